package catalog

import (
	"slices"
	"testing"
)

// What is registered no more, or otherwise, or of a tenant that is suspended, is
// named; the registrations of others are not.
func TestOutdated(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, other := w.admin("one"), w.admin("other")
	held := func(v Server) Registered { return Registered{p.Tenant, v.ID, v.Registration} }
	stays, moved, ended := w.server(p, "stays"), w.server(p, "moved"), w.server(p, "ended")
	theirs := w.server(other, "theirs")
	all := []Registered{held(stays), held(moved), held(ended), {other.Tenant, theirs.ID, theirs.Registration}}
	want := func(what string, want ...Registered) {
		t.Helper()
		if got, err := w.two.Outdated(t.Context(), all); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v %v, want %v", what, got, err, want)
		}
	}
	want("all stand")
	url := "https://elsewhere.example/mcp"
	again, err := w.one.UpdateServer(t.Context(), p, moved.ID, ServerUpdate{URL: &url})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.one.DeleteServer(t.Context(), p, ended.ID); err != nil {
		t.Fatal(err)
	}
	name := "Renamed"
	if _, err := w.one.UpdateServer(t.Context(), p, stays.ID, ServerUpdate{DisplayName: &name}); err != nil {
		t.Fatal(err)
	}
	want("one moved, one ended", held(moved), held(ended))
	all = append(all, held(again), Registered{other.Tenant, stays.ID, stays.Registration})
	want("the new one stands, another tenant's does not", held(moved), held(ended), all[5])
	if _, err := w.owner.Exec(t.Context(), `UPDATE tenants SET state = 'SUSPENDED' WHERE tenant_id = $1`, other.Tenant.String()); err != nil {
		t.Fatal(err)
	}
	want("a suspended tenant", held(moved), held(ended), all[3], all[5])
}
