package sessions

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func anyKey(Key) bool { return true }

// counterServer is a stateful legacy server: each session has a counter of its own.
func counterServer(t testing.TB) *mcptest.Server {
	s := mcptest.New(t, mcptest.Legacy)
	var mu sync.Mutex
	sessions, counts := 0, map[string]int{}
	s.On("initialize", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		mu.Lock()
		sessions++
		id := fmt.Sprintf("s%d", sessions)
		mu.Unlock()
		mcptest.WithHeader("Mcp-Session-Id", id, mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}`))(w, raw, r)
	})
	s.On("tools/call", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		if strings.Contains(r.Body, "hang") {
			s.Hang()(w, raw, r)
			return
		}
		mu.Lock()
		id := r.Header.Get("Mcp-Session-Id")
		counts[id]++
		n := counts[id]
		mu.Unlock()
		mcptest.Result(fmt.Sprintf(`{"content":[],"structuredContent":{"n":%d}}`, n))(w, raw, r)
	})
	return s
}

func TestFO050_NoConnectionIsSharedBetweenUsers(t *testing.T) {
	t.Parallel()
	s := counterServer(t)
	p := newPool(t, nil)
	target := httpTarget(s.URL)
	count := func(k Key) int {
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		var r struct{ StructuredContent struct{ N int } }
		if err := json.Unmarshal(resp.Result, &r); err != nil {
			t.Fatal(err)
		}
		return r.StructuredContent.N
	}
	a := keyOf(t, "a")
	b := a
	b.Subject.Value = "b"
	others := []Key{b}
	for _, change := range []func(*Key){
		func(k *Key) { k.Tenant = tenantID(t, "ten_b") },
		func(k *Key) { k.Subject.Source = "issuer" },
		func(k *Key) { k.Session = "ses_1" },
		func(k *Key) { k.Registration = 2 },
		func(k *Key) { k.AccountVersion = 2 },
		func(k *Key) { k.Server = "srv_2" },
	} {
		k := a
		change(&k)
		others = append(others, k)
	}
	if count(a) != 1 || count(a) != 2 {
		t.Fatal("the first user has no session of its own")
	}
	for _, k := range others {
		if n := count(k); n != 1 {
			t.Errorf("%+v sees %d", k, n)
		}
	}
	// A's call is cancelled while B's runs.
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := p.Do(ctx, a, target, Request{Method: "tools/call", Name: "hang", Params: json.RawMessage(`{"name":"hang"}`)})
		done <- err
	}()
	s.Wait(t, "tools/call", 10)
	cancel()
	if n := count(b); n != 2 {
		t.Errorf("B sees %d", n)
	}
	if err := <-done; !fault.Is(err, fault.Canceled) {
		t.Error(err)
	}
	if got := p.Connections(tenantID(t, "ten_b"), anyKey); len(got) != 1 {
		t.Errorf("the other tenant sees %d connections", len(got))
	}
}

func TestPool_ConnectsOnceForAllWaiters(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	release := make(chan struct{})
	s.On("server/discover", s.After(release, mcptest.Result(`{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}`)))
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			if resp, err := p.Do(context.Background(), k, target, echo()); err != nil || resp.Result == nil {
				t.Errorf("%v", err)
			}
		})
	}
	// One that does not wait to the end leaves without an effect.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	resp, err := p.Do(ctx, k, target, echo())
	expect(t, resp, err, "TIMEOUT", fault.Transport, NotSent)
	close(release)
	wg.Wait()
	if s.Count("server/discover") != 1 || s.Count("tools/call") != 32 {
		t.Fatalf("%d, %d", s.Count("server/discover"), s.Count("tools/call"))
	}
}

func TestPool_FailureIsSharedAndPaused(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("server/discover", mcptest.WithHeader("Retry-After", "30", mcptest.Status(503, "", "")))
	p := newPool(t, nil)
	target := httpTarget(s.URL)
	for i := range 20 {
		resp, err := p.Do(t.Context(), keyOf(t, fmt.Sprint(i)), target, echo())
		expect(t, resp, err, "SERVER_ERROR", fault.Server, NotSent)
		if f, _ := fault.As(err); f.RetryAfter <= 0 || f.RetryAfter > 30*time.Second {
			t.Fatalf("retry after %v", f.RetryAfter)
		}
	}
	if n := s.Count("server/discover"); n != 1 {
		t.Fatalf("%d probes", n)
	}
	// Another registration of the same server is not held back.
	k := keyOf(t, "a")
	k.Registration = 2
	s.On("server/discover")
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	infos := p.Connections(k.Tenant, anyKey)
	if len(infos) != 2 || infos[1].State != StateFailed || infos[1].Reason == "" {
		t.Fatalf("%+v", infos)
	}
}

func TestPool_IdleLifetimeAndNothingLeft(t *testing.T) {
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, func(c *PoolConfig) { c.Limits.Idle = 150 * time.Millisecond })
	target := httpTarget(s.URL)
	before := runtime.NumGoroutine()
	for i := range 50 {
		resp, err := p.Do(t.Context(), keyOf(t, fmt.Sprint(i)), target, echo())
		succeed(t, resp, err)
	}
	s.Wait(t, "DELETE", 50)
	s.CloseIdle() // before that it would cut what ends a session
	eventually(t, "idle connections have no goroutines", func() bool { return runtime.NumGoroutine() <= before+4 })
	p.mu.Lock()
	if len(p.slots) != 0 || len(p.tenants) != 0 {
		t.Errorf("%d slots, %d tenants are left", len(p.slots), len(p.tenants))
	}
	p.mu.Unlock()
	if infos := p.Connections(keyOf(t, "0").Tenant, anyKey); len(infos) != 50 || infos[0].State != StateClosed || infos[0].Reason != "idle" {
		t.Errorf("%d connections are told about", len(infos))
	}
}

func TestPool_LifetimeEndsABusyConnectionAfterItsLastCall(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, func(c *PoolConfig) { c.Limits.Lifetime = 100 * time.Millisecond })
	release := make(chan struct{})
	s.On("tools/call", s.After(release, mcptest.Result(okResult)))
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	done := make(chan error, 1)
	go func() {
		resp, err := p.Do(context.Background(), k, target, echo())
		if err == nil && resp.Result == nil {
			err = context.Canceled
		}
		done <- err
	}()
	s.Wait(t, "tools/call", 1)
	eventually(t, "it takes no new calls", func() bool { return len(p.matching(anyKey)) == 0 })
	if s.Count("DELETE") != 0 {
		t.Fatal("it was closed under a call")
	}
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	s.Wait(t, "DELETE", 1)
}

func TestPool_Bounds(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, func(c *PoolConfig) { c.Limits.Tenant, c.Limits.Total, c.Limits.InFlight = 2, 3, 2 })
	target := httpTarget(s.URL)
	for i := range 5 { // idle ones make room
		resp, err := p.Do(t.Context(), keyOf(t, fmt.Sprint(i)), target, echo())
		succeed(t, resp, err)
	}
	if n := len(p.matching(anyKey)); n > 2 {
		t.Fatalf("%d connections", n)
	}
	release := make(chan struct{})
	s.On("tools/call", s.After(release, mcptest.Result(okResult)))
	var wg sync.WaitGroup
	busy := func(k Key) {
		n := s.Count("tools/call")
		wg.Go(func() { p.Do(context.Background(), k, target, echo()) }) //nolint:errcheck // it only keeps the connection busy
		s.Wait(t, "tools/call", n+1)
	}
	busy(keyOf(t, "3"))
	busy(keyOf(t, "3"))
	busy(keyOf(t, "4"))
	resp, err := p.Do(t.Context(), keyOf(t, "3"), target, echo())
	expect(t, resp, err, "CONNECTION_BUSY", fault.Host, NotSent)
	resp, err = p.Do(t.Context(), keyOf(t, "5"), target, echo())
	expect(t, resp, err, "CONNECTIONS_EXHAUSTED", fault.Host, NotSent)
	other := keyOf(t, "x")
	other.Tenant = tenantID(t, "ten_b")
	busy(other)
	other.Subject = tenant.Subject{Source: "key", Value: "y"}
	resp, err = p.Do(t.Context(), other, target, echo())
	expect(t, resp, err, "CONNECTIONS_EXHAUSTED", fault.Host, NotSent)
	close(release)
	wg.Wait()
}

func TestPool_TargetsAreChecked(t *testing.T) {
	t.Parallel()
	p := newPool(t, nil)
	for name, c := range map[string]struct {
		target Target
		reason string
	}{
		"inner address": {httpTarget("http://10.0.0.5/mcp"), "INVALID_ARGUMENT"},
		"other origin":  {Target{Transport: TransportHTTP, URL: "http://127.0.0.1:9/mcp", Origin: "http://127.0.0.1:8"}, "ORIGIN_MISMATCH"},
		"unknown":       {Target{Transport: "SOCKET", URL: "http://127.0.0.1:9/mcp"}, "TRANSPORT_UNSUPPORTED"},
	} {
		resp, err := p.Do(t.Context(), keyOf(t, name), c.target, echo())
		if f, ok := fault.As(err); !ok || f.Reason != c.reason || resp.Phase != NotSent {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, r := range map[string]Request{
		"method":   {Method: "tools/list"},
		"params":   {Method: "tools/call", Params: json.RawMessage(`[]`)},
		"own meta": {Method: "tools/call", Params: json.RawMessage(`{"_meta":{}}`)},
		"reserved": {Method: "tools/call", Meta: map[string]json.RawMessage{"io.modelcontextprotocol/x": json.RawMessage(`1`)}},
		"bad meta": {Method: "tools/call", Meta: map[string]json.RawMessage{"x": json.RawMessage(`{`)}},
	} {
		if _, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget("http://127.0.0.1:9/"), r); !fault.Is(err, fault.Internal) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPool_ShutdownEndsWhatIsOpen(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{"listChanged":true}}`)
	s.On("GET", mcptest.StreamThen(s.Hang(), ": open\n\n"))
	p := newPool(t, nil)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	s.Wait(t, "GET", 1)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := p.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	if s.Count("DELETE") != 1 {
		t.Fatal("the session was not deleted")
	}
	resp, err = p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "STOPPING", fault.Host, NotSent)
}
