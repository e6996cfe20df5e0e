package consent

import (
	"strings"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestDecide_WhoMay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		role     tenant.Role
		may      bool
		effect   string
		own      bool
		wantKind fault.Kind
		ok       bool
	}{
		{tenant.RoleApprover, false, "WRITE", false, 0, true},
		{tenant.RoleApprover, false, "DESTRUCTIVE", false, 0, true},
		{tenant.RoleUser, false, "DESTRUCTIVE", true, 0, true},
		{tenant.RoleUser, false, "WRITE", false, fault.NotFound, false},
		{tenant.RoleService, false, "WRITE", true, fault.Denied, false}, // who proposes does not decide
		{tenant.RoleService, true, "WRITE", true, 0, true},
		{tenant.RoleService, true, "WRITE", false, fault.NotFound, false},
		{tenant.RoleService, true, "DESTRUCTIVE", true, fault.Denied, false},
		{tenant.RoleAdmin, true, "WRITE", true, fault.Denied, false},
		{tenant.RoleAuditor, true, "WRITE", true, fault.Denied, false},
		{tenant.RoleOperator, true, "WRITE", false, fault.NotFound, false},
	} {
		for _, approve := range []bool{true, false} {
			a := w.ask(RuleCall, c.effect)
			p := tenant.Principal{Tenant: w.tenant, KeyID: "key_x", Role: c.role, MayDecide: c.may}
			if c.own {
				p.Subject = w.alice.Subject
			}
			got, err := w.svc.Decide(t.Context(), p, a.ConsentID, Decision{Approve: approve, Reason: "so"})
			if (err == nil) != c.ok || err != nil && fault.KindOf(err) != c.wantKind {
				t.Errorf("%+v: %v", c, err)
				continue
			}
			want := Pending
			if c.ok {
				want = map[bool]State{true: Approved, false: Denied}[approve]
				if got.State != want || got.DecidedBy != p.Actor() || got.DecidedHow != "API" || got.Reason != "so" || got.DecideTime == nil {
					t.Errorf("%+v: %+v", c, got)
				}
			}
			if s := w.state(a.ConsentID); s != want {
				t.Errorf("%+v: the consent is %s", c, s)
			}
		}
	}
}

func TestDecide_TheFirstAnswerWins(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 5 {
		w.exec(`UPDATE grants SET state = 'VOID'`) // or it would cover the next
		a := w.ask(RuleSession, "WRITE")
		var mu sync.Mutex
		won := map[bool]int{}
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				approve := i%2 == 0
				_, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{Approve: approve})
				mu.Lock()
				defer mu.Unlock()
				if f, _ := fault.As(err); err != nil && (f == nil || f.Kind != fault.Conflict || f.Reason != "CONSENT_NOT_PENDING") {
					t.Error(err)
				} else if err == nil {
					won[approve]++
				}
			})
		}
		wg.Wait()
		if won[true]+won[false] != 1 {
			t.Fatalf("%v", won)
		}
		grants := w.text(`SELECT count(*)::text FROM grants WHERE consent_id = $1`, a.ConsentID)
		if (grants == "1") != (won[true] == 1) {
			t.Fatalf("%v, %s grants", won, grants)
		}
		if n := w.text(`SELECT count(*)::text FROM audit_entries WHERE kind = 'consent.decided' AND consent_id = $1`, a.ConsentID); n != "1" {
			t.Fatalf("%s decisions on record", n)
		}
	}
}

func TestDecide_TooLate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		name, sql string
		state     State
		reason    Refusal
	}{
		{"the time has passed", `UPDATE consents SET expire_time = now() - interval '1 second' WHERE consent_id = $1`, Expired, RefusedExpiry},
		{"the session closed in between", `UPDATE sessions SET state = 'CLOSED' WHERE $1 <> ''`, Void, RefusedVoid},
		{"the session ended in between", `UPDATE sessions SET state = 'OPEN', expire_time = now() - interval '1 second' WHERE $1 <> ''`, Void, RefusedVoid},
	} {
		a := w.ask(RuleSession, "WRITE")
		w.exec(c.sql, a.ConsentID)
		before := len(w.calls.ended)
		_, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{Approve: true})
		f, _ := fault.As(err)
		if f == nil || f.Kind != fault.Conflict || f.Metadata["state"] != string(c.state) || w.state(a.ConsentID) != c.state {
			t.Errorf("%s: %v, %s", c.name, err, w.state(a.ConsentID))
		}
		if len(w.calls.ended) != before+1 || w.calls.ended[before].Reason != c.reason {
			t.Errorf("%s: calls were told %+v", c.name, w.calls.ended[before:])
		}
		w.exec(`UPDATE sessions SET state = 'OPEN', expire_time = now() + interval '1 hour'`)
	}
	if n := w.text(`SELECT count(*)::text FROM grants`); n != "0" {
		t.Errorf("%s grants", n)
	}
	a := w.ask(RuleCall, "WRITE")
	if _, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{Reason: strings.Repeat("é", 1001)}); !fault.Is(err, fault.Invalid) {
		t.Errorf("long reason: %v", err)
	}
	if _, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{Reason: strings.Repeat("é", 1000)}); err != nil {
		t.Errorf("longest reason: %v", err)
	}
}

// What fails with the call undoes the decision.
func TestDecide_IsOneTransactionWithTheCall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.ask(RuleCall, "WRITE")
	w.calls.fail = fault.New(fault.Unavailable, "X", "x")
	if _, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{}); !fault.Is(err, fault.Unavailable) || w.state(a.ConsentID) != Pending {
		t.Fatalf("%v %s", err, w.state(a.ConsentID))
	}
	w.calls.fail = nil
	if _, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{Approve: true}); err != nil || len(w.calls.approved) != 1 {
		t.Fatal(err)
	}
}
