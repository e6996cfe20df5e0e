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
	s.CloseIdle()
	eventually(t, "idle connections have no goroutines", func() bool { return runtime.NumGoroutine() <= before+4 })
	s.Wait(t, "DELETE", 50)
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
		"sse":           {Target{Transport: "SSE", URL: "http://127.0.0.1:9/mcp"}, "TRANSPORT_UNSUPPORTED"},
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

// changes records what a pool tells.
type changes struct {
	mu   sync.Mutex
	told []Change
}

func (c *changes) add(ch Change) { c.mu.Lock(); c.told = append(c.told, ch); c.mu.Unlock() }

func (c *changes) count(kind string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ch := range c.told {
		if ch.Kind == kind {
			n++
		}
	}
	return n
}

func watchedPool(t *testing.T, change func(*Limits)) (*Pool, *changes) {
	var seen changes
	p := newPool(t, func(c *PoolConfig) {
		c.Limits.Coalesce, c.Limits.Reopen, c.Limits.MaxReopen = 10*time.Millisecond, 30*time.Millisecond, 200*time.Millisecond
		if change != nil {
			change(&c.Limits)
		}
	})
	p.OnChange(seen.add)
	return p, &seen
}

func TestWatcher_BothEras(t *testing.T) {
	t.Parallel()
	ack := mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":$ID},"notifications":{"toolsListChanged":true}}}`)
	changed := mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`)
	for _, c := range []struct{ version, open string }{{mcptest.Modern, "subscriptions/listen"}, {mcptest.Legacy, "GET"}} {
		s := mcptest.New(t, c.version)
		s.Capabilities(`{"tools":{"listChanged":true},"prompts":{"listChanged":true}}`)
		go1, go2 := make(chan struct{}), make(chan struct{})
		first := mcptest.StreamThen(s.After(go1, func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
			w.Write([]byte(changed))
			w.(http.Flusher).Flush()
			s.After(go2, mcptest.Cut())(w, raw, r)
		}), ack)
		s.On(c.open, first, mcptest.StreamThen(s.Hang(), ack))
		p, seen := watchedPool(t, nil)
		k := keyOf(t, "a")
		resp, err := p.Do(t.Context(), k, httpTarget(s.URL), echo())
		succeed(t, resp, err)
		eventually(t, "opening is told", func() bool { return seen.count("") == 1 })
		eventually(t, "it is seen", func() bool { return p.Connections(k.Tenant, anyKey)[0].Watching })
		close(go1)
		eventually(t, "the change is told", func() bool { return seen.count(KindTool) == 1 })
		close(go2)
		s.Wait(t, c.open, 2)
		eventually(t, "the gap is told", func() bool { return seen.count("") >= 2 })
		got := s.Seen(c.open)[0]
		if c.version == mcptest.Modern {
			var params struct {
				Notifications map[string]bool
				Meta          map[string]any `json:"_meta"`
			}
			if err := json.Unmarshal(got.Params, &params); err != nil || len(params.Notifications) != 2 || !params.Notifications["toolsListChanged"] || !params.Notifications["promptsListChanged"] || params.Meta == nil {
				t.Errorf("%s", got.Body)
			}
			if got.Header.Get("Mcp-Method") != "subscriptions/listen" {
				t.Error("no Mcp-Method")
			}
		} else if got.Header.Get("Accept") != "text/event-stream" || got.Header.Get("Mcp-Session-Id") != "session-1" {
			t.Errorf("%v", got.Header)
		}
	}
}

func TestFO075_ServerHasNoGETStream(t *testing.T) {
	t.Parallel()
	for name, a := range map[string]mcptest.Answer{
		"405": mcptest.Status(405, "", ""), "404": mcptest.Status(404, "", ""), "400": mcptest.Status(400, "", ""), "json": mcptest.JSON(`{}`),
	} {
		s := mcptest.New(t, mcptest.Legacy)
		s.Capabilities(`{"tools":{"listChanged":true}}`)
		s.On("GET", a)
		p, _ := watchedPool(t, func(l *Limits) { l.Reopen = time.Millisecond })
		for range 3 {
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			succeed(t, resp, err)
		}
		s.Wait(t, "GET", 1)
		time.Sleep(50 * time.Millisecond)
		if n := s.Count("GET"); n != 1 {
			t.Errorf("%s: %d attempts", name, n)
		}
	}
}

func TestFO081_ReopeningIsPaced(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, piece string
		window      time.Duration
		most        int
	}{
		{"clean close", ": bye\n\n", 700 * time.Millisecond, 5}, // pauses of at least 100, 200, 200 … ms
		{"hint", "retry: 500\n\n", 400 * time.Millisecond, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Legacy)
			s.Capabilities(`{"tools":{"listChanged":true}}`)
			s.On("GET", mcptest.Stream(c.piece))
			p, _ := watchedPool(t, func(l *Limits) { l.Reopen = 100 * time.Millisecond })
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			succeed(t, resp, err)
			s.Wait(t, "GET", 1)
			time.Sleep(c.window)
			if n := s.Count("GET"); n > c.most {
				t.Errorf("%d attempts", n)
			}
			// The loop stops with the connection.
			p.CloseKey(anyKey)
			s.Wait(t, "DELETE", 1)
			n := s.Count("GET")
			time.Sleep(700 * time.Millisecond)
			if s.Count("GET") > n {
				t.Error("it goes on after the end")
			}
		})
	}
	if l := (Limits{}).withDefaults(); l.Reopen < time.Second || l.Coalesce < time.Second {
		t.Errorf("defaults %v %v", l.Reopen, l.Coalesce)
	}
}

func TestWatcher_StormIsCoalesced(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{"listChanged":true}}`)
	storm := strings.Repeat(mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`), 5000)
	s.On("GET", mcptest.StreamThen(s.Hang(), storm))
	p, seen := watchedPool(t, func(l *Limits) { l.Coalesce = 300 * time.Millisecond })
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	eventually(t, "a change is told", func() bool { return seen.count(KindTool)+seen.count("") >= 2 })
	time.Sleep(400 * time.Millisecond)
	if n := seen.count(KindTool) + seen.count(""); n > 3 {
		t.Errorf("told %d times", n)
	}
}

func TestWatcher_RealServer(t *testing.T) {
	t.Parallel()
	for _, versions := range [][]string{nil, {"2025-11-25"}} {
		real := mcptest.NewReal(t)
		p, seen := watchedPool(t, nil)
		target := httpTarget(real.URL)
		target.Versions = versions
		k := keyOf(t, "a")
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		eventually(t, "the stream is open", func() bool { return p.Connections(k.Tenant, anyKey)[0].Watching })
		real.AddTool("later")
		eventually(t, "the change is told", func() bool { return seen.count(KindTool) > 0 })
		l, err := p.List(t.Context(), k, target, KindTool)
		if err != nil || len(l.Items) != 3 {
			t.Fatalf("%+v %v", l, err)
		}
	}
}

func TestList_Pages(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/list",
		mcptest.Result(`{"tools":[{"name":"a","x":1.0,"$schema":"y"}],"nextCursor":"","ttlMs":60000,"cacheScope":"public"}`),
		mcptest.Result(`{"tools":[],"nextCursor":"2","ttlMs":30000,"cacheScope":"public"}`),
		mcptest.Result(`{"tools":[{"name":"b"}],"ttlMs":90000,"cacheScope":"public"}`))
	p := newPool(t, nil)
	l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), KindTool)
	if err != nil || len(l.Items) != 2 || string(l.Items[0]) != `{"name":"a","x":1.0,"$schema":"y"}` || l.TTL != 30*time.Second || l.Scope != "public" || l.Era != EraModern || l.ListChanged {
		t.Fatalf("%+v %v", l, err)
	}
	seen := s.Seen("tools/list")
	if !strings.Contains(seen[1].Body, `"cursor":""`) || !strings.Contains(seen[2].Body, `"cursor":"2"`) || strings.Contains(seen[0].Body, "cursor") {
		t.Fatal(seen[1].Body)
	}
	if got := p.Connections(keyOf(t, "a").Tenant, anyKey)[0].State; got != StateCatalogued {
		t.Fatal(got)
	}
}

func TestList_BadAnswersAreNoEmptyList(t *testing.T) {
	t.Parallel()
	n := 0
	endless := func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		n++
		mcptest.Result(fmt.Sprintf(`{"tools":[],"nextCursor":"c%d"}`, n))(w, raw, r)
	}
	for name, c := range map[string]struct {
		answer mcptest.Answer
		reason string
	}{
		"empty":           {mcptest.Result(`{}`), "LIST_INVALID"},
		"null":            {mcptest.Result(`null`), "RESULT_INVALID"},
		"null array":      {mcptest.Result(`{"tools":null}`), "LIST_INVALID"},
		"miscased":        {mcptest.Result(`{"Tools":[]}`), "LIST_INVALID"},
		"object":          {mcptest.Result(`{"tools":{}}`), "LIST_INVALID"},
		"twice":           {mcptest.Result(`{"tools":[],"tools":[{"name":"x"}]}`), "LIST_INVALID"},
		"repeated cursor": {mcptest.Result(`{"tools":[],"nextCursor":"x"}`), "CURSOR_REPEATED"},
		"endless cursors": {endless, "LIST_TOO_LONG"},
		"numeric cursor":  {mcptest.Result(`{"tools":[],"nextCursor":7}`), "CURSOR_INVALID"},
		"long cursor":     {mcptest.Result(`{"tools":[],"nextCursor":"` + strings.Repeat("x", 10000) + `"}`), "CURSOR_INVALID"},
		"too many items":  {mcptest.Result(`{"tools":[` + strings.Repeat(`{"name":"x"},`, 30) + `{}]}`), "LIST_TOO_LONG"},
		"too many bytes":  {mcptest.Result(`{"tools":[{"name":"` + strings.Repeat("x", 200_000) + `"}]}`), "RESULT_TOO_LARGE"},
		"error":           {mcptest.Error(-32603, "x", ""), "LIST_REFUSED"},
		"not found":       {mcptest.Error(-32601, "x", ""), "LIST_REFUSED"},
		"input required":  {mcptest.Result(`{"resultType":"input_required","tools":[]}`), "RESULT_TYPE_INVALID"},
		"sign-in":         {mcptest.Status(401, "", ""), "AUTHORIZATION_REQUIRED"},
	} {
		s := mcptest.New(t, mcptest.Modern)
		s.On("tools/list", c.answer)
		p := newPool(t, func(c *PoolConfig) { c.Limits.ListItems, c.Limits.ListPages, c.Limits.ListBytes = 20, 10, 100_000 })
		l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), KindTool)
		if f, ok := fault.As(err); !ok || f.Reason != c.reason || l.Items != nil {
			t.Errorf("%s: %+v %v", name, l, err)
		}
	}
}

func TestList_KindsThatAServerDoesNotHave(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"resources":{"listChanged":true}}`)
	s.On("resources/templates/list", mcptest.Error(-32601, "no", ""))
	s.On("tools/list", mcptest.Error(-32601, "no", ""))
	p := newPool(t, nil)
	for _, kind := range []string{KindTool, KindPrompt, KindResourceTemplate} {
		l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), kind)
		if err != nil || l.Items == nil || len(l.Items) != 0 || l.ListChanged != (kind == KindResourceTemplate) || l.Scope != "private" {
			t.Errorf("%s: %+v %v", kind, l, err)
		}
	}
	if s.Count("prompts/list") != 0 {
		t.Error("prompts were asked for")
	}
}

func TestList_ToolsWithBadHeaderMarksAreLeftOut(t *testing.T) {
	t.Parallel()
	schema := func(s string) string { return `{"name":"bad","inputSchema":{"type":"object",` + s + `}}` }
	bad := []string{
		schema(`"properties":{"a":{"type":"string","x-mcp-header":""}}`),
		schema(`"properties":{"a":{"type":"string","x-mcp-header":"X"},"b":{"type":"string","x-mcp-header":"x"}}`),
		schema(`"properties":{"a":{"type":"string","x-mcp-header":"not a token"}}`),
		schema(`"properties":{"a":{"type":"number","x-mcp-header":"A"}}`),
		schema(`"properties":{"a":{"type":"object","x-mcp-header":"A"}}`),
		schema(`"properties":{"a":{"type":"array","items":{"type":"string","x-mcp-header":"A"}}}`),
		schema(`"anyOf":[{"properties":{"a":{"type":"string","x-mcp-header":"A"}}}]`),
		schema(`"$defs":{"d":{"type":"string","x-mcp-header":"A"}},"properties":{"a":{"$ref":"#/$defs/d"}}`),
	}
	good := `{"name":"good","description":"x-mcp-header","inputSchema":{"type":"object","properties":{"a":{"type":"string","x-mcp-header":"A"},"o":{"type":"object","properties":{"b":{"type":"integer","x-mcp-header":"B"}}}}}}`
	body := `{"tools":[` + strings.Join(append(bad, good), ",") + `]}`
	modern, legacy := mcptest.New(t, mcptest.Modern), mcptest.New(t, mcptest.Legacy)
	modern.On("tools/list", mcptest.Result(body))
	legacy.On("tools/list", mcptest.Result(body))
	p := newPool(t, nil)
	l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(modern.URL), KindTool)
	if err != nil || len(l.Items) != 1 || string(l.Items[0]) != good || len(l.Rejected) != len(bad) || l.Rejected[0].Reason == "" {
		t.Fatalf("%d kept, %d rejected, %v", len(l.Items), len(l.Rejected), err)
	}
	l, err = p.List(t.Context(), keyOf(t, "b"), httpTarget(legacy.URL), KindTool)
	if err != nil || len(l.Items) != len(bad)+1 {
		t.Fatalf("%d kept, %v", len(l.Items), err)
	}
}
