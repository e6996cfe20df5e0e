package consent

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Writers that void run in the transaction of what they follow, after it has
// locked the tenant, session, server or definition in question (design 3.2):
// grants and consents come next, calls last.

// VoidServer voids everything that stands for a server: its registration, its
// contract or its existence changed. keepContract, when not empty, spares what
// was agreed under that very contract.
func (s *Service) VoidServer(ctx context.Context, tx tenant.Tx, serverID, keepContract, reason string) error {
	return s.void(ctx, tx, reason, `server_id = $2 AND ($3 = '' OR contract_id <> $3)`, serverID, keepContract)
}

// VoidDefinition voids what stands for one definition, for one subject or, when
// subject is nil, for all.
func (s *Service) VoidDefinition(ctx context.Context, tx tenant.Tx, serverID string, subject *tenant.Subject, kind, name, digest, reason string) error {
	if subject == nil {
		return s.void(ctx, tx, reason, `server_id = $2 AND kind = $3 AND name = $4 AND definition_digest = $5`,
			serverID, kind, name, digest)
	}
	return s.void(ctx, tx, reason, `server_id = $2 AND kind = $3 AND name = $4 AND definition_digest = $5
		AND subject_source = $6 AND subject = $7`, serverID, kind, name, digest, subject.Source, subject.Value)
}

// VoidSession voids what stands for a session that closes.
func (s *Service) VoidSession(ctx context.Context, tx tenant.Tx, sessionID, reason string) error {
	return s.void(ctx, tx, reason, `session_id = $2`, sessionID)
}

// VoidCall voids the open consent of one call without ending the call, whose
// canceller writes its state; it is the first lock of a cancel.
func (s *Service) VoidCall(ctx context.Context, tx tenant.Tx, callID, actor, reason string) error {
	cs, err := collect(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2 AND state IN ('PENDING', 'APPROVED') FOR UPDATE`, callID)
	if err != nil || len(cs) == 0 {
		return err
	}
	if err := s.setState(ctx, tx, cs[0].ID, Void); err != nil {
		return err
	}
	return s.recordEnd(ctx, tx, cs[0], Void, actor, reason)
}

func (s *Service) void(ctx context.Context, tx tenant.Tx, reason, where string, args ...any) error {
	// One list of a server may void many definitions, each with its grants, its
	// consents and their calls; voiders of a tenant go one after the other, or two
	// of them could wait for each other.
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended('void:' || $1, 0))`, tx.Tenant().String()); err != nil {
		return err
	}
	if err := s.voidGrants(ctx, tx, reason, where, args); err != nil {
		return err
	}
	// ORDER BY gives all who lock consents one order.
	cs, err := collect(ctx, tx, `WHERE tenant_id = $1 AND state IN ('PENDING', 'APPROVED') AND `+where+
		` ORDER BY consent_id FOR UPDATE`, args...)
	if err != nil {
		return err
	}
	for _, c := range cs {
		if err := s.end(ctx, tx, c, Void, RefusedVoid, "system", reason); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) voidGrants(ctx context.Context, tx tenant.Tx, reason, where string, args []any) error {
	rows, err := tx.Query(ctx, `SELECT grant_id, session_id, consent_id, server_id, subject_source, subject FROM grants
		WHERE tenant_id = $1 AND state = 'ACTIVE' AND `+where+` ORDER BY grant_id FOR UPDATE`, append([]any{tx.Tenant()}, args...)...)
	if err != nil {
		return err
	}
	var ids []string
	var entries []audit.Entry
	var id string
	var e audit.Entry
	_, err = pgx.ForEachRow(rows, []any{&id, &e.SessionID, &e.ConsentID, &e.ServerID, &e.Subject.Source, &e.Subject.Value}, func() error {
		e.Kind, e.Actor, e.Time = audit.GrantEnded, "system", time.Now()
		e.Details = details(map[string]any{"grantId": id, "state": Void, "reason": reason})
		ids, entries = append(ids, id), append(entries, e)
		return nil
	})
	if err != nil || len(ids) == 0 {
		return err
	}
	_, err = tx.Exec(ctx, `UPDATE grants SET state = 'VOID', end_time = clock_timestamp()
		WHERE tenant_id = $1 AND grant_id = ANY ($2)`, tx.Tenant(), ids)
	for i := 0; err == nil && i < len(entries); i++ {
		_, err = s.rec.Append(ctx, tx, entries[i])
	}
	return err
}

// expireBatch bounds one round of the expiry job; the next round takes the rest.
const expireBatch = 200

// Expire ends consents whose time has passed, in every tenant; any replica may
// run it at any time, and each consent is ended once. It returns how many.
func (s *Service) Expire(ctx context.Context) (int, error) {
	type due struct {
		tenant tenant.ID
		id     string
	}
	var found []due
	err := s.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT tenant_id, consent_id FROM consents
			WHERE state IN ('PENDING', 'APPROVED') AND expire_time <= now() ORDER BY random() LIMIT $1`, expireBatch)
		if err != nil {
			return err
		}
		var d due
		_, err = pgx.ForEachRow(rows, []any{&d.tenant, &d.id}, func() error { found = append(found, d); return nil })
		return err
	})
	if err != nil {
		return 0, err
	}
	n := 0
	var failed error // one that cannot be ended must not keep the others
	for _, d := range found {
		ended := false
		err := s.db.InTx(ctx, d.tenant, func(ctx context.Context, tx tenant.Tx) error {
			c, past, err := lock(ctx, tx, d.id)
			if err != nil || !past || !slices.Contains([]State{Pending, Approved}, c.State) {
				return err
			}
			ended = true
			return s.end(ctx, tx, c, Expired, RefusedExpiry, "system", "nobody used it in time")
		})
		if err == nil && ended {
			n++
		}
		failed = errors.Join(failed, err)
		if ctx.Err() != nil {
			break
		}
	}
	return n, failed
}
