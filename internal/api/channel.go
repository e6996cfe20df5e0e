package api

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// channel is the connection between the REST gateway and the services: the
// same chain as gRPC, in process. Nothing is encoded or copied on the way.
type channel struct {
	edge    *edge
	methods map[string]localMethod
	streams map[string]localStream
}

type localMethod struct {
	service any
	handler grpc.MethodHandler
}

type localStream struct {
	service any
	handler grpc.StreamHandler
}

var (
	_ grpc.ClientConnInterface = (*channel)(nil)
	_ grpc.ServiceRegistrar    = (*channel)(nil)
)

// RegisterService implements grpc.ServiceRegistrar.
func (c *channel) RegisterService(desc *grpc.ServiceDesc, impl any) {
	for _, m := range desc.Methods {
		c.methods["/"+desc.ServiceName+"/"+m.MethodName] = localMethod{impl, m.Handler}
	}
	for _, m := range desc.Streams {
		c.streams["/"+desc.ServiceName+"/"+m.StreamName] = localStream{impl, m.Handler}
	}
}

// Invoke implements grpc.ClientConnInterface for the gateway only: the reply is
// left in the request, from where the response rewriter takes it, and the reply
// argument stays empty.
func (c *channel) Invoke(ctx context.Context, method string, args, _ any, _ ...grpc.CallOption) error {
	m, ok := c.methods[method]
	rq, inside := ctx.Value(requestKey{}).(*request)
	if !ok || !inside {
		return answerFor(fmt.Errorf("api: method %s was called from outside the gateway", method))
	}
	// What the gateway would send to another server ends here.
	ctx = metadata.NewOutgoingContext(ctx, metadata.MD{})
	out, err := m.handler(m.service, ctx, func(any) error { return nil },
		func(ctx context.Context, _ any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			return c.edge.serve(ctx, rq, info.FullMethod, args, next)
		})
	if err != nil {
		return err
	}
	rq.reply, ok = out.(proto.Message)
	if !ok {
		return answerFor(fmt.Errorf("api: method %s answered %T", method, out))
	}
	return nil
}

// NewStream implements grpc.ClientConnInterface. The gateway makes no stream: those
// of events are served beside it.
func (c *channel) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, answerFor(fault.New(fault.Unimplemented, "METHOD_NOT_FOUND", "no method streams here"))
}

// overREST reports whether the caller takes finished JSON by answerEncoded; a
// gRPC caller needs the message.
func overREST(ctx context.Context) bool {
	rq, ok := ctx.Value(requestKey{}).(*request)
	return ok && rq.transport == "rest"
}

// answerEncoded hands finished JSON to a REST caller in the place of the message
// that the service returns.
func answerEncoded(ctx context.Context, b []byte) {
	if rq, ok := ctx.Value(requestKey{}).(*request); ok {
		rq.encoded = b
	}
}
