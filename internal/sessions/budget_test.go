package sessions

import (
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

func TestBudget(t *testing.T) {
	t.Parallel()
	b := newBudget(freeAnswer*4, freeAnswer*3)
	x, y := tenantID(t, "ten_x"), tenantID(t, "ten_y")
	one, two, three := &lease{budget: b, tenant: x}, &lease{budget: b, tenant: x}, &lease{budget: b, tenant: y}
	for i, c := range []struct {
		l  *lease
		n  int
		ok bool
	}{
		{one, freeAnswer, true}, {one, 3 * freeAnswer, true}, {one, 2 * freeAnswer, true}, {two, freeAnswer, true}, {two, 2 * freeAnswer, true},
		{two, 2*freeAnswer + 1, false}, {three, 2 * freeAnswer, true}, {three, 2*freeAnswer + 1, false}, {nil, 1 << 30, true},
	} {
		if err := c.l.grow(c.n); (err == nil) != c.ok {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	one.release()
	one.release()
	two.adopt(three)
	if b.used != 2*freeAnswer || three.held != 0 {
		t.Fatalf("%+v", b)
	}
	(*lease)(nil).adopt(one)
}

// held tells what all answers hold.
func held(p *Pool) int64 {
	p.answers.mu.Lock()
	defer p.answers.mu.Unlock()
	return p.answers.used
}

// TestAnswersAreBoundedInAll: an answer that is held takes from its tenant, and
// what no longer fits ends at once with its own error.
func TestAnswersAreBoundedInAll(t *testing.T) {
	t.Parallel()
	large := `{"content":[{"type":"text","text":"` + strings.Repeat("x", 200<<10) + `"}]}`
	for name, answer := range map[string]mcptest.Answer{
		"json": mcptest.Result(large), "stream": mcptest.Stream(mcptest.ResultEvent(large)),
		"stream of many lines": mcptest.Stream("data: {\"jsonrpc\":\"2.0\",\"id\":$ID,\"result\":\n" + strings.Repeat("data:  "+strings.Repeat(" ", 1000)+"\n", 200) + "data: " + large + "}\n\n"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Modern)
			s.On("tools/call", answer)
			p := newPool(t, func(c *PoolConfig) { c.Limits.AnswerBytes, c.Limits.TenantAnswerBytes = 2<<20, 700<<10 })
			a, b := keyOf(t, "a"), keyOf(t, "a")
			b.Tenant = tenantID(t, "ten_b")
			first, err := p.Do(t.Context(), a, httpTarget(s.URL), echo())
			succeed(t, first, err)
			if h := held(p); h < 136<<10 {
				t.Fatalf("%d bytes are held", h)
			}
			var more []Response
			for len(more) < 8 {
				var resp Response
				if resp, err = p.Do(t.Context(), a, httpTarget(s.URL), echo()); err != nil {
					expect(t, resp, err, "RESULT_BUDGET", fault.Host, MaybeSent)
					break
				}
				more = append(more, resp)
			}
			if f, _ := fault.As(err); f == nil || f.Kind != fault.Exhausted || len(more) == 8 {
				t.Fatalf("after %d more: %v", len(more), err)
			}
			resp, err := p.Do(t.Context(), b, httpTarget(s.URL), echo())
			succeed(t, resp, err)
			resp.Release()
			first.Release()
			for i := range more {
				more[i].Release()
			}
			resp, err = p.Do(t.Context(), a, httpTarget(s.URL), echo())
			succeed(t, resp, err)
			resp.Release()
			resp.Release()
			if h := held(p); h != 0 {
				t.Fatalf("%d bytes are held for nobody", h)
			}
		})
	}
}

func TestAnswersAreBoundedInAll_Lists(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/list", mcptest.Result(`{"tools":[{"name":"x","description":"`+strings.Repeat("x", 200<<10)+`"}]}`))
	p := newPool(t, func(c *PoolConfig) { c.Limits.TenantAnswerBytes = 600 << 10 })
	for i := range 6 {
		l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), KindTool)
		if err != nil || len(l.Items) != 1 || (l.Negotiation > 0) != (i == 0) {
			t.Fatalf("list %d: %v, negotiated in %s", i, err, l.Negotiation)
		}
	}
	if h := held(p); h != 0 {
		t.Fatalf("%d bytes are held", h)
	}
}

func TestAnswersAreBoundedInAll_Stdio(t *testing.T) {
	t.Parallel()
	p, target := stdioPool(t, childRuntime(t), func(c *PoolConfig) { c.Limits.TenantAnswerBytes = 700 << 10 })
	k := keyOf(t, "a")
	for range 5 { // answers that nobody holds leave room for the next
		resp, err := p.Do(t.Context(), k, target, tool("large"))
		if len(said(t, resp, err)) != 200<<10 {
			t.Fatal("the answer was cut")
		}
		resp.Release()
	}
	var all []Response
	for {
		resp, err := p.Do(t.Context(), k, target, tool("large"))
		if err != nil {
			expect(t, resp, err, "RESULT_BUDGET", fault.Host, MaybeSent)
			break
		}
		if all = append(all, resp); len(all) == 8 {
			t.Fatal("no bound")
		}
	}
	resp, err := p.Do(t.Context(), k, target, tool("large, id last"))
	expect(t, resp, err, "RESULT_BUDGET", fault.Host, MaybeSent)
	// The connection lives, and small answers pass.
	resp, err = p.Do(t.Context(), k, target, tool("echo"))
	if said(t, resp, err) != "ok" || len(p.Connections(k.Tenant, func(Key) bool { return true })) != 1 {
		t.Fatal("the connection ended")
	}
	resp, err = p.Do(t.Context(), k, target, tool("empty"))
	expect(t, resp, err, "ANSWER_EMPTY", fault.Protocol, MaybeSent)
	for i := range all {
		all[i].Release()
	}
	if h := held(p); h != 0 {
		t.Fatalf("%d bytes are held for nobody", h)
	}
}
