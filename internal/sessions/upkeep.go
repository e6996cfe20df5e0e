package sessions

import (
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// notesKept bounds what is remembered of eras and of failing servers.
const notesKept = 8192

// forget frees a key's slot. The caller holds p.mu.
func (p *Pool) forget(k Key) {
	delete(p.slots, k)
	if p.tenants[k.Tenant]--; p.tenants[k.Tenant] <= 0 {
		delete(p.tenants, k.Tenant)
	}
}

// remember puts a connection into the ring of those that ended lately. The caller
// holds p.mu.
func (p *Pool) remember(c *conn, state, why string) {
	info := c.describe()
	info.State, info.Reason, info.Watching = state, why, false
	if len(p.lately) < endedKept {
		p.lately = append(p.lately, info)
		return
	}
	p.lately[p.oldest] = info
	p.oldest = (p.oldest + 1) % endedKept
}

// evict makes room by ending the connection that was unused for longest: of the
// tenant, if the tenant is at its own bound, else of anybody. The caller holds p.mu.
func (p *Pool) evict(t tenant.ID) bool {
	own := p.tenants[t] >= p.limits.Tenant
	var victim *conn
	var since time.Time
	for k, s := range p.slots {
		if s.c == nil || (own && k.Tenant != t) {
			continue
		}
		s.c.mu.Lock()
		idle, used := s.c.active == 0 && !s.c.ended, s.c.lastUsed
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

// failed notes a failure to connect, so that the server is left alone for a while
// that grows. Only failures that time may heal count. The caller holds p.mu.
func (p *Pool) failed(k Key, err error) {
	f, ok := fault.As(err)
	if !ok || (f.Kind != fault.Unavailable && f.Kind != fault.Deadline && f.Kind != fault.Exhausted) || f.Layer == fault.Host || f.Layer == fault.Protocol {
		return
	}
	reg := registrationOf(k)
	pa, ok := p.pauses[reg]
	if !ok {
		if len(p.pauses) >= notesKept {
			for old := range p.pauses {
				delete(p.pauses, old)
				break
			}
		}
		pa = &pause{next: p.limits.Backoff}
		p.pauses[reg] = pa
	}
	now := time.Now()
	pa.err = f
	if now.Before(pa.until) {
		// Attempts begin outside of pauses only: this one ran beside the one that
		// began the pause, and many users' attempts are one outage.
		pa.until = later(pa.until, now.Add(f.RetryAfter))
		return
	}
	pa.until = now.Add(max(jitter(pa.next), f.RetryAfter))
	pa.next = min(2*pa.next, p.limits.MaxBackoff)
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func (p *Pool) era(k Key) eraNote {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.eras[registrationOf(k)]
}

// noteEra remembers what a server proved. The newest version seen stays, so that
// a later downgrade is noticed.
func (p *Pool) noteEra(k Key, version string, legacy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	reg := registrationOf(k)
	note, ok := p.eras[reg]
	if !ok && len(p.eras) >= notesKept {
		for old := range p.eras {
			delete(p.eras, old)
			break
		}
	}
	p.eras[reg] = eraNote{version: max(note.version, version), legacy: legacy}
}

// forgetEra lets the next connection probe again.
func (p *Pool) forgetEra(k Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if note, ok := p.eras[registrationOf(k)]; ok {
		note.legacy = false
		p.eras[registrationOf(k)] = note
	}
}

// sweeping ends connections that are idle or old, until the pool shuts down.
func (p *Pool) sweeping() {
	every := max(min(p.limits.Idle, p.limits.Lifetime)/4, 10*time.Millisecond)
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
		busy, unused, age := c.active > 0, now.Sub(c.lastUsed), now.Sub(c.opened)
		c.mu.Unlock()
		switch {
		case !busy && unused >= p.limits.Idle:
			p.drop(c, "idle", false)
		case age >= p.limits.Lifetime:
			p.drop(c, "lifetime reached", false)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for reg, pa := range p.pauses {
		if now.Sub(pa.until) > 10*p.limits.MaxBackoff {
			delete(p.pauses, reg)
		}
	}
}
