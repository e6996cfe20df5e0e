package sessions

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

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
			if c.answer == nil {
				c.answer = s.Hang()
			}
			s.On("server/discover", c.answer)
			p := newPool(t, func(cfg *PoolConfig) { cfg.Limits.Probe = 200 * time.Millisecond })
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
			}
			if p.era(k).legacy != c.noted {
				t.Fatalf("remembered as legacy: %v", p.era(k).legacy)
			}
		})
	}
}

func TestProbe_RetriesOnceWhenItsVersionIsNamed(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	named := mcptest.Status(400, "application/json", `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"x","data":{"supported":["2026-07-28"],"requested":"2026-07-28"}}}`)
	s.On("server/discover", named, mcptest.Result(`{"supportedVersions":["2026-07-28"],"capabilities":{}}`))
	s.On("tools/call", named, mcptest.Result(okResult))
	p := newPool(t, nil)
	r := echo()
	sends := 0
	r.BeforeSend = func() error { sends++; return nil }
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r)
	succeed(t, resp, err)
	if s.Count("server/discover") != 2 || s.Count("tools/call") != 2 || sends != 2 || s.Count("initialize") != 0 {
		t.Fatalf("%d %d %d", s.Count("server/discover"), s.Count("tools/call"), sends)
	}
	a, b := s.Seen("tools/call")[0], s.Seen("tools/call")[1]
	if string(a.ID) == string(b.ID) {
		t.Fatal("the second request has the id of the first")
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
	s.On("initialize", mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{}}`))
	s.On("tools/call", mcptest.Error(-32022, "no", `{"supported":["2025-11-25"]}`), mcptest.Result(okResult))
	resp, err = p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	if resp.Era != EraLegacy {
		t.Fatalf("%+v", resp)
	}
	// With a downgrade forbidden the same ends before anything is sent.
	target.DowngradeForbidden = true
	p.CloseKey(func(Key) bool { return true })
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "DOWNGRADE_REFUSED", fault.Protocol, NotSent)
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

func TestFO068_StringIDOverHTTP(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	s.On("tools/call",
		mcptest.JSON(`{"jsonrpc":"2.0","id":"$ID","result":`+okResult+`}`),
		mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":99999,"result":{"content":[]}}`), mcptest.Event(`{"jsonrpc":"2.0","id":"0$ID","result":{"content":[]}}`), mcptest.ResultEvent(okResult)),
		mcptest.JSON(`{"jsonrpc":"2.0","id":$ID.0,"result":`+okResult+`}`),
		mcptest.JSON(`{"jsonrpc":"2.0","id":99999,"result":`+okResult+`}`),
	)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		if string(resp.Result) != okResult {
			t.Fatalf("%s", resp.Result)
		}
	}
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, echo())
		expect(t, resp, err, "NO_ANSWER", fault.Protocol, MaybeSent)
	}
	if info := p.Connections(k.Tenant, func(Key) bool { return true })[0]; info.Stray != 4 {
		t.Fatalf("%d strays", info.Stray)
	}
}

func TestFO069_NullIDErrorEndsTheCall(t *testing.T) {
	t.Parallel()
	body := `{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"boom","data":{"x":1}}}`
	for name, answer := range map[string]mcptest.Answer{
		"200": mcptest.JSON(body), "400": mcptest.Status(400, "application/json", body), "500": mcptest.Status(500, "application/json", body),
		"stream": nil, "no id": mcptest.JSON(`{"jsonrpc":"2.0","error":{"code":-32603,"message":"boom","data":{"x":1}}}`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Modern)
			p := newPool(t, nil)
			if answer == nil {
				answer = mcptest.StreamThen(s.Hang(), mcptest.Event(body))
			}
			release := make(chan struct{})
			s.On("tools/call", s.After(release, mcptest.Result(okResult)), answer)
			k, target := keyOf(t, "a"), httpTarget(s.URL)
			other := make(chan error, 1)
			go func() {
				resp, err := p.Do(context.Background(), k, target, echo())
				if err == nil && resp.Result == nil {
					err = errors.New("no result")
				}
				other <- err
			}()
			s.Wait(t, "tools/call", 1)
			resp, err := p.Do(t.Context(), k, target, echo())
			if err != nil || resp.Error == nil || resp.Error.Code != -32603 || resp.Error.Message != "boom" || string(resp.Error.Data) != `{"x":1}` || resp.Phase != Answered {
				t.Fatalf("%+v %v", resp, err)
			}
			close(release)
			if err := <-other; err != nil {
				t.Fatalf("the other call: %v", err)
			}
		})
	}
}

func TestFO071_ContentTypesWithParameters(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	body := `{"jsonrpc":"2.0","id":$ID,"result":` + okResult + `}`
	types := []string{"application/json; charset=utf-8", "APPLICATION/JSON", "application/json, application/json", "application/json ;x=y", "",
		"text/event-stream;charset=UTF-8", "Text/Event-Stream", "text/plain", "application/problem+json"}
	var answers []mcptest.Answer
	for _, ct := range types {
		b := body
		if strings.Contains(strings.ToLower(ct), "event-stream") {
			b = mcptest.Event(body)
		}
		if ct == "" {
			answers = append(answers, func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
				w.Header()["Content-Type"] = nil
				mcptest.Status(200, "", b)(w, raw, r)
			})
			continue
		}
		answers = append(answers, mcptest.Status(200, ct, b))
	}
	s.On("tools/call", answers...)
	for _, ct := range types {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		if ct == "text/plain" || ct == "application/problem+json" {
			expect(t, resp, err, "CONTENT_TYPE_UNSUPPORTED", fault.Protocol, MaybeSent)
			continue
		}
		succeed(t, resp, err)
	}
	if got := s.Seen("tools/call")[0].Header.Get("Content-Type"); got != "application/json" {
		t.Fatalf("sent as %q", got)
	}
}

func TestFO072_StreamCutBetweenCRAndLF(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	s.On("tools/call",
		mcptest.Stream("\xef\xbb\xbfdata: {\"jsonrpc\":\"2.0\",\"id\":$ID,\r", "\ndata: \"result\":"+okResult+"}\r", "\n\r", "\n"),
		mcptest.StreamThen(s.Hang(), ": ping\n\n", "data:\n\n", "event: ping\ndata: {}\n\n", "id: 9\n\n", "data: {\"jsonrpc\":\"2.0\",\"id\":$ID,\"result\":"+okResult+"}\r\r"),
	)
	for range 2 {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		succeed(t, resp, err)
	}
}

func TestFO074_LongLines(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	big := strings.Repeat("x", 5<<20)
	endless := func(w http.ResponseWriter, raw *http.Request, _ *mcptest.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: ") //nolint:errcheck // the client leaves in the middle
		chunk := bytes.Repeat([]byte("x"), 1<<20)
		for range 200 {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}
	s.On("tools/call",
		mcptest.Stream(mcptest.ResultEvent(`{"content":"`+big+`"}`)),
		endless,
		mcptest.Result(`{"content":"`+big+`"}`), // JSON over this request's own limit
		mcptest.Stream(mcptest.ResultEvent(okResult)),
	)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "RESULT_TOO_LARGE", fault.Server, MaybeSent)
	r := echo()
	r.ResultBytes = 1 << 20
	resp, err = p.Do(t.Context(), k, target, r)
	expect(t, resp, err, "RESULT_TOO_LARGE", fault.Server, MaybeSent)
	resp, err = p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	if s.Count("server/discover") != 1 {
		t.Fatal("the connection was opened anew")
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
				r.Timeout = 100 * time.Millisecond
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
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/call", slash)
	p := newPool(t, nil)
	for range 2 {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		succeed(t, resp, err)
	}
	if seen := s.Seen("tools/call"); len(seen) != 3 || seen[0].Body != seen[1].Body || seen[1].Verb != "POST" || seen[2].Path != "/mcp/" {
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
		{307, other.URL, "REDIRECTED", Answered, "origin"}, {308, "https://127.0.0.1:1/", "REDIRECTED", Answered, "origin"},
		{307, "/mcp", "REDIRECT_LOOP", Answered, "again"},
	} {
		s := mcptest.New(t, mcptest.Modern)
		s.On("tools/call", redirect(c.status, c.to))
		resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		expect(t, resp, err, c.reason, fault.Server, c.phase)
		if !strings.Contains(err.Error(), c.hint) {
			t.Errorf("%d to %s: %v", c.status, c.to, err)
		}
	}
	if other.Count("tools/call") != 0 {
		t.Fatal("the redirect reached another origin")
	}
}

func TestFO077_RedirectToAChallenge(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/call", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		if strings.HasSuffix(r.Path, "/") {
			mcptest.WithHeader("WWW-Authenticate", `Bearer scope="x"`, mcptest.Status(401, "", ""))(w, raw, r)
			return
		}
		mcptest.WithHeader("Location", "/mcp/", mcptest.Status(308, "", ""))(w, raw, r)
	})
	resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	expect(t, resp, err, "AUTHORIZATION_REQUIRED", fault.Server, Answered)
	if resp.WWWAuthenticate != `Bearer scope="x"` || resp.HTTPStatus != 401 {
		t.Fatalf("%+v", resp)
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

func zipped(s string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, s) //nolint:errcheck // into memory
	w.Close()
	return b.String()
}

func TestFO080_CompressedAnswers(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	gz := func(ct, body string) mcptest.Answer {
		return func(w http.ResponseWriter, _ *http.Request, r *mcptest.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("Content-Type", ct)
			io.WriteString(w, zipped(strings.ReplaceAll(body, "$ID", string(r.ID)))) //nolint:errcheck // the client may leave
		}
	}
	body := `{"jsonrpc":"2.0","id":$ID,"result":` + okResult + `}`
	bomb := `{"jsonrpc":"2.0","id":$ID,"result":{"x":"` + strings.Repeat("0", 40<<20) + `"}}`
	s.On("tools/call", gz("application/json", body), gz("text/event-stream", mcptest.Event(body)), gz("application/json", bomb), gz("text/event-stream", mcptest.Event(bomb)),
		mcptest.WithHeader("Content-Encoding", "br", mcptest.Result(okResult)), mcptest.WithHeader("Content-Encoding", "gzip", mcptest.Result(okResult)))
	s.On("tools/list", gz("application/json", `{"jsonrpc":"2.0","id":$ID,"result":{"tools":[{"name":"a"}]}}`))
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
	}
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, echo())
		expect(t, resp, err, "RESULT_TOO_LARGE", fault.Server, MaybeSent)
	}
	resp, err := p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "ENCODING_UNSUPPORTED", fault.Protocol, MaybeSent)
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "ANSWER_BROKEN", fault.Transport, MaybeSent)
	if l, err := p.List(t.Context(), k, target, KindTool); err != nil || len(l.Items) != 1 {
		t.Fatalf("%+v %v", l, err)
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
		r.Timeout = 150 * time.Millisecond
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), r)
		expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
		if !fault.Is(err, fault.Deadline) {
			t.Fatal(err)
		}
	}
}

func TestFO095_ServerRequestsAreAnswered(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, nil)
	s.On("tools/call",
		mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":"p1","method":"ping"}`), mcptest.ResultEvent(okResult)),
		mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":1,"method":"roots/list"}`), mcptest.Event(`{"jsonrpc":"2.0","id":2,"method":"sampling/createMessage","params":{}}`),
			mcptest.Event(`{"jsonrpc":"2.0","id":3,"method":"x/unknown"}`), mcptest.ResultEvent(`{"content":[],"isError":true}`)),
		mcptest.StreamThen(s.Hang(), mcptest.Event(`{"jsonrpc":"2.0","id":4,"method":"elicitation/create","params":{}}`)),
	)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "SERVER_ASKED", fault.Host, Answered)
	if f, _ := fault.As(err); f.Metadata["method"] != "roots/list" || resp.Result == nil || strings.Contains(f.Message, "declined") {
		t.Fatalf("%+v %+v", f, resp)
	}
	r := echo()
	r.Timeout = 500 * time.Millisecond
	resp, err = p.Do(t.Context(), k, target, r)
	expect(t, resp, err, "SERVER_ASKED", fault.Host, MaybeSent)
	var bodies []string
	for _, r := range s.Seen("POST") {
		bodies = append(bodies, r.Body)
	}
	all := strings.Join(bodies, "\n")
	for _, want := range []string{`{"jsonrpc":"2.0","id":"p1","result":{}}`, `"id":1,"error":{"code":-32601`, `"id":2,"error":{"code":-32601`, `"id":3,"error":{"code":-32601`, `"id":4,"error":{"code":-32601`} {
		if !strings.Contains(all, want) {
			t.Errorf("no answer %s in %s", want, all)
		}
	}
	if !strings.Contains(s.Seen("initialize")[0].Body, `"capabilities":{}`) {
		t.Error("capabilities were declared")
	}
}

func TestModern_ServerRequestsAreNotServed(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	s.On("tools/call", mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":1,"method":"roots/list"}`), mcptest.ResultEvent(okResult)))
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	if n := s.Count("POST"); n != 0 {
		t.Fatalf("%d answers were sent", n)
	}
}

func TestModern_ResultTypes(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	s.On("tools/call", mcptest.Result(`{"content":[]}`), mcptest.Result(`{"resultType":"input_required","requestState":"s"}`), mcptest.Result(`{"resultType":"task"}`), mcptest.Result(`[]`), mcptest.Result(`{"resultType":7}`))
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, target, echo())
	if err != nil || resp.ResultType != ResultInputRequired || resp.Phase != Answered {
		t.Fatalf("%+v %v", resp, err)
	}
	for _, reason := range []string{"RESULT_TYPE_INVALID", "RESULT_INVALID", "RESULT_TYPE_INVALID"} {
		resp, err = p.Do(t.Context(), k, target, echo())
		expect(t, resp, err, reason, fault.Protocol, Answered)
	}
}

func TestModern_404WithAnErrorIsAnAnswer(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	s.On("tools/call", mcptest.StatusError(404, -32601, "no tools here"), mcptest.Result(okResult))
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	if err != nil || resp.Error == nil || resp.Error.Code != -32601 || resp.HTTPStatus != 404 || resp.Phase != Answered {
		t.Fatalf("%+v %v", resp, err)
	}
	resp, err = p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	if s.Count("server/discover") != 1 {
		t.Fatal("it was taken for a lost session")
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
	expect(t, resp, err, "CANCELED", fault.Transport, MaybeSent)
	s.Wait(t, "notifications/cancelled", 1)
	var params struct{ RequestID json.RawMessage }
	if json.Unmarshal(s.Seen("notifications/cancelled")[0].Params, &params) != nil || string(params.RequestID) != string(s.Seen("tools/call")[0].ID) {
		t.Fatalf("%s", s.Seen("notifications/cancelled")[0].Body)
	}
}

func TestLegacy_StreamIsResumed(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, nil)
	var id string
	s.On("tools/call", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		id = string(r.ID)
		mcptest.Stream("id: e1\nretry: 20\ndata:\n\n")(w, raw, r)
	})
	s.On("GET", mcptest.Stream("id: e2\ndata:\n\n"), func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":`+id+`,"result":`+okResult+`}`))(w, raw, r)
	})
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	got := s.Seen("GET")
	if len(got) != 2 || got[0].Header.Get("Last-Event-Id") != "e1" || got[1].Header.Get("Last-Event-Id") != "e2" || s.Count("tools/call") != 1 {
		t.Fatalf("%d", len(got))
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
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "SERVER_UNREACHABLE", fault.Transport, NotSent)
}

func TestLegacy_Batch(t *testing.T) {
	t.Parallel()
	batch := mcptest.JSON(`[{"jsonrpc":"2.0","method":"notifications/message","params":{}},{"jsonrpc":"2.0","id":$ID,"result":` + okResult + `}]`)
	old, newer := mcptest.New(t, "2025-03-26"), mcptest.New(t, "2025-06-18")
	old.On("tools/call", batch)
	newer.On("tools/call", batch)
	p := newPool(t, nil)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(old.URL), echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), keyOf(t, "b"), Target{Transport: TransportHTTP, URL: newer.URL}, echo())
	expect(t, resp, err, "ANSWER_INVALID", fault.Protocol, MaybeSent)
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
		r := Request{Method: "tools/call", Name: "slow", Params: json.RawMessage(`{"name":"slow","arguments":{}}`), Timeout: 100 * time.Millisecond}
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
