package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"runtime/debug"
	"strings"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Authenticator verifies a credential and what its holder says about the user
// it acts for. remote is the address of the peer.
type Authenticator interface {
	Authenticate(ctx context.Context, credential string, who tenant.OnBehalf, remote netip.Addr) (tenant.Principal, error)
}

// Limiter decides whether a caller may make one more request now; it refuses
// with fault.Exhausted and the time to wait.
type Limiter interface {
	Allow(ctx context.Context, p tenant.Principal, method string) error
}

// Metrics counts finished requests; *telemetry.Metrics is one. Method is the full
// gRPC method, "" for requests that reached none.
type Metrics interface {
	Request(method, code string, took time.Duration)
}

// request is one request on its way through the edge, over REST or gRPC.
type request struct {
	id        string
	transport string // rest or grpc
	identity  identity
	denied    error // why identity could not be read
	// bare says that no header tells who calls; session is then the one that a
	// ticket is for.
	bare    bool
	session string
	remote  netip.Addr
	trace   telemetry.Trace
	// checked tells that the message came through decodeBody, whose rules for
	// texts are then not applied again.
	checked bool
	// http is the request as the gateway sees it; nil over gRPC.
	http *http.Request
	// Set when the chain ran.
	reply   proto.Message
	encoded encoded
}

type requestKey struct{}
type principalKey struct{}

// edge is the chain that every request runs through, whatever the transport:
// recover, deadline, authenticate, permit, limit, validate, log.
type edge struct {
	auth      Authenticator
	tickets   tickets
	limiter   Limiter // may be nil
	metrics   Metrics // may be nil
	log       *slog.Logger
	validator protovalidate.Validator
	now       func() time.Time
}

// caller returns the verified principal. Services only run behind the edge.
func caller(ctx context.Context) tenant.Principal {
	p, ok := ctx.Value(principalKey{}).(tenant.Principal)
	if !ok {
		panic("api: a service was called without the edge")
	}
	return p
}

// traceOf returns the caller's place in a distributed trace.
func traceOf(ctx context.Context) telemetry.Trace {
	if rq, ok := ctx.Value(requestKey{}).(*request); ok {
		return rq.trace
	}
	return telemetry.Trace{}
}

// serve runs the chain for one request and returns an *answer on failure.
func (e *edge) serve(ctx context.Context, rq *request, method string, in any, next grpc.UnaryHandler) (out any, err error) {
	start := e.now()
	r := rules[method]
	ctx = telemetry.With(context.WithValue(ctx, requestKey{}, rq), telemetry.Scope{Request: rq.id, Session: sessionID(in), Call: callID(in, nil), Trace: rq.trace.ID()})
	ctx, cancel := context.WithTimeout(ctx, r.deadline())
	defer cancel()
	var p tenant.Principal
	defer func() {
		if v := recover(); v != nil {
			e.log.ErrorContext(ctx, "panic", "method", method, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			out, err = nil, fault.New(fault.Internal, "INTERNAL", "internal error")
		}
		err = e.finish(ctx, rq, method, p, in, out, err, e.now().Sub(start))
		if err != nil {
			out = nil
		}
	}()
	if p, err = e.admit(ctx, rq, r, method, in); err != nil {
		return nil, err
	}
	ctx = telemetry.With(ctx, telemetry.Scope{Tenant: p.Tenant.String()})
	return next(context.WithValue(ctx, principalKey{}, p), in)
}

// admit authenticates, permits, limits and validates, in this order, so that
// nobody learns from a validation error what only others may call.
func (e *edge) admit(ctx context.Context, rq *request, r rule, method string, in any) (tenant.Principal, error) {
	p, err := e.identify(ctx, rq, in)
	if err != nil {
		return tenant.Principal{}, err
	}
	if err := r.permit(p); err != nil {
		return p, err
	}
	if e.limiter != nil {
		if err := e.limiter.Allow(ctx, p, method); err != nil {
			return p, err
		}
	}
	m, ok := in.(proto.Message)
	if !ok {
		return p, fmt.Errorf("api: request of type %T", in)
	}
	if err := rq.unreadQuery(m); err != nil {
		return p, err
	}
	return p, e.validate(m, rq.checked)
}

// identify verifies the credential, or the ticket that stands for one.
func (e *edge) identify(ctx context.Context, rq *request, in any) (tenant.Principal, error) {
	if t, ok := in.(ticketed); ok && t.GetTicket() != "" {
		if !rq.bare {
			return tenant.Principal{}, fault.Field1("ticket", "goes without a credential and without headers about a user")
		}
		return e.tickets.redeem(ctx, t.GetTicket(), rq)
	}
	if rq.denied != nil {
		return tenant.Principal{}, rq.denied
	}
	return e.auth.Authenticate(ctx, rq.identity.credential, rq.identity.onBehalf, rq.remote)
}

// unreadQuery refuses a query where the path holds all that the method takes:
// the gateway then does not look at it.
func (rq *request) unreadQuery(in proto.Message) error {
	if rq.http == nil || rq.http.URL.RawQuery == "" {
		return nil
	}
	if p := planOf(in.ProtoReflect().Descriptor()); len(p.fromPath) < len(p.fields) {
		return nil
	}
	name, _, _ := strings.Cut(rq.http.URL.RawQuery, "=")
	return fault.Field1("query", "this method takes no parameters in the query, but it has %.64q", name)
}

// validate applies the rules of the .proto files.
func (e *edge) validate(m proto.Message, checked bool) error {
	if !checked {
		if err := checkText(m.ProtoReflect(), planOf(m.ProtoReflect().Descriptor())); err != nil {
			return err.fault()
		}
	}
	err := e.validator.Validate(m)
	if err == nil {
		return nil
	}
	var bad *protovalidate.ValidationError
	if !errors.As(err, &bad) {
		return fault.Wrap(err, "validate request")
	}
	fields := make([]fault.Field, 0, len(bad.Violations))
	for _, v := range bad.Violations {
		fields = append(fields, fault.Field{Path: violationPath(v), Rule: violationRule(v)})
	}
	return fault.InvalidFields(fields...)
}

// finish turns the error into what the caller sees, and writes the one log
// line and the metrics of the request.
func (e *edge) finish(ctx context.Context, rq *request, method string, p tenant.Principal, in, out any, err error, d time.Duration) error {
	code, level := codes.OK, slog.LevelInfo
	var a *answer
	if err != nil {
		a = answerFor(err)
		code = a.st.Code()
		if code == codes.Internal {
			level = slog.LevelError
		}
	}
	if e.metrics != nil {
		e.metrics.Request(method, code.String(), d)
	}
	if e.log.Enabled(ctx, level) {
		ctx = telemetry.With(ctx, telemetry.Scope{Request: rq.id, Tenant: p.Tenant.String(), Call: callID(in, out)})
		attrs := make([]slog.Attr, 0, 8)
		attrs = append(attrs,
			slog.String("transport", rq.transport), slog.String("method", method), slog.String("code", code.String()),
			slog.Duration("took", d), slog.String("key_id", p.KeyID), slog.String("remote", rq.remote.String()))
		if err != nil {
			attrs = append(attrs, slog.String("reason", a.reason), slog.String("error", detail(err)))
		}
		e.log.LogAttrs(ctx, level, "request", attrs...)
	}
	if a == nil {
		return nil
	}
	return a
}

func sessionID(in any) string {
	if m, ok := in.(interface{ GetSessionId() string }); ok {
		return m.GetSessionId()
	}
	return ""
}

// callID is the call that a request is about or that it made.
func callID(in, out any) string {
	for _, m := range []any{in, out} {
		if c, ok := m.(interface{ GetCallId() string }); ok && c.GetCallId() != "" {
			return c.GetCallId()
		}
	}
	return ""
}

// unary is the edge as an interceptor of the gRPC server.
func (e *edge) unary(ctx context.Context, in any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if open[info.FullMethod] {
		return e.openUnary(ctx, in, info, next)
	}
	md, _ := metadata.FromIncomingContext(ctx)
	rq := &request{transport: "grpc", id: requestID(md.Get(headerRequestID)), remote: peerAddr(ctx)}
	rq.identity, rq.denied = readIdentity(md.Get)
	rq.trace = readTrace(md.Get)
	if err := grpc.SetHeader(ctx, metadata.Pairs(headerRequestID, rq.id)); err != nil {
		e.log.WarnContext(ctx, "request id not sent", "error", err)
	}
	return e.serve(ctx, rq, info.FullMethod, in, next)
}

// unknownMethod answers gRPC methods that do not exist in our error shape.
func (e *edge) unknownMethod(any, grpc.ServerStream) error {
	return answerFor(fault.New(fault.Unimplemented, "METHOD_NOT_FOUND", "no such method"))
}

func peerAddr(ctx context.Context) netip.Addr {
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		return parseAddr(p.Addr.String())
	}
	return netip.Addr{}
}

func parseAddr(s string) netip.Addr {
	ap, err := netip.ParseAddrPort(s)
	if err != nil {
		return netip.Addr{}
	}
	return ap.Addr().Unmap()
}

// violationPath is the path of a violation as the caller writes it.
func violationPath(v *protovalidate.Violation) string {
	path := ""
	for _, el := range v.Proto.GetField().GetElements() {
		if path != "" {
			path += "."
		}
		path += jsonName(el.GetFieldName())
		if el.HasIndex() {
			path += fmt.Sprintf("[%d]", el.GetIndex())
		}
	}
	if path == "" {
		return "body"
	}
	return path
}

// violationRule is the rule of a violation in words. The library's own text
// names enum values by number.
func violationRule(v *protovalidate.Violation) string {
	if v.FieldDescriptor == nil || v.FieldDescriptor.Enum() == nil || v.RuleDescriptor == nil {
		return v.Proto.GetMessage()
	}
	named := func(protoreflect.EnumNumber) bool { return true }
	switch v.RuleDescriptor.Name() {
	case "in":
		named = func(n protoreflect.EnumNumber) bool { return lists(v.RuleValue, n) }
	case "not_in":
		named = func(n protoreflect.EnumNumber) bool { return !lists(v.RuleValue, n) }
	case "const":
		named = func(n protoreflect.EnumNumber) bool { return v.RuleValue.Int() == int64(n) }
	}
	var names []string
	for i := range v.FieldDescriptor.Enum().Values().Len() {
		if ev := v.FieldDescriptor.Enum().Values().Get(i); ev.Number() != 0 && named(ev.Number()) {
			names = append(names, string(ev.Name()))
		}
	}
	return "must be one of " + strings.Join(names, ", ")
}

// lists reports whether a rule's list of numbers holds n.
func lists(rule protoreflect.Value, n protoreflect.EnumNumber) bool {
	l := rule.List()
	for i := range l.Len() {
		if l.Get(i).Int() == int64(n) {
			return true
		}
	}
	return false
}

// jsonName is the lowerCamelCase name that protoc gives a field.
func jsonName(s string) string {
	out := make([]byte, 0, len(s))
	up := false
	for i := range len(s) {
		c := s[i]
		switch {
		case c == '_':
			up = true
			continue
		case up && c >= 'a' && c <= 'z':
			c -= 'a' - 'A'
		}
		up = false
		out = append(out, c)
	}
	return string(out)
}
