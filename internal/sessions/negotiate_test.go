package sessions

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

func TestLegacy_Handshake(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"2025-11-25", "2025-06-18", "2025-03-26"} {
		s := mcptest.New(t, version)
		p := newPool(t, nil)
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		succeed(t, resp, err)
		if resp.Era != EraLegacy || resp.ProtocolVersion != version {
			t.Fatalf("%+v", resp)
		}
		call, initialized := s.Seen("tools/call")[0], s.Seen("notifications/initialized")
		if len(initialized) != 1 || s.Count("initialize") != 1 || call.Header.Get("Mcp-Session-Id") != "session-1" ||
			call.Header.Get("Mcp-Protocol-Version") != version || call.Header.Get("Mcp-Method") != "" || strings.Contains(call.Body, "_meta") {
			t.Fatalf("%s: %v %s", version, call.Header, call.Body)
		}
		if got := s.Seen("initialize")[0]; got.Header.Get("Mcp-Session-Id") != "" || !strings.Contains(got.Body, `"2025-11-25"`) {
			t.Fatalf("%v %s", got.Header, got.Body)
		}
		p.CloseKey(func(Key) bool { return true })
		s.Wait(t, "DELETE", 1)
		if got := s.Seen("DELETE")[0]; got.Header.Get("Mcp-Session-Id") != "session-1" {
			t.Fatalf("%v", got.Header)
		}
	}
}

type bearer string

func (b bearer) Authorize(_ context.Context, k Key, _ Target, h http.Header) error {
	h.Set("Authorization", "Bearer "+string(b)+k.Subject.Value)
	return nil
}

func TestCredentialsGoWithEveryRequest(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{"listChanged":true}}`)
	p := newPool(t, func(c *PoolConfig) { c.Credentials = bearer("t-") })
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	s.Wait(t, "GET", 1)
	p.CloseKey(func(Key) bool { return true })
	s.Wait(t, "DELETE", 1)
	for _, m := range []string{"server/discover", "initialize", "notifications/initialized", "tools/call", "GET", "DELETE"} {
		for _, r := range s.Seen(m) {
			if r.Header.Get("Authorization") != "Bearer t-a" {
				t.Errorf("%s without credentials", m)
			}
		}
	}
}

// probes lists what servers answer to server/discover, and what must follow.
func TestFO087_ProbeAgainstOldServers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		answer mcptest.Answer
		reason string // of the fault; empty for success by initialize
		noted  bool   // the era is remembered
	}{
		{"method not found", mcptest.Error(-32601, "no", ""), "", true},
		{"missing session", mcptest.StatusError(400, -32600, "missing session"), "", true},
		{"code 0", mcptest.Error(0, "no", ""), "", true},
		{"internal error", mcptest.Error(-32603, "no", ""), "", true},
		{"404 page", mcptest.Status(404, "text/html", "<html>"), "", true},
		{"404 not found in json", mcptest.StatusError(404, -32601, "no"), "", true},
		{"405", mcptest.Status(405, "", ""), "", true},
		{"406", mcptest.Status(406, "", ""), "", true},
		{"400 text", mcptest.Status(400, "text/plain", "no"), "", true},
		{"empty result", mcptest.Result(`{}`), "", true},
		{"null result", mcptest.Result(`null`), "", true},
		{"only older versions", mcptest.Result(`{"supportedVersions":["2025-06-18"],"capabilities":{}}`), "", true},
		{"unsupported, older offered", mcptest.Error(-32022, "no", `{"supported":["2025-06-18"],"requested":"2026-07-28"}`), "", true},
		{"parse error", mcptest.StatusError(400, -32700, "no"), "", true},
		{"server error", mcptest.StatusError(400, -32000, "Server not initialized"), "", true},
		{"custom code", mcptest.Error(-32001, "no", ""), "", true},
		{"invalid params", mcptest.Error(-32602, "no", ""), "", true},
		{"error with a null id", mcptest.Status(400, "application/json", `{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"no"}}`), "", true},
		{"404 empty", mcptest.Status(404, "", ""), "", true},
		{"404 unknown code in json", mcptest.StatusError(404, -32001, "session not found"), "", true},
		{"only unknown versions", mcptest.Result(`{"supportedVersions":["2031-01-01","2032-01-01"],"capabilities":{}}`), "VERSION_UNSUPPORTED", false},
		{"403 in json", mcptest.StatusError(403, -32600, "no"), "", true},
		{"429 page", mcptest.Status(429, "text/html", "<html>"), "RATE_LIMITED_BY_SERVER", false},
		{"504", mcptest.Status(504, "text/html", "<html>"), "SERVER_ERROR", false},
		{"200 empty", mcptest.Status(200, "application/json", ""), "", false},
		{"202", mcptest.Status(202, "", ""), "", false},
		{"hang", nil, "", false},
		{"500", mcptest.Status(500, "text/plain", "oops"), "", false},
		{"500 in json", mcptest.StatusError(500, -32603, "oops"), "", false},
		{"200 page", mcptest.Status(200, "text/html", "<html>"), "", false},
		{"unsupported, none known", mcptest.Error(-32022, "no", `{"supported":["2031-01-01"]}`), "VERSION_UNSUPPORTED", false},
		{"capability demanded", mcptest.StatusError(400, -32021, "no"), "DISCOVERY_REFUSED", false},
		{"header mismatch", mcptest.StatusError(400, -32020, "no"), "DISCOVERY_REFUSED", false},
		{"401", mcptest.WithHeader("WWW-Authenticate", "Bearer x", mcptest.Status(401, "", "")), "AUTHORIZATION_REQUIRED", false},
		{"403", mcptest.Status(403, "", ""), "FORBIDDEN_BY_SERVER", false},
		{"429", mcptest.WithHeader("Retry-After", "3", mcptest.Status(429, "", "")), "RATE_LIMITED_BY_SERVER", false},
		{"503 in json", mcptest.StatusError(503, -32603, "oops"), "SERVER_ERROR", false},
		{"502", mcptest.Status(502, "", ""), "SERVER_ERROR", false},
		{"503", mcptest.Status(503, "", ""), "SERVER_ERROR", false},
		{"cut", mcptest.Cut(), "SERVER_UNREACHABLE", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Legacy)
			p := newPool(t, func(cfg *PoolConfig) {
				if c.answer == nil { // only silence ends with its time, else a slow machine looks like it
					cfg.Limits.Probe = 200 * time.Millisecond
				}
			})
			if c.answer == nil {
				c.answer = s.Hang()
			}
			s.On("server/discover", c.answer)
			k := keyOf(t, "a")
			resp, err := p.Do(t.Context(), k, httpTarget(s.URL), echo())
			if c.reason == "" {
				succeed(t, resp, err)
				if resp.Era != EraLegacy {
					t.Fatalf("%+v", resp)
				}
			} else if f, ok := fault.As(err); !ok || f.Reason != c.reason || resp.Phase != NotSent {
				t.Fatalf("%+v %v", resp, err)
			} else if s.Count("initialize") != 0 {
				t.Fatal("initialize was tried")
			} else if c.name == "401" && (resp.WWWAuthenticate != "Bearer x" || resp.HTTPStatus != 401) {
				t.Fatalf("the challenge is lost: %+v", resp)
			}
			if p.eras[registrationOf(k)].legacy != c.noted {
				t.Fatalf("remembered as legacy: %v", p.eras[registrationOf(k)].legacy)
			}
		})
	}
}

func TestProbe_RetriesOnceWhenItsVersionIsNamed(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	named := mcptest.Status(400, "application/json", `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"x","data":{"supported":["2026-07-28"],"requested":"2026-07-28"}}}`)
	s.On("server/discover", named, mcptest.Result(`{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{},"completions":{}}}`))
	s.On("tools/list", named, mcptest.Result(`{"tools":[]}`))
	s.On("completion/complete", named, mcptest.Result(`{"completion":{"values":[]}}`))
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	if _, err := p.List(t.Context(), k, target, KindTool); err != nil {
		t.Fatal(err)
	}
	resp, err := p.Do(t.Context(), k, target, Request{Method: "completion/complete", Params: json.RawMessage(`{}`)})
	succeed(t, resp, err)
	for _, method := range []string{"server/discover", "tools/list", "completion/complete"} {
		seen := s.Seen(method)
		if len(seen) != 2 || string(seen[0].ID) == string(seen[1].ID) {
			t.Errorf("%s was sent %d times, or twice with one id", method, len(seen))
		}
	}
	if s.Count("initialize") != 0 {
		t.Error("the handshake was tried")
	}
}

// A refusal for the protocol version proves nothing of what was done before it. A
// request that a call stands behind is sent once, however the refusal comes.
func TestVersionRefused_NoCallIsSentAgain(t *testing.T) {
	t.Parallel()
	const progress = `{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"x","progress":1}}`
	refusals := map[string]func(body string) mcptest.Answer{
		"400":    func(body string) mcptest.Answer { return mcptest.Status(400, "application/json", body) },
		"200":    mcptest.JSON,
		"503":    func(body string) mcptest.Answer { return mcptest.Status(503, "application/json", body) },
		"stream": func(body string) mcptest.Answer { return mcptest.Stream(mcptest.Event(body)) },
		"stream after progress": func(body string) mcptest.Answer {
			return mcptest.Stream(mcptest.Event(progress), mcptest.Event(body))
		},
	}
	for how, refusal := range refusals {
		for _, version := range []string{mcptest.Modern, mcptest.Legacy} {
			for _, data := range []string{"", `,"data":{"supported":["2026-07-28","2025-11-25"]}`, `,"data":{"supported":["2025-06-18"]}`} {
				t.Run(how+" "+version+data, func(t *testing.T) {
					t.Parallel()
					s := mcptest.New(t, version)
					s.Capabilities(`{"tools":{},"resources":{},"prompts":{}}`)
					p := newPool(t, nil)
					for method, params := range map[string]string{"tools/call": `{"name":"echo","arguments":{}}`, "resources/read": `{"uri":"echo"}`, "prompts/get": `{"name":"echo"}`} {
						s.On(method, refusal(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"no"`+data+`}}`), mcptest.Result(okResult))
						sends := 0
						resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), Request{Method: method, Name: "echo", Params: json.RawMessage(params),
							BeforeSend: func() error { sends++; return nil }, OnNotice: func(Notice) {}})
						if err != nil || resp.Error == nil || resp.Error.Code != -32022 || resp.Phase != Answered || !resp.Doubted {
							t.Errorf("%s: %+v, %v", method, resp, err)
						}
						if s.Count(method) != 1 || sends != 1 {
							t.Errorf("%s was sent %d times (%d)", method, s.Count(method), sends)
						}
					}
				})
			}
		}
	}
}

func TestServerThatBecameLegacyIsProbedAgain(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	s.On("server/discover", mcptest.Error(-32601, "no", ""))
	s.On("initialize", mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{}}`))
	s.On("tools/call", mcptest.Error(-32022, "no", `{"supported":["2025-11-25"]}`), mcptest.Result(okResult))
	resp, err = p.Do(t.Context(), k, target, echo())
	if err != nil || !resp.Doubted || resp.Error == nil || resp.Phase != Answered {
		t.Fatalf("%+v, %v", resp, err)
	}
	resp, err = p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	if resp.Era != EraLegacy {
		t.Fatalf("%+v", resp)
	}
	// With a downgrade forbidden the same ends before anything is sent.
	target.DowngradeForbidden = true
	p.CloseKey(func(Key) bool { return true })
	p.forgetEra(k)
	handshakes := s.Count("initialize")
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "DOWNGRADE_REFUSED", fault.Protocol, NotSent)
	if s.Count("initialize") != handshakes {
		t.Fatal("the handshake was tried")
	}
	if s.Count("tools/call") != 3 {
		t.Fatalf("%d calls", s.Count("tools/call"))
	}
}

func TestVersionsOfTheContract(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, server string
		versions     []string
		reason       string
		version      string
	}{
		{"legacy only, dual server", mcptest.Legacy, []string{"2025-06-18", "2025-11-25"}, "", "2025-11-25"},
		{"modern only, legacy server", mcptest.Legacy, []string{"2026-07-28"}, "VERSION_UNSUPPORTED", ""},
		{"other legacy than the server's", "2025-03-26", []string{"2025-06-18"}, "VERSION_UNSUPPORTED", ""},
		{"unknown only", mcptest.Modern, []string{"2031-01-01"}, "VERSION_UNSUPPORTED", ""},
	} {
		s := mcptest.New(t, c.server)
		p := newPool(t, nil)
		target := httpTarget(s.URL)
		target.Versions = c.versions
		resp, err := p.Do(t.Context(), keyOf(t, "a"), target, echo())
		if c.reason != "" {
			expect(t, resp, err, c.reason, fault.Protocol, NotSent)
		} else if succeed(t, resp, err); resp.ProtocolVersion != c.version || s.Count("server/discover") != 0 {
			t.Errorf("%s: %+v", c.name, resp)
		}
		if s.Count("tools/call") > 0 && c.reason != "" {
			t.Errorf("%s: the call was sent", c.name)
		}
	}
	t.Run("initialize that answers a modern version", func(t *testing.T) {
		s := mcptest.New(t, mcptest.Legacy)
		s.On("initialize", mcptest.Result(`{"protocolVersion":"2026-07-28","capabilities":{}}`))
		resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		expect(t, resp, err, "VERSION_UNSUPPORTED", fault.Protocol, NotSent)
	})
	t.Run("contract that changes", func(t *testing.T) {
		s := mcptest.New(t, mcptest.Legacy)
		p := newPool(t, nil)
		target := httpTarget(s.URL)
		resp, err := p.Do(t.Context(), keyOf(t, "a"), target, echo())
		succeed(t, resp, err)
		target.Versions = []string{"2025-06-18"}
		resp, err = p.Do(t.Context(), keyOf(t, "a"), target, echo())
		expect(t, resp, err, "VERSION_UNSUPPORTED", fault.Protocol, NotSent)
	})
}
