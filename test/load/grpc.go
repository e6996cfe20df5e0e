package load

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// GRPC calls Bulkhead over one connection of gRPC. It is safe for concurrent use.
type GRPC struct {
	conn  *grpc.ClientConn
	calls pb.CallServiceClient
	tools pb.CatalogServiceClient
}

// NewGRPC returns a client of the address of a REST URL. It connects when first
// used.
func NewGRPC(url string) (*GRPC, error) {
	conn, err := grpc.NewClient("passthrough:///"+strings.TrimPrefix(url, "http://"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, err
	}
	return &GRPC{conn: conn, calls: pb.NewCallServiceClient(conn), tools: pb.NewCatalogServiceClient(conn)}, nil
}

// Close ends the connection.
func (c *GRPC) Close() error { return c.conn.Close() }

func as(ctx context.Context, who As) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+who.Key, "bulkhead-user", who.User)
}

// Read is REST.Read over gRPC.
func (c *GRPC) Read(ctx context.Context, who As, session string) error {
	call, err := c.calls.CreateCall(as(ctx, who), &pb.CreateCallRequest{SessionId: session, Server: ReadServer, Tool: ReadTool,
		Arguments: &pb.Json{Raw: []byte(ReadArguments)}})
	if err == nil && call.GetState() != pb.Call_SUCCEEDED {
		err = fmt.Errorf("the read ended as %s: %s", call.GetState(), call.GetError().GetMessage())
	}
	return err
}

// Tools lists the session's tools and returns how many there are.
func (c *GRPC) Tools(ctx context.Context, who As, session string) (int, error) {
	list, err := c.tools.ListTools(as(ctx, who), &pb.ListToolsRequest{SessionId: session})
	return len(list.GetTools()), err
}
