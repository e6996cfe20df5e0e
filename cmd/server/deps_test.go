package main_test

import (
	"fmt"
	"go/ast"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/bulkhead-mcp/bulkhead/"

// levels are the floors of the building, the lowest first. A package imports
// only packages of lower floors; a package below a listed one belongs to it.
var levels = [][]string{
	{"internal/fault", "internal/seal", "internal/canonical", "internal/resource"},
	{"internal/postgres", "internal/redis", "internal/egress", "internal/ratelimit", "internal/telemetry", "internal/config", "internal/confine"},
	{"internal/tenant", "internal/contract", "internal/elicitation"},
	{"internal/audit", "internal/webhooks", "internal/events"},
	{"internal/catalog", "internal/authz", "internal/consent", "internal/sessions"},
	{"internal/calls", "internal/inspect"},
	{"internal/api"},
	{"cmd/server"},
}

// beside are the packages beside the building: which floor each stands on (it
// imports what is below), and who imports it. Tests import any of them.
var beside = map[string]struct {
	floor int
	users []string
	why   string
}{
	"proto":                    {0, []string{"internal/api", "cmd/server"}, "the wire's schema stays at the edge"},
	"migrations":               {0, []string{"cmd/server", "internal/postgres/pgtest"}, "who starts the server migrates, nobody else"},
	"internal/demo":            {1, []string{"cmd/server"}, "the demo server is another process: nothing of ours calls into it"},
	"internal/mcptest":         {1, nil, "a test server must not end up in the product"},
	"internal/postgres/pgtest": {2, nil, "a test database must not end up in the product"},
	"internal/redis/redistest": {2, nil, "a test Redis must not end up in the product"},
	"test":                     {8, nil, "tests of the whole and what they bring must not end up in the product"},
	"deploy":                   {0, nil, "tools are not part of the product"},
	"docs":                     {0, nil, "the checks of the pages are not part of the product"},
}

// owners are the libraries that only the named packages import, tests aside.
// The path of a module covers what lies below it, that of the standard library
// does not.
var owners = []struct {
	path string
	only []string
	why  string
}{
	{"google.golang.org/", []string{"internal/api", "cmd/server", "proto"}, "the domain outlives the transport"},
	{"buf.build/", []string{"internal/api", "proto"}, "requests are validated at the edge, once"},
	{"github.com/grpc-ecosystem/", []string{"internal/api", "cmd/server", "proto"}, "the domain outlives the transport"},
	{"github.com/mark3labs/mcp-go/mcp", []string{"internal/sessions", "internal/demo", "internal/mcptest"}, "protocol versions change under us"},
	{"github.com/mark3labs/mcp-go/server", []string{"internal/demo", "internal/mcptest"}, "Bulkhead serves no MCP itself"},
	{"github.com/mark3labs/mcp-go/client", nil, "its transports follow redirects with credentials (GO-2026-6911) and read without bounds: ours replace them"},
	{"github.com/redis/", []string{"internal/redis"}, "the loss of Redis must cost speed only, so one package decides what it means"},
	{"github.com/alicebob/", []string{"internal/redis"}, "the in-process Redis is a detail of the client"},
	{"cel.dev/", []string{"internal/contract"}, "rules are compiled once and bounded in one place"},
	{"github.com/pressly/goose", []string{"internal/postgres"}, "one place migrates"},
	{"github.com/jackc/pgx/v5/pgxpool", []string{"internal/postgres", "internal/tenant"}, "a bare pool has no tenant"},
	{"github.com/riverqueue/", []string{"internal/postgres", "internal/webhooks", "cmd/server"}, "jobs are outside of row-level security but for what their tables' policies say"},
	{"github.com/prometheus/", []string{"internal/telemetry"}, "labels are bounded in one place"},
	{"github.com/caarlos0/env", []string{"internal/config"}, "parts take values, not names of variables"},
	{"go.yaml.in/", []string{"internal/contract", "internal/config"}, "YAML is read strictly, in one place"},
	{"github.com/landlock-lsm/", []string{"internal/confine"}, "a rule of Landlock holds a thread for good: only the entry, which becomes another program, takes one"},
	{"go.uber.org/goleak", nil, "it serves tests"},
	{"net/http/httptest", []string{"internal/mcptest"}, "it serves tests"},
	{"os/exec", []string{"internal/postgres/embedded", "internal/redis/redistest", "internal/sessions", "cmd/server"},
		"who starts a process must end it with its group"},
	{"log", []string{"internal/telemetry"}, "logs go to the slog.Logger that a part is given"},
	{"unsafe", []string{"proto"}, "no need is known outside generated code"},
}

func TestImports(t *testing.T) {
	t.Parallel()
	for _, f := range sources(t) {
		for _, broken := range importsOf(f) {
			t.Error(broken)
		}
	}
}

// importsOf returns the import rules that a file breaks.
func importsOf(f source) (broken []string) {
	if _, ok := floorOf(f.dir); !ok {
		return []string{fmt.Sprintf("%s: package %s has no floor: enter it in cmd/server/deps_test.go", f.path, f.dir)}
	}
	for _, spec := range f.file.Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			panic(err) // the parser has read it
		}
		why := ""
		if ours, ok := strings.CutPrefix(path, module); ok {
			why = internalImport(f, ours)
		} else {
			why = foreignImport(f, path)
		}
		if why != "" {
			broken = append(broken, fmt.Sprintf("%s imports %s: %s", f.at(spec), path, why))
		}
	}
	return broken
}

// internalImport says why f may not import the package of this module, or "".
func internalImport(f source, path string) string {
	from, _ := floorOf(f.dir)
	to, ok := floorOf(path)
	if unit(f.dir) == unit(path) {
		return ""
	}
	if s, is := beside[unit(path)]; is {
		if f.test || slices.Contains(s.users, unit(f.dir)) || isTest(f.dir) {
			return ""
		}
		return s.why
	}
	switch {
	case !ok:
		return "it has no floor"
	case to > from || to == from && !isBeside(f.dir):
		return fmt.Sprintf("imports go down only (floor %d to floor %d): declare what is needed as an interface here, and let cmd/server pass it", from, to)
	}
	return ""
}

// foreignImport says why f may not import the library, or "".
func foreignImport(f source, path string) string {
	if f.test || isTest(f.dir) {
		return ""
	}
	for _, o := range owners {
		below := strings.Contains(o.path, ".") && strings.HasPrefix(path, strings.TrimSuffix(o.path, "/")+"/")
		if path != o.path && !below {
			continue
		}
		if !slices.ContainsFunc(o.only, func(p string) bool { return inside(f.dir, p) }) {
			return "only " + list(o.only) + " may: " + o.why
		}
	}
	return ""
}

// list writes names for a message.
func list(names []string) string {
	if len(names) == 0 {
		return "tests"
	}
	return strings.Join(names, ", ")
}

// inside reports whether dir is the package or lies below it.
func inside(dir, pkg string) bool { return dir == pkg || strings.HasPrefix(dir, pkg+"/") }

// isTest reports whether the whole package serves tests or the workshop.
func isTest(dir string) bool {
	return inside(dir, "test") || inside(dir, "deploy") || inside(dir, "docs")
}

func isBeside(dir string) bool { _, ok := beside[unit(dir)]; return ok }

// unit returns the listed package that dir is or lies below; the longest name
// counts.
func unit(dir string) string {
	best := ""
	look := func(p string) {
		if inside(dir, p) && len(p) > len(best) {
			best = p
		}
	}
	for _, l := range levels {
		for _, p := range l {
			look(p)
		}
	}
	for p := range beside {
		look(p)
	}
	return best
}

// floorOf returns the floor that dir stands on.
func floorOf(dir string) (int, bool) {
	u := unit(dir)
	if s, ok := beside[u]; ok {
		return s.floor, true
	}
	for n, l := range levels {
		if slices.Contains(l, u) {
			return n, true
		}
	}
	return 0, false
}

// uses are names of the standard library that only some packages use.
var uses = []struct {
	path  string
	names []string
	// literal restricts composite literals, new and variables of a type; the type may be named.
	literal bool
	only    []string
	tests   bool // tests may, too
	why     string
}{
	{"net/http", []string{"Get", "Head", "Post", "PostForm", "DefaultClient", "DefaultTransport"}, false,
		[]string{"internal/egress"}, true, "an outbound request that internal/egress does not guard reaches any address"},
	{"net/http", []string{"Client", "Transport"}, true,
		[]string{"internal/egress"}, true, "an outbound request that internal/egress does not guard reaches any address"},
	{"net", []string{"Dial", "DialTimeout", "DialTCP", "DialUDP", "DialUnix", "DialIP", "LookupHost", "LookupIP"}, false,
		[]string{"internal/egress"}, true, "an outbound connection that internal/egress does not guard reaches any address"},
	{"net", []string{"Dialer"}, true,
		[]string{"internal/egress", "internal/redis"}, true, "connections leave through internal/egress; internal/redis reaches the one address of its setting"},
	{"os", []string{"Getenv", "LookupEnv", "Environ", "ExpandEnv", "Setenv", "Unsetenv", "Clearenv"}, false,
		[]string{"internal/config", "cmd/server/main.go"}, false, "parts take values, not names of variables"},
	{"syscall", []string{"Getenv", "Environ", "Setenv"}, false, nil, false, "parts take values, not names of variables"},
	{"os", []string{"Exit"}, false, []string{"cmd/server/main.go"}, false, "cleanup runs always when main alone exits"},
	{"log/slog", []string{"Default", "SetDefault", "Debug", "Info", "Warn", "Error", "Log", "LogAttrs", "With"}, false,
		nil, false, "logs go to the slog.Logger that a part is given"},
	{"time", []string{"Sleep"}, false, []string{"internal/mcptest/server.go"}, true,
		"nothing can end a sleep: wait for a context and a timer"},
}

// usesAllowed are the files that use such a name all the same.
var usesAllowed = map[string]string{
	"internal/postgres/pgtest/pgtest.go os.Getenv":           "reads BULKHEAD_TEST_DATABASE_URL, a setting of the tests that the product does not know",
	"internal/postgres/embedded/embedded_test.go os.Getenv":  "the test binary runs itself as the parent that is killed, told so by a variable",
	"internal/postgres/embedded/embedded_test.go os.Environ": "and hands its environment on",
	"internal/calls/interleave_test.go os.Getenv":            "takes the seed and the length of a random run, to repeat one",
	"internal/sessions/main_test.go os.Getenv":               "the test binary runs itself as a server on stdio, told so by a variable",
	"internal/sessions/stdio_test.go os.Getenv":              "hands the PATH to the host that the test kills",
	"internal/sessions/child_test.go os.Getenv":              "is that server, set up by variables",
	"internal/sessions/child_test.go os.Environ":             "tells what a server sees of the host's environment",
	"internal/webhooks/world_test.go os.Getenv":              "the test binary runs itself as a replica that is killed, told so by a variable",
	"internal/webhooks/kill_test.go os.Environ":              "and hands its environment on",
	"internal/confine/orders.go os.Exit":                     "is the main function of the processes between the host and a program",
	"internal/sessions/child_test.go os.Exit":                "plays a server that crashes",
	"internal/redis/redistest/redistest.go time.Sleep":       "polls for a foreign process to listen, up to a deadline",
}

func TestUses(t *testing.T) {
	t.Parallel()
	unused := map[string]bool{}
	for k := range usesAllowed {
		unused[k] = true
	}
	for _, f := range sources(t) {
		for _, broken := range usesOf(f, unused) {
			t.Error(broken)
		}
	}
	for k := range unused {
		t.Errorf("%s is allowed but does not occur: remove it from usesAllowed", k)
	}
}

// usesOf returns the rules on names that a file breaks, and takes the
// allowances that it used out of unused.
func usesOf(f source, unused map[string]bool) (broken []string) {
	if isTest(f.dir) {
		return nil
	}
	for _, u := range uses {
		if u.tests && f.test || slices.ContainsFunc(u.only, func(p string) bool { return f.path == p || inside(f.dir, p) }) {
			continue
		}
		for _, sel := range f.selectors(u.path, u.literal) {
			if !slices.Contains(u.names, sel.Sel.Name) {
				continue
			}
			name := u.path + "." + sel.Sel.Name
			if _, ok := usesAllowed[f.path+" "+name]; ok {
				delete(unused, f.path+" "+name)
				continue
			}
			broken = append(broken, fmt.Sprintf("%s uses %s, which only %s may: %s", f.at(sel), name, list(u.only), u.why))
		}
	}
	return broken
}

// selectors returns where the file uses a member of the package at path. With
// literal it returns only types of which a value is made: T{}, new(T), var x T
// and struct members of type T, which are values that work as they are.
func (f source) selectors(path string, literal bool) (found []*ast.SelectorExpr) {
	name := ""
	for _, spec := range f.file.Imports {
		if spec.Path.Value == strconv.Quote(path) {
			name = path[strings.LastIndex(path, "/")+1:]
			if spec.Name != nil {
				name = spec.Name.Name
			}
		}
	}
	if name == "" {
		return nil
	}
	member := func(e ast.Expr) {
		if sel, ok := e.(*ast.SelectorExpr); ok {
			if id, ok := sel.X.(*ast.Ident); ok && id.Name == name && id.Obj == nil {
				found = append(found, sel)
			}
		}
	}
	ast.Inspect(f.file, func(n ast.Node) bool {
		if !literal {
			if e, ok := n.(ast.Expr); ok {
				member(e)
			}
			return true
		}
		switch n := n.(type) {
		case *ast.CompositeLit:
			member(n.Type)
		case *ast.ValueSpec:
			member(n.Type)
		case *ast.Field:
			member(n.Type)
		case *ast.CallExpr:
			if id, ok := n.Fun.(*ast.Ident); ok && id.Name == "new" && len(n.Args) == 1 {
				member(n.Args[0])
			}
		}
		return true
	})
	return found
}

func TestRulesOfImportsCanFail(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, path, text, want string
	}{
		{"down", "internal/calls/x.go", `import _ "` + module + `internal/audit"`, ""},
		{"up", "internal/audit/x.go", `import _ "` + module + `internal/calls"`, "imports go down only"},
		{"up in a test", "internal/audit/x_test.go", `import _ "` + module + `internal/calls"`, "imports go down only"},
		{"aside", "internal/authz/x.go", `import _ "` + module + `internal/sessions"`, "imports go down only"},
		{"own part", "internal/postgres/embedded/x.go", `import _ "` + module + `internal/postgres"`, ""},
		{"no floor", "internal/misc/x.go", ``, "has no floor"},
		{"test database in a test", "internal/audit/x_test.go", `import _ "` + module + `internal/postgres/pgtest"`, ""},
		{"test database in the product", "internal/audit/x.go", `import _ "` + module + `internal/postgres/pgtest"`, "must not end up in the product"},
		{"stubs in the domain", "internal/calls/x.go", `import _ "` + module + `proto/gen/bulkhead/v1"`, "stays at the edge"},
		{"gRPC in the domain", "internal/calls/x.go", `import _ "google.golang.org/grpc/codes"`, "outlives the transport"},
		{"client of mcp-go", "internal/sessions/x.go", `import _ "github.com/mark3labs/mcp-go/client/transport"`, "GO-2026-6911"},
		{"types of mcp-go", "internal/sessions/x.go", `import _ "github.com/mark3labs/mcp-go/mcp"`, ""},
		{"log", "internal/sessions/x.go", `import _ "log"`, "slog.Logger"},
		{"slog", "internal/sessions/x.go", `import _ "log/slog"`, ""},
		{"get", "internal/sessions/x.go", `import "net/http"; var _ = http.Get`, "uses net/http.Get"},
		{"renamed", "internal/sessions/x.go", `import web "net/http"; var _ = web.DefaultClient`, "uses net/http.DefaultClient"},
		{"a client made", "internal/sessions/x.go", `import "net/http"; var _ = &http.Client{}`, "uses net/http.Client"},
		{"a client declared", "internal/sessions/x.go", `import "net/http"; var c http.Client`, "uses net/http.Client"},
		{"a transport by new", "internal/sessions/x.go", `import "net/http"; var _ = new(http.Transport)`, "uses net/http.Transport"},
		{"a client passed on", "internal/sessions/x.go", `import "net/http"; func f(c *http.Client) {}`, ""},
		{"a client in egress", "internal/egress/x.go", `import "net/http"; var _ = &http.Client{}`, ""},
		{"environment", "internal/calls/x.go", `import "os"; var _ = os.Getenv("X")`, "uses os.Getenv"},
		{"environment in a test", "internal/calls/x_test.go", `import "os"; var _ = os.Getenv("X")`, "uses os.Getenv"},
		{"exit beside main", "cmd/server/run.go", `import "os"; func f() { os.Exit(1) }`, "uses os.Exit"},
		{"exit in main", "cmd/server/main.go", `import "os"; func f() { os.Exit(1) }`, ""},
		{"sleep", "internal/calls/x.go", `import "time"; func f() { time.Sleep(1) }`, "uses time.Sleep"},
		{"global logger", "internal/calls/x.go", `import "log/slog"; func f() { slog.Info("x") }`, "uses log/slog.Info"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := parse(t, tt.path, "package x\n"+tt.text)
			got := strings.Join(append(importsOf(f), usesOf(f, map[string]bool{})...), "\n")
			if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
