package sessions

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// httpWire speaks Streamable HTTP with one server for one key. It holds no
// connection of its own; those belong to the egress client.
type httpWire struct {
	rt       http.RoundTripper
	endpoint atomic.Pointer[url.URL]
	conn     *conn
	key      Key
	target   Target
	creds    Credentials
	limits   *Limits
	count    *counters
	tasks    *tasks
	// oneWay is set where answers do not come in the response to a POST.
	oneWay bool
	named  *url.URL // the endpoint as a server of HTTP+SSE named it

	// agreed is what was negotiated so far. A server may ask while that goes on, and
	// answers to it are on their way meanwhile.
	agreed atomic.Pointer[agreement]

	lost atomic.Bool // the server forgot the session

	// The only watcher's own, in the legacy era: the last event of its stream, and
	// whether one was open.
	lastEvent string
	watched   bool
}

func newHTTPWire(p *Pool, c *conn) (*httpWire, error) {
	t := c.target
	u, err := p.egress.CheckURL(strings.ToLower(t.Transport)+".url", t.URL)
	if err != nil {
		return nil, err
	}
	if t.Origin != "" && egress.Origin(u) != strings.TrimSuffix(t.Origin, "/") {
		return nil, failure(fault.Precondition, fault.Host, "ORIGIN_MISMATCH", "the server's URL is not of the origin in its contract")
	}
	w := &httpWire{rt: p.egress.Pin(u).Transport, conn: c, key: c.key, target: t, creds: p.creds, limits: &p.limits, count: &c.count, tasks: &p.tasks}
	w.endpoint.Store(u)
	return w, nil
}

// agreement is what the wire was told of the negotiation.
type agreement struct {
	modern             bool
	version, sessionID string
}

func (w *httpWire) speak(era, version string) {
	w.agreed.Store(&agreement{era == EraModern, version, w.now().sessionID})
}

// enter tells the wire which session the server opened.
func (w *httpWire) enter(sessionID string) {
	is := w.now()
	is.sessionID = sessionID
	w.agreed.Store(&is)
}

func (w *httpWire) now() agreement {
	if is := w.agreed.Load(); is != nil {
		return *is
	}
	return agreement{}
}

// request builds a request to the endpoint with the headers of the negotiated
// version and the user's credentials.
func (w *httpWire) request(ctx context.Context, verb string, u *url.URL, body *sendBody) (*http.Request, error) {
	h := make(http.Header, 12)
	h["User-Agent"] = []string{"bulkhead"}
	if verb == http.MethodPost {
		h["Content-Type"] = []string{"application/json"}
		h["Accept"] = []string{"application/json, text/event-stream"}
	}
	is := w.now()
	if is.version != "" {
		h[mcp.HeaderProtocolVersion] = []string{is.version}
	}
	if is.sessionID != "" {
		h[mcp.HeaderSessionID] = []string{is.sessionID}
	}
	r := (&http.Request{Method: verb, URL: u, Host: u.Host, Header: h, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1}).WithContext(ctx)
	if body != nil {
		r.Body, r.ContentLength = body, int64(len(body.data))
	}
	if w.creds != nil {
		if err := w.creds.Authorize(ctx, w.key, w.target, h); err != nil {
			if _, ok := fault.As(err); ok {
				return nil, err
			}
			return nil, fault.New(fault.Internal, "CREDENTIALS_FAILED", "the user's credentials could not be used").Cause(err)
		}
	}
	return r, nil
}

// exchange implements wire. It follows redirects within the origin that keep
// method and body, but never those of a call: nothing here sends a call twice,
// whatever the server made of the first. It tries again when the connection turned out to be dead
// before a byte of the message went out.
func (w *httpWire) exchange(ctx context.Context, x *exchange) (reply, error) {
	u := w.endpoint.Load()
	for hop, dead := 0, 0; ; {
		var next *url.URL
		rep, err := w.once(ctx, x, u, &next)
		switch {
		case next != nil && x.method == string(mcp.MethodToolsCall):
			return rep, failure(fault.Unavailable, fault.Server, "REDIRECTED", "the server redirects the call, which is not sent again; register the final URL and check its trailing slash").
				With("status", strconv.Itoa(rep.status)).With("path", shorten(next.EscapedPath(), 200))
		case next != nil && hop < maxHops:
			hop++
			u = next
		case next != nil:
			return rep, failure(fault.Unavailable, fault.Server, "REDIRECT_LOOP", "the server redirects again and again")
		case errors.Is(err, errStale) && dead < 2 && ctx.Err() == nil:
			dead++
		default:
			if err == nil && hop > 0 {
				w.endpoint.Store(u)
			}
			var own *sendRefused
			if errors.As(err, &own) {
				return rep, own.err
			}
			if err != nil {
				err = egress.Fault(ctx, err)
			}
			if err != nil && rep.phase == MaybeSent && ctx.Err() != nil && !w.now().modern && !x.patient {
				w.cancelAtServer(x.id)
			}
			return rep, err
		}
	}
}

// sendRefused carries the error of BeforeSend through unchanged.
type sendRefused struct{ err error }

func (e *sendRefused) Error() string { return "sessions: not sent: " + e.err.Error() }

// errStale marks a failure of a connection before anything was sent on it.
var errStale = errors.New("sessions: connection was closed before the request")

// once makes one HTTP request and reads its answer. For a redirect that may be
// followed it sets next.
func (w *httpWire) once(ctx context.Context, x *exchange, u *url.URL, next **url.URL) (reply, error) {
	// The answer may be read to its end in the background, to reuse the connection,
	// after the caller's context ended; so the request has one of its own.
	rctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	body := &sendBody{data: x.body, before: x.beforeSend}
	r, err := w.request(rctx, http.MethodPost, u, body)
	if err != nil {
		stop()
		cancel()
		return reply{}, err
	}
	for k, v := range x.headers {
		r.Header.Set(k, v)
	}
	resp, err := w.rt.RoundTrip(r)
	if err != nil {
		stop()
		cancel()
		return w.unanswered(ctx, body, err)
	}
	rep, drain, err := w.answer(ctx, resp, x, next)
	if rep.phase == NotSent {
		rep.phase = body.phase()
	}
	stop()
	if drain == nil {
		resp.Body.Close() //nolint:errcheck // nothing more is wanted of it
		cancel()
		return rep, err
	}
	w.tasks.run(func() {
		timer := time.AfterFunc(250*time.Millisecond, cancel)
		io.CopyN(io.Discard, drain, 16<<10) //nolint:errcheck // only the connection's reuse depends on it
		timer.Stop()
		resp.Body.Close() //nolint:errcheck // nothing more is wanted of it
		cancel()
	})
	return rep, err
}

// unanswered judges an error of the round trip.
func (w *httpWire) unanswered(ctx context.Context, body *sendBody, err error) (reply, error) {
	unsent, refusal := body.abort()
	switch {
	case refusal != nil:
		return reply{}, &sendRefused{refusal}
	case ctx.Err() != nil:
		err = ended(ctx).Cause(err)
	}
	var op *net.OpError
	if errors.As(err, &op) && (op.Op == "write" || op.Op == "readfrom") && ctx.Err() == nil {
		// The kernel did not take the whole message, and no proper part of a JSON
		// object is a JSON object.
		unsent = true
	}
	if !unsent {
		return reply{phase: MaybeSent}, err
	}
	if ctx.Err() == nil && !(op != nil && op.Op == "dial") {
		err = errors.Join(errStale, err)
	}
	return reply{}, err
}

// answer reads a response. What is left of it to read comes back as drain.
func (w *httpWire) answer(ctx context.Context, resp *http.Response, x *exchange, next **url.URL) (rep reply, drain io.Reader, err error) {
	rep = reply{status: resp.StatusCode, phase: MaybeSent}
	body, err := decoded(resp)
	if err != nil {
		return rep, nil, protocolError("ENCODING_UNSUPPORTED", "the server compressed its answer in a way that was not offered")
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return w.refused(resp, body, x, next)
	}
	if w.oneWay {
		return rep, body, nil
	}
	if id := resp.Header.Get(mcp.HeaderSessionID); id != "" && x.method == string(mcp.MethodInitialize) {
		if !visible(id) {
			return rep, nil, protocolError("SESSION_ID_INVALID", "the server assigned a session id that is too long or not visible ASCII")
		}
		rep.sessionID = id
	}
	switch mediaType(resp.Header) {
	case "text/event-stream":
		drain, err = w.stream(ctx, body, x, &rep)
		return rep, drain, err
	case "application/json", "":
		data, err := readAll(body, x.limit+envelopeSlack, resp.ContentLength, x.hold)
		if err != nil {
			return rep, nil, broken(ctx, err)
		}
		return rep, nil, w.single(data, x, &rep)
	}
	return rep, nil, protocolError("CONTENT_TYPE_UNSUPPORTED", "the server's answer is neither JSON nor an event stream")
}

func visible(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < 0x21 || s[i] > 0x7e {
			return false
		}
	}
	return len(s) <= maxSessionID
}

// broken turns an error of reading a body into a fault.
func broken(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, errBudget):
		return overBudget
	case errors.Is(err, errTooLarge), errors.Is(err, errEventTooLarge), errors.Is(err, errStreamTooLarge):
		return tooLarge.Cause(err)
	case errors.Is(err, errQuestions):
		return tooManyQuestions
	case ctx.Err() != nil:
		return ended(ctx).Cause(err)
	}
	return failure(fault.Unavailable, fault.Transport, "ANSWER_BROKEN", "the connection broke before the answer was complete").Cause(err)
}

// single takes the answer out of a JSON body.
func (w *httpWire) single(data []byte, x *exchange, rep *reply) error {
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		return protocolError("NO_ANSWER", "the server accepted the request without answering it")
	}
	all, err := parseMessages(nil, data, takesBatches(w.now().version))
	if err != nil {
		w.count.garbage.Add(1)
		return protocolError("ANSWER_INVALID", "the server's answer is not valid JSON-RPC").Cause(err)
	}
	if !w.takeAll(all, x, rep) {
		return protocolError("NO_ANSWER", "the server's answer belongs to another request")
	}
	return w.checkSize(x, rep)
}

// takeAll judges the messages that came together and reports whether the answer is
// among them.
func (w *httpWire) takeAll(all []message, x *exchange, rep *reply) (answered bool) {
	for i := range all {
		if m := &all[i]; m.isRequest() {
			w.serverAsks(*m, x.besides())
		} else if !answered {
			answered = w.take(m, x, rep)
		} else if m.isResponse() {
			w.count.stray.Add(1)
		} else {
			w.take(m, x, rep)
		}
	}
	return answered
}

// checkSize judges the message that was taken as the answer.
func (w *httpWire) checkSize(x *exchange, rep *reply) error {
	if !rep.msg.isResponse() {
		rep.phase = MaybeSent
		return emptyAnswer
	}
	if int64(len(rep.msg.result)) > x.limit {
		rep.msg, rep.phase = message{}, MaybeSent
		return tooLarge
	}
	return nil
}

// take judges one message of the exchange's own HTTP response and reports whether
// it is the answer. An error without an id can only mean this request.
func (w *httpWire) take(m *message, x *exchange, rep *reply) bool {
	switch {
	case m.isResponse() && (m.answers(x.id) || m.err != nil && m.hasNullID()):
		rep.msg, rep.phase = *m, Answered
		return true
	case m.method == "" && m.id != nil && m.answers(x.id):
		rep.msg = *m
		return true
	case m.method != "" && m.id == nil:
		w.conn.noticed(m, x.besides(), w.now().modern)
	default:
		w.count.stray.Add(1)
	}
	return false
}

// serverAsks serves a request of a legacy server, on the stream of own or on that
// which all share. A modern server must not ask; what it asks is counted and left
// alone.
func (w *httpWire) serverAsks(m message, own *talk) {
	if w.now().modern {
		w.count.stray.Add(1)
		return
	}
	w.conn.asked(w, &m, own)
}

// notify implements wire. Whatever a 2xx answer holds is ignored.
func (w *httpWire) notify(ctx context.Context, body []byte) error {
	r, err := w.request(ctx, http.MethodPost, w.endpoint.Load(), &sendBody{data: body})
	if err != nil {
		return err
	}
	resp, err := w.rt.RoundTrip(r)
	if err != nil {
		return egress.Fault(ctx, err)
	}
	io.CopyN(io.Discard, resp.Body, refusalBytes) //nolint:errcheck // read for the reuse of the connection
	resp.Body.Close()                             //nolint:errcheck // nothing more is wanted of it
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return failure(fault.Unavailable, fault.Server, "NOTIFICATION_REFUSED", "the server refused a notification with status "+strconv.Itoa(resp.StatusCode))
	}
	return nil
}

// cancelAtServer tells a legacy server that nobody waits; for it, closing the
// stream is not a cancellation.
func (w *httpWire) cancelAtServer(id int64) {
	w.tasks.run(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		w.notify(ctx, encodeCancel(id)) //nolint:errcheck // a courtesy
	})
}

// close implements wire: a legacy session is deleted at the server, with the
// user's credentials.
func (w *httpWire) close(ctx context.Context) {
	if w.now().sessionID == "" || w.lost.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r, err := w.request(ctx, http.MethodDelete, w.endpoint.Load(), nil)
	if err != nil {
		return
	}
	resp, err := w.rt.RoundTrip(r)
	if err != nil {
		return
	}
	io.CopyN(io.Discard, resp.Body, refusalBytes) //nolint:errcheck // 405 is a valid answer too
	resp.Body.Close()                             //nolint:errcheck // nothing more is wanted of it
}
