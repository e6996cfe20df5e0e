package calls

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Sessions finds the working space of a call.
type Sessions interface {
	Get(ctx context.Context, p tenant.Principal, id string) (*sessions.Session, error)
}

// Catalog finds a registration and what it offers.
type Catalog interface {
	GetServer(ctx context.Context, p tenant.Principal, idOrName string) (catalog.Server, error)
	Current(ctx context.Context, srv catalog.Server, c catalog.Context, kind catalog.Kind, maxAge time.Duration) (*catalog.Revision, error)
	Invalidate(ctx context.Context, c catalog.Change) error
}

// Contracts finds the policy that governs a call.
type Contracts interface {
	Active(ctx context.Context, t tenant.ID, serverID string) (*authz.Active, error)
	At(ctx context.Context, t tenant.ID, serverID string, revision int) (*authz.Active, error)
	Forget(t tenant.ID, serverID string)
}

// Sender sends one request to a server. Its response tells how far the request
// came, also when it fails.
type Sender interface {
	Do(ctx context.Context, k sessions.Key, t sessions.Target, r sessions.Request) (sessions.Response, error)
}

// Audit keeps entries in the transaction of what they record.
type Audit interface {
	Prepare(ctx context.Context, t tenant.ID, e audit.Entry) (audit.Prepared, error)
	Append(ctx context.Context, tx tenant.Tx, e audit.Entry) (string, error)
}

// Signals tells other replicas that a call changed. Signals may be lost; waiting
// falls back to reading.
type Signals interface {
	PublishCall(t tenant.ID, callID string)
}

// Events tells those who follow a session; *events.Service is one. What happened is
// recorded by the database in the transaction of the change, so that nothing here
// can forget it: this only makes readers look at once.
type Events interface {
	Recorded(t tenant.ID)
	Progress(t tenant.ID, sessionID, callID string)
}

// Deps are the parts that calls are made of. All but Signals, Events and Follower
// are needed.
type Deps struct {
	DB        *tenant.DB
	Sessions  Sessions
	Catalog   Catalog
	Contracts Contracts
	Consent   *consent.Service
	Sender    Sender
	Audit     Audit
	Vault     Vault
	Signals   Signals
	Events    Events
	// Follower subscribes to resources; nil offers no subscriptions.
	Follower Follower
	Log      *slog.Logger
	// Announcer may be nil: then nobody is told of ends.
	Announcer Announcer
	// Observe is told of every call that ends; for metrics. It may be nil.
	Observe func(c *Call)
}

// Config bounds the service. Zero values mean the defaults.
type Config struct {
	// Name of this replica in the table of replicas.
	Name string
	// Sole says that no other replica can be alive: every earlier one is dead.
	Sole bool
	// Heartbeat, Death and Isolation: how often a replica says that it lives
	// (2 s), after how long silence means death (15 s), and after how long without
	// a written heartbeat it dispatches nothing (8 s).
	Heartbeat, Death, Isolation time.Duration
	// SendWindow is the time from the dispatch's commit to the first byte (2 s).
	SendWindow time.Duration
	// ConsentTTL is how long a question to an approver stands (1 h), InputTTL one
	// that a server asks its user (1 h).
	ConsentTTL, InputTTL time.Duration
	// MaxLive bounds the calls in execution in this replica (4,096).
	MaxLive int
	// Poll is how often a waiter reads when no signal comes (2 s).
	Poll time.Duration
}

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&c.Heartbeat, 2*time.Second)
	set(&c.Death, 15*time.Second)
	set(&c.Isolation, 8*time.Second)
	set(&c.SendWindow, 2*time.Second)
	set(&c.ConsentTTL, time.Hour)
	set(&c.InputTTL, time.Hour)
	set(&c.Poll, 2*time.Second)
	if c.MaxLive == 0 {
		c.MaxLive = 4096
	}
	if c.Name == "" {
		c.Name = "replica"
	}
	return c
}

type callKey struct {
	tenant tenant.ID
	id     string
}

type requestKey struct {
	tenant  tenant.ID
	subject tenant.Subject
	request string
}

// Service is the machine of calls. Run must be running for recovery to happen.
type Service struct {
	deps Deps
	cfg  Config
	log  *slog.Logger
	now  func() time.Time
	// pace shortens the pause before another attempt; tests need not wait.
	pace func(time.Duration) time.Duration

	replica   *replica
	hub       *hub
	committer *committer

	// work ends executions at the end of the grace period; drain tells waiters to
	// answer now.
	work      context.Context
	stopWork  context.CancelFunc
	drain     chan struct{}
	drainOnce sync.Once
	running   sync.WaitGroup

	// Slots for what a sweep, a decision or a signal begins.
	dispatching, recovering, resolving, obeying, polling, following chan struct{}

	updated chan sessions.Updated // at most maxUnheard

	mu       sync.Mutex
	live     map[callKey]*execution    // about cfg.MaxLive at most
	pending  map[requestKey]*execution // plain reads under way
	tended   map[callKey]bool          // at most as many as there are slots
	draining bool
}

// The slots: so many calls at a time are dispatched after a consent, taken over,
// asked about, looked up for a cancel. A server that hangs costs a few of them
// and not the sweep.
const (
	maxDispatching = 128
	maxRecovering  = 32
	maxResolving   = 32
	maxObeying     = 16
)

// NewService registers this replica and returns the machine.
func NewService(ctx context.Context, d Deps, c Config) (*Service, error) {
	if d.DB == nil || d.Sessions == nil || d.Catalog == nil || d.Contracts == nil || d.Consent == nil || d.Sender == nil ||
		d.Audit == nil || d.Vault == nil || d.Log == nil {
		return nil, errors.New("calls: a part is missing")
	}
	s := &Service{deps: d, cfg: c.withDefaults(), log: d.Log, now: time.Now, hub: newHub(), drain: make(chan struct{}),
		live: map[callKey]*execution{}, pending: map[requestKey]*execution{}, tended: map[callKey]bool{},
		dispatching: make(chan struct{}, maxDispatching), recovering: make(chan struct{}, maxRecovering),
		resolving: make(chan struct{}, maxResolving), obeying: make(chan struct{}, maxObeying),
		polling: make(chan struct{}, maxPolling), following: make(chan struct{}, maxFollowing),
		updated: make(chan sessions.Updated, maxUnheard)}
	if s.cfg.Isolation >= s.cfg.Death {
		return nil, errors.New("calls: a replica must stop dispatching before it may be taken for dead")
	}
	s.work, s.stopWork = context.WithCancel(context.Background())
	s.committer = newCommitter(s)
	s.replica = &replica{db: d.DB, cfg: s.cfg}
	if err := s.replica.register(ctx); err != nil {
		s.stopWork()
		return nil, err
	}
	d.Consent.Attach(s)
	return s, nil
}

// ConsentsEnded implements consent.Calls: the waiting calls are denied in the
// transaction that ended their consents.
func (s *Service) ConsentsEnded(ctx context.Context, tx tenant.Tx, ended []consent.Ended) error {
	for _, e := range ended {
		if _, err := s.deny(ctx, tx, e.CallID, Reason(e.Reason), e.Actor, e.Detail, nil); err != nil {
			return err
		}
	}
	return nil
}

// ConsentApproved implements consent.Calls: this replica dispatches the call. If
// it dies first, the sweep of any replica does.
func (s *Service) ConsentApproved(t tenant.ID, callID string) {
	s.recorded(t)
	s.tend(callKey{t, callID}, s.dispatching, "dispatch after consent", s.dispatchWaiting)
}

// tend runs fn for a call on a goroutine that Stop waits for, unless this replica
// tends to the call already, to as many as it has slots for, or is stopping: the
// next sweep, here or elsewhere, finds the call again.
func (s *Service) tend(k callKey, slots chan struct{}, what string, fn func(ctx context.Context, t tenant.ID, id string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining || s.tended[k] {
		return
	}
	select {
	case slots <- struct{}{}:
	default:
		return
	}
	s.tended[k] = true
	s.running.Add(1)
	go func() {
		defer s.running.Done()
		if err := fn(s.work, k.tenant, k.id); err != nil && !errors.Is(err, errLost) && s.work.Err() == nil {
			s.log.WarnContext(s.work, what, "tenant", k.tenant, "call", k.id, "error", detail(err))
		}
		s.mu.Lock()
		delete(s.tended, k)
		s.mu.Unlock()
		<-slots
	}()
}

// changed wakes those who wait for a call, here and elsewhere.
func (s *Service) changed(t tenant.ID, callID string) {
	s.hub.wake(callKey{t, callID})
	if s.deps.Signals != nil {
		s.deps.Signals.PublishCall(t, callID)
	}
	s.recorded(t)
}

// recorded makes those who follow a session look.
func (s *Service) recorded(t tenant.ID) {
	if s.deps.Events != nil {
		s.deps.Events.Recorded(t)
	}
}

// Signalled is told of another replica's signal about a call: a waiter reads
// again, and a call in execution here looks whether it was cancelled.
func (s *Service) Signalled(t tenant.ID, callID string) {
	k := callKey{t, callID}
	s.hub.wake(k)
	s.mu.Lock()
	e := s.live[k]
	s.mu.Unlock()
	if e != nil {
		s.tend(k, s.obeying, "obey a cancel", func(ctx context.Context, _ tenant.ID, _ string) error { return s.obeyCancel(ctx, e) })
	}
}

// Get returns a call. With wait it returns once the call's revision is above
// afterRevision, or when the time is up; with an afterRevision of 0 it returns at
// the first state other than DISPATCHING.
func (s *Service) Get(ctx context.Context, p tenant.Principal, id string, wait time.Duration, afterRevision int) (*Call, error) {
	done := func(c *Call) bool { return wait <= 0 || c.Revision > afterRevision }
	if afterRevision <= 0 {
		// Every call has a revision above 0: who names none waits for an end, as a
		// proposal does.
		done = func(c *Call) bool { return wait <= 0 || c.Settled() }
	}
	return s.await(ctx, p, callKey{p.Tenant, id}, wait, done)
}

// read returns the call from memory when this replica executes it, else from
// Postgres.
func (s *Service) read(ctx context.Context, p tenant.Principal, k callKey) (*Call, error) {
	s.mu.Lock()
	e := s.live[k]
	s.mu.Unlock()
	if e != nil {
		if c := e.snapshot(); !c.Recorded {
			if !owns(p, c) {
				return nil, errCallNotFound
			}
			return c, nil
		}
	}
	if !resource.IsID(resource.Call, k.id) {
		return nil, errCallNotFound
	}
	c, err := s.load(ctx, k.tenant, k.id)
	if err == nil && !owns(p, c) {
		err = errCallNotFound
	}
	if err != nil {
		return nil, err
	}
	return s.withQuestions(ctx, c)
}

// Filter narrows List. Before is the id of the last one seen.
type Filter struct {
	SessionID string
	State     State
	Kind      contract.Kind // empty for every kind
	Before    string
	Limit     int
}

// List returns the session's calls that the caller may see, newest first.
func (s *Service) List(ctx context.Context, p tenant.Principal, f Filter) (out []*Call, err error) {
	if _, err := s.deps.Sessions.Get(ctx, p, f.SessionID); err != nil {
		return nil, err
	}
	err = s.deps.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		rows, err := tx.Query(ctx, selectSQL+`WHERE tenant_id = $1 AND session_id = $2 AND subject_source = $3 AND subject = $4
			AND ($5 = '' OR state = $5) AND ($6 = '' OR call_id < $6)
			AND (COALESCE(cardinality($8::text[]), 0) = 0 OR server_name = ANY ($8))
			AND ($9 = '' OR kind = $9) ORDER BY call_id DESC LIMIT $7`,
			tx.Tenant(), f.SessionID, p.Subject.Source, p.Subject.Value, string(f.State), f.Before, f.Limit, p.Servers, string(f.Kind))
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, scan)
		return err
	})
	return out, err
}

func detail(err error) string {
	if f, ok := fault.As(err); ok {
		return f.Detail()
	}
	return err.Error()
}

func rawMeta(key string) map[string]json.RawMessage {
	if key == "" {
		return nil
	}
	raw, _ := json.Marshal(key) // a string always encodes
	return map[string]json.RawMessage{idempotencyMeta: raw}
}

// idempotencyMeta carries a call's key where the contract says meta: true. It is
// never an HTTP header: net/http would resend a POST that has one.
const idempotencyMeta = "idempotencyKey"
