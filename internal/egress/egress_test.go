package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestClass(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]string{
		"8.8.8.8": "", "1.1.1.1": "", "93.184.216.34": "", "172.15.255.255": "", "172.32.0.0": "", "100.63.255.255": "",
		"100.128.0.0": "", "192.0.1.0": "", "198.17.255.255": "", "198.20.0.0": "", "223.255.255.255": "",
		"2606:4700::1111": "", "2a00:1450::1": "", "2001:200::1": "",
		"0.0.0.0": "unspecified", "0.1.2.3": "unspecified", "10.0.0.5": "private", "10.255.255.255": "private",
		"100.64.0.1": "carrier-grade NAT", "100.100.100.200": "carrier-grade NAT", "127.0.0.1": "loopback", "127.9.9.9": "loopback",
		"169.254.169.254": "link-local", "169.254.170.2": "link-local", "168.63.129.16": "metadata",
		"172.16.0.1": "private", "172.31.255.255": "private", "192.168.1.1": "private",
		"192.0.0.192": "reserved", "192.0.2.1": "documentation", "198.51.100.1": "documentation", "203.0.113.7": "documentation",
		"192.88.99.1": "6to4 relay", "198.18.0.1": "benchmarking", "198.19.255.255": "benchmarking",
		"224.0.0.1": "multicast", "239.255.255.255": "multicast", "240.0.0.1": "reserved", "255.255.255.255": "reserved",
		"::": "unspecified", "::1": "loopback", "::7f00:1": "IPv4-compatible", "::ffff:127.0.0.1": "IPv4-mapped",
		"::ffff:8.8.8.8": "IPv4-mapped", "::ffff:0:808:808": "IPv4-translated",
		"64:ff9b::a00:5": "NAT64", "64:ff9b::808:808": "NAT64", "64:ff9b:1::1": "NAT64",
		"2001::1": "reserved", "2001:10::1": "reserved", "2001:db8::1": "documentation", "2002:7f00:1::": "6to4", "3fff::1": "documentation",
		"fc00::1": "private", "fd00:ec2::254": "private", "fe80::1": "link-local", "fec0::1": "site-local", "ff02::1": "multicast",
		"2606:4700::5efe:a00:5": "ISATAP", "2606:4700::200:5efe:a00:5": "ISATAP", "5f00::1": "reserved", "100::1": "reserved", "4000::1": "reserved",
		"fe80::1%eth0": "scoped", "2606:4700::1%1": "scoped",
	} {
		if got := Class(netip.MustParseAddr(addr)); got != want {
			t.Errorf("Class(%s) = %q, want %q", addr, got, want)
		}
	}
	if got := Class(netip.Addr{}); got != "invalid" {
		t.Errorf("Class of no address = %q", got)
	}
}

func TestPolicyCheck(t *testing.T) {
	t.Parallel()
	dev := Policy{Development: true}
	open := Policy{Allow: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00::/8")}}
	for _, c := range []struct {
		name   string
		policy Policy
		addr   string
		tls    bool
		ok     bool
	}{
		{"public over tls", Policy{}, "8.8.8.8", true, true},
		{"public without tls", Policy{}, "8.8.8.8", false, false},
		{"public without tls in development", dev, "8.8.8.8", false, false},
		{"loopback", Policy{}, "127.0.0.1", true, false},
		{"loopback in development", dev, "127.0.0.1", false, true},
		{"loopback 6 in development", dev, "::1", false, true},
		{"mapped loopback in development", dev, "::ffff:127.0.0.1", false, true},
		{"mapped loopback", Policy{}, "::ffff:127.0.0.1", true, false},
		{"private in development", dev, "10.0.0.1", true, false},
		{"metadata in development", dev, "169.254.169.254", false, false},
		{"unspecified in development", dev, "0.0.0.0", false, false},
		{"allowed", open, "10.1.2.3", false, true},
		{"allowed, mapped", open, "::ffff:10.1.2.3", false, true},
		{"beside allowed", open, "10.2.0.1", true, false},
		{"allowed 6", open, "fd00::1", true, true},
		{"allowed 6 with a zone", open, "fd00::1%lo", true, false},
		{"nat64 of an allowed address", open, "64:ff9b::a01:203", true, false},
	} {
		if err := c.policy.check(netip.MustParseAddr(c.addr), c.tls); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestCheckURL(t *testing.T) {
	t.Parallel()
	public, dev := New(Policy{}), New(Policy{Development: true})
	for _, c := range []struct {
		url         string
		public, dev bool
	}{
		{"https://calendar.example/mcp", true, true},
		{"https://calendar.example:8443/mcp?x=1", true, true},
		{"https://xn--bcher-kva.example/", true, true},
		{"https://8.8.8.8/", true, true},
		{"https://[2606:4700::1111]/", true, true},
		{"https://3com.example", true, true},
		{"http://127.0.0.1:9/", false, true},
		{"http://[::1]:9/", false, true},
		{"http://localhost:9/mcp", false, true},
		{"http://calendar.example/mcp", false, true}, // the dialer refuses it where it is not loopback
		{"https://10.0.0.5/", false, false},
		{"http://169.254.169.254/latest", false, false},
		{"https://[::ffff:10.0.0.5]/", false, false},
		{"https://[fe80::1%25eth0]/", false, false},
		{"https://2130706433/", false, false},
		{"https://0x7f.1/", false, false},
		{"https://0x7f000001/", false, false},
		{"https://127.1/", false, false},
		{"https://0177.0.0.1/", false, false},
		{"https://example.com.1/", false, false},
		{"https://user@calendar.example/", false, false},
		{"https://user:pw@calendar.example/", false, false},
		{"https://calendar.example/#x", false, false},
		{"https://calendar.example/#", false, false},
		{"https://calendar.example:0/", false, false},
		{"https://calendar.example:/", false, false},
		{"https://calendar.example:65536/", false, false},
		{"https://calendar.example:+80/", false, false},
		{"https://cal endar.example/", false, false},
		{"https://calendar.example\\@evil.example/", false, false},
		{"https://calendar.example\n/", false, false},
		{"https://bücher.example/", false, false},
		{"https://a..b/", false, false},
		{"https://calendar.example./", false, false},
		{"https://-a.example/", false, false},
		{"https://a%2eb/", false, false},
		{"https:///mcp", false, false},
		{"https:calendar.example", false, false},
		{"//calendar.example/", false, false},
		{"ftp://calendar.example/", false, false},
		{"file:///etc/passwd", false, false},
		{"javascript:alert(1)", false, false},
		{"", false, false},
		{"https://calendar.example/" + strings.Repeat("a", MaxURL), false, false},
	} {
		for _, m := range []struct {
			name   string
			client *Client
			ok     bool
		}{{"public", public, c.public}, {"development", dev, c.dev}} {
			_, err := m.client.CheckURL("http.url", c.url)
			if (err == nil) != m.ok {
				t.Errorf("%s: CheckURL(%.80q) = %v", m.name, c.url, err)
			}
			if f, ok := fault.As(err); err != nil && (!ok || f.Kind != fault.Invalid || len(f.Fields) != 1 || f.Fields[0].Path != "http.url") {
				t.Errorf("CheckURL(%.80q): %v names no field", c.url, err)
			}
		}
	}
}

func TestOrigin(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		"https://Calendar.Example:443/mcp": "https://calendar.example",
		"https://calendar.example:8443/":   "https://calendar.example:8443",
		"http://[::1]:80/x":                "http://[::1]",
		"http://127.0.0.1:8080/x":          "http://127.0.0.1:8080",
	} {
		u, err := url.Parse(raw)
		if err != nil {
			t.Fatal(err)
		}
		if got := Origin(u); got != want {
			t.Errorf("Origin(%s) = %s, want %s", raw, got, want)
		}
	}
}

func get(t *testing.T, c *Client, raw string) (*http.Response, error) {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	h := c.Pin(u)
	defer c.CloseIdle()
	resp, err := h.Get(raw)
	if err == nil {
		io.Copy(io.Discard, resp.Body) //nolint:errcheck // read only to reuse the connection
		resp.Body.Close()
	}
	return resp, err
}

// The address is judged when it is dialled, so a harmless name does not help, and
// what is told does not depend on whether the inner port is open.
func TestFO122_InnerAddressesAreRefusedAtConnectTime(t *testing.T) {
	t.Parallel()
	var hits int
	open := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits++ }))
	defer open.Close()
	shut, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closedPort := shut.Addr().String()
	shut.Close()
	_, openPort, _ := net.SplitHostPort(open.Listener.Addr().String())
	_, shutPort, _ := net.SplitHostPort(closedPort)

	var said []string
	for _, raw := range []string{
		"http://127.0.0.1:" + openPort, "http://127.0.0.1:" + shutPort,
		"http://localhost:" + openPort, "http://localhost:" + shutPort,
		"https://localhost:" + openPort, "http://[::ffff:127.0.0.1]:" + openPort,
		"http://10.0.0.5", "http://169.254.169.254/latest/meta-data", "https://[64:ff9b::7f00:1]:" + openPort, "http://0.0.0.0:" + openPort,
	} {
		_, err := get(t, New(Policy{}), raw)
		if !errors.Is(err, errRefused) {
			t.Fatalf("%s: %v", raw, err)
		}
		f := Fault(context.Background(), err)
		if f.Layer != fault.Transport || f.Kind != fault.Denied || f.Reason != "EGRESS_REFUSED" {
			t.Fatalf("%s: %+v", raw, f)
		}
		said = append(said, f.Message)
	}
	for _, s := range said {
		if s != said[0] || strings.Contains(s, openPort) {
			t.Fatalf("the messages differ: %q", said)
		}
	}
	if hits != 0 {
		t.Fatalf("%d requests came through", hits)
	}
}

func TestLoopbackByDevelopmentAndByAllow(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer s.Close()
	for name, p := range map[string]Policy{
		"development": {Development: true},
		"allow":       {Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}},
	} {
		if _, err := get(t, New(p), s.URL); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := get(t, New(Policy{Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.2/32")}}), s.URL); err == nil {
		t.Error("an address beside Allow was reached")
	}
}

func TestRedirectsAreReturnedAndOtherOriginsRefused(t *testing.T) {
	t.Parallel()
	var stolen int
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { stolen++ }))
	defer other.Close()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
	}))
	defer s.Close()
	c := New(Policy{Development: true})
	resp, err := get(t, c, s.URL)
	if err != nil || resp.StatusCode != http.StatusTemporaryRedirect {
		t.Fatalf("%v %v", resp, err)
	}
	u, _ := url.Parse(s.URL)
	pinned := c.Pin(u)
	for _, mutate := range []func(*http.Request){
		func(r *http.Request) { r.URL, _ = url.Parse(other.URL) },
		func(r *http.Request) { r.URL.Scheme = "https" },
		func(r *http.Request) { r.Host = "evil.example" },
		func(r *http.Request) { r.URL.User = url.User("x") },
	} {
		r, _ := http.NewRequest(http.MethodPost, s.URL, strings.NewReader("secret"))
		mutate(r)
		if resp, err := pinned.Do(r); !errors.Is(err, errOtherOrigin) {
			if err == nil {
				resp.Body.Close()
			}
			t.Errorf("%s: %v", r.URL, err)
		}
	}
	if stolen != 0 {
		t.Fatal("another origin was reached")
	}
}

func TestProxyOfTheEnvironmentIsNotUsed(t *testing.T) {
	var asked int
	proxy := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked++ }))
	defer proxy.Close()
	for _, k := range []string{"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"} {
		t.Setenv(k, proxy.URL)
	}
	_, err := get(t, New(Policy{Development: true}), "http://192.0.2.1/")
	if asked != 0 || !errors.Is(err, errRefused) {
		t.Fatalf("asked %d times, %v", asked, err)
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	old := httptest.NewUnstartedServer(http.NotFoundHandler())
	old.TLS = &tls.Config{MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10} //nolint:gosec // the point of the test
	old.Config.ErrorLog = quiet
	old.StartTLS()
	defer old.Close()
	good := httptest.NewUnstartedServer(http.NotFoundHandler())
	good.EnableHTTP2 = true
	good.Config.ErrorLog = quiet
	good.StartTLS()
	defer good.Close()
	roots := x509.NewCertPool()
	roots.AddCert(old.Certificate())
	roots.AddCert(good.Certificate())

	if _, err := get(t, New(Policy{Development: true, Roots: roots}), old.URL); err == nil {
		t.Error("TLS 1.1 was accepted")
	}
	resp, err := get(t, New(Policy{Development: true, Roots: roots}), good.URL)
	if err != nil || resp.ProtoMajor != 2 {
		t.Errorf("%v %v", resp, err)
	}
	_, err = get(t, New(Policy{Development: true}), good.URL)
	if f := Fault(context.Background(), err); err == nil || f.Reason != "CERTIFICATE_INVALID" {
		t.Errorf("an unknown authority gave %v", err)
	}
}

func TestResponseHeadersAreBounded(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Large", strings.Repeat("a", 100<<10))
	}))
	defer s.Close()
	_, err := get(t, New(Policy{Development: true}), s.URL)
	if f := Fault(context.Background(), err); err == nil || f.Reason != "SERVER_UNREACHABLE" {
		t.Fatalf("%v", err)
	}
}

func TestFault(t *testing.T) {
	t.Parallel()
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for name, c := range map[string]struct {
		ctx  context.Context
		err  error
		kind fault.Kind
	}{
		"cancelled": {cancelled, &url.Error{Err: context.Canceled}, fault.Canceled},
		"deadline":  {context.Background(), &url.Error{Err: context.DeadlineExceeded}, fault.Deadline},
		"reset":     {context.Background(), io.ErrUnexpectedEOF, fault.Unavailable},
		"a fault":   {context.Background(), fault.New(fault.TooLarge, "X", "x"), fault.TooLarge},
	} {
		if f := Fault(c.ctx, c.err); f.Kind != c.kind {
			t.Errorf("%s: %v", name, f.Kind)
		}
	}
}
