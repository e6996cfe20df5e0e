// Package catalog owns what a tenant registered and what it offers: the
// registrations of MCP servers, the definitions that the servers list, stored
// raw by digest, and immutable revisions of those lists. It decides which list
// counts as observed now: a list is made once for all replicas, swapped whole,
// never replaced by one that began earlier nor by an error, and kept apart for
// each authorization context.
//
// PostgreSQL is the truth. Memory holds what PostgreSQL confirmed within the
// last five seconds; a cache such as Redis holds encoded revisions, which count
// only when their digest is the one in PostgreSQL. The package opens no
// connection to a server: whoever lists is a Lister.
package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// Lister asks a server for everything it offers of one kind. The context given
// is scoped to the server's isolation: what must not be used is zero. A fault of
// kind Unauthenticated or Denied means that the server refused this user's
// credentials, and hides the list from the user.
type Lister interface {
	ListDefinitions(ctx context.Context, s Server, c Context, kind Kind) (Listing, error)
}

// Listing is what a server answered, complete: all pages, or an error instead.
type Listing struct {
	// Items are the definitions as received, in the server's order.
	Items []json.RawMessage
	// Rejected are definitions that the protocol tells a client to leave out.
	Rejected []Rejected
	// Incomplete says why the list may lack definitions, and is empty otherwise.
	Incomplete string
	// TTL is how long the server lets the list be reused. Zero means that it said
	// nothing or made no promise: the age that the caller allows decides alone.
	TTL time.Duration
	// Public says that the list is the same for all users. It is then shared
	// within the tenant, never beyond.
	Public bool
	// ProtocolVersion and Era are those of the connection.
	ProtocolVersion, Era string
	// Capabilities and ServerInfo are untrusted JSON and may be empty.
	Capabilities, ServerInfo json.RawMessage
	// Negotiation is the time it took to connect, zero on a known connection.
	Negotiation time.Duration
}

// Rejected is an item left out of a Listing with the rule it broke.
type Rejected struct {
	Item   json.RawMessage
	Reason string
}

// Voider ends what was agreed under what no longer stands, in the transaction
// that changes it.
type Voider interface {
	// VoidServer voids everything of a server, but what was agreed under the
	// contract keepContract when that is not empty.
	VoidServer(ctx context.Context, tx tenant.Tx, serverID, keepContract, reason string) error
	// VoidDefinition voids what was agreed about the definition with this digest,
	// for one subject or, when it is nil, for all. The kind is a call's: TOOL or
	// PROMPT.
	VoidDefinition(ctx context.Context, tx tenant.Tx, serverID string, subject *tenant.Subject, kind, name, digest, reason string) error
}

// Recorder keeps audit entries in the transaction of what they record.
type Recorder interface {
	Append(ctx context.Context, tx tenant.Tx, e audit.Entry) (string, error)
}

// Announcer tells a tenant's own systems what happened, in the transaction in
// which it happens. *webhooks.Service is one.
type Announcer interface {
	Announce(ctx context.Context, tx tenant.Tx, events ...webhooks.Event) error
}

// Cache keeps encoded revisions for all replicas. It may lose anything at any
// time, and what it returns is checked; failures look like absence. *redis.Cache
// is one.
type Cache interface {
	Get(ctx context.Context, k redis.Key) ([]byte, bool)
	Set(ctx context.Context, k redis.Key, value []byte, ttl time.Duration) bool
}

// Signal tells other replicas that something about a server changed; they call
// Service.Heard. It may lose messages. *redis.Signal is one.
type Signal interface {
	Publish(ctx context.Context, k redis.Kind, tenant, id string) error
}

// Changed is the kind of this package's signals; their id is a server's.
const Changed redis.Kind = "catalog.changed"

// Observer counts. Its methods must not block.
type Observer interface {
	// Listed is told of each list made by this replica; err is nil when it was
	// stored.
	Listed(t tenant.ID, serverID string, kind Kind, took time.Duration, err error)
	// Changed is told how many definitions changed or vanished with a list.
	Changed(t tenant.ID, serverID string, kind Kind, n int)
}

// Options are what a Service works with. DB, Lister, Voider, Recorder and
// CheckURL are needed; a zero field of the others takes the default.
type Options struct {
	DB       *tenant.DB
	Lister   Lister
	Voider   Voider
	Recorder Recorder
	// CheckURL judges the address of a server by the egress policy. Its error is
	// an Invalid fault for the field at path.
	CheckURL func(path, raw string) (*url.URL, error)
	// Runtimes are the names of the declared local commands.
	Runtimes []string
	// Declared names what this build declares to servers. Lists made under other
	// declarations are not reused.
	Declared string
	// Announcer, Cache, Signal and Observer may be nil.
	Announcer Announcer
	Cache     Cache
	Signal    Signal
	Observer  Observer
	// Now is the clock. Default: time.Now.
	Now func() time.Time
	// Wait bounds how long a caller of Current waits for a list before the last
	// good one is served as stale. Default: 10 s.
	Wait time.Duration
	// ListTimeout bounds one list, connecting included. Default: 30 s.
	ListTimeout time.Duration
}

// The bounds of what a replica holds in memory, and of its work.
const (
	confirmFor      = 5 * time.Second
	maxSlots        = 10_000
	maxServers      = 10_000
	maxCheckers     = 4_000
	maxRevisionData = 96 << 20
	maxAnswerData   = 48 << 20
	maxLists        = 256
	maxServerLists  = 16
	cacheFor        = 24 * time.Hour
)

func cacheKey(t tenant.ID, revisionID string) redis.Key {
	return redis.Key{Tenant: t.String(), Kind: "catalog", Parts: []string{revisionID}}
}

// Service is the catalog of all tenants. It is safe for concurrent use.
type Service struct {
	o        Options
	replica  string
	runtimes map[string]bool

	slots    *lru[slotKey, *slot]
	contents *lru[contentKey, *content]
	checkers *lru[checkerKey, *checker]
	answers  *lru[answerKey, []byte]
	servers  *lru[serverKey, cachedServer]
	drops    *lru[string, uint64]
	loads    group[contentKey, *content]
	// dropped numbers the signals heard, gaps those that were gaps.
	dropped, gaps atomic.Uint64

	stop    context.CancelFunc
	stopped context.Context
	work    sync.WaitGroup

	mu      sync.Mutex // guards what follows
	closed  bool
	lists   int
	perList map[contentKey]int // lists under way for a server
}

// New returns the catalog. Close ends it.
func New(o Options) (*Service, error) {
	if o.DB == nil || o.Lister == nil || o.Voider == nil || o.Recorder == nil || o.CheckURL == nil {
		return nil, errors.New("catalog: database, lister, voider, recorder and the check of URLs are needed")
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Wait <= 0 {
		o.Wait = 10 * time.Second
	}
	if o.ListTimeout <= 0 {
		o.ListTimeout = 30 * time.Second
	}
	s := &Service{
		o: o, replica: resource.NewID(resource.Catalog), runtimes: map[string]bool{},
		slots:    newLRU[slotKey, *slot](maxSlots),
		contents: newLRU[contentKey, *content](maxRevisionData),
		checkers: newLRU[checkerKey, *checker](maxCheckers),
		answers:  newLRU[answerKey, []byte](maxAnswerData),
		servers:  newLRU[serverKey, cachedServer](maxServers),
		drops:    newLRU[string, uint64](maxServers),
		perList:  map[contentKey]int{},
	}
	for _, r := range o.Runtimes {
		s.runtimes[r] = true
	}
	s.stopped, s.stop = context.WithCancel(context.Background())
	return s, nil
}

// Close cancels the lists under way and waits for them. Current fails afterwards.
func (s *Service) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.stop()
	s.work.Wait()
}

// run starts fn on a goroutine that Close waits for. It is false once closed.
func (s *Service) run(fn func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.work.Go(fn)
	return true
}

// Heard takes a signal. After Changed, and after a gap, this replica asks
// PostgreSQL again before it uses what it remembers about the server, or about
// all servers. Other kinds and unknown ids do no harm.
func (s *Service) Heard(e redis.Event) {
	switch {
	case e.Gap:
		s.dropped.Add(1)
		s.gaps.Add(1)
	case e.Kind == Changed:
		s.drop(e.ID)
	}
}

func (s *Service) drop(serverID string) {
	if !resource.IsID(resource.Server, serverID) {
		return
	}
	s.drops.put(serverID, s.dropped.Add(1), 1)
}

// dropCount changes whenever a signal was heard for the server.
func (s *Service) dropCount(serverID string) uint64 {
	n, _ := s.drops.get(serverID)
	return n ^ s.gaps.Load()<<40
}

// announce tells the other replicas and this one.
func (s *Service) announce(ctx context.Context, t tenant.ID, serverID string) {
	s.drop(serverID)
	if s.o.Signal != nil {
		// A lost signal costs at most confirmFor; PostgreSQL has it all.
		_ = s.o.Signal.Publish(ctx, Changed, t.String(), serverID)
	}
}

// slotKey names what one authorization context sees of one kind.
type slotKey struct {
	tenant  tenant.ID
	server  string
	context string
	kind    Kind
}

// contentKey names a revision, or a server, of one tenant.
type contentKey struct {
	tenant tenant.ID
	id     string
}

type checkerKey struct {
	tenant       tenant.ID
	digest, part string
}

// group lets one caller at a time do the work for a key, while the others wait
// for its result.
type group[K comparable, V any] struct {
	mu    sync.Mutex // guards calls
	calls map[K]*groupCall[V]
}

type groupCall[V any] struct {
	done  chan struct{}
	value V
	err   error
}

var errPanicked = errors.New("catalog: the shared work panicked")

func (g *group[K, V]) do(ctx context.Context, k K, fn func() (V, error)) (V, error) {
	g.mu.Lock()
	if c, ok := g.calls[k]; ok {
		g.mu.Unlock()
		select {
		case <-c.done:
			if c.err == nil || ctx.Err() != nil {
				return c.value, c.err
			}
			// The other caller may have gone away; this one still wants it.
			return fn()
		case <-ctx.Done():
			var zero V
			return zero, ctx.Err()
		}
	}
	c := &groupCall[V]{done: make(chan struct{}), err: errPanicked}
	if g.calls == nil {
		g.calls = map[K]*groupCall[V]{}
	}
	g.calls[k] = c
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		delete(g.calls, k)
		g.mu.Unlock()
		close(c.done)
	}()
	c.value, c.err = fn()
	return c.value, c.err
}
