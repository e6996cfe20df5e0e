// Package sessions owns the working spaces of users and the live connections to
// MCP servers. It is the only user of mcp-go on the client side, and only behind
// its own strict transports: every byte that a server sends is bounded, results
// pass through as raw bytes, and each request ends with a phase that is a fact.
package sessions
