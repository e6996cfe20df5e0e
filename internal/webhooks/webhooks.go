// Package webhooks tells a tenant's own systems what happened. It owns their
// endpoints with their secrets, the events, and the deliveries of each event to
// each endpoint that wants it. An event is stored in the transaction of what it
// tells and queued there, so that it is sent if and only if that is committed;
// it is sent at least once, in no promised order, signed as Standard Webhooks
// wants it. A job of the queue holds ids alone: what is sent is a row of its
// tenant.
package webhooks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Egress reaches endpoints, under the policy of what may be reached.
// *egress.Client is one.
type Egress interface {
	CheckURL(path, raw string) (*url.URL, error)
	Pin(u *url.URL) *http.Client
}

// Retry says when a delivery that failed is tried again: after First, and after
// each further failure three times as long, up to Most; not beyond GiveUp after
// the event. Each pause is up to a fifth longer or shorter, by chance.
type Retry struct {
	First, Most, GiveUp time.Duration
}

func (r Retry) withDefaults() Retry {
	orDefault(&r.First, 5*time.Second)
	orDefault(&r.Most, 4*time.Hour)
	orDefault(&r.GiveUp, 24*time.Hour)
	return r
}

func orDefault[T int | time.Duration](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// pause returns how long to wait after the failure of an attempt, the first of
// which has the number 1. The receiver may ask for more, but not beyond GiveUp.
func (r Retry) pause(attempt int, asked time.Duration) time.Duration {
	d := r.First
	for i := 1; i < attempt && d < r.Most; i++ {
		d *= 3
	}
	d = min(d, r.Most)
	d += time.Duration((rand.Float64()*2 - 1) * float64(d) / 5)
	return max(d, min(asked, r.GiveUp))
}

// Options are what a Service works with. DB, Vault, Recorder, Egress and Queue are
// needed; a zero field of the others takes the default.
type Options struct {
	DB       *tenant.DB
	Vault    *tenant.Vault
	Recorder tenant.Recorder
	Egress   Egress
	// Queue is the job queue's way to the database, as the system role.
	Queue *riverpgxv5.Driver
	Log   *slog.Logger
	// Observe is told of every attempt: its outcome is "delivered", "failed" for one
	// that is tried again, and "given_up". It may be nil.
	Observe func(t tenant.ID, outcome string)
	Retry   Retry
	// Poll is how often a replica looks for deliveries that are due (1 s).
	Poll time.Duration
	// Rescue is how long a delivery that a replica took may be under way before
	// another one takes it to be dead (90 s).
	Rescue time.Duration
	// Workers, TenantWorkers and EndpointWorkers bound the deliveries that are under
	// way in a replica, in all (256), of a tenant (32) and to an endpoint (8).
	Workers, TenantWorkers, EndpointWorkers int
}

func (o *Options) setDefaults() {
	o.Retry = o.Retry.withDefaults()
	orDefault(&o.Poll, time.Second)
	orDefault(&o.Rescue, 90*time.Second)
	orDefault(&o.Workers, 256)
	orDefault(&o.TenantWorkers, 32)
	orDefault(&o.EndpointWorkers, 8)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Observe == nil {
		o.Observe = func(tenant.ID, string) {}
	}
}

// Service keeps endpoints, takes events and delivers them. It is safe for
// concurrent use.
type Service struct {
	o     Options
	now   func() time.Time
	queue *river.Client[pgx.Tx]
	lanes *lanes
	// storing bounds the connections that deliveries take from requests.
	storing chan struct{}

	mu    sync.Mutex
	wants map[tenant.ID]wanted // at most maxTenants
}

// maxStoring is how many deliveries read or write their rows at a time.
const maxStoring = 8

// jobTime ends a job that hangs; a request ends long before.
const jobTime = 40 * time.Second

// New returns the service. Start must be called for anything to be delivered.
func New(o Options) (*Service, error) {
	if o.DB == nil || o.Vault == nil || o.Recorder == nil || o.Egress == nil || o.Queue == nil {
		return nil, errors.New("webhooks: a part is missing")
	}
	o.setDefaults()
	s := &Service{o: o, now: time.Now, storing: make(chan struct{}, maxStoring), wants: map[tenant.ID]wanted{},
		lanes: newLanes(o.TenantWorkers, o.EndpointWorkers)}
	workers := river.NewWorkers()
	if err := river.AddWorkerSafely(workers, &deliverer{s: s}); err != nil {
		return nil, fmt.Errorf("webhooks: %w", err)
	}
	var err error
	s.queue, err = river.NewClient(o.Queue, &river.Config{
		Schema: postgres.QueueSchema, Workers: workers,
		Queues:               map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: o.Workers}},
		FetchCooldown:        min(o.Poll, 100*time.Millisecond),
		FetchPollInterval:    o.Poll,
		JobTimeout:           min(jobTime, o.Rescue/2),
		RescueStuckJobsAfter: o.Rescue,
		// A job ends when its delivery does; nothing of it needs to be kept.
		CompletedJobRetentionPeriod: time.Hour,
		// Rebuilding indexes is for the owner of the tables.
		ReindexerSchedule: river.NeverSchedule(),
		Logger:            slog.New(quiet{o.Log.Handler()}),
	})
	if err != nil {
		return nil, fmt.Errorf("webhooks: %w", err)
	}
	return s, nil
}

// quiet passes on what the queue's library says of trouble alone.
type quiet struct{ slog.Handler }

// Enabled implements slog.Handler.
func (q quiet) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelWarn && q.Handler.Enabled(ctx, l)
}

// WithAttrs implements slog.Handler.
func (q quiet) WithAttrs(as []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(as)} }

// WithGroup implements slog.Handler.
func (q quiet) WithGroup(name string) slog.Handler { return quiet{q.Handler.WithGroup(name)} }

// Start begins to deliver. It goes on until Stop, whatever becomes of ctx.
func (s *Service) Start(ctx context.Context) error {
	if err := s.queue.Start(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("webhooks: start the queue: %w", err)
	}
	return nil
}

// hardStop is how long deliveries have to end after they were cancelled.
const hardStop = 5 * time.Second

// Stop takes no further delivery, waits for those under way until ctx ends, and
// then cancels them: they are tried again, by whichever replica comes first.
func (s *Service) Stop(ctx context.Context) error {
	err := s.queue.Stop(ctx)
	if err == nil || ctx.Err() == nil {
		return err
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), hardStop)
	defer cancel()
	return s.queue.StopAndCancel(last)
}
