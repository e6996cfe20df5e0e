package contract

import (
	"net/url"
	"regexp"
	"strings"
)

var uriScheme = regexp.MustCompile(`^[a-z][a-z0-9+.-]*:`)

// newResource reads a pattern. Its second result is the broken rule, or empty.
func newResource(pattern string) (*Resource, string) {
	scheme := uriScheme.FindString(pattern)
	switch {
	case scheme == "":
		return nil, "must be a URI with its scheme in lower case"
	case strings.Contains(pattern, " "):
		return nil, "must not have a space"
	case !strings.Contains(pattern, "*"):
		return &Resource{URI: pattern}, ""
	}
	rest := pattern[len(scheme):]
	if authority, ok := strings.CutPrefix(rest, "//"); ok {
		host, _, _ := strings.Cut(authority, "/")
		if strings.Contains(host, "*") {
			return nil, "must not have a wildcard in its authority"
		}
	}
	segments := strings.Split(pattern, "/")
	for i, s := range segments {
		switch {
		case s == "**" && i < len(segments)-1:
			return nil, "** may only be the last segment"
		case s == "**":
		case strings.Count(s, "*") > 1:
			return nil, "a segment may have one *, or be ** at the end"
		}
	}
	return &Resource{URI: pattern, segments: segments}, ""
}

// Matches says whether the pattern covers a URI. Without wildcards they must be
// the same string. A * stands for any text within one segment, also none, and
// ** for one or more whole segments at the end. A URI that another reader might
// take to lead out of its place (dot segments, encoded separators, backslashes,
// controls, lookalikes) is matched by no pattern with a wildcard.
func (r *Resource) Matches(uri string) bool {
	if r.segments == nil {
		return uri == r.URI
	}
	if len(uri) > maxURI || !cleanURI(uri) {
		return false
	}
	parts := strings.Split(uri, "/")
	n := len(r.segments)
	if r.segments[n-1] == "**" {
		if len(parts) < n || len(parts) == n && parts[n-1] == "" {
			return false
		}
		parts = parts[:n-1]
		n--
	}
	if len(parts) != n {
		return false
	}
	for i, p := range parts {
		head, tail, wild := strings.Cut(r.segments[i], "*")
		if !wild && p != head ||
			wild && (len(p) < len(head)+len(tail) || !strings.HasPrefix(p, head) || !strings.HasSuffix(p, tail)) {
			return false
		}
	}
	return true
}

// Overlaps says whether a URI that the template makes may be covered by the
// pattern: the text before the template's first expression and the text before the
// pattern's first wildcard agree as far as both go. It is a help for lists; what
// may be read, Matches alone decides.
func (r *Resource) Overlaps(template string) bool {
	fixed, _, varies := strings.Cut(template, "{")
	if !varies {
		return r.Matches(template)
	}
	pattern, _, wild := strings.Cut(r.URI, "*")
	return strings.HasPrefix(pattern, fixed) || wild && strings.HasPrefix(fixed, pattern)
}

// cleanURI judges a URI by what it says after percent-decoding once.
func cleanURI(uri string) bool {
	scheme := uriScheme.FindString(uri)
	if scheme == "" || !safeText(uri) {
		return false
	}
	rest := strings.TrimPrefix(uri[len(scheme):], "//")
	segments := strings.Split(rest, "/")
	for i, s := range segments {
		// An empty authority (file:///x) and one slash at the end are ordinary.
		if s == "" && (i == 0 || i == len(segments)-1) {
			continue
		}
		if !cleanURISegment(s) {
			return false
		}
	}
	return true
}

func cleanURISegment(s string) bool {
	plain, err := url.PathUnescape(s)
	if err != nil || !safeText(plain) || strings.Contains(plain, "/") || percentEncoded(plain) {
		return false
	}
	// An encoded dot has no honest use; a server that decodes late sees another
	// segment than we do.
	if strings.Count(plain, ".") != strings.Count(s, ".") {
		return false
	}
	return cleanSegment(plain)
}
