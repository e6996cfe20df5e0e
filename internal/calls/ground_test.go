package calls

import (
	"context"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// voiders take away what a dispatch stands on; each by its name in ground.changed.
var voiders = map[string]func(sc *scene) error{
	"the credential that proposed it was revoked": func(sc *scene) error {
		_, err := sc.w.tenants.RevokeKey(context.Background(), sc.admin, sc.alice.KeyID)
		return err
	},
	"the session is closed": func(sc *scene) error {
		_, err := sc.store.Close(context.Background(), sc.alice, sc.session.ID)
		return err
	},
	"another contract is active": func(sc *scene) error {
		ctx := context.Background()
		r, err := sc.contracts.Create(ctx, sc.admin, "calendar", contractSource(sc.t, "timeout: 20s", "timeout: 21s"), "")
		if err == nil {
			_, err = sc.contracts.Activate(ctx, sc.admin, "calendar", r.Revision)
		}
		return err
	},
	"the server is not registered any more": func(sc *scene) error {
		url := "https://calendar.example/other"
		_, err := sc.catalog.UpdateServer(context.Background(), sc.admin, "calendar", catalog.ServerUpdate{URL: &url})
		return err
	},
	"the definition is not the one that was decided on": func(sc *scene) error {
		sc.change("write", "second")
		return nil
	},
	"the definition was not observed lately enough": func(sc *scene) error {
		return sc.catalog.Invalidate(context.Background(), catalog.Change{Tenant: sc.alice.Tenant, ServerID: sc.server.ID, Reason: "changed"})
	},
	"the tenant is suspended": func(sc *scene) error {
		_, err := sc.w.owner.Exec(context.Background(), `UPDATE tenants SET state = 'SUSPENDED' WHERE tenant_id = $1`, sc.alice.Tenant.String())
		return err
	},
}

// Whoever takes away what a dispatch stands on waits for a dispatch that has
// looked at it, and the next dispatch sees that it is gone.
func TestGround_VoidersWaitForADispatchAndStopTheNext(t *testing.T) {
	t.Parallel()
	for name, void := range voiders {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			sc := w.scene(w.node(quick()))
			sc.propose("write")
			in, err := sc.parse(t.Context(), sc.alice, sc.proposal("write"))
			if err != nil {
				t.Fatal(err)
			}
			pl, err := sc.plan(t.Context(), sc.alice, sc.proposal("write"), in)
			if err != nil {
				t.Fatal(err)
			}
			e := sc.newExecution(pl)
			done := make(chan error, 1)
			err = w.db.InTx(t.Context(), sc.alice.Tenant, func(ctx context.Context, tx tenant.Tx) error {
				g, err := sc.lockGround(ctx, tx, pl.call, e)
				if why := g.changed(); err != nil || why != "" {
					t.Errorf("%s %v", why, err)
				}
				go func() { done <- void(sc) }()
				w.eventually(func() bool {
					return len(done) > 0 || w.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
				}, func() string { return "neither done nor waiting" })
				if len(done) > 0 {
					t.Error("it did not wait")
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(detail(err))
			}
			err = w.db.InTx(t.Context(), sc.alice.Tenant, func(ctx context.Context, tx tenant.Tx) error {
				g, err := sc.lockGround(ctx, tx, pl.call, e)
				if why := g.changed(); why != name {
					t.Errorf("the next dispatch finds %q", why)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// Plain facts about each part of the ground, one at a time.
func TestGround_Changed(t *testing.T) {
	t.Parallel()
	all := ground{true, true, true, true, true, true, true}
	if all.changed() != "" || !all.mayMend() || all.staleOnly() {
		t.Fatal("nothing has changed")
	}
	for i, c := range []struct {
		g           ground
		mend, stale bool
	}{
		{ground{false, true, true, true, true, true, true}, false, false},
		{ground{true, false, true, true, true, true, true}, false, false},
		{ground{true, true, false, true, true, true, true}, false, false},
		{ground{true, true, true, false, true, true, true}, true, false},
		{ground{true, true, true, true, false, true, true}, true, false},
		{ground{true, true, true, true, true, false, true}, true, false},
		{ground{true, true, true, true, true, true, false}, true, true},
		{ground{}, false, false},
	} {
		if c.g.changed() == "" || c.g.mayMend() != c.mend || c.g.staleOnly() != c.stale {
			t.Errorf("%d: %q %v %v", i, c.g.changed(), c.g.mayMend(), c.g.staleOnly())
		}
	}
}
