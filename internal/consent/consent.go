// Package consent owns the questions put to people and the grants they chose to
// let stand. A consent is bound to one exact call (tenant, user, session, server,
// origin, tool, definition digest, argument digest, scopes, contract, expiry),
// is decided once and used once. Nothing here sends anything: package calls
// spends consents and grants inside its dispatch transaction.
package consent

import (
	"context"
	"errors"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// State is where a consent stands. Each transition happens once.
type State string

// The states of a consent.
const (
	Pending  State = "PENDING"
	Approved State = "APPROVED"
	Denied   State = "DENIED"
	Expired  State = "EXPIRED"
	Void     State = "VOID"
	Consumed State = "CONSUMED"
)

// Rule is what a contract asks of a person before a tool runs.
type Rule string

// The consent rules of a contract.
const (
	RuleNone    Rule = "NONE"
	RuleSession Rule = "SESSION"
	RuleCall    Rule = "CALL"
)

// Binding is what a consent or a grant is good for; a call that differs in any
// member has neither. ArgumentsDigest and Origin bind consents only: a session
// grant covers other arguments of the same tool.
type Binding struct {
	SessionID        string
	Subject          tenant.Subject
	ServerID         string
	ServerName       string
	Origin           string
	Kind             string
	Name             string
	DefinitionDigest string
	ArgumentsDigest  string
	ContractID       string
	Scopes           []string
	AccountVersion   int64
}

// Request is a call that asks for consent.
type Request struct {
	Binding
	CallID           string
	ContractRevision int
	Effect           string
	Rule             Rule
	// Actor is who proposed the call, for the audit.
	Actor string
	// TTL is how long the question stands; it never outlives the session.
	TTL time.Duration
}

// Consent is a row of consents.
type Consent struct {
	Binding
	ID               string
	CallID           string
	ContractRevision int
	Effect           string
	Rule             Rule
	State            State
	DecidedBy        string
	DecidedHow       string
	Reason           string
	CreateTime       time.Time
	ExpireTime       time.Time
	DecideTime       *time.Time
}

// Admission is what Admit found for a call: a reserved grant, or the consent
// that now asks.
type Admission struct {
	GrantID    string
	ConsentID  string
	ExpireTime time.Time
}

// Refusal says why a consent or a grant does not let a call run.
type Refusal string

// The refusals, which become the reason of a denied call.
const (
	NotRefused    Refusal = ""
	RefusedVoid   Refusal = "VOID"
	RefusedExpiry Refusal = "EXPIRED"
	RefusedDenied Refusal = "REFUSED"
	// RefusedWaiting means that nobody has decided yet; the call goes on waiting.
	RefusedWaiting Refusal = "WAITING"
)

// Ended is a consent that can no longer be used, and the call that waited for it.
type Ended struct {
	ConsentID string
	CallID    string
	Reason    Refusal
	Actor     string
	Detail    string
}

// Calls is what consent tells the owner of calls.
type Calls interface {
	// ConsentsEnded denies the waiting calls in the same transaction.
	ConsentsEnded(ctx context.Context, tx tenant.Tx, ended []Ended) error
	// ConsentApproved is told after the commit of an approval.
	ConsentApproved(t tenant.ID, callID string)
}

// Recorder keeps audit entries in the transaction of what they record.
type Recorder interface {
	Append(ctx context.Context, tx tenant.Tx, e audit.Entry) (string, error)
}

// Announcer tells a tenant's own systems what happened, in the transaction in
// which it happens. *webhooks.Service is one.
type Announcer interface {
	Announce(ctx context.Context, tx tenant.Tx, events ...webhooks.Event) error
}

// Service opens, decides, voids and spends consents.
type Service struct {
	db        *tenant.DB
	rec       Recorder
	calls     Calls
	announcer Announcer
}

// NewService returns the service. Attach must be called before it is used.
func NewService(db *tenant.DB, rec Recorder) (*Service, error) {
	if db == nil || rec == nil {
		return nil, errors.New("consent: database and recorder are needed")
	}
	return &Service{db: db, rec: rec}, nil
}

// Attach names the owner of calls, which itself needs this service.
func (s *Service) Attach(c Calls) { s.calls = c }

// AnnounceTo names who tells of consents that are requested and that end; without
// it nobody does. It must be called before the service is used.
func (s *Service) AnnounceTo(a Announcer) { s.announcer = a }

// announce tells of a consent as it now is.
func (s *Service) announce(ctx context.Context, tx tenant.Tx, c Consent, st State) error {
	if s.announcer == nil {
		return nil
	}
	d := webhooks.ConsentData{ConsentID: c.ID, CallID: c.CallID, SessionID: c.SessionID, ServerID: c.ServerID, Server: c.ServerName,
		Kind: c.Kind, Name: c.Name, Effect: c.Effect, State: string(st), ArgumentsDigest: c.ArgumentsDigest,
		DefinitionDigest: c.DefinitionDigest, ContractID: c.ContractID}
	t := webhooks.ConsentDecided
	if st == Pending {
		t, d.ExpireTime = webhooks.ConsentRequested, &c.ExpireTime
	}
	return s.announcer.Announce(ctx, tx, webhooks.Event{Type: t, Data: d})
}
