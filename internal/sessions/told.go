package sessions

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Stage is a state that a connection reached, when, and how long that took from
// the state before.
type Stage struct {
	State string
	Time  time.Time
	Took  time.Duration
}

// enter notes the state that the connection reached. One that it was in before,
// such as a further list, makes no new stage.
func (c *conn) enter(state string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state = state
	for _, s := range c.stages {
		if s.State == state {
			return
		}
	}
	now := Stage{State: state, Time: time.Now()}
	if n := len(c.stages); n > 0 {
		now.Took = now.Time.Sub(c.stages[n-1].Time)
	}
	c.stages = append(c.stages, now)
}

// describe returns what is told about the connection. The caller knows that it is
// not opening any more.
func (c *conn) describe() ConnectionInfo {
	info := c.opens()
	info.Era, info.ProtocolVersion, info.Negotiation, info.Attempts = c.era, c.version, c.negotiation, c.attempts
	info.Watching = info.Watching || c.oneChannel() && len(c.announced) > 0
	return info
}

// opens returns what can be told of a connection that is still opening.
func (c *conn) opens() ConnectionInfo {
	c.talkMu.Lock()
	logs := slices.Clone(c.logs)
	c.talkMu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return ConnectionInfo{
		ID: c.id, Key: c.key, ServerName: c.target.ServerName, Transport: c.target.Transport, State: c.state,
		Opened: c.opened, LastUsed: c.lastUsed, Active: c.active, Watching: c.watchOpen > 0, Stages: slices.Clone(c.stages),
		Stray: c.count.stray.Load(), Garbage: c.count.garbage.Load(), Logs: logs,
	}
}

// Connections tells of a tenant's connections that match: living ones, opening
// ones, and those that ended lately, the newest of these first.
func (p *Pool) Connections(t tenant.ID, match func(Key) bool) []ConnectionInfo {
	var out []ConnectionInfo
	for _, c := range p.matching(func(k Key) bool { return k.Tenant == t && match(k) }) {
		out = append(out, c.describe())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, s := range p.slots {
		if s.opening != nil && k.Tenant == t && match(k) {
			out = append(out, s.opening.opens())
		}
	}
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

// Registrations returns a key of each registration that a connection or a
// subscription is held for. It has no members but Tenant, Server and Registration.
func (p *Pool) Registrations() []Key {
	p.mu.Lock()
	defer p.mu.Unlock()
	found := map[Key]bool{}
	for k := range p.slots {
		found[Key{Tenant: k.Tenant, Server: k.Server, Registration: k.Registration}] = true
	}
	for k := range p.subs {
		found[Key{Tenant: k.Tenant, Server: k.Server, Registration: k.Registration}] = true
	}
	return slices.Collect(maps.Keys(found))
}

// CloseKey ends the subscriptions and connections whose keys match, each connection
// when its last request in flight has ended. One that is still opening is not
// affected.
func (p *Pool) CloseKey(match func(Key) bool) {
	for _, s := range p.subscribers(match) {
		for _, uri := range s.all(anyWant) {
			s.settle(uri, failure(fault.Canceled, fault.Host, "UNSUBSCRIBED", "the subscription was ended"))
		}
	}
	for _, c := range p.matching(match) {
		p.drop(c, "closed", false)
	}
}

func (p *Pool) subscribers(match func(Key) bool) (out []*subscriber) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, s := range p.subs {
		if match(k) {
			out = append(out, s)
		}
	}
	return out
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
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
