package api

import (
	"context"
	"fmt"
	"runtime/debug"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionv1alpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// open are the gRPC methods for everybody, without a credential: they tell
// whether the server is ready, as /readyz does, and what the protos say, which
// are public. They reach no tenant's data and are neither logged nor counted.
// Every other method is in the table of roles, or refused.
var open = map[string]bool{
	healthpb.Health_Check_FullMethodName: true,
	healthpb.Health_List_FullMethodName:  true,
	healthpb.Health_Watch_FullMethodName: true,

	reflectionv1.ServerReflection_ServerReflectionInfo_FullMethodName:      true,
	reflectionv1alpha.ServerReflection_ServerReflectionInfo_FullMethodName: true,
}

// maxOpenMessages bounds what one stream without a credential may ask. Its time
// is bounded as that of every body is.
const maxOpenMessages = 1000

// registerOpen offers the open methods over gRPC.
func (s *Server) registerOpen() {
	healthpb.RegisterHealthServer(s.grpc, &health{server: s})
	reflection.Register(s.grpc)
}

// health is grpc.health.v1 of the whole server and of each service, which are
// ready together. List and Watch are not implemented; clients then ask Check.
type health struct {
	healthpb.UnimplementedHealthServer
	server *Server
}

// Check implements healthpb.HealthServer.
func (h *health) Check(ctx context.Context, in *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if _, ok := h.server.grpc.GetServiceInfo()[in.GetService()]; !ok && in.GetService() != "" {
		return nil, answerFor(fault.New(fault.NotFound, "SERVICE_NOT_FOUND", "no such service"))
	}
	out := &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}
	if !h.server.isReady(ctx) {
		out.Status = healthpb.HealthCheckResponse_NOT_SERVING
	}
	return out, nil
}

func (e *edge) openUnary(ctx context.Context, in any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (out any, err error) {
	defer e.recovered(ctx, info.FullMethod, &err)
	return next(ctx, in)
}

// recovered turns a panic into an error.
func (e *edge) recovered(ctx context.Context, method string, err *error) {
	if v := recover(); v != nil {
		e.panicked(ctx, method, v)
		*err = answerFor(fault.New(fault.Internal, "INTERNAL", "internal error"))
	}
}

func (e *edge) panicked(ctx context.Context, method string, v any) {
	e.log.ErrorContext(ctx, "panic", "method", method, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
}

// boundedStream takes a number of messages.
type boundedStream struct {
	grpc.ServerStream
	left int
}

// RecvMsg implements grpc.ServerStream.
func (s *boundedStream) RecvMsg(m any) error {
	if s.left == 0 {
		return answerFor(fault.New(fault.Exhausted, "TOO_MANY_MESSAGES", "a stream takes at most %d messages", maxOpenMessages))
	}
	s.left--
	return s.ServerStream.RecvMsg(m)
}
