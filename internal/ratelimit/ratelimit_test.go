package ratelimit

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// clock is a clock that stands still until it is moved.
type clock struct{ t time.Time }

func newClock() *clock { return &clock{t: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)} }

func (c *clock) now() time.Time          { return c.t }
func (c *clock) advance(d time.Duration) { c.t = c.t.Add(d) }

func count[K comparable](l *Limiter[K], key K, tries int) int {
	n := 0
	for range tries {
		if _, ok := l.Allow(key); ok {
			n++
		}
	}
	return n
}

func TestAllow_BurstThenRate(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New[string](Limit{PerSecond: 10, Burst: 5}, 10, c.now)
	steps := []struct {
		advance time.Duration
		want    int
	}{
		{0, 5}, {0, 0}, {99 * time.Millisecond, 0}, {time.Millisecond, 1}, {250 * time.Millisecond, 2},
		{50 * time.Millisecond, 1}, {time.Hour, 5}, {-time.Minute, 0},
	}
	for i, s := range steps {
		c.advance(s.advance)
		if got := count(l, "a", 50); got != s.want {
			t.Errorf("step %d: %d allowed, want %d", i, got, s.want)
		}
	}
}

func TestAllow_RetryAfterIsExact(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New[string](Limit{PerSecond: 4, Burst: 2}, 10, c.now)
	count(l, "a", 2)
	c.advance(100 * time.Millisecond)
	wait, ok := l.Allow("a")
	if ok || wait != 150*time.Millisecond {
		t.Fatalf("Allow = %v, %v; want to wait 150ms", wait, ok)
	}
	c.advance(wait - time.Nanosecond)
	if _, ok := l.Allow("a"); ok {
		t.Error("allowed too early")
	}
	c.advance(time.Nanosecond)
	if _, ok := l.Allow("a"); !ok {
		t.Error("not allowed when it was promised")
	}
}

func TestAllow_KeysAreApart(t *testing.T) {
	t.Parallel()
	l := New[string](Limit{PerSecond: 1, Burst: 3}, 10, newClock().now)
	count(l, "a", 9)
	if got := count(l, "b", 9); got != 3 {
		t.Errorf("b was allowed %d, want its own 3", got)
	}
}

func TestAllow_BoundGivesNobodyMore(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New[int](Limit{PerSecond: 1, Burst: 2}, 3, c.now)
	for key := range 3 {
		count(l, key, 2)
	}
	// Every bucket is in use: a thousand new keys share one.
	total := 0
	for key := 100; key < 1100; key++ {
		total += count(l, key, 2)
	}
	if total != 2 {
		t.Errorf("%d allowed for keys beyond the bound, want the shared 2", total)
	}
	if count(l, 0, 5) != 0 {
		t.Error("a known key got a fresh bucket")
	}
	c.advance(time.Hour)
	for key := 100; key < 110; key++ {
		if got := count(l, key, 5); key < 103 && got != 2 {
			t.Errorf("key %d: %d allowed, want 2 in the place of an idle one", key, got)
		}
		if len(l.buckets) > 3 || l.byUse.Len() != len(l.buckets) {
			t.Fatalf("%d buckets, %d in order; want at most 3", len(l.buckets), l.byUse.Len())
		}
	}
}

// TestAllow_NeverMoreThanTheLimit moves the clock at random and checks the
// definition: in every window w no key gets more than burst + w times rate.
func TestAllow_NeverMoreThanTheLimit(t *testing.T) {
	t.Parallel()
	const burst, rate = 5, 20.0
	rng := rand.New(rand.NewPCG(1, 2))
	c := newClock()
	l := New[int](Limit{PerSecond: rate, Burst: burst}, 4, c.now)
	got := map[int][]time.Time{}
	for range 20_000 {
		c.advance(time.Duration(rng.IntN(int(20 * time.Millisecond))))
		key := rng.IntN(8)
		if _, ok := l.Allow(key); ok {
			got[key] = append(got[key], c.t)
		}
	}
	for key, times := range got {
		for i := range times {
			for j := i; j < min(i+200, len(times)); j++ {
				w := times[j].Sub(times[i]).Seconds()
				if float64(j-i+1) > burst+w*rate+1e-6 {
					t.Fatalf("key %d: %d allowed in %.3f s", key, j-i+1, w)
				}
			}
		}
	}
}

func TestAllow_Concurrent(t *testing.T) {
	t.Parallel()
	l := New[string](Limit{PerSecond: 1, Burst: 100}, 10, newClock().now)
	var wg sync.WaitGroup
	got := make([]int, 8)
	for i := range got {
		wg.Go(func() { got[i] = count(l, "a", 50) })
	}
	wg.Wait()
	sum := 0
	for _, n := range got {
		sum += n
	}
	if sum != 100 {
		t.Errorf("%d allowed, want 100", sum)
	}
}

func TestNew_Refuses(t *testing.T) {
	t.Parallel()
	for _, l := range []Limit{{0, 1}, {-1, 1}, {1, 0}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v was taken", l)
				}
			}()
			New[string](l, 1, time.Now)
		}()
	}
}

func BenchmarkAllow(b *testing.B) {
	l := New[string](Limit{PerSecond: 1e9, Burst: 1 << 20}, 1000, time.Now)
	for b.Loop() {
		l.Allow("tenant")
	}
}
