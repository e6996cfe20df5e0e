package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mark3labs/mcp-go/client"
	"github.com/mark3labs/mcp-go/client/transport"
	"github.com/mark3labs/mcp-go/mcp"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, o Options) *Server {
	t.Helper()
	s, err := Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// connect opens a client; listening holds the legacy GET stream.
func connect(t *testing.T, s *Server, legacyStream bool) *client.Client {
	t.Helper()
	rt := &http.Transport{}
	opts := []transport.StreamableHTTPCOption{transport.WithHTTPBasicClient(&http.Client{Transport: rt})}
	if legacyStream {
		//lint:ignore SA1019 older clients do listen like this, and must hear of changes
		opts = append(opts, transport.WithContinuousListening())
	}
	tr, err := transport.NewStreamableHTTP(s.URL(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	c := client.NewClient(tr)
	ctx, cancel := context.WithCancel(context.Background())
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = c.Close()
		rt.CloseIdleConnections()
	})
	if _, err := c.Initialize(t.Context(), mcp.InitializeRequest{Params: mcp.InitializeParams{
		ClientInfo: mcp.Implementation{Name: "demo-test", Version: "1"},
	}}); err != nil {
		t.Fatal(err)
	}
	return c
}

func call(ctx context.Context, c *client.Client, tool, args string) (structured map[string]any, isError bool, err error) {
	res, err := c.CallTool(ctx, mcp.CallToolRequest{Params: mcp.CallToolParams{Name: tool, Arguments: json.RawMessage(args)}})
	if err != nil {
		return nil, false, err
	}
	structured, _ = res.StructuredContent.(map[string]any)
	return structured, res.IsError, nil
}

// mustCall is call for a success.
func mustCall(t *testing.T, c *client.Client, tool, args string) map[string]any {
	t.Helper()
	out, isError, err := call(t.Context(), c, tool, args)
	if err != nil || isError {
		t.Fatalf("%s: isError %v, err %v", tool, isError, err)
	}
	return out
}

const reviewDraft = `{"title":"Review","start":"2026-12-01T09:00:00Z","end":"2026-12-01T10:00:00Z","requestId":"r1"}`

func TestServesBothEras(t *testing.T) {
	for _, tt := range []struct {
		name    string
		options Options
		want    string
	}{
		{"modern", Options{}, mcp.ProtocolVersion20260728},
		{"legacy only", Options{LegacyOnly: true}, mcp.ProtocolVersion20251125},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := start(t, tt.options)
			c := connect(t, s, false)
			if got := c.ProtocolVersion(); got != tt.want {
				t.Fatalf("protocol version %s, want %s", got, tt.want)
			}
			listed, err := c.ListTools(t.Context(), mcp.ListToolsRequest{})
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, tool := range listed.Tools {
				names = append(names, tool.Name)
				if tool.InputSchema.AdditionalProperties != false {
					t.Errorf("%s takes unknown arguments", tool.Name)
				}
			}
			want := slices.Sorted(slices.Values(Tools()))
			if slices.Sort(names); !slices.Equal(names, want) {
				t.Fatalf("tools %v, want %v", names, want)
			}
			useCalendar(t, s, c)
		})
	}
}

func useCalendar(t *testing.T, s *Server, c *client.Client) {
	first := mustCall(t, c, CreateDraftEvent, reviewDraft)
	again := mustCall(t, c, CreateDraftEvent, reviewDraft)
	if first["id"] != "ev_1" || again["id"] != "ev_1" {
		t.Errorf("ids %v and %v, want ev_1 twice", first["id"], again["id"])
	}
	if n := s.Executions(CreateDraftEvent); n != 1 {
		t.Errorf("the repeated requestId executed: %d executions", n)
	}
	other := strings.Replace(reviewDraft, "Review", "Another", 1)
	if _, isError, err := call(t.Context(), c, CreateDraftEvent, other); err != nil || !isError {
		t.Errorf("requestId reused for another event: isError %v, err %v", isError, err)
	}
	for name, args := range map[string]string{
		"unknown member":  `{"title":"x","start":"2026-12-01T09:00:00Z","end":"2026-12-01T10:00:00Z","colour":"red"}`,
		"no title":        `{"start":"2026-12-01T09:00:00Z","end":"2026-12-01T10:00:00Z"}`,
		"end first":       `{"title":"x","start":"2026-12-01T10:00:00Z","end":"2026-12-01T09:00:00Z"}`,
		"title no string": `{"title":7,"start":"2026-12-01T09:00:00Z","end":"2026-12-01T10:00:00Z"}`,
	} {
		if _, isError, err := call(t.Context(), c, CreateDraftEvent, args); err != nil || !isError {
			t.Errorf("%s: isError %v, err %v; want a tool error", name, isError, err)
		}
	}
	if n := s.Executions(CreateDraftEvent); n != 1 {
		t.Errorf("a refused draft executed: %d executions", n)
	}
	if found := mustCall(t, c, FindDraft, `{"requestId":"r1"}`); found["found"] != true || found["id"] != "ev_1" {
		t.Errorf("find_draft of r1: %v", found)
	}
	if found := mustCall(t, c, FindDraft, `{"requestId":"r2"}`); found["found"] != false {
		t.Errorf("find_draft of an unknown requestId: %v", found)
	}
	got, _ := json.Marshal(mustCall(t, c, GetAvailability, `{"from":"2026-12-01T08:00:00Z","to":"2026-12-01T12:00:00Z"}`))
	want := `{"busy":[{"end":"2026-12-01T10:00:00Z","start":"2026-12-01T09:00:00Z","title":"Review"}],` +
		`"free":[{"end":"2026-12-01T09:00:00Z","start":"2026-12-01T08:00:00Z"},{"end":"2026-12-01T12:00:00Z","start":"2026-12-01T10:00:00Z"}]}`
	if string(got) != want {
		t.Errorf("availability\n got %s\nwant %s", got, want)
	}
	if sent := mustCall(t, c, SendInvitations, `{"id":"ev_1","attendees":["a@example.com"]}`); sent["sent"] != 1.0 {
		t.Errorf("send_invitations: %v", sent)
	}
	if _, isError, err := call(t.Context(), c, SendInvitations, `{"id":"ev_01","attendees":["a@example.com"]}`); err != nil || !isError {
		t.Errorf("invitation to an event that is not there: isError %v, err %v", isError, err)
	}
}

func TestDropAfterExecution(t *testing.T) {
	for _, legacy := range []bool{false, true} {
		s := start(t, Options{LegacyOnly: legacy, Faults: map[string]Fault{CreateDraftEvent: {DropAfter: true, Times: 1}}})
		c := connect(t, s, false)
		if _, _, err := call(t.Context(), c, CreateDraftEvent, reviewDraft); err == nil {
			t.Error("the dropped call was answered")
		}
		if n := s.Executions(CreateDraftEvent); n != 1 {
			t.Errorf("%d executions, want 1", n)
		}
		if found := mustCall(t, c, FindDraft, `{"requestId":"r1"}`); found["found"] != true {
			t.Errorf("the dropped call left no draft: %v", found)
		}
		mustCall(t, c, CreateDraftEvent, reviewDraft) // the fault was for one call
	}
}

// TestCancelledWhileDelayed cancels a call that has arrived and still waits.
func TestCancelledWhileDelayed(t *testing.T) {
	for _, tt := range []struct {
		name string
		f    Fault
		want int
	}{
		{"takes no effect", Fault{DelayBefore: time.Hour}, 0},
		{"takes effect when detached", Fault{DelayBefore: 50 * time.Millisecond, Detached: true}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := start(t, Options{})
			s.SetFault(CreateDraftEvent, tt.f)
			c := connect(t, s, false)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				_, _, err := call(ctx, c, CreateDraftEvent, reviewDraft)
				done <- err
			}()
			await(t, func() bool { return s.Arrivals(CreateDraftEvent) == 1 })
			cancel()
			if err := <-done; err == nil {
				t.Error("the cancelled call succeeded")
			}
			if err := s.Close(); err != nil { // waits for the handler
				t.Fatal(err)
			}
			if n := s.Executions(CreateDraftEvent); n != tt.want {
				t.Errorf("%d executions, want %d", n, tt.want)
			}
		})
	}
}

func TestListChanged(t *testing.T) {
	for _, legacy := range []bool{false, true} {
		t.Run(fmt.Sprintf("legacy %v", legacy), func(t *testing.T) {
			s := start(t, Options{LegacyOnly: legacy})
			c := connect(t, s, legacy)
			changed := listen(t, s, c)
			if err := s.AddTool("wipe_calendar", "Removes everything."); err != nil {
				t.Fatal(err)
			}
			<-changed
			listed, err := c.ListTools(t.Context(), mcp.ListToolsRequest{})
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]string{}
			for _, tool := range listed.Tools {
				got[tool.Name] = tool.Description
			}
			if len(got) != 5 || got["wipe_calendar"] == "" || got[GetAvailability] != "Now described otherwise." {
				t.Errorf("catalog after the change: %v", got)
			}
			mustCall(t, c, "wipe_calendar", `{}`)
			if s.Executions("wipe_calendar") != 1 {
				t.Error("the added tool does not count")
			}
			if err := s.RemoveTool("wipe_calendar"); err != nil {
				t.Fatal(err)
			}
			<-changed
		})
	}
}

func TestToolChangesRefused(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	for _, tt := range []struct {
		name string
		err  error
		want fault.Kind
	}{
		{"exists", s.AddTool(FindDraft, ""), fault.Exists},
		{"bad name", s.AddTool("two words", ""), fault.Invalid},
		{"describe unknown", s.Describe("nothing", ""), fault.NotFound},
		{"remove unknown", s.RemoveTool("nothing"), fault.NotFound},
	} {
		if f, ok := errors.AsType[*fault.Error](tt.err); !ok || f.Kind != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, tt.err, tt.want)
		}
	}
}

func TestOptionsRefused(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Options{
		"not loopback": {Address: "0.0.0.0:0"},
		"a name":       {Address: "calendar.example:80"},
		"no port":      {Address: "127.0.0.1"},
		"too many":     {GeneratedTools: maxGeneratedTools + 1},
		"grace":        {Grace: -1},
	} {
		s, err := Start(o)
		if f, ok := errors.AsType[*fault.Error](err); !ok || f.Kind != fault.Invalid {
			t.Errorf("%s: %v, want an invalid fault", name, err)
			if s != nil {
				_ = s.Close()
			}
		}
	}
}

func TestGeneratedTools(t *testing.T) {
	s := start(t, Options{GeneratedTools: 100})
	listed, err := connect(t, s, false).ListTools(t.Context(), mcp.ListToolsRequest{})
	if err != nil || len(listed.Tools) != 104 {
		t.Fatalf("%d tools, err %v; want 104", len(listed.Tools), err)
	}
}

// TestCloseLetsCallsFinish closes while a call runs and a stream is open. The
// stream ends at once, or Close would wait for it as long as the grace; the call
// is answered.
func TestCloseLetsCallsFinish(t *testing.T) {
	for _, legacy := range []bool{false, true} {
		t.Run(fmt.Sprintf("legacy %v", legacy), func(t *testing.T) {
			s := start(t, Options{Grace: time.Hour, LegacyOnly: legacy})
			listener, c := connect(t, s, legacy), connect(t, s, false)
			listen(t, s, listener)
			s.SetFault(CreateDraftEvent, Fault{DelayBefore: 200 * time.Millisecond})
			done := make(chan error, 1)
			go func() {
				_, _, err := call(t.Context(), c, CreateDraftEvent, reviewDraft)
				done <- err
			}()
			await(t, func() bool { return s.Arrivals(CreateDraftEvent) == 1 })
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Errorf("the running call was cut off: %v", err)
			}
		})
	}
}

// TestCloseWaitsForHandlers holds a handler past the end of everything else.
func TestCloseWaitsForHandlers(t *testing.T) {
	s := start(t, Options{})
	if !s.enter() {
		t.Fatal("a running server takes no request")
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	<-s.served
	await(t, func() bool { return s.stopped() })
	select {
	case <-closed:
		t.Error("closed while a handler ran")
	case <-time.After(50 * time.Millisecond): // time for a Close that does not wait to return
	}
	s.handlers.Done()
	<-closed
	if s.enter() {
		t.Error("a closed server takes a request")
	}
}

// TestCloseCancelsAfterGrace closes while a call waits longer than the grace.
func TestCloseCancelsAfterGrace(t *testing.T) {
	s := start(t, Options{Grace: time.Millisecond, Faults: map[string]Fault{CreateDraftEvent: {DelayBefore: time.Hour, Detached: true}}})
	c := connect(t, s, false)
	done := make(chan error, 1)
	go func() {
		_, _, err := call(t.Context(), c, CreateDraftEvent, reviewDraft)
		done <- err
	}()
	await(t, func() bool { return s.Arrivals(CreateDraftEvent) == 1 })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil || s.Executions(CreateDraftEvent) != 0 {
		t.Errorf("err %v, %d executions; want an error and none", err, s.Executions(CreateDraftEvent))
	}
}

func TestServeStopsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ready := make(chan string, 1)
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, Options{Ready: func(s *Server) { ready <- s.Origin() }}) }()
	origin := <-ready
	if status, _ := do(t, http.MethodGet, origin+"/executions", "", nil); status != http.StatusOK {
		t.Errorf("status %d", status)
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestPlainEndpoints(t *testing.T) {
	s := start(t, Options{Control: true})
	c := connect(t, s, false)
	mustCall(t, c, CreateDraftEvent, reviewDraft)
	_, body := do(t, http.MethodGet, s.Origin()+"/executions", "", nil)
	var counts map[string]int
	if err := json.Unmarshal([]byte(body), &counts); err != nil || counts[CreateDraftEvent] != 1 || counts[SendInvitations] != 0 || len(counts) != 4 {
		t.Errorf("executions %s, err %v", body, err)
	}
	for _, tt := range []struct {
		name, method, path, body string
		want                     int
	}{
		{"add a tool", http.MethodPut, "/control/tools/wipe", `{"description":"d"}`, 204},
		{"describe it", http.MethodPut, "/control/tools/wipe", `{"description":"e"}`, 204},
		{"remove it", http.MethodDelete, "/control/tools/wipe", "", 204},
		{"remove it again", http.MethodDelete, "/control/tools/wipe", "", 404},
		{"unknown member", http.MethodPut, "/control/tools/wipe", `{"descr":"d"}`, 400},
		{"bad delay", http.MethodPut, "/control/faults/find_draft", `{"delayBefore":"soon"}`, 400},
		{"too large", http.MethodPut, "/control/faults/find_draft", `{"delayBefore":"` + strings.Repeat("1", maxBody) + `"}`, 413},
		{"drop once", http.MethodPut, "/control/faults/find_draft", `{"dropAfter":true,"times":1}`, 200},
	} {
		if got, text := do(t, tt.method, s.Origin()+tt.path, tt.body, nil); got != tt.want {
			t.Errorf("%s: status %d (%s), want %d", tt.name, got, text, tt.want)
		}
	}
	if _, _, err := call(t.Context(), c, FindDraft, `{"requestId":"r1"}`); err == nil {
		t.Error("the fault set over HTTP is not in force")
	}
	_, body = do(t, http.MethodGet, s.Origin()+"/arrivals", "", nil)
	if err := json.Unmarshal([]byte(body), &counts); err != nil || counts[FindDraft] != 1 {
		t.Errorf("arrivals %s, err %v", body, err)
	}
}

func TestControlIsOffByDefault(t *testing.T) {
	s := start(t, Options{})
	if got, _ := do(t, http.MethodPut, s.Origin()+"/control/tools/wipe", `{"description":"d"}`, nil); got != http.StatusNotFound {
		t.Errorf("status %d, want 404", got)
	}
}

func TestBrowsersAreRefused(t *testing.T) {
	s := start(t, Options{})
	for name, change := range map[string]func(*http.Request){
		"origin":  func(r *http.Request) { r.Header.Set("Origin", "https://evil.example") },
		"rebound": func(r *http.Request) { r.Host = "evil.example" },
	} {
		if got, _ := do(t, http.MethodGet, s.Origin()+"/executions", "", change); got != http.StatusForbidden {
			t.Errorf("%s: status %d, want 403", name, got)
		}
	}
}

// do sends one request on a connection of its own.
func do(t *testing.T, method, url, body string, change func(*http.Request)) (status int, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(req)
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// listen opens the client's event stream and returns what it hears of changed
// tools. The stream is up when listen returns.
func listen(t *testing.T, s *Server, c *client.Client) <-chan struct{} {
	t.Helper()
	changed := make(chan struct{}, 1000)
	c.OnNotification(func(n mcp.JSONRPCNotification) {
		if n.Method == mcp.MethodNotificationToolsListChanged {
			changed <- struct{}{}
		}
	})
	if c.ProtocolVersion() == mcp.ProtocolVersion20260728 {
		stop, err := c.ListenAsync(t.Context(), mcp.SubscriptionFilter{ToolsListChanged: true}, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(stop)
	}
	// Nothing tells that the stream is up but a change that is heard.
	await(t, func() bool {
		if err := s.Describe(GetAvailability, "Now described otherwise."); err != nil {
			t.Fatal(err)
		}
		select {
		case <-changed:
			return true
		case <-time.After(25 * time.Millisecond):
			return false
		}
	})
	return changed
}

// stopped reports whether Close is past waiting for connections.
func (s *Server) stopped() bool {
	s.handlersMu.Lock()
	defer s.handlersMu.Unlock()
	return s.handlersEnded
}

// await polls until ok; the test's own deadline ends it.
func await(t *testing.T, ok func() bool) {
	t.Helper()
	for !ok() {
		select {
		case <-t.Context().Done():
			t.Fatal("gave up waiting")
		case <-time.After(time.Millisecond):
		}
	}
}
