package calls

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	// minPoll and maxPoll bound how often a server is asked about a task, whatever it
	// wishes; firstPoll is for one that has no wish.
	minPoll   = 500 * time.Millisecond
	maxPoll   = time.Minute
	firstPoll = 2 * time.Second
	// failedPoll is the least pause after an answer that could not be had.
	failedPoll = 5 * time.Second
	// pollTime bounds one look at a task, and claimTime for how long the replica that
	// looks keeps the others away.
	pollTime  = 20 * time.Second
	claimTime = 90 * time.Second
	// stopTime is how long a write that was asked to stop is waited for.
	stopTime = 30 * time.Second
	// maxPolling bounds the tasks that a replica looks at at a time.
	maxPolling = 32
	// attemptTask is how the attempt is filed that made a task.
	attemptTask = "TASK"
	auditTask   = "task.started"
	vaultTask   = "task"
)

// Task is a call that its server carries out in its own time: nothing of a replica
// is held for it, and any replica looks after it.
type Task struct {
	// Status is working, input_required, completed, failed or cancelled; the message
	// is foreign text.
	Status, StatusMessage string
	StartTime             time.Time
	// PollTime is when the server is asked next.
	PollTime time.Time

	id       string
	interval time.Duration
	ends     *time.Time // when the server forgets it
	round    int        // of its questions
	stopped  *time.Time // when the server was asked to stop it
	open     bool
}

// pause is the time to the next look, with a tenth of jitter either way.
func (t *Task) pause() time.Duration {
	d := t.interval
	if d == 0 {
		d = firstPoll
	}
	d = min(max(d, minPoll), maxPoll)
	return d + time.Duration((rand.Float64()-0.5)*float64(d)/5)
}

// note takes what the server says of the task.
func (t *Task) note(s *sessions.Task) {
	t.Status, t.StatusMessage, t.interval, t.ends = s.Status, cleanText(s.StatusMessage, 1000), s.PollInterval, nil
	if s.TTL != nil {
		end := t.StartTime.Add(*s.TTL)
		t.ends = &end
	}
}

// become records that the server made a task of the call: the attempt is answered,
// the call goes on without a replica.
func (e *execution) become(o outcome) {
	defer o.done()
	switch e.leaveBehind(func(ctx context.Context) error { return e.recordTask(ctx, o) }, errRepeated, errTaskReused) {
	case errTaskReused:
		e.reused(o)
	case errRepeated:
		e.persist(func(ctx context.Context) error { return e.adopt(ctx, e.snapshot()) })
	}
}

// errTaskReused says that another call of the same connection has this task.
var errTaskReused = errors.New("calls: the task is that of another call")

// reused ends a call whose server gave it the task of another call: nobody could
// tell whose result it will be. The task itself goes on for the other one.
func (e *execution) reused(o outcome) {
	o.task, o.unreadable = nil, true
	o.err = &Error{Layer: LayerProtocol, Code: sessions.ResultInvalid, Message: "the server gave the call a task that another call has already"}
	o.findings = append(o.findings, "TASK_ID_REUSED: the server gave two calls one task")
	if e.snapshot().Effect != Read {
		o.noteUnreadable()
	}
	e.end(o, After(e.failure(o)))
}

// taskKey names a task among those of its tenant without telling its id.
func (e *execution) taskKey(id string) []byte {
	h := sha256.New()
	for _, part := range []string{e.conn.Server, fmt.Sprint(e.conn.Registration), e.conn.Subject.Source, e.conn.Subject.Value, e.conn.Session, id} {
		fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	return h.Sum(nil)
}

func (e *execution) recordTask(ctx context.Context, o outcome) error {
	s := e.s
	c := *e.snapshot()
	now := s.now()
	c.UpdateTime = now
	c.Attempts = slices.Clone(c.Attempts)
	c.Attempts[len(c.Attempts)-1].close(o, now)
	c.Findings = append(slices.Clip(c.Findings), o.findings...)
	task := Task{id: o.task.ID, StartTime: now, round: e.rounds() + 1, open: true}
	task.note(o.task)
	task.PollTime = now.Add(task.pause())
	c.Task = &task
	sealed, err := s.deps.Vault.Seal(ctx, c.Tenant, vaultCall, c.ID, vaultTask, []byte(task.id))
	if err != nil {
		return err
	}
	mine := false
	err = s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		err := lockAttempt(ctx, tx, &c, Dispatching)
		if mine = err == nil || errors.Is(err, errCancelWanted); !mine {
			if errors.Is(err, errLost) {
				return e.keepEvidence(ctx, tx, &c, o)
			}
			return err
		}
		err = tx.QueryRow(ctx, `UPDATE calls SET findings = $3, negotiation_us = $4, execution_us = $5, cancel_requested = cancel_requested OR $6,
			revision = revision + 1, update_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2 RETURNING revision`, tx.Tenant(), c.ID,
			notNil(c.Findings), c.Timings.Negotiation.Microseconds(), c.Timings.Execution.Microseconds(), e.isCancelled()).Scan(&c.Revision)
		if err != nil {
			return err
		}
		if err := endAttempt(ctx, tx, &c, o); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `INSERT INTO call_tasks (tenant_id, call_id, task, status, status_message, poll_ms, next_poll, end_time, round,
			start_time, task_key) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT (tenant_id, task_key) WHERE open DO NOTHING`,
			tx.Tenant(), c.ID, sealed, task.Status, task.StatusMessage, task.interval.Milliseconds(), task.PollTime, task.ends, task.round,
			task.StartTime, e.taskKey(task.id))
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return errTaskReused
		}
		_, err = s.deps.Audit.Append(ctx, tx, s.entry(&c, auditTask, e.actor, map[string]any{"status": task.Status}))
		return err
	})
	if err != nil {
		return err
	}
	if !mine {
		e.stopTask(ctx, &task) // the call is somebody else's, and nobody would look after it
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

// followOn is follow for a caller: when the call became a task, what is left of the
// wait is waited for it.
func (s *Service) followOn(ctx context.Context, p tenant.Principal, e *execution, wait time.Duration) (*Call, error) {
	deadline := time.Now().Add(wait)
	c, err := s.follow(ctx, e, wait)
	if err != nil || c.Settled() || c.Task == nil {
		return c, err
	}
	return s.await(ctx, p, e.key, time.Until(deadline), (*Call).Settled)
}

// loadTask reads a call's task, nil if it has none. Its id stays sealed.
func loadTask(ctx context.Context, tx tenant.Tx, callID string) (*Task, []byte, error) {
	var t Task
	var sealed []byte
	var ms int64
	err := tx.QueryRow(ctx, `SELECT task, status, status_message, poll_ms, next_poll, end_time, round, cancel_time, start_time, open FROM call_tasks
		WHERE tenant_id = $1 AND call_id = $2`, tx.Tenant(), callID).
		Scan(&sealed, &t.Status, &t.StatusMessage, &ms, &t.PollTime, &t.ends, &t.round, &t.stopped, &t.StartTime, &t.open)
	if noRow(err) {
		return nil, nil, nil
	}
	t.interval = time.Duration(ms) * time.Millisecond
	return &t, sealed, err
}

// tell sends one of the task's methods with the connection key of the call's user.
func (e *execution) tell(ctx context.Context, method string, t *Task, more []byte) (sessions.Response, error) {
	ctx, cancel := context.WithTimeout(ctx, pollTime)
	defer cancel()
	params := canonical.AppendString([]byte(`{"taskId":`), t.id)
	params = append(append(params, more...), '}')
	return e.s.deps.Sender.Do(ctx, e.conn, e.target, sessions.Request{Method: method, Name: t.id, Params: params,
		ResultBytes: int64(e.limits.ResultBytes), Timeout: pollTime, BeforeSend: func() error { return e.s.beforeSend(0, time.Time{}) }})
}

// stopTask asks the server once to stop a task; whether it does, the next look
// tells.
func (e *execution) stopTask(ctx context.Context, t *Task) {
	r, err := e.tell(ctx, "tasks/cancel", t, nil)
	r.Release()
	if err != nil {
		e.s.log.InfoContext(e.scoped(ctx), "stop a task", "tenant", e.key.tenant, "call", e.key.id, "error", detail(err))
	}
}

// endTask ends the call of a task that nobody waits for any more: a read has
// failed, of a write it is not known what became of it.
func (e *execution) endTask(code, format string, args ...any) {
	o := outcome{phase: MaybeSent, err: hostError(code, format, args...)}
	switch {
	case e.snapshot().Effect == Read && code == "CANCELLED":
		e.finish(o, Cancelled)
	case e.snapshot().Effect == Read:
		e.finish(o, Failed)
	case e.terms.StatusQuery != nil:
		e.finishByQuery(o)
	default:
		e.finish(o, Uncertain)
	}
}

// overAtOnce ends a call whose task had ended when the server told of it: there is
// nothing to look after. It reports whether that was so.
func (e *execution) overAtOnce(o outcome) bool {
	switch o.task.Status {
	case sessions.TaskCompleted, sessions.TaskFailed, sessions.TaskCancelled:
	default:
		return false
	}
	o, state := e.concluded(e.snapshot(), o.task, o.release)
	defer o.done()
	f := e.failure(o)
	f.Temporary = false
	switch step := After(f); {
	case state == Uncertain && f.StatusQuery:
		e.end(o, Ask)
	case state == Failed && step != EndFailed, state == Cancelled && f.Phase != Answered:
		e.end(o, step) // an attempt before this one may have run, or a person gave up a read
	default:
		e.finish(o, state)
	}
	return true
}

// concluded is what a task that has ended came to. That it was cancelled is an
// answer to our wish, and then taken at the server's word. One that its server
// gave up by itself says nothing of how far it had come: a write is UNCERTAIN.
func (e *execution) concluded(c *Call, t *sessions.Task, release func()) (outcome, State) {
	o := outcome{phase: Answered, release: release}
	switch t.Status {
	case sessions.TaskCancelled:
		o.err = hostError("CANCELLED", "the server says that the task was cancelled")
		if c.Effect != Read && (c.Task == nil || c.Task.stopped == nil) {
			o.err.Message += ", although nobody asked for that; a part of it may be done"
			return o, Uncertain
		}
		return o, Cancelled
	case sessions.TaskFailed:
		o.err = protocolFailure(c.Kind, t.Error)
		return o, Failed
	}
	result, err := sessions.ReadResult(t.Result)
	result.Release()
	if err != nil || result.ResultType != sessions.ResultComplete {
		o.err = &Error{Layer: LayerProtocol, Code: sessions.ResultInvalid, Message: "the task's result is none of a tool"}
		if f, ok := fault.As(err); ok {
			o.err.Message += ": " + cleanText(f.Message, 1000)
		}
		o.result, o.findings = cleanResult(t.Result)
		if c.Effect != Read {
			o.noteUnreadable()
			return o, Uncertain
		}
		return o, Failed
	}
	e.readResult(&o, c, &result)
	if o.state != Succeeded {
		return o, Failed
	}
	return o, Succeeded
}
