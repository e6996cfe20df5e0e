package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

type ctx = context.Context

var errDown = fault.New(fault.Unavailable, "UPSTREAM_503", "the server answered 503").In(fault.Server)

func TestCurrent_ListsOnceForAllCallersAndReplicas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	release := make(chan struct{})
	w.lister.does(func(ctx, Server, Context, Kind) (Listing, error) {
		<-release
		return listing(tool("a", okSchema), tool("b", okSchema)), nil
	})
	var wg sync.WaitGroup
	for i := range 32 {
		s := w.one
		if i%2 == 1 {
			s = w.two
		}
		wg.Go(func() {
			r, err := s.Current(t.Context(), v, user(p, "ann"), Tool, time.Minute)
			if err != nil || !slices.Equal(names(r), []string{"a", "b"}) || r.Stale {
				t.Errorf("%v %v", err, r)
			}
		})
	}
	for w.lister.count() == 0 {
		time.Sleep(time.Millisecond)
	}
	close(release)
	wg.Wait()
	if n := w.lister.count(); n != 1 {
		t.Errorf("%d lists", n)
	}
	w.later(time.Minute + time.Second)
	w.current(w.one, v, user(p, "ann"), time.Minute)
	w.current(w.two, v, user(p, "ann"), time.Minute)
	if n := w.lister.count(); n != 2 {
		t.Errorf("%d lists after the age", n)
	}
	w.current(w.one, v, user(p, "ann"), 15*time.Minute)
	if n := w.lister.count(); n != 2 {
		t.Errorf("%d lists for a caller who allows more", n)
	}
}

func TestCurrent_ServesTheBytesAsReceived(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	odd := json.RawMessage(`{ "name" : "a<b>" , "inputSchema":{"type":"object","maximum":1.0},"_meta":{"n":1},  "description":"\u00e9é/\/" }`)
	broken := json.RawMessage(`{"name":"x","name":"y"}`)
	w.lister.says(listing(odd, broken), nil)
	first := w.current(w.one, v, user(p, "ann"), 0)
	if string(first.Definitions[0].Raw) != string(odd) || string(first.Definitions[1].Raw) != string(broken) {
		t.Errorf("raw %s", first.Definitions[0].Raw)
	}
	// Another _meta is the same definition; all replicas serve the bytes seen first.
	w.lister.says(listing(json.RawMessage(strings.Replace(string(odd), `"n":1`, `"n":2`, 1)), broken), nil)
	w.later(time.Hour)
	second := w.current(w.one, v, user(p, "ann"), time.Minute)
	bob := w.current(w.two, v, user(p, "bob"), time.Minute)
	w.exec(`SELECT 1`)
	third := w.replica()
	fromRows := w.current(third, v, user(p, "ann"), time.Minute)
	for i, r := range []*Revision{second, bob, fromRows} {
		if r.ID != first.ID || string(r.Definitions[0].Raw) != string(odd) {
			t.Errorf("%d: revision %v, raw %s", i, r.ID == first.ID, r.Definitions[0].Raw)
		}
	}
	if !second.Observed.After(first.Observed) {
		t.Error("the second list was not observed later")
	}
	if n := w.rows(`SELECT revision_id FROM catalog_revisions`); len(n) != 1 {
		t.Errorf("%d revisions", len(n))
	}
}

func TestFO044_FailureKeepsTheLastGoodList(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	good := w.current(w.one, v, user(p, "ann"), time.Minute)
	for _, bad := range []error{errDown, context.DeadlineExceeded, errors.New("invalid character 'x'"),
		fault.New(fault.Internal, "BUG", "secret detail")} {
		w.lister.says(Listing{}, bad)
		w.later(time.Hour)
		before := w.lister.count()
		for range 3 {
			for _, s := range []*Service{w.one, w.two} {
				r := w.current(s, v, user(p, "ann"), time.Minute)
				if !r.Stale || r.StaleReason == "" || r.ID != good.ID || !hasFinding(r.Findings, FindingStale) {
					t.Fatalf("%v: stale %v %q", bad, r.Stale, r.StaleReason)
				}
				if strings.Contains(r.StaleReason, "secret") || strings.Contains(r.StaleReason, "invalid character") {
					t.Errorf("the cause is told: %q", r.StaleReason)
				}
			}
		}
		if n := w.lister.count() - before; n != 1 {
			t.Errorf("%v: %d lists within the cool-down", bad, n)
		}
		if r := w.current(w.one, v, user(p, "ann"), 100*time.Hour); r.Stale {
			t.Error("a caller who allows the age gets it stale")
		}
	}
	w.lister.says(listing(tool("b", okSchema)), nil)
	w.later(time.Minute)
	if r := w.current(w.two, v, user(p, "ann"), time.Minute); r.Stale || !slices.Equal(names(r), []string{"b"}) {
		t.Errorf("after recovery: %v %v", r.Stale, names(r))
	}
}

func TestFO044_NothingIsServedBeforeTheFirstGoodList(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	w.lister.says(Listing{}, errDown)
	for i := range 3 {
		_, err := w.one.Current(t.Context(), v, user(p, "ann"), Tool, time.Minute)
		f, ok := fault.As(err)
		if !ok || f.Kind != fault.Unavailable || !strings.Contains(f.Message, "503") {
			t.Fatalf("%d: %v", i, err)
		}
		if i > 0 && f.RetryAfter <= 0 {
			t.Error("no word on when to try again")
		}
	}
	if n := w.lister.count(); n != 1 {
		t.Errorf("%d lists within the cool-down", n)
	}
	w.lister.says(listing(), nil)
	w.later(2 * time.Second)
	// An empty list that the server really gave is a list.
	if r := w.current(w.one, v, user(p, "ann"), time.Minute); r.Stale || len(r.Definitions) != 0 {
		t.Errorf("%v", names(r))
	}
}

func TestFO044_RefusedCredentialsHideTheList(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	w.current(w.one, v, user(p, "ann"), time.Minute)
	w.current(w.one, v, user(p, "bob"), time.Minute)
	w.lister.does(func(_ ctx, _ Server, c Context, _ Kind) (Listing, error) {
		if c.Subject.Value == "ann" {
			return Listing{}, fault.New(fault.Unauthenticated, "HTTP_401", "the server asks for a token")
		}
		return Listing{}, errDown
	})
	w.later(time.Hour)
	refusedFor := func(s *Service, name string, maxAge time.Duration) bool {
		_, err := s.Current(t.Context(), v, user(p, name), Tool, maxAge)
		f, ok := fault.As(err)
		return ok && f.Kind == fault.Denied && f.Reason == "AUTHORIZATION_REQUIRED"
	}
	if !refusedFor(w.one, "ann", time.Minute) || !refusedFor(w.two, "ann", 100*time.Hour) {
		t.Error("the list is served after a refusal")
	}
	// An outage that follows does not bring it back.
	w.lister.says(Listing{}, errDown)
	w.later(time.Hour)
	if _, err := w.one.Current(t.Context(), v, user(p, "ann"), Tool, 100*time.Hour); err == nil {
		t.Error("the list is served after refusal and outage")
	}
	if r := w.current(w.one, v, user(p, "bob"), time.Minute); !r.Stale {
		t.Error("the other user's list is gone, or fresh")
	}
}

func TestCache_ForgedBytesCountForNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	r := w.current(w.one, v, user(p, "ann"), time.Hour)
	cache := redis.NewCache(w.redis.Client(t))
	key := cacheKey(p.Tenant, r.ID)
	good, ok := cache.Get(t.Context(), key)
	if !ok {
		t.Fatal("the revision is not in the cache")
	}
	c, err := decodeContent(good)
	if err != nil || c.id != r.ID {
		t.Fatal(err)
	}
	// The id covers digests and not bytes: a forger may keep it.
	c.definitions[0].Raw = json.RawMessage(`{"name":"a","description":"forged","inputSchema":{"type":"object"}}`)
	for name, forged := range map[string][]byte{"other bytes": c.append(nil, true), "cut": good[:len(good)-1], "garbage": []byte("x")} {
		if !cache.Set(t.Context(), key, forged, time.Hour) {
			t.Fatal("not stored")
		}
		got := w.current(w.replica(), v, user(p, "ann"), time.Hour)
		if string(got.Definitions[0].Raw) != string(r.Definitions[0].Raw) {
			t.Errorf("%s: served %s", name, got.Definitions[0].Raw)
		}
	}
	// The true bytes are used: the rows may even be out of reach.
	cache.Set(t.Context(), key, good, time.Hour)
	w.exec(`DELETE FROM catalog_items`)
	if got := w.current(w.replica(), v, user(p, "ann"), time.Hour); string(got.Definitions[0].Raw) != string(r.Definitions[0].Raw) {
		t.Error("the cache was not used")
	}
	if err := errorOf(w.replicaWithoutCache().Current(t.Context(), v, user(p, "ann"), Tool, time.Hour)); err == nil {
		t.Error("rows that do not have the content of the id were served")
	}
}

func errorOf(_ *Revision, err error) error { return err }

func (w *world) replicaWithoutCache() *Service {
	s, err := New(Options{DB: w.db, Lister: w.lister, Voider: w.voids, Recorder: w.log, CheckURL: checkURL, Now: w.clock.Now})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(s.Close)
	return s
}

func TestCurrent_RegistrationChangedMeanwhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	var after Server
	w.lister.does(func(ctx ctx, _ Server, _ Context, _ Kind) (Listing, error) {
		var err error
		after, err = w.two.UpdateServer(ctx, p, v.ID, ServerUpdate{URL: ptr("https://elsewhere.example/mcp")})
		return listing(tool("of_the_old_address", okSchema)), err
	})
	if _, err := w.one.Current(t.Context(), v, user(p, "ann"), Tool, time.Hour); !fault.Is(err, fault.Conflict) {
		t.Fatalf("%v", err)
	}
	w.lister.says(listing(tool("new", okSchema)), nil)
	if got := names(w.current(w.one, after, user(p, "ann"), time.Hour)); !slices.Equal(got, []string{"new"}) {
		t.Errorf("%v", got)
	}
	// And a list of the earlier registration is never served for the later one.
	moved, err := w.one.UpdateServer(t.Context(), p, v.ID, ServerUpdate{URL: ptr("https://third.example/mcp")})
	if err != nil {
		t.Fatal(err)
	}
	w.lister.says(Listing{}, errDown)
	if r, err := w.one.Current(t.Context(), moved, user(p, "ann"), Tool, 100*time.Hour); err == nil {
		t.Errorf("served %v of another address", names(r))
	}
}

func TestFO045_FO046_SlowServerIsPendingAndComesLater(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	slow, quick := w.server(p, "slow"), w.server(p, "quick")
	s, err := New(Options{DB: w.db, Lister: w.lister, Voider: w.voids, Recorder: w.log, CheckURL: checkURL,
		Now: w.clock.Now, Wait: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	answer := make(chan struct{})
	w.lister.does(func(ctx ctx, v Server, _ Context, _ Kind) (Listing, error) {
		if v.ID == slow.ID {
			select {
			case <-answer:
			case <-ctx.Done():
				return Listing{}, ctx.Err()
			}
		}
		return listing(tool("late", okSchema)), nil
	})
	_, err = s.Current(t.Context(), slow, user(p, "ann"), Tool, time.Hour)
	if f, ok := fault.As(err); !ok || f.Reason != "CATALOG_PENDING" {
		t.Fatalf("%v", err)
	}
	// So many users wait for the slow one that its bound is full; the other server
	// of the same tenant is not held up.
	for i := range maxServerLists + 2 {
		_, err = s.Current(t.Context(), slow, user(p, fmt.Sprint("u", i)), Tool, time.Hour)
	}
	if f, ok := fault.As(err); !ok || f.Reason != "CATALOG_BUSY" {
		t.Errorf("%v", err)
	}
	bounded := time.Now().Add(10 * time.Second)
	for {
		if r, err := s.Current(t.Context(), quick, user(p, "ann"), Tool, time.Hour); err == nil && len(r.Definitions) == 1 {
			break
		}
		if time.Now().After(bounded) {
			t.Fatal("the quick server waits for the slow one")
		}
	}
	close(answer)
	for {
		if r, err := s.Current(t.Context(), slow, user(p, "ann"), Tool, time.Hour); err == nil {
			if !slices.Equal(names(r), []string{"late"}) || r.Stale {
				t.Errorf("%v", names(r))
			}
			break
		}
		if time.Now().After(bounded) {
			t.Fatal("the late answer never counts")
		}
	}
}

func TestFO040_FO043_PartOfAListReplacesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	var all []json.RawMessage
	for i := range 120 {
		all = append(all, tool(fmt.Sprint("t", i), okSchema))
	}
	w.lister.says(listing(all...), nil)
	if r := w.current(w.one, v, user(p, "ann"), time.Hour); len(r.Definitions) != 120 {
		t.Fatalf("%d definitions", len(r.Definitions))
	}
	// While the list is made again, and after its third page failed, the last
	// definition keeps its schema.
	w.lister.does(func(ctx ctx, _ Server, _ Context, _ Kind) (Listing, error) {
		err := w.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
			got, err := w.one.LockDefinition(ctx, tx, v.ID, v.scope(user(p, "ann")).name(""), Tool, "t119")
			if got.Digest == "" {
				t.Error("a definition is absent during the list")
			}
			return err
		})
		return Listing{}, errors.Join(err, errDown)
	})
	w.later(2 * time.Hour)
	if r := w.current(w.one, v, user(p, "ann"), time.Hour); len(r.Definitions) != 120 || !r.Stale {
		t.Errorf("%d definitions, stale %v", len(r.Definitions), r.Stale)
	}
}

func TestFO039_IncompleteListSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	l := listing(tool("a", okSchema))
	l.Incomplete = "pagination loop"
	l.Rejected = []Rejected{{Item: tool("bad", okSchema), Reason: "x-mcp-header is used twice"}}
	w.lister.says(l, nil)
	r := w.current(w.one, v, user(p, "ann"), time.Hour)
	if len(r.Findings) != 1 || r.Findings[0].Code != FindingIncomplete || !strings.Contains(r.Findings[0].Detail, "pagination loop") {
		t.Errorf("findings %v", r.Findings)
	}
	if d := r.Definitions[1]; d.Name != "bad" || !strings.Contains(d.Quarantine, "x-mcp-header") {
		t.Errorf("rejected %+v", d)
	}
	again := w.current(w.replica(), v, user(p, "ann"), time.Hour)
	if len(again.Findings) != 1 || again.Definitions[1].Quarantine != r.Definitions[1].Quarantine {
		t.Errorf("after storage: %v", again.Findings)
	}
}

// Each user's own list is asked for and kept apart, yet what the lists have in
// common is in memory once.
func TestCurrent_EqualListsOfManyUsersAreHeldOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	items := make([]json.RawMessage, 1000)
	for i := range items {
		items[i] = tool(fmt.Sprintf("tool_%d", i), okSchema)
	}
	w.lister.does(func(ctx, Server, Context, Kind) (Listing, error) { return listing(items...), nil })
	var first *Revision
	for i := range 8 {
		r := w.current(w.one, v, user(p, fmt.Sprintf("user%d", i)), time.Minute)
		if len(r.Definitions) != len(items) {
			t.Fatalf("%d definitions", len(r.Definitions))
		}
		if first == nil {
			first = r
		} else if &r.Definitions[0] != &first.Definitions[0] {
			t.Fatalf("user %d has a copy of the list", i)
		}
	}
	if n := w.lister.count(); n != 8 {
		t.Errorf("%d lists for 8 users", n)
	}
}
