package api

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/bulkhead-mcp/bulkhead/internal/events"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// fakeEvents opens no stream; what is told is tested with a database, end to end.
type fakeEvents struct{ *fakeDomain }

var errNoEvents = fault.New(fault.Exhausted, "TOO_MANY_STREAMS", "no room")

func (d fakeEvents) Follow(ctx context.Context, t tenant.ID, r events.Request) (*events.Stream, error) {
	after := int64(-1)
	if r.After != nil {
		after = *r.After
	}
	if err := d.note(ctx, "Follow %s %s %s %d %s", t, r.SessionID, r.CallID, after, r.Servers[calendarID]); err != nil {
		return nil, err
	}
	if err := r.Check(ctx); err != nil {
		return nil, err
	}
	return nil, errNoEvents
}

func (d fakeEvents) IssueTicket(ctx context.Context, p tenant.Principal, sessionID string) (string, time.Time, error) {
	return "bht_secret", time.Unix(30, 0), d.note(ctx, "IssueTicket %s %s", p.Subject, sessionID)
}

func (d fakeEvents) RedeemTicket(ctx context.Context, ticket string) (events.Ticket, error) {
	if ticket != "bht_secret" {
		return events.Ticket{}, fault.New(fault.Unauthenticated, "TICKET_INVALID", "no such ticket")
	}
	return events.Ticket{SessionID: sessionOne, KeyID: "key_service", Who: tenant.OnBehalf{User: "alice"}}, nil
}

// Reauthorize knows the keys that Authenticate does.
func (d *fakeDomain) Reauthorize(_ context.Context, keyID string, who tenant.OnBehalf) (tenant.Principal, error) {
	if keyID != "key_service" {
		return tenant.Principal{}, fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "no valid credential")
	}
	return tenant.Principal{Tenant: someTenant, KeyID: keyID, Role: tenant.RoleService, Subject: tenant.Subject{Source: "default", Value: who.User}}, nil
}

// What is wrong before a stream begins is an answer as any other.
func TestEvents_BeforeTheyBegin(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const path = "/v1/sessions/" + sessionOne + "/events"
	alice := asUser("service", "alice")
	none := []string{}
	for _, c := range []struct {
		path    string
		headers []string
		code    int
		reason  string
		field   string
		called  string
	}{
		{path, alice, 429, "TOO_MANY_STREAMS", "", "Follow ten_00000000000000000000000000 " + sessionOne + "  -1 calendar"},
		{path + "?after=0", alice, 429, "TOO_MANY_STREAMS", "", "Follow ten_00000000000000000000000000 " + sessionOne + "  0 calendar"},
		{path + "?after=7", append(asUser("service", "alice"), "Last-Event-ID", "9"), 429, "TOO_MANY_STREAMS", "", "Follow ten_00000000000000000000000000 " + sessionOne + "  9 calendar"},
		{"/v1/calls/" + callOne + "/events", alice, 429, "TOO_MANY_STREAMS", "", "Follow ten_00000000000000000000000000 " + sessionOne + " " + callOne + " -1 calendar"},
		{path + "?ticket=bht_secret", none, 429, "TOO_MANY_STREAMS", "", "Follow ten_00000000000000000000000000 " + sessionOne + "  -1 calendar"},
		{"/v1/sessions/ses_00000000000000000000000009/events?ticket=bht_secret", none, 403, "TICKET_OF_ANOTHER_SESSION", "", ""},
		{path + "?ticket=bht_other", none, 401, "TICKET_INVALID", "", ""},
		{path + "?ticket=bht_secret", alice, 400, "INVALID_ARGUMENT", "ticket: goes without a credential and without headers about a user", ""},
		{path, none, 401, "UNAUTHENTICATED", "", ""},
		{path, as("service"), 403, "USER_REQUIRED", "", ""},
		{path, as("auditor"), 403, "ROLE_NOT_ALLOWED", "", ""},
		{path + "?after=-1", alice, 400, "INVALID_ARGUMENT", "after: must be greater than or equal to 0", ""},
		{path + "?after=x", alice, 400, "INVALID_ARGUMENT", "after: must be an integer", ""},
		{path + "?what=1", alice, 400, "INVALID_ARGUMENT", "what: unknown field", ""},
		{path + "?sessionId=1", alice, 400, "INVALID_ARGUMENT", "sessionId: is part of the path and not of the query", ""},
		{path, append(asUser("service", "alice"), "Last-Event-ID", "07"), 400, "INVALID_ARGUMENT", "Last-Event-ID: must be the id of an event of this session", ""},
		{"/v1/sessions/nonsense/events", alice, 400, "INVALID_ARGUMENT", "", ""},
	} {
		a := r.rest("GET", c.path, "", c.headers...)
		called := strings.Join(r.taken(), ", ")
		if strings.HasPrefix(called, "Calls.") || strings.HasPrefix(called, "Get ") {
			_, called, _ = strings.Cut(called, ", ")
		}
		if a.code != c.code || c.reason != "INVALID_ARGUMENT" && a.reason() != c.reason || c.field != "" && a.field() != c.field || called != c.called {
			t.Errorf("%s %v: %d %s %q, called %q", c.path, c.headers, a.code, a.reason(), a.field(), called)
		}
	}
	r.logM.Lock()
	defer r.logM.Unlock()
	if strings.Contains(r.log.String(), "bht_") {
		t.Error("a ticket is in the log")
	}
}

func TestEvents_OverGRPC(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := pb.NewEventServiceClient(r.conn)
	for _, c := range []struct {
		md     metadata.MD
		ticket string
		code   codes.Code
	}{
		{metadata.Pairs("authorization", "Bearer service", "bulkhead-user", "alice"), "", codes.ResourceExhausted},
		{metadata.Pairs("authorization", "Bearer service", "bulkhead-user", "alice"), "bht_secret", codes.InvalidArgument},
		{metadata.MD{}, "bht_secret", codes.ResourceExhausted},
		{metadata.MD{}, "", codes.Unauthenticated},
	} {
		st, err := client.StreamSessionEvents(metadata.NewOutgoingContext(t.Context(), c.md), &pb.StreamSessionEventsRequest{SessionId: sessionOne, Ticket: c.ticket})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Recv(); status.Code(err) != c.code {
			t.Errorf("%v %q: %v", c.md, c.ticket, err)
		}
	}
}

func TestEvents_Ticket(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a := r.rest("POST", "/v1/sessions/"+sessionOne+":issueEventTicket", "{}", asUser("service", "alice")...)
	if string(a.body) != `{"ticket":"bht_secret","expireTime":"1970-01-01T00:00:30Z"}` || a.header.Get("Cache-Control") != "no-store" {
		t.Errorf("%d %s %v", a.code, a.body, a.header)
	}
	if got := r.taken(); len(got) != 1 || got[0] != "IssueTicket default|alice "+sessionOne {
		t.Error(got)
	}
}

// A stream's frames, its heartbeats and the error that ends it.
func TestSSE_Frames(t *testing.T) {
	t.Parallel()
	w := &recorder{header: http.Header{}}
	s := &sseStream{ctx: t.Context(), in: &pb.StreamSessionEventsRequest{SessionId: sessionOne}, w: newPacedWriter(w, streamWriteLimit)}
	in := &pb.StreamSessionEventsRequest{}
	if err := s.RecvMsg(in); err != nil || in.GetSessionId() != sessionOne || s.RecvMsg(in) != io.EOF {
		t.Errorf("%v %v", in, err)
	}
	for _, e := range []events.Event{{N: 7, Kind: events.CallChanged, State: "a\nb"}, {Kind: events.Heartbeat}, {Kind: events.CallProgress}} {
		if err := s.SendMsg(eventMessage(e)); err != nil {
			t.Fatal(err)
		}
	}
	s.fail(answerFor(fault.New(fault.Exhausted, "READER_TOO_SLOW", "slow")))
	s.fail(answerFor(fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "over")))
	got := strings.Split(w.String(), "\n\n")
	for i, want := range []string{"id: 7\nevent: call.changed\ndata: {\"eventId\":\"7\",", ": heartbeat", "event: call.progress\ndata: {\"eventId\":\"\",",
		"event: dropped\ndata: {\"code\":8,", "event: error\ndata: {\"code\":16,", ""} {
		if i >= len(got) || !strings.HasPrefix(got[i], want) {
			t.Errorf("frame %d of %q", i, got)
		}
	}
	if w.header.Get("Content-Type") != "text/event-stream" || w.header.Get("X-Accel-Buffering") != "no" {
		t.Error(w.header)
	}
}

// A stream outlives the server's time for an answer as long as its reader reads,
// and ends at a write that nobody takes.
func TestPacedWriter_EndsWithAReaderWhoDoesNotRead(t *testing.T) {
	t.Parallel()
	const limit = 50 * time.Millisecond
	for _, version := range []int{1, 2} {
		ended := make(chan struct{})
		srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			p := newPacedWriter(w, limit)
			quiet := time.NewTicker(2 * limit)
			defer quiet.Stop()
			chunk := make([]byte, 64<<10)
			var err error
			for i := 0; err == nil; i++ {
				if i < 3 {
					<-quiet.C // the time for an answer passes between writes
				}
				if _, err = p.Write(chunk[:min(len(chunk), 1+i*len(chunk))]); err == nil {
					err = p.flush()
				}
				if err != nil && i < 3 {
					t.Errorf("HTTP/%d: write %d: %v", r.ProtoMajor, i, err)
				}
			}
			close(ended)
		}))
		srv.Config.WriteTimeout = limit
		srv.Config.Protocols = &http.Protocols{}
		srv.Config.Protocols.SetHTTP1(true)
		srv.Config.Protocols.SetUnencryptedHTTP2(true)
		srv.Start()
		tr := &http.Transport{Protocols: &http.Protocols{}}
		tr.Protocols.SetHTTP1(version == 1)
		tr.Protocols.SetUnencryptedHTTP2(version == 2)
		res, err := (&http.Client{Transport: tr}).Get(srv.URL)
		if err != nil {
			t.Fatal(err)
		}
		// Nothing is read: the writes go on until all that lies between is full.
		<-ended
		if res.ProtoMajor != version {
			t.Errorf("HTTP/%d was spoken", res.ProtoMajor)
		}
		res.Body.Close()
		tr.CloseIdleConnections()
		srv.Close()
	}
}

type recorder struct {
	strings.Builder
	header http.Header
}

func (r *recorder) Header() http.Header { return r.header }
func (r *recorder) WriteHeader(int)     {}
func (r *recorder) Flush()              {}
