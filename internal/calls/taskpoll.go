package calls

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// lookAfterTasks finds tasks whose time has come.
func (s *Service) lookAfterTasks(ctx context.Context) error {
	fs, err := s.search(ctx, `SELECT tenant_id, call_id FROM call_tasks
		WHERE open AND next_poll <= clock_timestamp() AND claim_until <= clock_timestamp() ORDER BY next_poll LIMIT $1`)
	if err != nil {
		return err
	}
	s.tendAll(fs, s.polling, "look after a task", s.pollTask)
	return nil
}

// claimed is a task that this replica alone looks after for a while.
type claimed struct {
	call    *Call
	task    *Task
	all     []Interaction // of the task, sealed
	answers []keyed       // not told yet, sealed until opened
	now     time.Time     // of the database
	closed  bool          // the session is
}

func (k *claimed) pending() (n int, expired bool) {
	for _, i := range k.all {
		if i.State == Pending {
			n++
			expired = expired || !i.ExpireTime.After(k.now)
		}
	}
	return n, expired
}

// claim takes the task for a while. Answers that the server was not told are marked
// as told first: no answer is given twice, whatever happens to this replica.
func (s *Service) claim(ctx context.Context, t tenant.ID, id string) (k claimed, err error) {
	var sealed []byte
	err = s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		k = claimed{}
		err := tx.QueryRow(ctx, `UPDATE call_tasks SET claim_until = clock_timestamp() + $3::interval WHERE tenant_id = $1 AND call_id = $2
			AND open AND next_poll <= clock_timestamp() AND claim_until <= clock_timestamp() RETURNING clock_timestamp()`,
			tx.Tenant(), id, claimTime).Scan(&k.now)
		if err != nil {
			return noRowIsLost(err)
		}
		if k.call, err = byID(ctx, tx, id); err != nil {
			return err
		}
		if k.task, sealed, err = loadTask(ctx, tx, id); err != nil {
			return err
		}
		k.call.Task = k.task
		if err := tx.QueryRow(ctx, `SELECT state <> 'OPEN' FROM sessions WHERE tenant_id = $1 AND session_id = $2`, tx.Tenant(), k.call.SessionID).
			Scan(&k.closed); err != nil {
			return err
		}
		k.all, err = loadInteractions(ctx, tx, id, k.task.round)
		return err
	})
	if err != nil {
		return k, err
	}
	plain, err := s.deps.Vault.Open(ctx, t, vaultCall, id, vaultTask, sealed)
	k.task.id = string(plain)
	return k, err
}

// pollTask looks after one task: it tells the server what was answered, asks how
// far it is, and records what it says.
func (s *Service) pollTask(ctx context.Context, t tenant.ID, id string) error {
	if _, ok := s.replica.mayDispatch(); !ok {
		return nil
	}
	k, err := s.claim(ctx, t, id)
	if err != nil {
		return err
	}
	if err := s.pollClaimed(ctx, k); err != nil {
		return errors.Join(err, s.reschedule(ctx, k, failedPoll))
	}
	return nil
}

func (s *Service) pollClaimed(ctx context.Context, k claimed) error {
	e, err := s.resume(ctx, k.call)
	if err != nil {
		return err
	}
	e.recall(k.call)
	if done, err := s.beforePoll(ctx, e, &k); done || err != nil {
		return err
	}
	if err := s.tellAnswers(ctx, e, &k); err != nil {
		return err
	}
	r, err := e.tell(ctx, "tasks/get", k.task, nil)
	defer r.Release()
	switch {
	case err != nil || r.Error != nil && r.Error.Code != codeInvalidParams, r.Error == nil && r.Task == nil:
		// Nobody knows how the task is; that the server forgot it, its time tells.
		if k.task.ends != nil && !k.now.Before(*k.task.ends) {
			e.endTask("TASK_LOST", "the server keeps the task no longer and did not say how it ended")
			return nil
		}
		return s.reschedule(ctx, k, max(failedPoll, k.task.pause()))
	case r.Error != nil:
		e.endTask("TASK_LOST", "the server does not know the task any more")
		return nil
	}
	return s.heard(ctx, e, k, r)
}

// beforePoll ends what is over without asking again: the wish of a person, the
// ceiling, questions that nobody answers.
func (s *Service) beforePoll(ctx context.Context, e *execution, k *claimed) (done bool, err error) {
	c, t := k.call, k.task
	pending, expired := k.pending()
	switch {
	case c.State != Dispatching && c.State != InputRequired:
		e.stopTask(ctx, t)
		return true, s.closeTask(ctx, k.call)
	case c.CancelRequested && t.stopped == nil:
		e.stopTask(ctx, t)
		stopped := k.now
		t.stopped = &stopped
		if c.Effect == Read {
			e.endTask("CANCELLED", "the call was cancelled while the server worked on it")
			return true, nil
		}
	case t.stopped != nil && k.now.Sub(*t.stopped) > stopTime:
		e.endTask("CANCELLED", "the call was cancelled, and the server did not say what became of it")
		return true, nil
	case pending > 0 && (expired || k.closed):
		end := inputEnd{code: "INPUT_EXPIRED", message: "what the server asked was not answered in time", actor: "system", pending: WasExpired}
		if k.closed {
			end.code, end.message, end.pending = "SESSION_CLOSED", "the session was closed before the server was answered", WasCancelled
		}
		if err := s.endInput(ctx, c.Tenant, c.ID, end); err != nil {
			return true, err // it was answered just in time: the next look goes on
		}
		e.stopTask(ctx, t)
		return true, s.closeTask(ctx, c)
	case c.State == Dispatching && c.Ceiling != nil && k.now.After(*c.Ceiling):
		e.stopTask(ctx, t)
		e.endTask("TIMEOUT", "the task did not end within the call's ceiling")
		return true, nil
	}
	return false, nil
}

// tellAnswers sends what people answered, if what the call stands on still does.
func (s *Service) tellAnswers(ctx context.Context, e *execution, k *claimed) error {
	var ids []string
	for _, i := range k.all {
		if i.State == Pending || i.sent || i.response == nil {
			continue
		}
		result, err := s.deps.Vault.Open(ctx, k.call.Tenant, vaultInteraction, i.ID, "response", i.response)
		if err != nil {
			return err
		}
		ids, k.answers = append(ids, i.ID), append(k.answers, keyed{i.key, result})
	}
	if len(ids) == 0 {
		return nil
	}
	cur := *k.call
	if err := e.refresh(ctx, &cur); err != nil {
		return err
	}
	why := ""
	err := s.deps.DB.InTx(ctx, k.call.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		g, err := s.lockGround(ctx, tx, &cur, e)
		if err != nil {
			return err
		}
		if why = g.changed(); why != "" {
			return nil
		}
		return markSent(ctx, tx, ids, true)
	})
	if err != nil {
		return err
	}
	if why != "" {
		e.stopTask(ctx, k.task)
		e.endTask("GROUND_CHANGED", "the server's question was answered and not sent: %s", why)
		return errLost
	}
	r, err := e.tell(ctx, "tasks/update", k.task, appendAnswers([]byte(`,"inputResponses":`), k.answers))
	r.Release()
	if err != nil && r.Phase == sessions.NotSent {
		return errors.Join(err, s.deps.DB.InTx(ctx, k.call.Tenant, func(ctx context.Context, tx tenant.Tx) error {
			return markSent(ctx, tx, ids, false)
		}))
	}
	return nil // what came of it, the task tells
}

func markSent(ctx context.Context, tx tenant.Tx, ids []string, sent bool) error {
	_, err := tx.Exec(ctx, `UPDATE interactions SET sent = $3 WHERE tenant_id = $1 AND interaction_id = ANY ($2)`, tx.Tenant(), ids, sent)
	return err
}

// heard records what the server says of the task.
func (s *Service) heard(ctx context.Context, e *execution, k claimed, r sessions.Response) error {
	changed := k.task.Status != r.Task.Status || k.task.StatusMessage != cleanText(r.Task.StatusMessage, 1000)
	k.task.note(r.Task)
	switch r.Task.Status {
	case sessions.TaskCompleted, sessions.TaskFailed, sessions.TaskCancelled:
		// For the output schema; without it the result counts all the same.
		cur := *k.call
		if err := e.refresh(ctx, &cur); err != nil {
			s.log.InfoContext(e.scoped(ctx), "definition of a task", "tenant", e.key.tenant, "call", e.key.id, "error", detail(err))
		}
		o, state := e.concluded(k.call, r.Task, r.Release)
		if state == Uncertain && e.terms.StatusQuery != nil {
			e.finishByQuery(o)
			return nil
		}
		e.finish(o, state)
		return nil
	case sessions.TaskInputRequired:
		if asked, err := s.taskAsks(ctx, e, k, r.Task.Asks); asked || err != nil {
			return err
		}
	}
	if changed {
		if err := s.noteStatus(ctx, k); err != nil {
			return err
		}
	}
	return s.reschedule(ctx, k, k.task.pause())
}

// taskAsks puts the questions of a task that were not put before; keys are for its
// whole life. It reports whether there were any.
func (s *Service) taskAsks(ctx context.Context, e *execution, k claimed, asks []sessions.Ask) (bool, error) {
	known := map[string]bool{}
	for _, i := range k.all {
		known[i.key] = true
	}
	a := &inquiry{}
	for _, ask := range asks {
		if !known[ask.Key] {
			a.questions = append(a.questions, e.examine(ask, true))
		}
	}
	if len(a.questions) == 0 {
		return false, nil
	}
	why := a.violation()
	if len(k.all)+len(a.questions) > maxRounds*maxQuestions {
		why = "the server asked again and again"
	}
	if why != "" {
		e.stopTask(ctx, k.task)
		o := outcome{phase: Answered, err: &Error{Layer: LayerProtocol, Code: "INPUT_INVALID", Message: why}}
		e.finish(o, map[bool]State{true: Failed, false: Uncertain}[k.call.Effect == Read])
		return true, nil
	}
	sealed, err := s.sealRound(ctx, k.call, k.task.round, a)
	if err != nil {
		return true, err
	}
	err = s.deps.DB.InTx(ctx, k.call.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		locked, err := one(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, k.call.ID)
		if err != nil || locked.State != Dispatching && locked.State != InputRequired {
			return errors.Join(err, errLost)
		}
		if _, err := s.storeRound(ctx, tx, locked, sealed, inputTask, 0, nil); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE calls SET state = CASE WHEN $3 THEN 'INPUT_REQUIRED' ELSE state END, revision = revision + 1,
			update_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2`, tx.Tenant(), k.call.ID, a.pending())
		tx.AfterCommit(func() { s.changed(k.call.Tenant, k.call.ID) })
		return err
	})
	if err != nil {
		return true, err
	}
	pause := k.task.pause()
	if !a.pending() {
		pause = minPoll // the host's own answers are told at the next look
	}
	return true, s.reschedule(ctx, k, pause)
}

func (s *Service) noteStatus(ctx context.Context, k claimed) error {
	return s.deps.DB.InTx(ctx, k.call.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE calls SET revision = revision + 1, update_time = clock_timestamp()
			WHERE tenant_id = $1 AND call_id = $2 AND state IN ('DISPATCHING', 'INPUT_REQUIRED')`, tx.Tenant(), k.call.ID)
		tx.AfterCommit(func() { s.changed(k.call.Tenant, k.call.ID) })
		return err
	})
}

// reschedule gives the task back, to be looked at after the pause. What became due
// meanwhile, such as an answer, stays due.
func (s *Service) reschedule(ctx context.Context, k claimed, pause time.Duration) error {
	t := k.task
	return s.deps.DB.InTx(context.WithoutCancel(ctx), k.call.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE call_tasks SET status = $3, status_message = $4, poll_ms = $5, end_time = $6, cancel_time = $7,
			next_poll = CASE WHEN next_poll > $8 THEN clock_timestamp() ELSE clock_timestamp() + $9::interval END,
			claim_until = '-infinity', update_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2 AND open`,
			tx.Tenant(), k.call.ID, t.Status, t.StatusMessage, t.interval.Milliseconds(), t.ends, t.stopped, k.now, pause)
		return err
	})
}

// closeTask makes sure that nobody looks after the task any more.
func (s *Service) closeTask(ctx context.Context, c *Call) error {
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error { return closeTaskTx(ctx, tx, c.ID) })
}

func closeTaskTx(ctx context.Context, tx tenant.Tx, callID string) error {
	_, err := tx.Exec(ctx, `UPDATE call_tasks SET open = false, update_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2`,
		tx.Tenant(), callID)
	return err
}

// wakeTask makes a task due at once, after an answer or a cancel.
func wakeTask(ctx context.Context, tx tenant.Tx, callID string) error {
	_, err := tx.Exec(ctx, `UPDATE call_tasks SET next_poll = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2 AND open`, tx.Tenant(), callID)
	return err
}

func noRow(err error) bool { return errors.Is(err, pgx.ErrNoRows) }
