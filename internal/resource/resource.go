// Package resource mints and checks the names of things: opaque ids that sort
// by creation time, and the names that admins choose for servers.
package resource

import (
	"crypto/rand"
	"encoding/base32"
	"encoding/binary"
	"regexp"
	"time"
)

// Kind is the prefix of an id and tells what it names.
type Kind string

// The kinds of resource, one for each id prefix.
const (
	Tenant     Kind = "ten"
	Key        Kind = "key"
	Server     Kind = "srv"
	Session    Kind = "ses"
	Call       Kind = "call"
	Consent    Kind = "cns"
	Grant      Kind = "grt"
	AuditEntry Kind = "aud"
	Catalog    Kind = "cat"
	Connection Kind = "con"
	// Interaction is a question that a server asks in the middle of a call.
	Interaction Kind = "int"
	// Subscription is a session's wish to hear when a resource changes.
	Subscription Kind = "sub"
	// An event is told to endpoints by one delivery each.
	WebhookEndpoint Kind = "whe"
	WebhookEvent    Kind = "evt"
	WebhookDelivery Kind = "whd"
)

// Crockford's alphabet in lower case keeps the byte order of the input, so ids
// sort by time, and has no character that a path or a header must escape.
var encoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

// NewID returns kind_ followed by 26 characters: 48 bits of Unix milliseconds
// and 80 random bits. It never holds a colon (custom verbs use it).
func NewID(kind Kind) string { return newIDAt(kind, time.Now()) }

func newIDAt(kind Kind, at time.Time) string {
	var b [16]byte
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(at.UnixMilli()))
	copy(b[:6], ms[2:])
	rand.Read(b[6:]) //nolint:errcheck // crypto/rand.Read never fails since Go 1.24
	return string(kind) + "_" + encoding.EncodeToString(b[:])
}

// IsID reports whether s has the form of an id of this kind. It says nothing
// about existence.
func IsID(kind Kind, s string) bool {
	p := string(kind) + "_"
	if len(s) != len(p)+26 || s[:len(p)] != p {
		return false
	}
	_, err := encoding.DecodeString(s[len(p):])
	return err == nil
}

var serverName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,62}$`)

// ServerNameRule is the rule for names of servers, as shown in errors.
const ServerNameRule = "must match ^[a-z][a-z0-9-]{0,62}$"

// IsServerName reports whether s may name a server.
func IsServerName(s string) bool { return serverName.MatchString(s) }
