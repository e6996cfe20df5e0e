package consent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Admit finds what lets a call run, inside the admitting transaction: a use of a
// matching grant is reserved, else a consent is opened. Only the session rule
// looks for grants.
func (s *Service) Admit(ctx context.Context, tx tenant.Tx, r Request) (Admission, error) {
	if r.Rule == RuleSession {
		id, err := s.reserve(ctx, tx, r.Binding)
		if err != nil || id != "" {
			return Admission{GrantID: id}, err
		}
	}
	id := resource.NewID(resource.Consent)
	var expire time.Time
	// The database's clock decides expiry everywhere; replicas' clocks differ.
	err := tx.QueryRow(ctx, `
		INSERT INTO consents (tenant_id, consent_id, call_id, session_id, subject_source, subject, server_id, server_name,
		                      origin, kind, name, effect, rule, definition_digest, arguments_digest, contract_id,
		                      contract_revision, scopes, account_version, expire_time)
		SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19,
		       LEAST(s.expire_time, now() + $20::interval)
		  FROM sessions s WHERE s.tenant_id = $1 AND s.session_id = $4
		RETURNING expire_time`,
		tx.Tenant(), id, r.CallID, r.SessionID, r.Subject.Source, r.Subject.Value, r.ServerID, r.ServerName,
		r.Origin, r.Kind, r.Name, r.Effect, string(r.Rule), r.DefinitionDigest, r.ArgumentsDigest, r.ContractID,
		r.ContractRevision, scopes(r.Scopes), r.AccountVersion, r.TTL).Scan(&expire)
	if err != nil {
		return Admission{}, fmt.Errorf("open consent: %w", err)
	}
	_, err = s.rec.Append(ctx, tx, audit.Entry{Kind: audit.ConsentRequested, SessionID: r.SessionID, CallID: r.CallID,
		ConsentID: id, ServerID: r.ServerID, Subject: r.Subject, Actor: r.Actor, Time: time.Now(),
		Details: details(map[string]any{"rule": r.Rule, "effect": r.Effect, "name": r.Name, "argumentsDigest": r.ArgumentsDigest,
			"definitionDigest": r.DefinitionDigest, "contractId": r.ContractID})})
	if err == nil {
		err = s.announce(ctx, tx, Consent{Binding: r.Binding, ID: id, CallID: r.CallID, Effect: r.Effect, ExpireTime: expire.UTC()}, Pending)
	}
	return Admission{ConsentID: id, ExpireTime: expire}, err
}

func (s *Service) reserve(ctx context.Context, tx tenant.Tx, b Binding) (string, error) {
	var id string
	err := tx.QueryRow(ctx, `
		UPDATE grants SET uses_reserved = uses_reserved + 1
		 WHERE tenant_id = $1 AND grant_id = (
		       SELECT grant_id FROM grants
		        WHERE tenant_id = $1 AND session_id = $2 AND subject_source = $3 AND subject = $4 AND server_id = $5
		          AND kind = $6 AND name = $7 AND definition_digest = $8 AND contract_id = $9 AND account_version = $10
		          AND state = 'ACTIVE' AND expire_time > now()
		          AND (uses_limit IS NULL OR uses_reserved + uses_spent < uses_limit)
		        ORDER BY grant_id LIMIT 1 FOR UPDATE)
		RETURNING grant_id`,
		tx.Tenant(), b.SessionID, b.Subject.Source, b.Subject.Value, b.ServerID, b.Kind, b.Name,
		b.DefinitionDigest, b.ContractID, b.AccountVersion).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	return id, err
}

// Covers reports whether a grant would cover the call, without reserving it; for
// decisions and dry runs. Admission looks again.
func (s *Service) Covers(ctx context.Context, t tenant.ID, b Binding) (covered bool, err error) {
	err = s.db.Read(ctx, t, func(batch *pgx.Batch) {
		batch.Queue(`SELECT EXISTS (SELECT 1 FROM grants
		  WHERE tenant_id = $1 AND session_id = $2 AND subject_source = $3 AND subject = $4 AND server_id = $5
		    AND kind = $6 AND name = $7 AND definition_digest = $8 AND contract_id = $9 AND account_version = $10
		    AND state = 'ACTIVE' AND expire_time > now()
		    AND (uses_limit IS NULL OR uses_reserved + uses_spent < uses_limit))`,
			t, b.SessionID, b.Subject.Source, b.Subject.Value, b.ServerID, b.Kind, b.Name,
			b.DefinitionDigest, b.ContractID, b.AccountVersion).QueryRow(func(row pgx.Row) error { return row.Scan(&covered) })
	})
	return covered, err
}

// Consume uses a consent up for its call, inside the dispatch transaction. It
// locks the row, and looks at state, expiry by the database's clock, and every
// member of the binding. A refusal changes nothing but an expiry, which it
// writes down.
func (s *Service) Consume(ctx context.Context, tx tenant.Tx, id, callID string, b Binding) (Refusal, error) {
	c, past, err := lock(ctx, tx, id)
	if err != nil {
		return NotRefused, err
	}
	if r := c.refusal(callID, b); r != NotRefused {
		return r, nil
	}
	if past {
		if err := s.setState(ctx, tx, id, Expired); err != nil {
			return NotRefused, err
		}
		return RefusedExpiry, s.recordEnd(ctx, tx, c, Expired, "system", "it was not used in time")
	}
	return NotRefused, s.setState(ctx, tx, id, Consumed)
}

// Recheck looks at a consent that its call consumed in an earlier attempt: all
// checks again but its expiry.
func (s *Service) Recheck(ctx context.Context, tx tenant.Tx, id, callID string, b Binding) (Refusal, error) {
	c, _, err := lock(ctx, tx, id)
	if err != nil {
		return NotRefused, err
	}
	if c.State == Consumed && c.CallID == callID && c.same(b) {
		return NotRefused, nil
	}
	return RefusedVoid, nil
}

func (c Consent) refusal(callID string, b Binding) Refusal {
	switch c.State {
	case Approved:
	case Pending:
		return RefusedWaiting
	case Denied:
		return RefusedDenied
	case Expired:
		return RefusedExpiry
	default:
		return RefusedVoid
	}
	if c.CallID != callID || !c.same(b) {
		return RefusedVoid
	}
	return NotRefused
}

func (c Consent) same(b Binding) bool {
	x := c.Binding
	return x.SessionID == b.SessionID && x.Subject == b.Subject && x.ServerID == b.ServerID && x.Origin == b.Origin &&
		x.Kind == b.Kind && x.Name == b.Name && x.DefinitionDigest == b.DefinitionDigest &&
		x.ArgumentsDigest == b.ArgumentsDigest && x.ContractID == b.ContractID && x.AccountVersion == b.AccountVersion &&
		slices.Equal(scopes(x.Scopes), scopes(b.Scopes))
}

// lock reads a consent for update and tells whether its time has passed.
func lock(ctx context.Context, tx tenant.Tx, id string) (Consent, bool, error) {
	var past bool
	err := tx.QueryRow(ctx, `SELECT expire_time <= clock_timestamp() FROM consents
		WHERE tenant_id = $1 AND consent_id = $2 FOR UPDATE`, tx.Tenant(), id).Scan(&past)
	if err != nil {
		return Consent{}, false, err
	}
	c, err := read(ctx, tx, id)
	return c, past, err
}

func (s *Service) setState(ctx context.Context, tx tenant.Tx, id string, st State) error {
	_, err := tx.Exec(ctx, `UPDATE consents SET state = $3 WHERE tenant_id = $1 AND consent_id = $2`, tx.Tenant(), id, string(st))
	return err
}

// Spend turns a reserved use of a grant into a spent one, inside the dispatch
// transaction.
func (s *Service) Spend(ctx context.Context, tx tenant.Tx, grantID string, b Binding) (Refusal, error) {
	var live, same bool
	err := tx.QueryRow(ctx, `
		SELECT state = 'ACTIVE' AND expire_time > clock_timestamp() AND uses_reserved > 0,
		       session_id = $3 AND subject_source = $4 AND subject = $5 AND server_id = $6 AND kind = $7 AND name = $8
		       AND definition_digest = $9 AND contract_id = $10 AND account_version = $11
		  FROM grants WHERE tenant_id = $1 AND grant_id = $2 FOR UPDATE`,
		tx.Tenant(), grantID, b.SessionID, b.Subject.Source, b.Subject.Value, b.ServerID, b.Kind, b.Name,
		b.DefinitionDigest, b.ContractID, b.AccountVersion).Scan(&live, &same)
	if err != nil {
		return NotRefused, err
	}
	if !live || !same {
		return RefusedVoid, nil
	}
	_, err = tx.Exec(ctx, `UPDATE grants SET uses_reserved = uses_reserved - 1, uses_spent = uses_spent + 1
		WHERE tenant_id = $1 AND grant_id = $2`, tx.Tenant(), grantID)
	return NotRefused, err
}

// RecheckGrant looks at a grant whose use this call has already spent.
func (s *Service) RecheckGrant(ctx context.Context, tx tenant.Tx, grantID string) (Refusal, error) {
	var live bool
	err := tx.QueryRow(ctx, `SELECT state = 'ACTIVE' FROM grants
		WHERE tenant_id = $1 AND grant_id = $2 FOR UPDATE`, tx.Tenant(), grantID).Scan(&live)
	if err != nil || live {
		return NotRefused, err
	}
	return RefusedVoid, nil
}

// LockGrant takes the grant's lock, for who locks a call and then gives a use back.
func (s *Service) LockGrant(ctx context.Context, tx tenant.Tx, grantID string) error {
	_, err := tx.Exec(ctx, `SELECT FROM grants WHERE tenant_id = $1 AND grant_id = $2 FOR UPDATE`, tx.Tenant(), grantID)
	return err
}

// Unspend gives a spent use back, for a call that is known not to have been sent.
func (s *Service) Unspend(ctx context.Context, tx tenant.Tx, grantID string) error {
	_, err := tx.Exec(ctx, `UPDATE grants SET uses_spent = uses_spent - 1
		WHERE tenant_id = $1 AND grant_id = $2 AND uses_spent > 0`, tx.Tenant(), grantID)
	return err
}

func scopes(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func details(m map[string]any) []byte {
	raw, err := json.Marshal(m)
	if err != nil {
		panic(fmt.Sprintf("consent: details cannot be encoded: %v", err))
	}
	return raw
}
