package calls

import (
	"context"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

func TestWait_EndingEarlyRecordsAPlainReadAndItsEndUpdatesIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, two := w.node(quick()), w.node(quick())
	sc := w.scene(one)
	g := newGate(t)
	w.sender.answer(g.script(okAnswer))
	c := sc.propose("read", func(r *Proposal) { r.Wait = 0; r.RequestID = "x" })
	if c.State != Dispatching || !c.Recorded {
		t.Fatalf("%+v", c)
	}
	<-g.arrived
	// Now somebody may ask for it at another replica, or propose it again at this one.
	if got := sc.on(two).get(c.ID); got.State != Dispatching || got.Revision != c.Revision || len(got.Attempts) != 1 {
		t.Fatalf("%+v", got)
	}
	if again := sc.propose("read", func(r *Proposal) { r.Wait = 0; r.RequestID = "x" }); again.ID != c.ID || again.State != Dispatching {
		t.Fatalf("%+v", again)
	}
	done := make(chan *Call)
	go func() {
		c, err := two.Get(t.Context(), sc.alice, c.ID, 20*time.Second, c.Revision)
		if err != nil {
			t.Error(err)
		}
		done <- c
	}()
	g.release()
	if got := <-done; got.State != Succeeded || got.Revision <= c.Revision || got.Attempts[0].Phase != Answered {
		t.Fatalf("%+v", got)
	}
	if n := w.count(`SELECT calls FROM session_usage`); n != 1 || w.sender.count("read") != 1 {
		t.Fatalf("%d counted, %d sends", n, w.sender.count("read"))
	}
	w.verify(sc.alice.Tenant)
}

// Waits that end while the read finishes must neither lose nor double anything.
func TestWait_EndingAsTheReadEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for i := range 60 {
		pause := time.Duration(i%12) * 250 * time.Microsecond
		w.sender.answer(func(context.Context, sent, int) (sessions.Response, error) {
			time.Sleep(pause)
			return answered(okResult)
		})
		c := sc.propose("read", func(r *Proposal) { r.Wait = 2 * time.Millisecond })
		if !c.Recorded {
			t.Fatalf("%+v", c)
		}
		sc.until(c.ID, Succeeded)
	}
	if a, b, n := w.count(`SELECT count(*) FROM calls WHERE state = 'SUCCEEDED'`), w.count(`SELECT calls FROM session_usage`),
		w.count(`SELECT count(*) FROM audit_entries WHERE kind = 'call.finished'`); a != 60 || b != 60 || n != 60 {
		t.Fatalf("%d calls, %d counted, %d entries", a, b, n)
	}
}

func TestWait_TheCallersGoingAwayDoesNotCancel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for _, tool := range []string{"read", "write"} {
		g := newGate(t)
		w.sender.answer(g.script(okAnswer))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan *Call)
		go func() {
			c, err := sc.Propose(ctx, sc.alice, sc.proposal(tool))
			if err != nil {
				t.Error(detail(err))
			}
			done <- c
		}()
		<-g.arrived
		cancel()
		c := <-done
		if c.State != Dispatching || !c.Recorded {
			t.Fatalf("%s: %+v", tool, c)
		}
		g.release()
		sc.until(c.ID, Succeeded)
	}
}

func TestWait_SemanticsOfGet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := quick()
	cfg.Poll = time.Hour // only signals wake
	sc := w.scene(w.node(cfg))
	c := sc.propose("write_call")
	// A revision above afterRevision is there already.
	if got, err := sc.Get(t.Context(), sc.alice, c.ID, time.Hour, c.Revision-1); err != nil || got.Revision != c.Revision {
		t.Fatalf("%+v %v", got, err)
	}
	// Without a change the time runs out and the call comes as it is.
	if got, err := sc.Get(t.Context(), sc.alice, c.ID, 20*time.Millisecond, c.Revision); err != nil || got.Revision != c.Revision {
		t.Fatalf("%+v %v", got, err)
	}
	// Every change of revision ends a wait.
	g := newGate(t)
	w.sender.answer(g.script(okAnswer))
	for _, step := range []struct {
		do   func()
		want State
	}{
		{func() { sc.decide(c, true); <-g.arrived }, Dispatching},
		{func() { g.release() }, Succeeded},
	} {
		got := make(chan *Call)
		after := c.Revision
		go func() {
			c, err := sc.Get(t.Context(), sc.alice, c.ID, time.Minute, after)
			if err != nil {
				t.Error(err)
			}
			got <- c
		}()
		step.do()
		if c = <-got; c.State != step.want || c.Revision != after+1 {
			t.Fatalf("%s at %d after %d, want %s", c.State, c.Revision, after, step.want)
		}
	}
	sc.hub.mu.Lock()
	defer sc.hub.mu.Unlock()
	if len(sc.hub.waiting) != 0 {
		t.Errorf("%d entries for waiters that are gone", len(sc.hub.waiting))
	}
}

func TestTwoReplicas_AConsentDecidedAtOneCompletesACallWaitingAtTheOther(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		poll    time.Duration
		signals bool
	}{{"by signal", time.Hour, true}, {"without signals", 20 * time.Millisecond, false}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			cfg := quick()
			cfg.Poll = c.poll
			a, b := w.node(cfg), w.node(cfg)
			if c.signals {
				b.signals.join(a.Service)
			}
			sc := w.scene(a)
			call := sc.propose("write_call")
			got := make(chan *Call)
			go func() {
				rev := call.Revision
				for {
					x, err := a.Get(t.Context(), sc.alice, call.ID, time.Minute, rev)
					if err != nil {
						t.Error(err)
						break
					}
					if rev = x.Revision; x.State == Succeeded {
						got <- x
						return
					}
				}
				close(got)
			}()
			if _, err := b.consents.Decide(t.Context(), sc.approver, call.ConsentID, consent.Decision{Approve: true}); err != nil {
				t.Fatal(err)
			}
			if x := <-got; x == nil || x.Attempts[0].Epoch != epochOf(b) {
				t.Fatalf("%+v", x)
			}
		})
	}
}

func epochOf(n *node) int64 {
	e, _ := n.replica.mayDispatch()
	return e
}
