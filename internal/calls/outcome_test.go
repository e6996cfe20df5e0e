package calls

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// inTurn answers attempt n of a call with script n, the last one for ever.
func inTurn(scripts ...func(context.Context, sent, int) (sessions.Response, error)) func(context.Context, sent, int) (sessions.Response, error) {
	return func(ctx context.Context, s sent, n int) (sessions.Response, error) {
		return scripts[min(n, len(scripts))-1](ctx, s, n)
	}
}

var broke = failAs(sessions.MaybeSent, "CONNECTION_LOST", fault.Unavailable)

func status(code int) func(context.Context, sent, int) (sessions.Response, error) {
	return func(context.Context, sent, int) (sessions.Response, error) {
		return sessions.Response{Phase: sessions.Answered, HTTPStatus: code},
			fault.New(fault.Unavailable, "HTTP_STATUS", "status %d", code).In(fault.Server)
	}
}

func rpcError(context.Context, sent, int) (sessions.Response, error) {
	return sessions.Response{Phase: sessions.Answered, Error: &sessions.RPCError{Code: -32602, Message: "bad \x00 thing", Data: []byte(`{"x":"\ud800"}`)}}, nil
}

func TestOutcome_ByEffectAndPhase(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	type script = func(context.Context, sent, int) (sessions.Response, error)
	isError := func(context.Context, sent, int) (sessions.Response, error) {
		return answered(`{"isError":true,"content":[{"type":"text","text":"no room"}]}`)
	}
	input := func(context.Context, sent, int) (sessions.Response, error) {
		return sessions.Response{Phase: sessions.Answered, Result: []byte(`{}`), ResultType: sessions.ResultInputRequired}, nil
	}
	unsent := failAs(sessions.NotSent, "REFUSED", fault.Unavailable)
	for _, c := range []struct {
		name, tool string
		script     script
		state      State
		attempts   int
		layer      Layer
		code       string
	}{
		{"read, lost, no budget", "read", broke, Failed, 1, LayerTransport, "CONNECTION_LOST"},
		{"read, lost, budget used up", "read_retry", broke, Failed, 3, LayerTransport, "CONNECTION_LOST"},
		{"read, lost, then well", "read_retry", inTurn(broke, okAnswer), Succeeded, 2, "", ""},
		{"read, not sent", "read", unsent, Failed, 3, LayerTransport, "REFUSED"},
		{"read, tool's error", "read_retry", isError, Failed, 1, LayerTool, "TOOL_ERROR"},
		{"read, 503 with budget", "read_retry", inTurn(status(503), okAnswer), Succeeded, 2, "", ""},
		{"write, lost", "write", broke, Uncertain, 1, LayerTransport, "CONNECTION_LOST"},
		{"write, 502 proves nothing", "write", status(502), Uncertain, 1, LayerServer, "HTTP_STATUS"},
		{"write, 429 was answered", "write", status(429), Failed, 1, LayerServer, "HTTP_STATUS"},
		{"write, not sent then well", "write", inTurn(unsent, okAnswer), Succeeded, 2, "", ""},
		{"write, not sent then lost", "write", inTurn(unsent, broke), Uncertain, 2, LayerTransport, "CONNECTION_LOST"},
		{"write, JSON-RPC error", "write", rpcError, Failed, 1, LayerProtocol, "-32602"},
		{"write, tool's error", "write", isError, Failed, 1, LayerTool, "TOOL_ERROR"},
		// It says of no question: whether it has only asked cannot be told.
		{"write, asks for nothing", "write", input, Uncertain, 1, LayerProtocol, "INPUT_INVALID"},
		{"trusted key, lost then well", "write_key", inTurn(broke, okAnswer), Succeeded, 2, "", ""},
		{"trusted key, lost thrice", "write_key", broke, Uncertain, 3, LayerTransport, "CONNECTION_LOST"},
		{"trusted key, lost, then refused", "write_key", inTurn(broke, rpcError), Uncertain, 2, LayerProtocol, "-32602"},
		{"trusted key, lost, then not sent", "write_key", inTurn(broke, unsent), Uncertain, 3, LayerTransport, "REFUSED"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w.sender.answer(c.script)
			before := len(w.sender.all())
			call := sc.propose(c.tool, func(r *Proposal) { r.Arguments = fmt.Appendf(nil, `{"case":%q}`, c.name) })
			if call.State == ConsentRequired {
				sc.decide(call, true)
				// Retries of a consented call do not ask whether the consent still stands in time.
				w.exec(`UPDATE consents SET expire_time = now() - interval '1 hour' WHERE consent_id = $1 AND state = 'CONSUMED'`, call.ConsentID)
				call = sc.until(call.ID, Succeeded, Failed, Uncertain, Cancelled, Denied)
			}
			got := sc.get(call.ID)
			if got.State != c.state || len(got.Attempts) != c.attempts || len(call.Attempts) != c.attempts || got.Attempt != c.attempts {
				t.Fatalf("%s after %d attempts (shown %d): %+v", got.State, len(got.Attempts), len(call.Attempts), got.Error)
			}
			if c.layer == "" && got.Error != nil || c.layer != "" && (got.Error == nil || got.Error.Layer != c.layer || got.Error.Code != c.code) {
				t.Fatalf("error %+v", got.Error)
			}
			if n := len(w.sender.all()) - before; n != c.attempts {
				t.Fatalf("%d requests for %d attempts", n, c.attempts)
			}
			for i, a := range got.Attempts {
				if a.EndTime == nil || a.Phase == "" || a.Outcome == "" || a.Number != i+1 {
					t.Errorf("attempt %+v", a)
				}
			}
		})
	}
	w.verify(sc.alice.Tenant)
}

// finds answers a status query as the test wants and lets the write be lost.
func finds(result *string) func(context.Context, sent, int) (sessions.Response, error) {
	return func(ctx context.Context, s sent, n int) (sessions.Response, error) {
		if s.tool != "find" {
			return broke(ctx, s, n)
		}
		if *result == "" {
			return broke(ctx, s, n)
		}
		return answered(`{"content":[],"structuredContent":` + *result + `}`)
	}
}

func TestStatusQuery(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	result := `{"found":true,"id":"evt-1"}`
	w.sender.answer(finds(&result))
	c := sc.propose("write_query", func(r *Proposal) { r.RequestID = "q1" })
	if c.State != Succeeded || c.SideEffectID != "evt-1" || !slices.ContainsFunc(c.Findings, func(f string) bool { return strings.HasPrefix(f, "RESOLVED_BY_STATUS_QUERY") }) {
		t.Fatalf("%+v", c)
	}
	if s := w.sender.all(); s[len(s)-1].args != `{"id":"q1"}` || w.sender.count("write_query") != 1 {
		t.Fatalf("%+v", s)
	}

	// Absence is no evidence where the contract does not say so, nor is an answer
	// that cannot be read, nor none.
	for _, r := range []string{`{"found":false}`, `{}`, `[]`, ``, `{"found":"yes"}`} {
		result = r
		c := sc.propose("write_query")
		if c.State != Uncertain {
			t.Fatalf("%q: %s", r, c.State)
		}
		for range 3 {
			w.exec(`UPDATE calls SET resolve_after = now() WHERE call_id = $1 AND resolve_after IS NOT NULL`, c.ID)
			sc.sweep(t)
		}
		if got := sc.get(c.ID); got.State != Uncertain {
			t.Fatalf("%q later: %s", r, got.State)
		}
	}
	// What was not there yet may come to be seen.
	result = `{"found":false}`
	c = sc.propose("write_query")
	result = `{"found":true,"id":"late"}`
	w.exec(`UPDATE calls SET resolve_after = now() WHERE call_id = $1`, c.ID)
	sc.sweep(t)
	if got := sc.until(c.ID, Succeeded); got.SideEffectID != "late" || got.Receipt == c.Receipt || got.Error != nil {
		t.Fatalf("%+v", got)
	}
	if k := w.kinds(c.ID); !slices.Equal(k, []string{"call.dispatched", "call.uncertain", "call.resolved"}) {
		t.Fatalf("audit %v", k)
	}
	if n := w.sender.count("write_query"); n != 7 {
		t.Fatalf("%d writes of 7", n)
	}
	w.verify(sc.alice.Tenant)
}

func TestStatusQuery_AbsenceIsFinalWhereTheContractSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), "SETTLE", "1h")
	result := `{"found":false}`
	w.sender.answer(finds(&result))
	c := sc.propose("write_final")
	ask := func() *Call {
		w.exec(`UPDATE calls SET resolve_after = now() WHERE call_id = $1`, c.ID)
		sc.sweep(t)
		return sc.get(c.ID)
	}
	if c.State != Uncertain || ask().State != Uncertain {
		t.Fatal("absence counted before it had settled")
	}
	// The last try comes when absence would count, however many there were before.
	w.exec(`UPDATE calls SET resolve_tries = 100 WHERE call_id = $1`, c.ID)
	ask()
	if n := w.count(`SELECT count(*) FROM calls WHERE resolve_after BETWEEN now() + interval '50 minutes' AND now() + interval '61 minutes'`); n != 1 {
		t.Fatal("nobody will ask when absence counts")
	}
	w.exec(`UPDATE attempts SET end_time = now() - interval '2 hours' WHERE call_id = $1`, c.ID)
	if got := ask(); got.State != Failed || got.Error.Code != "NOT_EXECUTED" {
		t.Fatalf("%+v", got)
	}

	// The answer comes after all: the call is open again, and the query settles it.
	var epoch int64
	if err := w.owner.QueryRow(t.Context(), `SELECT replica_epoch FROM attempts WHERE call_id = $1`, c.ID).Scan(&epoch); err != nil {
		t.Fatal(err)
	}
	late := *sc.get(c.ID)
	late.Epoch = epoch
	e, err := sc.resume(t.Context(), &late)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.recordOutcome(t.Context(), outcome{phase: Answered, state: Succeeded, result: []byte(okResult)}, Succeeded, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if got := sc.get(c.ID); got.State != Uncertain || !got.Attempts[0].Evidence {
		t.Fatalf("%+v", got)
	}
	if k := w.kinds(c.ID); !slices.Contains(k, "call.reopened") || !slices.Contains(k, "call.late_answer") {
		t.Fatalf("audit %v", k)
	}
	result = `{"found":true}`
	if got := ask(); got.State != Succeeded {
		t.Fatalf("%+v", got)
	}
}

func TestFinalFrom(t *testing.T) {
	t.Parallel()
	base := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(minutes int) *time.Time { x := base.Add(time.Duration(minutes) * time.Minute); return &x }
	q := &contract.StatusQuery{Absent: contract.AbsentFinal, Settle: 10 * time.Minute}
	for name, c := range map[string]struct {
		call *Call
		q    *contract.StatusQuery
		want *time.Time
	}{
		"the contract does not say so": {&Call{Attempts: []Attempt{{EndTime: at(0)}}}, &contract.StatusQuery{Absent: contract.AbsentUncertain}, nil},
		"no attempt":                   {&Call{}, q, nil},
		"own attempt":                  {&Call{Epoch: 1, Ceiling: at(60), Attempts: []Attempt{{Epoch: 1, EndTime: at(1)}}}, q, at(11)},
		"taken over":                   {&Call{Epoch: 2, Ceiling: at(60), Attempts: []Attempt{{Epoch: 1, EndTime: at(1)}}}, q, at(70)},
		"an earlier attempt was":       {&Call{Epoch: 2, Ceiling: at(60), Attempts: []Attempt{{Epoch: 1, EndTime: at(1)}, {Epoch: 2, EndTime: at(2)}}}, q, at(70)},
		"past the ceiling":             {&Call{Epoch: 2, Ceiling: at(5), Attempts: []Attempt{{Epoch: 1, EndTime: at(30)}}}, q, at(40)},
		"attempt without an end":       {&Call{Epoch: 1, UpdateTime: *at(3), Ceiling: at(60), Attempts: []Attempt{{Epoch: 1}}}, q, at(70)},
	} {
		got := finalFrom(c.call, c.q)
		if (got == nil) != (c.want == nil) || got != nil && !got.Equal(*c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// TestOutcome_OddResults: whatever its shape, a failure is no success, and a
// member of another name is no member of the protocol.
func TestOutcome_OddResults(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for result, want := range map[string]struct {
		state   State
		layer   Layer
		code    string
		text    string
		finding string
	}{
		`{"isError":true,"content":"permission denied"}`:             {Failed, LayerTool, "TOOL_ERROR", "permission denied", "CONTENT_INVALID"},
		`{"isError":true,"content":{"x":1}}`:                         {Failed, LayerTool, "TOOL_ERROR", "says that it failed", "CONTENT_INVALID"},
		`{"isError":true,"ISERROR":false,"content":[]}`:              {Failed, LayerTool, "TOOL_ERROR", "says that it failed", "MISCASED_MEMBER"},
		`{"isError":"true"}`:                                         {Failed, LayerProtocol, "RESULT_INVALID", "may have run", ""},
		`{"isError":1}`:                                              {Failed, LayerProtocol, "RESULT_INVALID", "may have run", ""},
		`{"isError":false,"isError":true}`:                           {Failed, LayerProtocol, "RESULT_INVALID", "twice", ""},
		`{"content":[],"content":[{"type":"text","text":"\ud800"}]}`: {Failed, LayerProtocol, "RESULT_INVALID", "twice", "TEXT_REPAIRED"},
		`[]`:                            {Failed, LayerProtocol, "RESULT_INVALID", "not an object", ""},
		`{"content":"plain"}`:           {Succeeded, "", "", "", "CONTENT_INVALID"},
		`{"content":null}`:              {Succeeded, "", "", "", ""},
		`{"structuredContent":{"a":1}}`: {Succeeded, "", "", "", ""},
		`{"Content":[],"content":[]}`:   {Succeeded, "", "", "", "MISCASED_MEMBER"},
	} {
		for _, tool := range []string{"write", "read_retry"} {
			w.sender.answer(func(context.Context, sent, int) (sessions.Response, error) { return answered(result) })
			c := sc.propose(tool, func(r *Proposal) { r.Arguments = fmt.Appendf(nil, `{"case":%q}`, result) })
			got := sc.get(c.ID)
			clean, _ := cleanResult([]byte(result))
			state, finding := want.state, want.finding
			if want.code == sessions.ResultInvalid && tool == "write" {
				state = Uncertain // it was answered, and nobody can tell what
				if finding == "" {
					finding = "ANSWER_UNREADABLE"
				}
			}
			if got.State != state || len(got.Attempts) != 1 || got.Attempts[0].Phase != Answered || string(got.Result) != string(clean) {
				t.Errorf("%s of %s: %s, %s, %+v", result, tool, got.State, got.Result, got.Attempts)
				continue
			}
			if end := got.Attempts[0].EndTime; end == nil || got.FinishTime == nil || end.After(*got.FinishTime) {
				t.Errorf("%s of %s: the attempt ended at %v, the call at %v", result, tool, end, got.FinishTime)
			}
			text := want.text
			if tool != "write" && text == "may have run" {
				text = "isError"
			}
			if want.code == "" != (got.Error == nil) || got.Error != nil && (got.Error.Layer != want.layer || got.Error.Code != want.code || !strings.Contains(got.Error.Message, text)) {
				t.Errorf("%s of %s: %+v", result, tool, got.Error)
			}
			if finding == "" != (len(got.Findings) == 0) || finding != "" && !strings.HasPrefix(got.Findings[0], finding) {
				t.Errorf("%s of %s: findings %q", result, tool, got.Findings)
			}
		}
	}
}

// A status query speaks through the exact members of its answer only.
func TestStatusQuery_OddResults(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for _, result := range []string{
		`{"STRUCTUREDCONTENT":{"found":true,"id":"x"}}`,
		`{"structuredContent":{"found":false},"STRUCTUREDCONTENT":{"found":true,"id":"x"}}`,
		`{"structuredContent":{"found":false},"structuredContent":{"found":true}}`,
		`{"isError":true,"content":"no","structuredContent":{"found":true}}`,
		`{"isError":1,"structuredContent":{"found":true}}`,
	} {
		w.sender.answer(func(ctx context.Context, s sent, n int) (sessions.Response, error) {
			if s.tool != "find" {
				return broke(ctx, s, n)
			}
			return answered(result)
		})
		if c := sc.propose("write_query"); c.State != Uncertain || c.SideEffectID != "" {
			t.Errorf("%s: %s", result, c.State)
		}
	}
}

// A person's cancel has one name, whatever was cancelled.
func TestOutcome_CancelOfASentWrite(t *testing.T) {
	t.Parallel()
	e := &execution{}
	for _, effect := range []Effect{Read, Write} {
		for _, err := range []error{context.Canceled, fault.New(fault.Canceled, "CANCELED", "x").In(fault.Transport)} {
			o := e.read(&Call{Effect: effect}, sessions.Response{Phase: sessions.MaybeSent}, err)
			if o.err == nil || o.err.Layer != LayerHost || o.err.Code != "CANCELLED" || o.temporary || o.phase != MaybeSent {
				t.Errorf("%s, %v: %+v", effect, err, o.err)
			}
		}
	}
}
