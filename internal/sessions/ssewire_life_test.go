package sessions

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	"github.com/bulkhead-mcp/bulkhead/test/npm"
)

func TestSSE_VersionRules(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, version, reason string
		change                func(*Target)
	}{
		{"modern offered", "2026-07-28", "VERSION_UNSUPPORTED", func(*Target) {}},
		{"not in the contract", "2024-11-05", "VERSION_UNSUPPORTED", func(t *Target) { t.Versions = []string{"2025-11-25"} }},
		{"only modern in the contract", "2024-11-05", "VERSION_UNSUPPORTED", func(t *Target) { t.Versions = []string{"2026-07-28"} }},
		{"older than before", "2024-11-05", "DOWNGRADE_REFUSED", func(t *Target) { t.DowngradeForbidden, t.KnownVersion = true, "2025-03-26" }},
		{"other origin", "2024-11-05", "ORIGIN_MISMATCH", func(t *Target) { t.Origin = "https://calendar.example" }},
	} {
		s := mcptest.NewSSE(t, c.version)
		s.On("initialize", s.Streamed(mcptest.Result(`{"protocolVersion":"`+c.version+`","capabilities":{"tools":{}}}`)))
		target := sseTarget(s.URL)
		c.change(&target)
		resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), target, echo())
		if f, ok := fault.As(err); !ok || f.Reason != c.reason || resp.Phase != NotSent || s.Count("tools/call") != 0 {
			t.Errorf("%s: %+v %v", c.name, resp, err)
		}
	}
}

// What a server proved on one stream holds on the next.
func TestSSE_DowngradeBetweenConnections(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2025-11-25")
	s.On("initialize", s.Streamed(mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}`)),
		s.Streamed(mcptest.Result(`{"protocolVersion":"2024-11-05","capabilities":{"tools":{}}}`)))
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), sseTarget(s.URL)
	target.DowngradeForbidden = true
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	s.EndStream()
	eventually(t, "the connection has ended", func() bool { return p.Connections(k.Tenant, anyKey)[0].State == StateClosed })
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "DOWNGRADE_REFUSED", fault.Protocol, NotSent)
}

// A question of a server that we did not write reaches the one call it belongs to,
// and the server goes on with the answer.
func TestSSE_RealServerAsks(t *testing.T) {
	t.Parallel()
	p, k, target := newPool(t, nil), keyOf(t, "a"), sseTarget(npm.EverythingSSE(t))
	target.Declare.ElicitationForm = true
	name := "trigger-elicitation-request"
	r := Request{Method: "tools/call", Name: name, Params: json.RawMessage(`{"name":"` + name + `","arguments":{}}`)}
	asked := 0
	r.OnAsk = func(_ context.Context, a Ask) Answer {
		asked++
		if a.Method != "elicitation/create" || !strings.Contains(string(a.Params), "Your full, legal name") {
			t.Errorf("asked %s %s", a.Method, a.Params)
		}
		return Answer{Result: json.RawMessage(`{"action":"accept","content":{"name":"Alice of the stream"}}`)}
	}
	resp, err := p.Do(t.Context(), k, target, r)
	if err != nil || resp.Phase != Answered || asked != 1 || !strings.Contains(string(resp.Result), "Alice of the stream") {
		t.Fatalf("asked %d times: %+v %v", asked, resp, err)
	}
	resp.Release()
}

// An answer that comes before its request was sent answers nothing, and the request
// stays unsent.
func TestSSE_AnswerBeforeTheRequest(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2024-11-05")
	next := func() string { // ids are counted
		var n int64
		if err := json.Unmarshal(s.Seen("tools/call")[0].ID, &n); err != nil {
			t.Error(err)
		}
		return strconv.FormatInt(n+1, 10)
	}
	early := &earlyAnswer{push: func() { s.Push(strings.ReplaceAll(mcptest.ResultEvent(okResult), "$ID", next())) }}
	p := newPool(t, func(c *PoolConfig) { c.Credentials = early })
	k := keyOf(t, "a")
	resp, err := p.Do(t.Context(), k, sseTarget(s.URL), echo())
	succeed(t, resp, err)
	early.on.Store(true)
	var sent atomic.Bool
	r := echo()
	r.BeforeSend = func() error { sent.Store(true); return nil }
	resp, err = p.Do(t.Context(), k, sseTarget(s.URL), r)
	expect(t, resp, err, "ANSWER_UNASKED", fault.Protocol, NotSent)
	early.on.Store(false)
	resp, err = p.Do(t.Context(), k, sseTarget(s.URL), echo())
	succeed(t, resp, err)
	if sent.Load() || s.Count("tools/call") != 2 {
		t.Errorf("sent: %v, %d calls", sent.Load(), s.Count("tools/call"))
	}
}

// earlyAnswer is credentials that take so long that a server answers meanwhile.
type earlyAnswer struct {
	on   atomic.Bool
	push func()
}

func (e *earlyAnswer) Authorize(ctx context.Context, _ Key, _ Target, _ http.Header) error {
	if e.on.Load() {
		e.push()
		<-ctx.Done()
	}
	return ctx.Err()
}

// At a stop the POST of a request runs in place, and the wait for its answer ends.
func TestSSE_ExchangeAtAStop(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2024-11-05")
	p := newPool(t, nil)
	k := keyOf(t, "a")
	resp, err := p.Do(t.Context(), k, sseTarget(s.URL), echo())
	succeed(t, resp, err)
	c := p.matching(anyKey)[0]
	if err := p.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	id := c.nextID.Add(1)
	rep, err := c.wire.exchange(t.Context(), &exchange{id: id, method: "tools/call", body: encodeRequest(id, "tools/call", nil, nil, nil), limit: 1 << 20})
	if f, ok := fault.As(err); !ok || f.Reason != "CONNECTION_CLOSED" || rep.phase == Answered {
		t.Fatalf("%+v %v", rep, err)
	}
}

func TestSSE_IdleConnectionEnds(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2024-11-05")
	gone := make(chan struct{})
	s.On("GET", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		defer close(gone)
		s.Open(mcptest.Endpoint("/message"))(w, raw, r)
	})
	p := newPool(t, func(c *PoolConfig) { c.Limits.Idle = 50 * time.Millisecond })
	resp, err := p.Do(t.Context(), keyOf(t, "a"), sseTarget(s.URL), echo())
	succeed(t, resp, err)
	select {
	case <-gone:
	case <-t.Context().Done():
	}
}
