package main

import (
	"context"
	"net/netip"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/events"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The streams of signals between replicas. A signal is a hint to read Postgres;
// losing one costs freshness, never correctness.
const (
	signalCall     redis.Kind = "call"
	signalContract redis.Kind = "contract"
	signalSession  redis.Kind = "session"
	signalKey      redis.Kind = "key"
	signalEvents   redis.Kind = "events"
	signalProgress redis.Kind = "progress"
)

const publishTimeout = 200 * time.Millisecond

// signals sends and receives what replicas tell each other.
type signals struct {
	signal  *redis.Signal
	client  *redis.Client
	known   *known
	metrics *telemetry.Metrics

	calls     *calls.Service
	catalog   *catalog.Service
	contracts *authz.Service
	sessions  *sessions.Store
	pool      *sessions.Pool
	tenants   *tenant.Service
	// registered looks after connections whose registration may be over.
	registered *registrations
	events     *events.Service
}

func (s *signals) send(ctx context.Context, k redis.Kind, t tenant.ID, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), publishTimeout)
	defer cancel()
	_ = s.signal.Publish(ctx, k, t.String(), id) // lost signals are made up for by reading
}

// PublishCall implements calls.Signals.
func (s *signals) PublishCall(t tenant.ID, callID string) {
	s.send(context.Background(), signalCall, t, callID)
}

// PublishRecorded implements events.Publisher.
func (s *signals) PublishRecorded(t tenant.ID) { s.send(context.Background(), signalEvents, t, "") }

// PublishProgress implements events.Publisher. Ids hold no slash.
func (s *signals) PublishProgress(t tenant.ID, sessionID, callID string) {
	ctx, cancel := context.WithTimeout(context.Background(), publishTimeout)
	defer cancel()
	if s.signal.Publish(ctx, signalProgress, t.String(), sessionID+"/"+callID) != nil {
		s.events.Progressed(t, sessionID, callID) // at least here
	}
}

func (s *signals) run(ctx context.Context) error {
	sub, err := s.signal.Subscribe(signalCall, catalog.Changed, signalContract, signalSession, signalKey, signalEvents, signalProgress)
	if err != nil {
		return err
	}
	defer sub.Close()
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-sub.Events():
			s.metrics.RedisUp(s.client.Up())
			s.heard(e)
		}
	}
}

func (s *signals) heard(e redis.Event) {
	s.catalog.Heard(e)
	s.registered.heard(e)
	if e.Gap {
		s.events.SignalledAll()
		return
	}
	if e.Kind == signalKey {
		s.tenants.ForgetKey(e.ID)
		return
	}
	// A tenant that never called here has nothing in memory here.
	t, ok := s.known.get(e.Tenant)
	if !ok {
		return
	}
	switch e.Kind {
	case signalCall:
		s.calls.Signalled(t, e.ID)
	case signalEvents:
		s.events.Signalled(t)
	case signalProgress:
		if session, call, ok := strings.Cut(e.ID, "/"); ok {
			s.events.Progressed(t, session, call)
		}
	case catalog.Changed:
		s.events.CatalogChanged(t, e.ID)
	case signalContract:
		s.contracts.Forget(t, e.ID)
	case signalSession:
		s.sessions.Forget(t, e.ID)
		// It is sent when the session has closed.
		s.pool.CloseKey(func(k sessions.Key) bool { return k.Tenant == t && k.Session == e.ID })
	}
}

// authenticator remembers whom it let in, for signals.
type authenticator struct {
	*tenant.Service
	known *known
}

func (a authenticator) Authenticate(ctx context.Context, credential string, who tenant.OnBehalf, remote netip.Addr) (tenant.Principal, error) {
	p, err := a.Service.Authenticate(ctx, credential, who, remote)
	if err == nil && !p.Tenant.IsZero() {
		a.known.add(p.Tenant)
	}
	return p, err
}

// keyService tells the other replicas of a revoked key.
type keyService struct {
	*tenant.Service
	signals *signals
}

func (k keyService) RevokeKey(ctx context.Context, p tenant.Principal, id string) (tenant.Key, error) {
	out, err := k.Service.RevokeKey(ctx, p, id)
	if err == nil {
		k.signals.send(ctx, signalKey, p.Tenant, id)
	}
	return out, err
}
