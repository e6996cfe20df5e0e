package chaos

import (
	"strings"
	"testing"
	"time"
)

// TestKillBetweenDispatchAndOutcome kills the server while the calendar works on
// a call, and looks at what the next server makes of it.
func TestKillBetweenDispatchAndOutcome(t *testing.T) {
	t.Parallel()
	const hang = "10m"
	for _, tt := range []struct {
		name   string
		policy policy
		tool   string
		fault  fault
		// want is the state in which the call ends, code its error's.
		want, code, effect   string
		arrivals, executions int
	}{
		{name: "write, executed, query finds it", policy: policy{query: "uncertain"}, tool: draft, fault: fault{DelayAfter: hang},
			want: "SUCCEEDED", effect: "ev_1", arrivals: 1, executions: 1},
		{name: "write, not executed, absence proves nothing", policy: policy{query: "uncertain"}, tool: draft, fault: fault{DelayBefore: hang},
			want: "UNCERTAIN", code: "REPLICA_LOST", arrivals: 1},
		{name: "write, not executed, absence is final", policy: policy{query: "final", settle: "1s", ceiling: "4s"}, tool: draft,
			fault: fault{DelayBefore: hang}, want: "FAILED", code: "NOT_EXECUTED", arrivals: 1},
		{name: "write, executed later, query finds it then", policy: policy{query: "uncertain"}, tool: draft,
			fault: fault{DelayBefore: "3s", Detached: true}, want: "SUCCEEDED", effect: "ev_1", arrivals: 1, executions: 1},
		{name: "write, executed, no query", policy: policy{}, tool: draft, fault: fault{DelayAfter: hang},
			want: "UNCERTAIN", code: "REPLICA_LOST", arrivals: 1, executions: 1},
		{name: "write by key, executed, retried by contract", policy: policy{key: true, writeRetry: 1}, tool: draft,
			fault: fault{DelayAfter: hang, Times: 1}, want: "SUCCEEDED", arrivals: 2, executions: 1},
		{name: "recorded read, retried by contract", policy: policy{record: "before_send", readRetry: 1}, tool: read,
			fault: fault{DelayBefore: hang, Times: 1}, want: "SUCCEEDED", arrivals: 2, executions: 1},
		{name: "recorded read, no retry", policy: policy{record: "before_send"}, tool: read, fault: fault{DelayBefore: hang, Times: 1},
			want: "FAILED", code: "REPLICA_LOST", arrivals: 1},
		{name: "read that outlived its wait, retried by contract", policy: policy{readRetry: 1}, tool: read,
			fault: fault{DelayBefore: hang, Times: 1}, want: "SUCCEEDED", arrivals: 2, executions: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			cal := startCalendar(t)
			a := w.start()
			w.register(a, "calendar", cal.mcp, tt.policy)
			u := w.open(a, "alice")
			cal.fault(tt.tool, tt.fault)
			args := draftArgs("Review")
			if tt.tool == read {
				args = readArgs()
			}
			c, err := u.propose(proposal{server: "calendar", tool: tt.tool, args: args, requestID: "r1", wait: time.Millisecond})
			w.must(err)
			if tt.tool == draft {
				w.must(w.decide(a, c, "APPROVE"))
			}
			cal.awaitArrivals(tt.tool, 1)
			if tt.executions > 0 && tt.fault.DelayAfter != "" {
				eventually(t, "the effect", func() bool { return cal.executions(tt.tool) == 1 })
			}
			if n := w.number(`SELECT count(*) FROM calls WHERE call_id = $1 AND state = 'DISPATCHING'`, c.CallID); n != 1 {
				t.Fatal("a call under way is not recorded")
			}
			a.kill()
			w.presumeDead(a)

			b := w.start()
			u = u.at(b)
			got := w.awaitState(u, c.CallID, tt.want)
			if tt.code != "" && (got.Error == nil || got.Error.Code != tt.code || got.Error.Layer != "HOST") {
				t.Errorf("error %+v, want %s of the host", got.Error, tt.code)
			}
			if got.SideEffectID != tt.effect {
				t.Errorf("side effect %q, want %q", got.SideEffectID, tt.effect)
			}
			if tt.want == "SUCCEEDED" && len(got.Result) == 0 {
				t.Errorf("no result: %v", got)
			}
			if n := cal.arrivals(tt.tool); n != tt.arrivals {
				t.Errorf("%d arrivals, want %d", n, tt.arrivals)
			}
			if n := cal.executions(tt.tool); n != tt.executions {
				t.Errorf("%d executions, want %d", n, tt.executions)
			}
			again, err := u.propose(proposal{server: "calendar", tool: tt.tool, args: args, requestID: "r1", wait: time.Millisecond})
			if err != nil || again.CallID != c.CallID {
				t.Errorf("a repeat of the request made %v (%v), want the first call", again, err)
			}
			w.settled()
			w.consistent(b)
		})
	}
}

// TestKillDuringPlainRead kills the server while it carries out a read that is
// recorded with its outcome: the caller gets no answer, nothing is left of it,
// and the same request makes it anew.
func TestKillDuringPlainRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cal := startCalendar(t)
	a := w.start()
	w.register(a, "calendar", cal.mcp, policy{readRetry: 2})
	u := w.open(a, "alice")
	cal.fault(read, fault{DelayBefore: "10m", Times: 1})
	p := proposal{server: "calendar", tool: read, args: readArgs(), requestID: "r1", wait: time.Minute}
	answered := make(chan error, 1)
	go func() {
		_, err := u.propose(p)
		answered <- err
	}()
	cal.awaitArrivals(read, 1)
	a.kill()
	if err := <-answered; err == nil {
		t.Error("a dead server answered")
	}
	w.presumeDead(a)
	b := w.start()
	c, err := u.at(b).propose(p)
	if err != nil || c.State != "SUCCEEDED" {
		t.Fatalf("the repeat: %v %v", c, err)
	}
	if n := cal.arrivals(read); n != 2 {
		t.Errorf("%d arrivals, want the first and the caller's repeat", n)
	}
	if n := w.number(`SELECT count(*) FROM calls`); n != 1 {
		t.Errorf("%d calls are recorded, want one", n)
	}
	w.settled()
	w.consistent(b)
}

// TestKillDuringGrantedWrite kills the server during a write that a standing
// grant allowed: the use is spent, the grant goes on, the write is uncertain.
func TestKillDuringGrantedWrite(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cal := startCalendar(t)
	a := w.start()
	w.register(a, "calendar", cal.mcp, policy{consent: "session"})
	u := w.open(a, "alice")
	write := func(u user, id string) call {
		t.Helper()
		c, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs(id), requestID: id, wait: time.Millisecond})
		w.must(err)
		return c
	}
	first := write(u, "first")
	w.must(w.decide(a, first, "APPROVE"))
	w.awaitState(u, first.CallID, "SUCCEEDED")

	cal.fault(draft, fault{DelayAfter: "10m", Times: 1})
	second := write(u, "second")
	if second.Consent != nil || second.State != "DISPATCHING" {
		t.Fatalf("the grant does not cover the second call: %v", second)
	}
	cal.awaitArrivals(draft, 2)
	a.kill()
	w.presumeDead(a)
	b := w.start()
	u = u.at(b)
	w.awaitState(u, second.CallID, "UNCERTAIN")
	if c := w.awaitState(u, write(u, "third").CallID, "SUCCEEDED"); c.Consent != nil {
		t.Errorf("the grant did not outlive the server: %v", c)
	}
	if n := cal.arrivals(draft); n != 3 {
		t.Errorf("%d arrivals, want 3", n)
	}
	w.settled()
	w.consistent(b)
}

// TestKillWhileListing kills a server while it lists the definitions of the
// calendar anew. Its successor lists them itself, and a write that waits for it
// goes its way: nobody is told that the catalog is out of date.
func TestKillWhileListing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cal := startCalendar(t)
	px := newProxy(t, cal)
	a := w.start()
	w.register(a, "calendar", px.url, policy{})
	u := w.open(a, "alice")
	w.watching(u)
	c, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs("Waiting"), wait: time.Millisecond})
	w.must(err)
	px.holdBack("tools/list")
	cal.control("PUT", "tools/another", obj{"description": "It changes the list, not the tool."})
	eventually(t, "the change to be known", func() bool {
		return w.number(`SELECT count(*) FROM catalog_current WHERE invalidated > generation`) > 0
	})
	// Somebody looks until it is listed again; a change right after a list waits a moment.
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		for !px.holding() && !strings.HasPrefix(u.tool(draft), "error") {
			time.Sleep(50 * time.Millisecond)
		}
	}()
	px.awaitHeld()
	a.kill()
	<-looked
	px.release()
	w.presumeDead(a)
	b := w.start()
	u = u.at(b)
	w.must(w.decide(b, c, "APPROVE"))
	if got := w.awaitState(u, c.CallID, "SUCCEEDED", "DENIED", "FAILED", "UNCERTAIN"); got.State != "SUCCEEDED" {
		t.Errorf("the write that was approved meanwhile: %v", got)
	}
	w.settled()
	w.consistent(b)
}
