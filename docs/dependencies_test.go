package docs

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// TestDependenciesAreExplained checks that the page names exactly the direct
// dependencies of the server, of the tools and of the npm packages.
func TestDependenciesAreExplained(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("dependencies.md")
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| [^|]{10,} \\| [^|]{5,} \\|$").FindAllStringSubmatch(string(page), -1) {
		if explained[m[1]] {
			t.Errorf("%s is explained twice", m[1])
		}
		explained[m[1]] = true
	}
	used := map[string]string{}
	mods, err := filepath.Glob("../deploy/tools/*.mod")
	if err != nil || len(mods) == 0 {
		t.Fatalf("no files of tools: %v", err)
	}
	for _, file := range append(mods, "../go.mod") {
		for _, name := range direct(t, file) {
			used[name] = file
		}
	}
	embedded, err := filepath.Glob("../internal/postgres/embedded/npm/*/package.json")
	if err != nil || len(embedded) == 0 {
		t.Fatalf("no packages of PostgreSQL: %v", err)
	}
	for _, file := range append(embedded, "../test/package.json", "../proto/package.json") {
		for _, name := range npm(t, file) {
			used[name] = file
		}
	}
	for _, name := range slices.Sorted(maps.Keys(used)) {
		if !explained[name] {
			t.Errorf("%s (%s) is not explained: what does it save, what does it bring?", name, used[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(explained)) {
		if used[name] == "" {
			t.Errorf("%s is explained and not used", name)
		}
	}
}

// direct returns what a module file requires directly, and its tools.
func direct(t *testing.T, file string) (names []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json", file).Output()
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	var mod struct {
		Require []struct {
			Path     string
			Indirect bool
		}
		Tool []struct{ Path string }
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}
	for _, r := range mod.Require {
		if !r.Indirect {
			names = append(names, r.Path)
		}
	}
	for _, tool := range mod.Tool {
		names = append(names, tool.Path)
	}
	return names
}

// npm returns what a package.json asks for.
func npm(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var p struct {
		Dependencies, DevDependencies, OptionalDependencies map[string]string
	}
	if err := json.Unmarshal(text, &p); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	all := maps.Clone(p.DevDependencies)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, p.Dependencies)
	maps.Copy(all, p.OptionalDependencies)
	if len(all) == 0 {
		t.Fatalf("%s asks for nothing", file)
	}
	return slices.Collect(maps.Keys(all))
}
