// Package hostile_test plays MCP servers that misbehave, over real HTTP and real
// pipes, and holds the pool of connections to what it promises whatever they do:
// each request ends with a typed failure that names the layer, or with the right
// answer where tolerance is right; memory and work stay within the limits; another
// connection works at once; and nothing is left at the end: no goroutine, no
// process, no descriptor.
package hostile_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The test binary is the hostile child too. See child_test.go.
func TestMain(m *testing.M) {
	if script := os.Getenv("HOSTILE_CHILD"); script != "" {
		beChild(script)
		return
	}
	before := descriptors()
	code := m.Run()
	if code == 0 {
		for _, left := range leftovers(before) {
			fmt.Fprintln(os.Stderr, "left behind:", left)
			code = 1
		}
	}
	os.Exit(code)
}

// leftovers returns what the tests left behind, and waits a while for it to go.
func leftovers(before int) (left []string) {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		left = nil
		if n := descriptors(); n > before {
			left = append(left, fmt.Sprintf("%d descriptors more than before: %s", n-before, openFiles()))
		}
		if c := children(); c != "" {
			left = append(left, "children "+c)
		}
		if len(left) == 0 || time.Now().After(end) {
			break
		}
	}
	if err := goleak.Find(); err != nil {
		left = append(left, err.Error())
	}
	return left
}

func descriptors() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	n := 0
	for _, e := range entries {
		// The runtime opens pollers and the like for itself when it needs them.
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(to, "anon_inode") {
			n++
		}
	}
	return n
}

func openFiles() string {
	all, _ := filepath.Glob("/proc/self/fd/*")
	var out []string
	for _, p := range all {
		if to, err := os.Readlink(p); err == nil {
			out = append(out, to)
		}
	}
	return strings.Join(out, " ")
}

func children() string {
	all, _ := filepath.Glob("/proc/self/task/*/children")
	var out strings.Builder
	for _, p := range all {
		b, _ := os.ReadFile(p)
		out.Write(b)
	}
	return strings.TrimSpace(out.String())
}

// rig is a pool and where its requests go.
type rig struct {
	pool   *sessions.Pool
	key    sessions.Key
	target sessions.Target
	told   chan sessions.Change
}

// small are the limits of the suite: small enough that each can be reached at once.
func small() sessions.Limits {
	return sessions.Limits{
		ResultBytes: 64 << 10, NoiseBytes: 64 << 10, EventLines: 1000, ServerRequests: 8, LineBytes: 128 << 10,
		ListBytes: 256 << 10, ListItems: 100, ListPages: 10, StderrBytes: 1 << 10,
		Write: 200 * time.Millisecond, Grace: 100 * time.Millisecond, Backoff: time.Millisecond, MaxBackoff: time.Millisecond,
		Reopen: time.Millisecond, MaxReopen: 10 * time.Millisecond, Coalesce: time.Millisecond,
	}
}

func newRig(t testing.TB, target sessions.Target, limits sessions.Limits, runtimes map[string]sessions.Runtime) (r *rig, shutdown func()) {
	t.Helper()
	var id tenant.ID
	if err := id.Scan("ten_a"); err != nil {
		t.Fatal(err)
	}
	e := egress.New(egress.Policy{Development: true, Roots: roots()})
	r = &rig{target: target, told: make(chan sessions.Change, 4096)}
	r.key = sessions.Key{Tenant: id, Server: "srv_1", Registration: 1, Subject: tenant.Subject{Source: "key", Value: "a"}}
	r.pool = sessions.NewPool(sessions.PoolConfig{
		Egress: e, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Version: "test", TempDir: t.TempDir(), Limits: limits, Runtimes: runtimes,
	})
	r.pool.OnChange(func(c sessions.Change) {
		select {
		case r.told <- c:
		default:
			t.Error("changes are told without end")
		}
	})
	return r, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := r.pool.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		e.CloseIdle()
	}
}

// call is the request of most cases.
func call() sessions.Request {
	return sessions.Request{Method: "tools/call", Name: "echo", Params: json.RawMessage(`{"name":"echo","arguments":{"text":"hi"}}`), Timeout: 20 * time.Second}
}

// outcome writes what came of a request as one line: "ok", "error CODE" or
// "LAYER REASON, phase".
func outcome(resp sessions.Response, err error) string {
	if err != nil {
		f, ok := fault.As(err)
		if !ok {
			return fmt.Sprintf("no fault but %T: %v", err, err)
		}
		return fmt.Sprintf("%s %s, %s", f.Layer, f.Reason, resp.Phase)
	}
	if resp.Error != nil {
		return fmt.Sprintf("error %d", resp.Error.Code)
	}
	if !json.Valid(resp.Result) || resp.Phase != sessions.Answered {
		return fmt.Sprintf("a result that is none: %q, %s", resp.Result, resp.Phase)
	}
	if resp.ResultType != sessions.ResultComplete {
		return resp.ResultType
	}
	return "ok"
}

// listed is outcome for a list.
func listed(l sessions.Listing, err error) string {
	if err != nil {
		f, ok := fault.As(err)
		if !ok {
			return fmt.Sprintf("no fault but %T: %v", err, err)
		}
		return fmt.Sprintf("%s %s", f.Layer, f.Reason)
	}
	return fmt.Sprintf("%d items, %d rejected", len(l.Items), len(l.Rejected))
}

// allocated returns how many bytes fn made the whole process allocate.
func allocated(fn func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}
