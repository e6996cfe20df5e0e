// Package demo is a small calendar that speaks the Model Context Protocol over
// Streamable HTTP in both eras. Bulkhead starts it in development mode, and
// tests use it as a server that can be made to misbehave: it counts what it
// executed, waits, drops connections and changes its tools when told to.
//
// It keeps everything in memory and listens on loopback only. It knows nothing
// of Bulkhead's own packages except the fault type, and Bulkhead's service
// reaches it only over the wire.
package demo

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/mark3labs/mcp-go/mcp"
	"github.com/mark3labs/mcp-go/server"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Limits of the demo server. They bound what a client can make it hold.
const (
	maxBody           = 1 << 20          // bytes of one request
	maxSessions       = 10_000           // legacy sessions kept, the least recently used goes first
	maxEvents         = 10_000           // draft events kept
	maxGeneratedTools = 2_000            // Options.GeneratedTools
	maxAddedTools     = 1_000            // tools added at run time
	sessionIdle       = 30 * time.Minute // a legacy session unused for so long is forgotten
	heartbeat         = 5 * time.Minute  // ping on an event stream, which also keeps its session
	defaultGrace      = 5 * time.Second
)

// ServerName is the name under which the demo calendar is registered.
const ServerName = "calendar"

// Options configure a demo server. The zero value serves both eras on a free
// loopback port, without faults and without the control handler.
type Options struct {
	// Address is host:port to listen on; the host must be a loopback address.
	// The default is 127.0.0.1:0.
	Address string
	// LegacyOnly refuses protocol version 2026-07-28 and everything newer, so
	// that clients have to initialize a session.
	LegacyOnly bool
	// GeneratedTools adds that many read-only tools, at most 2,000, so that a
	// large catalog can be measured.
	GeneratedTools int
	// Faults are in force from the start, by tool name.
	Faults map[string]Fault
	// Control serves /control/, through which faults and tools are changed
	// over HTTP. It is for tests that run the server in another process.
	Control bool
	// Grace is how long Close lets running calls finish; 5 s by default.
	Grace time.Duration
	// Logger receives the transport's own complaints; nil discards them.
	Logger *slog.Logger
	// Ready, if set, is called by Serve once the server accepts connections.
	Ready func(*Server)
}

// Server is a running demo calendar. All methods are safe for concurrent use.
type Server struct {
	url    string
	origin string
	grace  time.Duration

	cal    *calendar
	counts *counts
	faults *faults
	tools  *toolset

	mcp  *server.StreamableHTTPServer
	http *http.Server

	// life ends when Close gives up waiting, streams when Close begins.
	life          context.Context
	endLife       context.CancelFunc
	streams       context.Context
	endStreams    context.CancelFunc
	served        chan struct{}
	serveErr      error // set before served is closed
	closeOnce     sync.Once
	closeErr      error
	handlersMu    sync.Mutex
	handlers      sync.WaitGroup
	handlersEnded bool // guarded by handlersMu; no handler starts after it
}

// Start listens and serves until Close. Errors are Invalid faults for bad
// options and the listener's own error otherwise.
func Start(o Options) (*Server, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", o.Address)
	if err != nil {
		return nil, err
	}
	s := &Server{
		origin: "http://" + ln.Addr().String(),
		grace:  o.Grace,
		cal:    newCalendar(),
		counts: newCounts(),
		faults: newFaults(o.Faults),
		served: make(chan struct{}),
	}
	s.url = s.origin + "/mcp"
	s.life, s.endLife = context.WithCancel(context.Background())
	s.streams, s.endStreams = context.WithCancel(s.life)

	m := server.NewMCPServer("bulkhead-demo-calendar", "1.0.0",
		server.WithToolCapabilities(true),
		server.WithInstructions("A calendar with draft events. Drafts invite nobody."),
		server.WithInputSchemaValidation(),
		server.WithOutputSchemaValidation(),
		server.WithRecovery(),
		server.WithMethodCacheHints(mcp.MethodToolsList, time.Minute.Milliseconds(), mcp.CacheScopePublic),
		server.WithToolHandlerMiddleware(s.misbehave),
	)
	s.tools = newToolset(m, s.cal, s.counts, o.GeneratedTools)
	httpOptions := []server.StreamableHTTPOption{
		server.WithSessionIdManager(newSessionIDs(maxSessions)),
		server.WithSessionIdleTTL(sessionIdle),
		server.WithHeartbeatInterval(heartbeat),
		server.WithStreamableHTTPLogger(o.Logger),
	}
	if o.LegacyOnly {
		httpOptions = append(httpOptions, server.WithStreamableHTTPProtocolVersions(mcp.LegacyProtocolVersions()...))
	}
	s.mcp = server.NewStreamableHTTPServer(m, httpOptions...)
	s.http = &http.Server{
		Handler:           s.handler(o.Control),
		BaseContext:       func(net.Listener) context.Context { return s.life },
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(o.Logger.Handler(), slog.LevelWarn),
	}
	go func() {
		defer close(s.served)
		if err := s.http.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			s.serveErr = err
		}
	}()
	return s, nil
}

// Serve runs a demo server until the context ends, then stops it gracefully.
// It returns nil after a clean stop.
func Serve(ctx context.Context, o Options) error {
	s, err := Start(o)
	if err != nil {
		return err
	}
	if o.Ready != nil {
		o.Ready(s)
	}
	select {
	case <-ctx.Done():
	case <-s.served:
	}
	return s.Close()
}

// Close stops the server: no new connection is taken, event streams end, and
// running calls have the grace period to finish before they are cancelled. It
// returns when no goroutine of the server is left, with the error that ended
// serving early, if any. Further calls return the same.
func (s *Server) Close() error {
	s.closeOnce.Do(func() {
		s.endStreams()
		ctx, cancel := context.WithTimeout(context.Background(), s.grace)
		defer cancel()
		if err := s.http.Shutdown(ctx); err != nil {
			s.endLife()
			s.closeErr = s.http.Close()
		}
		s.endLife()
		<-s.served
		s.handlersMu.Lock()
		s.handlersEnded = true
		s.handlersMu.Unlock()
		s.handlers.Wait()
		// With no HTTP server of its own this only ends sessions and the sweeper.
		s.closeErr = errors.Join(s.serveErr, s.closeErr, s.mcp.Shutdown(context.Background()))
	})
	return s.closeErr
}

// URL returns the MCP endpoint, http://127.0.0.1:port/mcp.
func (s *Server) URL() string { return s.url }

// Origin returns the origin of URL, without a path.
func (s *Server) Origin() string { return s.origin }

// Executions returns how often the tool took effect. A repeated requestId of
// create_draft_event takes no effect and is not counted.
func (s *Server) Executions(tool string) int { return s.counts.executed(tool) }

// Arrivals returns how many valid calls of the tool reached the server, before
// any artificial delay.
func (s *Server) Arrivals(tool string) int { return s.counts.arrived(tool) }

// SetFault puts a fault in force for the tool, in place of an earlier one.
func (s *Server) SetFault(tool string, f Fault) { s.faults.set(tool, f) }

// ClearFault ends the tool's fault.
func (s *Server) ClearFault(tool string) { s.faults.clear(tool) }

// AddTool offers a new tool that writes a note and counts its executions, and
// announces that the list changed. It refuses a name that is offered already,
// and more than 1,000 added tools.
func (s *Server) AddTool(name, description string) error { return s.tools.add(name, description) }

// Describe gives an offered tool another description and announces it.
func (s *Server) Describe(name, description string) error { return s.tools.describe(name, description) }

// RemoveTool withdraws a tool and announces it.
func (s *Server) RemoveTool(name string) error { return s.tools.remove(name) }

// fill puts in defaults and checks what the caller gave.
func (o *Options) fill() error {
	if o.Address == "" {
		o.Address = "127.0.0.1:0"
	}
	host, _, err := net.SplitHostPort(o.Address)
	if err != nil {
		return fault.Field1("address", "must be host:port")
	}
	if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
		return fault.Field1("address", "must name a loopback address")
	}
	if o.GeneratedTools < 0 || o.GeneratedTools > maxGeneratedTools {
		return fault.Field1("generatedTools", "must be from 0 to %d", maxGeneratedTools)
	}
	if o.Grace < 0 {
		return fault.Field1("grace", "must not be negative")
	}
	if o.Grace == 0 {
		o.Grace = defaultGrace
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}
