package tenant_test

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

type nullRecorder struct{}

func (nullRecorder) Record(context.Context, tenant.Tx, tenant.Event) error { return nil }

const operatorKey = "operator-key-for-tests-0123456789abcdef"

type world struct {
	db    *tenant.DB
	pg    *pgtest.DB
	svc   *tenant.Service
	vault *tenant.Vault
	ring  *seal.Ring
}

func setup(t *testing.T) world {
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
	svc, err := tenant.NewService(db, ring, nullRecorder{}, operatorKey)
	if err != nil {
		t.Fatal(err)
	}
	return world{db: db, pg: pg, svc: svc, vault: tenant.NewVault(db, ring), ring: ring}
}

func (w world) newTenant(t *testing.T, name string) (tenant.Tenant, tenant.Principal, string) {
	t.Helper()
	tn, key, err := w.svc.CreateTenant(t.Context(), name, "")
	if err != nil {
		t.Fatal(err)
	}
	p, err := w.svc.Authenticate(t.Context(), key.Secret, tenant.OnBehalf{}, netip.MustParseAddr("127.0.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	return tn, p, key.Secret
}

var local = netip.MustParseAddr("127.0.0.1")

func TestCreateTenant_RepeatGivesNoSecretAndOtherBodyIsRefused(t *testing.T) {
	t.Parallel()
	w := setup(t)
	first, key, err := w.svc.CreateTenant(t.Context(), "Acme", "r1")
	if err != nil || key.Secret == "" {
		t.Fatalf("first create: %v, secret %q", err, key.Secret)
	}
	again, key2, err := w.svc.CreateTenant(t.Context(), "Acme", "r1")
	if err != nil || again.ID != first.ID || key2.Secret != "" {
		t.Fatalf("repeat: %v %v secret=%v", err, again.ID, key2.Secret != "")
	}
	if _, _, err := w.svc.CreateTenant(t.Context(), "Other", "r1"); !fault.Is(err, fault.Exists) {
		t.Fatalf("other body: %v", err)
	}
	if _, _, err := w.svc.CreateTenant(t.Context(), "", ""); !fault.Is(err, fault.Invalid) {
		t.Fatalf("empty name: %v", err)
	}
}

func TestAuthenticate(t *testing.T) {
	t.Parallel()
	w := setup(t)
	_, admin, adminSecret := w.newTenant(t, "Acme")
	key, err := w.svc.CreateKey(t.Context(), admin, tenant.KeySpec{
		DisplayName: "web", Role: tenant.RoleService, SubjectSpace: "web", UserPatterns: []string{"a*e", "bob"},
		Networks: []string{"127.0.0.0/8"},
	}, "")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cred   string
		who    tenant.OnBehalf
		remote string
		kind   fault.Kind
		ok     bool
	}{
		"service for alice":         {key.Secret, tenant.OnBehalf{User: "alice"}, "127.0.0.9", 0, true},
		"service for nobody":        {key.Secret, tenant.OnBehalf{}, "127.0.0.9", 0, true},
		"mapped address":            {key.Secret, tenant.OnBehalf{User: "bob"}, "::ffff:127.0.0.1", 0, true},
		"user outside the patterns": {key.Secret, tenant.OnBehalf{User: "mallory"}, "127.0.0.1", fault.Denied, false},
		"other network":             {key.Secret, tenant.OnBehalf{User: "bob"}, "10.0.0.1", fault.Denied, false},
		"groups without user":       {key.Secret, tenant.OnBehalf{Groups: []string{"x"}}, "127.0.0.1", fault.Denied, false},
		"admin with user":           {adminSecret, tenant.OnBehalf{User: "alice"}, "127.0.0.1", fault.Denied, false},
		"wrong secret":              {key.Secret[:len(key.Secret)-1] + "A", tenant.OnBehalf{}, "127.0.0.1", fault.Unauthenticated, false},
		"unknown key":               {"bhk_00000000000000000000000000_x", tenant.OnBehalf{}, "127.0.0.1", fault.Unauthenticated, false},
		"no key at all":             {"", tenant.OnBehalf{}, "127.0.0.1", fault.Unauthenticated, false},
		"operator":                  {operatorKey, tenant.OnBehalf{}, "10.0.0.1", 0, true},
		"operator for a user":       {operatorKey, tenant.OnBehalf{User: "alice"}, "10.0.0.1", fault.Denied, false},
	} {
		p, err := w.svc.Authenticate(t.Context(), c.cred, c.who, netip.MustParseAddr(c.remote))
		if c.ok != (err == nil) || (!c.ok && fault.KindOf(err) != c.kind) {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
	p, err := w.svc.Authenticate(t.Context(), key.Secret, tenant.OnBehalf{User: "alice"}, local)
	if err != nil || p.Subject != (tenant.Subject{Source: "web", Value: "alice"}) || p.Tenant != admin.Tenant {
		t.Fatalf("principal %+v, %v", p, err)
	}
	if _, err := w.svc.RevokeKey(t.Context(), admin, key.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := w.svc.Authenticate(t.Context(), key.Secret, tenant.OnBehalf{}, local); !fault.Is(err, fault.Unauthenticated) {
		t.Fatalf("revoked key: %v", err)
	}
}

func TestCreateKey_NamesTheFields(t *testing.T) {
	t.Parallel()
	w := setup(t)
	_, admin, _ := w.newTenant(t, "Acme")
	for field, spec := range map[string]tenant.KeySpec{
		"displayName": {Role: tenant.RoleService},
		"role":        {DisplayName: "x", Role: tenant.RoleOperator},
		"mayDecide":   {DisplayName: "x", Role: tenant.RoleAuditor, MayDecide: true},
		"networks":    {DisplayName: "x", Role: tenant.RoleService, Networks: []string{"10.0.0.0"}},
		"servers":     {DisplayName: "x", Role: tenant.RoleService, Servers: []string{"A B"}},
		"expireTime":  {DisplayName: "x", Role: tenant.RoleService, ExpireTime: time.Unix(1, 0)},
	} {
		refused(t, w, admin, spec, field)
	}
	// Who acts on the whole tenant is not half limited.
	for _, role := range []tenant.Role{tenant.RoleAdmin, tenant.RoleAuditor} {
		refused(t, w, admin, tenant.KeySpec{DisplayName: "x", Role: role, Servers: []string{"a"}}, "servers")
		refused(t, w, admin, tenant.KeySpec{DisplayName: "x", Role: role, UserPatterns: []string{"a"}}, "userPatterns")
		refused(t, w, admin, tenant.KeySpec{DisplayName: "x", Role: role, SubjectSpace: "a"}, "subjectSpace")
		refused(t, w, admin, tenant.KeySpec{DisplayName: "x", Role: role, SubjectSpace: "a", UserPatterns: []string{"a"}, Servers: []string{"a"}},
			"subjectSpace", "userPatterns", "servers")
	}
	ks, err := w.svc.ListKeys(t.Context(), admin, "", 10)
	if err != nil || len(ks) != 1 {
		t.Fatalf("refused keys left a trace: %v %v", ks, err)
	}
}

func TestVault_BindsTenantKindIDAndField(t *testing.T) {
	t.Parallel()
	w := setup(t)
	a, _, _ := w.newTenant(t, "A")
	b, _, _ := w.newTenant(t, "B")
	sealed, err := w.vault.Seal(t.Context(), a.ID, "account", "1", "token", []byte("s3cret"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := w.vault.Open(t.Context(), a.ID, "account", "1", "token", sealed); err != nil || string(got) != "s3cret" {
		t.Fatalf("open: %q %v", got, err)
	}
	for name, open := range map[string]func() ([]byte, error){
		"other tenant": func() ([]byte, error) { return w.vault.Open(t.Context(), b.ID, "account", "1", "token", sealed) },
		"other id":     func() ([]byte, error) { return w.vault.Open(t.Context(), a.ID, "account", "2", "token", sealed) },
		"other field":  func() ([]byte, error) { return w.vault.Open(t.Context(), a.ID, "account", "1", "secret", sealed) },
		"shifted parts": func() ([]byte, error) {
			return w.vault.Open(t.Context(), a.ID, "account1", "", "token", sealed)
		},
	} {
		if _, err := open(); err == nil {
			t.Errorf("%s opened it", name)
		}
	}
}

// Every table with a tenant_id column must force row-level security with a
// policy on it, or be one of the few that have a reason not to.
func TestIsolation_EveryTenantTableForcesRowLevelSecurity(t *testing.T) {
	t.Parallel()
	w := setup(t)
	rows, err := w.pg.Owner(t).Query(t.Context(), `
		SELECT c.relname, c.relrowsecurity, c.relforcerowsecurity,
		       EXISTS (SELECT 1 FROM pg_policies p WHERE p.tablename = c.relname AND p.policyname = 'tenant_isolation'
		                  AND p.roles = '{bulkhead_app}' AND p.cmd = 'ALL' AND p.permissive = 'PERMISSIVE'
		                  AND p.qual LIKE '%current_tenant()%' AND p.with_check LIKE '%current_tenant()%'),
		       (SELECT count(*) FROM pg_policies p WHERE p.tablename = c.relname AND 'bulkhead_app' = ANY (p.roles))
		  FROM pg_class c
		  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant_id' AND NOT a.attisdropped
		 WHERE c.relkind IN ('r', 'p') AND c.relnamespace = 'public'::regnamespace`)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	var name string
	var enabled, forced, policy bool
	var count int
	_, err = pgx.ForEachRow(rows, []any{&name, &enabled, &forced, &policy, &count}, func() error {
		n++
		if !enabled || !forced || !policy || count != 1 {
			t.Errorf("table %s: enabled=%v forced=%v policy=%v, %d policies for the app", name, enabled, forced, policy, count)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n < 15 {
		t.Fatalf("only %d tenant tables found", n)
	}
}

func TestInTx_SeesOneTenantAndNoneWithout(t *testing.T) {
	t.Parallel()
	w := setup(t)
	a, _, _ := w.newTenant(t, "A")
	b, pb, _ := w.newTenant(t, "B")
	err := w.db.InTx(t.Context(), a.ID, func(ctx context.Context, tx tenant.Tx) error {
		var n int
		if err := tx.QueryRow(ctx, `SELECT count(*) FROM keys`).Scan(&n); err != nil || n != 1 {
			t.Errorf("%d keys visible, %v", n, err)
		}
		_, err := tx.Exec(ctx, `UPDATE keys SET display_name = 'stolen' WHERE tenant_id = $1`, b.ID)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	err = w.db.InTx(t.Context(), a.ID, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO create_requests (tenant_id, kind, actor, request_id, body_digest, resource_id)
			VALUES ($1, 'x', 'x', 'x', 'x', 'x')`, b.ID)
		return err
	})
	if err == nil {
		t.Error("wrote a row of another tenant")
	}
	if ks, err := w.svc.ListKeys(t.Context(), pb, "", 10); err != nil || len(ks) != 1 || ks[0].DisplayName == "stolen" {
		t.Errorf("B's keys: %+v %v", ks, err)
	}
	if err := w.db.InTx(t.Context(), tenant.ID{}, func(context.Context, tenant.Tx) error { return nil }); err == nil {
		t.Error("a transaction without a tenant ran")
	}
	// The setting is gone from a pooled connection once the transaction ends.
	var n int
	if err := w.pg.Pool(t, tenant.AppRole).QueryRow(t.Context(), `SELECT count(*) FROM keys`).Scan(&n); err != nil || n != 0 {
		t.Errorf("without a tenant: %d rows, %v", n, err)
	}
}

func TestInTx_RollsBackOnErrorAndPanic(t *testing.T) {
	t.Parallel()
	w := setup(t)
	a, pa, _ := w.newTenant(t, "A")
	rename := func(ctx context.Context, tx tenant.Tx) {
		if _, err := tx.Exec(ctx, `UPDATE keys SET display_name = 'changed' WHERE tenant_id = $1`, tx.Tenant()); err != nil {
			t.Error(err)
		}
	}
	boom := errors.New("boom")
	if err := w.db.InTx(t.Context(), a.ID, func(ctx context.Context, tx tenant.Tx) error { rename(ctx, tx); return boom }); !errors.Is(err, boom) {
		t.Errorf("error lost: %v", err)
	}
	func() {
		defer func() { _ = recover() }()
		_ = w.db.InTx(t.Context(), a.ID, func(ctx context.Context, tx tenant.Tx) error { rename(ctx, tx); panic("boom") })
	}()
	ks, err := w.svc.ListKeys(t.Context(), pa, "", 10)
	if err != nil || ks[0].DisplayName == "changed" {
		t.Errorf("not rolled back: %+v %v", ks, err)
	}
}

// refused wants a key to be refused for exactly these fields.
func refused(t *testing.T, w world, admin tenant.Principal, spec tenant.KeySpec, fields ...string) {
	t.Helper()
	_, err := w.svc.CreateKey(t.Context(), admin, spec, "")
	f, ok := fault.As(err)
	if !ok || f.Kind != fault.Invalid {
		t.Errorf("%v: %v", fields, err)
		return
	}
	var got []string
	for _, x := range f.Fields {
		got = append(got, x.Path)
	}
	if !slices.Equal(got, fields) {
		t.Errorf("%+v: fields %q, want %q", spec, got, fields)
	}
}

// A principal carries the limits of its key, and a space that nobody gave limits
// service keys only.
func TestAuthenticate_CarriesTheLimits(t *testing.T) {
	t.Parallel()
	w := setup(t)
	_, admin, _ := w.newTenant(t, "Acme")
	alice, bob := tenant.Subject{Source: "default", Value: "alice"}, tenant.Subject{Source: "web", Value: "bob"}
	for name, c := range map[string]struct {
		spec              tenant.KeySpec
		space             string
		forAlice, forBob  bool
		calendar, another bool
	}{
		"service":            {tenant.KeySpec{Role: tenant.RoleService}, "default", true, false, true, true},
		"service of a space": {tenant.KeySpec{Role: tenant.RoleService, SubjectSpace: "web"}, "web", false, true, true, true},
		"approver":           {tenant.KeySpec{Role: tenant.RoleApprover}, "", true, true, true, true},
		"approver of default": {tenant.KeySpec{Role: tenant.RoleApprover, SubjectSpace: "default"}, "default",
			true, false, true, true},
		"approver of a space": {tenant.KeySpec{Role: tenant.RoleApprover, SubjectSpace: "web"}, "web", false, true, true, true},
		"approver of users":   {tenant.KeySpec{Role: tenant.RoleApprover, UserPatterns: []string{"x", "b*"}}, "", false, true, true, true},
		"approver of servers": {tenant.KeySpec{Role: tenant.RoleApprover, Servers: []string{"calendar"}}, "", true, true, true, false},
		"approver of all":     {tenant.KeySpec{Role: tenant.RoleApprover, SubjectSpace: "web", UserPatterns: []string{"a*"}}, "web", false, false, true, true},
		"admin":               {tenant.KeySpec{Role: tenant.RoleAdmin}, "", true, true, true, true},
		"auditor":             {tenant.KeySpec{Role: tenant.RoleAuditor}, "", true, true, true, true},
	} {
		c.spec.DisplayName = name
		k, err := w.svc.CreateKey(t.Context(), admin, c.spec, "")
		if err != nil || k.SubjectSpace != c.space {
			t.Errorf("%s: space %q, %v", name, k.SubjectSpace, err)
			continue
		}
		p, err := w.svc.Authenticate(t.Context(), k.Secret, tenant.OnBehalf{}, local)
		if err != nil || p.MayActFor(alice) != c.forAlice || p.MayActFor(bob) != c.forBob ||
			p.MayUse("calendar") != c.calendar || p.MayUse("mail") != c.another {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

// The last admin key that works stays.
func TestRevokeKey_KeepsAnAdmin(t *testing.T) {
	t.Parallel()
	w := setup(t)
	_, admin, _ := w.newTenant(t, "Acme")
	last := func(id string) bool {
		t.Helper()
		_, err := w.svc.RevokeKey(t.Context(), admin, id)
		f, ok := fault.As(err)
		if err != nil && (!ok || f.Kind != fault.Precondition || f.Reason != "LAST_ADMIN_KEY") {
			t.Fatal(err)
		}
		return err != nil
	}
	mint := func(spec tenant.KeySpec) string {
		t.Helper()
		spec.DisplayName = "x"
		k, err := w.svc.CreateKey(t.Context(), admin, spec, "")
		if err != nil {
			t.Fatal(err)
		}
		return k.ID
	}
	if !last(admin.KeyID) {
		t.Fatal("the only admin key was revoked")
	}
	// Neither another role nor an admin key that has ended stands in for one.
	service, ended := mint(tenant.KeySpec{Role: tenant.RoleService}), mint(tenant.KeySpec{Role: tenant.RoleAdmin})
	if _, err := w.pg.Owner(t).Exec(t.Context(), `UPDATE keys SET expire_time = now() WHERE key_id = $1`, ended); err != nil {
		t.Fatal(err)
	}
	if !last(admin.KeyID) || last(ended) || last(ended) || last(service) || !last(admin.KeyID) {
		t.Fatal("the last admin key that works was revoked, or another one was kept")
	}
}

// gate is a recorder that stops a revocation before its commit.
type gate struct{ entered, open chan struct{} }

func (g gate) Record(_ context.Context, _ tenant.Tx, e tenant.Event) error {
	if e.Kind == "key.revoked" {
		g.entered <- struct{}{}
		<-g.open
	}
	return nil
}

// Of two admin keys that are revoked at once, one stays.
func TestRevokeKey_TwoAtOnce(t *testing.T) {
	t.Parallel()
	w := setup(t)
	_, admin, _ := w.newTenant(t, "Acme")
	second, err := w.svc.CreateKey(t.Context(), admin, tenant.KeySpec{DisplayName: "x", Role: tenant.RoleAdmin}, "")
	if err != nil {
		t.Fatal(err)
	}
	g := gate{make(chan struct{}, 2), make(chan struct{})}
	slow, err := tenant.NewService(w.db, w.ring, g, "")
	if err != nil {
		t.Fatal(err)
	}
	revoke := func(id string) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := slow.RevokeKey(t.Context(), admin, id)
			done <- err
		}()
		return done
	}
	first := revoke(admin.KeyID)
	<-g.entered
	other := revoke(second.ID)
	owner := w.pg.Owner(t)
	for waits := false; !waits && len(g.entered) == 0; {
		err := owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT 1 FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE NOT l.granted AND a.datname = current_database())`).Scan(&waits)
		if err != nil {
			t.Fatal(err)
		}
	}
	close(g.open)
	if err := <-first; err != nil {
		t.Errorf("the first: %v", err)
	}
	if err := <-other; !fault.Is(err, fault.Precondition) {
		t.Errorf("the second: %v", err)
	}
}

func TestWrite_AllOrNothingOfOneTenant(t *testing.T) {
	t.Parallel()
	w := setup(t)
	a, pa, _ := w.newTenant(t, "A")
	b, _, _ := w.newTenant(t, "B")
	rename := func(batch *pgx.Batch, of tenant.ID, name string) {
		batch.Queue(`UPDATE keys SET display_name = $2 WHERE tenant_id = $1`, of, name)
	}
	name := func() string {
		ks, err := w.svc.ListKeys(t.Context(), pa, "", 10)
		if err != nil || len(ks) != 1 {
			t.Fatalf("%d keys, %v", len(ks), err)
		}
		return ks[0].DisplayName
	}
	err := w.db.Write(t.Context(), a.ID, func(batch *pgx.Batch) {
		rename(batch, a.ID, "first")
		batch.Queue(`INSERT INTO create_requests (tenant_id, kind, actor, request_id, body_digest, resource_id)
			VALUES ($1, 'x', 'x', 'x', 'x', 'x')`, b.ID)
		rename(batch, a.ID, "third")
	})
	if err == nil || name() != "first admin" {
		t.Errorf("a failed batch left %q, %v", name(), err)
	}
	err = w.db.Write(t.Context(), a.ID, func(batch *pgx.Batch) { rename(batch, a.ID, "new"); rename(batch, b.ID, "stolen") })
	if err != nil || name() != "new" {
		t.Errorf("%q, %v", name(), err)
	}
	var stolen int
	if err := w.pg.Owner(t).QueryRow(t.Context(), `SELECT count(*) FROM keys WHERE display_name = 'stolen'`).Scan(&stolen); err != nil || stolen != 0 {
		t.Errorf("%d keys of B changed, %v", stolen, err)
	}
	if err := w.db.Write(t.Context(), tenant.ID{}, func(*pgx.Batch) {}); err == nil {
		t.Error("a batch without a tenant ran")
	}
}
