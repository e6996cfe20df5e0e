package sessions

import (
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// crash is what is remembered of a key whose program ended by itself: another is
// started when it is needed, the first time at once, then after pauses that grow.
// It belongs to one key, so that one user's arguments hold up nobody else.
type crash struct {
	count int       // in a row, none of which lived for long
	last  time.Time // the last one
	until time.Time // the end of the pause
}

// crashed notes that the program of a connection ended by itself or had to be
// ended. Failures to connect are noted by failed.
func (p *Pool) crashed(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !c.placed {
		return
	}
	now := time.Now()
	cr := p.crashes[c.key]
	if cr == nil {
		if len(p.crashes) >= notesKept {
			for old := range p.crashes {
				delete(p.crashes, old)
				break
			}
		}
		cr = &crash{}
		p.crashes[c.key] = cr
	}
	if now.Sub(c.opened) >= p.limits.MaxBackoff {
		cr.count = 0 // it lived for long
	}
	cr.count++
	cr.last = now
	if cr.count > 1 {
		d := p.limits.Backoff
		for range min(cr.count-2, 32) {
			d = min(2*d, p.limits.MaxBackoff)
		}
		cr.until = now.Add(jitter(d))
	}
}

// crashPause says why a key's program is not started now. The caller holds p.mu.
func (p *Pool) crashPause(k Key) error {
	if cr := p.crashes[k]; cr != nil {
		if left := time.Until(cr.until); left > 0 {
			return failure(fault.Unavailable, fault.Transport, "SERVER_CRASHING", "the server's program keeps ending by itself and is started again after a pause").Retry(left)
		}
	}
	return nil
}

// forgetCrashes forgets what was long ago. The caller holds p.mu.
func (p *Pool) forgetCrashes(now time.Time) {
	for k, cr := range p.crashes {
		if now.Sub(later(cr.last, cr.until)) > 10*p.limits.MaxBackoff {
			delete(p.crashes, k)
		}
	}
}
