package chaos

import (
	"fmt"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestFO124_StopInOrder sends SIGTERM while twenty calls are under way, half of
// them short enough for the grace period. Every caller gets an answer, what can
// end does, of the rest the store says what is known, and nothing is stuck.
func TestFO124_StopInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	quick, slow := startCalendar(t), startCalendar(t)
	a := w.start("BULKHEAD_GRACE_PERIOD=4s")
	w.register(a, "quick", quick.mcp, policy{})
	w.register(a, "slow", slow.mcp, policy{})
	quick.fault(draft, fault{DelayBefore: "1200ms"})
	quick.fault(read, fault{DelayBefore: "1200ms"})
	slow.fault(draft, fault{DelayBefore: "10m"})
	slow.fault(read, fault{DelayBefore: "10m"})
	u := w.open(a, "alice")

	const each = 5
	var mu sync.Mutex
	var callers sync.WaitGroup
	answers := map[string]error{}
	made := map[string]call{} // by name
	keep := func(name string, c call, err error) {
		mu.Lock()
		defer mu.Unlock()
		answers[name] = err
		if err == nil {
			made[name] = c
		}
	}
	// Writes are asked for first and approved at the end, reads wait where they are made.
	var waiting []call
	for _, server := range []string{"slow", "quick"} {
		for i := range each {
			c, err := u.propose(proposal{server: server, tool: draft, args: draftArgs(fmt.Sprint(server, i)), wait: time.Millisecond})
			w.must(err)
			waiting = append(waiting, c)
			name := fmt.Sprintf("%s write %d", server, i)
			made[name] = c
		}
	}
	for _, c := range waiting {
		w.must(w.decide(a, c, "APPROVE"))
	}
	for _, server := range []string{"slow", "quick"} {
		for i := range each {
			name := fmt.Sprintf("%s read %d", server, i)
			callers.Go(func() {
				c, err := u.propose(proposal{server: server, tool: read, args: readArgs(), wait: time.Minute})
				keep(name, c, err)
			})
		}
	}
	for i, c := range waiting {
		if i < each {
			callers.Go(func() {
				got, err := u.next(c.CallID, 1000, time.Minute)
				keep(fmt.Sprintf("slow write %d", i), got, err)
			})
		}
	}
	slow.awaitArrivals(draft, each)
	slow.awaitArrivals(read, each)
	quick.awaitArrivals(read, each)
	// The short ones that wait are under way now; whatever of the writes was quicker is done.
	a.signal(syscall.SIGTERM)
	eventually(t, "readiness to drop", func() bool { return !ready(a) })
	callers.Wait()
	for name, err := range answers {
		if err != nil {
			t.Errorf("%s: the caller got no answer: %v", name, err)
		}
	}
	if code := a.awaitExit(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if n := w.number(`SELECT count(*) FROM calls WHERE state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED', 'UNCERTAIN')`); n != 0 {
		t.Errorf("%d calls have no end", n)
	}
	if n := w.number(`SELECT count(*) FROM replicas WHERE state = 'STOPPED'`); n != 1 {
		t.Error("the server did not say that it has stopped")
	}
	if n := w.number(`SELECT count(*) FROM audit_entries WHERE sequence IS NULL`); n != 0 {
		t.Errorf("%d audit entries are not sealed", n)
	}
	b := w.start()
	u = u.at(b)
	for name, c := range made {
		got, err := u.call(c.CallID)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		want := map[string]bool{"SUCCEEDED": true}
		switch name[:len(name)-2] {
		case "slow write":
			want = map[string]bool{"UNCERTAIN": true}
		case "slow read":
			want = map[string]bool{"FAILED": true, "CANCELLED": true}
		}
		if !want[got.State] {
			t.Errorf("%s ended as %v", name, got)
		}
	}
	if n := quick.executions(draft); n != each {
		t.Errorf("%d quick writes ran", n)
	}
	w.consistent(b)
}

// ready asks on a connection of its own, as a probe does.
func ready(p *process) bool {
	probe := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := probe.Get(p.url + "/readyz")
	if err != nil {
		return false
	}
	resp.Body.Close() //nolint:errcheck // only the status counts
	return resp.StatusCode == http.StatusOK
}

// TestSecondSignalEndsAtOnce sends a second signal during a long grace period.
func TestSecondSignalEndsAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cal := startCalendar(t)
	a := w.start("BULKHEAD_GRACE_PERIOD=1h")
	w.register(a, "calendar", cal.mcp, policy{})
	cal.fault(draft, fault{DelayBefore: "10m"})
	u := w.open(a, "alice")
	c, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs("Long"), wait: time.Millisecond})
	w.must(err)
	w.must(w.decide(a, c, "APPROVE"))
	cal.awaitArrivals(draft, 1)
	a.signal(syscall.SIGTERM)
	eventually(t, "readiness to drop", func() bool { return !ready(a) })
	if w.number(`SELECT count(*) FROM calls WHERE state = 'DISPATCHING'`) != 1 {
		t.Error("the call did not get its grace")
	}
	a.signal(syscall.SIGTERM)
	if code := a.awaitExit(); code == 0 {
		t.Error("a stop that cut a call short says that all was well")
	}
	w.presumeDead(a)
	b := w.start()
	w.awaitState(u.at(b), c.CallID, "UNCERTAIN")
	if n := cal.arrivals(draft); n != 1 {
		t.Errorf("%d arrivals", n)
	}
	w.consistent(b)
}
