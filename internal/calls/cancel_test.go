package calls

import (
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

func TestCancel_InFlight(t *testing.T) {
	t.Parallel()
	result := `{"found":true}`
	for _, c := range []struct {
		tool  string
		state State
		code  string
	}{
		{"read", Cancelled, "CANCELLED"},
		{"write", Uncertain, "CANCELLED"},
		{"write_query", Succeeded, ""},
	} {
		t.Run(c.tool, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			sc := w.scene(w.node(quick()))
			arrived := make(chan struct{})
			w.sender.answer(inTurn(func(ctx ctx, s sent, n int) (response, error) {
				if s.tool == "find" {
					return finds(&result)(ctx, s, n)
				}
				close(arrived)
				return hang(ctx, s, n)
			}))
			call := sc.propose(c.tool, func(r *Proposal) { r.Wait = 0 })
			<-arrived
			got, err := sc.Cancel(t.Context(), sc.alice, call.ID)
			if err != nil || got.State != c.state {
				t.Fatalf("%+v %v", got, err)
			}
			if c.code != "" && (got.Error.Code != c.code || got.Error.Layer != LayerHost) {
				t.Fatalf("%+v", got.Error)
			}
			// Cancelling what has ended changes nothing.
			again, err := sc.Cancel(t.Context(), sc.alice, call.ID)
			if err != nil || again.State != c.state || again.Revision != got.Revision {
				t.Fatalf("%+v %v", again, err)
			}
			w.verify(sc.alice.Tenant)
		})
	}
}

func TestCancel_BeforeItIsSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	at, on := make(chan struct{}), make(chan struct{})
	w.sender.pause(func(sent) { close(at); <-on })
	c := sc.propose("write", func(r *Proposal) { r.Wait = 0 })
	<-at
	sc.mu.Lock()
	e := sc.live[callKey{c.Tenant, c.ID}]
	sc.mu.Unlock()
	e.cancel()
	close(on)
	if got := sc.until(c.ID, Cancelled, Uncertain, Succeeded, Failed); got.State != Cancelled || len(w.sender.all()) != 0 || got.Error.Code != "CANCELLED" {
		t.Fatalf("%+v", got)
	}
}

// Another replica executes the call: it obeys a signal, or the sweep when the
// signal was lost.
func TestCancel_AtAnotherReplica(t *testing.T) {
	t.Parallel()
	for _, signalled := range []bool{true, false} {
		w := newWorld(t)
		a, b := w.node(quick()), w.node(quick())
		if signalled {
			b.signals.join(a.Service)
		}
		sc := w.scene(a)
		arrived := make(chan struct{})
		w.sender.answer(func(ctx ctx, s sent, n int) (response, error) { close(arrived); return hang(ctx, s, n) })
		c := sc.propose("write", func(r *Proposal) { r.Wait = 0 })
		<-arrived
		done := make(chan *Call)
		go func() {
			got, err := b.Cancel(t.Context(), sc.alice, c.ID)
			if err != nil {
				t.Error(err)
			}
			done <- got
		}()
		if !signalled {
			w.eventually(func() bool {
				a.sweep(t)
				return sc.get(c.ID).State != Dispatching
			}, func() string { return "the sweep did not obey" })
		}
		if got := <-done; got.State != Uncertain {
			t.Fatalf("%+v", got)
		}
		w.sender.answer(nil)
	}
}

// A cancel races with the dispatch: whatever wins, nothing is CANCELLED that was
// sent, and nothing is sent that a cancel had ended.
func TestCancel_RacesWithTheDispatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	seen := map[State]int{}
	for i := range 30 {
		c := sc.propose("write_call")
		before := w.sender.count("write_call")
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := sc.consents.Decide(t.Context(), sc.approver, c.ConsentID, consent.Decision{Approve: true})
			if err != nil && !fault.Is(err, fault.Conflict) {
				t.Error(detail(err))
			}
		})
		wg.Go(func() {
			time.Sleep(time.Duration(i%10) * time.Millisecond)
			if _, err := sc.Cancel(t.Context(), sc.alice, c.ID); err != nil {
				t.Error(detail(err))
			}
		})
		wg.Wait()
		got := sc.until(c.ID, Cancelled, Succeeded, Uncertain)
		seen[got.State]++
		if n := w.sender.count("write_call") - before; (got.State == Cancelled) == (n > 0) || n > 1 {
			t.Fatalf("%s with %d sends", got.State, n)
		}
	}
	t.Log(seen)
	w.verify(sc.alice.Tenant)
}

func TestCancel_BetweenAttempts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.node(quick()), w.node(quick())
	sc := w.scene(a)
	for _, c := range []struct {
		tool string
		want State
	}{{"read_retry", Cancelled}, {"write", Cancelled}, {"write_key", Uncertain}} {
		w.sender.answer(nil)
		script := broke
		if c.tool == "write" {
			script = failAs(sessions.NotSent, "NO_ROUTE", fault.Unavailable)
		}
		var once sync.Once
		var id string
		ids := make(chan string, 1)
		w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
			once.Do(func() { id = <-ids; w.exec(`UPDATE calls SET cancel_requested = true WHERE call_id = $1`, id) })
			return script(ctx, s, n)
		})
		call := sc.propose(c.tool, func(r *Proposal) { r.Wait = 0 })
		if call.State == ConsentRequired {
			sc.decide(call, true)
		}
		ids <- call.ID
		got := sc.on(b).until(call.ID, Cancelled, Uncertain, Failed, Succeeded)
		if got.State != c.want || len(got.Attempts) != 1 {
			t.Errorf("%s: %s after %d attempts, %+v", c.tool, got.State, len(got.Attempts), got.Error)
		}
	}
}
