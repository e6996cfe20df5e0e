package api

import (
	"fmt"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The headers that say who calls; over gRPC they are metadata of these names.
const (
	headerAuthorization = "Authorization"
	headerUser          = "Bulkhead-User"
	headerGroups        = "Bulkhead-Groups"
	headerProject       = "Bulkhead-Project"
	headerRequestID     = "X-Request-Id"
	headerTraceParent   = "Traceparent"
	headerTraceState    = "Tracestate"
)

const (
	maxCredential = 8192 // bytes
	maxGroups     = 100
	maxIdentity   = 256 // characters
)

// identity is what a caller says about itself, not yet verified.
type identity struct {
	credential string
	onBehalf   tenant.OnBehalf
}

var errNoCredential = fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "send Authorization: Bearer <key>")

// readIdentity reads the caller's headers. values gives all values of a header.
func readIdentity(values func(name string) []string) (id identity, err error) {
	if id.credential, err = bearer(values(headerAuthorization)); err != nil {
		return identity{}, err
	}
	if id.onBehalf.User, err = named(headerUser, values(headerUser)); err != nil {
		return identity{}, err
	}
	if id.onBehalf.Project, err = named(headerProject, values(headerProject)); err != nil {
		return identity{}, err
	}
	id.onBehalf.Groups, err = groups(values(headerGroups))
	return id, err
}

// readTrace reads the caller's place in a distributed trace. Nothing else of it,
// such as baggage, is looked at.
func readTrace(values func(name string) []string) telemetry.Trace {
	return telemetry.ReadTrace(values(headerTraceParent), values(headerTraceState))
}

// bearer takes exactly one value of the form of RFC 6750, section 2.1. Two
// values are refused: whoever checked the first might use the second.
func bearer(values []string) (string, error) {
	if len(values) == 0 {
		return "", errNoCredential
	}
	if len(values) > 1 {
		return "", fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "Authorization appears more than once")
	}
	v := values[0]
	if len(v) < 8 || !strings.EqualFold(v[:7], "Bearer ") {
		return "", errNoCredential
	}
	token := v[7:]
	if len(token) > maxCredential {
		return "", fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "the credential is too long")
	}
	for i := range len(token) {
		c := token[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-._~+/=", c) >= 0) {
			return "", fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "the credential has characters that no credential has")
		}
	}
	return token, nil
}

// named reads a header of one percent-encoded value; absent is "".
func named(header string, values []string) (string, error) {
	if len(values) == 0 {
		return "", nil
	}
	if len(values) > 1 {
		return "", fault.Field1(header, "must appear once")
	}
	s, rule := decodeName(values[0])
	if rule != "" {
		return "", fault.Field1(header, "%s", rule)
	}
	return s, nil
}

func groups(values []string) ([]string, error) {
	if len(values) == 0 {
		return nil, nil
	}
	if len(values) > 1 {
		return nil, fault.Field1(headerGroups, "must appear once")
	}
	parts := strings.Split(values[0], ",")
	if len(parts) > maxGroups {
		return nil, fault.Field1(headerGroups, "must name at most %d groups", maxGroups)
	}
	seen := make(map[string]bool, len(parts))
	var out []string
	for i, part := range parts {
		g, rule := decodeName(strings.Trim(part, " "))
		if rule != "" {
			return nil, fault.Field1(fmt.Sprintf("%s[%d]", headerGroups, i), "%s", rule)
		}
		if !seen[g] {
			seen[g] = true
			out = append(out, g)
		}
	}
	return out, nil
}

// decodeName decodes percent-encoded UTF-8. A byte outside of printable ASCII
// is refused, because proxies and servers do not agree what it means.
func decodeName(v string) (name, rule string) {
	for i := range len(v) {
		if v[i] < 0x20 || v[i] > 0x7E {
			return "", "must be percent-encoded UTF-8"
		}
	}
	s, err := url.PathUnescape(v)
	if err != nil || !utf8.ValidString(s) {
		return "", "must be percent-encoded UTF-8"
	}
	n := 0
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return "", "must have printable characters only"
		}
		n++
	}
	if n == 0 || n > maxIdentity {
		return "", fmt.Sprintf("must have 1 to %d characters", maxIdentity)
	}
	if strings.TrimSpace(s) != s {
		return "", "must not begin or end with a space"
	}
	return s, ""
}

// requestID takes the caller's id of the request when there is one that a log
// can hold, else mints one.
func requestID(values []string) string {
	if len(values) == 1 && len(values[0]) <= 64 && len(values[0]) > 0 {
		ok := true
		for i := range len(values[0]) {
			c := values[0][i]
			ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-._", c) >= 0)
		}
		if ok {
			return values[0]
		}
	}
	return resource.NewID("req")
}
