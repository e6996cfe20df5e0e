package api

import (
	"context"
	"errors"
	"fmt"
	"math"
	"mime"
	"net/http"
	"net/url"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/grpc-ecosystem/grpc-gateway/v2/utilities"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// parseQueries makes the gateway read queries our way. It is one setting for the
// process in grpc-gateway.
var parseQueries = sync.OnceFunc(func() { runtime.NewServeMux(runtime.SetQueryParameterParser(queryParser{})) })

// newGateway returns grpc-gateway's mux without its conveniences: no method
// override, no header that becomes metadata, no form that becomes a query.
func newGateway(e *edge) *runtime.ServeMux {
	parseQueries()
	nothing := func(string) (string, bool) { return "", false }
	return runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, codec{}),
		runtime.WithIncomingHeaderMatcher(nothing),
		runtime.WithOutgoingHeaderMatcher(nothing),
		runtime.WithOutgoingTrailerMatcher(nothing),
		runtime.WithDisableHTTPMethodOverride(),
		runtime.WithDisablePathLengthFallback(),
		// An encoded slash stays encoded, so that it never becomes a separator.
		runtime.WithUnescapingMode(runtime.UnescapingModeAllExceptSlash),
		runtime.WithWriteContentLength(),
		runtime.WithForwardResponseRewriter(rewrite),
		runtime.WithErrorHandler(e.restError),
		runtime.WithRoutingErrorHandler(e.routingError),
	)
}

// rewrite puts the reply that the channel left in the request in the place of
// the empty one that the gateway holds.
func rewrite(ctx context.Context, m proto.Message) (any, error) {
	rq, ok := ctx.Value(requestKey{}).(*request)
	switch {
	case !ok:
		return m, nil
	case rq.encoded != nil:
		return rq.encoded, nil
	case rq.reply != nil:
		return rq.reply, nil
	}
	return m, nil
}

// rest serves /v1/…: what HTTP alone can say is checked here, the rest in the
// chain that gRPC runs too.
type rest struct {
	mux     http.Handler
	edge    *edge
	limit   int
	streams map[string]localStream
}

// ServeHTTP implements http.Handler.
func (h *rest) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rq := &request{transport: "rest", id: requestID(r.Header.Values(headerRequestID)), remote: parseAddr(r.RemoteAddr), checked: true}
	rq.identity, rq.denied = readIdentity(r.Header.Values)
	rq.trace = readTrace(r.Header.Values)
	w.Header().Set(headerRequestID, rq.id)
	ctx := context.WithValue(r.Context(), requestKey{}, rq)
	inner := r.WithContext(ctx)
	// The gateway gets no header at all but the one it needs; identity is in rq.
	inner.Header = http.Header{"Content-Type": r.Header["Content-Type"]}
	rq.http = inner
	defer func() {
		if v := recover(); v != nil {
			h.edge.log.ErrorContext(ctx, "panic", "path", r.URL.Path, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			h.edge.refused(ctx, w, inner, fault.New(fault.Internal, "INTERNAL", "internal error"))
		}
	}()
	if method, id, ok := streamPath(r); ok {
		h.serveStream(w, r, inner, rq, method, id)
		return
	}
	if err := h.refuse(inner, rq); err != nil {
		h.edge.refused(ctx, w, inner, err)
		return
	}
	if r.Body != nil {
		inner.Body = &restBody{r: r.Body, limit: h.limit, left: h.limit, size: r.ContentLength}
	}
	h.mux.ServeHTTP(w, inner)
}

// refuse finds what is wrong before any body is read.
func (h *rest) refuse(r *http.Request, rq *request) error {
	path := r.URL.EscapedPath()
	if strings.Contains(path, "//") || strings.HasSuffix(path, "/") {
		return errNoRoute
	}
	if rq.denied != nil {
		return rq.denied
	}
	if r.Method == http.MethodGet {
		return nil
	}
	if r.URL.RawQuery != "" {
		name, _, _ := strings.Cut(r.URL.RawQuery, "=")
		return fault.Field1("query", "%s takes no parameters in the query, but has %.64q", r.Method, name)
	}
	if r.ContentLength > int64(h.limit) {
		return tooLarge(h.limit)
	}
	if types := r.Header["Content-Type"]; len(types) > 0 {
		mt, _, err := mime.ParseMediaType(types[0])
		if err != nil || mt != "application/json" || len(types) > 1 {
			return errMediaType
		}
	}
	return nil
}

var (
	errNoRoute   = fault.New(fault.NotFound, "ROUTE_NOT_FOUND", "no such path")
	errMediaType = fault.New(fault.Invalid, "UNSUPPORTED_MEDIA_TYPE", "the content type must be application/json")
	errNotReady  = fault.New(fault.Unavailable, "NOT_READY", "the server takes no requests now").Retry(time.Second)
	errMethod    = fault.New(fault.Unimplemented, "METHOD_NOT_ALLOWED", "this path has no such method")
)

// refused answers and logs a request that ended before the chain.
func (e *edge) refused(ctx context.Context, w http.ResponseWriter, r *http.Request, err error) {
	rq, ok := ctx.Value(requestKey{}).(*request)
	if !ok {
		rq = &request{transport: "rest", remote: parseAddr(r.RemoteAddr)}
	}
	method, _ := runtime.RPCMethod(ctx)
	var a *answer
	if errors.As(e.finish(ctx, rq, method, tenant.Principal{}, nil, nil, err, 0), &a) {
		writeError(w, a)
	}
}

// writeError writes google.rpc.Status as JSON.
func writeError(w http.ResponseWriter, a *answer) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	if a.http == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	if a.retry > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(a.retry.Seconds()))))
	}
	w.WriteHeader(a.http)
	w.Write(marshal(a.st.Proto())) //nolint:errcheck // the caller went away; nothing is left to do
}

// restError is the gateway's error handler. Errors of the chain are answers
// already; the others are the gateway's own, about paths, queries and bodies.
func (e *edge) restError(ctx context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, err error) {
	var a *answer
	if errors.As(err, &a) {
		writeError(w, a)
		return
	}
	if b, ok := r.Body.(*restBody); ok && b.err != nil {
		err = b.err
	} else {
		err = gatewayFault(err)
	}
	e.refused(ctx, w, r, err)
}

var (
	wrongType = regexp.MustCompile(`^type mismatch, parameter: ([a-z_]+),`)
	ruleText  = regexp.MustCompile(`^([A-Za-z0-9_.-]{1,64}): (.*)$`)
)

// gatewayFault reads the gateway's own errors, which are only text.
func gatewayFault(err error) error {
	var he *runtime.HTTPStatusError
	if errors.As(err, &he) && he.HTTPStatus == http.StatusBadRequest {
		return fault.Field1("path", "has a malformed percent-encoding")
	}
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.InvalidArgument {
		return err
	}
	if m := wrongType.FindStringSubmatch(st.Message()); m != nil {
		return fault.Field1(jsonName(m[1]), "must be an integer")
	}
	if m := ruleText.FindStringSubmatch(st.Message()); m != nil {
		return fault.Field1(m[1], "%s", m[2])
	}
	return fault.Field1("query", "is malformed")
}

// routingError answers paths and methods that do not exist.
func (e *edge) routingError(ctx context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, code int) {
	switch code {
	case http.StatusMethodNotAllowed:
		w.Header().Set("Allow", strings.Join(api().methods(r.URL.EscapedPath()), ", "))
		e.refused(ctx, w, r, errMethod)
	case http.StatusNotFound:
		e.refused(ctx, w, r, errNoRoute)
	default:
		e.refused(ctx, w, r, fault.Field1("path", "is malformed"))
	}
}

// queryParser fills a request from the query of its URL, as strictly as bodies
// are read: known lowerCamelCase names, each once, enums by name.
type queryParser struct{}

// Parse implements runtime.QueryParameterParser. The gateway passes on only the
// text of the error, which gatewayFault takes apart again.
func (queryParser) Parse(m proto.Message, values url.Values, fromPath *utilities.DoubleArray) error {
	r := m.ProtoReflect()
	p := planOf(r.Descriptor())
	for name, vs := range values {
		if err := p.parameter(r, name, vs); err != nil {
			return err.within(name)
		}
	}
	return nil
}

func (p *plan) parameter(m protoreflect.Message, name string, values []string) *pathError {
	f := p.byName[name]
	if f == nil {
		return p.unknown(name)
	}
	if p.fromPath[name] {
		return broken("is part of the path and not of the query")
	}
	if len(values) != 1 || f.fd.IsList() {
		return broken("must appear once")
	}
	if f.plan != nil && (f.plan.shape == shapeObject || f.plan.shape == shapeJSON) {
		return broken("cannot be given in the query")
	}
	s := values[0]
	if strings.IndexByte(s, 0) >= 0 {
		return broken("holds the character U+0000")
	}
	if strings.ToValidUTF8(s, "") != s {
		return broken("is not valid UTF-8")
	}
	v, err := f.fromText(s, true)
	if err != nil {
		return err
	}
	m.Set(f.fd, v)
	return nil
}
