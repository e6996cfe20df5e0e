package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// streaming are the methods that answer with a stream.
var streaming = map[string]bool{
	pb.EventService_StreamSessionEvents_FullMethodName: true,
	pb.EventService_StreamCallEvents_FullMethodName:    true,
}

// stream is the edge as an interceptor of streams: open ones, and those that
// answer one request. The chain of a request runs once its message is there.
func (e *edge) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
	if open[info.FullMethod] {
		defer e.recovered(ss.Context(), info.FullMethod, &err)
		return next(srv, &boundedStream{ServerStream: ss, left: maxOpenMessages})
	}
	if !streaming[info.FullMethod] {
		return e.unknownMethod(srv, ss)
	}
	md, _ := metadata.FromIncomingContext(ss.Context())
	rq := &request{transport: "grpc", id: requestID(md.Get(headerRequestID)), remote: peerAddr(ss.Context())}
	rq.identity, rq.denied = readIdentity(md.Get)
	rq.bare = isBare(md.Get)
	rq.trace = readTrace(md.Get)
	if err := ss.SetHeader(metadata.Pairs(headerRequestID, rq.id)); err != nil {
		e.log.WarnContext(ss.Context(), "request id not sent", "error", err)
	}
	return e.serveStream(rq, info.FullMethod, srv, ss, next)
}

// serveStream runs the chain for one stream, over gRPC or REST. It has no deadline
// of its own: its handler ends with its caller, its authority and the server.
func (e *edge) serveStream(rq *request, method string, srv any, ss grpc.ServerStream, next grpc.StreamHandler) (err error) {
	start := e.now()
	st := &admittedStream{ServerStream: ss, edge: e, rq: rq, method: method, ctx: context.WithValue(ss.Context(), requestKey{}, rq)}
	defer func() {
		if v := recover(); v != nil {
			e.panicked(st.ctx, method, v)
			err = fault.New(fault.Internal, "INTERNAL", "internal error")
		}
		err = e.finish(st.ctx, rq, method, st.principal, st.in, nil, err, e.now().Sub(start))
	}()
	return next(srv, st)
}

// admittedStream admits a stream's caller when the request has been read.
type admittedStream struct {
	grpc.ServerStream
	edge      *edge
	rq        *request
	method    string
	ctx       context.Context
	in        any
	principal tenant.Principal
}

// Context implements grpc.ServerStream.
func (s *admittedStream) Context() context.Context { return s.ctx }

// RecvMsg implements grpc.ServerStream.
func (s *admittedStream) RecvMsg(m any) error {
	if s.in != nil {
		return s.ServerStream.RecvMsg(m) // the end of what the caller sends
	}
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	s.in = m
	s.ctx = telemetry.With(s.ctx, telemetry.Scope{Request: s.rq.id, Session: sessionID(m), Call: callID(m, nil), Trace: s.rq.trace.ID()})
	limited, cancel := context.WithTimeout(s.ctx, defaultLimit)
	defer cancel()
	var err error
	if s.principal, err = s.edge.admit(limited, s.rq, rules[s.method], s.method, m); err != nil {
		return err
	}
	s.ctx = telemetry.With(context.WithValue(s.ctx, principalKey{}, s.principal), telemetry.Scope{Tenant: s.principal.Tenant.String()})
	return nil
}

// ticketed is a request that may bring a ticket in the place of a credential.
type ticketed interface{ GetTicket() string }

// isBare reports whether no header says who calls.
func isBare(values func(name string) []string) bool {
	for _, name := range []string{headerAuthorization, headerUser, headerGroups, headerProject} {
		if len(values(name)) > 0 {
			return false
		}
	}
	return true
}

// tickets turns a ticket into the principal that it was given to.
type tickets struct {
	events    Events
	authority Authority
}

func (t tickets) redeem(ctx context.Context, ticket string, rq *request) (tenant.Principal, error) {
	used, err := t.events.RedeemTicket(ctx, ticket)
	if err != nil {
		return tenant.Principal{}, err
	}
	rq.session, rq.identity.onBehalf = used.SessionID, used.Who
	return t.authority.Reauthorize(ctx, used.KeyID, used.Who)
}

// streamWriteLimit is how long one write of a stream may take; who takes longer is
// gone.
const streamWriteLimit = 10 * time.Second

// pacedWriter gives every write of a stream a time of its own, in the place of the
// server's time for a whole answer.
type pacedWriter struct {
	http.ResponseWriter
	rc    *http.ResponseController
	limit time.Duration
}

func newPacedWriter(w http.ResponseWriter, limit time.Duration) *pacedWriter {
	p := &pacedWriter{ResponseWriter: w, rc: http.NewResponseController(w), limit: limit}
	// Between two writes no time counts.
	p.rc.SetWriteDeadline(time.Time{}) //nolint:errcheck // a writer of a test has no deadline
	return p
}

// Unwrap serves http.ResponseController.
func (p *pacedWriter) Unwrap() http.ResponseWriter { return p.ResponseWriter }

// Write implements io.Writer.
func (p *pacedWriter) Write(b []byte) (int, error) {
	p.rc.SetWriteDeadline(time.Now().Add(p.limit)) //nolint:errcheck // see newPacedWriter
	return p.ResponseWriter.Write(b)
}

// Flush implements http.Flusher, which gRPC asks for.
func (p *pacedWriter) Flush() { p.flush() } //nolint:errcheck // the next write fails, too

func (p *pacedWriter) flush() error {
	p.rc.SetWriteDeadline(time.Now().Add(p.limit)) //nolint:errcheck // see newPacedWriter
	err := p.rc.Flush()
	if err == nil {
		p.rc.SetWriteDeadline(time.Time{}) //nolint:errcheck // see newPacedWriter
	}
	return err
}

var errNoStream = errors.New("api: a stream was sent what it does not take")

func unexpected(m any) error { return fmt.Errorf("%w: %T", errNoStream, m) }
