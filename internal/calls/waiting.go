package calls

import (
	"context"
	"errors"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// dispatchWaiting dispatches a call whose consent was approved. Whoever comes
// second finds the consent consumed and the call moved, and does nothing.
func (s *Service) dispatchWaiting(ctx context.Context, t tenant.ID, id string) error {
	for try := 1; ; try++ {
		if s.full() {
			return nil // a later sweep finds room
		}
		err := s.tryWaiting(ctx, t, id, try)
		if !errors.Is(err, errReplan) {
			return err
		}
	}
}

func (s *Service) full() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.live) >= s.cfg.MaxLive
}

func (s *Service) tryWaiting(ctx context.Context, t tenant.ID, id string, try int) error {
	c, err := s.load(ctx, t, id)
	if err != nil || c.State != ConsentRequired {
		return err
	}
	e, err := s.resume(ctx, c)
	if err != nil {
		return s.refuseWaiting(ctx, c, err)
	}
	cur := *c
	e.anew = try > 1
	if err := e.refresh(ctx, &cur); err != nil {
		return s.refuseWaiting(ctx, c, err)
	}
	err = s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		return s.dispatchTx(ctx, tx, &cur, e, try >= maxPlans)
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

// dispatchTx is the dispatch transaction of a waiting call (design 3.2, step 3).
// It leaves the call DISPATCHING, or denied.
func (s *Service) dispatchTx(ctx context.Context, tx tenant.Tx, c *Call, e *execution, last bool) error {
	g, err := s.lockGround(ctx, tx, c, e)
	if err != nil {
		return err
	}
	if why := g.changed(); why != "" {
		switch {
		case g.staleOnly() && !last:
			return errReplan // a list that was announced as changed may show the same
		case g.moves(c):
			return errMoving // the sweep tries again, while the consent stands
		}
		return s.voidWaiting(ctx, tx, c.ID, why, nil)
	}
	refusal, err := s.deps.Consent.Consume(ctx, tx, c.ConsentID, c.ID, c.binding())
	switch {
	case err != nil:
		return err
	case refusal == consent.RefusedWaiting:
		return errLost
	case refusal == consent.RefusedVoid:
		return s.voidWaiting(ctx, tx, c.ID, "the consent does not stand any more", nil)
	case refusal != consent.NotRefused:
		_, err := s.deny(ctx, tx, c.ID, Reason(refusal), "system", "the consent does not stand any more", nil)
		return err
	}
	var waits bool
	err = tx.QueryRow(ctx, `SELECT state = 'CONSENT_REQUIRED' AND NOT cancel_requested FROM calls
		WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, tx.Tenant(), c.ID).Scan(&waits)
	if err != nil {
		return err
	}
	if !waits {
		return errLost
	}
	return s.enterDispatch(ctx, tx, c, e, e.actor, updateDispatch)
}

// voidWaiting ends a waiting call and its consent, in the order of their locks.
func (s *Service) voidWaiting(ctx context.Context, tx tenant.Tx, id, why string, shown *Error) error {
	if err := s.deps.Consent.VoidCall(ctx, tx, id, "system", why); err != nil {
		return err
	}
	_, err := s.deny(ctx, tx, id, ReasonVoid, "system", why, shown)
	return err
}

// refuseWaiting ends a call that was agreed to but cannot be dispatched: nothing
// was sent, and a new proposal asks again.
func (s *Service) refuseWaiting(ctx context.Context, c *Call, cause error) error {
	f, ok := fault.As(cause)
	if !ok || passing(f) || ctx.Err() != nil {
		return cause // a fault of ours or a stop: the sweep tries again
	}
	why := &Error{Layer: LayerHost, Code: f.Reason, Message: cleanText(f.Message, 2000)}
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		return s.voidWaiting(ctx, tx, c.ID, f.Reason, why)
	})
}

// errPending says that a list on which a write depends was not ready in time,
// although nothing failed.
var errPending = fault.New(fault.Unavailable, "CATALOG_PENDING", "the server's definitions are being listed; try again").Retry(time.Second)

// passing reports whether a fault says nothing about the call: ours, the
// database's, or one of this moment.
func passing(f *fault.Error) bool {
	switch f.Kind {
	case fault.Internal, fault.Canceled, fault.Conflict, fault.Deadline:
		return true
	}
	switch f.Reason {
	case "DATABASE_UNAVAILABLE", "REPLICA_ISOLATED", "SHUTTING_DOWN", "CATALOG_BUSY", "CATALOG_PENDING":
		return true
	}
	return false
}

func (s *Service) load(ctx context.Context, t tenant.ID, id string) (c *Call, err error) {
	err = s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		c, err = byID(ctx, tx, id)
		return err
	})
	return c, err
}

// resume builds the execution of a stored call, on any replica and after any
// restart, under the contract revision that decided it. It does not look at what
// the server offers: refresh does, before anything is sent.
func (s *Service) resume(ctx context.Context, c *Call) (*execution, error) {
	p := tenant.Principal{Tenant: c.Tenant, KeyID: c.KeyID, Subject: c.Subject}
	ses, err := s.deps.Sessions.Get(ctx, p, c.SessionID)
	if err != nil {
		return nil, err
	}
	srv, err := s.deps.Catalog.GetServer(ctx, p, c.ServerID)
	if err != nil {
		return nil, err
	}
	active, err := s.deps.Contracts.At(ctx, c.Tenant, c.ServerID, c.ContractRevision)
	if err != nil {
		return nil, err
	}
	terms, ok := active.Contract.Terms(c.Kind, c.Name)
	if !ok {
		return nil, fault.New(fault.Precondition, "NOT_IN_CONTRACT", "the contract does not name what is called")
	}
	e := &execution{s: s, key: callKey{c.Tenant, c.ID}, actor: "system for " + c.Subject.String(), server: srv, terms: terms,
		subject: contract.Principal{Subject: c.Subject.Value, Source: c.Subject.Source, Groups: ses.Groups, Project: ses.Project,
			Role: tenant.RoleService.String()},
		limits: active.Contract.Limits, def: &catalog.Definition{}, done: make(chan struct{}), call: c,
		conn: connectionKey(srv, c), target: TargetOf(srv, active.Contract),
		origins: active.Contract.Reverse.ElicitationURL}
	e.deadline = time.Now().Add(e.limits.Ceiling)
	if c.Ceiling != nil {
		e.deadline = time.Now().Add(c.Ceiling.Sub(s.now()))
	}
	return e, nil
}

// current is what the call's authorization context sees of the server now.
func (s *Service) current(ctx context.Context, srv catalog.Server, c *Call, age time.Duration) (*catalog.Revision, error) {
	return s.deps.Catalog.Current(ctx, srv, contextOf(c.Tenant, c.Subject, c.SessionID), decidedBy(c.Kind), age)
}

func contextOf(t tenant.ID, subject tenant.Subject, session string) catalog.Context {
	return catalog.Context{Tenant: t, Subject: subject, Session: session}
}

// refresh makes sure that the definition was observed lately enough before a
// dispatch, takes it, and notes when. A write on a catalog that cannot be renewed
// is not sent; a read goes on and says so.
func (e *execution) refresh(ctx context.Context, c *Call) error {
	age := e.age(c)
	if e.anew {
		age = catalog.Anew
	}
	rev, err := e.s.current(ctx, e.server, c, age)
	if err != nil {
		return err
	}
	if rev.Stale {
		if rev.Pending && c.Effect != Read {
			return errPending
		}
		if c.Effect != Read {
			return fault.New(fault.Unavailable, "CATALOG_STALE", "the server's definitions could not be read again: %s", rev.StaleReason)
		}
		c.Findings = append(append([]string(nil), c.Findings...), catalog.FindingStale+": "+rev.StaleReason)
	}
	observed := rev.Observed
	c.DefinitionObserved, c.CatalogContext = &observed, rev.Context
	// Another definition is refused by the transaction, which looks at what counts.
	if def, ok := rev.Find(c.Name); ok && def.Digest == c.DefinitionDigest {
		e.def = def
	}
	return nil
}
