package sessions

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// sseWire speaks HTTP+SSE, the transport of revision 2024-11-05: one event stream
// carries everything that the server says, and names first where messages for the
// server are posted. Its end is the end of the connection.
type sseWire struct {
	conn     *conn
	limits   *Limits
	tasks    *tasks
	get      *httpWire                // the stream's URL
	post     atomic.Pointer[httpWire] // the endpoint; nil until the server named it
	requests *inflight
	named    chan struct{}
	dead     chan struct{}
	failed   atomic.Bool // fail was called
	cause    error       // why, set before dead is closed
	ctx      context.Context
	cancel   context.CancelFunc

	mu      sync.Mutex
	batches bool
	closing bool
}

func newSSEWire(p *Pool, c *conn) (*sseWire, error) {
	get, err := newHTTPWire(p, c)
	if err != nil {
		return nil, err
	}
	w := &sseWire{
		conn: c, limits: &p.limits, tasks: &p.tasks, get: get, requests: newInflight(),
		named: make(chan struct{}), dead: make(chan struct{}),
	}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	return w, nil
}

// open opens the stream and waits until the server named its endpoint. The reply
// beside an error is the HTTP answer that refused the stream.
func (w *sseWire) open(ctx context.Context) (reply, error) {
	stop := context.AfterFunc(ctx, w.cancel)
	resp, rep, err := w.dial(ctx)
	if !stop() && err == nil {
		err = ended(ctx)
		resp.Body.Close() //nolint:errcheck // nothing is wanted of it
	}
	if err != nil {
		return rep, err
	}
	body, err := decoded(resp)
	if err != nil {
		resp.Body.Close() //nolint:errcheck // nothing is wanted of it
		return rep, protocolError("ENCODING_UNSUPPORTED", "the server compressed its stream in a way that was not offered")
	}
	w.tasks.run(func() {
		defer resp.Body.Close() //nolint:errcheck // read as far as it goes
		w.read(resp.Request.URL, body)
	})
	patience := time.NewTimer(w.limits.Probe)
	defer patience.Stop()
	select {
	case <-w.named:
		return reply{}, nil
	case <-w.dead:
		return reply{}, w.cause
	case <-ctx.Done():
		return reply{}, ended(ctx)
	case <-patience.C:
		return reply{}, endpointMissing
	}
}

var endpointMissing = protocolError("ENDPOINT_MISSING", "the server opened its event stream without naming the endpoint for messages first")

// dial makes the GET that opens the stream. It follows redirects within the origin.
func (w *sseWire) dial(ctx context.Context) (*http.Response, reply, error) {
	u := w.get.endpoint.Load()
	for hop := 0; hop <= maxHops; hop++ {
		resp, err := w.get.openStream(w.ctx, u, "")
		if err != nil {
			if ctx.Err() != nil {
				return nil, reply{}, ended(ctx).Cause(err)
			}
			return nil, reply{}, egress.Fault(ctx, err)
		}
		if resp.StatusCode == http.StatusOK && mediaType(resp.Header) == "text/event-stream" {
			return resp, reply{}, nil
		}
		var next *url.URL
		rep, err := w.notAStream(resp, &next)
		resp.Body.Close() //nolint:errcheck // read as far as it was wanted
		if next == nil {
			return nil, rep, err
		}
		u = next
	}
	return nil, reply{}, failure(fault.Unavailable, fault.Server, "REDIRECT_LOOP", "the server redirects again and again")
}

// notAStream judges an answer to the GET that is no event stream.
func (w *sseWire) notAStream(resp *http.Response, next **url.URL) (reply, error) {
	unsupported := protocolError("TRANSPORT_UNSUPPORTED", "the URL does not speak HTTP+SSE; register it as http if it speaks Streamable HTTP").With("status", strconv.Itoa(resp.StatusCode))
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return reply{status: resp.StatusCode}, unsupported
	}
	body, err := decoded(resp)
	if err != nil {
		return reply{status: resp.StatusCode}, unsupported
	}
	hold := w.conn.pool.lease(w.conn.key.Tenant)
	defer hold.release()
	rep, _, err := w.get.refused(resp, body, &exchange{hold: hold}, next)
	if f, ok := fault.As(err); err == nil || ok && f.Reason == "SERVER_REFUSED" {
		err = unsupported.Cause(err)
	}
	rep.msg = message{}
	return rep, err
}

// openStream sends the GET that opens an event stream, after the event lastID
// where it is taken up again.
func (w *httpWire) openStream(ctx context.Context, u *url.URL, lastID string) (*http.Response, error) {
	r, err := w.request(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	r.Header["Accept"] = []string{"text/event-stream"}
	if lastID != "" {
		r.Header["Last-Event-Id"] = []string{lastID}
	}
	return w.rt.RoundTrip(r)
}

// oneWayTo returns a wire that only posts, to an endpoint of the same origin.
func (w *httpWire) oneWayTo(u *url.URL, version string) *httpWire {
	to := &httpWire{rt: w.rt, conn: w.conn, key: w.key, target: w.target, creds: w.creds, limits: w.limits, count: w.count, tasks: w.tasks,
		oneWay: true, named: u}
	to.endpoint.Store(u)
	to.agreed.Store(&agreement{version: version})
	return to
}

// endpoint takes in the address for messages that the server named. It must lie in
// the stream's own origin, scheme and port included, and never changes.
func (w *sseWire) endpoint(stream *url.URL, raw string) error {
	to, err := stream.Parse(strings.TrimSpace(raw))
	if err != nil || len(raw) > egress.MaxURL || to.User != nil {
		return protocolError("ENDPOINT_INVALID", "the server named an endpoint that is no proper URL")
	}
	to.Fragment = ""
	if egress.Origin(to) != egress.Origin(stream) {
		return protocolError("ENDPOINT_FOREIGN", "the server named an endpoint of another origin, where nothing is sent").With("origin", shorten(egress.Origin(to), 200))
	}
	to.Scheme, to.Host = stream.Scheme, stream.Host // the same, spelled as the egress client knows it
	if _, err := w.conn.pool.egress.CheckURL("endpoint", to.String()); err != nil {
		return protocolError("ENDPOINT_INVALID", "the server named an endpoint that is no proper URL").Cause(err)
	}
	if had := w.post.Load(); had == nil {
		w.post.Store(w.get.oneWayTo(to, ""))
		close(w.named)
	} else if had.named.String() != to.String() {
		return protocolError("ENDPOINT_CHANGED", "the server named another endpoint in the middle of its stream")
	}
	return nil
}

func (w *sseWire) speak(_, version string) {
	had := w.post.Load()
	next := had.oneWayTo(had.named, version)
	next.endpoint.Store(had.endpoint.Load()) // where a redirect led
	w.post.Store(next)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.batches = takesBatches(version)
}

// fail takes the connection out of use and then ends everything that waits, once.
func (w *sseWire) fail(cause error) {
	if !w.failed.CompareAndSwap(false, true) {
		return
	}
	w.mu.Lock()
	closing := w.closing
	w.mu.Unlock()
	if !closing {
		// First of all, so that who is woken below does not get it again.
		w.conn.pool.drop(w.conn, publicText(cause), true)
	}
	w.cause = cause
	close(w.dead)
	w.cancel()
}

// posted is what came of the POST of a request.
type posted struct {
	rep  reply
	err  error
	hold *lease
}

// sending is the POST of a request, which runs beside the wait for its answer. It
// lets the body out until that wait is over, so that nothing is sent, and
// beforeSend not called, once the exchange has returned.
type sending struct {
	done   chan posted
	left   chan struct{} // closed when nobody asks for done any more
	cancel context.CancelFunc

	mu           sync.Mutex
	before       func() error
	went, closed bool
}

// send begins the POST of a request.
func (w *sseWire) send(ctx context.Context, x *exchange) *sending {
	s := &sending{done: make(chan posted, 1), left: make(chan struct{}), before: x.beforeSend}
	ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	w.tasks.run(func() {
		defer s.cancel()
		own := *x
		own.hold, own.beforeSend = w.conn.pool.lease(w.conn.key.Tenant), s.pass
		own.patient = true // who waits cancels at the server
		rep, err := w.post.Load().exchange(ctx, &own)
		s.done <- posted{rep, err, own.hold}
		select {
		case <-s.left:
			s.forget()
		default:
		}
	})
	return s
}

func (s *sending) pass() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errAborted
	}
	if s.before != nil {
		if err := s.before(); err != nil {
			return err
		}
	}
	s.went = true
	return nil
}

// shut lets nothing out any more, and reports whether anything went before.
func (s *sending) shut() (went bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.went
}

// leave ends the interest in the POST. Whoever comes last lets its answer go.
func (s *sending) leave() {
	s.shut()
	close(s.left)
	s.forget()
}

func (s *sending) forget() {
	select {
	case p := <-s.done:
		p.hold.release()
	default:
	}
}

// exchange implements wire. The answer may come before the POST has ended.
func (w *sseWire) exchange(ctx context.Context, x *exchange) (reply, error) {
	wait := w.requests.enter(x.id)
	defer w.requests.leave(x.id, wait)
	s := w.send(ctx, x)
	defer s.leave()
	accepted := false
	for {
		select {
		case m := <-wait.answer:
			return w.answered(x, s, m, accepted)
		case p := <-s.done:
			x.hold.adopt(p.hold)
			if p.err != nil || p.rep.msg.err != nil {
				return w.refused(p)
			}
			accepted = true
		case <-ctx.Done():
			return w.unanswered(x, s, accepted, ended(ctx))
		case <-w.dead:
			select {
			case m := <-wait.answer:
				return w.answered(x, s, m, accepted)
			default:
				return w.unanswered(x, s, accepted, w.cause)
			}
		}
	}
}

// answered judges what came on the stream. An answer to what was not sent is none.
func (w *sseWire) answered(x *exchange, s *sending, m message, accepted bool) (reply, error) {
	if !s.shut() {
		s.cancel()
		m.hold.release()
		return reply{}, protocolError("ANSWER_UNASKED", "the server answered a request that it had not been sent")
	}
	time.AfterFunc(250*time.Millisecond, s.cancel) // time for the POST to end by itself
	if x.patient && !accepted {
		p := <-s.done // so that it is known where redirects led before a call
		p.hold.release()
	}
	return w.requests.judge(x, m)
}

// refused judges a POST that the server refused or that did not arrive.
func (w *sseWire) refused(p posted) (reply, error) {
	switch {
	case p.rep.status == http.StatusNotFound && p.rep.msg.err == nil:
		p.rep.renew = true
		return p.rep, failure(fault.Unavailable, fault.Protocol, "SESSION_LOST", "the server forgot the session; the request was not carried out").Cause(p.err)
	case p.rep.status == http.StatusBadRequest:
		// Servers say so with 400, too; a new connection costs little and helps.
		p.rep.renew = true
	}
	return p.rep, p.err
}

// unanswered ends the wait for an answer that will not come. When the POST still
// runs, it is stopped and says how far it came.
func (w *sseWire) unanswered(x *exchange, s *sending, accepted bool, err error) (reply, error) {
	s.cancel()
	rep := reply{phase: MaybeSent}
	if !accepted {
		p := <-s.done
		p.hold.release()
		switch {
		case p.rep.phase == Answered:
			return w.refused(p)
		case p.err != nil:
			rep.phase = p.rep.phase
		}
	}
	if rep.phase == MaybeSent && !x.patient && !w.failed.Load() {
		w.post.Load().cancelAtServer(x.id)
	}
	return rep, err
}

// notify implements wire.
func (w *sseWire) notify(ctx context.Context, body []byte) error {
	return w.post.Load().notify(ctx, body)
}

// watch implements wire. Changes come on the one stream there is, so that there is
// never another to watch.
func (w *sseWire) watch(context.Context, *watch) watchEnd { return watchEnd{refused: true} }

// close implements wire. The end of the stream is the end of the session; there is
// nothing to delete.
func (w *sseWire) close(context.Context) {
	w.mu.Lock()
	w.closing = true
	w.mu.Unlock()
	w.fail(failure(fault.Unavailable, fault.Host, "CONNECTION_CLOSED", "the connection to the server was closed"))
}
