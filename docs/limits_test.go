// Package docs is Bulkhead's documentation; its Go code only checks that the
// pages say what the code does.
package docs

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestLimits checks that each row of the page shows the values of the constants
// or members that it names.
func TestLimits(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("limits.md")
	if err != nil {
		t.Fatal(err)
	}
	place := regexp.MustCompile("^((?:`[A-Za-z]+`, )*`[A-Za-z]+`) in `([a-z/]+)`$")
	packages := map[string]source{}
	rows := 0
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "| what ") || strings.HasPrefix(line, "| --- ") {
			continue
		}
		rows++
		cells := strings.Split(strings.Trim(line, "|"), " | ")
		m := place.FindStringSubmatch(strings.TrimSpace(cells[len(cells)-1]))
		if len(cells) != 4 || m == nil {
			t.Errorf("no place at the end of %q", line)
			continue
		}
		if packages[m[2]] == nil {
			packages[m[2]] = read(t, filepath.Join("..", m[2]))
		}
		shown := amounts(cells[1] + " | " + cells[2])
		for name := range strings.SplitSeq(strings.ReplaceAll(m[1], "`", ""), ", ") {
			if !packages[m[2]].shows(t, name, shown) {
				t.Errorf("%s in %s is not one of %v, in %q", name, m[2], shown, line)
			}
		}
	}
	if rows < 70 {
		t.Errorf("only %d rows were read", rows)
	}
}

// TestLimits_NoticesWrongValues keeps the check from passing over everything.
func TestLimits_NoticesWrongValues(t *testing.T) {
	t.Parallel()
	contract, sessions := read(t, "../internal/contract"), read(t, "../internal/sessions")
	for text, want := range map[string]bool{"256 KiB": true, "262,144 bytes": true, "256": false, "256 s": false, "–": false} {
		if got := contract.shows(t, "MaxBytes", amounts(text)); got != want {
			t.Errorf("MaxBytes as %q: %v", text, got)
		}
	}
	for text, want := range map[string]bool{"5 min": true, "300 s": true, "5": false, "4 min, 6 min": false} {
		if got := sessions.shows(t, "Idle", amounts(text)); got != want {
			t.Errorf("Idle as %q: %v", text, got)
		}
	}
}

// amount is a number of bytes or things, or of nanoseconds.
type amount struct {
	n    int64
	time bool
}

var units = map[string]amount{
	"": {1, false}, "KiB": {1 << 10, false}, "MiB": {1 << 20, false},
	"ms": {1e6, true}, "s": {1e9, true}, "min": {60e9, true}, "h": {3600e9, true}, "days": {24 * 3600e9, true},
}

// amounts are the numbers in a text, with their units.
func amounts(text string) (out []amount) {
	number := regexp.MustCompile(`(\d+(?:,\d{3})*)(?: (KiB|MiB|ms|s|min|h|days)\b)?`)
	for _, m := range number.FindAllStringSubmatch(text, -1) {
		n, _ := constant.Int64Val(constant.MakeFromLiteral(strings.TrimLeft(strings.ReplaceAll(m[1], ",", ""), "0"), token.INT, 0))
		u := units[m[2]]
		out = append(out, amount{n * u.n, u.time})
	}
	return out
}

// source has the expressions that a package gives to each name: of constants
// and variables, of members that are set, and of defaults, which are the second
// argument of a function whose first is the member.
type source map[string][]ast.Expr

func read(t *testing.T, dir string) source {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %d files, %v", dir, len(files), err)
	}
	s := source{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, s.collect)
	}
	return s
}

func (s source) collect(n ast.Node) bool {
	member := func(e ast.Expr) string {
		if u, ok := e.(*ast.UnaryExpr); ok {
			e = u.X
		}
		if sel, ok := e.(*ast.SelectorExpr); ok {
			return sel.Sel.Name
		}
		return ""
	}
	switch n := n.(type) {
	case *ast.ValueSpec:
		for i, v := range n.Values {
			s[n.Names[i].Name] = append(s[n.Names[i].Name], v)
		}
	case *ast.AssignStmt:
		if name := member(n.Lhs[0]); name != "" && len(n.Lhs) == 1 {
			s[name] = append(s[name], n.Rhs[0])
		}
	case *ast.CallExpr:
		if len(n.Args) == 2 && member(n.Args[0]) != "" {
			s[member(n.Args[0])] = append(s[member(n.Args[0])], n.Args[1])
		}
	}
	return true
}

// shows reports whether one of the name's values is among the amounts, and of a
// struct every member's.
func (s source) shows(t *testing.T, name string, shown []amount) bool {
	t.Helper()
	found := false
	for _, e := range s[name] {
		parts := []ast.Expr{e}
		if lit, ok := e.(*ast.CompositeLit); ok {
			parts = nil
			for _, el := range lit.Elts {
				parts = append(parts, el.(*ast.KeyValueExpr).Value)
			}
		}
		all := len(parts) > 0
		for _, p := range parts {
			v, time := s.value(p)
			if v == nil {
				all = false
				continue
			}
			found = true
			n, exact := constant.Int64Val(constant.ToInt(v))
			all = all && exact && slices.Contains(shown, amount{n, time})
		}
		if all {
			return true
		}
	}
	if !found {
		t.Errorf("%s has no value that can be read", name)
	}
	return false
}

var times = map[string]int64{"Nanosecond": 1, "Microsecond": 1e3, "Millisecond": 1e6, "Second": 1e9, "Minute": 60e9, "Hour": 3600e9}

// value evaluates what limits are written with; nil for anything else.
func (s source) value(e ast.Expr) (v constant.Value, time bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.INT || e.Kind == token.FLOAT {
			return constant.MakeFromLiteral(e.Value, e.Kind, 0), false
		}
	case *ast.ParenExpr:
		return s.value(e.X)
	case *ast.SelectorExpr:
		if x, ok := e.X.(*ast.Ident); ok && x.Name == "time" && times[e.Sel.Name] > 0 {
			return constant.MakeInt64(times[e.Sel.Name]), true
		}
	case *ast.Ident:
		if es := s[e.Name]; len(es) == 1 {
			return s.value(es[0])
		}
	case *ast.BinaryExpr:
		x, tx := s.value(e.X)
		y, ty := s.value(e.Y)
		if x == nil || y == nil {
			return nil, false
		}
		switch e.Op {
		case token.SHL:
			n, _ := constant.Uint64Val(y)
			return constant.Shift(x, e.Op, uint(n)), tx
		case token.ADD, token.SUB, token.MUL:
			return constant.BinaryOp(x, e.Op, y), tx || ty
		}
	}
	return nil, false
}
