// Package mcptest is an MCP server for tests: real HTTP, scripted answers, and a
// record of everything that arrived. It answers as a plain server of its era
// unless a method has a script.
package mcptest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// The kinds of server.
const (
	Modern = "2026-07-28"
	Legacy = "2025-11-25"
)

// Request is one HTTP request as it arrived.
type Request struct {
	Verb   string
	Path   string
	Header http.Header
	Body   string
	// Method, ID and Params are those of the JSON-RPC message in the body.
	Method string
	ID     json.RawMessage
	Params json.RawMessage
}

// Answer writes the answer to a request.
type Answer func(w http.ResponseWriter, raw *http.Request, r *Request)

// Server is a scripted MCP server.
type Server struct {
	// URL is the MCP endpoint.
	URL string

	http    *httptest.Server
	version string
	closing chan struct{}
	sse     bool

	mu      sync.Mutex
	scripts map[string][]Answer
	seen    []*Request
	caps    string
	stream  chan string // of HTTP+SSE
}

// New starts a server that speaks one version, Modern or Legacy, and stops it with
// the test.
func New(t testing.TB, version string) *Server {
	t.Helper()
	s := &Server{version: version, closing: make(chan struct{}), scripts: map[string][]Answer{}, caps: `{"tools":{}}`}
	s.http = httptest.NewServer(http.HandlerFunc(s.serve))
	s.URL = s.http.URL + "/mcp"
	t.Cleanup(s.Close)
	return s
}

// Close ends hanging answers and stops the server. It may be called twice.
func (s *Server) Close() {
	s.mu.Lock()
	select {
	case <-s.closing:
	default:
		close(s.closing)
	}
	s.mu.Unlock()
	s.http.CloseClientConnections()
	s.http.Close()
}

// Capabilities sets what the server announces, as a JSON object.
func (s *Server) Capabilities(raw string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.caps = raw
}

// On scripts the answers to a JSON-RPC method, or to the verb GET or DELETE: one
// for each request, the last for all that follow. It replaces an earlier script.
func (s *Server) On(method string, answers ...Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scripts[method] = answers
}

// Seen returns the requests with this method or verb so far.
func (s *Server) Seen(method string) []*Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*Request
	for _, r := range s.seen {
		if r.Method == method || (r.Method == "" && r.Verb == method) {
			out = append(out, r)
		}
	}
	return out
}

// Requests returns all requests so far.
func (s *Server) Requests() []*Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// Count returns the number of requests with this method or verb so far.
func (s *Server) Count(method string) int { return len(s.Seen(method)) }

// Wait waits until n requests with this method or verb arrived.
func (s *Server) Wait(t testing.TB, method string, n int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); s.Count(method) < n; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d requests %s arrived, want %d", s.Count(method), method, n)
		}
	}
}

// Reset forgets the requests seen so far.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = nil
}

// CloseIdle closes all connections of clients.
func (s *Server) CloseIdle() { s.http.CloseClientConnections() }

func (s *Server) serve(w http.ResponseWriter, raw *http.Request) {
	body, err := io.ReadAll(io.LimitReader(raw.Body, 64<<20))
	if err != nil {
		return
	}
	r := &Request{Verb: raw.Method, Path: raw.URL.Path, Header: raw.Header.Clone(), Body: string(body)}
	var m struct {
		Method string
		ID     json.RawMessage
		Params json.RawMessage
	}
	if json.Unmarshal(body, &m) == nil {
		r.Method, r.ID, r.Params = m.Method, m.ID, m.Params
	}
	s.answer(r)(w, raw, r)
}

func (s *Server) answer(r *Request) Answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, r)
	key := r.Method
	if key == "" {
		key = r.Verb
	}
	script := s.scripts[key]
	switch {
	case len(script) > 1:
		s.scripts[key] = script[1:]
		return script[0]
	case len(script) == 1:
		return script[0]
	}
	if s.sse {
		return s.Streamed(s.plain(key))
	}
	return s.plain(key)
}

// plain is how a simple server of the era answers.
func (s *Server) plain(key string) Answer {
	modern := s.version >= Modern
	switch {
	case key == "server/discover" && modern:
		return Result(fmt.Sprintf(`{"resultType":"complete","supportedVersions":[%q],"capabilities":%s,"_meta":{"io.modelcontextprotocol/serverInfo":{"name":"mcptest","version":"1"}}}`, s.version, s.caps))
	case key == "initialize" && !modern:
		return WithHeader("Mcp-Session-Id", "session-1", Result(fmt.Sprintf(`{"protocolVersion":%q,"capabilities":%s,"serverInfo":{"name":"mcptest","version":"1"}}`, s.version, s.caps)))
	case key == "tools/list":
		return Result(`{"resultType":"complete","tools":[{"name":"echo","inputSchema":{"type":"object"}}]}`)
	case key == "tools/call":
		return Result(`{"resultType":"complete","content":[{"type":"text","text":"ok"}]}`)
	case strings.HasPrefix(key, "notifications/"), key == "": // answers to our own requests have no method
		return Status(http.StatusAccepted, "", "")
	case key == http.MethodGet:
		return Status(http.StatusMethodNotAllowed, "", "")
	case key == http.MethodDelete, key == http.MethodPost:
		return Status(http.StatusOK, "", "")
	case modern:
		return StatusError(http.StatusNotFound, -32601, "method not found")
	}
	return Error(-32601, "method not found", "")
}

// fill replaces $ID by the id of the request.
func fill(s string, r *Request) string { return strings.ReplaceAll(s, "$ID", string(r.ID)) }

// Result answers with a result as plain JSON.
func Result(result string) Answer {
	return JSON(`{"jsonrpc":"2.0","id":$ID,"result":` + result + `}`)
}

// Error answers with a JSON-RPC error; data may be empty.
func Error(code int, message, data string) Answer {
	if data != "" {
		data = `,"data":` + data
	}
	return JSON(fmt.Sprintf(`{"jsonrpc":"2.0","id":$ID,"error":{"code":%d,"message":%q%s}}`, code, message, data))
}

// StatusError answers with a JSON-RPC error and an HTTP status.
func StatusError(status, code int, message string) Answer {
	return Status(status, "application/json", fmt.Sprintf(`{"jsonrpc":"2.0","id":$ID,"error":{"code":%d,"message":%q}}`, code, message))
}

// JSON answers 200 with a body in which $ID is the request's id.
func JSON(body string) Answer { return Status(http.StatusOK, "application/json", body) }

// Status answers with a status, a content type and a body with $ID.
func Status(status int, contentType, body string) Answer {
	return func(w http.ResponseWriter, _ *http.Request, r *Request) {
		if contentType != "" {
			w.Header().Set("Content-Type", contentType)
		}
		w.WriteHeader(status)
		io.WriteString(w, fill(body, r)) //nolint:errcheck // the client may be gone
	}
}

// WithHeader adds a header to an answer.
func WithHeader(name, value string, next Answer) Answer {
	return func(w http.ResponseWriter, raw *http.Request, r *Request) {
		w.Header().Add(name, value)
		next(w, raw, r)
	}
}

// Stream answers with an event stream made of the given pieces, each flushed by
// itself. $ID is the request's id.
func Stream(pieces ...string) Answer { return StreamThen(nil, pieces...) }

// StreamThen is Stream followed by something else, such as Hang.
func StreamThen(last Answer, pieces ...string) Answer {
	return func(w http.ResponseWriter, raw *http.Request, r *Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.WriteHeader(http.StatusOK)
		f := w.(http.Flusher)
		f.Flush()
		for _, p := range pieces {
			io.WriteString(w, fill(p, r)) //nolint:errcheck // the client may be gone
			f.Flush()
		}
		if last != nil {
			last(w, raw, r)
		}
	}
}

// Write writes one piece of a stream that has begun.
func Write(w http.ResponseWriter, piece string, r *Request) {
	io.WriteString(w, fill(piece, r)) //nolint:errcheck // the client may be gone
	w.(http.Flusher).Flush()
}

// Answered waits until the client has answered n requests of the server, which
// come without a method, or ctx ends.
func (s *Server) Answered(t testing.TB, ctx context.Context, n int) {
	for end := time.Now().Add(20 * time.Second); s.Count(http.MethodPost) < n && ctx.Err() == nil; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("the client answered %d requests, want %d", s.Count(http.MethodPost), n)
			return
		}
	}
}

// Event is one event of a stream with JSON data.
func Event(data string) string { return "data: " + data + "\n\n" }

// ResultEvent is the event that answers the request.
func ResultEvent(result string) string {
	return Event(`{"jsonrpc":"2.0","id":$ID,"result":` + result + `}`)
}

// Hang waits until the client leaves or the server stops.
func (s *Server) Hang() Answer {
	return func(_ http.ResponseWriter, raw *http.Request, _ *Request) {
		select {
		case <-raw.Context().Done():
		case <-s.closing:
		}
	}
}

// After waits for a channel and then answers.
func (s *Server) After(ch <-chan struct{}, next Answer) Answer {
	return func(w http.ResponseWriter, raw *http.Request, r *Request) {
		select {
		case <-ch:
			next(w, raw, r)
		case <-raw.Context().Done():
		case <-s.closing:
		}
	}
}

// Cut breaks the connection without an answer.
func Cut() Answer {
	return func(http.ResponseWriter, *http.Request, *Request) { panic(http.ErrAbortHandler) }
}
