package main

import (
	"context"
	"os"
	"slices"
	"sync"
	"time"
)

// caller makes one call; it is used by one goroutine.
type caller func(ctx context.Context) error

// target is something that answers calls.
type target struct {
	name string
	// own and upstream are the processes whose CPU time is that of the target and
	// of the server behind it; nil for none.
	own, upstream *child
	// open connects so many callers; close ends them.
	open func(ctx context.Context, callers int) (cs []caller, close func(), err error)
}

// bench is a case: targets that are measured in turn in each round.
type bench struct {
	name    string
	callers int
	targets []target
}

// sample is one measurement. Times are in milliseconds; CPU time is for a call.
type sample struct {
	Calls           int     `json:"calls"`
	Errors          int     `json:"errors"`
	CallsPerSecond  float64 `json:"callsPerSecond"`
	P50             float64 `json:"p50Ms"`
	P90             float64 `json:"p90Ms"`
	P99             float64 `json:"p99Ms"`
	CPUOwn          float64 `json:"cpuOwnMs"`
	CPUPostgres     float64 `json:"cpuPostgresMs"`
	CPURedis        float64 `json:"cpuRedisMs"`
	CPUUpstream     float64 `json:"cpuUpstreamMs"`
	CPUClient       float64 `json:"cpuClientMs"`
	ForeignCPUShare float64 `json:"foreignCpuShare"`

	firstError error
}

// clocks are the CPU times of all parts.
type clocks struct{ own, postgres, redis, upstream, client, known, busy time.Duration }

func (w *world) clocks(t target) clocks {
	c := clocks{postgres: cpuOfTree(w.pgPID), redis: cpuOf(w.redis.pid()), client: cpuOf(os.Getpid()), busy: busy()}
	c.known = c.postgres + c.client
	for _, k := range w.children {
		c.known += cpuOf(k.pid())
	}
	if t.own != nil {
		c.own = cpuOf(t.own.pid())
	}
	if t.upstream != nil {
		c.upstream = cpuOf(t.upstream.pid())
	}
	return c
}

// measure lets callers call a target for a time.
func (w *world) measure(ctx context.Context, t target, callers int, warm, during time.Duration) (sample, error) {
	cs, done, err := t.open(ctx, callers)
	if err != nil {
		return sample{}, err
	}
	defer done()
	if s := run(ctx, cs, warm); s.firstError != nil {
		return s, s.firstError
	}
	before := w.clocks(t)
	s := run(ctx, cs, during)
	after := w.clocks(t)
	each := func(d time.Duration) float64 { return d.Seconds() * 1000 / float64(max(s.Calls, 1)) }
	s.CPUOwn, s.CPUPostgres = each(after.own-before.own), each(after.postgres-before.postgres)
	s.CPURedis, s.CPUUpstream = each(after.redis-before.redis), each(after.upstream-before.upstream)
	s.CPUClient = each(after.client - before.client)
	if all := after.busy - before.busy; all > 0 {
		s.ForeignCPUShare = max(0, (all-(after.known-before.known)).Seconds()/all.Seconds())
	}
	return s, s.firstError
}

// run makes each caller call again and again, at least once.
func run(ctx context.Context, cs []caller, during time.Duration) sample {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var s sample
	var all []time.Duration
	began := time.Now()
	end := began.Add(during)
	for _, call := range cs {
		wg.Go(func() {
			took := make([]time.Duration, 0, 4096)
			var failed int
			var first error
			for {
				start := time.Now()
				cctx, cancel := context.WithTimeout(ctx, requestTimeout)
				err := call(cctx)
				cancel()
				now := time.Now()
				took = append(took, now.Sub(start))
				if err != nil {
					if failed++; first == nil {
						first = err
					}
				}
				// A caller whose connection broke cannot go on.
				if err != nil || !now.Before(end) || ctx.Err() != nil {
					break
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, took...)
			s.Errors += failed
			if s.firstError == nil {
				s.firstError = first
			}
		})
	}
	wg.Wait()
	s.Calls = len(all)
	s.CallsPerSecond = float64(len(all)) / time.Since(began).Seconds()
	slices.Sort(all)
	at := func(q float64) float64 { return all[int(q*float64(len(all)-1))].Seconds() * 1000 }
	s.P50, s.P90, s.P99 = at(0.50), at(0.90), at(0.99)
	return s
}
