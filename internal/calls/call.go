// Package calls owns the durable call: the state machine from a proposal to a
// recorded outcome, its attempts, its recovery after failures, crashes and
// pauses, and the waiting for it. A call never claims more than is known: what
// may have run and gave no answer is UNCERTAIN.
package calls

import (
	"slices"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Layer places the failure of a call.
type Layer string

// The layers of a call's error.
const (
	LayerTool      Layer = "TOOL"
	LayerProtocol  Layer = "PROTOCOL"
	LayerTransport Layer = "TRANSPORT"
	LayerServer    Layer = "SERVER"
	LayerHost      Layer = "HOST"
)

// Error is why a call failed. With the layers TOOL, PROTOCOL and SERVER the
// message and the data are foreign text.
type Error struct {
	Layer   Layer  `json:"layer"`
	Code    string `json:"code"`
	Message string `json:"message"`
	// Data is raw JSON, or nil.
	Data []byte `json:"data,omitempty"`
}

// Timings say where a call's time went.
type Timings struct {
	Negotiation time.Duration
	Discovery   time.Duration
	Decision    time.Duration
	Execution   time.Duration
}

// Attempt is one try to have a call executed.
type Attempt struct {
	Number    int
	Epoch     int64
	Phase     Phase
	Outcome   string
	Detail    string
	SendBy    *time.Time
	StartTime time.Time
	EndTime   *time.Time
	// Evidence reports an answer that came too late to count.
	Evidence bool
}

// Call is a call as it stands. Calls are values: a change makes a new revision.
type Call struct {
	Tenant             tenant.ID
	ID                 string
	SessionID          string
	KeyID              string
	Subject            tenant.Subject
	ServerID           string
	ServerName         string
	Origin             string
	Kind               contract.Kind
	Name               string
	RequestID          string
	requestDigest      string
	Arguments          []byte
	ArgumentsDigest    string
	State              State
	Reason             Reason
	Revision           int
	Decision           authz.Decision
	ContractID         string
	ContractRevision   int
	CatalogRevision    string
	CatalogContext     string
	DefinitionDigest   string
	DefinitionObserved *time.Time
	Effect             Effect
	ConsentRule        consent.Rule
	ConsentID          string
	ConsentExpire      *time.Time
	GrantID            string
	Attempt            int
	Epoch              int64
	SendBy             *time.Time
	Ceiling            *time.Time
	CancelRequested    bool
	IdempotencyKey     string
	Result             []byte
	Error              *Error
	SideEffectID       string
	Findings           []string
	Receipt            string
	Timings            Timings
	CreateTime         time.Time
	UpdateTime         time.Time
	FinishTime         *time.Time
	Trace              telemetry.Trace
	Attempts           []Attempt
	// Interactions are the questions of the present round while the call is
	// INPUT_REQUIRED; lists of calls leave them out.
	Interactions []Interaction
	// Task is what the server made of the call, while it is under way; lists of calls
	// leave it out.
	Task *Task
	// Progress and Logs are the newest that the server said of the call.
	Progress *Progress
	Logs     []LogLine
	// Recorded reports whether the state shown here is committed.
	Recorded bool
}

// Settled reports whether a waiter has nothing to wait for. A call whose questions
// are all answered goes on by itself, although it is INPUT_REQUIRED until it does.
func (c *Call) Settled() bool {
	if c.State != InputRequired {
		return c.State.Settled()
	}
	return slices.ContainsFunc(c.Interactions, func(i Interaction) bool { return i.State == Pending })
}

// tries counts the attempts since the server was last answered.
func (c *Call) tries() (n int) {
	for i := len(c.Attempts) - 1; i >= 0 && c.Attempts[i].Outcome != string(InputRequired); i-- {
		n++
	}
	return max(n, 1)
}

func (c *Call) binding() consent.Binding {
	return consent.Binding{SessionID: c.SessionID, Subject: c.Subject, ServerID: c.ServerID, ServerName: c.ServerName,
		Origin: c.Origin, Kind: string(c.Kind), Name: c.Name, DefinitionDigest: c.DefinitionDigest,
		ArgumentsDigest: c.ArgumentsDigest, ContractID: c.ContractID}
}

// owns reports whether the principal may see the call: its subject, and roles
// that see their whole tenant, with a credential that is for the call's server.
func owns(p tenant.Principal, c *Call) bool {
	if !p.MayUse(c.ServerName) {
		return false
	}
	switch p.Role {
	case tenant.RoleAdmin, tenant.RoleAuditor:
		return true
	}
	return !p.Subject.IsZero() && p.Subject == c.Subject
}
