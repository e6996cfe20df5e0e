package calls

import (
	"fmt"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// A server that refuses a call for its protocol version may have carried it out all
// the same: it says so itself, late or wrongly. Only a read, and a write with a key
// that the contract trusts, goes out once more, and then as an attempt that the audit
// log knows.
func TestWire_VersionRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), append([]string{`versions: ["2026-07-28"]`, `versions: ["2025-11-25", "2026-07-28"]`}, reverseContract...)...)
	const named, other = `,"data":{"supported":["2026-07-28","2025-11-25"]}`, `,"data":{"supported":["2025-06-18"]}`
	body := func(data string) string {
		return `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"no"` + data + `}}`
	}
	progress := mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"p","progress":1}}`)
	for name, refusal := range map[string]mcptest.Answer{
		"400":             mcptest.Status(400, "application/json", body(other)),
		"400, named":      mcptest.Status(400, "application/json", body(named)),
		"200":             mcptest.JSON(body("")),
		"stream":          mcptest.Stream(mcptest.Event(body(other))),
		"after progress":  mcptest.Stream(progress, mcptest.Event(body(other))),
		"progress, named": mcptest.Stream(progress, mcptest.Event(body(named))),
	} {
		for _, version := range []string{mcptest.Modern, mcptest.Legacy} {
			server := mcptest.New(t, version)
			w.wired(server)
			for tool, want := range map[string]struct {
				state State
				sends int
			}{"read": {Succeeded, 2}, "write": {Failed, 1}, "destroy": {Failed, 1}, "write_key": {Succeeded, 2}} {
				before := server.Count("tools/call")
				server.On("tools/call", refusal, mcptest.Result(okResult))
				c := sc.propose(tool)
				if c.State == ConsentRequired {
					sc.decide(c, true)
					sc.sweep(t)
					c = sc.until(c.ID, Succeeded, Failed, Uncertain)
				}
				sent := server.Count("tools/call") - before
				if c.State != want.state || sent != want.sends || len(c.Attempts) != want.sends || c.Attempts[0].Phase != Answered {
					t.Errorf("%s, %s: %s is %s after %d sends: %+v %+v", name, version, tool, c.State, sent, c.Error, c.Attempts)
				}
				if n := w.attempts(c.ID); tool != "read" && n != want.sends {
					t.Errorf("%s, %s: %d attempts of %s were audited", name, version, n, tool)
				}
			}
		}
		// A round that carries answers is a call like any other.
		server := mcptest.New(t, mcptest.Modern)
		w.wired(server)
		server.On("tools/call", mcptest.Result(`{"resultType":"input_required","requestState":"s","inputRequests":{"k":{"method":"elicitation/create","params":`+formParams+`}}}`),
			refusal, mcptest.Result(okResult))
		c := sc.get(sc.propose("write").ID)
		if c.State != InputRequired {
			t.Fatalf("%s %+v", c.State, c.Error)
		}
		sc.accept(c, 0, `{"acct":"7"}`)
		if c = sc.until(c.ID, Failed, Succeeded, Uncertain); c.State != Failed || server.Count("tools/call") != 2 || w.attempts(c.ID) != 2 {
			t.Errorf("%s: a round with answers is %s after %d sends: %+v", name, c.State, server.Count("tools/call"), c.Attempts)
		}
	}
}

// attempts counts those of a call's attempts that the audit log knows.
func (w *world) attempts(callID string) int {
	return w.count(`SELECT count(*) FROM audit_entries WHERE call_id = $1 AND kind = $2`, callID, audit.CallDispatched)
}

// What a server keeps in a state is for nobody to see, in whatever it wraps it; and
// what the database cannot hold ends the call at once, with its reason.
func TestWire_StateIsNeverShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	server := mcptest.New(t, mcptest.Modern)
	server.Capabilities(`{"tools":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}`)
	w.wired(server)
	const ask = `"inputRequests":{"k":{"method":"roots/list"}}`
	task := `{"resultType":"task","taskId":"T","status":"working"}`
	for name, c := range map[string]struct {
		answer, task string
		state        State
		code         string
	}{
		"complete":     {`{"content":[],"requestState":"SECRET"}`, "", Succeeded, ""},
		"failed":       {`{"isError":true,"content":[],"requestState":"SECRET"}`, "", Failed, "TOOL_ERROR"},
		"state twice":  {`{"resultType":"input_required","requestState":"SECRET","requestState":"SECRET",` + ask + `}`, "", Uncertain, sessions.ResultInvalid},
		"odd state":    {`{"resultType":"input_required","requestState":["SECRET"],` + ask + `}`, "", Failed, sessions.ResultInvalid},
		"odd type":     {`{"resultType":"odd","requestState":"SECRET"}`, "", Uncertain, "RESULT_TYPE_INVALID"},
		"flawed":       {`{"isError":1,"requestState":"SECRET"}`, "", Uncertain, sessions.ResultInvalid},
		"key with NUL": {`{"resultType":"input_required","requestState":"SECRET","inputRequests":{"a\u0000":{"method":"roots/list"}}}`, "", Failed, sessions.ResultInvalid},
		"task done":    {task, `"status":"completed","result":{"content":[],"requestState":"SECRET"}`, Succeeded, ""},
		"task asks":    {task, `"status":"completed","result":{"resultType":"input_required","requestState":"SECRET",` + ask + `}`, Uncertain, sessions.ResultInvalid},
	} {
		server.On("tools/call", mcptest.Result(c.answer))
		server.On("tasks/get", mcptest.Result(`{"resultType":"complete","taskId":"T",`+c.task+`}`))
		got := sc.propose("write", func(p *Proposal) {
			p.Arguments = []byte(`{"title":"` + name + `"}`)
			if c.task != "" {
				p.Wait = 0
			}
		})
		if c.task != "" {
			w.eventually(func() bool { sc.look(); got = sc.get(got.ID); return got.State.Settled() }, func() string { return name + ": no end" })
		}
		code := ""
		if got.Error != nil {
			code = got.Error.Code
		}
		if got.State != c.state || code != c.code {
			t.Errorf("%s is %s: %+v", name, got.State, got.Error)
		}
		if shown := fmt.Sprintf("%s %+v %q", got.Result, got.Error, got.Findings); strings.Contains(shown, "SECRET") {
			t.Errorf("%s shows %s", name, shown)
		}
	}
	if n := w.count(`SELECT count(*) FROM calls WHERE convert_from(COALESCE(result, ''), 'UTF8') LIKE '%SECRET%'`); n > 0 {
		t.Errorf("%d calls keep a state", n)
	}
}

// A task that had ended when the server told of it is the call's end; nobody asks
// for it again.
func TestWire_TaskThatEndedAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	server := mcptest.New(t, mcptest.Modern)
	server.Capabilities(`{"tools":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}`)
	w.wired(server)
	for members, want := range map[string]struct {
		state      State
		code, told string
	}{
		`"status":"completed","result":{"content":[{"type":"text","text":"at once"}]}`:           {Succeeded, "", "at once"},
		`"status":"completed","result":{"isError":true,"content":[{"type":"text","text":"no"}]}`: {Failed, "TOOL_ERROR", "no"},
		`"status":"completed","result":{"resultType":"input_required","requestState":"s"}`:       {Uncertain, sessions.ResultInvalid, ""},
		`"status":"failed","error":{"code":-32000,"message":"broken"}`:                           {Failed, "-32000", ""},
		`"status":"cancelled"`: {Uncertain, "CANCELLED", ""},
		`"status":"completed"`: {Uncertain, sessions.ResultInvalid, ""},
	} {
		for _, tool := range []string{"read", "write"} {
			server.On("tools/call", mcptest.Result(`{"resultType":"task","taskId":"T",`+members+`}`))
			before := server.Count("tools/call")
			c := sc.propose(tool)
			code := ""
			if c.Error != nil {
				code = c.Error.Code
			}
			state := want.state
			if state == Uncertain && tool == "read" {
				state = map[bool]State{true: Cancelled, false: Failed}[code == "CANCELLED"] // of a read there is nothing to know
			}
			if c.State != state || code != want.code || want.told != "" && c.told() != want.told || c.Task != nil || len(c.Attempts) != 1 {
				t.Errorf("%s: %s is %s, %+v, %s, %+v", members, tool, c.State, c.Error, c.Result, c.Attempts)
			}
			if got := sc.get(c.ID); got.State != c.State || server.Count("tools/call") != before+1 {
				t.Errorf("%s: %s is recorded as %s after %d sends", members, tool, got.State, server.Count("tools/call")-before)
			}
		}
	}
	if n := w.count(`SELECT count(*) FROM call_tasks`); n > 0 || server.Count("tasks/get") > 0 {
		t.Errorf("%d tasks are looked after, with %d looks", n, server.Count("tasks/get"))
	}
}
