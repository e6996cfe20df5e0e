// Package authz decides. It stores contracts in numbered, immutable revisions
// and asks of each proposed call, in a fixed order, every question that a
// contract poses; the first that fails is named. Deciding is a pure function of
// (contract, catalog revision, principal, proposal): it does no I/O, so that a
// dry run and a dispatch can never disagree.
package authz

import (
	"fmt"
	"slices"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Check names one question of a decision.
type Check string

// The checks in the order in which they are made (design 3.2, mission row B2).
const (
	CheckProtocol   Check = "protocol"
	CheckHost       Check = "host"
	CheckClient     Check = "client"
	CheckServer     Check = "server"
	CheckOrigin     Check = "origin"
	CheckTransport  Check = "transport"
	CheckMethod     Check = "method"
	CheckCapability Check = "capability"
	CheckSubject    Check = "subject"
	CheckDefinition Check = "definition"
	CheckAudience   Check = "audience"
	CheckScopes     Check = "scopes"
	CheckArguments  Check = "arguments"
	CheckPayload    Check = "payload"
	CheckConsent    Check = "consent"
	CheckTimeout    Check = "timeout"
	CheckBudget     Check = "budget"
)

// Outcome is what a decision comes to.
type Outcome string

// The outcomes. Ask means that only a person's consent is missing.
const (
	Allow Outcome = "ALLOW"
	Ask   Outcome = "ASK"
	Deny  Outcome = "DENY"
)

// Result is the answer to one check. Detail is for people and holds no payload.
type Result struct {
	Check  Check  `json:"check"`
	Passed bool   `json:"passed"`
	Detail string `json:"detail,omitempty"`
}

// Decision is the outcome with every check, as it is stored and shown.
type Decision struct {
	Outcome          Outcome  `json:"outcome"`
	ContractID       string   `json:"contractId,omitempty"`
	ContractRevision int      `json:"contractRevision,omitempty"`
	DefinitionDigest string   `json:"definitionDigest,omitempty"`
	FirstFailed      Check    `json:"firstFailed,omitempty"`
	Checks           []Result `json:"checks"`
}

// Server is what the decision knows of a registration.
type Server struct {
	ID        string
	Name      string
	Origin    string
	Transport string
	URL       string
	// Authorization is the registration's mode; NONE means that no token is sent.
	Authorization string
	Active        bool
}

// Definition is what the catalog last saw of the proposed tool or prompt. A zero
// value means that the server does not offer it. Resources have none: their URIs
// name them, and the contract's patterns allow them.
type Definition struct {
	Offered    bool
	Digest     string
	Quarantine string
	// Findings of the definition that the decision repeats to reviewers.
	Findings []string
	// Stale is the reason why the catalog cannot be trusted to be fresh enough.
	Stale string
	// ValidateArguments checks decoded arguments against the definition; nil when
	// there is nothing to check by.
	ValidateArguments func(any) error
}

// Proposal is what a caller wants to do.
type Proposal struct {
	Kind contract.Kind
	// Name is that of the tool or prompt, or the resource's URI.
	Name string
	// Arguments are in args-1, Decoded the same as values for rules and schemas.
	Arguments      []byte
	Decoded        any
	RequestID      string
	IdempotencyKey string
	// Timeout is what the caller asks for, zero for the contract's own.
	Timeout time.Duration
}

// Input is everything that a decision depends on.
type Input struct {
	Principal   tenant.Principal
	SessionID   string
	SessionOpen bool
	// InSession says that the session was opened with this server.
	InSession bool
	Servers   []string

	Server   Server
	Contract *contract.Contract
	Revision int

	ProtocolVersion string
	// Declared says that the server declares the feature that the proposal's kind
	// belongs to.
	Declared   bool
	Definition Definition

	Proposal Proposal
	// Granted says that a grant covers the call.
	Granted bool
	// Calls is the number of calls that the session has admitted before.
	Calls int64
}

// Decide answers every check. It never changes its input.
func Decide(in Input) Decision {
	var terms *contract.Terms
	if in.Contract != nil {
		terms, _ = in.Contract.Terms(in.Proposal.Kind, in.Proposal.Name)
	}
	if terms == nil {
		// What no contract names reads the same whether the server offers it or not.
		in.Definition = Definition{}
	}
	d := Decision{Outcome: Allow, ContractRevision: in.Revision, DefinitionDigest: in.Definition.Digest,
		Checks: make([]Result, 0, len(checks))}
	if in.Contract != nil {
		d.ContractID = in.Contract.ID
	}
	for _, c := range checks {
		ok, detail := c.run(in, terms)
		d.Checks = append(d.Checks, Result{Check: c.name, Passed: ok, Detail: detail})
		if ok {
			continue
		}
		if c.name == CheckConsent {
			if d.Outcome == Allow {
				d.Outcome, d.FirstFailed = Ask, c.name
			}
			continue
		}
		// A denial that comes after the consent check is what the caller must know:
		// no consent could help.
		if d.Outcome != Deny {
			d.Outcome, d.FirstFailed = Deny, c.name
		}
	}
	return d
}

// words are how the kinds are spoken of, and the method that calls each. An unknown
// kind has no method that a contract could allow.
var words = map[contract.Kind]struct{ one, feature, method, shape string }{
	contract.KindTool:     {"tool", "tools", "tools/call", "input schema"},
	contract.KindResource: {"resource", "resources", "resources/read", "resource"},
	contract.KindPrompt:   {"prompt", "prompts", "prompts/get", "prompt"},
}

const noContract = "the server has no active contract"

var checks = []struct {
	name Check
	run  func(Input, *contract.Terms) (bool, string)
}{
	{CheckProtocol, checkProtocol},
	{CheckHost, checkHost},
	{CheckClient, checkClient},
	{CheckServer, checkServer},
	{CheckOrigin, checkOrigin},
	{CheckTransport, checkTransport},
	{CheckMethod, checkMethod},
	{CheckCapability, checkCapability},
	{CheckSubject, checkSubject},
	{CheckDefinition, checkDefinition},
	{CheckAudience, checkAudience},
	{CheckScopes, checkScopes},
	{CheckArguments, checkArguments},
	{CheckPayload, checkPayload},
	{CheckConsent, checkConsent},
	{CheckTimeout, checkTimeout},
	{CheckBudget, checkBudget},
}

func checkProtocol(in Input, _ *contract.Terms) (bool, string) {
	switch {
	case in.Contract == nil:
		return false, noContract
	case in.ProtocolVersion == "":
		return false, "no protocol version has been negotiated"
	case !in.Contract.AllowsVersion(in.ProtocolVersion):
		return false, fmt.Sprintf("the contract does not allow version %s", in.ProtocolVersion)
	}
	return true, ""
}

func checkHost(in Input, _ *contract.Terms) (bool, string) {
	if !in.SessionOpen {
		return false, "the session is closed or has expired"
	}
	return true, ""
}

func checkClient(in Input, _ *contract.Terms) (bool, string) {
	switch {
	case !in.InSession:
		return false, "the session was not opened with this server"
	case !in.Principal.MayUse(in.Server.Name):
		return false, "this credential is not for this server"
	}
	return true, ""
}

func checkServer(in Input, _ *contract.Terms) (bool, string) {
	switch {
	case !in.Server.Active:
		return false, "the server is not registered any more"
	case in.Contract == nil:
		return false, noContract
	case in.Contract.Server != in.Server.Name:
		return false, fmt.Sprintf("the contract is for server %q", in.Contract.Server)
	}
	return true, ""
}

func checkOrigin(in Input, _ *contract.Terms) (bool, string) {
	if in.Contract == nil {
		return false, noContract
	}
	if in.Contract.Origin != in.Server.Origin {
		return false, fmt.Sprintf("the contract is for origin %s, the server is at %s", in.Contract.Origin, in.Server.Origin)
	}
	return true, ""
}

func checkTransport(in Input, _ *contract.Terms) (bool, string) {
	if in.Contract == nil {
		return false, noContract
	}
	if string(in.Contract.Transport) != in.Server.Transport {
		return false, fmt.Sprintf("the contract is for transport %s", in.Contract.Transport)
	}
	return true, ""
}

func checkMethod(in Input, _ *contract.Terms) (bool, string) {
	if in.Contract == nil {
		return false, noContract
	}
	if m := words[in.Proposal.Kind].method; !in.Contract.AllowsMethod(m) {
		return false, "the contract does not allow " + m
	}
	return true, ""
}

func checkCapability(in Input, _ *contract.Terms) (bool, string) {
	if !in.Declared {
		return false, "the server does not declare " + words[in.Proposal.Kind].feature
	}
	return true, ""
}

func checkSubject(in Input, t *contract.Terms) (bool, string) {
	if t == nil {
		return true, "the contract names no such " + words[in.Proposal.Kind].one
	}
	if !t.Subjects.Allow(in.Principal.Subject.String(), in.Principal.Groups, in.Principal.Project) {
		return false, "the contract does not allow this subject to use the " + words[in.Proposal.Kind].one
	}
	return true, ""
}

func checkDefinition(in Input, t *contract.Terms) (bool, string) {
	kind := in.Proposal.Kind
	one := words[kind].one
	switch def := in.Definition; {
	case t == nil:
		return false, "the contract does not name this " + one
	case kind == contract.KindResource:
		return true, ""
	case kind == contract.KindPrompt && !in.Contract.AllowsMethod("prompts/list"):
		return false, "the contract does not allow prompts/list, without which no definition is known"
	case !def.Offered:
		return false, "the server does not offer this " + one
	case def.Quarantine != "":
		return false, "the definition is quarantined: " + def.Quarantine
	case !t.Pins(def.Digest):
		return false, "the definition is not the reviewed one"
	case def.Stale != "" && t.Effect != contract.EffectRead:
		return false, "CATALOG_STALE: " + def.Stale
	}
	return true, ""
}

func checkAudience(in Input, _ *contract.Terms) (bool, string) {
	switch {
	case in.Contract == nil:
		return false, noContract
	case in.Contract.Audience == "" || in.Server.URL == "":
		return true, ""
	case in.Contract.Audience != in.Server.URL:
		return false, "the contract's audience is not the server's URL"
	}
	return true, ""
}

func checkScopes(in Input, _ *contract.Terms) (bool, string) {
	switch {
	case in.Contract == nil:
		return false, noContract
	case len(in.Contract.Scopes) == 0:
		return true, ""
	case in.Server.Authorization == "NONE":
		return true, "the server takes no token"
	}
	return false, "no account holds these scopes"
}

func checkArguments(in Input, t *contract.Terms) (bool, string) {
	if in.Definition.ValidateArguments != nil {
		if err := in.Definition.ValidateArguments(in.Proposal.Decoded); err != nil {
			return false, words[in.Proposal.Kind].shape + ": " + err.Error()
		}
	}
	if t == nil {
		return true, ""
	}
	args, err := contract.ValueOf(in.Proposal.Decoded)
	if err != nil {
		return false, err.Error()
	}
	return t.Check(vars(in, args))
}

func vars(in Input, args contract.Value) contract.Vars {
	return contract.Vars{
		Args: args,
		Principal: contract.Principal{Subject: in.Principal.Subject.Value, Source: in.Principal.Subject.Source,
			Groups: in.Principal.Groups, Project: in.Principal.Project, Role: in.Principal.Role.String()},
		Session: contract.Session{ID: in.SessionID, Servers: in.Servers},
		Call: contract.Call{IdempotencyKey: in.Proposal.IdempotencyKey, RequestID: in.Proposal.RequestID,
			Server: in.Server.Name, Tool: in.Proposal.Name},
	}
}

func checkPayload(in Input, _ *contract.Terms) (bool, string) {
	if in.Contract == nil {
		return false, noContract
	}
	if n, most := len(in.Proposal.Arguments), in.Contract.Limits.RequestBytes; n > most {
		return false, fmt.Sprintf("the arguments have %d bytes, the contract allows %d", n, most)
	}
	return true, ""
}

func checkConsent(in Input, t *contract.Terms) (bool, string) {
	switch {
	case t == nil || t.Consent == contract.ConsentNone:
		return true, ""
	case t.Consent == contract.ConsentSession && in.Granted:
		return true, "a grant covers this call"
	}
	return false, "no grant covers this call"
}

func checkTimeout(in Input, _ *contract.Terms) (bool, string) {
	if in.Contract == nil {
		return false, noContract
	}
	if in.Proposal.Timeout > in.Contract.Limits.Ceiling {
		return false, fmt.Sprintf("the contract's ceiling is %s", in.Contract.Limits.Ceiling)
	}
	return true, ""
}

func checkBudget(in Input, _ *contract.Terms) (bool, string) {
	if in.Contract == nil {
		return false, noContract
	}
	if most := in.Contract.Limits.CallsPerSession; in.Calls >= int64(most) {
		return false, fmt.Sprintf("the session has used its %d calls", most)
	}
	return true, ""
}

// Failed returns the result of the first failed check, for messages.
func (d Decision) Failed() (Result, bool) {
	i := slices.IndexFunc(d.Checks, func(r Result) bool { return r.Check == d.FirstFailed })
	if d.FirstFailed == "" || i < 0 {
		return Result{}, false
	}
	return d.Checks[i], true
}
