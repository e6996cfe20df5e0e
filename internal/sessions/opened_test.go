package sessions

import (
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Each connection is told of once when it is made and once when it has ended,
// and attempts that fail are none.
func TestPool_TellsOfConnections(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	open, ever := map[string]int{}, 0
	p := newPool(t, func(c *PoolConfig) {
		c.Opened = func(_ tenant.ID, server string) func() {
			mu.Lock()
			defer mu.Unlock()
			open[server]++
			ever++
			return func() { mu.Lock(); defer mu.Unlock(); open[server]-- }
		}
	})
	s := mcptest.New(t, mcptest.Modern)
	target := httpTarget(s.URL)
	for _, user := range []string{"a", "b"} {
		for range 2 {
			resp, err := p.Do(t.Context(), keyOf(t, user), target, echo())
			succeed(t, resp, err)
		}
	}
	if _, err := p.Do(t.Context(), keyOf(t, "c"), httpTarget("http://127.0.0.1:1/mcp"), echo()); err == nil {
		t.Error("connected to nothing")
	}
	mu.Lock()
	if open[target.ServerName] != 2 || ever != 2 {
		t.Errorf("%v open, %d ever", open, ever)
	}
	mu.Unlock()
	p.CloseKey(anyKey)
	p.CloseKey(anyKey)
	mu.Lock()
	defer mu.Unlock()
	if open[target.ServerName] != 0 || ever != 2 {
		t.Errorf("%v open after closing, %d ever", open, ever)
	}
}
