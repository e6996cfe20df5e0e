package events_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/events"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Transactions that change calls of several sessions, in any order, number their
// events without a hole and without a deadlock.
func TestNumbers_HaveNoHoleWhateverTheOrderOfTheChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.tenant()
	a, b, c := w.place(p), w.place(p), w.place(p)
	var wg sync.WaitGroup
	for i := range 6 {
		// Each has calls of its own: rows of calls are locked in the order of changes.
		order := []*place{a, b, c}
		mine := make([]*place, 3)
		for j := range order {
			mine[j] = &place{w: w, who: p, session: order[j].session, call: order[j].newCall()}
		}
		if i%2 == 1 {
			mine[0], mine[2] = mine[2], mine[0]
		}
		wg.Go(func() {
			for range 15 {
				change(t, mine...)
			}
		})
	}
	wg.Wait()
	rows, err := w.owner.Query(t.Context(), `SELECT h.last, count(e.n), max(e.n), count(DISTINCT e.n)
		FROM session_event_heads h JOIN session_events e USING (tenant_id, session_id) GROUP BY h.session_id, h.last`)
	must(t, err)
	sessions := 0
	for rows.Next() {
		var last, count, most, distinct int64
		must(t, rows.Scan(&last, &count, &most, &distinct))
		if last != 1+6+6*15 || count != last || most != last || distinct != last {
			t.Errorf("last %d, %d events up to %d, %d different", last, count, most, distinct)
		}
		sessions++
	}
	must(t, rows.Err())
	if sessions != 3 {
		t.Errorf("%d sessions have events", sessions)
	}
}

// A change that is undone leaves neither an event nor a hole.
func TestNumbers_UndoneChangeLeavesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	undo := errors.New("undo")
	err := w.db.InTx(t.Context(), pl.who.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if _, err := tx.Exec(ctx, changeSQL, tx.Tenant(), pl.call); err != nil {
			return err
		}
		return undo
	})
	if !errors.Is(err, undo) {
		t.Fatal(err)
	}
	change(t, pl)
	st := pl.follow(w.service(nil, quick()), 0)
	defer st.Close()
	for n := int64(1); n <= 2; n++ {
		if e := next(t, st); e.N != n || e.Revision != int(n) || e.CallID != pl.call || e.State != "DISPATCHING" || e.Server != "calendar" {
			t.Errorf("event %d: %+v", n, e)
		}
	}
}

// Two replicas on one store, a reader whose connection breaks again and again and
// comes back at the other: it has every id once, in order.
func TestFollow_NothingIsLostAcrossReplicasAndReconnects(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	services := []*events.Service{w.service(nil, quick()), w.service(nil, quick())}
	const total = 400
	var writing sync.WaitGroup
	for range 4 {
		mine := &place{w: w, who: pl.who, session: pl.session, call: pl.newCall()}
		writing.Go(func() {
			for i := range (total - 5) / 4 {
				change(t, mine)
				services[i%2].Recorded(pl.who.Tenant)
			}
		})
	}
	const all = 1 + 4 + 4*((total-5)/4)
	r := rand.New(rand.NewPCG(1, 2))
	last := int64(0)
	for turn := 0; last < all; turn++ {
		st := pl.follow(services[turn%2], last)
		for range 1 + r.IntN(60) {
			if last == all {
				break
			}
			e := next(t, st)
			if e.N != last+1 || e.Kind != events.CallChanged {
				t.Fatalf("after %d came %+v", last, e)
			}
			last = e.N
		}
		st.Close()
	}
	writing.Wait()
}

// Without a position a stream begins with what comes, and says where that is.
func TestFollow_BeginsNowOrAfterAnEvent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	s := w.service(nil, quick())
	change(t, pl)
	st, err := s.Follow(t.Context(), pl.who.Tenant, events.Request{SessionID: pl.session, Check: always})
	must(t, err)
	defer st.Close()
	if e, err := nextOf(t, st); err != nil || e.Kind != events.Ready || e.N != 2 {
		t.Fatalf("%+v, %v", e, err)
	}
	change(t, pl)
	if e := next(t, st); e.N != 3 {
		t.Errorf("%+v", e)
	}
	beyond := int64(4)
	_, err = s.Follow(t.Context(), pl.who.Tenant, events.Request{SessionID: pl.session, After: &beyond, Check: always})
	if f, ok := fault.As(err); !ok || f.Kind != fault.Invalid || f.Fields[0].Path != "after" {
		t.Errorf("%v", err)
	}
}

func TestFollow_OneCall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	s := w.service(nil, quick())
	other := &place{w: w, who: pl.who, session: pl.session, call: pl.newCall()}
	zero := int64(0)
	st, err := s.Follow(t.Context(), pl.who.Tenant, events.Request{SessionID: pl.session, CallID: other.call, After: &zero, Check: always})
	must(t, err)
	defer st.Close()
	change(t, pl)
	change(t, other)
	for _, n := range []int64{2, 4} {
		if e := next(t, st); e.N != n || e.CallID != other.call {
			t.Errorf("want %d: %+v", n, e)
		}
	}
}

// A reader that does not read is dropped while the others and the calls go on; it
// resumes with exactly what it missed.
func TestFollow_SlowReaderIsDroppedAndResumes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	cfg := quick()
	cfg.Buffered = 8
	s := w.service(nil, cfg)
	slow, brisk := pl.follow(s, 1), pl.follow(s, 1)
	defer slow.Close()
	defer brisk.Close()
	for n := int64(2); n <= 40; n++ {
		change(t, pl)
		s.Recorded(pl.who.Tenant)
		if e := next(t, brisk); e.N != n {
			t.Fatalf("the brisk reader has %+v", e)
		}
	}
	all, why := ending(t, slow)
	if why != "READER_TOO_SLOW" || numbers(all) != "2 3 4 5 6 7 8 9 " {
		t.Fatalf("%s, %s", numbers(all), why)
	}
	again := pl.follow(s, 9)
	defer again.Close()
	for n := int64(10); n <= 40; n++ {
		if e := next(t, again); e.N != n {
			t.Fatalf("want %d: %+v", n, e)
		}
	}
}

func TestFollow_EndsWithItsAuthority(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	s := w.service(nil, quick())
	for _, c := range []struct {
		err    error
		why    string
		reason string
	}{
		{fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "revoked"), "UNAUTHENTICATED", ""},
		{events.ErrSessionEnded, "EOF", "SESSION_ENDED"},
	} {
		var mu sync.Mutex
		var answer error
		after := int64(0)
		st, err := s.Follow(t.Context(), pl.who.Tenant, events.Request{SessionID: pl.session, After: &after, Check: func(context.Context) error {
			mu.Lock()
			defer mu.Unlock()
			return answer
		}})
		must(t, err)
		if e := next(t, st); e.N != 1 {
			t.Fatalf("%+v", e)
		}
		mu.Lock()
		answer = c.err
		mu.Unlock()
		all, why := ending(t, st)
		if why != c.why {
			t.Errorf("ended with %s", why)
		}
		if c.reason != "" && (len(all) == 0 || all[len(all)-1].Kind != events.Bye || all[len(all)-1].Reason != c.reason) {
			t.Errorf("%+v", all)
		}
		st.Close()
	}
}

// What the end of a session brings is told before the bye.
func TestFollow_TellsAllBeforeItEndsWithTheSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	cfg := quick()
	cfg.Poll = time.Hour // nobody looks but the end
	s := w.service(nil, cfg)
	after := int64(1)
	st, err := s.Follow(t.Context(), pl.who.Tenant, events.Request{SessionID: pl.session, After: &after,
		Check: func(context.Context) error { return events.ErrSessionEnded }})
	must(t, err)
	defer st.Close()
	for range 3 {
		change(t, pl)
	}
	all, why := ending(t, st)
	if numbers(all) != "2 3 4 " || why != "EOF" || all[len(all)-1].Kind != events.Bye {
		t.Errorf("%+v, %s", all, why)
	}
}

func TestDrain_EndsStreamsInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	s := w.service(nil, quick())
	st := pl.follow(s, 0)
	if e := next(t, st); e.N != 1 {
		t.Fatalf("%+v", e)
	}
	s.Drain()
	all, why := ending(t, st)
	if why != "EOF" || len(all) != 1 || all[0].Kind != events.Bye || all[0].Reason != "SHUTTING_DOWN" {
		t.Errorf("%+v, %s", all, why)
	}
	st.Close()
	_, err := s.Follow(t.Context(), pl.who.Tenant, events.Request{SessionID: pl.session, Check: always})
	if !fault.Is(err, fault.Unavailable) {
		t.Errorf("a stream begins after the drain: %v", err)
	}
}

func TestFollow_Heartbeat(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	cfg := quick()
	cfg.Heartbeat = time.Millisecond
	st := pl.follow(w.service(nil, cfg), 1)
	defer st.Close()
	for {
		e, err := nextOf(t, st)
		must(t, err)
		if e.Kind == events.Heartbeat {
			return
		}
	}
}

// What was removed is told as such, and what is left follows.
func TestRetain_BoundsWhatIsKeptAndReadersResync(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl, old := w.place(w.tenant()), w.place(w.tenant())
	cfg := quick()
	cfg.Kept = 5
	s := w.service(nil, cfg)
	for range 11 {
		change(t, pl)
	}
	_, err := w.owner.Exec(t.Context(), `UPDATE session_events SET create_time = now() - interval '25 hours' WHERE session_id = $1`, old.session)
	must(t, err)
	change(t, old)
	must(t, s.Retain(t.Context()))
	for _, c := range []struct {
		pl    *place
		floor int64
		last  int64
	}{{pl, 7, 12}, {old, 1, 2}} {
		st := c.pl.follow(s, 0)
		if e := next(t, st); e.Kind != events.Resync || e.N != c.floor {
			t.Fatalf("%+v", e)
		}
		for n := c.floor + 1; n <= c.last; n++ {
			if e := next(t, st); e.N != n {
				t.Errorf("want %d: %+v", n, e)
			}
		}
		st.Close()
	}
	// Nothing is told anew to who has it.
	st := pl.follow(s, 7)
	defer st.Close()
	if e := next(t, st); e.N != 8 {
		t.Errorf("%+v", e)
	}
}

func TestFollow_ReadersAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.tenant()
	a, b, c := w.place(p), w.place(p), w.place(w.tenant())
	cfg := quick()
	cfg.SessionReaders, cfg.TenantReaders = 2, 3
	s := w.service(nil, cfg)
	open := []*events.Stream{a.follow(s, 0), a.follow(s, 0), b.follow(s, 0)}
	for _, pl := range []*place{a, b} {
		_, err := s.Follow(t.Context(), p.Tenant, events.Request{SessionID: pl.session, Check: always})
		if f, ok := fault.As(err); !ok || f.Reason != "TOO_MANY_STREAMS" || f.RetryAfter <= 0 {
			t.Errorf("%v", err)
		}
	}
	c.follow(s, 0).Close() // another tenant has room of its own
	for _, st := range open {
		st.Close()
	}
	a.follow(s, 0).Close()
}

// Two hundred readers of ten sessions each have everything.
func TestFollow_TwoHundredReaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.tenant()
	cfg := quick()
	cfg.SessionReaders = 20
	s := w.service(nil, cfg)
	const changes = 20
	var reading sync.WaitGroup
	var places []*place
	for range 10 {
		pl := w.place(p)
		places = append(places, pl)
		for range 20 {
			st := pl.follow(s, 0)
			reading.Go(func() {
				defer st.Close()
				for n := int64(1); n <= changes+1; n++ {
					if e := next(t, st); e.N != n || e.SessionID != pl.session {
						t.Errorf("want %d: %+v", n, e)
						return
					}
				}
			})
		}
	}
	for range changes {
		change(t, places...)
		s.Recorded(p.Tenant)
	}
	reading.Wait()
}

// A stream of another tenant's session, were its id known, shows nothing.
func TestFollow_TenantsAreApart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	mine, theirs := w.place(w.tenant()), w.place(w.tenant())
	s := w.service(nil, quick())
	zero := int64(0)
	st, err := s.Follow(t.Context(), mine.who.Tenant, events.Request{SessionID: theirs.session, After: &zero, Check: always,
		Servers: map[string]string{"srv": "calendar"}})
	must(t, err)
	defer st.Close()
	ours := theirs.follow(s, 0)
	defer ours.Close()
	change(t, theirs)
	s.CatalogChanged(theirs.who.Tenant, "srv")
	s.Progress(theirs.who.Tenant, theirs.session, theirs.call)
	for _, n := range []int64{1, 2} {
		if e := next(t, ours); e.N != 0 && e.N != n {
			t.Errorf("%+v", e)
		}
	}
	s.Drain()
	if all, _ := ending(t, st); len(all) != 2 || all[0].Kind != events.Ready || all[1].Kind != events.Bye {
		t.Errorf("%+v", all)
	}
}

func TestLive_ProgressAndCatalog(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	s := w.service(nil, quick())
	one := int64(1)
	with, err := s.Follow(t.Context(), pl.who.Tenant, events.Request{SessionID: pl.session, After: &one, Check: always, Servers: map[string]string{"srv": "calendar"}})
	must(t, err)
	defer with.Close()
	without := pl.follow(s, 1)
	defer without.Close()
	s.CatalogChanged(pl.who.Tenant, "srv")
	s.Progress(pl.who.Tenant, pl.session, pl.call)
	if e := next(t, with); e.Kind != events.CatalogChanged || e.Server != "calendar" || e.N != 0 {
		t.Errorf("%+v", e)
	}
	for _, st := range []*events.Stream{with, without} {
		if e := next(t, st); e.Kind != events.CallProgress || e.CallID != pl.call || e.N != 0 {
			t.Errorf("%+v", e)
		}
	}
}
