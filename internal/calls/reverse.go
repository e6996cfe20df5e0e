package calls

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/elicitation"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// TargetOf says where a server is and what its contract lets be negotiated and
// declared, the same for calls and for lists. A connection that users share
// declares nothing: what a server asks or tells is for one of them.
func TargetOf(srv catalog.Server, c *contract.Contract) sessions.Target {
	t := sessions.Target{ServerName: srv.Name, Transport: string(srv.Transport), URL: srv.URL, Runtime: srv.Runtime, Origin: srv.Origin,
		Versions: c.Versions, DowngradeForbidden: c.DowngradeForbidden, KnownVersion: srv.NewestVersion, KnownEra: srv.Era}
	if srv.Isolation == catalog.PerTenant {
		return t
	}
	r := c.Reverse
	t.LogLevel, t.Roots = r.Logging, r.Roots
	t.Declare = sessions.Capabilities{ElicitationForm: r.ElicitationForm, ElicitationURL: len(r.ElicitationURL) > 0,
		Sampling: r.Sampling, Roots: len(r.Roots) > 0, Tasks: true}
	return t
}

// Why the host answers a question by itself.
const (
	refusedMalformed = "MALFORMED"
	refusedSecret    = "ASKS_FOR_SECRET"
	refusedURL       = "URL_REFUSED"
)

// question is what a server asks, examined: whether a person may see it, and what
// it is answered with where not.
type question struct {
	key    string
	kind   InteractionKind
	params json.RawMessage
	// violation says that the server must not ask this at all; nothing else is set.
	violation string
	// own says that the host answers by itself: with answer, for which state stands,
	// and for a reason when it refuses.
	own     bool
	answer  sessions.Answer
	state   InteractionState
	refusal string
	detail  string // of the refusal, for people
}

// digest stands for a question in the audit.
func (q question) digest() string { return digestOf(q.params) }

func digestOf(raw []byte) string {
	sum := sha256.Sum256(raw)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (q question) refused(state InteractionState, why, detail string, a sessions.Answer) question {
	q.own, q.state, q.refusal, q.detail, q.answer = true, state, why, detail, a
	return q
}

// The JSON-RPC errors that a question is answered with.
const (
	codeMethodNotFound = -32601
	codeInternal       = -32603 // the host failed
	codeRejected       = -1     // a person refused to have the model asked
)

func rejected(code int64, message string) sessions.Answer {
	return sessions.Answer{Error: &sessions.RPCError{Code: code, Message: message}}
}

// actionResult is the result of an elicitation that was not accepted.
func actionResult(a Action) sessions.Answer {
	words := map[Action]string{Accept: `{"action":"accept"}`, Decline: `{"action":"decline"}`, Dismiss: `{"action":"cancel"}`}
	return sessions.Answer{Result: json.RawMessage(words[a])}
}

// examine says what becomes of a question. Only what was declared may be asked; a
// modern server is answered by results alone, a legacy one by errors too.
func (e *execution) examine(a sessions.Ask, modern bool) question {
	q := question{key: a.Key, params: a.Params}
	d := e.target.Declare
	switch a.Method {
	case "elicitation/create":
		return e.examineElicitation(q, modern)
	case "sampling/createMessage":
		q.kind = Sampling
		if !d.Sampling {
			return undeclared(q, "sampling/createMessage", modern)
		}
		return examineSampling(q, modern)
	case "roots/list":
		q.kind = Roots
		if !d.Roots {
			return undeclared(q, "roots/list", modern)
		}
		q.own, q.state, q.answer = true, WasAnswered, sessions.Answer{Result: sessions.RootsResult(e.target.Roots)}
		return q
	}
	return undeclared(q, cleanText(a.Method, 60), modern)
}

func undeclared(q question, what string, modern bool) question {
	q.violation = "the server asked for " + what + ", which was not offered to it"
	if !modern {
		q.own, q.state, q.answer = true, WasCancelled, rejected(codeMethodNotFound, "not offered")
	}
	return q
}

func (e *execution) examineElicitation(q question, modern bool) question {
	q.kind = ElicitationForm
	mode, err := elicitation.Mode(q.params)
	if err != nil {
		return malformedQuestion(q, err, modern)
	}
	d := e.target.Declare
	if mode == "url" {
		q.kind = ElicitationURL
	}
	if mode == "url" && !d.ElicitationURL || mode == "form" && !d.ElicitationForm {
		q = undeclared(q, "input in the mode "+mode, modern)
		if !modern {
			q.answer = rejected(codeInvalidParams, "this mode was not offered")
		}
		return q
	}
	if mode == "url" {
		l, err := elicitation.ParseURL(q.params)
		switch {
		case err != nil:
			return q.refused(WasDeclined, refusedURL, err.Error(), actionResult(Decline))
		case !l.LeadsTo(e.origins):
			return q.refused(WasDeclined, refusedURL, "the URL leads to an origin that the contract does not name", actionResult(Decline))
		}
		return q
	}
	form, err := elicitation.ParseForm(q.params)
	if err != nil {
		return malformedQuestion(q, err, modern)
	}
	if word := form.Secret(); word != "" {
		return q.refused(WasDeclined, refusedSecret, "the form asks for a "+word, actionResult(Decline))
	}
	return q
}

func malformedQuestion(q question, err error, modern bool) question {
	a := actionResult(Dismiss)
	if !modern {
		a = rejected(codeInvalidParams, "the question is malformed")
	}
	return q.refused(WasCancelled, refusedMalformed, err.Error(), a)
}
