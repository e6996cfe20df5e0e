package postgres

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// The roles that hold the product's privileges. The migrations create them
// NOLOGIN; a login role takes one by SET ROLE.
const (
	// AppRole does the work of one tenant under row-level security.
	AppRole = "bulkhead_app"
	// SystemRole finds work across tenants and nothing else.
	SystemRole = "bulkhead_system"
)

// Login is a role to log in as. Without a password it can log in only where the
// server trusts the connection.
type Login struct {
	Name     string
	Password string
}

// PrepareLogin creates the login role, or takes it back to its place, and lets
// it take AppRole and SystemRole, which must exist. It inherits nothing: before
// SET ROLE it may do no more than connect. Several processes may call it at
// once, and again.
func PrepareLogin(ctx context.Context, ownerURL string, l Login) error {
	conn, err := pgx.Connect(ctx, ownerURL)
	if err != nil {
		return Translate(err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	name := pgx.Identifier{l.Name}.Sanitize()
	attributes := " LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEDB NOCREATEROLE NOREPLICATION NOINHERIT"
	if l.Password != "" {
		quoted, err := quoteLiteral(ctx, conn, l.Password)
		if err != nil {
			return err
		}
		attributes += " PASSWORD " + quoted
	}
	err = retryCatalog(ctx, func() error {
		var exists bool
		if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)`, l.Name).Scan(&exists); err != nil {
			return err
		}
		verb := "CREATE ROLE "
		if exists {
			verb = "ALTER ROLE "
		}
		if _, err := conn.Exec(ctx, verb+name+attributes); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, "GRANT "+AppRole+", "+SystemRole+" TO "+name)
		return err
	})
	return Translate(err)
}

func quoteLiteral(ctx context.Context, conn *pgx.Conn, s string) (string, error) {
	var quoted string
	err := conn.QueryRow(ctx, `SELECT quote_literal($1::text)`, s).Scan(&quoted)
	return quoted, Translate(err)
}

// retryCatalog repeats what lost a race for a row of the role catalog, which
// all databases of a cluster share and advisory locks of one do not cover.
func retryCatalog(ctx context.Context, do func() error) error {
	var err error
	for range 20 {
		if err = do(); !catalogRace(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(25 * time.Millisecond):
		}
	}
	return fault.Wrap(err, "role catalog")
}

func catalogRace(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return false
	}
	switch pg.Code {
	case "42710", "23505": // duplicate_object, unique_violation: another process made the role
		return true
	case "XX000": // "tuple concurrently updated" has no code of its own
		return pg.Message == "tuple concurrently updated"
	}
	return false
}
