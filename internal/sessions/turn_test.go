package sessions

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// sharedKey is that of a server that the whole tenant shares.
func sharedKey(t testing.TB) Key {
	return Key{Tenant: tenantID(t, "ten_a"), Server: "srv_1", Registration: 1}
}

// gauge counts how many calls a server works on at a time.
type gauge struct {
	mu        sync.Mutex
	now, most int
}

func (g *gauge) around(next mcptest.Answer) mcptest.Answer {
	return func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		g.mu.Lock()
		g.now++
		g.most = max(g.most, g.now)
		g.mu.Unlock()
		defer func() {
			g.mu.Lock()
			g.now--
			g.mu.Unlock()
		}()
		next(w, raw, r)
	}
}

// On a connection that all users share a legacy server has one call at a time;
// who waits does so within its own time, and not in any number.
func TestShared_LegacyCallsWaitForEachOther(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	g := &gauge{}
	s.On("tools/call", g.around(mcptest.Result(okResult)))
	p := newPool(t, func(c *PoolConfig) { c.Limits.Queue = 8 })
	k, target := sharedKey(t), httpTarget(s.URL)
	var wg sync.WaitGroup
	for range 9 {
		wg.Go(func() {
			if resp, err := p.Do(context.Background(), k, target, echo()); err != nil || resp.Result == nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if g.most != 1 || s.Count("tools/call") != 9 || s.Count("initialize") != 1 {
		t.Errorf("%d calls at a time, %d in all, %d connections", g.most, s.Count("tools/call"), s.Count("initialize"))
	}

	release := make(chan struct{})
	s.On("tools/call", s.After(release, mcptest.Result(okResult)))
	busy := make(chan error, 1)
	go func() {
		_, err := p.Do(context.Background(), k, target, echo())
		busy <- err
	}()
	s.Wait(t, "tools/call", 10)
	r := echo()
	r.Queue = 10 * time.Millisecond
	r.BeforeSend = func() error { t.Error("a call was sent out of turn"); return nil }
	resp, err := p.Do(t.Context(), k, target, r)
	expect(t, resp, err, TurnNotCome, fault.Host, NotSent)
	if resp.Timings.Negotiation < r.Queue {
		t.Errorf("the wait is not told: %+v", resp.Timings)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	for range 8 {
		waiting.Go(func() { p.Do(ctx, k, target, echo()) }) //nolint:errcheck // it only fills the queue
	}
	c := p.matching(anyKey)[0]
	eventually(t, "the queue is full", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.queue == 8
	})
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "CONNECTION_BUSY", fault.Host, NotSent)
	// A list is not a call, and users of their own connection wait for nobody.
	if _, err := p.List(t.Context(), k, target, KindTool); err != nil {
		t.Error(err)
	}
	cancel()
	waiting.Wait()
	close(release)
	if err := <-busy; err != nil {
		t.Error(err)
	}
	if n := s.Count("tools/call"); n != 10 {
		t.Errorf("%d calls arrived", n)
	}
}

// A modern server is told with each request what it belongs to, and users with a
// connection of their own share nothing: their calls run side by side.
func TestShared_OthersRunSideBySide(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		version string
		key     Key
	}{
		"modern, shared": {mcptest.Modern, sharedKey(t)},
		"legacy, own":    {mcptest.Legacy, keyOf(t, "a")},
	} {
		s := mcptest.New(t, c.version)
		release := make(chan struct{})
		s.On("tools/call", s.After(release, mcptest.Result(okResult)))
		p := newPool(t, nil)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if _, err := p.Do(context.Background(), c.key, httpTarget(s.URL), echo()); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			})
		}
		s.Wait(t, "tools/call", 3)
		close(release)
		wg.Wait()
	}
}

// A shared connection that ends while calls wait for it is made anew for them.
func TestShared_TheQueueOutlivesItsConnection(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	release := make(chan struct{})
	s.On("tools/call", s.After(release, mcptest.StatusError(404, -32001, "session gone")), mcptest.Result(okResult))
	p := newPool(t, nil)
	k, target := sharedKey(t), httpTarget(s.URL)
	var wg sync.WaitGroup
	wg.Go(func() {
		resp, err := p.Do(context.Background(), k, target, echo())
		expectReason(t, resp, err, SessionLost, Answered)
	})
	s.Wait(t, "tools/call", 1)
	c := p.matching(anyKey)[0]
	for range 3 {
		wg.Go(func() {
			if resp, err := p.Do(context.Background(), k, target, echo()); err != nil || resp.Result == nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "they wait", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.queue == 3
	})
	close(release)
	wg.Wait()
	if s.Count("initialize") != 2 || s.Count("tools/call") != 4 {
		t.Errorf("%d sessions, %d calls", s.Count("initialize"), s.Count("tools/call"))
	}
}

// expectReason is expect for goroutines.
func expectReason(t testing.TB, resp Response, err error, reason string, phase Phase) {
	t.Helper()
	if f, ok := fault.As(err); !ok || f.Reason != reason || resp.Phase != phase {
		t.Errorf("%v with phase %q, want %s with %q", err, resp.Phase, reason, phase)
	}
}

// Nothing is offered to a server on a shared connection.
func TestShared_DeclaresNothing(t *testing.T) {
	t.Parallel()
	all := Target{Declare: Capabilities{ElicitationForm: true, ElicitationURL: true, Sampling: true, Roots: true, Tasks: true}, LogLevel: "debug", Roots: []string{"file:///x"}}
	if got := all.silenced(); got.Declare != (Capabilities{}) || got.LogLevel != "" || got.Roots != nil {
		t.Errorf("%+v", got)
	}
	for _, version := range []string{mcptest.Modern, mcptest.Legacy} {
		s := mcptest.New(t, version)
		p := newPool(t, nil)
		target := httpTarget(s.URL)
		target.Declare, target.LogLevel, target.Roots = all.Declare, all.LogLevel, all.Roots
		resp, err := p.Do(t.Context(), sharedKey(t), target, echo())
		succeed(t, resp, err)
		if _, err := p.List(t.Context(), sharedKey(t), target, KindTool); err != nil {
			t.Fatal(err)
		}
		for _, m := range []string{"server/discover", "initialize", "tools/call", "tools/list"} {
			for _, r := range s.Seen(m) {
				for _, word := range []string{"elicitation", "sampling", "roots", "logLevel", "tasks"} {
					if strings.Contains(r.Body, word) {
						t.Errorf("%s offers %s: %s", m, word, r.Body)
					}
				}
			}
		}
		if s.Count("logging/setLevel") != 0 {
			t.Error("log messages were asked for")
		}
	}
}
