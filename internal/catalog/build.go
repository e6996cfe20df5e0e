package catalog

import (
	"errors"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// The bounds of one list.
const (
	// MaxDefinitions is the greatest number of definitions of one kind.
	MaxDefinitions = 5_000
	// MaxListing is the greatest length of one list in bytes.
	MaxListing = 16 << 20
	// maxCapabilities bounds what a server declares about itself, in bytes.
	maxCapabilities = 64 << 10
	// maxTTL bounds for how long a server may have its list reused.
	maxTTL = 24 * time.Hour
)

// buildContent examines a listing. A bad definition is quarantined alone; only a
// list past the bounds is refused as a whole.
func buildContent(v Server, kind Kind, l Listing) (*content, error) {
	if n := len(l.Items) + len(l.Rejected); n > MaxDefinitions {
		return nil, fault.New(fault.Unavailable, "CATALOG_TOO_LARGE", "the server lists %d definitions, more than %d",
			n, MaxDefinitions).In(fault.Server)
	}
	size := 0
	for _, raw := range l.Items {
		size += len(raw)
	}
	for _, r := range l.Rejected {
		size += len(r.Item)
	}
	if size > MaxListing {
		return nil, fault.New(fault.Unavailable, "CATALOG_TOO_LARGE", "the server lists %d bytes, more than %d",
			size, MaxListing).In(fault.Server)
	}
	c := &content{serverID: v.ID, kind: kind, protocolVersion: short(l.ProtocolVersion), era: short(l.Era)}
	c.definitions = make([]Definition, 0, len(l.Items)+len(l.Rejected))
	for _, raw := range l.Items {
		c.definitions = append(c.definitions, readDefinition(kind, raw))
	}
	for _, r := range l.Rejected {
		d := readDefinition(kind, r.Item)
		if d.Quarantine == "" {
			d.Quarantine = bounded("the protocol refuses it: " + printable(r.Reason))
		}
		c.definitions = append(c.definitions, d)
	}
	quarantineDuplicates(c.definitions)
	if len(l.Capabilities) > 0 && len(l.Capabilities) <= maxCapabilities {
		// In canonical form, so that the order of members makes no new revision.
		if doc, err := canonical.Doc(l.Capabilities); err == nil {
			c.capabilities = doc
		}
	}
	if l.Incomplete != "" {
		c.findings = append(c.findings, Finding{Code: FindingIncomplete, Detail: bounded("incomplete: " + printable(l.Incomplete))})
	}
	c.seal()
	return c, nil
}

// short bounds a word that a server chose, such as its protocol version.
func short(s string) string {
	if len(s) > 64 || hasControl(s) {
		return quoteShort(s)
	}
	return s
}

// printable returns text that may be foreign as quoted ASCII unless it is plain.
func printable(s string) string {
	if isPlainASCII(s) {
		return s
	}
	return quoteShort(s)
}

// listFault turns what a Lister returned into what callers are told, and says
// whether the server refused the user's credentials.
func listFault(err error) (f *fault.Error, hidden bool) {
	f, ok := fault.As(err)
	switch {
	case ok && (f.Kind == fault.Unauthenticated || f.Kind == fault.Denied):
		return refused().Cause(err), true
	case ok && f.Kind != fault.Internal:
		out := *f
		// What the server did is no judgement about our caller's request.
		out.Kind = fault.Unavailable
		return (&out).Cause(err), false
	case errors.Is(err, errTimeout):
		return fault.New(fault.Unavailable, "SERVER_TIMEOUT", "the server did not list its definitions in time").
			In(fault.Transport).Cause(err), false
	}
	return fault.New(fault.Unavailable, "CATALOG_UNAVAILABLE", "the server's definitions could not be listed").
		In(fault.Server).Cause(err), false
}

var errTimeout = errors.New("catalog: the list took too long")

func refused() *fault.Error {
	return fault.New(fault.Denied, "AUTHORIZATION_REQUIRED", "the server refuses the credentials of this user").In(fault.Server)
}
