package calls

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// asker is a server that asks one question in each of its ways, by the tag of the
// call: as a modern one, as a legacy one, as a task. It knows what it was told.
type asker struct {
	t *testing.T

	mu        sync.Mutex
	rounds    map[string]int // requests with answers, or updates of a task
	told      map[string]string
	cancelled map[string]bool
}

func (x *asker) tell(tag, what string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.rounds[tag]++
	x.told[tag] = what
}

func (x *asker) answer(ctx ctx, s sent, _ int) (response, error) {
	if s.method != methodCall {
		return x.task(s)
	}
	var args struct{ Tag, Mode string }
	if err := json.Unmarshal([]byte(s.args), &args); err != nil {
		return response{}, err
	}
	switch args.Mode {
	case "legacy":
		got := s.r.OnAsk(ctx, form(""))
		if ctx.Err() != nil {
			return response{Phase: sessions.MaybeSent}, ctx.Err()
		}
		x.tell(args.Tag, string(got.Result))
	case "task":
		return response{Phase: sessions.Answered, Era: sessions.EraModern, ResultType: sessions.ResultTask,
			Task: &sessions.Task{ID: args.Tag, Status: sessions.TaskWorking, PollInterval: time.Millisecond}}, nil
	default:
		state := `"of ` + args.Tag + `"`
		if s.inputs == "" {
			return asks(state, form("k"))
		}
		if s.state != state {
			x.t.Errorf("%s was sent the state %s", args.Tag, s.state)
		}
		x.tell(args.Tag, s.inputs)
	}
	return answered(okResult)
}

func (x *asker) task(s sent) (response, error) {
	tag := s.r.Name
	x.mu.Lock()
	defer x.mu.Unlock()
	t := &sessions.Task{ID: tag, Status: sessions.TaskInputRequired, Asks: []sessions.Ask{form("k")}}
	switch {
	case s.method == "tasks/cancel":
		x.cancelled[tag] = true
	case s.method == "tasks/update":
		x.rounds[tag]++
		x.told[tag] = string(s.r.Params)
	case x.cancelled[tag]:
		t = &sessions.Task{ID: tag, Status: sessions.TaskCancelled}
	case x.rounds[tag] > 0:
		t = &sessions.Task{ID: tag, Status: sessions.TaskCompleted, Result: json.RawMessage(okResult)}
	}
	return response{Phase: sessions.Answered, Era: sessions.EraModern, ResultType: sessions.ResultComplete, Result: json.RawMessage(`{}`), Task: t}, nil
}

// TestInput_Interleavings lets two replicas take answers, cancels, closes, expiries
// and each other's death in any order: every call ends in a legal state, a question
// is answered once, a round is sent at most once, and what the server was told is
// what was answered.
func TestInput_Interleavings(t *testing.T) {
	t.Parallel()
	total := setting(t, interleavingsVariable, 180)
	if testing.Short() {
		total = min(total, 40)
	}
	seed := uint64(setting(t, seedVariable, int(rand.Uint64()>>1)))
	t.Logf("%s=%d", seedVariable, seed)
	w := newWorld(t)
	w.logTransitions()
	a, b := w.node(quick()), w.node(quick())
	a.signals.join(b.Service)
	b.signals.join(a.Service)
	server := &asker{t: t, rounds: map[string]int{}, told: map[string]string{}, cancelled: map[string]bool{}}
	w.sender.answer(server.answer)
	x := &interleaver{w: w, t: t, nodes: []*node{a, b}, left: total, truth: newTruth(seed)}
	ctx, stop := context.WithCancel(t.Context())
	var loops, workers sync.WaitGroup
	for _, n := range x.nodes {
		loops.Go(func() { x.recover(ctx, n) })
	}
	for i := range 4 {
		sc := w.scene(x.nodes[i%2], reverseContract...)
		r := &inputRunner{interleaver: x, sc: sc, server: server, rng: rand.New(rand.NewPCG(seed, uint64(i)))}
		workers.Go(r.run)
	}
	workers.Wait()
	// What nobody answered ends with its time.
	x.w.eventually(func() bool {
		w.exec(`UPDATE call_inputs SET expire_time = now() WHERE phase = 'WAITING'`)
		w.exec(`UPDATE interactions SET expire_time = now() WHERE state = 'PENDING'`)
		w.exec(`UPDATE call_tasks SET next_poll = now() WHERE open`)
		return w.count(`SELECT count(*) FROM calls WHERE state IN ('DISPATCHING', 'INPUT_REQUIRED')`) == 0 && w.count(`SELECT count(*) FROM call_tasks WHERE open`) == 0
	}, func() string { return "calls stay open: " + w.open() })
	stop()
	loops.Wait()
	x.checkTransitions()
	for what, sql := range map[string]string{
		"questions of ended calls are open": `SELECT count(*) FROM interactions WHERE state = 'PENDING'`,
		"inputs of ended calls are open":    `SELECT count(*) FROM call_inputs WHERE phase IN ('WAITING', 'READY', 'HELD')`,
		"ended without receipt":             `SELECT count(*) FROM calls WHERE receipt = '' OR finish_time IS NULL`,
		"reads are uncertain":               `SELECT count(*) FROM calls WHERE state = 'UNCERTAIN' AND effect = 'READ'`,
		"deadlocks":                         `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`,
	} {
		if n := w.count(sql); n != 0 {
			t.Errorf("%s: %d", what, n)
		}
	}
	for tag, n := range server.rounds {
		if n > 1 {
			t.Errorf("%s was told %d times", tag, n)
		}
	}
	tenants, err := w.db.Tenants(t.Context(), "", 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range tenants {
		w.verify(id)
	}
	for k, n := range x.stats {
		t.Logf("%5d %s", n, k)
	}
}

// open tells of the calls that have not ended.
func (w *world) open() (out string) {
	err := w.owner.QueryRow(context.Background(), `SELECT COALESCE(string_agg(concat_ws(' ', c.call_id, c.state, c.effect, convert_from(c.arguments, 'UTF8'),
		c.replica_epoch, r.state, c.cancel_requested, now() - c.update_time, i.phase, i.round, k.open, k.status, k.claim_until - now(), k.next_poll - now()), E'\n'), '')
		FROM calls c LEFT JOIN call_inputs i USING (call_id) LEFT JOIN call_tasks k USING (call_id) LEFT JOIN replicas r ON r.epoch = c.replica_epoch
		WHERE c.state IN ('DISPATCHING', 'INPUT_REQUIRED') OR k.open`).Scan(&out)
	if err != nil {
		w.t.Error(err)
	}
	return out
}

type inputRunner struct {
	*interleaver
	sc     *scene
	server *asker
	rng    *rand.Rand
}

func (r *inputRunner) run() {
	for r.take() {
		r.one()
	}
}

// one makes one call and lets everything happen to it that may.
func (r *inputRunner) one() {
	ctx := context.WithoutCancel(r.t.Context())
	tag := fmt.Sprintf("t%d", r.tags.Add(1))
	mode := []string{"modern", "legacy", "task"}[r.rng.IntN(3)]
	tool := []string{"read", "write"}[r.rng.IntN(2)]
	sc := *r.sc
	s, err := sc.store.Create(ctx, sc.alice, sessions.OpenRequest{Servers: []string{"calendar"}})
	if !r.harmlessly("open", err) {
		return
	}
	sc.session = s
	p := sc.proposal(tool)
	p.Arguments, p.RequestID, p.Wait = fmt.Appendf(nil, `{"tag":%q,"mode":%q}`, tag, mode), tag, 0
	c, err := r.nodes[r.rng.IntN(2)].Propose(ctx, sc.alice, p)
	if !r.harmlessly("propose", err) {
		return
	}
	for deadline := time.Now().Add(5 * time.Second); c.State == Dispatching && time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if mode == "task" {
			r.w.exec(`UPDATE call_tasks SET next_poll = now() WHERE call_id = $1 AND open`, c.ID)
		}
		c = sc.get(c.ID)
	}
	if c.State != InputRequired || len(c.Interactions) == 0 {
		r.count("lost before it was asked: " + string(c.State))
		return
	}
	var wg sync.WaitGroup
	won := [2]bool{}
	later := func(percent int, do func(n *node)) {
		if r.rng.IntN(100) >= percent {
			return
		}
		pause, n := time.Duration(r.rng.IntN(8000))*time.Microsecond, r.nodes[r.rng.IntN(2)]
		wg.Go(func() { time.Sleep(pause); do(n) })
	}
	for i, a := range []Answer{{Action: Accept, Content: json.RawMessage(`{"acct":"1"}`)}, {Action: Decline}} {
		later(75, func(n *node) {
			_, err := n.Respond(ctx, sc.alice, c.ID, c.Interactions[0].ID, a)
			won[i] = r.harmlessly("respond", err)
		})
	}
	later(20, func(n *node) { _, err := n.Cancel(ctx, sc.alice, c.ID); r.harmlessly("cancel", err) })
	later(15, func(n *node) { _, err := n.store.Close(ctx, sc.alice, s.ID); r.harmlessly("close", err) })
	later(15, func(*node) {
		r.w.exec(`UPDATE call_inputs SET expire_time = now() WHERE call_id = $1`, c.ID)
		r.w.exec(`UPDATE interactions SET expire_time = now() WHERE call_id = $1`, c.ID)
	})
	later(10, func(n *node) { r.w.kill(n) })
	wg.Wait()
	if won[0] && won[1] {
		r.t.Errorf("%s was answered twice", tag)
	}
	r.server.mu.Lock()
	told := r.server.told[tag]
	r.server.mu.Unlock()
	if won[0] && strings.Contains(told, "decline") || won[1] && strings.Contains(told, "accept") {
		r.t.Errorf("%s: %v, and the server was told %s", tag, won, told)
	}
	r.count(fmt.Sprintf("%s, answered %v", mode, won[0] || won[1]))
}

// harmlessly passes over refusals; a fault of ours is a failure.
func (r *inputRunner) harmlessly(what string, err error) bool {
	if f, _ := fault.As(err); err != nil && (f == nil || f.Kind == fault.Internal) {
		r.t.Errorf("%s: %v", what, detail(err))
	}
	return err == nil
}
