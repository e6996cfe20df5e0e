// Package docs is Bulkhead's documentation; its Go code only checks that the
// pages name things that exist.
package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestLimitsNameTheirPlace checks that each limit's constant or member is in the
// package that the page names.
func TestLimitsNameTheirPlace(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("limits.md")
	if err != nil {
		t.Fatal(err)
	}
	place := regexp.MustCompile("\\| `([A-Za-z]+)` in `([a-z/]+)` \\|$")
	rows := 0
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "| what ") || strings.HasPrefix(line, "| --- ") {
			continue
		}
		rows++
		m := place.FindStringSubmatch(line)
		if m == nil {
			t.Errorf("no place at the end of %q", line)
			continue
		}
		if !declares(t, filepath.Join("..", m[2]), m[1]) {
			t.Errorf("%s is not declared in %s", m[1], m[2])
		}
	}
	if rows < 40 {
		t.Errorf("only %d rows were read", rows)
	}
}

// declares reports whether a file of the package, tests aside, has the name at
// the start of a declaration or among the members of a struct.
func declares(t *testing.T, dir, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	declaration := regexp.MustCompile(`(?m)^(const )?\s*([A-Za-z]+, )*` + name + `\b[^(:.]`)
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if declaration.Match(text) {
			return true
		}
	}
	return false
}
