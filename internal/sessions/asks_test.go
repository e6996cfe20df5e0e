package sessions

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// everything is a declaration of all there is.
var everything = Capabilities{ElicitationForm: true, ElicitationURL: true, Sampling: true, Roots: true, Tasks: true}

func declaring(url string, d Capabilities) Target {
	t := httpTarget(url)
	t.Declare = d
	return t
}

// replies are the answers to its own requests that a server got.
func replies(s *mcptest.Server) string {
	var all []string
	for _, r := range s.Seen("POST") {
		all = append(all, r.Body)
	}
	return strings.Join(all, "\n")
}

func TestDeclare_ExactShapes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		declared       Capabilities
		modern, legacy string
		before         string // of revision 2025-06-18
	}{
		{Capabilities{}, `{}`, `{}`, `{}`},
		{Capabilities{ElicitationForm: true}, `{"elicitation":{"form":{}}}`, `{"elicitation":{"form":{}}}`, `{"elicitation":{}}`},
		{Capabilities{ElicitationURL: true}, `{"elicitation":{"url":{}}}`, `{"elicitation":{"url":{}}}`, `{}`},
		{everything, `{"elicitation":{"form":{},"url":{}},"roots":{},"sampling":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}`,
			`{"elicitation":{"form":{},"url":{}},"roots":{},"sampling":{}}`, `{"elicitation":{},"roots":{},"sampling":{}}`},
	} {
		s, old := mcptest.New(t, mcptest.Modern), mcptest.New(t, mcptest.Legacy)
		p := newPool(t, nil)
		for _, url := range []string{s.URL, old.URL} {
			k := keyOf(t, url)
			resp, err := p.Do(t.Context(), k, declaring(url, c.declared), echo())
			succeed(t, resp, err)
		}
		for _, method := range []string{"server/discover", "tools/call"} {
			meta := member(s.Seen(method)[0].Params, "_meta")
			if got := member(meta, "io.modelcontextprotocol/clientCapabilities"); string(got) != c.modern {
				t.Errorf("%s declares %s, want %s", method, got, c.modern)
			}
		}
		if got := member(old.Seen("initialize")[0].Params, "capabilities"); string(got) != c.legacy {
			t.Errorf("initialize declares %s, want %s", got, c.legacy)
		}
		if got := c.declared.inHandshake("2025-06-18").legacy("2025-06-18"); got != c.before {
			t.Errorf("2025-06-18: %s, want %s", got, c.before)
		}
		if got := c.declared.inHandshake("2025-03-26").legacy("2025-03-26"); strings.Contains(got, "elicitation") {
			t.Errorf("2025-03-26: %s", got)
		}
		if declarationOf(c.declared.index()) != c.declared {
			t.Errorf("%+v is not its own number's", c.declared)
		}
	}
}

func TestDeclare_LegacyConnectionIsMadeAnew(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{},"logging":{}}`)
	s.On("logging/setLevel", mcptest.Result(`{}`))
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	do := func(handshakes int) {
		t.Helper()
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		if n := s.Count("initialize"); n != handshakes {
			t.Fatalf("%d handshakes, want %d", n, handshakes)
		}
	}
	do(1)
	target.Declare.Tasks = true // the extension has no effect on a legacy connection
	do(1)
	target.Declare.ElicitationForm = true
	do(2)
	target.LogLevel = "warning"
	do(3)
	target.Declare.Roots = true
	do(4)
	target.Roots = []string{"file:///a"}
	do(5)
	do(5)
	// What is listed may depend on what is declared.
	if _, err := p.List(t.Context(), k, httpTarget(s.URL), KindTool); err != nil || s.Count("initialize") != 6 {
		t.Fatal(err, s.Count("initialize"))
	}
	// A modern server is told with every request.
	m := mcptest.New(t, mcptest.Modern)
	for _, d := range []Capabilities{{}, everything} {
		resp, err := p.Do(t.Context(), keyOf(t, "m"), declaring(m.URL, d), echo())
		succeed(t, resp, err)
	}
	if m.Count("server/discover") != 1 || !strings.Contains(m.Seen("tools/call")[1].Body, `"sampling":{}`) || strings.Contains(m.Seen("tools/call")[0].Body, `"sampling"`) {
		t.Fatal("a modern connection was not kept, or not told")
	}
}

func TestAsks_OnTheStreamOfTheCall(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	ask := func(id, method, params string) string {
		return mcptest.Event(`{"jsonrpc":"2.0","id":` + id + `,"method":"` + method + `","params":` + params + `}`)
	}
	s.On("tools/call", mcptest.StreamThen(func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		s.Answered(t, raw.Context(), 8)
		mcptest.Write(w, mcptest.ResultEvent(okResult), r)
	},
		ask(`"p"`, "ping", `{}`), ask(`1`, "roots/list", `{}`),
		ask(`"form"`, "elicitation/create", `{"message":"which?","requestedSchema":{"type":"object"}}`),
		ask(`"url"`, "elicitation/create", `{"mode":"url","url":"https://x"}`), ask(`"odd"`, "elicitation/create", `{"mode":7}`),
		ask(`"s"`, "sampling/createMessage", `{"maxTokens":1}`), ask(`"st"`, "sampling/createMessage", `{"tools":[]}`), ask(`"x"`, "x/unknown", `{}`),
		ask(`null`, "elicitation/create", `{}`)))
	p := newPool(t, nil)
	target := declaring(s.URL, Capabilities{ElicitationForm: true, Roots: true, Sampling: true})
	target.Roots = []string{"file:///work/a b"}
	var mu sync.Mutex
	asked := map[string]string{}
	r := echo()
	r.OnAsk = func(_ context.Context, a Ask) Answer {
		mu.Lock()
		defer mu.Unlock()
		asked[a.Method] += string(a.Params)
		if a.Method == "sampling/createMessage" {
			return Answer{Error: &RPCError{Code: -1, Message: "the user refused", Data: json.RawMessage(`{"a":1}`)}}
		}
		return Answer{Result: json.RawMessage(`{"action":"accept","content":{"x":1}}`)}
	}
	resp, err := p.Do(t.Context(), keyOf(t, "a"), target, r)
	succeed(t, resp, err)
	got := replies(s)
	for _, want := range []string{
		`{"jsonrpc":"2.0","id":"p","result":{}}`, `{"jsonrpc":"2.0","id":1,"result":{"roots":[{"uri":"file:///work/a b"}]}}`,
		`{"jsonrpc":"2.0","id":"form","result":{"action":"accept","content":{"x":1}}}`, `"id":"url","error":{"code":-32602`, `"id":"odd","error":{"code":-32602`,
		`"id":"s","error":{"code":-1,"message":"the user refused","data":{"a":1}}`, `"id":"st","error":{"code":-32602`, `"id":"x","error":{"code":-32601`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
	if len(asked) != 2 || asked["elicitation/create"] != `{"message":"which?","requestedSchema":{"type":"object"}}` || asked["sampling/createMessage"] != `{"maxTokens":1}` {
		t.Errorf("asked %q", asked)
	}
	for _, r := range s.Seen("POST") {
		if r.Header.Get("Mcp-Session-Id") != "session-1" || r.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%v", r.Header)
		}
	}
	if n := p.Connections(keyOf(t, "a").Tenant, anyKey)[0].Stray; n != 1 {
		t.Errorf("%d strays", n)
	}
}

// A person's time is not the server's.
func TestAsks_ClockStandsStill(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.On("tools/call", mcptest.StreamThen(func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		s.Answered(t, raw.Context(), 1)
		mcptest.Write(w, mcptest.ResultEvent(okResult), r)
	}, mcptest.Event(`{"jsonrpc":"2.0","id":1,"method":"elicitation/create","params":{}}`)),
		mcptest.StreamThen(s.Hang(), mcptest.Event(`{"jsonrpc":"2.0","id":2,"method":"elicitation/create","params":{}}`)),
		mcptest.StreamThen(s.Hang(), mcptest.Event(`{"jsonrpc":"2.0","id":3,"method":"elicitation/create","params":{}}`)))
	p := newPool(t, nil)
	target := declaring(s.URL, Capabilities{ElicitationForm: true})
	r := echo()
	r.Timeout = 300 * time.Millisecond
	r.OnAsk = func(ctx context.Context, _ Ask) Answer {
		select { // longer than the server has
		case <-ctx.Done():
			t.Error("the question was taken back")
		case <-time.After(600 * time.Millisecond):
		}
		return Answer{Result: json.RawMessage(`{"action":"decline"}`)}
	}
	resp, err := p.Do(t.Context(), keyOf(t, "a"), target, r)
	succeed(t, resp, err)
	// What is left of the server's time runs on after the answer.
	r.OnAsk = func(context.Context, Ask) Answer { return Answer{Result: json.RawMessage(`{"action":"decline"}`)} }
	resp, err = p.Do(t.Context(), keyOf(t, "a"), target, r)
	expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
	// The caller's own end takes the question back and waits for who has it.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	left := false
	r.OnAsk = func(ctx context.Context, _ Ask) Answer {
		<-ctx.Done()
		left = true
		return Answer{}
	}
	resp, err = p.Do(ctx, keyOf(t, "a"), target, r)
	expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
	if !left {
		t.Error("the request ended before its question")
	}
	s.Wait(t, "notifications/cancelled", 2)
	if strings.Contains(replies(s), `"id":3`) {
		t.Error("a question of a request that is over was answered")
	}
}

func TestAsks_BoundedAndTakenBack(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	all := make(chan struct{})
	var events []string
	for _, id := range []string{"1", "2", "3", "4", "5", "6", "7", "8", "9", "9"} {
		events = append(events, mcptest.Event(`{"jsonrpc":"2.0","id":`+id+`,"method":"elicitation/create","params":{}}`))
	}
	s.On("tools/call", mcptest.StreamThen(func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		s.Answered(t, raw.Context(), 2) // the two beyond the bound are refused at once
		for _, id := range []string{"1", "2", "3", "4", "5", "6", "7", "8", `"77"`} {
			mcptest.Write(w, mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":`+id+`}}`), r)
		}
		select {
		case <-all:
		case <-raw.Context().Done():
		}
		mcptest.Write(w, mcptest.ResultEvent(okResult), r)
	}, events...))
	p := newPool(t, nil)
	r := echo()
	var back atomic.Int32
	r.OnAsk = func(ctx context.Context, _ Ask) Answer {
		<-ctx.Done()
		if back.Add(1) == maxOpenAsks {
			close(all)
		}
		return Answer{Result: json.RawMessage(`{"action":"cancel"}`)}
	}
	resp, err := p.Do(t.Context(), keyOf(t, "a"), declaring(s.URL, Capabilities{ElicitationForm: true}), r)
	succeed(t, resp, err)
	got := replies(s)
	if strings.Count(got, `"id":9,"error":{"code":-32603`) != 2 || strings.Contains(got, `"id":1,`) {
		t.Errorf("%s", got)
	}
}
