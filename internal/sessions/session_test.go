package sessions

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// shelf has the servers a, b and c, of which a and b have contracts.
type shelf struct{}

func (shelf) Find(_ context.Context, _ tenant.ID, names []string) (out []ServerRef, err error) {
	for _, n := range names {
		n = strings.TrimPrefix(n, "srv_")
		if !slices.Contains([]string{"a", "b", "c"}, n) {
			return nil, fault.Field1("servers", "no %q", n)
		}
		out = append(out, ServerRef{ID: "srv_" + n, Name: n})
	}
	return out, nil
}

func (shelf) Contracted(context.Context, tenant.ID, int) ([]ServerRef, error) {
	return []ServerRef{{"srv_a", "a"}, {"srv_b", "b"}}, nil
}

type sessionVoider struct {
	mu   sync.Mutex
	ids  []string
	fail error
}

func (v *sessionVoider) VoidSession(_ context.Context, _ tenant.Tx, id, _ string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.ids = append(v.ids, id)
	return v.fail
}

type storeWorld struct {
	t      *testing.T
	store  *Store
	db     *tenant.DB
	pool   *pgxpool.Pool
	voider *sessionVoider
	alice  tenant.Principal
	now    time.Time
}

func newStoreWorld(t *testing.T) *storeWorld {
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
	tn, _, err := tenants.CreateTenant(t.Context(), "Acme", "")
	if err != nil {
		t.Fatal(err)
	}
	w := &storeWorld{t: t, db: db, pool: pg.Owner(t), voider: &sessionVoider{}, now: time.Now()}
	if w.store, err = NewStore(db, shelf{}, w.voider, log); err != nil {
		t.Fatal(err)
	}
	w.store.now = func() time.Time { return w.now }
	w.alice = tenant.Principal{Tenant: tn.ID, KeyID: "key_a", Role: tenant.RoleService, Groups: []string{"staff"}, Project: "p",
		Subject: tenant.Subject{Source: "web", Value: "alice"}}
	return w
}

func (w *storeWorld) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.pool.Exec(w.t.Context(), sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

func (w *storeWorld) open(r OpenRequest) *Session {
	w.t.Helper()
	s, err := w.store.Create(w.t.Context(), w.alice, r)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func TestSessionCreate(t *testing.T) {
	t.Parallel()
	w := newStoreWorld(t)
	s := w.open(OpenRequest{})
	if !slices.Equal(s.ServerIDs, []string{"srv_a", "srv_b"}) || s.Subject != w.alice.Subject || !slices.Equal(s.Groups, w.alice.Groups) ||
		s.Project != "p" || s.KeyID != "key_a" || s.State != "OPEN" || s.Calls() != 0 || s.ExpireTime.Sub(s.CreateTime) != DefaultTTL {
		t.Fatalf("%+v", s)
	}
	limited := w.alice
	limited.Servers = []string{"b"}
	if s, err := w.store.Create(t.Context(), limited, OpenRequest{}); err != nil || !slices.Equal(s.ServerIDs, []string{"srv_b"}) {
		t.Fatalf("%+v %v", s, err)
	}
	nobody := w.alice
	nobody.Subject = tenant.Subject{}
	many := make([]string, maxServers+1)
	for name, c := range map[string]struct {
		p    tenant.Principal
		r    OpenRequest
		kind fault.Kind
		path string
	}{
		"nobody":           {nobody, OpenRequest{}, fault.Invalid, ""},
		"too short":        {w.alice, OpenRequest{TTL: minTTL - 1}, fault.Invalid, "ttl"},
		"too long":         {w.alice, OpenRequest{TTL: maxTTL + 1}, fault.Invalid, "ttl"},
		"negative":         {w.alice, OpenRequest{TTL: -1}, fault.Invalid, "ttl"},
		"unknown server":   {w.alice, OpenRequest{Servers: []string{"a", "z"}}, fault.Invalid, "servers"},
		"a server twice":   {w.alice, OpenRequest{Servers: []string{"a", "srv_a"}}, fault.Invalid, "servers[1]"},
		"too many servers": {w.alice, OpenRequest{Servers: many}, fault.Invalid, "servers"},
		"not its server":   {limited, OpenRequest{Servers: []string{"a"}}, fault.Denied, ""},
	} {
		_, err := w.store.Create(t.Context(), c.p, c.r)
		f, _ := fault.As(err)
		if f == nil || f.Kind != c.kind || c.path != "" && (len(f.Fields) != 1 || f.Fields[0].Path != c.path) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if ss, err := w.store.List(t.Context(), w.alice, "", 10); err != nil || len(ss) != 2 {
		t.Errorf("%d sessions, %v", len(ss), err)
	}
	first := w.open(OpenRequest{RequestID: "k", TTL: time.Hour})
	if again := w.open(OpenRequest{RequestID: "k", TTL: time.Hour}); again.ID != first.ID {
		t.Error("a repeat opened another session")
	}
	if _, err := w.store.Create(t.Context(), w.alice, OpenRequest{RequestID: "k"}); !fault.Is(err, fault.Exists) {
		t.Errorf("another body: %v", err)
	}
}

func TestSessionClose(t *testing.T) {
	t.Parallel()
	w := newStoreWorld(t)
	var closed []string
	w.store.OnClose = func(_ tenant.ID, id string) { closed = append(closed, id) }
	s := w.open(OpenRequest{})
	if _, err := w.store.Get(t.Context(), w.alice, s.ID); err != nil {
		t.Fatal(err)
	}
	w.voider.fail = fault.New(fault.Unavailable, "X", "x")
	if _, err := w.store.Close(t.Context(), w.alice, s.ID); !fault.Is(err, fault.Unavailable) || len(closed) != 0 {
		t.Fatal(err)
	}
	if got, err := w.store.Get(t.Context(), w.alice, s.ID); err != nil || !got.Open(time.Now()) {
		t.Fatalf("half closed: %+v %v", got, err)
	}
	w.voider.fail = nil
	for range 2 {
		got, err := w.store.Close(t.Context(), w.alice, s.ID)
		if err != nil || got.State != "CLOSED" || got.CloseTime == nil {
			t.Fatalf("%+v %v", got, err)
		}
	}
	if len(w.voider.ids) != 2 || !slices.Equal(closed, []string{s.ID}) {
		t.Fatalf("voided %v, told %v", w.voider.ids, closed)
	}
	if got, err := w.store.Get(t.Context(), w.alice, s.ID); err != nil || got.Open(time.Now()) {
		t.Fatalf("this replica knows at once: %+v %v", got, err)
	}
	var n int
	if err := w.pool.QueryRow(t.Context(), `SELECT count(*) FROM audit_entries WHERE kind = 'session.closed'`).Scan(&n); err != nil || n != 1 {
		t.Fatalf("%d entries, %v", n, err)
	}
}

// A replica may be five seconds behind, and no longer.
func TestSessionGet_HoldsFiveSeconds(t *testing.T) {
	t.Parallel()
	w := newStoreWorld(t)
	s := w.open(OpenRequest{})
	open := func() bool {
		got, err := w.store.Get(t.Context(), w.alice, s.ID)
		if err != nil {
			t.Fatal(err)
		}
		return got.Open(w.now)
	}
	if !open() {
		t.Fatal("closed")
	}
	w.exec(`UPDATE sessions SET state = 'CLOSED'`)
	w.now = w.now.Add(sessionTTL)
	if !open() {
		t.Fatal("asked too early")
	}
	w.now = w.now.Add(time.Millisecond)
	if open() {
		t.Fatal("held for longer than five seconds")
	}
	w.exec(`UPDATE sessions SET state = 'OPEN'`)
	w.store.Forget(w.alice.Tenant, s.ID)
	if !open() {
		t.Fatal("a signal was not heard")
	}
	w.now = w.now.Add(DefaultTTL)
	if open() {
		t.Fatal("open past its time")
	}
}

// What was admitted and is not committed yet is not forgotten when the session is
// read again, and those who still hold the old one count on.
func TestSessionCount_AcrossReads(t *testing.T) {
	t.Parallel()
	w := newStoreWorld(t)
	s := w.open(OpenRequest{})
	get := func() *Session {
		got, err := w.store.Get(t.Context(), w.alice, s.ID)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	old := get()
	var wg sync.WaitGroup
	var mu sync.Mutex
	admitted := 0
	for range 20 {
		wg.Go(func() {
			for range 5 {
				if old.Admit(50) {
					mu.Lock()
					admitted++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	if admitted != 50 || old.Calls() != 50 || old.Admit(50) {
		t.Fatalf("%d admitted of 50", admitted)
	}
	w.now = w.now.Add(sessionTTL + 1)
	if again := get(); again.Calls() != 50 || again == old {
		t.Fatalf("%d", again.Calls())
	}
	old.Admitted()
	if n := get().Calls(); n != 51 {
		t.Fatalf("%d: a call of the old one was lost", n)
	}
	err := w.db.InTx(t.Context(), w.alice.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		n, err := CountCalls(ctx, tx, s.ID, 70)
		if n != 70 {
			t.Errorf("%d", n)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	w.now = w.now.Add(sessionTTL + 1)
	if n := get().Calls(); n != 70 || old.Calls() != 70 {
		t.Fatalf("%d: the database knows of more", n)
	}
	for _, id := range []string{"", "x", "ses_\x00", resource.NewID(resource.Session)} {
		if _, err := w.store.Get(t.Context(), w.alice, id); !fault.Is(err, fault.NotFound) {
			t.Errorf("%q: %v", id, err)
		}
		if _, err := w.store.Close(t.Context(), w.alice, id); !fault.Is(err, fault.NotFound) {
			t.Errorf("close %q: %v", id, err)
		}
	}
}

// A session exists for a limited credential when the credential is for each of
// its servers, deleted ones too; pages of List stay full.
func TestSession_LimitedToServers(t *testing.T) {
	t.Parallel()
	w := newStoreWorld(t)
	for _, name := range []string{"a", "b"} {
		w.exec(`INSERT INTO servers (tenant_id, server_id, name, display_name, transport, url, origin, isolation, state)
			VALUES ($1, 'srv_' || $2, $2, $2, 'HTTP', 'https://x/', 'https://x', 'PER_USER', CASE $2::text WHEN 'a' THEN 'ACTIVE' ELSE 'DELETED' END)`,
			w.alice.Tenant.String(), name)
	}
	both := w.open(OpenRequest{Servers: []string{"a", "b"}, RequestID: "both"})
	unknown := w.open(OpenRequest{Servers: []string{"c"}})
	var as []string
	for range 3 {
		w.open(OpenRequest{Servers: []string{"a", "b"}})
		as = append(as, w.open(OpenRequest{Servers: []string{"a"}}).ID)
	}
	limited := func(servers ...string) tenant.Principal {
		p := w.alice
		p.Servers = servers
		return p
	}
	for name, c := range map[string]struct {
		p    tenant.Principal
		id   string
		sees bool
	}{
		"no limit":            {w.alice, both.ID, true},
		"all of its servers":  {limited("x", "b", "a"), both.ID, true},
		"one of them":         {limited("a"), both.ID, false},
		"none of them":        {limited("x"), both.ID, false},
		"its only one":        {limited("a"), as[0], true},
		"a server of no name": {limited("c"), unknown.ID, false},
	} {
		for range 2 { // from the database, from memory
			if _, err := w.store.Get(t.Context(), c.p, c.id); c.sees != (err == nil) || err != nil && !fault.Is(err, fault.NotFound) {
				t.Errorf("%s: get: %v", name, err)
			}
		}
		if c.sees {
			continue
		}
		if s, err := w.store.Close(t.Context(), c.p, c.id); s != nil || !fault.Is(err, fault.NotFound) {
			t.Errorf("%s: close: %+v %v", name, s, err)
		}
		if s, err := w.store.Get(t.Context(), w.alice, c.id); err != nil || s.State != "OPEN" || len(w.voider.ids) != 0 {
			t.Errorf("%s: closed all the same: %+v %v", name, s, err)
		}
	}
	var listed []string
	for after := ""; ; {
		ss, err := w.store.List(t.Context(), limited("a"), after, 2)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range ss {
			listed, after = append(listed, s.ID), s.ID
		}
		if len(ss) < 2 {
			break
		}
	}
	if !slices.Equal(listed, as) {
		t.Errorf("lists %q, want %q", listed, as)
	}
	// A repeat of a request does not show what the repeating credential may not see.
	all := w.open(OpenRequest{RequestID: "all"})
	if s, err := w.store.Create(t.Context(), limited("a"), OpenRequest{RequestID: "all"}); s != nil || !fault.Is(err, fault.Exists) {
		t.Errorf("repeats the request for %s: %+v %v", all.ID, s, err)
	}
	if s, err := w.store.Close(t.Context(), limited("a"), as[0]); err != nil || s.State != "CLOSED" {
		t.Errorf("%+v %v", s, err)
	}
}
