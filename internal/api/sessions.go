package api

import (
	"context"
	"slices"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Sessions keeps users' working spaces; *sessions.Store is one.
type Sessions interface {
	Create(ctx context.Context, p tenant.Principal, r sessions.OpenRequest) (*sessions.Session, error)
	Get(ctx context.Context, p tenant.Principal, id string) (*sessions.Session, error)
	List(ctx context.Context, p tenant.Principal, after string, limit int) ([]*sessions.Session, error)
	Close(ctx context.Context, p tenant.Principal, id string) (*sessions.Session, error)
}

// Connections tells of live connections; *sessions.Pool is one.
type Connections interface {
	Connections(t tenant.ID, match func(sessions.Key) bool) []sessions.ConnectionInfo
}

type sessionService struct {
	pb.UnimplementedSessionServiceServer
	sessions    Sessions
	connections Connections
	servers     Servers
}

func (s *sessionService) OpenSession(ctx context.Context, in *pb.OpenSessionRequest) (*pb.Session, error) {
	id := minted(in.GetRequestId())
	ses, err := s.sessions.Create(ctx, caller(ctx), sessions.OpenRequest{
		Servers: in.GetServers(), TTL: in.GetTtl().AsDuration(), RequestID: id})
	if err != nil {
		return nil, err
	}
	out, err := s.message(ctx, ses)
	if err != nil {
		return nil, err
	}
	out.RequestId = &id
	return out, nil
}

func (s *sessionService) GetSession(ctx context.Context, in *pb.GetSessionRequest) (*pb.Session, error) {
	ses, err := s.sessions.Get(ctx, caller(ctx), in.GetSessionId())
	if err != nil {
		return nil, err
	}
	return s.message(ctx, ses)
}

func (s *sessionService) ListSessions(ctx context.Context, in *pb.ListSessionsRequest) (*pb.ListSessionsResponse, error) {
	p, err := readPage(in, "sessions", caller(ctx).Subject.String())
	if err != nil {
		return nil, err
	}
	list, err := s.sessions.List(ctx, caller(ctx), p.after, p.limit+1)
	if err != nil {
		return nil, err
	}
	list, next := cut(p, list, func(s *sessions.Session) string { return s.ID })
	out := &pb.ListSessionsResponse{NextPageToken: next}
	for _, ses := range list {
		m, err := s.message(ctx, ses)
		if err != nil {
			return nil, err
		}
		out.Sessions = append(out.Sessions, m)
	}
	return out, nil
}

func (s *sessionService) CloseSession(ctx context.Context, in *pb.CloseSessionRequest) (*pb.Session, error) {
	ses, err := s.sessions.Close(ctx, caller(ctx), in.GetSessionId())
	if err != nil {
		return nil, err
	}
	return s.message(ctx, ses)
}

func (s *sessionService) ListConnections(ctx context.Context, in *pb.ListConnectionsRequest) (*pb.ListConnectionsResponse, error) {
	p := caller(ctx)
	ses, err := s.sessions.Get(ctx, p, in.GetSessionId())
	if err != nil {
		return nil, err
	}
	infos := s.connections.Connections(p.Tenant, func(k sessions.Key) bool { return serves(k, ses) })
	return &pb.ListConnectionsResponse{Connections: each(infos, connectionMessage)}, nil
}

// serves reports whether a connection is one that the session's calls use: its
// own, its user's, or the tenant's.
func serves(k sessions.Key, ses *sessions.Session) bool {
	return slices.Contains(ses.ServerIDs, k.Server) &&
		(k.Session == "" || k.Session == ses.ID) && (k.Subject.IsZero() || k.Subject == ses.Subject)
}

// message names the session's servers. One that was deleted, or that the
// caller's key is not for, keeps its id only.
func (s *sessionService) message(ctx context.Context, ses *sessions.Session) (*pb.Session, error) {
	out := &pb.Session{
		SessionId: ses.ID, Subject: ses.Subject.String(), Project: ses.Project, Groups: ses.Groups,
		State:      word[pb.Session_State](pb.Session_State_value, ses.State),
		CreateTime: stamp(ses.CreateTime), ExpireTime: stamp(ses.ExpireTime), CloseTime: stampOf(ses.CloseTime),
	}
	for _, id := range ses.ServerIDs {
		v, err := s.servers.GetServer(ctx, caller(ctx), id)
		if err != nil && !fault.Is(err, fault.NotFound) {
			return nil, err
		}
		out.Servers = append(out.Servers, &pb.Session_Member{ServerId: id, Server: v.Name})
	}
	return out, nil
}

func connectionMessage(c sessions.ConnectionInfo) *pb.Connection {
	return &pb.Connection{
		ConnectionId: c.ID, Server: c.ServerName,
		Transport: word[pb.Connection_Transport](pb.Connection_Transport_value, c.Transport),
		State:     word[pb.Connection_State](pb.Connection_State_value, c.State), Reason: foreign(c.Reason),
		Era: word[pb.Server_Era](pb.Server_Era_value, c.Era), ProtocolVersion: foreign(c.ProtocolVersion),
		InFlight: int32(c.Active), Watching: c.Watching, Negotiation: duration(c.Negotiation),
		CreateTime: stamp(c.Opened), LastUseTime: stamp(c.LastUsed),
		Stages: each(c.Stages, stageMessage), Attempts: int32(c.Attempts), NextTryTime: stamp(c.NextTry),
		StrayMessages: c.Stray, GarbageLines: c.Garbage, Logs: each(c.Logs, logMessage),
	}
}

func stageMessage(s sessions.Stage) *pb.Connection_Stage {
	return &pb.Connection_Stage{State: word[pb.Connection_State](pb.Connection_State_value, s.State), Time: stamp(s.Time), Took: duration(s.Took)}
}

func logMessage(n sessions.Notice) *pb.Connection_Log {
	return &pb.Connection_Log{Time: stamp(n.Time), Level: foreign(n.Level), Logger: foreign(n.Logger), Data: raw(n.Data)}
}
