package calls

import (
	"context"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func TestMaxLive_BoundsWhatAReplicaExecutes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := quick()
	cfg.MaxLive = 1
	sc := w.scene(w.node(cfg))
	waiting := sc.propose("write_call")
	g := newGate(t)
	w.sender.answer(g.script(okAnswer))
	one := sc.propose("write", func(r *Proposal) { r.Wait = 0 })
	<-g.arrived
	if _, err := sc.Propose(t.Context(), sc.alice, sc.proposal("read")); !fault.Is(err, fault.Unavailable) {
		t.Fatalf("%v", err)
	}
	sc.decide(waiting, true)
	sc.sweep(t)
	if got := sc.get(waiting.ID); got.State != ConsentRequired {
		t.Fatalf("%s although there is no room", got.State)
	}
	g.release()
	sc.until(one.ID, Succeeded)
	w.eventually(func() bool { return !sc.full() }, func() string { return "no room" })
	sc.sweep(t)
	sc.until(waiting.ID, Succeeded)
}

// One server that hangs must not keep the sweep from the others.
func TestSweep_DoesNotWaitForAServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
		if s.tool == "find" {
			return hang(ctx, s, n)
		}
		return broke(ctx, s, n)
	})
	// Asking about it hangs until the replica stops.
	c := sc.propose("write_query", func(r *Proposal) { r.Wait = 0 })
	sc.sweep(t)
	if got := sc.get(c.ID); got.State != Dispatching {
		t.Fatalf("%s", got.State)
	}
	result := ""
	w.sender.answer(finds(&result))
	lost := sc.propose("write_query")
	w.sender.answer(hang)
	w.exec(`UPDATE calls SET resolve_after = now() WHERE call_id = $1`, lost.ID)
	if err := sc.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.eventually(func() bool { return w.sender.count("find") == 3 }, func() string { return "not asked" })
	// While it hangs the next sweep comes and does not ask twice.
	w.exec(`UPDATE calls SET resolve_after = now() WHERE call_id = $1`, lost.ID)
	waiting := sc.propose("write_call")
	w.sender.answer(nil)
	w.exec(`UPDATE consents SET state = 'APPROVED' WHERE consent_id = $1`, waiting.ConsentID)
	if err := sc.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	sc.until(waiting.ID, Succeeded)
	if n := w.sender.count("find"); n != 3 {
		t.Fatalf("asked %d times", n)
	}
}

// The caller goes away in the middle of the admitting commit.
func TestPropose_ACommitIsNotCutByTheCaller(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	w.exec(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.2); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON calls DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()`)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		w.eventually(func() bool { return w.count(`SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'`) > 0 },
			func() string { return "no commit" })
		cancel()
	}()
	c, err := sc.Propose(ctx, sc.alice, sc.proposal("write"))
	if err != nil {
		t.Fatal(detail(err))
	}
	sc.until(c.ID, Succeeded)
	if ctx.Err() == nil {
		t.Fatal("the caller never went away")
	}
}

func TestCommitted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	g := newGate(t)
	w.sender.answer(g.script(okAnswer))
	c := sc.propose("write", func(r *Proposal) { r.Wait = 0 })
	<-g.arrived
	unclear := fault.New(fault.Unavailable, "DATABASE_UNAVAILABLE", "gone")
	other := *c
	other.Attempt++
	missing := *c
	missing.ID = sc.session.ID
	for name, x := range map[string]struct {
		c    *Call
		err  error
		want bool
	}{
		"committed":       {c, unclear, true},
		"clear refusal":   {c, errLost, false},
		"another attempt": {&other, unclear, false},
		"rolled back":     {&missing, unclear, false},
	} {
		if got := sc.committed(t.Context(), x.c, x.err); got != x.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A list that the server has since refused to this user stops reads too.
func TestHiddenList_StopsEvenAnApprovedRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	c := sc.propose("read_call")
	w.exec(`UPDATE catalog_current SET stale_reason = 'down', invalidated = generation + 1`)
	stale := sc.propose("read_call")
	sc.decide(stale, true)
	sc.until(stale.ID, Succeeded) // a read goes on with a list that may be old
	w.exec(`UPDATE catalog_current SET hidden = true, failures = 1, retry_time = clock_timestamp() + interval '1 hour'`)
	sc.decide(c, true)
	if got := sc.until(c.ID, Denied, Succeeded); got.State != Denied || got.Reason != ReasonVoid || w.sender.count("read_call") != 1 {
		t.Fatalf("%s %s, %d sends", got.State, got.Reason, w.sender.count("read_call"))
	}
}
