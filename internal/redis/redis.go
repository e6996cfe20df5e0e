// Package redis offers what may be lost at any moment: a cache and signals
// between replicas. Nothing here is truth. When Redis is away every call
// returns at once, as a miss or ErrDown, and one probe in the background waits
// for it to come back; callers never do.
//
// It is the only user of go-redis and of miniredis. Tenants are plain strings
// here, since the package lies below package tenant; every key and every signal
// has one.
package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// ErrDown means that Redis was not asked, or did not answer in time.
var ErrDown = errors.New("redis is down")

const (
	// dialTimeout bounds a connection made in the background, where no caller
	// waits.
	dialTimeout = time.Second
	// probeFirst and probeMost bound the pause between two probes of a lost
	// Redis; it doubles from one to the other.
	probeFirst = 100 * time.Millisecond
	probeMost  = 2 * time.Second
)

// Options tune a client. A zero field takes the default.
type Options struct {
	// Timeout bounds every operation, connecting included; default 50 ms.
	Timeout time.Duration
	// PoolSize is the largest number of connections; default 16.
	PoolSize int
	// Namespace begins every key and channel; default "bulkhead". Two
	// installations on one Redis need two: channels know no database number.
	Namespace string
	// Log receives one line when Redis is lost and one when it is back; nil
	// discards them.
	Log *slog.Logger
}

// Client is a connection pool with a circuit: after one failure nothing is sent
// until a probe has succeeded. It is safe for concurrent use.
type Client struct {
	rdb       *goredis.Client
	timeout   time.Duration
	namespace string
	log       *slog.Logger

	up   atomic.Bool
	stop context.CancelFunc
	life context.Context // ends with Close

	mu      sync.Mutex // guards closed, and up's change to false
	closed  bool
	running sync.WaitGroup
}

var quiet sync.Once

// Open returns a client of the Redis at url (redis://, rediss:// or unix://). It
// does not wait for Redis: a client that cannot reach it begins lost, and
// recovers by itself. The error is Invalid and never repeats the address, which
// may hold a password. ctx bounds the one attempt to connect.
func Open(ctx context.Context, url string, o Options) (*Client, error) {
	// go-redis writes to a logger of the whole process otherwise.
	quiet.Do(func() { goredis.SetLogger(&logging.VoidLogger{}) })
	opt, err := goredis.ParseURL(url)
	if err != nil {
		return nil, fault.Field1("redisUrl", "is not a Redis address")
	}
	if o.Timeout <= 0 {
		o.Timeout = 50 * time.Millisecond
	}
	if o.PoolSize <= 0 {
		o.PoolSize = 16
	}
	if o.Namespace == "" {
		o.Namespace = "bulkhead"
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	tune(opt, o)
	c := &Client{rdb: goredis.NewClient(opt), timeout: o.Timeout, namespace: o.Namespace, log: o.Log}
	c.life, c.stop = context.WithCancel(context.Background())
	c.up.Store(true)
	if err := c.ping(ctx); err != nil {
		c.lose(err)
	}
	return c, nil
}

// tune makes the library do no more than asked: no retries, no waiting beyond
// the context, no chatter at connecting.
func tune(opt *goredis.Options, o Options) {
	opt.MaxRetries = -1
	opt.DialerRetries = 1
	opt.DialTimeout = dialTimeout
	opt.ReadTimeout = dialTimeout
	opt.WriteTimeout = dialTimeout
	opt.PoolTimeout = o.Timeout
	opt.ContextTimeoutEnabled = true
	opt.PoolSize = o.PoolSize
	opt.MinIdleConns = min(2, o.PoolSize)
	opt.DisableIdentity = true
	opt.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	// The library's own dialer does not heed the context during a TLS handshake.
	tlsConfig := opt.TLSConfig
	opt.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		d := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
		if tlsConfig == nil {
			return d.DialContext(ctx, network, addr)
		}
		return (&tls.Dialer{NetDialer: d, Config: tlsConfig}).DialContext(ctx, network, addr)
	}
}

// Up reports whether Redis answered last.
func (c *Client) Up() bool { return c.up.Load() }

// Close ends the probe and the connections and waits for them. Subscriptions
// are closed by their owners, before.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.up.Store(false)
	c.mu.Unlock()
	c.stop()
	c.running.Wait()
	return c.rdb.Close()
}

// do runs one operation within the timeout, or returns ErrDown at once. What
// Redis answered, an error reply too, is returned as it is.
func (c *Client) do(ctx context.Context, op func(context.Context) error) error {
	if !c.up.Load() {
		return ErrDown
	}
	limited, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	err := op(limited)
	var reply goredis.Error
	switch {
	case err == nil, errors.Is(err, goredis.Nil), errors.As(err, &reply):
		return err
	case ctx.Err() != nil: // the caller went away: that says nothing about Redis
		return ctx.Err()
	}
	c.lose(err)
	return ErrDown
}

func (c *Client) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return c.rdb.Ping(ctx).Err()
}

// lose opens the circuit and starts the probe, unless that has been done.
func (c *Client) lose(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || !c.up.CompareAndSwap(true, false) {
		return
	}
	c.log.Warn("redis is lost; going on without it", "cause", cause)
	c.running.Go(c.probe)
}

// probe waits for Redis and closes the circuit. There is one at a time, since
// it alone sets up to true.
func (c *Client) probe() {
	since := time.Now()
	for pause := probeFirst; ; pause = min(2*pause, probeMost) {
		if c.ping(c.life) == nil {
			c.mu.Lock()
			if !c.closed {
				c.up.Store(true)
				c.log.Info("redis is back", "after", time.Since(since))
			}
			c.mu.Unlock()
			return
		}
		select {
		case <-c.life.Done():
			return
		case <-time.After(pause):
		}
	}
}
