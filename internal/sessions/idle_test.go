package sessions

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// watchServer is a modern server in a process of its own that declares these
// capabilities. It holds every stream of changes that is opened; a GET tells all
// of them that the tools changed and answers how many there are.
func watchServer(caps string) {
	var mu sync.Mutex
	streams := map[chan struct{}]bool{}
	serveRole(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			mu.Lock()
			defer mu.Unlock()
			for c := range streams {
				c <- struct{}{}
			}
			fmt.Fprint(w, len(streams))
			return
		}
		body, _ := io.ReadAll(r.Body)
		m, err := parseMessage(body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		if m.method == "subscriptions/listen" {
			c := make(chan struct{}, 16)
			mu.Lock()
			streams[c] = true
			mu.Unlock()
			defer func() { mu.Lock(); delete(streams, c); mu.Unlock() }()
			w.Header().Set("Content-Type", "text/event-stream")
			meta := `"_meta":{"io.modelcontextprotocol/subscriptionId":` + string(m.id) + `}`
			fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/subscriptions/acknowledged\",\"params\":{\"notifications\":{\"toolsListChanged\":true},%s}}\n\n", meta)
			for {
				http.NewResponseController(w).Flush() //nolint:errcheck // the client may be gone
				select {
				case <-c:
					fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/tools/list_changed\",\"params\":{%s}}\n\n", meta)
				case <-r.Context().Done():
					return
				}
			}
		}
		out := `{"content":[]}`
		if m.method == "server/discover" {
			out = `{"supportedVersions":["2026-07-28"],"capabilities":` + caps + `}`
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"jsonrpc":"2.0","id":`+string(m.id)+`,"result":`+out+`}`) //nolint:errcheck // the client may be gone
	})
}

// idleCost opens a connection for each of n users and returns what one of them
// holds once nothing happens: bytes of live heap and of stacks, and goroutines.
func idleCost(t *testing.T, p *Pool, target Target, n int) (bytesEach, goroutinesEach float64) {
	t.Helper()
	open := func(from, to int) {
		users := make(chan int)
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for i := range users {
					k := keyOf(t, "u"+strconv.Itoa(i))
					resp, err := p.Do(context.Background(), k, target, echo())
					if resp.Release(); err != nil {
						t.Errorf("user %d: %v", i, err)
					}
				}
			})
		}
		for i := from; i < to; i++ {
			users <- i
		}
		close(users)
		wg.Wait()
		if t.Failed() {
			t.FailNow()
		}
	}
	watching := func(want int) {
		eventually(t, "every stream is open", func() bool {
			return len(p.Connections(keyOf(t, "").Tenant, func(Key) bool { return true })) == want && (!announcing(p) || openStreams(p) == want)
		})
	}
	const warm = 64
	open(0, warm)
	watching(warm)
	heap, goroutines := liveNow()
	open(warm, warm+n)
	watching(warm + n)
	heapAfter, goroutinesAfter := liveNow()
	return (heapAfter - heap) / float64(n), float64(goroutinesAfter-goroutines) / float64(n)
}

func announcing(p *Pool) bool {
	for _, c := range p.matching(func(Key) bool { return true }) {
		return c.announces()
	}
	return false
}

func openStreams(p *Pool) (n int) {
	for _, c := range p.matching(func(Key) bool { return true }) {
		c.mu.Lock()
		if c.watchOpen > 0 {
			n++
		}
		c.mu.Unlock()
	}
	return n
}

func liveNow() (bytes float64, goroutines int) {
	var m runtime.MemStats
	for range 3 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse), runtime.NumGoroutine()
}

// needFiles fails when the process may not open so many files.
func needFiles(t *testing.T, n uint64) {
	t.Helper()
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		t.Fatal(err)
	}
	if l.Cur < n {
		t.Fatalf("this test needs %d open files and the limit is %d: raise it, for example with `ulimit -n %d`", n, l.Cur, n)
	}
}

// An idle connection without a stream costs no goroutine and at most 12 KiB. The
// transport's own connections are shared by all users of a server and are none of
// it; closing the idle ones first leaves only what the pool holds.
func TestIdle_Quiet(t *testing.T) {
	p := newPool(t, func(c *PoolConfig) { c.Limits.Tenant, c.Limits.Server, c.Limits.Idle = 6000, 6000, time.Hour })
	target := httpTarget(startServer(t, `watch {"tools":{}}`))
	each, goroutines := idleCost(t, p, target, 1000)
	t.Logf("%.0f bytes and %.3f goroutines each", each, goroutines)
	// A handful of transport connections may come or go while it is measured.
	if goroutines > 0.05 {
		t.Errorf("%.3f goroutines each, want none", goroutines)
	}
	if !raceEnabled && each > 12<<10 {
		t.Errorf("%.0f bytes each, want at most 12 KiB", each)
	}
}

// Five thousand users with a stream of changes each: one costs at most 65 KiB, and
// a change reaches every one of them.
func TestIdle_FiveThousandWatchers(t *testing.T) {
	needFiles(t, 8192)
	const n = 5000
	var mu sync.Mutex
	heard := map[tenant.Subject]bool{}
	var listening atomic.Bool
	p := newPool(t, func(c *PoolConfig) { c.Limits.Tenant, c.Limits.Server, c.Limits.Idle = 6000, 6000, time.Hour })
	p.OnChange(func(ch Change) {
		if ch.Kind == KindTool && !ch.Connected && listening.Load() {
			mu.Lock()
			heard[ch.Key.Subject] = true
			mu.Unlock()
		}
	})
	address := startServer(t, `watch {"tools":{"listChanged":true}}`)
	each, goroutines := idleCost(t, p, httpTarget(address), n-64)
	t.Logf("%.0f bytes and %.2f goroutines each", each, goroutines)
	if !raceEnabled && each > 65<<10 {
		t.Errorf("%.0f bytes each, want at most 65 KiB", each)
	}
	listening.Store(true)
	resp, err := http.Get(address + "/change")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close() //nolint:errcheck // read whole
	http.DefaultClient.CloseIdleConnections()
	if err != nil || string(body) != strconv.Itoa(n) {
		t.Fatalf("the server holds %q streams (%v), want %d", body, err, n)
	}
	eventually(t, "the change reached everybody", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(heard) == n
	})
}
