package sessions

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// The pause before a stream is taken up again: what the server asked for, else
// resumePause, and never less than leastPause.
const (
	resumePause = time.Second
	leastPause  = 100 * time.Millisecond
)

var streamEnded = failure(fault.Unavailable, fault.Transport, "STREAM_ENDED", "the server ended its stream before the answer")

// stream reads an event stream until the answer, and takes it up again when it
// ended early and a legacy server told event ids: also when it meant to, since that
// is how it lets clients poll.
func (w *httpWire) stream(ctx context.Context, body io.Reader, x *exchange, rep *reply) (io.Reader, error) {
	lim := streamLimits{event: x.limit + envelopeSlack, lines: w.limits.EventLines, total: x.limit + envelopeSlack + w.limits.NoiseBytes}
	e := newEventReader(body, lim)
	e.hold = x.hold
	asked := rate{most: w.limits.ServerRequests}
	var resumed io.Closer // the first body is closed by the caller
	defer func() {
		if resumed != nil {
			resumed.Close() //nolint:errcheck // read as far as needed
		}
	}()
	for tries := 0; ; tries++ {
		from := e.lastID
		err := w.events(e, x, rep, &asked)
		if err == nil {
			return body, w.checkSize(x, rep)
		}
		if e.lastID != from {
			tries = 0
		}
		if !w.resumable(ctx, e, err) {
			if err == io.EOF {
				return nil, streamEnded
			}
			return nil, broken(ctx, err)
		}
		resp, err := w.resume(ctx, e, tries, rep)
		if err != nil {
			return nil, err
		}
		if resumed != nil {
			resumed.Close() //nolint:errcheck // read as far as it went
		}
		resumed = resp.Body
		if body, err = decoded(resp); err != nil {
			return nil, broken(ctx, err)
		}
		next := newEventReader(body, lim)
		next.lastID, next.retry, next.total, next.hold = e.lastID, e.retry, e.total, x.hold
		e = next
	}
}

// resumable reports whether a stream that ended so can go on after its last event.
// What a limit ended does not.
func (w *httpWire) resumable(ctx context.Context, e *eventReader, err error) bool {
	return !w.now().modern && e.lastID != "" && ctx.Err() == nil &&
		!errors.Is(err, errBudget) && !errors.Is(err, errQuestions) && !errors.Is(err, errTooLarge) && !errors.Is(err, errEventTooLarge) && !errors.Is(err, errStreamTooLarge)
}

// events reads one stream; nil means that the answer came.
func (w *httpWire) events(e *eventReader, x *exchange, rep *reply, asked *rate) error {
	room := make([]message, 0, 1)
	for {
		ev, err := e.next()
		if err != nil {
			return err
		}
		if ev.name != "" && ev.name != "message" {
			continue
		}
		all, err := parseMessages(room, ev.data, takesBatches(w.now().version))
		if err != nil {
			w.count.garbage.Add(1)
			continue
		}
		if asked.over(requestsIn(all), time.Now()) {
			return errQuestions
		}
		if w.takeAll(all, x, rep) {
			e.keep()
			return nil
		}
	}
}

func requestsIn(all []message) (n int) {
	for i := range all {
		if all[i].isRequest() {
			n++
		}
	}
	return n
}

// rate bounds what happens in a minute.
type rate struct {
	most, n int
	since   time.Time
}

// over counts n more and reports whether that is too many in this minute.
func (r *rate) over(n int, now time.Time) bool {
	if now.Sub(r.since) >= time.Minute {
		r.n, r.since = 0, now
	}
	r.n += n
	return r.n > r.most
}

// resume opens the stream that continues after the last event, as revision
// 2025-11-25 describes. A failure that may pass is tried again.
func (w *httpWire) resume(ctx context.Context, e *eventReader, tries int, rep *reply) (*http.Response, error) {
	pause := resumePause
	if e.retry > 0 {
		pause = max(e.retry, leastPause)
	}
	for ; tries < resumes; tries++ {
		if sleep(ctx, pause) != nil {
			return nil, ended(ctx)
		}
		resp, err := w.openStream(ctx, w.endpoint.Load(), e.lastID)
		switch {
		case ctx.Err() != nil:
			return nil, ended(ctx).Cause(err)
		case err != nil:
			continue
		case resp.StatusCode == http.StatusOK && mediaType(resp.Header) == "text/event-stream":
			return resp, nil
		}
		pause = max(pause, retryAfter(resp.Header.Get("Retry-After"), time.Now()))
		io.CopyN(io.Discard, resp.Body, refusalBytes) //nolint:errcheck // read for the reuse of the connection
		resp.Body.Close()                             //nolint:errcheck // nothing more is wanted of it
		if code := resp.StatusCode; code < 500 && code != http.StatusTooManyRequests && code != http.StatusRequestTimeout {
			if code == http.StatusNotFound && w.now().sessionID != "" {
				rep.renew = true
				w.lost.Store(true)
			}
			return nil, streamEnded
		}
	}
	return nil, streamEnded
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
