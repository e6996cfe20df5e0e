package chaos

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// opaque is a requestState of odd bytes, as they stand in the message.
const opaque = `"a\u0062\/c \ud83d\ude00 é\u0000 \\\" {} \uFFFD\t "`

const askForm = `{"mode":"form","message":"Which account?","requestedSchema":{"type":"object","properties":{"account":{"type":"string"},"n":{"type":"integer","default":2}},"required":["account"]}}`

// asker is a server that asks its user in the middle of a call, in the test's own
// process, which outlives every server under test. Its tools are "look", a read,
// and "change", a write that asks for consent; the argument "how" says how it asks.
type asker struct {
	*mcptest.Server
	t      testing.TB
	legacy bool

	mu    sync.Mutex
	asked int             // questions put on streams
	polls map[string]int  // looks at each task
	over  map[string]bool // tasks that may end
}

// startAsker starts the server and registers it with a contract that lets it ask.
func (w *world) startAsker(p *process, name, version string) *asker {
	w.t.Helper()
	a := w.newAsker(version)
	w.must(p.as(w.admin).post("/v1/servers", obj{"name": name, "http": obj{"url": a.URL}}, nil))
	w.contract(p, name, version, a)
	return a
}

func (w *world) newAsker(version string) *asker {
	w.t.Helper()
	a := &asker{Server: mcptest.New(w.t, version), t: w.t, legacy: version == mcptest.Legacy, polls: map[string]int{}, over: map[string]bool{}}
	a.Capabilities(`{"tools":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}`)
	a.On("tools/list", mcptest.Result(`{"resultType":"complete","tools":[{"name":"look","inputSchema":{"type":"object"}},{"name":"change","inputSchema":{"type":"object"}}]}`))
	a.On("tools/call", a.call)
	a.On("tasks/get", a.task)
	a.On("tasks/update", mcptest.Result(`{"resultType":"complete"}`))
	a.On("tasks/cancel", mcptest.Result(`{"resultType":"complete"}`))
	return a
}

// contract puts a contract in force that lets the server ask.
func (w *world) contract(p *process, name, version string, a *asker) {
	w.t.Helper()
	admin := p.as(w.admin)
	w.must(admin.post("/v1/servers/"+name+":probe", obj{}, nil))
	digests := w.digests(p, name)
	text := fmt.Sprintf("server: %s\ntransport: http\nprotocol: {versions: [%q]}\norigin: %q\naudience: %q\nmethods: [tools/list, tools/call]\n"+
		"limits: {timeout: 2m, ceiling: 5m, calls_per_session: 100000, definition_age: {write: 60s, read: 15m}}\nreverse: {elicitation: {form: true}}\ntools:\n"+
		"  - {name: look, definition: %q, effect: read, consent: none}\n  - {name: change, definition: %q, effect: write, consent: call}\n",
		name, version, strings.TrimSuffix(a.URL, "/mcp"), a.URL, digests["look"], digests["change"])
	var made struct{ Revision int }
	w.must(admin.post("/v1/servers/"+name+"/contracts", obj{"yaml": text}, &made))
	w.must(admin.post(fmt.Sprintf("/v1/servers/%s/contracts/%d:activate", name, made.Revision), obj{}, nil))
}

type toolCall struct {
	Name           string
	Arguments      struct{ How string }
	InputResponses json.RawMessage
	RequestState   json.RawMessage
}

func (a *asker) call(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
	var c toolCall
	if err := json.Unmarshal(r.Params, &c); err != nil {
		a.t.Errorf("params %s: %v", r.Params, err)
	}
	question := `"inputRequests":{"k\u0031":{"method":"elicitation/create","params":` + askForm + `}}`
	switch {
	case a.legacy && c.Arguments.How == "plainly":
		mcptest.Result(`{"content":[{"type":"text","text":"as you see"}]}`)(w, raw, r)
	case a.legacy:
		a.hold(w, raw, r)
	case strings.HasPrefix(c.Arguments.How, "task"):
		mcptest.Result(a.taskAs(c.Name+" "+c.Arguments.How, `"resultType":"task","status":"working"`))(w, raw, r)
	case c.RequestState == nil:
		mcptest.Result(`{"resultType":"input_required","requestState":`+opaque+`,`+question+`}`)(w, raw, r)
	case c.Arguments.How == "sent":
		a.Hang()(w, raw, r)
	default:
		mcptest.Result(`{"resultType":"complete","content":[{"type":"text","text":"thanks"}]}`)(w, raw, r)
	}
}

// hold asks on the stream of the answer, which stays open until there is one.
func (a *asker) hold(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
	a.mu.Lock()
	a.asked++
	id := fmt.Sprintf("q%d", a.asked)
	a.mu.Unlock()
	mcptest.StreamThen(func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		for a.answerTo(id) == "" {
			select {
			case <-raw.Context().Done():
				return
			case <-glance():
			}
		}
		mcptest.Write(w, mcptest.ResultEvent(`{"content":[{"type":"text","text":"thanks"}]}`), r)
	}, mcptest.Event(`{"jsonrpc":"2.0","id":"`+id+`","method":"elicitation/create","params":`+askForm+`}`))(w, raw, r)
}

// answerTo is what a question on a stream was answered with.
func (a *asker) answerTo(id string) string {
	for _, r := range a.Requests() {
		var m struct {
			ID     string
			Result json.RawMessage
		}
		if r.Method == "" && json.Unmarshal([]byte(r.Body), &m) == nil && m.ID == id {
			return string(m.Result)
		}
	}
	return ""
}

func (a *asker) taskAs(id, members string) string {
	return `{"taskId":"` + id + `","createdAt":"2026-11-29T00:00:00Z","lastUpdatedAt":"2026-11-29T00:00:00Z","ttlMs":null,"pollIntervalMs":500,` + members + `}`
}

// task tells how a task is: it works until it may end, and one that asks has a
// question until it was answered.
func (a *asker) task(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
	var p struct{ TaskID string }
	if err := json.Unmarshal(r.Params, &p); err != nil {
		a.t.Errorf("params %s: %v", r.Params, err)
	}
	answered := len(a.updates(p.TaskID)) > 0
	a.mu.Lock()
	a.polls[p.TaskID]++
	over := a.over[p.TaskID]
	a.mu.Unlock()
	members := `"resultType":"complete","status":"working"`
	switch {
	case strings.HasSuffix(p.TaskID, "asks") && !answered:
		members = `"resultType":"complete","status":"input_required","inputRequests":{"k1":{"method":"elicitation/create","params":` + askForm + `}}`
	case over:
		members = `"resultType":"complete","status":"completed","result":{"content":[{"type":"text","text":"thanks"}]}`
	}
	mcptest.Result(a.taskAs(p.TaskID, members))(w, raw, r)
}

func (a *asker) looks(task string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.polls[task]
}

// end lets a task end at its next look.
func (a *asker) end(task string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over[task] = true
}

func (a *asker) updates(task string) (out []*mcptest.Request) {
	for _, r := range a.Seen("tasks/update") {
		var p struct{ TaskID string }
		if json.Unmarshal(r.Params, &p) == nil && p.TaskID == task {
			out = append(out, r)
		}
	}
	return out
}

// calls are the requests of one tool with one way to ask.
func (a *asker) calls(tool, how string) (out []*mcptest.Request) {
	for _, r := range a.Seen("tools/call") {
		var c toolCall
		if json.Unmarshal(r.Params, &c) == nil && c.Name == tool && c.Arguments.How == how {
			out = append(out, r)
		}
	}
	return out
}

// wantRound wants the call to have been sent twice: as it was first, and with the
// answer and the server's state under another id.
func (a *asker) wantRound(tool, how string) {
	a.t.Helper()
	sent := a.calls(tool, how)
	if len(sent) != 2 {
		a.t.Errorf("%s %s: %d requests, want the first and one further", tool, how, len(sent))
		return
	}
	if string(sent[0].ID) == string(sent[1].ID) {
		a.t.Errorf("%s %s: both requests have the id %s", tool, how, sent[0].ID)
	}
	var before, after map[string]json.RawMessage
	for i, into := range []*map[string]json.RawMessage{&before, &after} {
		if err := json.Unmarshal(sent[i].Params, into); err != nil {
			a.t.Errorf("%s: %v", sent[i].Params, err)
			return
		}
	}
	for name, want := range map[string]string{"name": string(before["name"]), "arguments": string(before["arguments"]),
		"inputResponses": `{"k1":{"action":"accept","content":{"account":"7","n":2}}}`, "requestState": opaque} {
		if string(after[name]) != want {
			a.t.Errorf("%s %s: the further request has %s %s, want %s", tool, how, name, after[name], want)
		}
	}
	if len(after) != len(before)+2 || before["requestState"] != nil || before["inputResponses"] != nil {
		a.t.Errorf("%s %s: %s became %s", tool, how, sent[0].Params, sent[1].Params)
	}
}
