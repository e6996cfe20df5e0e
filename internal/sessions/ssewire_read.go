package sessions

import (
	"errors"
	"io"
	"net/url"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// read reads the stream to its end. What is no answer is bounded for each minute.
func (w *sseWire) read(stream *url.URL, body io.Reader) {
	e := newEventReader(body, streamLimits{event: w.limits.LineBytes, lines: w.limits.EventLines, total: w.limits.LineBytes + w.limits.NoiseBytes})
	e.hold = w.conn.pool.lease(w.conn.key.Tenant)
	e.giveUp = func(begin []byte) {
		if !w.requests.giveUp(begin) {
			e.err = errBudget // somebody would wait for ever
		}
	}
	window := time.Now()
	for {
		ev, err := e.next()
		if err != nil {
			e.hold.release()
			w.fail(w.streamFault(err))
			return
		}
		if time.Since(window) > time.Minute {
			e.total, window = 0, time.Now()
		}
		taken := false
		switch ev.name {
		case "endpoint":
			err = w.endpoint(stream, string(ev.data))
		case "", "message":
			if w.post.Load() == nil {
				err = endpointMissing
				break
			}
			taken = w.message(ev.data, e.hold)
		}
		switch {
		case err != nil:
			e.hold.release()
			w.fail(err)
			return
		case taken:
			e.keep()
			e.total, e.hold = 0, w.conn.pool.lease(w.conn.key.Tenant)
		default:
			e.hold.release()
		}
	}
}

// streamFault says why the stream ended.
func (w *sseWire) streamFault(err error) error {
	switch {
	case errors.Is(err, errBudget):
		return overBudget
	case errors.Is(err, errEventTooLarge), errors.Is(err, errStreamTooLarge):
		return failure(fault.TooLarge, fault.Server, "STREAM_TOO_LARGE", "the server's event stream carried more than it may").Cause(err)
	case w.post.Load() == nil && err == io.EOF:
		return endpointMissing
	}
	return failure(fault.Unavailable, fault.Transport, "STREAM_ENDED", "the server's event stream ended before the answer").Cause(err)
}

// message judges one event and reports whether a request has it now.
func (w *sseWire) message(data []byte, hold *lease) bool {
	w.mu.Lock()
	batches := w.batches
	w.mu.Unlock()
	all, err := parseMessages(nil, data, batches)
	if err != nil {
		w.conn.count.garbage.Add(1)
		return false
	}
	taken := false
	for i := range all {
		m := &all[i]
		if !taken && m.isResponse() {
			m.hold = hold // the first answer holds the event for all
		}
		if w.take(m) {
			taken = true
		}
	}
	return taken
}

// take judges one message and reports whether a request has it now. A request of
// the server is never an answer, whatever its id.
func (w *sseWire) take(m *message) bool {
	w.conn.unanswered.Store(0)
	switch {
	case m.method == "" && m.id != nil, m.method == "" && m.err != nil:
		if w.requests.deliver(m) {
			return true
		}
		w.conn.count.stray.Add(1)
	case m.isRequest():
		w.conn.asked(w, m, nil)
	case m.method != "":
		w.conn.noticed(m, nil, false)
	default:
		w.conn.count.stray.Add(1)
	}
	return false
}
