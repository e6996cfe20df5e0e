package catalog

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestFO047_ListsAreKeptForEachUser(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	w.lister.does(func(_ ctx, _ Server, c Context, _ Kind) (Listing, error) {
		if c.Subject.Value == "ann" && c.Account == 1 {
			return listing(tool("a1", okSchema), tool("a2", okSchema)), nil
		}
		return Listing{}, fault.New(fault.Denied, "HTTP_403", "no")
	})
	ann := user(p, "ann")
	ann.Account = 1
	w.current(w.one, v, ann, time.Hour)
	for _, c := range []Context{
		user(p, "bob"),
		user(p, "ann"), // another account version is another context
		{Tenant: p.Tenant, Subject: tenant.Subject{Source: "other", Value: "ann"}, Account: 1},
	} {
		c := c
		if c.Subject.Source == "other" {
			w.lister.says(Listing{}, fault.New(fault.Denied, "HTTP_403", "no"))
		}
		if r, err := w.one.Current(t.Context(), v, c, Tool, time.Hour); !fault.Is(err, fault.Denied) {
			t.Errorf("%+v sees %v, %v", c, r, err)
		}
	}
	// Bob's invalidation leaves Ann's list alone.
	before := w.lister.count()
	bob := v.scope(user(p, "bob"))
	if err := w.one.Invalidate(t.Context(), Change{Tenant: p.Tenant, ServerID: v.ID, Context: &bob, Kind: Tool}); err != nil {
		t.Fatal(err)
	}
	if r := w.current(w.two, v, ann, time.Hour); r.Stale || w.lister.count() != before {
		t.Error("Ann was invalidated too")
	}
	if _, err := w.one.Current(t.Context(), v, Context{Tenant: p.Tenant}, Tool, time.Hour); !fault.Is(err, fault.Precondition) {
		t.Errorf("no user: %v", err)
	}
}

func TestFO048_CacheScope(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, q := w.admin("Acme"), w.admin("Bolt")
	v, other := w.server(p, "calendar"), w.server(q, "calendar")
	public := false
	w.lister.does(func(_ ctx, _ Server, c Context, _ Kind) (Listing, error) {
		l := listing(tool("for_"+c.Subject.Value, okSchema))
		l.Public = public
		l.TTL = time.Minute
		return l, nil
	})
	// Private, and absent: never shared.
	if got := names(w.current(w.one, v, user(p, "ann"), time.Hour)); got[0] != "for_ann" {
		t.Error(got)
	}
	if got := names(w.current(w.one, v, user(p, "bob"), time.Hour)); got[0] != "for_bob" {
		t.Error(got)
	}
	// Public: shared within the tenant, on every replica, and not beyond it, even
	// when the server's answers differ.
	public = true
	w.later(time.Minute + time.Second)
	before := w.lister.count()
	for _, s := range []*Service{w.one, w.two} {
		for _, name := range []string{"ann", "bob", "cid"} {
			r := w.current(s, v, user(p, name), time.Hour)
			if got := names(r); got[0] != "for_ann" || !strings.HasPrefix(r.Context, "public-") {
				t.Errorf("%s sees %v in %s", name, got, r.Context)
			}
		}
	}
	if n := w.lister.count() - before; n != 1 {
		t.Errorf("%d lists of a public one", n)
	}
	if got := names(w.current(w.one, other, user(q, "bob"), time.Hour)); got[0] != "for_bob" {
		t.Errorf("another tenant sees %v", got)
	}
	// Private again: nobody goes on with the shared one.
	public = false
	w.later(2 * time.Minute)
	if got := names(w.current(w.one, v, user(p, "bob"), time.Hour)); got[0] != "for_bob" {
		t.Error(got)
	}
	if got := names(w.current(w.two, v, user(p, "ann"), time.Hour)); got[0] != "for_ann" {
		t.Errorf("after the end of sharing ann sees %v", got)
	}
}

func TestTTL_ShortensTheAgeAndNeverLengthensIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	l := listing(tool("a", okSchema))
	for i, tc := range []struct {
		ttl, maxAge, wait time.Duration
		again             bool
	}{
		{0, time.Minute, 50 * time.Second, false}, // no promise: the caller's age decides
		{10 * time.Second, time.Minute, 11 * time.Second, true},
		{time.Hour, time.Minute, 61 * time.Second, true},
		{-time.Second, time.Minute, 30 * time.Second, false},
	} {
		l.TTL = tc.ttl
		w.lister.says(l, nil)
		c := user(p, fmt.Sprint("u", i))
		w.current(w.one, v, c, tc.maxAge)
		before := w.lister.count()
		w.later(tc.wait)
		w.current(w.one, v, c, tc.maxAge)
		if again := w.lister.count() != before; again != tc.again {
			t.Errorf("%+v: listed again %v", tc, again)
		}
	}
}

func TestIsolationModes_DecideWhoSharesAList(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	for _, tc := range []struct {
		isolation Isolation
		lists     int
	}{{PerUser, 2}, {PerSession, 3}, {PerTenant, 1}} {
		v, err := w.one.CreateServer(t.Context(), p, ServerSpec{Name: "s", URL: "https://s.example/",
			Isolation: tc.isolation, SharedStateAcknowledged: true}, "")
		if err != nil {
			t.Fatal(err)
		}
		before := w.lister.count()
		again := user(p, "ann")
		again.Session = "ses_second"
		for _, c := range []Context{user(p, "ann"), user(p, "bob"), again} {
			w.current(w.one, v, c, time.Hour)
			w.current(w.two, v, c, time.Hour)
		}
		if n := w.lister.count() - before; n != tc.lists {
			t.Errorf("%s: %d lists, want %d", tc.isolation, n, tc.lists)
		}
		if asked := w.lister.asked[len(w.lister.asked)-1]; tc.isolation == PerTenant && (!asked.Subject.IsZero() || asked.Session != "") {
			t.Errorf("a shared connection is asked as %+v", asked)
		}
		if err := w.one.DeleteServer(t.Context(), p, "s"); err != nil {
			t.Fatal(err)
		}
	}
}
