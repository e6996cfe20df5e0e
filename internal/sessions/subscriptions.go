package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const (
	// maxSubscriptions bounds the subscriptions of one key.
	maxSubscriptions = 64
	// maxSubscriptionURI bounds the URI of a resource that is subscribed or reported.
	maxSubscriptionURI = 2048
	// maxUpdates bounds the URIs of one report; when there are more, each subscribed
	// one is reported instead.
	maxUpdates = 256
)

// Updated is told to the function given to Pool.OnUpdated.
type Updated struct {
	Key Key
	// URI is that of a subscribed resource that may have changed, or, of a legacy
	// server, of a resource beneath one.
	URI string
	// Refused says that the server no longer grants the subscription, which is over.
	Refused bool
}

// OnUpdated sets the function that is told when a subscribed resource may have
// changed: the server said so, or nobody was listening for a while. It is told at
// most about once a second for a key, on a goroutine of the pool, and must return
// soon. Set it before the pool is used.
func (p *Pool) OnUpdated(fn func(Updated)) { p.onUpdated.Store(&fn) }

// subscriber keeps the subscriptions of one key over all its connections.
type subscriber struct {
	pool *Pool
	key  Key
	wake chan struct{} // the wants have changed

	mu     sync.Mutex
	target Target
	wants  map[string]*want
	edits  int             // how often wants has changed
	untold map[string]bool // updates that wait for the next report
	timer  *time.Timer
	told   time.Time
}

// want is one wanted subscription.
type want struct {
	granted bool // it was at least once
	live    bool // somebody listens for it now
	err     error
	settled chan struct{} // closed when the server first granted or refused it
}

// Subscribe asks the server to tell when a resource changes, and returns when it
// has agreed. The subscription holds over all connections of the key until
// Unsubscribe; subscribing again changes nothing.
func (p *Pool) Subscribe(ctx context.Context, k Key, t Target, uri string) error {
	if uri == "" || len(uri) > maxSubscriptionURI {
		return fault.New(fault.Invalid, "URI_INVALID", "the URI of a subscription has 1 to %d bytes", maxSubscriptionURI)
	}
	if k.shared() {
		t = t.silenced()
	}
	w, err := p.want(k, t, uri)
	if err != nil {
		return err
	}
	select {
	case <-w.settled:
		return w.err
	case <-ctx.Done():
		return ended(ctx)
	}
}

// Unsubscribe ends a subscription. Where there is none it does nothing.
func (p *Pool) Unsubscribe(k Key, uri string) {
	p.mu.Lock()
	s := p.subs[k]
	p.mu.Unlock()
	if s != nil {
		s.settle(uri, failure(fault.Canceled, fault.Host, "UNSUBSCRIBED", "the subscription was ended"))
	}
}

// want adds a subscription to those of the key.
func (p *Pool) want(k Key, t Target, uri string) (*want, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.subs[k]
	if s == nil {
		mine := 0
		for other := range p.subs {
			if other.Tenant == k.Tenant {
				mine++
			}
		}
		if mine >= p.limits.Tenant || len(p.subs) >= p.limits.Total {
			return nil, failure(fault.Exhausted, fault.Host, "SUBSCRIPTIONS_EXHAUSTED", "too many users have subscriptions")
		}
		if !p.tasks.begin() {
			return nil, failure(fault.Unavailable, fault.Host, "STOPPING", "the server is stopping")
		}
		s = &subscriber{pool: p, key: k, target: t, wake: make(chan struct{}, 1), wants: map[string]*want{}, untold: map[string]bool{}}
		p.subs[k] = s
		s.mu.Lock() // until it has its first want
		defer s.mu.Unlock()
		go func() {
			defer p.tasks.wg.Done()
			s.keep(p.ctx)
		}()
	} else {
		s.mu.Lock()
		defer s.mu.Unlock()
	}
	s.target = t
	w := s.wants[uri]
	if w == nil {
		if len(s.wants) >= maxSubscriptions {
			return nil, failure(fault.Exhausted, fault.Host, "SUBSCRIPTIONS_EXHAUSTED", "there are too many subscriptions at the server")
		}
		w = &want{settled: make(chan struct{})}
		s.wants[uri] = w
		s.edits++
		s.poke()
	}
	return w, nil
}

func (s *subscriber) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// settle notes what the server said to a subscription. One that is refused is over.
func (s *subscriber) settle(uri string, err error) {
	s.mu.Lock()
	w := s.wants[uri]
	if w == nil {
		s.mu.Unlock()
		return
	}
	was, gap := w.granted, w.granted && !w.live
	w.granted, w.live = err == nil, err == nil
	if err != nil {
		delete(s.wants, uri)
		s.edits++
		s.poke()
	}
	select {
	case <-w.settled:
	default:
		w.err = err
		close(w.settled)
	}
	s.mu.Unlock()
	switch {
	case err == nil && gap:
		s.updated(uri) // it may have changed while nobody listened
	case err != nil && was && !fault.Is(err, fault.Canceled):
		s.pool.tellUpdated(Updated{Key: s.key, URI: uri, Refused: true})
	}
}

// all returns those of the wanted URIs that which holds for, in order.
func (s *subscriber) all(which func(*want) bool) (uris []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uri, w := range s.wants {
		if which(w) {
			uris = append(uris, uri)
		}
	}
	slices.Sort(uris)
	return uris
}

func anyWant(*want) bool     { return true }
func granted(w *want) bool   { return w.granted }
func ungranted(w *want) bool { return !w.granted }
func silent(w *want) bool    { return !w.live }

// keep holds the subscriptions until none is wanted any more or ctx ends.
func (s *subscriber) keep(ctx context.Context) {
	defer s.quiet()
	pause := s.pool.limits.Reopen
	for {
		s.mu.Lock()
		t := s.target
		s.mu.Unlock()
		began := time.Now()
		c, err := s.pool.acquire(ctx, s.key, &t, true)
		if err == nil {
			s.serve(ctx, c, &t)
			if s.lost(s.all(anyWant)); time.Since(began) > time.Minute {
				pause = s.pool.limits.Reopen
			}
		} else if ctx.Err() == nil {
			var ce *connectError
			if errors.As(err, &ce) {
				err = ce.err
			}
			for _, uri := range s.all(ungranted) { // who waits for it learns why
				s.settle(uri, err)
			}
		}
		if s.leave(ctx) {
			return
		}
		timer := time.NewTimer(jitter(pause))
		select {
		case <-timer.C:
			pause = min(2*pause, s.pool.limits.MaxReopen)
		case <-s.wake:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// leave ends the subscriber when nothing is wanted of it any more.
func (s *subscriber) leave(ctx context.Context) bool {
	if ctx.Err() != nil {
		for _, uri := range s.all(anyWant) {
			s.settle(uri, failure(fault.Unavailable, fault.Host, "STOPPING", "the server is stopping"))
		}
	}
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.wants) > 0 {
		return false
	}
	if s.pool.subs[s.key] == s {
		delete(s.pool.subs, s.key)
	}
	return true
}

// serve holds the subscriptions on one connection until it is over or none is
// wanted any more.
func (s *subscriber) serve(ctx context.Context, c *conn, t *Target) {
	c.keeps(s) // from here on it is not idle, though no request is in flight
	defer c.keeps(nil)
	s.pool.release(c)
	if c.offers&offersSubscribe == 0 {
		err := c.gate(t, string(mcp.MethodResourcesSubscribe))
		for _, uri := range s.all(anyWant) {
			s.settle(uri, err)
		}
		return
	}
	var have []string
	pause := s.pool.limits.Reopen
	for seen := 0; ; {
		s.mu.Lock()
		edits := s.edits
		s.mu.Unlock()
		wanted := s.all(anyWant)
		if c.era == EraModern {
			if edits != seen {
				c.listenFor(wanted)
			}
			have, seen = wanted, edits
		} else {
			have = s.change(ctx, c, t, have, wanted)
		}
		if len(wanted) == 0 {
			return
		}
		var again <-chan time.Time
		if len(have) < len(wanted) {
			again = time.After(jitter(pause))
			pause = min(2*pause, s.pool.limits.MaxReopen)
		}
		select {
		case <-s.wake:
		case <-again:
		case <-c.gone:
			return
		case <-ctx.Done():
			return
		}
	}
}

// change subscribes and unsubscribes at a legacy server, and returns what is
// subscribed now.
func (s *subscriber) change(ctx context.Context, c *conn, t *Target, have, wanted []string) (now []string) {
	for _, uri := range have {
		if !slices.Contains(wanted, uri) {
			c.subscription(ctx, t, string(mcp.MethodResourcesUnsubscribe), uri) //nolint:errcheck // updates that come all the same are dropped
		}
	}
	for _, uri := range wanted {
		if slices.Contains(have, uri) {
			now = append(now, uri)
			if slices.Contains(s.all(silent), uri) {
				s.settle(uri, nil) // it was ended and wanted again meanwhile
			}
			continue
		}
		err := c.subscription(ctx, t, string(mcp.MethodResourcesSubscribe), uri)
		if err != nil && (c.over() || ctx.Err() != nil) {
			return now // the next connection decides
		}
		if f, ok := fault.As(err); ok && f.Kind != fault.Precondition && slices.Contains(s.all(granted), uri) {
			continue // it was granted before, and this may pass
		}
		s.settle(uri, err)
		if err == nil {
			now = append(now, uri)
		}
	}
	return now
}

// subscription sends one of the two requests of the legacy era.
func (c *conn) subscription(ctx context.Context, t *Target, method, uri string) error {
	params, err := json.Marshal(map[string]string{"uri": uri})
	if err != nil {
		return fault.Wrap(err, "encode a URI")
	}
	resp, _, err := c.do(ctx, t, &Request{Method: method, Params: params, ResultBytes: envelopeSlack})
	resp.Release()
	if err == nil && resp.Error != nil {
		err = refusedSubscription.With("serverMessage", shorten(resp.Error.Message, 200))
	}
	return err
}

var refusedSubscription = failure(fault.Precondition, fault.Server, "SUBSCRIPTION_REFUSED", "the server does not grant the subscription")

// acknowledged notes what a modern server granted of a stream's resources.
func (s *subscriber) acknowledged(w *watch) {
	for _, uri := range w.uris {
		if w.granted == nil || slices.Contains(w.granted, uri) {
			s.settle(uri, nil)
		} else {
			s.settle(uri, refusedSubscription)
		}
	}
}

// refused notes that a modern server opens no stream for these resources. Those
// that another stream has are not affected.
func (s *subscriber) refused(uris []string) {
	mute := s.all(silent)
	for _, uri := range uris {
		if slices.Contains(mute, uri) {
			s.settle(uri, refusedSubscription)
		}
	}
}

// lost notes that nobody listens for these resources any more, and reports those
// that were listened for.
func (s *subscriber) lost(uris []string) {
	for _, uri := range uris {
		s.mu.Lock()
		w := s.wants[uri]
		was := w != nil && w.live
		if was {
			w.live = false
		}
		s.mu.Unlock()
		if was {
			s.updated(uri)
		}
	}
}

// resourceUpdated takes in what a server says of a resource.
func (c *conn) resourceUpdated(params []byte) {
	uri, _ := text(member(params, "uri"))
	c.mu.Lock()
	s := c.keeper
	c.mu.Unlock()
	if s == nil || uri == "" || len(uri) > maxSubscriptionURI || !s.covers(uri) {
		c.count.stray.Add(1)
		return
	}
	s.updated(uri)
}

// covers reports whether a URI is subscribed or lies beneath one that is.
func (s *subscriber) covers(uri string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.wants[uri]; ok {
		return true
	}
	for known := range s.wants {
		if strings.HasPrefix(uri, known) {
			return true
		}
	}
	return false
}

// updated reports an update at once when none was reported lately, and otherwise
// together with all others when the time has come.
func (s *subscriber) updated(uri string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pool.onUpdated.Load() == nil {
		return
	}
	if len(s.untold) < maxUpdates || s.untold[uri] {
		s.untold[uri] = true
	} else {
		clear(s.untold)
		for known := range s.wants {
			s.untold[known] = true
		}
	}
	if s.timer != nil || !s.pool.tasks.begin() {
		return
	}
	s.timer = time.AfterFunc(max(0, s.pool.limits.Coalesce-time.Since(s.told)), func() {
		defer s.pool.tasks.wg.Done()
		s.tell()
	})
}

func (s *subscriber) tell() {
	s.mu.Lock()
	uris := s.untold
	s.untold, s.timer, s.told = map[string]bool{}, nil, time.Now()
	s.mu.Unlock()
	for uri := range uris {
		s.pool.tellUpdated(Updated{Key: s.key, URI: uri})
	}
}

// quiet ends the reports.
func (s *subscriber) quiet() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.timer != nil && s.timer.Stop() {
		s.pool.tasks.wg.Done()
		s.timer = nil
	}
}

func (p *Pool) tellUpdated(u Updated) {
	if fn := p.onUpdated.Load(); fn != nil {
		(*fn)(u)
	}
}

// keeps notes who has subscriptions on the connection, nil for nobody.
func (c *conn) keeps(s *subscriber) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keeper = s
}
