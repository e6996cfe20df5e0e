package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

const (
	// registrationsEvery is how often this replica looks whether what it is connected
	// to is still registered when no signal tells it to, registrationsPause the least
	// time between two looks.
	registrationsEvery = 3 * time.Second
	registrationsPause = 250 * time.Millisecond
	// registrationsTime bounds one look.
	registrationsTime = 10 * time.Second
)

// registrations ends connections, children and subscriptions of this replica to
// servers that were deleted or registered anew, or whose tenant is suspended, at
// whichever replica that happened.
type registrations struct {
	catalog *catalog.Service
	pool    *sessions.Pool
	log     *slog.Logger
	wake    chan struct{}
}

func newRegistrations(c *catalog.Service, pool *sessions.Pool, log *slog.Logger) *registrations {
	return &registrations{catalog: c, pool: pool, log: log, wake: make(chan struct{}, 1)}
}

// heard takes a signal. Those that say that a registration changed are those of
// changed lists, too.
func (r *registrations) heard(e redis.Event) {
	if !e.Gap && e.Kind != catalog.Changed {
		return
	}
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *registrations) run(ctx context.Context) error {
	tick := time.NewTicker(registrationsEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-r.wake:
		}
		r.look(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(registrationsPause):
		}
	}
}

func (r *registrations) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, registrationsTime)
	defer cancel()
	var held []catalog.Registered
	for _, k := range r.pool.Registrations() {
		held = append(held, catalog.Registered{Tenant: k.Tenant, ServerID: k.Server, Registration: k.Registration})
	}
	over, err := r.catalog.Outdated(ctx, held)
	if err != nil {
		if ctx.Err() == nil {
			r.log.WarnContext(ctx, "look for registrations that are over", "error", err)
		}
		return
	}
	for _, o := range over {
		r.log.InfoContext(ctx, "connections end with their registration", "tenant", o.Tenant, "server", o.ServerID, "registration", o.Registration)
		r.pool.CloseKey(func(k sessions.Key) bool {
			return k.Tenant == o.Tenant && k.Server == o.ServerID && k.Registration == o.Registration
		})
	}
}
