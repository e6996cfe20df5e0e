package sessions

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
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
	// Learned is told of the era and version that a server proved, when it is news to
	// this process, and Alarm of what a security team wants to see: one of the Event
	// constants, each time it happens. Either may be nil; they must not block.
	Learned func(k Key, era, version string)
	Alarm   func(k Key, t Target, event string)
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
	meta       [declarations][]byte
	clientInfo mcp.Implementation
	onChange   atomic.Pointer[func(Change)]
	opened     func(t tenant.ID, server string) (closed func())
	learned    func(k Key, era, version string)
	alarm      func(k Key, t Target, event string)
	answers    *budget
	pings      atomic.Int32 // under way
	onUpdated  atomic.Pointer[func(Updated)]

	tasks  tasks
	ctx    context.Context // ends connecting and watching at Shutdown
	cancel context.CancelFunc

	mu       sync.Mutex
	closed   bool
	slots    map[Key]*slot
	subs     map[Key]*subscriber
	tenants  map[tenant.ID]int // slots of each tenant
	servers  map[serverKey]int // slots of each server
	children map[tenant.ID]int // living processes of each tenant
	running  int               // living processes in all
	eras     map[registration]eraNote
	pauses   map[registration]*pause
	crashes  map[Key]*crash
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

// slot is the place of one key: a connection, or the attempt to get one.
type slot struct {
	ready   chan struct{} // closed when c or err is set
	opening *conn         // while there is neither
	trial   *pause        // that this connection is the trial of
	c       *conn
	err     error
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
		slots: map[Key]*slot{}, tenants: map[tenant.ID]int{}, servers: map[serverKey]int{}, children: map[tenant.ID]int{},
		eras: map[registration]eraNote{}, pauses: map[registration]*pause{}, crashes: map[Key]*crash{}, opened: cfg.Opened,
		subs:    map[Key]*subscriber{},
		learned: cfg.Learned, alarm: cfg.Alarm,
	}
	if p.clientInfo.Version == "" {
		p.clientInfo.Version = "dev"
	}
	p.answers = newBudget(p.limits.AnswerBytes, p.limits.TenantAnswerBytes)
	for i := range p.meta {
		p.meta[i] = modernMeta(p.clientInfo.Name, p.clientInfo.Version, declarationOf(i))
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.tellConfinement()
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
// protocol version gets it a second time if the method only asks. For any other,
// that refusal is no more than the server's word, and what follows from it is for
// the caller to decide and to record. The caller releases the response.
func (p *Pool) Do(ctx context.Context, k Key, t Target, r Request) (Response, error) {
	if err := checkRequest(r.Method, &r); err != nil {
		return Response{}, err
	}
	if k.shared() {
		t, r = t.silenced(), r.silenced()
	}
	var waited time.Duration
	for again := false; ; {
		began := time.Now()
		c, err := p.acquireTurn(ctx, k, &t, &r)
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
		resp, retry, err := c.do(ctx, &t, &r)
		c.passTurn()
		p.release(c)
		p.alarmed(k, t, err)
		resp.Timings.Negotiation = waited
		if !retry || again || !onlyAsks(&r) {
			return resp, err
		}
		resp.Release()
		again = true
	}
}

// onlyAsks reports whether a request may be sent a second time without anybody's
// leave: nothing comes of it but its answer, and nobody counts how often it is sent.
func onlyAsks(r *Request) bool {
	switch r.Method {
	case string(mcp.MethodCompletionComplete), string(mcp.MethodTasksGet):
		return r.BeforeSend == nil
	}
	return false
}

// checkRequest refuses what only a fault of ours can bring.
func checkRequest(method string, r *Request) error {
	if _, known := needs[method]; !known || method == string(mcp.MethodSetLogLevel) || subscribes(method) {
		return fault.New(fault.Internal, "METHOD_INVALID", "the method is not one that calls may use")
	}
	if err := checkParams(r.Params); err != nil {
		return err
	}
	return checkMeta(r.Meta)
}

// List reads all pages of what the server offers of one kind. A session that was
// lost, and an era that is in doubt, are negotiated anew once, since listing has
// no effect.
func (p *Pool) List(ctx context.Context, k Key, t Target, kind string) (Listing, error) {
	if _, ok := lists[kind]; !ok {
		return Listing{}, fault.New(fault.Internal, "KIND_INVALID", "there is no such kind of definition")
	}
	if k.shared() {
		t = t.silenced()
	}
	for again := false; ; again = true {
		began := time.Now()
		c, err := p.acquire(ctx, k, &t, false)
		if err != nil {
			var ce *connectError
			if errors.As(err, &ce) {
				err = ce.err
			}
			return Listing{}, err
		}
		out, err := c.list(ctx, &t, kind)
		if c.opened.After(began) {
			out.Negotiation = c.negotiation
		}
		p.release(c)
		p.alarmed(k, t, err)
		if f, ok := fault.As(err); !again && ok && (f.Reason == SessionLost || c.doubted.Load()) {
			continue
		}
		return out, err
	}
}

// acquire returns the connection of a key with one more user on it. One that was
// declared otherwise than the target says is ended, unless any will do.
func (p *Pool) acquire(ctx context.Context, k Key, t *Target, any bool) (*conn, error) {
	for {
		s, trial, err := p.slot(k, t)
		if err != nil {
			return nil, err
		}
		if trial != nil {
			if err := awaitTrial(ctx, trial); err != nil {
				return nil, err
			}
			continue
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
		if !t.allowed(c.version) || t.DowngradeForbidden && c.fellBack {
			p.drop(c, "the contract no longer allows the negotiated version", false)
			continue
		}
		if !any && !c.agrees(t) {
			p.drop(c, "what is declared to the server has changed", false)
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

// slot returns the key's slot and starts connecting when there is none. Where the
// server is being tried after a pause, it returns that trial instead.
func (p *Pool) slot(k Key, t *Target) (s *slot, trial <-chan struct{}, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, nil, failure(fault.Unavailable, fault.Host, "STOPPING", "the server is stopping")
	}
	if s, ok := p.slots[k]; ok {
		return s, nil, nil
	}
	if err := p.crashPause(k); err != nil {
		return nil, nil, err
	}
	if trial, err := p.paused(k); trial != nil || err != nil {
		return nil, trial, err
	}
	if err := p.admit(k, *t); err != nil {
		return nil, nil, err
	}
	s = &slot{ready: make(chan struct{})}
	p.slots[k] = s
	p.tenants[k.Tenant]++
	p.servers[serverOf(k)]++
	p.try(k, s)
	p.start(s, k, *t)
	return s, nil, nil
}

// start opens a slot in the background.
func (p *Pool) start(s *slot, k Key, t Target) {
	p.tasks.run(func() { p.open(s, k, t) })
}

// open connects a slot.
func (p *Pool) open(s *slot, k Key, t Target) {
	timeout := p.limits.Connect
	if t.Timeout > 0 {
		timeout = min(timeout, t.Timeout)
	}
	ctx, cancel := context.WithTimeout(p.ctx, timeout)
	defer cancel()
	c := p.begin(s, k, t)
	err := p.connect(ctx, c)
	p.mu.Lock()
	s.opening = nil
	if err == nil && p.closed {
		err = failure(fault.Unavailable, fault.Host, "STOPPING", "the server is stopping")
	}
	if err == nil && c.over() {
		err = failure(fault.Unavailable, fault.Transport, "SERVER_ENDED", "the server ended the connection")
	}
	failed := p.tried(k, s, err)
	if err != nil {
		p.forget(k)
		s.err = &connectError{err, c.refusal}
		p.failed(k, err)
		p.remember(c, StateFailed, publicText(err))
	} else {
		c.attempts = failed + 1
		s.c, c.placed = c, true
		if p.opened != nil {
			c.closed = p.opened(k.Tenant, c.target.ServerName)
		}
		if c.announces() {
			c.watchTried = make(chan struct{}) // before anybody can list
		}
	}
	p.mu.Unlock()
	p.alarmed(k, t, err)
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

// firstID is the least id of a request; all ids have as many digits.
const firstID = 1_000_000_000

// begin makes the connection of a slot, still without a wire, so that it can be
// told about from its first moment.
func (p *Pool) begin(s *slot, k Key, t Target) *conn {
	now := time.Now()
	c := &conn{id: resource.NewID(resource.Connection), pool: p, key: k, target: t, opened: now, lastUsed: now, turn: make(chan struct{}, 1), gone: make(chan struct{})}
	// A request that is repeated with answers must have another id, whichever replica
	// and process sends it: no two connections count from the same number.
	c.nextID.Store(firstID + rand.Int64N(8*firstID))
	c.enter(StateIdentified)
	p.mu.Lock()
	defer p.mu.Unlock()
	s.opening = c
	return c
}

// connect makes a wire and negotiates. Beside an error the connection can still be
// closed and told about.
func (p *Pool) connect(ctx context.Context, c *conn) (err error) {
	defer func() { c.negotiation = time.Since(c.opened) }()
	switch c.target.Transport {
	case TransportHTTP:
		w, err := newHTTPWire(p, c)
		if err != nil {
			return err
		}
		c.wire = w
	case TransportSSE:
		w, err := newSSEWire(p, c)
		if err != nil {
			return err
		}
		c.wire = w
		if c.refusal, err = w.open(ctx); err != nil {
			return err
		}
	case TransportStdio:
		w, err := newStdioWire(p, c)
		if err != nil {
			return err
		}
		c.wire = w
	default:
		return failure(fault.Unimplemented, fault.Host, "TRANSPORT_UNSUPPORTED", "this transport is not supported")
	}
	return c.negotiate(ctx)
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
	if c.gone != nil {
		close(c.gone)
	}
	idle := c.active == 0
	c.closing = idle
	announced := len(c.announced) > 0
	stop := c.stopWatch
	c.mu.Unlock()
	if stop != nil {
		stop() // whoever comes next opens a stream of its own
	}

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
