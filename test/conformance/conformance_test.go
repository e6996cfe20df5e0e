// Package conformance holds the product against the official conformance suite.
// For every scenario the suite starts a server of its own and runs a client
// against it; the client here is an adapter that knows nothing of the protocol
// and only uses the public REST API of a running server, as a tenant of its own.
// What counts is what the suite's servers saw.
package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/test/npm"
	"github.com/bulkhead-mcp/bulkhead/test/service"
)

// The environment by which the suite runs this test binary as its client.
const (
	adapterURL      = "BULKHEAD_TEST_ADAPTER_URL"
	adapterOperator = "BULKHEAD_TEST_ADAPTER_OPERATOR"
)

func TestMain(m *testing.M) {
	if os.Getenv(adapterURL) != "" {
		os.Exit(adapt())
	}
	goleak.VerifyTestMain(m)
}

// TestClient runs every scenario of expected.go, one at a time, because some of
// them judge how long something took.
func TestClient(t *testing.T) {
	suite := npm.Conformance(t)
	wantKnown(t, suite)
	s := service.Start(t, map[string]service.Runtime{})
	for _, sc := range scenarios {
		t.Run(sc.name+"/"+sc.version, func(t *testing.T) {
			checks := run(t, suite, s, sc)
			problems := judge(checks, sc)
			switch {
			case sc.lacks == "" && len(problems) > 0:
				t.Error(strings.Join(problems, "\n"))
			case sc.lacks != "" && len(problems) == 0:
				t.Errorf("passes, and is listed as lacking: %s", sc.lacks)
			}
		})
	}
}

// check is one finding of the suite.
type check struct {
	ID, Name, Status, Description, ErrorMessage string
	Details                                     json.RawMessage
}

// run runs one scenario and returns its checks.
func run(t *testing.T, suite []string, s *service.Service, sc scenario) (checks []check) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, suite[0], append(suite[1:], "client", "--command", self, "--scenario", sc.name,
		"--spec-version", sc.version, "--output-dir", dir)...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), adapterURL + "=" + s.URL, adapterOperator + "=" + s.OperatorKey}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	out, exit := cmd.CombinedOutput() // a failure is told by the checks
	if ctx.Err() != nil {
		t.Fatalf("the suite did not end, as when somebody stays connected to its server:\n%s", out)
	}
	// The suite does not judge how its client ended; we do.
	for _, name := range []string{"stdout", "stderr"} {
		found, err := filepath.Glob(filepath.Join(dir, "*", name+".txt"))
		if err != nil || len(found) != 1 {
			t.Fatalf("%d files of the adapter's %s, exit %v:\n%s", len(found), name, exit, out)
		}
		text, err := os.ReadFile(found[0])
		if err != nil {
			t.Fatal(err)
		}
		if name == "stderr" && len(text) > 0 {
			checks = append(checks, check{ID: "adapter", Status: "FAILURE", ErrorMessage: string(text)})
		} else if len(text) > 0 {
			t.Logf("%s", text)
		}
	}
	found, err := filepath.Glob(filepath.Join(dir, "*", "checks.json"))
	if err != nil || len(found) != 1 {
		t.Fatalf("%d lists of checks, exit %v:\n%s", len(found), exit, out)
	}
	text, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	var theirs []check
	if err := json.Unmarshal(text, &theirs); err != nil {
		t.Fatalf("checks %q: %v", text, err)
	}
	return append(checks, theirs...)
}

// judge returns what is wrong. A scenario in which nothing was tested is wrong.
func judge(checks []check, sc scenario) (problems []string) {
	good, unused := 0, map[string]bool{}
	for _, name := range sc.skips {
		unused[name] = true
	}
	for _, c := range checks {
		switch c.Status {
		case "SUCCESS":
			good++
		case "INFO":
		case "SKIPPED":
			if slices.Contains(sc.skips, c.Name) {
				delete(unused, c.Name)
				continue
			}
			fallthrough
		default:
			problems = append(problems, fmt.Sprintf("%s %s (%s): %s %s %s", c.Status, c.ID, c.Name, c.Description, c.ErrorMessage, c.Details))
		}
	}
	for name := range unused {
		problems = append(problems, name+" is listed as skipped and was not")
	}
	if good == 0 {
		problems = append(problems, "no check was successful")
	}
	return problems
}

var listed = regexp.MustCompile(`(?m)^\s+- (\S+) \[([^\]]+)\]$`)

// wantKnown wants exactly the suite's scenarios to be in our lists, so that a
// newer suite cannot bring one that nobody looks at.
func wantKnown(t *testing.T, suite []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), suite[0], append(suite[1:], "list", "--client")...).Output()
	if err != nil {
		t.Fatalf("list the scenarios: %v", err)
	}
	ours := map[string]bool{}
	for _, sc := range scenarios {
		ours[sc.name+" "+sc.version] = true
	}
	for _, name := range needOAuth {
		ours[name] = true
	}
	for name := range notOffered {
		ours[name] = true
	}
	theirs := 0
	for _, m := range listed.FindAllStringSubmatch(string(out), -1) {
		for version := range strings.SplitSeq(m[2], ",") {
			theirs++
			if !ours[m[1]] && !ours[m[1]+" "+strings.TrimSpace(version)] {
				t.Errorf("%s at %s is in none of our lists", m[1], version)
			}
		}
	}
	if theirs < len(scenarios) {
		t.Fatalf("the suite lists %d, fewer than we run:\n%s", theirs, out)
	}
}
