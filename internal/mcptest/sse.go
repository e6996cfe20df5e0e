package mcptest

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// NewSSE starts a scripted server of HTTP+SSE: GET opens the event stream, and what
// is posted to the endpoint it names is answered there. A script for GET makes the
// stream with Open; a script for a method answers the POST itself unless it is
// wrapped by Streamed.
func NewSSE(t testing.TB, version string) *Server {
	t.Helper()
	s := New(t, version)
	s.URL = s.http.URL + "/sse"
	s.sse, s.stream = true, make(chan string, 64)
	s.On("GET", s.Open(Endpoint("/message?sessionId=secret-1")))
	return s
}

// Endpoint is the event that names where messages are posted.
func Endpoint(url string) string { return "event: endpoint\ndata: " + url + "\n\n" }

// Open answers GET with an event stream that begins with the given pieces and then
// carries what Push brings.
func (s *Server) Open(pieces ...string) Answer {
	return func(w http.ResponseWriter, raw *http.Request, r *Request) {
		own := make(chan string, 64)
		s.mu.Lock()
		s.stream = own // before the client knows where to post
		s.mu.Unlock()
		StreamThen(s.pump(own), pieces...)(w, raw, r)
	}
}

func (s *Server) pump(own <-chan string) Answer {
	return func(w http.ResponseWriter, raw *http.Request, _ *Request) { s.carry(own, w, raw) }
}

func (s *Server) carry(own <-chan string, w http.ResponseWriter, raw *http.Request) {
	for {
		select {
		case piece := <-own:
			switch piece {
			case endStream:
				return
			case cutStream:
				panic(http.ErrAbortHandler)
			}
			w.Write([]byte(piece)) //nolint:errcheck // the client may be gone
			w.(http.Flusher).Flush()
		case <-raw.Context().Done():
			return
		case <-s.closing:
			return
		}
	}
}

const endStream, cutStream = "\x00end", "\x00cut"

// Push writes a piece to the event stream that was opened last.
func (s *Server) Push(piece string) {
	s.mu.Lock()
	stream := s.stream
	s.mu.Unlock()
	select {
	case stream <- piece:
	case <-s.closing:
	}
}

// EndStream closes the open event stream properly, CutStream breaks it off.
func (s *Server) EndStream() { s.Push(endStream) }

// CutStream breaks the open event stream off.
func (s *Server) CutStream() { s.Push(cutStream) }

// Streamed answers the POST with 202 and pushes the body of the answer, in which
// $ID is the request's id, as an event.
func (s *Server) Streamed(answer Answer) Answer {
	return func(w http.ResponseWriter, raw *http.Request, r *Request) {
		made := httptest.NewRecorder()
		answer(made, raw, r)
		w.WriteHeader(http.StatusAccepted)
		if made.Body.Len() > 0 {
			s.Push(Event(made.Body.String()))
		}
	}
}

// Pushes answers the POST with 202 and pushes the pieces, in which $ID is the
// request's id.
func (s *Server) Pushes(pieces ...string) Answer {
	return func(w http.ResponseWriter, _ *http.Request, r *Request) {
		w.WriteHeader(http.StatusAccepted)
		for _, p := range pieces {
			s.Push(fill(p, r))
		}
	}
}
