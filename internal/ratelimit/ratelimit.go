// Package ratelimit bounds how often each key may do something, in memory and
// without a clock of its own. A key is whatever the caller tells callers apart
// by, a tenant most often; it must be a type of its own or hold its tenant, so
// that two tenants never share a bucket.
package ratelimit

import (
	"container/list"
	"sync"
	"time"
)

// Limit is a token bucket: Burst at once, then PerSecond.
type Limit struct {
	PerSecond float64
	Burst     int
}

// Limiter holds a bucket for each key. It is safe for concurrent use.
//
// The number of buckets is bounded without giving anybody more than the limit: a
// bucket is forgotten only when it is full again, which a new one would be too.
// When none is, keys without a bucket share one.
type Limiter[K comparable] struct {
	interval time.Duration // between two tokens
	window   time.Duration // interval times burst
	most     int
	now      func() time.Time

	mu       sync.Mutex
	buckets  map[K]*list.Element // of *bucket[K]
	byUse    *list.List          // the least recently used one at the back
	overflow time.Time           // the shared bucket
}

// bucket is a bucket in the form of GCRA: one instant says it all. The bucket is
// full when that is not after now.
type bucket[K comparable] struct {
	key    K
	fullAt time.Time
}

// New returns a limiter with at most that many buckets, by the clock now. A
// limit that is not positive is a mistake of the program and panics.
func New[K comparable](l Limit, most int, now func() time.Time) *Limiter[K] {
	if !(l.PerSecond > 0) || l.Burst < 1 || most < 1 {
		panic("ratelimit: a limit must be positive")
	}
	interval := max(1, time.Duration(float64(time.Second)/l.PerSecond))
	return &Limiter[K]{
		interval: interval, window: interval * time.Duration(l.Burst), most: most, now: now,
		buckets: map[K]*list.Element{}, byUse: list.New(),
	}
}

// Allow takes a token of key. Without one it returns false and how long it takes
// until there is one; asking in vain costs nothing.
func (l *Limiter[K]) Allow(key K) (retryAfter time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	fullAt := l.bucketOf(key, now)
	next, wait, ok := take(*fullAt, now, l.interval, l.window)
	*fullAt = next
	return wait, ok
}

// take is the algorithm: a token moves the instant at which the bucket is full
// by one interval, and may not move it further than a window from now.
func take(fullAt, now time.Time, interval, window time.Duration) (time.Time, time.Duration, bool) {
	if fullAt.Before(now) {
		fullAt = now
	}
	next := fullAt.Add(interval)
	if over := next.Sub(now) - window; over > 0 {
		return fullAt, over, false
	}
	return next, 0, true
}

// bucketOf returns where key's instant is kept. Called with mu held.
func (l *Limiter[K]) bucketOf(key K, now time.Time) *time.Time {
	if e, ok := l.buckets[key]; ok {
		l.byUse.MoveToFront(e)
		return &e.Value.(*bucket[K]).fullAt
	}
	if len(l.buckets) >= l.most {
		oldest := l.byUse.Back()
		b := oldest.Value.(*bucket[K])
		if b.fullAt.After(now) {
			return &l.overflow
		}
		delete(l.buckets, b.key)
		l.byUse.Remove(oldest)
	}
	// The key may have drawn on the shared bucket a moment ago.
	b := &bucket[K]{key: key, fullAt: l.overflow}
	l.buckets[key] = l.byUse.PushFront(b)
	return &b.fullAt
}
