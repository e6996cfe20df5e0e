// Package sessions owns the working spaces of users and the live connections to
// MCP servers. It is the only user of mcp-go on the client side, and only behind
// its own strict transports: every byte that a server sends is bounded, results
// pass through as raw bytes, and each request ends with a phase that is a fact.
//
// What is taken from mcp-go are the names of the protocol, its versions, the rules
// for Mcp-* headers and its types. Its readers are not used, because they have no
// bounds, do not compare response ids and lose HTTP statuses; its typed client is
// not, because it decodes results and settles on an era by any failure. So there
// is no implementation of its transport.Interface either: that interface has no
// place for the phase of a request.
//
// Three things may look odd. A server that answers server/discover with status 500,
// with a page, or not at all gets a handshake tried, but nothing is remembered of
// it, since none of this is a sign of an era. A request whose body the kernel did
// not take whole counts as not sent, because no proper part of a JSON object is
// one. And a child process is not this process's own child: internal/confine puts
// a keeper between them, which ends all that the child started, also when this
// process is killed.
//
// What a server says beside its answers goes one way, whatever the wire: a wire
// hands requests to conn.asked and notifications to conn.noticed, with the request
// on whose own stream they came. A talk is what goes on beside a request that takes
// questions or notices; a plain request has none and pays nothing for it. The time
// of a request stands still while a person has a question of it. Subscriptions
// belong to a key and not to a connection: a subscriber makes them again on each
// connection, and reports every gap as an update.
package sessions
