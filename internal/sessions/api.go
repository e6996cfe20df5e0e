package sessions

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Key names one connection and everything that is pooled for it. It is
// comparable; two callers share a connection only when every member is equal.
type Key struct {
	// Tenant is the owner. Connections of two tenants are never shared.
	Tenant tenant.ID
	// Server is the id of the server registration.
	Server string
	// Registration is the revision of the registration; a change of the URL, the
	// runtime or the authorization makes a new one and so a new connection.
	Registration int64
	// Subject is the user, and zero for isolation per tenant.
	Subject tenant.Subject
	// Session is the session's id for isolation per session, and empty otherwise.
	Session string
	// AccountVersion is the version of the user's account at the server, and 0
	// where the server asks for none.
	AccountVersion int64
}

// The transports of a Target.
const (
	TransportHTTP  = "HTTP"
	TransportSSE   = "SSE"
	TransportStdio = "STDIO"
)

// The eras of the protocol. MODERN is 2026-07-28, without a handshake; LEGACY is
// every older revision, with initialize.
const (
	EraModern = "MODERN"
	EraLegacy = "LEGACY"
)

// Target says where a server is and what its contract lets be negotiated.
type Target struct {
	// ServerName is the tenant's name for the server, for errors and logs.
	ServerName string
	// Transport is TransportHTTP, TransportSSE or TransportStdio.
	Transport string
	// URL is the MCP endpoint, for HTTP, and the event stream, for SSE.
	URL string
	// Runtime is the name of a declared command, for stdio.
	Runtime string
	// Origin is the origin the contract was written for: scheme://host[:port], or
	// stdio:<runtime>. When it is set, URL or Runtime must agree with it.
	Origin string
	// Versions are the protocol versions the contract allows. None means all that
	// this build knows.
	Versions []string
	// DowngradeForbidden refuses an older version than one this server is known to
	// speak: KnownVersion, or what this process has seen of the registration.
	DowngradeForbidden bool
	// KnownVersion is the newest version seen before, and empty if there is none.
	KnownVersion string
	// KnownEra is the era that the server proved last, before this process first
	// connected; empty if there is none. A known legacy server is not probed.
	KnownEra string
	// Timeout bounds connecting and negotiating. 0 means the pool's own limit.
	Timeout time.Duration
	// Declare is what this client says that it offers to the server. A legacy
	// connection with another declaration is ended and negotiated anew; a modern
	// one says it with every request.
	Declare Capabilities
	// LogLevel is the least severe level of log messages that the server is asked
	// for (debug … emergency); empty means that none are wanted, and those that come
	// all the same are dropped.
	LogLevel string
	// Roots are the file URIs that roots/list is answered with when Declare.Roots is
	// set.
	Roots []string
}

// Capabilities is what a client can offer to a server. The zero value offers
// nothing, and what is not offered is refused when a server asks for it.
type Capabilities struct {
	ElicitationForm, ElicitationURL, Sampling, Roots bool
	// Tasks is the extension io.modelcontextprotocol/tasks, of the modern era only.
	Tasks bool
}

// Request is one request to a server, as raw bytes.
type Request struct {
	// Method is the MCP method: tools/call, resources/read, prompts/get,
	// completion/complete, tasks/get, tasks/update or tasks/cancel.
	Method string
	// Name is what Mcp-Name carries: params.name, params.uri for resources, and
	// params.taskId for tasks.
	Name string
	// Params is the JSON object of parameters, without _meta. It is sent as it is.
	Params json.RawMessage
	// Meta is added as params._meta; values are raw JSON. Keys of the protocol
	// itself (io.modelcontextprotocol/…) are refused.
	Meta map[string]json.RawMessage
	// Schema is the tool's inputSchema as last listed. It yields the Mcp-Param-*
	// headers; without it none are sent.
	Schema json.RawMessage
	// ResultBytes bounds the result. 0 means the pool's own limit.
	ResultBytes int64
	// Timeout bounds the execution after negotiation. 0 means the pool's limit.
	Timeout time.Duration
	// Queue bounds the wait for the calls before this one where calls run one at a
	// time. 0 means Timeout.
	Queue time.Duration
	// BeforeSend is called as late as possible before the first byte of the body
	// is written, on another goroutine than the caller's. An error means that
	// nothing is sent; Do returns it, with Phase NotSent. It is called again when
	// the message is written a second time, after a connection broke before it had
	// taken the whole of it. A request that was answered is never sent again.
	BeforeSend func() error
	// OnAsk serves what a legacy server asks for while this request runs, one
	// goroutine for each question, 8 at once. Only what the target declares reaches
	// it; roots and ping are answered by the pool itself. ctx ends with the request,
	// and when the server takes its question back; OnAsk must return then, because the
	// request does not end before it. While it runs, Timeout stands still: only ctx
	// of Do bounds how long people take. nil refuses all questions to people.
	OnAsk func(ctx context.Context, a Ask) Answer
	// OnNotice is told of progress and log messages of this request, the newest of
	// what came at once. It must return soon and must not use the pool.
	OnNotice func(Notice)
}

// Ask is what a server wants to know in the middle of a request: a request of a
// legacy server, or one of the inputRequests of a modern one. All of it is
// untrusted.
type Ask struct {
	// Key names it among the inputRequests of a modern answer; empty for legacy.
	Key string
	// Method is elicitation/create, sampling/createMessage or roots/list.
	Method string
	// Params is a valid JSON object of bounded size, {} when there was none.
	Params json.RawMessage
}

// Answer is what an Ask is answered with: a result, a raw JSON object, or an error.
type Answer struct {
	Result json.RawMessage
	Error  *RPCError
}

// The kinds of a Notice.
const (
	NoticeProgress = "PROGRESS"
	NoticeLog      = "LOG"
)

// Notice is progress or a log message; untrusted text, bounded.
type Notice struct {
	Kind string
	Time time.Time
	// Progress, and Total if Total is not nil, are of a PROGRESS.
	Progress float64
	Total    *float64
	// Message is the text of a PROGRESS.
	Message string
	// Level, Logger and Data (raw JSON) are of a LOG.
	Level, Logger string
	Data          json.RawMessage
}

// Task is the state of a task of the extension io.modelcontextprotocol/tasks.
type Task struct {
	ID string
	// Status is working, input_required, completed, failed or cancelled.
	Status        string
	StatusMessage string
	// TTL is how long the server keeps the task from its creation, nil for no end;
	// PollInterval is what it wants between two looks, 0 if it did not say.
	TTL          *time.Duration
	PollInterval time.Duration
	// Asks are its inputRequests, Result and Error how it ended.
	Asks   []Ask
	Result json.RawMessage
	Error  *RPCError
}

// Phase says how far a request came. It is a fact, whatever error goes with it.
type Phase uint8

const (
	// NotSent means that the server cannot have seen the whole message.
	NotSent Phase = iota
	// MaybeSent means that bytes went out and no readable answer came back.
	MaybeSent
	// Answered means that the server answered this request: with a result, a
	// JSON-RPC error, or an HTTP status that refuses the request.
	Answered
)

// String returns the phase in lower case with spaces, for logs.
func (p Phase) String() string {
	switch p {
	case NotSent:
		return "not sent"
	case MaybeSent:
		return "maybe sent"
	default:
		return "answered"
	}
}

// RPCError is a JSON-RPC error as the server sent it. All of it is untrusted.
type RPCError struct {
	Code    int64
	Message string
	Data    json.RawMessage
}

// The values of Response.ResultType that this package lets through.
const (
	ResultComplete      = "complete"
	ResultInputRequired = "input_required"
	ResultTask          = "task"
)

// Timings say where the time of a request went.
type Timings struct {
	// Negotiation is the time spent waiting for a connection.
	Negotiation time.Duration
	// Execution is the time from building the request to its answer or failure.
	Execution time.Duration
}

// Response is what came of a request. A JSON-RPC error is an answer and no Go
// error: Error is set and Do returns nil.
type Response struct {
	// Result is the raw result, valid JSON as it was received. It is set beside an
	// error with the reason ResultInvalid too.
	Result json.RawMessage
	// Parts are the protocol's own members of Result.
	Parts Parts
	// ResultType is ResultComplete, ResultInputRequired or, for tools/call and of a
	// server that was told of the extension and has it, ResultTask, when Result is set.
	ResultType string
	// Asks and RequestState are of ResultInputRequired: what the server wants to
	// know, sorted by key, and its state as a raw JSON string, nil when there is none.
	// Only what the target declares is among Asks, else the result is invalid.
	//
	// When Error has the code -32042 of the legacy revision 2025-11-25 and the target
	// declares URLs, ResultType is ResultInputRequired too, Result is nil, and Asks are
	// the URLs to visit, keyed by the server's elicitationId: once a person has been
	// there, the same request is sent again, without inputResponses.
	Asks         []Ask
	RequestState json.RawMessage
	// OnlyAsked says of a result that is invalid that the server says with it, in the
	// protocol's form, that it has not carried the request out yet: it asks first,
	// although for what it may not ask.
	OnlyAsked bool
	// Task is the handle of ResultTask, and the state that tasks/get answered; the
	// latter's ResultType is always ResultComplete.
	Task *Task
	// Error is the JSON-RPC error, or nil.
	Error *RPCError
	// HTTPStatus is the status of the HTTP answer, 0 if there was none.
	HTTPStatus int
	// WWWAuthenticate is the challenge of a 401 or 403, bounded, untrusted.
	WWWAuthenticate string
	// RetryAfter is what the server asked for with 429 or 503.
	RetryAfter time.Duration
	// Doubted says that the server refused the request, by its own word without
	// carrying it out, in a way that speaks against what was negotiated with it. The
	// connection was given up, and the next one negotiates anew; only one whose very
	// version the server named as supported when it refused it stays.
	Doubted bool
	// Phase is how far the request came.
	Phase Phase
	// Era and ProtocolVersion are those of the connection, once negotiated.
	Era, ProtocolVersion string
	// Timings of this request.
	Timings Timings

	hold *lease
}

// Release gives back what the response has of the budget for answers. Whoever got
// it from Do calls this once nothing of it is held any more, at the latest when it
// is stored; calling it again does nothing.
func (r *Response) Release() { r.hold.release() }

// Parts are the members of a result that the protocol defines for tools/call, as
// raw JSON and under their exact names only, parts of the result's bytes. A member
// that is not there is nil.
type Parts struct {
	StructuredContent, Content json.RawMessage
	// IsError is what the member isError says.
	IsError bool
	// Miscased are names of the protocol that came spelled in another case; such
	// members were ignored.
	Miscased []string
	// Repaired says that bytes that were no UTF-8 were replaced.
	Repaired bool
}

// The reasons of errors for an answer that came and cannot be used. The phase
// beside them is Answered.
const (
	ResultInvalid = "RESULT_INVALID"
	ErrorInvalid  = "ERROR_INVALID"
	// ResultTypeInvalid is of a result of a type that was not asked for.
	ResultTypeInvalid = "RESULT_TYPE_INVALID"
)

// Reasons of errors for a request that was not carried out.
const (
	// SessionLost means that a legacy server forgot the session. The phase beside it
	// is Answered.
	SessionLost = "SESSION_LOST"
	// TurnNotCome means that the calls of others on a shared connection took too
	// long. The phase beside it is NotSent.
	TurnNotCome = "TURN_NOT_COME"
)

// The kinds of definition that List knows.
const (
	KindTool             = "tool"
	KindResource         = "resource"
	KindResourceTemplate = "resource_template"
	KindPrompt           = "prompt"
	// KindDeclaration lists nothing: it asks only what the server declares, for
	// which a connection is enough.
	KindDeclaration = "declaration"
)

// Listing is everything a server offers of one kind, as raw bytes.
type Listing struct {
	// Items are the definitions in the server's order. It is never nil.
	Items []json.RawMessage
	// Rejected are definitions that the protocol tells a client to leave out.
	Rejected []Rejection
	// Incomplete says why definitions may be missing, and is empty otherwise.
	Incomplete string
	// TTL is how long the server lets the list be kept, 0 if it did not say. It is
	// the shortest of all pages.
	TTL time.Duration
	// Scope is public or private; what is not said is private.
	Scope string
	// ProtocolVersion and Era are those of the connection.
	ProtocolVersion, Era string
	// Capabilities and ServerInfo are what the server said of itself; untrusted.
	Capabilities, ServerInfo json.RawMessage
	// ListChanged reports whether the server announces changes of this list.
	ListChanged bool
	// Negotiation is the time it took to connect for this list, 0 where there was a
	// connection.
	Negotiation time.Duration
}

// Rejection is a definition left out of a Listing, and the rule it broke.
type Rejection struct {
	Item   json.RawMessage
	Reason string
}

// The states of a connection. A legacy connection is INITIALIZED where a modern
// one is DISCOVERED.
const (
	StateIdentified  = "IDENTIFIED"
	StateNegotiated  = "NEGOTIATED"
	StateInitialized = "INITIALIZED"
	StateDiscovered  = "DISCOVERED"
	StateCatalogued  = "CATALOGUED"
	StateFailed      = "FAILED"
	StateClosed      = "CLOSED"
)

// ConnectionInfo describes a connection, a living one or one that ended lately.
type ConnectionInfo struct {
	ID              string
	Key             Key
	ServerName      string
	Transport       string
	Era             string
	ProtocolVersion string
	State           string
	// Reason says why the connection failed or was closed, for people. It begins with
	// ServerStuck where the server answered nothing any more.
	Reason string
	// Negotiation is the time it took to connect.
	Negotiation time.Duration
	// Opened and LastUsed are times of this process's clock.
	Opened, LastUsed time.Time
	// Stages are the states that it went through, in order.
	Stages []Stage
	// Attempts counts this attempt to connect and those before it that failed in a
	// row. NextTry is when the server may be tried again after a failure, and zero
	// where nothing is waited for.
	Attempts int
	NextTry  time.Time
	// Active is the number of requests in flight.
	Active int
	// Watching reports whether a stream for changes is open.
	Watching bool
	// Stray counts messages that matched no request, Garbage unreadable lines.
	Stray, Garbage int64
	// Logs are the newest log messages of the server, oldest first, 16 at most.
	Logs []Notice
}

// Credentials adds a user's credentials to an outgoing HTTP request. It is asked
// for every request, so that tokens are never fixed into a connection. The
// request goes to the origin of the target only.
type Credentials interface {
	Authorize(ctx context.Context, k Key, t Target, h http.Header) error
}

// Change is told to the function given to Pool.OnChange. An empty Kind means
// that anything may have changed: a stream broke, opened late or was lost.
type Change struct {
	Key  Key
	Kind string
	// Connected says that a connection to the server was made and that nothing was
	// listed on it yet: only what was listed before may be out of date. Opened is
	// when it began to be made, by this process's clock.
	Connected bool
	Opened    time.Time
}
