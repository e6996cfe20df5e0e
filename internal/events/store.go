package events

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// head is how far a session's events are, and up to which they were removed.
type head struct{ last, floor int64 }

func (s *Service) heads(ctx context.Context, t tenant.ID, sessions []string) (map[string]head, error) {
	out := make(map[string]head, len(sessions))
	err := s.db.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(`SELECT session_id, last, floor FROM session_event_heads WHERE tenant_id = $1 AND session_id = ANY ($2)`, t, sessions).
			Query(func(rows pgx.Rows) error {
				var id string
				var h head
				_, err := pgx.ForEachRow(rows, []any{&id, &h.last, &h.floor}, func() error { out[id] = h; return nil })
				return err
			})
	})
	return out, err
}

// page reads events after one and up to another, in order.
func (s *Service) page(ctx context.Context, t tenant.ID, session string, after, upTo int64) (out []Event, err error) {
	err = s.db.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(`SELECT n, kind, session_id, call_id, consent_id, interaction_id, state, revision, server, uri, create_time
			FROM session_events WHERE tenant_id = $1 AND session_id = $2 AND n > $3 AND n <= $4 ORDER BY n LIMIT $5`,
			t, session, after, upTo, pageSize).
			Query(func(rows pgx.Rows) (err error) {
				out, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Event, err error) {
					err = row.Scan(&e.N, &e.Kind, &e.SessionID, &e.CallID, &e.ConsentID, &e.InteractionID, &e.State, &e.Revision,
						&e.Server, &e.URI, &e.Time)
					return e, err
				})
				return err
			})
	})
	return out, err
}

// tenantPage bounds the tenants that Retain takes at a time.
const tenantPage = 500

// Retain removes the events that are too old or too many, of every tenant.
func (s *Service) Retain(ctx context.Context) error {
	var errs []error
	for after := ""; ; {
		tenants, err := s.db.Tenants(ctx, after, tenantPage)
		if err != nil {
			return err
		}
		for _, t := range tenants {
			errs = append(errs, s.retain(ctx, t))
		}
		if len(tenants) < tenantPage || ctx.Err() != nil {
			return errors.Join(errs...)
		}
		after = tenants[len(tenants)-1].String()
	}
}

// retain finds up to which event each session's are to go, and removes them with
// the mark that says so, a session at a time.
func (s *Service) retain(ctx context.Context, t tenant.ID) error {
	type cut struct {
		session string
		upTo    int64
	}
	var cuts []cut
	err := s.db.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		if _, err := tx.Exec(ctx, `DELETE FROM event_tickets WHERE tenant_id = $1 AND expire_time < clock_timestamp()`, tx.Tenant()); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `SELECT session_id, max(n) FROM (
				SELECT session_id, last - $2 AS n FROM session_event_heads WHERE tenant_id = $1 AND last - floor > $2
				UNION ALL
				SELECT session_id, n FROM session_events
				 WHERE tenant_id = $1 AND n IS NOT NULL AND create_time < clock_timestamp() - make_interval(secs => $3)
			) old GROUP BY session_id ORDER BY session_id LIMIT 1000`, tx.Tenant(), s.cfg.Kept, s.cfg.KeptFor.Seconds())
		if err != nil {
			return err
		}
		cuts, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (c cut, err error) {
			err = row.Scan(&c.session, &c.upTo)
			return c, err
		})
		return err
	})
	if err != nil {
		return err
	}
	for _, c := range cuts {
		err = errors.Join(err, s.db.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE session_event_heads SET floor = greatest(floor, $3) WHERE tenant_id = $1 AND session_id = $2`,
				tx.Tenant(), c.session, c.upTo)
			if err != nil {
				return err
			}
			_, err = tx.Exec(ctx, `DELETE FROM session_events WHERE tenant_id = $1 AND session_id = $2 AND n <= $3`, tx.Tenant(), c.session, c.upTo)
			return err
		}))
	}
	return err
}

// readTimeout bounds one reading of the database on nobody's behalf.
const readTimeout = 10 * time.Second
