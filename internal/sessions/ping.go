package sessions

import (
	"context"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const (
	// maxPings bounds the pings under way in the process; others come with a later
	// sweep.
	maxPings = 64
	// missedPings is how many unanswered pings in a row end a connection.
	missedPings = 2
	// stuckAfter is how many requests in a row whose time ran out, with no sign of the
	// server in between, make a connection in use suspect.
	stuckAfter = 3
)

// ServerStuck begins the reason of a connection that was ended because its server
// answered nothing any more although it was asked.
const ServerStuck = "SERVER_STUCK"

// judgeSilence counts the requests that the server let run out of time. Where many
// come on one channel, or a session holds them together, a server that is stuck
// would be asked for ever: a legacy one is pinged, and a program of the modern era,
// which has no ping, is ended as it is. The next use opens a new connection. Over
// HTTP each request of the modern era stands for itself.
func (c *conn) judgeSilence(ctx context.Context, phase Phase, err error) {
	f, _ := fault.As(err)
	switch {
	case phase == Answered:
		c.unanswered.Store(0)
		return
	case err == nil, context.Cause(ctx) != context.DeadlineExceeded && (f == nil || f.Reason != writeFailed):
		return
	}
	if c.unanswered.Add(1) < stuckAfter {
		return
	}
	if c.era != EraLegacy {
		if c.target.Transport == TransportStdio {
			c.pool.drop(c, ServerStuck+": the server's program let several requests in a row run out of time and said nothing", true)
		}
		return
	}
	c.mu.Lock()
	due := !c.pinging && !c.ended
	if due && c.pool.pings.Add(1) > maxPings {
		c.pool.pings.Add(-1)
		due = false // the next request tells
	}
	if due {
		c.pinging, c.pinged = true, time.Now()
	}
	c.mu.Unlock()
	if due {
		c.pool.tasks.run(func() { c.ping(1) })
	}
}

// pingDue reports whether the connection is to be asked whether its server is still
// there: a legacy one whose open stream or pipe is silent for lack of work.
// Everywhere else the next request tells. The caller begins the ping.
func (c *conn) pingDue(now time.Time) bool {
	every := c.pool.limits.Ping
	if every < 0 || c.era != EraLegacy {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	open := c.watchOpen > 0 || c.oneChannel()
	if !open || c.pinging || c.ended || c.active > 0 || now.Sub(c.lastUsed) < every || now.Sub(c.pinged) < every {
		return false
	}
	if c.pool.pings.Add(1) > maxPings {
		c.pool.pings.Add(-1)
		return false
	}
	c.pinging, c.pinged = true, now
	return true
}

// ping asks the server for a sign of life and ends the connection when most pings in
// a row brought none. A refusal is one, too. It is no use of the connection, which
// idles on.
func (c *conn) ping(most int) {
	defer c.pool.pings.Add(-1)
	ctx, cancel := context.WithTimeout(c.pool.ctx, c.pool.limits.Probe)
	defer cancel()
	hold := c.pool.lease(c.key.Tenant)
	defer hold.release()
	id := c.nextID.Add(1)
	rep, _ := c.wire.exchange(ctx, &exchange{
		id: id, method: string(mcp.MethodPing), hold: hold, limit: envelopeSlack, patient: true,
		body: encodeRequest(id, string(mcp.MethodPing), nil, nil, nil),
	})
	c.mu.Lock()
	c.pinging = false
	if rep.phase == Answered {
		c.missed = 0
		c.unanswered.Store(0)
	} else if c.pool.ctx.Err() == nil {
		c.missed++
	}
	silent := c.missed >= most
	c.mu.Unlock()
	switch {
	case rep.renew:
		c.pool.drop(c, "the server refused the connection", true)
	case silent && most < missedPings:
		c.pool.drop(c, ServerStuck+": the server let several requests in a row run out of time and did not answer a ping", true)
	case silent:
		c.pool.drop(c, "the server no longer answers", true)
	}
}
