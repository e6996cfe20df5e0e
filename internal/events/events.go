// Package events lets frontends follow what happens in a session. The events
// themselves are written by the database, by triggers in the transaction of what
// they tell (migration 0011), and numbered without a hole for each session in the
// order of the commits; this package reads them, for as many readers as there are,
// and removes them when they are old. Signals only make a reader look sooner: what
// is not signalled is found within the poll interval. A reader never holds anybody
// up: one that does not keep pace is dropped and resumes from the last id it has.
package events

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Kind says what happened, as noun.happened.
type Kind string

// The kinds that are stored, those that are told live only, and those about the
// stream itself.
const (
	CallChanged          Kind = "call.changed"
	ConsentRequested     Kind = "consent.requested"
	ConsentDecided       Kind = "consent.decided"
	InteractionRequested Kind = "interaction.requested"
	InteractionEnded     Kind = "interaction.ended"
	ResourceUpdated      Kind = "resource.updated"

	CallProgress   Kind = "call.progress"
	CatalogChanged Kind = "catalog.changed"

	// Ready is the first of a stream; its N is where the stream begins.
	Ready Kind = "ready"
	// Resync says that events up to N were removed before they were read: the
	// reader has to look at everything anew.
	Resync    Kind = "resync"
	Heartbeat Kind = "heartbeat"
	// Bye is the last of a stream that ends in order.
	Bye Kind = "bye"
)

// Event is one thing that happened: names and states, no contents.
type Event struct {
	// N is the event's number in its session; 0 for what is told live only.
	N             int64
	Kind          Kind
	SessionID     string
	CallID        string
	ConsentID     string
	InteractionID string
	State         string
	Revision      int
	Server        string
	URI           string
	Time          time.Time
	// Reason says why a stream ends or begins anew.
	Reason string
}

const (
	// maxBuffered bounds the events that wait for a reader.
	maxBuffered = 256
	// maxSessionReaders and maxTenantReaders bound the streams in one replica.
	maxSessionReaders = 16
	maxTenantReaders  = 500
	// maxKept and keptFor bound what is stored of a session.
	maxKept = 10_000
	keptFor = 24 * time.Hour

	pageSize = 200
	// heartbeat is how often an idle stream shows that it lives.
	heartbeat = 15 * time.Second
	// poll is how often the database is read without a signal.
	poll = 2 * time.Second
	// recheck is how often a stream's authority is looked at; what it stands on is
	// cached for 5 s at most.
	recheck = time.Second
	// gather is the least time between two looks for one tenant.
	gather = 10 * time.Millisecond
	// publishPause is the least time between two signals about one tenant.
	publishPause = 20 * time.Millisecond
	retainPause  = 5 * time.Minute
)

// ErrSessionEnded is what a Request's Check returns when the session has ended.
var ErrSessionEnded = errors.New("events: the session has ended")

// Publisher tells the other replicas; *cmd/server.signals is one. Signals may be
// lost.
type Publisher interface {
	PublishRecorded(t tenant.ID)
	PublishProgress(t tenant.ID, sessionID, callID string)
}

// Config bounds and paces the service. Zero values mean the defaults.
type Config struct {
	Heartbeat, Poll, Recheck time.Duration
	Buffered                 int
	SessionReaders           int
	TenantReaders            int
	Kept                     int64
	KeptFor                  time.Duration
}

func (c Config) withDefaults() Config {
	setTime := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	setTime(&c.Heartbeat, heartbeat)
	setTime(&c.Poll, poll)
	setTime(&c.Recheck, recheck)
	setTime(&c.KeptFor, keptFor)
	set(&c.Buffered, maxBuffered)
	set(&c.SessionReaders, maxSessionReaders)
	set(&c.TenantReaders, maxTenantReaders)
	if c.Kept == 0 {
		c.Kept = maxKept
	}
	return c
}

// Service follows the events of every session that somebody reads here.
type Service struct {
	db  *tenant.DB
	pub Publisher
	cfg Config
	log *slog.Logger
	now func() time.Time

	// life ends with Drain: streams say bye.
	life context.Context
	end  context.CancelFunc

	mu      sync.Mutex
	watches map[tenant.ID]*watch // those with a reader
	dirty   map[tenant.ID]bool   // those to signal
	stir    chan struct{}
	running sync.WaitGroup
}

// New returns the service. pub may be nil, for a replica that is alone.
func New(db *tenant.DB, pub Publisher, log *slog.Logger, cfg Config) (*Service, error) {
	if db == nil || log == nil {
		return nil, errors.New("events: database and log are needed")
	}
	s := &Service{db: db, pub: pub, cfg: cfg.withDefaults(), log: log, now: time.Now, watches: map[tenant.ID]*watch{},
		dirty: map[tenant.ID]bool{}, stir: make(chan struct{}, 1)}
	s.life, s.end = context.WithCancel(context.Background())
	return s, nil
}

// Recorded says that something was recorded for a tenant: readers here look at
// once, and those of other replicas when Run has told them. It never waits.
func (s *Service) Recorded(t tenant.ID) {
	s.Signalled(t)
	if s.pub == nil {
		return
	}
	s.mu.Lock()
	s.dirty[t] = true
	s.mu.Unlock()
	select {
	case s.stir <- struct{}{}:
	default:
	}
}

// Signalled makes the readers of a tenant look.
func (s *Service) Signalled(t tenant.ID) {
	s.mu.Lock()
	w := s.watches[t]
	s.mu.Unlock()
	if w != nil {
		w.stir()
	}
}

// SignalledAll makes everybody look, after signals may have been lost.
func (s *Service) SignalledAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.watches {
		w.stir()
	}
}

// Progress tells that a server said how far a call is, live only. Every replica
// hears it by its own signal; without one, only the readers here do.
func (s *Service) Progress(t tenant.ID, sessionID, callID string) {
	if s.pub != nil {
		s.pub.PublishProgress(t, sessionID, callID)
		return
	}
	s.Progressed(t, sessionID, callID)
}

// Progressed delivers what Progress told, here or elsewhere.
func (s *Service) Progressed(t tenant.ID, sessionID, callID string) {
	s.live(t, func(r *Request) bool { return r.SessionID == sessionID }, Event{Kind: CallProgress, CallID: callID})
}

// CatalogChanged tells every session with a server that what it offers may have
// changed.
func (s *Service) CatalogChanged(t tenant.ID, serverID string) {
	s.live(t, func(r *Request) bool { _, ok := r.Servers[serverID]; return ok }, Event{Kind: CatalogChanged, URI: "", Server: serverID})
}

func (s *Service) live(t tenant.ID, match func(*Request) bool, e Event) {
	s.mu.Lock()
	w := s.watches[t]
	s.mu.Unlock()
	if w != nil {
		e.Time = s.now()
		w.tell(match, e)
	}
}

// Run signals other replicas and removes old events until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	retain := time.NewTicker(retainPause)
	defer retain.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-retain.C:
			if err := s.Retain(ctx); err != nil && ctx.Err() == nil {
				s.log.WarnContext(ctx, "remove old events", "error", err)
			}
			continue
		case <-s.stir:
		}
		s.mu.Lock()
		due := s.dirty
		s.dirty = map[tenant.ID]bool{}
		s.mu.Unlock()
		for t := range due {
			s.pub.PublishRecorded(t)
		}
		pause(ctx, publishPause)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// Drain ends every stream in order; no new one begins.
func (s *Service) Drain() { s.end() }

// Close drains and waits for what runs here.
func (s *Service) Close(context.Context) error {
	s.end()
	s.running.Wait()
	return nil
}

var (
	errStopping = fault.New(fault.Unavailable, "SHUTTING_DOWN", "the server is stopping").Retry(time.Second)
	errTooSlow  = fault.New(fault.Exhausted, "READER_TOO_SLOW", "more than the bound waited for this reader; resume after the last id")
)
