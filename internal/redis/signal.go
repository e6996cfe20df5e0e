package redis

import (
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const (
	// queued is how many events wait for a slow reader before it gets a gap.
	queued = 256
	// idleLimit is how long a subscription hears nothing before it asks whether
	// the connection lives; after twice that it is given up.
	idleLimit = 3 * time.Second
	// The pause between two attempts to subscribe doubles from first to most.
	resubscribeFirst = 100 * time.Millisecond
	resubscribeMost  = 2 * time.Second

	maxTenantLen = 128
	maxIDLen     = 256
)

// Kind names a stream of signals, such as "catalog.changed".
type Kind string

var kindPattern = regexp.MustCompile(`^[a-z][a-z0-9._-]{0,63}$`)

// Event is one signal, or a gap. It carries no data: who hears it looks into the
// database.
type Event struct {
	Kind   Kind
	Tenant string
	ID     string
	// Gap says that signals of any kind and tenant may have been missed before
	// this point; the other fields are empty. Each subscription begins with one,
	// and has one after each reconnection and each overflow.
	Gap bool
}

// Signal sends and hears signals between replicas.
type Signal struct{ c *Client }

// NewSignal returns the signals on c.
func NewSignal(c *Client) *Signal { return &Signal{c: c} }

// Publish sends a signal to every replica, this one too. An error means that
// nobody may have heard it: ErrDown, or a name out of bounds (a tenant of 1 to
// 128 bytes, an id of at most 256).
func (s *Signal) Publish(ctx context.Context, k Kind, tenant, id string) error {
	channel, err := s.channel(k)
	if err != nil {
		return err
	}
	if tenant == "" || len(tenant) > maxTenantLen || len(id) > maxIDLen {
		return errors.New("redis: a signal's tenant or id is out of bounds")
	}
	payload := appendField(appendField(nil, tenant), id)
	return s.c.do(ctx, func(ctx context.Context) error {
		return s.c.rdb.Publish(ctx, channel, payload).Err()
	})
}

func (s *Signal) prefix() string { return s.c.namespace + ":signal:" }

func (s *Signal) channel(k Kind) (string, error) {
	if !kindPattern.MatchString(string(k)) {
		return "", errors.New("redis: malformed kind of signal")
	}
	return s.prefix() + string(k), nil
}

// parsePayload reverses Publish.
func parsePayload(s string) (tenant, id string, ok bool) {
	tenant, rest, ok := cutField(s)
	if !ok || tenant == "" || len(tenant) > maxTenantLen {
		return "", "", false
	}
	id, rest, ok = cutField(rest)
	if !ok || rest != "" || len(id) > maxIDLen {
		return "", "", false
	}
	return tenant, id, true
}

func cutField(s string) (field, rest string, ok bool) {
	length, rest, ok := strings.Cut(s, ":")
	n, err := strconv.Atoi(length)
	if !ok || err != nil || n < 0 || n > len(rest) || strconv.Itoa(n) != length {
		return "", "", false
	}
	return rest[:n], rest[n:], true
}

// Subscription hears signals until it is closed. It reconnects by itself, for as
// long as it takes.
type Subscription struct {
	events chan Event
	cancel context.CancelFunc
	done   chan struct{}
}

// Subscribe begins to hear signals of the given kinds, of all tenants. The first
// event is a gap, sent when the subscription is in force; with Redis away it
// comes when Redis does. The caller closes the subscription.
func (s *Signal) Subscribe(kinds ...Kind) (*Subscription, error) {
	if len(kinds) == 0 {
		return nil, errors.New("redis: a subscription to nothing")
	}
	channels := make([]string, len(kinds))
	for i, k := range kinds {
		var err error
		if channels[i], err = s.channel(k); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithCancel(s.c.life)
	// One place more than events may take: it is kept for a gap.
	sub := &Subscription{events: make(chan Event, queued+1), cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(sub.done)
		defer close(sub.events)
		s.listen(ctx, channels, sub)
	}()
	return sub, nil
}

// Events returns the stream, which is closed with the subscription.
func (s *Subscription) Events() <-chan Event { return s.events }

// Close ends the subscription and waits for it.
func (s *Subscription) Close() {
	s.cancel()
	<-s.done
}

// listen subscribes again and again until ctx ends.
func (s *Signal) listen(ctx context.Context, channels []string, sub *Subscription) {
	pause := resubscribeFirst
	for ctx.Err() == nil {
		if s.hear(ctx, channels, sub) {
			pause = resubscribeFirst
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, resubscribeMost)
	}
}

// hear serves one connection until it fails. It reports whether the
// subscription was ever in force.
func (s *Signal) hear(ctx context.Context, channels []string, sub *Subscription) bool {
	ps := s.c.rdb.Subscribe(ctx, channels...)
	defer ps.Close()
	// A read that blocks does not heed its context.
	defer context.AfterFunc(ctx, func() { ps.Close() })()
	confirmed := 0
	asked := false
	for {
		m, err := ps.ReceiveTimeout(ctx, idleLimit)
		var timeout interface{ Timeout() bool }
		if errors.As(err, &timeout) && timeout.Timeout() && !asked && confirmed == len(channels) {
			asked = true
			if ps.Ping(ctx) == nil {
				continue
			}
		}
		if err != nil {
			// go-redis reconnects at the next call, and hides what was missed.
			return confirmed == len(channels)
		}
		asked = false
		switch m := m.(type) {
		case *goredis.Subscription:
			if confirmed++; confirmed == len(channels) {
				sub.deliver(Event{Gap: true})
			}
		case *goredis.Message:
			if tenant, id, ok := parsePayload(m.Payload); ok {
				sub.deliver(Event{Kind: Kind(strings.TrimPrefix(m.Channel, s.prefix())), Tenant: tenant, ID: id})
			}
		}
	}
}

// deliver never blocks, since a slow reader must not make Redis cut everyone
// off. An event that finds the queue full becomes a gap in the last place; while
// that place is taken, the gap in it is still unread and covers this event too.
// Only one goroutine calls it, so the queue can only have become shorter since
// its length was read.
func (s *Subscription) deliver(e Event) {
	switch n := len(s.events); {
	case n < queued:
		s.events <- e
	case n == queued:
		s.events <- Event{Gap: true}
	}
}
