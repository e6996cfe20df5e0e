package calls

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestRead_IsRecordedWithItsOutcomeInOneCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	c := sc.propose("read")
	if c.State != Succeeded || !c.Recorded || c.Receipt == "" || string(c.Result) != okResult || len(c.Attempts) != 1 {
		t.Fatalf("%+v", c)
	}
	got := sc.get(c.ID)
	if got.State != Succeeded || got.Receipt != c.Receipt || got.Revision != c.Revision || len(got.Attempts) != 1 ||
		got.Attempts[0].Phase != Answered || got.Attempts[0].EndTime == nil {
		t.Fatalf("%+v", got)
	}
	if k := w.kinds(c.ID); !slices.Equal(k, []string{"call.finished"}) {
		t.Fatalf("audit: %v", k)
	}
	if n := w.count(`SELECT calls FROM session_usage WHERE session_id = $1`, sc.session.ID); n != 1 {
		t.Fatalf("%d calls counted", n)
	}
	w.verify(sc.alice.Tenant)
}

func TestRead_RecordedBeforeItIsSentWhenTheContractSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), "RECORD", "before_send")
	c := sc.propose("read")
	if k := w.kinds(c.ID); c.State != Succeeded || !slices.Equal(k, []string{"call.dispatched", "call.finished"}) {
		t.Fatalf("%s %v", c.State, k)
	}
}

func TestWrite_AsksIsApprovedAndRunsOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	c := sc.propose("write_call")
	if c.State != ConsentRequired || c.ConsentID == "" || c.ConsentExpire == nil || len(w.sender.all()) != 0 {
		t.Fatalf("%+v", c)
	}
	sc.decide(c, true)
	c = sc.until(c.ID, Succeeded)
	if w.sender.count("write_call") != 1 || c.Receipt == "" || len(c.Attempts) != 1 || c.Attempts[0].SendBy == nil {
		t.Fatalf("%d sends, %+v", w.sender.count("write_call"), c)
	}
	want := []string{"consent.requested", "call.proposed", "consent.decided", "call.dispatched", "call.finished"}
	if k := w.kinds(c.ID); !slices.Equal(k, want) {
		t.Fatalf("audit: %v", k)
	}
	// Dispatching it again, by whoever comes late, does nothing.
	if err := sc.dispatchWaiting(t.Context(), sc.alice.Tenant, c.ID); err != nil || w.sender.count("write_call") != 1 {
		t.Fatal(err, w.sender.count("write_call"))
	}
	_, err := sc.consents.Decide(t.Context(), sc.approver, c.ConsentID, consent.Decision{})
	if f, _ := fault.As(err); f == nil || f.Kind != fault.Conflict || f.Metadata["state"] != "CONSUMED" {
		t.Fatalf("a second answer: %v", err)
	}
	w.verify(sc.alice.Tenant)
}

func TestWrite_TwoDispatchesOfOneConsentAtOnceSendOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, two := w.node(quick()), w.node(quick())
	sc := w.scene(one)
	for range 10 {
		c := sc.propose("write_call")
		w.exec(`UPDATE consents SET state = 'APPROVED' WHERE consent_id = $1`, c.ConsentID)
		done := make(chan error, 4)
		for _, n := range []*node{one, two, one, two} {
			go func() { done <- n.dispatchWaiting(t.Context(), sc.alice.Tenant, c.ID) }()
		}
		for range 4 {
			if err := <-done; err != nil && !errors.Is(err, errLost) {
				t.Fatal(detail(err))
			}
		}
		sc.until(c.ID, Succeeded)
	}
	if n := w.sender.count("write_call"); n != 10 {
		t.Fatalf("%d sends of 10 calls", n)
	}
}

// ending is a way in which a waiting call ends without being sent.
type ending struct {
	name   string
	end    func(sc *scene, c *Call)
	state  State
	reason Reason
	// lazy endings are noticed when somebody would dispatch.
	lazy    bool
	consent string
}

var endings = []ending{
	{"denied", func(sc *scene, c *Call) { sc.decide(c, false) }, Denied, ReasonRefused, false, "DENIED"},
	{"cancelled", func(sc *scene, c *Call) {
		if c, err := sc.Cancel(sc.t.Context(), sc.alice, c.ID); err != nil || c.State != Cancelled {
			sc.t.Errorf("cancel: %+v, %v", c, err)
		}
	}, Cancelled, NoReason, false, "VOID"},
	{"expired", func(sc *scene, c *Call) {
		sc.w.exec(`UPDATE consents SET expire_time = now() - interval '1 second' WHERE consent_id = $1`, c.ConsentID)
		sc.sweep(sc.t)
	}, Denied, ReasonExpired, false, "EXPIRED"},
	{"another contract", func(sc *scene, _ *Call) { sc.activate(contractSource(sc.t, "timeout: 20s", "timeout: 21s")) }, Denied, ReasonVoid, false, "VOID"},
	{"another contract and back", func(sc *scene, _ *Call) {
		sc.activate(contractSource(sc.t, "timeout: 20s", "timeout: 21s"))
		if _, err := sc.contracts.Activate(sc.t.Context(), sc.admin, "calendar", sc.contract.Revision); err != nil {
			sc.t.Error(err)
		}
	}, Denied, ReasonVoid, false, "VOID"},
	{"another definition", func(sc *scene, _ *Call) { sc.change("write_call", "second") }, Denied, ReasonVoid, false, "VOID"},
	{"the session closed", func(sc *scene, c *Call) {
		if _, err := sc.store.Close(sc.t.Context(), sc.alice, c.SessionID); err != nil {
			sc.t.Error(err)
		}
	}, Denied, ReasonVoid, false, "VOID"},
	{"the server moved", func(sc *scene, _ *Call) {
		url := "https://calendar.example/other"
		if _, err := sc.catalog.UpdateServer(sc.t.Context(), sc.admin, "calendar", catalog.ServerUpdate{URL: &url}); err != nil {
			sc.t.Error(err)
		}
	}, Denied, ReasonVoid, false, "VOID"},
	{"the server deleted", func(sc *scene, _ *Call) {
		if err := sc.catalog.DeleteServer(sc.t.Context(), sc.admin, "calendar"); err != nil {
			sc.t.Error(err)
		}
	}, Denied, ReasonVoid, false, "VOID"},
	{"the key revoked", func(sc *scene, c *Call) {
		if _, err := sc.w.tenants.RevokeKey(sc.t.Context(), sc.admin, c.KeyID); err != nil {
			sc.t.Error(err)
		}
	}, Denied, ReasonVoid, true, "VOID"},
	{"the tenant suspended", func(sc *scene, _ *Call) {
		sc.w.exec(`UPDATE tenants SET state = 'SUSPENDED' WHERE tenant_id = $1`, sc.alice.Tenant.String())
	}, Denied, ReasonVoid, true, "VOID"},
	{"the session expired", func(sc *scene, c *Call) {
		sc.w.exec(`UPDATE sessions SET expire_time = now() - interval '1 second' WHERE session_id = $1`, c.SessionID)
	}, Denied, ReasonVoid, true, "VOID"},
	{"the list cannot be renewed", func(sc *scene, _ *Call) {
		sc.w.lister.fail(fault.New(fault.Unavailable, "DOWN", "the server is down"))
		sc.invalidate()
	}, Denied, ReasonVoid, true, "VOID"},
}

func (sc *scene) invalidate() {
	sc.t.Helper()
	err := sc.catalog.Invalidate(sc.t.Context(), catalog.Change{Tenant: sc.alice.Tenant, ServerID: sc.server.ID, Reason: "changed"})
	if err != nil {
		sc.t.Fatal(err)
	}
}

// What ends a waiting call keeps it from being sent, whether it came before the
// approval or after it.
func TestWaiting_WhatEndsIt(t *testing.T) {
	t.Parallel()
	for _, approvedFirst := range []bool{false, true} {
		for _, e := range endings {
			if approvedFirst && e.name == "denied" {
				continue
			}
			t.Run(e.name, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				var observed []State
				n := w.node(quick(), func(d *Deps) { d.Observe = func(c *Call) { observed = append(observed, c.State) } })
				sc := w.scene(n)
				c := sc.propose("write_call")
				approve := func() {
					// Behind the service's back, so that nobody dispatches before the sweep.
					w.exec(`UPDATE consents SET state = 'APPROVED' WHERE consent_id = $1 AND state = 'PENDING'`, c.ConsentID)
				}
				if approvedFirst {
					approve()
				}
				e.end(sc, c)
				if e.lazy {
					approve()
				}
				n.sweep(t)
				got := sc.until(c.ID, e.state)
				if got.Reason != e.reason || len(w.sender.all()) != 0 || got.Receipt == "" || got.FinishTime == nil {
					t.Fatalf("%s %q, %d sends, %+v", got.State, got.Reason, len(w.sender.all()), got)
				}
				// Whoever waits learns why, and not from the audit alone.
				if e.state == Denied && (got.Error == nil || got.Error.Layer != LayerHost || got.Error.Message == "") {
					t.Fatalf("no cause is named: %+v", got.Error)
				}
				var state string
				if err := w.owner.QueryRow(t.Context(), `SELECT state FROM consents WHERE consent_id = $1`, c.ConsentID).Scan(&state); err != nil || state != e.consent {
					t.Fatalf("the consent is %s, %v", state, err)
				}
				_, err := sc.consents.Decide(t.Context(), sc.approver, c.ConsentID, consent.Decision{Approve: true})
				if !fault.Is(err, fault.Conflict) {
					t.Fatalf("deciding it then: %v", err)
				}
				if !slices.Equal(observed, []State{e.state}) {
					t.Fatalf("observed %v", observed)
				}
				w.verify(sc.alice.Tenant)
			})
		}
	}
}

func TestSessionRule_AGrantCoversTheNextCalls(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	first := sc.propose("write_session")
	waiting := sc.propose("write_session")
	if first.State != ConsentRequired || waiting.State != ConsentRequired {
		t.Fatal(first.State, waiting.State)
	}
	sc.decide(first, true)
	sc.until(first.ID, Succeeded)
	second := sc.propose("write_session", func(r *Proposal) { r.Arguments = []byte(`{"other":true}`) })
	if second.State != Succeeded || second.GrantID == "" || second.ConsentID != "" || second.Decision.Outcome != authz.Allow {
		t.Fatalf("%+v", second)
	}
	var reserved, spent int
	if err := w.owner.QueryRow(t.Context(), `SELECT uses_reserved, uses_spent FROM grants`).Scan(&reserved, &spent); err != nil || reserved != 0 || spent != 1 {
		t.Fatal(reserved, spent, err)
	}
	// The grant is for this user, session, tool and definition only.
	bob := w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "bob"})
	for name, c := range map[string]*Call{
		"another tool": sc.propose("write_call"),
		"another session": sc.propose("write_session", func(r *Proposal) {
			r.SessionID = sc.open(sc.alice).ID
		}),
	} {
		if c.State != ConsentRequired {
			t.Errorf("%s: %s", name, c.State)
		}
	}
	if c, err := sc.Propose(t.Context(), bob, Proposal{SessionID: sc.open(bob).ID, Server: "calendar", Tool: "write_session"}); err != nil || c.State != ConsentRequired {
		t.Errorf("another user: %+v %v", c, err)
	}
	if got := sc.get(waiting.ID); got.State != ConsentRequired {
		t.Errorf("the call that waited before: %s", got.State)
	}
	sc.change("write", "second") // another tool's definition
	if c := sc.propose("write_session"); c.State != Succeeded {
		t.Errorf("after a change of another tool: %s", c.State)
	}
	sc.change("write_session", "second")
	if n := w.count(`SELECT count(*) FROM grants WHERE state = 'VOID' AND end_time IS NOT NULL`); n != 1 {
		t.Errorf("%d void grants", n)
	}
	if n := w.count(`SELECT count(*) FROM audit_entries WHERE kind IN ('grant.opened', 'grant.ended')`); n != 2 {
		t.Errorf("%d entries of the grant", n)
	}
	if c := sc.propose("write_session"); c.State != Denied || c.Decision.FirstFailed != authz.CheckDefinition {
		t.Errorf("with another definition: %s %s", c.State, c.Decision.FirstFailed)
	}
}

func TestGrant_AUseIsGivenBackOnlyWhenNothingWasSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	first := sc.propose("write_session")
	sc.decide(first, true)
	sc.until(first.ID, Succeeded)
	spent := func() int { return w.count(`SELECT uses_spent FROM grants`) }

	w.sender.answer(failAs(sessions.NotSent, "NO_ROUTE", fault.Unavailable))
	c := sc.propose("write_session", nothing)
	if c.State != Failed || len(c.Attempts) != 3 || spent() != 0 {
		t.Fatalf("not sent: %s, %d attempts, %d spent", c.State, len(c.Attempts), spent())
	}
	w.sender.answer(failAs(sessions.Answered, "REFUSED", fault.Denied))
	if c := sc.propose("write_session"); c.State != Failed || spent() != 1 {
		t.Fatalf("answered: %s, %d spent", c.State, spent())
	}
	w.sender.answer(failAs(sessions.MaybeSent, "BROKE", fault.Unavailable))
	if c := sc.propose("write_session"); c.State != Uncertain || spent() != 2 {
		t.Fatalf("maybe sent: %s, %d spent", c.State, spent())
	}
	// First perhaps sent, then not: an idempotent tool is not under a grant here, so
	// the table is asked with a limit instead.
	w.exec(`UPDATE grants SET uses_limit = 3`)
	w.sender.answer(nil)
	if c := sc.propose("write_session"); c.State != Succeeded || spent() != 3 {
		t.Fatalf("the last use: %s, %d spent", c.State, spent())
	}
	if c := sc.propose("write_session"); c.State != ConsentRequired || spent() != 3 {
		t.Fatalf("past the last use: %s, %d spent", c.State, spent())
	}
}

func nothing(*Proposal) {}

// failAs makes every attempt fail in this phase.
func failAs(p sessions.Phase, reason string, k fault.Kind) func(context.Context, sent, int) (sessions.Response, error) {
	return func(context.Context, sent, int) (sessions.Response, error) {
		return sessions.Response{Phase: p}, fault.New(k, reason, "as the script says").In(fault.Transport)
	}
}

func TestBudget(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), "calls_per_session: 1000000", "calls_per_session: 4")
	// Plain reads at once: exactly as many as the budget.
	got := make(chan *Call, 12)
	for range 12 {
		go func() {
			c, err := sc.Propose(t.Context(), sc.alice, sc.proposal("read"))
			if err != nil {
				t.Error(detail(err))
			}
			got <- c
		}()
	}
	states := map[State]int{}
	for range 12 {
		c := <-got
		if states[c.State]++; c.State == Denied && c.Decision.FirstFailed != authz.CheckBudget {
			t.Errorf("%+v", c.Decision)
		}
	}
	if states[Succeeded] != 4 || states[Denied] != 8 || w.sender.count("read") != 4 {
		t.Fatalf("%v, %d sends", states, w.sender.count("read"))
	}
	// A write counts in its transaction, also where memory knows nothing.
	other := sc.on(w.node(quick()))
	c := other.propose("write_call")
	if c.State != Denied || c.Decision.FirstFailed != authz.CheckBudget || c.ConsentID != "" || c.Attempt != 0 {
		t.Fatalf("%+v", c)
	}
	sc.session = sc.open(sc.alice)
	w.exec(`INSERT INTO session_usage SELECT tenant_id, session_id, 4 FROM sessions WHERE session_id = $1`, sc.session.ID)
	fresh := sc.on(sc.node)
	fresh.session.Admit(1) // memory is behind
	for _, tool := range []string{"write", "write_call"} {
		c := fresh.propose(tool)
		if c.State != Denied || c.Decision.FirstFailed != authz.CheckBudget || c.ConsentID != "" || c.Attempt != 0 || len(c.Attempts) != 0 {
			t.Fatalf("%s: %+v", tool, c)
		}
	}
	if n := w.count(`SELECT count(*) FROM consents`); n != 0 {
		t.Fatalf("%d consents of denied calls", n)
	}
}

func TestDenied_IsACallWithItsCheckNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	// FO-096: no door to a tool that the contract does not name.
	for _, name := range []string{"erase", "calendar__read", "calendar.read", "mcp__calendar__read", "READ", "read ", "re\u200bad"} {
		c := sc.propose(name)
		if c.State != Denied || c.Decision.FirstFailed != authz.CheckDefinition || c.Receipt == "" || !c.Recorded {
			t.Errorf("%q: %s %s", name, c.State, c.Decision.FirstFailed)
		}
		if k := w.kinds(c.ID); !slices.Equal(k, []string{"call.denied"}) {
			t.Errorf("%q: audit %v", name, k)
		}
	}
	sc.change("write", "second")
	if c := sc.propose("write"); c.State != Denied || c.Decision.FirstFailed != authz.CheckDefinition {
		t.Errorf("a definition that nobody reviewed: %s", c.State)
	}
	if _, err := sc.store.Close(t.Context(), sc.alice, sc.session.ID); err != nil {
		t.Fatal(err)
	}
	if c := sc.propose("read"); c.State != Denied || c.Decision.FirstFailed != authz.CheckHost {
		t.Errorf("closed session: %s", c.State)
	}
	if n := len(w.sender.all()); n != 0 {
		t.Errorf("%d requests were sent", n)
	}
}

// A replica whose memory is behind must not send what Postgres no longer allows.
func TestAdmit_LooksWhereItCounts(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"key":     `UPDATE keys SET state = 'REVOKED'`,
		"session": `UPDATE sessions SET state = 'CLOSED'`,
		"server":  `UPDATE servers SET registration = registration + 1`,
		"tenant":  `UPDATE tenants SET state = 'SUSPENDED'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			sc := w.scene(w.node(quick()))
			sc.propose("write")
			sc.propose("write") // all is in memory now
			w.exec(sql)
			got := sc.propose("write")
			if got.State != Denied || got.Reason != ReasonVoid || w.sender.count("write") != 2 {
				t.Fatalf("%s %s, %d sends", got.State, got.Reason, w.sender.count("write"))
			}
		})
	}
	t.Run("contract", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		one, two := w.node(quick()), w.node(quick())
		sc := w.scene(one)
		sc.propose("write")
		sc.on(two).activate(contractSource(t, `"D:write", effect: write, consent: none`, `"D:write", effect: write, consent: call`))
		if got := sc.propose("write"); got.State != ConsentRequired || w.sender.count("write") != 1 {
			t.Fatalf("%s, %d sends", got.State, w.sender.count("write"))
		}
	})
	t.Run("same contract under a newer number", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		sc := w.scene(w.node(quick()))
		c := sc.propose("write_call")
		if r := sc.activate(contractSource(t)); r.ContractID != c.ContractID || r.Revision == c.ContractRevision {
			t.Fatalf("%+v", r)
		}
		sc.decide(c, true)
		sc.until(c.ID, Succeeded)
	})
}

func TestPropose_NamesBadInputAndLeavesNoTrace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for name, c := range map[string]struct {
		change func(*Proposal)
		path   string
	}{
		"no tool":          {func(r *Proposal) { r.Tool = "" }, "tool"},
		"NUL in the tool":  {func(r *Proposal) { r.Tool = "re\x00ad" }, "tool"},
		"long tool":        {func(r *Proposal) { r.Tool = strings.Repeat("x", 129) }, "tool"},
		"tool no UTF-8":    {func(r *Proposal) { r.Tool = "\xff" }, "tool"},
		"server":           {func(r *Proposal) { r.Server = "No Such" }, "server"},
		"NUL in server":    {func(r *Proposal) { r.Server = "a\x00" }, "server"},
		"long request id":  {func(r *Proposal) { r.RequestID = strings.Repeat("x", 129) }, "requestId"},
		"NUL in requestId": {func(r *Proposal) { r.RequestID = "\x00" }, "requestId"},
		"array":            {func(r *Proposal) { r.Arguments = []byte(`[]`) }, "arguments"},
		"no JSON":          {func(r *Proposal) { r.Arguments = []byte(`{`) }, "arguments"},
		"duplicate":        {func(r *Proposal) { r.Arguments = []byte(`{"a":{"b":1,"b":2}}`) }, "arguments.a.b"},
		"lone surrogate":   {func(r *Proposal) { r.Arguments = []byte(`{"a":"\ud800"}`) }, "arguments.a"},
	} {
		r := sc.proposal("read")
		c.change(&r)
		_, err := sc.Propose(t.Context(), sc.alice, r)
		f, _ := fault.As(err)
		if f == nil || f.Kind != fault.Invalid || len(f.Fields) == 0 || f.Fields[0].Path != c.path {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, id := range []string{"", "x", "ses_\x00", "ses_00000000000000000000000000"} {
		r := sc.proposal("read")
		r.SessionID = id
		if _, err := sc.Propose(t.Context(), sc.alice, r); !fault.Is(err, fault.NotFound) {
			t.Errorf("session %q: %v", id, err)
		}
		if _, err := sc.Get(t.Context(), sc.alice, id, time.Second, 0); !fault.Is(err, fault.NotFound) {
			t.Errorf("call %q: %v", id, err)
		}
		if _, err := sc.Cancel(t.Context(), sc.alice, id); !fault.Is(err, fault.NotFound) {
			t.Errorf("cancel %q: %v", id, err)
		}
		if _, err := sc.consents.Get(t.Context(), sc.approver, id); !fault.Is(err, fault.NotFound) {
			t.Errorf("consent %q: %v", id, err)
		}
	}
	if n := w.count(`SELECT (SELECT count(*) FROM calls) + (SELECT count(*) FROM consents) + (SELECT count(*) FROM session_usage)`); n != 0 {
		t.Fatalf("%d rows", n)
	}
}
