package contract

import (
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

var (
	runtimeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)
	hostName    = regexp.MustCompile(`^([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?$`)
	// scopeToken is RFC 6749 appendix A.4.
	scopeToken = regexp.MustCompile(`^[\x21\x23-\x5B\x5D-\x7E]{1,256}$`)
)

// reach reads who the server is and which tokens it takes. A local process has
// an origin of its own kind and takes none.
func (r *reader) reach(c *Contract, top object) {
	local := c.Transport == TransportStdio
	if v, path, ok := top.need("origin"); ok {
		if local {
			c.Origin, _ = r.runtime(path, v)
		} else {
			c.Origin, _ = r.origin(path, v)
		}
	}
	if v, path, ok := top.get("audience"); ok {
		if local {
			r.fail(path, "must be left out for transport stdio")
		} else {
			c.Audience, _ = r.audience(path, v)
		}
	}
	if v, path, ok := top.get("scopes"); ok {
		if local {
			r.fail(path, "must be left out for transport stdio")
			return
		}
		c.Scopes = r.texts(path, v, 0, maxScopes, func(path string, v any) (string, bool) {
			s, ok := v.(string)
			if !ok {
				r.fail(path, "must be a string, not %s", typeName(v))
			} else if ok = scopeToken.MatchString(s); !ok {
				r.fail(path, "must be a scope of RFC 6749: 1 to 256 printable ASCII characters without space, quote and backslash")
			}
			return s, ok
		})
	}
}

func (r *reader) runtime(path string, v any) (string, bool) {
	s, ok := v.(string)
	name, found := strings.CutPrefix(s, runtimePrefix)
	if !ok || !found || !runtimeName.MatchString(name) {
		r.fail(path, "must be %s and the name of a declared runtime", runtimePrefix)
		return "", false
	}
	return s, true
}

// origin reads a web origin (RFC 6454 section 6.2) in its one normal form, so
// that origins are compared as strings.
func (r *reader) origin(path string, v any) (string, bool) {
	s, ok := r.text(path, v, maxURI)
	if !ok {
		return "", false
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.User != nil || u.Host == "" {
		r.fail(path, "must be an origin such as https://calendar.example")
		return "", false
	}
	if s != u.Scheme+"://"+u.Host {
		r.fail(path, "must be scheme, host and port only, in lower case, without a slash at its end")
		return "", false
	}
	if rule := checkHost(u); rule != "" {
		r.fail(path, "%s", rule)
		return "", false
	}
	return s, true
}

func checkHost(u *url.URL) string {
	host := u.Hostname()
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.String() != host || addr.Zone() != "" {
			return "must have its address in normal form"
		}
	} else if len(host) > 253 || !hostName.MatchString(host) {
		return "must have a host name in lower-case ASCII"
	} else if last := host[strings.LastIndexByte(host, '.')+1:]; strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") {
		// Resolvers read 127.1 and 0x7f.1 as addresses (WHATWG URL section 3.5).
		return "must have its address in normal form"
	}
	if strings.HasSuffix(u.Host, ":") {
		return "must have a port after the colon"
	}
	if p := u.Port(); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 || strconv.FormatUint(n, 10) != p {
			return "must have a port from 1 to 65535"
		}
		if u.Scheme == "https" && n == 443 || u.Scheme == "http" && n == 80 {
			return "must leave out the default port"
		}
	}
	return ""
}

// audience reads a resource identifier (RFC 8707 section 2): an absolute URI
// without fragment. It is sent byte for byte as written.
func (r *reader) audience(path string, v any) (string, bool) {
	s, ok := r.printable(path, v, maxURI)
	if !ok {
		return "", false
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.Opaque != "":
		r.fail(path, "must be an absolute http or https URI")
	case u.User != nil:
		r.fail(path, "must not hold a user or password")
	case strings.Contains(s, "#"):
		r.fail(path, "must not have a fragment")
	case strings.Contains(s, " "):
		r.fail(path, "must not have a space")
	default:
		if rule := checkHost(u); rule != "" && rule != "must leave out the default port" {
			r.fail(path, "%s", rule)
			return "", false
		}
		return s, true
	}
	return "", false
}

// root reads one file URI that is told to a server as a root.
func (r *reader) root(path string, v any) (string, bool) {
	s, ok := r.printable(path, v, maxURI)
	if !ok {
		return "", false
	}
	dir, found := strings.CutPrefix(s, "file://")
	if !found || !cleanPath(dir) {
		r.fail(path, "must be file:// and a clean absolute path")
		return "", false
	}
	return s, true
}
