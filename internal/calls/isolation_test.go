package calls

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// stranger tries to reach what is alice's: as somebody with the same name in
// another tenant, as another user of hers, or as herself by a key that is not for
// her server.
type stranger struct {
	*scene        // of alice
	who           string
	user, admin   tenant.Principal
	approver      tenant.Principal
	done, waiting *Call // of alice
	grant         string
	sameTenant    bool
	limited       bool               // user is alice
	approvers     []tenant.Principal // of a limited stranger: each outside one limit
	ctx           context.Context
	binding       consent.Binding
}

// in runs fn in a transaction of the stranger's tenant.
func (x *stranger) in(fn func(ctx context.Context, tx tenant.Tx) error) error {
	return x.w.db.InTx(x.ctx, x.user.Tenant, fn)
}

func (x *stranger) notFound(what string, err error) {
	x.t.Helper()
	if !fault.Is(err, fault.NotFound) {
		x.t.Errorf("%s: %s: %v", x.who, what, err)
	}
}

// isolationCases has a case for every exported method of the stores that a
// tenant's request can reach. nil needs a reason beside it.
var isolationCases = map[string]func(x *stranger){
	"calls.Propose": func(x *stranger) {
		_, err := x.Propose(x.ctx, x.user, x.proposal("read"))
		x.notFound("propose in her session", err)
		// A repeat of her request id is nobody's but her own.
		r := x.proposal("write_call")
		r.RequestID = x.waiting.RequestID
		_, err = x.Propose(x.ctx, x.user, r)
		x.notFound("repeat her request", err)
		if x.limited {
			x.taken(r.RequestID)
		}
	},
	"calls.Get": func(x *stranger) {
		for _, c := range []*Call{x.done, x.waiting} {
			_, err := x.Get(x.ctx, x.user, c.ID, time.Minute, 99)
			x.notFound("get", err)
		}
	},
	"calls.List": func(x *stranger) {
		_, err := x.List(x.ctx, x.user, Filter{SessionID: x.session.ID, Limit: 10})
		x.notFound("list", err)
	},
	"calls.Cancel": func(x *stranger) {
		_, err := x.Cancel(x.ctx, x.user, x.waiting.ID)
		x.notFound("cancel", err)
	},
	"calls.Complete": func(x *stranger) {
		_, err := x.Complete(x.ctx, x.user, Query{SessionID: x.session.ID, Server: x.server.ID, Prompt: "greet", Argument: "who"})
		x.notFound("complete in her session", err)
	},
	"calls.Subscribe": func(x *stranger) {
		_, err := x.Subscribe(x.ctx, x.user, x.session.ID, x.server.ID, "note://n/a")
		x.notFound("subscribe in her session", err)
	},
	"calls.Subscriptions": func(x *stranger) {
		_, err := x.Subscriptions(x.ctx, x.user, x.session.ID)
		x.notFound("list her subscriptions", err)
	},
	"calls.Unsubscribe": func(x *stranger) {
		x.notFound("end her subscription", x.Unsubscribe(x.ctx, x.user, x.session.ID, "sub_00000000000000000000000001"))
	},
	"calls.Updated": nil, // told by a connection, whose key names the user; see TestSubscription_Updates
	"calls.Check": func(x *stranger) {
		if x.sameTenant {
			return // a dry run is an admin's; it shows a contract, nobody's calls
		}
		_, err := x.Check(x.ctx, x.admin, x.catalog, DryRun{Server: x.server.ID, Tool: "read"})
		x.notFound("check", err)
	},
	"calls.ConsentsEnded": func(x *stranger) {
		if x.sameTenant {
			return // follows a consent that its caller has ended
		}
		err := x.in(func(ctx context.Context, tx tenant.Tx) error {
			return x.ConsentsEnded(ctx, tx, []consent.Ended{{CallID: x.waiting.ID, Reason: consent.RefusedVoid}})
		})
		if err != nil {
			x.t.Error(err)
		}
	},
	"calls.ConsentApproved": func(x *stranger) { x.ConsentApproved(x.user.Tenant, x.waiting.ID) },
	"calls.Signalled":       func(x *stranger) { x.Signalled(x.user.Tenant, x.done.ID) },
	"calls.Sweep":           nil, // crosses tenants on purpose, each call in its tenant; see TestReaper
	"calls.Run":             nil, // runs Sweep
	"calls.Drain":           nil, // touches no row
	"calls.Stop":            nil, // touches the replica's row only

	"consent.Attach":     nil, // touches no row
	"consent.AnnounceTo": nil, // touches no row
	"consent.Expire":     nil, // crosses tenants on purpose, each consent in its tenant
	"consent.Get": func(x *stranger) {
		for _, p := range x.principals() {
			_, err := x.consents.Get(x.ctx, p, x.waiting.ConsentID)
			x.notFound("get consent", err)
		}
	},
	"consent.List": func(x *stranger) {
		for _, p := range x.principals() {
			vs, err := x.consents.List(x.ctx, p, consent.Filter{Limit: 100})
			if err != nil || len(vs) != 0 {
				x.t.Errorf("%s: list consents: %d, %v", x.who, len(vs), err)
			}
		}
	},
	"consent.Decide": func(x *stranger) {
		mayDecide := x.user
		mayDecide.MayDecide = true
		for _, p := range append(x.principals(), mayDecide) {
			for _, approve := range []bool{true, false} {
				_, err := x.consents.Decide(x.ctx, p, x.waiting.ConsentID, consent.Decision{Approve: approve})
				x.notFound("decide", err)
			}
		}
	},
	"consent.Covers": func(x *stranger) {
		b := x.binding
		b.Subject = x.user.Subject
		if yes, err := x.consents.Covers(x.ctx, x.user.Tenant, b); err != nil || yes {
			x.t.Errorf("%s: her grant covers: %v %v", x.who, yes, err)
		}
	},
	"consent.Stands": func(x *stranger) {
		if x.sameTenant {
			return // a hint about a server of the tenant, whoever agreed
		}
		if yes, err := x.consents.Stands(x.ctx, x.user.Tenant, x.server.ID); err != nil || yes {
			x.t.Errorf("%s: her consent stands in another tenant: %v %v", x.who, yes, err)
		}
	},
	"consent.Admit": func(x *stranger) {
		b := x.binding
		b.Subject = x.user.Subject
		err := x.in(func(ctx context.Context, tx tenant.Tx) error {
			a, err := x.consents.Admit(ctx, tx, consent.Request{Binding: b, CallID: "call_x", Rule: consent.RuleSession, Effect: "WRITE", TTL: time.Hour})
			if err == nil && a.GrantID != "" {
				x.t.Errorf("%s: her grant was reserved", x.who)
			}
			return errUndo
		})
		if err == nil {
			x.t.Error("not undone")
		}
	},
	"consent.Consume": func(x *stranger) {
		b := x.waiting.binding()
		b.Subject = x.user.Subject
		err := x.in(func(ctx context.Context, tx tenant.Tx) error {
			r, err := x.consents.Consume(ctx, tx, x.waiting.ConsentID, x.waiting.ID, b)
			if err == nil && r == consent.NotRefused {
				x.t.Errorf("%s: consumed her consent", x.who)
			}
			return err
		})
		if !x.sameTenant {
			x.notFound("consume", err)
		}
	},
	"consent.Recheck": func(x *stranger) {
		b := x.done.binding()
		b.Subject = x.user.Subject
		err := x.in(func(ctx context.Context, tx tenant.Tx) error {
			r, err := x.consents.Recheck(ctx, tx, x.done.ConsentID, x.done.ID, b)
			if err == nil && r == consent.NotRefused {
				x.t.Errorf("%s: her consent holds", x.who)
			}
			return err
		})
		if !x.sameTenant {
			x.notFound("recheck", err)
		}
	},
	"consent.Spend": func(x *stranger) {
		b := x.binding
		b.Subject = x.user.Subject
		err := x.in(func(ctx context.Context, tx tenant.Tx) error {
			r, err := x.consents.Spend(ctx, tx, x.grant, b)
			if err == nil && r == consent.NotRefused {
				x.t.Errorf("%s: spent her grant", x.who)
			}
			return err
		})
		if !x.sameTenant {
			x.notFound("spend", err)
		}
	},
	"consent.RecheckGrant": func(x *stranger) {
		if x.sameTenant {
			return // for the call that has spent it
		}
		x.notFound("recheck grant", x.in(func(ctx context.Context, tx tenant.Tx) error {
			_, err := x.consents.RecheckGrant(ctx, tx, x.grant)
			return err
		}))
	},
	"consent.LockGrant": func(x *stranger) { x.harmless(x.consents.LockGrant, x.grant) },
	"consent.Unspend":   func(x *stranger) { x.harmless(x.consents.Unspend, x.grant) },
	"consent.VoidCall": func(x *stranger) {
		x.harmless(func(ctx context.Context, tx tenant.Tx, id string) error {
			return x.consents.VoidCall(ctx, tx, id, "nobody", "")
		}, x.waiting.ID)
	},
	"consent.VoidSession": func(x *stranger) {
		x.harmless(func(ctx context.Context, tx tenant.Tx, id string) error {
			return x.consents.VoidSession(ctx, tx, id, "")
		}, x.session.ID)
	},
	"consent.VoidServer": func(x *stranger) {
		x.harmless(func(ctx context.Context, tx tenant.Tx, id string) error {
			return x.consents.VoidServer(ctx, tx, id, "", "")
		}, x.server.ID)
	},
	"consent.VoidDefinition": func(x *stranger) {
		d := digest(x.t, "write_call", "first")
		err := x.in(func(ctx context.Context, tx tenant.Tx) error {
			return x.consents.VoidDefinition(ctx, tx, x.server.ID, &x.user.Subject, "TOOL", "write_call", d, "")
		})
		if err == nil && !x.sameTenant {
			err = x.in(func(ctx context.Context, tx tenant.Tx) error {
				return x.consents.VoidDefinition(ctx, tx, x.server.ID, nil, "TOOL", "write_call", d, "")
			})
		}
		if err != nil {
			x.t.Error(err)
		}
	},

	// Contracts belong to the tenant, not to a user; which roles may read and write
	// them is the edge's business.
	"authz.Create": func(x *stranger) { x.contract(func(s string) error { return x.create(s) }) },
	"authz.Activate": func(x *stranger) {
		x.contract(func(s string) error { _, err := x.contracts.Activate(x.ctx, x.admin, s, 1); return err })
	},
	"authz.Get": func(x *stranger) {
		x.contract(func(s string) error { _, err := x.contracts.Get(x.ctx, x.admin, s, 1); return err })
	},
	"authz.List": func(x *stranger) {
		x.contract(func(s string) error { _, err := x.contracts.List(x.ctx, x.admin, s, 0, 10); return err })
	},
	"authz.Active": func(x *stranger) {
		if x.sameTenant {
			return
		}
		if a, err := x.contracts.Active(x.ctx, x.user.Tenant, x.server.ID); err != nil || a != nil {
			x.t.Errorf("%+v %v", a, err)
		}
	},
	"authz.At": func(x *stranger) {
		if x.sameTenant {
			return
		}
		_, err := x.contracts.At(x.ctx, x.user.Tenant, x.server.ID, 1)
		x.notFound("at", err)
	},
	"authz.Forget": func(x *stranger) { x.contracts.Forget(x.user.Tenant, x.server.ID) },

	"sessions.Get": func(x *stranger) {
		for _, p := range x.principals() {
			_, err := x.store.Get(x.ctx, p, x.session.ID)
			x.notFound("get session", err)
		}
	},
	"sessions.List": func(x *stranger) {
		ss, err := x.store.List(x.ctx, x.user, "", 100)
		if err != nil || len(ss) != 0 {
			x.t.Errorf("%s: %d sessions, %v", x.who, len(ss), err)
		}
	},
	"sessions.Close": func(x *stranger) {
		for _, p := range x.principals() {
			_, err := x.store.Close(x.ctx, p, x.session.ID)
			x.notFound("close", err)
		}
	},
	"sessions.Create": func(x *stranger) {
		// Her request id is not his; her server is his only within the tenant.
		s, err := x.store.Create(x.ctx, x.user, sessions.OpenRequest{Servers: []string{x.server.ID}, RequestID: "hers"})
		switch {
		case !x.sameTenant:
			x.notFound("open with her server", err)
		case x.limited:
			if !fault.Is(err, fault.Denied) {
				x.t.Errorf("%s: open with her server: %+v %v", x.who, s, err)
			}
		case err != nil || s.ID == x.session.ID || s.Subject != x.user.Subject:
			x.t.Errorf("%+v %v", s, err)
		default:
			x.w.exec(`DELETE FROM sessions WHERE session_id = $1`, s.ID)
		}
	},
	"sessions.Forget": func(x *stranger) { x.store.Forget(x.user.Tenant, x.session.ID) },
}

var errUndo = fault.New(fault.Conflict, "UNDO", "undone by the test")

// taken repeats a request of alice's for a server that the key is for: it learns
// that the id is taken, and nothing of the call that has it.
func (x *stranger) taken(requestID string) {
	x.t.Helper()
	s, err := x.store.Create(x.ctx, x.user, sessions.OpenRequest{Servers: []string{"mail"}})
	if err != nil {
		x.t.Fatal(err)
	}
	r := x.proposal("write_call")
	r.SessionID, r.Server, r.RequestID = s.ID, "mail", requestID
	_, err = x.Propose(x.ctx, x.user, r)
	if f, ok := fault.As(err); !ok || f.Kind != fault.Exists || len(f.Fields) > 0 || len(f.Metadata) > 0 {
		x.t.Errorf("%s: her request id: %v", x.who, err)
	}
	x.w.exec(`DELETE FROM sessions WHERE session_id = $1`, s.ID)
}

func (x *stranger) principals() []tenant.Principal {
	if x.limited {
		return append([]tenant.Principal{x.user}, x.approvers...)
	}
	if x.sameTenant {
		return []tenant.Principal{x.user, {Tenant: x.user.Tenant, Role: tenant.RoleService}, {Tenant: x.user.Tenant, Role: tenant.RoleUser}}
	}
	return []tenant.Principal{x.user, x.admin, x.approver}
}

func (x *stranger) harmless(fn func(context.Context, tenant.Tx, string) error, id string) {
	x.t.Helper()
	if x.sameTenant {
		return // works for the transaction of whoever may
	}
	if err := x.in(func(ctx context.Context, tx tenant.Tx) error { return fn(ctx, tx, id) }); err != nil {
		x.t.Error(err)
	}
}

func (x *stranger) create(server string) error {
	_, err := x.contracts.Create(x.ctx, x.admin, server, contractSource(x.t), "hers")
	return err
}

// contract calls fn with what names her server; within the tenant it is a key
// for other servers that must not reach it.
func (x *stranger) contract(fn func(server string) error) {
	x.t.Helper()
	x.notFound("contract by id", fn(x.server.ID))
	x.notFound("contract by name", fn("calendar"))
	x.notFound("no name", fn("a\x00"))
}

func methods(v any, pkg string) (out []string) {
	t := reflect.TypeOf(v)
	for i := range t.NumMethod() {
		out = append(out, pkg+"."+t.Method(i).Name)
	}
	return out
}

// asked are the methods that take a principal, whose limits they have to keep;
// the others are the business of whoever has checked one.
func asked(v any, pkg string, into map[string]bool) {
	t := reflect.TypeOf(v)
	for i := range t.NumMethod() {
		m := t.Method(i)
		for n := range m.Type.NumIn() {
			if m.Type.In(n) == reflect.TypeFor[tenant.Principal]() {
				into[pkg+"."+m.Name] = true
			}
		}
	}
}

// print is everything that is alice's, as text.
func (w *world) print(t tenant.ID) string {
	var b strings.Builder
	for _, table := range []string{"calls", "attempts", "consents", "grants", "sessions", "session_usage", "contracts", "servers", "keys",
		"interactions", "call_inputs", "call_tasks", "call_notices", "resource_subscriptions"} {
		var rows string
		err := w.owner.QueryRow(context.Background(), `SELECT COALESCE(string_agg(x::text, E'\n' ORDER BY x::text), '') FROM `+table+` x WHERE tenant_id = $1`, t).Scan(&rows)
		if err != nil {
			w.t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s:\n%s\n", table, rows)
	}
	return b.String()
}

// Every method of the stores, with another tenant and with another user of the
// same tenant: nothing of one is seen or changed by the other. And every method
// that takes a principal, with keys of the same tenant that are limited to other
// servers, users and subject spaces.
func TestIsolation_EveryMethodWithTwoTenantsAndTwoSubjects(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	sc := w.scene(n)
	all := methods(n.Service, "calls")
	all = append(all, methods(n.consents, "consent")...)
	all = append(all, methods(n.contracts, "authz")...)
	all = append(all, methods(n.store, "sessions")...)
	seen := map[string]bool{}
	for _, m := range all {
		seen[m] = true
		if _, ok := isolationCases[m]; !ok {
			t.Errorf("%s has no case", m)
		}
	}
	for m := range isolationCases {
		if !seen[m] {
			t.Errorf("the case %s has no method", m)
		}
	}
	first := sc.propose("write_session", func(r *Proposal) { r.RequestID = "one" })
	sc.decide(first, true)
	done := sc.until(first.ID, Succeeded)
	waiting := sc.propose("write_call", func(r *Proposal) { r.RequestID = "two" })
	w.ask(waiting)
	var grant string
	if err := w.owner.QueryRow(t.Context(), `SELECT grant_id FROM grants`).Scan(&grant); err != nil {
		t.Fatal(err)
	}

	_, key, err := w.tenants.CreateTenant(t.Context(), "Other", "")
	if err != nil {
		t.Fatal(err)
	}
	foreign := w.login(key.Secret, tenant.OnBehalf{})
	base := stranger{scene: sc, done: done, waiting: waiting, grant: grant, ctx: t.Context(), binding: done.binding()}
	other := base
	other.who, other.admin = "another tenant", foreign
	other.user = w.key(foreign, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "alice"})
	other.approver = w.key(foreign, tenant.KeySpec{Role: tenant.RoleApprover}, tenant.OnBehalf{})
	if other.user.Subject != sc.alice.Subject {
		t.Fatal("the subjects differ, which proves less")
	}
	bob := base
	bob.who, bob.sameTenant = "another user", true
	bob.user = w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService, MayDecide: true}, tenant.OnBehalf{User: "bob"})
	// Within the tenant: an admin key that is for other servers.
	bob.admin = sc.admin
	bob.admin.Servers = []string{"mail"}
	impostor := base
	impostor.who, impostor.sameTenant = "the same name of another source", true
	impostor.user = w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService, SubjectSpace: "other"}, tenant.OnBehalf{User: "alice"})
	impostor.admin = bob.admin

	limited := base
	limited.who, limited.sameTenant, limited.limited, limited.admin = "a key for other servers", true, true, bob.admin
	limited.user = w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService, Servers: []string{"mail"}, MayDecide: true}, tenant.OnBehalf{User: "alice"})
	if limited.user.Subject != sc.alice.Subject {
		t.Fatal("the subjects differ, which proves less")
	}
	for _, spec := range []tenant.KeySpec{{Servers: []string{"mail"}}, {UserPatterns: []string{"bob", "a_ice"}}, {SubjectSpace: "other"}} {
		spec.Role = tenant.RoleApprover
		limited.approvers = append(limited.approvers, w.key(sc.admin, spec, tenant.OnBehalf{}))
	}
	if _, err := n.catalog.CreateServer(t.Context(), sc.admin, catalog.ServerSpec{Name: "mail", URL: "https://mail.example/mcp"}, ""); err != nil {
		t.Fatal(err)
	}
	byPrincipal := map[string]bool{}
	asked(n.Service, "calls", byPrincipal)
	asked(n.consents, "consent", byPrincipal)
	asked(n.contracts, "authz", byPrincipal)
	asked(n.store, "sessions", byPrincipal)

	before := w.print(sc.alice.Tenant)
	for _, x := range []*stranger{&other, &bob, &impostor, &limited} {
		for name, fn := range isolationCases {
			if fn == nil || x.limited && !byPrincipal[name] {
				continue
			}
			fn(x)
			if after := w.print(sc.alice.Tenant); after != before {
				t.Fatalf("%s by %s changed something:\n%s\n%s", name, x.who, before, after)
			}
		}
	}
	// A key for her server sees it all, and what she did at another one not.
	own := w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService, Servers: []string{"calendar"}}, tenant.OnBehalf{User: "alice"})
	r := sc.proposal("read")
	r.Server = "mail"
	elsewhere, err := sc.Propose(t.Context(), sc.alice, r)
	if err != nil || elsewhere.State != Denied {
		t.Fatalf("%+v, %v", elsewhere, err)
	}
	base.user, base.who = own, "a key for the calendar"
	_, err = sc.Get(t.Context(), own, elsewhere.ID, 0, 0)
	base.notFound("get what is elsewhere", err)
	if cs, err := sc.List(t.Context(), own, Filter{SessionID: sc.session.ID, Limit: 2}); err != nil || len(cs) != 2 || cs[0].ID != waiting.ID {
		t.Errorf("the limited key: %d calls, %v", len(cs), err)
	}
	w.exec(`DELETE FROM calls WHERE call_id = $1`, elsewhere.ID)
	// And she herself sees it all.
	if cs, err := sc.List(t.Context(), sc.alice, Filter{SessionID: sc.session.ID, Limit: 10}); err != nil || len(cs) != 2 || cs[0].ID != waiting.ID {
		t.Errorf("%d calls, %v", len(cs), err)
	}
	if vs, err := sc.consents.List(t.Context(), sc.alice, consent.Filter{Limit: 10}); err != nil || len(vs) != 2 || string(vs[1].Arguments) != `{"title":"x"}` {
		t.Errorf("%d consents, %v", len(vs), err)
	}
	if rs, err := sc.contracts.List(t.Context(), sc.admin, "calendar", 0, 10); err != nil || len(rs) != 1 {
		t.Errorf("%d contracts, %v", len(rs), err)
	}
	if _, err := sc.Check(t.Context(), sc.admin, sc.catalog, DryRun{Server: "calendar", Tool: "read", Subject: sc.alice.Subject}); err != nil {
		t.Error(err)
	}
}
