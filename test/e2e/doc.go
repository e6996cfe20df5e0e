// Package e2e tests the whole service over its public API: the real binary in
// production mode on a private PostgreSQL and Redis, called over REST and gRPC,
// against MCP servers of our own and of others. It reaches into nothing of the
// service except the owner's view of the database, to see what was not written.
package e2e
