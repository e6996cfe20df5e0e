package calls

import (
	"context"
	"encoding/json"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// codeHeaderMismatch is how a modern server refuses a call whose headers do not
// fit its arguments: the schema that says which go there is not the server's.
const codeHeaderMismatch = -32020

// mend finds out whether a server refused an attempt, without carrying it out,
// over something that is put right since or can be: a session or an era that is
// negotiated anew, or a definition that is listed anew.
func (e *execution) mend(o *outcome, c *Call, r sessions.Response, err error) {
	f, _ := fault.As(err)
	switch {
	case f != nil && f.Reason == sessions.TurnNotCome:
		o.queued = true
	case f != nil && f.Reason == sessions.SessionLost, r.Doubted:
		o.refused, o.temporary = true, true
	case err == nil && r.Error != nil && r.Error.Code == codeHeaderMismatch:
		o.refused, o.temporary, o.relist = true, true, true
		o.err.Message += "; nothing was carried out: the server's definition is not what it was when it was listed, and the call may be proposed again"
		e.outdated(c)
	}
}

// outdated makes every replica list again what the call was decided on.
func (e *execution) outdated(c *Call) {
	ctx, cancel := context.WithTimeout(e.s.work, 5*time.Second)
	defer cancel()
	err := e.s.deps.Catalog.Invalidate(ctx, catalog.Change{Tenant: c.Tenant, ServerID: c.ServerID, Kind: decidedBy(c.Kind),
		Context:   &catalog.Context{Tenant: e.conn.Tenant, Subject: e.conn.Subject, Session: e.conn.Session, Account: e.conn.AccountVersion},
		Connected: true, // the server announced nothing, so this is no noise of it
		Reason:    "the server refused the headers of a call"})
	if err != nil {
		e.s.log.InfoContext(e.scoped(ctx), "invalidate catalog", "tenant", e.key.tenant, "call", e.key.id, "error", detail(err))
	}
}

// relist takes the definition anew before a read in memory is tried once more. It
// must be the one that was decided on; where the contract pins none, a new one
// must take the same arguments.
func (e *execution) relist() error {
	c := e.snapshot()
	rev, err := e.s.current(e.s.work, e.server, c, e.age(c))
	if err != nil {
		return err
	}
	def, ok := rev.Find(c.Name)
	if !ok || rev.Stale {
		return errReplan
	}
	if def.Digest != c.DefinitionDigest {
		if e.terms.Definition != contract.DefinitionAny {
			return errReplan
		}
		decoded, err := canonical.Decode(c.Arguments)
		if err != nil {
			return fault.Wrap(err, "decode canonical arguments")
		}
		if _, err := def.ValidateArguments(decoded); err != nil {
			return err
		}
	}
	observed := rev.Observed
	e.update(func(c *Call) {
		c.DefinitionDigest, c.DefinitionObserved, c.CatalogRevision, c.CatalogContext = def.Digest, &observed, rev.ID, rev.Context
	})
	e.def = def
	return nil
}

// meta is what a request carries beside its parameters: the idempotency key where
// the contract puts it there, and the caller's trace with a span of this attempt.
// Baggage is never passed on.
func (e *execution) meta(c *Call) map[string]json.RawMessage {
	var m map[string]json.RawMessage
	if e.terms.Idempotency.Meta {
		m = rawMeta(c.IdempotencyKey)
	}
	t := c.Trace.Child()
	if t.Parent() == "" {
		return m
	}
	if m == nil {
		m = make(map[string]json.RawMessage, 2)
	}
	m["traceparent"] = canonical.AppendString(nil, t.Parent())
	if t.State() != "" {
		m["tracestate"] = canonical.AppendString(nil, t.State())
	}
	return m
}
