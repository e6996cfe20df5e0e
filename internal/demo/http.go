package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// exchange is what a tool handler can do to the HTTP exchange that carries it.
type exchange struct {
	dropped atomic.Bool // nothing more is written, and the connection is cut
}

type exchangeKey struct{}

// exchangeFrom returns the exchange of a request's context. Every request comes
// through mcpHandler, which puts one there.
func exchangeFrom(ctx context.Context) *exchange {
	return ctx.Value(exchangeKey{}).(*exchange)
}

// handler routes the endpoints. Only loopback hosts and no browser may use any
// of them: a page could otherwise rebind its name to this address.
func (s *Server) handler(control bool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/mcp", s.serveMCP)
	mux.HandleFunc("GET /executions", func(w http.ResponseWriter, _ *http.Request) {
		_, effects := s.counts.snapshot(s.tools.names())
		writeJSON(w, effects)
	})
	mux.HandleFunc("GET /arrivals", func(w http.ResponseWriter, _ *http.Request) {
		arrivals, _ := s.counts.snapshot(s.tools.names())
		writeJSON(w, arrivals)
	})
	if control {
		mux.HandleFunc("PUT /control/faults/{tool}", s.putFault)
		mux.HandleFunc("DELETE /control/faults/{tool}", func(_ http.ResponseWriter, r *http.Request) {
			s.ClearFault(r.PathValue("tool"))
		})
		mux.HandleFunc("PUT /control/tools/{tool}", s.putTool)
		mux.HandleFunc("DELETE /control/tools/{tool}", func(w http.ResponseWriter, r *http.Request) {
			writeOutcome(w, s.RemoveTool(r.PathValue("tool")))
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.enter() {
			http.Error(w, "the server is stopping", http.StatusServiceUnavailable)
			return
		}
		defer s.handlers.Done()
		if !loopbackHost(r.Host) || r.Header.Get("Origin") != "" {
			http.Error(w, "only local programs may use this server", http.StatusForbidden)
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		mux.ServeHTTP(w, r)
	})
}

// enter counts a handler in, unless Close is past waiting for handlers.
func (s *Server) enter() bool {
	s.handlersMu.Lock()
	defer s.handlersMu.Unlock()
	if s.handlersEnded {
		return false
	}
	s.handlers.Add(1)
	return true
}

// serveMCP hands a request to the library with what faults and a graceful stop
// need: an exchange that can be dropped, and for event streams a context that
// ends as soon as Close begins, while calls keep their grace period.
func (s *Server) serveMCP(w http.ResponseWriter, r *http.Request) {
	x := &exchange{}
	ctx := context.WithValue(r.Context(), exchangeKey{}, x)
	if isStream(r) {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(s.streams, cancel)()
	}
	s.mcp.ServeHTTP(&droppable{ResponseWriter: w, x: x}, r.WithContext(ctx))
	if x.dropped.Load() {
		panic(http.ErrAbortHandler) // net/http closes the connection and logs nothing
	}
}

// isStream reports whether the request holds an event stream open: the legacy
// GET, or the modern subscriptions/listen, whose method header is required.
func isStream(r *http.Request) bool {
	return r.Method == http.MethodGet || r.Header.Get(mcp.HeaderMethod) == string(mcp.MethodSubscriptionsListen)
}

// droppable swallows what is written after its exchange was dropped.
type droppable struct {
	http.ResponseWriter
	x *exchange
}

func (d *droppable) WriteHeader(status int) {
	if !d.x.dropped.Load() {
		d.ResponseWriter.WriteHeader(status)
	}
}

func (d *droppable) Write(p []byte) (int, error) {
	if d.x.dropped.Load() {
		return len(p), nil
	}
	return d.ResponseWriter.Write(p)
}

// Flush makes the writer an http.Flusher, which the library asks for.
func (d *droppable) Flush() {
	if f, ok := d.ResponseWriter.(http.Flusher); ok && !d.x.dropped.Load() {
		f.Flush()
	}
}

// Unwrap lets http.ResponseController reach the connection.
func (d *droppable) Unwrap() http.ResponseWriter { return d.ResponseWriter }

// putFault takes {"delayBefore","delayAfter","dropAfter","detached","times"}.
func (s *Server) putFault(w http.ResponseWriter, r *http.Request) {
	var in struct {
		DelayBefore string `json:"delayBefore"`
		DelayAfter  string `json:"delayAfter"`
		DropAfter   bool   `json:"dropAfter"`
		Detached    bool   `json:"detached"`
		Times       int    `json:"times"`
	}
	if err := readJSON(r, &in); err != nil {
		writeOutcome(w, err)
		return
	}
	before, err := duration("delayBefore", in.DelayBefore)
	if err != nil {
		writeOutcome(w, err)
		return
	}
	after, err := duration("delayAfter", in.DelayAfter)
	if err != nil {
		writeOutcome(w, err)
		return
	}
	if in.Times < 0 {
		writeOutcome(w, fault.Field1("times", "must not be negative"))
		return
	}
	s.SetFault(r.PathValue("tool"), Fault{
		DelayBefore: before, DelayAfter: after, DropAfter: in.DropAfter, Detached: in.Detached, Times: in.Times,
	})
}

// putTool adds the tool, or changes its description when it is offered.
func (s *Server) putTool(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Description string `json:"description"`
	}
	if err := readJSON(r, &in); err != nil {
		writeOutcome(w, err)
		return
	}
	name := r.PathValue("tool")
	err := s.Describe(name, in.Description)
	if f, ok := errors.AsType[*fault.Error](err); ok && f.Kind == fault.NotFound {
		err = s.AddTool(name, in.Description)
	}
	writeOutcome(w, err)
}

// duration reads a Go duration; the empty string is none.
func duration(path, text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, fault.Field1(path, "must be a duration that is not negative")
	}
	return d, nil
}

// readJSON reads one JSON object without unknown members.
func readJSON(r *http.Request, into any) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return fault.New(fault.TooLarge, "TOO_LARGE", "the body is larger than %d bytes", maxBody)
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil || dec.More() {
		return fault.Field1("body", "must be one JSON object with known members")
	}
	return nil
}

// writeOutcome answers 204, or the fault's status and sentence.
func writeOutcome(w http.ResponseWriter, err error) {
	if err == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	status := http.StatusInternalServerError
	if f, ok := errors.AsType[*fault.Error](err); ok {
		switch f.Kind {
		case fault.NotFound:
			status = http.StatusNotFound
		case fault.TooLarge:
			status = http.StatusRequestEntityTooLarge
		default:
			status = http.StatusBadRequest
		}
	}
	http.Error(w, err.Error(), status)
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // a caller that went away needs no answer
}

// loopbackHost reports whether a Host header names this machine.
func loopbackHost(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	if strings.EqualFold(name, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(name)
	return err == nil && ip.IsLoopback()
}
