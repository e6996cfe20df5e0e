package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"runtime"
	"runtime/pprof"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/config"
	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/redis/redistest"
	"github.com/bulkhead-mcp/bulkhead/test/load"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var soakDuration = flag.Duration("duration", 10*time.Second, "how long TestSoak loads the service")

// What the soak allows: after it the process has at most so many more goroutines
// and bytes of live heap than before, at the latest soakSettle after its end.
const (
	soakCallers    = 64
	soakTenants    = 4
	soakWarm       = 3 * time.Second
	soakGoroutines = 10
	soakHeap       = 8 << 20
	soakSettle     = 5 * time.Second
)

// TestSoak runs the whole service in this process, lets many callers use it for
// a while, and then looks for what they left behind. Before and after it the same
// load has been, the same users have their connections, and no client holds one:
// whatever is more then has leaked. The demo calendar and the clients are in this
// process too, and must leave nothing either.
func TestSoak(t *testing.T) {
	s := startSoak(t)
	warm := s.load(t, soakWarm)
	before := s.settled(t, nil)
	work := s.load(t, *soakDuration)
	after := s.settled(t, &before)
	t.Logf("%d calls and more in %s after %d to warm up; goroutines %d, then %d; live heap %.1f MiB, then %.1f MiB",
		work, *soakDuration, warm, before.goroutines, after.goroutines, mib(before.heap), mib(after.heap))
	s.stop(t)
}

func mib(n uint64) float64 { return float64(n) / (1 << 20) }

// soak is the service in this process, and its callers.
type soak struct {
	url     string
	demo    *demo.Server
	log     *soakLog
	end     context.CancelFunc
	ended   chan error
	callers []*soakCaller
}

// soakCaller is a user with a session of its own.
type soakCaller struct {
	load.As
	tenant  *load.Tenant
	session string
	turn    int
}

func startSoak(t *testing.T) *soak {
	t.Helper()
	calendar, err := demo.Start(demo.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := calendar.Close(); err != nil {
			t.Errorf("the demo calendar: %v", err)
		}
	})
	var random [64]byte
	rand.Read(random[:])
	operator := hex.EncodeToString(random[32:])
	cfg := &config.Config{Listen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0", DataDir: t.TempDir(),
		DatabaseURL: config.Secret(pgtest.New(t).URL), RedisURL: config.Secret(redistest.New(t).URL),
		KEKs: []config.KEK{{ID: "soak", Key: random[:32]}}, OperatorKey: config.Secret(operator),
		EgressAllow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, LogLevel: slog.LevelInfo, GracePeriod: 10 * time.Second}
	ctx, end := context.WithCancel(context.Background())
	s := &soak{demo: calendar, end: end, ended: make(chan error, 1), log: &soakLog{serving: make(chan string, 1)}}
	go func() { s.ended <- run(ctx, cfg, io.Discard, s.log) }()
	t.Cleanup(end)
	select {
	case s.url = <-s.log.serving:
	case err := <-s.ended:
		t.Fatalf("the server ended: %v", err)
	case <-time.After(time.Minute):
		t.Fatal("the server does not serve")
	}
	s.prepare(t, operator)
	return s
}

func (s *soak) prepare(t *testing.T, operator string) {
	t.Helper()
	c := load.NewREST(s.url, 4)
	defer c.Close()
	for i := range soakTenants {
		tenant, err := c.Prepare(t.Context(), operator, fmt.Sprintf("soak %d", i), load.Server{Name: load.ReadServer, URL: s.demo.URL()})
		if err != nil {
			t.Fatal(err)
		}
		for k := range soakCallers / soakTenants {
			s.callers = append(s.callers, &soakCaller{tenant: tenant, As: load.As{Key: tenant.ServiceKey, User: fmt.Sprintf("user-%d", k)}})
		}
	}
}

// load lets all callers work for a time, then brings them all to the server at
// the same moment, and closes the clients. It returns the number of things done.
func (s *soak) load(t *testing.T, during time.Duration) (done int) {
	t.Helper()
	rest := load.NewREST(s.url, soakCallers)
	rpc, err := load.NewGRPC(s.url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		rest.Close()
		if err := rpc.Close(); err != nil {
			t.Error(err)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), during+time.Minute)
	defer cancel()
	end := time.Now().Add(during)
	counts := s.each(t, func(c *soakCaller, i int) (n int, err error) {
		for ; err == nil && time.Now().Before(end); n++ {
			err = c.step(ctx, rest, rpc, i)
		}
		return n, err
	})
	// The pool of connections to the calendar is now as large as it can be: one
	// for each caller.
	s.demo.SetFault(load.ReadTool, demo.Fault{DelayBefore: 500 * time.Millisecond})
	s.each(t, func(c *soakCaller, _ int) (int, error) { return 1, rest.Read(ctx, c.As, c.session) })
	s.demo.ClearFault(load.ReadTool)
	for _, n := range counts {
		done += n
	}
	return done
}

// each runs fn for every caller at once; every error fails the test.
func (s *soak) each(t *testing.T, fn func(c *soakCaller, i int) (int, error)) []int {
	t.Helper()
	counts := make([]int, len(s.callers))
	var wg sync.WaitGroup
	for i, c := range s.callers {
		wg.Go(func() {
			var err error
			if counts[i], err = fn(c, i); err != nil {
				t.Errorf("caller %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return counts
}

// step does the caller's next thing: mostly reads over REST or gRPC, now and then
// a list, a write that is approved or denied, or a new session for the old one.
// Callers are out of step with each other.
func (c *soakCaller) step(ctx context.Context, rest *load.REST, rpc *load.GRPC, i int) (err error) {
	c.turn++
	switch turn := c.turn + i; {
	case c.session == "" || turn%25 == 0:
		if c.session != "" {
			if err := rest.CloseSession(ctx, c.As, c.session); err != nil {
				return err
			}
		}
		c.session, err = rest.Open(ctx, c.As, load.ReadServer)
		return err
	case turn%10 == 0:
		return rest.Write(ctx, c.tenant, c.As, c.session, turn%20 != 0)
	case turn%15 == 0:
		_, err = rest.Tools(ctx, c.As, c.session)
		return err
	case turn%16 == 0:
		_, err = rpc.Tools(ctx, c.As, c.session)
		return err
	case turn%2 == 0:
		return rpc.Read(ctx, c.As, c.session)
	}
	return rest.Read(ctx, c.As, c.session)
}

// weight is what the process holds.
type weight struct {
	goroutines int
	heap       uint64
}

// settled weighs the process after two collections, when what ends by itself has
// ended. Without a limit that is as soon as nothing more ends; with one, as soon
// as the limit is kept, and the test fails when that takes too long.
func (s *soak) settled(t *testing.T, limit *weight) weight {
	t.Helper()
	const pause, still = 100 * time.Millisecond, 10
	same := 0
	var last weight
	for end := time.Now().Add(soakSettle); ; {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		now := weight{runtime.NumGoroutine(), m.HeapAlloc}
		if limit != nil {
			if now.goroutines <= limit.goroutines+soakGoroutines && now.heap <= limit.heap+soakHeap {
				return now
			}
			if time.Now().After(end) {
				t.Errorf("%s after the end there are %d goroutines and %.1f MiB of live heap; before there were %d and %.1f MiB",
					soakSettle, now.goroutines, mib(now.heap), limit.goroutines, mib(limit.heap))
				leftovers(t)
				return now
			}
		} else {
			if same++; now.goroutines != last.goroutines {
				same = 0
			}
			if same >= still || time.Now().After(end) {
				return now
			}
		}
		last = now
		<-time.After(pause)
	}
}

// leftovers shows what is there, each stack once.
func leftovers(t *testing.T) {
	t.Helper()
	var b bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&b, 1); err != nil {
		t.Error(err)
	}
	t.Logf("%.30000s", b.String())
}

// stop ends the service, which must end well and have logged no error.
func (s *soak) stop(t *testing.T) {
	t.Helper()
	s.end()
	select {
	case err := <-s.ended:
		if err != nil {
			t.Errorf("the server ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the server did not end within a minute")
	}
	if err := s.log.err(); err != nil {
		t.Error(err)
	}
}

// soakLog reads the server's log: the address, and lines that speak of errors.
type soakLog struct {
	serving chan string

	mu     sync.Mutex
	errors []error // at most ten
}

// Write implements io.Writer; the logger writes one line at a time.
func (l *soakLog) Write(line []byte) (int, error) {
	switch {
	case bytes.Contains(line, []byte(`"msg":"serving"`)):
		var said struct{ Address string }
		if err := json.Unmarshal(line, &said); err != nil {
			return 0, err
		}
		l.serving <- "http://" + said.Address
	case bytes.Contains(line, []byte(`"level":"ERROR"`)):
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.errors) < 10 {
			l.errors = append(l.errors, errors.New("logged: "+string(line)))
		}
	}
	return len(line), nil
}

func (l *soakLog) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.errors...)
}
