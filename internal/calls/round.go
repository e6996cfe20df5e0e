package calls

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Vault seals what a server wants kept and what people answer.
type Vault interface {
	Seal(ctx context.Context, t tenant.ID, kind, id, field string, plain []byte) ([]byte, error)
	Open(ctx context.Context, t tenant.ID, kind, id, field string, sealed []byte) ([]byte, error)
}

// phaseOfInput is how far a call's questions are, as its row of call_inputs says.
type phaseOfInput string

const (
	inputWaiting phaseOfInput = "WAITING" // for answers
	inputReady   phaseOfInput = "READY"   // to be sent again with them
	inputSent    phaseOfInput = "SENT"    // with the attempt under way
	inputHeld    phaseOfInput = "HELD"    // by the replica that keeps the request open
	inputTask    phaseOfInput = "TASK"    // whose server is told the answers
	inputEnded   phaseOfInput = "ENDED"
)

// round is one time that a modern server asked, with all answers: what the request
// is repeated with.
type round struct {
	number int
	// plain says that the request is repeated as it was.
	plain bool
	// state is the server's, a raw JSON string; nil when it sent none.
	state   json.RawMessage
	answers []keyed
}

type keyed struct {
	key    string
	result json.RawMessage
}

// params adds the answers and the state to the params of the first request. A nil
// round adds nothing.
func (r *round) params(params json.RawMessage) json.RawMessage {
	if r == nil || r.plain {
		return params
	}
	out := slices.Clone(params[:len(params)-1])
	if len(r.answers) > 0 {
		out = append(out, `,"inputResponses":`...)
		out = appendAnswers(out, r.answers)
	}
	if r.state != nil {
		out = append(append(out, `,"requestState":`...), r.state...)
	}
	return append(out, '}')
}

func appendAnswers(out []byte, answers []keyed) []byte {
	out = append(out, '{')
	for i, a := range answers {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(append(canonical.AppendString(out, a.key), ':'), a.result...)
	}
	return append(out, '}')
}

// rounds is how often the server has asked so far.
func (e *execution) rounds() int {
	if e.round == nil {
		return 0
	}
	return e.round.number
}

// inquiry is the answer of a server that wants to know something first.
type inquiry struct {
	questions []question
	state     json.RawMessage
	plain     bool
}

// violation says why the server may not ask this, "" when it may.
func (a *inquiry) violation() string {
	if len(a.questions) == 0 && a.state == nil {
		return "the server wants input and says of none"
	}
	if len(a.questions) > maxQuestions {
		return fmt.Sprintf("the server asked %d questions at a time, more than %d", len(a.questions), maxQuestions)
	}
	seen := map[string]bool{}
	for _, q := range a.questions {
		if q.violation != "" {
			return q.violation
		}
		if seen[q.key] {
			return "the server asked two questions under one key"
		}
		seen[q.key] = true
	}
	return ""
}

// pending reports whether a person must answer.
func (a *inquiry) pending() bool {
	return slices.ContainsFunc(a.questions, func(q question) bool { return !q.own })
}

// own is the round that follows when the host answers everything by itself.
func (a *inquiry) own(number int) *round {
	r := &round{number: number, plain: a.plain, state: a.state}
	for _, q := range a.questions {
		r.answers = append(r.answers, keyed{q.key, q.answer.Result})
	}
	return r
}

// readAsks examines what the server asked. An error that sends a person to a URL
// first (revision 2025-11-25) is repeated without answers.
func (e *execution) readAsks(o *outcome, r sessions.Response) {
	o.phase = Answered
	a := &inquiry{state: r.RequestState, plain: r.Error != nil || r.Era == sessions.EraLegacy}
	for i, ask := range r.Asks {
		if a.plain && ask.Key == "" {
			ask.Key = fmt.Sprintf("%d", i+1)
		}
		q := e.examine(ask, true)
		if a.plain && q.violation == "" && (q.kind != ElicitationURL || q.own) {
			q.violation = "the server's error asks for something else than that a person opens a URL of the contract"
		}
		a.questions = append(a.questions, q)
		if q.refusal != "" {
			o.findings = append(o.findings, "INPUT_REFUSED: "+q.refusal+": "+cleanText(q.detail, 300))
		}
	}
	o.asked = a
}

// sealedRound is a round ready to be stored: sealing may need the database, and
// nobody should hold one connection and wait for another.
type sealedRound struct {
	number int
	plain  bool
	state  []byte
	rows   []sealedQuestion
}

type sealedQuestion struct {
	question
	id                string
	request, response []byte
}

const (
	vaultCall        = "call"
	vaultInteraction = "interaction"
)

func (s *Service) sealRound(ctx context.Context, c *Call, number int, a *inquiry) (out sealedRound, err error) {
	out = sealedRound{number: number, plain: a.plain}
	if a.state != nil {
		if out.state, err = s.deps.Vault.Seal(ctx, c.Tenant, vaultCall, c.ID, "request_state", a.state); err != nil {
			return out, err
		}
	}
	for _, q := range a.questions {
		row := sealedQuestion{question: q, id: resource.NewID(resource.Interaction)}
		if row.request, err = s.deps.Vault.Seal(ctx, c.Tenant, vaultInteraction, row.id, "request", q.params); err != nil {
			return out, err
		}
		if q.own && q.answer.Result != nil {
			if row.response, err = s.deps.Vault.Seal(ctx, c.Tenant, vaultInteraction, row.id, "response", q.answer.Result); err != nil {
				return out, err
			}
		}
		out.rows = append(out.rows, row)
	}
	return out, nil
}

// storeRound writes down what was asked in the phase that follows. It returns when
// the questions end: with their time, or with the session.
func (s *Service) storeRound(ctx context.Context, tx tenant.Tx, c *Call, r sealedRound, phase phaseOfInput, epoch int64, until *time.Time) (expire time.Time, err error) {
	err = tx.QueryRow(ctx, `INSERT INTO call_inputs (tenant_id, call_id, round, phase, plain, request_state, ask_time, expire_time, due_time)
		SELECT $1, $2, $3, $4, $5, $6, clock_timestamp(), LEAST(expire_time, $8, clock_timestamp() + $7::interval), clock_timestamp()
		FROM sessions WHERE tenant_id = $1 AND session_id = $9
		ON CONFLICT (call_id) DO UPDATE SET round = excluded.round, phase = excluded.phase, plain = excluded.plain,
		  request_state = excluded.request_state, ask_time = excluded.ask_time, expire_time = excluded.expire_time, due_time = excluded.due_time
		RETURNING expire_time`, tx.Tenant(), c.ID, r.number, string(phase), r.plain, r.state, s.cfg.InputTTL, until, c.SessionID).Scan(&expire)
	if err != nil {
		return expire, err
	}
	b := &pgx.Batch{}
	for _, q := range r.rows {
		state, how, by := Pending, "", ""
		if q.own {
			state, how, by = q.state, "HOST", "system"
		}
		b.Queue(`INSERT INTO interactions (tenant_id, interaction_id, call_id, round, server_key, kind, state, refusal, request, response,
			held_epoch, answered_by, answered_how, create_time, expire_time, answer_time)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, clock_timestamp(), $14,
			        CASE WHEN $7 = 'PENDING' THEN NULL ELSE clock_timestamp() END)`,
			tx.Tenant(), q.id, c.ID, r.number, q.key, string(q.kind), string(state), q.refusal, q.request, q.response, epoch, by, how, expire)
	}
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return expire, err
	}
	return expire, s.auditAsked(ctx, tx, c, r)
}

// auditAsked records that the server asked, and what of it was refused.
func (s *Service) auditAsked(ctx context.Context, tx tenant.Tx, c *Call, r sealedRound) error {
	var shown, refused []map[string]any
	for _, q := range r.rows {
		d := map[string]any{"interactionId": q.id, "kind": q.kind, "digest": q.digest(), "bytes": len(q.params)}
		if q.refusal != "" {
			d["refusal"] = q.refusal
			refused = append(refused, d)
			continue
		}
		shown = append(shown, d)
	}
	if len(refused) > 0 {
		if _, err := s.deps.Audit.Append(ctx, tx, s.entry(c, auditRefused, "system", map[string]any{"round": r.number, "questions": refused})); err != nil {
			return err
		}
	}
	if len(shown) == 0 && len(refused) > 0 {
		return nil
	}
	_, err := s.deps.Audit.Append(ctx, tx, s.entry(c, auditRequired, "system", map[string]any{"round": r.number, "questions": shown,
		"state": r.state != nil}))
	return err
}

// The kinds of audit entry about what servers ask.
const (
	auditRequired = "input.required"
	auditAnswered = "input.answered"
	auditExpired  = "input.expired"
	auditRefused  = "input.refused"
)

// interactions are the rows that become what the API shows.
func (r sealedRound) interactions(c *Call, now, expire time.Time) (out []Interaction) {
	for _, q := range r.rows {
		i := Interaction{ID: q.id, CallID: c.ID, Server: c.ServerName, Origin: c.Origin, Round: r.number, key: q.key, Kind: q.kind, State: Pending, Refusal: q.refusal,
			Request: q.params, CreateTime: now, ExpireTime: expire}
		if q.own {
			i.State, i.AnswerTime, i.AnsweredBy = q.state, &now, "system"
		}
		out = append(out, i)
	}
	return shownOnly(out)
}

// shownOnly leaves out what no person needs to know of and hides what a server
// should not have asked.
func shownOnly(all []Interaction) []Interaction {
	out := []Interaction{}
	for _, i := range all {
		if i.Kind == Roots {
			continue
		}
		if i.Refusal != "" {
			i.Request = nil
		}
		out = append(out, i)
	}
	return out
}

// input is the stored row of a call's questions with its interactions.
type input struct {
	round   int
	phase   phaseOfInput
	plain   bool
	state   []byte // sealed
	asked   time.Time
	expires time.Time
	all     []Interaction // of this round, sealed
}

var errNoInput = errors.New("calls: the call was asked nothing")

// loadInput reads a call's questions, the present round's interactions among them.
func loadInput(ctx context.Context, tx tenant.Tx, callID string) (in input, err error) {
	err = tx.QueryRow(ctx, `SELECT round, phase, plain, request_state, ask_time, expire_time FROM call_inputs
		WHERE tenant_id = $1 AND call_id = $2`, tx.Tenant(), callID).
		Scan(&in.round, &in.phase, &in.plain, &in.state, &in.asked, &in.expires)
	if errors.Is(err, pgx.ErrNoRows) {
		return in, errNoInput
	}
	if err != nil {
		return in, err
	}
	in.all, err = loadInteractions(ctx, tx, callID, in.round)
	return in, err
}

const interactionColumns = `interaction_id, call_id, round, server_key, kind, state, refusal, request, response, sent, create_time,
	expire_time, answer_time, answered_by`

// loadInteractions reads a call's interactions in order, sealed; of all rounds for
// round 0.
func loadInteractions(ctx context.Context, tx tenant.Tx, callID string, round int) ([]Interaction, error) {
	rows, err := tx.Query(ctx, `SELECT `+interactionColumns+` FROM interactions
		WHERE tenant_id = $1 AND call_id = $2 AND ($3 = 0 OR round = $3) ORDER BY round, server_key, interaction_id`, tx.Tenant(), callID, round)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanInteraction)
}

func scanInteraction(row pgx.CollectableRow) (i Interaction, err error) {
	err = row.Scan(&i.ID, &i.CallID, &i.Round, &i.key, &i.Kind, &i.State, &i.Refusal, &i.Request, &i.response, &i.sent, &i.CreateTime,
		&i.ExpireTime, &i.AnswerTime, &i.AnsweredBy)
	return i, err
}

// openRound makes the round that the request is repeated with.
func (s *Service) openRound(ctx context.Context, c *Call, in input) (*round, error) {
	r := &round{number: in.round, plain: in.plain}
	var err error
	if in.state != nil {
		if r.state, err = s.deps.Vault.Open(ctx, c.Tenant, vaultCall, c.ID, "request_state", in.state); err != nil {
			return nil, err
		}
	}
	for _, i := range in.all {
		if i.response == nil {
			return nil, fmt.Errorf("calls: %s of %s has no answer", i.ID, c.ID)
		}
		result, err := s.deps.Vault.Open(ctx, c.Tenant, vaultInteraction, i.ID, "response", i.response)
		if err != nil {
			return nil, err
		}
		r.answers = append(r.answers, keyed{i.key, result})
	}
	return r, nil
}
