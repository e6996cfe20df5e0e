package main

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// lister lets the catalog list through the pool of connections, bound by the
// server's contract where it has one.
type lister struct {
	pool      *sessions.Pool
	contracts *authz.Service
}

func (l lister) ListDefinitions(ctx context.Context, v catalog.Server, c catalog.Context, kind catalog.Kind) (catalog.Listing, error) {
	t := calls.TargetOf(v, &contract.Contract{})
	active, err := l.contracts.Active(ctx, c.Tenant, v.ID)
	if err != nil {
		return catalog.Listing{}, err
	}
	// An admin's probe looks at what a server can do before there is a contract
	// for it, or beside the one there is.
	if active != nil && !c.Probe {
		t = calls.TargetOf(v, active.Contract)
	}
	k := sessions.Key{Tenant: c.Tenant, Server: v.ID, Registration: v.Registration, Subject: c.Subject, Session: c.Session,
		AccountVersion: c.Account}
	got, err := l.pool.List(ctx, k, t, kind)
	if err != nil {
		return catalog.Listing{}, err
	}
	out := catalog.Listing{Items: got.Items, Incomplete: got.Incomplete, TTL: got.TTL, Public: got.Scope == "public", ProtocolVersion: got.ProtocolVersion,
		Era: got.Era, Negotiation: got.Negotiation, Capabilities: got.Capabilities, ServerInfo: got.ServerInfo}
	for _, r := range got.Rejected {
		out.Rejected = append(out.Rejected, catalog.Rejected{Item: r.Item, Reason: r.Reason})
	}
	return out, nil
}

// serverFinder finds registrations for sessions that open.
type serverFinder struct{ catalog *catalog.Service }

func (f serverFinder) Find(ctx context.Context, t tenant.ID, namesOrIDs []string) ([]sessions.ServerRef, error) {
	out := make([]sessions.ServerRef, len(namesOrIDs))
	for i, n := range namesOrIDs {
		v, err := f.catalog.GetServer(ctx, tenant.Principal{Tenant: t}, n)
		if fault.Is(err, fault.NotFound) {
			return nil, fault.Field1("servers", "names %q, which is not registered", n)
		}
		if err != nil {
			return nil, err
		}
		out[i] = sessions.ServerRef{ID: v.ID, Name: v.Name}
	}
	return out, nil
}

func (f serverFinder) Contracted(ctx context.Context, t tenant.ID, limit int) (out []sessions.ServerRef, err error) {
	after := ""
	for len(out) < limit {
		vs, err := f.catalog.ListServers(ctx, tenant.Principal{Tenant: t}, after, 200)
		if err != nil || len(vs) == 0 {
			return out, err
		}
		for _, v := range vs {
			if after = v.Name; v.ActiveContract > 0 && len(out) < limit {
				out = append(out, sessions.ServerRef{ID: v.ID, Name: v.Name})
			}
		}
	}
	return out, nil
}

// changeQueue carries what connections notice to the catalog, off the pool's
// goroutines. When it is full, changes of one server are joined into one for all
// of its users, so that none is lost.
type changeQueue struct {
	catalog *catalog.Service
	log     *slog.Logger
	queue   chan catalog.Change

	consents   *consent.Service
	rebuilding chan struct{} // a place for each list under way
	work       sync.WaitGroup

	mu     sync.Mutex
	joined map[changedServer]bool // at most one for each registered server
	met    map[changedServer]bool // servers that this process has connected to; at most maxMet
	wake   chan struct{}
}

type changedServer struct {
	tenant tenant.ID
	server string
}

const (
	maxQueuedChanges = 4096
	maxMet           = 10_000
	maxRebuilding    = 8
	rebuildTime      = 15 * time.Second
)

func newChangeQueue(c *catalog.Service, k *consent.Service, log *slog.Logger) *changeQueue {
	return &changeQueue{catalog: c, consents: k, rebuilding: make(chan struct{}, maxRebuilding), log: log, queue: make(chan catalog.Change, maxQueuedChanges),
		joined: map[changedServer]bool{}, met: map[changedServer]bool{}, wake: make(chan struct{}, 1)}
}

const changeReason = "the server announced a change or was reconnected"

func (q *changeQueue) heard(c sessions.Change) {
	k := c.Key
	ch := catalog.Change{Tenant: k.Tenant, ServerID: k.Server, Kind: c.Kind, Reason: changeReason,
		Context: &catalog.Context{Tenant: k.Tenant, Subject: k.Subject, Session: k.Session, Account: k.AccountVersion}}
	// A further user's new connection says nothing against a list that others
	// watch; the first one after a start does.
	ch.Connected, ch.Opened = c.Connected, c.Opened
	ch.Own = c.Connected && !q.meet(changedServer{k.Tenant, k.Server})
	select {
	case q.queue <- ch:
		return
	default:
	}
	q.mu.Lock()
	q.joined[changedServer{k.Tenant, k.Server}] = true
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// meet reports whether this is the first connection to the server.
func (q *changeQueue) meet(s changedServer) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.met[s] {
		return false
	}
	if len(q.met) >= maxMet {
		clear(q.met)
	}
	q.met[s] = true
	return true
}

func (q *changeQueue) run(ctx context.Context) error {
	defer q.work.Wait()
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-q.queue:
			q.invalidate(ctx, c)
		case <-q.wake:
			for _, s := range q.takeJoined() {
				q.invalidate(ctx, catalog.Change{Tenant: s.tenant, ServerID: s.server, Reason: changeReason})
			}
		}
	}
}

func (q *changeQueue) takeJoined() []changedServer {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := slices.Collect(maps.Keys(q.joined))
	clear(q.joined)
	return out
}

func (q *changeQueue) invalidate(ctx context.Context, c catalog.Change) {
	if err := q.catalog.Invalidate(ctx, c); err != nil && ctx.Err() == nil {
		q.log.WarnContext(ctx, "invalidate catalog", "tenant", c.Tenant, "server", c.ServerID, "error", err)
	}
	if c.Own || c.Context == nil {
		return
	}
	// Lists are made when they are needed. Where something was agreed to they are
	// needed now: a changed definition voids it, and whoever is asked should know.
	select {
	case q.rebuilding <- struct{}{}:
		q.work.Go(func() {
			defer func() { <-q.rebuilding }()
			q.rebuild(ctx, c)
		})
	default: // enough of that for now; a dispatch looks in any case
	}
}

func (q *changeQueue) rebuild(ctx context.Context, c catalog.Change) {
	ctx, cancel := context.WithTimeout(ctx, rebuildTime)
	defer cancel()
	// Whoever heard of the change may be another user than those who agreed: a
	// list that the server calls public is everybody's.
	stands, err := q.consents.Stands(ctx, c.Tenant, c.ServerID)
	if err != nil || !stands {
		return
	}
	v, err := q.catalog.GetServer(ctx, tenant.Principal{Tenant: c.Tenant}, c.ServerID)
	if err == nil {
		_, err = q.catalog.Current(ctx, v, *c.Context, catalog.Tool, rebuildTime)
	}
	if err != nil && ctx.Err() == nil {
		q.log.InfoContext(ctx, "rebuild catalog", "tenant", c.Tenant, "server", c.ServerID, "error", err)
	}
}

// observer counts the work of the catalog.
type observer struct{ m *telemetry.Metrics }

func (o observer) Listed(t tenant.ID, serverID string, _ catalog.Kind, _ time.Duration, err error) {
	word := "ok"
	if err != nil {
		word = "failed"
	}
	o.m.CatalogRefresh(t.String(), serverID, word)
}

func (o observer) Changed(t tenant.ID, serverID string, _ catalog.Kind, n int) {
	if n > 0 {
		o.m.SecurityEvent(t.String(), serverID, "definition_changed")
	}
}

// servers ends the metrics of a server, and this replica's connections to it, with
// the server.
type servers struct {
	*catalog.Service
	metrics *telemetry.Metrics
	pool    *sessions.Pool
}

// UpdateServer implements api.Servers: connections of an earlier registration end,
// here at once, at other replicas as soon as they hear or look.
func (s servers) UpdateServer(ctx context.Context, p tenant.Principal, idOrName string, up catalog.ServerUpdate) (catalog.Server, error) {
	v, err := s.Service.UpdateServer(ctx, p, idOrName, up)
	if err == nil {
		s.pool.CloseKey(func(k sessions.Key) bool {
			return k.Tenant == p.Tenant && k.Server == v.ID && k.Registration != v.Registration
		})
	}
	return v, err
}

// DeleteServer implements api.Servers.
func (s servers) DeleteServer(ctx context.Context, p tenant.Principal, idOrName string) error {
	v, err := s.GetServer(ctx, p, idOrName)
	if err != nil {
		return err
	}
	if err := s.Service.DeleteServer(ctx, p, v.ID); err != nil {
		return err
	}
	// Calls are counted by name, listings by id.
	s.metrics.ForgetServer(p.Tenant.String(), v.Name)
	s.metrics.ForgetServer(p.Tenant.String(), v.ID)
	s.pool.CloseKey(func(k sessions.Key) bool { return k.Tenant == p.Tenant && k.Server == v.ID })
	return nil
}

// known remembers the tenants that this replica has authenticated, because a
// signal names its tenant as text and an id cannot be made from text.
type known struct {
	mu  sync.Mutex
	ids map[string]tenant.ID // at most maxKnown
}

const maxKnown = 100_000

func (k *known) add(t tenant.ID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.ids) < maxKnown || k.ids[t.String()] == t {
		k.ids[t.String()] = t
	}
}

func (k *known) get(s string) (tenant.ID, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t, ok := k.ids[s]
	return t, ok
}
