package postgres

import (
	"context"
	"database/sql"
	"io/fs"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// lockPollSeconds and lockAttempts bound the wait for another replica that
// migrates: one try a second for five minutes.
const (
	lockPollSeconds = 1
	lockAttempts    = 300
)

// Migrate applies the goose files of files that the database at url has not
// seen, in order and forward only, and then the migrations of the job queue. Any number of replicas may call it at once:
// a session advisory lock lets one work while the others wait. The address
// must be that of the owner of the tables.
func Migrate(ctx context.Context, url string, files fs.FS, log *slog.Logger) error {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return fault.Field1("migrationDatabaseUrl", "is not a PostgreSQL address")
	}
	cfg.RuntimeParams["application_name"] = "bulkhead-migrate"
	cfg.RuntimeParams["timezone"] = "UTC"
	// A rebuild of a large table must not end by a timeout meant for requests.
	cfg.RuntimeParams["statement_timeout"] = "0"
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	if err := db.PingContext(ctx); err != nil {
		return Translate(err)
	}
	return migrate(ctx, url, db, files, log)
}

func migrate(ctx context.Context, url string, db *sql.DB, files fs.FS, log *slog.Logger) error {
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(lockPollSeconds, lockAttempts))
	if err != nil {
		return fault.Wrap(err, "migration lock")
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithSessionLocker(locker), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fault.Wrap(err, "read migrations")
	}
	results, err := p.Up(ctx)
	for _, r := range results {
		if r.Error == nil {
			log.InfoContext(ctx, "migration applied", "version", r.Source.Version, "duration", r.Duration)
		}
	}
	if err != nil {
		return fault.Wrap(err, "apply migrations")
	}
	return migrateQueue(ctx, url, db, log)
}
