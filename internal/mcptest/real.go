package mcptest

import (
	"context"
	"net/http"
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
	// Waiting counts the executions of the tool slow that have not ended.
	Waiting atomic.Int64
	mcp     *server.MCPServer
}

// NewReal starts a server with the tools echo (text) and slow, which waits for its
// context. It speaks both eras.
func NewReal(t testing.TB) *Real {
	t.Helper()
	r := newReal()
	r.serve(t, server.NewStreamableHTTPServer(r.mcp, server.WithStateful(true)), "")
	return r
}

// NewRealSSE is NewReal over HTTP+SSE.
func NewRealSSE(t testing.TB) *Real {
	t.Helper()
	r := newReal()
	r.serve(t, server.NewSSEServer(r.mcp), "/sse")
	return r
}

func (r *Real) serve(t testing.TB, handler http.Handler, path string) {
	h := httptest.NewServer(handler)
	r.URL = h.URL + path
	t.Cleanup(func() {
		h.CloseClientConnections()
		h.Close()
	})
}

func newReal() *Real {
	r := &Real{mcp: server.NewMCPServer("real", "1", server.WithToolCapabilities(true))}
	r.mcp.AddTool(mcp.NewTool("echo", mcp.WithString("text")), func(_ context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r.Calls.Add(1)
		return mcp.NewToolResultText(req.GetString("text", "")), nil
	})
	r.mcp.AddTool(mcp.NewTool("slow"), func(ctx context.Context, _ mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r.Waiting.Add(1)
		defer r.Waiting.Add(-1)
		<-ctx.Done()
		return nil, ctx.Err()
	})
	return r
}

// AddTool adds a tool that does nothing; servers announce that their list changed.
func (r *Real) AddTool(name string) {
	r.mcp.AddTool(mcp.NewTool(name), func(context.Context, mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return mcp.NewToolResultText("ok"), nil
	})
}
