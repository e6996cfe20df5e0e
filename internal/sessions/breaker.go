package sessions

import (
	"context"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// serverKey is a server of a tenant, whatever its registration's revision.
type serverKey struct {
	tenant tenant.ID
	server string
}

func serverOf(k Key) serverKey { return serverKey{k.Tenant, k.Server} }

// pause is the time in which a failing server is left alone. When it is over, one
// connection is the trial: the others wait for what comes of it.
type pause struct {
	until time.Time
	next  time.Duration
	err   *fault.Error
	tries int           // attempts to connect that failed, one for each pause
	trial chan struct{} // closed when the trial ended; nil while there is none
}

// paused says why a key is not connected now: the fault of the server's pause, or
// the trial that is to be waited for. The caller holds p.mu.
func (p *Pool) paused(k Key) (trial <-chan struct{}, err error) {
	pa, ok := p.pauses[registrationOf(k)]
	switch {
	case !ok:
		return nil, nil
	case pa.trial != nil:
		return pa.trial, nil
	}
	if left := time.Until(pa.until); left > 0 {
		return nil, pa.err.Retry(left)
	}
	return nil, nil
}

// awaitTrial waits for the end of a trial.
func awaitTrial(ctx context.Context, trial <-chan struct{}) error {
	select {
	case <-trial:
		return nil
	case <-ctx.Done():
		return ended(ctx)
	}
}

// try makes a new slot the trial of its server if that comes out of a pause. The
// caller holds p.mu.
func (p *Pool) try(k Key, s *slot) {
	if pa, ok := p.pauses[registrationOf(k)]; ok {
		pa.trial = make(chan struct{})
		s.trial = pa
	}
}

// tried ends the trial that a slot was, if it was one, and returns how many
// attempts had failed before it. The caller holds p.mu.
func (p *Pool) tried(k Key, s *slot, err error) (failed int) {
	if pa := p.pauses[registrationOf(k)]; pa != nil {
		failed = pa.tries
	}
	if s.trial != nil {
		close(s.trial.trial)
		s.trial.trial = nil
	}
	if f, ok := fault.As(err); err == nil || ok && !passes(f) && f.Layer != fault.Host {
		// The server answered, if only to refuse this user: it is not down.
		delete(p.pauses, registrationOf(k))
	}
	return failed
}

// passes reports whether a failure to connect is one that time may heal.
func passes(f *fault.Error) bool {
	return (f.Kind == fault.Unavailable || f.Kind == fault.Deadline || f.Kind == fault.Exhausted) && f.Layer != fault.Host && f.Layer != fault.Protocol
}

// failed notes a failure to connect, so that the server is left alone for a while
// that grows. The caller holds p.mu.
func (p *Pool) failed(k Key, err error) {
	f, ok := fault.As(err)
	if !ok || !passes(f) {
		return
	}
	reg := registrationOf(k)
	pa, ok := p.pauses[reg]
	if !ok {
		if len(p.pauses) >= notesKept {
			p.forgetPause()
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
	pa.tries++
	pa.until = now.Add(max(jitter(pa.next), f.RetryAfter))
	pa.next = min(2*pa.next, p.limits.MaxBackoff)
}

// forgetPause makes room for another pause. One with a trial is waited for and
// stays.
func (p *Pool) forgetPause() {
	for reg, pa := range p.pauses {
		if pa.trial == nil {
			delete(p.pauses, reg)
			return
		}
	}
}

// outlook says of a failed connection how often connecting has failed and when it
// may be tried again. The caller holds p.mu.
func (p *Pool) outlook(k Key, info *ConnectionInfo) {
	info.Attempts = 1
	if pa := p.pauses[registrationOf(k)]; pa != nil {
		info.Attempts, info.NextTry = max(pa.tries, 1), pa.until
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
