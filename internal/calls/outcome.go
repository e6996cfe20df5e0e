package calls

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// outcome is what came of one attempt.
type outcome struct {
	phase      Phase
	state      State // Succeeded, or "" for a failure
	result     []byte
	err        *Error
	temporary  bool
	refused    bool // by the server, unexecuted, over something that can be put right
	relist     bool // namely by listing its definitions
	unreadable bool // the server answered with what says nothing of the call
	queued     bool // it gave up its place in a queue of this replica
	retryAfter time.Duration
	findings   []string
	sideEffect string
	by         string         // where the outcome comes from, if not from the attempt itself
	release    func()         // gives back what the result has of the budget for answers
	asked      *inquiry       // what the server wants to know first
	task       *sessions.Task // what the server made of the call
}

// done is called once the outcome is recorded or no longer of interest.
func (o outcome) done() {
	if o.release != nil {
		o.release()
	}
}

// word is how an attempt is filed.
func (o outcome) word() string {
	switch {
	case o.state == Succeeded:
		return string(Succeeded)
	case o.asked != nil && o.err == nil:
		return string(InputRequired)
	case o.task != nil:
		return attemptTask
	}
	return string(Failed)
}

// codeStopped is the code of a call that ended because this replica stops and
// nobody can answer any more what its server asks.
const codeStopped = "HOST_STOPPED"

func hostError(code, format string, args ...any) *Error {
	return &Error{Layer: LayerHost, Code: code, Message: fmt.Sprintf(format, args...)}
}

// read turns a response into an outcome. The result is looked into only as far
// as the contract or the definition ask.
func (e *execution) read(c *Call, r sessions.Response, err error) outcome {
	o := outcome{phase: phaseOf(r.Phase), retryAfter: r.RetryAfter, release: r.Release}
	switch {
	case err != nil:
		e.readFailure(&o, c, r, err)
	case r.ResultType == sessions.ResultInputRequired, len(r.Asks) > 0:
		e.readAsks(&o, r)
	case r.ResultType == sessions.ResultTask && r.Task != nil:
		o.phase, o.task = Answered, r.Task
	case r.Error != nil:
		o.phase = Answered
		o.err = protocolFailure(c.Kind, r.Error)
	default:
		e.readResult(&o, c, &r)
	}
	e.mend(&o, c, r, err)
	return o
}

func phaseOf(p sessions.Phase) Phase {
	switch p {
	case sessions.NotSent:
		return NotSent
	case sessions.Answered:
		return Answered
	}
	return MaybeSent
}

func (e *execution) readFailure(o *outcome, c *Call, r sessions.Response, err error) {
	f, ok := fault.As(err)
	if ok && f.Kind == fault.Canceled || !ok && errors.Is(err, context.Canceled) {
		// A person's wish or this replica's end: the server has no part in it.
		o.err = hostError("CANCELLED", "the call was cancelled while the server worked on it")
		e.mu.Lock()
		if e.halted && !e.cancelled {
			o.err = hostError(codeStopped, "the host stopped while the server waited for an answer to its question")
		}
		e.mu.Unlock()
		return
	}
	if !ok {
		o.err = &Error{Layer: LayerTransport, Code: "FAILED", Message: "the request failed"}
		if errors.Is(err, context.DeadlineExceeded) {
			o.err.Code, o.err.Message, o.temporary = "TIMEOUT", "the server did not answer in time", true
		}
		return
	}
	layer := Layer(f.Layer)
	o.err = &Error{Layer: layer, Code: f.Reason, Message: cleanText(f.Message, 2000)}
	if f.RetryAfter > o.retryAfter {
		o.retryAfter = f.RetryAfter
	}
	switch f.Kind {
	case fault.Unavailable, fault.Deadline, fault.Exhausted, fault.Conflict:
		o.temporary = true
	}
	switch f.Reason {
	case sessions.ResultInvalid, sessions.ResultTypeInvalid:
		o.temporary, o.unreadable = false, !r.OnlyAsked
		o.result, o.findings = cleanResult(r.Result)
	case sessions.ErrorInvalid:
		// An error whose code can be read is an error, whatever else is wrong with it.
		o.temporary, o.unreadable = false, r.Error == nil || r.Error.Code == 0
		if e := r.Error; e != nil {
			o.err.Data = cleanJSON(e.Data)
			if e.Message != "" {
				o.err.Message += ": " + cleanText(e.Message, 1000)
			}
		}
	}
	if o.unreadable && c.Effect != Read {
		o.noteUnreadable()
	}
	// A gateway's 502 or 504 proves nothing of what is behind it.
	if r.HTTPStatus >= 500 && o.phase == Answered {
		o.phase, o.temporary = MaybeSent, true
	}
}

// noteUnreadable says of a write that its answer tells nothing; the finding stays
// when the call is resolved.
func (o *outcome) noteUnreadable() {
	o.findings = append(o.findings, "ANSWER_UNREADABLE: "+cleanText(o.err.Message, 300))
	o.err.Message += "; the server did answer, so the tool may have run"
}

func (e *execution) readResult(o *outcome, c *Call, r *sessions.Response) {
	o.phase = Answered
	o.result, o.findings = cleanResult(r.Result)
	if r.Parts.Repaired && len(o.findings) == 0 {
		o.findings = []string{textRepaired}
	}
	if c.Kind != contract.KindTool {
		o.findings = append(o.findings, readOddities(c.Kind, o.result)...)
		o.state = Succeeded
		return
	}
	o.findings = append(o.findings, oddities(r.Parts)...)
	if o.err = toolError(r.Parts); o.err != nil {
		return
	}
	o.state = Succeeded
	if len(e.def.OutputSchema) == 0 && e.terms.StatusQuery == nil {
		return
	}
	structured := structuredContent(r.Parts)
	if len(e.def.OutputSchema) > 0 {
		o.findings = append(o.findings, e.checkOutput(structured)...)
	}
	if e.terms.StatusQuery != nil && structured != nil {
		if v, err := contract.NewValue(structured); err == nil {
			vars := e.vars(c)
			vars.Result = v
			o.sideEffect = e.terms.StatusQuery.SideEffectID(vars)
		}
	}
}

// oddities are findings about members that are not as the protocol has them and
// do no harm to the result.
func oddities(p sessions.Parts) (found []string) {
	for _, name := range p.Miscased {
		found = append(found, "MISCASED_MEMBER: the result has a member like "+name+" in another case, which was ignored")
	}
	if len(p.Content) > 0 && p.Content[0] != '[' && string(p.Content) != "null" {
		found = append(found, "CONTENT_INVALID: the result's content is not an array")
	}
	return found
}

// toolError returns what a result with isError says, nil for any other. What the
// content is like makes no difference to whether the tool failed.
func toolError(p sessions.Parts) *Error {
	if !p.IsError {
		return nil
	}
	return &Error{Layer: LayerTool, Code: "TOOL_ERROR", Message: firstText(p.Content)}
}

// structuredContent returns the member in canonical form, nil when there is none
// that can be read.
func structuredContent(p sessions.Parts) []byte {
	if len(p.StructuredContent) == 0 {
		return nil
	}
	canon, err := canonical.Args(cleanJSON(p.StructuredContent))
	if err != nil {
		return nil
	}
	return canon
}

// checkOutput notes a mismatch; the side effect has happened, so the call has
// succeeded all the same.
func (e *execution) checkOutput(structured []byte) []string {
	if structured == nil {
		return []string{"SCHEMA_MISMATCH: the result has no readable structuredContent although the definition promises it"}
	}
	v, err := canonical.Decode(structured)
	if err != nil {
		return []string{"SCHEMA_MISMATCH: the structuredContent cannot be decoded"}
	}
	skipped, err := e.def.ValidateResult(v)
	switch {
	case err != nil:
		return []string{"SCHEMA_MISMATCH: " + cleanText(err.Error(), 300)}
	case skipped != "":
		return []string{"SCHEMA_NOT_CHECKED: " + cleanText(skipped, 300)}
	}
	return nil
}

func (e *execution) vars(c *Call) contract.Vars {
	v := contract.Vars{Principal: e.subject, Session: contract.Session{ID: c.SessionID},
		Call: contract.Call{IdempotencyKey: c.IdempotencyKey, RequestID: c.RequestID, Server: c.ServerName, Tool: c.Name}}
	if args, err := contract.NewValue(c.Arguments); err == nil {
		v.Args = args
	}
	return v
}

// maxBlocks is how many blocks of content are searched for a text.
const maxBlocks = 64

// firstText returns the first text of a content, which may also be a bare string.
func firstText(content []byte) string {
	const none = "the tool says that it failed"
	if len(content) == 0 {
		return none
	}
	if content[0] == '"' {
		return textOf(content, none)
	}
	d := json.NewDecoder(bytes.NewReader(content))
	if t, err := d.Token(); err != nil || t != json.Delim('[') {
		return none
	}
	for n := 0; n < maxBlocks && d.More(); n++ {
		var raw json.RawMessage
		if d.Decode(&raw) != nil {
			break
		}
		// A map, because a struct would take members in any case.
		var block map[string]json.RawMessage
		if json.Unmarshal(raw, &block) == nil && textOf(block["type"], "") == "text" {
			return textOf(block["text"], none)
		}
	}
	return none
}

func textOf(raw []byte, otherwise string) string {
	var s string
	if len(raw) == 0 || raw[0] != '"' || json.Unmarshal(raw, &s) != nil {
		return otherwise
	}
	return cleanText(s, 2000)
}

// cleanText makes foreign text valid UTF-8 without NUL and cuts it.
func cleanText(s string, most int) string {
	s = string(bytes.ToValidUTF8([]byte(s), []byte("\uFFFD")))
	s = string(bytes.ReplaceAll([]byte(s), []byte{0}, []byte("\uFFFD")))
	if len(s) > most {
		for most > 0 && !utf8.RuneStart(s[most]) {
			most--
		}
		s = s[:most] + "…"
	}
	return s
}

const textRepaired = "TEXT_REPAIRED: the result held bytes or surrogates that are not text; they were replaced"

func cleanJSON(raw []byte) []byte {
	out, _ := cleanResult(raw)
	return out
}

// cleanResult passes a result on as received, but for what no JSON encoder
// downstream could carry: bytes that are no UTF-8 and lone surrogates become the
// replacement character, and the result says so.
func cleanResult(raw []byte) ([]byte, []string) {
	out := raw
	if !utf8.Valid(out) {
		out = bytes.ToValidUTF8(out, []byte("\uFFFD"))
	}
	out = replaceLoneSurrogates(out)
	if len(raw) == 0 || &out[0] == &raw[0] || bytes.Equal(out, raw) {
		return raw, nil
	}
	return out, []string{textRepaired}
}

// replaceLoneSurrogates rewrites \uD800 to \uDFFF escapes that form no pair.
func replaceLoneSurrogates(raw []byte) []byte {
	if !bytes.Contains(raw, []byte(`\ud`)) && !bytes.Contains(raw, []byte(`\uD`)) {
		return raw
	}
	out := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); {
		if raw[i] != '\\' || i+1 >= len(raw) {
			out = append(out, raw[i])
			i++
			continue
		}
		if raw[i+1] != 'u' || i+6 > len(raw) {
			out = append(out, raw[i], raw[i+1])
			i += 2
			continue
		}
		unit, err := strconv.ParseUint(string(raw[i+2:i+6]), 16, 16)
		if err != nil || unit < 0xD800 || unit > 0xDFFF {
			out = append(out, raw[i:i+6]...)
			i += 6
			continue
		}
		if unit < 0xDC00 && i+12 <= len(raw) && raw[i+6] == '\\' && raw[i+7] == 'u' {
			if low, err := strconv.ParseUint(string(raw[i+8:i+12]), 16, 16); err == nil && low >= 0xDC00 && low <= 0xDFFF {
				out = append(out, raw[i:i+12]...)
				i += 12
				continue
			}
		}
		out = append(out, `\ufffd`...)
		i += 6
	}
	return out
}

// finish records the end of the call and tells those who wait.
func (e *execution) finish(o outcome, state State) {
	if e.plain {
		e.mu.Lock()
		memory := !e.call.Recorded
		e.finishing = memory
		e.mu.Unlock()
		if memory {
			e.finishPlain(o, state)
			return
		}
	}
	e.persist(func(ctx context.Context) error { return e.recordOutcome(ctx, o, state, time.Time{}) })
}

// maxPersist is how often a record is tried that fails for no reason that passes.
const maxPersist = 10

// persist repeats a transaction while the database is away, until this replica
// stops: the outcome of a call that was sent must not be lost to an outage. When
// it cannot be written at all, the reaper says what is known.
func (e *execution) persist(write func(ctx context.Context) error) {
	base := e.scoped(context.WithoutCancel(e.s.work))
	for try := 1; ; try++ {
		ctx, cancel := context.WithTimeout(base, 10*time.Second)
		err := write(ctx)
		cancel()
		if err == nil {
			return
		}
		e.s.log.WarnContext(base, "record outcome", "tenant", e.key.tenant, "call", e.key.id, "try", try, "error", detail(err))
		if try >= maxPersist && fault.Is(err, fault.Internal) || try >= 2 && e.s.work.Err() != nil {
			e.mu.Lock()
			e.err = errNotRecorded.Cause(err)
			e.mu.Unlock()
			return
		}
		t := time.NewTimer(Delay(try, 0, 0))
		select {
		case <-t.C:
		case <-e.s.work.Done():
		}
		t.Stop()
	}
}

// recordOutcome writes the end of an attempt and of its call, if both are still
// this replica's; else the answer is kept as evidence only.
func (e *execution) recordOutcome(ctx context.Context, o outcome, state State, resolveAfter time.Time) error {
	c, held := e.finished(o, state), e.held()
	// A use of a grant is given back when no attempt was sent.
	unspend := c.GrantID != "" && !e.touched && state != Succeeded && state != Uncertain
	entry, err := e.s.prepareEnd(ctx, c, e.actor, o.by)
	if err != nil {
		return err
	}
	mine := false
	err = e.s.deps.DB.InTx(ctx, e.key.tenant, func(ctx context.Context, tx tenant.Tx) (err error) {
		if unspend {
			if err := e.s.deps.Consent.LockGrant(ctx, tx, c.GrantID); err != nil {
				return err
			}
		}
		if err := e.released(ctx, tx, held); err != nil {
			return err
		}
		mine, err = e.s.writeEnd(ctx, tx, c, entry, resolveAfter)
		if err != nil {
			return err
		}
		if !mine {
			return e.keepEvidence(ctx, tx, c, o)
		}
		if c.Task != nil {
			if err := closeTaskTx(ctx, tx, c.ID); err != nil {
				return err
			}
		}
		if err := endAttempt(ctx, tx, c, o); err != nil || !unspend {
			return err
		}
		return e.s.deps.Consent.Unspend(ctx, tx, c.GrantID)
	})
	if err != nil {
		return err
	}
	if !mine {
		// What the others made of the call is what counts.
		if c, err = e.s.load(ctx, e.key.tenant, e.key.id); err != nil {
			return err
		}
	}
	c.Recorded = true
	e.mu.Lock()
	e.call = c
	e.mu.Unlock()
	if mine {
		e.s.observe(c)
	}
	e.s.changed(e.key.tenant, e.key.id)
	return nil
}

// finished returns the call as it ends with this outcome.
func (e *execution) finished(o outcome, state State) *Call {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := *e.call
	now := e.s.now()
	c.State, c.Result, c.Error, c.SideEffectID = state, o.result, o.err, o.sideEffect
	c.Findings = append(append([]string(nil), c.Findings...), o.findings...)
	c.Revision++
	c.UpdateTime = now
	c.FinishTime = &now
	if n := len(c.Attempts); n > 0 {
		c.Attempts = append([]Attempt(nil), c.Attempts...)
		c.Attempts[n-1].close(o, now)
	}
	if state == Uncertain && c.Error == nil {
		c.Error = hostError("OUTCOME_UNKNOWN", "the call may have been executed; nobody knows")
	}
	return &c
}
