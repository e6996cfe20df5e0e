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

// exchange implements wire. The answer may come before the POST has ended, so the
// POST runs beside the wait for it.
func (w *sseWire) exchange(ctx context.Context, x *exchange) (reply, error) {
	wait := w.requests.enter(x.id)
	defer w.requests.leave(x.id, wait)
	done, left := make(chan posted), make(chan struct{})
	defer close(left)
	pctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	w.tasks.run(func() {
		defer cancel()
		own := *x
		own.hold, own.patient = w.conn.pool.lease(w.conn.key.Tenant), true // who waits cancels at the server
		rep, err := w.post.Load().exchange(pctx, &own)
		select {
		case done <- posted{rep, err, own.hold}:
		case <-left:
			own.hold.release()
		}
	})
	accepted := false
	for {
		select {
		case m := <-wait.answer:
			time.AfterFunc(250*time.Millisecond, cancel) // time for the POST to end by itself
			if x.patient && !accepted {
				p := <-done // so that it is known where redirects led before a call
				p.hold.release()
			}
			return w.requests.judge(x, m)
		case p := <-done:
			x.hold.adopt(p.hold)
			if p.err != nil || p.rep.msg.err != nil {
				return w.refused(p)
			}
			accepted, done = true, nil
		case <-ctx.Done():
			cancel()
			return w.unanswered(x, accepted, done, ended(ctx))
		case <-w.dead:
			select {
			case m := <-wait.answer:
				cancel()
				return w.requests.judge(x, m)
			default:
			}
			cancel()
			return w.unanswered(x, accepted, done, w.cause)
		}
	}
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
func (w *sseWire) unanswered(x *exchange, accepted bool, done <-chan posted, err error) (reply, error) {
	rep := reply{phase: MaybeSent}
	if !accepted {
		p := <-done
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
