package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/bulkhead-mcp/bulkhead/internal/events"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// streamPath reports which stream a request is for. Whatever is wrong with the id
// is found by the chain.
func streamPath(r *http.Request) (method, id string, ok bool) {
	parts := strings.Split(r.URL.EscapedPath(), "/")
	if r.Method != http.MethodGet || len(parts) != 5 || parts[4] != "events" {
		return "", "", false
	}
	switch parts[2] {
	case "sessions":
		return pb.EventService_StreamSessionEvents_FullMethodName, parts[3], true
	case "calls":
		return pb.EventService_StreamCallEvents_FullMethodName, parts[3], true
	}
	return "", "", false
}

// headerLastEvent is what a browser sends when it connects again.
const headerLastEvent = "Last-Event-ID"

// serveStream serves events over REST: the same handler, behind the same chain, as
// over gRPC, with a stream that writes server-sent events.
func (h *rest) serveStream(w http.ResponseWriter, r, inner *http.Request, rq *request, method, id string) {
	rq.http, rq.checked = nil, true
	rq.bare = isBare(r.Header.Values)
	in, err := streamRequest(method, id, r.URL.Query(), r.Header.Values(headerLastEvent))
	if err != nil {
		h.edge.refused(inner.Context(), w, inner, err)
		return
	}
	local := h.streams[method]
	ss := &sseStream{ctx: inner.Context(), in: in, w: newPacedWriter(w, streamWriteLimit)}
	err = h.edge.serveStream(rq, method, local.service, ss, local.handler)
	var a *answer
	switch {
	case err == nil:
	case !errors.As(err, &a):
		a = answerFor(err)
		fallthrough
	case !ss.begun:
		writeError(w, a)
	default:
		ss.fail(a)
	}
}

// streamRequest makes the request's message of path, query and header.
func streamRequest(method, id string, query url.Values, last []string) (proto.Message, error) {
	session, call := &pb.StreamSessionEventsRequest{SessionId: id}, &pb.StreamCallEventsRequest{CallId: id}
	var m proto.Message = session
	after := &session.After
	if method == pb.EventService_StreamCallEvents_FullMethodName {
		m, after = call, &call.After
	}
	if err := (queryParser{}).Parse(m, query, nil); err != nil {
		var bad *pathError
		if errors.As(err, &bad) {
			return nil, bad.fault()
		}
		return nil, err
	}
	if len(last) > 1 {
		return nil, fault.Field1(headerLastEvent, "must appear once")
	}
	if len(last) == 1 && last[0] != "" {
		n, err := strconv.ParseInt(last[0], 10, 64)
		if err != nil || n < 0 || strconv.FormatInt(n, 10) != last[0] {
			return nil, fault.Field1(headerLastEvent, "must be the id of an event of this session")
		}
		*after = &n
	}
	return m, nil
}

// sseStream is a gRPC stream of one request and many events, written as
// server-sent events.
type sseStream struct {
	ctx   context.Context
	in    proto.Message
	taken bool
	w     *pacedWriter
	begun bool
}

var _ grpc.ServerStream = (*sseStream)(nil)

// SetHeader implements grpc.ServerStream; the gateway's answers have no metadata.
func (s *sseStream) SetHeader(metadata.MD) error { return nil }

// SendHeader implements grpc.ServerStream.
func (s *sseStream) SendHeader(metadata.MD) error { return nil }

// SetTrailer implements grpc.ServerStream.
func (s *sseStream) SetTrailer(metadata.MD) {}

// Context implements grpc.ServerStream.
func (s *sseStream) Context() context.Context { return s.ctx }

// RecvMsg implements grpc.ServerStream: it gives the one request.
func (s *sseStream) RecvMsg(m any) error {
	if s.taken {
		return io.EOF
	}
	s.taken = true
	to, ok := m.(proto.Message)
	if !ok {
		return unexpected(m)
	}
	proto.Merge(to, s.in)
	return nil
}

// SendMsg implements grpc.ServerStream. A heartbeat is a comment.
func (s *sseStream) SendMsg(m any) error {
	e, ok := m.(*pb.Event)
	if !ok {
		return unexpected(m)
	}
	if !s.begun {
		s.begun = true
		h := s.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("X-Accel-Buffering", "no")
		s.w.WriteHeader(http.StatusOK)
	}
	if e.GetKind() == string(events.Heartbeat) {
		return s.write([]byte(": heartbeat\n\n"))
	}
	return s.write(frame(e.GetEventId(), e.GetKind(), marshal(e)))
}

// fail tells why a stream that has begun ends.
func (s *sseStream) fail(a *answer) {
	name := "error"
	if a.reason == "READER_TOO_SLOW" {
		name = "dropped"
	}
	s.write(frame("", name, marshal(a.st.Proto()))) //nolint:errcheck // the caller went away; nothing is left to do
}

func (s *sseStream) write(b []byte) error {
	if _, err := s.w.Write(b); err != nil {
		return gone(err)
	}
	return gone(s.w.flush())
}

// gone says of a failed write that the caller went away.
func gone(err error) error {
	if err == nil {
		return nil
	}
	return fault.Wrap(context.Canceled, "write to the caller: "+err.Error())
}

// frame is one server-sent event. Our JSON has no line breaks.
func frame(id, name string, data []byte) []byte {
	b := make([]byte, 0, len(data)+64)
	if id != "" {
		b = append(append(append(b, "id: "...), id...), '\n')
	}
	b = append(append(append(b, "event: "...), name...), "\ndata: "...)
	return append(append(b, data...), "\n\n"...)
}
