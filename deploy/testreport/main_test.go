package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// passing is what go test -json writes for a package with one test that passes.
const passing = `{"Action":"start","Package":"m/a"}
{"Action":"run","Package":"m/a","Test":"TestA"}
{"Action":"output","Package":"m/a","Test":"TestA","Output":"chatter\n"}
{"Action":"pass","Package":"m/a","Test":"TestA","Elapsed":0}
{"Action":"output","Package":"m/a","Output":"PASS\n"}
{"Action":"output","Package":"m/a","Output":"ok  \tm/a\t0.01s\n"}
{"Action":"pass","Package":"m/a","Elapsed":0.01}
`

const skipping = `{"Action":"output","Package":"m/b","Test":"TestB/redis","Output":"=== RUN   TestB/redis\n"}
{"Action":"output","Package":"m/b","Test":"TestB/redis","Output":"    b_test.go:1: no redis here\n"}
{"Action":"output","Package":"m/b","Test":"TestB/redis","Output":"--- SKIP: TestB/redis (0.00s)\n"}
{"Action":"skip","Package":"m/b","Test":"TestB/redis","Elapsed":0}
`

const failing = `{"Action":"output","Package":"m/c","Test":"TestC","Output":"    c_test.go:1: got 1, want 2\n"}
{"Action":"output","Package":"m/c","Test":"TestHangs","Output":"still here\n"}
{"Action":"fail","Package":"m/c","Test":"TestC","Elapsed":0}
{"Action":"output","Package":"m/c","Output":"FAIL\tm/c\t0.02s\n"}
{"Action":"fail","Package":"m/c","Elapsed":0.02}
`

const unbuilt = `{"ImportPath":"m/d","Action":"build-output","Output":"d.go:1:1: syntax error\n"}
{"ImportPath":"m/d","Action":"build-fail"}
{"Action":"output","Package":"m/d","Output":"FAIL\tm/d [build failed]\n"}
{"Action":"fail","Package":"m/d","Elapsed":0,"FailedBuild":"m/d"}
`

func TestReport(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, in, allow string
		ok              bool
		want, not       string
	}{
		{"passes", passing, "", true, "ok  \tm/a\t0.01s\n1 tests passed, 0 failed, 0 skipped in 1 packages", "chatter"},
		{"skip not allowed", passing + skipping, "", false, "skipped and not allowed: m/b TestB/redis: b_test.go:1: no redis here", ""},
		{"skip allowed", passing + skipping, "# why\nb */redis no redis\n", true, "skipped: m/b TestB/redis: b_test.go:1: no redis here", "not allowed"},
		{"skip of another package", passing + skipping, "a */redis no redis\n", false, "skipped and not allowed", ""},
		{"fails", passing + failing, "", false, "c_test.go:1: got 1, want 2", ""},
		{"tests that never ended are shown", failing, "", false, "still here", ""},
		{"does not build", unbuilt + passing, "", false, "d.go:1:1: syntax error\nFAIL\tm/d [build failed]", ""},
		{"nothing", "", "", false, "nothing was tested", ""},
		{"the go command complains", "go: no such package\n" + passing, "", false, "go: no such package", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			allow := filepath.Join(t.TempDir(), "allow")
			if err := os.WriteFile(allow, []byte(tt.allow), 0o600); err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			ok, err := run(strings.NewReader(tt.in), &out, allow, "")
			if err != nil || ok != tt.ok || !strings.Contains(out.String(), tt.want) || tt.not != "" && strings.Contains(out.String(), tt.not) {
				t.Errorf("ok %v, %v; want %v, %q and not %q in:\n%s", ok, err, tt.ok, tt.want, tt.not, out.String())
			}
		})
	}
}

func TestReport_LinesApart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	allow, lines := filepath.Join(dir, "allow"), filepath.Join(dir, "lines")
	if err := os.WriteFile(allow, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if ok, err := run(strings.NewReader(passing+failing), &out, allow, lines); ok || err != nil {
		t.Fatalf("ok %v, %v", ok, err)
	}
	got, err := os.ReadFile(lines)
	if err != nil || string(got) != "ok  \tm/a\t0.01s\nFAIL\tm/c\t0.02s\n" {
		t.Errorf("lines %q, %v", got, err)
	}
	if strings.Contains(out.String(), "\nok") || strings.HasPrefix(out.String(), "ok") {
		t.Errorf("lines twice, unmarked:\n%s", out.String())
	}
}

func TestParseAllowed_Refuses(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"a TestA\n", "a Test*/*x no reason\n"} {
		if _, err := parseAllowed(text); err == nil || !strings.Contains(err.Error(), "line 1") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
