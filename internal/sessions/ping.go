package sessions

import (
	"context"
	"time"

	"github.com/mark3labs/mcp-go/mcp"
)

const (
	// maxPings bounds the pings under way in the process; others come with a later
	// sweep.
	maxPings = 64
	// missedPings is how many unanswered pings in a row end a connection.
	missedPings = 2
)

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

// ping asks the server for a sign of life. A refusal is one, too. It is no use of
// the connection, which idles on.
func (c *conn) ping() {
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
	} else if c.pool.ctx.Err() == nil {
		c.missed++
	}
	silent := c.missed >= missedPings
	c.mu.Unlock()
	switch {
	case rep.renew:
		c.pool.drop(c, "the server refused the connection", true)
	case silent:
		c.pool.drop(c, "the server no longer answers", true)
	}
}
