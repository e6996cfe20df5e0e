package config

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const secretWord = "hunter2"

// file writes a file and returns its path.
func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// production returns an environment that is complete for production mode.
func production(t *testing.T) []string {
	t.Helper()
	return []string{
		"BULKHEAD_DATABASE_URL=postgres://app:" + secretWord + "@db/bulkhead",
		"BULKHEAD_REDIS_URL=redis://redis:6379",
		"BULKHEAD_KEK_FILE=" + file(t, "k1:"+base64.StdEncoding.EncodeToString(testKey(1))),
	}
}

func testKey(n byte) []byte {
	b := make([]byte, kekSize)
	for i := range b {
		b[i] = n + byte(i)
	}
	return b
}

func TestLoad_DevelopmentDefaults(t *testing.T) {
	t.Parallel()
	c, err := Load([]string{"HOME=/home/alice", "PATH=/bin", "BULKHEAD_TEST_DATABASE_URL=x", "BULKHEAD_MODE="})
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		Development: true, Listen: "127.0.0.1:8080", MetricsListen: "127.0.0.1:9090",
		DataDir: "/home/alice/.cache/bulkhead", LogLevel: slog.LevelInfo, GracePeriod: 25 * time.Second,
		EgressAllow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")},
	}
	if isRoot() {
		want.DataDir = "/var/lib/bulkhead"
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("Load = %+v\nwant   %+v", c, want)
	}
}

func TestLoad_Mode(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name        string
		env         []string
		development bool
		refused     []string // variables named by the refusal
	}{
		{"nothing set", nil, true, nil},
		{"asked for", []string{"BULKHEAD_MODE=development"}, true, nil},
		{"localhost and IPv6 are loopback", []string{"BULKHEAD_LISTEN=localhost:0", "BULKHEAD_METRICS_LISTEN=[::1]:9"}, true, nil},
		{"production", []string{"BULKHEAD_MODE=production"}, false, []string{"DATABASE_URL", "REDIS_URL", "KEK_FILE"}},
		{"in a pod", []string{"KUBERNETES_SERVICE_HOST=10.0.0.1"}, false, []string{"DATABASE_URL", "REDIS_URL", "KEK_FILE"}},
		{"every interface", []string{"BULKHEAD_LISTEN=:8080"}, false, []string{"DATABASE_URL", "REDIS_URL", "KEK_FILE"}},
		{"open metrics", []string{"BULKHEAD_METRICS_LISTEN=0.0.0.0:9090"}, false, []string{"DATABASE_URL", "REDIS_URL", "KEK_FILE"}},
		{"a name that is not localhost", []string{"BULKHEAD_LISTEN=localhost.example:80"}, false, []string{"DATABASE_URL", "REDIS_URL", "KEK_FILE"}},
		{"database alone", []string{"BULKHEAD_DATABASE_URL=postgres://db/x"}, false, []string{"REDIS_URL", "KEK_FILE"}},
		{"redis alone", []string{"BULKHEAD_REDIS_URL=redis://r"}, false, []string{"DATABASE_URL", "KEK_FILE"}},
		{"migration address alone", []string{"BULKHEAD_MIGRATION_DATABASE_URL=postgres://db/x"}, false, []string{"DATABASE_URL"}},
		{"asked for but a database is named", []string{"BULKHEAD_MODE=development", "BULKHEAD_DATABASE_URL=postgres://db/x"}, false, []string{"MODE"}},
		{"asked for but open", []string{"BULKHEAD_MODE=development", "BULKHEAD_LISTEN=0.0.0.0:1"}, false, []string{"MODE"}},
		{"another word", []string{"BULKHEAD_MODE=prod"}, false, []string{"MODE"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, err := Load(append([]string{"HOME=/home/a"}, tt.env...))
			if len(tt.refused) == 0 {
				if err != nil || c.Development != tt.development {
					t.Fatalf("Load: %v; want development %v", err, tt.development)
				}
				return
			}
			if got := variables(t, err); !reflect.DeepEqual(got, tt.refused) {
				t.Errorf("refused %v, want %v", got, tt.refused)
			}
		})
	}
}

// variables returns the names that a refusal names, without the prefix.
func variables(t *testing.T, err error) []string {
	t.Helper()
	f, ok := fault.As(err)
	if !ok || f.Kind != fault.Invalid {
		t.Fatalf("Load: %v, want an Invalid fault", err)
	}
	var names []string
	for _, field := range f.Fields {
		if field.Rule == "" || strings.Contains(field.Rule, secretWord) {
			t.Errorf("rule %q is empty or tells a secret", field.Rule)
		}
		names = append(names, strings.TrimPrefix(field.Path, prefix))
	}
	return names
}

func TestLoad_Production(t *testing.T) {
	t.Parallel()
	operator := strings.Repeat("o", 40)
	c, err := Load(append(production(t),
		"BULKHEAD_LISTEN=0.0.0.0:8080", "BULKHEAD_DATA_DIR=/srv/data/", "BULKHEAD_LOG_LEVEL=debug", "BULKHEAD_GRACE_PERIOD=1m",
		"BULKHEAD_MIGRATION_DATABASE_URL_FILE="+file(t, "postgres://owner:"+secretWord+"@db/bulkhead\n"),
		"BULKHEAD_OPERATOR_KEY_FILE="+file(t, operator+"\n"),
		"BULKHEAD_EGRESS_ALLOW=10.0.0.0/8, fd00::/8",
		"BULKHEAD_PUBLIC_URL=https://mcp.example/base/",
		"BULKHEAD_RUNTIMES_FILE="+file(t, `{"fs":{"command":["node","x.js","/data"],"env":{"A":"b"},"readRoots":["/data"],"writeRoots":["/data/w"],"dir":"/data",`+
			`"network":true,"user":"1000:1000","limits":{"memoryBytes":268435456,"processes":16}}}`)))
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		Listen: "0.0.0.0:8080", MetricsListen: "127.0.0.1:9090", DataDir: "/srv/data",
		DatabaseURL: "postgres://app:hunter2@db/bulkhead", MigrationDatabaseURL: "postgres://owner:hunter2@db/bulkhead",
		RedisURL: "redis://redis:6379", KEKs: []KEK{{ID: "k1", Key: testKey(1)}}, OperatorKey: Secret(operator),
		Runtimes: map[string]Runtime{"fs": {Command: []string{"node", "x.js", "/data"}, Env: map[string]string{"A": "b"},
			ReadRoots: []string{"/data"}, WriteRoots: []string{"/data/w"}, Dir: "/data", Network: true, User: "1000:1000",
			Limits: RuntimeLimits{MemoryBytes: 256 << 20, Processes: 16}}},
		EgressAllow: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")},
		PublicURL:   "https://mcp.example/base", LogLevel: slog.LevelDebug, GracePeriod: time.Minute,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("Load = %#v\nwant   %#v", c, want)
	}
}

func TestLoad_RefusesValues(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, value, rule string }{
		{"LISTN", "x", "is not a known setting"},
		{"LISTEN", "8080", "must be host:port"},
		{"METRICS_LISTEN", "127.0.0.1:http", "must have a port"},
		{"LISTEN", "127.0.0.1:65536", "must have a port"},
		{"DATA_DIR", "data", "must be an absolute path"},
		{"POSTGRES_BIN", "bin", "must be an absolute path"},
		{"DATABASE_URL", "mysql://u:hunter2@h/x", "begins with postgres://"},
		{"REDIS_URL", "http://u:hunter2@h", "begins with redis://"},
		{"KEK_FILE", "/nonexistent/kek", "does not exist"},
		{"OPERATOR_KEY_FILE", file(t, secretWord), "32 to 256 characters"},
		{"OPERATOR_KEY_FILE", file(t, strings.Repeat("a b", 20)), "without spaces"},
		{"RUNTIMES_FILE", file(t, `{"a":{}}`), "a.command: has 1 to 64 members"},
		{"RUNTIMES_FILE", "/", "cannot be read"},
		{"EGRESS_ALLOW", "10.0.0.1/8", "is not a network"},
		{"EGRESS_ALLOW", "10.0.0.0", "is not a network"},
		{"PUBLIC_URL", "mcp.example", "must be an http or https address"},
		{"PUBLIC_URL", "https://u:hunter2@mcp.example", "must have no user"},
		{"PUBLIC_URL", "https://mcp.example/?q", "must have no user, query or fragment"},
		{"LOG_LEVEL", "loud", "must be debug, info, warn or error"},
		{"GRACE_PERIOD", "0s", "between 1s and 1h"},
		{"GRACE_PERIOD", "25", "between 1s and 1h"},
		{"DATABASE_URL_FILE", file(t, " \n"), "names an empty file"},
	}
	for _, tt := range tests {
		t.Run(tt.name+" "+tt.rule, func(t *testing.T) {
			t.Parallel()
			_, err := Load([]string{"HOME=/home/a", prefix + tt.name + "=" + tt.value})
			f, ok := fault.As(err)
			if !ok {
				t.Fatalf("Load: %v, want a fault", err)
			}
			for _, field := range f.Fields {
				if strings.Contains(field.Rule, secretWord) {
					t.Errorf("%s tells the secret: %s", field.Path, field.Rule)
				}
				if field.Path == prefix+tt.name && strings.Contains(field.Rule, tt.rule) {
					return
				}
			}
			t.Errorf("fields %v, want %s with %q", f.Fields, prefix+tt.name, tt.rule)
		})
	}
}

func TestLoad_SecretTwice(t *testing.T) {
	t.Parallel()
	env := append(production(t), "BULKHEAD_REDIS_URL_FILE="+file(t, "redis://other"))
	if got := variables(t, second(Load(env))); !reflect.DeepEqual(got, []string{"REDIS_URL"}) {
		t.Errorf("refused %v, want REDIS_URL", got)
	}
}

func second(_ *Config, err error) error { return err }

func TestLoad_SecretsDoNotPrint(t *testing.T) {
	t.Parallel()
	c, err := Load(append(production(t), "BULKHEAD_RUNTIMES_FILE="+file(t, `{"a":{"command":["x","hunter2"],"env":{"T":"hunter2"}}}`)))
	if err != nil {
		t.Fatal(err)
	}
	key := string(c.KEKs[0].Key)
	if got := fmt.Sprintf("%[1]d %[1]x", c.KEKs[0]); got != "kek k1 kek k1" {
		t.Errorf("a key prints as %s", got)
	}
	var log strings.Builder
	l := slog.New(slog.NewJSONHandler(&log, nil))
	l.Info("x", "url", c.DatabaseURL, "kek", c.KEKs[0], "runtime", c.Runtimes["a"])
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "url", c.DatabaseURL, "kek", c.KEKs[0], "runtime", c.Runtimes["a"])
	marshaled, err := json.Marshal([]any{c.DatabaseURL, c.KEKs})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{
		fmt.Sprint(c.DatabaseURL), fmt.Sprintf("%[1]v %+[1]v %#[1]v %[1]s %[1]q %[1]d %[1]x", c.DatabaseURL),
		fmt.Sprintf("%[1]v %+[1]v %#[1]v %[1]s", c.KEKs), fmt.Sprintf("%+v", c), string(marshaled), log.String(),
	} {
		if strings.Contains(s, secretWord) || strings.Contains(s, key) || strings.Contains(s, base64.StdEncoding.EncodeToString([]byte(key))) {
			t.Errorf("a secret prints: %s", s)
		}
	}
}

func TestParseKEKs(t *testing.T) {
	t.Parallel()
	one, two := testKey(1), testKey(100)
	b64, hx := base64.StdEncoding.EncodeToString(one), hex.EncodeToString(two)
	tests := []struct {
		name, in string
		want     []KEK
		rule     string
	}{
		{"raw", string(one), []KEK{{"default", one}}, ""},
		{"base64", b64 + "\n", []KEK{{"default", one}}, ""},
		{"unpadded URL base64", base64.RawURLEncoding.EncodeToString(one), []KEK{{"default", one}}, ""},
		{"hex", hx, []KEK{{"default", two}}, ""},
		{"rotation, primary first", "# keys\n2026-11:" + hx + "\n\nold: " + b64 + "\n", []KEK{{"2026-11", two}, {"old", one}}, ""},
		{"nothing", "\n# none\n", nil, "holds no key"},
		{"short", "k:" + b64[:40], nil, "line 1: a key is 32 bytes"},
		{"same id", "a:" + b64 + "\na:" + hx, nil, `the id "a" occurs twice`},
		{"same key", "a:" + b64 + "\nb:" + b64, nil, `the ids "a" and "b" have the same key`},
		{"two without ids", b64 + "\n" + hx, nil, `the id "default" occurs twice`},
		{"bad id", "A:" + b64, nil, "line 1: an id has"},
		{"no id", ":" + b64, nil, "line 1: an id has"},
		{"zeros", strings.Repeat("\x00", 32), nil, "one byte repeated"},
		{"33 bytes", string(one) + "x", nil, "line"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, rule := parseKEKs([]byte(tt.in))
			if tt.rule != "" {
				if !strings.Contains(rule, tt.rule) {
					t.Errorf("rule %q, want %q", rule, tt.rule)
				}
				return
			}
			if rule != "" || !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %v, %q", got, rule)
			}
		})
	}
}

func TestDevelopmentKEK_StaysTheSame(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, err := DevelopmentKEK(dir)
	if err != nil {
		t.Fatal(err)
	}
	again, err := DevelopmentKEK(dir)
	if err != nil || !reflect.DeepEqual(first, again) {
		t.Errorf("second look: %v, %v; want the first key", again, err)
	}
	if st, err := os.Stat(filepath.Join(dir, "kek")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", st.Mode(), err)
	}
	if other, err := DevelopmentKEK(t.TempDir()); err != nil || reflect.DeepEqual(first, other) {
		t.Errorf("another directory has the same key (%v)", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "kek"), []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := DevelopmentKEK(dir); err == nil {
		t.Error("a broken key file is replaced or taken")
	}
}

func TestParseRuntimes_Refusals(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, in, want string }{
		{"not JSON", `{`, "runtimes: is not JSON"},
		{"empty", ``, "runtimes: is not JSON"},
		{"a list", `[]`, "runtimes: must be an object"},
		{"more after it", `{} {}`, "runtimes: has something after"},
		{"unknown member", `{"a":{"command":["x"],"shell":true}}`, "runtimes.a.shell: is not a known member"},
		{"other case", `{"a":{"Command":["x"]}}`, "runtimes.a.Command: is not a known member"},
		{"unknown limit", `{"a":{"command":["x"],"limits":{"memory":1}}}`, "runtimes.a.limits.memory: is not a known member"},
		{"limit too small", `{"a":{"command":["x"],"limits":{"openFiles":2}}}`, "a.limits.openFiles: is a whole number from 8 to"},
		{"limit too great", `{"a":{"command":["x"],"limits":{"cpuSeconds":99999999}}}`, "a.limits.cpuSeconds: is a whole number from 1 to"},
		{"negative limit", `{"a":{"command":["x"],"limits":{"processes":-1}}}`, "processes has the wrong type"},
		{"user", `{"a":{"command":["x"],"user":"a b"}}`, "a.user: is a name, a number"},
		{"user with a group's name", `{"a":{"command":["x"],"user":"1000:staff"}}`, "a.user: is a name, a number"},
		{"twice", `{"a":{"command":["x"]},"a":{"command":["y"]}}`, "runtimes.a: occurs twice"},
		{"variable twice", `{"a":{"command":["x"],"env":{"E":"1","E":"2"}}}`, "runtimes.a.env.E: occurs twice"},
		{"wrong type", `{"a":{"command":"x"}}`, "has the wrong type"},
		{"bad name", `{"A_b":{"command":["x"]}}`, `"A_b": a name matches`},
		{"no command", `{"a":{"command":[]}}`, "a.command: has 1 to 64"},
		{"relative program", `{"a":{"command":["./x"]}}`, "a.command[0]: is an absolute path"},
		{"zero byte", `{"a":{"command":["x","\u0000"]}}`, "a.command[1]: holds a zero byte"},
		{"bad variable", `{"a":{"command":["x"],"env":{"A=B":"1"}}}`, `a.env: "A=B" is not a name`},
		{"relative root", `{"a":{"command":["x"],"readRoots":["data"]}}`, "a.readRoots[0]: is an absolute path"},
		{"root with ..", `{"a":{"command":["x"],"writeRoots":["/data/../etc"]}}`, "a.writeRoots[0]: is an absolute path"},
		{"relative dir", `{"a":{"command":["x"],"dir":"."}}`, "a.dir: is an absolute path"},
		{"deep", `{"a":` + strings.Repeat(`[`, 100) + strings.Repeat(`]`, 100) + `}`, "is nested too deeply"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, bad := parseRuntimes([]byte(tt.in))
			if len(bad) == 0 || !strings.Contains(bad[0].Path+": "+bad[0].Rule, tt.want) {
				t.Errorf("refusals %v, want %q", bad, tt.want)
			}
		})
	}
}

func FuzzParseRuntimes(f *testing.F) {
	f.Add([]byte(`{"fs":{"command":["node"],"env":{"A":"b"},"readRoots":["/data"],"dir":"/"}}`))
	f.Add([]byte(`{"a":{"command":[null]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		rs, bad := parseRuntimes(b)
		if len(bad) > 0 {
			return
		}
		for name, r := range rs {
			if !runtimeName.MatchString(name) || len(r.Command) == 0 || r.Command[0] == "" {
				t.Errorf("accepted %q: %v", name, r.Command)
			}
		}
	})
}

func FuzzParseKEKs(f *testing.F) {
	f.Add([]byte("a:" + hex.EncodeToString(testKey(1))))
	f.Add(testKey(1))
	f.Fuzz(func(t *testing.T, b []byte) {
		keys, rule := parseKEKs(b)
		if (rule == "") != (len(keys) > 0) {
			t.Fatalf("%d keys and rule %q", len(keys), rule)
		}
		for _, k := range keys {
			if len(k.Key) != kekSize || !validKEKID(k.ID) {
				t.Errorf("accepted %v", k)
			}
		}
	})
}
