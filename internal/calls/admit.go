package calls

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// maxPlans bounds how often a proposal is decided anew because something that
// the decision stood on changed before it could be admitted.
const maxPlans = 3

// Propose decides a call, admits it and, when nothing stands against it, sends
// it. It returns at the first state other than DISPATCHING or when the wait is
// over. The call goes on when the caller goes away. A repeat of a requestID with
// the same body returns the first call as it stands now.
func (s *Service) Propose(ctx context.Context, p tenant.Principal, r Proposal) (*Call, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.running.Done()
	r.Wait = min(r.Wait, maxWait)
	in, err := s.parse(ctx, p, r)
	if err != nil {
		return nil, err
	}
	if r.RequestID != "" {
		if c, err := s.repeated(ctx, p, r, in); c != nil || err != nil {
			return c, err
		}
	}
	for try := 1; ; try++ {
		last := try >= maxPlans
		pl, err := s.plan(ctx, p, r, in)
		if err != nil {
			return nil, err
		}
		e, err := s.admit(ctx, pl, last)
		switch {
		case errors.Is(err, errReplan) && !last:
			s.deps.Contracts.Forget(p.Tenant, in.server.ID)
			in.anew = true
			continue
		case errors.Is(err, errReplan):
			return nil, errMoving
		case errors.Is(err, errRepeated):
			if c, err := s.repeated(ctx, p, r, in); c != nil || err != nil || last {
				return c, err
			}
			continue // the first one left no call: this one is the first now
		case err != nil:
			return nil, err
		case e == nil:
			return pl.call, nil
		}
		return s.followOn(ctx, p, e, r.Wait)
	}
}

var errMoving = fault.New(fault.Conflict, "GROUND_MOVING", "what the call stands on keeps changing; try again").Retry(time.Second)

// repeated returns the call that an earlier request with this id made, waited
// for like a new one; nil when there is none.
func (s *Service) repeated(ctx context.Context, p tenant.Principal, r Proposal, in parsed) (*Call, error) {
	s.mu.Lock()
	e := s.pending[requestKey{p.Tenant, p.Subject, r.RequestID}]
	s.mu.Unlock()
	if e != nil {
		if err := sameRequest(p, e.snapshot(), r, in); err != nil {
			return nil, err
		}
		return s.follow(ctx, e, r.Wait)
	}
	var c *Call
	err := s.deps.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) (err error) {
		c, err = byRequest(ctx, tx, p.Subject, r.RequestID)
		return err
	})
	if errors.Is(err, errCallNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := sameRequest(p, c, r, in); err != nil {
		return nil, err
	}
	if c.State.Settled() {
		return c, nil
	}
	return s.await(ctx, p, callKey{c.Tenant, c.ID}, r.Wait, (*Call).Settled)
}

// sameRequest refuses a request whose id stands for another call. Of a call that
// the caller may not see it says no more.
func sameRequest(p tenant.Principal, c *Call, r Proposal, in parsed) error {
	if c.requestDigest == in.digest {
		return nil
	}
	f := fault.New(fault.Exists, "REQUEST_ID_REUSED", "requestId was used for another call")
	if !owns(p, c) {
		return f
	}
	f = f.With("callId", c.ID)
	var paths []string
	if c.ServerID != in.server.ID {
		paths = append(paths, "server")
	}
	if c.Kind != in.target.kind || c.Name != in.target.name {
		paths = append(paths, in.target.field)
	}
	carried := carriedKey(c, in.args)
	for _, d := range canonical.Diff(c.Arguments, in.args) {
		if d != carried || carried == "" {
			paths = append(paths, canonical.At("arguments", d))
		}
	}
	if len(paths) == 0 {
		paths = append(paths, "arguments")
	}
	for _, path := range paths {
		f.Fields = append(f.Fields, fault.Field{Path: path, Rule: "differs from the first request"})
	}
	return f
}

// carriedKey returns the path of the argument that the host added to a stored
// call for its idempotency key, "" when the caller had brought it.
func carriedKey(c *Call, args []byte) string {
	var stored, given map[string]json.RawMessage
	if c.IdempotencyKey != c.RequestID || json.Unmarshal(c.Arguments, &stored) != nil || json.Unmarshal(args, &given) != nil {
		return ""
	}
	for name, raw := range stored {
		var key string
		if _, ok := given[name]; !ok && json.Unmarshal(raw, &key) == nil && key == c.RequestID {
			return canonical.Member("", name)
		}
	}
	return ""
}

// errReplan says that what a plan stood on is no longer true.
var errReplan = errors.New("calls: the plan is out of date")

// admit records the plan's call. It returns the execution of a call that is now
// DISPATCHING, nil for one that waits or is denied. last makes a change of the
// ground a denial rather than another try.
func (s *Service) admit(ctx context.Context, pl *plan, last bool) (*execution, error) {
	if pl.decision.Outcome == authz.Deny {
		return nil, s.storeDenied(ctx, pl)
	}
	if pl.plain() {
		e, err := s.startPlain(pl)
		if errors.As(err, new(*overBudget)) {
			return nil, s.storeOverBudget(ctx, pl)
		}
		return e, err
	}
	e := s.newExecution(pl)
	// From here on the caller may go away: a commit must not be cut in the middle.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), admitTime)
	defer cancel()
	err := s.deps.DB.InTx(ctx, pl.principal.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		return s.admitTx(ctx, tx, pl, e, last)
	})
	switch {
	case errors.As(err, new(*overBudget)):
		return nil, s.storeOverBudget(ctx, pl)
	case err != nil && !s.committed(ctx, pl.call, err):
		return nil, err
	}
	pl.call.Recorded = true
	if pl.call.State == Denied {
		s.observe(pl.call)
		return nil, nil
	}
	pl.session.Admitted()
	if pl.call.State != Dispatching {
		return nil, nil
	}
	s.start(e)
	return e, nil
}

// admitTime bounds an admission, waiting for locks included.
const admitTime = 20 * time.Second

// committed reports whether a dispatch took place although its commit gave no
// clear answer. If it did, this replica must go on with it: nobody else knows that
// nothing has been sent. The send window holds all the same.
func (s *Service) committed(ctx context.Context, c *Call, err error) bool {
	switch fault.KindOf(err) {
	case fault.Unavailable, fault.Deadline, fault.Canceled:
	default:
		return false
	}
	if c.State != Dispatching {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	got, err := s.load(ctx, c.Tenant, c.ID)
	return err == nil && got.State == Dispatching && got.Epoch == c.Epoch && got.Attempt == c.Attempt
}

// overBudget undoes an admission that would exceed the session's calls.
type overBudget struct{}

func (*overBudget) Error() string { return "calls: the session has used its calls" }

// storeOverBudget denies a call whose admission was undone: nothing that it
// wrote on the call holds any more.
func (s *Service) storeOverBudget(ctx context.Context, pl *plan) error {
	c := pl.call
	c.ConsentID, c.ConsentExpire, c.GrantID = "", nil, ""
	c.Attempt, c.Attempts, c.Epoch, c.SendBy, c.Ceiling = 0, nil, 0, nil, nil
	pl.input.Calls = int64(pl.active.Contract.Limits.CallsPerSession)
	pl.redecide()
	return s.storeDenied(ctx, pl)
}

func (s *Service) observe(c *Call) {
	if s.deps.Observe != nil {
		s.deps.Observe(c)
	}
}

func (s *Service) admitTx(ctx context.Context, tx tenant.Tx, pl *plan, e *execution, last bool) error {
	c := pl.call
	g, err := s.lockGround(ctx, tx, c, e)
	if err != nil {
		return err
	}
	if why := g.changed(); why != "" {
		if g.moves(c) || g.mayMend() && !last {
			return errReplan
		}
		return s.storeDeniedTx(ctx, tx, c, ReasonVoid, why)
	}
	send := c.ConsentRule == consent.RuleNone
	if !send {
		adm, err := s.deps.Consent.Admit(ctx, tx, consent.Request{Binding: c.binding(), CallID: c.ID,
			ContractRevision: c.ContractRevision, Effect: string(c.Effect), Rule: c.ConsentRule, Actor: e.actor, TTL: s.cfg.ConsentTTL})
		if err != nil {
			return err
		}
		send = adm.GrantID != ""
		c.GrantID, c.ConsentID = adm.GrantID, adm.ConsentID
		c.ConsentExpire = nil
		if adm.ConsentID != "" {
			c.ConsentExpire = &adm.ExpireTime
		}
		// What the transaction found counts: a grant may have come or gone.
		pl.input.Granted = send
		pl.redecide()
	}
	total, err := countCall(ctx, tx, c)
	if err != nil {
		return err
	}
	if total > int64(pl.active.Contract.Limits.CallsPerSession) {
		return &overBudget{}
	}
	if !send {
		c.State = ConsentRequired
		if err := s.insert(ctx, tx, c); err != nil {
			return err
		}
		_, err := s.deps.Audit.Append(ctx, tx, s.entry(c, "call.proposed", pl.principal.Actor(), map[string]any{"outcome": pl.decision.Outcome}))
		return err
	}
	if c.GrantID != "" {
		if r, err := s.deps.Consent.Spend(ctx, tx, c.GrantID, c.binding()); err != nil || r != consent.NotRefused {
			return errors.Join(err, errReplan)
		}
	}
	return s.enterDispatch(ctx, tx, c, e, pl.principal.Actor(), s.insert)
}

// enterDispatch moves a call whose ground is locked to DISPATCHING: the attempt,
// the epoch and the time until which it may be sent are written down first.
func (s *Service) enterDispatch(ctx context.Context, tx tenant.Tx, c *Call, e *execution, actor string,
	write func(context.Context, tenant.Tx, *Call) error) error {
	epoch, ok := s.replica.mayDispatch()
	if !ok {
		return errIsolated
	}
	// The monotonic clock is read before the database's: the window, and the time
	// to the ceiling, can only be shorter than what is written.
	started := time.Now()
	now, err := databaseTime(ctx, tx)
	if err != nil {
		return err
	}
	c.State, c.Epoch = Dispatching, epoch
	c.Attempt++
	sendBy := now.Add(s.cfg.SendWindow)
	c.SendBy = &sendBy
	if c.Ceiling == nil {
		ceiling := now.Add(e.limits.Ceiling)
		c.Ceiling = &ceiling
	}
	c.Attempts = append(slices.Clip(c.Attempts), Attempt{Number: c.Attempt, Epoch: epoch, SendBy: &sendBy, StartTime: now})
	if err := write(ctx, tx, c); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `INSERT INTO attempts (tenant_id, call_id, attempt, replica_epoch, send_by, start_time)
		VALUES ($1, $2, $3, $4, $5, $6)`, tx.Tenant(), c.ID, c.Attempt, c.Epoch, c.SendBy, now)
	if err != nil {
		return err
	}
	_, err = s.deps.Audit.Append(ctx, tx, s.entry(c, "call.dispatched", actor, map[string]any{
		"consentId": c.ConsentID, "grantId": c.GrantID, "epoch": c.Epoch, "sendBy": c.SendBy}))
	e.sendBefore, e.deadline = started.Add(s.cfg.SendWindow), started.Add(c.Ceiling.Sub(now))
	return err
}

var errIsolated = fault.New(fault.Unavailable, "REPLICA_ISOLATED", "this replica cannot reach its database; try again").Retry(time.Second)

func databaseTime(ctx context.Context, tx tenant.Tx) (now time.Time, err error) {
	err = tx.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
	return now, err
}

func (s *Service) storeDenied(ctx context.Context, pl *plan) error {
	err := s.deps.DB.InTx(ctx, pl.principal.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		return s.storeDeniedTx(ctx, tx, pl.call, NoReason, "")
	})
	pl.call.Recorded = err == nil
	if err == nil {
		s.observe(pl.call)
	}
	return err
}

func (s *Service) storeDeniedTx(ctx context.Context, tx tenant.Tx, c *Call, r Reason, why string) error {
	now := s.now()
	c.State, c.Reason, c.FinishTime = Denied, r, &now
	if r != NoReason {
		c.Error = hostError(string(r), "%s", endWords(r, why))
	}
	id, err := s.deps.Audit.Append(ctx, tx, s.entry(c, "call.denied", c.Subject.String(), map[string]any{
		"firstFailed": c.Decision.FirstFailed, "reason": r, "detail": why}))
	if err != nil {
		return err
	}
	c.Receipt = id
	return s.insert(ctx, tx, c)
}

// ground is what a dispatch stands on, as its transaction found and locked it.
type ground struct {
	tenant, key, session, server, contract, definition, fresh bool
}

// changed names the first thing that is not as the call was decided on, or "".
func (g ground) changed() string {
	switch {
	case !g.tenant:
		return "the tenant is suspended"
	case !g.key:
		return "the credential that proposed it was revoked"
	case !g.session:
		return "the session is closed"
	case !g.server:
		return "the server is not registered any more"
	case !g.contract:
		return "another contract is active"
	case !g.definition:
		return "the definition is not the one that was decided on"
	case !g.fresh:
		return "the definition was not observed lately enough"
	}
	return ""
}

// mayMend reports whether a new decision may stand where this one does not: the
// contract, the registration or the definition may merely be newer.
func (g ground) mayMend() bool { return g.tenant && g.key && g.session }

// staleOnly reports whether only the age of the definition stands against it.
func (g ground) staleOnly() bool {
	return g.mayMend() && g.server && g.contract && g.definition && !g.fresh
}

// moves reports whether a write waits only for a list that stands still. That says
// nothing against it; a read that is not fresh was refused to its user.
func (g ground) moves(c *Call) bool { return g.staleOnly() && c.Effect != Read }

// lockGround locks, in the order that every writer that voids keeps (design
// 3.2), what a dispatch stands on, and reads it: tenant, credential, session,
// server with its contract, definition. Grant or consent and the call follow.
// Share locks let dispatches run side by side and make voiders wait for them,
// or them for the voiders.
//
// A contract is what its id says: the same one under a newer number still stands.
// A read goes on with a list that could not be renewed, but not with one that the
// server has since refused to this user.
func (s *Service) lockGround(ctx context.Context, tx tenant.Tx, c *Call, e *execution) (ground, error) {
	var g ground
	b := &pgx.Batch{}
	scan := func(dst ...any) func(pgx.Row) error {
		return func(row pgx.Row) error {
			if err := row.Scan(dst...); !errors.Is(err, pgx.ErrNoRows) {
				return err
			}
			return nil // an absent row leaves false
		}
	}
	b.Queue(`SELECT state = 'ACTIVE' FROM tenants WHERE tenant_id = $1 FOR SHARE`, tx.Tenant()).QueryRow(scan(&g.tenant))
	b.Queue(`SELECT state = 'ACTIVE' AND (expire_time IS NULL OR expire_time > clock_timestamp())
		FROM keys WHERE tenant_id = $1 AND key_id = $2 FOR SHARE`, tx.Tenant(), c.KeyID).QueryRow(scan(&g.key))
	b.Queue(`SELECT state = 'OPEN' AND expire_time > clock_timestamp()
		FROM sessions WHERE tenant_id = $1 AND session_id = $2 FOR SHARE`, tx.Tenant(), c.SessionID).QueryRow(scan(&g.session))
	b.Queue(`SELECT state = 'ACTIVE' AND origin = $3 AND registration = $4, active_contract_id = $5
		FROM servers WHERE tenant_id = $1 AND server_id = $2 FOR SHARE`,
		tx.Tenant(), c.ServerID, c.Origin, e.server.Registration, c.ContractID).QueryRow(scan(&g.server, &g.contract))
	b.Queue(`SELECT NOT hidden AND ($5 OR invalidated <= generation
		       AND COALESCE(observe_time > clock_timestamp() - $4::interval, false))
		FROM catalog_current WHERE tenant_id = $1 AND server_id = $2 AND context = $3 AND kind = $6 FOR SHARE`,
		tx.Tenant(), c.ServerID, c.CatalogContext, e.age(c), c.Effect == Read, decidedBy(c.Kind)).QueryRow(scan(&g.fresh))
	b.Queue(`SELECT EXISTS (SELECT 1 FROM catalog_current k
		  LEFT JOIN catalog_items i ON i.tenant_id = k.tenant_id AND i.revision_id = k.revision_id
		       AND i.name = $4 AND i.digest = $5 AND i.quarantine = ''
		 WHERE k.tenant_id = $1 AND k.server_id = $2 AND k.context = $3 AND k.kind = $7 AND k.registration = $6
		   AND (i.name IS NOT NULL OR $7 = $8))`,
		tx.Tenant(), c.ServerID, c.CatalogContext, c.Name, c.DefinitionDigest, e.server.Registration, decidedBy(c.Kind),
		catalog.Declaration).QueryRow(scan(&g.definition))
	return g, tx.SendBatch(ctx, b).Close()
}
