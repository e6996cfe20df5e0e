package audit

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Wrap(m)) }

type nullRecorder struct{}

func (nullRecorder) Record(context.Context, tenant.Tx, tenant.Event) error { return nil }

// clock is a settable clock that starts at the present.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

type world struct {
	pg    *pgtest.DB
	db    *tenant.DB
	vault *tenant.Vault
	svc   *tenant.Service
	log   *Log
	clock *clock
	owner *pgxpool.Pool
	t     tenant.ID
}

var signer = seal.NewSigner(seal.DeriveSeed(make([]byte, 32), "audit"))

func newWorld(tb testing.TB) *world {
	tb.Helper()
	w := &world{pg: pgtest.New(tb), clock: &clock{now: time.Now()}}
	var err error
	if w.db, err = tenant.NewDB(w.pg.Pool(tb, tenant.AppRole), w.pg.Pool(tb, tenant.SystemRole)); err != nil {
		tb.Fatal(err)
	}
	kek, err := seal.NewLocalKEK("k1", make([]byte, 32))
	if err != nil {
		tb.Fatal(err)
	}
	ring, err := seal.NewRing(kek)
	if err != nil {
		tb.Fatal(err)
	}
	if w.svc, err = tenant.NewService(w.db, ring, nullRecorder{}, ""); err != nil {
		tb.Fatal(err)
	}
	w.vault = tenant.NewVault(w.db, ring)
	w.log = w.newLog(tb, signer)
	w.owner = w.pg.Owner(tb)
	w.t = w.newTenant(tb)
	return w
}

func (w *world) newLog(tb testing.TB, s *seal.Signer) *Log {
	tb.Helper()
	l, err := New(w.db, w.vault, s, Options{Now: w.clock.Now})
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

func (w *world) newTenant(tb testing.TB) tenant.ID {
	tb.Helper()
	tn, _, err := w.svc.CreateTenant(tb.Context(), "test", "")
	if err != nil {
		tb.Fatal(err)
	}
	return tn.ID
}

// sample is an entry with every member set.
func (w *world) sample(n int) Entry {
	return Entry{Kind: CallFinished, SessionID: resource.NewID(resource.Session), CallID: resource.NewID(resource.Call),
		ConsentID: resource.NewID(resource.Consent), ServerID: resource.NewID(resource.Server), Actor: "SERVICE:key_1",
		Subject: tenant.Subject{Source: "web", Value: "alice"}, Time: w.clock.Now(), Details: fmt.Appendf(nil, `{"n":%d}`, n)}
}

// add inserts n entries through Prepare and Queue.
func (w *world) add(tb testing.TB, t tenant.ID, n int) {
	tb.Helper()
	err := w.db.InTx(tb.Context(), t, func(ctx context.Context, tx tenant.Tx) error {
		b := &pgx.Batch{}
		for i := range n {
			p, err := w.log.Prepare(ctx, t, w.sample(i))
			if err != nil {
				return err
			}
			p.Queue(b)
		}
		return tx.SendBatch(ctx, b).Close()
	})
	if err != nil {
		tb.Fatal(err)
	}
}

func (w *world) sealNow(tb testing.TB, t tenant.ID) {
	tb.Helper()
	if err := w.log.SealNow(tb.Context(), t); err != nil {
		tb.Fatal(err)
	}
}

func (w *world) flush(tb testing.TB) {
	tb.Helper()
	if err := w.log.Flush(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

func (w *world) verify(tb testing.TB, t tenant.ID, external *Checkpoint) Report {
	tb.Helper()
	rep, err := w.log.Verify(tb.Context(), t, external)
	if err != nil {
		tb.Fatal(err)
	}
	return rep
}

func (w *world) mustOK(tb testing.TB, t tenant.ID, entries int64) Report {
	tb.Helper()
	rep := w.verify(tb, t, nil)
	if !rep.OK || len(rep.Problems) > 0 || rep.Entries != entries || rep.LastSequence != entries || !rep.DetailsChecked {
		tb.Fatalf("want a sound chain of %d entries, got %+v", entries, rep)
	}
	return rep
}

// exec runs SQL as the owner of the tables, past every policy.
func (w *world) exec(tb testing.TB, sql string, args ...any) {
	tb.Helper()
	if _, err := w.owner.Exec(tb.Context(), sql, args...); err != nil {
		tb.Fatalf("%s: %v", sql, err)
	}
}

func TestAppend_ListsWhatWasWritten(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	want := w.sample(7)
	want.Details = []byte(`{"argumentsDigest":"args-1:sha256:00","n":7}`)
	var id string
	err := w.db.InTx(t.Context(), w.t, func(ctx context.Context, tx tenant.Tx) (err error) {
		id, err = w.log.Append(ctx, tx, want)
		return err
	})
	if err != nil || !resource.IsID(resource.AuditEntry, id) {
		t.Fatalf("append: %q, %v", id, err)
	}
	check := func(sealed bool) {
		t.Helper()
		got, next, err := w.log.List(t.Context(), w.t, Filter{})
		if err != nil || len(got) != 1 || next != "" {
			t.Fatalf("list: %d entries, next %q, %v", len(got), next, err)
		}
		r := got[0]
		if r.ID != id || r.Kind != want.Kind || r.SessionID != want.SessionID || r.CallID != want.CallID ||
			r.ConsentID != want.ConsentID || r.ServerID != want.ServerID || r.Actor != want.Actor || r.Subject != want.Subject ||
			!r.Time.Equal(want.Time.Truncate(time.Microsecond)) || string(r.Details) != string(want.Details) {
			t.Errorf("got %+v with details %s", r, r.Details)
		}
		if sealed != (r.Sequence == 1) || sealed != strings.HasPrefix(r.Digest, "audit-1:sha256:") {
			t.Errorf("sealed %v: sequence %d, digest %q", sealed, r.Sequence, r.Digest)
		}
	}
	check(false)
	if rep := w.verify(t, w.t, nil); !rep.OK || rep.Unsealed != 1 || rep.Entries != 0 {
		t.Errorf("before sealing: %+v", rep)
	}
	w.sealNow(t, w.t)
	check(true)
	w.mustOK(t, w.t, 1)

	var stored string
	if err := w.owner.QueryRow(t.Context(), `SELECT encode(details, 'escape') FROM audit_entries`).Scan(&stored); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(stored, "argumentsDigest") {
		t.Error("details are stored in the clear")
	}
}

func TestRecord_KeepsTenantEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var _ tenant.Recorder = w.log
	err := w.db.InTx(t.Context(), w.t, func(ctx context.Context, tx tenant.Tx) error {
		return errors.Join(
			w.log.Record(ctx, tx, tenant.Event{Kind: KeyCreated, Actor: "OPERATOR", Details: map[string]any{"keyId": "key_1"}}),
			w.log.Record(ctx, tx, tenant.Event{Kind: KeyRevoked, Actor: "ADMIN:key_2"}))
	})
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := w.log.List(t.Context(), w.t, Filter{})
	if err != nil || len(got) != 2 || string(got[0].Details) != `{"keyId":"key_1"}` || got[0].Actor != "OPERATOR" || string(got[1].Details) != "{}" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestPrepare_RefusesMistakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	bad := map[string]func(*Entry){
		"no kind":       func(e *Entry) { e.Kind = "" },
		"one word":      func(e *Entry) { e.Kind = "call" },
		"upper case":    func(e *Entry) { e.Kind = "Call.finished" },
		"two dots":      func(e *Entry) { e.Kind = "call.was.finished" },
		"ends in a dot": func(e *Entry) { e.Kind = "call." },
		"long kind":     func(e *Entry) { e.Kind = "call." + strings.Repeat("x", 60) },
		"long actor":    func(e *Entry) { e.Actor = strings.Repeat("a", maxText+1) },
		"NUL":           func(e *Entry) { e.Subject.Value = "a\x00" },
		"bad UTF-8":     func(e *Entry) { e.CallID = "\xff" },
		"no object":     func(e *Entry) { e.Details = []byte(`[1]`) },
		"no JSON":       func(e *Entry) { e.Details = []byte(`{"a":`) },
		"JSON bytes":    func(e *Entry) { e.Details = []byte("{\"a\":\"\xff\"}") },
		"long details":  func(e *Entry) { e.Details = []byte(`{"a":"` + strings.Repeat("x", MaxDetails) + `"}`) },
	}
	for name, change := range bad {
		e := w.sample(1)
		change(&e)
		if _, err := w.log.Prepare(t.Context(), w.t, e); err == nil {
			t.Errorf("%s: passes", name)
		} else if strings.Contains(err.Error(), "xxxxxxxx") && name == "long details" {
			t.Errorf("%s: the error repeats details: %v", name, err)
		}
	}
	e := w.sample(1)
	e.Details = []byte(`{"a":"` + strings.Repeat("x", MaxDetails-8) + `"}`)
	if _, err := w.log.Prepare(t.Context(), w.t, e); err != nil {
		t.Errorf("details at the limit: %v", err)
	}
}

func TestList_FiltersAndPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 7)
	call := w.sample(0)
	call.Kind = CallUncertain
	if err := w.db.InTx(t.Context(), w.t, func(ctx context.Context, tx tenant.Tx) error {
		_, err := w.log.Append(ctx, tx, call)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	w.sealNow(t, w.t)
	w.add(t, w.t, 2) // unsealed

	all := func(f Filter) (rs []Record) {
		t.Helper()
		for {
			page, next, err := w.log.List(t.Context(), w.t, f)
			if err != nil {
				t.Fatal(err)
			}
			rs = append(rs, page...)
			if next == "" {
				return rs
			}
			if len(page) != f.PageSize {
				t.Fatalf("a page of %d with a next one", len(page))
			}
			f.PageToken = next
		}
	}
	for size := 1; size <= 11; size++ {
		rs, seen := all(Filter{PageSize: size}), map[string]bool{}
		for _, r := range rs {
			seen[r.ID] = true
		}
		if len(rs) != 10 || len(seen) != 10 {
			t.Errorf("pages of %d: %d entries, %d different", size, len(rs), len(seen))
		}
		chain := all(Filter{PageSize: size, Order: ByChain})
		if len(chain) != 8 || chain[0].Sequence != 1 || chain[7].Sequence != 8 {
			t.Errorf("pages of %d by chain: %d entries", size, len(chain))
		}
	}
	for name, f := range map[string]Filter{
		"call": {CallID: call.CallID}, "session": {SessionID: call.SessionID}, "rare kind": {Kind: CallUncertain},
		"call and kind": {CallID: call.CallID, Kind: CallUncertain}, "after": {Order: ByChain, AfterSequence: 7},
	} {
		if rs := all(f); len(rs) != 1 || rs[0].CallID != call.CallID {
			t.Errorf("%s: %+v", name, rs)
		}
	}
	if rs := all(Filter{Kind: CallFinished}); len(rs) != 9 {
		t.Errorf("frequent kind: %d entries", len(rs))
	}
	if rs := all(Filter{CallID: call.CallID, Kind: CallDenied}); len(rs) != 0 {
		t.Errorf("nothing matches: %+v", rs)
	}

	_, token, _ := w.log.List(t.Context(), w.t, Filter{PageSize: 1})
	for name, c := range map[string]struct {
		f     Filter
		field string
	}{
		"call":        {Filter{CallID: "ses_1"}, "callId"},
		"session":     {Filter{SessionID: "x"}, "sessionId"},
		"kind":        {Filter{Kind: "Call"}, "kind"},
		"size":        {Filter{PageSize: -1}, "pageSize"},
		"token":       {Filter{PageToken: "!"}, "pageToken"},
		"other order": {Filter{PageToken: token, Order: ByChain}, "pageToken"},
		"after":       {Filter{AfterSequence: 1}, "afterSequence"},
	} {
		_, _, err := w.log.List(t.Context(), w.t, c.f)
		f, ok := fault.As(err)
		if !ok || f.Kind != fault.Invalid || len(f.Fields) != 1 || f.Fields[0].Path != c.field {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Two tenants: neither sees, seals or verifies the other's entries.
func TestTenants_AreApart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.newTenant(t)
	w.add(t, w.t, 3)
	w.add(t, other, 5)
	w.sealNow(t, w.t)
	if rep := w.verify(t, other, nil); rep.Entries != 0 || rep.Unsealed != 5 {
		t.Errorf("sealing one sealed the other: %+v", rep)
	}
	w.flush(t)
	mine, theirs := w.mustOK(t, w.t, 3), w.mustOK(t, other, 5)
	if mine.LastDigest == theirs.LastDigest || mine.Checkpoint == nil || theirs.Checkpoint == nil {
		t.Errorf("got %+v and %+v", mine, theirs)
	}
	rs, _, err := w.log.List(t.Context(), w.t, Filter{})
	if err != nil || len(rs) != 3 {
		t.Fatalf("%d entries, %v", len(rs), err)
	}
	if rs, _, err := w.log.List(t.Context(), other, Filter{CallID: rs[0].CallID}); err != nil || len(rs) != 0 {
		t.Errorf("the other tenant finds the call: %+v, %v", rs, err)
	}
	if _, err := w.log.Verify(t.Context(), w.t, theirs.Checkpoint); !fault.Is(err, fault.Invalid) {
		t.Errorf("another tenant's checkpoint: %v", err)
	}
	p, err := w.log.Prepare(t.Context(), other, w.sample(0))
	if err != nil {
		t.Fatal(err)
	}
	err = w.db.InTx(t.Context(), w.t, func(ctx context.Context, tx tenant.Tx) error {
		b := &pgx.Batch{}
		p.Queue(b)
		return tx.SendBatch(ctx, b).Close()
	})
	if err == nil {
		t.Error("an entry of another tenant was inserted")
	}
}

// The role of the server cannot touch what is sealed, nor insert what looks so.
func TestTable_SealedEntriesStay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 2)
	w.sealNow(t, w.t)
	w.add(t, w.t, 1)
	for _, sql := range []string{
		`UPDATE audit_entries SET sequence = 9 WHERE tenant_id = $1 AND sequence = 1`,
		`UPDATE audit_entries SET sequence = NULL WHERE tenant_id = $1 AND sequence = 1`,
		`UPDATE audit_entries SET digest = '' WHERE tenant_id = $1 AND sequence = 1`,
		`UPDATE audit_entries SET digest = 'x' WHERE tenant_id = $1 AND sequence IS NULL`,
		`UPDATE audit_entries SET kind = 'x.y' WHERE tenant_id = $1`,
		`DELETE FROM audit_entries WHERE tenant_id = $1`,
		`DELETE FROM audit_checkpoints WHERE tenant_id = $1`,
		`UPDATE audit_checkpoints SET digest = '' WHERE tenant_id = $1`,
		`INSERT INTO audit_entries (tenant_id, audit_entry_id, kind, details, details_digest, create_time, sequence)
		 VALUES ($1, 'aud_x', 'x.y', '', '', now(), 3)`,
		`INSERT INTO audit_entries (tenant_id, audit_entry_id, kind, details, details_digest, create_time, digest)
		 VALUES ($1, 'aud_x', 'x.y', '', '', now(), 'x')`,
	} {
		err := w.db.InTx(t.Context(), w.t, func(ctx context.Context, tx tenant.Tx) error {
			_, err := tx.Exec(ctx, sql, w.t)
			return err
		})
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("not refused: %s: %v", sql, err)
		}
	}
	w.sealNow(t, w.t)
	w.mustOK(t, w.t, 3)
}

// Every member of a link must change its digest, and every member of the
// content the keyed one; a member added later must be added there.
func TestDigests_CoverEveryMember(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key, err := w.vault.Key(t.Context(), w.t)
	if err != nil {
		t.Fatal(err)
	}
	base := link{content: content{Time: time.UnixMicro(1)}}
	vary := func(v reflect.Value, name string, keyed bool, e *link) {
		old := reflect.New(v.Type()).Elem()
		old.Set(v)
		switch v.Interface().(type) {
		case string:
			v.SetString("changed")
		case int64:
			v.SetInt(77)
		case time.Time:
			v.Set(reflect.ValueOf(time.UnixMicro(2)))
		default:
			t.Fatalf("%s: extend the test for %s", name, v.Type())
		}
		if name != "Digest" && e.digest("ten") == base.digest("ten") {
			t.Errorf("the chain digest does not cover %s", name)
		}
		if keyed && detailsDigest(key, "ten", e.content, nil) == detailsDigest(key, "ten", base.content, nil) {
			t.Errorf("the keyed digest does not cover %s", name)
		}
		v.Set(old)
	}
	e := base
	for _, part := range []struct {
		v     reflect.Value
		keyed bool
	}{
		{reflect.ValueOf(&e).Elem(), false}, {reflect.ValueOf(&e.content).Elem(), true}, {reflect.ValueOf(&e.Subject).Elem(), true},
	} {
		for i := range part.v.NumField() {
			f := part.v.Type().Field(i)
			if f.Type.Kind() == reflect.Struct && f.Type != reflect.TypeFor[time.Time]() {
				continue
			}
			field := part.v.Field(i)
			vary(field, f.Name, part.keyed, &e)
		}
	}
	if base.digest("ten") == base.digest("tan") || detailsDigest(key, "ten", base.content, nil) == detailsDigest(key, "tan", base.content, nil) ||
		detailsDigest(key, "ten", base.content, nil) == detailsDigest(key, "ten", base.content, []byte("x")) {
		t.Error("a digest does not cover tenant or details")
	}
}

// The chain's form is a promise to whoever verifies an export.
func TestDigest_IsStable(t *testing.T) {
	t.Parallel()
	e := link{content: content{ID: "aud_1", Kind: "call.finished", Time: time.UnixMicro(1_790_000_000_000_000)},
		Ordinal: 4, Sequence: 1, DetailsDigest: "audit-1:hmac-sha256:00"}
	const want = "audit-1:sha256:fda6be6449b9a6596e6d5c44bf77d5c9d8b9058781f249477639d4fcc08c0b14"
	if got := e.digest("ten_1"); got != want {
		t.Errorf("got %s", got)
	}
}

func FuzzPageToken(f *testing.F) {
	f.Add("bzE", uint8(0))
	f.Add(ByChain.token(row{link: link{Sequence: 42}}), uint8(1))
	f.Fuzz(func(t *testing.T, s string, o uint8) {
		order := Order(o % 2)
		after, ok := order.parse(s)
		if !ok {
			return
		}
		if after < 0 {
			t.Fatalf("%q gives %d", s, after)
		}
		again, ok := order.parse(order.token(row{link: link{Sequence: after, Ordinal: after}}))
		if !ok || again != after {
			t.Fatalf("%q: %d does not survive", s, after)
		}
	})
}

func BenchmarkPrepare(b *testing.B) {
	w := newWorld(b)
	e := w.sample(1)
	e.Details = []byte(`{"argumentsDigest":"args-1:sha256:` + strings.Repeat("a", 64) + `","outcome":"SUCCEEDED","resultBytes":1234,"text":"` + strings.Repeat("x", 300) + `"}`)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := w.log.Prepare(b.Context(), w.t, e); err != nil {
			b.Fatal(err)
		}
	}
}

// The first entries of a tenant come in the transaction that makes it, when no
// other connection can read its key yet.
func TestRecord_InTheTransactionThatCreatesTheTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kek, err := seal.NewLocalKEK("k1", make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	ring, err := seal.NewRing(kek)
	if err != nil {
		t.Fatal(err)
	}
	svc, err := tenant.NewService(w.db, ring, w.log, "")
	if err != nil {
		t.Fatal(err)
	}
	tn, _, err := svc.CreateTenant(t.Context(), "new", "")
	if err != nil {
		t.Fatal(err)
	}
	w.sealNow(t, tn.ID)
	if rep := w.verify(t, tn.ID, nil); !rep.OK || rep.Entries == 0 || !rep.DetailsChecked {
		t.Errorf("got %+v", rep)
	}
}

// As many transactions as there are connections need a key that is not in
// memory: none may wait for a connection that the others hold.
func TestAppend_TakesNoSecondConnection(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const conns = 8 // of pgtest's pools
	ready := make(chan struct{})
	var in, g sync.WaitGroup
	in.Add(conns)
	for i := range conns {
		g.Go(func() {
			to := w.newTenant(t)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			err := w.db.InTx(ctx, to, func(ctx context.Context, tx tenant.Tx) error {
				in.Done()
				<-ready
				_, err := w.log.Append(ctx, tx, w.sample(i))
				return err
			})
			if err != nil {
				t.Errorf("append: %v", err)
			}
		})
	}
	in.Wait()
	close(ready)
	g.Wait()
}
