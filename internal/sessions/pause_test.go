package sessions

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Many users' attempts that fail together are one failure: the pause does not
// grow with their number, and what the server asks for still counts.
func TestFO091_FailuresOfOneMomentCountOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := &Pool{limits: Limits{Backoff: time.Second, MaxBackoff: time.Minute}, pauses: map[registration]*pause{}}
		k := Key{Server: "srv", Registration: 1}
		down := fault.New(fault.Unavailable, "CONNECT_FAILED", "no").In(fault.Transport)
		left := func() time.Duration { return time.Until(p.pauses[registrationOf(k)].until) }
		for range 200 {
			p.failed(k, down)
		}
		if d := left(); d < time.Second || d > 1500*time.Millisecond {
			t.Errorf("after 200 failures at once the pause is %s", d)
		}
		<-time.After(left()) // virtual time
		p.failed(k, down)
		if d := left(); d < 2*time.Second || d > 3*time.Second {
			t.Errorf("after the second failure the pause is %s", d)
		}
		p.failed(k, down.Retry(10*time.Second))
		if d := left(); d != 10*time.Second {
			t.Errorf("the server asked for 10 s, the pause is %s", d)
		}
	})
}
