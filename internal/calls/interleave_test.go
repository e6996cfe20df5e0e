package calls

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The settings of TestInterleavings, for a longer run or for one seen before.
const (
	interleavingsVariable = "BULKHEAD_TEST_INTERLEAVINGS"
	seedVariable          = "BULKHEAD_TEST_SEED"
)

// TestInterleavings lets two replicas propose, decide, revoke, activate, change,
// close, cancel, expire and die in random interleavings, and holds what the
// server saw and what the tables say against what must be true whatever happened
// (design 3.2): what was acknowledged before a dispatch began prevents it; no
// consent and no use of a grant is used twice; nothing that may not be repeated
// is sent twice; no state claims more than is known.
func TestInterleavings(t *testing.T) {
	total := setting(t, interleavingsVariable, 1000)
	if testing.Short() {
		total = min(total, 100)
	}
	seed := uint64(setting(t, seedVariable, int(rand.Uint64()>>1)))
	t.Logf("%s=%d %s=%d", seedVariable, seed, interleavingsVariable, total)
	w := newWorld(t)
	w.logTransitions()
	a, b := w.node(quick()), w.node(quick())
	a.signals.join(b.Service)
	b.signals.join(a.Service)
	x := &interleaver{w: w, t: t, nodes: []*node{a, b}, left: total, truth: newTruth(seed)}
	w.sender.answer(x.truth.answer)
	w.sender.pause(x.truth.pause)

	ctx, stop := context.WithCancel(t.Context())
	var loops, workers sync.WaitGroup
	for _, n := range x.nodes {
		loops.Go(func() { x.recover(ctx, n) })
	}
	for i := range 4 {
		sc := w.scene(x.nodes[i%2], "ceiling: 1m", "ceiling: 5m")
		r := &runner{interleaver: x, sc: sc, rng: rand.New(rand.NewPCG(seed, uint64(i)))}
		r.other = r.store2("timeout: 20s", "timeout: 21s")
		workers.Go(r.run)
	}
	workers.Wait()
	x.settle()
	stop()
	loops.Wait()
	x.check()
}

func setting(t *testing.T, name string, byDefault int) int {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		return byDefault
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// logTransitions keeps every change of a call's state, as the database saw it.
func (w *world) logTransitions() {
	w.exec(`CREATE TABLE transitions (n bigint GENERATED ALWAYS AS IDENTITY, call_id text, was text, now text, attempts int, epoch bigint);
		CREATE FUNCTION log_transition() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
		BEGIN
		  IF TG_OP = 'INSERT' THEN
		    INSERT INTO transitions (call_id, was, now, attempts, epoch) VALUES (NEW.call_id, '', NEW.state, NEW.attempt, NEW.replica_epoch);
		  ELSIF OLD.state <> NEW.state OR OLD.attempt <> NEW.attempt THEN
		    INSERT INTO transitions (call_id, was, now, attempts, epoch) VALUES (NEW.call_id, OLD.state, NEW.state, NEW.attempt, NEW.replica_epoch);
		  END IF;
		  RETURN NEW;
		END $$;
		CREATE TRIGGER log_transition AFTER INSERT OR UPDATE ON calls FOR EACH ROW EXECUTE FUNCTION log_transition()`)
}

// truth is the server: it knows what it executed.
type truth struct {
	mu       sync.Mutex
	rng      *rand.Rand
	executed map[string]int // by tag
	sends    map[string]int
}

func newTruth(seed uint64) *truth {
	return &truth{rng: rand.New(rand.NewPCG(seed, 99)), executed: map[string]int{}, sends: map[string]int{}}
}

func (x *truth) roll(n int) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.rng.IntN(n)
}

func (x *truth) pause(sent) { time.Sleep(time.Duration(x.roll(3000)) * time.Microsecond) }

func (x *truth) answer(ctx context.Context, s sent, _ int) (response, error) {
	var args struct{ Tag, ID string }
	if err := json.Unmarshal([]byte(s.args), &args); err != nil {
		return response{}, err
	}
	if s.tool == "find" {
		x.mu.Lock()
		defer x.mu.Unlock()
		return answered(fmt.Sprintf(`{"structuredContent":{"found":%v,"id":"e"}}`, x.executed[args.ID] > 0))
	}
	x.mu.Lock()
	x.sends[args.Tag]++
	how := x.rng.IntN(100)
	if how < 85 && (s.tool != "write_key" || x.executed[args.Tag] == 0) {
		x.executed[args.Tag]++ // a trusted key is honoured
	}
	wait := time.Duration(x.rng.IntN(4000)) * time.Microsecond
	x.mu.Unlock()
	select {
	case <-time.After(wait):
	case <-ctx.Done():
		return response{Phase: sessions.MaybeSent}, ctx.Err()
	}
	switch {
	case how < 70:
		return answered(okResult)
	case how < 93: // executed or not, nobody hears of it
		return response{Phase: sessions.MaybeSent}, fault.New(fault.Unavailable, "CONNECTION_LOST", "lost").In(fault.Transport)
	}
	return response{Phase: sessions.Answered, Error: &sessions.RPCError{Code: -32000, Message: "no"}}, nil
}

// void is something acknowledged that must prevent dispatches, from then until
// it begins to be undone.
type void struct {
	what, column, value string
	server              string // where the value alone could be that of two tenants
	from, until         time.Time
}

type interleaver struct {
	w     *world
	t     *testing.T
	nodes []*node
	truth *truth
	tags  atomic.Int64

	mu    sync.Mutex
	left  int
	voids []*void
	stats map[string]int
}

func (x *interleaver) take() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.left--
	return x.left >= 0
}

func (x *interleaver) count(what string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.stats == nil {
		x.stats = map[string]int{}
	}
	x.stats[what]++
}

// now is the database's clock, which orders acknowledgements and dispatches.
func (x *interleaver) now() (at time.Time) {
	if err := x.w.owner.QueryRow(context.Background(), `SELECT clock_timestamp()`).Scan(&at); err != nil {
		x.t.Error(err)
	}
	return at
}

func (x *interleaver) acknowledged(what, column, value, server string) *void {
	v := &void{what: what, column: column, value: value, server: server, from: x.now()}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.voids = append(x.voids, v)
	return v
}

// undo ends what a void says, before it is undone.
func (x *interleaver) undo(v *void) {
	at := x.now()
	x.mu.Lock()
	defer x.mu.Unlock()
	v.until = at
}

func (x *interleaver) recover(ctx context.Context, n *node) {
	for ctx.Err() == nil {
		if err := n.Sweep(ctx); err != nil && ctx.Err() == nil {
			x.t.Errorf("sweep: %v", detail(err))
		}
		// A replica that was declared dead goes on under a new epoch.
		if err := n.replica.heartbeat(ctx); err != nil && ctx.Err() == nil {
			x.t.Errorf("heartbeat: %v", detail(err))
		}
		time.Sleep(15 * time.Millisecond)
	}
}

// settle waits until nothing moves any more by itself.
func (x *interleaver) settle() {
	x.w.eventually(func() bool {
		return x.w.count(`SELECT count(*) FROM calls c LEFT JOIN consents k USING (tenant_id, consent_id)
			WHERE c.state = 'DISPATCHING' OR c.state = 'CONSENT_REQUIRED' AND k.state = 'APPROVED'`) == 0
	}, func() string { return "calls stay open" })
	for _, n := range x.nodes { // answers that are late
		x.w.eventually(func() bool {
			n.mu.Lock()
			defer n.mu.Unlock()
			return len(n.live) == 0
		}, func() string { return "executions stay" })
	}
}

// runner makes the interleavings of one tenant.
type runner struct {
	*interleaver
	sc    *scene
	rng   *rand.Rand
	other int        // revision of the other contract
	turn  sync.Mutex // one change and back at a time
}

func (r *runner) store2(changes ...string) int {
	rec, err := r.sc.contracts.Create(r.t.Context(), r.sc.admin, "calendar", contractSource(r.t, append([]string{"ceiling: 1m", "ceiling: 5m"}, changes...)...), "")
	if err != nil {
		r.t.Fatal(err)
	}
	return rec.Revision
}

var interleavedTools = []string{"write", "write_call", "write_call", "write_call", "write_session", "write_session", "write_key", "write_query",
	"write_final", "read_call", "read_retry", "destroy"}

// step is what one goroutine of a round does.
type step func(sc *scene)

func (r *runner) run() {
	for {
		var steps []step
		sc := *r.sc
		if r.rng.IntN(100) < 20 {
			sc.alice = r.w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "alice"})
			steps = append(steps, r.revoke)
		}
		s, err := sc.store.Create(r.t.Context(), sc.alice, sessions.OpenRequest{Servers: []string{"calendar"}})
		if err != nil {
			r.t.Error(detail(err))
			return
		}
		sc.session = s
		calls := 0
		for range 3 + r.rng.IntN(3) {
			if r.take() {
				calls++
				steps = append(steps, r.call())
			}
		}
		if calls == 0 {
			return
		}
		for _, d := range []struct {
			percent int
			do      step
		}{{15, r.closeSession}, {12, r.activate}, {12, r.redefine}, {8, r.kill}} {
			if r.rng.IntN(100) < d.percent {
				steps = append(steps, d.do)
			}
		}
		var wg sync.WaitGroup
		for _, do := range steps {
			pause := time.Duration(r.rng.IntN(12000)) * time.Microsecond
			on := *sc.on(r.nodes[r.rng.IntN(2)])
			wg.Go(func() {
				time.Sleep(pause)
				do(&on)
			})
		}
		wg.Wait()
	}
}

// harmless passes over refusals; a fault of ours or a deadlock is a failure.
func (r *runner) harmless(what string, err error) bool {
	if f, _ := fault.As(err); err != nil && (f == nil || f.Kind == fault.Internal || f.Reason == "CONCURRENT_CHANGE") {
		r.t.Errorf("%s: %v", what, detail(err))
	}
	return err == nil
}

// call proposes a call and does to it what a person may.
func (r *runner) call() step {
	tool := interleavedTools[r.rng.IntN(len(interleavedTools))]
	tag := fmt.Sprintf("t%d", r.tags.Add(1))
	approve, cancel, expire := r.rng.IntN(100) < 85, r.rng.IntN(100) < 12, r.rng.IntN(100) < 5
	wait := time.Duration(r.rng.IntN(2)*r.rng.IntN(10)) * time.Millisecond
	pauses := [3]time.Duration{}
	for i := range pauses {
		pauses[i] = time.Duration(r.rng.IntN(6000)) * time.Microsecond
	}
	decider := r.nodes[r.rng.IntN(2)]
	limit := r.rng.IntN(3) == 0
	return func(sc *scene) {
		ctx := context.WithoutCancel(r.t.Context())
		p := sc.proposal(tool)
		p.Arguments, p.Wait, p.RequestID = fmt.Appendf(nil, `{"tag":%q}`, tag), wait, tag
		c, err := sc.Propose(ctx, sc.alice, p)
		if !r.harmless("propose", err) {
			r.count("refused")
			return
		}
		var wg sync.WaitGroup
		if c.State == ConsentRequired {
			wg.Go(func() {
				time.Sleep(pauses[0])
				_, err := decider.consents.Decide(ctx, sc.approver, c.ConsentID, consent.Decision{Approve: approve})
				if r.harmless("decide", err) && !approve {
					r.acknowledged("a denial", "call_id", c.ID, "")
				}
				if approve && limit {
					r.w.exec(`UPDATE grants SET uses_limit = uses_reserved + uses_spent + 1 WHERE session_id = $1 AND uses_limit IS NULL`, sc.session.ID)
				}
			})
		}
		if cancel {
			wg.Go(func() {
				time.Sleep(pauses[1])
				got, err := sc.Cancel(ctx, sc.alice, c.ID)
				if r.harmless("cancel", err) && got.Recorded {
					r.acknowledged("a cancel", "call_id", c.ID, "")
				}
			})
		}
		if expire && c.ConsentID != "" {
			wg.Go(func() {
				time.Sleep(pauses[2])
				r.w.exec(`UPDATE consents SET expire_time = now() - interval '1 second' WHERE consent_id = $1`, c.ConsentID)
				r.acknowledged("an expiry", "first_call_id", c.ID, "")
			})
		}
		wg.Wait()
	}
}

func (r *runner) revoke(sc *scene) {
	_, err := r.w.tenants.RevokeKey(context.Background(), sc.admin, sc.alice.KeyID)
	if r.harmless("revoke", err) {
		r.acknowledged("a revocation", "key_id", sc.alice.KeyID, "")
	}
}

func (r *runner) closeSession(sc *scene) {
	_, err := sc.store.Close(context.Background(), sc.alice, sc.session.ID)
	if r.harmless("close", err) {
		r.acknowledged("a close", "session_id", sc.session.ID, "")
	}
}

// activate makes the other contract active, and the first again.
func (r *runner) activate(sc *scene) {
	r.turn.Lock()
	defer r.turn.Unlock()
	ctx := context.Background()
	if _, err := sc.contracts.Activate(ctx, sc.admin, "calendar", r.other); !r.harmless("activate", err) {
		return
	}
	v := r.acknowledged("an activation", "contract_id", sc.contract.ContractID, sc.server.ID)
	time.Sleep(2 * time.Millisecond)
	r.undo(v)
	_, err := sc.contracts.Activate(ctx, sc.admin, "calendar", sc.contract.Revision)
	r.harmless("activate again", err)
}

// redefine lets the server change the definitions of two tools, and back.
func (r *runner) redefine(sc *scene) {
	r.turn.Lock()
	defer r.turn.Unlock()
	ctx := context.Background()
	see := func(description string) bool {
		r.sc.w.lister.of(sc.server.ID, description, "write_call", "write_session")
		err := sc.catalog.Invalidate(ctx, catalog.Change{Tenant: sc.alice.Tenant, ServerID: sc.server.ID, Reason: "changed"})
		if !r.harmless("invalidate", err) {
			return false
		}
		srv, err := sc.catalog.GetServer(ctx, sc.alice, "calendar")
		if !r.harmless("server", err) {
			return false
		}
		rev, err := sc.catalog.Current(ctx, srv, contextOf(sc.alice.Tenant, sc.alice.Subject, sc.session.ID), catalog.Tool, time.Hour)
		return r.harmless("list", err) && !rev.Stale
	}
	if see("second") {
		one := r.acknowledged("a new definition", "definition_digest", digest(r.t, "write_call", "first"), sc.server.ID)
		two := r.acknowledged("a new definition", "definition_digest", digest(r.t, "write_session", "first"), sc.server.ID)
		time.Sleep(2 * time.Millisecond)
		r.undo(one)
		r.undo(two)
	}
	see("first")
}

// kill declares a replica dead; what it executes goes on as a ghost.
func (r *runner) kill(sc *scene) {
	r.w.exec(`UPDATE replicas SET state = 'DEAD' WHERE epoch = $1 AND state = 'ALIVE'`, epochOf(sc.node))
	r.count("killed")
}
