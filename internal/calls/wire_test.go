package calls

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// wired lets the scene's calls go to a server over real HTTP.
func (w *world) wired(server *mcptest.Server) {
	w.t.Helper()
	out := egress.New(egress.Policy{Development: true})
	w.t.Cleanup(out.CloseIdle)
	pool := sessions.NewPool(sessions.PoolConfig{Egress: out, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), TempDir: w.t.TempDir()})
	w.t.Cleanup(func() {
		if err := pool.Shutdown(context.Background()); err != nil {
			w.t.Error(err)
		}
	})
	w.sender.answer(func(ctx context.Context, s sent, _ int) (sessions.Response, error) {
		to := s.target
		to.URL, to.Origin, to.Versions = server.URL, "", nil
		return pool.Do(ctx, s.key, to, s.r)
	})
}

func (w *world) last(server *mcptest.Server, method string) *mcptest.Request {
	w.t.Helper()
	var found *mcptest.Request
	for _, r := range server.Requests() {
		if r.Method == method {
			found = r
		}
	}
	if found == nil {
		w.t.Fatalf("no %s", method)
	}
	return found
}

// The whole of a modern round and of a task as bytes on the wire.
func TestWire_ModernRoundAndTask(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), reverseContract...)
	server := mcptest.New(t, mcptest.Modern)
	server.Capabilities(`{"tools":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}`)
	w.wired(server)
	ask := `"inputRequests":{"k\u0031":{"method":"elicitation/create","params":` + formParams + `}}`
	server.On("tools/call",
		mcptest.Result(`{"resultType":"input_required","requestState":"a\u0062\/c",`+ask+`}`),
		mcptest.Result(`{"resultType":"task","taskId":"T/1","status":"working","createdAt":"2026-11-29T00:00:00Z","lastUpdatedAt":"2026-11-29T00:00:00Z","ttlMs":null,"pollIntervalMs":1000}`))
	c := sc.get(sc.propose("write").ID)
	if c.State != InputRequired || len(c.Interactions) != 1 {
		t.Fatalf("%s %+v", c.State, c.Error)
	}
	first := w.last(server, "tools/call")
	sc.accept(c, 0, `{"acct":"7"}`)
	w.eventually(func() bool { c = sc.get(c.ID); return c.Task != nil }, func() string { return "no task" })
	second := w.last(server, "tools/call")
	for _, want := range []string{`"inputResponses":{"k1":{"action":"accept","content":{"acct":"7","n":2}}}`, `"requestState":"a\u0062\/c"`, `"name":"write"`, `"arguments":{"title":"x"}`} {
		if !strings.Contains(second.Body, want) {
			t.Errorf("no %s in %s", want, second.Body)
		}
	}
	if string(first.ID) == string(second.ID) || strings.Contains(first.Body, "requestState") {
		t.Errorf("%s, then %s", first.Body, second.Body)
	}
	server.On("tasks/get",
		mcptest.Result(`{"resultType":"complete","taskId":"T/1","status":"input_required","statusMessage":"wants","createdAt":"2026-11-29T00:00:00Z","lastUpdatedAt":"2026-11-29T00:00:00Z","ttlMs":null,`+ask+`}`),
		mcptest.Result(`{"resultType":"complete","taskId":"T/1","status":"completed","createdAt":"2026-11-29T00:00:00Z","lastUpdatedAt":"2026-11-29T00:00:00Z","ttlMs":null,"result":{"content":[{"type":"text","text":"at last"}]}}`))
	server.On("tasks/update", mcptest.Result(`{"resultType":"complete"}`))
	sc.look()
	if c = sc.get(c.ID); c.State != InputRequired || c.Task.StatusMessage != "wants" {
		t.Fatalf("%s %+v", c.State, c.Task)
	}
	sc.accept(c, 0, `{"acct":"8"}`)
	w.eventually(func() bool { sc.look(); c = sc.get(c.ID); return c.State == Succeeded }, func() string { return "no end" })
	update := w.last(server, "tasks/update")
	if c.told() != "at last" || server.Count("tools/call") != 2 || server.Count("tasks/update") != 1 || update.Header.Get("Mcp-Name") != "T/1" ||
		!strings.Contains(update.Body, `"inputResponses":{"k1":{"action":"accept","content":{"acct":"8","n":2}}}`) {
		t.Errorf("%s, %s %v", c.Result, update.Body, update.Header)
	}
}

// A legacy server asks on the stream of its answer; the answer is posted while the
// stream stays open.
func TestWire_LegacyQuestion(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), append([]string{`versions: ["2026-07-28"]`, `versions: ["2025-11-25", "2026-07-28"]`}, reverseContract...)...)
	server := mcptest.New(t, mcptest.Legacy)
	w.wired(server)
	answered := make(chan struct{})
	server.On("tools/call", mcptest.StreamThen(server.After(answered, func(rw http.ResponseWriter, _ *http.Request, r *mcptest.Request) {
		mcptest.Write(rw, mcptest.ResultEvent(`{"content":[{"type":"text","text":"thanks"}]}`), r)
	}), mcptest.Event(`{"jsonrpc":"2.0","id":"q1","method":"elicitation/create","params":`+formParams+`}`)))
	c := sc.propose("write", func(p *Proposal) { p.Wait = time.Minute })
	if c.State != InputRequired {
		t.Fatalf("%s %+v", c.State, c.Error)
	}
	sc.accept(sc.get(c.ID), 0, `{"acct":"7"}`)
	server.Answered(t, t.Context(), 1)
	close(answered)
	if got := sc.until(c.ID, Succeeded); got.told() != "thanks" || len(got.Attempts) != 1 {
		t.Fatalf("%s %+v", got.Result, got.Attempts)
	}
	for _, r := range server.Requests() {
		var m struct {
			ID     string
			Result json.RawMessage
		}
		if r.Method == "" && json.Unmarshal([]byte(r.Body), &m) == nil && m.ID == "q1" {
			if string(m.Result) != `{"action":"accept","content":{"acct":"7","n":2}}` {
				t.Errorf("%s", r.Body)
			}
			return
		}
	}
	t.Error("the server got no answer")
}

// What cannot be read says nothing of what was done: of a write it is not known, a
// read has failed. An error with a code, and a question that was not offered, are a
// server's word.
func TestWire_UnreadableAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), "limits: {timeout: 20s", "reverse: {elicitation: {form: true}}\nlimits: {timeout: 20s")
	server := mcptest.New(t, mcptest.Modern)
	server.Capabilities(`{"tools":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}`)
	w.wired(server)
	roots := `"inputRequests":{"a":{"method":"roots/list"}}`
	for body, want := range map[string]struct {
		write State
		code  string
	}{
		`"result":[]`:                                                                {Uncertain, "RESULT_INVALID"},
		`"result":{"isError":"no"}`:                                                  {Uncertain, "RESULT_INVALID"},
		`"result":{"isError":false,"isError":true}`:                                  {Uncertain, "RESULT_INVALID"},
		`"result":{"resultType":"weird"}`:                                            {Uncertain, "RESULT_TYPE_INVALID"},
		`"result":{"resultType":7}`:                                                  {Uncertain, "RESULT_TYPE_INVALID"},
		`"result":{"resultType":"task","taskId":"t","status":"weird"}`:               {Uncertain, "RESULT_INVALID"},
		`"result":{"resultType":"task","status":"working"}`:                          {Uncertain, "RESULT_INVALID"},
		`"result":{"resultType":"task","taskId":"t","status":"completed"}`:           {Uncertain, "RESULT_INVALID"},
		`"result":{"resultType":"task","taskId":"t","status":"failed","error":"no"}`: {Uncertain, "RESULT_INVALID"},
		`"result":{"resultType":"input_required"}`:                                   {Uncertain, "RESULT_INVALID"},
		`"result":{"resultType":"input_required","inputRequests":[]}`:                {Uncertain, "RESULT_INVALID"},
		`"result":{"resultType":"input_required","inputRequests":{"a":{}}}`:          {Uncertain, "RESULT_INVALID"},
		`"result":{"resultType":"input_required",` + roots + `}`:                     {Failed, "RESULT_INVALID"},
		`"result":{"resultType":"input_required","requestState":"s",` + roots + `}`:  {Failed, "RESULT_INVALID"},
		`"error":{"code":"x","message":"no"}`:                                        {Uncertain, "ERROR_INVALID"},
		`"error":{"message":"no"}`:                                                   {Uncertain, "ERROR_INVALID"},
		`"error":"no"`:                                                               {Uncertain, "ERROR_INVALID"},
		`"error":{"code":-32000,"message":5}`:                                        {Failed, "ERROR_INVALID"},
		`"error":{"code":-32000,"message":"no"}`:                                     {Failed, "-32000"},
	} {
		server.On("tools/call", mcptest.JSON(`{"jsonrpc":"2.0","id":$ID,`+body+`}`))
		for tool, state := range map[string]State{"read_retry": Failed, "write": want.write, "write_query": want.write} {
			c := sc.propose(tool, func(p *Proposal) { p.Arguments = fmt.Appendf(nil, `{"case":%q}`, body) })
			got := sc.get(c.ID)
			if got.State != state || got.Error == nil || got.Error.Code != want.code || got.Error.Layer != LayerProtocol || len(got.Attempts) != 1 ||
				got.Attempts[0].Phase != Answered {
				t.Errorf("%s of %s: %s %+v %+v", body, tool, got.State, got.Error, got.Attempts)
			}
			if kept := slices.ContainsFunc(got.Findings, func(f string) bool { return strings.HasPrefix(f, "ANSWER_UNREADABLE: ") }); kept != (state == Uncertain) {
				t.Errorf("%s of %s: %q", body, tool, got.Findings)
			}
			asked := w.count(`SELECT count(*) FROM calls WHERE call_id = $1 AND resolve_after IS NOT NULL`, c.ID) == 1
			if asked != (state == Uncertain && tool == "write_query") {
				t.Errorf("%s of %s: asked again: %v", body, tool, asked)
			}
		}
	}
}
