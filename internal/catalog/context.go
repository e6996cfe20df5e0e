package catalog

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Context is whose list it is: the authorization context in which a server is
// asked. Contexts never share a list, but for one that the server calls public,
// which is shared within the tenant.
type Context struct {
	Tenant  tenant.ID
	Subject tenant.Subject
	// Session is the session's id.
	Session string
	// Account is the version of the user's account at the server, 0 for none.
	Account int64
	// Probe says that an admin asks, not a user's session; the connection need not
	// be kept.
	Probe bool
}

// scope leaves in c only what the server's isolation distinguishes.
func (v Server) scope(c Context) Context {
	switch v.Isolation {
	case PerTenant:
		c.Subject, c.Session, c.Account = tenant.Subject{}, "", 0
	case PerUser:
		c.Session = ""
	}
	return c
}

// name returns the stored name of a scoped context: a word for people and a
// digest, so that rows and calls do not repeat who the user is. Declared is part
// of it because servers offer more or less by what the client declares.
func (c Context) name(declared string) string {
	word := "user-"
	switch {
	case c.Session != "":
		word = "session-"
	case c.Subject.IsZero():
		word = "tenant-"
	}
	return word + contextDigest(declared, c.Subject.Source, c.Subject.Value, c.Session, account(c.Account))
}

func publicName(declared string) string { return "public-" + contextDigest(declared) }

func account(version int64) string {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(version))
	return string(b[:])
}

func contextDigest(parts ...string) string {
	var b []byte
	for _, p := range parts {
		b = appendText(b, p)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// subject returns whose agreements a changed definition ends: the user's, or
// everyone's (nil) where all users see one list.
func (c Context) subject() *tenant.Subject {
	if c.Subject.IsZero() {
		return nil
	}
	s := c.Subject
	return &s
}
