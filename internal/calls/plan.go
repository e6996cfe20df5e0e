package calls

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Proposal is what a caller wants to be done: exactly one of Tool, Resource, which
// is a URI, and Prompt is given. Arguments are JSON as received, empty for {}. Wait is how long to wait for an end, at most 60 s.
type Proposal struct {
	SessionID string
	Server    string
	Tool      string
	Resource  string
	Prompt    string
	Arguments []byte
	RequestID string
	Wait      time.Duration
	// Trace is the caller's distributed trace, which goes on to the server.
	Trace telemetry.Trace
}

// plan is a proposal with everything that was found and decided about it.
type plan struct {
	principal tenant.Principal
	session   *sessions.Session
	server    catalog.Server
	active    *authz.Active   // nil when the server has no contract
	terms     *contract.Terms // nil when the contract has none
	revision  *catalog.Revision
	def       *catalog.Definition // nil when it is not offered or in quarantine
	input     authz.Input
	decision  authz.Decision
	call      *Call
}

// parsed is a proposal whose input is known to be good.
type parsed struct {
	session *sessions.Session
	server  catalog.Server
	target  target
	args    []byte
	digest  string // of the request, for repeats
	// anew asks for a list of this moment: a transaction found that the one before
	// does not count, which this replica may hear later.
	anew bool
}

// maxIdempotencyKey bounds in bytes a key that the caller brings.
const maxIdempotencyKey = 256

// maxRequestID bounds a requestId in bytes.
const maxRequestID = 128

// check names what no call can be stored under.
func (r Proposal) check() error {
	_, bad := readTarget(r.Tool, r.Resource, r.Prompt, r.Arguments)
	if !isWord(r.RequestID, maxRequestID) {
		bad = append(bad, fault.Field{Path: "requestId", Rule: fmt.Sprintf("must have at most %d bytes of text without control characters", maxRequestID)})
	}
	if !resource.IsServerName(r.Server) && !resource.IsID(resource.Server, r.Server) {
		bad = append(bad, fault.Field{Path: "server", Rule: "must be the name or the id of a server"})
	}
	if len(bad) > 0 {
		return fault.InvalidFields(bad...)
	}
	return nil
}

func isWord(s string, most int) bool {
	return len(s) <= most && utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

func (s *Service) parse(ctx context.Context, p tenant.Principal, r Proposal) (parsed, error) {
	if err := r.check(); err != nil {
		return parsed{}, err
	}
	ses, err := s.deps.Sessions.Get(ctx, p, r.SessionID)
	if err != nil {
		return parsed{}, err
	}
	srv, err := s.deps.Catalog.GetServer(ctx, p, r.Server)
	if err != nil {
		return parsed{}, err
	}
	args, err := parseArguments(r.Arguments)
	if err != nil {
		return parsed{}, err
	}
	to, _ := readTarget(r.Tool, r.Resource, r.Prompt, r.Arguments)
	return parsed{session: ses, server: srv, target: to, args: args, digest: requestDigest(srv.ID, to, args)}, nil
}

// parseArguments reads arguments once into args-1.
func parseArguments(raw []byte) ([]byte, error) {
	if len(raw) == 0 {
		return []byte("{}"), nil
	}
	args, err := canonical.Args(raw)
	if err != nil {
		return nil, badArguments(err)
	}
	if args[0] != '{' {
		return nil, fault.Field1("arguments", "must be an object")
	}
	return args, nil
}

func badArguments(err error) error {
	var bad *canonical.Error
	if !errors.As(err, &bad) {
		return fault.Wrap(err, "canonical arguments")
	}
	return fault.Field1(canonical.At("arguments", bad.Path), "%s", bad.Rule)
}

func requestDigest(serverID string, to target, args []byte) string {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(serverID), []byte(to.kind), []byte(to.name)} {
		h.Write(part)
		h.Write([]byte{0})
	}
	h.Write(args)
	return hex.EncodeToString(h.Sum(nil))
}

// plan finds everything that a decision depends on and decides. It does no
// writing; what it found is looked at again where it counts.
func (s *Service) plan(ctx context.Context, p tenant.Principal, r Proposal, in parsed) (*plan, error) {
	pl := &plan{principal: p, session: in.session, server: in.server}
	started := s.now()
	active, err := s.deps.Contracts.Active(ctx, p.Tenant, in.server.ID)
	if err != nil {
		return nil, err
	}
	pl.active = active
	if active != nil {
		pl.terms, _ = active.Contract.Terms(in.target.kind, in.target.name)
	}
	c := &Call{Tenant: p.Tenant, ID: resource.NewID(resource.Call), SessionID: in.session.ID, KeyID: p.KeyID, Subject: p.Subject,
		ServerID: in.server.ID, ServerName: in.server.Name, Origin: in.server.Origin, Kind: in.target.kind, Name: in.target.name,
		RequestID: r.RequestID, requestDigest: in.digest, Revision: 1, CreateTime: started, UpdateTime: started, Trace: r.Trace.Child()}
	if c.RequestID == "" {
		c.RequestID = "r-" + c.ID
	}
	pl.call = c
	if err := pl.carryKey(in.args); err != nil {
		return nil, err
	}
	if err := s.discover(ctx, pl, in.anew); err != nil {
		return nil, err
	}
	c.Timings.Discovery = s.now().Sub(started)
	return pl, s.decide(ctx, pl)
}

// carryKey puts the idempotency key where the contract says, before anything is
// hashed: what is decided, shown and sent are the same bytes.
func (pl *plan) carryKey(args []byte) error {
	c := pl.call
	c.Arguments = args
	if pl.terms != nil && pl.terms.Idempotency.Offered() {
		c.IdempotencyKey = c.RequestID
		if name := pl.terms.Idempotency.Argument; name != "" {
			if err := pl.addArgument(name); err != nil {
				return err
			}
		}
	}
	c.ArgumentsDigest = canonical.ArgsDigest(c.Arguments)
	return nil
}

func (pl *plan) addArgument(name string) error {
	c := pl.call
	var members map[string]json.RawMessage
	if err := json.Unmarshal(c.Arguments, &members); err != nil {
		return fault.Wrap(err, "read canonical arguments")
	}
	if given, ok := members[name]; ok {
		// The caller brings a key of its own; only text can be one. A null would leave
		// a variable that has a value as it is.
		var key string
		if err := json.Unmarshal(given, &key); err != nil || !isWord(key, maxIdempotencyKey) || key == "" {
			return fault.Field1(canonical.Member("arguments", name), "is the idempotency key and must be a string of 1 to %d bytes without control characters", maxIdempotencyKey)
		}
		c.IdempotencyKey = key
		return nil
	}
	raw, err := json.Marshal(c.IdempotencyKey)
	if err != nil {
		return fault.Wrap(err, "encode idempotency key")
	}
	sep := ","
	if len(members) == 0 {
		sep = ""
	}
	nameRaw := canonical.AppendString(nil, name)
	with := append([]byte("{"), nameRaw...)
	with = append(append(append(with, ':'), raw...), sep...)
	c.Arguments, err = canonical.Args(append(with, c.Arguments[1:]...))
	return fault.Wrap(err, "canonical arguments with key")
}

// discover finds the definition, as fresh as the contract wants it.
func (s *Service) discover(ctx context.Context, pl *plan, anew bool) error {
	age := 15 * time.Minute
	if pl.active != nil {
		age = pl.active.Contract.Limits.DefinitionAge.Read
		if pl.terms != nil && pl.terms.Effect != contract.EffectRead {
			age = pl.active.Contract.Limits.DefinitionAge.Write
		}
	}
	if anew {
		age = catalog.Anew
	}
	rev, err := s.deps.Catalog.Current(ctx, pl.server, contextOf(pl.call.Tenant, pl.call.Subject, pl.call.SessionID), pl.decidedOn(), age)
	if err != nil {
		return err
	}
	if rev.Pending && pl.terms != nil && pl.terms.Effect != contract.EffectRead {
		return errPending // nothing is decided on a list that is just being made
	}
	pl.adopt(rev)
	return nil
}

// decidedOn is the kind of list that the decision needs. Prompts are not listed
// where the contract does not allow it; then none is known.
func (pl *plan) decidedOn() catalog.Kind {
	kind := decidedBy(pl.call.Kind)
	if kind == catalog.Prompt && (pl.active == nil || !pl.active.Contract.AllowsMethod("prompts/list")) {
		return catalog.Declaration
	}
	return kind
}

// adopt takes the revision that the decision stands on, and the definition in it.
func (pl *plan) adopt(rev *catalog.Revision) {
	pl.revision = rev
	c := pl.call
	c.CatalogRevision, c.CatalogContext = rev.ID, rev.Context
	observed := rev.Observed
	c.DefinitionObserved = &observed
	pl.def, c.DefinitionDigest = nil, ""
	if def, ok := rev.Find(c.Name); ok {
		pl.def, c.DefinitionDigest = def, def.Digest
	}
}

// decide fills the input and decides. It is repeated when a transaction finds
// that something changed in between.
func (s *Service) decide(ctx context.Context, pl *plan) error {
	started := s.now()
	decoded, err := canonical.Decode(pl.call.Arguments)
	if err != nil {
		return fault.Wrap(err, "decode canonical arguments")
	}
	pl.input = authz.Input{
		Principal: pl.principal, SessionID: pl.session.ID, SessionOpen: pl.session.Open(started),
		InSession: pl.session.Has(pl.server.ID), Servers: pl.session.ServerIDs,
		Server:          ServerFacts(pl.server),
		ProtocolVersion: pl.revision.ProtocolVersion, Declared: Declares(pl.revision, pl.call.Kind),
		Definition: definitionFacts(pl),
		Proposal: authz.Proposal{Kind: pl.call.Kind, Name: pl.call.Name, Arguments: pl.call.Arguments, Decoded: decoded,
			RequestID: pl.call.RequestID, IdempotencyKey: pl.call.IdempotencyKey},
		Calls: pl.session.Calls(),
	}
	if pl.active != nil {
		pl.input.Contract, pl.input.Revision = pl.active.Contract, pl.active.Revision
		pl.call.ContractID, pl.call.ContractRevision = pl.active.Contract.ID, pl.active.Revision
	}
	if pl.terms != nil {
		pl.call.Effect, pl.call.ConsentRule = Effect(pl.terms.Effect), consent.Rule(pl.terms.Consent)
		if pl.call.ConsentRule == consent.RuleSession {
			if pl.input.Granted, err = s.deps.Consent.Covers(ctx, pl.principal.Tenant, pl.call.binding()); err != nil {
				return err
			}
		}
	}
	pl.redecide()
	pl.call.Timings.Decision = s.now().Sub(started)
	return nil
}

func (pl *plan) redecide() {
	pl.decision = authz.Decide(pl.input)
	pl.call.Decision = pl.decision
	pl.call.Findings = pl.findings()
}

func (pl *plan) findings() []string {
	var out []string
	if pl.server.Isolation == catalog.PerTenant {
		out = append(out, "SHARED_STATE: all users of the tenant use one connection to this server, which may tell one what another did")
	}
	if pl.revision.Stale {
		out = append(out, "CATALOG_STALE: "+pl.revision.StaleReason)
	}
	if pl.def != nil {
		for _, f := range pl.def.Findings {
			out = append(out, f.Code+": "+f.Detail)
		}
	}
	return out
}

// definition is what a call is sent by: an empty one where it needs none.
func (pl *plan) definition() *catalog.Definition {
	if pl.def == nil {
		return &catalog.Definition{}
	}
	return pl.def
}

func definitionFacts(pl *plan) authz.Definition {
	var f authz.Definition
	if pl.revision.Stale {
		f.Stale = pl.revision.StaleReason
	}
	if d := pl.def; d != nil {
		f.Offered, f.Digest = true, d.Digest
		f.ValidateArguments = func(v any) error { _, err := d.ValidateArguments(v); return err }
		return f
	}
	for i := range pl.revision.Definitions {
		if d := &pl.revision.Definitions[i]; d.Name == pl.call.Name {
			f.Offered, f.Quarantine = true, d.Quarantine
		}
	}
	return f
}

// ServerFacts is what a decision knows of a registration.
func ServerFacts(v catalog.Server) authz.Server {
	return authz.Server{ID: v.ID, Name: v.Name, Origin: v.Origin, Transport: string(v.Transport), URL: v.URL,
		Authorization: v.AuthorizationMode, Active: !v.Deleted}
}

// plain reports whether the call is a read that lives in memory until it is
// recorded with its outcome (design 3.3).
func (pl *plan) plain() bool {
	return pl.terms != nil && pl.terms.Effect == contract.EffectRead && pl.terms.Consent == contract.ConsentNone &&
		pl.active.Contract.Record == contract.RecordBeforeAnswer
}
