// Package postgres opens the connection pool, applies the migrations, checks
// that the server runs without the privileges that would defeat row-level
// security, and translates what the driver reports into faults. It holds no
// query of the product; SQL lives with its domain.
package postgres

import (
	"context"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Options bound what one pool may take from the database. A zero field takes
// the default.
type Options struct {
	// MaxConns is the largest number of connections; default 16, at most 1000.
	MaxConns int32
	// StatementTimeout ends a statement that runs longer; default 15 s.
	StatementTimeout time.Duration
	// LockTimeout ends a statement that waits longer for a lock; default 5 s.
	LockTimeout time.Duration
	// IdleInTransactionTimeout ends a session whose transaction does nothing for
	// longer; default 15 s.
	IdleInTransactionTimeout time.Duration
	// ConnectTimeout bounds one attempt to connect; default 5 s.
	ConnectTimeout time.Duration
	// ApplicationName is what pg_stat_activity shows; default "bulkhead".
	ApplicationName string
}

func (o Options) withDefaults() Options {
	if o.MaxConns <= 0 {
		o.MaxConns = 16
	}
	o.MaxConns = min(o.MaxConns, 1000)
	orDefault := func(d *time.Duration, def time.Duration) {
		if *d <= 0 {
			*d = def
		}
	}
	orDefault(&o.StatementTimeout, 15*time.Second)
	orDefault(&o.LockTimeout, 5*time.Second)
	orDefault(&o.IdleInTransactionTimeout, 15*time.Second)
	orDefault(&o.ConnectTimeout, 5*time.Second)
	if o.ApplicationName == "" {
		o.ApplicationName = "bulkhead"
	}
	return o
}

// Open returns a pool on the database at url, whose every connection has taken
// role by SET ROLE; an empty role stays with the login role. It connects once,
// so that a wrong address or role fails here: Invalid for an address that
// cannot be read, Unavailable for a server that does not answer. The text of
// the fault never repeats the address, which may hold a password.
func Open(ctx context.Context, url, role string, opts Options) (*pgxpool.Pool, error) {
	o := opts.withDefaults()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fault.Field1("databaseUrl", "is not a PostgreSQL address")
	}
	cfg.MaxConns = o.MaxConns
	cfg.MaxConnIdleTime = 5 * time.Minute
	cfg.MaxConnLifetime = time.Hour
	cfg.MaxConnLifetimeJitter = 5 * time.Minute
	cfg.ConnConfig.ConnectTimeout = o.ConnectTimeout
	params := cfg.ConnConfig.RuntimeParams
	params["application_name"] = o.ApplicationName
	params["timezone"] = "UTC"
	params["statement_timeout"] = millis(o.StatementTimeout)
	params["lock_timeout"] = millis(o.LockTimeout)
	params["idle_in_transaction_session_timeout"] = millis(o.IdleInTransactionTimeout)
	if role != "" {
		set := "SET ROLE " + pgx.Identifier{role}.Sanitize()
		cfg.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
			_, err := c.Exec(ctx, set)
			return err
		}
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, Translate(err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, Translate(err)
	}
	return pool, nil
}

func millis(d time.Duration) string {
	return strconv.FormatInt(max(1, d.Milliseconds()), 10)
}
