package tenant

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
)

// The database roles; migrations create both without login.
const (
	AppRole    = "bulkhead_app"
	SystemRole = "bulkhead_system"
)

const setTenant = `SELECT set_config('app.tenant_id', $1, true)`

// DB is the database as tenants see it. App connections act as AppRole and see
// one tenant at a time; system connections act as SystemRole and only find work.
type DB struct {
	app    *pgxpool.Pool
	system *pgxpool.Pool
}

// NewDB takes one pool for each role. Both are the caller's to close.
func NewDB(app, system *pgxpool.Pool) (*DB, error) {
	if app == nil || system == nil {
		return nil, errors.New("tenant: both pools are needed")
	}
	return &DB{app: app, system: system}, nil
}

// Tx is a transaction of one tenant. Only DB makes it, and every table it can
// reach shows that tenant's rows alone.
type Tx struct {
	tx     pgx.Tx
	tenant ID
	after  *[]func()
}

// Tenant returns the tenant of the transaction.
func (t Tx) Tenant() ID { return t.tenant }

// AfterCommit runs fn once the transaction has committed, on the goroutine that
// ran it; it never runs when the transaction fails. For signals, which must not
// speak of what may be undone.
func (t Tx) AfterCommit(fn func()) { *t.after = append(*t.after, fn) }

// Exec runs one statement.
func (t Tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	tag, err := t.tx.Exec(ctx, sql, args...)
	return tag, postgres.Translate(err)
}

// Query runs one query; the caller closes the rows.
func (t Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := t.tx.Query(ctx, sql, args...)
	return rows, postgres.Translate(err)
}

// QueryRow runs a query of at most one row. Its Scan returns pgx.ErrNoRows when
// there is none, and other errors as the driver gives them.
func (t Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return t.tx.QueryRow(ctx, sql, args...)
}

// SendBatch sends several statements in one round trip; the caller closes it.
func (t Tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return t.tx.SendBatch(ctx, b)
}

// Bare returns the driver's transaction, for the job queue, whose library adds jobs
// to a transaction of its caller and neither commits nor rolls back.
func (t Tx) Bare() pgx.Tx { return t.tx }

// Savepoint runs fn under a savepoint: its error undoes fn's statements only.
func (t Tx) Savepoint(ctx context.Context, fn func(Tx) error) error {
	sp, err := t.tx.Begin(ctx)
	if err != nil {
		return postgres.Translate(err)
	}
	if err := fn(Tx{tx: sp, tenant: t.tenant, after: t.after}); err != nil {
		if rerr := sp.Rollback(ctx); rerr != nil {
			return errors.Join(err, rerr)
		}
		return err
	}
	return postgres.Translate(sp.Commit(ctx))
}

// InTx runs fn in a transaction of one tenant and commits unless fn fails or
// panics. A serialization failure or a deadlock comes back as fault.Conflict;
// fn must have no effects outside the transaction if the caller retries.
func (d *DB) InTx(ctx context.Context, t ID, fn func(ctx context.Context, tx Tx) error) error {
	if t.IsZero() {
		return errors.New("tenant: a transaction without a tenant")
	}
	conn, err := d.app.Acquire(ctx)
	if err != nil {
		return postgres.Translate(err)
	}
	defer conn.Release()
	begin, err := beginAs(t)
	if err != nil {
		return err
	}
	var after []func()
	err = inTx(ctx, conn, begin, func(tx pgx.Tx) error { return fn(ctx, Tx{tx: tx, tenant: t, after: &after}) })
	if err != nil {
		return err
	}
	for _, f := range after {
		f()
	}
	return nil
}

// beginAs opens a transaction and names its tenant in one round trip. The simple
// protocol takes no arguments, so the id must have the form that we mint.
func beginAs(t ID) (pgx.TxOptions, error) {
	if !resource.IsID(resource.Tenant, t.value) {
		return pgx.TxOptions{}, errors.New("tenant: malformed id")
	}
	return pgx.TxOptions{BeginQuery: "BEGIN; SELECT set_config('app.tenant_id', '" + t.value + "', true)"}, nil
}

// System runs fn in a transaction of the system role, which crosses tenants: it
// can list names and states of work, create tenants and keep replicas' records,
// and nothing else.
func (d *DB) System(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	conn, err := d.system.Acquire(ctx)
	if err != nil {
		return postgres.Translate(err)
	}
	defer conn.Release()
	return inTx(ctx, conn, pgx.TxOptions{}, func(tx pgx.Tx) error { return fn(ctx, tx) })
}

func inTx(ctx context.Context, conn *pgxpool.Conn, opts pgx.TxOptions, fn func(pgx.Tx) error) (err error) {
	tx, err := conn.BeginTx(ctx, opts)
	if err != nil {
		return postgres.Translate(err)
	}
	done := false
	defer func() {
		if done {
			return
		}
		// A rollback must happen although the caller's context may be over.
		if rerr := tx.Rollback(context.WithoutCancel(ctx)); rerr != nil && !errors.Is(rerr, pgx.ErrTxClosed) {
			err = errors.Join(err, rerr)
		}
	}()
	if err := fn(tx); err != nil {
		return postgres.Translate(err)
	}
	if err := tx.Commit(ctx); err != nil {
		return postgres.Translate(err)
	}
	done = true
	return nil
}

// Read runs the queries that fn queues for one tenant in a single round trip,
// as one implicit transaction. Results are taken by the queued queries'
// callbacks, in order; the first error ends it. A callback that finds no row
// returns its own error.
func (d *DB) Read(ctx context.Context, t ID, fn func(b *pgx.Batch)) error {
	return d.batch(ctx, t, fn)
}

// Write runs the statements that fn queues for one tenant in a single round
// trip, as one implicit transaction: all of them count, or none. They are
// committed before a result is read, so that no callback can undo them; what
// must not be written has to make one of the statements fail.
func (d *DB) Write(ctx context.Context, t ID, fn func(b *pgx.Batch)) error {
	return d.batch(ctx, t, fn)
}

func (d *DB) batch(ctx context.Context, t ID, fn func(b *pgx.Batch)) error {
	if t.IsZero() {
		return errors.New("tenant: a batch without a tenant")
	}
	b := &pgx.Batch{}
	b.Queue(setTenant, t.value)
	fn(b)
	if err := d.app.SendBatch(ctx, b).Close(); err != nil {
		return postgres.Translate(err)
	}
	return nil
}

// Tenants returns the ids of tenants after the given one in id order, at most
// limit; for loops of the system that visit each tenant.
func (d *DB) Tenants(ctx context.Context, after string, limit int) ([]ID, error) {
	var ids []ID
	err := d.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT tenant_id FROM tenants WHERE tenant_id > $1 ORDER BY tenant_id LIMIT $2`, after, limit)
		if err != nil {
			return err
		}
		ids, err = pgx.CollectRows(rows, pgx.RowTo[ID])
		return err
	})
	return ids, err
}

// RememberCreate records the requestId of a create in the creating transaction.
// It returns the id of the resource that an earlier request with the same body
// made, or "" when this one is the first; another body is fault.Exists. An empty
// requestID is never remembered.
func RememberCreate(ctx context.Context, tx Tx, kind, actor, requestID, bodyDigest, resourceID string) (string, error) {
	if requestID == "" {
		return "", nil
	}
	tag, err := tx.Exec(ctx, `
		INSERT INTO create_requests (tenant_id, kind, actor, request_id, body_digest, resource_id)
		VALUES ($1, $2, $3, $4, $5, $6)
		ON CONFLICT DO NOTHING`, tx.tenant, kind, actor, requestID, bodyDigest, resourceID)
	if err != nil {
		return "", err
	}
	if tag.RowsAffected() == 1 {
		return "", nil
	}
	var digest, existing string
	err = tx.QueryRow(ctx, `
		SELECT body_digest, resource_id FROM create_requests
		 WHERE tenant_id = $1 AND kind = $2 AND actor = $3 AND request_id = $4`,
		tx.tenant, kind, actor, requestID).Scan(&digest, &existing)
	if err != nil {
		return "", fmt.Errorf("read create request: %w", err)
	}
	if digest != bodyDigest {
		return "", fault.New(fault.Exists, "REQUEST_ID_REUSED", "requestId was used for another request").With("resource", existing)
	}
	return existing, nil
}
