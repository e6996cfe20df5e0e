package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// wire is one HTTP/1.1 connection with one caller. It sends the same bytes again
// and again and decodes nothing, so that the client costs little beside what is
// measured, and the same for every target.
type wire struct {
	conn    net.Conn
	r       *bufio.Reader
	request []byte
	// expect must be in the answer.
	expect string
	body   []byte
}

// dial connects to the host of url and prepares a request. expect is a text that
// every good answer holds.
func dial(url, method, path string, header map[string]string, body, expect string) (*wire, error) {
	host := strings.TrimPrefix(url, "http://")
	conn, err := net.Dial("tcp", host)
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\n", method, path, host)
	for k, v := range header {
		fmt.Fprintf(&b, "%s: %s\r\n", k, v)
	}
	if body != "" {
		b.WriteString("Content-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n")
	}
	b.WriteString("\r\n" + body)
	return &wire{conn: conn, r: bufio.NewReaderSize(conn, 64<<10), request: []byte(b.String()), expect: expect}, nil
}

func (w *wire) do(ctx context.Context) error {
	if d, ok := ctx.Deadline(); ok {
		if err := w.conn.SetDeadline(d); err != nil {
			return err
		}
	}
	if _, err := w.conn.Write(w.request); err != nil {
		return err
	}
	resp, err := http.ReadResponse(w.r, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if n := resp.ContentLength; n > int64(cap(w.body)) {
		w.body = make([]byte, 0, n)
	}
	b := w.body[:0]
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := resp.Body.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	w.body = b
	if resp.StatusCode != http.StatusOK || !contains(b, w.expect) {
		return fmt.Errorf("%s: %.300s", resp.Status, b)
	}
	return nil
}

// contains looks at the ends of large answers only: a listing is counted once,
// not searched each time.
func contains(b []byte, expect string) bool {
	const look = 4 << 10
	if len(b) <= 2*look {
		return strings.Contains(string(b), expect)
	}
	return strings.Contains(string(b[:look]), expect) || strings.Contains(string(b[len(b)-look:]), expect)
}

func (w *wire) close() { w.conn.Close() }

// modern are the headers of a request of revision 2026-07-28 (basic/transports,
// Standard Request Headers).
func modern(method, name string) map[string]string {
	h := map[string]string{"Accept": "application/json, text/event-stream", "Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": method}
	if name != "" {
		h["Mcp-Name"] = name
	}
	return h
}

// modernBody is a request of revision 2026-07-28 with its _meta. params is the
// inside of an object, without braces.
func modernBody(method, params string) string {
	if params != "" {
		params += ","
	}
	return `{"jsonrpc":"2.0","id":1,"method":"` + method + `","params":{` + params +
		`"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",` +
		`"io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}`
}

// requestTimeout bounds one request of a measurement.
const requestTimeout = 30 * time.Second
