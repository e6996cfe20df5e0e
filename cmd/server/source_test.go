package main_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

// root is the module's root as seen from this package.
const root = "../.."

// source is a Go file of this module, read for the rules that a compiler does
// not hold.
type source struct {
	path      string // with slashes, from the module's root
	dir       string
	test      bool
	generated bool
	lines     int
	fset      *token.FileSet
	file      *ast.File
}

// at names the place of a node.
func (f source) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", f.path, f.fset.Position(n.Pos()).Line)
}

// sources returns all Go files of the module that are not ignored.
func sources(t *testing.T) []source {
	t.Helper()
	all, err := readSources()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 100 {
		t.Fatalf("only %d files were found", len(all))
	}
	return all
}

var readSources = sync.OnceValues(func() (all []source, err error) {
	err = walk(func(p string, text []byte) error {
		if path.Ext(p) != ".go" {
			return nil
		}
		f, err := newSource(p, text)
		if err == nil {
			all = append(all, f)
		}
		return err
	})
	return all, err
})

// walk visits the files of the module but those of tools and of node_modules.
func walk(visit func(path string, text []byte) error) error {
	return filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		switch {
		case d.IsDir() && p != root && (strings.HasPrefix(name, ".") && name != ".ci" ||
			slices.Contains([]string{"node_modules", "testdata", "third_party", "bin"}, name)):
			return filepath.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		return visit(filepath.ToSlash(rel), text)
	})
}

func newSource(p string, text []byte) (source, error) {
	f := source{path: p, dir: path.Dir(p), test: strings.HasSuffix(p, "_test.go"), fset: token.NewFileSet()}
	f.lines = strings.Count(string(text), "\n")
	var err error
	f.file, err = parser.ParseFile(f.fset, p, text, parser.ParseComments)
	if err == nil {
		f.generated = ast.IsGenerated(f.file)
	}
	return f, err
}

func parse(t *testing.T, p, text string) source {
	t.Helper()
	f, err := newSource(p, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

const (
	softLines = 500 // told
	hardLines = 520 // refused
)

// sleeps are the tests that sleep other than to look again and again, and why.
// Tests wait for what they want to see: by channels, by testing/synctest's
// clock, or by the clock that a part is given. What another process or a peer
// over a socket does can only be polled for, in a for loop with an end. A file
// stands for all its functions.
var sleeps = map[string]string{
	"internal/calls/interleave_test.go":                              "lets random pauses order what many do at once; every order is right",
	"internal/calls/input_interleave_test.go":                        "lets random pauses order what many do at once; every order is right",
	"internal/calls TestCancel_RacesWithTheDispatch":                 "scatters cancellations over the life of a call; every order is right",
	"internal/calls TestWait_EndingAsTheReadEnds":                    "scatters the ends of a read around the end of a wait; every order is right",
	"internal/calls TestRequestID_FiftyAtOnceRunOnce":                "plays a server that takes a while",
	"internal/calls TestReaper_OneOfManyTakesIt":                     "plays a server that takes a while",
	"internal/calls TestPaused_SendsNothing":                         "plays a process that is stopped for longer than the window to send",
	"internal/calls TestPersist_AnOutcomeSurvivesAnOutage":           "plays an outage of the database that lasts a while",
	"internal/sessions TestFO079_StalePooledConnection":              "lets a closure reach the client before the next call",
	"internal/sessions runChild":                                     "plays a server that is slow to start",
	"internal/sessions hostChild":                                    "plays a host that waits to be killed",
	"internal/sessions TestStdio_CancelNullErrorStringIDAndRequests": "lets a call come first; either order is right",
	"internal/sessions TestFO075_ServerHasNoGETStream":               "looks that nothing more happens; on a slow machine it sees less, never more",
	"internal/sessions TestFO081_ReopeningIsPaced":                   "looks that nothing more happens; on a slow machine it sees less, never more",
	"internal/sessions TestWatcher_StormIsCoalesced":                 "looks that nothing more happens; on a slow machine it sees less, never more",
	"internal/sessions TestStdio_ChangesAreToldSparingly":            "looks that nothing more happens; on a slow machine it sees less, never more",
}

var banned = []string{"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc", "base", "types", "models"}

func TestStyle(t *testing.T) {
	t.Parallel()
	documented := map[string]bool{}
	unused := map[string]bool{}
	for k := range sleeps {
		unused[k] = true
	}
	for _, f := range sources(t) {
		if f.generated {
			continue
		}
		if _, ok := documented[f.dir]; !ok {
			documented[f.dir] = false
		}
		documented[f.dir] = documented[f.dir] || f.file.Doc != nil && (!f.test || onlyTests(t, f.dir))
		if f.lines > softLines && !f.test && f.lines <= hardLines {
			t.Logf("%s has %d lines: look whether it holds two ideas", f.path, f.lines)
		}
		for _, broken := range styleOf(f) {
			t.Error(broken)
		}
		if !f.test || f.dir == "test" || strings.HasPrefix(f.dir, "test/") {
			continue
		}
		for _, fn := range sleepers(f) {
			_, byName := sleeps[f.dir+" "+fn]
			_, byFile := sleeps[f.path]
			if !byName && !byFile {
				t.Errorf("%s: %s sleeps: wait for what is expected, or enter it in sleeps with the reason", f.path, fn)
			}
			delete(unused, f.dir+" "+fn)
			delete(unused, f.path)
		}
	}
	for dir, ok := range documented {
		if !ok {
			t.Errorf("%s: the package has no comment: say what it owns, and what it does not", dir)
		}
	}
	for k := range unused {
		t.Errorf("%s does not sleep: remove it from sleeps", k)
	}
}

// onlyTests reports whether a directory has no Go file but tests.
func onlyTests(t *testing.T, dir string) bool {
	return !slices.ContainsFunc(sources(t), func(f source) bool { return f.dir == dir && !f.test })
}

// sleepers returns the functions of a file that call time.Sleep elsewhere than
// in a for loop that polls; a range loop does not.
func sleepers(f source) (names []string) {
	calls := map[ast.Node]bool{}
	for _, sel := range f.selectors("time", false) {
		calls[sel] = sel.Sel.Name == "Sleep"
	}
	for _, d := range f.file.Decls {
		name := "a variable"
		if fn, ok := d.(*ast.FuncDecl); ok {
			name = fn.Name.Name
		}
		var path []ast.Node
		ast.Inspect(d, func(n ast.Node) bool {
			if n == nil {
				path = path[:len(path)-1]
				return true
			}
			path = append(path, n)
			if calls[n] && !polls(path) && !slices.Contains(names, name) {
				names = append(names, name)
			}
			return true
		})
	}
	return names
}

// polls reports whether the innermost loop of a node is one that polls.
func polls(path []ast.Node) bool {
	for _, n := range slices.Backward(path) {
		switch n.(type) {
		case *ast.ForStmt:
			return true
		case *ast.RangeStmt:
			return false
		}
	}
	return false
}

// styleOf returns the rules of style that a hand-written file breaks.
func styleOf(f source) (broken []string) {
	add := func(n ast.Node, format string, args ...any) {
		broken = append(broken, f.at(n)+": "+fmt.Sprintf(format, args...))
	}
	if slices.Contains(banned, strings.TrimSuffix(f.file.Name.Name, "_test")) {
		add(f.file.Name, "package %s: a package is named by the one thing that it owns", f.file.Name.Name)
	}
	if f.test {
		return broken
	}
	if f.lines > hardLines {
		add(f.file, "%d lines, more than %d: split it by what a reader looks for", f.lines, hardLines)
	}
	for _, d := range f.file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Name.IsExported() && d.Doc == nil && (d.Recv == nil || receiverExported(d.Recv)) {
				add(d, "%s is exported and has no comment: say what it does, its limits and its errors", d.Name.Name)
			}
		case *ast.GenDecl:
			for _, n := range bare(d) {
				add(n, "%s is exported and has no comment: say what it is, its unit and its limits", n.Name)
			}
		}
	}
	return broken
}

// bare returns the exported names of a declaration that no comment is on. A
// comment on a group of constants or variables serves all of it.
func bare(d *ast.GenDecl) (names []*ast.Ident) {
	for _, s := range d.Specs {
		switch s := s.(type) {
		case *ast.TypeSpec:
			if s.Name.IsExported() && s.Doc == nil && (d.Doc == nil || d.Lparen.IsValid()) {
				names = append(names, s.Name)
			}
		case *ast.ValueSpec:
			for _, n := range s.Names {
				if n.IsExported() && s.Doc == nil && s.Comment == nil && d.Doc == nil {
					names = append(names, n)
				}
			}
		}
	}
	return names
}

func receiverExported(recv *ast.FieldList) bool {
	e := recv.List[0].Type
	for {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.IndexListExpr:
			e = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return false
		}
	}
}

// later matches a promise to do something later, which belongs into an issue.
var later = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME)\b`)

func TestNothingIsPutOff(t *testing.T) {
	t.Parallel()
	kinds := []string{".go", ".sql", ".sh", ".proto", ".mjs", ".cjs", ".js", ".md", ".yaml", ".yml", ".mod", ""}
	err := walk(func(p string, text []byte) error {
		if !slices.Contains(kinds, path.Ext(p)) || strings.HasPrefix(p, "proto/gen/") {
			return nil
		}
		if m := later.FindIndex(text); m != nil {
			t.Errorf("%s:%d: do it, or write an issue", p, 1+strings.Count(string(text[:m[0]]), "\n"))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestRulesOfStyleCanFail(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, path, text, want string
	}{
		{"function", "a/x.go", "package a\nfunc F() {}", "F is exported"},
		{"function with a comment", "a/x.go", "package a\n// F is.\nfunc F() {}", ""},
		{"method of a hidden type", "a/x.go", "package a\ntype t int\nfunc (t) F() {}", ""},
		{"method", "a/x.go", "package a\n// T is.\ntype T[K any] struct{}\nfunc (*T[K]) F() {}", "F is exported"},
		{"type", "a/x.go", "package a\ntype T int", "T is exported"},
		{"grouped types", "a/x.go", "package a\n// They are.\ntype (\nT int\n)", "T is exported"},
		{"constant", "a/x.go", "package a\nconst C = 1", "C is exported"},
		{"grouped constants", "a/x.go", "package a\n// They are.\nconst (\nC = 1\n)", ""},
		{"name", "util/x.go", "package util", "by the one thing"},
		{"length", "a/x.go", "package a\n" + strings.Repeat("//\n", hardLines), "lines, more than"},
		{"length of a test", "a/x_test.go", "package a\n" + strings.Repeat("//\n", hardLines), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := strings.Join(styleOf(parse(t, tt.path, tt.text)), "\n")
			if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
	for text, want := range map[string]bool{
		"time.Sleep(1)":                                 true,
		"for range 3 { time.Sleep(1) }":                 true,
		"for !done() { time.Sleep(1) }":                 false,
		"for ; !done(); time.Sleep(1) { }":              false,
		"for !done() { for range 3 { time.Sleep(1) } }": true,
	} {
		f := parse(t, "a/x_test.go", "package a\nimport \"time\"\nfunc f() { "+text+" }")
		if got := slices.Contains(sleepers(f), "f"); got != want {
			t.Errorf("%s: sleeps %v", text, got)
		}
	}
	if !later.MatchString("// TO"+"DO: later") || later.MatchString(`\uXXXX`) {
		t.Error("what is put off is not seen")
	}
}
