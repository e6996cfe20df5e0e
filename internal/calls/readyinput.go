package calls

import (
	"context"
	"errors"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// answeredPause is how long a call whose questions are answered waits for its next
// try when it cannot be dispatched for now.
const answeredPause = 5 * time.Second

// dispatchInput sends a call again whose questions are all answered. Whoever comes
// second finds the round sent and does nothing.
func (s *Service) dispatchInput(ctx context.Context, t tenant.ID, id string) error {
	for try := 1; ; try++ {
		if s.full() {
			return nil // a later sweep finds room
		}
		err := s.tryInput(ctx, t, id, try)
		if !errors.Is(err, errReplan) {
			return err
		}
	}
}

func (s *Service) tryInput(ctx context.Context, t tenant.ID, id string, try int) error {
	c, in, err := s.callInput(ctx, t, id)
	if errors.Is(err, errNoInput) || err == nil && (c.State != InputRequired || in.phase != inputReady) {
		return nil
	}
	if err != nil {
		return err
	}
	e, err := s.resume(ctx, c)
	if err != nil {
		return s.stopInput(ctx, c, err)
	}
	if e.round, err = s.openRound(ctx, c, in); err != nil {
		return err
	}
	e.recall(c)
	cur := *c
	e.anew = try > 1
	if err := e.refresh(ctx, &cur); err != nil {
		return s.stopInput(ctx, c, err)
	}
	err = s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		return s.dispatchInputTx(ctx, tx, &cur, e, in, try >= maxPlans)
	})
	if err != nil && !s.committed(ctx, &cur, err) || cur.State != Dispatching {
		return err // errLost: somebody else had it
	}
	cur.Revision++
	e.call = &cur
	s.start(e)
	s.changed(t, id)
	return nil
}

// recall takes from the stored attempts what an execution knows of its past.
func (e *execution) recall(c *Call) {
	for _, a := range c.Attempts {
		e.maybe = e.maybe || a.Phase == MaybeSent
		e.touched = e.touched || a.Phase != NotSent
	}
}

// sentRound is the round that a call's present attempt was sent with, nil if none.
func (s *Service) sentRound(ctx context.Context, c *Call) (*round, error) {
	_, in, err := s.callInput(ctx, c.Tenant, c.ID)
	if errors.Is(err, errNoInput) || err == nil && in.phase != inputSent {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return s.openRound(ctx, c, in)
}

// callInput reads a call with its questions.
func (s *Service) callInput(ctx context.Context, t tenant.ID, id string) (c *Call, in input, err error) {
	err = s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		if c, err = byID(ctx, tx, id); err != nil {
			return err
		}
		in, err = loadInput(ctx, tx, id)
		return err
	})
	return c, in, err
}

// dispatchInputTx is the dispatch transaction of a round: every check of a further
// attempt again. What was consented to is the call with all of its rounds; where
// its ground is gone the call ends, for nothing more may be sent.
func (s *Service) dispatchInputTx(ctx context.Context, tx tenant.Tx, c *Call, e *execution, in input, last bool) error {
	g, err := s.lockGround(ctx, tx, c, e)
	if err != nil {
		return err
	}
	if why := g.changed(); why != "" {
		switch {
		case g.staleOnly() && !last:
			return errReplan
		case g.moves(c):
			return errMoving // the sweep tries again, until the questions' time is over
		}
		return s.endInputTx(ctx, tx, c.ID, inputEnd{code: "GROUND_CHANGED", message: "it was answered and not sent again: " + why,
			actor: "system", pending: Withdrawn}, nil)
	}
	if err := s.recheck(ctx, tx, c); fault.Is(err, fault.Precondition) {
		return s.endInputTx(ctx, tx, c.ID, inputEnd{code: "GROUND_CHANGED", message: "it was answered and not sent again: " + detail(err),
			actor: "system", pending: Withdrawn}, nil)
	} else if err != nil {
		return err
	}
	var waited time.Duration
	err = tx.QueryRow(ctx, `SELECT clock_timestamp() - i.ask_time FROM calls c JOIN call_inputs i USING (tenant_id, call_id)
		WHERE c.tenant_id = $1 AND c.call_id = $2 AND c.state = 'INPUT_REQUIRED' AND i.phase = 'READY' AND i.round = $3 FOR UPDATE`,
		tx.Tenant(), c.ID, in.round).Scan(&waited)
	if err != nil {
		return noRowIsLost(err)
	}
	if _, err := tx.Exec(ctx, `UPDATE call_inputs SET phase = 'SENT' WHERE tenant_id = $1 AND call_id = $2`, tx.Tenant(), c.ID); err != nil {
		return err
	}
	// What a person takes to answer is not the server's time.
	if c.Ceiling != nil {
		later := c.Ceiling.Add(waited)
		c.Ceiling = &later
	}
	return s.enterDispatch(ctx, tx, c, e, e.actor, updateDispatch)
}

// stopInput is what becomes of an answered call that cannot be dispatched: it is
// tried again while that may help, until its questions' time is over.
func (s *Service) stopInput(ctx context.Context, c *Call, cause error) error {
	f, ok := fault.As(cause)
	if !ok || passing(f) || f.Kind == fault.Unavailable || f.Kind == fault.Exhausted || ctx.Err() != nil {
		err := s.deps.DB.InTx(context.WithoutCancel(ctx), c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE call_inputs SET due_time = clock_timestamp() + $3::interval
				WHERE tenant_id = $1 AND call_id = $2 AND phase = 'READY'`, tx.Tenant(), c.ID, answeredPause)
			return err
		})
		return errors.Join(cause, err)
	}
	return s.endInput(ctx, c.Tenant, c.ID, inputEnd{code: f.Reason, message: "it was answered and not sent again: " + cleanText(f.Message, 1000),
		actor: "system", pending: Withdrawn})
}

// claimAnswered dispatches calls whose questions were answered at a replica that
// did not live to dispatch them.
func (s *Service) claimAnswered(ctx context.Context) error {
	fs, err := s.search(ctx, `SELECT tenant_id, call_id FROM call_inputs
		WHERE phase = 'READY' AND due_time <= clock_timestamp() AND expire_time > clock_timestamp() ORDER BY due_time LIMIT $1`)
	if err != nil {
		return err
	}
	s.tendAll(fs, s.dispatching, "dispatch after input", s.dispatchInput)
	return nil
}

// expireInputs ends calls whose questions nobody answered in time, and those of
// sessions that were closed: nobody can answer them any more.
func (s *Service) expireInputs(ctx context.Context) error {
	fs, err := s.search(ctx, `SELECT i.tenant_id, i.call_id FROM call_inputs i
		WHERE i.phase IN ('WAITING', 'READY') AND (i.expire_time <= clock_timestamp() OR EXISTS (
		  SELECT 1 FROM calls c JOIN sessions s ON s.tenant_id = c.tenant_id AND s.session_id = c.session_id
		   WHERE c.tenant_id = i.tenant_id AND c.call_id = i.call_id AND s.state <> 'OPEN'))
		ORDER BY i.expire_time LIMIT $1`)
	if err != nil {
		return err
	}
	s.tendAll(fs, s.recovering, "end an unanswered call", s.expireInput)
	return nil
}

func (s *Service) expireInput(ctx context.Context, t tenant.ID, id string) error {
	return s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		c, err := one(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, id)
		if err != nil || c.State != InputRequired {
			return err
		}
		var over, closed bool
		err = tx.QueryRow(ctx, `SELECT i.expire_time <= clock_timestamp(), s.state <> 'OPEN' FROM call_inputs i, sessions s
			WHERE i.tenant_id = $1 AND i.call_id = $2 AND i.phase IN ('WAITING', 'READY') AND s.tenant_id = $1 AND s.session_id = $3`,
			tx.Tenant(), id, c.SessionID).Scan(&over, &closed)
		if err != nil || !over && !closed {
			return noRowIsLost(err)
		}
		end := inputEnd{code: "INPUT_EXPIRED", message: "what the server asked was not answered in time", actor: "system", pending: WasExpired}
		if closed {
			end = inputEnd{code: "SESSION_CLOSED", message: "the session was closed before the server was answered", actor: "system", pending: WasCancelled}
		}
		return s.endLockedInput(ctx, tx, c, end)
	})
}
