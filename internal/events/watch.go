package events

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// watch reads the events of one tenant's sessions for all their readers here: one
// look is one query, however many read. It runs while there is a reader.
type watch struct {
	s      *Service
	tenant tenant.ID
	wake   chan struct{}
	stop   context.CancelFunc

	mu      sync.Mutex
	feeds   map[string]*feed
	readers int
}

// feed is a session with its readers, and the last event that they were given.
type feed struct {
	pos     int64
	readers map[*Stream]bool
}

func (w *watch) stir() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// join enters a stream among its session's readers. Live events after st.upTo will
// come through its buffer; last is how far the session was when that was read.
func (s *Service) join(st *Stream, last int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life.Err() != nil {
		return errStopping
	}
	w := s.watches[st.tenant]
	if w == nil {
		w = &watch{s: s, tenant: st.tenant, wake: make(chan struct{}, 1), feeds: map[string]*feed{}}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.feeds[st.req.SessionID]
	if f == nil {
		f = &feed{pos: last, readers: map[*Stream]bool{}}
	}
	switch {
	case len(f.readers) >= s.cfg.SessionReaders:
		return tooMany("session", s.cfg.SessionReaders)
	case w.readers >= s.cfg.TenantReaders:
		return tooMany("tenant", s.cfg.TenantReaders)
	}
	f.readers[st] = true
	w.feeds[st.req.SessionID] = f
	w.readers++
	st.watch, st.upTo = w, f.pos
	if s.watches[st.tenant] == nil {
		s.watches[st.tenant] = w
		var ctx context.Context
		ctx, w.stop = context.WithCancel(context.Background())
		s.running.Add(1)
		go func() {
			defer s.running.Done()
			w.run(ctx)
		}()
	}
	return nil
}

// leave takes a stream out; the last one ends the watch.
func (s *Service) leave(st *Stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := st.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	w.remove(st)
	if w.readers == 0 && s.watches[w.tenant] == w {
		delete(s.watches, w.tenant)
		w.stop()
	}
}

// remove is called under w.mu. Removing twice does nothing.
func (w *watch) remove(st *Stream) {
	f := w.feeds[st.req.SessionID]
	if f == nil || !f.readers[st] {
		return
	}
	delete(f.readers, st)
	close(st.live)
	w.readers--
	if len(f.readers) == 0 {
		delete(w.feeds, st.req.SessionID)
	}
}

func (w *watch) run(ctx context.Context) {
	t := time.NewTicker(w.s.cfg.Poll)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-w.wake:
		}
		if err := w.look(ctx); err != nil && ctx.Err() == nil {
			w.s.log.WarnContext(ctx, "read events", "tenant", w.tenant, "error", err)
		}
		pause(ctx, gather)
	}
}

// look reads what is new in every session that is read here.
func (w *watch) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	w.mu.Lock()
	sessions := make([]string, 0, len(w.feeds))
	for id := range w.feeds {
		sessions = append(sessions, id)
	}
	w.mu.Unlock()
	slices.Sort(sessions)
	heads, err := w.s.heads(ctx, w.tenant, sessions)
	if err != nil {
		return err
	}
	for _, id := range sessions {
		for more := true; more; {
			if more, err = w.feed(ctx, id, heads[id].last); err != nil {
				return err
			}
		}
	}
	return nil
}

// feed gives a session's readers one page; it reports whether there is more.
func (w *watch) feed(ctx context.Context, session string, last int64) (more bool, err error) {
	w.mu.Lock()
	f := w.feeds[session]
	if f == nil || f.pos >= last {
		w.mu.Unlock()
		return false, nil
	}
	from := f.pos
	w.mu.Unlock()
	page, err := w.s.page(ctx, w.tenant, session, from, last)
	if err != nil {
		return false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// Another feed of the session may have begun meanwhile; it looks by itself.
	if w.feeds[session] != f {
		return false, nil
	}
	for _, e := range page {
		f.pos = e.N
		for st := range f.readers {
			w.give(st, e)
		}
	}
	if len(page) < pageSize {
		f.pos = last // what is missing was removed; the next number shows it
	}
	return f.pos < last, nil
}

// give never waits: a reader whose buffer is full is dropped.
func (w *watch) give(st *Stream, e Event) {
	select {
	case st.live <- e:
	default:
		w.remove(st)
	}
}

// tell gives what is told live only. A reader that has no room goes without.
func (w *watch) tell(match func(*Request) bool, e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, f := range w.feeds {
		e.SessionID = id
		for st := range f.readers {
			if !match(&st.req) {
				continue
			}
			select {
			case st.live <- e:
			default:
			}
		}
	}
}
