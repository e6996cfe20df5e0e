package sessions

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The test binary re-executes itself: as a server on stdio, and as a host that is
// killed. See child_test.go.
func TestMain(m *testing.M) {
	if role := os.Getenv("BULKHEAD_TEST_CHILD"); role != "" {
		runChild(role)
		return
	}
	goleak.VerifyTestMain(pgtest.Wrap(m))
}

func tenantID(t testing.TB, s string) tenant.ID {
	t.Helper()
	var id tenant.ID
	if err := id.Scan(s); err != nil {
		t.Fatal(err)
	}
	return id
}

func keyOf(t testing.TB, user string) Key {
	t.Helper()
	return Key{Tenant: tenantID(t, "ten_a"), Server: "srv_1", Registration: 1, Subject: tenant.Subject{Source: "key", Value: user}}
}

func quietLog() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// newPool returns a pool that may reach loopback, shut down with the test.
func newPool(t testing.TB, change func(*PoolConfig)) *Pool {
	t.Helper()
	e := egress.New(egress.Policy{Development: true})
	cfg := PoolConfig{Egress: e, Log: quietLog(), Version: "test", TempDir: t.TempDir(), Limits: Limits{Backoff: time.Millisecond, MaxBackoff: 2 * time.Millisecond, Grace: 300 * time.Millisecond}}
	if change != nil {
		change(&cfg)
	}
	p := NewPool(cfg)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := p.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		e.CloseIdle()
	})
	return p
}

func httpTarget(url string) Target {
	return Target{ServerName: "test", Transport: TransportHTTP, URL: url}
}

func echo() Request {
	return Request{Method: "tools/call", Name: "echo", Params: json.RawMessage(`{"name":"echo","arguments":{"text":"hi"}}`)}
}

// expect checks the fault of an error: its reason, layer, and the phase beside it.
func expect(t testing.TB, resp Response, err error, reason string, layer fault.Layer, phase Phase) {
	t.Helper()
	f, ok := fault.As(err)
	if !ok {
		t.Fatalf("error %v (%+v), want a fault %s", err, resp, reason)
	}
	if f.Reason != reason || f.Layer != layer || resp.Phase != phase {
		t.Fatalf("got %s %s %q with phase %q, want %s %s with phase %q (%s)", f.Layer, f.Reason, f.Message, resp.Phase, layer, reason, phase, f.Detail())
	}
}

func succeed(t testing.TB, resp Response, err error) {
	t.Helper()
	if err != nil || resp.Error != nil || resp.Result == nil || resp.Phase != Answered || resp.ResultType != ResultComplete {
		t.Fatalf("%+v, %v", resp, err)
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}
