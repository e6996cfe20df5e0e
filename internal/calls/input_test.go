package calls

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// reverseContract lets a server ask everything.
var reverseContract = []string{"limits: {timeout: 20s", `reverse: {elicitation: {form: true, url: ["https://login.example"]}, sampling: true, roots: ["file:///srv/data"]}
limits: {timeout: 20s`}

const (
	formParams = `{"mode":"form","message":"Which account?","requestedSchema":{"type":"object","properties":{"acct":{"type":"string","maxLength":4},"n":{"type":"integer","default":2}},"required":["acct"]}}`
	urlParams  = `{"mode":"url","message":"Sign in","url":"https://login.example/a"}`
	askParams  = `{"messages":[{"role":"user","content":{"type":"text","text":"hi"}}],"maxTokens":5,"includeContext":"allServers"}`
)

func form(key string) sessions.Ask {
	return sessions.Ask{Key: key, Method: "elicitation/create", Params: json.RawMessage(formParams)}
}

func link(key string) sessions.Ask {
	return sessions.Ask{Key: key, Method: "elicitation/create", Params: json.RawMessage(urlParams)}
}

func sampling(key string) sessions.Ask {
	return sessions.Ask{Key: key, Method: "sampling/createMessage", Params: json.RawMessage(askParams)}
}

// asks is the answer of a modern server that wants to know something; "" is no state.
func asks(state string, as ...sessions.Ask) (response, error) {
	r := sessions.Response{ResultType: sessions.ResultInputRequired, Result: json.RawMessage(`{"resultType":"input_required"}`), Asks: as,
		Phase: sessions.Answered, Era: sessions.EraModern, ProtocolVersion: "2026-07-28"}
	if state != "" {
		r.RequestState = json.RawMessage(state)
	}
	return r, nil
}

func (sc *scene) respond(c *Call, at int, a Answer) (*Interaction, error) {
	sc.t.Helper()
	return sc.Respond(sc.t.Context(), sc.alice, c.ID, c.Interactions[at].ID, a)
}

func (sc *scene) accept(c *Call, at int, content string) {
	sc.t.Helper()
	if _, err := sc.respond(c, at, Answer{Action: Accept, Content: json.RawMessage(content)}); err != nil {
		sc.t.Fatalf("respond: %v", detail(err))
	}
}

// sends are the requests that left for the scene's tenant.
func (sc *scene) sends() (out []sent) {
	for _, s := range sc.w.sender.all() {
		if s.key.Tenant == sc.alice.Tenant {
			out = append(out, s)
		}
	}
	return out
}

// The modern round: nothing is held while a person thinks, any replica goes on, and
// the server gets its own state byte for byte.
func TestInput_ModernRoundIsAnsweredAnywhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const state = `"opa\u0071ue \/ \ud83d\ude00"`
	w.sender.answer(func(_ ctx, s sent, n int) (response, error) {
		if n == 1 {
			return asks(state, form("k1"), link("k 2"), sessions.Ask{Key: "r", Method: "roots/list", Params: json.RawMessage(`{}`)})
		}
		return answered(okResult)
	})
	for _, tool := range []string{"read", "write", "write_call", "write_session"} {
		t.Run(tool, func(t *testing.T) {
			a, b := w.node(quick()), w.node(quick())
			sc := w.scene(a, reverseContract...)
			c := sc.propose(tool)
			if c.State == ConsentRequired {
				sc.decide(c, true)
				c = sc.until(c.ID, InputRequired)
			}
			if c.State != InputRequired || len(c.Interactions) != 2 || !c.Recorded {
				t.Fatalf("%s %+v", c.State, c.Interactions)
			}
			if got := sc.get(c.ID); got.State != InputRequired || len(got.Interactions) != 2 || got.Revision != c.Revision ||
				string(got.Interactions[1].Request) != formParams && string(got.Interactions[0].Request) != formParams {
				t.Fatalf("%+v", got)
			}
			c = sc.get(c.ID)
			if len(a.live) != 0 {
				t.Fatal("the replica holds the call")
			}
			w.kill(a)
			other := sc.on(b)
			for _, i := range c.Interactions {
				ans := Answer{Action: Accept}
				if i.Kind == ElicitationForm {
					ans.Content = json.RawMessage(`{"acct":"42"}`)
				}
				got, err := b.Respond(t.Context(), sc.alice, c.ID, i.ID, ans)
				if err != nil || got.State != WasAnswered {
					t.Fatalf("%+v %v", got, err)
				}
			}
			got := other.until(c.ID, Succeeded)
			sends := sc.sends()
			last := sends[len(sends)-1]
			if want := `{"k 2":{"action":"accept"},"k1":{"action":"accept","content":{"acct":"42","n":2}},"r":{"roots":[{"uri":"file:///srv/data"}]}}`; last.inputs != want ||
				last.state != state || last.args != sends[0].args {
				t.Fatalf("sent %+v, wanted %s", last, want)
			}
			if len(sends) != 2 || len(got.Attempts) != 2 || got.Attempts[0].Outcome != "INPUT_REQUIRED" || got.Attempts[0].Phase != Answered {
				t.Fatalf("%d sends, %+v", len(sends), got.Attempts)
			}
			kinds := strings.Join(w.kinds(c.ID), " ")
			if !strings.Contains(kinds, "input.required input.answered input.answered call.dispatched call.finished") {
				t.Fatal(kinds)
			}
			// What is stored says nothing without the key, and what is logged says nothing at all.
			for _, secret := range []string{"opa", "Which account", `"42"`} {
				if n := w.count(`SELECT count(*) FROM interactions i, call_inputs p WHERE position($1::bytea in i.request) > 0
					OR position($1::bytea in i.response) > 0 OR position($1::bytea in p.request_state) > 0`, []byte(secret)); n != 0 || strings.Contains(w.logs.String(), secret) {
					t.Errorf("%s is in the clear", secret)
				}
			}
			w.verify(sc.alice.Tenant)
		})
	}
}

func TestInput_AnswersAreHeldAgainstWhoAndWhat(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	w.sender.answer(func(_ ctx, s sent, n int) (response, error) {
		if n == 1 {
			return asks(`"s"`, form("a"), sampling("b"))
		}
		return answered(okResult)
	})
	c := sc.get(sc.propose("write").ID)
	bob := w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "bob"})
	id := c.Interactions[0].ID
	refuse := func(p tenant.Principal, call, id string, a Answer, kind fault.Kind, where string) {
		t.Helper()
		_, err := sc.Respond(t.Context(), p, call, id, a)
		f, ok := fault.As(err)
		if !ok || f.Kind != kind || where != "" && (len(f.Fields) == 0 || f.Fields[0].Path != where) {
			t.Errorf("%+v: %v", a, err)
		}
	}
	good := Answer{Action: Accept, Content: json.RawMessage(`{"acct":"42"}`)}
	refuse(bob, c.ID, id, good, fault.NotFound, "")
	refuse(sc.admin, c.ID, id, good, fault.Denied, "")
	refuse(sc.alice, c.ID, "int_00000000000000000000000000", good, fault.NotFound, "")
	refuse(sc.alice, c.ID, "x", good, fault.NotFound, "")
	refuse(sc.alice, c.ID, id, Answer{}, fault.Invalid, "action")
	refuse(sc.alice, c.ID, id, Answer{Action: Accept}, fault.Invalid, "content")
	refuse(sc.alice, c.ID, id, Answer{Action: Accept, Content: json.RawMessage(`{"acct":"12345"}`)}, fault.Invalid, "content.acct")
	refuse(sc.alice, c.ID, id, Answer{Action: Decline, Content: json.RawMessage(`{}`)}, fault.Invalid, "content")
	refuse(sc.alice, c.ID, id, Answer{Action: Accept, Content: good.Content, Result: good.Content}, fault.Invalid, "result")
	if n := w.count(`SELECT count(*) FROM interactions WHERE state <> 'PENDING'`); n != 0 {
		t.Fatal("a wrong answer changed something")
	}
	first, err := sc.respond(c, 0, good)
	if err != nil {
		t.Fatal(err)
	}
	// Written otherwise it is the same answer.
	again, err := sc.respond(c, 0, Answer{Action: Accept, Content: json.RawMessage(` { "n":2, "acct":"42"}`)})
	if err != nil || !again.AnswerTime.Equal(*first.AnswerTime) {
		t.Fatalf("%+v %v", again, err)
	}
	refuse(sc.alice, c.ID, id, Answer{Action: Decline}, fault.Exists, "")
	refuse(sc.alice, c.ID, id, Answer{Action: Accept, Content: json.RawMessage(`{"acct":"43"}`)}, fault.Exists, "")

	second := c.Interactions[1]
	if strings.Contains(string(second.Request), "includeContext") || second.Kind != Sampling {
		t.Errorf("%s", second.Request)
	}
	refuse(sc.alice, c.ID, second.ID, Answer{Action: Accept}, fault.Invalid, "result")
	for _, bad := range []string{`[]`, `{"role":"user","content":{"type":"text","text":"x"},"model":"m"}`, `{"role":"assistant","content":[],"model":"m"}`,
		`{"role":"assistant","content":{"type":"tool_use"},"model":"m"}`, `{"role":"assistant","content":{"type":"text","text":"x"}}`,
		`{"role":"assistant","content":{"type":"text","text":"x"},"model":"m","stopReason":"toolUse"}`} {
		_, err := sc.respond(c, 1, Answer{Action: Accept, Result: json.RawMessage(bad)})
		if f, ok := fault.As(err); !ok || f.Kind != fault.Invalid || !strings.HasPrefix(f.Fields[0].Path, "result") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	said := `{"content":{"text":"x","type":"text"},"model":"m","role":"assistant"}`
	if _, err := sc.respond(c, 1, Answer{Action: Accept, Result: json.RawMessage(said)}); err != nil {
		t.Fatal(err)
	}
	sc.until(c.ID, Succeeded)
	if last := w.sender.all()[1]; !strings.HasSuffix(last.inputs, `"b":`+said+`}`) {
		t.Errorf("%s", last.inputs)
	}
	refuse(sc.alice, c.ID, id, Answer{Action: Decline}, fault.Exists, "")
	// Another call's interaction is not to be had through this call.
	w.sender.answer(func(ctx, sent, int) (response, error) { return asks("", form("a")) })
	other := sc.propose("destroy", func(p *Proposal) { p.Arguments = []byte(`{"o":1}`) })
	refuse(sc.alice, other.ID, id, good, fault.NotFound, "")
}

// What the host answers by itself: forms that ask for secrets, malformed ones, URLs
// that lead elsewhere. No person is asked, and the server can end its work.
func TestInput_HostAnswersWhatNobodyMayBeAsked(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	for name, c := range map[string]struct{ params, result, refusal string }{
		"secret": {`{"message":"x","requestedSchema":{"type":"object","properties":{"password":{"type":"string"}}}}`, `{"action":"decline"}`, "ASKS_FOR_SECRET"},
		"nested": {`{"message":"x","requestedSchema":{"type":"object","properties":{"a":{"type":"object"}}}}`, `{"action":"cancel"}`, "MALFORMED"},
		"url":    {`{"mode":"url","message":"x","url":"https://evil.example/"}`, `{"action":"decline"}`, "URL_REFUSED"},
		"huge":   {`{"message":"` + strings.Repeat("x", 70<<10) + `","requestedSchema":{"type":"object","properties":{}}}`, `{"action":"cancel"}`, "MALFORMED"},
	} {
		for _, tool := range []string{"read", "write"} {
			t.Run(name+" "+tool, func(t *testing.T) {
				sc := w.scene(n, reverseContract...)
				w.sender.answer(func(ctx, sent, int) (response, error) {
					if len(sc.sends()) == 1 {
						return asks(`"st"`, sessions.Ask{Key: "k", Method: "elicitation/create", Params: json.RawMessage(c.params)})
					}
					return answered(okResult)
				})
				got := sc.propose(tool)
				if got.State != Succeeded || len(got.Attempts) != 2 || !slices.ContainsFunc(got.Findings, func(f string) bool { return strings.HasPrefix(f, "INPUT_REFUSED: "+c.refusal) }) {
					t.Fatalf("%+v", got)
				}
				if last := sc.sends()[1]; last.inputs != `{"k":`+c.result+`}` || last.state != `"st"` {
					t.Fatalf("%+v", last)
				}
				if tool == "write" {
					all, err := sc.Interactions(t.Context(), sc.alice, got.ID)
					if err != nil || len(all) != 1 || all[0].Refusal != c.refusal || all[0].Request != nil || all[0].State == Pending {
						t.Fatalf("%+v %v", all, err)
					}
					if !slices.Contains(w.kinds(got.ID), "input.refused") {
						t.Fatal(w.kinds(got.ID))
					}
				}
			})
		}
	}
}

// A server that asks what it was not offered breaks the protocol; one that asks for
// ever, too. A write that was answered meanwhile may be half done.
func TestInput_EndsWithServersThatBreakTheRules(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), "limits: {timeout: 20s", "reverse: {elicitation: {form: true}}\nlimits: {timeout: 20s")
	many := make([]sessions.Ask, maxQuestions+1)
	for i := range many {
		many[i] = form(fmt.Sprint(i))
	}
	for name, as := range map[string][]sessions.Ask{"sampling": {sampling("x")}, "url": {link("x")}, "method": {{Key: "x", Method: "tools/call", Params: json.RawMessage(`{}`)}},
		"roots": {{Key: "x", Method: "roots/list", Params: json.RawMessage(`{}`)}}, "too many": many, "twice": {form("a"), form("a")}} {
		w.sender.answer(func(ctx, sent, int) (response, error) { return asks(`"s"`, as...) })
		for _, tool := range []string{"read", "write"} {
			c := sc.propose(tool, func(p *Proposal) { p.Arguments = fmt.Appendf(nil, `{"%s":1}`, name) })
			if c.State != Failed || c.Error.Layer != LayerProtocol || c.Error.Code != "INPUT_INVALID" {
				t.Errorf("%s %s: %s %+v", name, tool, c.State, c.Error)
			}
		}
	}
	var pauses []time.Duration
	sc.pace = func(d time.Duration) time.Duration { pauses = append(pauses, d); return 0 }
	// Only a state: it goes on by itself, a bounded number of times.
	for tool, state := range map[string]State{"read": Failed, "write": Uncertain} {
		before := w.sender.count(tool)
		w.sender.answer(func(_ ctx, _ sent, n int) (response, error) { return asks(fmt.Sprintf(`"s%d"`, n)) })
		c := sc.propose(tool, func(p *Proposal) { p.Arguments, p.Wait = []byte(`{"state":1}`), time.Minute })
		if c.State != state || c.Error.Code != "INPUT_INVALID" || w.sender.count(tool)-before != maxRounds+1 {
			t.Errorf("%s: %s %+v, %d sends", tool, c.State, c.Error, w.sender.count(tool)-before)
		}
		if last := w.sender.all()[len(w.sender.all())-1]; last.state != `"s10"` || last.inputs != "" {
			t.Errorf("%+v", last)
		}
	}
	if len(pauses) != 2*maxRounds || pauses[0] < firstDelay || pauses[maxRounds-1] != maxDelay {
		t.Errorf("%v", pauses)
	}
}

// Whatever ends a call that waits for input, a read is CANCELLED and a write is
// UNCERTAIN, and nothing is sent any more.
func TestInput_WhatEndsAWaitingCall(t *testing.T) {
	t.Parallel()
	ends := map[string]func(sc *scene, c *Call){
		"expire": func(sc *scene, c *Call) {
			sc.w.exec(`UPDATE call_inputs SET expire_time = now() WHERE call_id = $1`, c.ID)
			sc.sweep(sc.t)
		},
		"cancel": func(sc *scene, c *Call) {
			if got, err := sc.Cancel(sc.t.Context(), sc.alice, c.ID); err != nil || !got.State.Final() && got.State != Uncertain {
				sc.t.Errorf("%+v %v", got, err)
			}
		},
		"close": func(sc *scene, c *Call) {
			if _, err := sc.store.Close(sc.t.Context(), sc.alice, sc.session.ID); err != nil {
				sc.t.Error(err)
			}
			sc.sweep(sc.t)
		},
		"close and answer": func(sc *scene, c *Call) {
			if _, err := sc.store.Close(sc.t.Context(), sc.alice, sc.session.ID); err != nil {
				sc.t.Error(err)
			}
			// Nobody answers in a session that is closed: the answer is refused, and the call ends.
			if _, err := sc.respond(c, 0, Answer{Action: Accept, Content: json.RawMessage(`{"acct":"1"}`)}); !fault.Is(err, fault.Precondition) {
				sc.t.Error(err)
			}
			sc.sweep(sc.t)
		},
		"another contract": func(sc *scene, c *Call) {
			sc.activate(contractSource(sc.t, append(reverseContract, "ceiling: 1m", "ceiling: 2m")...))
			sc.accept(c, 0, `{"acct":"1"}`)
		},
		"another definition": func(sc *scene, c *Call) {
			sc.w.lister.of(sc.server.ID, "second", c.Name)
			sc.change(c.Name, "first")
			sc.accept(c, 0, `{"acct":"1"}`)
		},
		"suspended": func(sc *scene, c *Call) {
			sc.w.exec(`UPDATE tenants SET state = 'SUSPENDED' WHERE tenant_id = $1`, sc.alice.Tenant)
			sc.accept(c, 0, `{"acct":"1"}`)
		},
		"revoked": func(sc *scene, c *Call) {
			if _, err := sc.w.tenants.RevokeKey(sc.t.Context(), sc.admin, sc.alice.KeyID); err != nil {
				sc.t.Error(err)
			}
			sc.accept(c, 0, `{"acct":"1"}`)
		},
	}
	w := newWorld(t)
	n := w.node(quick())
	w.sender.answer(func(ctx, sent, int) (response, error) { return asks(`"s"`, form("a")) })
	for name, end := range ends {
		for tool, state := range map[string]State{"read": Cancelled, "write_call": Uncertain} {
			t.Run(name+" "+tool, func(t *testing.T) {
				sc := w.scene(n, reverseContract...)
				sc.t = t
				c := sc.propose(tool)
				if c.State == ConsentRequired {
					sc.decide(c, true)
				}
				c = sc.until(c.ID, InputRequired)
				end(sc, c)
				got := sc.until(c.ID, Cancelled, Uncertain)
				if got.State != state || got.Error == nil || got.Receipt == "" || got.FinishTime == nil || len(sc.sends()) != 1 {
					t.Fatalf("%s %+v, %d sends", got.State, got.Error, len(sc.sends()))
				}
				if n := w.count(`SELECT count(*) FROM interactions WHERE state = 'PENDING' AND call_id = $1`, c.ID) +
					w.count(`SELECT count(*) FROM call_inputs WHERE phase <> 'ENDED' AND call_id = $1`, c.ID); n != 0 {
					t.Fatal("questions stay open")
				}
				if name == "expire" && !slices.Contains(w.kinds(c.ID), "input.expired") {
					t.Fatal(w.kinds(c.ID))
				}
				if _, err := sc.respond(c, 0, Answer{Action: Dismiss}); err == nil && !strings.Contains(name, " ") {
					t.Error("an answer came after the end")
				}
				w.verify(sc.alice.Tenant)
			})
		}
	}
}

// A refused form is told to the server; a refused sampling ends the call, since a
// modern server knows no word for it.
func TestInput_Refusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	for action, word := range map[Action]string{Decline: "decline", Dismiss: "cancel"} {
		w.sender.answer(func(_ ctx, _ sent, n int) (response, error) {
			if n == 1 {
				return asks("", form("a"), link("b"))
			}
			return answered(`{"isError":true,"content":[{"type":"text","text":"then not"}]}`)
		})
		c := sc.get(sc.propose("write", func(p *Proposal) { p.Arguments = []byte(`{"a":"` + word + `"}`) }).ID)
		for i := range c.Interactions {
			if _, err := sc.respond(c, i, Answer{Action: action}); err != nil {
				t.Fatal(err)
			}
		}
		got := sc.until(c.ID, Failed)
		last := w.sender.all()[len(w.sender.all())-1]
		if want := `{"a":{"action":"` + word + `"},"b":{"action":"` + word + `"}}`; last.inputs != want || last.state != "" || got.Error.Layer != LayerTool {
			t.Errorf("%+v %+v", last, got.Error)
		}
	}
	w.sender.answer(func(ctx, sent, int) (response, error) { return asks(`"s"`, form("a"), sampling("b")) })
	for tool, state := range map[string]State{"read": Cancelled, "write": Uncertain} {
		c := sc.get(sc.propose(tool, func(p *Proposal) { p.Arguments = []byte(`{"s":1}`) }).ID)
		if _, err := sc.respond(c, 1, Answer{Action: Decline}); err != nil {
			t.Fatal(err)
		}
		if got := sc.get(c.ID); got.State != state || got.Error.Code != "INPUT_DECLINED" {
			t.Errorf("%s %+v", got.State, got.Error)
		}
	}
}

// An error of revision 2025-11-25 that sends a person to a URL: the request is
// repeated as it was.
func TestInput_URLErrorIsRepeatedPlainly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	w.sender.answer(func(_ ctx, _ sent, n int) (response, error) {
		if n == 1 {
			return response{Phase: sessions.Answered, Era: sessions.EraLegacy, Error: &sessions.RPCError{Code: -32042, Message: "open it"},
				Asks: []sessions.Ask{{Method: "elicitation/create", Params: json.RawMessage(urlParams)}}}, nil
		}
		return answered(okResult)
	})
	c := sc.get(sc.propose("write").ID)
	if c.State != InputRequired {
		t.Fatalf("%s %+v", c.State, c.Error)
	}
	if _, err := sc.respond(c, 0, Answer{Action: Accept}); err != nil {
		t.Fatal(err)
	}
	sc.until(c.ID, Succeeded)
	if all := w.sender.all(); len(all) != 2 || all[1].inputs != "" || all[1].state != "" || all[1].args != all[0].args {
		t.Fatalf("%+v", all)
	}
	c = sc.get(sc.propose("write", func(p *Proposal) { p.Arguments = []byte(`{"other":1}`) }).ID)
	if _, err := sc.respond(c, 0, Answer{Action: Decline}); err != nil {
		t.Fatal(err)
	}
	if got := sc.get(c.ID); got.State != Uncertain || len(w.sender.all()) != 3 {
		t.Fatalf("%s", got.State)
	}
}

// A round that was not sent is sent again with the same answers; one whose replica
// dies is repeated only where the contract lets it.
func TestInput_RetriesKeepTheirRound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.node(quick()), w.node(quick())
	sc := w.scene(a, reverseContract...)
	g := newGate(t)
	w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
		switch n {
		case 1:
			return asks(`"s"`, form("a"))
		case 2:
			return response{Phase: sessions.NotSent}, fault.New(fault.Unavailable, "CONNECT_FAILED", "no").In(fault.Transport)
		case 3:
			return g.script(okAnswer)(ctx, s, n)
		}
		return answered(okResult)
	})
	c := sc.get(sc.propose("read_retry").ID)
	sc.accept(c, 0, `{"acct":"1"}`)
	<-g.arrived
	w.kill(a)
	b.sweep(t)
	got := sc.on(b).until(c.ID, Succeeded)
	all := w.sender.all()
	if len(all) != 4 || len(got.Attempts) != 4 {
		t.Fatalf("%d sends, %+v", len(all), got.Attempts)
	}
	for _, s := range all[1:] {
		if s.state != `"s"` || s.inputs != all[1].inputs || s.inputs == "" {
			t.Errorf("%+v", s)
		}
	}
	// A write that sent nothing in its second round was asked in its first: nobody knows.
	w.sender.answer(func(_ ctx, _ sent, n int) (response, error) {
		if n == 1 {
			return asks(`"s"`, form("a"))
		}
		return response{Phase: sessions.NotSent}, fault.New(fault.Unavailable, "CONNECT_FAILED", "no").In(fault.Transport)
	})
	on := sc.on(b)
	c = on.get(on.propose("write").ID)
	on.accept(c, 0, `{"acct":"1"}`)
	if got := on.until(c.ID, Failed, Uncertain); got.State != Uncertain || len(got.Attempts) != 4 {
		t.Errorf("%s %+v", got.State, got.Attempts)
	}
	g.release()
}
