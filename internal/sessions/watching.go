package sessions

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/mark3labs/mcp-go/mcp"
)

// announces reports whether there is a stream to watch: of changes, and in the
// legacy era of what the server asks and tells.
func (c *conn) announces() bool {
	if c.era == EraLegacy {
		return !c.oneChannel() && (len(c.announced) > 0 || c.declared.asks() || c.logLevel.Load() > 0)
	}
	return len(c.announced) > 0
}

// watch starts the watcher of a connection whose server announces changes.
func (p *Pool) watch(c *conn) {
	if c.watchTried == nil {
		return
	}
	ctx, cancel := context.WithCancel(p.ctx)
	c.mu.Lock()
	gone := c.ended
	if !gone {
		c.stopWatch = cancel
	}
	c.mu.Unlock()
	if gone {
		cancel()
		close(c.watchTried)
		return
	}
	p.tasks.run(func() {
		defer cancel()
		c.watching(ctx)
	})
}

// watching runs until ctx ends: it holds the stream of changes open. It reports
// the new connection, and a gap each time the stream breaks and each time it
// opens after something was listed.
func (c *conn) watching(ctx context.Context) {
	pause := c.pool.limits.Reopen
	tried := sync.OnceFunc(func() { close(c.watchTried) })
	defer tried()
	c.changed(connected) // what was listed before this connection may be out of date
	for {
		id := c.nextID.Add(1)
		w := &watch{id: id, conn: c, opened: func() { c.watchOpened(tried) }}
		if c.era == EraModern {
			w.body = encodeRequest(id, string(mcp.MethodSubscriptionsListen), listenParams(c.announced), c.pool.meta[c.target.Declare.index()], nil)
		}
		end := c.wire.watch(ctx, w)
		was := c.setWatching(false)
		tried()
		if ctx.Err() != nil || end.refused {
			return
		}
		if was {
			c.mu.Lock()
			c.listed = true // what was listed under this stream is before the next one
			c.mu.Unlock()
			c.changed("")
		}
		if end.lived > time.Minute {
			pause = c.pool.limits.Reopen
		}
		if sleep(ctx, max(jitter(pause), end.retry)) != nil {
			return
		}
		pause = min(2*pause, c.pool.limits.MaxReopen)
	}
}

// jitter spreads d over [d, 1.5 d), so that a restarted server is not met by all
// at once and the least pause still holds.
func jitter(d time.Duration) time.Duration {
	return d + time.Duration(rand.Int64N(int64(d)/2+1))
}

// watchFirst is how long a first list waits for the stream of changes.
const watchFirst = time.Second

// afterWatch waits until the stream of changes is open, so that nothing changes
// unseen between a list and the stream. A list that does not wait for it is
// noted: the stream's opening is then a gap.
func (c *conn) afterWatch(ctx context.Context) {
	if c.watchTried == nil {
		return
	}
	t := time.NewTimer(watchFirst)
	defer t.Stop()
	select {
	case <-c.watchTried:
	case <-t.C:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.watchOpen {
		c.listed = true
	}
}

// awaitStream waits until the stream on which a legacy server may ask is open, or
// will not be, for a short time after the connection was made.
func (c *conn) awaitStream(ctx context.Context) {
	if c.watchTried == nil || c.era != EraLegacy {
		return
	}
	select {
	case <-c.watchTried:
		return
	default:
	}
	t := time.NewTimer(max(0, watchFirst-time.Since(c.opened.Add(c.negotiation))))
	defer t.Stop()
	select {
	case <-c.watchTried:
	case <-t.C:
	case <-ctx.Done():
	}
}

// watchOpened notes that the stream of changes is open, and reports a gap if
// lists were made before.
func (c *conn) watchOpened(tried func()) {
	c.mu.Lock()
	c.watchOpen = true
	gap := c.listed
	c.mu.Unlock()
	tried()
	if gap {
		c.changed("")
	}
}

func (c *conn) setWatching(open bool) (was bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, c.watchOpen = c.watchOpen, open
	return was
}
