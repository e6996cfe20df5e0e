// Package tenant knows who is asking. It owns tenants, their API keys and their
// data keys, and it is the only way to the tenants' tables: its transactions
// are scoped to one tenant by row-level security, and their type cannot be made
// elsewhere.
package tenant

import (
	"database/sql/driver"
	"fmt"
	"log/slog"
	"slices"
	"strings"
)

// ID names a tenant. It cannot be built outside this package: it comes from a
// verified credential or from a stored row.
type ID struct{ value string }

// String returns the id as text, ten_….
func (t ID) String() string { return t.value }

// LogValue implements slog.LogValuer; without it a log would show an empty object.
func (t ID) LogValue() slog.Value { return slog.StringValue(t.value) }

// IsZero reports whether t names no tenant.
func (t ID) IsZero() bool { return t.value == "" }

// Value implements driver.Valuer, so that an ID can be a query's argument.
func (t ID) Value() (driver.Value, error) {
	if t.value == "" {
		return nil, fmt.Errorf("tenant: no tenant given")
	}
	return t.value, nil
}

// Scan implements sql.Scanner for a column of a stored row.
func (t *ID) Scan(src any) error {
	s, ok := src.(string)
	if !ok || s == "" {
		return fmt.Errorf("tenant: cannot scan %T as an id", src)
	}
	t.value = s
	return nil
}

// Subject is a person or program as its source names it: alice of two sources
// is two people. The source is an issuer's id or a key's subject space.
type Subject struct {
	Source string
	Value  string
}

// IsZero reports whether s names nobody.
func (s Subject) IsZero() bool { return s.Value == "" }

// String returns source|value for logs and actors.
func (s Subject) String() string {
	if s.IsZero() {
		return ""
	}
	return s.Source + "|" + s.Value
}

// Role is what a credential is for; the table of methods for each role is in
// package api.
type Role uint8

// The roles. A key has one of them; User is a person with a token of their own.
const (
	RoleNone Role = iota
	RoleOperator
	RoleAdmin
	RoleService
	RoleApprover
	RoleAuditor
	RoleUser
)

var roleNames = [...]string{"NONE", "OPERATOR", "ADMIN", "SERVICE", "APPROVER", "AUDITOR", "USER"}

// String returns the role's word in the API and in the tables.
func (r Role) String() string {
	if int(r) < len(roleNames) {
		return roleNames[r]
	}
	return "NONE"
}

// ParseRole returns the role of a word, RoleNone when there is none.
func ParseRole(s string) Role {
	for i, n := range roleNames {
		if n == s {
			return Role(i)
		}
	}
	return RoleNone
}

// Principal is a verified caller. Tenant is zero only for the operator.
type Principal struct {
	Tenant  ID
	KeyID   string
	Role    Role
	Subject Subject
	Groups  []string
	Project string
	// MayDecide lets a service key decide consents; an admin gave it.
	MayDecide bool
	// Servers limits the credential to these server names; empty means all.
	Servers []string
	// SubjectSpace and UserPatterns limit the credential to subjects of this source
	// whose name matches a pattern; empty means any.
	SubjectSpace string
	UserPatterns []string
}

// Actor names the caller in audit entries: the key, and the subject it acts for.
func (p Principal) Actor() string {
	a := p.Role.String() + ":" + p.KeyID
	if !p.Subject.IsZero() {
		a += " for " + p.Subject.String()
	}
	return a
}

// MayUse reports whether the credential is for this server.
func (p Principal) MayUse(server string) bool {
	return len(p.Servers) == 0 || slices.Contains(p.Servers, server)
}

// MayActFor reports whether the credential is for this subject: for a service
// key to act as it, for an approver to decide what it asked for.
func (p Principal) MayActFor(s Subject) bool {
	return (p.SubjectSpace == "" || p.SubjectSpace == s.Source) &&
		(len(p.UserPatterns) == 0 || matchesAny(p.UserPatterns, s.Value))
}

var likeEscape = strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`, `*`, `%`)

// UserLikes returns UserPatterns as patterns of SQL's LIKE, for queries that
// show what MayActFor shows.
func (p Principal) UserLikes() []string {
	out := make([]string, len(p.UserPatterns))
	for i, pattern := range p.UserPatterns {
		out[i] = likeEscape.Replace(pattern)
	}
	return out
}
