package calls

import (
	"context"
	"errors"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// cancelWait is how long Cancel waits for a call in execution to end.
const cancelWait = 5 * time.Second

// Cancel stops a call: one that waits for a consent is CANCELLED; one in execution
// is told to its server and ends as CANCELLED only if it was never sent or is a
// read, else as UNCERTAIN until more is known, and so does one that waits for
// input. Cancelling an ended call changes nothing.
func (s *Service) Cancel(ctx context.Context, p tenant.Principal, id string) (*Call, error) {
	k := callKey{p.Tenant, id}
	for try := 1; ; try++ {
		c, err := s.read(ctx, p, k)
		if err != nil || c.State.Final() || c.State == Uncertain {
			return c, err
		}
		done := false
		switch c.State {
		case Dispatching:
		case InputRequired:
			done, err = s.cancelInput(ctx, p, c)
		default:
			done, err = s.cancelWaiting(ctx, p, c)
		}
		if err != nil {
			return nil, err
		}
		if done {
			return s.read(ctx, p, k)
		}
		wanted, err := s.requestCancel(ctx, p, k)
		if err != nil {
			return nil, err
		}
		if wanted || try >= maxPlans {
			return s.await(ctx, p, k, cancelWait, func(c *Call) bool { return c.State.Final() || c.State == Uncertain })
		}
	}
}

// cancelInput ends a call that waits for input and that nobody executes; false for
// one whose request is held open.
func (s *Service) cancelInput(ctx context.Context, p tenant.Principal, c *Call) (done bool, err error) {
	err = s.deps.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		locked, err := one(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, c.ID)
		if err != nil || locked.State != InputRequired {
			return err
		}
		in, err := loadInput(ctx, tx, c.ID)
		if err != nil || in.phase != inputWaiting && in.phase != inputReady {
			return err
		}
		done = true
		return s.endLockedInput(ctx, tx, locked, inputEnd{code: "CANCELLED", message: "the call was cancelled before the server was answered",
			actor: p.Actor(), pending: WasCancelled})
	})
	return done, err
}

// cancelWaiting ends a call that waits for a person; false when it has moved on.
func (s *Service) cancelWaiting(ctx context.Context, p tenant.Principal, c *Call) (done bool, err error) {
	err = s.deps.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		// The consent's lock comes before the call's, as in a dispatch.
		if err := s.deps.Consent.VoidCall(ctx, tx, c.ID, p.Actor(), "the call was cancelled"); err != nil {
			return err
		}
		id, err := s.deps.Audit.Append(ctx, tx, s.entry(c, audit.CallCancelled, p.Actor(), nil))
		if err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `UPDATE calls SET state = 'CANCELLED', receipt = $3, revision = revision + 1,
			update_time = clock_timestamp(), finish_time = clock_timestamp()
			WHERE tenant_id = $1 AND call_id = $2 AND state IN ('CONSENT_REQUIRED', 'AUTHORIZATION_REQUIRED')`,
			tx.Tenant(), c.ID, id)
		if err != nil {
			return err
		}
		if done = tag.RowsAffected() == 1; !done {
			return errLost
		}
		tx.AfterCommit(func() {
			s.changed(p.Tenant, c.ID)
			ended := *c
			ended.State = Cancelled
			s.observe(&ended)
		})
		return s.announceAs(ctx, tx, c, Cancelled, id)
	})
	if errors.Is(err, errLost) {
		return false, nil
	}
	return done, err
}

// requestCancel writes the wish down for whichever replica executes the call,
// and carries it out at once when it is this one. It reports whether somebody does.
func (s *Service) requestCancel(ctx context.Context, p tenant.Principal, k callKey) (wanted bool, err error) {
	s.mu.Lock()
	e := s.live[k]
	s.mu.Unlock()
	if e != nil {
		e.cancel()
	}
	err = s.deps.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE calls c SET cancel_requested = true WHERE tenant_id = $1 AND call_id = $2
			AND (state = 'DISPATCHING' OR state = 'INPUT_REQUIRED' AND EXISTS (SELECT 1 FROM call_inputs i
			  WHERE i.tenant_id = c.tenant_id AND i.call_id = c.call_id AND i.phase IN ('HELD', 'TASK')))`, tx.Tenant(), k.id)
		if wanted = tag.RowsAffected() > 0; err != nil || !wanted {
			return err
		}
		return wakeTask(ctx, tx, k.id)
	})
	if err == nil && wanted && e == nil {
		s.tend(k, s.polling, "look after a task", s.pollTask)
	}
	if err == nil && e == nil {
		s.changed(k.tenant, k.id)
	}
	return wanted || e != nil && !e.snapshot().Recorded, err
}

// cancel ends the request under way; the executor decides what that means.
func (e *execution) cancel() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cancelled = true
	if e.stop != nil {
		e.stop()
	}
}

// obeyCancel looks whether somebody on another replica wants the call stopped.
func (s *Service) obeyCancel(ctx context.Context, e *execution) error {
	var wanted bool
	err := s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		return tx.QueryRow(ctx, `SELECT cancel_requested FROM calls WHERE tenant_id = $1 AND call_id = $2`,
			tx.Tenant(), e.key.id).Scan(&wanted)
	})
	if err == nil && wanted {
		e.cancel()
	}
	return err
}
