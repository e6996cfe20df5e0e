package calls

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// sweepBatch bounds one round of each search; the next round takes the rest.
const sweepBatch = 100

type found struct {
	tenant tenant.ID
	id     string
}

// Sweep is one round of recovery: it buries silent replicas, takes over what
// they were executing, dispatches what was agreed to and not yet sent, asks
// about uncertain calls, obeys cancels from elsewhere and expires consents. Any
// number of replicas may run it at any time.
func (s *Service) Sweep(ctx context.Context) error {
	_, errBury := s.replica.bury(ctx)
	return errors.Join(errBury, s.reap(ctx), s.claimApproved(ctx), s.resolveDue(ctx), s.obeyCancels(ctx), s.expire(ctx))
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

// each handles what a search found; one failure does not stop the others.
func (s *Service) each(ctx context.Context, fs []found, what string, fn func(context.Context, tenant.ID, string) error) error {
	for _, f := range fs {
		if ctx.Err() != nil {
			return nil
		}
		if err := fn(ctx, f.tenant, f.id); err != nil && !errors.Is(err, errLost) {
			s.log.WarnContext(ctx, what, "tenant", f.tenant, "call", f.id, "error", detail(err))
		}
	}
	return nil
}

// reap takes over the calls of replicas that are dead or have stopped.
func (s *Service) reap(ctx context.Context) error {
	fs, err := s.search(ctx, `SELECT c.tenant_id, c.call_id FROM calls c
		WHERE c.state = 'DISPATCHING' AND NOT EXISTS (
		      SELECT 1 FROM replicas r WHERE r.epoch = c.replica_epoch AND r.state = 'ALIVE')
		ORDER BY c.call_id LIMIT $1`)
	if err != nil {
		return err
	}
	return s.each(ctx, fs, "take over a call", s.takeOver)
}

// takeOver fences a call of a dead replica by taking its epoch, and then does
// with it what its effect and the contract allow. How far the attempt came is
// not known, so it may have been sent.
func (s *Service) takeOver(ctx context.Context, t tenant.ID, id string) error {
	epoch, ok := s.replica.mayDispatch()
	if !ok {
		return errIsolated
	}
	c, err := s.load(ctx, t, id)
	if err != nil || c.State != Dispatching {
		return err
	}
	e, err := s.resume(ctx, c)
	if err != nil {
		// Without its contract or server nothing more can be asked: say what is known.
		return s.endReaped(ctx, c, epoch, EndUncertain, time.Time{})
	}
	e.maybe = true
	f := e.failure(outcome{phase: MaybeSent, temporary: true})
	f.Cancelled = c.CancelRequested
	step := After(f)
	if step == Retry && s.retryReaped(ctx, c, e, epoch) {
		return nil
	}
	if step == Retry {
		f.Temporary = false
		step = After(f)
	}
	resolveAfter := time.Time{}
	if step == Ask {
		resolveAfter = s.now()
	}
	return s.endReaped(ctx, c, epoch, step, resolveAfter)
}

// retryReaped fences the call and sends it again as this replica's own attempt,
// as the contract allows.
func (s *Service) retryReaped(ctx context.Context, c *Call, e *execution, epoch int64) bool {
	old := c.Epoch
	err := s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		return fence(ctx, tx, c, old, epoch)
	})
	if err != nil {
		return false
	}
	mine := *c
	mine.Epoch = epoch
	e.call = &mine
	started := s.background(func(context.Context) {
		if e.redispatch(outcome{phase: MaybeSent, err: hostError("REPLICA_LOST", "the replica that sent it is gone")}) != nil {
			_ = s.endReaped(s.work, &mine, epoch, EndFailed, time.Time{})
			return
		}
		s.start(e)
	})
	if !started {
		e.call = c
	}
	return started
}

// fence gives the call a new owner; an outcome of the old one finds no row.
func fence(ctx context.Context, tx tenant.Tx, c *Call, from, to int64) error {
	tag, err := tx.Exec(ctx, `UPDATE calls SET replica_epoch = $5, update_time = clock_timestamp()
		WHERE tenant_id = $1 AND call_id = $2 AND replica_epoch = $3 AND attempt = $4 AND state = 'DISPATCHING'`,
		tx.Tenant(), c.ID, from, c.Attempt, to)
	if err == nil && tag.RowsAffected() == 0 {
		err = errLost
	}
	return err
}

func (s *Service) endReaped(ctx context.Context, c *Call, epoch int64, step Step, resolveAfter time.Time) error {
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
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if c.Epoch != epoch {
			if err := fence(ctx, tx, c, c.Epoch, epoch); err != nil {
				return err
			}
		}
		mine, err := s.writeEnd(ctx, tx, &end, "system", resolveAfter)
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
			if s.deps.Observe != nil {
				s.deps.Observe(&end)
			}
		})
		return err
	})
}

// claimApproved dispatches what a replica approved and did not live to dispatch.
func (s *Service) claimApproved(ctx context.Context) error {
	fs, err := s.search(ctx, `SELECT c.tenant_id, c.call_id FROM calls c
		JOIN consents k ON k.tenant_id = c.tenant_id AND k.consent_id = c.consent_id
		WHERE c.state = 'CONSENT_REQUIRED' AND k.state = 'APPROVED' ORDER BY c.call_id LIMIT $1`)
	if err != nil {
		return err
	}
	for _, f := range fs {
		s.ConsentApproved(f.tenant, f.id)
	}
	return nil
}

func (s *Service) resolveDue(ctx context.Context) error {
	fs, err := s.search(ctx, `SELECT tenant_id, call_id FROM calls
		WHERE state = 'UNCERTAIN' AND resolve_after <= clock_timestamp() ORDER BY resolve_after LIMIT $1`)
	if err != nil {
		return err
	}
	return s.each(ctx, fs, "resolve an uncertain call", s.resolve)
}

// obeyCancels ends calls in execution here that somebody wants stopped, for when
// the signal was lost.
func (s *Service) obeyCancels(ctx context.Context) error {
	epoch, _ := s.replica.mayDispatch()
	fs, err := s.search(ctx, `SELECT tenant_id, call_id FROM calls
		WHERE state = 'DISPATCHING' AND replica_epoch = $1 AND cancel_requested ORDER BY call_id LIMIT $2`, epoch)
	if err != nil {
		return err
	}
	for _, f := range fs {
		s.mu.Lock()
		e := s.live[callKey{f.tenant, f.id}]
		s.mu.Unlock()
		if e != nil {
			e.cancel()
		}
	}
	return nil
}
