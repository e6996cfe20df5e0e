// Package contract owns the language of contracts: the reviewed policy for one
// MCP server. It parses a contract strictly, addresses it by its content,
// compiles its rules and evaluates them. It is pure: it does no I/O, keeps no
// state besides compiled programs, and is the only package that knows CEL.
// Storing contracts and deciding calls by them is the work of authz.
//
// The members, their defaults and their bounds are described in
// docs/contract.md and, for programs, by Schema.
package contract

import (
	_ "embed"
	"slices"
	"time"
)

// Transport is how a server is reached.
type Transport string

// The transports of a contract.
const (
	TransportHTTP  Transport = "HTTP"
	TransportSSE   Transport = "SSE"
	TransportStdio Transport = "STDIO"
)

// Kind is what a call asks a server for.
type Kind string

// The kinds of what can be called.
const (
	KindTool     Kind = "TOOL"
	KindResource Kind = "RESOURCE"
	KindPrompt   Kind = "PROMPT"
)

// Effect is what a call does to the world.
type Effect string

// The effects of a call, from harmless to harmful.
const (
	EffectRead        Effect = "READ"
	EffectWrite       Effect = "WRITE"
	EffectDestructive Effect = "DESTRUCTIVE"
)

// Consent is how often a human must agree.
type Consent string

// The consent rules: never, once for a session, for each call.
const (
	ConsentNone    Consent = "NONE"
	ConsentSession Consent = "SESSION"
	ConsentCall    Consent = "CALL"
)

// Record is when a read is recorded; everything else is always recorded before
// it is sent (design section 3.3).
type Record string

// The moments of recording that are offered.
const (
	RecordBeforeSend   Record = "BEFORE_SEND"
	RecordBeforeAnswer Record = "BEFORE_ANSWER"
)

// Absent is what it means that a status query did not find the effect.
type Absent string

// The meanings of absence. Final counts only after the settling time.
const (
	AbsentUncertain Absent = "UNCERTAIN"
	AbsentFinal     Absent = "FINAL"
)

// DefinitionAny as the Definition of Terms pins nothing: any definition that the
// server offers under this name is accepted.
const DefinitionAny = "any"

// Contract is one parsed contract. It is immutable and safe for concurrent use.
type Contract struct {
	// ID is mcp-host-contract@sha256:… over Canonical.
	ID string
	// Canonical is the document as it was given, in doc-1 and without defaults.
	Canonical []byte

	Server             string
	Transport          Transport
	Versions           []string // protocol versions, in the order of preference
	DowngradeForbidden bool
	Origin             string
	Audience           string // empty when the server takes no tokens
	Scopes             []string
	Methods            []string
	Limits             Limits
	Record             Record // for reads
	Tools              []*Tool
	Resources          []*Resource // the first that matches counts
	Prompts            []*Prompt
	Reverse            Reverse

	tools map[string]*Tool
}

// Limits bounds the use of a server.
type Limits struct {
	Timeout         time.Duration // without progress
	Ceiling         time.Duration // in any case
	RequestBytes    int           // of a call's arguments in args-1
	ResultBytes     int           // of a result as received
	CallsPerSession int
	DefinitionAge   DefinitionAge
}

// DefinitionAge is how long ago a definition may have been observed last.
type DefinitionAge struct {
	Write time.Duration
	Read  time.Duration
}

// Terms are what a contract says about one thing that may be called, whatever its
// kind.
type Terms struct {
	Definition string // doc-1:sha256:… or DefinitionAny
	Effect     Effect
	Consent    Consent
	Subjects   Subjects
	When       string // source of the rule, for people; empty means no rule
	Retry      Retry
	// Idempotency is the zero value when the server does not honour a key.
	Idempotency Idempotency
	StatusQuery *StatusQuery  // nil when there is none
	Timeout     time.Duration // of this one, else that of the contract

	when *rule
}

// Tool is one tool that may be called.
type Tool struct {
	Name string
	Terms
}

// Retry bounds repeated attempts of a call that may have been sent.
type Retry struct {
	Max int // attempts after the first
}

// Idempotency is where the server takes an idempotency key.
type Idempotency struct {
	Argument string // name of the argument that carries it, or empty
	Meta     bool   // in the request's _meta
}

// Offered says whether the server honours an idempotency key at all.
func (i Idempotency) Offered() bool { return i.Meta || i.Argument != "" }

// Subjects is who may make a call. The zero value means everybody.
type Subjects struct {
	Groups   []string
	Users    []string // source|value, as a subject is written
	Projects []string
}

// Allow says whether somebody may make the call: of each list that is given one
// entry must match. The user is written source|value.
func (s Subjects) Allow(user string, groups []string, project string) bool {
	inGroup := func(g string) bool { return slices.Contains(groups, g) }
	return (len(s.Users) == 0 || slices.Contains(s.Users, user)) &&
		(len(s.Groups) == 0 || slices.ContainsFunc(s.Groups, inGroup)) &&
		(len(s.Projects) == 0 || project != "" && slices.Contains(s.Projects, project))
}

// Resource is a pattern of resource URIs that may be read. Its definition is never
// pinned: what is read is named by its URI alone.
type Resource struct {
	URI string
	Terms

	segments []string // nil for a URI without wildcards
}

// Prompt is a prompt that may be fetched.
type Prompt struct {
	Name string
	Terms
}

// Reverse is what the server may ask of its host.
type Reverse struct {
	ElicitationForm bool
	ElicitationURL  []string // origins that URL elicitation may lead to
	Sampling        bool
	Roots           []string // file URIs that are told to the server
	Logging         string   // least severe level of log messages that are wanted, empty for none
}

// Tool returns the tool of this name.
func (c *Contract) Tool(name string) (*Tool, bool) {
	t, ok := c.tools[name]
	return t, ok
}

// AllowsMethod says whether the contract lists this MCP method.
func (c *Contract) AllowsMethod(method string) bool { return slices.Contains(c.Methods, method) }

// AllowsVersion says whether the contract lists this protocol version.
func (c *Contract) AllowsVersion(version string) bool { return slices.Contains(c.Versions, version) }

// Prompt returns the prompt of this name.
func (c *Contract) Prompt(name string) (*Prompt, bool) {
	for _, p := range c.Prompts {
		if p.Name == name {
			return p, true
		}
	}
	return nil, false
}

// Resource returns the first pattern that matches this URI: the order in which a
// contract lists them decides.
func (c *Contract) Resource(uri string) (*Resource, bool) {
	for _, r := range c.Resources {
		if r.Matches(uri) {
			return r, true
		}
	}
	return nil, false
}

// Terms returns what the contract says about something that is called by this
// name, which is a URI for a resource. Nothing is allowed that has no terms.
func (c *Contract) Terms(k Kind, name string) (*Terms, bool) {
	switch k {
	case KindTool:
		if t, ok := c.Tool(name); ok {
			return &t.Terms, true
		}
	case KindResource:
		if r, ok := c.Resource(name); ok {
			return &r.Terms, true
		}
	case KindPrompt:
		if p, ok := c.Prompt(name); ok {
			return &p.Terms, true
		}
	}
	return nil, false
}

// Pins says whether the contract accepts a definition of this digest.
func (t *Terms) Pins(digest string) bool {
	return t.Definition == DefinitionAny || t.Definition == digest
}

//go:embed schema.json
var schema []byte

// Schema returns the JSON Schema (2020-12) of a contract. It describes shape and
// bounds; rules that span members, and CEL, are checked by Parse alone.
func Schema() []byte { return slices.Clone(schema) }
