package config

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const (
	prefix = "BULKHEAD_"
	// testPrefix begins the variables of the test suites, which are not settings.
	testPrefix = "BULKHEAD_TEST_"
	fileSuffix = "_FILE"
)

// raw is the environment as text. Names lack the prefix.
type raw struct {
	Mode                 string `env:"MODE"`
	Listen               string `env:"LISTEN" envDefault:"127.0.0.1:8080"`
	MetricsListen        string `env:"METRICS_LISTEN" envDefault:"127.0.0.1:9090"`
	DataDir              string `env:"DATA_DIR"`
	DatabaseURL          string `env:"DATABASE_URL"`
	MigrationDatabaseURL string `env:"MIGRATION_DATABASE_URL"`
	RedisURL             string `env:"REDIS_URL"`
	KEKFile              string `env:"KEK_FILE"`
	OperatorKeyFile      string `env:"OPERATOR_KEY_FILE"`
	RuntimesFile         string `env:"RUNTIMES_FILE"`
	EgressAllow          string `env:"EGRESS_ALLOW"`
	PublicURL            string `env:"PUBLIC_URL"`
	PostgresBin          string `env:"POSTGRES_BIN"`
	LogLevel             string `env:"LOG_LEVEL" envDefault:"info"`
	GracePeriod          string `env:"GRACE_PERIOD" envDefault:"25s"`
}

// byFile are the settings that may come as NAME_FILE.
var byFile = []string{"DATABASE_URL", "MIGRATION_DATABASE_URL", "REDIS_URL"}

func toMap(environ []string) map[string]string {
	m := make(map[string]string, len(environ))
	for _, kv := range environ {
		if name, value, ok := strings.Cut(kv, "="); ok {
			m[name] = value
		}
	}
	return m
}

type loader struct {
	env    map[string]string
	raw    raw
	fields []fault.Field
}

func (l *loader) refuse(name, format string, args ...any) {
	l.fields = append(l.fields, fault.Field{Path: prefix + name, Rule: fmt.Sprintf(format, args...)})
}

func (l *loader) load() (*Config, error) {
	l.refuseUnknown()
	l.readSecretFiles()
	if err := env.ParseWithOptions(&l.raw, env.Options{Environment: l.env, Prefix: prefix}); err != nil {
		return nil, fault.Wrap(err, "parse the environment")
	}
	c := &Config{
		Listen:               l.listener("LISTEN", l.raw.Listen),
		MetricsListen:        l.listener("METRICS_LISTEN", l.raw.MetricsListen),
		DataDir:              l.dataDir(),
		DatabaseURL:          l.address("DATABASE_URL", l.raw.DatabaseURL, "postgres", "postgresql"),
		MigrationDatabaseURL: l.address("MIGRATION_DATABASE_URL", l.raw.MigrationDatabaseURL, "postgres", "postgresql"),
		RedisURL:             l.address("REDIS_URL", l.raw.RedisURL, "redis", "rediss", "unix"),
		KEKs:                 l.keks(),
		OperatorKey:          l.operatorKey(),
		Runtimes:             l.runtimes(),
		EgressAllow:          l.egressAllow(),
		PublicURL:            l.publicURL(),
		PostgresBin:          l.absolute("POSTGRES_BIN", l.raw.PostgresBin),
		LogLevel:             l.logLevel(),
		GracePeriod:          l.gracePeriod(),
	}
	c.Development = l.mode()
	if c.Development {
		c.EgressAllow = append(c.EgressAllow,
			netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"))
	}
	if len(l.fields) > 0 {
		return nil, fault.InvalidFields(l.fields...)
	}
	return c, nil
}

// known returns the names of all settings.
func known() []string {
	params, err := env.GetFieldParamsWithOptions(&raw{}, env.Options{Prefix: prefix})
	if err != nil {
		panic("config: the tags of raw are wrong: " + err.Error())
	}
	names := make([]string, 0, len(params)+len(byFile))
	for _, p := range params {
		names = append(names, p.Key)
	}
	for _, n := range byFile {
		names = append(names, prefix+n+fileSuffix)
	}
	return names
}

func (l *loader) refuseUnknown() {
	names := known()
	var unknown []string
	for name, value := range l.env {
		if strings.HasPrefix(name, prefix) && !strings.HasPrefix(name, testPrefix) && !slices.Contains(names, name) {
			unknown = append(unknown, name)
		}
		// Compose files and charts set what they do not mean to set to nothing.
		if value == "" {
			delete(l.env, name)
		}
	}
	slices.Sort(unknown)
	for _, name := range unknown {
		l.refuse(strings.TrimPrefix(name, prefix), "is not a known setting")
	}
}

// readSecretFiles puts the content of NAME_FILE in the place of NAME.
func (l *loader) readSecretFiles() {
	for _, name := range byFile {
		path := l.env[prefix+name+fileSuffix]
		if path == "" {
			continue
		}
		if l.env[prefix+name] != "" {
			l.refuse(name, "is given both here and by %s", prefix+name+fileSuffix)
			continue
		}
		b, ok := l.file(name+fileSuffix, path)
		if !ok {
			continue
		}
		value := strings.TrimSpace(string(b))
		if value == "" {
			l.refuse(name+fileSuffix, "names an empty file")
		}
		l.env[prefix+name] = value
	}
}

// mode applies the rule of the development mode: no database, Redis or key file
// named, listeners on loopback, and neither BULKHEAD_MODE=production nor a
// Kubernetes pod. Anything else is production, where all three are required.
func (l *loader) mode() bool {
	var reason string
	switch {
	case l.raw.Mode == "production":
		reason = "BULKHEAD_MODE is production"
	case l.env["KUBERNETES_SERVICE_HOST"] != "":
		reason = "this is a Kubernetes pod"
	case l.raw.DatabaseURL != "":
		reason = "BULKHEAD_DATABASE_URL is set"
	case l.raw.RedisURL != "":
		reason = "BULKHEAD_REDIS_URL is set"
	case l.raw.KEKFile != "":
		reason = "BULKHEAD_KEK_FILE is set"
	case !loopback(l.raw.Listen):
		reason = "BULKHEAD_LISTEN is not a loopback address"
	case !loopback(l.raw.MetricsListen):
		reason = "BULKHEAD_METRICS_LISTEN is not a loopback address"
	}
	switch l.raw.Mode {
	case "", "production":
	case "development":
		if reason != "" {
			l.refuse("MODE", "cannot be development, since %s", reason)
			return false
		}
	default:
		l.refuse("MODE", "must be development or production")
		return false
	}
	if reason == "" {
		if l.raw.MigrationDatabaseURL != "" {
			l.refuse("DATABASE_URL", "is required, since BULKHEAD_MIGRATION_DATABASE_URL is set")
		}
		return true
	}
	for _, required := range []struct{ name, value string }{
		{"DATABASE_URL", l.raw.DatabaseURL}, {"REDIS_URL", l.raw.RedisURL}, {"KEK_FILE", l.raw.KEKFile},
	} {
		if required.value == "" {
			l.refuse(required.name, "is required, since %s", reason)
		}
	}
	return false
}

// loopback reports whether only this machine can reach the address. A name is
// not looked up: only localhost counts, and an empty host is every interface.
func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

func (l *loader) listener(name, value string) string {
	_, port, err := net.SplitHostPort(value)
	if err != nil {
		l.refuse(name, "must be host:port")
		return ""
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || strconv.FormatUint(n, 10) != port {
		l.refuse(name, "must have a port between 0 and 65535")
	}
	return value
}

// dataDir defaults to a directory that the account of the private PostgreSQL
// can reach: for root below /var/lib, for others in their cache.
func (l *loader) dataDir() string {
	if l.raw.DataDir != "" {
		return l.absolute("DATA_DIR", l.raw.DataDir)
	}
	if isRoot() {
		return "/var/lib/bulkhead"
	}
	if dir := l.env["XDG_CACHE_HOME"]; filepath.IsAbs(dir) {
		return filepath.Join(dir, "bulkhead")
	}
	if home := l.env["HOME"]; filepath.IsAbs(home) {
		return filepath.Join(home, ".cache", "bulkhead")
	}
	return "/var/lib/bulkhead"
}

func (l *loader) absolute(name, path string) string {
	if path == "" {
		return ""
	}
	if !filepath.IsAbs(path) {
		l.refuse(name, "must be an absolute path")
	}
	return filepath.Clean(path)
}

// address checks no more than the scheme, and never repeats the value, which
// may hold a password.
func (l *loader) address(name, value string, schemes ...string) Secret {
	if value == "" {
		return ""
	}
	u, err := url.Parse(value)
	if err != nil || !slices.Contains(schemes, u.Scheme) {
		l.refuse(name, "must be an address that begins with %s://", schemes[0])
	}
	return Secret(value)
}

func (l *loader) egressAllow() []netip.Prefix {
	const most = 256
	var out []netip.Prefix
	for item := range strings.SplitSeq(l.raw.EgressAllow, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		p, err := netip.ParsePrefix(item)
		if err != nil || p != p.Masked() {
			l.refuse("EGRESS_ALLOW", "%q is not a network such as 10.0.0.0/8", item)
			continue
		}
		out = append(out, p)
	}
	if len(out) > most {
		l.refuse("EGRESS_ALLOW", "has more than %d networks", most)
	}
	return out
}

func (l *loader) publicURL() string {
	if l.raw.PublicURL == "" {
		return ""
	}
	u, err := url.Parse(l.raw.PublicURL)
	switch {
	case err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "":
		l.refuse("PUBLIC_URL", "must be an http or https address")
		return ""
	case u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		l.refuse("PUBLIC_URL", "must have no user, query or fragment")
		return ""
	}
	return strings.TrimRight(u.String(), "/")
}

func (l *loader) logLevel() slog.Level {
	switch l.raw.LogLevel {
	case "debug":
		return slog.LevelDebug
	case "info":
		return slog.LevelInfo
	case "warn":
		return slog.LevelWarn
	case "error":
		return slog.LevelError
	}
	l.refuse("LOG_LEVEL", "must be debug, info, warn or error")
	return slog.LevelInfo
}

func (l *loader) gracePeriod() time.Duration {
	d, err := time.ParseDuration(l.raw.GracePeriod)
	if err != nil || d < time.Second || d > time.Hour {
		l.refuse("GRACE_PERIOD", "must be a duration between 1s and 1h")
	}
	return d
}
