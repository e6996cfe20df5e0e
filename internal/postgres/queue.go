package postgres

import (
	"context"
	"database/sql"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
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
// built in, where the schema for them exists. It takes the lock of the other
// migrations.
func migrateQueue(ctx context.Context, db *sql.DB, log *slog.Logger) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return Translate(err)
	}
	defer conn.Close() //nolint:errcheck // the caller closes the pool behind it
	return conn.Raw(func(c any) error { return migrateQueueOn(ctx, c.(*stdlib.Conn).Conn(), log) })
}

func migrateQueueOn(ctx context.Context, conn *pgx.Conn, log *slog.Logger) error {
	var exists bool
	if err := conn.QueryRow(ctx, `SELECT to_regnamespace($1) IS NOT NULL`, QueueSchema).Scan(&exists); err != nil || !exists {
		return Translate(err)
	}
	// The lock ends with the session, which ends with this function's caller.
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock($1)`, lock.DefaultLockID); err != nil {
		return Translate(err)
	}
	m, err := rivermigrate.New(riverpgxv5.New(nil), &rivermigrate.Config{Schema: QueueSchema, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return fault.Wrap(err, "read the queue's migrations")
	}
	// One after the other: a word that one adds to an enum counts for the next only
	// once it is committed.
	for more := true; more; {
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			done, err := m.MigrateTx(ctx, tx, rivermigrate.DirectionUp, &rivermigrate.MigrateOpts{MaxSteps: 1})
			if err != nil {
				return err
			}
			more = len(done.Versions) > 0
			for _, v := range done.Versions {
				log.InfoContext(ctx, "queue migration applied", "version", v.Version, "duration", v.Duration)
			}
			return nil
		})
		if err != nil {
			return fault.Wrap(err, "apply the queue's migrations")
		}
	}
	_, err = conn.Exec(ctx, queueGrants)
	return fault.Wrap(err, "grant the queue")
}
