package calls

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/elicitation"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

var (
	errInteractionNotFound = fault.New(fault.NotFound, "INTERACTION_NOT_FOUND", "no such interaction of this call")
	errAnsweredOtherwise   = fault.New(fault.Exists, "INTERACTION_ANSWERED", "the interaction was answered otherwise")
	errInteractionEnded    = fault.New(fault.Precondition, "INTERACTION_ENDED", "the interaction has ended without an answer")
	errSessionClosed       = fault.New(fault.Precondition, "SESSION_CLOSED", "the session is closed or has expired; the question was not answered")
	errCallEnded           = fault.New(fault.Precondition, "CALL_ENDED", "the call has ended; the question was not answered")
	errNotYours            = fault.New(fault.Denied, "NOT_YOUR_CALL", "only the call's own user answers what its server asks")
)

// Interactions returns what the server asked during a call, oldest first.
func (s *Service) Interactions(ctx context.Context, p tenant.Principal, callID string) ([]Interaction, error) {
	c, err := s.read(ctx, p, callKey{p.Tenant, callID})
	if err != nil || !c.Recorded {
		return nil, err
	}
	return s.shown(ctx, c, 0)
}

// shown reads and opens the interactions of a round, of all for 0.
func (s *Service) shown(ctx context.Context, c *Call, round int) (out []Interaction, err error) {
	err = s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		out, err = loadInteractions(ctx, tx, c.ID, round)
		return err
	})
	if err != nil {
		return nil, err
	}
	out = shownOnly(out)
	for i := range out {
		if err := s.openInteraction(ctx, c, &out[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (s *Service) openInteraction(ctx context.Context, c *Call, i *Interaction) (err error) {
	t := c.Tenant
	i.Server, i.Origin = c.ServerName, c.Origin
	if i.Request != nil {
		i.Request, err = s.deps.Vault.Open(ctx, t, vaultInteraction, i.ID, "request", i.Request)
	}
	if err == nil && i.response != nil {
		i.response, err = s.deps.Vault.Open(ctx, t, vaultInteraction, i.ID, "response", i.response)
	}
	return err
}

// withQuestions adds the open questions to a call that waits for their answers, and
// to one under way its task.
func (s *Service) withQuestions(ctx context.Context, c *Call) (*Call, error) {
	if c.State != InputRequired && c.State != Dispatching || !c.Recorded {
		return c, nil
	}
	more := *c
	err := s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) (err error) {
		more.Task, _, err = loadTask(ctx, tx, c.ID)
		return err
	})
	if err != nil || c.State != InputRequired {
		return &more, err
	}
	all, err := s.shown(ctx, c, 0)
	if err != nil {
		return nil, err
	}
	more.Interactions = all[:0]
	for _, i := range all {
		// Questions of a legacy server have a round each.
		if i.Round == all[len(all)-1].Round || i.State == Pending {
			more.Interactions = append(more.Interactions, i)
		}
	}
	return &more, nil
}

// Respond answers an interaction, once: the same answer again gives the same
// result. Nobody but the call's own user may; the credential that proposed the
// call may, for an answer is no consent. A wrong answer changes nothing.
func (s *Service) Respond(ctx context.Context, p tenant.Principal, callID, id string, a Answer) (*Interaction, error) {
	if !resource.IsID(resource.Interaction, id) {
		return nil, errInteractionNotFound
	}
	c, err := s.read(ctx, p, callKey{p.Tenant, callID})
	if err != nil {
		return nil, err
	}
	if p.Subject.IsZero() || p.Subject != c.Subject {
		return nil, errNotYours
	}
	for {
		i, err := s.interaction(ctx, c, id)
		if err != nil {
			return nil, err
		}
		state, response, err := i.answer(a)
		if err != nil {
			return nil, err
		}
		switch {
		case i.State == WasAnswered || i.State == WasDeclined || i.State == WasCancelled:
			if i.AnsweredBy == "" {
				return nil, s.unanswered(ctx, c) // the host ended it
			}
			if i.State != state || !bytes.Equal(i.response, response) {
				return nil, errAnsweredOtherwise
			}
			return i, nil
		case i.State == Withdrawn:
			return nil, s.unanswered(ctx, c)
		case i.State != Pending:
			return nil, errInteractionEnded
		}
		done, err := s.writeAnswer(ctx, p, c, i, state, response)
		if err != nil {
			return nil, err
		}
		if done {
			return s.interaction(ctx, c, id)
		}
	}
}

func (s *Service) interaction(ctx context.Context, c *Call, id string) (*Interaction, error) {
	var i Interaction
	err := s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		rows, err := tx.Query(ctx, `SELECT `+interactionColumns+` FROM interactions
			WHERE tenant_id = $1 AND call_id = $2 AND interaction_id = $3 AND kind <> 'ROOTS'`, tx.Tenant(), c.ID, id)
		if err != nil {
			return err
		}
		i, err = pgx.CollectExactlyOneRow(rows, scanInteraction)
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errInteractionNotFound
	}
	if err != nil {
		return nil, err
	}
	if i.Refusal != "" {
		return nil, errInteractionEnded
	}
	return &i, s.openInteraction(ctx, c, &i)
}

// answer makes the result that the server is told, and what it makes of the
// interaction.
func (i *Interaction) answer(a Answer) (InteractionState, json.RawMessage, error) {
	var wrong []fault.Field
	if len(a.Content) > 0 && (a.Action != Accept || i.Kind != ElicitationForm) {
		wrong = append(wrong, fault.Field{Path: "content", Rule: "belongs to an accepted form only"})
	}
	if len(a.Result) > 0 && (a.Action != Accept || i.Kind != Sampling) {
		wrong = append(wrong, fault.Field{Path: "result", Rule: "belongs to an accepted sampling only"})
	}
	if len(wrong) > 0 {
		return "", nil, fault.InvalidFields(wrong...)
	}
	switch a.Action {
	case Decline:
		return WasDeclined, actionResult(Decline).Result, nil
	case Dismiss:
		return WasCancelled, actionResult(Dismiss).Result, nil
	case Accept:
		result, err := i.accepted(a)
		return WasAnswered, result, err
	}
	return "", nil, fault.Field1("action", "must be ACCEPT, DECLINE or CANCEL")
}

func (i *Interaction) accepted(a Answer) (json.RawMessage, error) {
	switch i.Kind {
	case ElicitationURL:
		return actionResult(Accept).Result, nil
	case Sampling:
		if len(a.Result) == 0 {
			return nil, fault.Field1("result", "is required: what the model answered")
		}
		return completion(a.Result)
	}
	if len(a.Content) == 0 {
		return nil, fault.Field1("content", "is required: the form's fields")
	}
	form, err := elicitation.ParseForm(i.Request)
	if err != nil {
		return nil, fault.Wrap(err, "read a stored form")
	}
	content, err := form.Fill(a.Content)
	if err != nil {
		return nil, err
	}
	return append(append([]byte(`{"action":"accept","content":`), content...), '}'), nil
}

// writeAnswer writes an answer down if the question is still open. Whoever gives
// the last one of a round lets the call go on.
func (s *Service) writeAnswer(ctx context.Context, p tenant.Principal, c *Call, i *Interaction, state InteractionState, response json.RawMessage) (done bool, err error) {
	sealed, err := s.deps.Vault.Seal(ctx, p.Tenant, vaultInteraction, i.ID, "response", response)
	if err != nil {
		return false, err
	}
	var phase phaseOfInput
	err = s.deps.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		locked, err := one(ctx, tx, `WHERE tenant_id = $1 AND call_id = $2 FOR UPDATE`, c.ID)
		if err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `UPDATE interactions SET state = $4, response = $5, answered_by = $6, answered_how = 'API',
			answer_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2 AND interaction_id = $3 AND state = 'PENDING'
			AND expire_time > clock_timestamp()`, tx.Tenant(), c.ID, i.ID, string(state), sealed, p.Actor())
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return s.missed(ctx, tx, locked, i.ID)
		}
		if err := mayAnswer(ctx, tx, locked); err != nil {
			return err
		}
		done = true
		if err := s.auditAnswer(ctx, tx, locked, i, p.Actor(), state, response); err != nil {
			return err
		}
		phase, err = s.afterAnswer(ctx, tx, locked, i, state, p.Actor())
		return err
	})
	if err != nil || !done {
		return false, err
	}
	k := callKey{p.Tenant, c.ID}
	switch phase {
	case inputReady:
		s.tend(k, s.dispatching, "dispatch after input", s.dispatchInput)
	case inputTask:
		s.tend(k, s.polling, "look after a task", s.pollTask)
	}
	return true, nil
}

// unanswered says why a question was ended that nobody has answered.
func (s *Service) unanswered(ctx context.Context, c *Call) error {
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		now, err := byID(ctx, tx, c.ID)
		if err != nil {
			return err
		}
		if err := mayAnswer(ctx, tx, now); err != nil {
			return err
		}
		return errInteractionEnded
	})
}

// mayAnswer refuses an answer that nobody waits for any more.
func mayAnswer(ctx context.Context, tx tenant.Tx, c *Call) error {
	var open bool
	err := tx.QueryRow(ctx, `SELECT state = 'OPEN' AND expire_time > clock_timestamp() FROM sessions WHERE tenant_id = $1 AND session_id = $2`,
		tx.Tenant(), c.SessionID).Scan(&open)
	switch {
	case err != nil:
		return err
	case !open:
		return errSessionClosed
	case c.State.Final() || c.State == Uncertain:
		return errCallEnded
	}
	return nil
}

// missed tells an answer that lost against another one, nil, from one that came
// when the time was over.
func (s *Service) missed(ctx context.Context, tx tenant.Tx, c *Call, id string) error {
	var pending bool
	err := tx.QueryRow(ctx, `SELECT state = 'PENDING' FROM interactions WHERE tenant_id = $1 AND call_id = $2 AND interaction_id = $3`,
		tx.Tenant(), c.ID, id).Scan(&pending)
	if err != nil || !pending {
		return err
	}
	if err := mayAnswer(ctx, tx, c); err != nil {
		return err
	}
	return errInteractionEnded
}

func (s *Service) auditAnswer(ctx context.Context, tx tenant.Tx, c *Call, i *Interaction, actor string, state InteractionState, response []byte) error {
	_, err := s.deps.Audit.Append(ctx, tx, s.entry(c, auditAnswered, actor, map[string]any{"interactionId": i.ID, "kind": i.Kind,
		"round": i.Round, "state": state, "answerDigest": digestOf(response), "answerBytes": len(response)}))
	return err
}

// afterAnswer moves a locked call on once nothing of its round is open. A modern
// server has no word for a refused sampling or a URL that was not opened after an
// error: the call ends there.
func (s *Service) afterAnswer(ctx context.Context, tx tenant.Tx, c *Call, i *Interaction, state InteractionState, actor string) (phase phaseOfInput, err error) {
	var plain bool
	var open int
	err = tx.QueryRow(ctx, `SELECT i.phase, i.plain, (SELECT count(*) FROM interactions x
		WHERE x.tenant_id = i.tenant_id AND x.call_id = i.call_id AND x.state = 'PENDING')
		FROM call_inputs i WHERE i.tenant_id = $1 AND i.call_id = $2`, tx.Tenant(), c.ID).Scan(&phase, &plain, &open)
	if err != nil {
		return "", err
	}
	if phase == inputTask {
		if err := wakeTask(ctx, tx, c.ID); err != nil {
			return "", err
		}
	}
	refused := state != WasAnswered && (i.Kind == Sampling && phase != inputHeld || plain)
	if refused && c.State == InputRequired {
		return phase, s.endLockedInput(ctx, tx, c, inputEnd{code: "INPUT_DECLINED", message: "what the server asked was declined",
			actor: actor, pending: Withdrawn})
	}
	if open == 0 && phase == inputWaiting {
		phase = inputReady
		_, err = tx.Exec(ctx, `UPDATE call_inputs SET phase = 'READY', due_time = clock_timestamp() WHERE tenant_id = $1 AND call_id = $2`,
			tx.Tenant(), c.ID)
		if err != nil {
			return "", err
		}
	}
	// A task goes on by itself; what a person took to answer is not the server's time.
	_, err = tx.Exec(ctx, `UPDATE calls SET revision = revision + 1, update_time = clock_timestamp(),
		state = CASE WHEN $3 THEN 'DISPATCHING' ELSE state END,
		ceiling_time = CASE WHEN $3 THEN ceiling_time + (clock_timestamp() - (SELECT ask_time FROM call_inputs i
		  WHERE i.tenant_id = $1 AND i.call_id = $2)) ELSE ceiling_time END
		WHERE tenant_id = $1 AND call_id = $2`, tx.Tenant(), c.ID, open == 0 && phase == inputTask)
	tx.AfterCommit(func() { s.changed(tx.Tenant(), c.ID) })
	return phase, err
}
