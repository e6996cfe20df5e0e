package sessions

import (
	"context"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// shared reports whether all users of the tenant use the key's connection.
func (k Key) shared() bool { return k.Subject.IsZero() && k.Session == "" }

// silenced returns the target as a shared connection has it: nothing is offered
// to a server that could not tell whom it would ask or tell.
func (t Target) silenced() Target {
	t.Declare, t.LogLevel, t.Roots = Capabilities{}, "", nil
	return t
}

// silenced returns the request as a shared connection sends it: a question in the
// middle of it could reach another user.
func (r Request) silenced() Request {
	r.OnAsk = nil
	return r
}

// oneAtATime reports whether calls on the connection wait for each other: all
// users share it, and its protocol does not say which of their calls a message of
// the server belongs to.
func (c *conn) oneAtATime() bool {
	return c.key.shared() && (c.era != EraModern || c.target.Transport == TransportStdio)
}

// acquireTurn is acquire for a call: where calls run one at a time, it returns
// when it is this one's turn. passTurn and release follow.
func (p *Pool) acquireTurn(ctx context.Context, k Key, t *Target, r *Request) (*conn, error) {
	for {
		c, err := p.acquire(ctx, k, t, false)
		if err != nil || !c.oneAtATime() {
			return c, err
		}
		if err := c.awaitTurn(ctx, r); err != nil {
			p.release(c)
			return nil, err
		}
		if !c.over() {
			return c, nil
		}
		// It ended while this call waited; nothing was sent.
		c.passTurn()
		p.release(c)
	}
}

// awaitTurn waits for the calls before this one, within the call's own time.
func (c *conn) awaitTurn(ctx context.Context, r *Request) error {
	select {
	case c.turn <- struct{}{}:
		return nil
	default:
	}
	c.mu.Lock()
	full := c.queue >= c.pool.limits.Queue
	if !full {
		c.queue++
	}
	c.mu.Unlock()
	if full {
		return failure(fault.Exhausted, fault.Host, "CONNECTION_BUSY", "too many calls wait for the one connection that the tenant shares").Retry(time.Second)
	}
	defer func() {
		c.mu.Lock()
		c.queue--
		c.mu.Unlock()
	}()
	wait := r.Queue
	if wait <= 0 {
		wait = r.Timeout
	}
	if wait <= 0 {
		wait = c.pool.limits.Call
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case c.turn <- struct{}{}:
		return nil
	case <-timer.C:
		return failure(fault.Unavailable, fault.Host, TurnNotCome, "the calls of others on the connection that the tenant shares took too long")
	case <-ctx.Done():
		return ended(ctx)
	}
}

// passTurn lets the next call have its turn.
func (c *conn) passTurn() {
	if c.oneAtATime() {
		<-c.turn
	}
}
