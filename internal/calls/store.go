package calls

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const columns = `call_id, session_id, key_id, subject_source, subject, server_id, server_name, origin, kind, name,
	request_id, request_digest, arguments, arguments_digest, state, reason, revision, decision, contract_id,
	contract_revision, catalog_revision, catalog_context, definition_digest, definition_observed, effect, consent_rule,
	consent_id, grant_id, attempt, replica_epoch, send_by, ceiling_time, cancel_requested, idempotency_key, result, error,
	side_effect_id, findings, receipt, negotiation_us, discovery_us, decision_us, execution_us,
	create_time, update_time, finish_time, trace_parent, trace_state`

const insertSQL = `INSERT INTO calls (tenant_id, ` + columns + `)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24,
	        $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36, $37, $38, $39, $40, $41, $42, $43, $44, $45, $46, $47, $48, $49)
	ON CONFLICT DO NOTHING`

func insertArgs(c *Call) ([]any, error) {
	decision, err := json.Marshal(c.Decision)
	if err != nil {
		return nil, fmt.Errorf("encode decision: %w", err)
	}
	failure, err := encodeError(c.Error)
	if err != nil {
		return nil, err
	}
	findings := c.Findings
	if findings == nil {
		findings = []string{}
	}
	return []any{c.Tenant, c.ID, c.SessionID, c.KeyID, c.Subject.Source, c.Subject.Value, c.ServerID, c.ServerName, c.Origin,
		c.Kind, c.Name, c.RequestID, c.requestDigest, c.Arguments, c.ArgumentsDigest, string(c.State), string(c.Reason),
		c.Revision, decision, c.ContractID, c.ContractRevision, c.CatalogRevision, c.CatalogContext, c.DefinitionDigest,
		c.DefinitionObserved, string(c.Effect), string(c.ConsentRule), c.ConsentID, c.GrantID, c.Attempt, c.Epoch, c.SendBy,
		c.Ceiling, c.CancelRequested, c.IdempotencyKey, c.Result, failure, c.SideEffectID, findings, c.Receipt,
		c.Timings.Negotiation.Microseconds(), c.Timings.Discovery.Microseconds(), c.Timings.Decision.Microseconds(),
		c.Timings.Execution.Microseconds(), c.CreateTime, c.UpdateTime, c.FinishTime, c.Trace.Parent(), c.Trace.State()}, nil
}

func encodeError(e *Error) ([]byte, error) {
	if e == nil {
		return nil, nil
	}
	raw, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode error: %w", err)
	}
	return raw, nil
}

// errRepeated undoes an insertion whose request id another call already has.
var errRepeated = errors.New("calls: the request id is taken")

func (s *Service) insert(ctx context.Context, tx tenant.Tx, c *Call) error {
	args, err := insertArgs(c)
	if err != nil {
		return err
	}
	tag, err := tx.Exec(ctx, insertSQL, args...)
	if err != nil {
		return err
	}
	if tag.RowsAffected() == 0 {
		return errRepeated
	}
	tx.AfterCommit(func() { s.recorded(tx.Tenant()) })
	return nil
}

func scan(row pgx.CollectableRow) (*Call, error) {
	c := &Call{Recorded: true}
	var decision, failure, noticed []byte
	var negotiation, discovery, deciding, execution int64
	var traceParent, traceState string
	err := row.Scan(&c.Tenant, &c.ID, &c.SessionID, &c.KeyID, &c.Subject.Source, &c.Subject.Value, &c.ServerID, &c.ServerName,
		&c.Origin, &c.Kind, &c.Name, &c.RequestID, &c.requestDigest, &c.Arguments, &c.ArgumentsDigest, &c.State, &c.Reason,
		&c.Revision, &decision, &c.ContractID, &c.ContractRevision, &c.CatalogRevision, &c.CatalogContext,
		&c.DefinitionDigest, &c.DefinitionObserved, &c.Effect, &c.ConsentRule, &c.ConsentID, &c.GrantID, &c.Attempt,
		&c.Epoch, &c.SendBy, &c.Ceiling, &c.CancelRequested, &c.IdempotencyKey, &c.Result, &failure, &c.SideEffectID,
		&c.Findings, &c.Receipt, &negotiation, &discovery, &deciding, &execution, &c.CreateTime, &c.UpdateTime, &c.FinishTime,
		&traceParent, &traceState, &c.ConsentExpire, &noticed)
	if err != nil {
		return nil, err
	}
	c.Trace = telemetry.TraceOf(traceParent, traceState)
	c.takeNotices(noticed)
	c.Timings = Timings{Negotiation: micros(negotiation), Discovery: micros(discovery), Decision: micros(deciding), Execution: micros(execution)}
	if err := json.Unmarshal(decision, &c.Decision); err != nil {
		return nil, fmt.Errorf("stored decision of %s: %w", c.ID, err)
	}
	if failure != nil {
		c.Error = &Error{}
		if err := json.Unmarshal(failure, c.Error); err != nil {
			return nil, fmt.Errorf("stored error of %s: %w", c.ID, err)
		}
	}
	return c, nil
}

func micros(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

const selectSQL = `SELECT tenant_id, ` + columns + `,
	(SELECT expire_time FROM consents k WHERE k.tenant_id = calls.tenant_id AND k.consent_id = calls.consent_id),
	(SELECT notices FROM call_notices n WHERE n.tenant_id = calls.tenant_id AND n.call_id = calls.call_id) FROM calls `

var errCallNotFound = fault.New(fault.NotFound, "CALL_NOT_FOUND", "no such call")

// one reads a call with its attempts; where starts at $2, for $1 is the tenant.
func one(ctx context.Context, tx tenant.Tx, where string, args ...any) (*Call, error) {
	rows, err := tx.Query(ctx, selectSQL+where, append([]any{tx.Tenant()}, args...)...)
	if err != nil {
		return nil, err
	}
	c, err := pgx.CollectExactlyOneRow(rows, scan)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errCallNotFound
	}
	if err != nil {
		return nil, err
	}
	rows, err = tx.Query(ctx, `SELECT attempt, replica_epoch, phase, outcome, detail, send_by, start_time, end_time,
		evidence_time IS NOT NULL FROM attempts WHERE tenant_id = $1 AND call_id = $2 ORDER BY attempt`, tx.Tenant(), c.ID)
	if err != nil {
		return nil, err
	}
	c.Attempts, err = pgx.CollectRows(rows, scanAttempt)
	return c, err
}

func scanAttempt(row pgx.CollectableRow) (a Attempt, err error) {
	err = row.Scan(&a.Number, &a.Epoch, &a.Phase, &a.Outcome, &a.Detail, &a.SendBy, &a.StartTime, &a.EndTime, &a.Evidence)
	return a, err
}

func byID(ctx context.Context, tx tenant.Tx, id string) (*Call, error) {
	return one(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2`, id)
}

func byRequest(ctx context.Context, tx tenant.Tx, s tenant.Subject, requestID string) (*Call, error) {
	return one(ctx, tx, `WHERE tenant_id = $1 AND subject_source = $2 AND subject = $3 AND request_id = $4`, s.Source, s.Value, requestID)
}

// deny ends a waiting call; its row is the last lock of the transaction. A call
// that waits has a consent and no grant: a reserved use is spent in the
// transaction that reserves it. why is shown with the call; without one it is
// made of reason and detail. It reports whether the call was still waiting.
func (s *Service) deny(ctx context.Context, tx tenant.Tx, callID string, r Reason, actor, detail string, why *Error) (bool, error) {
	c, err := one(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, callID)
	if fault.Is(err, fault.NotFound) {
		return false, nil
	}
	if err != nil || !c.State.May(Denied) || c.State == Dispatching {
		return false, err
	}
	if c.GrantID != "" {
		return false, fmt.Errorf("calls: %s waits although it has a grant", callID)
	}
	id, err := s.deps.Audit.Append(ctx, tx, s.entry(c, audit.CallDenied, actor, map[string]any{"reason": r, "detail": detail}))
	if err != nil {
		return false, err
	}
	if why == nil {
		why = hostError(string(r), "%s", endWords(r, detail))
	}
	c.State, c.Reason, c.Receipt, c.Error = Denied, r, id, why
	failure, err := encodeError(why)
	if err != nil {
		return false, err
	}
	_, err = tx.Exec(ctx, `UPDATE calls SET state = 'DENIED', reason = $3, receipt = $4, error = $5, revision = revision + 1,
		update_time = clock_timestamp(), finish_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2`,
		tx.Tenant(), callID, string(r), id, failure)
	if err != nil {
		return false, err
	}
	tx.AfterCommit(func() {
		s.changed(tx.Tenant(), callID)
		s.observe(c)
	})
	return true, s.announce(ctx, tx, c)
}

// endWords says why a waiting call was denied.
func endWords(r Reason, detail string) string {
	words := map[Reason]string{ReasonRefused: "the consent was refused", ReasonExpired: "the consent expired",
		ReasonVoid: "what was asked for does not stand any more"}[r]
	if detail != "" {
		words += ": " + cleanText(detail, 1000)
	}
	return words
}

// entry is an audit entry about a call: digests and facts, never the payload.
func (s *Service) entry(c *Call, kind, actor string, more map[string]any) audit.Entry {
	d := map[string]any{"server": c.ServerName, "name": c.Name, "requestId": c.RequestID, "effect": c.Effect,
		"argumentsDigest": c.ArgumentsDigest, "argumentsBytes": len(c.Arguments), "definitionDigest": c.DefinitionDigest,
		"contractId": c.ContractID, "attempt": c.Attempt}
	if id := c.Trace.ID(); id != "" {
		d["traceId"] = id
	}
	for k, v := range more {
		d[k] = v
	}
	raw, err := json.Marshal(d)
	if err != nil {
		panic(fmt.Sprintf("calls: audit details cannot be encoded: %v", err))
	}
	return audit.Entry{Kind: kind, SessionID: c.SessionID, CallID: c.ID, ConsentID: c.ConsentID, ServerID: c.ServerID,
		Subject: c.Subject, Actor: actor, Time: s.now(), Details: raw}
}

// countCall adds an admitted call to its session's durable count.
func countCall(ctx context.Context, tx tenant.Tx, c *Call) (int64, error) {
	return sessions.CountCalls(ctx, tx, c.SessionID, 1)
}

// noRowIsLost says of a row that is not there as it should be that somebody else
// had it first.
func noRowIsLost(err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return errLost
	}
	return err
}
