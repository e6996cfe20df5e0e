package elicitation

import (
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// MaxURL is the greatest length in bytes of a URL that a person is sent to.
const MaxURL = 2048

// Link is a question that is answered at a URL, in the person's own browser.
type Link struct {
	// Message is what the server says, foreign text.
	Message string
	// URL is the whole URL as the server sent it, and Host its host and port, which
	// a frontend shows apart.
	URL, Host string
	// Origin is scheme, host and port, as contracts write it.
	Origin string
	// Punycode says that the host is written in letters that may look like others.
	Punycode bool
	// ID is the elicitationId of revision 2025-11-25, empty for others.
	ID string
}

// ParseURL reads the params of an elicitation/create in URL mode. The URL is https,
// or http to the person's own machine, and carries no credentials. It is never
// fetched. Whether it may be followed, LeadsTo says.
func ParseURL(params []byte) (*Link, error) {
	m, message, err := read(params)
	if err != nil {
		return nil, err
	}
	l := &Link{Message: message}
	l.ID, _ = textOf(m["elicitationId"])
	raw, ok := textOf(m["url"])
	if !ok || len(raw) > MaxURL {
		return nil, malformed("url must be text of at most %d bytes", MaxURL)
	}
	if strings.ContainsFunc(raw, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '\\' }) {
		return nil, malformed("url must be ASCII without spaces and backslashes")
	}
	u, err := url.Parse(raw)
	if err != nil || u.Hostname() == "" || u.Opaque != "" {
		return nil, malformed("url cannot be read")
	}
	if strings.HasSuffix(u.Host, ":") {
		return nil, malformed("url must have no empty port")
	}
	if u.User != nil {
		return nil, malformed("url must carry no credentials")
	}
	host := strings.ToLower(u.Hostname())
	if u.Scheme != "https" && !(u.Scheme == "http" && isLoopback(host)) {
		return nil, malformed("url must be https")
	}
	l.URL, l.Host = raw, strings.ToLower(u.Host)
	l.Origin = u.Scheme + "://" + l.Host
	if port := u.Port(); port == "443" && u.Scheme == "https" || port == "80" && u.Scheme == "http" {
		l.Origin = u.Scheme + "://" + strings.TrimSuffix(l.Host, ":"+port)
	}
	for label := range strings.SplitSeq(host, ".") {
		l.Punycode = l.Punycode || strings.HasPrefix(label, "xn--")
	}
	return l, nil
}

// LeadsTo reports whether the URL's origin is one of these, as contracts write them.
func (l *Link) LeadsTo(origins []string) bool { return slices.Contains(origins, l.Origin) }

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}
