// Package config turns the environment into one checked struct, and is the only
// place that reads the environment. Everything wrong is reported at once, by
// variable and rule; a variable that begins with BULKHEAD_ and is not known is
// refused, since it is most often a misspelled one.
//
// A secret may be given by a file instead: NAME_FILE holds the path of a file
// whose content is the value of NAME.
package config

import (
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"time"
)

// Config is the whole configuration, checked. It is read-only.
type Config struct {
	// Development says that the process brings its own PostgreSQL and Redis, a
	// demo tenant and a demo server, all on loopback.
	Development bool
	// Listen is the address of REST and gRPC, host:port.
	Listen string
	// MetricsListen is the address of /metrics, host:port.
	MetricsListen string
	// DataDir is an absolute path; in development mode the database lies there.
	DataDir string
	// DatabaseURL is the address for serving; empty in development mode.
	DatabaseURL Secret
	// MigrationDatabaseURL is the address of the tables' owner. When it is empty
	// in production mode, the process applies no migrations.
	MigrationDatabaseURL Secret
	// RedisURL is empty in development mode.
	RedisURL Secret
	// KEKs are the key-encryption keys, the primary one first; empty in
	// development mode, where DevelopmentKEK makes one.
	KEKs []KEK
	// OperatorKey is the credential that creates tenants, at least 32
	// characters; without one no caller is the operator.
	OperatorKey Secret
	// Runtimes are the declared commands of stdio servers, by name.
	Runtimes map[string]Runtime
	// EgressAllow are the non-public networks that servers may be reached in. In
	// development mode loopback is among them.
	EgressAllow []netip.Prefix
	// PublicURL is the address callers know, without a slash at the end; empty
	// when it was not given.
	PublicURL string
	// PostgresBin is a directory with PostgreSQL's server binaries for
	// development mode, instead of searching for one.
	PostgresBin string
	// LogLevel is the least level that is logged.
	LogLevel slog.Level
	// GracePeriod is how long a stopping process lets calls finish.
	GracePeriod time.Duration
}

// Secret is a value that must not be seen. Every way of printing it prints a
// placeholder; string(s) is the value.
type Secret string

const redacted = "[redacted]"

// Format prints a placeholder under every verb; with String alone a wrong verb
// would print the value.
func (Secret) Format(f fmt.State, _ rune) { io.WriteString(f, redacted) } //nolint:errcheck // fmt keeps its own error

// MarshalText returns a placeholder, for JSON and the like.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// LogValue returns a placeholder.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// Process loads the configuration from this process's environment.
func Process() (*Config, error) { return Load(os.Environ()) }

// Load checks an environment, given as NAME=value, and reads the files it names.
// The error is an Invalid fault with one field for each broken rule; the paths
// of its fields are names of variables. No value of a secret is in it.
func Load(environ []string) (*Config, error) {
	l := loader{env: toMap(environ)}
	return l.load()
}
