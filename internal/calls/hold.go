package calls

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	// holdMargin is the most that is left of a call's ceiling when a question of a
	// legacy server ends, so that the server can still answer the call.
	holdMargin = 5 * time.Second
	// settleTime bounds how long an answer waits for its record.
	settleTime = 10 * time.Second
	// haltTime is how long a server may take to end a call after its question ended
	// because this replica stops.
	haltTime = time.Second
)

// onAsk answers a question of a legacy server while its request stays open here. A
// person may answer at any replica; this one passes it on. It runs beside the
// request, which does not end before it returns.
func (e *execution) onAsk(ctx context.Context, a sessions.Ask) sessions.Answer {
	q := e.examine(a, false)
	if q.own {
		e.noteRefusal(ctx, q)
		return q.answer
	}
	if e.isCancelled() {
		return dismissed(q)
	}
	if e.s.stopping() {
		defer e.halt()
		return dismissed(q)
	}
	i, err := e.hold(ctx, q)
	if errors.Is(err, errCancelWanted) {
		return dismissed(q)
	}
	if err != nil {
		e.s.log.WarnContext(e.scoped(ctx), "a server's question could not be put", "tenant", e.key.tenant, "call", e.key.id, "error", detail(err))
		return broken()
	}
	end, stopping := e.awaitAnswer(ctx, i)
	if stopping {
		defer e.halt()
	}
	return e.settle(ctx, q, i, end)
}

// stopping reports whether this replica drains: nobody can answer here any more
// what it holds.
func (s *Service) stopping() bool {
	select {
	case <-s.drain:
		return true
	default:
		return false
	}
}

// halt ends the request whose question ended because this replica stops, unless
// the server ends it at once: what the server says in time is what counts.
func (e *execution) halt() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.halted || e.stop == nil {
		return
	}
	e.halted = true
	time.AfterFunc(haltTime, e.stop)
}

// asker serves a server's questions, nil where none was offered to answer any.
func (e *execution) asker() func(context.Context, sessions.Ask) sessions.Answer {
	if d := e.target.Declare; !d.ElicitationForm && !d.ElicitationURL && !d.Sampling {
		return nil
	}
	return e.onAsk
}

// margin is what is left of the ceiling when a question ends.
func (e *execution) margin() time.Duration { return min(holdMargin, e.limits.Ceiling/10) }

// dismissed is what a server is told when nobody answers.
func dismissed(q question) sessions.Answer {
	if q.kind == Sampling {
		return rejected(codeRejected, "the user did not answer")
	}
	return actionResult(Dismiss)
}

// broken is what a server is told when the host could not put its question: no
// person has said anything.
func broken() sessions.Answer { return rejected(codeInternal, "the question could not be put") }

// noteRefusal records a question that the host refused by itself.
func (e *execution) noteRefusal(ctx context.Context, q question) {
	if q.refusal == "" {
		return
	}
	c := e.update(func(c *Call) {
		c.Findings = append(slices.Clip(c.Findings), "INPUT_REFUSED: "+q.refusal+": "+cleanText(q.detail, 300))
	})
	err := e.s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := e.s.deps.Audit.Append(ctx, tx, e.s.entry(c, auditRefused, "system", map[string]any{
			"questions": []map[string]any{{"kind": q.kind, "digest": q.digest(), "bytes": len(q.params), "refusal": q.refusal}}}))
		return err
	})
	if err != nil {
		e.s.log.WarnContext(e.scoped(ctx), "record a refused question", "tenant", e.key.tenant, "call", e.key.id, "error", detail(err))
	}
}

// hold shows the question with the call, which is INPUT_REQUIRED while its request
// stays open. A read that was in memory only is recorded first.
func (e *execution) hold(ctx context.Context, q question) (Interaction, error) {
	if err := e.harden(ctx); err != nil {
		return Interaction{}, err
	}
	s := e.s
	c := *e.snapshot()
	sealed, err := s.sealRound(ctx, &c, 0, &inquiry{questions: []question{q}})
	if err != nil {
		return Interaction{}, err
	}
	until := c.Ceiling.Add(-e.margin())
	var expire time.Time
	err = s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		if err := lockAttempt(ctx, tx, &c, Dispatching, InputRequired); err != nil {
			return err
		}
		// Only a statement after the lock sees the round of a question beside this one.
		err := tx.QueryRow(ctx, `SELECT 1 + COALESCE(max(round), 0) FROM call_inputs WHERE tenant_id = $1 AND call_id = $2`, tx.Tenant(), c.ID).
			Scan(&sealed.number)
		if err != nil {
			return err
		}
		if expire, err = s.storeRound(ctx, tx, &c, sealed, inputHeld, c.Epoch, &until); err != nil {
			return err
		}
		return tx.QueryRow(ctx, `UPDATE calls SET state = 'INPUT_REQUIRED', revision = revision + 1, update_time = clock_timestamp()
			WHERE tenant_id = $1 AND call_id = $2 RETURNING revision`, tx.Tenant(), c.ID).Scan(&c.Revision)
	})
	if errors.Is(err, errCancelWanted) {
		e.cancel()
	}
	if err != nil {
		return Interaction{}, err
	}
	shown := sealed.interactions(&c, s.now(), expire)
	e.update(func(now *Call) {
		now.State, now.Revision = InputRequired, max(now.Revision, c.Revision)
		now.Interactions = append(slices.Clip(now.Interactions), shown...)
	})
	s.changed(e.key.tenant, e.key.id)
	return shown[0], nil
}

// awaitAnswer waits until the question ends: it returns what it ends as when nobody
// has answered by then, and whether that is because this replica stops.
func (e *execution) awaitAnswer(ctx context.Context, i Interaction) (end InteractionState, stopping bool) {
	until := time.NewTimer(time.Until(e.deadline) - e.margin())
	defer until.Stop()
	for {
		ch, release := e.s.hub.watch(e.key)
		if end := e.lookAt(ctx, i); end != "" {
			release()
			return end, false
		}
		t := time.NewTimer(e.s.cfg.Poll)
		select {
		case <-ch:
		case <-t.C:
		case <-until.C:
			end = WasExpired
		case <-ctx.Done():
			end = Withdrawn
		case <-e.s.drain:
			end, stopping = WasCancelled, true
		}
		t.Stop()
		release()
		if end != "" {
			return end, stopping
		}
	}
}

// lookAt says what an unanswered question ends as, "" while it is to be waited for.
func (e *execution) lookAt(ctx context.Context, i Interaction) (end InteractionState) {
	var pending, open, over bool
	err := e.s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		return tx.QueryRow(ctx, `SELECT i.state = 'PENDING', s.state = 'OPEN', i.expire_time <= clock_timestamp() FROM interactions i, sessions s
			WHERE i.tenant_id = $1 AND i.interaction_id = $2 AND s.tenant_id = $1 AND s.session_id = $3`,
			tx.Tenant(), i.ID, e.snapshot().SessionID).Scan(&pending, &open, &over)
	})
	switch {
	case err != nil: // the database is away: there is time until the ceiling
		return ""
	case !pending || over:
		return WasExpired
	case !open:
		return WasCancelled
	}
	return ""
}

// settle ends the question and lets the call go on under its old attempt, before
// the server hears anything: what was answered meanwhile counts, else end.
func (e *execution) settle(ctx context.Context, q question, i Interaction, end InteractionState) sessions.Answer {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	c := e.snapshot()
	var got Interaction
	revision := 0
	err := errors.New("not tried")
	for try := 1; err != nil && ctx.Err() == nil && !errors.Is(err, errLost); try++ {
		if try > 1 {
			t := time.NewTimer(Delay(try, 0, 0))
			select {
			case <-t.C:
			case <-ctx.Done():
			}
			t.Stop()
		}
		err = e.s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) (err error) {
			got, revision, err = e.s.settleTx(ctx, tx, c, i.ID, end)
			return err
		})
	}
	if err != nil {
		// What the call becomes tells: its outcome is written with all of its questions.
		e.s.log.WarnContext(e.scoped(ctx), "settle a server's question", "tenant", e.key.tenant, "call", e.key.id, "error", detail(err))
		return broken()
	}
	e.update(func(c *Call) {
		c.Interactions = slices.DeleteFunc(slices.Clone(c.Interactions), func(x Interaction) bool { return x.ID == i.ID })
		if c.Revision = max(c.Revision, revision); len(c.Interactions) == 0 {
			c.State, c.Interactions = Dispatching, nil
		}
	})
	e.s.changed(e.key.tenant, e.key.id)
	if q.kind == Sampling && got.State != WasAnswered {
		return dismissed(q)
	}
	if got.response == nil {
		return actionResult(Dismiss)
	}
	result, err := e.s.deps.Vault.Open(ctx, e.key.tenant, vaultInteraction, i.ID, "response", got.response)
	if err != nil {
		return broken()
	}
	return sessions.Answer{Result: result}
}

func (s *Service) settleTx(ctx context.Context, tx tenant.Tx, c *Call, id string, end InteractionState) (got Interaction, revision int, err error) {
	locked, err := one(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, c.ID)
	if err != nil {
		return got, 0, err
	}
	// A question beside this one that was settled after all were answered has let
	// the call go on already.
	onward := locked.State == Dispatching
	if locked.State != InputRequired && !onward || locked.Epoch != c.Epoch || locked.Attempt != c.Attempt {
		return got, 0, errLost // another replica has ended it
	}
	tag, err := tx.Exec(ctx, `UPDATE interactions SET state = $3, answered_how = 'HOST', answer_time = clock_timestamp()
		WHERE tenant_id = $1 AND interaction_id = $2 AND state = 'PENDING'`, tx.Tenant(), id, string(end))
	if err != nil {
		return got, 0, err
	}
	if tag.RowsAffected() > 0 && end == WasExpired {
		if _, err := s.deps.Audit.Append(ctx, tx, s.entry(locked, auditExpired, "system", map[string]any{"interactionId": id})); err != nil {
			return got, 0, err
		}
	}
	open := 0
	err = tx.QueryRow(ctx, `SELECT state, response, (SELECT count(*) FROM interactions x WHERE x.tenant_id = $1 AND x.call_id = i.call_id AND x.state = 'PENDING')
		FROM interactions i WHERE tenant_id = $1 AND interaction_id = $2`, tx.Tenant(), id).Scan(&got.State, &got.response, &open)
	if err != nil || open > 0 || onward {
		return got, locked.Revision, err
	}
	return got, locked.Revision + 1, s.unhold(ctx, tx, c)
}

// unhold lets a locked call that was held go on under its attempt.
func (s *Service) unhold(ctx context.Context, tx tenant.Tx, c *Call) error {
	_, err := tx.Exec(ctx, `UPDATE calls SET state = 'DISPATCHING', revision = revision + 1, update_time = clock_timestamp()
		WHERE tenant_id = $1 AND call_id = $2 AND state = 'INPUT_REQUIRED' AND replica_epoch = $3 AND attempt = $4`,
		tx.Tenant(), c.ID, c.Epoch, c.Attempt)
	if err != nil {
		return err
	}
	return closeInput(ctx, tx, c.ID, Withdrawn)
}

// held is the call as this replica last knew it, for released.
func (e *execution) held() *Call {
	c := *e.snapshot()
	return &c
}

// released makes sure in a transaction that ends or repeats an attempt that no
// question holds the call any more, for when that could not be written before.
func (e *execution) released(ctx context.Context, tx tenant.Tx, c *Call) error {
	if c.State != InputRequired {
		return nil
	}
	if err := e.s.unhold(ctx, tx, c); err != nil {
		return err
	}
	c.State = Dispatching
	return nil
}

// endHeld ends a call whose question was held by a replica that is gone, and with
// it the request.
func (s *Service) endHeld(ctx context.Context, c *Call, epoch int64) error {
	end := inputEnd{code: "REPLICA_LOST", message: "the replica that held the server's question is gone", actor: "system",
		pending: Withdrawn, phase: MaybeSent}
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		return s.endInputTx(ctx, tx, c.ID, end, func(now *Call) error {
			if now.Epoch != c.Epoch || now.Attempt != c.Attempt {
				return errLost
			}
			var free bool
			err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM call_inputs WHERE tenant_id = $1 AND call_id = $2 AND phase = 'HELD')
				AND ($3::bigint = $4::bigint OR NOT EXISTS (SELECT 1 FROM replicas WHERE epoch = $3::bigint AND state = 'ALIVE'))`, tx.Tenant(), c.ID, c.Epoch, epoch).Scan(&free)
			if err == nil && !free {
				err = errLost
			}
			return err
		})
	})
}
