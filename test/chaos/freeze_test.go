package chaos

import (
	"fmt"
	"syscall"
	"testing"
	"time"
)

// TestFreezeBeforeSend stops a server between the commit of a dispatch and the
// first byte to the calendar, until another server has taken the call over. The
// place to stop is the negotiation for a user who has no connection yet: it comes
// after the commit, and the proxy holds its answer back.
func TestFreezeBeforeSend(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		policy policy
		tool   string
		// wholeTime lets the death time pass as it does in life.
		wholeTime bool
		want      string
		arrivals  int // of what the successor sent by contract
	}{
		{name: "write, past sendBy", policy: policy{}, tool: draft, want: "UNCERTAIN"},
		{name: "write, whole death time", policy: policy{}, tool: draft, wholeTime: true, want: "UNCERTAIN"},
		{name: "write, absence is final", policy: policy{query: "final", settle: "1s", ceiling: "8s"}, tool: draft, want: "FAILED"},
		{name: "recorded read, retried by its successor", policy: policy{record: "before_send", readRetry: 1}, tool: read, want: "SUCCEEDED", arrivals: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			cal := startCalendar(t)
			px := newProxy(t, cal)
			a := w.start()
			w.register(a, "calendar", px.url, tt.policy)
			b := w.start()
			bob, c := w.dispatchHeld(a, px, tt.tool)
			arrived := cal.arrivals(tt.tool)
			a.signal(syscall.SIGSTOP)
			px.letThrough() // for the successor; the answer to the frozen one is still held
			if !tt.wholeTime {
				w.presumeDead(a)
			}
			epoch := w.number(`SELECT replica_epoch FROM attempts WHERE call_id = $1 AND attempt = 1`, c.CallID)
			w.awaitState(bob.at(b), c.CallID, "UNCERTAIN", "SUCCEEDED", "FAILED")
			eventually(t, "sendBy to pass", func() bool {
				return w.number(`SELECT count(*) FROM attempts WHERE call_id = $1 AND send_by < clock_timestamp()`, c.CallID) >= 1
			})
			px.release()
			a.signal(syscall.SIGCONT)
			eventually(t, "the frozen server to take a new epoch", func() bool {
				return w.number(`SELECT count(*) FROM replicas WHERE state = 'ALIVE' AND name LIKE '%/' || $1 AND epoch <> $2`, fmt.Sprint(a.pid), epoch) == 1
			})
			eventually(t, "the late outcome", func() bool {
				return w.number(`SELECT count(*) FROM attempts WHERE call_id = $1 AND replica_epoch = $2 AND evidence_time IS NOT NULL`, c.CallID, epoch) == 1
			})
			w.none("a late outcome that says more than that nothing was sent", `SELECT phase, outcome FROM attempts
				WHERE call_id = $1 AND replica_epoch = $2 AND phase <> 'NOT_SENT'`, c.CallID, epoch)
			got := w.awaitState(bob.at(b), c.CallID, tt.want)
			if n := cal.arrivals(tt.tool) - arrived; n != tt.arrivals {
				t.Errorf("%d arrivals since the freeze, want %d: %v", n, tt.arrivals, got)
			}
			w.takenOnce(c.CallID)
			// The thawed server works again, under its new epoch.
			if c, err := bob.propose(proposal{server: "calendar", tool: read, args: readArgs(), wait: time.Minute}); err != nil || c.State != "SUCCEEDED" {
				t.Errorf("after the thaw: %v %v", c, err)
			}
			w.settled()
			w.consistent(b)
		})
	}
}

// watching makes the user's connection and waits until it hears of changes, and
// until what its opening changed is known.
func (w *world) watching(u user) {
	w.t.Helper()
	ask := proposal{server: "calendar", tool: find, args: obj{"requestId": "none"}, wait: time.Minute}
	_, err := u.propose(ask)
	w.must(err)
	eventually(w.t, "the connection to watch", func() bool {
		var list struct{ Connections []struct{ Watching bool } }
		return u.get("/v1/sessions/"+u.session+"/connections", &list) == nil && len(list.Connections) > 0 && list.Connections[0].Watching
	})
	pause(w.t, 300*time.Millisecond) // it is told within a moment; who is early tries again
	_, err = u.propose(ask)
	w.must(err)
}

// dispatchHeld makes a call of a user without a connection, whose negotiation is
// held back after the commit of the dispatch. A catalog that goes stale just then
// would be listed first, over the same connection: then the next user tries.
func (w *world) dispatchHeld(a *process, px *proxy, tool string) (user, call) {
	w.t.Helper()
	alice := w.open(a, "alice")
	args := draftArgs("Frozen")
	if tool == read {
		args = readArgs()
	}
	w.watching(alice)
	for i := range 10 {
		// The catalog is the same for all users; alice brings it up to date.
		_, err := alice.propose(proposal{server: "calendar", tool: find, args: obj{"requestId": "none"}, wait: time.Minute})
		w.must(err)
		u := w.open(a, fmt.Sprintf("bob%d", i))
		p := proposal{server: "calendar", tool: tool, args: args, wait: time.Millisecond, requestID: "r1"}
		px.holdBack("server/discover")
		var c call
		if c, err = u.propose(p); err == nil && c.State == "CONSENT_REQUIRED" {
			err = w.decide(a, c, "APPROVE")
		}
		w.must(err)
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if px.holding() && w.number(`SELECT count(*) FROM calls WHERE call_id = $1 AND state = 'DISPATCHING' AND attempt = 1`, c.CallID) == 1 {
				return u, c
			}
		}
		w.t.Logf("%s could not be caught between dispatch and send; the next one tries", u.user)
		px.release()
		w.settled()
	}
	w.t.Fatal("no call could be caught between dispatch and send")
	return user{}, call{}
}

// takenOnce checks that a call was taken over once: it ended once.
func (w *world) takenOnce(id string) {
	w.t.Helper()
	if n := w.number(`SELECT count(*) FROM audit_entries WHERE call_id = $1 AND kind IN ('call.finished', 'call.uncertain')`, id); n != 1 {
		w.t.Errorf("the call ended %d times", n)
	}
	if n := w.number(`SELECT count(*) FROM audit_entries WHERE call_id = $1 AND kind = 'call.late_answer'`, id); n != 1 {
		w.t.Errorf("%d late answers are in the audit, want one", n)
	}
}

// TestFreezeWhileServerWorks stops a server while the calendar works on its
// call. Its answer comes after another server has taken the call: it is evidence
// and changes nothing.
func TestFreezeWhileServerWorks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cal := startCalendar(t)
	px := newProxy(t, cal)
	a := w.start()
	w.register(a, "calendar", px.url, policy{})
	b := w.start()
	u := w.open(a, "alice")
	c, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs("Frozen"), wait: time.Millisecond})
	w.must(err)
	px.holdBack("tools/call")
	w.must(w.decide(a, c, "APPROVE"))
	px.awaitHeld()
	a.signal(syscall.SIGSTOP)
	w.presumeDead(a)
	before := w.awaitState(u.at(b), c.CallID, "UNCERTAIN")
	px.release()
	a.signal(syscall.SIGCONT)
	eventually(t, "the evidence", func() bool {
		return w.number(`SELECT count(*) FROM attempts WHERE call_id = $1 AND evidence IS NOT NULL AND phase = 'ANSWERED'`, c.CallID) == 1
	})
	got, err := u.at(b).call(c.CallID)
	w.must(err)
	if got.State != "UNCERTAIN" || got.Revision != before.Revision || got.Receipt != before.Receipt || len(got.Result) > 4 {
		t.Errorf("the late answer changed the call: %v, was %v", got, before)
	}
	if len(got.Attempts) != 1 || !got.Attempts[0].Evidence {
		t.Errorf("the call does not show that there is evidence: %v", got)
	}
	if n := cal.arrivals(draft); n != 1 {
		t.Errorf("%d arrivals", n)
	}
	w.takenOnce(c.CallID)
	w.settled()
	w.consistent(b)
}
