// Package api is the public face of Bulkhead: the gRPC services of bulkhead.v1
// and their REST form, on one listener. Both run through one chain (recover,
// deadline, authenticate, permit, limit, validate, log), and every error becomes
// what a caller sees in one function. Services only convert between messages
// and the domain; they decide nothing.
package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"

	openapi "github.com/bulkhead-mcp/bulkhead/proto"
)

// DefaultMaxRequestBytes bounds one request, as REST body or gRPC message.
const DefaultMaxRequestBytes = 4 << 20

const (
	maxHeaderBytes    = 32 << 10
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	// Above the longest deadline of a method, so that the method's own answer
	// comes first.
	writeTimeout = verifyLimit + time.Minute
)

// Config is the edge and what it serves. Log, Auth, Authority and every service are
// needed; Limiter, Metrics and Ready may be nil.
type Config struct {
	// MaxRequestBytes bounds one request; 0 means DefaultMaxRequestBytes.
	MaxRequestBytes int
	Log             *slog.Logger
	Auth            Authenticator
	Authority       Authority
	Limiter         Limiter
	Metrics         Metrics
	// Ready returns why the server cannot take requests now, nil when it can.
	// The text goes to the log, not to the caller.
	Ready func(context.Context) error

	Services
}

// Server serves REST and gRPC.
type Server struct {
	http  *http.Server
	grpc  *grpc.Server
	edge  *edge
	ready func(context.Context) error
	// end cancels the requests that outlive the grace of Shutdown.
	end context.CancelFunc
}

// New builds the server. It compiles every validation rule, so that a broken
// one is found at start.
func New(c Config) (*Server, error) {
	if c.Log == nil || c.Auth == nil || c.Authority == nil {
		return nil, errors.New("api: Log, Auth and Authority are needed")
	}
	if c.MaxRequestBytes == 0 {
		c.MaxRequestBytes = DefaultMaxRequestBytes
	}
	if c.MaxRequestBytes < 1024 {
		return nil, errors.New("api: MaxRequestBytes must be at least 1024")
	}
	var requests []proto.Message
	for _, r := range api() {
		requests = append(requests, dynamicpb.NewMessage(r.input))
	}
	v, err := protovalidate.New(protovalidate.WithMessages(requests...))
	if err != nil {
		return nil, fmt.Errorf("compile the rules of requests: %w", err)
	}
	e := &edge{auth: c.Auth, tickets: tickets{c.Events, c.Authority}, limiter: c.Limiter, metrics: c.Metrics, log: c.Log, validator: v, now: time.Now}
	s := &Server{edge: e, ready: c.Ready}
	s.grpc = grpc.NewServer(grpc.MaxRecvMsgSize(c.MaxRequestBytes), grpc.UnaryInterceptor(e.unary),
		grpc.StreamInterceptor(e.stream), grpc.UnknownServiceHandler(e.unknownMethod))
	local := &channel{edge: e, methods: map[string]localMethod{}, streams: map[string]localStream{}}
	gateway := newGateway(e)
	if err := c.Services.register(registrars{s.grpc, local}, gateway, local, c.Authority); err != nil {
		return nil, err
	}
	s.registerOpen()
	s.http = s.newHTTP(c.Log, s.handler(&rest{mux: gateway, edge: e, limit: c.MaxRequestBytes, streams: local.streams}, c.MaxRequestBytes, bodyTimeout))
	return s, nil
}

func (s *Server) newHTTP(log *slog.Logger, h http.Handler) *http.Server {
	base, end := context.WithCancel(context.Background())
	s.end = end
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           h,
		Protocols:         &protocols,
		ReadHeaderTimeout: readHeaderTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return base },
	}
}

// handler sends a request to gRPC by its content type, else to a plain path.
// Every body must arrive within a time, also where nobody reads it: net/http
// reads what is left.
func (s *Server) handler(v1 http.Handler, limit int, within time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = timed(w, r, within)
		if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
			s.serveGRPC(w, r, limit)
			return
		}
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "no-store")
		switch path := r.URL.Path; {
		case strings.HasPrefix(path, "/v1/"):
			v1.ServeHTTP(w, r)
		case path == "/healthz":
			plain(w, r, []byte(`{"status":"ok"}`))
		case path == "/readyz":
			s.serveReady(w, r)
		case strings.HasPrefix(path, schemaPath):
			s.serveSchema(w, r)
		case path == "/openapi.json":
			plain(w, r, openapi.OpenAPI)
		default:
			s.edge.refused(r.Context(), w, r, errNoRoute)
		}
	})
}

func plain(w http.ResponseWriter, r *http.Request, body []byte) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		writeError(w, answerFor(errMethod))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(body) //nolint:errcheck // the caller went away; nothing is left to do
}

func (s *Server) serveReady(w http.ResponseWriter, r *http.Request) {
	if !s.isReady(r.Context()) {
		writeError(w, answerFor(errNotReady))
		return
	}
	plain(w, r, []byte(`{"status":"ready"}`))
}

// isReady asks whether the server can take requests; why not is logged.
func (s *Server) isReady(ctx context.Context) bool {
	if s.ready == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	err := s.ready(ctx)
	if err != nil {
		s.edge.log.WarnContext(ctx, "not ready", "error", detail(err))
	}
	return err == nil
}

// Serve answers on l until ctx ends or Shutdown is called, and then returns nil.
// When ctx ends first, requests under way get grace to finish.
func (s *Server) Serve(ctx context.Context, l net.Listener, grace time.Duration) error {
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(l) }()
	select {
	case err := <-served:
		if errors.Is(err, http.ErrServerClosed) {
			return nil
		}
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	err := s.Shutdown(stop)
	<-served
	return err
}

// Shutdown stops accepting, waits for requests under way until ctx ends, then
// cancels them and closes their connections.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	s.end()
	if err != nil {
		err = errors.Join(err, s.http.Close())
	}
	s.grpc.Stop()
	return err
}

// registrars registers a service with gRPC and with the gateway's channel.
type registrars []grpc.ServiceRegistrar

// RegisterService implements grpc.ServiceRegistrar.
func (rs registrars) RegisterService(desc *grpc.ServiceDesc, impl any) {
	for _, r := range rs {
		r.RegisterService(desc, impl)
	}
}
