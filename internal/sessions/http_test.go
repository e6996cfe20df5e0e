package sessions

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

const okResult = `{"resultType":"complete","content":[{"type":"text","text":"ok"}]}`

func TestModern_HeadersAndMeta(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	r := echo()
	r.Name = "échо name "
	r.Params = json.RawMessage(`{"name":"échо name ","arguments":{"region":"us-west1","n":42,"deep":{"b":true},"pad":" x ","gone":null,"big":1e2}}`)
	r.Schema = json.RawMessage(`{"type":"object","properties":{"region":{"type":"string","x-mcp-header":"Region"},"n":{"type":"integer","x-mcp-header":"N"},"pad":{"type":"string","x-mcp-header":"Pad"},"gone":{"type":"string","x-mcp-header":"Gone"},"deep":{"type":"object","properties":{"b":{"type":"boolean","x-mcp-header":"B"}}}}}`)
	r.Meta = map[string]json.RawMessage{"example.com/idempotencyKey": json.RawMessage(`"k1"`)}
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r)
	succeed(t, resp, err)
	if resp.Era != EraModern || resp.ProtocolVersion != mcptest.Modern || string(resp.Result) != okResult || resp.HTTPStatus != 200 {
		t.Fatalf("%+v", resp)
	}
	got := s.Seen("tools/call")[0]
	want := mcp.StandardHeaders(mcptest.Modern, mcp.MethodToolsCall, r.Params)
	want["Mcp-Protocol-Version"] = mcptest.Modern
	for k, v := range map[string]string{"Mcp-Param-Region": "us-west1", "Mcp-Param-N": "42", "Mcp-Param-Pad": "=?base64?IHgg?=", "Mcp-Param-B": "true",
		"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Session-Id": "", "Mcp-Param-Gone": "", "Idempotency-Key": ""} {
		want[k] = v
	}
	for k, v := range want {
		if got.Header.Get(k) != v {
			t.Errorf("%s: %q, want %q", k, got.Header.Get(k), v)
		}
	}
	// The arguments go out as the very bytes that were given.
	if !strings.Contains(got.Body, `"arguments":{"region":"us-west1","n":42,"deep":{"b":true},"pad":" x ","gone":null,"big":1e2}`) {
		t.Errorf("body %s", got.Body)
	}
	var params struct {
		Meta map[string]any `json:"_meta"`
	}
	if err := json.Unmarshal(got.Params, &params); err != nil {
		t.Fatal(err)
	}
	if params.Meta["io.modelcontextprotocol/protocolVersion"] != mcptest.Modern || params.Meta["example.com/idempotencyKey"] != "k1" ||
		params.Meta["io.modelcontextprotocol/clientCapabilities"] == nil || params.Meta["io.modelcontextprotocol/clientInfo"].(map[string]any)["name"] != "bulkhead" {
		t.Errorf("_meta %v", params.Meta)
	}
}

func TestModern_ArgumentThatNoHeaderCarriesIsRefused(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	r := echo()
	r.Params = json.RawMessage(`{"name":"echo","arguments":{"n":9007199254740993}}`)
	r.Schema = json.RawMessage(`{"type":"object","properties":{"n":{"type":"integer","x-mcp-header":"N"}}}`)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r)
	expect(t, resp, err, "HEADER_ARGUMENT_INVALID", fault.Host, NotSent)
	if s.Count("tools/call") != 0 {
		t.Fatal("it was sent")
	}
}

func TestFO076_TransientErrorsDoNotPoison(t *testing.T) {
	t.Parallel()
	for _, era := range []string{mcptest.Modern, mcptest.Legacy} {
		s := mcptest.New(t, era)
		p := newPool(t, nil)
		ok := mcptest.Result(okResult)
		s.On("tools/call", ok, mcptest.Status(503, "", ""), ok, s.Hang(), ok, mcptest.Cut(), ok, mcptest.JSON(`{"jsonrpc`), ok, mcptest.JSON(``), ok)
		want := []string{"", "SERVER_ERROR", "", "TIMEOUT", "", "SERVER_UNREACHABLE", "", "ANSWER_INVALID", "", "NO_ANSWER", ""}
		for i, reason := range want {
			r := echo()
			r.Timeout = 10 * time.Second
			if reason == "TIMEOUT" {
				r.Timeout = 400 * time.Millisecond
			}
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r)
			if reason == "" {
				succeed(t, resp, err)
				continue
			}
			if f, isFault := fault.As(err); !isFault || f.Reason != reason || resp.Phase != MaybeSent {
				t.Fatalf("%s, call %d: %+v %v", era, i, resp, err)
			}
		}
		if s.Count("tools/call") != len(want) {
			t.Fatalf("%d calls arrived", s.Count("tools/call"))
		}
	}
}

func TestFO077_RedirectsOfPOST(t *testing.T) {
	t.Parallel()
	other := mcptest.New(t, mcptest.Modern)
	redirect := func(status int, to string) mcptest.Answer {
		return mcptest.WithHeader("Location", to, mcptest.Status(status, "", ""))
	}
	slash := func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		if strings.HasSuffix(r.Path, "/") {
			mcptest.Result(okResult)(w, raw, r)
			return
		}
		redirect(307, "/mcp/")(w, raw, r)
	}
	// Connecting finds the way, and the calls go there at once.
	found := func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		if strings.HasSuffix(r.Path, "/") {
			mcptest.Result(`{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}`)(w, raw, r)
			return
		}
		redirect(307, "/mcp/")(w, raw, r)
	}
	s := mcptest.New(t, mcptest.Modern)
	s.On("server/discover", found)
	s.On("tools/call", slash)
	p := newPool(t, nil)
	for range 2 {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		succeed(t, resp, err)
	}
	if seen := s.Seen("tools/call"); len(seen) != 2 || seen[0].Path != "/mcp/" || seen[1].Path != "/mcp/" {
		t.Fatalf("%+v", seen)
	}
	if seen := s.Seen("server/discover"); len(seen) != 2 || seen[0].Body != seen[1].Body || seen[1].Verb != "POST" {
		t.Fatalf("%d requests", len(seen))
	}
	for _, c := range []struct {
		status int
		to     string
		reason string
		phase  Phase
		hint   string
	}{
		{301, "/mcp/", "REDIRECTED", MaybeSent, "slash"}, {302, "/mcp/", "REDIRECTED", MaybeSent, "slash"}, {303, "/mcp/", "REDIRECTED", MaybeSent, "slash"},
		{307, other.URL, "REDIRECTED_AWAY", Answered, "origin"}, {308, "https://127.0.0.1:1/", "REDIRECTED_AWAY", Answered, "origin"},
		{307, "/mcp", "REDIRECTED", Answered, "slash"}, {308, "/mcp/", "REDIRECTED", Answered, "slash"},
	} {
		s := mcptest.New(t, mcptest.Modern)
		s.On("tools/call", redirect(c.status, c.to))
		resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		expect(t, resp, err, c.reason, fault.Server, c.phase)
		if !strings.Contains(err.Error(), c.hint) {
			t.Errorf("%d to %s: %v", c.status, c.to, err)
		}
		if n := s.Count("tools/call"); n != 1 {
			t.Errorf("%d to %s: the call was sent %d times", c.status, c.to, n)
		}
	}
	if other.Count("tools/call") != 0 {
		t.Fatal("the redirect reached another origin")
	}
}

func TestFO077_RedirectToAChallenge(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("server/discover", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		if strings.HasSuffix(r.Path, "/") {
			mcptest.WithHeader("WWW-Authenticate", `Bearer scope="x"`, mcptest.Status(401, "", ""))(w, raw, r)
			return
		}
		mcptest.WithHeader("Location", "/mcp/", mcptest.Status(308, "", ""))(w, raw, r)
	})
	resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "AUTHORIZATION_REQUIRED", fault.Server, NotSent)
	if resp.WWWAuthenticate != `Bearer scope="x"` || resp.HTTPStatus != 401 {
		t.Fatalf("%+v", resp)
	}
}

func TestRedirectLoopOfDiscovery(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("server/discover", mcptest.WithHeader("Location", "/mcp", mcptest.Status(307, "", "")))
	resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "REDIRECT_LOOP", fault.Server, NotSent)
	if n := s.Count("server/discover"); n != maxHops+1 {
		t.Fatalf("%d requests", n)
	}
}

// Silence is no reason to give up before the deadline, whatever goes on below; a
// connection that breaks meanwhile leaves the outcome open.
func TestFO078_SilenceAndReset(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	release := make(chan struct{})
	s.On("tools/call", s.After(release, mcptest.Result(okResult)), s.After(release, mcptest.Cut()), mcptest.StreamThen(mcptest.Cut(), ": working\n\n"))
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	time.AfterFunc(600*time.Millisecond, func() { close(release) })
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "SERVER_UNREACHABLE", fault.Transport, MaybeSent)
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "ANSWER_BROKEN", fault.Transport, MaybeSent)
}

func TestFO079_StalePooledConnection(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	for range 20 {
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		s.CloseIdle()
		time.Sleep(10 * time.Millisecond) // the closure reaches the client
	}
	if s.Count("tools/call") != 20 {
		t.Fatalf("%d calls arrived", s.Count("tools/call"))
	}
	// A server that takes the request and closes without an answer got it once.
	s.On("tools/call", mcptest.Cut())
	before := s.Count("tools/call")
	resp, err := p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "SERVER_UNREACHABLE", fault.Transport, MaybeSent)
	if s.Count("tools/call") != before+1 {
		t.Fatal("it was sent again")
	}
}

func TestFO082_AnswersToNotifications(t *testing.T) {
	t.Parallel()
	for name, a := range map[string]mcptest.Answer{
		"202": mcptest.Status(202, "", ""), "204": mcptest.Status(204, "", ""), "text": mcptest.Status(200, "text/plain", "ok"),
		"json": mcptest.JSON(`{}`), "500": mcptest.Status(500, "", "oops"),
	} {
		s := mcptest.New(t, mcptest.Legacy)
		s.On("notifications/initialized", a)
		resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		if err != nil || resp.Result == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFO083_SessionLost(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]mcptest.Answer{
		"empty body": mcptest.Status(404, "", ""), "json-rpc body": mcptest.StatusError(404, -32001, "session not found"),
	} {
		s := mcptest.New(t, mcptest.Legacy)
		s.On("initialize",
			mcptest.WithHeader("Mcp-Session-Id", "one", mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}`)),
			mcptest.WithHeader("Mcp-Session-Id", "two", mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}`)))
		byID := func(next mcptest.Answer) mcptest.Answer {
			return func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
				if r.Header.Get("Mcp-Session-Id") != "two" {
					lost(w, raw, r)
					return
				}
				next(w, raw, r)
			}
		}
		s.On("tools/call", mcptest.Result(okResult), byID(mcptest.Result(okResult)))
		var changes sync.Map
		p := newPool(t, nil)
		p.OnChange(func(c Change) { changes.Store(c, true) })
		k, target := keyOf(t, "a"), httpTarget(s.URL)
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		resp, err = p.Do(t.Context(), k, target, echo())
		expect(t, resp, err, "SESSION_LOST", fault.Protocol, Answered)
		if n := s.Count("tools/call"); n != 2 {
			t.Fatalf("%s: the lost call was sent %d times", name, n-1)
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if resp, err := p.Do(context.Background(), k, target, echo()); err != nil || resp.Result == nil {
					t.Errorf("%s: after: %v", name, err)
				}
			})
		}
		wg.Wait()
		if s.Count("initialize") != 2 {
			t.Fatalf("%s: %d handshakes", name, s.Count("initialize"))
		}
		eventually(t, "the gap is told", func() bool { _, ok := changes.Load(Change{Key: k}); return ok })
	}
	t.Run("a list is read again", func(t *testing.T) {
		s := mcptest.New(t, mcptest.Legacy)
		s.On("tools/list", mcptest.Status(404, "", ""), mcptest.Result(`{"tools":[{"name":"a"}]}`))
		l, err := newPool(t, nil).List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), KindTool)
		if err != nil || len(l.Items) != 1 || s.Count("initialize") != 2 {
			t.Fatalf("%+v %v", l, err)
		}
	})
}

func TestFO088_TotalLimitHoldsWithAndWithoutProgress(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	progress := func(w http.ResponseWriter, raw *http.Request, _ *mcptest.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for raw.Context().Err() == nil {
			fmt.Fprint(w, mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"foreign","progress":1}}`))
			w.(http.Flusher).Flush()
			time.Sleep(10 * time.Millisecond)
		}
	}
	s.On("tools/call", s.Hang(), progress)
	for range 2 {
		r := echo()
		r.Timeout = 400 * time.Millisecond
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r)
		expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
		if !fault.Is(err, fault.Deadline) {
			t.Fatal(err)
		}
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		answer mcptest.Answer
		reason string
		layer  fault.Layer
		phase  Phase
		kind   fault.Kind
	}{
		{mcptest.WithHeader("WWW-Authenticate", "Bearer", mcptest.Status(401, "", "")), "AUTHORIZATION_REQUIRED", fault.Server, Answered, fault.Precondition},
		{mcptest.WithHeader("WWW-Authenticate", `Bearer error="insufficient_scope"`, mcptest.Status(403, "", "")), "FORBIDDEN_BY_SERVER", fault.Server, Answered, fault.Precondition},
		{mcptest.WithHeader("Retry-After", "7", mcptest.Status(429, "", "")), "RATE_LIMITED_BY_SERVER", fault.Server, Answered, fault.Exhausted},
		{mcptest.Status(413, "", ""), "SERVER_REFUSED", fault.Server, Answered, fault.Unavailable},
		{mcptest.WithHeader("Retry-After", "7", mcptest.Status(503, "", "")), "SERVER_ERROR", fault.Server, MaybeSent, fault.Unavailable},
		{mcptest.Status(504, "text/html", "secret of the proxy"), "SERVER_ERROR", fault.Server, MaybeSent, fault.Unavailable},
	} {
		s := mcptest.New(t, mcptest.Modern)
		s.On("tools/call", c.answer)
		resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		expect(t, resp, err, c.reason, c.layer, c.phase)
		f, _ := fault.As(err)
		if f.Kind != c.kind || strings.Contains(f.Detail(), "secret") {
			t.Errorf("%s: %v %s", c.reason, f.Kind, f.Detail())
		}
		if (c.reason == "RATE_LIMITED_BY_SERVER" || strings.Contains(f.Message, "503")) && (f.RetryAfter != 7*time.Second || resp.RetryAfter != 7*time.Second) {
			t.Errorf("%s: retry after %v", c.reason, f.RetryAfter)
		}
	}
}

func TestLegacy_CancelIsTold(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, nil)
	s.On("tools/call", s.Hang())
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		s.Wait(t, "tools/call", 1)
		cancel()
	}()
	resp, err := p.Do(ctx, keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "CANCELLED", fault.Host, MaybeSent)
	s.Wait(t, "notifications/cancelled", 1)
	var params struct{ RequestID json.RawMessage }
	if json.Unmarshal(s.Seen("notifications/cancelled")[0].Params, &params) != nil || string(params.RequestID) != string(s.Seen("tools/call")[0].ID) {
		t.Fatalf("%s", s.Seen("notifications/cancelled")[0].Body)
	}
}

func TestBeforeSend(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	late := fault.New(fault.Precondition, "TOO_LATE", "past the time to send")
	r := echo()
	r.BeforeSend = func() error { return late }
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r)
	expect(t, resp, err, "TOO_LATE", fault.Host, NotSent)
	if s.Count("tools/call") != 0 {
		t.Fatal("it arrived")
	}
	resp, err = p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
}

func TestUnreachableIsNotSent(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	s.Close()
	p.egress.CloseIdle()
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "SERVER_UNREACHABLE", fault.Transport, NotSent)
}

func TestRealServer(t *testing.T) {
	t.Parallel()
	real := mcptest.NewReal(t)
	for _, versions := range [][]string{nil, {"2025-11-25"}, {"2025-06-18"}} {
		p := newPool(t, nil)
		target := httpTarget(real.URL)
		target.Versions = versions
		k := keyOf(t, "a")
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		if !strings.Contains(string(resp.Result), `"hi"`) {
			t.Fatalf("%s", resp.Result)
		}
		l, err := p.List(t.Context(), k, target, KindTool)
		if err != nil || len(l.Items) < 2 || !l.ListChanged || len(l.ServerInfo) == 0 {
			t.Fatalf("%+v %v", l, err)
		}
		r := Request{Method: "tools/call", Name: "slow", Params: json.RawMessage(`{"name":"slow","arguments":{}}`), Timeout: 400 * time.Millisecond}
		resp, err = p.Do(t.Context(), k, target, r)
		expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
		r = Request{Method: "tools/call", Name: "none", Params: json.RawMessage(`{"name":"none","arguments":{}}`)}
		if resp, err = p.Do(t.Context(), k, target, r); err != nil || resp.Error == nil || resp.Phase != Answered {
			t.Fatalf("%+v %v", resp, err)
		}
	}
	if real.Calls.Load() != 3 {
		t.Fatalf("%d executions", real.Calls.Load())
	}
}

func TestStreamedAnswersReuseTheConnection(t *testing.T) {
	t.Parallel()
	var opened atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		m, _ := parseMessage(body)
		result := okResult
		if m.method == "server/discover" {
			result = `{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}`
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":%s}\n\n", m.id, result)
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	s.Start()
	defer s.Close()
	p := newPool(t, nil)
	for range 50 {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		succeed(t, resp, err)
	}
	if n := opened.Load(); n > 10 {
		t.Fatalf("%d connections for 51 requests", n)
	}
	p.egress.CloseIdle()
}

func TestHTTP2(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		m, _ := parseMessage(body)
		result := okResult
		switch {
		case r.ProtoMajor != 2:
			w.WriteHeader(http.StatusHTTPVersionNotSupported)
			return
		case m.method == "server/discover":
			result = `{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}`
		case m.method == "": // the headers of the refused one
		case calls.Add(1) == 2:
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":%s}`, m.id, result)
	}))
	s.EnableHTTP2 = true
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	defer s.Close()
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	e := egress.New(egress.Policy{Development: true, Roots: roots})
	defer e.CloseIdle()
	p := newPool(t, func(c *PoolConfig) { c.Egress = e })
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "SERVER_UNREACHABLE", fault.Transport, MaybeSent)
	r := echo()
	r.BeforeSend = func() error { return fault.New(fault.Precondition, "TOO_LATE", "late") }
	resp, err = p.Do(t.Context(), k, target, r)
	expect(t, resp, err, "TOO_LATE", fault.Host, NotSent)
	resp, err = p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	if calls.Load() != 3 {
		t.Fatalf("%d calls arrived", calls.Load())
	}
}

// What a failed round trip proves about the request.
func TestUnanswered(t *testing.T) {
	t.Parallel()
	write := &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}
	for _, c := range []struct {
		name    string
		started bool
		err     error
		phase   Phase
		stale   bool
	}{
		{"nothing written, connection reset", false, &net.OpError{Op: "read", Err: syscall.ECONNRESET}, NotSent, true},
		{"nothing written, no route", false, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, NotSent, false},
		{"body not taken whole", true, fmt.Errorf("http: %w", write), NotSent, true},
		{"body not taken whole by readfrom", true, &net.OpError{Op: "readfrom", Err: write}, NotSent, true},
		{"body out, connection reset", true, &net.OpError{Op: "read", Err: syscall.ECONNRESET}, MaybeSent, false},
		{"body out, end of file", true, io.EOF, MaybeSent, false},
	} {
		body := &sendBody{data: []byte("{}")}
		if c.started {
			body.Read(make([]byte, 8)) //nolint:errcheck // it cannot fail
		}
		rep, err := (&httpWire{}).unanswered(t.Context(), body, c.err)
		if rep.phase != c.phase || errors.Is(err, errStale) != c.stale {
			t.Errorf("%s: %v, %v", c.name, rep.phase, err)
		}
		if n, err := body.Read(make([]byte, 8)); n != 0 || err == nil {
			t.Errorf("%s: the body still gives bytes", c.name)
		}
	}
}
