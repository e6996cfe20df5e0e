package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Both roles of a session are looked at: the effective one, under which every
// statement runs, and the login role, which one injected RESET ROLE would
// bring back. Owning includes being a member of the owner.
const checkSQL = `
SELECT r.rolname, r.rolsuper, r.rolbypassrls,
       COALESCE((SELECT min(c.oid::regclass::text)
                   FROM pg_class c
                   JOIN pg_namespace n ON n.oid = c.relnamespace
                  WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
                    AND n.nspname NOT IN ('pg_catalog', 'information_schema')
                    AND n.nspname NOT LIKE 'pg\_%'
                    AND pg_has_role(r.oid, c.relowner, 'MEMBER')), '')
  FROM pg_roles r
 WHERE r.rolname IN (session_user, current_user)
 ORDER BY r.rolname`

// Check refuses a pool whose sessions could step around row-level security: the
// login role and the role taken by SET ROLE must be neither superuser nor
// BYPASSRLS, and must own no table, view or foreign table. A refusal is a
// Precondition with reason DATABASE_ROLE_TOO_POWERFUL that names role and rule.
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	rows, err := pool.Query(ctx, checkSQL)
	if err != nil {
		return Translate(err)
	}
	defer rows.Close()
	seen := 0
	for rows.Next() {
		var role, owned string
		var super, bypass bool
		if err := rows.Scan(&role, &super, &bypass, &owned); err != nil {
			return Translate(err)
		}
		seen++
		if rule := tooPowerful(super, bypass, owned); rule != "" {
			return fault.New(fault.Precondition, "DATABASE_ROLE_TOO_POWERFUL",
				"database role %q %s; give the server a login role that does not", role, rule)
		}
	}
	if err := rows.Err(); err != nil {
		return Translate(err)
	}
	if seen == 0 {
		return fault.New(fault.Internal, "DATABASE_ROLE_UNKNOWN", "the session's role is not listed by the database")
	}
	return nil
}

func tooPowerful(super, bypass bool, owned string) string {
	switch {
	case super:
		return "is a superuser"
	case bypass:
		return "bypasses row-level security"
	case owned != "":
		return fmt.Sprintf("owns table %s", owned)
	}
	return ""
}
