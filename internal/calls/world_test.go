package calls

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
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
	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Wrap(m)) }

// world is one database with its audit, a server that is a script, and as many
// replicas as a test makes.
type world struct {
	t       testing.TB
	pg      *pgtest.DB
	db      *tenant.DB
	owner   *pgxpool.Pool
	tenants *tenant.Service
	audit   *audit.Log
	vault   *tenant.Vault
	sender  *sender
	lister  *lister
	logs    *logs
}

// logs keeps what the replicas log, to find what must never be there.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func newWorld(t testing.TB) *world {
	t.Helper()
	pg := pgtest.New(t)
	w := &world{t: t, pg: pg, owner: pg.Owner(t), lister: newLister(), logs: &logs{}}
	w.sender = &sender{w: w}
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
	t.Cleanup(w.checkEvents)
	w.vault = tenant.NewVault(w.db, ring)
	w.audit, err = audit.New(w.db, w.vault, seal.NewSigner(seal.DeriveSeed(make([]byte, 32), "audit")), audit.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if w.tenants, err = tenant.NewService(w.db, ring, w.audit, ""); err != nil {
		t.Fatal(err)
	}
	return w
}

// checkEvents holds the events against what is stored, after every test: each
// session's are numbered without a hole, and the last of each call, consent and
// question tells its state.
func (w *world) checkEvents() {
	rows, err := w.owner.Query(context.Background(), `
		SELECT 'hole in ' || h.session_id FROM session_event_heads h JOIN session_events e USING (tenant_id, session_id)
		 GROUP BY h.session_id, h.last HAVING count(e.n) <> h.last OR max(e.n) <> h.last OR count(*) <> h.last
		UNION ALL SELECT 'not told: ' || c.call_id || ' ' || c.state FROM calls c LEFT JOIN LATERAL (SELECT e.state, e.revision, e.session_id FROM session_events e
		   WHERE e.kind = 'call.changed' AND e.call_id = c.call_id ORDER BY n DESC LIMIT 1) e ON true
		 WHERE (c.state, c.revision, c.session_id) IS DISTINCT FROM (e.state, e.revision, e.session_id)
		UNION ALL SELECT 'not told: ' || consent_id || ' ' || state FROM consents c WHERE NOT EXISTS (SELECT FROM session_events e
		   WHERE e.consent_id = c.consent_id AND e.kind = CASE c.state WHEN 'PENDING' THEN 'consent.requested' ELSE 'consent.decided' END)
		UNION ALL SELECT 'not told: ' || interaction_id || ' ' || state FROM interactions c WHERE state IN ('PENDING', 'EXPIRED', 'WITHDRAWN')
		   AND NOT EXISTS (SELECT FROM session_events e WHERE e.interaction_id = c.interaction_id AND e.state = c.state)`)
	if err != nil {
		w.t.Error(err)
		return
	}
	wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(wrong) > 0 {
		w.t.Errorf("events: %q, %v", wrong, err)
	}
}

// node is one replica: everything that a process has of its own.
type node struct {
	*Service
	consents  *consent.Service
	contracts *authz.Service
	catalog   *catalog.Service
	store     *sessions.Store
	signals   *signals
}

// signals joins replicas as Redis would; a nil peer list loses everything.
type signals struct {
	mu    sync.Mutex
	peers []*Service
}

func (s *signals) PublishCall(t tenant.ID, id string) {
	s.mu.Lock()
	peers := slices.Clone(s.peers)
	s.mu.Unlock()
	for _, p := range peers {
		p.Signalled(t, id)
	}
}

func (s *signals) join(peers ...*Service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers = peers
}

// quick are settings under which a test need not wait.
func quick() Config {
	return Config{Heartbeat: 50 * time.Millisecond, Death: time.Hour, Isolation: 30 * time.Minute, Poll: 20 * time.Millisecond,
		SendWindow: 30 * time.Second}
}

// node makes a replica. It has no loops: a test that wants a sweep calls it.
func (w *world) node(cfg Config, change ...func(*Deps)) *node {
	w.t.Helper()
	n := &node{signals: &signals{}}
	var err error
	fail := func(err error) {
		if err != nil {
			w.t.Helper()
			w.t.Fatal(err)
		}
	}
	n.consents, err = consent.NewService(w.db, w.audit)
	fail(err)
	n.contracts, err = authz.NewService(w.db, n.consents, w.audit)
	fail(err)
	n.catalog, err = catalog.New(catalog.Options{DB: w.db, Lister: w.lister, Voider: n.consents, Recorder: w.audit,
		CheckURL: func(_, raw string) (*url.URL, error) { return url.Parse(raw) }, Wait: 2 * time.Second})
	fail(err)
	n.store, err = sessions.NewStore(w.db, finder{n.catalog}, n.consents, w.audit)
	fail(err)
	d := Deps{DB: w.db, Sessions: n.store, Catalog: n.catalog, Contracts: n.contracts, Consent: n.consents, Sender: w.sender,
		Audit: w.audit, Vault: w.vault, Signals: n.signals, Log: slog.New(slog.NewTextHandler(w.logs, nil))}
	for _, c := range change {
		c(&d)
	}
	n.Service, err = NewService(w.t.Context(), d, cfg)
	fail(err)
	w.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		if err := n.Stop(ctx); err != nil {
			w.t.Errorf("stop: %v", err)
		}
		n.catalog.Close()
	})
	return n
}

// finder finds registrations for sessions.
type finder struct{ c *catalog.Service }

func (f finder) Find(ctx context.Context, t tenant.ID, names []string) (out []sessions.ServerRef, err error) {
	for _, name := range names {
		v, err := f.c.GetServer(ctx, tenant.Principal{Tenant: t}, name)
		if err != nil {
			return nil, err
		}
		out = append(out, sessions.ServerRef{ID: v.ID, Name: v.Name})
	}
	return out, nil
}

func (f finder) Contracted(context.Context, tenant.ID, int) ([]sessions.ServerRef, error) {
	return nil, nil
}

// scene is a tenant with one server under contract and an open session.
type scene struct {
	*node
	w                      *world
	t                      testing.TB
	admin, alice, approver tenant.Principal
	server                 catalog.Server
	contract               authz.Record
	session                *sessions.Session
}

func (w *world) key(admin tenant.Principal, spec tenant.KeySpec, who tenant.OnBehalf) tenant.Principal {
	w.t.Helper()
	spec.DisplayName = "test"
	k, err := w.tenants.CreateKey(w.t.Context(), admin, spec, "")
	if err != nil {
		w.t.Fatal(err)
	}
	return w.login(k.Secret, who)
}

func (w *world) login(secret string, who tenant.OnBehalf) tenant.Principal {
	w.t.Helper()
	p, err := w.tenants.Authenticate(w.t.Context(), secret, who, netip.MustParseAddr("127.0.0.1"))
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

func (w *world) scene(n *node, changes ...string) *scene {
	w.t.Helper()
	sc := &scene{node: n, w: w, t: w.t}
	ctx := w.t.Context()
	_, key, err := w.tenants.CreateTenant(ctx, "Acme", "")
	if err != nil {
		w.t.Fatal(err)
	}
	sc.admin = w.login(key.Secret, tenant.OnBehalf{})
	sc.alice = w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "alice"})
	sc.approver = w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleApprover}, tenant.OnBehalf{})
	sc.server, err = n.catalog.CreateServer(ctx, sc.admin, catalog.ServerSpec{Name: "calendar", URL: "https://calendar.example/mcp"}, "")
	if err != nil {
		w.t.Fatal(err)
	}
	sc.contract = sc.activate(contractSource(w.t, changes...))
	sc.session = sc.open(sc.alice)
	return sc
}

func (sc *scene) activate(source []byte) authz.Record {
	sc.t.Helper()
	r, err := sc.contracts.Create(sc.t.Context(), sc.admin, "calendar", source, "")
	if err != nil {
		sc.t.Fatal(err)
	}
	if r, err = sc.contracts.Activate(sc.t.Context(), sc.admin, "calendar", r.Revision); err != nil {
		sc.t.Fatal(err)
	}
	return r
}

func (sc *scene) open(p tenant.Principal) *sessions.Session {
	sc.t.Helper()
	s, err := sc.store.Create(sc.t.Context(), p, sessions.OpenRequest{Servers: []string{"calendar"}})
	if err != nil {
		sc.t.Fatal(err)
	}
	return s
}

// on returns the scene as another replica sees it.
func (sc *scene) on(n *node) *scene {
	other := *sc
	other.node = n
	return &other
}

func (sc *scene) proposal(tool string) Proposal {
	return Proposal{SessionID: sc.session.ID, Server: "calendar", Tool: tool, Arguments: []byte(`{"title":"x"}`), Wait: 10 * time.Second}
}

func (sc *scene) propose(tool string, change ...func(*Proposal)) *Call {
	sc.t.Helper()
	r := sc.proposal(tool)
	for _, c := range change {
		c(&r)
	}
	c, err := sc.Propose(sc.t.Context(), sc.alice, r)
	if err != nil {
		sc.t.Fatalf("propose %s: %v", tool, detail(err))
	}
	return c
}

func (sc *scene) decide(c *Call, approve bool) consent.Consent {
	sc.t.Helper()
	out, err := sc.consents.Decide(sc.t.Context(), sc.approver, c.ConsentID, consent.Decision{Approve: approve, Reason: "because"})
	if err != nil {
		sc.t.Fatalf("decide: %v", detail(err))
	}
	return out
}

// get reads the call as Postgres has it.
func (sc *scene) get(id string) *Call {
	sc.t.Helper()
	c, err := sc.Get(sc.t.Context(), sc.alice, id, 0, 0)
	if err != nil {
		sc.t.Fatalf("get: %v", detail(err))
	}
	return c
}

// until reads the call until it is in one of the states.
func (sc *scene) until(id string, states ...State) *Call {
	sc.t.Helper()
	var c *Call
	sc.w.eventually(func() bool {
		c = sc.get(id)
		return slices.Contains(states, c.State)
	}, func() string {
		return fmt.Sprintf("call is %s (%v, %+v), wanted %v", c.State, c.Reason, c.Error, states)
	})
	return c
}

// eventually looks again and again; only a fault of the program lets it fail.
func (w *world) eventually(ok func() bool, what func() string) {
	w.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			w.t.Fatalf("it never came: %s\n%s", what(), w.logs)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// sweep runs one round of recovery and waits for all that it began.
func (n *node) sweep(t testing.TB) {
	t.Helper()
	if err := n.Sweep(t.Context()); err != nil {
		t.Fatalf("sweep: %v", detail(err))
	}
	for {
		n.mu.Lock()
		busy := len(n.tended)
		n.mu.Unlock()
		if busy == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func (sc *scene) change(tool, description string) {
	sc.t.Helper()
	sc.w.lister.set(tool, description)
	ctx := sc.t.Context()
	if err := sc.catalog.Invalidate(ctx, catalog.Change{Tenant: sc.alice.Tenant, ServerID: sc.server.ID, Reason: "changed"}); err != nil {
		sc.t.Fatal(err)
	}
	srv, err := sc.catalog.GetServer(ctx, sc.alice, "calendar")
	if err != nil {
		sc.t.Fatal(err)
	}
	if _, err := sc.catalog.Current(ctx, srv, contextOf(sc.alice.Tenant, sc.alice.Subject, sc.session.ID), catalog.Tool, time.Hour); err != nil {
		sc.t.Fatal(err)
	}
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.owner.Exec(w.t.Context(), sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) count(sql string, args ...any) (n int) {
	w.t.Helper()
	if err := w.owner.QueryRow(w.t.Context(), sql, args...).Scan(&n); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// kinds returns the kinds of a call's audit entries in order.
func (w *world) kinds(callID string) (out []string) {
	w.t.Helper()
	rows, err := w.owner.Query(w.t.Context(), `SELECT kind FROM audit_entries WHERE call_id = $1 ORDER BY ordinal`, callID)
	if err != nil {
		w.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var k string
		if err := rows.Scan(&k); err != nil {
			w.t.Fatal(err)
		}
		out = append(out, k)
	}
	return out
}

func (w *world) verify(t tenant.ID) {
	w.t.Helper()
	if err := w.audit.SealNow(context.Background(), t); err != nil {
		w.t.Fatal(err)
	}
	r, err := w.audit.Verify(context.Background(), t, nil)
	if err != nil || !r.OK || r.Unsealed > 0 {
		w.t.Fatalf("audit: %+v, %v", r, err)
	}
}
