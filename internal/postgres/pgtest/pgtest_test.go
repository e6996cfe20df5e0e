package pgtest_test

import (
	"fmt"
	"testing"

	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Wrap(m)) }

func TestNew_DatabasesAreApart(t *testing.T) {
	for i := range 4 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			owner := db.Owner(t)
			if _, err := owner.Exec(t.Context(), `CREATE TABLE marker (n int); INSERT INTO marker VALUES (1)`); err != nil {
				t.Fatalf("another test's table is here: %v", err)
			}
			var n int
			if err := owner.QueryRow(t.Context(), `SELECT count(*) FROM tenants`).Scan(&n); err != nil || n != 0 {
				t.Fatalf("tenants = %d, %v; want an empty migrated table", n, err)
			}
		})
	}
}

func TestPool_LoginIsFitToServe(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, role := range []string{postgres.AppRole, postgres.SystemRole, ""} {
		pool := db.Pool(t, role)
		if err := postgres.Check(t.Context(), pool); err != nil {
			t.Errorf("role %q: %v", role, err)
		}
	}
	if err := postgres.Check(t.Context(), db.Owner(t)); err == nil {
		t.Error("the owner passes as fit to serve")
	}
}

func TestPool_BareLoginMayNothing(t *testing.T) {
	t.Parallel()
	var n int
	err := pgtest.New(t).Pool(t, "").QueryRow(t.Context(), `SELECT count(*) FROM tenants`).Scan(&n)
	if err == nil {
		t.Fatal("the login role reads a table before SET ROLE")
	}
}
