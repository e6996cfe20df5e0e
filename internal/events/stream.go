package events

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Request says what to follow. Whoever makes it has seen that the caller may.
type Request struct {
	SessionID string
	// CallID narrows the stream to one call; empty for all of the session.
	CallID string
	// Servers names the session's servers by their ids.
	Servers map[string]string
	// After is the last event known; nil begins with what comes from now on.
	After *int64
	// Check says whether the caller still may: ErrSessionEnded ends the stream in
	// order, any other error ends it with that error.
	Check func(ctx context.Context) error
}

// Stream is one reader. One goroutine calls Next, and Close in the end.
type Stream struct {
	s      *Service
	tenant tenant.ID
	req    Request
	watch  *watch
	// live brings what the watch reads; it is closed when the stream was dropped.
	live chan Event

	queue []Event
	// sent is the last event that was taken into account, upTo that up to which the
	// stream reads by itself.
	sent, upTo int64
	checked    time.Time
	beat       *time.Ticker
	check      *time.Ticker
	err        error // what ends the stream once the queue is empty
}

func tooMany(of string, most int) error {
	return fault.New(fault.Exhausted, "TOO_MANY_STREAMS", "the %s has %d streams of events at this replica already", of, most).Retry(5 * time.Second)
}

// Follow begins a stream. The caller closes it.
func (s *Service) Follow(ctx context.Context, t tenant.ID, r Request) (*Stream, error) {
	if s.life.Err() != nil {
		return nil, errStopping
	}
	heads, err := s.heads(ctx, t, []string{r.SessionID})
	if err != nil {
		return nil, err
	}
	h := heads[r.SessionID]
	st := &Stream{s: s, tenant: t, req: r, live: make(chan Event, s.cfg.Buffered), sent: h.last, checked: s.now()}
	if r.After != nil {
		if *r.After > h.last {
			return nil, fault.Field1("after", "is behind the session's last event, which is %d", h.last)
		}
		st.sent = *r.After
	}
	if err := s.join(st, h.last); err != nil {
		return nil, err
	}
	st.beat, st.check = time.NewTicker(s.cfg.Heartbeat), time.NewTicker(s.cfg.Recheck)
	st.queue = append(st.queue, st.about(Ready, ""))
	if st.sent < h.floor {
		st.resync(h.floor)
	}
	return st, nil
}

// about makes an event about the stream itself.
func (st *Stream) about(k Kind, reason string) Event {
	e := Event{Kind: k, SessionID: st.req.SessionID, CallID: st.req.CallID, Time: st.s.now(), Reason: reason}
	if k == Ready || k == Resync {
		e.N = st.sent
	}
	return e
}

// resync says that the events up to n are gone.
func (st *Stream) resync(n int64) {
	st.sent = n
	st.queue = append(st.queue, st.about(Resync, "EVENTS_REMOVED"))
}

// Close ends the stream.
func (st *Stream) Close() {
	st.s.leave(st)
	st.beat.Stop()
	st.check.Stop()
}

// Next waits for the next event. It returns io.EOF after a bye, and the reason as
// a fault when the stream ends otherwise.
func (st *Stream) Next(ctx context.Context) (Event, error) {
	for {
		if len(st.queue) > 0 {
			e := st.queue[0]
			st.queue = st.queue[1:]
			return e, nil
		}
		if st.err != nil {
			return Event{}, st.err
		}
		if st.s.now().Sub(st.checked) >= st.s.cfg.Recheck {
			st.authority(ctx)
			continue
		}
		if st.sent < st.upTo {
			if err := st.catchUp(ctx, st.upTo); err != nil {
				return Event{}, err
			}
			continue
		}
		select {
		case e, ok := <-st.live:
			if !ok {
				return Event{}, errTooSlow
			}
			st.take(e)
		case <-st.beat.C:
			return st.about(Heartbeat, ""), nil
		case <-st.check.C:
			st.authority(ctx)
		case <-st.s.life.Done():
			st.bye("SHUTTING_DOWN")
		case <-ctx.Done():
			return Event{}, ctx.Err()
		}
	}
}

// catchUp reads one page from the database.
func (st *Stream) catchUp(ctx context.Context, upTo int64) error {
	page, err := st.s.page(ctx, st.tenant, st.req.SessionID, st.sent, upTo)
	if err != nil {
		return err
	}
	for _, e := range page {
		st.take(e)
	}
	if len(page) == 0 {
		st.resync(upTo)
	}
	return nil
}

// take queues an event that is this reader's and was not seen before.
func (st *Stream) take(e Event) {
	switch {
	case e.N == 0:
	case e.N <= st.sent:
		return
	case e.N > st.sent+1:
		st.resync(e.N - 1)
		st.sent = e.N
	default:
		st.sent = e.N
	}
	if e.Kind == CatalogChanged {
		e.Server = st.req.Servers[e.Server]
	}
	if st.req.CallID == "" || st.req.CallID == e.CallID {
		st.queue = append(st.queue, e)
	}
}

// authority asks whether the caller still may read.
func (st *Stream) authority(ctx context.Context) {
	st.checked = st.s.now()
	err := st.req.Check(ctx)
	switch {
	case err == nil:
	case errors.Is(err, ErrSessionEnded):
		st.rest(ctx)
		st.bye("SESSION_ENDED")
	case ctx.Err() != nil:
		st.err = ctx.Err()
	default:
		st.err = err
	}
}

// rest reads what the end of the session brought, before the bye.
func (st *Stream) rest(ctx context.Context) {
	heads, err := st.s.heads(ctx, st.tenant, []string{st.req.SessionID})
	for last := heads[st.req.SessionID].last; err == nil && st.sent < last && len(st.queue) < int(st.s.cfg.Kept); {
		err = st.catchUp(ctx, last)
	}
	if err != nil {
		st.err = err
	}
}

func (st *Stream) bye(reason string) {
	if st.err == nil {
		st.queue, st.err = append(st.queue, st.about(Bye, reason)), io.EOF
	}
}
