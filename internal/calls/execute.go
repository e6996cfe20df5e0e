package calls

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// execution is a call that this replica is carrying out.
type execution struct {
	s       *Service
	key     callKey
	actor   string
	subject contract.Principal
	server  catalog.Server
	terms   *contract.Terms
	limits  contract.Limits
	def     *catalog.Definition
	conn    sessions.Key
	target  sessions.Target
	origins []string // that a question may send a person to
	round   *round   // what the server asked last and was answered, nil before it asked
	// plain is a read that lives in memory until it is recorded.
	plain bool
	// sendBefore is when the window of a recorded attempt closes, and deadline the
	// ceiling of the call, both by the monotonic clock. The dispatch transaction
	// sets them before the attempt runs; a plain read has no window.
	sendBefore, deadline time.Time
	maybe                bool // an earlier attempt may have been executed
	touched              bool // some attempt was, or may have been, sent
	anew                 bool // a list of this moment is asked for before the next
	done                 chan struct{}

	mu        sync.Mutex
	call      *Call // replaced, never changed in place
	cancelled bool
	halted    bool               // what the server asked ended because this replica stops
	stop      context.CancelFunc // ends the request under way; nil between attempts
	finishing bool               // a plain read is being recorded with its outcome
	noticed   bool               // the server said something that is not recorded
	noting    bool               // a goroutine records it
	err       error              // why the outcome could not be recorded
}

func (s *Service) newExecution(pl *plan) *execution {
	p := pl.principal
	return &execution{s: s, key: callKey{p.Tenant, pl.call.ID}, actor: p.Actor(), server: pl.server,
		subject: contract.Principal{Subject: p.Subject.Value, Source: p.Subject.Source, Groups: p.Groups, Project: p.Project, Role: p.Role.String()},
		terms:   pl.terms, limits: pl.active.Contract.Limits, def: pl.definition(), done: make(chan struct{}), call: pl.call,
		conn: connectionKey(pl.server, pl.call), target: TargetOf(pl.server, pl.active.Contract),
		origins: pl.active.Contract.Reverse.ElicitationURL}
}

func connectionKey(srv catalog.Server, c *Call) sessions.Key {
	return keyOf(srv, c.Tenant, c.Subject, c.SessionID)
}

// keyOf names the connection of a user's session to a server.
func keyOf(srv catalog.Server, t tenant.ID, subject tenant.Subject, session string) sessions.Key {
	k := sessions.Key{Tenant: t, Server: srv.ID, Registration: srv.Registration}
	switch srv.Isolation {
	case catalog.PerSession:
		k.Subject, k.Session = subject, session
	case catalog.PerTenant:
	default:
		k.Subject = subject
	}
	return k
}

// snapshot returns the call as it stands; it must not be changed.
func (e *execution) snapshot() *Call {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.call
}

// update replaces the call by a changed copy and wakes those who wait for it.
func (e *execution) update(change func(c *Call)) *Call {
	e.mu.Lock()
	c := *e.call
	change(&c)
	e.call = &c
	e.mu.Unlock()
	return &c
}

// start runs an admitted execution on a goroutine that Stop waits for. The
// caller holds a place in s.running.
func (s *Service) start(e *execution) {
	s.mu.Lock()
	s.live[e.key] = e
	s.running.Add(1)
	s.mu.Unlock()
	go func() {
		defer s.running.Done()
		e.run()
	}()
}

func (e *execution) run() {
	defer e.leave()
	for {
		o := e.send()
		if o.state == Succeeded {
			e.finish(o, Succeeded)
			o.done()
			return
		}
		if o.task != nil {
			if !e.overAtOnce(o) {
				e.become(o)
			}
			return
		}
		if o.asked != nil {
			if e.meet(&o) {
				continue
			}
			return
		}
		f := e.failure(o)
		step := After(f)
		if step == Retry {
			o.done() // only its error is of interest, and there is a pause
			if e.again(o, f.Delay, nil) {
				continue
			}
			f = e.failure(o) // somebody may have cancelled it meanwhile
			f.Temporary = false
			step = After(f)
		}
		e.end(o, step)
		o.done()
		return
	}
}

func (e *execution) leave() {
	c := e.snapshot()
	k := requestKey{e.key.tenant, c.Subject, c.RequestID}
	e.s.mu.Lock()
	if e.s.live[e.key] == e {
		delete(e.s.live, e.key)
	}
	if e.s.pending[k] == e {
		delete(e.s.pending, k)
	}
	e.s.mu.Unlock()
	close(e.done)
	e.s.hub.wake(e.key)
}

func (e *execution) end(o outcome, step Step) {
	switch step {
	case EndCancelled:
		if o.err == nil || o.err.Code != codeStopped {
			o.err = hostError("CANCELLED", "the call was cancelled")
		}
		e.finish(o, Cancelled)
	case Ask:
		e.finishByQuery(o)
	case EndUncertain:
		e.finish(o, Uncertain)
	default:
		e.finish(o, Failed)
	}
}

func (e *execution) failure(o outcome) Failure {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.call
	f := Failure{Effect: c.Effect, Phase: o.phase, Idempotent: e.terms.Idempotency.Offered() && c.IdempotencyKey != "",
		StatusQuery: e.terms.StatusQuery != nil, Temporary: o.temporary, Refused: o.refused, Queued: o.queued, Unreadable: o.unreadable,
		Cancelled: e.cancelled || o.err != nil && o.err.Code == codeStopped, Asked: e.round != nil,
		Attempt: c.tries(),
		Retries: e.terms.Retry.Max, Left: time.Until(e.deadline), Delay: Delay(c.tries(), o.retryAfter, rand.Float64())}
	if e.s.work.Err() != nil {
		f.Temporary = false // this replica stops; nothing new is begun
	}
	// An attempt before this one may have run: that this one was not sent, or was
	// answered with an error, says nothing of it. A read is harmless all the same.
	if e.maybe && (o.phase == NotSent || c.Effect != Read) {
		f.Phase = MaybeSent
	}
	if o.phase == MaybeSent {
		e.maybe = true
	}
	return f
}

// age is how long ago the call's definition may have been observed.
func (e *execution) age(c *Call) time.Duration {
	if c.Effect == Read {
		return e.limits.DefinitionAge.Read
	}
	return e.limits.DefinitionAge.Write
}

// send makes one attempt. No transaction is open while the server works.
func (e *execution) send() outcome {
	c := e.snapshot()
	timeout := e.limits.Timeout
	if e.terms.Timeout > 0 {
		timeout = e.terms.Timeout
	}
	ctx, stop := context.WithDeadline(e.s.work, e.deadline)
	defer stop()
	e.mu.Lock()
	if e.cancelled {
		e.mu.Unlock()
		return outcome{phase: NotSent, err: hostError("CANCELLED", "the call was cancelled before it was sent")}
	}
	e.stop = stop
	e.mu.Unlock()
	started := e.s.now()
	epoch, window := c.Epoch, e.sendBefore
	method, params := onWire(c)
	resp, err := e.s.deps.Sender.Do(ctx, e.conn, e.target, sessions.Request{Method: method, Name: c.Name,
		Params: e.round.params(params), Meta: e.meta(c), Schema: e.def.InputSchema, ResultBytes: int64(e.limits.ResultBytes),
		Timeout: timeout, Queue: queueTime(window), BeforeSend: func() error { return e.s.beforeSend(epoch, window) },
		OnAsk: e.asker(), OnNotice: e.onNotice})
	e.mu.Lock()
	e.stop = nil
	e.mu.Unlock()
	o := e.read(c, resp, err)
	e.touched = e.touched || o.phase != NotSent
	e.update(func(c *Call) {
		c.Timings.Negotiation += resp.Timings.Negotiation
		c.Timings.Execution += resp.Timings.Execution
		if resp.Timings.Execution == 0 {
			c.Timings.Execution += e.s.now().Sub(started)
		}
	})
	return o
}

// queueTime is how long an attempt may wait for its turn on a connection that has
// one call at a time: a recorded one must be sent in its window.
func queueTime(window time.Time) time.Duration {
	if window.IsZero() {
		return 0
	}
	return max(time.Until(window), time.Millisecond)
}

// scoped is a context whose log lines name the caller's trace.
func (e *execution) scoped(ctx context.Context) context.Context {
	return telemetry.With(ctx, telemetry.Scope{Trace: e.snapshot().Trace.ID()})
}

var errTooLate = fault.New(fault.Unavailable, "SEND_WINDOW_PASSED", "the attempt was not sent in its window")

// beforeSend is asked as late as possible: a replica that was paused, that was
// taken for dead, or that cannot write its heartbeat, sends nothing. A zero
// window is that of a read in memory.
func (s *Service) beforeSend(epoch int64, window time.Time) error {
	now, ok := s.replica.mayDispatch()
	if !ok {
		return errIsolated
	}
	if !window.IsZero() && (now != epoch || time.Now().After(window)) {
		return errTooLate
	}
	return nil
}

// again prepares another attempt after the delay, with what the host answered of
// its own, and reports whether there is one.
func (e *execution) again(o outcome, delay time.Duration, own *inquiry) bool {
	if e.s.pace != nil {
		delay = e.s.pace(delay)
	}
	t := time.NewTimer(delay)
	defer t.Stop()
	select {
	case <-t.C:
	case <-e.s.work.Done():
		return false
	}
	if o.relist && !e.snapshot().Recorded {
		if err := e.relist(); err != nil {
			return false
		}
	}
	if again, settled := e.againPlain(o, own); settled {
		return again
	}
	err := e.redispatch(o, own)
	if errors.Is(err, errCancelWanted) {
		e.cancel()
		return false
	}
	if err != nil && !errors.Is(err, errLost) {
		e.s.log.InfoContext(e.scoped(e.s.work), "no further attempt", "tenant", e.key.tenant, "call", e.key.id, "reason", detail(err))
	}
	return err == nil
}

// againPlain counts another attempt of a read in memory, unless the call was
// cancelled; a read that meanwhile was recorded goes through a transaction like
// any other call.
func (e *execution) againPlain(o outcome, own *inquiry) (again, settled bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cancelled {
		return false, true
	}
	if !e.plain || e.call.Recorded {
		return false, false
	}
	now := e.s.now()
	c := *e.call
	c.Attempts = append([]Attempt(nil), c.Attempts...)
	c.Attempts[len(c.Attempts)-1].close(o, now)
	if own != nil {
		e.round = own.own(e.rounds() + 1)
		c.Findings = append(slices.Clip(c.Findings), o.findings...)
	}
	c.Attempt++
	c.Attempts = append(c.Attempts, Attempt{Number: c.Attempt, Epoch: c.Epoch, StartTime: now})
	e.call = &c
	return true, true
}

func (a *Attempt) close(o outcome, now time.Time) {
	a.Phase, a.EndTime, a.Outcome = o.phase, &now, o.word()
	if o.err != nil {
		a.Detail = o.err.Code
	}
}

// startPlain begins a read that is recorded with its outcome. A second request
// with the same id joins the first.
func (s *Service) startPlain(pl *plan) (*execution, error) {
	epoch, ok := s.replica.mayDispatch()
	if !ok {
		return nil, errIsolated
	}
	e := s.newExecution(pl)
	e.plain = true
	now := s.now()
	ceiling := now.Add(e.limits.Ceiling)
	e.deadline = time.Now().Add(e.limits.Ceiling)
	c := pl.call
	c.State, c.Epoch, c.Attempt, c.Ceiling = Dispatching, epoch, 1, &ceiling
	c.Attempts = []Attempt{{Number: 1, Epoch: epoch, StartTime: now}}
	k := requestKey{c.Tenant, c.Subject, c.RequestID}
	s.mu.Lock()
	if s.pending[k] != nil {
		s.mu.Unlock()
		return nil, errRepeated
	}
	if !pl.session.Admit(int64(e.limits.CallsPerSession)) {
		s.mu.Unlock()
		return nil, &overBudget{}
	}
	s.pending[k] = e
	s.mu.Unlock()
	s.start(e)
	return e, nil
}

// watch waits until the execution ends, reported true, or its call waits for input
// while the request stays open, or the time is up.
func (e *execution) watch(ctx context.Context, wait time.Duration) (ended bool) {
	t := time.NewTimer(max(wait, 0))
	defer t.Stop()
	for {
		var changed <-chan struct{}
		release := func() {}
		if e.asker() != nil {
			changed, release = e.s.hub.watch(e.key)
		}
		if changed != nil && e.snapshot().State == InputRequired {
			release()
			return false
		}
		over := false
		select {
		case <-e.done:
			ended, over = true, true
		case <-changed:
		case <-t.C:
			over = true
		case <-ctx.Done():
			over = true
		case <-e.s.drain:
			over = true
		}
		release()
		if over {
			return ended
		}
	}
}

// follow waits for an execution and returns its call. A plain read whose wait
// ends first is recorded at once, for from then on somebody may ask for it.
func (s *Service) follow(ctx context.Context, e *execution, wait time.Duration) (*Call, error) {
	if e.watch(ctx, wait) {
		return e.result()
	}
	err := e.harden(context.WithoutCancel(ctx))
	if errors.Is(err, errRepeated) {
		// The id belongs to a call of another replica, or of another kind.
		first, err := s.first(context.WithoutCancel(ctx), e.snapshot())
		return first, err
	}
	if err != nil {
		return nil, err
	}
	select {
	case <-e.done:
		return e.result()
	default:
		return e.snapshot(), nil
	}
}

func (e *execution) result() (*Call, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.call, e.err
}

// harden records a plain read that is still under way.
func (e *execution) harden(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, hardenTime)
	defer cancel()
	e.mu.Lock()
	if !e.plain || e.call.Recorded || e.finishing {
		finishing := e.finishing
		e.mu.Unlock()
		if !finishing {
			return nil
		}
		select {
		case <-e.done:
			return nil
		case <-ctx.Done():
			return errNotRecorded
		}
	}
	// The execution waits, so that an outcome never overtakes this record.
	defer e.mu.Unlock()
	c := *e.call
	c.Recorded = true
	err := e.s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		if _, err := countCall(ctx, tx, &c); err != nil {
			return err
		}
		if err := e.s.insert(ctx, tx, &c); err != nil {
			return err
		}
		for _, a := range c.Attempts {
			if err := insertAttempt(ctx, tx, &c, a); err != nil {
				return err
			}
		}
		_, err := e.s.deps.Audit.Append(ctx, tx, e.s.entry(&c, "call.dispatched", e.actor, map[string]any{"epoch": c.Epoch}))
		return err
	})
	if err != nil {
		return fault.Wrap(err, "record a read under way")
	}
	e.call = &c
	e.recordNotices()
	return nil
}

// hardenTime bounds what a caller waits beyond its wait for a record.
const hardenTime = 5 * time.Second

var errNotRecorded = fault.New(fault.Unavailable, "OUTCOME_NOT_RECORDED", "the outcome could not be recorded yet; ask again").Retry(time.Second)
