package calls

import (
	"context"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// hub wakes those who wait for a call in this replica. It holds an entry only
// while somebody waits.
type hub struct {
	mu      sync.Mutex
	waiting map[callKey]*waiters
}

type waiters struct {
	ch chan struct{} // closed at the next change
	n  int
}

func newHub() *hub { return &hub{waiting: map[callKey]*waiters{}} }

// watch returns a channel that closes at the call's next change, and a function
// to call when no longer waiting.
func (h *hub) watch(k callKey) (<-chan struct{}, func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w := h.waiting[k]
	if w == nil {
		w = &waiters{ch: make(chan struct{})}
		h.waiting[k] = w
	}
	w.n++
	return w.ch, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if w.n--; w.n == 0 && h.waiting[k] == w {
			delete(h.waiting, k)
		}
	}
}

func (h *hub) wake(k callKey) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w := h.waiting[k]; w != nil {
		close(w.ch)
		delete(h.waiting, k)
	}
}

// maxWait bounds a wait (design 3.5).
const maxWait = time.Minute

// await reads the call until done says so or the wait is over. It watches before
// it reads, so that no change falls between; without a signal it reads again
// each poll interval. Draining answers at once.
func (s *Service) await(ctx context.Context, p tenant.Principal, k callKey, wait time.Duration, done func(*Call) bool) (*Call, error) {
	deadline := time.Now().Add(min(wait, maxWait))
	for {
		ch, release := s.hub.watch(k)
		c, err := s.read(ctx, p, k)
		left := time.Until(deadline)
		if err != nil || done(c) || left <= 0 {
			release()
			return c, err
		}
		over := s.sleep(ctx, ch, min(left, s.cfg.Poll))
		release()
		if over {
			return c, nil
		}
	}
}

// sleep waits for a change or the time; it reports whether waiting should end.
func (s *Service) sleep(ctx context.Context, ch <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ch:
	case <-t.C:
	case <-s.drain:
		return true
	case <-ctx.Done():
		return true
	}
	return false
}
