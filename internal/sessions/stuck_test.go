package sessions

import (
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// timeOut makes requests that run out of time, one after the other.
func timeOut(t *testing.T, p *Pool, k Key, target Target, r Request, n int) {
	t.Helper()
	r.Timeout = 30 * time.Millisecond
	r.OnNotice = func(Notice) {}
	for range n {
		if resp, err := p.Do(t.Context(), k, target, r); err == nil || resp.Phase == Answered {
			t.Fatalf("%+v %v", resp, err)
		}
	}
}

// stuck returns how many connections of a key ended because their server was stuck,
// and the id of the living one.
func stuck(p *Pool, k Key) (ended int, living string) {
	for _, info := range p.Connections(k.Tenant, func(o Key) bool { return o == k }) {
		if info.State != StateClosed {
			living = info.ID
		} else if strings.HasPrefix(info.Reason, ServerStuck+": ") {
			ended++
		}
	}
	return ended, living
}

// A program that no longer answers is replaced, although it is in use all the time.
func TestStuck_ProgramIsReplaced(t *testing.T) {
	t.Parallel()
	for _, era := range []string{"legacy", "modern"} {
		t.Run(era, func(t *testing.T) {
			t.Parallel()
			p, target := stdioPool(t, childRuntime(t, "ERA="+era), func(c *PoolConfig) { c.Limits.Probe = 2 * time.Second })
			k := keyOf(t, "a")
			resp, err := p.Do(t.Context(), k, target, tool("stop reading"))
			succeed(t, resp, err)
			_, first := stuck(p, k)
			timeOut(t, p, k, target, tool("echo"), stuckAfter-1)
			if n, id := stuck(p, k); n != 0 || id != first {
				t.Fatalf("%d ended before their time", n)
			}
			timeOut(t, p, k, target, tool("echo"), 1)
			eventually(t, "it is ended", func() bool { n, _ := stuck(p, k); return n == 1 })
			resp, err = p.Do(t.Context(), k, target, tool("echo"))
			if said(t, resp, err) != "ok" {
				t.Fatal("the new program does not answer")
			}
		})
	}
}

// One that is slow with some requests and answers others stays.
func TestStuck_LivingOnesStay(t *testing.T) {
	t.Parallel()
	p, target := stdioPool(t, childRuntime(t, "ERA=modern"), nil)
	k := keyOf(t, "a")
	resp, err := p.Do(t.Context(), k, target, tool("echo"))
	succeed(t, resp, err)
	_, first := stuck(p, k)
	for range 3 {
		timeOut(t, p, k, target, tool("hang"), stuckAfter-1)
		resp, err := p.Do(t.Context(), k, target, tool("echo"))
		succeed(t, resp, err)
	}
	if n, id := stuck(p, k); n != 0 || id != first {
		t.Fatalf("%d were ended", n)
	}
	// Over HTTP the modern era holds nothing together.
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/call", s.Hang())
	timeOut(t, p, keyOf(t, "m"), httpTarget(s.URL), echo(), stuckAfter+1)
	if s.Count("ping") > 0 || s.Count("server/discover") != 1 {
		t.Errorf("%d pings, %d probes", s.Count("ping"), s.Count("server/discover"))
	}
}

func TestStuck_LegacyIsPinged(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*testing.T) (*mcptest.Server, Target){
		"HTTP": func(t *testing.T) (*mcptest.Server, Target) {
			s := mcptest.New(t, mcptest.Legacy)
			return s, httpTarget(s.URL)
		},
		"HTTP+SSE": func(t *testing.T) (*mcptest.Server, Target) {
			s := mcptest.NewSSE(t, "2024-11-05")
			return s, sseTarget(s.URL)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, target := start(t)
			p := newPool(t, func(c *PoolConfig) { c.Limits.Probe = 2 * time.Second })
			k := keyOf(t, "a")
			s.On("tools/call", s.Hang())
			// It refuses ping as unknown: a sign of life.
			for n := 1; n <= 2; n++ {
				timeOut(t, p, k, target, echo(), stuckAfter)
				s.Wait(t, "ping", n)
				eventually(t, "the ping is answered", func() bool {
					c := p.matching(func(Key) bool { return true })[0]
					c.mu.Lock()
					defer c.mu.Unlock()
					return !c.pinging
				})
			}
			if n, _ := stuck(p, k); n != 0 || s.Count("initialize") != 1 {
				t.Fatalf("%d ended, %d handshakes", n, s.Count("initialize"))
			}
			s.On("ping", s.Hang())
			timeOut(t, p, k, target, echo(), stuckAfter)
			eventually(t, "it is ended", func() bool { n, _ := stuck(p, k); return n == 1 })
			timeOut(t, p, k, target, echo(), 1)
			if s.Count("initialize") != 2 {
				t.Errorf("%d handshakes", s.Count("initialize"))
			}
		})
	}
}
