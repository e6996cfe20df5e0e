package calls

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// kill declares a replica dead, as its silence would.
func (w *world) kill(n *node) {
	w.exec(`UPDATE replicas SET state = 'DEAD' WHERE epoch = $1`, epochOf(n))
}

// A replica dies in the middle of a call; another one says what is known, or asks,
// or tries again as the contract allows. The answer that the dead one gets after
// all is evidence and changes nothing.
func TestReaper_WhatBecomesOfTheCallsOfADeadReplica(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		tool     string
		query    string // the status query's answer
		cancel   bool
		state    State
		sends    int
		attempts int
	}{
		{tool: "read", state: Failed, sends: 1, attempts: 1},
		{tool: "read_retry", state: Succeeded, sends: 2, attempts: 2},
		{tool: "read_retry", cancel: true, state: Cancelled, sends: 1, attempts: 1},
		{tool: "write", state: Uncertain, sends: 1, attempts: 1},
		{tool: "write", cancel: true, state: Uncertain, sends: 1, attempts: 1},
		{tool: "write_call", state: Uncertain, sends: 1, attempts: 1},
		{tool: "write_key", state: Succeeded, sends: 2, attempts: 2},
		{tool: "write_query", query: `{"found":true,"id":"e"}`, state: Succeeded, sends: 1, attempts: 1},
		{tool: "write_query", query: `{"found":false}`, state: Uncertain, sends: 1, attempts: 1},
		// Absence would be final, but not before the dead replica's ceiling.
		{tool: "write_final", query: `{"found":false}`, state: Uncertain, sends: 1, attempts: 1},
	} {
		name := c.tool + " " + c.query
		if c.cancel {
			name += " cancelled"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a, b := w.node(quick()), w.node(quick())
			sc := w.scene(a)
			g := newGate(t)
			first := g.script(okAnswer)
			w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
				switch {
				case s.tool == "find":
					return finds(&c.query)(ctx, s, n)
				case n == 1:
					return first(ctx, s, n)
				}
				return answered(`{"content":[],"second":true}`)
			})
			call := sc.propose(c.tool, func(r *Proposal) { r.Wait = 0 })
			if call.State == ConsentRequired {
				sc.decide(call, true)
			}
			<-g.arrived
			if c.cancel {
				w.exec(`UPDATE calls SET cancel_requested = true WHERE call_id = $1`, call.ID)
			}
			b.sweep(t)
			if got := sc.on(b).get(call.ID); got.State != Dispatching || got.Epoch != epochOf(a) {
				t.Fatalf("taken from a living replica: %+v", got)
			}
			w.kill(a)
			b.sweep(t)
			b.sweep(t) // takes what the first left uncertain to the status query
			got := sc.on(b).until(call.ID, c.state)
			if n := w.sender.count(c.tool); n != c.sends || len(got.Attempts) != c.attempts || got.Attempts[0].Outcome != "FAILED" {
				t.Fatalf("%d sends, %+v", n, got.Attempts)
			}
			if c.state == Uncertain || c.state == Failed {
				if got.Error == nil || got.Error.Code != "REPLICA_LOST" {
					t.Fatalf("%+v", got.Error)
				}
			}
			// The dead one was only paused: its answer comes now.
			g.release()
			w.eventually(func() bool { return w.count(`SELECT count(*) FROM attempts WHERE evidence IS NOT NULL`) == 1 },
				func() string { return "the late answer was not kept" })
			late := sc.on(b).get(call.ID)
			if late.State != got.State || late.Revision != got.Revision || string(late.Result) != string(got.Result) || late.Receipt != got.Receipt {
				t.Fatalf("the late answer changed the call: %+v", late)
			}
			if !late.Attempts[0].Evidence || !slices.Contains(w.kinds(call.ID), "call.late_answer") {
				t.Fatalf("%+v %v", late.Attempts, w.kinds(call.ID))
			}
			w.verify(sc.alice.Tenant)
		})
	}
}

func TestReaper_AbsenceCountsPastTheCeilingOfTheDead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.node(quick()), w.node(quick())
	sc := w.scene(a)
	result := `{"found":false}`
	w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
		if s.tool == "find" {
			return finds(&result)(ctx, s, n)
		}
		return hang(ctx, s, n)
	})
	c := sc.propose("write_final", func(r *Proposal) { r.Wait = 0 })
	w.eventually(func() bool { return w.sender.count("write_final") == 1 }, func() string { return "not sent" })
	w.kill(a)
	b.sweep(t)
	b.sweep(t)
	if got := sc.on(b).get(c.ID); got.State != Uncertain {
		t.Fatalf("%s", got.State)
	}
	w.exec(`UPDATE calls SET ceiling_time = now() - interval '1 second', resolve_after = now()`)
	w.exec(`UPDATE attempts SET end_time = now() - interval '1 second'`)
	b.sweep(t)
	if got := sc.on(b).get(c.ID); got.State != Failed || got.Error.Code != "NOT_EXECUTED" {
		t.Fatalf("%s %+v", got.State, got.Error)
	}
}

// A call under the replica's own epoch that is not in its memory was lost to it:
// its outcome could not be written, or its dispatch failed on the way.
func TestReaper_TakesWhatItsOwnReplicaLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	c := sc.propose("write")
	w.exec(`UPDATE calls SET state = 'DISPATCHING' WHERE call_id = $1`, c.ID)
	w.exec(`UPDATE attempts SET end_time = NULL, phase = ''`)
	sc.sweep(t)
	if got := sc.get(c.ID); got.State != Dispatching {
		t.Fatalf("%s: what has only just been dispatched was taken", got.State)
	}
	w.exec(`UPDATE calls SET update_time = now() - interval '1 minute'`)
	sc.sweep(t)
	if got := sc.get(c.ID); got.State != Uncertain {
		t.Fatalf("%s", got.State)
	}
	// What it does execute, for however long, is left alone.
	g := newGate(t)
	w.sender.answer(g.script(okAnswer))
	c = sc.propose("write", func(r *Proposal) { r.Wait = 0 })
	<-g.arrived
	w.exec(`UPDATE calls SET update_time = now() - interval '1 minute' WHERE call_id = $1`, c.ID)
	sc.sweep(t)
	w.kill(sc.node)
	sc.sweep(t)
	if got := sc.get(c.ID); got.State != Dispatching {
		t.Fatalf("%s", got.State)
	}
	g.release()
	sc.until(c.ID, Succeeded)
}

// Two replicas want the same call of a dead third; one gets it.
func TestReaper_OneOfManyTakesIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b, c := w.node(quick()), w.node(quick()), w.node(quick())
	sc := w.scene(a)
	g := newGate(t)
	w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
		if n == 1 {
			return g.script(okAnswer)(ctx, s, n)
		}
		time.Sleep(5 * time.Millisecond)
		return answered(okResult)
	})
	var ids []string
	for i := range 8 {
		x := sc.propose("read_retry", func(r *Proposal) { r.Wait = 0; r.Arguments = []byte{'{', '"', 'a' + byte(i), '"', ':', '1', '}'} })
		ids = append(ids, x.ID)
		<-g.arrived
	}
	w.kill(a)
	done := make(chan struct{}, 2)
	for _, n := range []*node{b, c} {
		go func() {
			for range 3 {
				n.sweep(t)
			}
			done <- struct{}{}
		}()
	}
	<-done
	<-done
	for _, id := range ids {
		if got := sc.on(b).until(id, Succeeded); len(got.Attempts) != 2 {
			t.Errorf("%d attempts", len(got.Attempts))
		}
	}
	if n := w.sender.count("read_retry"); n != 16 {
		t.Errorf("%d sends for 8 calls and one retry of each", n)
	}
	g.release()
}

// A living replica that took a call first keeps it, although another one saw it
// in the hands of the dead.
func TestFence_OnlyAgainstTheDead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.node(quick()), w.node(quick())
	sc := w.scene(a)
	g := newGate(t)
	w.sender.answer(g.script(okAnswer))
	c := sc.propose("read_retry", func(r *Proposal) { r.Wait = 0 })
	<-g.arrived
	if err := b.takeOver(t.Context(), c.Tenant, c.ID); !errors.Is(err, errLost) {
		t.Fatalf("%v", err)
	}
	if got := sc.get(c.ID); got.Epoch != epochOf(a) {
		t.Fatalf("%+v", got)
	}
	g.release()
	sc.until(c.ID, Succeeded)
}

func TestApproved_TheNextReplicaDispatchesIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.node(quick()), w.node(quick())
	sc := w.scene(a)
	c := sc.propose("write_call")
	a.Drain() // the deciding replica stops before it can dispatch
	sc.decide(c, true)
	if _, err := sc.Propose(t.Context(), sc.alice, sc.proposal("read")); !fault.Is(err, fault.Unavailable) {
		t.Fatalf("draining: %v", err)
	}
	if w.sender.count("write_call") != 0 {
		t.Fatal("a draining replica dispatched")
	}
	b.sweep(t)
	if got := sc.on(b).until(c.ID, Succeeded); got.Attempts[0].Epoch != epochOf(b) {
		t.Fatalf("%+v", got)
	}
}

// silence makes a replica one whose last heartbeat that arrived is long ago.
func (n *node) silence() {
	n.replica.mu.Lock()
	defer n.replica.mu.Unlock()
	n.replica.beat = time.Now().Add(-time.Hour)
}

// A paused replica wakes up after its window, or after its death, and sends
// nothing; a replica that cannot reach its database sends nothing either.
func TestPaused_SendsNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		while func(w *world, a, b *node)
		cfg   func(*Config)
		want  error
	}{
		{"past the window", func(*world, *node, *node) { time.Sleep(60 * time.Millisecond) },
			func(c *Config) { c.SendWindow = 50 * time.Millisecond }, errTooLate},
		{"declared dead, under a new epoch", func(w *world, a, b *node) {
			w.kill(a)
			b.sweep(w.t)
			if err := a.replica.heartbeat(w.t.Context()); err != nil {
				w.t.Error(err)
			}
		}, func(*Config) {}, errTooLate},
		{"isolated", func(_ *world, a, _ *node) { a.silence() }, func(*Config) {}, errIsolated},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			cfg := quick()
			c.cfg(&cfg)
			a, b := w.node(cfg), w.node(quick())
			sc := w.scene(a)
			at, on := make(chan struct{}), make(chan struct{})
			w.sender.pause(func(sent) { at <- struct{}{}; <-on })
			// The scene may have taken long: it is alive when the call begins.
			if err := a.replica.heartbeat(t.Context()); err != nil {
				t.Fatal(err)
			}
			call := sc.propose("write", func(r *Proposal) { r.Wait = 0 })
			<-at
			c.while(w, a, b)
			w.sender.pause(nil)
			close(on)
			w.eventually(func() bool {
				w.sender.mu.Lock()
				defer w.sender.mu.Unlock()
				return len(w.sender.refuse) > 0
			}, func() string { return "nobody was refused" })
			w.sender.mu.Lock()
			refused := w.sender.refuse[0]
			w.sender.mu.Unlock()
			if !errors.Is(refused, c.want) {
				t.Fatalf("refused with %v", refused)
			}
			if c.want == errIsolated && w.sender.count("write") != 0 {
				t.Fatal("an isolated replica sent")
			}
			sc.on(b).until(call.ID, Failed, Succeeded, Uncertain)
		})
	}
	t.Run("an isolated replica admits nothing", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		sc := w.scene(w.node(quick()))
		sc.silence()
		for _, tool := range []string{"read", "write"} {
			if _, err := sc.Propose(t.Context(), sc.alice, sc.proposal(tool)); !errors.Is(err, errIsolated) {
				t.Errorf("%s: %v", tool, err)
			}
		}
		if err := sc.replica.heartbeat(t.Context()); err != nil {
			t.Fatal(err)
		}
		if c := sc.propose("write"); c.State != Succeeded {
			t.Errorf("%s", c.State)
		}
	})
}

func TestReplica_HeartbeatDeathAndNewEpoch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.node(quick())
	first := epochOf(a)
	w.exec(`UPDATE replicas SET heartbeat = now() - interval '2 hours'`)
	if n, err := a.replica.bury(t.Context()); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	if err := a.replica.heartbeat(t.Context()); err != nil || epochOf(a) <= first {
		t.Fatal(epochOf(a), err)
	}
	sole := quick()
	sole.Sole = true
	b := w.node(sole)
	if n := w.count(`SELECT count(*) FROM replicas WHERE state = 'ALIVE'`); n != 1 {
		t.Fatalf("%d alive beside a sole replica", n)
	}
	if err := b.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.replica.heartbeat(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := w.count(`SELECT count(*) FROM replicas WHERE state = 'ALIVE'`); n != 0 {
		t.Fatalf("a stopped replica came back: %d alive", n)
	}
	bad := quick()
	bad.Isolation = bad.Death
	if _, err := NewService(t.Context(), b.deps, bad); err == nil {
		t.Fatal("a replica that may be taken for dead while it dispatches")
	}
	if _, err := NewService(t.Context(), Deps{}, quick()); err == nil {
		t.Fatal("no parts")
	}
}

func TestRun_KeepsAliveAndRecovers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := quick()
	cfg.Heartbeat = 10 * time.Millisecond
	a, b := w.node(quick()), w.node(cfg)
	sc := w.scene(a)
	g := newGate(t)
	w.sender.answer(g.script(okAnswer))
	c := sc.propose("write", func(r *Proposal) { r.Wait = 0 })
	<-g.arrived
	w.kill(a)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- b.Run(ctx) }()
	sc.on(b).until(c.ID, Uncertain)
	w.eventually(func() bool {
		return w.count(`SELECT count(*) FROM replicas WHERE epoch = $1 AND heartbeat > start_time`, epochOf(b)) == 1
	}, func() string { return "no heartbeat" })
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	g.release()
}

func TestStop(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	sc := w.scene(n)
	g := newGate(t)
	w.sender.answer(func(ctx ctx, s sent, k int) (response, error) {
		if s.args == `{"finishes":true}` {
			return g.script(okAnswer)(ctx, s, k)
		}
		return hang(ctx, s, k)
	})
	quickly := func(r *Proposal) { r.Wait = 0 }
	read, write, query := sc.propose("read", quickly), sc.propose("write", quickly), sc.propose("write_query", quickly)
	finishing := sc.propose("write", func(r *Proposal) { r.Wait = 0; r.Arguments = []byte(`{"finishes":true}`) })
	<-g.arrived
	waiting := make(chan *Call, 1)
	go func() {
		c, err := n.Get(t.Context(), sc.alice, write.ID, time.Minute, write.Revision)
		if err != nil {
			t.Error(err)
		}
		waiting <- c
	}()
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error)
	go func() { stopped <- n.Stop(ctx) }()
	if c := <-waiting; c.State != Dispatching { // draining answers waits early
		t.Errorf("%s", c.State)
	}
	g.release() // within the grace
	other := sc.on(w.node(quick()))
	other.until(finishing.ID, Succeeded)
	cancel() // the grace is over
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]State{read.ID: Failed, write.ID: Uncertain, query.ID: Uncertain, finishing.ID: Succeeded} {
		if got := other.get(id); got.State != want {
			t.Errorf("%s is %s, want %s", got.Name, got.State, want)
		}
	}
	if _, err := n.Propose(t.Context(), sc.alice, sc.proposal("read")); !fault.Is(err, fault.Unavailable) {
		t.Errorf("after the stop: %v", err)
	}
	if n := w.count(`SELECT count(*) FROM calls WHERE state = 'DISPATCHING'`); n != 0 {
		t.Errorf("%d calls lost", n)
	}
	// The query that could not be asked any more is asked by the next.
	w.sender.answer(func(context.Context, sent, int) (response, error) {
		return answered(`{"structuredContent":{"found":true,"id":"x"}}`)
	})
	w.exec(`UPDATE calls SET resolve_after = now() WHERE resolve_after IS NOT NULL`)
	other.sweep(t)
	other.until(query.ID, Succeeded)
	w.verify(sc.alice.Tenant)
}

// The database goes away while a call is out; the outcome is written when it is
// back.
func TestPersist_AnOutcomeSurvivesAnOutage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for _, tool := range []string{"read", "write"} {
		w.sender.answer(func(ctx context.Context, s sent, n int) (response, error) {
			w.exec(`ALTER TABLE calls RENAME TO calls_away`)
			go func() {
				time.Sleep(300 * time.Millisecond)
				w.exec(`ALTER TABLE calls_away RENAME TO calls`)
			}()
			return answered(okResult)
		})
		r := sc.proposal(tool)
		r.Wait = 30 * time.Second
		c, err := sc.Propose(t.Context(), sc.alice, r)
		if err != nil || c.State != Succeeded || !c.Recorded {
			t.Fatalf("%s: %+v %v", tool, c, err)
		}
		sc.until(c.ID, Succeeded)
	}
}
