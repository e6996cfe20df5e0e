package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/bulkhead-mcp/bulkhead/test/load"
)

// idle is what an idle connection costs: a session of a user of its own, whose
// one call opened the user's own connection to the server, and that then holds
// still. The server announces changes, so there is an event stream for each. No
// caller's connection is open.
type idle struct {
	Connections int `json:"connections"`
	// LiveBytes is the growth of the live heap and of the stacks for a connection,
	// AnonymousBytes of the resident memory, in which garbage is too.
	LiveBytes      float64 `json:"liveBytesEach"`
	AnonymousBytes float64 `json:"anonymousBytesEach"`
	Goroutines     float64 `json:"goroutinesEach"`
	// ResidentMiB is the whole process with them, before they came, and before the
	// first request.
	ResidentMiB      float64 `json:"residentMiB"`
	ResidentMiBWarm  float64 `json:"residentMiBBefore"`
	ResidentMiBStart float64 `json:"residentMiBAtStart"`
	GoroutinesStart  float64 `json:"goroutinesAtStart"`
}

// idleWarm is how many sessions come before the first look, so that pools and
// caches are as large as they will be.
const idleWarm = 50

func (w *world) idle(ctx context.Context, n int) (idle, error) {
	if err := w.hold(ctx, "warm", idleWarm); err != nil {
		return idle{}, err
	}
	live, goroutines, err := w.settled(ctx)
	if err != nil {
		return idle{}, err
	}
	resident, anonymous := residentOf(w.server.pid())
	if err := w.hold(ctx, "idle", n); err != nil {
		return idle{}, err
	}
	liveAfter, goroutinesAfter, err := w.settled(ctx)
	if err != nil {
		return idle{}, err
	}
	residentAfter, anonymousAfter := residentOf(w.server.pid())
	each := func(after, before float64) float64 { return (after - before) / float64(n) }
	return idle{Connections: n, LiveBytes: each(liveAfter, live), AnonymousBytes: each(float64(anonymousAfter), float64(anonymous)),
		Goroutines: each(goroutinesAfter, goroutines), ResidentMiB: mib(residentAfter), ResidentMiBWarm: mib(resident),
		ResidentMiBStart: mib(w.idleResident), GoroutinesStart: w.idleGoroutines}, nil
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// hold opens sessions of n users, makes one call in each, and leaves them open.
func (w *world) hold(ctx context.Context, kind string, n int) error {
	users, err := w.users(ctx, kind, w.tenants, n, load.ReadServer)
	if err != nil {
		return err
	}
	const workers = 4
	c := load.NewREST(w.url, workers)
	defer c.Close()
	var wg sync.WaitGroup
	errs := make(chan error, workers)
	for k := range workers {
		wg.Go(func() {
			for i := k; i < n; i += workers {
				if err := c.Read(ctx, users[i].As, users[i].session); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	return <-errs
}

// settled lets the server collect its garbage twice and returns its live heap
// and stacks in bytes and the number of its goroutines. What makes it collect is
// the scraping itself. What lives is the least that is seen until the next
// collection: garbage counts until it is swept, in the background.
func (w *world) settled(ctx context.Context) (live, goroutines float64, err error) {
	const most = 50_000
	first := -1.0
	for range most {
		m, err := w.scrape(ctx)
		if err != nil {
			return 0, 0, err
		}
		n := m["go_gc_duration_seconds_count"]
		if first < 0 {
			first = n
		}
		switch now := m["go_memstats_heap_alloc_bytes"] + m["go_memstats_stack_inuse_bytes"]; {
		case n < first+2:
		case n > first+2 && live > 0:
			return live, goroutines, nil
		case live == 0 || now < live:
			live, goroutines = now, m["go_goroutines"]
		}
	}
	return 0, 0, fmt.Errorf("the server did not collect garbage in %d scrapes", most)
}

// scrape reads the server's metrics that have no labels.
func (w *world) scrape(ctx context.Context) (map[string]float64, error) {
	r, err := http.NewRequestWithContext(ctx, "GET", w.metrics+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	out := map[string]float64{}
	lines := bufio.NewScanner(io.LimitReader(resp.Body, 16<<20))
	for lines.Scan() {
		name, value, ok := strings.Cut(lines.Text(), " ")
		if n, err := strconv.ParseFloat(value, 64); ok && err == nil {
			out[name] = n
		}
	}
	return out, lines.Err()
}
