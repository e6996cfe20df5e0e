package calls

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
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
		pl, err := s.plan(ctx, p, r, in)
		if err != nil {
			return nil, err
		}
		e, err := s.admit(ctx, pl, try == maxPlans)
		switch {
		case errors.Is(err, errReplan):
			s.deps.Contracts.Forget(p.Tenant, in.server.ID)
			continue
		case errors.Is(err, errRepeated):
			return s.repeated(ctx, p, r, in)
		case err != nil:
			return nil, err
		case e == nil:
			return pl.call, nil
		}
		return s.follow(ctx, e, r.Wait)
	}
}

// repeated returns the call that an earlier request with this id made, waited
// for like a new one; nil when there is none.
func (s *Service) repeated(ctx context.Context, p tenant.Principal, r Proposal, in parsed) (*Call, error) {
	s.mu.Lock()
	e := s.pending[requestKey{p.Tenant, p.Subject, r.RequestID}]
	s.mu.Unlock()
	if e != nil {
		if err := sameRequest(e.snapshot(), r, in); err != nil {
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
	if err := sameRequest(c, r, in); err != nil {
		return nil, err
	}
	if c.State.Settled() {
		return c, nil
	}
	return s.await(ctx, p, callKey{c.Tenant, c.ID}, r.Wait, func(c *Call) bool { return c.State.Settled() })
}

func sameRequest(c *Call, r Proposal, in parsed) error {
	if c.requestDigest == in.digest {
		return nil
	}
	f := fault.New(fault.Exists, "REQUEST_ID_REUSED", "requestId was used for another call").With("callId", c.ID)
	var paths []string
	if c.ServerID != in.server.ID {
		paths = append(paths, "server")
	}
	if c.Name != r.Tool {
		paths = append(paths, "tool")
	}
	for _, d := range canonical.Diff(c.Arguments, in.args) {
		paths = append(paths, canonical.At("arguments", d))
	}
	for _, path := range paths {
		f.Fields = append(f.Fields, fault.Field{Path: path, Rule: "differs from the first request"})
	}
	return f
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
		return s.startPlain(pl)
	}
	e := s.newExecution(pl)
	err := s.deps.DB.InTx(ctx, pl.principal.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		return s.admitTx(ctx, tx, pl, e, last)
	})
	var over *overBudget
	switch {
	case errors.As(err, &over):
		pl.input.Calls = over.calls
		pl.redecide()
		return nil, s.storeDenied(ctx, pl)
	case err != nil:
		return nil, err
	}
	pl.session.Admitted()
	pl.call.Recorded = true
	if pl.call.State != Dispatching {
		return nil, nil
	}
	s.start(e)
	return e, nil
}

// overBudget undoes an admission that would exceed the session's calls.
type overBudget struct{ calls int64 }

func (*overBudget) Error() string { return "calls: the session has used its calls" }

func (s *Service) admitTx(ctx context.Context, tx tenant.Tx, pl *plan, e *execution, last bool) error {
	c := pl.call
	age := pl.active.Contract.Limits.DefinitionAge.Write
	if c.Effect == Read {
		age = pl.active.Contract.Limits.DefinitionAge.Read
	}
	g, err := s.lockGround(ctx, tx, c, age)
	if err != nil {
		return err
	}
	if g.changed() != "" && !last {
		return errReplan
	}
	if why := g.changed(); why != "" {
		return s.storeDeniedTx(ctx, tx, c, ReasonVoid, why)
	}
	send := c.ConsentRule == consent.RuleNone
	if !send {
		adm, err := s.deps.Consent.Admit(ctx, tx, consent.Request{Binding: c.binding(), CallID: c.ID,
			ContractRevision: c.ContractRevision, Effect: string(c.Effect), Rule: c.ConsentRule, TTL: s.cfg.ConsentTTL})
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
	if most := int64(pl.active.Contract.Limits.CallsPerSession); total > most {
		return &overBudget{calls: most}
	}
	if !send {
		c.State = ConsentRequired
		if err := insert(ctx, tx, c); err != nil {
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
	return s.enterDispatch(ctx, tx, c, e, pl.principal.Actor(), insert)
}

// enterDispatch moves a call whose ground is locked to DISPATCHING: the attempt,
// the epoch and the time until which it may be sent are written down first.
func (s *Service) enterDispatch(ctx context.Context, tx tenant.Tx, c *Call, e *execution, actor string,
	write func(context.Context, tenant.Tx, *Call) error) error {
	epoch, ok := s.replica.mayDispatch()
	if !ok {
		return errIsolated
	}
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
	// The monotonic clock starts before the commit: the window can only be shorter
	// than what was written.
	e.sendBefore = time.Now().Add(s.cfg.SendWindow)
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
	if err == nil && s.deps.Observe != nil {
		s.deps.Observe(pl.call)
	}
	return err
}

func (s *Service) storeDeniedTx(ctx context.Context, tx tenant.Tx, c *Call, r Reason, why string) error {
	now := s.now()
	c.State, c.Reason, c.FinishTime = Denied, r, &now
	id, err := s.deps.Audit.Append(ctx, tx, s.entry(c, "call.denied", c.Subject.String(), map[string]any{
		"firstFailed": c.Decision.FirstFailed, "reason": r, "detail": why}))
	if err != nil {
		return err
	}
	c.Receipt = id
	return insert(ctx, tx, c)
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

// lockGround locks, in the order that every writer that voids keeps (design
// 3.2), what a dispatch stands on, and reads it: tenant, credential, session,
// server with its contract, definition. Grant or consent and the call follow.
// Share locks let dispatches run side by side and make voiders wait for them,
// or them for the voiders.
func (s *Service) lockGround(ctx context.Context, tx tenant.Tx, c *Call, age time.Duration) (ground, error) {
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
	b.Queue(`SELECT state = 'ACTIVE' AND origin = $3, COALESCE(active_contract, 0) = $4 AND active_contract_id = $5
		FROM servers WHERE tenant_id = $1 AND server_id = $2 FOR SHARE`,
		tx.Tenant(), c.ServerID, c.Origin, c.ContractRevision, c.ContractID).QueryRow(scan(&g.server, &g.contract))
	b.Queue(`SELECT stale_reason = '' AND observe_time > clock_timestamp() - $4::interval OR $5
		FROM catalog_current WHERE tenant_id = $1 AND server_id = $2 AND context = $3 AND kind = 'tool' FOR SHARE`,
		tx.Tenant(), c.ServerID, c.CatalogContext, age, c.Effect == Read).QueryRow(scan(&g.fresh))
	b.Queue(`SELECT EXISTS (SELECT 1 FROM catalog_current k
		  JOIN catalog_items i ON i.tenant_id = k.tenant_id AND i.revision_id = k.revision_id
		 WHERE k.tenant_id = $1 AND k.server_id = $2 AND k.context = $3 AND k.kind = 'tool'
		   AND i.name = $4 AND i.digest = $5 AND i.quarantine = '')`,
		tx.Tenant(), c.ServerID, c.CatalogContext, c.Name, c.DefinitionDigest).QueryRow(scan(&g.definition))
	return g, tx.SendBatch(ctx, b).Close()
}
