package catalog

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// TestGenerations lets lists, marks and failures of three contexts, private and
// public, end in any order, and compares the rows with a model.
func TestGenerations_AnEarlierListNeverReplacesALaterOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	for round := range 12 {
		v := w.server(p, fmt.Sprintf("s%d", round))
		w.generations(rng, p, v)
	}
}

type open struct {
	made *made
}

func (w *world) generations(rng *rand.Rand, p tenant.Principal, v Server) {
	t := w.t
	t.Helper()
	type row struct{ generation, invalidated int64 }
	users := []string{"ann", "bob", "cid"}
	model := map[string]*row{} // by context name
	content := map[int64]string{}
	public := publicName("")
	var under []*open
	at := func(name string) *row {
		if model[name] == nil {
			model[name] = &row{}
		}
		return model[name]
	}
	for step := range 40 {
		switch rng.IntN(5) {
		case 0, 1: // begin
			scope := v.scope(user(p, users[rng.IntN(len(users))]))
			k := slotKey{p.Tenant, v.ID, scope.name(""), Tool}
			// The lease is a courtesy; a dead replica's is passed over.
			w.exec(`UPDATE catalog_current SET lister = '' WHERE server_id = $1`, v.ID)
			g, err := w.one.begin(t.Context(), wish{key: k, server: v}, true)
			if err != nil || g == 0 {
				t.Fatal(g, err)
			}
			c, err := buildContent(v, Tool, listing(tool(fmt.Sprintf("t%d", rng.IntN(4)), okSchema)))
			if err != nil {
				t.Fatal(err)
			}
			at(k.context)
			content[g] = c.id
			under = append(under, &open{made: &made{key: k, server: v, scope: scope, generation: g, content: c, public: rng.IntN(3) == 0}})
		case 2, 3: // end one of those under way
			if len(under) == 0 {
				continue
			}
			i := rng.IntN(len(under))
			m := under[i].made
			under = slices.Delete(under, i, i+1)
			if rng.IntN(5) == 0 {
				if err := w.two.fail(t.Context(), m.key, m.generation, "no", false); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if _, err := w.two.swap(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			target := m.key.context
			if m.public {
				target = public
			}
			if r := at(target); m.generation >= r.generation {
				r.generation = m.generation
				r.invalidated = max(r.invalidated, at(m.key.context).invalidated)
				if pub := model[public]; !m.public && pub != nil && pub.generation > 0 && pub.invalidated <= pub.generation {
					pub.invalidated = -1 // now some later number
				}
			}
		case 4: // mark
			scope := v.scope(user(p, users[rng.IntN(len(users))]))
			name := scope.name("")
			err := w.db.InTx(t.Context(), p.Tenant, func(ctx ctx, tx tenant.Tx) error {
				return invalidate(ctx, tx, v.ID, []string{name, public}, []string{Tool}, "marked")
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range []string{name, public} {
				if model[n] != nil {
					model[n].invalidated = -1
				}
			}
		}
		for name, want := range model {
			var got row
			var id string
			err := w.owner.QueryRow(t.Context(), `SELECT generation, invalidated, COALESCE(revision_id, '') FROM catalog_current
				WHERE server_id = $1 AND context = $2`, v.ID, name).Scan(&got.generation, &got.invalidated, &id)
			if err != nil {
				t.Fatalf("step %d, %s: %v", step, name, err)
			}
			if got.generation != want.generation || content[got.generation] != id {
				t.Fatalf("step %d, %s: generation %d, want %d, content %v", step, name, got.generation, want.generation, content[got.generation] == id)
			}
			if want.invalidated == -1 {
				if got.invalidated <= got.generation {
					t.Fatalf("step %d, %s: a mark was lost: %+v", step, name, got)
				}
				want.invalidated = got.invalidated
			} else if (got.invalidated > got.generation) != (want.invalidated > want.generation) {
				t.Fatalf("step %d, %s: marked %+v, want %+v", step, name, got, *want)
			}
		}
	}
}

func TestLockDefinition(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	w.lister.says(listing(tool("a", okSchema), tool("twice", okSchema), tool("twice", okSchema)), nil)
	r := w.current(w.one, v, user(p, "ann"), time.Hour)
	d, _ := r.Find("a")
	lock := func(name string) (got Pinned) {
		err := w.db.InTx(t.Context(), p.Tenant, func(ctx ctx, tx tenant.Tx) (err error) {
			got, err = w.two.LockDefinition(ctx, tx, v.ID, r.Context, Tool, name)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := lock("a"); got.Digest != d.Digest || got.Stale || got.RevisionID != r.ID || got.Registration != 1 || got.Age <= 0 {
		t.Errorf("%+v", got)
	}
	for _, name := range []string{"twice", "none", ""} {
		if got := lock(name); got.Digest != "" {
			t.Errorf("%q is callable", name)
		}
	}
	w.later(time.Minute)
	if got := lock("a"); got.Age < time.Minute {
		t.Errorf("age %s", got.Age)
	}
	if err := w.one.Invalidate(t.Context(), Change{Tenant: p.Tenant, ServerID: v.ID, Reason: "reconnected"}); err != nil {
		t.Fatal(err)
	}
	if got := lock("a"); !got.Stale || got.StaleReason != "reconnected" {
		t.Errorf("%+v", got)
	}
}
