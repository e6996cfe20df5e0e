package consent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Wrap(m)) }

// owner stands for package calls and keeps what it is told.
type owner struct {
	mu       sync.Mutex
	ended    []Ended
	approved []string
	fail     error
}

func (o *owner) ConsentsEnded(_ context.Context, _ tenant.Tx, ended []Ended) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = append(o.ended, ended...)
	return o.fail
}

func (o *owner) ConsentApproved(_ tenant.ID, callID string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.approved = append(o.approved, callID)
}

type world struct {
	t       testing.TB
	db      *tenant.DB
	pool    *pgxpool.Pool
	svc     *Service
	calls   *owner
	tenant  tenant.ID
	session string
	alice   tenant.Principal
	boss    tenant.Principal // the approver
}

func newWorld(t testing.TB) *world {
	t.Helper()
	pg := pgtest.New(t)
	db, err := tenant.NewDB(pg.Pool(t, tenant.AppRole), pg.Pool(t, tenant.SystemRole))
	if err != nil {
		t.Fatal(err)
	}
	kek, err := seal.NewLocalKEK("k1", make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	ring, err := seal.NewRing(kek)
	if err != nil {
		t.Fatal(err)
	}
	log, err := audit.New(db, tenant.NewVault(db, ring), seal.NewSigner(seal.DeriveSeed(make([]byte, 32), "audit")), audit.Options{})
	if err != nil {
		t.Fatal(err)
	}
	tenants, err := tenant.NewService(db, ring, log, "")
	if err != nil {
		t.Fatal(err)
	}
	svc, err := NewService(db, log)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, db: db, pool: pg.Owner(t), svc: svc, calls: &owner{}, session: resource.NewID(resource.Session)}
	svc.Attach(w.calls)
	tn, _, err := tenants.CreateTenant(t.Context(), "Acme", "")
	if err != nil {
		t.Fatal(err)
	}
	w.tenant = tn.ID
	w.alice = tenant.Principal{Tenant: tn.ID, KeyID: "key_a", Role: tenant.RoleService, Subject: tenant.Subject{Source: "web", Value: "alice"}}
	w.boss = tenant.Principal{Tenant: tn.ID, KeyID: "key_b", Role: tenant.RoleApprover}
	w.exec(`INSERT INTO sessions (tenant_id, session_id, key_id, subject_source, subject, server_ids, expire_time)
		VALUES ($1, $2, 'key_a', 'web', 'alice', '{srv}', now() + interval '1 hour')`, tn.ID.String(), w.session)
	return w
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.pool.Exec(context.Background(), sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) text(sql string, args ...any) (s string) {
	w.t.Helper()
	if err := w.pool.QueryRow(context.Background(), sql, args...).Scan(&s); err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) binding() Binding {
	return Binding{SessionID: w.session, Subject: w.alice.Subject, ServerID: "srv", ServerName: "calendar", Origin: "https://x",
		Kind: "TOOL", Name: "put", DefinitionDigest: "doc-1:sha256:d", ArgumentsDigest: "args-1:sha256:a", ContractID: "c1"}
}

// ask opens a consent.
func (w *world) ask(rule Rule, effect string) Admission {
	w.t.Helper()
	var a Admission
	err := w.tx(func(ctx context.Context, tx tenant.Tx) (err error) {
		a, err = w.svc.Admit(ctx, tx, Request{Binding: w.binding(), CallID: resource.NewID(resource.Call), ContractRevision: 1, Effect: effect,
			Rule: rule, TTL: 30 * time.Minute})
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

func (w *world) tx(fn func(ctx context.Context, tx tenant.Tx) error) error {
	return w.db.InTx(w.t.Context(), w.tenant, fn)
}

func (w *world) state(id string) State {
	return State(w.text(`SELECT state FROM consents WHERE consent_id = $1`, id))
}

// A consent serves its own call with its own binding, once.
func TestConsume_EveryMemberOfTheBinding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.ask(RuleCall, "WRITE")
	call := w.text(`SELECT call_id FROM consents WHERE consent_id = $1`, a.ConsentID)
	consume := func(callID string, change func(*Binding)) (r Refusal) {
		b := w.binding()
		change(&b)
		if err := w.tx(func(ctx context.Context, tx tenant.Tx) (err error) {
			r, err = w.svc.Consume(ctx, tx, a.ConsentID, callID, b)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return r
	}
	same := func(*Binding) {}
	if r := consume(call, same); r != RefusedWaiting {
		t.Fatalf("undecided: %s", r)
	}
	if _, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{Approve: true}); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Binding){
		"session": func(b *Binding) { b.SessionID += "x" }, "subject": func(b *Binding) { b.Subject.Value = "bob" },
		"source": func(b *Binding) { b.Subject.Source = "other" }, "server": func(b *Binding) { b.ServerID += "x" },
		"origin": func(b *Binding) { b.Origin += "x" }, "kind": func(b *Binding) { b.Kind = "PROMPT" }, "name": func(b *Binding) { b.Name += "x" },
		"definition": func(b *Binding) { b.DefinitionDigest += "x" }, "arguments": func(b *Binding) { b.ArgumentsDigest += "x" },
		"contract": func(b *Binding) { b.ContractID += "x" }, "scopes": func(b *Binding) { b.Scopes = []string{"s"} },
		"account": func(b *Binding) { b.AccountVersion++ },
	} {
		if r := consume(call, change); r != RefusedVoid {
			t.Errorf("other %s: %q", name, r)
		}
	}
	if r := consume(call+"x", same); r != RefusedVoid {
		t.Errorf("other call: %q", r)
	}
	if r := consume(call, same); r != NotRefused || w.state(a.ConsentID) != Consumed {
		t.Fatalf("%q %s", r, w.state(a.ConsentID))
	}
	if r := consume(call, same); r != RefusedVoid {
		t.Fatalf("a second time: %q", r)
	}
	for name, want := range map[string]Refusal{"": NotRefused, "x": RefusedVoid} {
		w.exec(`UPDATE consents SET expire_time = now() - interval '1 hour'`) // a further attempt does not mind
		b := w.binding()
		b.Name += name
		err := w.tx(func(ctx context.Context, tx tenant.Tx) error {
			r, err := w.svc.Recheck(ctx, tx, a.ConsentID, call, b)
			if r != want {
				t.Errorf("recheck %q: %q", name, r)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Covers, which decides, and Admit, which counts, agree on every grant.
func TestGrant_CoversAndAdmitAgree(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.ask(RuleSession, "WRITE")
	if _, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{Approve: true}); err != nil {
		t.Fatal(err)
	}
	check := func(name string, b Binding, want bool) {
		t.Helper()
		covers, err := w.svc.Covers(t.Context(), w.tenant, b)
		if err != nil || covers != want {
			t.Errorf("%s: covers %v, %v", name, covers, err)
		}
		undo := fault.New(fault.Conflict, "UNDO", "undo")
		err = w.tx(func(ctx context.Context, tx tenant.Tx) error {
			got, err := w.svc.Admit(ctx, tx, Request{Binding: b, CallID: "c", Effect: "WRITE", Rule: RuleSession, TTL: time.Minute})
			if err != nil {
				return err
			}
			if (got.GrantID != "") != want {
				t.Errorf("%s: admitted by %+v", name, got)
			}
			if want {
				r, err := w.svc.Spend(ctx, tx, got.GrantID, b)
				if err != nil || r != NotRefused {
					t.Errorf("%s: spend %q %v", name, r, err)
				}
			}
			return undo
		})
		if !strings.Contains(fmt.Sprint(err), "undo") {
			t.Errorf("%s: %v", name, err)
		}
	}
	check("the same", w.binding(), true)
	b := w.binding()
	b.ArgumentsDigest, b.Origin = "other", "other" // not bound by a grant
	check("other arguments", b, true)
	for name, change := range map[string]func(*Binding){
		"session": func(b *Binding) { b.SessionID = w.otherSession() }, "subject": func(b *Binding) { b.Subject.Value = "bob" },
		"server": func(b *Binding) { b.ServerID += "x" }, "kind": func(b *Binding) { b.Kind = "PROMPT" }, "name": func(b *Binding) { b.Name += "x" },
		"definition": func(b *Binding) { b.DefinitionDigest += "x" }, "contract": func(b *Binding) { b.ContractID += "x" },
		"account": func(b *Binding) { b.AccountVersion++ },
	} {
		b := w.binding()
		change(&b)
		check(name, b, false)
	}
	w.exec(`UPDATE grants SET uses_limit = 2, uses_spent = 1, uses_reserved = 1`)
	check("used up", w.binding(), false)
	w.exec(`UPDATE grants SET uses_reserved = 0`)
	check("one use left", w.binding(), true)
	w.exec(`UPDATE grants SET expire_time = now() - interval '1 second'`)
	check("expired", w.binding(), false)
	w.exec(`UPDATE grants SET expire_time = now() + interval '1 hour', state = 'VOID'`)
	check("void", w.binding(), false)
}

func (w *world) otherSession() string {
	id := resource.NewID(resource.Session)
	w.exec(`INSERT INTO sessions (tenant_id, session_id, key_id, subject_source, subject, server_ids, expire_time)
		VALUES ($1, $2, 'key_a', 'web', 'alice', '{srv}', now() + interval '1 hour')`, w.tenant.String(), id)
	return id
}

func TestVoid_WhatItReachesAndWhatItSpares(t *testing.T) {
	t.Parallel()
	bob := tenant.Subject{Source: "web", Value: "bob"}
	digest := "doc-1:sha256:d"
	for _, c := range []struct {
		name  string
		void  func(ctx context.Context, s *Service, tx tenant.Tx, w *world) error
		ended bool
	}{
		{"its session", func(ctx context.Context, s *Service, tx tenant.Tx, w *world) error {
			return s.VoidSession(ctx, tx, w.session, "r")
		}, true},
		{"another session", func(ctx context.Context, s *Service, tx tenant.Tx, _ *world) error {
			return s.VoidSession(ctx, tx, "x", "r")
		}, false},
		{"its server", func(ctx context.Context, s *Service, tx tenant.Tx, _ *world) error {
			return s.VoidServer(ctx, tx, "srv", "", "r")
		}, true},
		{"its server under another contract", func(ctx context.Context, s *Service, tx tenant.Tx, _ *world) error {
			return s.VoidServer(ctx, tx, "srv", "c2", "r")
		}, true},
		{"its server, sparing its contract", func(ctx context.Context, s *Service, tx tenant.Tx, _ *world) error {
			return s.VoidServer(ctx, tx, "srv", "c1", "r")
		}, false},
		{"its definition for all", func(ctx context.Context, s *Service, tx tenant.Tx, _ *world) error {
			return s.VoidDefinition(ctx, tx, "srv", nil, "TOOL", "put", digest, "r")
		}, true},
		{"its definition for her", func(ctx context.Context, s *Service, tx tenant.Tx, w *world) error {
			return s.VoidDefinition(ctx, tx, "srv", &w.alice.Subject, "TOOL", "put", digest, "r")
		}, true},
		{"its definition for bob", func(ctx context.Context, s *Service, tx tenant.Tx, _ *world) error {
			return s.VoidDefinition(ctx, tx, "srv", &bob, "TOOL", "put", digest, "r")
		}, false},
		{"another digest", func(ctx context.Context, s *Service, tx tenant.Tx, _ *world) error {
			return s.VoidDefinition(ctx, tx, "srv", nil, "TOOL", "put", digest+"x", "r")
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			pending, approved := w.ask(RuleCall, "WRITE"), w.ask(RuleSession, "WRITE")
			used := w.ask(RuleCall, "WRITE")
			for _, id := range []string{approved.ConsentID, used.ConsentID} {
				if _, err := w.svc.Decide(t.Context(), w.boss, id, Decision{Approve: true}); err != nil {
					t.Fatal(err)
				}
			}
			w.exec(`UPDATE consents SET state = 'CONSUMED' WHERE consent_id = $1`, used.ConsentID)
			if err := w.tx(func(ctx context.Context, tx tenant.Tx) error { return c.void(ctx, w.svc, tx, w) }); err != nil {
				t.Fatal(err)
			}
			want := []State{Pending, Approved, Consumed}
			grant, ended := "ACTIVE", 0
			if c.ended {
				want, grant, ended = []State{Void, Void, Consumed}, "VOID", 2
			}
			if got := []State{w.state(pending.ConsentID), w.state(approved.ConsentID), w.state(used.ConsentID)}; !slices.Equal(got, want) {
				t.Errorf("consents %v", got)
			}
			if got := w.text(`SELECT state FROM grants`); got != grant || len(w.calls.ended) != ended {
				t.Errorf("grant %s, ended %+v", got, w.calls.ended)
			}
			if n := w.text(`SELECT count(*)::text FROM audit_entries WHERE kind IN ('consent.voided', 'grant.ended')`); c.ended && n != "3" || !c.ended && n != "0" {
				t.Errorf("%s entries", n)
			}
		})
	}
}

// One consent that cannot be ended does not keep the others.
func TestExpire_GoesOnPastAFailure(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 3 {
		w.ask(RuleCall, "WRITE")
	}
	w.exec(`UPDATE consents SET expire_time = now() - interval '1 second'`)
	first := &once{owner: w.calls}
	w.svc.Attach(first)
	n, err := w.svc.Expire(t.Context())
	if err == nil || n != 2 {
		t.Fatalf("%d, %v", n, err)
	}
	if n, err = w.svc.Expire(t.Context()); err != nil || n != 1 {
		t.Fatalf("%d, %v", n, err)
	}
	if n, err = w.svc.Expire(t.Context()); err != nil || n != 0 {
		t.Fatalf("%d, %v", n, err)
	}
	if got := w.text(`SELECT count(*)::text FROM audit_entries WHERE kind = 'consent.expired'`); got != "3" {
		t.Fatalf("%s entries", got)
	}
}

// once fails the first time.
type once struct {
	*owner
	failed bool
}

func (o *once) ConsentsEnded(ctx context.Context, tx tenant.Tx, ended []Ended) error {
	if !o.failed {
		o.failed = true
		return fault.New(fault.Unavailable, "X", "x")
	}
	return o.owner.ConsentsEnded(ctx, tx, ended)
}

func TestList_PagesAndFilters(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ids []string
	for range 5 {
		ids = append(ids, w.ask(RuleCall, "WRITE").ConsentID)
	}
	slices.Sort(ids)
	if _, err := w.svc.Decide(t.Context(), w.boss, ids[0], Decision{}); err != nil {
		t.Fatal(err)
	}
	list := func(f Filter) (out []string) {
		vs, err := w.svc.List(t.Context(), w.boss, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range vs {
			out = append(out, v.ID)
		}
		return out
	}
	if got := append(list(Filter{Limit: 3}), list(Filter{Limit: 3, After: ids[2]})...); !slices.Equal(got, ids) {
		t.Errorf("%v", got)
	}
	if got := list(Filter{Limit: 10, State: Pending}); !slices.Equal(got, ids[1:]) {
		t.Errorf("pending %v", got)
	}
	if got := list(Filter{Limit: 10, SessionID: "other"}); len(got) != 0 {
		t.Errorf("other session %v", got)
	}
}

// One list that changed two definitions meets a session that closes: both void
// the same grants and consents, in different orders, and neither is undone.
func TestVoid_VoidersOfATenantDoNotDeadlock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 2 {
		a := w.ask(RuleSession, "WRITE")
		if _, err := w.svc.Decide(t.Context(), w.boss, a.ConsentID, Decision{Approve: true}); err != nil {
			t.Fatal(err)
		}
		// The second pair is of another definition, and the first one's consent stays.
		w.exec(`UPDATE grants SET name = name || '2' WHERE name = 'put2'`)
		w.exec(`UPDATE grants SET name = name || '2' WHERE name = 'put'`)
		w.exec(`UPDATE consents SET name = name || '2' WHERE name = 'put2'`)
		w.exec(`UPDATE consents SET name = name || '2' WHERE name = 'put'`)
	}
	closed := make(chan error, 1)
	void := func(ctx context.Context, tx tenant.Tx, name string) error {
		return w.svc.VoidDefinition(ctx, tx, "srv", nil, "TOOL", name, "doc-1:sha256:d", "changed")
	}
	err := w.tx(func(ctx context.Context, tx tenant.Tx) error {
		if err := void(ctx, tx, "put2"); err != nil {
			return err
		}
		go func() {
			closed <- w.db.InTx(context.Background(), w.tenant, func(ctx context.Context, tx tenant.Tx) error {
				return w.svc.VoidSession(ctx, tx, w.session, "closed")
			})
		}()
		for w.text(`SELECT count(*)::text FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == "0" {
			if len(closed) > 0 {
				return <-closed
			}
			time.Sleep(time.Millisecond)
		}
		return void(ctx, tx, "put22")
	})
	if err != nil {
		t.Errorf("the list: %v", err)
	}
	if err := <-closed; err != nil {
		t.Errorf("the close: %v", err)
	}
	if n := w.text(`SELECT count(*)::text FROM grants WHERE state = 'VOID'`); n != "2" || len(w.calls.ended) != 2 {
		t.Errorf("%s grants, %d consents", n, len(w.calls.ended))
	}
}
