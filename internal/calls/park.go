package calls

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// meet does what a server's questions ask for: the host answers by itself and goes
// on at once, or the call waits for a person and nothing of this replica is held.
// It reports whether another attempt follows.
func (e *execution) meet(o *outcome) bool {
	a := o.asked
	why := a.violation()
	if why == "" && e.rounds() >= maxRounds {
		why = "the server asked again and again"
	}
	switch {
	case why != "":
		o.err = &Error{Layer: LayerProtocol, Code: "INPUT_INVALID", Message: why}
		e.abandon(*o)
		return false
	case e.isCancelled():
		o.err = hostError("CANCELLED", "the call was cancelled")
		e.abandon(*o)
		return false
	case a.pending():
		e.park(*o)
		return false
	}
	defer o.done()
	// A server that has nothing to ask wants time (O-6), and one that was answered
	// by the host alone learns nothing from haste.
	if e.again(*o, Delay(e.rounds()+1, o.retryAfter, 0), a) {
		return true
	}
	o.err = hostError("INPUT_NOT_SENT", "the server asked for input, and the call could not go on")
	e.abandon(*o)
	return false
}

func (e *execution) isCancelled() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cancelled
}

// abandon ends a call that the server wanted to know something for and that does
// not go on. Before it was answered anything it has only asked, if it asked at all;
// from then on a write may be half done.
func (e *execution) abandon(o outcome) {
	defer o.done()
	effect := e.snapshot().Effect
	cancelled := e.isCancelled()
	switch {
	case effect == Read && cancelled:
		e.end(o, EndCancelled)
	case effect == Read || e.round == nil && !e.maybe && !cancelled && len(o.asked.questions) > 0:
		e.end(o, EndFailed)
	case e.terms.StatusQuery != nil:
		e.end(o, Ask)
	default:
		e.end(o, EndUncertain)
	}
}

// park ends the attempt and lets the call wait for a person. A read that was in
// memory only is recorded first.
func (e *execution) park(o outcome) {
	defer o.done()
	lost := e.leaveBehind(func(ctx context.Context) error { return e.recordInput(ctx, o) }, errRepeated, errCancelWanted)
	switch lost {
	case errRepeated:
		// The request id belongs to a call of another replica: that one is shown.
		e.persist(func(ctx context.Context) error { return e.adopt(ctx, e.snapshot()) })
	case errCancelWanted:
		e.cancel()
		o.err = hostError("CANCELLED", "the call was cancelled")
		e.abandon(o)
	}
}

// leaveBehind records that the call goes on without this replica, and before that
// the call itself if it was in memory only. It returns which of the errors ended
// the attempts to do so.
func (e *execution) leaveBehind(record func(context.Context) error, ending ...error) (why error) {
	e.persist(func(ctx context.Context) error {
		err := e.harden(ctx)
		if err == nil {
			err = record(ctx)
		}
		for _, end := range ending {
			if errors.Is(err, end) {
				why = end
				return nil
			}
		}
		return err
	})
	return why
}

// recordInput writes the end of the attempt, what the server asked, and that the
// call waits, in one transaction.
func (e *execution) recordInput(ctx context.Context, o outcome) error {
	s := e.s
	c := *e.snapshot()
	now := s.now()
	c.State = InputRequired
	c.UpdateTime = now
	c.Findings = append(slices.Clip(c.Findings), o.findings...)
	c.Attempts = slices.Clone(c.Attempts)
	c.Attempts[len(c.Attempts)-1].close(o, now)
	sealed, err := s.sealRound(ctx, &c, e.rounds()+1, o.asked)
	if err != nil {
		return err
	}
	mine, cancelled := false, false
	err = s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		err := lockAttempt(ctx, tx, &c, Dispatching)
		mine = err == nil
		switch {
		case errors.Is(err, errLost):
			return e.keepEvidence(ctx, tx, &c, o)
		case errors.Is(err, errCancelWanted):
			cancelled = true
			return nil
		case err != nil:
			return err
		}
		err = tx.QueryRow(ctx, `UPDATE calls SET state = 'INPUT_REQUIRED', findings = $3, negotiation_us = $4, execution_us = $5,
			revision = revision + 1, update_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2 RETURNING revision`,
			tx.Tenant(), c.ID, notNil(c.Findings), c.Timings.Negotiation.Microseconds(), c.Timings.Execution.Microseconds()).Scan(&c.Revision)
		if err != nil {
			return err
		}
		if err := endAttempt(ctx, tx, &c, o); err != nil {
			return err
		}
		expire, err := s.storeRound(ctx, tx, &c, sealed, inputWaiting, 0, nil)
		c.Interactions = sealed.interactions(&c, now, expire)
		return err
	})
	if err != nil {
		return err
	}
	if cancelled {
		return errCancelWanted
	}
	if !mine {
		lost, err := s.load(ctx, e.key.tenant, e.key.id)
		if err != nil {
			return err
		}
		c = *lost
	}
	e.mu.Lock()
	e.call = &c
	e.mu.Unlock()
	s.changed(e.key.tenant, e.key.id)
	return nil
}

func notNil(texts []string) []string {
	if texts == nil {
		return []string{}
	}
	return texts
}

// inputEnd is how a call ends that waits for input.
type inputEnd struct {
	code, message string
	actor         string
	// pending is what becomes of its open questions.
	pending InteractionState
	phase   Phase // of an attempt that is still open, for a call that was held
}

// endInput ends a call that waits for input: nobody will send it again. A read is
// CANCELLED; of a write a part may be done, so it is UNCERTAIN, and a status query,
// where there is one, may speak about it at once.
func (s *Service) endInput(ctx context.Context, t tenant.ID, id string, end inputEnd) error {
	return s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		return s.endInputTx(ctx, tx, id, end, nil)
	})
}

// endInputTx is endInput in a transaction that has not locked the call yet; may
// looks at the locked call and gives the reason for which it is left alone.
func (s *Service) endInputTx(ctx context.Context, tx tenant.Tx, id string, end inputEnd, may func(*Call) error) error {
	c, err := one(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, id)
	if err != nil {
		return err
	}
	if c.State != InputRequired {
		return errLost
	}
	if may != nil {
		if err := may(c); err != nil {
			return err
		}
	}
	return s.endLockedInput(ctx, tx, c, end)
}

// endLockedInput ends a call that is locked and waits for input.
func (s *Service) endLockedInput(ctx context.Context, tx tenant.Tx, c *Call, end inputEnd) error {
	c.State = Cancelled
	var resolveAfter *time.Time
	if c.Effect != Read {
		now := s.now()
		c.State, resolveAfter = Uncertain, &now
	}
	c.Error = hostError(end.code, "%s", end.message)
	failure, err := encodeError(c.Error)
	if err != nil {
		return err
	}
	if end.pending == WasExpired {
		if _, err := s.deps.Audit.Append(ctx, tx, s.entry(c, auditExpired, end.actor, nil)); err != nil {
			return err
		}
	}
	if c.Receipt, err = s.deps.Audit.Append(ctx, tx, s.entry(c, endKind(c.State), end.actor, endDetails(c))); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `UPDATE calls SET state = $3, error = $4, receipt = $5, resolve_after = $6, revision = revision + 1,
		update_time = clock_timestamp(), finish_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2`,
		tx.Tenant(), c.ID, string(c.State), failure, c.Receipt, resolveAfter)
	if err != nil {
		return err
	}
	if err := closeInput(ctx, tx, c.ID, end.pending); err != nil {
		return err
	}
	if end.phase != "" {
		if err := endAttempt(ctx, tx, c, outcome{phase: end.phase, err: c.Error}); err != nil {
			return err
		}
	}
	tx.AfterCommit(func() {
		s.changed(tx.Tenant(), c.ID)
		s.observe(c)
	})
	return s.announce(ctx, tx, c)
}

// closeInput ends what is still open of a call's questions.
func closeInput(ctx context.Context, tx tenant.Tx, callID string, pending InteractionState) error {
	_, err := tx.Exec(ctx, `UPDATE interactions SET state = $3, answered_how = 'HOST', answer_time = clock_timestamp()
		WHERE tenant_id = $1 AND call_id = $2 AND state = 'PENDING'`, tx.Tenant(), callID, string(pending))
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `UPDATE call_inputs SET phase = 'ENDED' WHERE tenant_id = $1 AND call_id = $2`, tx.Tenant(), callID)
	return err
}
