package events_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/events"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Wrap(m)) }

type nullRecorder struct{}

func (nullRecorder) Record(context.Context, tenant.Tx, tenant.Event) error { return nil }

// world is one database, with as many services on it as a test makes.
type world struct {
	t       *testing.T
	db      *tenant.DB
	owner   *pgxpool.Pool
	tenants *tenant.Service
}

func newWorld(t *testing.T) *world {
	t.Helper()
	pg := pgtest.New(t)
	w := &world{t: t, owner: pg.Owner(t)}
	var err error
	w.db, err = tenant.NewDB(pg.Pool(t, tenant.AppRole), pg.Pool(t, tenant.SystemRole))
	must(t, err)
	kek, err := seal.NewLocalKEK("k1", make([]byte, 32))
	must(t, err)
	ring, err := seal.NewRing(kek)
	must(t, err)
	w.tenants, err = tenant.NewService(w.db, ring, nullRecorder{}, "")
	must(t, err)
	return w
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// quick are settings under which no test has to wait.
func quick() events.Config {
	return events.Config{Heartbeat: time.Hour, Poll: 10 * time.Millisecond, Recheck: 5 * time.Millisecond}
}

func (w *world) service(pub events.Publisher, cfg events.Config) *events.Service {
	w.t.Helper()
	s, err := events.New(w.db, pub, slog.New(slog.DiscardHandler), cfg)
	must(w.t, err)
	w.t.Cleanup(func() { must(w.t, s.Close(context.Background())) })
	return s
}

// place is a session of a tenant's, with a call to change.
type place struct {
	w       *world
	who     tenant.Principal
	session string
	call    string
}

func (w *world) tenant() tenant.Principal {
	w.t.Helper()
	_, key, err := w.tenants.CreateTenant(w.t.Context(), "Acme", "")
	must(w.t, err)
	admin, err := w.tenants.Authenticate(w.t.Context(), key.Secret, tenant.OnBehalf{}, netip.MustParseAddr("127.0.0.1"))
	must(w.t, err)
	k, err := w.tenants.CreateKey(w.t.Context(), admin, tenant.KeySpec{DisplayName: "web", Role: tenant.RoleService}, "")
	must(w.t, err)
	p, err := w.tenants.Authenticate(w.t.Context(), k.Secret, tenant.OnBehalf{User: "alice"}, netip.MustParseAddr("127.0.0.1"))
	must(w.t, err)
	return p
}

// place opens a session whose first event is its call.
func (w *world) place(p tenant.Principal) *place {
	w.t.Helper()
	pl := &place{w: w, who: p, session: resource.NewID(resource.Session)}
	must(w.t, w.db.InTx(w.t.Context(), p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO sessions (tenant_id, session_id, key_id, subject_source, subject, server_ids, expire_time)
			VALUES ($1, $2, $3, 'default', 'alice', '{}', now() + interval '1 hour')`, tx.Tenant(), pl.session, p.KeyID)
		return err
	}))
	pl.call = pl.newCall()
	return pl
}

func (pl *place) newCall() string {
	pl.w.t.Helper()
	id := resource.NewID(resource.Call)
	must(pl.w.t, pl.w.db.InTx(pl.w.t.Context(), pl.who.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO calls (tenant_id, call_id, session_id, key_id, subject_source, subject, server_id, server_name,
			origin, kind, name, request_id, request_digest, arguments, arguments_digest, state, decision)
			VALUES ($1, $2, $3, 'key', 'default', 'alice', 'srv', 'calendar', 'o', 'TOOL', 'n', $2, '', '', '', 'DISPATCHING', '')`,
			tx.Tenant(), id, pl.session)
		return err
	}))
	return id
}

const changeSQL = `UPDATE calls SET revision = revision + 1 WHERE tenant_id = $1 AND call_id = $2`

// change makes one event in each of the places, in one transaction.
func change(t testing.TB, places ...*place) {
	t.Helper()
	must(t, places[0].w.db.InTx(t.Context(), places[0].who.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		for _, pl := range places {
			if _, err := tx.Exec(ctx, changeSQL, tx.Tenant(), pl.call); err != nil {
				return err
			}
		}
		return nil
	}))
}

func always(context.Context) error { return nil }

func (pl *place) follow(s *events.Service, after int64) *events.Stream {
	pl.w.t.Helper()
	st, err := s.Follow(pl.w.t.Context(), pl.who.Tenant, events.Request{SessionID: pl.session, After: &after, Check: always})
	must(pl.w.t, err)
	return st
}

// next is the next event that is not about the stream.
func next(t testing.TB, st *events.Stream) events.Event {
	t.Helper()
	for {
		e, err := nextOf(t, st)
		must(t, err)
		if e.Kind != events.Ready && e.Kind != events.Heartbeat {
			return e
		}
	}
}

func nextOf(t testing.TB, st *events.Stream) (events.Event, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	e, err := st.Next(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("no event came")
	}
	return e, err
}

// ending reads to the end of a stream and returns what it had and why it ended.
func ending(t testing.TB, st *events.Stream) (all []events.Event, why string) {
	t.Helper()
	for {
		e, err := nextOf(t, st)
		if errors.Is(err, io.EOF) {
			return all, "EOF"
		}
		if f, ok := fault.As(err); ok {
			return all, f.Reason
		}
		must(t, err)
		all = append(all, e)
	}
}

func numbers(all []events.Event) string {
	out := ""
	for _, e := range all {
		if e.Kind == events.CallChanged {
			out += fmt.Sprint(e.N, " ")
		}
	}
	return out
}
