package sessions

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"time"

	"github.com/mark3labs/mcp-go/mcp"
)

// watch is the wish to hear of changed lists.
type watch struct {
	// id and body are those of subscriptions/listen; unused in the legacy era.
	id   int64
	body []byte
	// uris are the resources whose changes are asked for, and granted those that the
	// server acknowledged, nil for all. granted is set before opened is called.
	uris    []string
	granted []string
	// opened is called when the stream is known to be open.
	opened func()
	// conn takes what is told on the stream.
	conn *conn
}

// watchEnd says how a stream of changes ended.
type watchEnd struct {
	// refused means that the server offers no such stream.
	refused bool
	// lived is how long the stream was open.
	lived time.Duration
	// retry is the pause that the server asked for.
	retry time.Duration
}

// listenParams writes the parameters of subscriptions/listen for the kinds of list
// whose changes the server announces, and for resources.
func listenParams(announced map[string]bool, uris []string) []byte {
	filter := map[string]any{}
	if len(uris) > 0 {
		filter["resourceSubscriptions"] = uris
	}
	for kind, name := range map[string]string{
		KindTool: "toolsListChanged", KindPrompt: "promptsListChanged", KindResourceTemplate: "resourcesListChanged",
	} {
		if announced[kind] {
			filter[name] = true
		}
	}
	b, err := json.Marshal(map[string]any{"notifications": filter})
	if err != nil {
		panic(err) // booleans and strings always encode
	}
	return b
}

// watch implements wire: subscriptions/listen in the modern era, the GET stream in
// the legacy one.
func (w *httpWire) watch(ctx context.Context, want *watch) (end watchEnd) {
	verb, body := http.MethodGet, (*sendBody)(nil)
	if w.now().modern {
		verb, body = http.MethodPost, &sendBody{data: want.body}
	}
	r, err := w.request(ctx, verb, w.endpoint.Load(), body)
	if err != nil {
		return end
	}
	if w.now().modern {
		r.Header[mcp.HeaderMethod] = []string{string(mcp.MethodSubscriptionsListen)}
	} else {
		r.Header["Accept"] = []string{"text/event-stream"}
		if w.lastEvent != "" {
			r.Header["Last-Event-Id"] = []string{w.lastEvent}
		}
	}
	resp, err := w.rt.RoundTrip(r)
	if err != nil {
		return end
	}
	defer resp.Body.Close() //nolint:errcheck // read as far as it goes
	end.retry = retryAfter(resp.Header.Get("Retry-After"), time.Now())
	stream, err := decoded(resp)
	if err != nil || resp.StatusCode != http.StatusOK || mediaType(resp.Header) != "text/event-stream" {
		// Sign-in, rate limits and failures pass; every other answer is the server's
		// way of saying that it has no such stream.
		code := resp.StatusCode
		end.refused = code < 500 && code != http.StatusUnauthorized && code != http.StatusForbidden && code != http.StatusTooManyRequests && code != http.StatusRequestTimeout
		io.CopyN(io.Discard, resp.Body, refusalBytes) //nolint:errcheck // read for the reuse of the connection
		switch {
		case code == http.StatusNotFound && w.watched && w.now().sessionID != "":
			w.lost.Store(true)
			w.conn.pool.drop(w.conn, "the server forgot the session", true)
		case w.lastEvent != "" && end.refused:
			// It may only not know the event any more; the gap is told anyway.
			w.lastEvent, end.refused = "", false
		}
		return end
	}
	began := time.Now()
	if !w.now().modern { // there is one watcher only, and no acknowledgement
		w.watched = true
		want.opened()
	}
	hint, refused := w.follow(ctx, stream, want)
	end.lived, end.refused = time.Since(began), refused
	end.retry = max(end.retry, min(hint, maxRetryAfter))
	return end
}

// follow reads a stream of changes to its end and returns the server's retry hint.
func (w *httpWire) follow(ctx context.Context, stream io.Reader, want *watch) (hint time.Duration, refused bool) {
	e := newEventReader(stream, streamLimits{event: envelopeSlack + maxAsk, lines: w.limits.EventLines, total: w.limits.NoiseBytes})
	e.lastID = w.lastEvent
	asked, room := rate{most: w.limits.ServerRequests}, make([]message, 0, 1)
	for {
		ev, err := e.next()
		if !w.now().modern {
			w.lastEvent = e.lastID
		}
		if err != nil {
			return e.retry, false
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
			return e.retry, false
		}
		for i := range all {
			if over, refused := w.heard(&all[i], want); over {
				return e.retry, refused
			}
		}
	}
}

// heard judges one message of a stream of changes and reports whether it ends the
// stream, and whether because the server refuses it.
func (w *httpWire) heard(m *message, want *watch) (over, refused bool) {
	modern := w.now().modern
	switch {
	case m.isRequest():
		w.serverAsks(*m, nil)
	case m.isResponse():
		if modern && m.answers(want.id) {
			return true, m.err != nil
		}
		w.count.stray.Add(1)
	case modern && !want.owns(m):
		w.count.stray.Add(1)
	case modern: // what belongs to a request comes on its own stream
		return want.note(m, nobody, true), false
	default:
		return want.note(m, nil, false), false
	}
	return false, false
}

// owns reports whether a message belongs to this stream, as far as it says.
func (want *watch) owns(m *message) bool {
	id := member(member(m.params, "_meta"), mcp.MetaKeySubscriptionID)
	if m.method == string(mcp.MethodNotificationCancelled) && id == nil {
		id = member(m.params, "requestId")
	}
	named := message{id: id}
	return id == nil || named.answers(want.id)
}

// note judges a notification on a stream of changes and reports whether it ends
// the stream.
func (want *watch) note(m *message, own *talk, modern bool) (over bool) {
	switch m.method {
	case string(mcp.MethodNotificationSubscriptionsAcknowledged):
		if filter := member(m.params, "notifications"); filter != nil && len(want.uris) > 0 {
			want.granted = acknowledged(member(filter, "resourceSubscriptions"))
		}
		want.opened()
		return false
	case string(mcp.MethodNotificationCancelled):
		named := message{id: member(m.params, "requestId")}
		if modern {
			return named.answers(want.id)
		}
	}
	want.conn.noticed(m, own, modern)
	return false
}

// acknowledged reads the resources that a server granted.
func acknowledged(raw []byte) []string {
	s := scanner{data: raw}
	out := []string{}
	err := s.array(0, func() error {
		v, err := s.raw(1)
		if uri, ok := text(v); ok && len(out) < maxSubscriptions {
			out = append(out, uri)
		}
		return err
	})
	if err != nil {
		return []string{}
	}
	return out
}

// oneChannel reports whether the server announces changes where everything else
// comes: legacy servers do, on the pipe of stdio and on the stream of HTTP+SSE.
func (c *conn) oneChannel() bool {
	return c.era == EraLegacy && c.target.Transport != TransportHTTP
}
