// Package deploy holds what builds, checks and ships Bulkhead; its Go code is
// tests of the scripts only.
package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// report is cut from govulncheck's own output: a finding by symbol, one in a
// package that is only imported, and one in a module of which nothing is built
// in. Only the first two count.
const report = `{
  "config": {
    "protocol_version": "v1.0.0",
    "scanner_name": "govulncheck"
  }
}
{
  "finding": {
    "osv": "GO-2026-1001",
    "trace": [
      {
        "module": "stdlib",
        "version": "v1.26.8",
        "package": "net/http",
        "function": "Do"
      },
      {
        "module": "example.com/ours",
        "package": "example.com/ours/main"
      }
    ]
  }
}
{
  "finding": {
    "osv": "GO-2026-1002",
    "trace": [
      {
        "module": "example.com/theirs",
        "version": "v1.0.0",
        "package": "example.com/theirs/client"
      }
    ]
  }
}
{
  "finding": {
    "osv": "GO-2026-1003",
    "trace": [
      {
        "module": "example.com/unused",
        "version": "v1.0.0"
      }
    ]
  }
}
`

func TestVulnerabilityGate(t *testing.T) {
	t.Parallel()
	const both = "# why\n\nGO-2026-1001 2027-02-28 a reason\nGO-2026-1002 2027-02-28 a reason\n"
	for _, tt := range []struct {
		name, report, allow, today string
		pass                       bool
		want                       string
	}{
		{"all allowed", report, both, "2026-12-01", true, "2 finding(s), all allowed: yes"},
		{"last day", report, both, "2027-02-28", true, "all allowed: yes"},
		{"a day late", report, both, "2027-03-01", false, "allowed only until 2027-02-28: GO-2026-1001 in net/http"},
		{"new", report, "GO-2026-1001 2027-02-28 a reason\n", "2026-12-01", false, "new: GO-2026-1002 in example.com/theirs/client"},
		{"nothing allowed", report, "", "2026-12-01", false, "new: GO-2026-1001"},
		{"no longer found", report, both + "GO-2026-1003 2027-02-28 a reason\n", "2026-12-01", true, "GO-2026-1003 is allowed but no longer found"},
		{"no reason", report, both + "GO-2026-1004 2027-02-28\n", "2026-12-01", false, "line 5 is not"},
		{"no date", report, "GO-2026-1001 soon a reason\n", "2026-12-01", false, "line 1 is not"},
		{"no report", "", both, "2026-12-01", false, "no govulncheck report"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for name, text := range map[string]string{"report": tt.report, "allow": tt.allow} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			out, err := exec.CommandContext(t.Context(), "./vuln.sh", "-report", filepath.Join(dir, "report"),
				"-allow", filepath.Join(dir, "allow"), "-today", tt.today).CombinedOutput()
			if pass := err == nil; pass != tt.pass || !strings.Contains(string(out), tt.want) {
				t.Errorf("pass %v, want %v and %q in:\n%s", pass, tt.pass, tt.want, out)
			}
		})
	}
}
