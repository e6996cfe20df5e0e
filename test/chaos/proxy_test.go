package chaos

import (
	"bytes"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
)

// proxy stands between the servers and the calendar, and can hold back the
// bytes that the calendar sends after a request of a chosen method.
type proxy struct {
	t      testing.TB
	ln     net.Listener
	target string
	url    string // of the MCP endpoint

	mu    sync.Mutex
	hold  string        // method whose answers are held; "" for none
	held  int           // answers held so far
	open  chan struct{} // closed to let them go
	conns map[net.Conn]bool
	wg    sync.WaitGroup
}

func newProxy(t testing.TB, cal *calendar) *proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, ln: ln, target: strings.TrimPrefix(cal.origin, "http://"), url: "http://" + ln.Addr().String() + "/mcp",
		open: make(chan struct{}), conns: map[net.Conn]bool{}}
	p.wg.Go(p.serve)
	t.Cleanup(func() {
		p.release()
		ln.Close() //nolint:errcheck // the test is over
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) serve() {
	for {
		c, err := p.ln.Accept()
		if err != nil {
			return
		}
		up, err := net.Dial("tcp", p.target)
		if err != nil {
			c.Close() //nolint:errcheck // nothing behind it
			continue
		}
		p.mu.Lock()
		p.conns[c], p.conns[up] = true, true
		p.mu.Unlock()
		method := &lastMethod{}
		p.wg.Go(func() { defer c.Close(); defer up.Close(); pipe(up, c, method.note) })                           //nolint:errcheck // both ends go
		p.wg.Go(func() { defer c.Close(); defer up.Close(); pipe(c, up, func([]byte) { p.pass(method.get()) }) }) //nolint:errcheck // both ends go
	}
}

// lastMethod is the Mcp-Method of the newest request of a connection.
type lastMethod struct {
	mu   sync.Mutex
	name string
}

func (m *lastMethod) note(b []byte) {
	if _, after, ok := bytes.Cut(bytes.ToLower(b), []byte("mcp-method: ")); ok {
		name, _, _ := bytes.Cut(after, []byte("\r"))
		m.mu.Lock()
		m.name = string(name)
		m.mu.Unlock()
	}
}

func (m *lastMethod) get() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.name
}

func pipe(dst io.Writer, src io.Reader, see func([]byte)) {
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			see(buf[:n])
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// pass returns when bytes that answer the method may go on.
func (p *proxy) pass(method string) {
	p.mu.Lock()
	open, stop := p.open, p.hold != "" && p.hold == method
	if stop {
		p.held++
	}
	p.mu.Unlock()
	if stop {
		<-open
	}
}

// holdBack holds the answers of a method from now on.
func (p *proxy) holdBack(method string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold, p.held, p.open = method, 0, make(chan struct{})
}

// awaitHeld waits until an answer is held back.
func (p *proxy) awaitHeld() {
	p.t.Helper()
	eventually(p.t, "an answer to be held back", p.holding)
}

// holding reports whether an answer is held back.
func (p *proxy) holding() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held > 0
}

// letThrough ends the holding back for new answers; those that are held stay.
func (p *proxy) letThrough() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold = ""
}

// release lets everything go.
func (p *proxy) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold = ""
	select {
	case <-p.open:
	default:
		close(p.open)
	}
}

// cut breaks all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close() //nolint:errcheck // that is the point
		delete(p.conns, c)
	}
}
