package calls

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// writeEnd writes the end of a call when the attempt is still the one that
// counts, with its audit entry. resolveAfter, when set, is when a status query
// may speak again about an uncertain call.
func (s *Service) writeEnd(ctx context.Context, tx tenant.Tx, c *Call, entry audit.Prepared, resolveAfter time.Time) (bool, error) {
	failure, err := encodeError(c.Error)
	if err != nil {
		return false, err
	}
	var after *time.Time
	if !resolveAfter.IsZero() {
		after = &resolveAfter
	}
	err = tx.QueryRow(ctx, `
		UPDATE calls SET state = $5, result = $6, error = $7, side_effect_id = $8, findings = $9, receipt = $10,
		       negotiation_us = $11, execution_us = $12, resolve_after = $13,
		       revision = revision + 1, update_time = clock_timestamp(), finish_time = clock_timestamp()
		 WHERE tenant_id = $1 AND call_id = $2 AND replica_epoch = $3 AND attempt = $4 AND state = 'DISPATCHING' RETURNING revision`,
		tx.Tenant(), c.ID, c.Epoch, c.Attempt, string(c.State), c.Result, failure, c.SideEffectID, notNil(c.Findings), entry.ID(),
		c.Timings.Negotiation.Microseconds(), c.Timings.Execution.Microseconds(), after).Scan(&c.Revision)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	c.Receipt = entry.ID()
	b := &pgx.Batch{}
	entry.Queue(b)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return true, err
	}
	return true, s.announce(ctx, tx, c)
}

// prepareEnd makes the audit entry of a call's end, before the transaction that
// keeps it: sealing may need the database, and nobody should hold one connection
// and wait for another.
func (s *Service) prepareEnd(ctx context.Context, c *Call, actor, by string) (audit.Prepared, error) {
	d := endDetails(c)
	if by != "" {
		d["by"] = by
	}
	return s.deps.Audit.Prepare(ctx, c.Tenant, s.entry(c, endKind(c.State), actor, d))
}

func endKind(s State) string {
	switch s {
	case Uncertain:
		return "call.uncertain"
	case Cancelled:
		return "call.cancelled"
	}
	return "call.finished"
}

func endDetails(c *Call) map[string]any {
	d := map[string]any{"state": c.State, "outcome": c.Decision.Outcome}
	if c.Error != nil {
		d["layer"], d["code"] = c.Error.Layer, c.Error.Code
	}
	if c.Result != nil {
		sum := sha256.Sum256(c.Result)
		d["resultDigest"], d["resultBytes"] = "sha256:"+hex.EncodeToString(sum[:]), len(c.Result)
	}
	if c.SideEffectID != "" {
		d["sideEffectId"] = c.SideEffectID
	}
	return d
}

func endAttempt(ctx context.Context, tx tenant.Tx, c *Call, o outcome) error {
	code := ""
	if o.err != nil {
		code = o.err.Code
	}
	_, err := tx.Exec(ctx, `UPDATE attempts SET phase = $4, outcome = $5, detail = $6,
		end_time = COALESCE((SELECT finish_time FROM calls WHERE tenant_id = $1 AND call_id = $2), clock_timestamp())
		WHERE tenant_id = $1 AND call_id = $2 AND attempt = $3`, tx.Tenant(), c.ID, c.Attempt, string(o.phase), o.word(), code)
	return err
}

func insertAttempt(ctx context.Context, tx tenant.Tx, c *Call, a Attempt) error {
	_, err := tx.Exec(ctx, insertAttemptSQL, attemptArgs(c, a)...)
	return err
}

const insertAttemptSQL = `INSERT INTO attempts (tenant_id, call_id, attempt, replica_epoch, phase, outcome, detail, send_by,
	start_time, end_time) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`

func attemptArgs(c *Call, a Attempt) []any {
	return []any{c.Tenant, c.ID, a.Number, a.Epoch, string(a.Phase), a.Outcome, a.Detail, a.SendBy, a.StartTime, a.EndTime}
}

// maxEvidence bounds what is kept of an answer that came too late.
const maxEvidence = 64 << 10

// keepEvidence files an answer that no longer counts: another replica, a cancel
// or a resolution has taken the call.
func (e *execution) keepEvidence(ctx context.Context, tx tenant.Tx, c *Call, o outcome) error {
	raw := o.result
	if raw == nil && o.err != nil {
		raw, _ = encodeError(o.err)
	}
	if len(raw) > maxEvidence {
		raw = raw[:maxEvidence]
	}
	tag, err := tx.Exec(ctx, `UPDATE attempts SET phase = $4, outcome = $5, evidence = $6, evidence_time = clock_timestamp(),
		end_time = COALESCE(end_time, clock_timestamp())
		WHERE tenant_id = $1 AND call_id = $2 AND attempt = $3 AND replica_epoch = $7`,
		tx.Tenant(), c.ID, c.Attempt, string(o.phase), o.word(), raw, c.Epoch)
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	d := endDetails(c)
	d["phase"] = o.phase
	if _, err = e.s.deps.Audit.Append(ctx, tx, e.s.entry(c, "call.late_answer", e.actor, d)); err != nil {
		return err
	}
	if o.state == Succeeded {
		return e.reopen(ctx, tx, c)
	}
	return nil
}

// reopen makes a call uncertain again that was resolved as not executed, when
// its late answer says that it was (design 3.1). The status query, asked again,
// then says what it made.
func (e *execution) reopen(ctx context.Context, tx tenant.Tx, c *Call) error {
	tag, err := tx.Exec(ctx, `UPDATE calls SET state = 'UNCERTAIN', error = NULL, resolve_after = clock_timestamp(), resolve_tries = 0,
		findings = findings || $3::text[], revision = revision + 1, update_time = clock_timestamp()
		WHERE tenant_id = $1 AND call_id = $2 AND state = 'FAILED'
		  AND EXISTS (SELECT FROM unnest(findings) f WHERE f LIKE 'RESOLVED_BY_STATUS_QUERY:%')`, tx.Tenant(), c.ID,
		[]string{"REOPENED: an answer that came late says that the call was executed"})
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	id, err := e.s.deps.Audit.Append(ctx, tx, e.s.entry(c, audit.CallReopened, e.actor, nil))
	if err != nil {
		return err
	}
	return e.s.announceAs(ctx, tx, c, Uncertain, id)
}

// errLost says that the call is no longer this attempt's.
var errLost = fault.New(fault.Conflict, "CALL_TAKEN", "another replica has taken the call")

// redispatch is the dispatch transaction of a further attempt: every check again
// but the consent's expiry. own is what the host answered by itself.
func (e *execution) redispatch(o outcome, own *inquiry) error {
	ctx, cancel := context.WithTimeout(e.s.work, 10*time.Second)
	defer cancel()
	cur := *e.snapshot()
	if err := e.refresh(ctx, &cur); err != nil {
		return err
	}
	cur.Attempts = slices.Clone(cur.Attempts)
	if n := len(cur.Attempts); n > 0 {
		cur.Attempts[n-1].close(o, e.s.now())
	}
	var sealed sealedRound
	if own != nil {
		var err error
		cur.Findings = append(slices.Clip(cur.Findings), o.findings...)
		if sealed, err = e.s.sealRound(ctx, &cur, e.rounds()+1, own); err != nil {
			return err
		}
	}
	err := e.s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		g, err := e.s.lockGround(ctx, tx, &cur, e)
		if err != nil {
			return err
		}
		if why := g.changed(); why != "" {
			return fault.New(fault.Precondition, "GROUND_CHANGED", "%s", why)
		}
		if err := e.s.recheck(ctx, tx, &cur); err != nil {
			return err
		}
		if err := e.released(ctx, tx, &cur); err != nil {
			return err
		}
		if err := lockAttempt(ctx, tx, &cur, Dispatching); err != nil {
			return err
		}
		if err := endAttempt(ctx, tx, &cur, o); err != nil {
			return err
		}
		if own != nil {
			if _, err := e.s.storeRound(ctx, tx, &cur, sealed, inputSent, 0, nil); err != nil {
				return err
			}
		}
		return e.s.enterDispatch(ctx, tx, &cur, e, e.actor, updateDispatch)
	})
	if err != nil && !(cur.Attempt > e.snapshot().Attempt && e.s.committed(ctx, &cur, err)) {
		return err
	}
	cur.Revision++
	if own != nil {
		e.round = own.own(sealed.number)
	}
	e.mu.Lock()
	e.call = &cur
	e.mu.Unlock()
	return nil
}

func (s *Service) recheck(ctx context.Context, tx tenant.Tx, c *Call) (err error) {
	r := consent.NotRefused
	switch {
	case c.ConsentID != "":
		r, err = s.deps.Consent.Recheck(ctx, tx, c.ConsentID, c.ID, c.binding())
	case c.GrantID != "":
		r, err = s.deps.Consent.RecheckGrant(ctx, tx, c.GrantID)
	}
	if err == nil && r != consent.NotRefused {
		err = fault.New(fault.Precondition, "CONSENT_"+string(r), "the consent does not stand any more")
	}
	return err
}

// lockAttempt locks the call last and makes sure that it is in one of these states
// and that the attempt is still ours and wanted.
func lockAttempt(ctx context.Context, tx tenant.Tx, c *Call, states ...State) error {
	var mine, cancelled bool
	err := tx.QueryRow(ctx, `SELECT state = ANY($5) AND replica_epoch = $3 AND attempt = $4, cancel_requested
		FROM calls WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, tx.Tenant(), c.ID, c.Epoch, c.Attempt, states).Scan(&mine, &cancelled)
	switch {
	case err != nil:
		return err
	case !mine:
		return errLost
	case cancelled:
		return errCancelWanted
	}
	return nil
}

// errCancelWanted says that somebody, maybe at another replica, wants it stopped.
var errCancelWanted = fault.New(fault.Canceled, "CANCELLED", "the call was cancelled")

// updateDispatch writes a stored call's move to DISPATCHING.
func updateDispatch(ctx context.Context, tx tenant.Tx, c *Call) error {
	tag, err := tx.Exec(ctx, `UPDATE calls SET state = 'DISPATCHING', attempt = $3, replica_epoch = $4, send_by = $5,
		ceiling_time = $6, definition_observed = $7, revision = revision + 1, update_time = clock_timestamp()
		WHERE tenant_id = $1 AND call_id = $2`,
		tx.Tenant(), c.ID, c.Attempt, c.Epoch, c.SendBy, c.Ceiling, c.DefinitionObserved)
	if err == nil && tag.RowsAffected() != 1 {
		err = fmt.Errorf("calls: %s vanished", c.ID)
	}
	return err
}
