package webhooks

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestMain(m *testing.M) {
	if orders := os.Getenv(childVariable); orders != "" {
		runChild(orders)
		return
	}
	goleak.VerifyTestMain(pgtest.Wrap(m))
}

// quick is a policy of retries for tests that wait for them.
var quick = Retry{First: 5 * time.Millisecond, Most: 50 * time.Millisecond, GiveUp: time.Minute}

// recorder keeps what is recorded.
type recorder struct {
	mu     sync.Mutex
	events []tenant.Event
}

// Record implements tenant.Recorder.
func (r *recorder) Record(_ context.Context, _ tenant.Tx, e tenant.Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
	return nil
}

func (r *recorder) kinds() (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		out = append(out, e.Kind)
	}
	return out
}

// world is a database with the service of one or more replicas on it.
type world struct {
	t       testing.TB
	pg      *pgtest.DB
	owner   *pgxpool.Pool
	db      *tenant.DB
	vault   *tenant.Vault
	audit   *recorder
	tenants *tenant.Service
	svc     *Service
	admin   tenant.Principal

	mu       sync.Mutex
	outcomes map[string]int
}

func newWorld(t testing.TB, change ...func(*Options)) *world {
	t.Helper()
	w := &world{t: t, pg: pgtest.New(t), outcomes: map[string]int{}}
	w.owner = w.pg.Owner(t)
	var err error
	if w.db, err = tenant.NewDB(w.pg.Pool(t, tenant.AppRole), w.pg.Pool(t, tenant.SystemRole)); err != nil {
		t.Fatal(err)
	}
	ring := newRing(t)
	w.vault = tenant.NewVault(w.db, ring)
	w.audit = &recorder{}
	if w.tenants, err = tenant.NewService(w.db, ring, w.audit, ""); err != nil {
		t.Fatal(err)
	}
	w.svc = w.service(change...)
	w.admin = w.newAdmin("Acme")
	return w
}

func newRing(t testing.TB) *seal.Ring {
	kek, err := seal.NewLocalKEK("k1", make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	ring, err := seal.NewRing(kek)
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

// outcome is how often a delivery is known to have come out so: it is told after it
// was written down.
func (w *world) outcome(word string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.outcomes[word]
}

// service makes a replica's service; Start is the test's.
func (w *world) service(change ...func(*Options)) *Service {
	w.t.Helper()
	pool, err := postgres.Open(w.t.Context(), w.pg.URL, tenant.SystemRole, postgres.Options{MaxConns: 6})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(pool.Close)
	o := Options{DB: w.db, Vault: w.vault, Recorder: w.audit, Egress: egress.New(egress.Policy{Development: true, IdleTimeout: time.Second}),
		Queue: riverpgxv5.New(pool), Retry: quick, Poll: 10 * time.Millisecond, Observe: func(_ tenant.ID, outcome string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.outcomes[outcome]++
		}}
	if testing.Verbose() {
		o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	for _, f := range change {
		f(&o)
	}
	s, err := New(o)
	if err != nil {
		w.t.Fatal(err)
	}
	if e, ok := o.Egress.(*egress.Client); ok {
		w.t.Cleanup(e.CloseIdle)
	}
	return s
}

// start delivers until the test ends.
func (w *world) start(s *Service) {
	w.t.Helper()
	if err := s.Start(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			w.t.Errorf("stop: %v", err)
		}
	})
}

func (w *world) newAdmin(name string) tenant.Principal {
	w.t.Helper()
	_, key, err := w.tenants.CreateTenant(w.t.Context(), name, "")
	if err != nil {
		w.t.Fatal(err)
	}
	p, err := w.tenants.Authenticate(w.t.Context(), key.Secret, tenant.OnBehalf{}, netip.MustParseAddr("127.0.0.1"))
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

func (w *world) endpoint(p tenant.Principal, url string, types ...string) NewEndpoint {
	w.t.Helper()
	e, err := w.svc.CreateEndpoint(w.t.Context(), p, EndpointSpec{URL: url, EventTypes: types}, "")
	if err != nil {
		w.t.Fatal(err)
	}
	return e
}

// announce tells events in a transaction of their own.
func (w *world) announce(p tenant.Principal, events ...Event) {
	w.t.Helper()
	err := w.db.InTx(w.t.Context(), p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		return w.svc.Announce(ctx, tx, events...)
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// sealed is a secret as the row of an endpoint has it.
func (w *world) sealed(endpoint string) []byte {
	w.t.Helper()
	raw, _ := mintSecret()
	out, err := w.svc.sealSecret(w.t.Context(), w.admin.Tenant, endpoint, raw)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

func (w *world) deliveries(p tenant.Principal, endpoint string) []Delivery {
	w.t.Helper()
	ds, err := w.svc.ListDeliveries(w.t.Context(), p, endpoint, DeliveryFilter{Limit: 2000})
	if err != nil {
		w.t.Fatal(err)
	}
	return ds
}

func (w *world) count(sql string, args ...any) (n int) {
	w.t.Helper()
	if err := w.owner.QueryRow(context.Background(), sql, args...).Scan(&n); err != nil {
		w.t.Fatal(err)
	}
	return n
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.owner.Exec(context.Background(), sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

// until waits for something that others bring about.
func (w *world) until(what string, done func() bool) {
	w.t.Helper()
	deadline := time.Now().Add(90*time.Second + time.Duration(*total)*20*time.Millisecond)
	for !done() {
		if time.Now().After(deadline) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.t.Fatalf("it never came to pass: %s; outcomes %v", what, w.outcomes)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// message is what an endpoint got.
type message struct {
	header http.Header
	body   []byte
}

// receiver is an endpoint that answers as it is told.
type receiver struct {
	*httptest.Server
	mu  sync.Mutex
	got []message
}

// newReceiver starts an endpoint. answer is given the number of the request,
// beginning with 1; nil answers 204.
func newReceiver(t testing.TB, answer func(n int, w http.ResponseWriter, r *http.Request)) *receiver {
	t.Helper()
	v := &receiver{}
	v.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		v.mu.Lock()
		v.got = append(v.got, message{r.Header.Clone(), body})
		n := len(v.got)
		v.mu.Unlock()
		if answer == nil {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		answer(n, w, r)
	}))
	t.Cleanup(v.Close)
	return v
}

func (v *receiver) messages() []message {
	v.mu.Lock()
	defer v.mu.Unlock()
	return append([]message(nil), v.got...)
}

func someCall(name string) Event {
	return Event{Type: CallFinished, Data: CallData{CallID: "call_00000000000000000000000001", SessionID: "ses_00000000000000000000000001",
		ServerID: "srv_00000000000000000000000001", Server: "calendar", Kind: "TOOL", Name: name, State: "SUCCEEDED",
		ArgumentsDigest: "args-1:sha256:aa", DefinitionDigest: "doc-1:sha256:bb", Receipt: "aud_00000000000000000000000001"}}
}
