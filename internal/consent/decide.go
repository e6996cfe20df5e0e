package consent

import (
	"context"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Decision is a person's answer.
type Decision struct {
	Approve bool
	// Reason is shown in the record; at most 1,000 characters.
	Reason string
}

// Decide answers a pending consent. The first answer wins; every later one is
// fault.Conflict with the state that stands. Approving a consent of the session
// rule opens a grant for this session, user, server, tool and definition. A
// SERVICE key needs mayDecide and never decides for a destructive tool.
func (s *Service) Decide(ctx context.Context, p tenant.Principal, id string, d Decision) (Consent, error) {
	if utf8.RuneCountInString(d.Reason) > 1000 || strings.ContainsFunc(d.Reason, isControl) {
		return Consent{}, fault.Field1("reason", "must have at most 1000 characters, and of control characters only tabs and line ends")
	}
	var out Consent
	var refuse error // told to the caller, with the transaction kept
	err := s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		before, err := visible(ctx, tx, p, id)
		if err != nil {
			return err
		}
		if err := mayDecide(p, before); err != nil {
			return err
		}
		open, err := lockSession(ctx, tx, before.SessionID)
		if err != nil {
			return err
		}
		c, past, err := lock(ctx, tx, id)
		if err != nil {
			return err
		}
		switch {
		case c.State != Pending:
			refuse = alreadyDecided(c)
		case past:
			refuse = alreadyDecided(Consent{ID: id, State: Expired})
			err = s.end(ctx, tx, c, Expired, RefusedExpiry, "system", "")
		case !open:
			refuse = alreadyDecided(Consent{ID: id, State: Void})
			err = s.end(ctx, tx, c, Void, RefusedVoid, "system", "the session is closed")
		case d.Approve:
			err = s.approve(ctx, tx, p, c, d.Reason)
		default:
			err = s.deny(ctx, tx, p, c, d.Reason)
		}
		if err != nil {
			return err
		}
		out, err = read(ctx, tx, id)
		return err
	})
	if err == nil {
		err = refuse
	}
	return out, err
}

func isControl(r rune) bool { return unicode.IsControl(r) && r != '\t' && r != '\n' && r != '\r' }

func alreadyDecided(c Consent) error {
	return fault.New(fault.Conflict, "CONSENT_NOT_PENDING", "the consent is %s", c.State).
		With("consent", c.ID).With("state", string(c.State))
}

func mayDecide(p tenant.Principal, c Consent) error {
	switch p.Role {
	case tenant.RoleApprover:
		return nil
	case tenant.RoleUser:
		return nil // visible() showed that it is the user's own
	case tenant.RoleService:
		if p.MayDecide && c.Effect != "DESTRUCTIVE" {
			return nil
		}
	}
	return fault.New(fault.Denied, "MAY_NOT_DECIDE", "who proposes does not decide: this credential may not decide this consent")
}

func lockSession(ctx context.Context, tx tenant.Tx, id string) (open bool, err error) {
	err = tx.QueryRow(ctx, `SELECT state = 'OPEN' AND expire_time > clock_timestamp() FROM sessions
		WHERE tenant_id = $1 AND session_id = $2 FOR SHARE`, tx.Tenant(), id).Scan(&open)
	return open, err
}

func (s *Service) approve(ctx context.Context, tx tenant.Tx, p tenant.Principal, c Consent, reason string) error {
	if err := s.writeDecision(ctx, tx, p, c, Approved, reason); err != nil {
		return err
	}
	if c.Rule == RuleSession {
		if err := s.openGrant(ctx, tx, p, c); err != nil {
			return err
		}
	}
	tx.AfterCommit(func() { s.calls.ConsentApproved(p.Tenant, c.CallID) })
	return nil
}

// openGrant opens the grant of an approved consent of the session rule. The call
// that asked spends the consent; the grant is for those after it.
func (s *Service) openGrant(ctx context.Context, tx tenant.Tx, p tenant.Principal, c Consent) error {
	id := resource.NewID(resource.Grant)
	_, err := tx.Exec(ctx, `
		INSERT INTO grants (tenant_id, grant_id, consent_id, session_id, subject_source, subject, server_id, kind, name,
		                    definition_digest, contract_id, account_version, expire_time)
		SELECT $1, $2, $3, s.session_id, $4, $5, $6, $7, $8, $9, $10, $11, s.expire_time
		  FROM sessions s WHERE s.tenant_id = $1 AND s.session_id = $12`,
		tx.Tenant(), id, c.ID, c.Subject.Source, c.Subject.Value, c.ServerID, c.Kind, c.Name,
		c.DefinitionDigest, c.ContractID, c.AccountVersion, c.SessionID)
	if err != nil {
		return err
	}
	_, err = s.rec.Append(ctx, tx, audit.Entry{Kind: audit.GrantOpened, SessionID: c.SessionID, CallID: c.CallID, ConsentID: c.ID,
		ServerID: c.ServerID, Subject: c.Subject, Actor: p.Actor(), Time: time.Now(),
		Details: details(map[string]any{"grantId": id, "name": c.Name, "definitionDigest": c.DefinitionDigest, "contractId": c.ContractID})})
	return err
}

func (s *Service) deny(ctx context.Context, tx tenant.Tx, p tenant.Principal, c Consent, reason string) error {
	if err := s.writeDecision(ctx, tx, p, c, Denied, reason); err != nil {
		return err
	}
	return s.calls.ConsentsEnded(ctx, tx, []Ended{{ConsentID: c.ID, CallID: c.CallID, Reason: RefusedDenied, Actor: p.Actor(), Detail: reason}})
}

func (s *Service) writeDecision(ctx context.Context, tx tenant.Tx, p tenant.Principal, c Consent, st State, reason string) error {
	_, err := tx.Exec(ctx, `UPDATE consents SET state = $3, decided_by = $4, decided_how = 'API', reason = $5,
		decide_time = clock_timestamp() WHERE tenant_id = $1 AND consent_id = $2`,
		tx.Tenant(), c.ID, string(st), p.Actor(), reason)
	if err != nil {
		return err
	}
	_, err = s.rec.Append(ctx, tx, audit.Entry{Kind: audit.ConsentDecided, SessionID: c.SessionID, CallID: c.CallID, ConsentID: c.ID,
		ServerID: c.ServerID, Subject: c.Subject, Actor: p.Actor(), Time: time.Now(),
		Details: details(map[string]any{"decision": st, "how": "API", "reason": reason, "byService": p.Role == tenant.RoleService,
			"argumentsDigest": c.ArgumentsDigest, "definitionDigest": c.DefinitionDigest, "contractId": c.ContractID})})
	if err != nil {
		return err
	}
	return s.announce(ctx, tx, c, st)
}

// end closes one locked consent without a person's decision.
func (s *Service) end(ctx context.Context, tx tenant.Tx, c Consent, st State, r Refusal, actor, detail string) error {
	if err := s.setState(ctx, tx, c.ID, st); err != nil {
		return err
	}
	if err := s.recordEnd(ctx, tx, c, st, actor, detail); err != nil {
		return err
	}
	return s.calls.ConsentsEnded(ctx, tx, []Ended{{ConsentID: c.ID, CallID: c.CallID, Reason: r, Actor: actor, Detail: detail}})
}

func (s *Service) recordEnd(ctx context.Context, tx tenant.Tx, c Consent, st State, actor, detail string) error {
	kind := audit.ConsentVoided
	if st == Expired {
		kind = audit.ConsentExpired
	}
	_, err := s.rec.Append(ctx, tx, audit.Entry{Kind: kind, SessionID: c.SessionID, CallID: c.CallID, ConsentID: c.ID,
		ServerID: c.ServerID, Subject: c.Subject, Actor: actor, Time: time.Now(), Details: details(map[string]any{"reason": detail})})
	if err != nil {
		return err
	}
	return s.announce(ctx, tx, c, st)
}
