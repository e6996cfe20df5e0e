package sessions

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func TestCrash_PausesGrowForOneKeyOnly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := &Pool{limits: Limits{Backoff: time.Second, MaxBackoff: time.Minute}, crashes: map[Key]*crash{}}
		k := Key{Server: "srv", Registration: 1}
		left := func(k Key) time.Duration {
			f, ok := fault.As(p.crashPause(k))
			if !ok {
				return 0
			}
			return f.RetryAfter
		}
		crashAfter := func(lived time.Duration) {
			c := &conn{key: k, placed: true, opened: time.Now()}
			<-time.After(lived) // virtual time
			p.crashed(c)
		}
		for i, least := range []time.Duration{0, time.Second, 2 * time.Second, 4 * time.Second} {
			crashAfter(time.Millisecond)
			if d := left(k); d < least || d > least*3/2 {
				t.Errorf("after %d crashes the pause is %s", i+1, d)
			}
			<-time.After(left(k))
		}
		for range 40 {
			crashAfter(0)
		}
		if d := left(k); d < time.Minute || d > 90*time.Second {
			t.Errorf("the longest pause is %s", d)
		}
		if other := (Key{Server: "srv", Registration: 1, Session: "other"}); left(other) != 0 {
			t.Error("another key is held up")
		}
		<-time.After(left(k))
		if crashAfter(time.Minute); left(k) != 0 {
			t.Error("a program that lived for long is not started again at once")
		}
		p.forgetCrashes(time.Now().Add(10 * time.Minute))
		if len(p.crashes) != 1 {
			t.Error("it is forgotten too early")
		}
		p.forgetCrashes(time.Now().Add(11 * time.Minute))
		if len(p.crashes) != 0 {
			t.Error("it is never forgotten")
		}
		p.crashed(&conn{key: k, opened: time.Now()})
		if len(p.crashes) != 0 {
			t.Error("a failure to connect counts as a crash")
		}
	})
}

func TestCrash_NoHotLoop(t *testing.T) {
	t.Parallel()
	p, target := stdioPool(t, childRuntime(t), func(c *PoolConfig) { c.Limits.Backoff, c.Limits.MaxBackoff = time.Hour, time.Hour })
	k := keyOf(t, "a")
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, tool("crash"))
		expect(t, resp, err, "SERVER_ENDED", fault.Transport, MaybeSent)
	}
	resp, err := p.Do(t.Context(), k, target, tool("echo"))
	expect(t, resp, err, "SERVER_CRASHING", fault.Transport, NotSent)
	if f, _ := fault.As(err); f.RetryAfter < 30*time.Minute {
		t.Errorf("it may be tried again after %s", f.RetryAfter)
	}
	resp, err = p.Do(t.Context(), keyOf(t, "b"), target, tool("echo"))
	said(t, resp, err)
}
