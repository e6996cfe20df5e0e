// Package chaos proves what survives when processes die, freeze, stop or lose
// their stores. Its tests start the real server binary, as many times as they
// need, on a real PostgreSQL and a real Redis, call only its public API, and
// count at the demo calendar, which is a process of its own, what really
// happened. The database is looked into for what no API shows.
package chaos

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
)

// binary is the server under test, built once for all tests.
var binary string

// patience bounds every wait. It is long because the machine may be busy; no
// test passes or fails by how fast something was.
const patience = 90 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		serveStdio()
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "bhchaos-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary directory
	binary = filepath.Join(dir, "server")
	args := []string{"build", "-o", binary}
	if raceEnabled {
		args = append(args, "-race")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "go", append(args, "../../cmd/server")...).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the server: %v\n%s", err, out)
		return 1
	}
	// The tests wait for other processes far more than they compute.
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set("8")
	}
	return pgtest.Wrap(m).Run()
}
