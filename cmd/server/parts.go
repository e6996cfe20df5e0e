package main

import (
	"context"
	"crypto/ed25519"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/api"
	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/config"
	"github.com/bulkhead-mcp/bulkhead/internal/confine"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/events"
	"github.com/bulkhead-mcp/bulkhead/internal/ratelimit"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// tenantRate is what one tenant may ask of one replica.
var tenantRate = ratelimit.Limit{PerSecond: 2000, Burst: 4000}

// parts is the built service.
type parts struct {
	cfg     *config.Config
	stores  *stores
	log     *slog.Logger
	metrics *telemetry.Metrics
	audit   *audit.Log
	tenants *tenant.Service
	authz   *authz.Service
	hooks   *webhooks.Service
	catalog *catalog.Service
	calls   *calls.Service
	events  *events.Service
	signals *signals
	changes *changeQueue
	lessons *lessons
	api     *api.Server
}

// build makes every part, in the order of imports, and pushes what must be
// closed.
func build(ctx context.Context, cfg *config.Config, st *stores, log *slog.Logger, stack *closers) (*parts, error) {
	p := &parts{cfg: cfg, stores: st, log: log, metrics: telemetry.NewMetrics()}
	vault := tenant.NewVault(st.db, st.ring)
	var older []ed25519.PublicKey
	for _, s := range olderSigners(cfg.KEKs) {
		older = append(older, s.Public())
	}
	var err error
	if p.audit, err = audit.New(st.db, vault, st.signer, audit.Options{Log: log, KnownKeys: older}); err != nil {
		return nil, err
	}
	stack.push(p.audit.Flush)
	operator, err := operatorKey(cfg)
	if err != nil {
		return nil, err
	}
	if p.tenants, err = tenant.NewService(st.db, st.ring, p.audit, operator); err != nil {
		return nil, err
	}
	consents, err := consent.NewService(st.db, p.audit)
	if err != nil {
		return nil, err
	}
	out := egress.New(egress.Policy{Allow: cfg.EgressAllow, Development: cfg.Development})
	p.hooks, err = webhooks.New(webhooks.Options{DB: st.db, Vault: vault, Recorder: p.audit, Egress: out, Queue: st.jobs, Log: log,
		Observe: func(t tenant.ID, outcome string) { p.metrics.WebhookAttempt(t.String(), outcome) }})
	if err != nil {
		return nil, err
	}
	consents.AnnounceTo(p.hooks)
	if p.authz, err = authz.NewService(st.db, consents, p.audit); err != nil {
		return nil, err
	}
	p.signals = &signals{signal: redis.NewSignal(st.redis), client: st.redis, known: &known{ids: map[string]tenant.ID{}},
		metrics: p.metrics, contracts: p.authz, tenants: p.tenants}
	p.authz.OnActivate = p.contractActivated

	p.lessons = newLessons(p.metrics, log)
	pool := sessions.NewPool(sessions.PoolConfig{Egress: out, Log: log, Version: version, Runtimes: runtimes(cfg),
		Opened:  func(t tenant.ID, server string) func() { return p.metrics.ConnectionOpened(t.String(), server) },
		Learned: p.lessons.learned, Alarm: p.lessons.alarm})
	stack.push(pool.Shutdown)
	if err := p.buildCatalog(consents, out, pool, stack); err != nil {
		return nil, err
	}
	store, err := sessions.NewStore(st.db, serverFinder{p.catalog}, consents, p.audit)
	if err != nil {
		return nil, err
	}
	store.OnClose = func(t tenant.ID, id string) {
		pool.CloseKey(func(k sessions.Key) bool { return k.Tenant == t && k.Session == id })
		p.signals.send(context.Background(), signalSession, t, id)
	}
	p.signals.sessions = store
	if p.events, err = events.New(st.db, p.signals, log, events.Config{}); err != nil {
		return nil, err
	}
	stack.push(p.events.Close)
	p.signals.events = p.events
	p.calls, err = calls.NewService(ctx, calls.Deps{DB: st.db, Sessions: store, Catalog: p.catalog, Contracts: p.authz,
		Consent: consents, Sender: pool, Audit: p.audit, Vault: vault, Signals: p.signals, Events: p.events, Follower: pool, Log: log,
		Announcer: p.hooks, Observe: p.observeCall},
		calls.Config{Name: replicaName(), Sole: st.sole})
	if err != nil {
		return nil, err
	}
	p.signals.calls = p.calls
	pool.OnUpdated(p.calls.Updated)
	p.api, err = api.New(api.Config{Log: log, Auth: authenticator{p.tenants, p.signals.known}, Authority: p.tenants, Metrics: p.metrics,
		Limiter: api.NewTenantLimit(tenantRate, p.metrics.RateLimited), Ready: p.ready,
		Services: api.Services{Tenants: p.tenants, Keys: keyService{p.tenants, p.signals}, Servers: servers{p.catalog, p.metrics, pool}, Offers: p.catalog,
			Contracts: p.authz, ActiveContracts: p.authz, Sessions: store, Connections: pool, Calls: p.calls, Subscriptions: p.calls,
			Consents: consents, Audit: p.audit, WebhookEndpoints: p.hooks, WebhookDeliveries: p.hooks, Events: p.events}})
	return p, err
}

// contractActivated tells the other replicas, and has the server listed anew: what
// it lists may depend on what the new contract has this client declare.
func (p *parts) contractActivated(t tenant.ID, serverID string) {
	ctx, cancel := context.WithTimeout(context.Background(), activatedTime)
	defer cancel()
	p.signals.send(ctx, signalContract, t, serverID)
	err := p.catalog.Invalidate(ctx, catalog.Change{Tenant: t, ServerID: serverID, Reason: "another contract was activated"})
	if err != nil {
		p.log.WarnContext(ctx, "invalidate catalog", "tenant", t, "server", serverID, "error", err)
	}
}

// activatedTime bounds what follows an activation.
const activatedTime = 10 * time.Second

func (p *parts) buildCatalog(consents *consent.Service, out *egress.Client, pool *sessions.Pool, stack *closers) (err error) {
	p.catalog, err = catalog.New(catalog.Options{DB: p.stores.db, Lister: lister{pool, p.authz}, Voider: consents, Recorder: p.audit,
		Announcer: p.hooks, CheckURL: out.CheckURL, Runtimes: slices.Sorted(maps.Keys(p.cfg.Runtimes)), Cache: redis.NewCache(p.stores.redis),
		Signal: p.signals.signal, Observer: observer{p.metrics}})
	if err != nil {
		return err
	}
	stack.push(func(context.Context) error { p.catalog.Close(); return nil })
	p.signals.catalog, p.signals.pool = p.catalog, pool
	p.signals.registered = newRegistrations(p.catalog, pool, p.log)
	p.lessons.catalog = p.catalog
	p.changes = newChangeQueue(p.catalog, consents, p.log)
	pool.OnChange(p.changes.heard)
	return nil
}

func runtimes(cfg *config.Config) map[string]sessions.Runtime {
	out := make(map[string]sessions.Runtime, len(cfg.Runtimes))
	for name, r := range cfg.Runtimes {
		out[name] = sessions.Runtime{Command: r.Command, Env: r.Env, ReadRoots: r.ReadRoots, WriteRoots: r.WriteRoots, Dir: r.Dir,
			Network: r.Network, User: r.User, Limits: confine.Limits{Memory: r.Limits.MemoryBytes, AddressSpace: r.Limits.AddressSpaceBytes,
				FileSize: r.Limits.FileBytes, OpenFiles: r.Limits.OpenFiles, Processes: r.Limits.Processes, CPUSeconds: r.Limits.CPUSeconds}}
	}
	return out
}

func (p *parts) observeCall(c *calls.Call) {
	p.metrics.CallState(c.Tenant.String(), c.ServerName, string(c.State))
	if c.State == calls.Denied && c.Decision.FirstFailed == "origin" {
		p.lessons.refused(c.Tenant, c.ServerID, c.ServerName, 0, sessions.EventOriginRefused)
	}
	p.metrics.CallTook(c.Tenant.String(), c.ServerName, c.Timings.Execution)
}

// ready says why the process cannot take requests: Postgres must answer; Redis
// may be away.
func (p *parts) ready(ctx context.Context) error {
	_, err := p.stores.db.Tenants(ctx, "", 1)
	return err
}
