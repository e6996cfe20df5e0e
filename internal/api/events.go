package api

import (
	"context"
	"errors"
	"io"
	"strconv"
	"time"

	"google.golang.org/grpc"

	"github.com/bulkhead-mcp/bulkhead/internal/events"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Events tells what happens in sessions; *events.Service is one.
type Events interface {
	Follow(ctx context.Context, t tenant.ID, r events.Request) (*events.Stream, error)
	IssueTicket(ctx context.Context, p tenant.Principal, sessionID string) (string, time.Time, error)
	RedeemTicket(ctx context.Context, ticket string) (events.Ticket, error)
}

// Authority says whether a key that was let in still is what it was;
// *tenant.Service is one.
type Authority interface {
	Reauthorize(ctx context.Context, keyID string, who tenant.OnBehalf) (tenant.Principal, error)
}

type eventService struct {
	pb.UnimplementedEventServiceServer
	events    Events
	authority Authority
	sessions  Sessions
	servers   Servers
	calls     Calls
	now       func() time.Time
}

// StreamSessionEvents implements pb.EventServiceServer.
func (s *eventService) StreamSessionEvents(in *pb.StreamSessionEventsRequest, out grpc.ServerStreamingServer[pb.Event]) error {
	return s.stream(out, events.Request{SessionID: in.GetSessionId(), After: in.After})
}

// StreamCallEvents implements pb.EventServiceServer.
func (s *eventService) StreamCallEvents(in *pb.StreamCallEventsRequest, out grpc.ServerStreamingServer[pb.Event]) error {
	c, err := s.calls.Get(out.Context(), caller(out.Context()), in.GetCallId(), 0, 0)
	if err != nil {
		return err
	}
	return s.stream(out, events.Request{SessionID: c.SessionID, CallID: c.ID, After: in.After})
}

// IssueEventTicket implements pb.EventServiceServer.
func (s *eventService) IssueEventTicket(ctx context.Context, in *pb.IssueEventTicketRequest) (*pb.EventTicket, error) {
	p := caller(ctx)
	ses, err := s.sessions.Get(ctx, p, in.GetSessionId())
	if err != nil {
		return nil, err
	}
	if !ses.Open(s.now()) {
		return nil, errSessionOver
	}
	ticket, expire, err := s.events.IssueTicket(ctx, p, ses.ID)
	if err != nil {
		return nil, err
	}
	return &pb.EventTicket{Ticket: ticket, ExpireTime: stamp(expire)}, nil
}

var (
	errSessionOver    = fault.New(fault.Precondition, "SESSION_ENDED", "the session has ended")
	errTicketMismatch = fault.New(fault.Denied, "TICKET_OF_ANOTHER_SESSION", "the ticket is for another session")
)

func (s *eventService) stream(out grpc.ServerStreamingServer[pb.Event], r events.Request) error {
	ctx := out.Context()
	p := caller(ctx)
	rq, ok := ctx.Value(requestKey{}).(*request)
	if !ok {
		return errors.New("api: a stream outside the edge")
	}
	if rq.session != "" && rq.session != r.SessionID {
		return errTicketMismatch
	}
	ses, err := s.sessions.Get(ctx, p, r.SessionID)
	if err != nil {
		return err
	}
	if !ses.Open(s.now()) && r.After == nil {
		return errSessionOver
	}
	if r.Servers, err = s.names(ctx, p, ses); err != nil {
		return err
	}
	who := rq.identity.onBehalf
	r.Check = func(ctx context.Context) error {
		now, err := s.authority.Reauthorize(ctx, p.KeyID, who)
		if err != nil {
			return err
		}
		ses, err := s.sessions.Get(ctx, now, r.SessionID)
		if err == nil && !ses.Open(s.now()) {
			err = events.ErrSessionEnded
		}
		return err
	}
	st, err := s.events.Follow(ctx, p.Tenant, r)
	if err != nil {
		return err
	}
	defer st.Close()
	for {
		e, err := st.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := out.Send(eventMessage(e)); err != nil {
			return err
		}
	}
}

// names are the names of the session's servers.
func (s *eventService) names(ctx context.Context, p tenant.Principal, ses *sessions.Session) (map[string]string, error) {
	names := make(map[string]string, len(ses.ServerIDs))
	for _, id := range ses.ServerIDs {
		v, err := s.servers.GetServer(ctx, p, id)
		if err != nil && !fault.Is(err, fault.NotFound) {
			return nil, err
		}
		if err == nil {
			names[id] = v.Name
		}
	}
	return names, nil
}

func eventMessage(e events.Event) *pb.Event {
	out := &pb.Event{Kind: string(e.Kind), SessionId: e.SessionID, CallId: e.CallID, ConsentId: e.ConsentID, InteractionId: e.InteractionID,
		State: e.State, Revision: int32(e.Revision), Server: e.Server, Uri: e.URI, CreateTime: stamp(e.Time), Reason: e.Reason}
	if e.N > 0 || e.Kind == events.Ready {
		out.EventId = strconv.FormatInt(e.N, 10)
	}
	return out
}
