package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/migrations"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Wrap(m)) }

func TestOpen_SessionSettings(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool, err := postgres.Open(t.Context(), db.URL, postgres.AppRole, postgres.Options{
		MaxConns: 3, StatementTimeout: 2500 * time.Millisecond, LockTimeout: time.Second, IdleInTransactionTimeout: 3 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	want := map[string]string{
		"role": "bulkhead_app", "statement_timeout": "2500ms", "lock_timeout": "1s",
		"idle_in_transaction_session_timeout": "3s", "TimeZone": "UTC", "application_name": "bulkhead",
	}
	got := map[string]string{}
	for name := range want {
		var v string
		if err := pool.QueryRow(t.Context(), `SELECT current_setting($1)`, name).Scan(&v); err != nil {
			t.Fatal(err)
		}
		got[name] = v
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("settings = %v, want %v", got, want)
	}
	if n := pool.Config().MaxConns; n != 3 {
		t.Errorf("MaxConns = %d, want 3", n)
	}
}

func TestOpen_Refusals(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	tests := []struct {
		name, url, role string
		want            fault.Kind
	}{
		{"not an address", "postgres://user:hunter2@[", "", fault.Invalid},
		{"nobody answers", "postgres://user:hunter2@127.0.0.1:1/x", "", fault.Unavailable},
		{"unknown role", db.URL, "no_such_role; --", fault.Internal},
		{"role not granted", db.URL, "pg_monitor", fault.Internal},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := postgres.Open(t.Context(), tt.url, tt.role, postgres.Options{})
			if !fault.Is(err, tt.want) {
				t.Errorf("Open: %v, want kind %v", err, tt.want)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Error("the password is in the error")
			}
		})
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		setup string // by the owner; %[1]s is a role of this case's own
		want  string
	}{
		{"an ordinary login passes", ``, ""},
		{"bypasses row-level security", `ALTER ROLE %[1]s BYPASSRLS`, "bypasses row-level security"},
		{"is a superuser", `ALTER ROLE %[1]s SUPERUSER`, "is a superuser"},
		{"owns a table", `CREATE TABLE own (n int); ALTER TABLE own OWNER TO %[1]s`, "owns table own"},
		{"is a member of an owner", `CREATE ROLE %[1]s_group; GRANT %[1]s_group TO %[1]s;
			CREATE TABLE own (n int); ALTER TABLE own OWNER TO %[1]s_group`, "owns table own"},
		{"owns a view in another schema", `CREATE SCHEMA s; CREATE VIEW s.v AS SELECT 1; ALTER VIEW s.v OWNER TO %[1]s`, "owns table s.v"},
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			login := postgres.Login{Name: fmt.Sprintf("%s_l%d", db.Name, i), Password: "it's a secret"}
			if err := postgres.PrepareLogin(t.Context(), db.OwnerURL, login); err != nil {
				t.Fatal(err)
			}
			owner := db.Owner(t)
			t.Cleanup(func() { dropRoles(t, db, login.Name) })
			if tt.setup != "" {
				if _, err := owner.Exec(t.Context(), strings.ReplaceAll(tt.setup, "%[1]s", login.Name)); err != nil {
					t.Fatal(err)
				}
			}
			pool, err := postgres.Open(t.Context(), db.URLAs(login), postgres.AppRole, postgres.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			err = postgres.Check(t.Context(), pool)
			if tt.want == "" {
				if err != nil {
					t.Errorf("Check: %v", err)
				}
				return
			}
			if !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Check: %v, want a refusal that says %q", err, tt.want)
			}
		})
	}
}

// dropRoles removes a role and what it owns; roles outlive the database.
func dropRoles(t *testing.T, db *pgtest.DB, name string) {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, db.OwnerURL)
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close(ctx)
	for _, role := range []string{name, name + "_group"} {
		conn.Exec(ctx, "DROP OWNED BY "+role+" CASCADE")
		if _, err := conn.Exec(ctx, "DROP ROLE IF EXISTS "+role); err != nil {
			t.Error(err)
		}
	}
}

func TestPrepareLogin_Together(t *testing.T) {
	t.Parallel()
	a, b := pgtest.New(t), pgtest.New(t)
	login := postgres.Login{Name: a.Name + "_many"}
	t.Cleanup(func() { dropRoles(t, a, login.Name) })
	errs := make([]error, 8)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			url := a.OwnerURL
			if i%2 == 1 {
				url = b.OwnerURL
			}
			errs[i] = postgres.PrepareLogin(t.Context(), url, login)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

func TestPrepareLogin_TakesPrivilegesBack(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	login := postgres.Login{Name: db.Name + "_back"}
	owner := db.Owner(t)
	t.Cleanup(func() { dropRoles(t, db, login.Name) })
	if _, err := owner.Exec(t.Context(), "CREATE ROLE "+login.Name+" SUPERUSER BYPASSRLS INHERIT"); err != nil {
		t.Fatal(err)
	}
	if err := postgres.PrepareLogin(t.Context(), db.OwnerURL, login); err != nil {
		t.Fatal(err)
	}
	var super, bypass, inherit, canLogin bool
	err := owner.QueryRow(t.Context(), `SELECT rolsuper, rolbypassrls, rolinherit, rolcanlogin FROM pg_roles WHERE rolname = $1`, login.Name).
		Scan(&super, &bypass, &inherit, &canLogin)
	if err != nil || super || bypass || inherit || !canLogin {
		t.Errorf("super %v, bypass %v, inherit %v, login %v, %v; want only login", super, bypass, inherit, canLogin, err)
	}
}

func TestMigrate_ManyReplicasOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	files := fstest.MapFS{
		"9001_first.sql":  {Data: []byte("-- +goose Up\nCREATE TABLE once (n int);\nINSERT INTO once VALUES (1);\n")},
		"9002_second.sql": {Data: []byte("-- +goose Up\nINSERT INTO once VALUES (2);\n")},
	}
	owner := db.Owner(t)
	if _, err := owner.Exec(t.Context(), `DROP TABLE goose_db_version`); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	errs := make([]error, 4)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = postgres.Migrate(t.Context(), db.OwnerURL, files, log) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := owner.QueryRow(t.Context(), `SELECT count(*) FROM once`).Scan(&n); err != nil || n != 2 {
		t.Errorf("rows = %d, %v; want each migration applied once", n, err)
	}
}

// Replicas that start later find the queue as it should be, and its jobs apart.
func TestMigrate_QueueIsLeftAsItIs(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	owner := db.Owner(t)
	var before, after string
	look := func(out *string) {
		t.Helper()
		err := owner.QueryRow(t.Context(), `SELECT (SELECT string_agg(version || ' ' || created_at, ',' ORDER BY version) FROM river.river_migration)
			|| (SELECT string_agg(policyname || array_to_string(roles, ','), ';' ORDER BY policyname) FROM pg_policies WHERE tablename = 'river_job')
			|| (SELECT relrowsecurity FROM pg_class WHERE oid = 'river.river_job'::regclass)`).Scan(out)
		if err != nil {
			t.Fatal(err)
		}
	}
	look(&before)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := postgres.Migrate(t.Context(), db.OwnerURL, migrations.FS, slog.New(slog.DiscardHandler)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if look(&after); before != after || !strings.Contains(after, "system_jobs{bulkhead_system}") && !strings.Contains(after, "system_jobsbulkhead_system") || !strings.HasSuffix(after, "true") {
		t.Errorf("before %s\nafter  %s", before, after)
	}
	for _, sql := range []string{`DELETE FROM river.river_job`, `UPDATE river.river_job SET args = '{}'`, `SELECT FROM river.river_leader`, `SELECT FROM river.river_notification`} {
		if _, err := db.Pool(t, postgres.AppRole).Exec(t.Context(), sql); err == nil {
			t.Errorf("who works for a tenant may %s", sql)
		}
	}
}

func TestMigrate_Failures(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	log := slog.New(slog.DiscardHandler)
	bad := fstest.MapFS{"9001_bad.sql": {Data: []byte("-- +goose Up\nCREATE TABLE half (n int);\nSELECT nonsense;\n")}}
	if err := postgres.Migrate(t.Context(), db.OwnerURL, bad, log); err == nil {
		t.Error("a broken migration passes")
	}
	var there bool
	if err := db.Owner(t).QueryRow(t.Context(), `SELECT to_regclass('half') IS NOT NULL`).Scan(&there); err != nil || there {
		t.Errorf("half a migration stays: %v, %v", there, err)
	}
	if err := postgres.Migrate(t.Context(), "postgres://[", bad, log); !fault.Is(err, fault.Invalid) {
		t.Errorf("bad address: %v, want Invalid", err)
	}
	if err := postgres.Migrate(t.Context(), "postgres://x@127.0.0.1:1/x", bad, log); !fault.Is(err, fault.Unavailable) {
		t.Errorf("no server: %v, want Unavailable", err)
	}
}

func TestTranslate_Table(t *testing.T) {
	t.Parallel()
	pg := func(code string) error {
		return fmt.Errorf("store: %w", &pgconn.PgError{Code: code, Message: "SECRET detail", ConstraintName: "c"})
	}
	tests := []struct {
		name string
		err  error
		want fault.Kind
	}{
		{"unique", pg("23505"), fault.Exists},
		{"exclusion", pg("23P01"), fault.Exists},
		{"foreign key", pg("23503"), fault.Precondition},
		{"serialization", pg("40001"), fault.Conflict},
		{"deadlock", pg("40P01"), fault.Conflict},
		{"lock timeout", pg("55P03"), fault.Conflict},
		{"insufficient privilege", pg("42501"), fault.Internal},
		{"check violation", pg("23514"), fault.Internal},
		{"syntax", pg("42601"), fault.Internal},
		{"no code", pg(""), fault.Internal},
		{"cancelled", pg("57014"), fault.Deadline},
		{"shutdown", pg("57P01"), fault.Unavailable},
		{"starting", pg("57P03"), fault.Unavailable},
		{"too many connections", pg("53300"), fault.Unavailable},
		{"connection failure", pg("08006"), fault.Unavailable},
		{"read only after failover", pg("25006"), fault.Unavailable},
		{"no rows", fmt.Errorf("x: %w", pgx.ErrNoRows), fault.NotFound},
		{"caller gone", context.Canceled, fault.Canceled},
		{"deadline", fmt.Errorf("x: %w", context.DeadlineExceeded), fault.Deadline},
		{"cut off", io.ErrUnexpectedEOF, fault.Unavailable},
		{"refused", &net.OpError{Op: "dial", Err: errors.New("SECRET refused")}, fault.Unavailable},
		{"anything else", errors.New("SECRET"), fault.Internal},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := postgres.Translate(tt.err)
			f, ok := fault.As(got)
			if !ok || f.Kind != tt.want {
				t.Fatalf("Translate = %v, want kind %v", got, tt.want)
			}
			if strings.Contains(got.Error(), "SECRET") {
				t.Errorf("public text %q holds the driver's", got)
			}
			if !errors.Is(got, tt.err) {
				t.Error("the cause is lost to the log")
			}
		})
	}
	if postgres.Translate(nil) != nil {
		t.Error("nil became an error")
	}
	mine := fault.New(fault.Denied, "MINE", "mine")
	if got := postgres.Translate(fmt.Errorf("x: %w", mine)); !fault.Is(got, fault.Denied) {
		t.Errorf("a fault became %v", got)
	}
}

// TestTranslate_Real provokes the states in the database itself.
func TestTranslate_Real(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	owner := db.Owner(t)
	if _, err := owner.Exec(t.Context(), `CREATE TABLE u (n int CONSTRAINT u_pk PRIMARY KEY); INSERT INTO u VALUES (1)`); err != nil {
		t.Fatal(err)
	}
	_, err := owner.Exec(t.Context(), `INSERT INTO u VALUES (1)`)
	if got := postgres.Translate(err); !fault.Is(got, fault.Exists) || postgres.Constraint(got) != "u_pk" {
		t.Errorf("duplicate: %v, constraint %q", got, postgres.Constraint(got))
	}
	_, err = db.Pool(t, postgres.AppRole).Exec(t.Context(), `SELECT * FROM u`)
	if got := postgres.Translate(err); !fault.Is(got, fault.Internal) {
		t.Errorf("no privilege: %v", got)
	}
	short, err := postgres.Open(t.Context(), db.URL, postgres.AppRole, postgres.Options{StatementTimeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer short.Close()
	_, err = short.Exec(t.Context(), `SELECT pg_sleep(30)`)
	if got := postgres.Translate(err); !fault.Is(got, fault.Deadline) {
		t.Errorf("statement timeout: %v", got)
	}
	_, err = owner.Exec(t.Context(), `SELECT pg_terminate_backend(pg_backend_pid())`)
	if got := postgres.Translate(err); !fault.Is(got, fault.Unavailable) {
		t.Errorf("terminated: %v", got)
	}
}

func TestRetryable(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	owner := db.Owner(t)
	if _, err := owner.Exec(t.Context(), `CREATE TABLE r (n int); INSERT INTO r VALUES (0)`); err != nil {
		t.Fatal(err)
	}
	begin := func() pgx.Tx {
		tx, err := owner.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tx.Rollback(context.Background()) })
		if _, err := tx.Exec(t.Context(), `SELECT n FROM r`); err != nil {
			t.Fatal(err)
		}
		return tx
	}
	first, second := begin(), begin()
	if _, err := first.Exec(t.Context(), `UPDATE r SET n = 1`); err != nil {
		t.Fatal(err)
	}
	if err := first.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := second.Exec(t.Context(), `UPDATE r SET n = 2`)
	if !postgres.Retryable(err) || !postgres.Retryable(postgres.Translate(err)) {
		t.Errorf("lost update: %v is not retryable", err)
	}
	if postgres.Retryable(io.EOF) || postgres.Retryable(nil) {
		t.Error("an unknown end of a transaction counts as retryable")
	}
}
