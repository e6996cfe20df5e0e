package calls

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// sweepBatch bounds one round of each search; the next round takes the rest.
const sweepBatch = 100

type found struct {
	tenant tenant.ID
	id     string
}

// Sweep begins one round of recovery: it buries silent replicas, takes over what
// they were executing, dispatches what was agreed to and not yet sent, asks
// about uncertain calls, obeys cancels from elsewhere, expires consents and looks
// at subscriptions. What
// needs a server goes on after Sweep returns; Stop waits for it. Any number of
// replicas may run it at any time.
func (s *Service) Sweep(ctx context.Context) error {
	_, errBury := s.replica.bury(ctx)
	return errors.Join(errBury, s.reap(ctx), s.claimApproved(ctx), s.claimAnswered(ctx), s.resolveDue(ctx), s.obeyCancels(ctx),
		s.expire(ctx), s.expireInputs(ctx), s.lookAfterTasks(ctx), s.followDue(ctx))
}

func (s *Service) expire(ctx context.Context) error {
	_, err := s.deps.Consent.Expire(ctx)
	return err
}

func (s *Service) search(ctx context.Context, sql string, args ...any) (out []found, err error) {
	err = s.deps.DB.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, sql, append(args, sweepBatch)...)
		if err != nil {
			return err
		}
		var f found
		_, err = pgx.ForEachRow(rows, []any{&f.tenant, &f.id}, func() error { out = append(out, f); return nil })
		return err
	})
	return out, err
}

func (s *Service) tendAll(fs []found, slots chan struct{}, what string, fn func(context.Context, tenant.ID, string) error) {
	for _, f := range fs {
		s.tend(callKey(f), slots, what, fn)
	}
}

// orphanTime is how long a call may say that this replica executes it although it
// does not: between the dispatch's commit and the start, or for ever when its
// outcome could not be written.
const orphanTime = 30 * time.Second

// reap takes over the calls of replicas that are dead or have stopped, and those
// of this replica that it has lost sight of. The order is random, so that calls
// that cannot be taken do not hide the others.
func (s *Service) reap(ctx context.Context) error {
	epoch, _ := s.replica.mayDispatch()
	fs, err := s.search(ctx, `SELECT c.tenant_id, c.call_id FROM calls c
		WHERE (c.state = 'DISPATCHING' AND NOT EXISTS (SELECT 1 FROM call_tasks k WHERE k.call_id = c.call_id AND k.open)
		    OR c.state = 'INPUT_REQUIRED' AND EXISTS (SELECT 1 FROM call_inputs i WHERE i.call_id = c.call_id AND i.phase = 'HELD'))
		  AND (NOT EXISTS (SELECT 1 FROM replicas r WHERE r.epoch = c.replica_epoch AND r.state = 'ALIVE')
		      OR c.replica_epoch = $1 AND c.update_time < clock_timestamp() - $2::interval)
		ORDER BY random() LIMIT $3`, epoch, orphanTime)
	if err != nil {
		return err
	}
	s.tendAll(fs, s.recovering, "take over a call", s.takeOver)
	return nil
}

// takeOver fences a call of a dead replica by taking its epoch, and then does
// with it what its effect and the contract allow. How far the attempt came is
// not known, so it may have been sent. A call that is still executed here, under
// an epoch that was taken for dead, is left to its execution or to the others.
func (s *Service) takeOver(ctx context.Context, t tenant.ID, id string) error {
	s.mu.Lock()
	mine := s.live[callKey{t, id}] != nil
	s.mu.Unlock()
	epoch, ok := s.replica.mayDispatch()
	if mine || !ok {
		return nil
	}
	c, err := s.load(ctx, t, id)
	if err == nil && c.State == InputRequired {
		return s.endHeld(ctx, c, epoch)
	}
	if err != nil || c.State != Dispatching {
		return err
	}
	e, err := s.resume(ctx, c)
	if f, ok := fault.As(err); err != nil && (!ok || passing(f)) {
		return err // the next sweep tries again
	}
	if err != nil {
		// Without its contract or server nothing more can be done: say what is known.
		return s.endReaped(ctx, c, epoch, EndUncertain)
	}
	if e.round, err = s.sentRound(ctx, c); err != nil {
		return err
	}
	e.maybe, e.touched, e.cancelled = true, true, c.CancelRequested
	f := e.failure(outcome{phase: MaybeSent, temporary: true})
	step := After(f)
	if step == Retry {
		return s.retryReaped(ctx, c, e, f, epoch)
	}
	return s.endReaped(ctx, c, epoch, step)
}

// retryReaped fences the call and sends it again as this replica's own attempt,
// as the contract allows. If this process dies in between, the next one finds the
// call under an epoch that is dead again.
func (s *Service) retryReaped(ctx context.Context, c *Call, e *execution, f Failure, epoch int64) error {
	err := s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		return fence(ctx, tx, c, c.Epoch, epoch)
	})
	if err != nil {
		return err
	}
	mine := *c
	mine.Epoch = epoch
	e.call = &mine
	err = e.redispatch(outcome{phase: MaybeSent, err: hostError("REPLICA_LOST", "the replica that sent it is gone")}, nil)
	if err == nil {
		s.start(e)
		s.changed(c.Tenant, c.ID)
		return nil
	}
	if errors.Is(err, errLost) {
		return nil
	}
	s.log.InfoContext(ctx, "no further attempt", "tenant", c.Tenant, "call", c.ID, "reason", detail(err))
	f.Temporary, f.Cancelled = false, f.Cancelled || errors.Is(err, errCancelWanted)
	return s.endReaped(ctx, &mine, epoch, After(f))
}

// fence gives the call a new owner; an outcome of the old one finds no row. What
// another living replica has taken meanwhile is lost.
func fence(ctx context.Context, tx tenant.Tx, c *Call, from, to int64) error {
	// A server may just have made a task of it: that is seen once the row is locked.
	var task bool
	if _, err := tx.Exec(ctx, `SELECT 1 FROM calls WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, tx.Tenant(), c.ID); err != nil {
		return err
	}
	err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM call_tasks WHERE tenant_id = $1 AND call_id = $2 AND open)`, tx.Tenant(), c.ID).Scan(&task)
	if err != nil || task {
		return errors.Join(err, errLost)
	}
	tag, err := tx.Exec(ctx, `UPDATE calls SET replica_epoch = $5, update_time = clock_timestamp()
		WHERE tenant_id = $1 AND call_id = $2 AND replica_epoch = $3 AND attempt = $4 AND state = 'DISPATCHING'
		  AND ($3 = $5 OR NOT EXISTS (SELECT 1 FROM replicas r WHERE r.epoch = $3 AND r.state = 'ALIVE'))`,
		tx.Tenant(), c.ID, from, c.Attempt, to)
	if err == nil && tag.RowsAffected() == 0 {
		err = errLost
	}
	return err
}

// endReaped says what is known of a call that nobody executes any more. A status
// query, where there is one, may speak about it at once.
func (s *Service) endReaped(ctx context.Context, c *Call, epoch int64, step Step) error {
	state := Uncertain
	switch {
	case step == EndCancelled:
		state = Cancelled
	case c.Effect == Read:
		state = Failed
	}
	end := *c
	end.State, end.Epoch = state, epoch
	end.Error = hostError("REPLICA_LOST", "the replica that executed the call is gone; its outcome is not known")
	var resolveAfter time.Time
	if state == Uncertain {
		resolveAfter = s.now()
	}
	entry, err := s.prepareEnd(ctx, &end, "system", "")
	if err != nil {
		return err
	}
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if err := fence(ctx, tx, c, c.Epoch, epoch); err != nil {
			return err
		}
		mine, err := s.writeEnd(ctx, tx, &end, entry, resolveAfter)
		if err != nil {
			return err
		}
		if !mine {
			return errLost
		}
		_, err = tx.Exec(ctx, `UPDATE attempts SET phase = 'MAYBE_SENT', outcome = 'FAILED', detail = 'REPLICA_LOST',
			end_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2 AND attempt = $3 AND end_time IS NULL`,
			tx.Tenant(), c.ID, c.Attempt)
		tx.AfterCommit(func() {
			s.changed(c.Tenant, c.ID)
			s.observe(&end)
		})
		return err
	})
}

// claimApproved dispatches what a replica approved and did not live to dispatch.
func (s *Service) claimApproved(ctx context.Context) error {
	fs, err := s.search(ctx, `SELECT c.tenant_id, c.call_id FROM calls c
		JOIN consents k ON k.tenant_id = c.tenant_id AND k.consent_id = c.consent_id
		WHERE c.state = 'CONSENT_REQUIRED' AND k.state = 'APPROVED' ORDER BY random() LIMIT $1`)
	if err != nil {
		return err
	}
	s.tendAll(fs, s.dispatching, "dispatch after consent", s.dispatchWaiting)
	return nil
}

func (s *Service) resolveDue(ctx context.Context) error {
	fs, err := s.search(ctx, `SELECT tenant_id, call_id FROM calls
		WHERE state = 'UNCERTAIN' AND resolve_after <= clock_timestamp() ORDER BY resolve_after LIMIT $1`)
	if err != nil {
		return err
	}
	s.tendAll(fs, s.resolving, "resolve an uncertain call", s.resolve)
	return nil
}

// obeyCancels ends calls in execution here that somebody wants stopped, for when
// the signal was lost.
func (s *Service) obeyCancels(ctx context.Context) error {
	epoch, _ := s.replica.mayDispatch()
	fs, err := s.search(ctx, `SELECT tenant_id, call_id FROM calls
		WHERE state IN ('DISPATCHING', 'INPUT_REQUIRED') AND replica_epoch = $1 AND cancel_requested ORDER BY call_id LIMIT $2`, epoch)
	if err != nil {
		return err
	}
	for _, f := range fs {
		s.mu.Lock()
		e := s.live[callKey(f)]
		s.mu.Unlock()
		if e != nil {
			e.cancel()
		}
	}
	return nil
}
