package calls

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Query asks for values of one argument of a prompt or of a resource template,
// exactly one of which is given. Context is an object of the arguments that are
// chosen already, empty for none.
type Query struct {
	SessionID       string
	Server          string
	Prompt          string
	Template        string
	Argument, Value string
	Context         []byte
}

// Suggestions are a server's values for an argument, best first, and untrusted.
type Suggestions struct {
	Server catalog.Server
	Values []string
	// Total is nil where the server does not say how many there are.
	Total *int
	More  bool
}

// The bounds of a completion.
const (
	// MaxSuggestions is the greatest number of values, as the protocol has it.
	MaxSuggestions = 100
	// maxSuggestion bounds a value in bytes, maxQueryValue what is typed so far,
	// maxQueryContext the arguments that are chosen already.
	maxSuggestion   = 1024
	maxQueryValue   = 4096
	maxQueryContext = 16 << 10
	maxAnswer       = 256 << 10
	completionTime  = 10 * time.Second
)

// firstContext is the revision from which on a server is told of the other arguments.
const firstContext = "2025-06-18"

// Complete asks a server for values of an argument, over the user's own connection.
// It is no call: nothing is decided for later, recorded or kept, for another user
// least of all. The user must be allowed what the argument belongs to.
func (s *Service) Complete(ctx context.Context, p tenant.Principal, q Query) (Suggestions, error) {
	if err := s.enter(); err != nil {
		return Suggestions{}, err
	}
	defer s.running.Done()
	chosen, err := q.check()
	if err != nil {
		return Suggestions{}, err
	}
	ses, srv, active, err := s.place(ctx, p, q.SessionID, q.Server)
	if err != nil {
		return Suggestions{}, err
	}
	rev, err := s.deps.Catalog.Current(ctx, srv, contextOf(p.Tenant, ses.Subject, ses.ID), q.kind(), active.Contract.Limits.DefinitionAge.Read)
	if err != nil {
		return Suggestions{}, err
	}
	if err := q.permit(p, ses, srv, active, rev, s.now()); err != nil {
		return Suggestions{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	r, err := s.deps.Sender.Do(ctx, keyOf(srv, p.Tenant, ses.Subject, ses.ID), TargetOf(srv, active.Contract), sessions.Request{
		Method: methodComplete, Params: q.params(rev.ProtocolVersion, chosen), ResultBytes: maxAnswer,
		Timeout: min(completionTime, active.Contract.Limits.Timeout)})
	defer r.Release()
	switch {
	case err != nil:
		return Suggestions{}, err
	case r.Error != nil:
		return Suggestions{}, fault.New(fault.Precondition, "COMPLETION_REFUSED", "the server refuses to complete this: %s", cleanText(r.Error.Message, 300)).In(fault.Protocol)
	case r.ResultType != sessions.ResultComplete:
		return Suggestions{}, errNoSuggestions
	}
	out, err := readSuggestions(r.Result)
	out.Server = srv
	return out, err
}

const methodComplete = "completion/complete"

// place finds where a request outside of calls goes: the open session, a server of
// it, and the contract in force.
func (s *Service) place(ctx context.Context, p tenant.Principal, sessionID, server string) (*sessions.Session, catalog.Server, *authz.Active, error) {
	ses, err := s.deps.Sessions.Get(ctx, p, sessionID)
	if err != nil {
		return nil, catalog.Server{}, nil, err
	}
	srv, err := s.deps.Catalog.GetServer(ctx, p, server)
	if err != nil {
		return nil, catalog.Server{}, nil, err
	}
	active, err := s.deps.Contracts.Active(ctx, p.Tenant, srv.ID)
	if err == nil && active == nil {
		err = refusedBy(authz.CheckServer, "the server has no active contract")
	}
	return ses, srv, active, err
}

// refusedBy is the fault of what a contract, or what it stands on, does not allow;
// it is named as the check of a decision.
func refusedBy(c authz.Check, detail string) *fault.Error {
	return fault.New(fault.Denied, "NOT_ALLOWED", "%s: %s", c, detail).With("check", string(c))
}

// check reads the chosen arguments and names what no server is asked with.
func (q Query) check() (chosen []byte, err error) {
	var bad []fault.Field
	note := func(path, rule string, args ...any) {
		bad = append(bad, fault.Field{Path: path, Rule: fmt.Sprintf(rule, args...)})
	}
	const words = "must have 1 to %d bytes of text without control characters"
	switch {
	case (q.Prompt == "") == (q.Template == ""):
		note("ref", "must have exactly one of prompt and resourceTemplate")
	case !isWord(q.Prompt, catalog.MaxName):
		note("ref.prompt", words, catalog.MaxName)
	case !isWord(q.Template, catalog.MaxURI):
		note("ref.resourceTemplate", words, catalog.MaxURI)
	}
	if q.Argument == "" || !isWord(q.Argument, catalog.MaxName) {
		note("argument.name", words, catalog.MaxName)
	}
	if len(q.Value) > maxQueryValue {
		note("argument.value", "must have at most %d bytes", maxQueryValue)
	}
	chosen = []byte("{}")
	if len(q.Context) > 0 {
		if chosen, err = canonical.Args(q.Context); err != nil || len(chosen) > maxQueryContext || !texts(chosen) {
			note("context", "must be an object of strings, of at most %d bytes", maxQueryContext)
		}
	}
	if len(bad) > 0 {
		return nil, fault.InvalidFields(bad...)
	}
	return chosen, nil
}

func texts(object []byte) bool {
	var members map[string]*string
	if object[0] != '{' || json.Unmarshal(object, &members) != nil {
		return false
	}
	for _, v := range members {
		if v == nil {
			return false
		}
	}
	return true
}

func (q Query) kind() catalog.Kind {
	if q.Prompt != "" {
		return catalog.Prompt
	}
	return catalog.ResourceTemplate
}

// permit decides as for a call of what the argument belongs to, short of what only
// a call has: arguments, consent, budget. Of what the user may not use nothing is
// asked.
func (q Query) permit(p tenant.Principal, ses *sessions.Session, srv catalog.Server, active *authz.Active, rev *catalog.Revision, now time.Time) error {
	kind, name := contract.KindPrompt, q.Prompt
	if q.Prompt == "" {
		kind, name = contract.KindResource, q.Template
	}
	def, offered := rev.Find(name)
	f := authz.Definition{Offered: offered}
	if offered {
		f.Digest = def.Digest
	}
	d := authz.Decide(authz.Input{Principal: p, SessionID: ses.ID, SessionOpen: ses.Open(now), InSession: ses.Has(srv.ID), Servers: ses.ServerIDs,
		Server: ServerFacts(srv), Contract: active.Contract, Revision: active.Revision, ProtocolVersion: rev.ProtocolVersion,
		Declared: Declares(rev, kind), Definition: f, Proposal: authz.Proposal{Kind: kind, Name: name}})
	// A template is no URI: patterns of the contract may cover what it makes.
	if err := permitted(d, active.Contract, methodComplete, kind == contract.KindResource); err != nil {
		return err
	}
	if kind == contract.KindResource {
		if err := permitTemplate(p, active.Contract, name, offered); err != nil {
			return err
		}
	}
	if !rev.Completes() {
		return refusedBy(authz.CheckCapability, "the server does not declare completions")
	}
	if !def.HasArgument(q.Argument) {
		return fault.Field1("argument.name", "is no argument of it")
	}
	return nil
}

// permitted reads from the decision about a call whether something else may be asked
// about what it would call: by a method of its own, and short of what only a call
// has. The definition may be left to the caller.
func permitted(d authz.Decision, c *contract.Contract, method string, anyDefinition bool) error {
	for _, r := range d.Checks {
		switch r.Check {
		case authz.CheckArguments, authz.CheckPayload, authz.CheckConsent, authz.CheckTimeout, authz.CheckBudget:
			continue
		case authz.CheckDefinition:
			if anyDefinition {
				continue
			}
		case authz.CheckMethod:
			if !c.AllowsMethod(method) {
				r.Passed, r.Detail = false, "the contract does not allow "+method
			}
		}
		if !r.Passed {
			return refusedBy(r.Check, r.Detail)
		}
	}
	return nil
}

func permitTemplate(p tenant.Principal, c *contract.Contract, template string, offered bool) error {
	if !c.AllowsMethod("resources/templates/list") {
		return refusedBy(authz.CheckDefinition, "the contract does not allow resources/templates/list, without which no template is known")
	}
	for _, r := range c.Resources {
		if offered && r.Overlaps(template) && r.Subjects.Allow(p.Subject.String(), p.Groups, p.Project) {
			return nil
		}
	}
	return refusedBy(authz.CheckDefinition, "the contract covers no such resource template, or the server does not offer it")
}

// params says to the server what to complete.
func (q Query) params(version string, chosen []byte) json.RawMessage {
	b := []byte(`{"ref":{"type":"ref/prompt","name":`)
	name := q.Prompt
	if q.Prompt == "" {
		b, name = []byte(`{"ref":{"type":"ref/resource","uri":`), q.Template
	}
	b = append(canonical.AppendString(b, name), `},"argument":{"name":`...)
	b = append(canonical.AppendString(b, q.Argument), `,"value":`...)
	b = append(canonical.AppendString(b, q.Value), '}')
	if len(chosen) > len("{}") && version >= firstContext {
		b = append(append(append(b, `,"context":{"arguments":`...), chosen...), '}')
	}
	return append(b, '}')
}

var errNoSuggestions = fault.New(fault.Unavailable, "COMPLETION_INVALID", "the server's answer holds no completion").In(fault.Protocol)

// readSuggestions takes what can be used of an answer: texts, cut in number and
// length. What more there is is told, as if the server had said so.
func readSuggestions(result []byte) (Suggestions, error) {
	// Maps, because structs would take members in any case.
	var top, c map[string]json.RawMessage
	var values []json.RawMessage
	if json.Unmarshal(result, &top) != nil || json.Unmarshal(top["completion"], &c) != nil || json.Unmarshal(c["values"], &values) != nil || values == nil {
		return Suggestions{}, errNoSuggestions
	}
	out := Suggestions{Values: []string{}, More: string(c["hasMore"]) == "true" || len(values) > MaxSuggestions}
	for _, raw := range values[:min(len(values), MaxSuggestions)] {
		var v *string
		// A cut value would be another one.
		if json.Unmarshal(raw, &v) == nil && v != nil && len(*v) <= maxSuggestion {
			out.Values = append(out.Values, cleanText(*v, maxSuggestion))
		}
	}
	var total *int
	if json.Unmarshal(c["total"], &total) == nil && total != nil && *total >= 0 && *total <= 1<<31-1 {
		out.Total = total
	}
	return out, nil
}
