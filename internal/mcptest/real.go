package mcptest

import (
	"context"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/mark3labs/mcp-go/mcp"
	"github.com/mark3labs/mcp-go/server"
)

// Real is a server made of mcp-go, for tests that want a real peer.
type Real struct {
	// URL is the MCP endpoint.
	URL string
	// Calls counts executions of the tool echo.
	Calls atomic.Int64
	mcp   *server.MCPServer
}

// NewReal starts a server with the tools echo (text) and slow, which waits for its
// context. It speaks both eras.
func NewReal(t testing.TB) *Real {
	t.Helper()
	r := &Real{mcp: server.NewMCPServer("real", "1", server.WithToolCapabilities(true))}
	r.mcp.AddTool(mcp.NewTool("echo", mcp.WithString("text")), func(_ context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r.Calls.Add(1)
		return mcp.NewToolResultText(req.GetString("text", "")), nil
	})
	r.mcp.AddTool(mcp.NewTool("slow"), func(ctx context.Context, _ mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	h := httptest.NewServer(server.NewStreamableHTTPServer(r.mcp, server.WithStateful(true)))
	r.URL = h.URL
	t.Cleanup(func() {
		h.CloseClientConnections()
		h.Close()
	})
	return r
}

// AddTool adds a tool that does nothing; servers announce that their list changed.
func (r *Real) AddTool(name string) {
	r.mcp.AddTool(mcp.NewTool(name), func(context.Context, mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return mcp.NewToolResultText("ok"), nil
	})
}
