package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// following is one open stream; next fails the test when none comes. ended is the
// name of what ended it, "" for the end of the connection.
type following struct {
	t      *testing.T
	events chan *pb.Event
	ended  string // read after events is closed
	close  func()
}

// follow opens a stream over the world's transport with the header of a browser
// that had seen after.
func (w *world) follow(t *testing.T, key, user, path, after string) *following {
	t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	f := &following{t: t, events: make(chan *pb.Event, 100)}
	done := make(chan struct{})
	f.close = func() { cancel(); <-done }
	t.Cleanup(f.close)
	if w.transport == "grpc" && key != "" {
		in := &pb.StreamSessionEventsRequest{SessionId: strings.Split(path, "/")[3]}
		if after != "" {
			var n int64
			_, err := fmt.Sscan(after, &n)
			must(t, err)
			in.After = &n
		}
		st, err := pb.NewEventServiceClient(theService.conn).StreamSessionEvents(
			metadata.AppendToOutgoingContext(ctx, "Authorization", "Bearer "+key, "Bulkhead-User", user), in)
		must(t, err)
		go func() {
			defer close(done)
			defer close(f.events)
			for {
				e, err := st.Recv()
				if err != nil {
					if codeOf(err) == codes.Unauthenticated {
						f.ended = "error"
					}
					return
				}
				f.events <- e
			}
		}()
		return f
	}
	req, err := http.NewRequestWithContext(ctx, "GET", theService.URL+path, nil)
	must(t, err)
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
		req.Header.Set("Bulkhead-User", user)
	}
	if after != "" {
		req.Header.Set("Last-Event-ID", after)
	}
	res, err := w.http.Do(req)
	if err != nil {
		close(done)
		t.Fatal(err)
	}
	if h := res.Header; res.StatusCode != 200 || h.Get("Content-Type") != "text/event-stream" || h.Get("Cache-Control") != "no-store" || h.Get("X-Accel-Buffering") != "no" {
		t.Errorf("%s: %d %v", path, res.StatusCode, h)
	}
	go func() {
		defer close(done)
		defer close(f.events)
		defer res.Body.Close()
		f.read(bufio.NewScanner(res.Body))
	}()
	return f
}

// read takes server-sent events apart, by the standard's rules as far as ours go.
func (f *following) read(lines *bufio.Scanner) {
	var id, name, data string
	for lines.Scan() {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, "id: "):
			id = line[4:]
		case strings.HasPrefix(line, "event: "):
			name = line[7:]
		case strings.HasPrefix(line, "data: "):
			data = line[6:]
		case line == "" && (name == "error" || name == "dropped"):
			f.ended = name
			return
		case line == "" && data != "":
			e := &pb.Event{}
			if err := protojson.Unmarshal([]byte(data), e); err != nil || e.GetEventId() != id || e.GetKind() != name {
				f.ended = fmt.Sprintf("malformed %s %s %s: %v", id, name, data, err)
				return
			}
			f.events <- e
			id, name, data = "", "", ""
		}
	}
}

func (f *following) next() *pb.Event {
	f.t.Helper()
	e, ok := <-f.events
	if !ok {
		f.t.Fatalf("the stream ended: %s", f.ended)
	}
	return e
}

// until reads to an event of the kind and state.
func (f *following) until(kind, state string) (seen []string, last *pb.Event) {
	f.t.Helper()
	for {
		e := f.next()
		seen = append(seen, fmt.Sprintf("%s %s %s", e.GetEventId(), e.GetKind(), e.GetState()))
		if e.GetKind() == kind && e.GetState() == state {
			return seen, e
		}
	}
}

// A frontend follows a session through consent to the result, loses its connection
// on the way and misses nothing; with the session the stream ends.
func TestEvents_OfACallThatNeedsConsent(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.calendar(startDemo(t, demo.Options{}))
		ses := w.session(w.alice)
		path := "/v1/sessions/" + ses + "/events"
		f := w.follow(t, w.serviceKey, "alice", path, "")
		if e := f.next(); e.GetKind() != "ready" || e.GetEventId() != "0" {
			t.Fatalf("%v", e)
		}
		call := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("Review"))
		_, asked := f.until("consent.requested", "PENDING")
		if asked.GetConsentId() != call.GetConsent().GetConsentId() || asked.GetCallId() != call.GetCallId() || asked.GetServer() != "calendar" {
			t.Errorf("%v", asked)
		}
		f.close()
		w.decide(call, pb.DecideConsentRequest_APPROVE)
		wantState(t, w.ended(w.alice, call), pb.Call_SUCCEEDED)

		f = w.follow(t, w.serviceKey, "alice", path, "2")
		f.next()
		seen, last := f.until("call.changed", "SUCCEEDED")
		if got := strings.Join(seen, ", "); got != "3 consent.decided APPROVED, 4 call.changed DISPATCHING, 5 call.changed SUCCEEDED" {
			t.Errorf("after the reconnection: %s", got)
		}
		if last.GetRevision() != w.ended(w.alice, call).GetRevision() || last.GetCallId() != call.GetCallId() {
			t.Errorf("%v", last)
		}
		// A read has one event, the one with its outcome.
		read := w.propose(w.alice, ses, "calendar", demo.GetAvailability, week)
		seen, last = f.until("call.changed", "SUCCEEDED")
		if len(seen) != 1 || last.GetCallId() != read.GetCallId() {
			t.Errorf("%v", seen)
		}
		code, answer := w.raw("GET", path, "", w.serviceKey, "Bulkhead-User", "bob")
		if code != 404 || !strings.Contains(answer, "SESSION_NOT_FOUND") {
			t.Errorf("another user: %d %s", code, answer)
		}
		_, err := w.alice.CloseSession(w.ctx, &pb.CloseSessionRequest{SessionId: ses})
		must(t, err)
		if _, bye := f.until("bye", ""); bye.GetReason() != "SESSION_ENDED" {
			t.Errorf("%v", bye)
		}
		if _, more := <-f.events; more || f.ended != "" {
			t.Errorf("after the bye: %s", f.ended)
		}
	})
}

// A stream ends with the key that opened it.
func TestEvents_EndWithTheKey(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.calendar(startDemo(t, demo.Options{}))
		made, err := w.admin.CreateKey(w.ctx, &pb.CreateKeyRequest{DisplayName: "short", Role: pb.Key_SERVICE})
		must(t, err)
		f := w.follow(t, made.GetSecret(), "alice", "/v1/sessions/"+w.session(w.alice)+"/events", "")
		f.next()
		_, err = w.admin.DeleteKey(w.ctx, &pb.DeleteKeyRequest{KeyId: made.GetKeyId()})
		must(t, err)
		for range f.events {
		}
		if f.ended != "error" {
			t.Errorf("ended by %q", f.ended)
		}
	})
}

// A browser, which sends no header, follows one call by a ticket, once.
func TestEvents_ByTicket(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rest")
	w.calendar(startDemo(t, demo.Options{}))
	ses := w.session(w.alice)
	call := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("Review"))
	ticket, err := w.alice.IssueEventTicket(w.ctx, &pb.IssueEventTicketRequest{SessionId: ses})
	must(t, err)
	_, err = w.bob.IssueEventTicket(w.ctx, &pb.IssueEventTicketRequest{SessionId: ses})
	if codeOf(err) != codes.NotFound {
		t.Errorf("somebody else's session: %v", err)
	}
	path := "/v1/calls/" + call.GetCallId() + "/events?after=0&ticket=" + ticket.GetTicket()
	f := w.follow(t, "", "", path, "")
	f.next()
	if seen, _ := f.until("call.changed", "CONSENT_REQUIRED"); len(seen) != 2 {
		t.Errorf("%v", seen)
	}
	res, err := w.http.Get(theService.URL + path)
	must(t, err)
	defer res.Body.Close()
	if res.StatusCode != 401 {
		t.Errorf("the same ticket again: %d", res.StatusCode)
	}
	if theService.Logged(ticket.GetTicket()) {
		t.Error("the ticket is in the log")
	}
}
