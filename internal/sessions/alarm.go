package sessions

import "github.com/bulkhead-mcp/bulkhead/internal/fault"

// The events that Alarm is told of.
const (
	// EventDowngradeRefused: a server fell back to an older protocol version than it
	// had proved, and its contract forbids that.
	EventDowngradeRefused = "downgrade_refused"
	// EventOriginRefused: a server is, redirects to, or wants messages posted to
	// another origin than it was registered and reviewed with.
	EventOriginRefused = "origin_refused"
)

// alarmed tells of an error that a security team wants to see.
func (p *Pool) alarmed(k Key, t Target, err error) {
	f, ok := fault.As(err)
	if !ok || p.alarm == nil {
		return
	}
	switch f.Reason {
	case "DOWNGRADE_REFUSED":
		p.alarm(k, t, EventDowngradeRefused)
	case "ORIGIN_MISMATCH", "REDIRECTED_AWAY", "ENDPOINT_FOREIGN":
		p.alarm(k, t, EventOriginRefused)
	}
}
