package sessions

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// told collects what a pool tells of eras and alarms.
type told struct {
	mu     sync.Mutex
	eras   []string
	alarms []string
}

func (n *told) learned(_ Key, era, version string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.eras = append(n.eras, era+" "+version)
}

func (n *told) alarm(k Key, _ Target, event string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.alarms = append(n.alarms, k.Tenant.String()+" "+k.Server+" "+event)
}

func (n *told) all() (eras, alarms []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.eras), slices.Clone(n.alarms)
}

func (n *told) in(c *PoolConfig) { c.Learned, c.Alarm = n.learned, n.alarm }

// What a server proved is told once, and what others learned before this process
// began is used: a legacy server is not probed, and one that became modern since
// is found out.
func TestEra_IsToldAndTakenOver(t *testing.T) {
	t.Parallel()
	n := &told{}
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, n.in)
	for _, user := range []string{"a", "b"} {
		resp, err := p.Do(t.Context(), keyOf(t, user), httpTarget(s.URL), echo())
		succeed(t, resp, err)
	}
	if eras, _ := n.all(); !slices.Equal(eras, []string{"LEGACY 2025-11-25"}) {
		t.Errorf("%v", eras)
	}
	if s.Count("server/discover") != 1 || s.Count("initialize") != 2 {
		t.Errorf("%d probes, %d handshakes", s.Count("server/discover"), s.Count("initialize"))
	}

	// Another process, which is told what this one learned.
	target := httpTarget(s.URL)
	target.KnownEra, target.KnownVersion = EraLegacy, "2025-11-25"
	resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), target, echo())
	succeed(t, resp, err)
	if s.Count("server/discover") != 1 || s.Count("initialize") != 3 {
		t.Errorf("a known legacy server was probed: %d probes", s.Count("server/discover"))
	}

	modern := mcptest.New(t, mcptest.Modern)
	target.URL = modern.URL
	n = &told{}
	p = newPool(t, n.in)
	for _, user := range []string{"a", "b"} {
		resp, err = p.Do(t.Context(), keyOf(t, user), target, echo())
		succeed(t, resp, err)
	}
	if eras, _ := n.all(); !slices.Equal(eras, []string{"MODERN 2026-07-28"}) || modern.Count("initialize") != 1 {
		t.Errorf("%v after %d handshakes", eras, modern.Count("initialize"))
	}
	// And one more process takes the modern one for what it is, with one request.
	target.KnownEra, target.KnownVersion = EraModern, "2026-07-28"
	modern.Reset()
	resp, err = newPool(t, nil).Do(t.Context(), keyOf(t, "a"), target, echo())
	succeed(t, resp, err)
	if modern.Count("server/discover") != 1 || modern.Count("initialize") != 0 {
		t.Errorf("%d probes, %d handshakes", modern.Count("server/discover"), modern.Count("initialize"))
	}
}

// A server that is known to be modern and gives no sign is not taken for legacy
// at once; one that says so is, unless the contract forbids it.
func TestEra_NoSignIsNoDowngrade(t *testing.T) {
	t.Parallel()
	for name, sign := range map[string]mcptest.Answer{
		"hang": nil, "500": mcptest.Status(500, "", ""), "page": mcptest.Status(200, "text/html", "<html>"), "empty": mcptest.Status(202, "", ""),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := &told{}
			s := mcptest.New(t, mcptest.Legacy)
			if sign == nil {
				sign = s.Hang()
			}
			s.On("server/discover", sign)
			p := newPool(t, func(c *PoolConfig) {
				n.in(c)
				c.Limits.Probe, c.Limits.Backoff, c.Limits.MaxBackoff = 50*time.Millisecond, time.Nanosecond, time.Nanosecond
			})
			target := httpTarget(s.URL)
			target.KnownEra, target.KnownVersion = EraModern, "2026-07-28"
			for range maxSilent - 1 {
				resp, err := p.Do(t.Context(), keyOf(t, "a"), target, echo())
				expect(t, resp, err, "ERA_UNKNOWN", fault.Transport, NotSent)
			}
			if s.Count("initialize") != 0 {
				t.Fatal("it was taken for legacy")
			}
			// With a downgrade forbidden that stays so.
			strict := target
			strict.DowngradeForbidden = true
			resp, err := p.Do(t.Context(), keyOf(t, "a"), strict, echo())
			expect(t, resp, err, "ERA_UNKNOWN", fault.Transport, NotSent)
			// Else the server is another one by now.
			resp, err = p.Do(t.Context(), keyOf(t, "a"), target, echo())
			succeed(t, resp, err)
			if _, alarms := n.all(); len(alarms) != 0 {
				t.Errorf("alarms over silence: %v", alarms)
			}
		})
	}
}

// A refused downgrade, whether this process or another one before it saw the newer
// version, and a server that leads elsewhere, raise an alarm each time.
func TestAlarm(t *testing.T) {
	t.Parallel()
	n := &told{}
	p := newPool(t, n.in)
	s := mcptest.New(t, mcptest.Legacy)
	target := httpTarget(s.URL)
	target.KnownEra, target.KnownVersion, target.DowngradeForbidden = EraModern, "2026-07-28", true
	for range 2 {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), target, echo())
		expect(t, resp, err, "DOWNGRADE_REFUSED", fault.Protocol, NotSent)
	}
	if s.Count("initialize") != 0 {
		t.Error("the handshake was tried")
	}
	// From one legacy version to an older one, too.
	older := mcptest.New(t, "2025-03-26")
	target.URL, target.KnownEra, target.KnownVersion = older.URL, EraLegacy, "2025-06-18"
	k := keyOf(t, "a")
	k.Server = "srv_2"
	resp, err := p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "DOWNGRADE_REFUSED", fault.Protocol, NotSent)

	away := mcptest.WithHeader("Location", "http://127.0.0.1:1/mcp", mcptest.Status(307, "", ""))
	moved := mcptest.New(t, mcptest.Modern)
	moved.On("tools/call", away)
	moved.On("tools/list", away)
	k.Server = "srv_3"
	resp, err = p.Do(t.Context(), k, httpTarget(moved.URL), echo())
	expect(t, resp, err, "REDIRECTED_AWAY", fault.Server, Answered)
	if _, err := p.List(t.Context(), k, httpTarget(moved.URL), KindTool); err == nil {
		t.Error("the list was read")
	}
	k.Server = "srv_4"
	drifted := httpTarget(moved.URL)
	drifted.Origin = "https://calendar.example"
	resp, err = p.Do(t.Context(), k, drifted, echo())
	expect(t, resp, err, "ORIGIN_MISMATCH", fault.Host, NotSent)
	_, alarms := n.all()
	want := []string{"ten_a srv_1 downgrade_refused", "ten_a srv_1 downgrade_refused", "ten_a srv_2 downgrade_refused",
		"ten_a srv_3 origin_refused", "ten_a srv_3 origin_refused", "ten_a srv_4 origin_refused"}
	if !slices.Equal(alarms, want) {
		t.Errorf("%q", alarms)
	}
}

// Which refusals on a modern connection speak against its era: the request was not
// carried out, and before the next one the era is found out again.
func TestEra_RefusalsThatSpeakAgainstIt(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		answer  mcptest.Answer
		doubted bool
	}{
		{"400 session missing", mcptest.StatusError(400, -32600, "Mcp-Session-Id is missing"), true},
		{"400 not initialized", mcptest.StatusError(400, -32000, "Server not initialized"), true},
		{"400 page", mcptest.Status(400, "text/html", "<html>"), true},
		{"400 empty", mcptest.Status(400, "", ""), true},
		{"404 page", mcptest.Status(404, "text/html", "<html>"), true},
		{"405", mcptest.Status(405, "", ""), true},
		{"406", mcptest.Status(406, "", ""), true},
		{"404 method not found", mcptest.StatusError(404, -32601, "no"), false},
		{"400 invalid params", mcptest.StatusError(400, -32602, "no"), false},
		{"400 header mismatch", mcptest.StatusError(400, -32020, "no"), false},
		{"400 capability missing", mcptest.StatusError(400, -32021, "no"), false},
		{"200 error", mcptest.Error(-32000, "no", ""), false},
		{"401", mcptest.Status(401, "", ""), false},
		{"403", mcptest.Status(403, "", ""), false},
		{"413", mcptest.Status(413, "", ""), false},
		{"429", mcptest.Status(429, "", ""), false},
		{"500", mcptest.Status(500, "", ""), false},
		{"503", mcptest.Status(503, "", ""), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Modern)
			s.On("tools/call", c.answer, mcptest.Result(okResult))
			p := newPool(t, nil)
			resp, _ := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			if resp.Doubted != c.doubted || resp.Doubted && resp.Phase != Answered {
				t.Errorf("doubted %v with phase %q", resp.Doubted, resp.Phase)
			}
			if n := s.Count("tools/call"); n != 1 {
				t.Errorf("it was sent %d times", n)
			}
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			succeed(t, resp, err)
			if probes := s.Count("server/discover"); (probes == 2) != c.doubted {
				t.Errorf("%d probes", probes)
			}
		})
	}
}

// A modern server that is replaced by a legacy one, and the other way round, is
// found out by its refusals, and lists go on at once.
func TestEra_ChangesUnderAConnection(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)

	noSession := mcptest.StatusError(400, -32000, "Bad Request: no valid session ID provided")
	s.On("server/discover", noSession)
	s.On("initialize", mcptest.WithHeader("Mcp-Session-Id", "s1", mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}`)))
	s.On("tools/list", noSession, mcptest.Result(`{"tools":[{"name":"echo","inputSchema":{}}]}`))
	l, err := p.List(t.Context(), k, target, KindTool)
	if err != nil || l.Era != EraLegacy || len(l.Items) != 1 {
		t.Fatalf("%+v, %v", l, err)
	}

	// Back again: the session is gone, and its successor knows no handshake.
	s.On("tools/list", mcptest.Status(404, "", ""), mcptest.Result(`{"resultType":"complete","tools":[]}`))
	s.On("initialize", mcptest.StatusError(404, -32601, "method not found"))
	s.On("server/discover", mcptest.Result(discovered))
	if l, err = p.List(t.Context(), k, target, KindTool); err != nil || l.Era != EraModern {
		t.Fatalf("%+v, %v", l, err)
	}
}

// The same signs on stdio: every error but the three of the modern era leads to
// initialize and is remembered.
func TestStdio_SignsOfAnEra(t *testing.T) {
	t.Parallel()
	failing := func(code int) string {
		return fmt.Sprintf(`{"jsonrpc":"2.0","id":$ID,"error":{"code":%d,"message":"no"}}`, code)
	}
	for _, c := range []struct{ name, answer, reason string }{
		{"method not found", failing(-32601), ""}, {"invalid request", failing(-32600), ""}, {"invalid params", failing(-32602), ""},
		{"internal error", failing(-32603), ""}, {"server error", failing(-32000), ""}, {"custom", failing(-32002), ""}, {"zero", failing(0), ""},
		{"empty result", `{"jsonrpc":"2.0","id":$ID,"result":{}}`, ""},
		{"older versions", `{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2024-11-05"],"capabilities":{}}}`, ""},
		{"unknown versions", `{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2031-01-01"],"capabilities":{}}}`, "VERSION_UNSUPPORTED"},
		{"header mismatch", failing(-32020), "DISCOVERY_REFUSED"}, {"capability missing", failing(-32021), "DISCOVERY_REFUSED"},
		{"version unsupported", failing(-32022), "VERSION_UNSUPPORTED"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, target := stdioPool(t, childRuntime(t, "ERA=legacy", "DISCOVER="+c.answer), nil)
			k := keyOf(t, "a")
			resp, err := p.Do(t.Context(), k, target, tool("echo"))
			if c.reason != "" {
				expect(t, resp, err, c.reason, fault.Protocol, NotSent)
			} else if said(t, resp, err); resp.Era != EraLegacy {
				t.Errorf("%+v", resp)
			}
			if noted := p.eras[registrationOf(k)].legacy; noted != (c.reason == "") {
				t.Errorf("remembered as legacy: %v", noted)
			}
		})
	}
}

// A child that is known to be modern may start as slowly as it likes: the verdict
// is the server's, not that of one start.
func TestStdio_ASlowStartKeepsTheVerdict(t *testing.T) {
	t.Parallel()
	r := childRuntime(t, "ERA=modern")
	r.Command = append([]string{"sh", "-c", `echo banner; sleep 0.4; exec "$@"`, "sh"}, r.Command...)
	p, target := stdioPool(t, r, func(c *PoolConfig) { c.Limits.Probe, c.Limits.Connect = 10*time.Millisecond, time.Hour })
	for known, want := range map[string]string{"": EraLegacy, EraModern: EraModern} {
		if target.KnownEra = known; known != "" {
			target.KnownVersion = "2026-07-28"
		}
		k := keyOf(t, "a")
		k.Server = "srv_" + known
		resp, err := p.Do(t.Context(), k, target, tool("echo"))
		if said(t, resp, err); resp.Era != want {
			t.Errorf("known as %q it comes up %s", known, resp.Era)
		}
		target.KnownVersion = ""
	}
}

// A connection that was made while a downgrade was allowed, such as by an admin's
// probe of a server that all users share, serves nobody to whom it is forbidden.
func TestEra_AFallenBackConnectionServesNoStrictContract(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, nil)
	target := httpTarget(s.URL)
	target.KnownEra, target.KnownVersion = EraModern, "2026-07-28"
	resp, err := p.Do(t.Context(), sharedKey(t), target, echo())
	succeed(t, resp, err)
	target.DowngradeForbidden = true
	resp, err = p.Do(t.Context(), sharedKey(t), target, echo())
	expect(t, resp, err, "DOWNGRADE_REFUSED", fault.Protocol, NotSent)
	if n := s.Count("tools/call"); n != 1 {
		t.Errorf("%d calls", n)
	}
}
