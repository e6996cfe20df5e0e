package calls

import (
	"context"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// answer is what a status query brought to light about a write.
type answer struct {
	verdict    contract.Verdict
	detail     string
	result     []byte
	sideEffect string
	release    func() // gives back what the result has of the budget for answers
}

// done is called once nothing of the answer is needed any more.
func (a answer) done() {
	if a.release != nil {
		a.release()
	}
}

// ask runs the contract's status query: a read of the same server that tells
// whether the write happened. It fails closed: anything but a clear answer is
// unknown.
func (e *execution) ask(ctx context.Context, c *Call) answer {
	q := e.terms.StatusQuery
	vars := e.vars(c)
	args, err := q.Arguments(vars)
	if err != nil {
		return answer{detail: detail(err)}
	}
	schema, err := e.queryTool(ctx, c)
	if err != nil {
		return answer{detail: detail(err)}
	}
	ctx, cancel := context.WithTimeout(ctx, e.limits.Timeout)
	defer cancel()
	r, err := e.s.deps.Sender.Do(ctx, e.conn, e.target, sessions.Request{Method: methodCall, Name: q.Tool,
		Params: callParams(q.Tool, args), Schema: schema, ResultBytes: int64(e.limits.ResultBytes), Timeout: e.limits.Timeout})
	a := judge(q, vars, &r, err)
	if a.release = r.Release; a.result == nil {
		r.Release()
	}
	return a
}

// judge makes an answer of what the query's tool returned.
func judge(q *contract.StatusQuery, vars contract.Vars, r *sessions.Response, err error) answer {
	if err != nil {
		return answer{detail: "the query failed: " + cleanText(err.Error(), 300)}
	}
	if r.Error != nil || r.ResultType == sessions.ResultInputRequired {
		return answer{detail: "the query was answered with an error"}
	}
	if r.Parts.IsError {
		return answer{detail: "the query's tool says that it failed"}
	}
	structured := structuredContent(r.Parts)
	if structured == nil {
		return answer{detail: "the query's answer has no structuredContent"}
	}
	if vars.Result, err = contract.NewValue(structured); err != nil {
		return answer{detail: "the query's answer is no object"}
	}
	var a answer
	a.result, _ = cleanResult(r.Result)
	if a.verdict, a.detail = q.Judge(vars); a.verdict == contract.VerdictSucceeded {
		a.sideEffect = q.SideEffectID(vars)
	}
	return a
}

// queryTool makes sure that the tool that is asked is the reviewed one.
func (e *execution) queryTool(ctx context.Context, c *Call) ([]byte, error) {
	a, err := e.s.deps.Contracts.At(ctx, c.Tenant, c.ServerID, c.ContractRevision)
	if err != nil {
		return nil, err
	}
	tool, ok := a.Contract.Tool(e.terms.StatusQuery.Tool)
	if !ok {
		return nil, fault.New(fault.Precondition, "QUERY_TOOL_MISSING", "the contract does not name the query's tool")
	}
	rev, err := e.s.current(ctx, e.server, c, e.limits.DefinitionAge.Read)
	if err != nil {
		return nil, err
	}
	def, ok := rev.Find(tool.Name)
	if !ok || !tool.Pins(def.Digest) {
		return nil, fault.New(fault.Precondition, "QUERY_TOOL_CHANGED", "the query's tool is not the reviewed one")
	}
	return def.InputSchema, nil
}

// finishByQuery ends an attempt whose outcome is unknown with what the status
// query says. Without positive evidence the call is uncertain for now; absence
// speaks later, if the contract lets it.
func (e *execution) finishByQuery(o outcome) {
	// A replica that stops does not ask any more: another one will.
	a := e.ask(e.s.work, e.snapshot())
	defer a.done()
	if a.verdict == contract.VerdictSucceeded {
		o.result, o.sideEffect, o.err, o.state, o.by = a.result, a.sideEffect, nil, Succeeded, byStatusQuery
		o.findings = append(o.findings, "RESOLVED_BY_STATUS_QUERY: the result is the status query's answer")
		e.persist(func(ctx context.Context) error { return e.recordOutcome(ctx, o, Succeeded, time.Time{}) })
		return
	}
	after := e.s.now().Add(max(e.terms.StatusQuery.Settle, firstResolve))
	e.persist(func(ctx context.Context) error { return e.recordOutcome(ctx, o, Uncertain, after) })
}

const (
	// firstResolve is the least pause before an uncertain call is asked about again.
	firstResolve = 2 * time.Second
	maxResolves  = 8
	// byStatusQuery is how the audit names evidence of a status query.
	byStatusQuery = "STATUS_QUERY"
)

// resolve asks again about an uncertain call whose time has come. Only one
// replica at a time does, and after maxResolves tries nobody does any more.
func (s *Service) resolve(ctx context.Context, t tenant.ID, id string) error {
	var c *Call
	var now time.Time // by the database's clock, which alone decides what is final
	err := s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		err := tx.QueryRow(ctx, `UPDATE calls SET resolve_tries = resolve_tries + 1,
			resolve_after = CASE WHEN resolve_tries + 1 < $3 THEN clock_timestamp() + interval '2 seconds' * power(2, resolve_tries + 1) END
			WHERE tenant_id = $1 AND call_id = $2 AND state = 'UNCERTAIN' AND resolve_after <= clock_timestamp()
			RETURNING clock_timestamp()`, tx.Tenant(), id, maxResolves).Scan(&now)
		if err != nil {
			return err
		}
		c, err = byID(ctx, tx, id)
		return err
	})
	if fault.Is(err, fault.NotFound) {
		return nil // somebody else asks, or it is resolved
	}
	if err != nil {
		return err
	}
	e, err := s.resume(ctx, c)
	if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Precondition) {
		// Its server, session or contract is gone, and comes back no more.
		s.log.InfoContext(ctx, "an uncertain call cannot be asked about any more", "tenant", t, "call", id, "reason", detail(err))
		return s.askAgain(ctx, c, nil)
	}
	if err != nil {
		return err
	}
	if e.terms.StatusQuery == nil {
		return s.askAgain(ctx, c, nil)
	}
	final := finalFrom(c, e.terms.StatusQuery)
	a := e.ask(ctx, c)
	defer a.done()
	switch {
	case a.verdict == contract.VerdictSucceeded:
		return s.writeResolution(ctx, c, Succeeded, a)
	case a.verdict != contract.VerdictAbsent || final == nil:
		return nil
	case !now.Before(*final):
		return s.writeResolution(ctx, c, Failed, a)
	}
	return s.askAgain(ctx, c, final) // it is not there yet, and by then it would be
}

// askAgain sets when the status query is asked next about an uncertain call; nil
// means never.
func (s *Service) askAgain(ctx context.Context, c *Call, at *time.Time) error {
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE calls SET resolve_after = $3 WHERE tenant_id = $1 AND call_id = $2 AND state = 'UNCERTAIN'`,
			tx.Tenant(), c.ID, at)
		return err
	})
}

// finalFrom returns from when on not finding the effect proves that it will not
// come, nil for never. The contract must say so, and the settling time must have
// passed since the last attempt could have acted: since its end, or since the
// ceiling where some attempt was that of a dead replica, or of one that was taken
// for dead and lives (design 3.4).
func finalFrom(c *Call, q *contract.StatusQuery) *time.Time {
	if q.Absent != contract.AbsentFinal || len(c.Attempts) == 0 {
		return nil
	}
	from := c.UpdateTime
	if last := c.Attempts[len(c.Attempts)-1]; last.EndTime != nil {
		from = *last.EndTime
	}
	for _, a := range c.Attempts {
		if (a.Epoch != c.Epoch || a.EndTime == nil) && c.Ceiling != nil && c.Ceiling.After(from) {
			from = *c.Ceiling
		}
	}
	from = from.Add(q.Settle)
	return &from
}

func (s *Service) writeResolution(ctx context.Context, c *Call, state State, a answer) error {
	var failed []byte
	if state == Failed {
		var err error
		failed, err = encodeError(hostError("NOT_EXECUTED", "the status query does not find the effect, and by the contract that is final"))
		if err != nil {
			return err
		}
	}
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		d := map[string]any{"state": state, "by": byStatusQuery, "verdict": a.verdict.String(), "sideEffectId": a.sideEffect}
		id, err := s.deps.Audit.Append(ctx, tx, s.entry(c, audit.CallResolved, "system", d))
		if err != nil {
			return err
		}
		result := a.result
		if state == Failed {
			result = nil
		}
		tag, err := tx.Exec(ctx, `UPDATE calls SET state = $3, result = $4, error = $5, side_effect_id = $6, receipt = $7,
			findings = findings || $8::text[], resolve_after = NULL, revision = revision + 1, update_time = clock_timestamp()
			WHERE tenant_id = $1 AND call_id = $2 AND state = 'UNCERTAIN'`, tx.Tenant(), c.ID, string(state), result, failed,
			a.sideEffect, id, []string{"RESOLVED_BY_STATUS_QUERY: evidence came from the contract's status query"})
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return errLost
		}
		tx.AfterCommit(func() { s.changed(c.Tenant, c.ID) })
		return s.announceAs(ctx, tx, c, state, id)
	})
}
