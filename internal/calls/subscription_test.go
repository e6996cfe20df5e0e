package calls

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// follower is what the servers of a test were asked to tell of.
type follower struct {
	mu   sync.Mutex
	told map[string]sessions.Key
	asks int
	err  error
}

func (f *follower) Subscribe(_ context.Context, k sessions.Key, _ sessions.Target, uri string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asks++
	if f.err == nil {
		f.told[uri] = k
	}
	return f.err
}

func (f *follower) Unsubscribe(_ sessions.Key, uri string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.told, uri)
}

func (f *follower) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *follower) uris() (out []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for uri := range f.told {
		out = append(out, uri)
	}
	slices.Sort(out)
	return out
}

func (w *world) following() (*node, *follower) {
	w.t.Helper()
	f := &follower{told: map[string]sessions.Key{}}
	return w.node(quick(), func(d *Deps) { d.Follower = f }), f
}

func (sc *scene) subscribe(uri string) *Subscription {
	sc.t.Helper()
	x, err := sc.Subscribe(sc.t.Context(), sc.alice, sc.session.ID, "calendar", uri)
	if err != nil {
		sc.t.Fatal(detail(err))
	}
	return x
}

func (sc *scene) subscriptions() []*Subscription {
	sc.t.Helper()
	out, err := sc.Subscriptions(sc.t.Context(), sc.alice, sc.session.ID)
	if err != nil {
		sc.t.Fatal(err)
	}
	return out
}

// due lets every subscription be looked at in the next sweep.
func (w *world) due() {
	w.t.Helper()
	w.exec(`UPDATE resource_subscriptions SET due_time = clock_timestamp() WHERE due_time IS NOT NULL`)
}

// A subscription is counted once for a session and resource, notes each change of
// it and of what is beneath it, and ends on demand.
func TestSubscription_Updates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n, f := w.following()
	sc := w.scene(n)
	a, again, b := sc.subscribe("note://n/a"), sc.subscribe("note://n/a"), sc.subscribe("note://n/b")
	if a.ID != again.ID || a.ID == b.ID || f.asks != 2 || !slices.Equal(f.uris(), []string{"note://n/a", "note://n/b"}) {
		t.Fatalf("%+v, %+v, asked %d times for %v", a, again, f.asks, f.uris())
	}
	key := f.told["note://n/a"]
	if key.Tenant != sc.alice.Tenant || key.Subject != sc.alice.Subject {
		t.Errorf("whose connection: %+v", key)
	}
	ctx := t.Context()
	bob := key
	bob.Subject.Value = "bob"
	for _, u := range []sessions.Updated{{Key: key, URI: "note://n/a"}, {Key: key, URI: "note://n/a/deep"}, {Key: key, URI: "note://n/ab"},
		{Key: key, URI: "note://n/other"}, {Key: bob, URI: "note://n/a"}} {
		if err := n.noteUpdate(ctx, u.Key, u.URI, u.Refused); err != nil {
			t.Fatal(err)
		}
	}
	list := sc.subscriptions()
	if len(list) != 2 || list[0].Updates != 2 || list[0].LastUpdate == nil || list[1].Updates != 0 || list[0].State != SubscriptionActive {
		t.Errorf("%+v, %+v", list[0], list[1])
	}
	if err := n.noteUpdate(ctx, key, "note://n/b", true); err != nil {
		t.Fatal(err)
	}
	if list = sc.subscriptions(); list[1].State != SubscriptionLost || list[1].Reason == "" {
		t.Errorf("refused: %+v", list[1])
	}
	if err := n.Unsubscribe(ctx, sc.alice, sc.session.ID, a.ID); err != nil || slices.Contains(f.uris(), "note://n/a") || len(sc.subscriptions()) != 1 {
		t.Errorf("%v, follows %v", err, f.uris())
	}
	if err := n.Unsubscribe(ctx, sc.alice, sc.session.ID, a.ID); !fault.Is(err, fault.NotFound) {
		t.Errorf("twice: %v", err)
	}
	if got := w.count(`SELECT count(*) FROM audit_entries WHERE kind IN ('subscription.created', 'subscription.ended')`); got != 3 {
		t.Errorf("%d entries", got)
	}
	w.verify(sc.alice.Tenant)
}

// What the contract does not cover for the user is followed by nobody.
func TestSubscription_Refused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n, f := w.following()
	sc, without := w.scene(n), w.scene(n, ", resources/subscribe", "")
	bob := w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "bob"})
	ctx := t.Context()
	for name, tt := range map[string]struct {
		sc   *scene
		who  tenant.Principal
		uri  string
		kind fault.Kind
	}{
		"not covered":    {sc, sc.alice, "file:///etc/passwd", fault.Denied},
		"subject":        {sc, sc.alice, "note://n/staff/a", fault.Denied},
		"method":         {without, without.alice, "note://n/a", fault.Denied},
		"another user":   {sc, bob, "note://n/a", fault.NotFound},
		"another tenant": {sc, without.alice, "note://n/a", fault.NotFound},
		"no URI":         {sc, sc.alice, "", fault.Invalid},
		"long URI":       {sc, sc.alice, "note://n/" + strings.Repeat("a", 2048), fault.Invalid},
		"control":        {sc, sc.alice, "note://n/\x00", fault.Invalid},
	} {
		if _, err := n.Subscribe(ctx, tt.who, tt.sc.session.ID, "calendar", tt.uri); !fault.Is(err, tt.kind) {
			t.Errorf("%s: %v", name, err)
		}
	}
	shared := true
	isolation := catalog.PerTenant
	if _, err := n.catalog.UpdateServer(ctx, without.admin, "calendar", catalog.ServerUpdate{Isolation: &isolation, SharedStateAcknowledged: &shared}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Subscribe(ctx, without.alice, without.session.ID, "calendar", "note://n/a"); !fault.Is(err, fault.Precondition) {
		t.Errorf("a shared server: %v", err)
	}
	f.fail(fault.New(fault.Precondition, "SUBSCRIPTION_REFUSED", "no").In(fault.Server))
	if _, err := n.Subscribe(ctx, sc.alice, sc.session.ID, "calendar", "note://n/a"); !fault.Is(err, fault.Precondition) || len(sc.subscriptions()) > 0 {
		t.Errorf("the server refuses: %v, %d kept", err, len(sc.subscriptions()))
	}
	f.fail(nil)
	for i := range maxFollowed {
		sc.subscribe(fmt.Sprintf("note://n/%d", i))
	}
	if _, err := n.Subscribe(ctx, sc.alice, sc.session.ID, "calendar", "note://n/more"); !fault.Is(err, fault.Exhausted) {
		t.Errorf("too many: %v", err)
	}
}

// Another replica takes up what a dead one followed, tries again what is lost for
// now, and lets go of what the contract no longer covers and of sessions that end.
func TestSubscription_IsTakenUpAndLetGo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	dead, _ := w.following()
	sc := w.scene(dead)
	sc.subscribe("note://n/a")
	n, f := w.following()
	w.due()
	if n.sweep(t); len(f.uris()) > 0 {
		t.Fatalf("it takes what a living replica follows: %v", f.uris())
	}
	w.exec(`UPDATE replicas SET state = 'DEAD' WHERE epoch = $1`, dead.replica.epoch)
	w.due()
	f.fail(fault.New(fault.Unavailable, "CONNECT_FAILED", "no answer").In(fault.Transport))
	n.sweep(t)
	if x := sc.on(n).subscriptions()[0]; x.State != SubscriptionLost || !strings.Contains(x.Reason, "CONNECT_FAILED") {
		t.Errorf("while the server is away: %+v", x)
	}
	f.fail(nil)
	w.due()
	n.sweep(t)
	if x := sc.on(n).subscriptions()[0]; x.State != SubscriptionActive || x.Reason != "" || !slices.Equal(f.uris(), []string{"note://n/a"}) {
		t.Errorf("taken up: %+v, %v", x, f.uris())
	}
	sc.on(n).activate(contractSource(t, `  - {uri: "note://n/**"}`+"\n", ""))
	w.due()
	n.sweep(t)
	if x := sc.on(n).subscriptions()[0]; x.State != SubscriptionLost || len(f.uris()) > 0 {
		t.Errorf("under another contract: %+v, %v", x, f.uris())
	}
	sc.on(n).activate(contractSource(t))
	w.due()
	n.sweep(t)
	if !slices.Equal(f.uris(), []string{"note://n/a"}) {
		t.Errorf("under the first again: %v", f.uris())
	}
	if _, err := n.store.Close(t.Context(), sc.alice, sc.session.ID); err != nil {
		t.Fatal(err)
	}
	n.sweep(t)
	if left := w.count(`SELECT count(*) FROM resource_subscriptions`); left != 0 || len(f.uris()) > 0 {
		t.Errorf("after the session: %d, %v", left, f.uris())
	}
}
