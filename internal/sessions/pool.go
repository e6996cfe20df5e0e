package sessions

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// PoolConfig is what a Pool works with.
type PoolConfig struct {
	// Egress makes every HTTP request. Required.
	Egress *egress.Client
	// Log takes diagnostics. Required.
	Log *slog.Logger
	// Version is this build's version, told to servers.
	Version string
	// Runtimes are the commands that stdio servers may name.
	Runtimes map[string]Runtime
	// TempDir is where children get their private directories; empty means the
	// system's.
	TempDir string
	// Credentials adds users' credentials to HTTP requests; nil adds none.
	Credentials Credentials
	// Limits bound everything; zero members mean defaults.
	Limits Limits
	// Opened is told of each connection that is made and returns what to call when
	// it has ended; for metrics. It may be nil and must not block.
	Opened func(t tenant.ID, server string) (closed func())
}

// Pool owns the live connections. It opens one for a key when it is first needed,
// shares it among all callers with that key, and ends it when nobody used it for
// a while. It is safe for concurrent use.
type Pool struct {
	egress     *egress.Client
	log        *slog.Logger
	creds      Credentials
	runtimes   map[string]Runtime
	tempDir    string
	limits     Limits
	meta       []byte
	clientInfo mcp.Implementation
	onChange   atomic.Pointer[func(Change)]
	spawn      *spawner
	opened     func(t tenant.ID, server string) (closed func())
	answers    *budget

	tasks  tasks
	ctx    context.Context // ends connecting and watching at Shutdown
	cancel context.CancelFunc

	mu       sync.Mutex
	closed   bool
	slots    map[Key]*slot
	tenants  map[tenant.ID]int // slots of each tenant
	children map[tenant.ID]int // living processes of each tenant
	running  int               // living processes in all
	eras     map[registration]eraNote
	pauses   map[registration]*pause
	lately   []ConnectionInfo // a ring of connections that ended
	oldest   int
}

// registration is what knowledge of a server's era and failures belongs to.
type registration struct {
	tenant   tenant.ID
	server   string
	revision int64
}

func registrationOf(k Key) registration { return registration{k.Tenant, k.Server, k.Registration} }

// eraNote is what a server proved about itself.
type eraNote struct {
	version string // the newest seen
	legacy  bool   // the last definite answer was legacy
}

// pause is the time in which a failing server is left alone.
type pause struct {
	until time.Time
	next  time.Duration
	err   *fault.Error
}

// slot is the place of one key: a connection, or the attempt to get one.
type slot struct {
	ready chan struct{} // closed when c or err is set
	c     *conn
	err   error
}

// connectError is an error of connecting with what the server said, so that a
// caller gets the challenge of a server that asks for a sign-in first.
type connectError struct {
	err     error
	refusal reply
}

func (e *connectError) Error() string { return e.err.Error() }
func (e *connectError) Unwrap() error { return e.err }

// NewPool returns a pool and starts its sweeper. Shutdown ends it.
func NewPool(cfg PoolConfig) *Pool {
	p := &Pool{
		egress: cfg.Egress, log: cfg.Log, creds: cfg.Credentials, runtimes: cfg.Runtimes, tempDir: cfg.TempDir,
		limits: cfg.Limits.withDefaults(), clientInfo: mcp.Implementation{Name: "bulkhead", Version: cfg.Version},
		slots: map[Key]*slot{}, tenants: map[tenant.ID]int{}, children: map[tenant.ID]int{},
		eras: map[registration]eraNote{}, pauses: map[registration]*pause{}, spawn: newSpawner(), opened: cfg.Opened,
	}
	if p.clientInfo.Version == "" {
		p.clientInfo.Version = "dev"
	}
	p.answers = newBudget(p.limits.AnswerBytes, p.limits.TenantAnswerBytes)
	p.meta = modernMeta(p.clientInfo.Name, p.clientInfo.Version)
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.tasks.run(p.sweeping)
	return p
}

// OnChange sets the function that is told when the lists of a server may have
// changed, at most about once a second for a key. It is called on a goroutine of
// the pool and must return soon. Set it before the pool is used.
func (p *Pool) OnChange(fn func(Change)) { p.onChange.Store(&fn) }

func (p *Pool) tell(ch Change) {
	if fn := p.onChange.Load(); fn != nil {
		(*fn)(ch)
	}
}

// Do sends one request on the key's connection, opening it when there is none. A
// request is sent at most once, except that a server which refused it for its
// protocol version gets it a second time. The caller releases the response.
func (p *Pool) Do(ctx context.Context, k Key, t Target, r Request) (Response, error) {
	if err := checkRequest(r.Method, &r); err != nil {
		return Response{}, err
	}
	var waited time.Duration
	for again := false; ; {
		began := time.Now()
		c, err := p.acquire(ctx, k, t)
		waited += time.Since(began)
		if err != nil {
			resp := Response{Timings: Timings{Negotiation: waited}}
			var ce *connectError
			if errors.As(err, &ce) {
				err = ce.err
				resp.HTTPStatus, resp.WWWAuthenticate, resp.RetryAfter = ce.refusal.status, ce.refusal.challenge, ce.refusal.retryAfter
			}
			return resp, err
		}
		resp, retry, err := c.do(ctx, &r)
		p.release(c)
		resp.Timings.Negotiation = waited
		if !retry || again {
			return resp, err
		}
		resp.Release()
		again = true
	}
}

// checkRequest refuses what only a fault of ours can bring.
func checkRequest(method string, r *Request) error {
	if !mcp.MethodRequiresNameHeader(mcp.MCPMethod(method)) {
		return fault.New(fault.Internal, "METHOD_INVALID", "the method is not one that calls may use")
	}
	if err := checkParams(r.Params); err != nil {
		return err
	}
	return checkMeta(r.Meta)
}

// List reads all pages of what the server offers of one kind. A legacy session
// that was lost is opened anew once, since listing has no effect.
func (p *Pool) List(ctx context.Context, k Key, t Target, kind string) (Listing, error) {
	if _, ok := lists[kind]; !ok {
		return Listing{}, fault.New(fault.Internal, "KIND_INVALID", "there is no such kind of definition")
	}
	for again := false; ; again = true {
		began := time.Now()
		c, err := p.acquire(ctx, k, t)
		if err != nil {
			var ce *connectError
			if errors.As(err, &ce) {
				err = ce.err
			}
			return Listing{}, err
		}
		out, err := c.list(ctx, kind)
		if c.opened.After(began) {
			out.Negotiation = c.negotiation
		}
		p.release(c)
		if f, ok := fault.As(err); !again && ok && f.Reason == "SESSION_LOST" {
			continue
		}
		return out, err
	}
}

// acquire returns the connection of a key with one more user on it.
func (p *Pool) acquire(ctx context.Context, k Key, t Target) (*conn, error) {
	for {
		s, err := p.slot(k, t)
		if err != nil {
			return nil, err
		}
		select {
		case <-s.ready:
		default:
			select {
			case <-s.ready:
			case <-ctx.Done():
				return nil, ended(ctx)
			}
		}
		if s.err != nil {
			return nil, s.err
		}
		c := s.c
		if !t.allowed(c.version) {
			p.drop(c, "the contract no longer allows the negotiated version", false)
			continue
		}
		c.mu.Lock()
		if c.ended {
			c.mu.Unlock()
			continue
		}
		if c.active >= p.limits.InFlight {
			c.mu.Unlock()
			return nil, failure(fault.Exhausted, fault.Host, "CONNECTION_BUSY", "too many requests run on the connection to the server")
		}
		c.active++
		c.lastUsed = time.Now()
		c.mu.Unlock()
		return c, nil
	}
}

func (p *Pool) release(c *conn) {
	c.mu.Lock()
	c.active--
	c.lastUsed = time.Now()
	last := c.ended && c.active == 0 && !c.closing
	c.closing = c.closing || last
	c.mu.Unlock()
	if last {
		p.close(c)
	}
}

// slot returns the key's slot and starts connecting when there is none.
func (p *Pool) slot(k Key, t Target) (*slot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, failure(fault.Unavailable, fault.Host, "STOPPING", "the server is stopping")
	}
	if s, ok := p.slots[k]; ok {
		return s, nil
	}
	if pa, ok := p.pauses[registrationOf(k)]; ok {
		if left := time.Until(pa.until); left > 0 {
			return nil, pa.err.Retry(left)
		}
	}
	if p.tenants[k.Tenant] >= p.limits.Tenant || len(p.slots) >= p.limits.Total {
		if !p.evict(k.Tenant) {
			return nil, failure(fault.Exhausted, fault.Host, "CONNECTIONS_EXHAUSTED", "too many connections to servers are open")
		}
	}
	s := &slot{ready: make(chan struct{})}
	p.slots[k] = s
	p.tenants[k.Tenant]++
	p.tasks.run(func() { p.open(s, k, t) })
	return s, nil
}

// open connects a slot.
func (p *Pool) open(s *slot, k Key, t Target) {
	timeout := p.limits.Connect
	if t.Timeout > 0 {
		timeout = min(timeout, t.Timeout)
	}
	ctx, cancel := context.WithTimeout(p.ctx, timeout)
	defer cancel()
	c, err := p.connect(ctx, k, t)
	p.mu.Lock()
	if err == nil && p.closed {
		err = failure(fault.Unavailable, fault.Host, "STOPPING", "the server is stopping")
	}
	if err == nil && c.over() {
		err = failure(fault.Unavailable, fault.Transport, "SERVER_ENDED", "the server's program ended")
	}
	if err != nil {
		p.forget(k)
		s.err = &connectError{err, c.refusal}
		p.failed(k, err)
		p.remember(c, StateFailed, publicText(err))
	} else {
		s.c, c.placed = c, true
		if p.opened != nil {
			c.closed = p.opened(k.Tenant, c.target.ServerName)
		}
		if c.announces() {
			c.watchTried = make(chan struct{}) // before anybody can list
		}
		delete(p.pauses, registrationOf(k))
	}
	p.mu.Unlock()
	close(s.ready)
	switch {
	case err == nil:
		p.watch(c)
	case c.wire != nil:
		p.close(c)
	}
}

func publicText(err error) string {
	if f, ok := fault.As(err); ok {
		return f.Message
	}
	return "internal error"
}

// connect makes a wire and negotiates. The connection is returned beside an error
// too, so that it can be closed and told about.
func (p *Pool) connect(ctx context.Context, k Key, t Target) (*conn, error) {
	now := time.Now()
	c := &conn{id: resource.NewID(resource.Connection), pool: p, key: k, target: t, state: StateIdentified, opened: now, lastUsed: now}
	var err error
	switch t.Transport {
	case TransportHTTP:
		w, e := newHTTPWire(p, k, t, &c.count, c.changed)
		if err = e; err == nil {
			c.wire = w
		}
	case TransportStdio:
		w, e := newStdioWire(p, c)
		if err = e; err == nil {
			c.wire = w
		}
	default:
		err = failure(fault.Unimplemented, fault.Host, "TRANSPORT_UNSUPPORTED", "this transport is not supported")
	}
	if err == nil {
		err = c.negotiate(ctx)
	}
	c.negotiation = time.Since(now)
	return c, err
}

// announces reports whether there is a stream of changes to watch. A legacy
// server on stdio announces them on the pipe that everything else uses.
func (c *conn) announces() bool {
	return len(c.announced) > 0 && !(c.target.Transport == TransportStdio && c.era == EraLegacy)
}

// watch starts the watcher of a connection whose server announces changes.
func (p *Pool) watch(c *conn) {
	if c.watchTried == nil {
		return
	}
	ctx, cancel := context.WithCancel(p.ctx)
	c.mu.Lock()
	gone := c.ended
	if !gone {
		c.stopWatch = cancel
	}
	c.mu.Unlock()
	if gone {
		cancel()
		close(c.watchTried)
		return
	}
	p.tasks.run(func() {
		defer cancel()
		c.watching(ctx)
	})
}

// drop ends a connection for new users. Requests in flight go on; the last one
// closes it. gap says that whoever relies on its lists must know.
func (p *Pool) drop(c *conn, why string, gap bool) {
	c.mu.Lock()
	if c.ended {
		c.mu.Unlock()
		return
	}
	c.ended = true
	idle := c.active == 0
	c.closing = idle
	announced := len(c.announced) > 0
	c.mu.Unlock()

	p.mu.Lock()
	if s, ok := p.slots[c.key]; ok && s.c == c {
		p.forget(c.key)
	}
	if c.placed {
		p.remember(c, StateClosed, why)
	}
	if c.closed != nil {
		c.closed()
	}
	p.mu.Unlock()
	if idle {
		p.close(c)
	}
	if gap || announced {
		p.tasks.run(func() { p.tell(Change{Key: c.key}) })
	}
}

// close shuts a connection in the background.
func (p *Pool) close(c *conn) {
	p.tasks.run(func() { c.shutdown(context.WithoutCancel(p.ctx)) })
}

// Connections tells of a tenant's connections that match, living ones first.
func (p *Pool) Connections(t tenant.ID, match func(Key) bool) []ConnectionInfo {
	var out []ConnectionInfo
	for _, c := range p.matching(func(k Key) bool { return k.Tenant == t && match(k) }) {
		out = append(out, c.describe())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.lately {
		// The newest first.
		info := p.lately[(p.oldest+len(p.lately)-1-i)%len(p.lately)]
		if info.Key.Tenant == t && match(info.Key) {
			out = append(out, info)
		}
	}
	return out
}

func (p *Pool) matching(match func(Key) bool) []*conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []*conn
	for k, s := range p.slots {
		if s.c != nil && match(k) {
			out = append(out, s.c)
		}
	}
	return out
}

// CloseKey ends the connections whose keys match, each when its last request in
// flight has ended. A connection that is still opening is not affected.
func (p *Pool) CloseKey(match func(Key) bool) {
	for _, c := range p.matching(match) {
		p.drop(c, "closed", false)
	}
}

// Shutdown ends all connections and waits until nothing is left of them: no
// goroutine, no process. When ctx ends first, its error is returned and the rest
// goes on in the background.
func (p *Pool) Shutdown(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	var open []*conn
	for k, s := range p.slots {
		if s.c != nil {
			open = append(open, s.c)
			p.forget(k)
		}
	}
	p.mu.Unlock()
	p.onChange.Store(nil)
	p.cancel()
	for _, c := range open {
		c.mu.Lock()
		first := !c.closing
		c.ended, c.closing = true, true
		c.mu.Unlock()
		if first {
			p.close(c)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.tasks.wait()
		p.spawn.stop()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
