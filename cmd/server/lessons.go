package main

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// lessons carries what connections learn of a server, its era and what had to be
// refused, to where it is kept, off the pool's goroutines.
type lessons struct {
	catalog *catalog.Service
	metrics *telemetry.Metrics
	log     *slog.Logger
	queue   chan lesson

	mu     sync.Mutex
	lately map[lesson]time.Time // events put into the queue; at most maxLessons
}

// lesson is one thing learned: an era with a version, or an event.
type lesson struct {
	tenant       tenant.ID
	server       string
	registration int64
	era, version string
	event        string
}

const (
	maxLessons = 1024
	lessonTime = 10 * time.Second
	// sameEvent is how long an event of one server is not recorded again.
	sameEvent = time.Minute
)

func newLessons(m *telemetry.Metrics, log *slog.Logger) *lessons {
	return &lessons{metrics: m, log: log, queue: make(chan lesson, maxLessons), lately: map[lesson]time.Time{}}
}

func (l *lessons) learned(k sessions.Key, era, version string) {
	l.put(lesson{tenant: k.Tenant, server: k.Server, registration: k.Registration, era: era, version: version})
}

func (l *lessons) alarm(k sessions.Key, t sessions.Target, event string) {
	l.refused(k.Tenant, k.Server, t.ServerName, k.Registration, event)
}

// refused counts an event and sends it to the audit. A registration of 0 is the
// one of the moment.
func (l *lessons) refused(t tenant.ID, server, name string, registration int64, event string) {
	l.metrics.SecurityEvent(t.String(), name, event)
	one := lesson{tenant: t, server: server, registration: registration, event: event}
	now := time.Now()
	l.mu.Lock()
	last, ok := l.lately[one]
	again := ok && now.Sub(last) < sameEvent
	if !again {
		if len(l.lately) >= maxLessons {
			clear(l.lately)
		}
		l.lately[one] = now
	}
	l.mu.Unlock()
	if !again {
		l.put(one)
	}
}

// put never waits. What finds no room is counted all the same, and comes again
// with the next connection.
func (l *lessons) put(one lesson) {
	select {
	case l.queue <- one:
	default:
		l.log.Warn("too much is learned at once of servers", "tenant", one.tenant, "server", one.server, "event", one.event)
	}
}

func (l *lessons) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case one := <-l.queue:
			l.keep(ctx, one)
		}
	}
}

func (l *lessons) keep(ctx context.Context, one lesson) {
	ctx, cancel := context.WithTimeout(ctx, lessonTime)
	defer cancel()
	if one.event == "" {
		if err := l.catalog.Learned(ctx, one.tenant, one.server, one.registration, one.era, one.version); err != nil {
			l.log.WarnContext(ctx, "keep the era of a server", "tenant", one.tenant, "server", one.server, "error", err)
		}
		return
	}
	first, err := l.catalog.Refused(ctx, one.tenant, one.server, one.registration, one.event)
	if err != nil {
		l.log.WarnContext(ctx, "record a security event", "tenant", one.tenant, "server", one.server, "event", one.event, "error", err)
	}
	if first {
		l.log.WarnContext(ctx, "security event", "tenant", one.tenant, "server", one.server, "event", one.event)
	}
}
