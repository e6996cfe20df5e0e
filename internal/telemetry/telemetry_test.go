package telemetry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// line logs once and returns the line without its time.
func line(t *testing.T, log func(*slog.Logger)) map[string]any {
	t.Helper()
	var buf bytes.Buffer
	log(NewLogger(&buf, slog.LevelDebug))
	if n := bytes.Count(buf.Bytes(), []byte("\n")); n != 1 {
		t.Fatalf("%d lines: %s", n, buf.Bytes())
	}
	var m map[string]any
	if err := json.Unmarshal(buf.Bytes(), &m); err != nil {
		t.Fatal(err)
	}
	if _, ok := m["time"]; !ok {
		t.Error("no time")
	}
	delete(m, "time")
	return m
}

func TestLogger_Scope(t *testing.T) {
	t.Parallel()
	ctx := With(t.Context(), Scope{Request: "r", Tenant: "t"})
	ctx = With(ctx, Scope{Session: "s", Call: "c"})
	scope := map[string]any{"level": "INFO", "msg": "m", "request": "r", "tenant": "t", "session": "s", "call": "c"}
	with := func(more map[string]any) map[string]any {
		out := map[string]any{}
		for _, m := range []map[string]any{scope, more} {
			for k, v := range m {
				out[k] = v
			}
		}
		return out
	}
	tests := []struct {
		name string
		log  func(*slog.Logger)
		want map[string]any
	}{
		{"plain", func(l *slog.Logger) { l.InfoContext(ctx, "m", "a", 1) }, with(map[string]any{"a": 1.0})},
		{"with attributes", func(l *slog.Logger) { l.With("b", "x").InfoContext(ctx, "m") }, with(map[string]any{"b": "x"})},
		{"in a group", func(l *slog.Logger) { l.With("b", "x").WithGroup("g").With("c", 1).InfoContext(ctx, "m", "d", 2) },
			with(map[string]any{"b": "x", "g": map[string]any{"c": 1.0, "d": 2.0}})},
		{"named by the line itself", func(l *slog.Logger) { l.InfoContext(ctx, "m", "tenant", "other") }, with(map[string]any{"tenant": "other"})},
		{"no scope", func(l *slog.Logger) { l.Info("m") }, map[string]any{"level": "INFO", "msg": "m"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := line(t, tt.log); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("line %v, want %v", got, tt.want)
			}
		})
	}
}

func TestLogger_GroupsDoNotShareAttributes(t *testing.T) {
	t.Parallel()
	var buf bytes.Buffer
	base := NewLogger(&buf, slog.LevelInfo).WithGroup("g")
	a, b := base.With("a", 1), base.With("b", 2)
	a.Info("m")
	b.Info("m")
	if s := buf.String(); strings.Count(s, `"a":1`) != 1 || strings.Count(s, `"b":2`) != 1 {
		t.Errorf("lines %s", s)
	}
}

func TestLogger_Redacts(t *testing.T) {
	t.Parallel()
	const word = "hunter2"
	for _, key := range []string{
		"password", "Authorization", "api_key", "X-Api-Key", "accessToken", "refresh_token", "clientSecret",
		"set-cookie", "credentials", "operatorKey", "requestState",
	} {
		got := line(t, func(l *slog.Logger) {
			l.With(key, word).WithGroup("g").Info("m", key, word, "any", slog.AnyValue([]byte("x")), slog.Group("h", key, []string{word}))
		})
		if s := fmt.Sprint(got); strings.Contains(s, word) {
			t.Errorf("%s tells the secret: %s", key, s)
		}
	}
	for _, value := range []string{"bhk_abc_" + word, "Bearer " + word, "Basic " + word} {
		got := line(t, func(l *slog.Logger) { l.Info("m", "header", value) })
		if got["header"] != redacted {
			t.Errorf("%q is logged as %v", value, got["header"])
		}
	}
	kept := line(t, func(l *slog.Logger) { l.Info("m", "tokenGeneration", 7, "key", "key_1", "pageSize", 5) })
	if kept["tokenGeneration"] != 7.0 || kept["key"] != "key_1" {
		t.Errorf("too much is redacted: %v", kept)
	}
}

func TestLogger_FaultsWithTheirCause(t *testing.T) {
	t.Parallel()
	inner := fault.New(fault.Unavailable, "X", "inner public").Cause(io.EOF)
	err := fmt.Errorf("read: %w", fault.New(fault.Internal, "INTERNAL", "internal error").Cause(inner))
	tests := []struct {
		err  error
		want string
	}{
		{err, "read: internal error: inner public: EOF"},
		{errors.New("plain"), "plain"},
		{fault.New(fault.Denied, "D", "no"), "no"},
	}
	for _, tt := range tests {
		if got := line(t, func(l *slog.Logger) { l.Info("m", "error", tt.err) }); got["error"] != tt.want {
			t.Errorf("error %q, want %q", got["error"], tt.want)
		}
	}
}

func TestLogger_CutsText(t *testing.T) {
	t.Parallel()
	got := line(t, func(l *slog.Logger) { l.Info("m", "s", strings.Repeat("é", 1<<20)) })
	if s := got["s"].(string); len(s) > maxText+len("…") || strings.ContainsRune(s, '\uFFFD') {
		t.Errorf("%d bytes are logged", len(s))
	}
}

func TestMetrics_Values(t *testing.T) {
	t.Parallel()
	m := NewMetrics()
	m.Request("Calls.Create", "OK", time.Second)
	m.CallState("t", "calendar", "SUCCEEDED")
	m.CallState("t", "calendar", "SUCCEEDED")
	m.CallTook("t", "calendar", 20*time.Millisecond)
	m.CatalogRefresh("t", "calendar", "changed")
	m.ConnectionOpened("t", "calendar")
	m.ConnectionOpened("t", "calendar")()
	m.SecurityEvent("t", "calendar", "downgrade_refused")
	m.RateLimited("t")
	m.RedisUp(true)

	rec := httptest.NewRecorder()
	m.Handler(slog.New(slog.DiscardHandler)).ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	body := rec.Body.String()
	for _, want := range []string{
		`bulkhead_requests_total{code="OK",method="Calls.Create"} 1`,
		`bulkhead_request_duration_seconds_sum{method="Calls.Create"} 1`,
		`bulkhead_calls_total{server="calendar",state="SUCCEEDED",tenant="t"} 2`,
		`bulkhead_call_duration_seconds_bucket{server="calendar",tenant="t",le="0.025"} 1`,
		`bulkhead_call_duration_seconds_bucket{server="calendar",tenant="t",le="0.01"} 0`,
		`bulkhead_catalog_refreshes_total{outcome="changed",server="calendar",tenant="t"} 1`,
		`bulkhead_connections{server="calendar",tenant="t"} 1`,
		`bulkhead_security_events_total{event="downgrade_refused",server="calendar",tenant="t"} 1`,
		`bulkhead_rate_limited_total{tenant="t"} 1`,
		`bulkhead_redis_up 1`, `go_goroutines `, `process_open_fds `,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s", want)
		}
	}
	if rec.Code != 200 {
		t.Errorf("status %d", rec.Code)
	}
}

func TestMetrics_BoundedSeries(t *testing.T) {
	t.Parallel()
	m := NewMetrics()
	var wg sync.WaitGroup
	closers := make([][]func(), 4)
	for w := range 4 {
		wg.Go(func() {
			for i := range 3000 {
				m.CallState(fmt.Sprintf("t%d", i), fmt.Sprintf("s%d", w), "SUCCEEDED")
				closers[w] = append(closers[w], m.ConnectionOpened("one", fmt.Sprintf("s%d", i)))
				m.SecurityEvent("t", "s", fmt.Sprintf("event%d", i))
				m.Request(fmt.Sprintf("m%d", i), "OK", 0)
			}
		})
	}
	wg.Wait()
	for name, got := range map[string][2]int{
		"calls":       {testutil.CollectAndCount(m.calls), maxPairs + maxTenants + 1},
		"connections": {testutil.CollectAndCount(m.connections), maxServers + 1},
		"security":    {testutil.CollectAndCount(m.security), maxWords + 1},
		"requests":    {testutil.CollectAndCount(m.requests), maxMethods + 1},
	} {
		if got[0] > got[1] {
			t.Errorf("%s: %d series, want at most %d", name, got[0], got[1])
		}
	}
	m.ForgetServer("one", "s2") // and what is open stays open, under no name
	for _, closed := range slices.Concat(closers...) {
		closed()
	}
	for _, server := range []string{other, "s1"} {
		if v := testutil.ToFloat64(m.connections.WithLabelValues("one", server)); v != 0 {
			t.Errorf("connections of %s: %v after all were closed", server, v)
		}
	}
}

// The servers of one tenant fill its own labels only, and a deleted one leaves
// nothing behind.
func TestMetrics_ForgetServer(t *testing.T) {
	t.Parallel()
	m := NewMetrics()
	series := func() int {
		return testutil.CollectAndCount(m.calls) + testutil.CollectAndCount(m.callTime) +
			testutil.CollectAndCount(m.refreshes) + testutil.CollectAndCount(m.connections)
	}
	use := func(tenant, server string) {
		m.CallState(tenant, server, "SUCCEEDED")
		m.CallTook(tenant, server, time.Second)
		m.CatalogRefresh(tenant, server, "ok")
		m.ConnectionOpened(tenant, server)()
	}
	use("b", "calendar")
	before := series()
	for i := range 200 {
		use("a", fmt.Sprintf("s%d", i))
		m.ForgetServer("a", fmt.Sprintf("s%d", i))
	}
	if got := series(); got != before {
		t.Errorf("%d series after 200 servers came and went, want %d", got, before)
	}
	for i := range 200 {
		use("a", fmt.Sprintf("s%d", i))
	}
	if got, want := series(), before+4*(maxServers+1); got != want {
		t.Errorf("%d series with 200 servers, want %d", got, want)
	}
	if got := testutil.ToFloat64(m.calls.WithLabelValues("a", other, "SUCCEEDED")); got != 200-maxServers {
		t.Errorf("%v calls of other servers", got)
	}
	m.ForgetServer("a", "s150") // has no series of its own
	m.ForgetServer("a", other)
	m.ForgetServer("a", "s0")
	use("a", "s199")
	use("b", "mail")
	if got, want := series(), before+4*(maxServers+1)+4; got != want {
		t.Errorf("%d series after one made room, want %d", got, want)
	}
	if got := testutil.ToFloat64(m.calls.WithLabelValues("a", "s199", "SUCCEEDED")); got != 1 {
		t.Errorf("s199 has %v calls", got)
	}
	if got := testutil.ToFloat64(m.calls.WithLabelValues("b", "calendar", "SUCCEEDED")); got != 1 {
		t.Errorf("another tenant's calls: %v", got)
	}
}

func TestMetrics_HostileLabels(t *testing.T) {
	t.Parallel()
	m := NewMetrics()
	m.CallState("t\xff\xfe", strings.Repeat("é", 100), "a\nb\"c")
	m.SecurityEvent(strings.Repeat("x", 1<<20), "\xff", "\x00")
	rec := httptest.NewRecorder()
	m.Handler(slog.New(slog.DiscardHandler)).ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	if rec.Code != 200 || rec.Body.Len() > 1<<20 {
		t.Errorf("status %d, %d bytes", rec.Code, rec.Body.Len())
	}
}

func BenchmarkCallState(b *testing.B) {
	m := NewMetrics()
	for b.Loop() {
		m.CallState("ten_1", "calendar", "SUCCEEDED")
	}
}
