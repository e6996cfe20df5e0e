package sessions

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// updates records what a pool tells of resources.
type updates struct {
	mu   sync.Mutex
	told []Updated
}

func (u *updates) add(v Updated) { u.mu.Lock(); u.told = append(u.told, v); u.mu.Unlock() }

func (u *updates) count(uri string, refused bool) (n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, v := range u.told {
		if v.URI == uri && v.Refused == refused {
			n++
		}
	}
	return n
}

func subscribingPool(t *testing.T, change func(*PoolConfig)) (*Pool, *updates) {
	var seen updates
	p := newPool(t, func(c *PoolConfig) {
		c.Limits.Coalesce, c.Limits.Reopen, c.Limits.MaxReopen = 10*time.Millisecond, 20*time.Millisecond, 100*time.Millisecond
		if change != nil {
			change(c)
		}
	})
	p.OnUpdated(seen.add)
	return p, &seen
}

// listener is a modern server's side of subscriptions/listen: it grants what is
// asked for and holds the streams.
type listener struct {
	s       *mcptest.Server
	refuses string // a URI that is not granted

	mu      sync.Mutex
	streams map[string]chan string // what to send, by the id of the request
	ids     []string
}

func newListener(s *mcptest.Server) *listener {
	l := &listener{s: s, streams: map[string]chan string{}}
	s.On("subscriptions/listen", l.serve)
	return l
}

func listened(r *mcptest.Request) []string {
	var p struct {
		Notifications struct{ ResourceSubscriptions []string }
	}
	if err := json.Unmarshal(r.Params, &p); err != nil {
		return nil
	}
	return p.Notifications.ResourceSubscriptions
}

func (l *listener) serve(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
	granted, _ := json.Marshal(slices.DeleteFunc(listened(r), func(u string) bool { return u == l.refuses }))
	w.Header().Set("Content-Type", "text/event-stream")
	to := make(chan string, 8)
	l.mu.Lock()
	l.streams[string(r.ID)] = to
	l.ids = append(l.ids, string(r.ID))
	l.mu.Unlock()
	mcptest.Write(w, mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":$ID},"notifications":{"toolsListChanged":true,"resourceSubscriptions":`+string(granted)+`}}}`), r)
	for {
		select {
		case piece, ok := <-to:
			if !ok {
				panic(http.ErrAbortHandler)
			}
			mcptest.Write(w, piece, r)
		case <-raw.Context().Done():
			l.mu.Lock()
			delete(l.streams, string(r.ID))
			l.mu.Unlock()
			return
		}
	}
}

// open returns the ids of the streams that are open.
func (l *listener) open() (ids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range l.ids {
		if l.streams[id] != nil {
			ids = append(ids, id)
		}
	}
	return ids
}

func (l *listener) send(id, piece string) { l.mu.Lock(); defer l.mu.Unlock(); l.streams[id] <- piece }

func (l *listener) cut(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.streams[id])
	delete(l.streams, id)
}

func updatedEvent(uri string) string {
	return mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":$ID},"uri":"` + uri + `"}}`)
}

func TestSubscriptions_Modern(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.Capabilities(`{"tools":{"listChanged":true},"resources":{"subscribe":true}}`)
	l := newListener(s)
	l.refuses = "file:///no"
	p, seen := subscribingPool(t, func(c *PoolConfig) { c.Limits.Idle = 60 * time.Millisecond })
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	for _, uri := range []string{"file:///a", "file:///b", "file:///a"} {
		if err := p.Subscribe(t.Context(), k, target, uri); err != nil {
			t.Fatal(err)
		}
	}
	// only reports whether one stream is open, for these resources.
	only := func(uris ...string) func() bool {
		return func() bool {
			ids := l.open()
			return len(ids) == 1 && slices.ContainsFunc(s.Seen("subscriptions/listen"), func(r *mcptest.Request) bool {
				return string(r.ID) == ids[0] && slices.Equal(listened(r), uris)
			})
		}
	}
	eventually(t, "only the newest stream is open", only("file:///a", "file:///b"))
	if seen.count("file:///a", false)+seen.count("file:///b", false) != 0 {
		t.Error("an update was told where nothing was missed")
	}
	l.send(l.open()[0], updatedEvent("file:///b")+updatedEvent("file:///never"))
	eventually(t, "the update is told", func() bool { return seen.count("file:///b", false) == 1 })
	// A stream's loss is a gap for all that it had.
	l.cut(l.open()[0])
	eventually(t, "the gap is told", func() bool { return seen.count("file:///a", false) >= 1 && seen.count("file:///b", false) >= 2 })
	eventually(t, "it is open again", only("file:///a", "file:///b"))
	// What is not granted is refused and leaves the others alone.
	err := p.Subscribe(t.Context(), k, target, "file:///no")
	if f, ok := fault.As(err); !ok || f.Reason != "SUBSCRIPTION_REFUSED" {
		t.Fatal(err)
	}
	p.Unsubscribe(k, "file:///a")
	eventually(t, "it is no longer listened for", only("file:///b"))
	// Subscriptions keep the connection; without them it is idle.
	if infos := p.Connections(k.Tenant, anyKey); len(infos) != 1 || infos[0].Stray < 1 {
		t.Fatalf("%+v", infos)
	}
	p.Unsubscribe(k, "file:///b")
	eventually(t, "the connection is given up", func() bool { return len(p.matching(anyKey)) == 0 })
	if seen.count("file:///never", false) != 0 || seen.count("file:///no", true) != 0 {
		t.Error("told what was not subscribed")
	}
}

// The old stream holds until the new one is acknowledged.
func TestSubscriptions_NothingIsLostBetweenStreams(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.Capabilities(`{"resources":{"subscribe":true}}`)
	l := newListener(s)
	p, seen := subscribingPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	if err := p.Subscribe(t.Context(), k, target, "file:///a"); err != nil {
		t.Fatal(err)
	}
	first := l.open()[0]
	release := make(chan struct{})
	s.On("subscriptions/listen", s.After(release, l.serve))
	done := make(chan error, 1)
	go func() { done <- p.Subscribe(context.Background(), k, target, "file:///b") }()
	s.Wait(t, "subscriptions/listen", 2)
	l.send(first, updatedEvent("file:///a"))
	eventually(t, "the old stream still counts", func() bool { return seen.count("file:///a", false) == 1 })
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	eventually(t, "the old stream is closed", func() bool { o := l.open(); return len(o) == 1 && o[0] != first })
}

func TestSubscriptions_RefusedStreams(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.Capabilities(`{"resources":{"subscribe":true}}`)
	s.On("subscriptions/listen", mcptest.Error(-32602, "no", ""))
	p, seen := subscribingPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	err := p.Subscribe(t.Context(), k, target, "file:///a")
	if f, ok := fault.As(err); !ok || f.Reason != "SUBSCRIPTION_REFUSED" {
		t.Fatal(err)
	}
	// One that was granted and is refused later is told so.
	l := newListener(s)
	if err := p.Subscribe(t.Context(), k, target, "file:///a"); err != nil {
		t.Fatal(err)
	}
	s.On("subscriptions/listen", mcptest.Error(-32602, "no", ""))
	l.cut(l.open()[0])
	eventually(t, "the refusal is told", func() bool { return seen.count("file:///a", true) == 1 })

	plain := mcptest.New(t, mcptest.Modern)
	plain.Capabilities(`{"resources":{}}`)
	err = p.Subscribe(t.Context(), keyOf(t, "b"), httpTarget(plain.URL), "file:///a")
	if f, ok := fault.As(err); !ok || f.Reason != "CAPABILITY_MISSING" || f.Metadata["capability"] != "resources.subscribe" {
		t.Fatal(err)
	}
	for _, uri := range []string{"", strings.Repeat("x", maxSubscriptionURI+1)} {
		if err := p.Subscribe(t.Context(), k, target, uri); !fault.Is(err, fault.Invalid) {
			t.Error(err)
		}
	}
}

func TestSubscriptions_Legacy(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"tools":{},"resources":{"subscribe":true}}`)
	s.On("resources/subscribe", mcptest.Result(`{}`), mcptest.Error(-32602, "unknown resource", ""), mcptest.Result(`{}`))
	s.On("resources/unsubscribe", mcptest.Result(`{}`))
	updated := func(uri string) string {
		return mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{"uri":"` + uri + `"}}`)
	}
	s.On("tools/call", mcptest.Stream(updated("file:///dir/inside"), updated("file:///other"), mcptest.ResultEvent(okResult)), mcptest.Status(404, "", ""), mcptest.Result(okResult))
	p, seen := subscribingPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	if err := p.Subscribe(t.Context(), k, target, "file:///dir"); err != nil {
		t.Fatal(err)
	}
	err := p.Subscribe(t.Context(), k, target, "file:///no")
	if f, ok := fault.As(err); !ok || f.Reason != "SUBSCRIPTION_REFUSED" || f.Metadata["serverMessage"] != "unknown resource" {
		t.Fatal(err)
	}
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	eventually(t, "the update of what is inside is told", func() bool { return seen.count("file:///dir/inside", false) == 1 })
	// A lost session is made anew without anybody's request, and subscribed again.
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, SessionLost, fault.Protocol, Answered)
	s.Wait(t, "resources/subscribe", 3)
	eventually(t, "the gap is told", func() bool { return seen.count("file:///dir", false) >= 1 })
	if n := s.Count("initialize"); n != 2 || seen.count("file:///other", false) != 0 {
		t.Errorf("%d handshakes, %+v", n, seen.told)
	}
	p.Unsubscribe(k, "file:///dir")
	s.Wait(t, "resources/unsubscribe", 1)
	if got := string(member(s.Seen("resources/unsubscribe")[0].Params, "uri")); got != `"file:///dir"` {
		t.Error(got)
	}
	eventually(t, "nobody keeps subscriptions", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return len(p.subs) == 0 })
}

func TestSubscriptions_Bounded(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"resources":{"subscribe":true}}`)
	s.On("resources/subscribe", mcptest.Result(`{}`))
	p, _ := subscribingPool(t, func(c *PoolConfig) { c.Limits.Tenant = 1 })
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	for i := range maxSubscriptions {
		if err := p.Subscribe(t.Context(), k, target, strings.Repeat("x", i+1)); err != nil {
			t.Fatal(err)
		}
	}
	for _, k := range []Key{k, keyOf(t, "b")} {
		if err := p.Subscribe(t.Context(), k, target, "more"); !fault.Is(err, fault.Exhausted) {
			t.Error(err)
		}
	}
	// Somebody who cannot connect learns why.
	down := httpTarget("http://127.0.0.1:1/mcp")
	p, _ = subscribingPool(t, nil)
	if err := p.Subscribe(t.Context(), keyOf(t, "c"), down, "file:///a"); !fault.Is(err, fault.Unavailable) {
		t.Error(err)
	}
	eventually(t, "nothing is kept of it", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return len(p.subs) == 0 })
}

func TestSubscriptions_Child(t *testing.T) {
	t.Parallel()
	for _, era := range []string{"legacy", "modern"} {
		var seen updates
		p, target := stdioPool(t, childRuntime(t, "ERA="+era), func(c *PoolConfig) {
			c.Limits.Coalesce, c.Limits.Reopen, c.Limits.MaxReopen = 10*time.Millisecond, 20*time.Millisecond, 100*time.Millisecond
		})
		p.OnUpdated(seen.add)
		k := keyOf(t, "a")
		for _, uri := range []string{"file:///a", "file:///b"} {
			if err := p.Subscribe(t.Context(), k, target, uri); err != nil {
				t.Fatal(era, err)
			}
		}
		resp, err := p.Do(t.Context(), k, target, tool("update"))
		said(t, resp, err)
		eventually(t, "the update is told", func() bool { return seen.count("file:///a", false) == 1 })
		// A new process is subscribed again without a request.
		resp, err = p.Do(t.Context(), k, target, tool("crash"))
		expect(t, resp, err, "SERVER_ENDED", fault.Transport, MaybeSent)
		eventually(t, "the gap is told, and its end", func() bool { return seen.count("file:///b", false) >= 2 })
		resp, err = p.Do(t.Context(), k, target, tool("update"))
		said(t, resp, err)
		n := seen.count("file:///a", false)
		eventually(t, "the update of the new process is told", func() bool { return n >= 3 || seen.count("file:///a", false) > n })
	}
}

// A subscription ends with its key, as when the registration is over: it opens no
// connection again, and nothing is held for it.
func TestSubscriptions_EndWithTheirKey(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.Capabilities(`{"tools":{},"resources":{"subscribe":true}}`)
	l := newListener(s)
	p, seen := subscribingPool(t, nil)
	k, other := keyOf(t, "a"), keyOf(t, "a")
	other.Registration++
	for _, k := range []Key{k, other} {
		if err := p.Subscribe(t.Context(), k, httpTarget(s.URL), "file:///a"); err != nil {
			t.Fatal(err)
		}
	}
	if got := p.Registrations(); len(got) != 2 || !slices.Contains(got, Key{Tenant: k.Tenant, Server: k.Server, Registration: k.Registration}) {
		t.Fatalf("%+v", got)
	}
	p.CloseKey(func(o Key) bool { return o == k })
	eventually(t, "only the other registration is held", func() bool {
		got := p.Registrations()
		return len(got) == 1 && got[0].Registration == other.Registration && len(l.open()) == 1
	})
	if seen.count("file:///a", true) != 0 {
		t.Error("an end of our own is told as a refusal")
	}
	if err := p.Subscribe(t.Context(), k, httpTarget(s.URL), "file:///a"); err != nil {
		t.Errorf("subscribe again: %v", err)
	}
}
