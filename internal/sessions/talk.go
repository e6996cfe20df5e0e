package sessions

import (
	"context"
	"sync"
	"time"
)

// talk is what goes on beside one running request: the server's questions, and its
// notices. A request that serves neither has none.
type talk struct {
	conn    *conn
	ctx     context.Context // ends with the request
	cancel  context.CancelCauseFunc
	clock   *clock
	onAsk   func(ctx context.Context, a Ask) Answer
	notices *notices // nil where none are wanted

	mu    sync.Mutex
	over  bool
	asked int // questions so far
	open  int // questions that a person has now
	wg    sync.WaitGroup
}

// nobody stands for what goes on beside a request that has no such wishes, where it
// is known that a message belongs to that request.
var nobody = &talk{}

func (x *exchange) besides() *talk {
	if x.beside == nil {
		return nobody
	}
	return x.beside
}

// talk begins what goes on beside a request. Every talk has its end.
func (c *conn) talk(ctx context.Context, t *Target, r *Request, timeout time.Duration) *talk {
	k := &talk{conn: c}
	if c.era == EraLegacy {
		k.onAsk = r.OnAsk
	}
	k.ctx, k.cancel = context.WithCancelCause(ctx)
	k.clock = newClock(timeout, func() { k.cancel(context.DeadlineExceeded) })
	if r.OnNotice != nil {
		k.notices = c.newNotices(t, r.OnNotice)
	}
	c.talkMu.Lock()
	defer c.talkMu.Unlock()
	if c.talks == nil {
		c.talks = map[*talk]struct{}{}
	}
	c.talks[k] = struct{}{}
	return k
}

// end takes the questions back that are still open, waits for those who have them,
// and hands over the last notice.
func (k *talk) end() {
	k.conn.talkMu.Lock()
	delete(k.conn.talks, k)
	k.conn.talkMu.Unlock()
	k.clock.end()
	k.mu.Lock()
	k.over = true
	k.mu.Unlock()
	k.cancel(context.Canceled)
	k.wg.Wait()
	k.notices.end()
}

// enter counts one more question that a person gets; it is false when there are
// too many, or the request is over.
func (k *talk) enter(most int) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over || k.open >= maxOpenAsks || k.asked >= most {
		return false
	}
	k.open++
	k.asked++
	k.wg.Add(1)
	if k.open == 1 {
		k.clock.stop()
	}
	return true
}

func (k *talk) leave() {
	k.mu.Lock()
	if k.open--; k.open == 0 && !k.over {
		k.clock.start()
	}
	k.mu.Unlock()
	k.wg.Done()
}

// clock is the time that a server has for a request. It stands still while the
// server waits for people.
type clock struct {
	mu    sync.Mutex
	timer *time.Timer
	left  time.Duration
	since time.Time
	over  bool
}

func newClock(d time.Duration, expire func()) *clock {
	return &clock{timer: time.AfterFunc(d, expire), left: d, since: time.Now()}
}

func (c *clock) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.timer.Stop()
	c.left = max(0, c.left-time.Since(c.since))
}

func (c *clock) start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return
	}
	c.since = time.Now()
	c.timer.Reset(c.left)
}

func (c *clock) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	c.timer.Stop()
}
