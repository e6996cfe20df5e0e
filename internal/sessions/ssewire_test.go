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
	"github.com/bulkhead-mcp/bulkhead/test/npm"
)

func sseTarget(url string) Target {
	return Target{ServerName: "test", Transport: TransportSSE, URL: url}
}

func TestSSE_RealServers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		start   func(t *testing.T) string
		request Request
		want    string
	}{
		{"mcp-go", func(t *testing.T) string { return mcptest.NewRealSSE(t).URL }, echo(), `"text":"hi"`},
		{"server-everything", func(t *testing.T) string { return npm.EverythingSSE(t) },
			Request{Method: "tools/call", Name: "echo", Params: json.RawMessage(`{"name":"echo","arguments":{"message":"over the stream"}}`)}, "Echo: over the stream"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p, k, target := newPool(t, nil), keyOf(t, "a"), sseTarget(c.start(t))
			l, err := p.List(t.Context(), k, target, KindTool)
			if err != nil || len(l.Items) < 2 || l.Era != EraLegacy {
				t.Fatalf("%+v %v", l, err)
			}
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					resp, err := p.Do(t.Context(), k, target, c.request)
					if err != nil || resp.Phase != Answered || !strings.Contains(string(resp.Result), c.want) {
						t.Errorf("%+v %v", resp, err)
					}
					resp.Release()
				})
			}
			wg.Wait()
			all := p.Connections(k.Tenant, anyKey)
			if len(all) != 1 || all[0].Transport != TransportSSE || !all[0].Watching || all[0].Stray != 0 || all[0].Garbage != 0 {
				t.Fatalf("%+v", all)
			}
		})
	}
}

func TestSSE_RealServerAnnouncesAndCancels(t *testing.T) {
	t.Parallel()
	real := mcptest.NewRealSSE(t)
	p, seen := watchedPool(t, nil)
	k, target := keyOf(t, "a"), sseTarget(real.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	real.AddTool("later")
	eventually(t, "the change is told", func() bool { return seen.count(KindTool) == 1 })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		resp, err = p.Do(ctx, k, target, Request{Method: "tools/call", Name: "slow", Params: json.RawMessage(`{"name":"slow"}`)})
	}()
	eventually(t, "the call runs", func() bool { return real.Waiting.Load() == 1 })
	cancel()
	<-ended
	expect(t, resp, err, "CANCELLED", fault.Host, MaybeSent)
	eventually(t, "the server ended the call", func() bool { return real.Waiting.Load() == 0 })
	resp, err = p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
}

func TestSSE_Exchange(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"2024-11-05", "2025-03-26", "2025-11-25"} {
		s := mcptest.NewSSE(t, version)
		p := newPool(t, func(c *PoolConfig) { c.Credentials = bearer("t-") })
		k := keyOf(t, "a")
		sent := 0
		r := echo()
		r.BeforeSend = func() error { sent++; return nil }
		resp, err := p.Do(t.Context(), k, sseTarget(s.URL), r)
		succeed(t, resp, err)
		if resp.Era != EraLegacy || resp.ProtocolVersion != version || sent != 1 || string(resp.Result) != okResult {
			t.Fatalf("%+v, sent %d times", resp, sent)
		}
		if s.Count("server/discover") != 0 {
			t.Error("it was probed for the modern era")
		}
		get, call := s.Seen("GET")[0], s.Seen("tools/call")[0]
		if get.Header.Get("Accept") != "text/event-stream" || call.Path != "/message" || call.Header.Get("Content-Type") != "application/json" ||
			call.Header.Get("Mcp-Protocol-Version") != version || call.Header.Get("Mcp-Session-Id") != "" {
			t.Errorf("%v %s %v", get.Header, call.Path, call.Header)
		}
		for _, m := range []string{"GET", "initialize", "notifications/initialized", "tools/call"} {
			if all := s.Seen(m); len(all) != 1 || all[0].Header.Get("Authorization") != "Bearer t-a" {
				t.Errorf("%d of %s, or without credentials", len(all), m)
			}
		}
		p.CloseKey(anyKey)
		eventually(t, "the stream is closed", func() bool { return p.Connections(k.Tenant, anyKey)[0].State == StateClosed })
		if s.Count("DELETE") != 0 {
			t.Error("a session was deleted that there is not")
		}
	}
}

// The first event names the endpoint, and nowhere else is anything sent.
func TestSSE_Endpoint(t *testing.T) {
	t.Parallel()
	elsewhere := mcptest.New(t, mcptest.Legacy)
	for _, c := range []struct {
		name, reason string
		layer        fault.Layer
		open         func(s *mcptest.Server) mcptest.Answer
	}{
		{"other port", "ENDPOINT_FOREIGN", fault.Protocol, func(s *mcptest.Server) mcptest.Answer { return s.Open(mcptest.Endpoint(elsewhere.URL)) }},
		{"other scheme", "ENDPOINT_FOREIGN", fault.Protocol, func(s *mcptest.Server) mcptest.Answer {
			return s.Open(mcptest.Endpoint(strings.Replace(s.URL, "http:", "https:", 1)))
		}},
		{"other host", "ENDPOINT_FOREIGN", fault.Protocol, func(s *mcptest.Server) mcptest.Answer { return s.Open(mcptest.Endpoint("//localhost/m")) }},
		{"no URL", "ENDPOINT_INVALID", fault.Protocol, func(s *mcptest.Server) mcptest.Answer { return s.Open(mcptest.Endpoint("http://[::1")) }},
		{"user information", "ENDPOINT_INVALID", fault.Protocol, func(s *mcptest.Server) mcptest.Answer {
			return s.Open(mcptest.Endpoint(strings.Replace(s.URL, "http://", "http://me@", 1)))
		}},
		{"too long", "ENDPOINT_INVALID", fault.Protocol, func(s *mcptest.Server) mcptest.Answer {
			return s.Open(mcptest.Endpoint("/" + strings.Repeat("a", 4000)))
		}},
		{"never", "ENDPOINT_MISSING", fault.Protocol, func(s *mcptest.Server) mcptest.Answer { return s.Open(": waiting\n\n") }},
		{"message first", "ENDPOINT_MISSING", fault.Protocol, func(s *mcptest.Server) mcptest.Answer {
			return s.Open(mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`), mcptest.Endpoint("/m"))
		}},
		{"ends first", "ENDPOINT_MISSING", fault.Protocol, func(*mcptest.Server) mcptest.Answer { return mcptest.Stream(": bye\n\n") }},
		{"cut first", "STREAM_ENDED", fault.Transport, func(*mcptest.Server) mcptest.Answer { return mcptest.StreamThen(mcptest.Cut(), ": bye\n\n") }},
		{"Streamable HTTP", "TRANSPORT_UNSUPPORTED", fault.Protocol, func(*mcptest.Server) mcptest.Answer { return mcptest.Status(405, "", "") }},
		{"Streamable HTTP without a session", "TRANSPORT_UNSUPPORTED", fault.Protocol, func(*mcptest.Server) mcptest.Answer {
			return mcptest.Status(400, "application/json", `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"no"}}`)
		}},
		{"a page", "TRANSPORT_UNSUPPORTED", fault.Protocol, func(*mcptest.Server) mcptest.Answer { return mcptest.Status(200, "text/html", "<html>") }},
		{"sign-in", "AUTHORIZATION_REQUIRED", fault.Server, func(*mcptest.Server) mcptest.Answer {
			return mcptest.WithHeader("WWW-Authenticate", "Bearer x", mcptest.Status(401, "", ""))
		}},
		{"outage", "SERVER_ERROR", fault.Server, func(*mcptest.Server) mcptest.Answer { return mcptest.Status(503, "", "") }},
		{"redirected away", "REDIRECTED_AWAY", fault.Server, func(*mcptest.Server) mcptest.Answer {
			return mcptest.WithHeader("Location", elsewhere.URL, mcptest.Status(307, "", ""))
		}},
		{"redirected in a circle", "REDIRECT_LOOP", fault.Server, func(*mcptest.Server) mcptest.Answer {
			return mcptest.WithHeader("Location", "/sse", mcptest.Status(307, "", ""))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.NewSSE(t, "2024-11-05")
			s.On("GET", c.open(s))
			n := &told{}
			p := newPool(t, func(cfg *PoolConfig) {
				if n.in(cfg); c.reason == "ENDPOINT_MISSING" {
					cfg.Limits.Probe = 200 * time.Millisecond
				}
			})
			resp, err := p.Do(t.Context(), keyOf(t, "a"), sseTarget(s.URL), echo())
			expect(t, resp, err, c.reason, c.layer, NotSent)
			if _, alarms := n.all(); (len(alarms) == 1) != (c.reason == "ENDPOINT_FOREIGN" || c.reason == "REDIRECTED_AWAY") {
				t.Errorf("alarms %v", alarms)
			}
			if c.name == "sign-in" && (resp.WWWAuthenticate != "Bearer x" || resp.HTTPStatus != 401) {
				t.Errorf("the challenge is lost: %+v", resp)
			}
			if n := s.Count("initialize") + elsewhere.Count("initialize") + elsewhere.Count("GET"); n != 0 {
				t.Errorf("%d messages were sent", n)
			}
		})
	}
}

func TestSSE_RedirectsWithinTheOrigin(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2024-11-05")
	s.On("GET", mcptest.WithHeader("Location", "/sse/", mcptest.Status(307, "", "")), s.Open(mcptest.Endpoint("message?sessionId=1")))
	s.On("initialize", mcptest.WithHeader("Location", "/other/", mcptest.Status(307, "", "")), s.Streamed(mcptest.Result(`{"protocolVersion":"2024-11-05","capabilities":{"tools":{}}}`)))
	p := newPool(t, nil)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), sseTarget(s.URL), echo())
	succeed(t, resp, err)
	if got := s.Seen("initialize"); got[0].Path != "/sse/message" || s.Seen("tools/call")[0].Path != "/other/" {
		t.Errorf("posted to %s, then to %s", got[0].Path, s.Seen("tools/call")[0].Path)
	}
	s.On("tools/call", mcptest.WithHeader("Location", "/again", mcptest.Status(307, "", "")))
	resp, err = p.Do(t.Context(), keyOf(t, "a"), sseTarget(s.URL), echo())
	expect(t, resp, err, "REDIRECTED", fault.Server, Answered)
	if s.Count("tools/call") != 2 {
		t.Error("a call was sent twice")
	}
}

// Each fault of the stream or the POST ends the call with the phase that is a fact.
func TestSSE_Faults(t *testing.T) {
	t.Parallel()
	answer := mcptest.ResultEvent(okResult)
	for _, c := range []struct {
		name, reason string
		layer        fault.Layer
		phase        Phase
		lost         bool // the connection ends with it
		call         func(s *mcptest.Server) mcptest.Answer
	}{
		{"cut in the middle of the answer", "STREAM_ENDED", fault.Transport, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes(answer[:len(answer)/2], "\x00cut")
		}},
		{"ended without an answer", "STREAM_ENDED", fault.Transport, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer { return s.Pushes("\x00end") }},
		{"stream ends while the POST hangs", "STREAM_ENDED", fault.Transport, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer {
			return func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
				s.EndStream()
				s.Hang()(w, raw, r)
			}
		}},
		{"huge event", "STREAM_TOO_LARGE", fault.Server, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes("data: " + strings.Repeat("x", 300<<10))
		}},
		{"endless line", "STREAM_TOO_LARGE", fault.Server, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes(strings.Repeat(strings.Repeat("x", 100<<10), 3))
		}},
		{"many lines", "STREAM_TOO_LARGE", fault.Server, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes(strings.Repeat("data:\n", 2000))
		}},
		{"endless noise", "STREAM_TOO_LARGE", fault.Server, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes(strings.Repeat(": noise noise noise noise\n\n", 20_000))
		}},
		{"another endpoint", "ENDPOINT_CHANGED", fault.Protocol, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer { return s.Pushes(mcptest.Endpoint("/other"), answer) }},
		{"foreign endpoint", "ENDPOINT_FOREIGN", fault.Protocol, MaybeSent, true, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes(mcptest.Endpoint("http://elsewhere.example/"), answer)
		}},
		{"answer of another", "TIMEOUT", fault.Transport, MaybeSent, false, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes(strings.ReplaceAll(answer, "$ID", "$ID7"), strings.ReplaceAll(answer, "$ID", "null"), `data: {"jsonrpc":"2.0","id":$ID`+"\n\n")
		}},
		{"answer on the POST", "TIMEOUT", fault.Transport, MaybeSent, false, func(*mcptest.Server) mcptest.Answer { return mcptest.Result(okResult) }},
		{"drip", "TIMEOUT", fault.Transport, MaybeSent, false, func(s *mcptest.Server) mcptest.Answer { return s.Pushes("data: {", `"json`, `rpc":`) }},
		{"empty answer", "ANSWER_EMPTY", fault.Protocol, MaybeSent, false, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes(mcptest.Event(`{"jsonrpc":"2.0","id":$ID}`))
		}},
		{"answer above its limit", "RESULT_TOO_LARGE", fault.Server, MaybeSent, false, func(s *mcptest.Server) mcptest.Answer {
			return s.Pushes(mcptest.ResultEvent(`"` + strings.Repeat("x", 128<<10) + `"`))
		}},
		{"POST refused", "SERVER_REFUSED", fault.Server, Answered, true, func(*mcptest.Server) mcptest.Answer { return mcptest.Status(400, "text/plain", "no such session") }},
		{"session forgotten", "SESSION_LOST", fault.Protocol, Answered, true, func(*mcptest.Server) mcptest.Answer { return mcptest.Status(404, "", "") }},
		{"sign-in", "AUTHORIZATION_REQUIRED", fault.Server, Answered, false, func(*mcptest.Server) mcptest.Answer { return mcptest.Status(401, "", "") }},
		{"outage", "SERVER_ERROR", fault.Server, MaybeSent, false, func(*mcptest.Server) mcptest.Answer { return mcptest.Status(502, "", "") }},
		{"POST cut", "SERVER_UNREACHABLE", fault.Transport, MaybeSent, false, func(*mcptest.Server) mcptest.Answer { return mcptest.Cut() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.NewSSE(t, "2024-11-05")
			p, seen := watchedPool(t, func(l *Limits) { l.LineBytes, l.EventLines, l.NoiseBytes = 256<<10, 1000, 128<<10 })
			k := keyOf(t, "a")
			resp, err := p.Do(t.Context(), k, sseTarget(s.URL), echo())
			succeed(t, resp, err)
			s.On("tools/call", c.call(s), s.Streamed(mcptest.Result(okResult)))
			r := echo()
			r.ResultBytes = 64 << 10
			r.Timeout = 20 * time.Second
			if c.reason == "TIMEOUT" {
				r.Timeout = 400 * time.Millisecond
			}
			resp, err = p.Do(t.Context(), k, sseTarget(s.URL), r)
			expect(t, resp, err, c.reason, c.layer, c.phase)
			if c.reason == "TIMEOUT" {
				s.Wait(t, "notifications/cancelled", 1)
				if got := s.Seen("notifications/cancelled")[0]; !strings.Contains(string(got.Params), `"requestId":`+string(s.Seen("tools/call")[1].ID)+`,`) {
					t.Errorf("%s", got.Body)
				}
			}
			if c.name == "drip" {
				return // the answer that would follow goes on in the broken event
			}
			resp, err = p.Do(t.Context(), k, sseTarget(s.URL), echo())
			succeed(t, resp, err)
			want := 1
			if c.lost {
				want = 2
			}
			if n := s.Count("GET"); n != want {
				t.Errorf("%d streams were opened, want %d", n, want)
			}
			if c.lost {
				eventually(t, "the gap is told", func() bool { return seen.count("") >= 1 })
			}
		})
	}
}

func TestSSE_NotSent(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2024-11-05")
	p := newPool(t, nil)
	r := echo()
	r.BeforeSend = func() error { return fault.New(fault.Precondition, "TOO_LATE", "too late") }
	resp, err := p.Do(t.Context(), keyOf(t, "a"), sseTarget(s.URL), r)
	expect(t, resp, err, "TOO_LATE", fault.Host, NotSent)
	if s.Count("tools/call") != 0 {
		t.Error("it was sent")
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.BeforeSend = func() error { cancel(); return nil }
	s.On("tools/call", s.Hang())
	resp, err = p.Do(ctx, keyOf(t, "a"), sseTarget(s.URL), r)
	expect(t, resp, err, "CANCELLED", fault.Host, MaybeSent)
}

// An answer may overtake the response to its own POST, and what the server asks is
// never taken for an answer, whatever its id.
func TestSSE_OrderAndIdentity(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2024-11-05")
	s.On("tools/call", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		id := string(r.ID)
		s.Push(mcptest.Event(`{"jsonrpc":"2.0","id":` + id + `,"method":"ping"}`))
		s.Push(mcptest.Event(`{"jsonrpc":"2.0","id":` + id + `,"method":"sampling/createMessage","params":{}}`))
		s.Wait(t, "POST", 2)
		s.Push(mcptest.Event(`{"jsonrpc":"2.0","id":` + id + `,"result":` + okResult + `}`))
		s.Push(mcptest.Event(`{"jsonrpc":"2.0","id":` + id + `,"result":{"late":true}}`))
		s.Hang()(w, raw, r)
	})
	p := newPool(t, nil)
	k := keyOf(t, "a")
	resp, err := p.Do(t.Context(), k, sseTarget(s.URL), echo())
	if err != nil || string(resp.Result) != okResult {
		t.Fatalf("%+v %v", resp, err)
	}
	bodies := fmt.Sprint(s.Seen("POST")[0].Body, s.Seen("POST")[1].Body)
	if !strings.Contains(bodies, `"result":{}`) || !strings.Contains(bodies, `-32601`) {
		t.Errorf("answered %s", bodies)
	}
	eventually(t, "the second answer is stray", func() bool { return p.Connections(k.Tenant, anyKey)[0].Stray == 1 })
}

// A server that asks without end gets as many answers as it takes, and costs
// neither memory nor the calls that run beside.
func TestSSE_FloodOfPings(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2024-11-05")
	p := newPool(t, nil)
	k := keyOf(t, "a")
	flood := make([]string, 0, 21)
	for i := range 20 {
		var b strings.Builder
		for j := range 1000 {
			b.WriteString(mcptest.Event(fmt.Sprintf(`{"jsonrpc":"2.0","id":"p%d-%d","method":"ping"}`, i, j)))
		}
		flood = append(flood, b.String())
	}
	s.On("tools/call", s.Pushes(append(flood, mcptest.ResultEvent(okResult))...))
	resp, err := p.Do(t.Context(), k, sseTarget(s.URL), echo())
	succeed(t, resp, err)
	s.Wait(t, "POST", 1)
	if got := s.Seen("POST")[0].Body; !strings.HasPrefix(got, `{"jsonrpc":"2.0","id":"p0-`) || !strings.HasSuffix(got, `,"result":{}}`) {
		t.Errorf("answered %s", got)
	}
	if info := p.Connections(k.Tenant, anyKey)[0]; info.State != StateInitialized || info.Stray == 0 {
		t.Errorf("%+v", info)
	}
}

func TestSSE_BatchesOfTheirRevisionOnly(t *testing.T) {
	t.Parallel()
	batch := mcptest.Event(`[{"jsonrpc":"2.0","method":"notifications/message","params":{}},{"jsonrpc":"2.0","id":"s1","method":"ping"},{"jsonrpc":"2.0","id":$ID,"result":` + okResult + `}]`)
	for _, version := range []string{"2025-03-26", "2024-11-05"} {
		s := mcptest.NewSSE(t, version)
		s.On("tools/call", s.Pushes(batch))
		p := newPool(t, nil)
		r := echo()
		r.Timeout = 20 * time.Second
		if version == "2024-11-05" {
			r.Timeout = 400 * time.Millisecond
		}
		resp, err := p.Do(t.Context(), keyOf(t, "a"), sseTarget(s.URL), r)
		if version == "2024-11-05" {
			expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
			continue
		}
		succeed(t, resp, err)
		s.Wait(t, "POST", 1)
	}
}

// What an answer needs of the budget is given up with that answer alone.
func TestSSE_Budget(t *testing.T) {
	t.Parallel()
	s := mcptest.NewSSE(t, "2024-11-05")
	big := `{"jsonrpc":"2.0","id":$ID,"result":{"content":[{"type":"text","text":"` + strings.Repeat("x", 1<<20) + `"}]}}`
	s.On("tools/call", s.Streamed(mcptest.Result(okResult)), s.Streamed(mcptest.JSON(big)), s.Streamed(mcptest.Result(okResult)))
	p := newPool(t, func(c *PoolConfig) { c.Limits.AnswerBytes, c.Limits.TenantAnswerBytes = 512<<10, 512<<10 })
	k := keyOf(t, "a")
	resp, err := p.Do(t.Context(), k, sseTarget(s.URL), echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, sseTarget(s.URL), echo())
	expect(t, resp, err, "RESULT_BUDGET", fault.Host, MaybeSent)
	resp, err = p.Do(t.Context(), k, sseTarget(s.URL), echo())
	succeed(t, resp, err)
	if n := s.Count("GET"); n != 1 {
		t.Errorf("%d streams", n)
	}
	if p.answers.used != 0 {
		t.Errorf("%d bytes are still counted", p.answers.used)
	}
	s.On("tools/call", s.Streamed(mcptest.Result(`{"content":[{"type":"text","text":"`+strings.Repeat("x", 200<<10)+`"}]}`)))
	resp, err = p.Do(t.Context(), k, sseTarget(s.URL), echo())
	succeed(t, resp, err)
	if p.answers.used == 0 {
		t.Error("a large answer is not counted")
	}
	resp.Release()
	if p.answers.used != 0 {
		t.Errorf("%d bytes are still counted", p.answers.used)
	}
}
