package sessions

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// On the stream that all share, a question belongs to a request only while it is
// the only one in flight that takes questions.
func TestAsks_OnTheSharedStream(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	pieces := make(chan string, 4)
	s.On("GET", mcptest.StreamThen(func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		for {
			select {
			case piece := <-pieces:
				mcptest.Write(w, piece, r)
			case <-raw.Context().Done():
				return
			}
		}
	}, ": open\n\n"))
	ask := func(id string) {
		pieces <- mcptest.Event(`{"jsonrpc":"2.0","id":"` + id + `","method":"elicitation/create","params":{}}`)
	}
	first, second := make(chan struct{}), make(chan struct{})
	s.On("tools/call", s.After(first, mcptest.Result(okResult)), s.After(second, mcptest.Result(okResult)))
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), declaring(s.URL, Capabilities{ElicitationForm: true, Roots: true})
	r := echo()
	r.OnAsk = func(context.Context, Ask) Answer { return Answer{Result: json.RawMessage(`{"action":"decline"}`)} }
	var wg sync.WaitGroup
	call := func() {
		wg.Go(func() {
			if resp, err := p.Do(context.Background(), k, target, r); err != nil || resp.Result == nil {
				t.Errorf("%+v %v", resp, err)
			}
		})
	}
	call()
	s.Wait(t, "tools/call", 1)
	if s.Count("GET") != 1 {
		t.Fatal("the call went out before the stream for questions was open")
	}
	ask("only")
	s.Wait(t, "POST", 1)
	call()
	s.Wait(t, "tools/call", 2)
	ask("which")
	s.Wait(t, "POST", 2)
	close(first)
	close(second)
	wg.Wait()
	ask("alone")
	pieces <- mcptest.Event(`{"jsonrpc":"2.0","id":"r","method":"roots/list"}`)
	s.Wait(t, "POST", 4)
	got := replies(s)
	for _, want := range []string{`"id":"only","result":{"action":"decline"}`, `"id":"which","error":{"code":-32600,"message":"several`, `"id":"alone","error":{"code":-32600,"message":"no request`, `"id":"r","result":{"roots":[]}`} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in %s", want, got)
		}
	}
	if n := p.Connections(k.Tenant, anyKey)[0].Stray; n != 2 {
		t.Errorf("%d strays", n)
	}
	// A question on the stream of a request that nobody attends to is not another's.
	s.On("tools/call", mcptest.StreamThen(func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		s.Answered(t, raw.Context(), 5)
		mcptest.Write(w, mcptest.ResultEvent(okResult), r)
	}, mcptest.Event(`{"jsonrpc":"2.0","id":"own","method":"elicitation/create","params":{}}`)))
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	if !strings.Contains(replies(s), `"id":"own","error":{"code":-32600`) {
		t.Error(replies(s))
	}
}

func TestStdio_AsksAndNotices(t *testing.T) {
	t.Parallel()
	for _, era := range []string{"legacy", "modern"} {
		p, target := stdioPool(t, childRuntime(t, "ERA="+era), nil)
		target.Declare, target.LogLevel = Capabilities{ElicitationForm: true}, "warning"
		k := keyOf(t, "a")
		if era == "legacy" {
			r := tool("ask user")
			r.OnAsk = func(_ context.Context, a Ask) Answer {
				if string(a.Params) != `{"message":"which?"}` {
					t.Errorf("%s", a.Params)
				}
				return Answer{Result: json.RawMessage("{\"action\":\n\"cancel\"}")}
			}
			resp, err := p.Do(t.Context(), k, target, r)
			if got := said(t, resp, err); got != `{"jsonrpc":"2.0","id":"u1","result":{"action":"cancel"}}`+"\n" {
				t.Error(got)
			}
		}
		var got []Notice
		r := tool("progress")
		r.OnNotice = func(n Notice) { got = append(got, n) }
		resp, err := p.Do(t.Context(), k, target, r)
		said(t, resp, err)
		logs := p.Connections(k.Tenant, anyKey)[0].Logs
		if len(logs) != 1 || logs[0].Level != "error" || logs[0].Logger != "l" || string(logs[0].Data) != `{"x":1}` {
			t.Errorf("%s: logs %+v", era, logs)
		}
		if len(got) == 0 || got[0].Kind != NoticeProgress || got[0].Progress != 0.5 || *got[0].Total != 2 || got[0].Message != "half" {
			t.Errorf("%s: %+v", era, got)
		}
	}
}

func TestNotices_ProgressGrowsAndIsPaced(t *testing.T) {
	t.Parallel()
	for _, version := range []string{mcptest.Modern, mcptest.Legacy} {
		s := mcptest.New(t, version)
		s.On("tools/call", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
			token, _ := text(member(member(r.Params, "_meta"), "progressToken"))
			var pieces []string
			for i := range 1000 {
				pieces = append(pieces, mcptest.Event(fmt.Sprintf(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":%q,"progress":%d}}`, token, i)))
			}
			for _, odd := range []string{`"progressToken":"guessed","progress":5000`, `"progressToken":"` + token + `","progress":3`, `"progressToken":"` + token + `","progress":"9999"`, `"progressToken":"` + token + `"`} {
				pieces = append(pieces, mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/progress","params":{`+odd+`}}`))
			}
			pieces = append(pieces, mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"error","data":"unwanted"}}`), mcptest.ResultEvent(okResult))
			mcptest.Stream(strings.Join(pieces, ""))(w, raw, r)
		})
		p := newPool(t, nil)
		var got []Notice
		r := echo()
		r.OnNotice = func(n Notice) { got = append(got, n) }
		r.Meta = map[string]json.RawMessage{"example.com/x": json.RawMessage("1")}
		began := time.Now()
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r)
		succeed(t, resp, err)
		if most := 2 + int(time.Since(began)/noticePace); len(got) == 0 || len(got) > most || got[len(got)-1].Progress != 999 {
			t.Errorf("%s: %d notices, the last %+v", version, len(got), got[len(got)-1])
		}
		info := p.Connections(keyOf(t, "a").Tenant, anyKey)[0]
		if info.Stray != 5 || len(info.Logs) != 0 {
			t.Errorf("%s: %d strays, %+v", version, info.Stray, info.Logs)
		}
		meta := string(member(s.Seen("tools/call")[0].Params, "_meta"))
		if !json.Valid([]byte(meta)) || !strings.Contains(meta, `"example.com/x":1`) || strings.Contains(meta, "logLevel") {
			t.Error(meta)
		}
		r.Meta = map[string]json.RawMessage{"progressToken": json.RawMessage("1")}
		if _, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r); !fault.Is(err, fault.Internal) {
			t.Error(err)
		}
	}
}

func TestNotices_Logs(t *testing.T) {
	t.Parallel()
	log := func(level, data string) string {
		return mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"` + level + `","logger":"x","data":` + data + `}}`)
	}
	var pieces []string
	for i := range 20 {
		pieces = append(pieces, log("warning", fmt.Sprint(i)))
	}
	pieces = append(pieces, log("info", `"below"`), log("loud", `"unknown"`), log("alert", `"`+strings.Repeat("é", maxLogData)+`"`), mcptest.ResultEvent(okResult))
	for _, version := range []string{mcptest.Modern, mcptest.Legacy} {
		s := mcptest.New(t, version)
		s.Capabilities(`{"tools":{},"logging":{}}`)
		s.On("logging/setLevel", mcptest.Result(`{}`))
		s.On("tools/call", mcptest.Stream(pieces...))
		p := newPool(t, nil)
		target := httpTarget(s.URL)
		target.LogLevel = "warning"
		var got []Notice
		r := echo()
		r.OnNotice = func(n Notice) { got = append(got, n) }
		resp, err := p.Do(t.Context(), keyOf(t, "a"), target, r)
		succeed(t, resp, err)
		if len(got) == 0 || got[len(got)-1].Level != "alert" || got[len(got)-1].Kind != NoticeLog {
			t.Errorf("%s: %+v", version, got)
		}
		info := p.Connections(keyOf(t, "a").Tenant, anyKey)[0]
		if n := len(info.Logs); n != maxLogs || string(info.Logs[0].Data) != "5" || !json.Valid(info.Logs[n-1].Data) || len(info.Logs[n-1].Data) > maxLogData || info.Stray != 2 {
			t.Errorf("%s: %d strays, %d logs from %s", version, info.Stray, n, info.Logs[0].Data)
		}
		asked := member(member(s.Seen("tools/call")[0].Params, "_meta"), "io.modelcontextprotocol/logLevel")
		if version == mcptest.Modern && string(asked) != `"warning"` || version == mcptest.Legacy && (asked != nil || s.Count("logging/setLevel") != 1 || string(s.Seen("logging/setLevel")[0].Params) != `{"level":"warning"}`) {
			t.Errorf("%s: asked with %s and %d times", version, asked, s.Count("logging/setLevel"))
		}
	}
	// A server without logging is not asked.
	s := mcptest.New(t, mcptest.Legacy)
	target := httpTarget(s.URL)
	target.LogLevel = "debug"
	resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), target, echo())
	if succeed(t, resp, err); s.Count("logging/setLevel") != 0 {
		t.Error("asked all the same")
	}
}

func TestTasks(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.Capabilities(`{"tools":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}`)
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), declaring(s.URL, everything)
	s.On("tools/call", mcptest.Result(`{"resultType":"task","taskId":"t/é","status":"working","statusMessage":"at it","ttlMs":60000,"pollIntervalMs":1500}`))
	resp, err := p.Do(t.Context(), k, target, echo())
	if err != nil || resp.ResultType != ResultTask || resp.Task.ID != "t/é" || resp.Task.Status != TaskWorking || resp.Task.StatusMessage != "at it" || *resp.Task.TTL != time.Minute || resp.Task.PollInterval != 1500*time.Millisecond {
		t.Fatalf("%+v %+v %v", resp, resp.Task, err)
	}
	get := func(members string) (Response, error) {
		s.On("tasks/get", mcptest.Result(`{`+members+`}`))
		return p.Do(t.Context(), k, target, Request{Method: "tasks/get", Name: "t/é", Params: json.RawMessage(`{"taskId":"t/é"}`)})
	}
	for _, kind := range []string{`"resultType":"complete",`, `"resultType":"task",`, ``} {
		resp, err = get(kind + `"taskId":"t/é","status":"completed","ttlMs":null,"result":{"content":[]}`)
		if err != nil || resp.ResultType != ResultComplete || string(resp.Task.Result) != `{"content":[]}` || resp.Task.TTL != nil {
			t.Fatalf("%+v %v", resp, err)
		}
	}
	if got := s.Seen("tasks/get")[0].Header.Get("Mcp-Name"); got != "=?base64?dC/DqQ==?=" || s.Seen("tasks/get")[0].Header.Get("Mcp-Method") != "tasks/get" {
		t.Errorf("Mcp-Name %q", got)
	}
	resp, err = get(`"taskId":"t/é","status":"completed","result":{"resultType":"input_required","requestState":"SECRET"}`)
	if err != nil || string(resp.Task.Result) != `{"resultType":"input_required"}` {
		t.Fatalf("%s %v", resp.Task.Result, err)
	}
	resp, err = get(`"taskId":"t/é","status":"input_required","inputRequests":{"q":{"method":"elicitation/create","params":{}}}`)
	if err != nil || len(resp.Task.Asks) != 1 || resp.Task.Asks[0].Key != "q" {
		t.Fatalf("%+v %v", resp.Task, err)
	}
	resp, err = get(`"taskId":"t/é","status":"failed","error":{"code":-32000,"message":"no"}`)
	if err != nil || resp.Task.Error == nil || resp.Task.Error.Code != -32000 {
		t.Fatalf("%+v %v", resp.Task, err)
	}
	for name, bad := range map[string]string{
		"another": `"taskId":"other","status":"working"`, "no id": `"status":"working"`, "no status": `"taskId":"t/é"`, "odd status": `"taskId":"t/é","status":"busy"`,
		"no result": `"taskId":"t/é","status":"completed"`, "no error": `"taskId":"t/é","status":"failed"`, "odd time": `"taskId":"t/é","status":"working","ttlMs":-1`,
		"unknown question": `"taskId":"t/é","status":"input_required","inputRequests":{"q":{"method":"x"}}`,
		"id with NUL":      `"taskId":"t\u0000","status":"working"`, "half an id": `"taskId":"t\ud800","status":"working"`,
		"id twice": `"taskId":"t/é","taskId":"t/é","status":"working"`, "status twice": `"taskId":"t/é","status":"working","status":"completed","result":{}`,
		"time twice": `"taskId":"t/é","status":"working","ttlMs":1,"ttlMs":2`, "message twice": `"taskId":"t/é","status":"working","statusMessage":"a","statusMessage":"b"`,
		"pause twice":     `"taskId":"t/é","status":"working","pollIntervalMs":1,"pollIntervalMs":2`,
		"result twice":    `"taskId":"t/é","status":"completed","result":{"content":[]},"result":{"content":[]}`,
		"error twice":     `"taskId":"t/é","status":"failed","error":{"code":1,"message":"x"},"error":{"code":1,"message":"x"}`,
		"questions twice": `"taskId":"t/é","status":"input_required","inputRequests":{},"inputRequests":{}`,
		"type twice":      `"resultType":"complete","resultType":"complete","taskId":"t/é","status":"working"`,
	} {
		resp, err := get(bad)
		if f, ok := fault.As(err); !ok || f.Reason != ResultInvalid || resp.Task != nil {
			t.Errorf("%s: %+v %v", name, resp, err)
		}
	}
	for _, method := range []string{"tasks/update", "tasks/cancel"} {
		s.On(method, mcptest.Result(`{"resultType":"complete"}`))
		resp, err := p.Do(t.Context(), k, target, Request{Method: method, Name: "t/é", Params: json.RawMessage(`{"taskId":"t/é"}`)})
		if err != nil || resp.ResultType != ResultComplete {
			t.Errorf("%s: %+v %v", method, resp, err)
		}
	}
	// A task that was not declared, or for another method, is no answer.
	resp, err = p.Do(t.Context(), k, declaring(s.URL, Capabilities{}), echo())
	expect(t, resp, err, "RESULT_TYPE_INVALID", fault.Protocol, Answered)
	s.On("tasks/cancel", mcptest.Result(`{"resultType":"task","taskId":"x","status":"working"}`))
	resp, err = p.Do(t.Context(), k, target, Request{Method: "tasks/cancel", Name: "x", Params: json.RawMessage(`{"taskId":"x"}`)})
	expect(t, resp, err, "RESULT_TYPE_INVALID", fault.Protocol, Answered)
}

func TestGate(t *testing.T) {
	t.Parallel()
	bare, old := mcptest.New(t, mcptest.Modern), mcptest.New(t, mcptest.Legacy)
	bare.Capabilities(`{"tools":true,"resources":null}`)
	p := newPool(t, nil)
	for method, capability := range map[string]string{"tools/call": "tools", "resources/read": "resources", "prompts/get": "prompts", "completion/complete": "completions", "tasks/get": extensionTasks} {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), declaring(bare.URL, everything), Request{Method: method, Name: "x", Params: json.RawMessage(`{}`)})
		expect(t, resp, err, "CAPABILITY_MISSING", fault.Host, NotSent)
		if f, _ := fault.As(err); f.Metadata["capability"] != capability || bare.Count(method) != 0 {
			t.Errorf("%s: %+v", method, f)
		}
	}
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(bare.URL), Request{Method: "tasks/get", Name: "x"})
	expect(t, resp, err, "CAPABILITY_UNDECLARED", fault.Host, NotSent)
	resp, err = p.Do(t.Context(), keyOf(t, "b"), declaring(old.URL, everything), Request{Method: "tasks/get", Name: "x"})
	expect(t, resp, err, "ERA_UNSUITED", fault.Host, NotSent)
	for _, method := range []string{"logging/setLevel", "resources/subscribe", "x"} {
		if _, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(bare.URL), Request{Method: method}); !fault.Is(err, fault.Internal) {
			t.Errorf("%s: %v", method, err)
		}
	}
	// The first revision had no flag for completions.
	if offersOf([]byte(`{}`), "2024-11-05")&offersCompletions == 0 || offersOf([]byte(`{}`), "2025-03-26")&offersCompletions != 0 {
		t.Error("completions")
	}
	c := mcptest.New(t, mcptest.Modern)
	c.Capabilities(`{"completions":{}}`)
	c.On("completion/complete", mcptest.Result(`{"resultType":"complete","completion":{"values":["a"]}}`))
	resp, err = p.Do(t.Context(), keyOf(t, "c"), httpTarget(c.URL), Request{Method: "completion/complete", Params: json.RawMessage(`{"ref":{"type":"ref/prompt","name":"p"},"argument":{"name":"x","value":""}}`)})
	succeed(t, resp, err)
}

func TestErrors_ThatWantMoreOfTheClient(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/call", mcptest.Error(-32021, "no", `{"requiredCapabilities":{"elicitation":{"url":{}},"sampling":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}}`), mcptest.Error(-32021, "no", ""))
	p := newPool(t, nil)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "CLIENT_CAPABILITY_REQUIRED", fault.Protocol, Answered)
	if f, _ := fault.As(err); f.Metadata["capabilities"] != "elicitation.url,io.modelcontextprotocol/tasks,sampling" || resp.Error == nil {
		t.Errorf("%+v", f)
	}
	resp, err = p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "CLIENT_CAPABILITY_REQUIRED", fault.Protocol, Answered)

	old := mcptest.New(t, mcptest.Legacy)
	visit := func(data string) (Response, error) {
		old.On("tools/call", mcptest.Error(-32042, "visit", data))
		return p.Do(t.Context(), keyOf(t, "b"), declaring(old.URL, everything), echo())
	}
	one := `{"mode":"url","elicitationId":"%s","url":"https://example.com","message":"sign in"}`
	resp, err = visit(`{"elicitations":[` + fmt.Sprintf(one, "z") + `,` + fmt.Sprintf(one, "b") + `]}`)
	if err != nil || resp.ResultType != ResultInputRequired || len(resp.Asks) != 2 || resp.Asks[0].Key != "b" || resp.Asks[1].Method != "elicitation/create" || string(resp.Asks[1].Params) != fmt.Sprintf(one, "z") || resp.Error == nil || resp.Error.Code != -32042 || resp.RequestState != nil {
		t.Fatalf("%+v %v", resp, err)
	}
	for _, bad := range []string{``, `{}`, `{"elicitations":[]}`, `{"elicitations":[{"mode":"form","elicitationId":"a","url":"x"}]}`, `{"elicitations":[{"mode":"url","url":"x"}]}`,
		`{"elicitations":[` + fmt.Sprintf(one, "a") + `,` + fmt.Sprintf(one, "a") + `]}`, `{"elicitations":[` + strings.Repeat(fmt.Sprintf(one, "a")+",", maxAsks) + fmt.Sprintf(one, "b") + `]}`} {
		resp, err := visit(bad)
		if err != nil || resp.ResultType != "" || resp.Asks != nil || resp.Error == nil || resp.Error.Code != -32042 {
			t.Errorf("%s: %+v %v", bad, resp, err)
		}
	}
	old.On("tools/call", mcptest.Error(-32042, "visit", `{"elicitations":[`+fmt.Sprintf(one, "a")+`]}`))
	resp, err = p.Do(t.Context(), keyOf(t, "b"), declaring(old.URL, Capabilities{ElicitationForm: true}), echo())
	if err != nil || resp.Asks != nil || resp.Error == nil {
		t.Errorf("undeclared: %+v %v", resp, err)
	}
	// Word that a visit is over is taken without harm.
	old.On("tools/call", mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/elicitation/complete","params":{"elicitationId":"unknown"}}`), mcptest.ResultEvent(okResult)))
	resp, err = p.Do(t.Context(), keyOf(t, "b"), declaring(old.URL, everything), echo())
	succeed(t, resp, err)
}
