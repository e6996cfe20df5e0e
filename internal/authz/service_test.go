package authz

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Wrap(m)) }

// voider keeps what it is told.
type voider struct {
	mu   sync.Mutex
	keep []string
	fail error
}

func (v *voider) VoidServer(_ context.Context, _ tenant.Tx, _, keepContract, _ string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keep = append(v.keep, keepContract)
	return v.fail
}

type world struct {
	t      testing.TB
	svc    *Service
	pool   *pgxpool.Pool
	voider *voider
	admin  tenant.Principal
	server string
	now    time.Time
}

func newWorld(t testing.TB) *world {
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
	w := &world{t: t, pool: pg.Owner(t), voider: &voider{}, server: resource.NewID(resource.Server), now: time.Now()}
	if w.svc, err = NewService(db, w.voider, log); err != nil {
		t.Fatal(err)
	}
	w.svc.now = func() time.Time { return w.now }
	tn, key, err := tenants.CreateTenant(t.Context(), "Acme", "")
	if err != nil {
		t.Fatal(err)
	}
	w.admin = tenant.Principal{Tenant: tn.ID, KeyID: key.ID, Role: tenant.RoleAdmin}
	w.exec(`INSERT INTO servers (tenant_id, server_id, name, display_name, transport, url, origin, isolation)
		VALUES ($1, $2, 'calendar', 'c', 'HTTP', 'https://calendar.example/mcp', 'https://calendar.example', 'PER_USER')`, tn.ID.String(), w.server)
	return w
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.pool.Exec(context.Background(), sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

func source(timeout string) []byte {
	return []byte(`{"server":"calendar","transport":"http","protocol":{"versions":["2026-07-28"]},"origin":"https://calendar.example",
		"limits":{"timeout":"` + timeout + `"},"tools":[{"name":"look","definition":"any","effect":"read"}]}`)
}

func (w *world) create(timeout string) Record {
	w.t.Helper()
	r, err := w.svc.Create(w.t.Context(), w.admin, "calendar", source(timeout), "")
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func (w *world) activate(revision int) Record {
	w.t.Helper()
	r, err := w.svc.Activate(w.t.Context(), w.admin, w.server, revision)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func TestContracts_RevisionsAreNumberedAndOneIsActive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, two, again := w.create("1s"), w.create("2s"), w.create("1s")
	if one.Revision != 1 || two.Revision != 2 || again.Revision != 3 || one.ContractID != again.ContractID || one.ContractID == two.ContractID ||
		one.State != "DRAFT" || one.ServerName != "calendar" || one.CreatedBy != w.admin.Actor() {
		t.Fatalf("%+v %+v %+v", one, two, again)
	}
	told := 0
	w.svc.OnActivate = func(tenant.ID, string) { told++ }
	if r := w.activate(1); r.State != "ACTIVE" || r.ActivateTime == nil {
		t.Fatalf("%+v", r)
	}
	w.activate(1) // changes nothing
	w.activate(2)
	w.activate(3)
	if !slices.Equal(w.voider.keep, []string{one.ContractID, two.ContractID, one.ContractID}) || told != 3 {
		t.Fatalf("voided but %v, told %d times", w.voider.keep, told)
	}
	rs, err := w.svc.List(t.Context(), w.admin, "calendar", 0, 10)
	if err != nil || len(rs) != 3 || rs[0].State != "ACTIVE" || rs[1].State != "RETIRED" || rs[2].State != "RETIRED" || rs[2].RetireTime == nil {
		t.Fatalf("%+v %v", rs, err)
	}
	if rs, err := w.svc.List(t.Context(), w.admin, w.server, 3, 1); err != nil || len(rs) != 1 || rs[0].Revision != 2 {
		t.Fatalf("%+v %v", rs, err)
	}
	if r, err := w.svc.Get(t.Context(), w.admin, "calendar", 2); err != nil || string(r.Source) != string(source("2s")) || r.ContractID != two.ContractID {
		t.Fatalf("%+v %v", r, err)
	}
	if _, err := w.svc.Get(t.Context(), w.admin, "calendar", 9); !fault.Is(err, fault.NotFound) {
		t.Fatal(err)
	}
	// What fails beside it leaves the old one active.
	w.voider.fail = fault.New(fault.Unavailable, "X", "x")
	if _, err := w.svc.Activate(t.Context(), w.admin, "calendar", 2); !fault.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	if r, err := w.svc.Get(t.Context(), w.admin, "calendar", 3); err != nil || r.State != "ACTIVE" {
		t.Fatalf("%+v %v", r, err)
	}
}

func TestContracts_ActivatedAtOnceLeaveOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 6 {
		w.create("1s")
	}
	w.create("9s")
	var wg sync.WaitGroup
	for rev := 1; rev <= 7; rev++ {
		wg.Go(func() {
			if _, err := w.svc.Activate(t.Context(), w.admin, "calendar", rev); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() { w.create("3s") })
	}
	wg.Wait()
	var active, revision, last, named int
	err := w.pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE state = 'ACTIVE'), max(revision) FILTER (WHERE state = 'ACTIVE'), max(revision),
		(SELECT active_contract FROM servers) FROM contracts`).Scan(&active, &revision, &last, &named)
	if err != nil || active != 1 || named != revision || last != 14 {
		t.Fatalf("%d active, %d, %d, %d: %v", active, revision, named, last, err)
	}
}

func TestContracts_MustFitTheirServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, c := range map[string]struct {
		old, new string
		path     string
	}{
		"server":    {`"server":"calendar"`, `"server":"mail"`, "server"},
		"origin":    {`"origin":"https://calendar.example"`, `"origin":"https://calendar.example:444"`, "origin"},
		"transport": {`"transport":"http"`, `"transport":"sse"`, "transport"},
		"syntax":    {`"effect":"read"`, `"effect":"reads"`, "tools[0].effect"},
	} {
		src := strings.Replace(string(source("1s")), c.old, c.new, 1)
		if c.path == "transport" {
			src = strings.Replace(src, "2026-07-28", "2025-11-25", 1)
		}
		_, err := w.svc.Create(t.Context(), w.admin, "calendar", []byte(src), "")
		f, _ := fault.As(err)
		if f == nil || f.Kind != fault.Invalid || len(f.Fields) != 1 || f.Fields[0].Path != c.path {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := w.create("1s")
	w.exec(`UPDATE servers SET origin = 'https://moved.example'`)
	if _, err := w.svc.Activate(t.Context(), w.admin, "calendar", r.Revision); !fault.Is(err, fault.Invalid) {
		t.Errorf("after a move: %v", err)
	}
	for _, server := range []string{"", "mail", "a\x00b", "srv_00000000000000000000000000", "CALENDAR"} {
		if _, err := w.svc.Create(t.Context(), w.admin, server, source("1s"), ""); !fault.Is(err, fault.NotFound) {
			t.Errorf("%q: %v", server, err)
		}
	}
	limited := w.admin
	limited.Servers = []string{"mail"}
	for name, err := range map[string]error{
		"create":   second(w.svc.Create(t.Context(), limited, "calendar", source("1s"), "")),
		"activate": second(w.svc.Activate(t.Context(), limited, "calendar", 1)),
		"get":      second(w.svc.Get(t.Context(), limited, "calendar", 1)),
		"list":     second(w.svc.List(t.Context(), limited, "calendar", 0, 1)),
	} {
		if !fault.Is(err, fault.NotFound) {
			t.Errorf("%s with a credential for another server: %v", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestContracts_ARepeatedCreateMakesOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var mu sync.Mutex
	got := map[int]int{}
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			r, err := w.svc.Create(t.Context(), w.admin, "calendar", source("1s"), "k")
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			got[r.Revision]++
		})
	}
	wg.Wait()
	if len(got) != 1 || got[1] != 10 {
		t.Fatalf("%v", got)
	}
	if _, err := w.svc.Create(t.Context(), w.admin, "calendar", source("2s"), "k"); !fault.Is(err, fault.Exists) {
		t.Fatal(err)
	}
}

// A replica may be five seconds behind, and no longer.
func TestActive_HoldsFiveSeconds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	revision := func() int {
		a, err := w.svc.Active(t.Context(), w.admin.Tenant, w.server)
		if err != nil {
			t.Fatal(err)
		}
		if a == nil {
			return 0
		}
		return a.Revision
	}
	if revision() != 0 {
		t.Fatal("no contract is active yet")
	}
	w.create("1s")
	w.create("2s")
	w.activate(1)
	if revision() != 1 {
		t.Fatal("the replica that activates knows at once")
	}
	first, _ := w.svc.Active(t.Context(), w.admin.Tenant, w.server)
	elsewhere := func(rev int) {
		w.exec(`UPDATE contracts SET state = 'RETIRED' WHERE state = 'ACTIVE'`)
		w.exec(`UPDATE contracts SET state = 'ACTIVE' WHERE revision = $1`, rev)
	}
	elsewhere(2)
	w.now = w.now.Add(activeTTL - time.Millisecond)
	if revision() != 1 {
		t.Fatal("asked too early")
	}
	w.now = w.now.Add(2 * time.Millisecond)
	if revision() != 2 {
		t.Fatal("held for longer than five seconds")
	}
	elsewhere(1)
	w.svc.Forget(w.admin.Tenant, w.server)
	if revision() != 1 {
		t.Fatal("a signal was not heard")
	}
	w.now = w.now.Add(activeTTL)
	if a, _ := w.svc.Active(t.Context(), w.admin.Tenant, w.server); a == first || a.Contract.ID != first.Contract.ID {
		t.Fatal("forgotten, then read again: the same contract, newly compiled")
	} else {
		w.now = w.now.Add(activeTTL)
		if b, _ := w.svc.Active(t.Context(), w.admin.Tenant, w.server); a != b {
			t.Fatal("compiled again although nothing changed")
		}
	}
	for _, rev := range []int{1, 2, 2} {
		a, err := w.svc.At(t.Context(), w.admin.Tenant, w.server, rev)
		if err != nil || a.Revision != rev {
			t.Fatalf("%+v %v", a, err)
		}
	}
	if _, err := w.svc.At(t.Context(), w.admin.Tenant, w.server, 7); !fault.Is(err, fault.NotFound) {
		t.Fatal(err)
	}
}
