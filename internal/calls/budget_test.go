package calls

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// TestLargeAnswers_AreGivenBack: a call that is recorded leaves room for the next,
// whichever way it ended; the answers of status queries do too.
func TestLargeAnswers_AreGivenBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	out := egress.New(egress.Policy{Development: true})
	t.Cleanup(out.CloseIdle)
	pool := sessions.NewPool(sessions.PoolConfig{Egress: out, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), TempDir: t.TempDir(),
		Limits: sessions.Limits{TenantAnswerBytes: 400 << 10}})
	t.Cleanup(func() {
		if err := pool.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	text := strings.Repeat("x", 200<<10)
	var result, found string
	server := mcptest.New(t, mcptest.Modern)
	real := func(ctx context.Context, s sent, result string) (sessions.Response, error) {
		server.On("tools/call", mcptest.Result(result))
		return pool.Do(ctx, s.key, sessions.Target{ServerName: "x", Transport: sessions.TransportHTTP, URL: server.URL},
			sessions.Request{Method: "tools/call", Name: s.tool, Params: []byte(`{}`)})
	}
	w.sender.answer(func(ctx context.Context, s sent, n int) (sessions.Response, error) {
		switch s.tool {
		case "write_query":
			return broke(ctx, s, n)
		case "find":
			return real(ctx, s, found)
		}
		return real(ctx, s, result)
	})
	for _, c := range []struct {
		tool, result string
		state        State
	}{
		{"read", `{"content":[{"type":"text","text":"` + text + `"}]}`, Succeeded},
		{"write", `{"content":[{"type":"text","text":"` + text + `"}]}`, Succeeded},
		{"write", `{"isError":true,"content":[{"type":"text","text":"` + text + `"}]}`, Failed},
		{"write", `{"isError":1,"content":[{"type":"text","text":"` + text + `"}]}`, Uncertain},
		{"write_query", `{"structuredContent":{"found":true,"id":"` + text[:10] + `"},"content":"` + text + `"}`, Succeeded},
		{"write_query", `{"structuredContent":{"found":false},"content":"` + text + `"}`, Uncertain},
	} {
		result, found = c.result, c.result
		for i := range 4 {
			if got := sc.propose(c.tool); got.State != c.state || got.Error != nil && got.Error.Code == "RESULT_BUDGET" {
				t.Fatalf("%s, call %d: %s %+v", c.tool, i, got.State, got.Error)
			}
		}
	}
}
