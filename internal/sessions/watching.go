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

// watcher holds one stream of changes open, again and again. One that asks for
// other resources takes over from the one before it once its stream is
// acknowledged, so that nothing changes unseen in between.
type watcher struct {
	uris   []string // of resources, in the modern era
	cancel context.CancelFunc
	ended  chan struct{} // closed when it has ended
}

// watch starts the watcher of a connection whose server announces changes.
func (p *Pool) watch(c *conn) {
	if c.watchTried == nil {
		return
	}
	c.changed(connected) // what was listed before this connection may be out of date
	if c.startWatcher(nil, true) == nil {
		c.watchedOnce()
	}
}

// watchedOnce tells who waits for the stream that it is open or will not be.
func (c *conn) watchedOnce() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.watchTried != nil && !c.watchDone {
		c.watchDone = true
		close(c.watchTried)
	}
}

// startWatcher starts a watcher, which takes over from the one there is. It
// returns nil when the connection is over. The first of a connection is not
// started where one is already: who subscribed meanwhile asked for more.
func (c *conn) startWatcher(uris []string, first bool) *watcher {
	c.mu.Lock()
	defer c.mu.Unlock()
	if first && c.watcher != nil {
		return c.watcher
	}
	if c.ended || !c.pool.tasks.begin() {
		return nil
	}
	if c.watchCtx == nil {
		c.watchCtx, c.stopWatch = context.WithCancel(c.pool.ctx)
	}
	r := &watcher{uris: uris, ended: make(chan struct{})}
	ctx, cancel := context.WithCancel(c.watchCtx)
	r.cancel = cancel
	if c.watcher == nil {
		c.watcher = r
	} else {
		c.taking = r
	}
	go func() {
		defer c.pool.tasks.wg.Done()
		defer close(r.ended)
		defer cancel()
		c.watching(ctx, r)
		c.mu.Lock()
		if c.taking == r {
			c.taking = nil
		} else if c.watcher == r {
			c.watcher = nil
		}
		c.mu.Unlock()
	}()
	return r
}

// watching runs until ctx ends: it holds the stream of changes open. It reports a
// gap each time the stream breaks and each time it opens after something was listed.
func (c *conn) watching(ctx context.Context, r *watcher) {
	pause := c.pool.limits.Reopen
	defer c.watchedOnce()
	for {
		id := c.nextID.Add(1)
		open := false // guarded by c.mu
		w := &watch{id: id, conn: c, uris: r.uris}
		w.opened = sync.OnceFunc(func() { c.watchOpened(r, w, &open) })
		if c.era == EraModern {
			w.body = encodeRequest(id, string(mcp.MethodSubscriptionsListen), listenParams(c.announced, r.uris), c.pool.meta[c.target.Declare.index()], nil)
		}
		end := c.wire.watch(ctx, w)
		c.mu.Lock()
		was, keeper := open, c.keeper
		if was {
			c.watchOpen--
			c.listed = c.listed || ctx.Err() == nil // what was listed under this stream is before the next one
		}
		c.mu.Unlock()
		c.watchedOnce()
		if ctx.Err() != nil {
			return
		}
		if was {
			c.changed("")
		}
		if keeper != nil && was {
			keeper.lost(r.uris)
		}
		if keeper != nil && end.refused {
			keeper.refused(r.uris)
		}
		if end.refused {
			return
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
	if c.watchOpen == 0 {
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

// watchOpened notes that a stream of changes is open, reports a gap if lists were
// made before, and ends the watcher that this one takes over from.
func (c *conn) watchOpened(r *watcher, w *watch, open *bool) {
	c.mu.Lock()
	c.watchOpen++
	*open = true
	gap, keeper := c.listed, c.keeper
	var before *watcher
	if c.taking == r {
		before, c.watcher, c.taking = c.watcher, r, nil
	}
	c.mu.Unlock()
	c.watchedOnce()
	if before != nil {
		before.cancel()
	}
	if gap {
		c.changed("")
	}
	if keeper != nil {
		keeper.acknowledged(w)
	}
}

// listenFor asks a modern server for changes of these resources too, beside those
// of its lists. The watcher that was to take over before is given up.
func (c *conn) listenFor(uris []string) {
	c.mu.Lock()
	taking, now := c.taking, c.watcher
	c.mu.Unlock()
	if taking != nil {
		taking.cancel()
		<-taking.ended
	}
	if len(uris) == 0 && len(c.announced) == 0 {
		if now != nil {
			now.cancel()
			<-now.ended
		}
		return
	}
	c.startWatcher(uris, false)
}
