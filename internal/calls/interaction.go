package calls

import (
	"encoding/json"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/elicitation"
)

// InteractionKind is what a server asks for.
type InteractionKind string

// The kinds of an interaction. Roots are answered by the host and not shown.
const (
	ElicitationForm InteractionKind = "ELICITATION_FORM"
	ElicitationURL  InteractionKind = "ELICITATION_URL"
	Sampling        InteractionKind = "SAMPLING"
	Roots           InteractionKind = "ROOTS"
)

// InteractionState is where a question stands.
type InteractionState string

// The states of an interaction; all but Pending are final.
const (
	Pending      InteractionState = "PENDING"
	WasAnswered  InteractionState = "ANSWERED"
	WasDeclined  InteractionState = "DECLINED"
	WasCancelled InteractionState = "CANCELLED"
	WasExpired   InteractionState = "EXPIRED"
	// Withdrawn means that the server no longer wants to know.
	Withdrawn InteractionState = "WITHDRAWN"
)

// Action is what a person does with a question.
type Action string

// The actions of an answer.
const (
	Accept  Action = "ACCEPT"
	Decline Action = "DECLINE"
	Dismiss Action = "CANCEL"
)

// Interaction is what a server asks in the middle of a call. Its request is
// foreign, untrusted text; of one that the host refused it is not shown.
type Interaction struct {
	ID     string
	CallID string
	// Server and Origin say who asks.
	Server, Origin string
	// Round counts from 1 the times that the server asked.
	Round int
	key   string
	Kind  InteractionKind
	State InteractionState
	// Refusal says why the host answered by itself, "" where a person is asked.
	Refusal string
	// Request are the params of the question as received, nil when it is not shown.
	Request    json.RawMessage
	CreateTime time.Time
	ExpireTime time.Time
	AnswerTime *time.Time
	AnsweredBy string
	sent       bool
	response   json.RawMessage
}

// Answer is what a person says to a question. Content is of an accepted form,
// Result of an accepted sampling.
type Answer struct {
	Action          Action
	Content, Result json.RawMessage
}

const (
	// maxRounds is how often a server may ask during one call.
	maxRounds = 10
	// maxQuestions is how much it may ask at a time.
	maxQuestions = 16
)

// View is what a person is shown of a question, all of it foreign.
type View struct {
	Message string
	// Schema is of a form, URL and Host of a link, Sampling of a sampling.
	Schema    json.RawMessage
	URL, Host string
	Sampling  json.RawMessage
	// Findings are remarks, "CODE: sentence".
	Findings []string
}

// View reads the question. One that is not shown has an empty view.
func (i *Interaction) View() (v View) {
	if i.Request == nil {
		return v
	}
	switch i.Kind {
	case Sampling:
		v.Sampling = i.Request
	case ElicitationForm:
		if f, err := elicitation.ParseForm(i.Request); err == nil {
			v.Message, v.Schema = f.Message, f.Schema
		}
	case ElicitationURL:
		if l, err := elicitation.ParseURL(i.Request); err == nil {
			v.Message, v.URL, v.Host = l.Message, l.URL, l.Host
			if l.Punycode {
				v.Findings = append(v.Findings, "PUNYCODE_HOST: the host is written in letters that may look like others")
			}
		}
	}
	for _, f := range catalog.TextFindings(i.Request) {
		v.Findings = append(v.Findings, f.Code+": "+f.Detail)
	}
	return v
}
