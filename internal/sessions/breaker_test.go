package sessions

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

const discovered = `{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}`

// lapse ends the pause of a key's server at once.
func lapse(p *Pool, k Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pauses[registrationOf(k)].until = time.Now()
}

// After a pause one connection tries first; the others wait for what comes of it,
// for better and for worse.
func TestPool_OneConnectionTriesFirstAfterAPause(t *testing.T) {
	t.Parallel()
	for _, heals := range []bool{true, false} {
		s := mcptest.New(t, mcptest.Modern)
		s.On("server/discover", mcptest.Status(503, "", ""))
		p := newPool(t, func(c *PoolConfig) { c.Limits.Backoff, c.Limits.MaxBackoff = time.Hour, time.Hour })
		target := httpTarget(s.URL)
		resp, err := p.Do(t.Context(), keyOf(t, "0"), target, echo())
		expect(t, resp, err, "SERVER_ERROR", fault.Server, NotSent)
		lapse(p, keyOf(t, "0"))

		release := make(chan struct{})
		next := mcptest.Result(discovered)
		if !heals {
			next = mcptest.Status(503, "", "")
		}
		s.On("server/discover", s.After(release, next), mcptest.Result(discovered))
		const users = 16
		var wg sync.WaitGroup
		var mu sync.Mutex
		worked := 0
		for i := range users {
			wg.Go(func() {
				resp, err := p.Do(context.Background(), keyOf(t, fmt.Sprint(i)), target, echo())
				mu.Lock()
				defer mu.Unlock()
				if err == nil && resp.Result != nil {
					worked++
				}
			})
		}
		s.Wait(t, "server/discover", 2)
		// One that does not want to wait for the trial leaves it alone.
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		resp, err = p.Do(ctx, keyOf(t, "late"), target, echo())
		cancel()
		expect(t, resp, err, "TIMEOUT", fault.Transport, NotSent)
		if n := s.Count("server/discover"); n != 2 {
			t.Fatalf("%d probes while the trial runs", n)
		}
		close(release)
		wg.Wait()
		switch {
		case heals && worked != users:
			t.Errorf("%d of %d worked after the trial", worked, users)
		case !heals && (worked != 0 || s.Count("server/discover") != 2):
			t.Errorf("%d worked, %d probes after a trial that failed", worked, s.Count("server/discover"))
		}
	}
}

// A server that refuses one user is up: the others are not held back by a pause
// before.
func TestPool_ARefusalEndsThePause(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("server/discover", mcptest.Status(503, "", ""), mcptest.Status(401, "", ""), mcptest.Result(discovered))
	p := newPool(t, func(c *PoolConfig) { c.Limits.Backoff, c.Limits.MaxBackoff = time.Hour, time.Hour })
	target := httpTarget(s.URL)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), target, echo())
	expect(t, resp, err, "SERVER_ERROR", fault.Server, NotSent)
	lapse(p, keyOf(t, "a"))
	resp, err = p.Do(t.Context(), keyOf(t, "a"), target, echo())
	expect(t, resp, err, "AUTHORIZATION_REQUIRED", fault.Server, NotSent)
	resp, err = p.Do(t.Context(), keyOf(t, "b"), target, echo())
	succeed(t, resp, err)
}

// What is told of a connection: its stages with their times, the attempts before
// it, and for one that failed when the next may be made.
func TestConnections_TellEachStage(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	release := make(chan struct{})
	s.On("server/discover", mcptest.Status(503, "", ""), s.After(release, mcptest.Result(discovered)))
	p := newPool(t, func(c *PoolConfig) { c.Limits.Backoff, c.Limits.MaxBackoff = time.Hour, time.Hour })
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	before := time.Now()
	resp, err := p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "SERVER_ERROR", fault.Server, NotSent)
	failed := p.Connections(k.Tenant, anyKey)
	if len(failed) != 1 || failed[0].State != StateFailed || failed[0].Reason == "" || failed[0].Attempts != 1 ||
		failed[0].NextTry.Before(before.Add(time.Hour)) || states(failed[0]) != "IDENTIFIED FAILED" {
		t.Fatalf("%+v", failed)
	}
	lapse(p, k)
	done := make(chan error, 1)
	go func() {
		_, err := p.List(context.Background(), k, target, KindTool)
		done <- err
	}()
	s.Wait(t, "server/discover", 2)
	if opening := p.Connections(k.Tenant, anyKey); len(opening) != 2 || opening[0].State != StateIdentified {
		t.Fatalf("%+v", opening)
	}
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	c := p.Connections(k.Tenant, anyKey)[0]
	if states(c) != "IDENTIFIED NEGOTIATED DISCOVERED CATALOGUED" || c.Attempts != 2 || !c.NextTry.IsZero() || c.Era != EraModern {
		t.Fatalf("%+v", c)
	}
	for i, st := range c.Stages {
		if st.Time.Before(c.Opened) || i > 0 && st.Time.Sub(c.Stages[i-1].Time) != st.Took {
			t.Errorf("%+v", c.Stages)
		}
	}
	p.CloseKey(anyKey)
	if c := p.Connections(k.Tenant, anyKey)[0]; c.State != StateClosed || c.Reason != "closed" || states(c) != "IDENTIFIED NEGOTIATED DISCOVERED CATALOGUED CLOSED" {
		t.Fatalf("%+v", c)
	}
}

func states(c ConnectionInfo) (out string) {
	for i, s := range c.Stages {
		if i > 0 {
			out += " "
		}
		out += s.State
	}
	return out
}

// One server uses up its own part of what the tenant has, and no more.
func TestPool_OneServerLeavesRoomForTheOthers(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, func(c *PoolConfig) { c.Limits.Tenant, c.Limits.Server = 3, 2 })
	release := make(chan struct{})
	s.On("tools/call", s.After(release, mcptest.Result(okResult)))
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			if _, err := p.Do(context.Background(), keyOf(t, fmt.Sprint(i)), httpTarget(s.URL), echo()); err != nil {
				t.Error(err)
			}
		})
	}
	s.Wait(t, "tools/call", 2)
	resp, err := p.Do(t.Context(), keyOf(t, "2"), httpTarget(s.URL), echo())
	expect(t, resp, err, "CONNECTIONS_EXHAUSTED", fault.Host, NotSent)
	// A further revision of the same registration is the same server.
	k := keyOf(t, "2")
	k.Registration = 2
	resp, err = p.Do(t.Context(), k, httpTarget(s.URL), echo())
	expect(t, resp, err, "CONNECTIONS_EXHAUSTED", fault.Host, NotSent)
	other := mcptest.New(t, mcptest.Modern)
	k.Server = "srv_2"
	resp, err = p.Do(t.Context(), k, httpTarget(other.URL), echo())
	succeed(t, resp, err)
	close(release)
	wg.Wait()
	// Idle connections of the same server make room.
	resp, err = p.Do(t.Context(), keyOf(t, "2"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	if n := len(p.matching(func(k Key) bool { return k.Server == "srv_1" })); n != 2 {
		t.Errorf("%d connections to the server", n)
	}
}

// A connection that ends under a call gives up its stream of changes at once, so
// that there is one for a server and an authorization context.
func TestWatch_OneStreamForAKey(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{"listChanged":true}}`)
	var mu sync.Mutex
	open, most := 0, 0
	hang := s.Hang()
	s.On("GET", mcptest.StreamThen(func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		mu.Lock()
		open++
		most = max(most, open)
		mu.Unlock()
		hang(w, raw, r)
		mu.Lock()
		open--
		mu.Unlock()
	}, ": open\n\n"))
	release := make(chan struct{})
	s.On("tools/call", s.After(release, mcptest.Result(okResult)), mcptest.Result(okResult))
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	done := make(chan error, 1)
	go func() {
		_, err := p.Do(context.Background(), k, target, echo())
		done <- err
	}()
	s.Wait(t, "GET", 1)
	s.Wait(t, "tools/call", 1)
	p.CloseKey(anyKey)
	eventually(t, "the first stream ends under the call", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return open == 0
	})
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	s.Wait(t, "GET", 2)
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if most != 1 {
		t.Errorf("%d streams at a time", most)
	}
}

// Children of one server leave room for those of the others.
func TestStdio_OneServerLeavesRoomForTheOthers(t *testing.T) {
	t.Parallel()
	p, target := stdioPool(t, childRuntime(t), func(c *PoolConfig) { c.Limits.ServerProcesses, c.Limits.TenantProcesses = 1, 2 })
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { p.Do(ctx, keyOf(t, "a"), target, tool("hang")) }) //nolint:errcheck // it only keeps the child busy
	eventually(t, "the child is busy", func() bool {
		infos := p.Connections(keyOf(t, "a").Tenant, anyKey)
		return len(infos) == 1 && infos[0].Active == 1 && infos[0].State == StateInitialized
	})
	resp, err := p.Do(t.Context(), keyOf(t, "b"), target, tool("echo"))
	expect(t, resp, err, "CONNECTIONS_EXHAUSTED", fault.Host, NotSent)
	k := keyOf(t, "b")
	k.Server = "srv_2"
	resp, err = p.Do(t.Context(), k, target, tool("echo"))
	succeed(t, resp, err)
	cancel()
	wg.Wait()
}
