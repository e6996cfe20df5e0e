package calls

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// legacy plays a legacy server that asks in the middle of a request and then
// answers the call with what it was told.
func legacy(as ...sessions.Ask) func(ctx, sent, int) (response, error) {
	return func(ctx ctx, s sent, _ int) (response, error) {
		var told []string
		for _, a := range as {
			got := s.r.OnAsk(ctx, a)
			if ctx.Err() != nil {
				return response{Phase: sessions.MaybeSent}, ctx.Err()
			}
			text := string(got.Result)
			if got.Error != nil {
				text = fmt.Sprint(got.Error.Code)
			}
			told = append(told, text)
		}
		raw, err := json.Marshal(map[string]any{"content": []map[string]string{{"type": "text", "text": strings.Join(told, " ")}}})
		if err != nil {
			return response{}, err
		}
		return sessions.ReadResult(raw)
	}
}

func (c *Call) told() string {
	var r struct{ Content []struct{ Text string } }
	if json.Unmarshal(c.Result, &r) != nil || len(r.Content) == 0 {
		return ""
	}
	return r.Content[0].Text
}

// A legacy request stays open while a person answers at any replica; it is one
// attempt, and the waiter is shown the question at once.
func TestHold_IsAnsweredAtAnyReplica(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.node(quick()), w.node(quick())
	b.signals.join(a.Service)
	w.sender.answer(legacy(form(""), link(""), sampling("")))
	for _, tool := range []string{"read", "write", "read_call"} {
		sc := w.scene(a, reverseContract...)
		c := sc.propose(tool, func(p *Proposal) { p.Wait = time.Minute })
		if c.State == ConsentRequired {
			sc.decide(c, true)
			c = sc.until(c.ID, InputRequired)
		}
		said := `{"content":{"text":"x","type":"text"},"model":"m","role":"assistant"}`
		for i, ans := range []Answer{{Action: Accept, Content: json.RawMessage(`{"acct":"1"}`)}, {Action: Accept}, {Action: Accept, Result: json.RawMessage(said)}} {
			w.eventually(func() bool {
				c = sc.on(b).get(c.ID)
				return len(c.Interactions) > 0 && c.Interactions[0].State == Pending && c.Interactions[0].Round == i+1
			}, func() string { return fmt.Sprintf("no question %d: %+v", i, c) })
			if c.State != InputRequired || !c.Recorded || len(c.Attempts) != 1 {
				t.Fatalf("%+v", c)
			}
			if _, err := b.Respond(t.Context(), sc.alice, c.ID, c.Interactions[0].ID, ans); err != nil {
				t.Fatal(detail(err))
			}
		}
		c = sc.until(c.ID, Succeeded)
		if want := `{"action":"accept","content":{"acct":"1","n":2}} {"action":"accept"} ` + said; c.told() != want || len(c.Attempts) != 1 || len(sc.sends()) != 1 {
			t.Fatalf("%s: %s, %+v", tool, c.told(), c.Attempts)
		}
		if kinds := strings.Join(w.kinds(c.ID), " "); strings.Count(kinds, "input.required input.answered") != 3 {
			t.Fatal(kinds)
		}
		w.verify(sc.alice.Tenant)
	}
}

func TestHold_Refusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	secret := sessions.Ask{Method: "elicitation/create", Params: json.RawMessage(`{"message":"x","requestedSchema":{"type":"object","properties":{"password":{"type":"string"}}}}`)}
	nested := sessions.Ask{Method: "elicitation/create", Params: json.RawMessage(`{"message":"x","requestedSchema":{"type":"object","properties":{"a":{"type":"object"}}}}`)}
	mode := sessions.Ask{Method: "elicitation/create", Params: json.RawMessage(`{"mode":"voice","message":"x"}`)}
	tools := sessions.Ask{Method: "sampling/createMessage", Params: json.RawMessage(`{"maxTokens":1,"messages":[{"role":"user","content":{"type":"text","text":"x"}}],"tools":[]}`)}
	w.sender.answer(legacy(secret, nested, mode, tools, sessions.Ask{Method: "roots/list", Params: json.RawMessage(`{}`)}))
	c := sc.propose("read")
	if want := `{"action":"decline"} -32602 -32602 -32602 {"roots":[{"uri":"file:///srv/data"}]}`; c.State != Succeeded || c.told() != want || len(c.Attempts) != 1 {
		t.Fatalf("%s %s", c.State, c.told())
	}
	if n := len(slices.DeleteFunc(slices.Clone(c.Findings), func(f string) bool { return !strings.HasPrefix(f, "INPUT_REFUSED: ") })); n != 4 {
		t.Errorf("%v", c.Findings)
	}
	if n := w.count(`SELECT count(*) FROM audit_entries WHERE kind = 'input.refused'`); n != 4 {
		t.Errorf("%d entries", n)
	}
	if n := w.count(`SELECT count(*) FROM interactions`); n != 0 {
		t.Errorf("%d interactions", n)
	}
	// A person's no to sampling is the protocol's error.
	w.sender.answer(legacy(sampling(""), form("")))
	for action, want := range map[Action]string{Decline: `-1 {"action":"decline"}`, Dismiss: `-1 {"action":"cancel"}`} {
		c = sc.propose("write", func(p *Proposal) { p.Arguments = []byte(`{"a":"` + string(action) + `"}`) })
		for i := range 2 {
			w.eventually(func() bool { c = sc.get(c.ID); return len(c.Interactions) > 0 && c.Interactions[0].Round == i+1 }, func() string { return "no question" })
			if _, err := sc.respond(c, 0, Answer{Action: action}); err != nil {
				t.Fatal(detail(err))
			}
		}
		if c = sc.until(c.ID, Succeeded); c.told() != want {
			t.Errorf("%s", c.told())
		}
	}
	// What was not declared reaches nobody.
	plain := w.scene(sc.node)
	w.sender.answer(func(ctx ctx, s sent, _ int) (response, error) {
		if s.r.OnAsk != nil {
			t.Error("questions are served that were not offered")
		}
		return answered(okResult)
	})
	plain.propose("read")
}

// Whatever happens to a held question: the server is told or hears no more, and
// the call ends as what is known of it.
func TestHold_WhatEndsIt(t *testing.T) {
	t.Parallel()
	type act func(sc *scene, c *Call)
	cases := map[string]struct {
		act  act
		ceil string // of the contract
		told string // by a call that succeeds
		read State
		end  InteractionState
	}{
		"ceiling": {act: func(*scene, *Call) {}, ceil: "ceiling: 2s", told: `{"action":"cancel"}`, end: WasExpired},
		"close": {act: func(sc *scene, c *Call) {
			if _, err := sc.store.Close(context.Background(), sc.alice, sc.session.ID); err != nil {
				sc.t.Error(err)
			}
		}, told: `{"action":"cancel"}`, end: WasCancelled},
		"cancel": {act: func(sc *scene, c *Call) {
			if _, err := sc.Cancel(context.Background(), sc.alice, c.ID); err != nil {
				sc.t.Error(err)
			}
		}, read: Cancelled, end: Withdrawn},
		"cancel elsewhere": {act: func(sc *scene, c *Call) {
			sc.w.exec(`UPDATE calls SET cancel_requested = true WHERE call_id = $1`, c.ID)
			sc.sweep(sc.t)
		}, read: Cancelled, end: Withdrawn},
	}
	w := newWorld(t)
	n := w.node(quick())
	w.sender.answer(legacy(form("")))
	for name, c := range cases {
		for _, tool := range []string{"read", "write"} {
			t.Run(name+" "+tool, func(t *testing.T) {
				changes := slices.Clone(reverseContract)
				if c.ceil != "" {
					changes = append(changes, "timeout: 20s, ceiling: 1m", "timeout: 1s, "+c.ceil)
				}
				sc := w.scene(n, changes...)
				sc.t = t
				call := sc.propose(tool)
				if c.ceil == "" && call.State != InputRequired {
					t.Fatalf("%+v", call)
				}
				c.act(sc, call)
				want := Succeeded
				if c.told == "" {
					want = map[string]State{"read": c.read, "write": Uncertain}[tool]
				}
				got := sc.until(call.ID, Succeeded, Failed, Cancelled, Uncertain)
				if got.State != want || c.told != "" && got.told() != c.told {
					t.Fatalf("%s %+v %s", got.State, got.Error, got.told())
				}
				all, err := sc.Interactions(t.Context(), sc.alice, got.ID)
				if err != nil || len(all) != 1 || all[0].State != c.end {
					t.Fatalf("%+v %v", all, err)
				}
			})
		}
	}
}

// The server takes its question back: the call goes on, and an answer comes too
// late.
func TestHold_ServerWithdraws(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	withdraw, withdrawn, finish := make(chan struct{}), make(chan struct{}), newGate(t)
	w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
		asking, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() { <-withdraw; cancel() }()
		s.r.OnAsk(asking, form(""))
		close(withdrawn)
		return finish.script(okAnswer)(ctx, s, n)
	})
	c := sc.propose("write")
	if c.State != InputRequired {
		t.Fatal(c.State)
	}
	close(withdraw)
	<-withdrawn
	now := sc.get(c.ID)
	if now.State != Dispatching || now.Revision <= c.Revision {
		t.Fatalf("%s %d", now.State, now.Revision)
	}
	if _, err := sc.respond(c, 0, Answer{Action: Decline}); err == nil {
		t.Error("a question that was withdrawn was answered")
	}
	finish.release()
	if got := sc.until(c.ID, Succeeded); len(got.Attempts) != 1 {
		t.Errorf("%+v", got.Attempts)
	}
}

// The replica that holds the question dies: the request is gone with it.
func TestHold_ReplicaDies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := w.node(quick())
	w.sender.answer(legacy(form("")))
	for tool, state := range map[string]State{"read": Cancelled, "read_retry": Cancelled, "write": Uncertain, "write_call": Uncertain} {
		a := w.node(quick())
		sc := w.scene(a, reverseContract...)
		c := sc.propose(tool)
		if c.State == ConsentRequired {
			sc.decide(c, true)
		}
		c = sc.until(c.ID, InputRequired)
		b.sweep(t)
		if got := sc.on(b).get(c.ID); got.State != InputRequired {
			t.Fatalf("taken from a living replica: %s", got.State)
		}
		w.kill(a)
		b.sweep(t)
		got := sc.on(b).get(c.ID)
		if got.State != state || got.Error.Code != "REPLICA_LOST" || got.Attempts[0].Phase != MaybeSent && !got.Attempts[0].Evidence || got.Attempts[0].EndTime == nil {
			t.Fatalf("%s: %s %+v %+v\n%s", tool, got.State, got.Error, got.Attempts, w.logs)
		}
		// The dead one was only paused: what it makes of the question changes nothing.
		w.eventually(func() bool {
			return w.count(`SELECT count(*) FROM attempts WHERE call_id = $1 AND evidence IS NOT NULL`, c.ID) == 1
		},
			func() string { return "the holder holds on" })
		if late := sc.on(b).get(c.ID); late.State != state || late.Revision != got.Revision {
			t.Fatalf("%s became %s", got.State, late.State)
		}
		if _, err := b.Respond(t.Context(), sc.alice, c.ID, c.Interactions[0].ID, Answer{Action: Decline}); err == nil {
			t.Error("answered after the end")
		}
	}
}

// The same holds across an outage of the database: the outcome is not lost to a
// question that could not be settled.
func TestHold_UnsettledQuestionEndsWithItsCall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	g := newGate(t)
	w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
		asking, cancel := context.WithCancel(ctx)
		defer cancel()
		go s.r.OnAsk(asking, form("")) // a holder that never gets to write
		return g.script(okAnswer)(ctx, s, n)
	})
	c := sc.propose("write", func(p *Proposal) { p.Wait = time.Minute })
	if c.State != InputRequired {
		t.Fatalf("%+v", c)
	}
	g.release()
	got := sc.until(c.ID, Succeeded)
	if n := w.count(`SELECT count(*) FROM interactions WHERE state = 'PENDING'`); n != 0 || len(got.Interactions) != 0 {
		t.Errorf("%d open", n)
	}
}

// Several questions of one request are open at a time: each is shown, and each
// answer reaches the question that it belongs to.
func TestHold_ManyQuestionsAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	const many = 8
	ask := func(n int) sessions.Ask {
		return sessions.Ask{Method: "elicitation/create", Params: fmt.Appendf(nil,
			`{"message":"q%d","requestedSchema":{"type":"object","properties":{"n":{"type":"string"}}}}`, n)}
	}
	w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
		told := make([]string, many)
		var wg sync.WaitGroup
		for n := range many {
			wg.Go(func() {
				got := s.r.OnAsk(ctx, ask(n))
				told[n] = string(got.Result)
				if got.Error != nil {
					told[n] = fmt.Sprint(got.Error.Code)
				}
			})
		}
		wg.Wait()
		raw, err := json.Marshal(map[string]any{"content": []map[string]string{{"type": "text", "text": strings.Join(told, " ")}}})
		if err != nil {
			return response{}, err
		}
		return sessions.ReadResult(raw)
	})
	for _, tool := range []string{"write", "read"} {
		c := sc.propose(tool)
		w.eventually(func() bool { c = sc.get(c.ID); return len(c.Interactions) == many }, func() string {
			return fmt.Sprintf("%d questions of %d", len(c.Interactions), many)
		})
		want := make([]string, many)
		for _, i := range c.Interactions {
			if i.State != Pending {
				t.Fatalf("%+v", i)
			}
			message := i.View().Message
			at := int(message[1] - '0')
			want[at] = `{"action":"accept","content":{"n":"` + message + `"}}`
			if _, err := sc.Respond(t.Context(), sc.alice, c.ID, i.ID, Answer{Action: Accept, Content: json.RawMessage(`{"n":"` + message + `"}`)}); err != nil {
				t.Fatal(detail(err))
			}
		}
		if c = sc.until(c.ID, Succeeded); c.told() != strings.Join(want, " ") {
			t.Fatalf("%s: %s", tool, c.told())
		}
	}
	w.verify(sc.alice.Tenant)
}

// A fault of the host is no person's word: the server hears of it as what it is.
func TestHold_HostFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	w.exec(`ALTER TABLE interactions ADD CONSTRAINT none CHECK (false) NOT VALID`)
	w.sender.answer(legacy(form(""), sampling("")))
	for _, tool := range []string{"read", "write"} {
		if c := sc.propose(tool); c.State != Succeeded || c.told() != "-32603 -32603" {
			t.Errorf("%s: %s %s", tool, c.State, c.told())
		}
	}
}

// A stop does not wait for people: they could not answer here any more. What the
// server says in time counts; else a read is cancelled, a write uncertain.
func TestHold_Drain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	told := make(chan sessions.Answer, 2)
	silent := func(ctx ctx, s sent, n int) (response, error) {
		told <- s.r.OnAsk(ctx, form(""))
		told <- s.r.OnAsk(ctx, form(""))
		return hang(ctx, s, n)
	}
	for name, c := range map[string]struct {
		script      func(ctx, sent, int) (response, error)
		read, write State
	}{
		"the server ends the call": {legacy(form("")), Succeeded, Succeeded},
		"the server is silent":     {silent, Cancelled, Uncertain},
	} {
		for tool, state := range map[string]State{"read": c.read, "write": c.write} {
			t.Run(name+" "+tool, func(t *testing.T) {
				w.sender.answer(c.script)
				n := w.node(quick())
				sc := w.scene(n, reverseContract...)
				sc.t = t
				call := sc.propose(tool)
				if call.State != InputRequired {
					t.Fatalf("%+v", call)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if err := n.Stop(ctx); err != nil || ctx.Err() != nil {
					t.Fatal("the stop took all of its time: ", err)
				}
				got := sc.on(w.node(quick())).get(call.ID)
				if got.State != state || state == Succeeded && got.told() != `{"action":"cancel"}` ||
					state != Succeeded && (got.Error.Code != codeStopped || !strings.Contains(got.Error.Message, "the host stopped")) {
					t.Fatalf("%s %+v %s", got.State, got.Error, got.told())
				}
				for range 2 { // the open question, and the one put after the stop began
					if state == Succeeded {
						break
					}
					if a := <-told; string(a.Result) != `{"action":"cancel"}` {
						t.Errorf("the server was told %s", a.Result)
					}
				}
				all, err := sc.Interactions(t.Context(), sc.alice, call.ID)
				if err != nil || len(all) != 1 || all[0].State != WasCancelled {
					t.Errorf("%+v %v", all, err)
				}
			})
		}
	}
}
