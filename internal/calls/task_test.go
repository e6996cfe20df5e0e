package calls

import (
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// tasks plays a server with the extension: each call becomes a task, of which a
// test says how it stands.
type tasks struct {
	mu      sync.Mutex
	state   sessions.Task
	err     *sessions.RPCError // of tasks/get
	fail    error
	updates []string
	methods []string
}

func (x *tasks) set(change func(x *tasks)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	change(x)
}

func (x *tasks) is(status string) { x.set(func(x *tasks) { x.state.Status = status }) }

func (x *tasks) count(method string) (n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, m := range x.methods {
		if m == method {
			n++
		}
	}
	return n
}

func (x *tasks) answer(_ ctx, s sent, _ int) (response, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.methods = append(x.methods, s.method)
	r := response{Phase: sessions.Answered, Era: sessions.EraModern, ResultType: sessions.ResultComplete, Result: json.RawMessage(`{}`)}
	var p struct {
		TaskID         string
		InputResponses json.RawMessage
	}
	if err := json.Unmarshal(s.r.Params, &p); err != nil {
		return r, err
	}
	if s.method != methodCall && (p.TaskID != "secret-task" || s.r.Name != p.TaskID || !s.target.Declare.Tasks) {
		return response{Phase: sessions.Answered, Error: &sessions.RPCError{Code: -32000, Message: "whose?"}}, nil
	}
	task := x.state
	task.ID = "secret-task"
	switch s.method {
	case methodCall:
		task.Status = sessions.TaskWorking
		r.ResultType, r.Task = sessions.ResultTask, &task
	case "tasks/get":
		if x.fail != nil {
			return response{Phase: sessions.MaybeSent}, x.fail
		}
		if x.err != nil {
			return response{Phase: sessions.Answered, Error: x.err}, nil
		}
		r.Task = &task
	case "tasks/update":
		x.updates = append(x.updates, string(p.InputResponses))
	}
	return r, nil
}

// look makes every task due and looks after them on this replica.
func (sc *scene) look() {
	sc.t.Helper()
	sc.w.exec(`UPDATE call_tasks SET next_poll = now() - interval '1 second', claim_until = '-infinity' WHERE open`)
	sc.sweep(sc.t)
}

func newTasks(w *world) *tasks {
	x := &tasks{state: sessions.Task{Status: sessions.TaskWorking, StatusMessage: "begun"}}
	w.sender.answer(x.answer)
	return x
}

// A task outlives the replica that began it; its result is that of the call.
func TestTask_SurvivesItsReplica(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := w.node(quick())
	x := newTasks(w)
	for _, tool := range []string{"read", "write", "write_call"} {
		a := w.node(quick())
		sc := w.scene(a, reverseContract...)
		x.set(func(x *tasks) {
			x.state, x.methods = sessions.Task{Status: sessions.TaskWorking, StatusMessage: "begun"}, nil
		})
		c := sc.propose(tool, func(p *Proposal) { p.Wait = 50 * time.Millisecond })
		if c.State == ConsentRequired {
			sc.decide(c, true)
		}
		w.eventually(func() bool { c = sc.get(c.ID); return c.Task != nil }, func() string { return "no task" })
		if c.State != Dispatching || !c.Recorded || c.Task.Status != "working" || c.Task.StatusMessage != "begun" || len(a.live) != 0 {
			t.Fatalf("%+v %+v", c, c.Task)
		}
		w.kill(a)
		other := sc.on(b)
		x.set(func(x *tasks) { x.state.StatusMessage = "half" })
		other.look()
		now := other.get(c.ID)
		if now.State != Dispatching || now.Task.StatusMessage != "half" || now.Revision <= c.Revision {
			t.Fatalf("%+v %+v", now, now.Task)
		}
		other.look()
		if again := other.get(c.ID); again.Revision != now.Revision {
			t.Error("a look that brings nothing makes a revision")
		}
		x.set(func(x *tasks) { x.state.Status, x.state.Result = sessions.TaskCompleted, json.RawMessage(okResult) })
		other.look()
		got := other.get(c.ID)
		if got.State != Succeeded || string(got.Result) != okResult || len(got.Attempts) != 1 || got.Attempts[0].Outcome != "SUCCEEDED" || x.count(methodCall) != 1 {
			t.Fatalf("%s %+v %s %v", got.State, got.Error, got.Result, x.methods)
		}
		if n := w.count(`SELECT count(*) FROM call_tasks WHERE open OR position('secret' in encode(task, 'escape')) > 0`); n != 0 {
			t.Error("the task is open, or its id in the clear")
		}
		if kinds := strings.Join(w.kinds(c.ID), " "); !strings.HasSuffix(kinds, "call.dispatched task.started call.finished") {
			t.Error(kinds)
		}
		w.verify(sc.alice.Tenant)
	}
}

func TestTask_HowItEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	x := newTasks(w)
	lost := fault.New(fault.Unavailable, "CONNECTION_LOST", "lost").In(fault.Transport)
	for name, c := range map[string]struct {
		do          func(sc *scene, c *Call)
		read, write State
		code        string
		cancels     int
	}{
		"isError": {func(*scene, *Call) {
			x.set(func(x *tasks) {
				x.state.Status, x.state.Result = "completed", json.RawMessage(`{"isError":true,"content":[]}`)
			})
		}, Failed, Failed, "TOOL_ERROR", 0},
		"no result": {func(*scene, *Call) {
			x.set(func(x *tasks) { x.state.Status, x.state.Result = "completed", json.RawMessage(`{"resultType":"task"}`) })
		}, Failed, Uncertain, "RESULT_INVALID", 0},
		"failed": {func(*scene, *Call) {
			x.set(func(x *tasks) {
				x.state.Status, x.state.Error = "failed", &sessions.RPCError{Code: -32000, Message: "no"}
			})
		}, Failed, Failed, "-32000", 0},
		// Nobody asked for it: how far a write had come, the server does not say.
		"cancelled": {func(*scene, *Call) { x.is("cancelled") }, Cancelled, Uncertain, "CANCELLED", 0},
		"unknown":   {func(*scene, *Call) { x.set(func(x *tasks) { x.err = &sessions.RPCError{Code: -32602} }) }, Failed, Uncertain, "TASK_LOST", 0},
		"forgotten": {func(sc *scene, c *Call) {
			x.set(func(x *tasks) { x.fail = lost })
			sc.look()
			if got := sc.get(c.ID); got.State != Dispatching {
				sc.t.Errorf("%s after one look that failed", got.State)
			}
			sc.w.exec(`UPDATE call_tasks SET end_time = now() WHERE call_id = $1`, c.ID)
		}, Failed, Uncertain, "TASK_LOST", 0},
		"ceiling": {func(sc *scene, c *Call) { sc.w.exec(`UPDATE calls SET ceiling_time = now() WHERE call_id = $1`, c.ID) }, Failed, Uncertain, "TIMEOUT", 1},
		"cancel, and the server obeys": {func(sc *scene, c *Call) {
			x.is("cancelled")
			if _, err := sc.Cancel(sc.t.Context(), sc.alice, c.ID); err != nil {
				sc.t.Error(err)
			}
		}, Cancelled, Cancelled, "CANCELLED", 1},
		"cancel, and it does not": {func(sc *scene, c *Call) {
			sc.w.exec(`UPDATE calls SET cancel_requested = true WHERE call_id = $1`, c.ID)
			sc.look()
			sc.w.exec(`UPDATE call_tasks SET cancel_time = now() - interval '1 minute' WHERE call_id = $1`, c.ID)
		}, Cancelled, Uncertain, "CANCELLED", 1},
	} {
		for tool, state := range map[string]State{"read": c.read, "write": c.write} {
			t.Run(name+" "+tool, func(t *testing.T) {
				x.set(func(x *tasks) {
					x.state, x.err, x.fail, x.methods = sessions.Task{Status: sessions.TaskWorking}, nil, nil, nil
				})
				sc := w.scene(n, reverseContract...)
				sc.t = t
				call := sc.propose(tool, func(p *Proposal) { p.Wait = time.Millisecond })
				w.eventually(func() bool { call = sc.get(call.ID); return call.Task != nil }, func() string { return "no task" })
				c.do(sc, call)
				sc.look()
				got := sc.get(call.ID)
				if got.State != state || got.Error == nil || got.Error.Code != c.code || got.Receipt == "" || x.count("tasks/cancel") != c.cancels {
					t.Fatalf("%s %+v, %v", got.State, got.Error, x.methods)
				}
				if n := w.count(`SELECT count(*) FROM call_tasks WHERE open AND call_id = $1`, call.ID); n != 0 {
					t.Error("it is looked after for ever")
				}
			})
		}
	}
}

// The questions of a task are answered like any other, each key once.
func TestTask_Questions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	x := newTasks(w)
	sc := w.scene(n, reverseContract...)
	c := sc.propose("write", func(p *Proposal) { p.Wait = time.Millisecond })
	w.eventually(func() bool { c = sc.get(c.ID); return c.Task != nil }, func() string { return "no task" })
	x.set(func(x *tasks) {
		x.state.Status = sessions.TaskInputRequired
		x.state.Asks = []sessions.Ask{form("a"), link("b"), {Key: "r", Method: "roots/list", Params: json.RawMessage(`{}`)}}
	})
	sc.look()
	sc.look()
	c = sc.get(c.ID)
	if c.State != InputRequired || len(c.Interactions) != 2 {
		t.Fatalf("%s %+v", c.State, c.Interactions)
	}
	sc.accept(c, 0, `{"acct":"1"}`) // a part of the answers
	sc.sweep(t)
	if c = sc.get(c.ID); c.State != InputRequired {
		t.Fatal(c.State)
	}
	if _, err := sc.respond(c, 1, Answer{Action: Accept}); err != nil {
		t.Fatal(err)
	}
	if c = sc.get(c.ID); c.State != Dispatching {
		t.Fatal(c.State)
	}
	sc.look()
	sc.look()
	all := map[string]json.RawMessage{}
	for _, u := range x.updates {
		var one map[string]json.RawMessage
		if err := json.Unmarshal([]byte(u), &one); err != nil {
			t.Fatal(err)
		}
		for k, v := range one {
			if all[k] != nil {
				t.Errorf("%s was answered twice: %v", k, x.updates)
			}
			all[k] = v
		}
	}
	if len(all) != 3 || string(all["b"]) != `{"action":"accept"}` || string(all["r"]) != `{"roots":[{"uri":"file:///srv/data"}]}` {
		t.Errorf("%v", x.updates)
	}
	// A key that was answered is never put again; a new one is.
	x.set(func(x *tasks) { x.state.Asks = append(x.state.Asks, sampling("c")) })
	sc.look()
	if c = sc.get(c.ID); c.State != InputRequired || len(slices.DeleteFunc(slices.Clone(c.Interactions), func(i Interaction) bool { return i.State != Pending })) != 1 {
		t.Fatalf("%s %+v", c.State, c.Interactions)
	}
	last := c.Interactions[slices.IndexFunc(c.Interactions, func(i Interaction) bool { return i.State == Pending })]
	// Nobody asks the model: the task is stopped, and the call ends.
	if _, err := sc.Respond(t.Context(), sc.alice, c.ID, last.ID, Answer{Action: Decline}); err != nil {
		t.Fatal(err)
	}
	sc.look()
	if c = sc.get(c.ID); c.State != Uncertain || c.Error.Code != "INPUT_DECLINED" || x.count("tasks/cancel") != 1 {
		t.Fatalf("%s %+v %v", c.State, c.Error, x.methods)
	}
	// A task may end while it asks, be asked nothing in time, or lose its ground.
	for name, do := range map[string]struct {
		act   func(c *Call)
		state State
	}{
		"completed": {func(*Call) {
			x.set(func(x *tasks) { x.state.Status, x.state.Result = "completed", json.RawMessage(okResult) })
		}, Succeeded},
		"expired": {func(c *Call) { w.exec(`UPDATE interactions SET expire_time = now() WHERE call_id = $1`, c.ID) }, Uncertain},
		"cancelled": {func(c *Call) {
			x.is("cancelled")
			if _, err := sc.Cancel(t.Context(), sc.alice, c.ID); err != nil {
				t.Error(err)
			}
		}, Cancelled},
		"another contract": {func(c *Call) {
			sc.activate(contractSource(t, append(slices.Clone(reverseContract), "ceiling: 1m", "ceiling: 2m")...))
			sc.accept(c, 0, `{"acct":"1"}`)
		}, Uncertain},
	} {
		sc = w.scene(n, reverseContract...)
		x.set(func(x *tasks) {
			x.state, x.updates = sessions.Task{Status: sessions.TaskInputRequired, Asks: []sessions.Ask{form("a")}}, nil
		})
		c = sc.propose("write", func(p *Proposal) { p.Wait = time.Millisecond })
		w.eventually(func() bool { return sc.get(c.ID).Task != nil }, func() string { return "no task" })
		sc.look()
		c = sc.get(c.ID)
		do.act(c)
		sc.look()
		if got := sc.until(c.ID, do.state); len(x.updates) != 0 {
			t.Errorf("%s: %s %v", name, got.State, x.updates)
		}
		if n := w.count(`SELECT count(*) FROM interactions WHERE state = 'PENDING' AND call_id = $1`, c.ID); n != 0 {
			t.Errorf("%s: questions stay open", name)
		}
	}
}

func TestTask_PollsAsTheServerWishesWithinBounds(t *testing.T) {
	t.Parallel()
	for wish, want := range map[time.Duration]time.Duration{0: firstPoll, time.Millisecond: minPoll, 10 * time.Second: 10 * time.Second, time.Hour: maxPoll} {
		for range 100 {
			if got := (&Task{interval: wish}).pause(); got < want*9/10 || got > want*11/10 {
				t.Fatalf("%s became %s", wish, got)
			}
		}
	}
}

// One task is of one call: whose result it becomes must not be for the server to
// mix up. Other users have other tasks, and an id is free again after the end.
func TestTask_OfAnotherCall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	x := newTasks(w)
	sc := w.scene(n, reverseContract...)
	begin := func(tool string, p tenant.Principal, session string) *Call {
		t.Helper()
		c, err := sc.Propose(t.Context(), p, Proposal{SessionID: session, Server: "calendar", Tool: tool, Arguments: []byte(`{}`), Wait: time.Millisecond})
		if err != nil {
			t.Fatal(detail(err))
		}
		w.eventually(func() bool {
			c, err = sc.Get(t.Context(), p, c.ID, 0, 0)
			return err == nil && (c.Task != nil || c.State != Dispatching)
		}, func() string { return "neither a task nor an end" })
		return c
	}
	first := begin("write", sc.alice, sc.session.ID)
	for tool, state := range map[string]State{"read": Failed, "write": Uncertain, "write_query": Uncertain} {
		c := begin(tool, sc.alice, sc.session.ID)
		if c = sc.until(c.ID, state); c.Error.Code != sessions.ResultInvalid || c.Attempts[0].Phase != Answered ||
			!slices.ContainsFunc(c.Findings, func(f string) bool { return strings.HasPrefix(f, "TASK_ID_REUSED: ") }) {
			t.Errorf("%s: %+v %q", tool, c.Error, c.Findings)
		}
	}
	if x.count("tasks/cancel") != 0 {
		t.Error("the other call's task was stopped")
	}
	bob := w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "bob"})
	if c := begin("write", bob, sc.open(bob).ID); c.State != Dispatching || c.Task == nil {
		t.Errorf("bob: %s %+v", c.State, c.Error)
	}
	x.set(func(x *tasks) { x.state.Status, x.state.Result = "completed", json.RawMessage(okResult) })
	sc.look()
	if got := sc.get(first.ID); got.State != Succeeded {
		t.Errorf("the first: %s %+v", got.State, got.Error)
	}
	x.is(sessions.TaskWorking)
	if c := begin("write", sc.alice, sc.session.ID); c.Task == nil {
		t.Errorf("again: %s %+v", c.State, c.Error)
	}
}
