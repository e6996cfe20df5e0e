package catalog

import (
	"time"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
)

// Transport is how a server is reached.
type Transport string

// The transports of a registration.
const (
	HTTP  Transport = "HTTP"
	SSE   Transport = "SSE"
	Stdio Transport = "STDIO"
)

// Isolation says who shares a connection to a server, and with it what the
// server remembers and lists.
type Isolation string

// The isolation modes.
const (
	PerUser    Isolation = "PER_USER"
	PerSession Isolation = "PER_SESSION"
	PerTenant  Isolation = "PER_TENANT"
)

// AuthorizationNone is the only authorization mode yet: the server gets no
// credentials.
const AuthorizationNone = "NONE"

// MaxServers is how many servers a tenant may have registered at a time.
const MaxServers = 1000

// Server is a tenant's registration of one MCP server.
type Server struct {
	ID          string
	Name        string
	DisplayName string
	Transport   Transport
	// URL is the MCP endpoint of an HTTP server or the event stream of an SSE one,
	// Runtime the declared command of a stdio one; the other is empty.
	URL, Runtime string
	// Origin is scheme://host[:port] in lower case, or stdio:<runtime>.
	Origin                  string
	Isolation               Isolation
	SharedStateAcknowledged bool
	AuthorizationMode       string
	// Registration counts the changes of what is connected to and for whom.
	// Connections, lists and agreements of an earlier one are worth nothing.
	Registration int64
	// Era and ProtocolVersion are what a connection proved last, NewestVersion is the
	// newest version that any proved; empty before. All are of this registration.
	Era, ProtocolVersion, NewestVersion string
	// ActiveContract is the revision in force, 0 for none.
	ActiveContract   int
	ActiveContractID string
	// Deleted says that the registration has ended.
	Deleted                bool
	CreateTime, UpdateTime time.Time
}

// ServerSpec is what an admin registers. Exactly one of URL, StreamURL and Runtime
// is set.
type ServerSpec struct {
	// Name matches ^[a-z][a-z0-9-]{0,62}$ and is unique in the tenant while the
	// registration lives. It never changes.
	Name string
	// DisplayName has at most 128 characters; empty means Name. It names nothing.
	DisplayName string
	// URL is for Streamable HTTP; StreamURL, for HTTP+SSE, is the switch that turns
	// this old transport on for one server; Runtime is for stdio.
	URL       string
	StreamURL string `json:",omitempty"` // so that the digest of other creates stays what it was
	Runtime   string
	// Isolation: empty means PerUser.
	Isolation Isolation
	// AuthorizationMode: empty means AuthorizationNone.
	AuthorizationMode string
	// SharedStateAcknowledged is needed for PerTenant: all users then share what
	// the server remembers.
	SharedStateAcknowledged bool
}

// ServerUpdate changes the members that are not nil. The kind of transport
// cannot change: URL is for HTTP servers, StreamURL for SSE ones and Runtime for
// stdio ones.
type ServerUpdate struct {
	DisplayName             *string
	URL, StreamURL, Runtime *string
	Isolation               *Isolation
	AuthorizationMode       *string
	SharedStateAcknowledged *bool
}

// problems collects broken rules, so that an answer names all of them.
type problems []fault.Field

func (p *problems) add(path, rule string) { *p = append(*p, fault.Field{Path: path, Rule: rule}) }

func (p *problems) join(err error) {
	if f, ok := fault.As(err); ok {
		*p = append(*p, f.Fields...)
	}
}

func (p problems) err() error {
	if len(p) == 0 {
		return nil
	}
	return fault.InvalidFields(p...)
}

// server checks a spec and returns the registration it asks for.
func (s *Service) server(spec ServerSpec) (Server, error) {
	var bad problems
	out := Server{Name: spec.Name, DisplayName: spec.DisplayName, URL: spec.URL, Runtime: spec.Runtime,
		Isolation: spec.Isolation, AuthorizationMode: spec.AuthorizationMode,
		SharedStateAcknowledged: spec.SharedStateAcknowledged, Registration: 1}
	if !resource.IsServerName(spec.Name) {
		bad.add("name", resource.ServerNameRule)
	}
	if out.DisplayName == "" {
		out.DisplayName = spec.Name
	}
	if out.Isolation == "" {
		out.Isolation = PerUser
	}
	if out.AuthorizationMode == "" {
		out.AuthorizationMode = AuthorizationNone
	}
	switch {
	case spec.URL != "" && spec.StreamURL != "":
		bad.add("sse", "must be absent when http is given")
	case (spec.URL != "" || spec.StreamURL != "") && spec.Runtime != "":
		bad.add("stdio", "must be absent when http or sse is given")
	case spec.URL != "":
		out.Transport = HTTP
	case spec.StreamURL != "":
		out.Transport, out.URL = SSE, spec.StreamURL
	case spec.Runtime != "":
		out.Transport = Stdio
	default:
		bad.add("http", "one of http, sse and stdio is needed")
	}
	s.complete(&out, &bad)
	return out, bad.err()
}

// complete checks what create and update share and computes the origin.
func (s *Service) complete(v *Server, bad *problems) {
	if !utf8.ValidString(v.DisplayName) || utf8.RuneCountInString(v.DisplayName) > 128 || hasControl(v.DisplayName) {
		bad.add("displayName", "must have at most 128 characters and no control characters")
	}
	switch v.Transport {
	case HTTP, SSE:
		u, err := s.o.CheckURL(v.Transport.urlField(), v.URL)
		if err != nil {
			bad.join(err)
		} else {
			v.Origin = egress.Origin(u)
		}
	case Stdio:
		if !s.runtimes[v.Runtime] {
			bad.add("stdio.runtime", "is not a runtime that the operator declared")
		}
		v.Origin = "stdio:" + v.Runtime
	}
	switch v.Isolation {
	case PerUser, PerSession:
	case PerTenant:
		if !v.SharedStateAcknowledged {
			bad.add("sharedStateAcknowledged", "must be true for PER_TENANT: all users share what the server remembers")
		}
		if v.AuthorizationMode != AuthorizationNone {
			bad.add("authorization.mode", "must be NONE for PER_TENANT: a shared connection carries no user's credentials")
		}
	default:
		bad.add("isolation", "must be PER_USER, PER_SESSION or PER_TENANT")
	}
	if v.AuthorizationMode != AuthorizationNone {
		bad.add("authorization.mode", "must be NONE: this build offers no other mode")
	}
}

// urlField is how the API names the URL of a transport.
func (t Transport) urlField() string {
	if t == SSE {
		return "sse.url"
	}
	return "http.url"
}

func hasControl(s string) bool {
	for _, r := range s {
		if r < ' ' || r >= 0x7f && r <= 0x9f {
			return true
		}
	}
	return false
}

// apply returns the registration after an update, and whether the update changes
// what is connected to or for whom.
func (s *Service) apply(v Server, up ServerUpdate) (Server, bool, error) {
	var bad problems
	before := v
	set(&v.DisplayName, up.DisplayName)
	set(&v.Isolation, up.Isolation)
	set(&v.AuthorizationMode, up.AuthorizationMode)
	set(&v.SharedStateAcknowledged, up.SharedStateAcknowledged)
	if up.URL != nil {
		if v.Transport != HTTP {
			bad.add("http", "is not how this server is reached; register another")
		}
		v.URL = *up.URL
	}
	if up.StreamURL != nil {
		if v.Transport != SSE {
			bad.add("sse", "is not how this server is reached; register another")
		}
		v.URL = *up.StreamURL
	}
	if up.Runtime != nil {
		if v.Transport != Stdio {
			bad.add("stdio", "is not how this server is reached; register another")
		}
		v.Runtime = *up.Runtime
	}
	if v.DisplayName == "" {
		v.DisplayName = v.Name
	}
	if len(bad) == 0 {
		s.complete(&v, &bad)
	}
	if err := bad.err(); err != nil {
		return before, false, err
	}
	moved := v.URL != before.URL || v.Runtime != before.Runtime || v.Isolation != before.Isolation ||
		v.AuthorizationMode != before.AuthorizationMode
	if moved {
		v.Registration++
		v.Era, v.ProtocolVersion, v.NewestVersion = "", "", ""
	}
	return v, moved, nil
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}
