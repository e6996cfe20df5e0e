package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	protocolRow  = regexp.MustCompile(`(?m)^\| ([A-Z]+-\d+) \| ([^|]+) \| ([^|]*) \|$`)
	protocolTest = regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9_]*)`")
	protocolFile = regexp.MustCompile("`([a-z][A-Za-z0-9_./-]*\\.(?:go|sql|proto|md|mjs|json))`")
	testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9_]*)\(`)
)

// TestProtocol checks that the page names tests and files that exist, each row
// once, and a test or a reason for each.
func TestProtocol(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	exist := testFunctions(t)
	for _, m := range protocolTest.FindAllStringSubmatch(string(page), -1) {
		if !exist[m[1]] {
			t.Errorf("there is no test %s", m[1])
		}
	}
	for _, m := range protocolFile.FindAllStringSubmatch(string(page), -1) {
		if _, err := os.Stat(filepath.Join("..", m[1])); err != nil {
			t.Errorf("there is no file %s", m[1])
		}
	}
	seen := map[string]bool{}
	for _, m := range protocolRow.FindAllStringSubmatch(string(page), -1) {
		id, text, tests := m[1], m[2], m[3]
		if seen[id] {
			t.Errorf("%s is there twice", id)
		}
		seen[id] = true
		excused := strings.HasPrefix(text, "Not done") || strings.HasPrefix(text, "Not offered") || strings.TrimSpace(tests) == "no test yet"
		if !excused && !protocolTest.MatchString(tests) {
			t.Errorf("%s names no test and does not say that it is not done", id)
		}
	}
	if len(seen) < 200 {
		t.Errorf("%d rows were read", len(seen))
	}
}

// testFunctions returns the names of all tests of the repository.
func testFunctions(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if d.Name() == "node_modules" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range testFunction.FindAllSubmatch(text, -1) {
			names[string(m[1])] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
