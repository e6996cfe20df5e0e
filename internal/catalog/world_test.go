package catalog

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/redis/redistest"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Wrap(m)) }

type nullRecorder struct{}

func (nullRecorder) Record(context.Context, tenant.Tx, tenant.Event) error { return nil }

// script is a Lister that does what the test says and counts.
type script struct {
	mu     sync.Mutex
	answer func(ctx context.Context, v Server, c Context, kind Kind) (Listing, error)
	calls  int
	asked  []Context
}

func (s *script) ListDefinitions(ctx context.Context, v Server, c Context, kind Kind) (Listing, error) {
	s.mu.Lock()
	s.calls++
	s.asked = append(s.asked, c)
	answer := s.answer
	s.mu.Unlock()
	return answer(ctx, v, c, kind)
}

func (s *script) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

// says makes the script answer with these from now on.
func (s *script) says(l Listing, err error) {
	s.does(func(context.Context, Server, Context, Kind) (Listing, error) { return l, err })
}

func (s *script) does(fn func(context.Context, Server, Context, Kind) (Listing, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = fn
}

func listing(items ...json.RawMessage) Listing {
	return Listing{Items: items, Era: "MODERN", ProtocolVersion: "2026-07-28", Capabilities: json.RawMessage(`{"tools":{}}`)}
}

// voids records what is voided; it writes nothing.
type voids struct {
	mu   sync.Mutex
	seen []string
	err  error
}

func (v *voids) VoidServer(_ context.Context, tx tenant.Tx, serverID, keep, reason string) error {
	return v.add(fmt.Sprintf("server %s %s %q", tx.Tenant(), serverID, keep))
}

func (v *voids) VoidDefinition(_ context.Context, _ tenant.Tx, _ string, subject *tenant.Subject, kind, name, digest, reason string) error {
	who := "all"
	if subject != nil {
		who = subject.Value
	}
	return v.add(fmt.Sprintf("%s %s %s of %s", kind, name, digest, who))
}

func (v *voids) add(s string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.seen = append(v.seen, s)
	return v.err
}

func (v *voids) fails(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.err = err
}

// take returns what was voided since the last take, sorted.
func (v *voids) take() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := v.seen
	v.seen = nil
	slices.Sort(out)
	return out
}

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

// told keeps what is announced.
type told struct {
	mu     sync.Mutex
	events []webhooks.Event
}

// Announce implements Announcer.
func (a *told) Announce(_ context.Context, _ tenant.Tx, events ...webhooks.Event) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.events = append(a.events, events...)
	return nil
}

func (a *told) take() []webhooks.Event {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := a.events
	a.events = nil
	return out
}

type world struct {
	t      *testing.T
	db     *tenant.DB
	owner  *pgxpool.Pool
	svc    *tenant.Service
	log    *audit.Log
	clock  *clock
	lister *script
	voids  *voids
	told   *told
	redis  *redistest.Server
	one    *Service // a replica
	two    *Service // another
}

func newWorld(t *testing.T) *world {
	t.Helper()
	pg := pgtest.New(t)
	w := &world{t: t, clock: &clock{now: time.Now()}, lister: &script{}, voids: &voids{}, owner: pg.Owner(t)}
	var err error
	if w.db, err = tenant.NewDB(pg.Pool(t, tenant.AppRole), pg.Pool(t, tenant.SystemRole)); err != nil {
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
	if w.svc, err = tenant.NewService(w.db, ring, nullRecorder{}, ""); err != nil {
		t.Fatal(err)
	}
	signer := seal.NewSigner(seal.DeriveSeed(make([]byte, 32), "audit"))
	if w.log, err = audit.New(w.db, tenant.NewVault(w.db, ring), signer, audit.Options{}); err != nil {
		t.Fatal(err)
	}
	w.redis = redistest.New(t)
	w.lister.says(listing(tool("a", okSchema)), nil)
	w.told = &told{}
	w.one, w.two = w.replica(), w.replica()
	return w
}

// replica returns a Service on the common database and Redis.
func (w *world) replica() *Service {
	w.t.Helper()
	client := w.redis.Client(w.t)
	s, err := New(Options{DB: w.db, Lister: w.lister, Voider: w.voids, Recorder: w.log, Announcer: w.told,
		CheckURL: egress.New(egress.Policy{Development: true}).CheckURL, Runtimes: []string{"filesystem"},
		Cache: redis.NewCache(client), Signal: redis.NewSignal(client), Now: w.clock.Now,
		Wait: 20 * time.Second, ListTimeout: 20 * time.Second})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(s.Close)
	return s
}

// hears connects a replica to the signals until the test ends, and returns when
// it hears.
func (w *world) hears(s *Service) {
	w.t.Helper()
	sub, err := redis.NewSignal(w.redis.Client(w.t)).Subscribe(Changed)
	if err != nil {
		w.t.Fatal(err)
	}
	s.Heard(<-sub.Events())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range sub.Events() {
			s.Heard(e)
		}
	}()
	w.t.Cleanup(func() { sub.Close(); <-done })
}

func (w *world) admin(name string) tenant.Principal {
	w.t.Helper()
	_, key, err := w.svc.CreateTenant(w.t.Context(), name, "")
	if err != nil {
		w.t.Fatal(err)
	}
	p, err := w.svc.Authenticate(w.t.Context(), key.Secret, tenant.OnBehalf{}, netip.MustParseAddr("127.0.0.1"))
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

func (w *world) server(p tenant.Principal, name string) Server {
	w.t.Helper()
	v, err := w.one.CreateServer(w.t.Context(), p, ServerSpec{Name: name, URL: "https://" + name + ".example/mcp"}, "")
	if err != nil {
		w.t.Fatal(err)
	}
	return v
}

func user(p tenant.Principal, name string) Context {
	return Context{Tenant: p.Tenant, Subject: tenant.Subject{Source: "app", Value: name}, Session: "ses_" + name}
}

// later lets d pass, for the replicas and for the rows.
func (w *world) later(d time.Duration) {
	w.t.Helper()
	w.clock.mu.Lock()
	w.clock.now = w.clock.now.Add(d)
	w.clock.mu.Unlock()
	w.exec(`UPDATE catalog_current SET observe_time = observe_time - $1::interval, retry_time = retry_time - $1::interval,
		lease_time = lease_time - $1::interval`, d)
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.owner.Exec(w.t.Context(), sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) rows(sql string, args ...any) []string {
	w.t.Helper()
	rows, err := w.owner.Query(w.t.Context(), sql, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// current is Current that must succeed.
func (w *world) current(s *Service, v Server, c Context, maxAge time.Duration) *Revision {
	w.t.Helper()
	r, err := s.Current(w.t.Context(), v, c, Tool, maxAge)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func names(r *Revision) []string {
	var out []string
	for i := range r.Definitions {
		out = append(out, r.Definitions[i].Name)
	}
	return out
}

func checkURL(_, raw string) (*url.URL, error) { return url.Parse(raw) }

func subject(name string) tenant.Subject { return tenant.Subject{Source: "app", Value: name} }

// benchTenant returns an id as a stored row would give it.
func benchTenant() (id tenant.ID, err error) {
	err = id.Scan("ten_00000000000000000000000000")
	return id, err
}
