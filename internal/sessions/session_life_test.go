package sessions

import (
	"fmt"
	"net/http"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// Each process has sessions of its own at a stateful server: calls that go to one
// or the other all succeed with one handshake each, and a process that starts anew
// begins with a handshake, for no id of a session outlives its process.
func TestLegacy_EachProcessHasItsOwnSession(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	var mu sync.Mutex
	live := map[string]bool{}
	s.On("initialize", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		mu.Lock()
		id := fmt.Sprintf("s%d", len(live)+1)
		live[id] = true
		mu.Unlock()
		mcptest.WithHeader("Mcp-Session-Id", id, mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}`))(w, raw, r)
	})
	known := func(next mcptest.Answer) mcptest.Answer {
		return func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
			mu.Lock()
			ok := live[raw.Header.Get("Mcp-Session-Id")]
			mu.Unlock()
			if !ok {
				mcptest.Status(404, "", "")(w, raw, r)
				return
			}
			next(w, raw, r)
		}
	}
	s.On("tools/call", known(mcptest.Result(okResult)))
	s.On("tools/list", known(mcptest.Result(`{"tools":[]}`)))
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	target.KnownEra, target.KnownVersion = EraLegacy, "2025-11-25"
	processes := []*Pool{newPool(t, nil), newPool(t, nil)}
	for i := range 10 {
		resp, err := processes[i%2].Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
	}
	if n := s.Count("initialize"); n != 2 {
		t.Errorf("%d handshakes of two processes", n)
	}
	// The server forgets everything while the process is away.
	mu.Lock()
	for id := range live {
		live[id] = false
	}
	mu.Unlock()
	s.Reset()
	again := newPool(t, nil)
	if _, err := again.List(t.Context(), k, target, KindTool); err != nil {
		t.Fatal(err)
	}
	if first := s.Requests()[0]; first.Method != "initialize" || first.Header.Get("Mcp-Session-Id") != "" || s.Count("initialize") != 1 {
		t.Errorf("it begins with %s %v", first.Method, first.Header)
	}
	// And the processes that lived on find out by themselves.
	for _, p := range processes {
		if _, err := p.List(t.Context(), k, target, KindTool); err != nil {
			t.Error(err)
		}
	}
	if n := s.Count("initialize"); n != 3 {
		t.Errorf("%d handshakes", n)
	}
}
