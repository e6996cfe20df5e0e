package egress

import (
	"errors"
	"net/netip"
)

// refused is the list of addresses that no server may resolve to, unless the
// operator allows them. It follows the IANA special-purpose registries (RFC 6890
// and its updates); IPv6 outside 2000::/3 is refused as a whole.
var refused = []struct {
	prefix netip.Prefix
	class  string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "unspecified"},
	{netip.MustParsePrefix("10.0.0.0/8"), "private"},
	{netip.MustParsePrefix("100.64.0.0/10"), "carrier-grade NAT"}, // 100.100.100.200 serves metadata
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("168.63.129.16/32"), "metadata"}, // a public number that is the host of every Azure machine
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local"}, // 169.254.169.254 serves metadata
	{netip.MustParsePrefix("172.16.0.0/12"), "private"},
	{netip.MustParsePrefix("192.0.0.0/24"), "reserved"},
	{netip.MustParsePrefix("192.0.2.0/24"), "documentation"},
	{netip.MustParsePrefix("192.88.99.0/24"), "6to4 relay"},
	{netip.MustParsePrefix("192.168.0.0/16"), "private"},
	{netip.MustParsePrefix("198.18.0.0/15"), "benchmarking"},
	{netip.MustParsePrefix("198.51.100.0/24"), "documentation"},
	{netip.MustParsePrefix("203.0.113.0/24"), "documentation"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved"},

	{netip.MustParsePrefix("::/128"), "unspecified"},
	{netip.MustParsePrefix("::1/128"), "loopback"},
	{netip.MustParsePrefix("::ffff:0:0/96"), "IPv4-mapped"},
	{netip.MustParsePrefix("::ffff:0:0:0/96"), "IPv4-translated"},
	{netip.MustParsePrefix("::/96"), "IPv4-compatible"},
	{netip.MustParsePrefix("64:ff9b::/96"), "NAT64"},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "NAT64"},
	{netip.MustParsePrefix("2001::/23"), "reserved"}, // Teredo, ORCHID and others
	{netip.MustParsePrefix("2001:db8::/32"), "documentation"},
	{netip.MustParsePrefix("2002::/16"), "6to4"},
	{netip.MustParsePrefix("3fff::/20"), "documentation"},
	{netip.MustParsePrefix("fc00::/7"), "private"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("fec0::/10"), "site-local"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
}

var globalUnicast = netip.MustParsePrefix("2000::/3")

var errRefused = errors.New("egress: address refused")

// Class names the reason why an address is special, and is empty for an ordinary
// public one. Addresses that carry an IPv4 address inside an IPv6 one are special
// whatever they carry, because a translator on the way would unpack them.
func Class(a netip.Addr) string {
	switch {
	case !a.IsValid():
		return "invalid"
	case a.Zone() != "":
		return "scoped"
	}
	for _, r := range refused {
		if r.prefix.Contains(a) {
			return r.class
		}
	}
	// netip.Prefix.Contains never matches a mapped address, so it is asked apart.
	if a.Is4In6() {
		return "IPv4-mapped"
	}
	if a.Is6() {
		if !globalUnicast.Contains(a) {
			return "reserved"
		}
		b := a.As16()
		// ISATAP (RFC 5214) keeps an IPv4 address behind 00-00-5e-fe or 02-00-5e-fe.
		if (b[8] == 0 || b[8] == 2) && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe {
			return "ISATAP"
		}
	}
	return ""
}

// exempt reports whether the operator opened this address on purpose: by Allow,
// or loopback in development. Only such an address may be reached without TLS.
func (p Policy) exempt(a netip.Addr) bool {
	if a.Zone() != "" {
		return false
	}
	// The system dials a mapped address over IPv4, so it is judged as IPv4.
	a = a.Unmap()
	if p.Development && a.IsLoopback() {
		return true
	}
	for _, prefix := range p.Allow {
		if prefix.Contains(a) {
			return true
		}
	}
	return false
}

// check judges a resolved address. TLS does not make an inner address outer; its
// absence makes every address but an exempt one forbidden.
func (p Policy) check(a netip.Addr, tls bool) error {
	if p.exempt(a) {
		return nil
	}
	if !tls || Class(a) != "" {
		return errRefused
	}
	return nil
}
