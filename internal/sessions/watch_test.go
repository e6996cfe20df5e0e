package sessions

import (
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// changes records what a pool tells.
type changes struct {
	mu   sync.Mutex
	told []Change
}

func (c *changes) add(ch Change) { c.mu.Lock(); c.told = append(c.told, ch); c.mu.Unlock() }

func (c *changes) count(kind string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ch := range c.told {
		if ch.Kind == kind && !ch.Connected {
			n++
		}
	}
	return n
}

func (c *changes) connected() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ch := range c.told {
		if ch.Connected {
			n++
		}
	}
	return n
}

func watchedPool(t *testing.T, change func(*Limits)) (*Pool, *changes) {
	var seen changes
	p := newPool(t, func(c *PoolConfig) {
		c.Limits.Coalesce, c.Limits.Reopen, c.Limits.MaxReopen = 10*time.Millisecond, 30*time.Millisecond, 200*time.Millisecond
		if change != nil {
			change(&c.Limits)
		}
	})
	p.OnChange(seen.add)
	return p, &seen
}

func TestWatcher_BothEras(t *testing.T) {
	t.Parallel()
	ack := mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":$ID},"notifications":{"toolsListChanged":true}}}`)
	changed := mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`)
	for _, c := range []struct{ version, open string }{{mcptest.Modern, "subscriptions/listen"}, {mcptest.Legacy, "GET"}} {
		s := mcptest.New(t, c.version)
		s.Capabilities(`{"tools":{"listChanged":true},"prompts":{"listChanged":true}}`)
		go1, go2 := make(chan struct{}), make(chan struct{})
		first := mcptest.StreamThen(s.After(go1, func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
			w.Write([]byte(changed))
			w.(http.Flusher).Flush()
			s.After(go2, mcptest.Cut())(w, raw, r)
		}), ack)
		s.On(c.open, first, mcptest.StreamThen(s.Hang(), ack))
		p, seen := watchedPool(t, nil)
		k := keyOf(t, "a")
		resp, err := p.Do(t.Context(), k, httpTarget(s.URL), echo())
		succeed(t, resp, err)
		eventually(t, "connecting is told", func() bool { return seen.connected() == 1 })
		eventually(t, "it is seen", func() bool { return p.Connections(k.Tenant, anyKey)[0].Watching })
		close(go1)
		eventually(t, "the change is told", func() bool { return seen.count(KindTool) == 1 })
		close(go2)
		s.Wait(t, c.open, 2)
		eventually(t, "the gap is told", func() bool { return seen.count("") >= 1 })
		got := s.Seen(c.open)[0]
		if c.version == mcptest.Modern {
			var params struct {
				Notifications map[string]bool
				Meta          map[string]any `json:"_meta"`
			}
			if err := json.Unmarshal(got.Params, &params); err != nil || len(params.Notifications) != 2 || !params.Notifications["toolsListChanged"] || !params.Notifications["promptsListChanged"] || params.Meta == nil {
				t.Errorf("%s", got.Body)
			}
			if got.Header.Get("Mcp-Method") != "subscriptions/listen" {
				t.Error("no Mcp-Method")
			}
		} else if got.Header.Get("Accept") != "text/event-stream" || got.Header.Get("Mcp-Session-Id") != "session-1" {
			t.Errorf("%v", got.Header)
		}
	}
}

func TestFO075_ServerHasNoGETStream(t *testing.T) {
	t.Parallel()
	for name, a := range map[string]mcptest.Answer{
		"405": mcptest.Status(405, "", ""), "404": mcptest.Status(404, "", ""), "400": mcptest.Status(400, "", ""), "json": mcptest.JSON(`{}`),
	} {
		s := mcptest.New(t, mcptest.Legacy)
		s.Capabilities(`{"tools":{"listChanged":true}}`)
		s.On("GET", a)
		p, _ := watchedPool(t, func(l *Limits) { l.Reopen = time.Millisecond })
		for range 3 {
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			succeed(t, resp, err)
		}
		s.Wait(t, "GET", 1)
		time.Sleep(50 * time.Millisecond)
		if n := s.Count("GET"); n != 1 {
			t.Errorf("%s: %d attempts", name, n)
		}
	}
}

func TestFO081_ReopeningIsPaced(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, piece string
		window      time.Duration
		most        int
	}{
		{"clean close", ": bye\n\n", 700 * time.Millisecond, 5}, // pauses of at least 100, 200, 200 … ms
		{"hint", "retry: 500\n\n", 400 * time.Millisecond, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Legacy)
			s.Capabilities(`{"tools":{"listChanged":true}}`)
			s.On("GET", mcptest.Stream(c.piece))
			p, _ := watchedPool(t, func(l *Limits) { l.Reopen = 100 * time.Millisecond })
			resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			succeed(t, resp, err)
			s.Wait(t, "GET", 1)
			time.Sleep(c.window)
			if n := s.Count("GET"); n > c.most {
				t.Errorf("%d attempts", n)
			}
			// The loop stops with the connection.
			p.CloseKey(anyKey)
			s.Wait(t, "DELETE", 1)
			n := s.Count("GET")
			time.Sleep(700 * time.Millisecond)
			if s.Count("GET") > n {
				t.Error("it goes on after the end")
			}
		})
	}
	if l := (Limits{}).withDefaults(); l.Reopen < time.Second || l.Coalesce < time.Second {
		t.Errorf("defaults %v %v", l.Reopen, l.Coalesce)
	}
}

func TestWatcher_StormIsCoalesced(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{"listChanged":true}}`)
	storm := strings.Repeat(mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`), 5000)
	s.On("GET", mcptest.StreamThen(s.Hang(), storm))
	p, seen := watchedPool(t, func(l *Limits) { l.Coalesce = 300 * time.Millisecond })
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	eventually(t, "a change is told", func() bool { return seen.count(KindTool)+seen.count("") >= 1 })
	time.Sleep(400 * time.Millisecond)
	if n := seen.count(KindTool) + seen.count(""); n > 3 {
		t.Errorf("told %d times", n)
	}
}

func TestWatcher_RealServer(t *testing.T) {
	t.Parallel()
	for _, versions := range [][]string{nil, {"2025-11-25"}} {
		real := mcptest.NewReal(t)
		p, seen := watchedPool(t, nil)
		target := httpTarget(real.URL)
		target.Versions = versions
		k := keyOf(t, "a")
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		eventually(t, "the stream is open", func() bool { return p.Connections(k.Tenant, anyKey)[0].Watching })
		real.AddTool("later")
		eventually(t, "the change is told", func() bool { return seen.count(KindTool) > 0 })
		l, err := p.List(t.Context(), k, target, KindTool)
		if err != nil || len(l.Items) != 3 {
			t.Fatalf("%+v %v", l, err)
		}
	}
}
