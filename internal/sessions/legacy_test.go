package sessions

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

func initialized(version string) mcptest.Answer {
	return mcptest.WithHeader("Mcp-Session-Id", "session-1", mcptest.Result(`{"protocolVersion":"`+version+`","capabilities":{"tools":{}}}`))
}

// A counter-offer is taken when the contract has it, and otherwise the session that
// came with it is deleted, with the user's credentials.
func TestLegacy_CounterOffers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, offer, reason string
		change              func(*Target)
	}{
		{"2025-06-18", "2025-06-18", "", func(*Target) {}},
		{"2025-03-26", "2025-03-26", "", func(*Target) {}},
		{"2024-11-05", "2024-11-05", "", func(*Target) {}},
		{"a version with no handshake", "2026-07-28", "VERSION_UNSUPPORTED", func(*Target) {}},
		{"an unknown version", "2031-01-01", "VERSION_UNSUPPORTED", func(*Target) {}},
		{"no version", "", "VERSION_UNSUPPORTED", func(*Target) {}},
		{"one that the contract lacks", "2025-03-26", "VERSION_UNSUPPORTED", func(t *Target) { t.Versions = []string{"2025-11-25", "2025-06-18"} }},
		{"an older one than before", "2025-03-26", "DOWNGRADE_REFUSED", func(t *Target) { t.DowngradeForbidden, t.KnownVersion = true, "2025-11-25" }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Legacy)
			s.On("initialize", initialized(c.offer))
			p := newPool(t, func(cfg *PoolConfig) { cfg.Credentials = bearer("t-") })
			target := httpTarget(s.URL)
			c.change(&target)
			resp, err := p.Do(t.Context(), keyOf(t, "a"), target, echo())
			if c.reason == "" {
				succeed(t, resp, err)
				call := s.Seen("tools/call")[0].Header
				if resp.ProtocolVersion != c.offer || call.Get("Mcp-Protocol-Version") != c.offer || call.Get("Mcp-Session-Id") != "session-1" {
					t.Fatalf("%+v %v", resp, call)
				}
				return
			}
			expect(t, resp, err, c.reason, fault.Protocol, NotSent)
			s.Wait(t, "DELETE", 1)
			got := s.Seen("DELETE")[0].Header
			if got.Get("Mcp-Session-Id") != "session-1" || got.Get("Authorization") != "Bearer t-a" {
				t.Errorf("%v", got)
			}
			if n := s.Count("notifications/initialized") + s.Count("tools/call"); n != 0 {
				t.Errorf("%d messages after the refusal", n)
			}
		})
	}
}

func TestLegacy_InitializeIsNotCancelled(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.On("initialize", s.Hang())
	p := newPool(t, func(c *PoolConfig) { c.Limits.Connect = time.Second })
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "TIMEOUT", fault.Transport, NotSent)
	if err := p.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.Count("initialize") != 1 || s.Count("notifications/cancelled") != 0 {
		t.Errorf("%d handshakes, %d cancelled", s.Count("initialize"), s.Count("notifications/cancelled"))
	}
}

// What refuses the handshake is shown with the versions it names.
func TestLegacy_RefusedHandshakeIsShown(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.On("initialize", mcptest.Status(400, "application/json", `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"use 2026-07-28","data":{"supported":["2026-07-28"]}}}`))
	target := httpTarget(s.URL)
	target.Versions = []string{"2025-11-25"}
	resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), target, echo())
	expect(t, resp, err, "INITIALIZE_REFUSED", fault.Protocol, NotSent)
	if f, _ := fault.As(err); !strings.Contains(f.Message, "use 2026-07-28") || f.Metadata["supported"] != "2026-07-28" || f.Metadata["code"] != "-32022" {
		t.Errorf("%+v", f)
	}
	if s.Count("GET") != 0 {
		t.Error("a modern server was taken for one of HTTP+SSE")
	}
}

// A URL of HTTP+SSE that was registered as http is told apart, and only told: it is
// another registration. Only 400, 404 and 405 leave the question open.
func TestLegacy_ServerOfHTTPSSEIsNamed(t *testing.T) {
	t.Parallel()
	refused := func(code int) mcptest.Answer {
		return mcptest.Status(200, "application/json", fmt.Sprintf(`{"jsonrpc":"2.0","id":$ID,"error":{"code":%d,"message":"no"}}`, code))
	}
	status := func(code int, a mcptest.Answer) mcptest.Answer {
		return func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) { a(statusWriter{w, code}, raw, r) }
	}
	for _, c := range []struct {
		name, reason string
		initialize   mcptest.Answer
		looked       bool // GET was tried
		named        bool // sse is named
		page         bool // GET yields something else
	}{
		{"405", "TRANSPORT_UNSUPPORTED", mcptest.Status(405, "", ""), true, true, false},
		{"404", "TRANSPORT_UNSUPPORTED", mcptest.Status(404, "text/html", "<html>"), true, true, false},
		{"400", "TRANSPORT_UNSUPPORTED", mcptest.Status(400, "", ""), true, true, false},
		{"400 with an old error", "TRANSPORT_UNSUPPORTED", status(400, refused(-32600)), true, true, false},
		{"405, but no event stream", "TRANSPORT_UNSUPPORTED", mcptest.Status(405, "", ""), true, false, true},
		{"404 of an endpoint for JSON-RPC", "INITIALIZE_REFUSED", status(404, refused(-32601)), false, false, false},
		{"400 with a modern error", "INITIALIZE_REFUSED", status(400, refused(-32021)), false, false, false},
		{"406", "TRANSPORT_UNSUPPORTED", mcptest.Status(406, "", ""), false, false, false},
		{"401", "AUTHORIZATION_REQUIRED", mcptest.Status(401, "", ""), false, false, false},
		{"403", "FORBIDDEN_BY_SERVER", mcptest.Status(403, "", ""), false, false, false},
		{"429", "RATE_LIMITED_BY_SERVER", mcptest.Status(429, "", ""), false, false, false},
		{"503", "SERVER_ERROR", mcptest.Status(503, "", ""), false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.NewSSE(t, "2024-11-05")
			s.On("server/discover", mcptest.Status(405, "", ""))
			s.On("initialize", c.initialize)
			if c.page {
				s.On("GET", mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/message"}`)))
			}
			p := newPool(t, func(cfg *PoolConfig) { cfg.Credentials = bearer("t-") })
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			f, ok := fault.As(err)
			if !ok || f.Reason != c.reason || resp.Phase != NotSent || strings.Contains(f.Message, "register the server as sse") != c.named {
				t.Fatalf("%+v %v", resp, err)
			}
			gets := s.Seen("GET")
			if len(gets) > 0 != c.looked || c.looked && (len(gets) != 1 || gets[0].Header.Get("Authorization") != "Bearer t-a") {
				t.Errorf("%d times GET", len(gets))
			}
			if s.Count("initialize") != 1 || s.Count("tools/call") != 0 {
				t.Error("the other transport was spoken")
			}
		})
	}
}

// statusWriter answers with a status of its own.
type statusWriter struct {
	http.ResponseWriter
	code int
}

func (w statusWriter) WriteHeader(int) { w.ResponseWriter.WriteHeader(w.code) }

// A stream that broke in the middle of an event goes on after the last whole one.
func TestResume_AfterABrokenConnection(t *testing.T) {
	t.Parallel()
	answer := mcptest.ResultEvent(okResult)
	for _, c := range []struct {
		name   string
		first  []string
		last   mcptest.Answer
		after  string // Last-Event-ID of each attempt
		resume []mcptest.Answer
		reason string // of the failure, empty for success
		gets   int
	}{
		{"cut after an event", []string{"id: e1\ndata:\n\n"}, mcptest.Cut(), "e1", []mcptest.Answer{mcptest.Stream(answer)}, "", 1},
		{"cut in an event", []string{"id: e1\ndata:\n\n", "id: e2\n" + answer[:20]}, mcptest.Cut(), "e1", []mcptest.Answer{mcptest.Stream(answer)}, "", 1},
		{"ended to make the client poll", []string{"id: e1\nretry: 20\ndata:\n\n"}, nil, "e1",
			[]mcptest.Answer{mcptest.Stream("id: e1\ndata:\n\n"), mcptest.Stream("retry: 1\n\n"), mcptest.Stream(answer)}, "", 3},
		{"a passing outage", []string{"id: e1\nretry: 20\ndata:\n\n"}, mcptest.Cut(), "e1",
			[]mcptest.Answer{mcptest.Status(503, "", ""), mcptest.Cut(), mcptest.Stream(answer)}, "", 3},
		{"never anything new", []string{"id: e1\nretry: 1\ndata:\n\n"}, nil, "e1", []mcptest.Answer{mcptest.Stream(": nothing\n\n")}, "STREAM_ENDED", resumes},
		{"not offered", []string{"id: e1\nretry: 20\ndata:\n\n"}, mcptest.Cut(), "e1", []mcptest.Answer{mcptest.Status(405, "", "")}, "STREAM_ENDED", 1},
		{"session forgotten", []string{"id: e1\nretry: 20\ndata:\n\n"}, mcptest.Cut(), "e1", []mcptest.Answer{mcptest.Status(404, "", "")}, "STREAM_ENDED", 1},
		{"no id, cut", []string{": nothing\n\n"}, mcptest.Cut(), "", nil, "ANSWER_BROKEN", 0},
		{"no id, ended", []string{": nothing\n\n"}, nil, "", nil, "STREAM_ENDED", 0},
		{"id of a broken event only", []string{"id: e1\n"}, mcptest.Cut(), "", nil, "ANSWER_BROKEN", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Legacy)
			id := make(chan string, 1)
			s.On("tools/call", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
				id <- string(r.ID)
				mcptest.StreamThen(c.last, c.first...)(w, raw, r)
			}, mcptest.Result(okResult))
			answers := make([]mcptest.Answer, len(c.resume))
			for i, a := range c.resume {
				answers[i] = func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
					select {
					case got := <-id:
						r.ID = []byte(got)
						id <- got
					default:
					}
					a(w, raw, r)
				}
			}
			if len(answers) > 0 {
				s.On("GET", answers...)
			}
			p := newPool(t, nil)
			k := keyOf(t, "a")
			resp, err := p.Do(t.Context(), k, httpTarget(s.URL), echo())
			if c.reason == "" {
				succeed(t, resp, err)
			} else {
				expect(t, resp, err, c.reason, fault.Transport, MaybeSent)
			}
			gets := s.Seen("GET")
			if len(gets) != c.gets {
				t.Errorf("%d attempts, want %d", len(gets), c.gets)
			}
			for _, g := range gets {
				if g.Header.Get("Last-Event-Id") != c.after || g.Header.Get("Mcp-Session-Id") != "session-1" || g.Header.Get("Accept") != "text/event-stream" {
					t.Errorf("%v", g.Header)
				}
			}
			if s.Count("tools/call") != 1 {
				t.Error("the call was sent again")
			}
			if c.name == "session forgotten" {
				resp, err := p.Do(t.Context(), k, httpTarget(s.URL), echo())
				succeed(t, resp, err)
				if s.Count("initialize") != 2 || s.Count("DELETE") != 0 {
					t.Errorf("%d handshakes, %d deleted", s.Count("initialize"), s.Count("DELETE"))
				}
			}
		})
	}
}

// Modern streams are never taken up again, whatever ids they tell.
func TestResume_NotInTheModernEra(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/call", mcptest.StreamThen(mcptest.Cut(), "id: e1\ndata:\n\n"))
	resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "ANSWER_BROKEN", fault.Transport, MaybeSent)
	if s.Count("GET") != 0 {
		t.Error("it was resumed")
	}
}

// The pause before taking up a stream is the one that the server asked for.
func TestResume_WaitsAsLongAsTheServerWants(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	var ended, resumed time.Time
	s.On("tools/call", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		s.On("GET", func(w http.ResponseWriter, raw *http.Request, _ *mcptest.Request) {
			resumed = time.Now()
			mcptest.Stream(mcptest.ResultEvent(okResult))(w, raw, r)
		})
		mcptest.Stream("id: e1\nretry: 400\ndata:\n\n")(w, raw, r)
		ended = time.Now()
	})
	resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	if waited := resumed.Sub(ended); waited < 350*time.Millisecond {
		t.Errorf("waited %v", waited)
	}
}

// The stream of changes is taken up after its last event. A server that does not
// know the event any more is asked without it.
func TestWatcher_TakesUpAfterTheLastEvent(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{"listChanged":true}}`)
	s.On("GET", mcptest.StreamThen(mcptest.Cut(), "id: g1\ndata:\n\n", "id: g2\ndata: {"), mcptest.Stream("id: g3\ndata:\n\n"), mcptest.Status(400, "", ""), mcptest.StreamThen(s.Hang()))
	p, seen := watchedPool(t, nil)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	s.Wait(t, "GET", 4)
	var got []string
	for _, r := range s.Seen("GET") {
		got = append(got, r.Header.Get("Last-Event-Id"))
	}
	if strings.Join(got, ",") != ",g1,g3," {
		t.Errorf("taken up after %q", got)
	}
	eventually(t, "the gaps are told", func() bool { return seen.count("") >= 1 })
}

func TestWatcher_ForgottenSessionEndsTheConnection(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{"listChanged":true}}`)
	s.On("GET", mcptest.Stream(": bye\n\n"), mcptest.Status(404, "", ""))
	p, seen := watchedPool(t, nil)
	k := keyOf(t, "a")
	resp, err := p.Do(t.Context(), k, httpTarget(s.URL), echo())
	succeed(t, resp, err)
	eventually(t, "the connection has ended", func() bool { return p.Connections(k.Tenant, anyKey)[0].State == StateClosed })
	eventually(t, "the gap is told", func() bool { return seen.count("") >= 1 })
	if s.Count("DELETE") != 0 {
		t.Error("a session was deleted that the server does not have")
	}
}

// Batches are read where revision 2025-03-26 lets servers send them: in a body, on
// the stream of a request and on that of changes; what they ask is answered.
func TestLegacy_Batches(t *testing.T) {
	t.Parallel()
	batch := `[{"jsonrpc":"2.0","method":"notifications/tools/list_changed"},{"jsonrpc":"2.0","id":"s1","method":"ping"},{"jsonrpc":"2.0","id":$ID,"result":` + okResult + `}]`
	for _, version := range []string{"2025-03-26", "2025-06-18"} {
		for name, c := range map[string]struct {
			call   mcptest.Answer
			reason string // with another revision
		}{
			"body":   {mcptest.JSON(batch), "ANSWER_INVALID"},
			"stream": {mcptest.Stream(mcptest.Event(batch)), "STREAM_ENDED"},
		} {
			s := mcptest.New(t, version)
			s.Capabilities(`{"tools":{"listChanged":true}}`)
			s.On("GET", mcptest.StreamThen(s.Hang(), mcptest.Event(`[{"jsonrpc":"2.0","id":"g1","method":"ping"},{"jsonrpc":"2.0","method":"notifications/prompts/list_changed"}]`)))
			s.On("tools/call", c.call)
			p, seen := watchedPool(t, nil)
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			if version != "2025-03-26" {
				if f, ok := fault.As(err); !ok || f.Reason != c.reason || resp.Phase != MaybeSent {
					t.Errorf("%s %s: %+v %v", version, name, resp, err)
				}
				continue
			}
			succeed(t, resp, err)
			s.Wait(t, "POST", 2)
			eventually(t, "both changes are told", func() bool { return seen.count(KindTool) >= 1 && seen.count(KindPrompt) >= 1 })
			for _, r := range s.Seen("POST") {
				if r.Body != `{"jsonrpc":"2.0","id":"s1","result":{}}` && r.Body != `{"jsonrpc":"2.0","id":"g1","result":{}}` {
					t.Errorf("%s: %s", name, r.Body)
				}
			}
		}
	}
}

// What a server asks is bounded for each minute, so that pings never end a call that
// runs for hours.
func TestRate(t *testing.T) {
	t.Parallel()
	r, now := rate{most: 3}, time.Unix(1_700_000_000, 0)
	for i, want := range []bool{false, false, false, true, true} {
		if r.over(1, now.Add(time.Duration(i)*time.Second)) != want {
			t.Fatalf("request %d: %v", i, !want)
		}
	}
	for hour := range 24 * 60 {
		now = now.Add(time.Minute)
		if r.over(3, now) {
			t.Fatalf("minute %d is over", hour)
		}
	}
	if !r.over(1, now) {
		t.Error("four in a minute are not over")
	}
}

func TestLegacy_FloodOfQuestionsEndsTheCall(t *testing.T) {
	t.Parallel()
	for _, method := range []string{"ping", "roots/list", "elicitation/create", "sampling/createMessage"} {
		for _, n := range []int{64, 65} {
			s := mcptest.New(t, mcptest.Legacy)
			question := "id: e1\n" + mcptest.Event(`{"jsonrpc":"2.0","id":1,"method":"`+method+`"}`)
			s.On("tools/call", mcptest.Stream(strings.Repeat(question, n), mcptest.ResultEvent(okResult)))
			resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), declaring(s.URL, everything), echo())
			if n == 64 {
				succeed(t, resp, err)
				continue
			}
			expect(t, resp, err, "TOO_MANY_QUESTIONS", fault.Server, MaybeSent)
			if s.Count("tools/call") != 1 || s.Count("GET") > 1 {
				t.Errorf("%s: it was taken up again", method)
			}
		}
	}
}

func TestPing_IdleConnections(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		start  func(t *testing.T) *mcptest.Server
		target func(string) Target
	}{
		"HTTP+SSE": {func(t *testing.T) *mcptest.Server { return mcptest.NewSSE(t, "2024-11-05") }, sseTarget},
		"Streamable HTTP with a stream": {func(t *testing.T) *mcptest.Server {
			s := mcptest.New(t, mcptest.Legacy)
			s.Capabilities(`{"tools":{"listChanged":true}}`)
			s.On("GET", mcptest.StreamThen(s.Hang()))
			return s
		}, httpTarget},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := c.start(t) // which refuses ping as unknown: a sign of life, too
			p, seen := watchedPool(t, func(l *Limits) { l.Ping, l.Probe = 20*time.Millisecond, 5*time.Second })
			k := keyOf(t, "a")
			resp, err := p.Do(t.Context(), k, c.target(s.URL), echo())
			succeed(t, resp, err)
			used := p.Connections(k.Tenant, anyKey)[0].LastUsed
			s.Wait(t, "ping", 4)
			if info := p.Connections(k.Tenant, anyKey)[0]; info.State != StateInitialized || !info.LastUsed.Equal(used) {
				t.Errorf("%+v", info)
			}
			s.On("ping", mcptest.Status(502, "", ""))
			eventually(t, "the connection has ended", func() bool { return p.Connections(k.Tenant, anyKey)[0].State == StateClosed })
			if info := p.Connections(k.Tenant, anyKey)[0]; info.Reason != "the server no longer answers" {
				t.Errorf("%+v", info)
			}
			eventually(t, "the gap is told", func() bool { return seen.count("") >= 1 })
			if s.Count("notifications/cancelled") != 0 {
				t.Error("a ping was cancelled")
			}
		})
	}
}

func TestPing_OnlyWhereItTellsSomething(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		version string
		ping    time.Duration
	}{"modern": {mcptest.Modern, 10 * time.Millisecond}, "no stream": {mcptest.Legacy, 10 * time.Millisecond}, "off": {mcptest.Legacy, -1}} {
		s := mcptest.New(t, c.version)
		if name != "no stream" {
			s.Capabilities(`{"tools":{"listChanged":true}}`)
			s.On("GET", mcptest.StreamThen(s.Hang()))
			s.On("subscriptions/listen", mcptest.StreamThen(s.Hang()))
		}
		p, _ := watchedPool(t, func(l *Limits) { l.Ping = c.ping })
		k := keyOf(t, "a")
		resp, err := p.Do(t.Context(), k, httpTarget(s.URL), echo())
		succeed(t, resp, err)
		if name == "off" {
			eventually(t, "the stream is open", func() bool { return p.Connections(k.Tenant, anyKey)[0].Watching })
		}
		for _, conn := range p.matching(anyKey) {
			if conn.pingDue(time.Now().Add(time.Hour)) {
				t.Errorf("%s: it is pinged", name)
			}
		}
	}
}

// A server that refuses our version where it should name its own is taken at what
// it names: one step down, once, and the next connection begins there.
func TestLegacy_StepsDownToAVersionThatIsNamed(t *testing.T) {
	t.Parallel()
	const named = "Unsupported protocol version: 2025-11-25. Supported versions: 2024-11-05, 2025-03-26, 2025-06-18"
	for name, c := range map[string]struct {
		refusal mcptest.Answer
		steps   bool
	}{
		"in the message":     {mcptest.StatusError(400, -32600, named), true},
		"in a plain text":    {mcptest.Status(400, "text/plain", named), true},
		"in the data":        {mcptest.Error(-32602, "no", `{"supported":["2025-06-18","2025-03-26"],"requested":"2025-11-25"}`), true},
		"nothing named":      {mcptest.StatusError(400, -32600, "no"), false},
		"only the same":      {mcptest.StatusError(400, -32600, "not 2025-11-25"), false},
		"an outage names it": {mcptest.Status(503, "text/plain", named), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Legacy)
			s.On("server/discover", mcptest.Status(405, "", ""))
			s.On("initialize", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
				if strings.Contains(r.Body, `"2025-06-18"`) {
					initialized("2025-06-18")(w, raw, r)
					return
				}
				c.refusal(w, raw, r)
			})
			p := newPool(t, nil)
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			if !c.steps {
				if err == nil || s.Count("initialize") != 1 {
					t.Fatalf("%+v, %v after %d handshakes", resp, err, s.Count("initialize"))
				}
				return
			}
			succeed(t, resp, err)
			if resp.ProtocolVersion != "2025-06-18" || s.Count("initialize") != 2 || s.Seen("tools/call")[0].Header.Get("Mcp-Protocol-Version") != "2025-06-18" {
				t.Fatalf("%+v after %d handshakes", resp, s.Count("initialize"))
			}
			resp, err = p.Do(t.Context(), keyOf(t, "b"), httpTarget(s.URL), echo())
			if succeed(t, resp, err); s.Count("initialize") != 3 {
				t.Errorf("the next connection needs %d handshakes", s.Count("initialize")-2)
			}
		})
	}
	t.Run("one step only", func(t *testing.T) {
		t.Parallel()
		s := mcptest.New(t, mcptest.Legacy)
		s.On("initialize", mcptest.StatusError(400, -32600, named))
		_, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		if err == nil || s.Count("initialize") != 2 {
			t.Errorf("%v after %d handshakes", err, s.Count("initialize"))
		}
	})
}
