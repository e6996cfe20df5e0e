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
	c, err := s.load(ctx, t, id)
	if err != nil || c.State != ConsentRequired {
		return err
	}
	e, err := s.resume(ctx, c)
	if err != nil {
		return s.failWaiting(ctx, c, err)
	}
	cur := *c
	age := e.limits.DefinitionAge.Write
	if c.Effect == Read {
		age = e.limits.DefinitionAge.Read
	}
	if err := s.refreshFor(ctx, e.server, &cur, age); err != nil {
		return s.failWaiting(ctx, c, err)
	}
	refused := NoReason
	err = s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) (err error) {
		refused, err = s.dispatchTx(ctx, tx, &cur, e, age)
		return err
	})
	if errors.Is(err, errLost) {
		return nil
	}
	if err != nil || refused != NoReason || cur.State != Dispatching {
		return err
	}
	cur.Revision++
	e.call = &cur
	s.start(e)
	s.changed(t, id)
	return nil
}

// dispatchTx is the dispatch transaction of a waiting call (design 3.2, step 3).
func (s *Service) dispatchTx(ctx context.Context, tx tenant.Tx, c *Call, e *execution, age time.Duration) (Reason, error) {
	g, err := s.lockGround(ctx, tx, c, age)
	if err != nil {
		return NoReason, err
	}
	if why := g.changed(); why != "" {
		if err := s.deps.Consent.VoidCall(ctx, tx, c.ID); err != nil {
			return NoReason, err
		}
		_, err := s.deny(ctx, tx, c.ID, ReasonVoid, "system", why)
		return ReasonVoid, err
	}
	refusal, err := s.deps.Consent.Consume(ctx, tx, c.ConsentID, c.ID, c.binding())
	switch {
	case err != nil:
		return NoReason, err
	case refusal == consent.RefusedWaiting:
		return NoReason, errLost
	case refusal != consent.NotRefused:
		_, err := s.deny(ctx, tx, c.ID, Reason(refusal), "system", "the consent does not stand any more")
		return Reason(refusal), err
	}
	var waits bool
	err = tx.QueryRow(ctx, `SELECT state = 'CONSENT_REQUIRED' AND NOT cancel_requested FROM calls
		WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, tx.Tenant(), c.ID).Scan(&waits)
	if err != nil {
		return NoReason, err
	}
	if !waits {
		return NoReason, errLost
	}
	return NoReason, s.enterDispatch(ctx, tx, c, e, e.actor, updateDispatch)
}

func (s *Service) load(ctx context.Context, t tenant.ID, id string) (c *Call, err error) {
	err = s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		c, err = byID(ctx, tx, id)
		return err
	})
	return c, err
}

// resume builds the execution of a stored call, on any replica and after any
// restart, under the contract revision that decided it.
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
	tool, ok := active.Contract.Tool(c.Name)
	if !ok {
		return nil, fault.New(fault.Precondition, "TOOL_NOT_IN_CONTRACT", "the contract does not name this tool")
	}
	rev, err := s.current(ctx, srv, c, active.Contract.Limits.DefinitionAge.Read)
	if err != nil {
		return nil, err
	}
	def, ok := rev.Find(c.Name)
	if !ok {
		def = &catalog.Definition{}
	}
	return &execution{s: s, key: callKey{c.Tenant, c.ID}, actor: "system for " + c.Subject.String(), server: srv, tool: tool,
		subject: contract.Principal{Subject: c.Subject.Value, Source: c.Subject.Source, Groups: ses.Groups, Project: ses.Project},
		limits:  active.Contract.Limits, def: def, done: make(chan struct{}), call: c,
		conn: connectionKey(srv, c), target: targetOf(srv, active.Contract)}, nil
}

// current is what the call's authorization context sees of the server now.
func (s *Service) current(ctx context.Context, srv catalog.Server, c *Call, age time.Duration) (*catalog.Revision, error) {
	return s.deps.Catalog.Current(ctx, srv, contextOf(c.Tenant, c.Subject, c.SessionID), catalog.Tool, age)
}

func contextOf(t tenant.ID, subject tenant.Subject, session string) catalog.Context {
	return catalog.Context{Tenant: t, Subject: subject, Session: session}
}

// refreshFor makes sure that the definition was observed within the age before a
// dispatch, and notes when. A write on a catalog that cannot be renewed is not
// sent.
func (s *Service) refreshFor(ctx context.Context, srv catalog.Server, c *Call, age time.Duration) error {
	rev, err := s.current(ctx, srv, c, age)
	if err != nil {
		return err
	}
	if rev.Stale && c.Effect != Read {
		return fault.New(fault.Unavailable, "CATALOG_STALE", "the server's definitions could not be read again: %s", rev.StaleReason)
	}
	observed := rev.Observed
	c.DefinitionObserved, c.CatalogContext = &observed, rev.Context
	return nil
}

// failWaiting ends a call that was agreed to but cannot be dispatched. Nothing
// was sent; a new proposal asks again.
func (s *Service) failWaiting(ctx context.Context, c *Call, cause error) error {
	f, ok := fault.As(cause)
	if !ok || f.Kind == fault.Internal || ctx.Err() != nil {
		return cause // a fault of ours or a stop: the sweep tries again
	}
	failed := &Error{Layer: LayerHost, Code: f.Reason, Message: cleanText(f.Message, 2000)}
	raw, err := encodeError(failed)
	if err != nil {
		return err
	}
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if err := s.deps.Consent.VoidCall(ctx, tx, c.ID); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `UPDATE calls SET state = 'FAILED', error = $3, revision = revision + 1,
			update_time = clock_timestamp(), finish_time = clock_timestamp()
			WHERE tenant_id = $1 AND call_id = $2 AND state = 'CONSENT_REQUIRED'`, tx.Tenant(), c.ID, raw)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		_, err = s.deps.Audit.Append(ctx, tx, s.entry(c, "call.finished", "system", map[string]any{
			"state": Failed, "layer": LayerHost, "code": f.Reason}))
		tx.AfterCommit(func() { s.changed(c.Tenant, c.ID) })
		return err
	})
}
