// Package egress is the only outbound HTTP client of Bulkhead. It decides on the
// address that is really dialled, after name resolution and for every attempt,
// so that no name, redirect or rebinding reaches inside. It follows no redirect,
// reads no proxy from the environment, and hands out clients that can reach one
// origin only. It does not bound response bodies: each user reads with a limit of
// its own.
package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Policy says what may be reached and how long it may take. The zero value
// reaches public addresses over TLS with the default limits.
type Policy struct {
	// Allow opens addresses that are otherwise refused, and plain http to them.
	// Write NAT64 prefixes here only where they lead to the public Internet.
	Allow []netip.Prefix
	// Development opens loopback, with and without TLS.
	Development bool
	// Roots are the trusted certificate authorities. Nil means the system's.
	Roots *x509.CertPool
	// DialTimeout bounds name resolution and connecting, default 10 s.
	DialTimeout time.Duration
	// TLSTimeout bounds the TLS handshake, default 10 s.
	TLSTimeout time.Duration
	// FirstByteTimeout bounds the wait for response headers, default 10 min. It
	// is the outermost bound: a tool may work in silence for minutes and proxies
	// hold back headers meanwhile, so callers set their own deadline below it.
	FirstByteTimeout time.Duration
	// IdleTimeout ends unused connections, default 30 s. It is short because a
	// connection that the other side closed meanwhile costs a call its certainty.
	IdleTimeout time.Duration
	// HeaderBytes bounds the headers of a response, default 64 KiB.
	HeaderBytes int64
	// IdlePerHost bounds unused connections to one host, default 64.
	IdlePerHost int
}

// MaxURL is the greatest length of a URL in bytes.
const MaxURL = 2048

// Client makes guarded requests. It is safe for concurrent use.
type Client struct {
	policy Policy
	secure *http.Transport
	plain  *http.Transport
}

// New returns a client that holds to the policy. Zero limits get their defaults.
func New(p Policy) *Client {
	p.DialTimeout = orDefault(p.DialTimeout, 10*time.Second)
	p.TLSTimeout = orDefault(p.TLSTimeout, 10*time.Second)
	p.FirstByteTimeout = orDefault(p.FirstByteTimeout, 10*time.Minute)
	p.IdleTimeout = orDefault(p.IdleTimeout, 30*time.Second)
	p.HeaderBytes = orDefault(p.HeaderBytes, 64<<10)
	p.IdlePerHost = orDefault(p.IdlePerHost, 64)
	p.Allow = append([]netip.Prefix(nil), p.Allow...)
	return &Client{policy: p, secure: p.transport(true), plain: p.transport(false)}
}

func orDefault[T int | int64 | time.Duration](v, d T) T {
	if v <= 0 {
		return d
	}
	return v
}

// transport builds the transport of one scheme. There are two because only the
// dialer knows the resolved address and only the scheme says whether TLS follows.
func (p Policy) transport(secure bool) *http.Transport {
	d := &net.Dialer{
		Timeout:   p.DialTimeout,
		KeepAlive: 30 * time.Second,
		ControlContext: func(_ context.Context, network, address string, _ syscall.RawConn) error {
			return p.control(network, address, secure)
		},
	}
	return &http.Transport{
		Proxy:                  nil,
		DialContext:            d.DialContext,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: p.Roots},
		TLSHandshakeTimeout:    p.TLSTimeout,
		ResponseHeaderTimeout:  p.FirstByteTimeout,
		IdleConnTimeout:        p.IdleTimeout,
		MaxResponseHeaderBytes: p.HeaderBytes,
		MaxIdleConns:           1024,
		MaxIdleConnsPerHost:    p.IdlePerHost,
		ForceAttemptHTTP2:      secure,
		// Decompression needs a bound, which only the reader of the body knows.
		DisableCompression: true,
	}
}

// control runs between the creation of a socket and its connect, once for every
// resolved address that is tried.
func (p Policy) control(network, address string, secure bool) error {
	if network != "tcp4" && network != "tcp6" {
		return errRefused
	}
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return errRefused
	}
	return p.check(ap.Addr(), secure)
}

// CloseIdle closes connections that no request uses.
func (c *Client) CloseIdle() {
	c.secure.CloseIdleConnections()
	c.plain.CloseIdleConnections()
}

// CheckURL parses a URL and refuses what no server of ours may have: another
// scheme, user information, a fragment, a host that is no plain name or address,
// and addresses that the policy refuses. A name is judged again when it is
// dialled. The error is an Invalid fault for the field at path.
func (c *Client) CheckURL(path, raw string) (*url.URL, error) {
	if len(raw) > MaxURL {
		return nil, fault.Field1(path, "must have at most %d bytes", MaxURL)
	}
	for i := 0; i < len(raw); i++ {
		if raw[i] <= ' ' || raw[i] >= 0x7f || raw[i] == '\\' {
			return nil, fault.Field1(path, "must be written in ASCII without spaces or backslashes")
		}
	}
	u, err := url.Parse(raw)
	switch {
	case err != nil || u.Opaque != "" || u.Host == "":
		return nil, fault.Field1(path, "must be an absolute URL")
	case u.Scheme != "https" && u.Scheme != "http":
		return nil, fault.Field1(path, "must begin with https://")
	case u.User != nil:
		return nil, fault.Field1(path, "must not hold a user name or password")
	case u.Fragment != "" || strings.Contains(raw, "#"):
		return nil, fault.Field1(path, "must not have a fragment")
	}
	if rule := checkHost(u); rule != "" {
		return nil, fault.Field1(path, "%s", rule)
	}
	if rule := c.policy.checkHostPolicy(u); rule != "" {
		return nil, fault.Field1(path, "%s", rule)
	}
	return u, nil
}

// checkHostPolicy judges what can be judged before a name is resolved.
func (p Policy) checkHostPolicy(u *url.URL) string {
	secure := u.Scheme == "https"
	if a, err := netip.ParseAddr(u.Hostname()); err == nil {
		switch {
		case p.check(a, secure) == nil:
			return ""
		case p.check(a, true) == nil:
			return "must begin with https://"
		}
		return "must not lead to an internal or reserved address"
	}
	if !secure && !p.Development && len(p.Allow) == 0 {
		return "must begin with https://"
	}
	return ""
}

// checkHost refuses hosts that parsers read in different ways: numbers that some
// take for an IPv4 address, zones, empty labels, characters outside letters,
// digits, hyphen and underscore. It returns the broken rule.
func checkHost(u *url.URL) string {
	host := u.Hostname()
	if port := u.Port(); port != "" || strings.HasSuffix(u.Host, ":") {
		var n int
		if _, err := fmt.Sscanf(port, "%d", &n); err != nil || n < 1 || n > 65535 || len(port) > 5 {
			return "must have a port from 1 to 65535"
		}
	}
	if strings.HasPrefix(u.Host, "[") || strings.Contains(host, ":") {
		a, err := netip.ParseAddr(host)
		if err != nil || a.Zone() != "" || !strings.HasPrefix(u.Host, "[") {
			return "must have a host name or an IP address"
		}
		return ""
	}
	if len(host) > 253 {
		return "must have a host name of at most 253 characters"
	}
	labels := strings.Split(host, ".")
	for _, l := range labels {
		if l == "" || len(l) > 63 || strings.Trim(l, labelChars) != "" || l[0] == '-' || l[len(l)-1] == '-' {
			return "must have a host name of letters, digits and hyphens"
		}
	}
	// WHATWG URL and inet_aton read a name with a numeric last label as IPv4.
	if last := strings.ToLower(labels[len(labels)-1]); last[0] >= '0' && last[0] <= '9' {
		if _, err := netip.ParseAddr(host); err != nil {
			return "must have a host name or an IP address in its usual form"
		}
	}
	return ""
}

const labelChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"

// Origin returns scheme://host[:port] in lower case, without a default port.
func Origin(u *url.URL) string {
	host, port := strings.ToLower(u.Hostname()), u.Port()
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if port != "" && !(u.Scheme == "https" && port == "443") && !(u.Scheme == "http" && port == "80") {
		host += ":" + port
	}
	return strings.ToLower(u.Scheme) + "://" + host
}

// Pin returns an HTTP client that reaches the origin of u and nothing else, and
// that returns redirects instead of following them. All pinned clients share the
// connections of c; a pinned client holds no resources. It has no time limit of
// its own: give each request a context with a deadline.
func (c *Client) Pin(u *url.URL) *http.Client {
	rt := &pinned{scheme: u.Scheme, host: u.Host, base: c.secure}
	if u.Scheme != "https" {
		rt.base = c.plain
	}
	return &http.Client{
		Transport:     rt,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// pinned refuses every request to another origin, whoever makes it, so that no
// redirect or bug can carry headers or a body elsewhere (GO-2026-6911).
type pinned struct {
	scheme, host string
	base         *http.Transport
}

// RoundTrip implements http.RoundTripper.
func (p *pinned) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != p.scheme || r.URL.Host != p.host || (r.Host != "" && r.Host != p.host) || r.URL.User != nil {
		if r.Body != nil {
			r.Body.Close() //nolint:errcheck // the request is refused anyway
		}
		return nil, errOtherOrigin
	}
	return p.base.RoundTrip(r)
}

var errOtherOrigin = errors.New("egress: request to another origin refused")

// CloseIdleConnections does nothing: the connections belong to every client.
func (p *pinned) CloseIdleConnections() {}

// Fault turns an error of a request into a fault of the transport layer. What a
// caller is told does not depend on what was found behind an address; the cause
// is for the log only.
func Fault(ctx context.Context, err error) *fault.Error {
	if f, ok := fault.As(err); ok {
		return f
	}
	base := &fault.Error{Kind: fault.Unavailable, Layer: fault.Transport, Reason: "SERVER_UNREACHABLE", Message: "the server could not be reached or broke the connection"}
	var cert *tls.CertificateVerificationError
	var late net.Error
	switch {
	case errors.Is(err, errRefused), errors.Is(err, errOtherOrigin):
		base.Kind, base.Reason, base.Message = fault.Denied, "EGRESS_REFUSED", "the server's address is not one that may be reached"
	case errors.Is(err, context.Canceled) && ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded):
		base.Kind, base.Reason, base.Message = fault.Canceled, "CANCELED", "the request was cancelled"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &late) && late.Timeout():
		base.Kind, base.Reason, base.Message = fault.Deadline, "TIMEOUT", "the server did not answer in time"
	case errors.As(err, &cert):
		base.Reason, base.Message = "CERTIFICATE_INVALID", "the server's certificate is not valid for its name"
	}
	return base.Cause(err)
}
