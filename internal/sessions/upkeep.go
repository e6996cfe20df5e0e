package sessions

import (
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// notesKept bounds what is remembered of eras and of failing servers.
const notesKept = 8192

// forget frees a key's slot. The caller holds p.mu.
func (p *Pool) forget(k Key) {
	delete(p.slots, k)
	if p.tenants[k.Tenant]--; p.tenants[k.Tenant] <= 0 {
		delete(p.tenants, k.Tenant)
	}
	of := serverOf(k)
	if p.servers[of]--; p.servers[of] <= 0 {
		delete(p.servers, of)
	}
}

// remember puts a connection into the ring of those that ended lately. The caller
// holds p.mu.
func (p *Pool) remember(c *conn, state, why string) {
	c.enter(state)
	info := c.describe()
	info.Reason, info.Watching = why, false
	if state == StateFailed {
		p.outlook(c.key, &info)
	}
	if len(p.lately) < endedKept {
		p.lately = append(p.lately, info)
		return
	}
	p.lately[p.oldest] = info
	p.oldest = (p.oldest + 1) % endedKept
}

// admit makes room for a connection of the key, if its server, its tenant and the
// process allow one. The caller holds p.mu.
func (p *Pool) admit(k Key, t Target) error {
	most := p.limits.Server
	if t.Transport == TransportStdio {
		most = min(most, p.limits.ServerProcesses)
	}
	var among func(Key) bool
	switch {
	case p.servers[serverOf(k)] >= most:
		among = func(o Key) bool { return serverOf(o) == serverOf(k) }
	case p.tenants[k.Tenant] >= p.limits.Tenant:
		among = func(o Key) bool { return o.Tenant == k.Tenant }
	case len(p.slots) >= p.limits.Total:
		among = func(Key) bool { return true }
	}
	if among != nil && !p.evict(among) {
		return failure(fault.Exhausted, fault.Host, "CONNECTIONS_EXHAUSTED", "too many connections to servers are open")
	}
	return nil
}

// evict makes room by ending the connection that was unused for longest among
// some. The caller holds p.mu.
func (p *Pool) evict(among func(Key) bool) bool {
	var victim *conn
	var since time.Time
	for k, s := range p.slots {
		if s.c == nil || !among(k) {
			continue
		}
		s.c.mu.Lock()
		idle, used := s.c.active == 0 && !s.c.ended && s.c.keeper == nil, s.c.lastUsed
		s.c.mu.Unlock()
		if idle && (victim == nil || used.Before(since)) {
			victim, since = s.c, used
		}
	}
	if victim == nil {
		return false
	}
	p.forget(victim.key)
	p.tasks.run(func() { p.drop(victim, "made room for another connection", false) })
	return true
}

// sweeping ends connections that are idle or old, until the pool shuts down.
func (p *Pool) sweeping() {
	every := min(p.limits.Idle, p.limits.Lifetime) / 4
	if p.limits.Ping > 0 {
		every = min(every, p.limits.Ping/2)
	}
	every = max(every, 10*time.Millisecond)
	tick := time.NewTicker(min(every, 30*time.Second))
	defer tick.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-tick.C:
			p.sweep(time.Now())
		}
	}
}

func (p *Pool) sweep(now time.Time) {
	for _, c := range p.matching(func(Key) bool { return true }) {
		c.mu.Lock()
		busy, unused, age := c.active > 0 || c.keeper != nil, now.Sub(c.lastUsed), now.Sub(c.opened)
		c.mu.Unlock()
		switch {
		case !busy && unused >= p.limits.Idle:
			p.drop(c, "idle", false)
		case age >= p.limits.Lifetime:
			p.drop(c, "lifetime reached", false)
		case c.pingDue(now):
			p.tasks.run(func() { c.ping(missedPings) })
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forgetCrashes(now)
	for reg, pa := range p.pauses {
		if pa.trial == nil && now.Sub(pa.until) > 10*p.limits.MaxBackoff {
			delete(p.pauses, reg)
		}
	}
}
