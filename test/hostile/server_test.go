package hostile_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// The eras that a server plays.
const (
	modern = "2026-07-28"
	legacy = "2025-11-25"
)

// script writes the answer to one request, byte by byte as it likes.
type script func(p *peer)

// server is an MCP server that writes HTTP by hand, so that it can write it wrong.
// Methods without a script are answered as a good server of its version does.
type server struct {
	version string
	url     string
	ln      net.Listener
	wg      sync.WaitGroup
	closing chan struct{}
	sent    atomic.Int64 // bytes that scripts wrote
	scripts atomic.Pointer[map[string]script]

	mu    sync.Mutex
	conns map[net.Conn]bool
	seen  map[string]int
}

func newServer(t testing.TB, ln net.Listener, version string, scripts map[string]script) *server {
	t.Helper()
	s := &server{version: version, ln: ln, closing: make(chan struct{}), conns: map[net.Conn]bool{}, seen: map[string]int{}}
	s.url = "http://" + ln.Addr().String() + "/mcp"
	s.scripts.Store(&scripts)
	s.wg.Go(s.accept)
	return s
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// heal makes it a good server.
func (s *server) heal(scripts map[string]script) { s.scripts.Store(&scripts) }

func (s *server) close() {
	close(s.closing)
	s.ln.Close()
	s.mu.Lock()
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// total is the number of requests so far.
func (s *server) total() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.seen {
		n += k
	}
	return n
}

func (s *server) count(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen[method]
}

func (s *server) accept() {
	for {
		c, err := s.ln.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.conns[c] = true
		s.mu.Unlock()
		s.wg.Go(func() {
			defer func() {
				c.Close()
				s.mu.Lock()
				delete(s.conns, c)
				s.mu.Unlock()
			}()
			s.serve(c)
		})
	}
}

func (s *server) serve(c net.Conn) {
	in := bufio.NewReaderSize(c, 4<<10)
	for {
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		p := &peer{Conn: c, server: s, in: in, header: r.Header, path: r.URL.Path, body: string(body)}
		var m struct {
			Method string
			ID     json.RawMessage
		}
		if json.Unmarshal(body, &m) == nil {
			p.method, p.id = m.Method, string(m.ID)
		}
		if p.method == "" {
			p.method = r.Method // answers of the host are POST
		}
		s.mu.Lock()
		s.seen[p.method]++
		p.n = s.seen[p.method]
		s.mu.Unlock()
		if f, ok := (*s.scripts.Load())[p.method]; ok {
			f(p)
		} else {
			p.plain()
		}
		if !p.keep {
			return
		}
	}
}

// peer is one request and the connection to write its answer on.
type peer struct {
	net.Conn
	server *server
	in     *bufio.Reader
	header http.Header
	path   string
	body   string
	method string
	id     string
	n      int  // how many requests with this method there were, this one too
	keep   bool // the connection serves further requests
	line   *line
}

// write writes text with $ID replaced, and reports whether it could.
func (p *peer) write(text string) bool {
	n, err := io.WriteString(p.Conn, strings.ReplaceAll(text, "$ID", p.id))
	p.server.sent.Add(int64(n))
	return err == nil
}

// forever writes text again and again until the other side has enough. It gives up
// at 256 MiB, far beyond every limit.
func (p *peer) forever(text string) {
	chunk := []byte(strings.Repeat(text, 1+(32<<10)/len(text)))
	for p.server.sent.Load() < 256<<20 {
		n, err := p.Conn.Write(chunk)
		p.server.sent.Add(int64(n))
		if err != nil {
			return
		}
	}
}

// hang waits until the other side leaves or the server stops.
func (p *peer) hang() {
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		io.Copy(io.Discard, p.in) //nolint:errcheck // it ends with the connection
	}()
	select {
	case <-gone:
	case <-p.server.closing:
	}
	p.Conn.Close()
	<-gone
}

// reset closes the connection so that the other side sees an error.
func (p *peer) reset() {
	c, ok := p.Conn.(*net.TCPConn)
	if ok {
		c.SetLinger(0) //nolint:errcheck // it is closed anyhow
	}
	p.Conn.Close()
}

// full writes a whole answer with its length.
func (p *peer) full(status int, headers, body string) {
	body = strings.ReplaceAll(body, "$ID", p.id)
	p.write(fmt.Sprintf("HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n", status, headers, len(body)))
	p.keep = p.write(body)
}

const jsonType = "Content-Type: application/json\r\n"

// head begins an answer that ends with the connection.
func (p *peer) head(headers string) bool {
	return p.write("HTTP/1.1 200 OK\r\nConnection: close\r\n" + headers + "\r\n")
}

// chunk writes one chunk of a chunked answer.
func (p *peer) chunk(text string) bool {
	text = strings.ReplaceAll(text, "$ID", p.id)
	return p.write(fmt.Sprintf("%x\r\n%s\r\n", len(text), text))
}

// raw answers with exactly these bytes and closes.
func raw(text string) script { return func(p *peer) { p.write(text) } }

// body answers 200 with JSON of this text.
func body(text string) script { return func(p *peer) { p.full(200, jsonType, text) } }

// status answers with a status, headers and a text.
func status(code int, headers, text string) script {
	return func(p *peer) { p.full(code, headers, text) }
}

// result answers with a JSON-RPC result.
func result(text string) script { return body(`{"jsonrpc":"2.0","id":$ID,"result":` + text + `}`) }

const sseType = "Content-Type: text/event-stream\r\n"

// stream answers with an event stream of these pieces, whole as HTTP.
func stream(pieces ...string) script {
	return func(p *peer) {
		p.write("HTTP/1.1 200 OK\r\n" + sseType + "Transfer-Encoding: chunked\r\n\r\n")
		for _, text := range pieces {
			if !p.chunk(text) {
				return
			}
		}
		p.keep = p.write("0\r\n\r\n")
	}
}

// endless answers with a beginning and then one text for ever.
func endless(headers, begin, again string) script {
	return func(p *peer) {
		if p.head(headers) && (begin == "" || p.write(begin)) {
			p.forever(again)
		}
	}
}

func event(data string) string { return "data: " + data + "\n\n" }

const good = `{"resultType":"complete","content":[{"type":"text","text":"ok"}]}`

// answerEvent is the event of a good answer.
var answerEvent = event(`{"jsonrpc":"2.0","id":$ID,"result":` + good + `}`)

// plain is how a good server answers.
func (p *peer) plain() {
	is := p.server.version
	switch {
	case p.method == "server/discover" && is == modern:
		result(`{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}`)(p)
	case p.method == "initialize" && is != modern:
		p.full(200, jsonType+"Mcp-Session-Id: s1\r\n", `{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":"`+is+`","capabilities":{"tools":{}},"serverInfo":{"name":"x","version":"1"}}}`)
	case p.method == "tools/list":
		result(`{"resultType":"complete","tools":[{"name":"echo","inputSchema":{"type":"object"}}]}`)(p)
	case p.method == "tools/call":
		result(good)(p)
	case p.method == "subscriptions/listen", p.method == "GET":
		status(405, "", "")(p)
	case strings.HasPrefix(p.method, "notifications/"), p.method == "POST", p.method == "DELETE":
		status(202, "", "")(p)
	default:
		body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"method not found"}}`)(p)
	}
}

// drip writes a text one byte at a time, each in a segment of its own.
func (p *peer) drip(text string) bool {
	for _, b := range []byte(strings.ReplaceAll(text, "$ID", p.id)) {
		if _, err := p.Conn.Write([]byte{b}); err != nil {
			return false
		}
	}
	return true
}

// patience bounds each case. It is generous: only a hang meets it.
const patience = 60 * time.Second
