package postgres

import (
	"context"
	"database/sql"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3/lock"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// QueueSchema holds the tables of the job queue. The product's migrations make
// it, the queue's own fill it.
const QueueSchema = "river"

// queueGrants say who may do what with the queue. Jobs name their tenant in their
// arguments: who works for one tenant adds and sees that tenant's jobs alone.
// Policies are made once, for that locks the table.
const queueGrants = `
DO $$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_policies WHERE schemaname = 'river' AND policyname = 'system_jobs') THEN
    ALTER TABLE river.river_job ENABLE ROW LEVEL SECURITY;
    CREATE POLICY tenant_isolation ON river.river_job TO bulkhead_app
      USING (args ->> 'tenant' = (SELECT current_tenant())) WITH CHECK (args ->> 'tenant' = (SELECT current_tenant()));
    CREATE POLICY system_jobs ON river.river_job TO bulkhead_system USING (true) WITH CHECK (true);
  END IF;
END $$;
GRANT SELECT, INSERT, UPDATE (kind) ON river.river_job TO bulkhead_app;
GRANT USAGE ON SEQUENCE river.river_job_id_seq TO bulkhead_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON river.river_job, river.river_leader, river.river_notification, river.river_queue TO bulkhead_system;
GRANT SELECT ON river.river_migration TO bulkhead_system;
GRANT USAGE ON ALL SEQUENCES IN SCHEMA river TO bulkhead_system`

// migrateQueue brings the queue's tables to the version of the library that is
// built in, where the schema for them exists. It holds the lock of the other
// migrations meanwhile, in a session of its own.
func migrateQueue(ctx context.Context, url string, db *sql.DB, log *slog.Logger) error {
	var exists bool
	if err := db.QueryRowContext(ctx, `SELECT to_regnamespace($1) IS NOT NULL`, QueueSchema).Scan(&exists); err != nil || !exists {
		return Translate(err)
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		return Translate(err)
	}
	defer conn.Close() //nolint:errcheck // the caller closes the pool behind it
	// The lock ends with the session, when the caller closes the pool.
	if _, err := conn.ExecContext(ctx, `SELECT pg_advisory_lock($1)`, lock.DefaultLockID); err != nil {
		return Translate(err)
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return fault.Field1("migrationDatabaseUrl", "is not a PostgreSQL address")
	}
	cfg.MaxConns = 1
	cfg.ConnConfig.RuntimeParams["application_name"] = "bulkhead-migrate"
	cfg.ConnConfig.RuntimeParams["statement_timeout"] = "0"
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return Translate(err)
	}
	defer pool.Close()
	m, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: QueueSchema, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return fault.Wrap(err, "read the queue's migrations")
	}
	done, err := m.Migrate(ctx, rivermigrate.DirectionUp, nil)
	if err != nil {
		return fault.Wrap(err, "apply the queue's migrations")
	}
	for _, v := range done.Versions {
		log.InfoContext(ctx, "queue migration applied", "version", v.Version, "duration", v.Duration)
	}
	_, err = pool.Exec(ctx, queueGrants)
	return fault.Wrap(err, "grant the queue")
}
