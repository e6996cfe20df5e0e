package consent

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const columns = `consent_id, call_id, session_id, subject_source, subject, server_id, server_name, origin, kind, name, effect,
	rule, definition_digest, arguments_digest, contract_id, contract_revision, scopes, account_version, state,
	decided_by, decided_how, reason, create_time, expire_time, decide_time`

func (c *Consent) targets() []any {
	return []any{&c.ID, &c.CallID, &c.SessionID, &c.Subject.Source, &c.Subject.Value, &c.ServerID, &c.ServerName, &c.Origin,
		&c.Kind, &c.Name, &c.Effect, &c.Rule, &c.DefinitionDigest, &c.ArgumentsDigest, &c.ContractID, &c.ContractRevision,
		&c.Scopes, &c.AccountVersion, &c.State, &c.DecidedBy, &c.DecidedHow, &c.Reason, &c.CreateTime, &c.ExpireTime, &c.DecideTime}
}

func scan(row pgx.CollectableRow) (c Consent, err error) {
	err = row.Scan(c.targets()...)
	return c, err
}

// collect reads consents; where starts at $2, for $1 is the tenant.
func collect(ctx context.Context, tx tenant.Tx, where string, args ...any) ([]Consent, error) {
	rows, err := tx.Query(ctx, `SELECT `+columns+` FROM consents `+where, append([]any{tx.Tenant()}, args...)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scan)
}

func read(ctx context.Context, tx tenant.Tx, id string) (Consent, error) {
	cs, err := collect(ctx, tx, `WHERE tenant_id = $1 AND consent_id = $2`, id)
	if err != nil {
		return Consent{}, err
	}
	if len(cs) == 0 {
		return Consent{}, errNotFound
	}
	return cs[0], nil
}

var errNotFound = fault.New(fault.NotFound, "CONSENT_NOT_FOUND", "no such consent")

// seesOthers reports whether the role sees consents of more than one subject.
func seesOthers(r tenant.Role) bool {
	return r == tenant.RoleApprover || r == tenant.RoleAdmin || r == tenant.RoleAuditor
}

// sees is the ownership rule: approvers, admins and auditors see their tenant's
// consents, everyone else those of the subject they act for; all of them only
// what their credential's limits leave. List says the same in SQL.
func sees(p tenant.Principal, c Consent) bool {
	if !p.MayUse(c.ServerName) || !p.MayActFor(c.Subject) {
		return false
	}
	return seesOthers(p.Role) || !p.Subject.IsZero() && p.Subject == c.Subject
}

func visible(ctx context.Context, tx tenant.Tx, p tenant.Principal, id string) (Consent, error) {
	if !resource.IsID(resource.Consent, id) {
		return Consent{}, errNotFound
	}
	c, err := read(ctx, tx, id)
	if err == nil && !sees(p, c) {
		err = errNotFound
	}
	return c, err
}

// View is a consent with the arguments of its call, as they will be sent.
type View struct {
	Consent
	Arguments []byte
}

// Get returns one consent that the caller may see.
func (s *Service) Get(ctx context.Context, p tenant.Principal, id string) (v View, err error) {
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if v.Consent, err = visible(ctx, tx, p, id); err != nil {
			return err
		}
		v.Arguments, err = arguments(ctx, tx, v.CallID)
		return err
	})
	return v, err
}

func arguments(ctx context.Context, tx tenant.Tx, callID string) (raw []byte, err error) {
	err = tx.QueryRow(ctx, `SELECT arguments FROM calls WHERE tenant_id = $1 AND call_id = $2`, tx.Tenant(), callID).Scan(&raw)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return raw, err
}

// Filter narrows List. After is the id of the last one seen.
type Filter struct {
	State     State
	SessionID string
	After     string
	Limit     int
}

// List returns consents that the caller may see in the order of their ids.
func (s *Service) List(ctx context.Context, p tenant.Principal, f Filter) (vs []View, err error) {
	all := seesOthers(p.Role)
	if !all && p.Subject.IsZero() {
		return nil, nil
	}
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		rows, err := tx.Query(ctx, `SELECT `+columns+`,
			(SELECT arguments FROM calls c WHERE c.tenant_id = k.tenant_id AND c.call_id = k.call_id)
			FROM consents k WHERE tenant_id = $1 AND consent_id > $2 AND ($3 = '' OR state = $3)
			AND ($4 = '' OR session_id = $4) AND ($5 OR (subject_source = $6 AND subject = $7))
			AND (COALESCE(cardinality($9::text[]), 0) = 0 OR server_name = ANY ($9))
			AND ($10 = '' OR subject_source = $10) AND (cardinality($11::text[]) = 0 OR subject LIKE ANY ($11))
			ORDER BY consent_id LIMIT $8`, tx.Tenant(), f.After, string(f.State), f.SessionID, all,
			p.Subject.Source, p.Subject.Value, f.Limit, p.Servers, p.SubjectSpace, p.UserLikes())
		if err != nil {
			return err
		}
		vs, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (v View, err error) {
			err = row.Scan(append(v.targets(), &v.Arguments)...)
			return v, err
		})
		return err
	})
	return vs, err
}
