package hostile_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// large writes an answer of about n bytes from one small buffer, so that what is
// counted is what the reader allocates.
func large(n int, headers, begin, end string) script {
	block := []byte(strings.Repeat("x", 64<<10))
	return func(p *peer) {
		ok := p.head(headers) && p.write(begin)
		for left := n; ok && left > 0; left -= len(block) {
			sent, err := p.Conn.Write(block[:min(left, len(block))])
			ok = err == nil && sent > 0
		}
		p.write(end)
	}
}

// TestMemory_OfALargeResult holds what a large result costs to three times its
// size, however it comes: the bytes, their growth while the length is not known,
// and nothing else. A buffer that doubles costs between two and four times what is
// in it at the end, depending on where the last step falls.
func TestMemory_OfALargeResult(t *testing.T) {
	const size = 10 << 20
	const begin, end = `{"jsonrpc":"2.0","id":$ID,"result":{"content":[{"type":"text","text":"`, `"}]}}`
	whole := len(begin) + size + len(end) - len("$ID") + 10 // ids have ten digits
	for name, f := range map[string]script{
		"JSON of known length":   large(size, jsonType+fmt.Sprintf("Content-Length: %d\r\n", whole), begin, end),
		"JSON of unknown length": large(size, jsonType, begin, end),
		"event":                  large(size, sseType, "data: "+begin, end+"\n\n"),
	} {
		for _, version := range []string{modern, legacy} {
			s := newServer(t, listen(t), version, onCall(f))
			limits := small()
			limits.ResultBytes = 16 << 20
			r, shutdown := newRig(t, sessions.Target{ServerName: "large", Transport: sessions.TransportHTTP, URL: s.url}, limits, nil)
			var got string
			n := allocated(func() { got = r.call(context.Background(), nil) })
			shutdown()
			s.close()
			t.Logf("%s of %s: %.2f times its size", name, version, float64(n)/size)
			if got != "ok" {
				t.Errorf("%s of %s: %s", name, version, got)
			}
			if n > 3*size {
				t.Errorf("%s of %s: %d bytes are allocated for a result of %d", name, version, n, size)
			}
		}
	}
}

// TestMemory_OfAStreamIsLinear compares what streams of n and of 4 n parts cost: a
// reader whose work grows with the square would allocate sixteen times as much.
func TestMemory_OfAStreamIsLinear(t *testing.T) {
	for name, part := range map[string]string{
		"events":        event(`{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}`),
		"comments":      ": nothing\n",
		"lines of data": "data: 1,\n",
		"garbage":       event("{"),
	} {
		cost := func(n int) int64 {
			text := strings.Repeat(part, n)
			if name == "lines of data" {
				text = "data: {\"x\":[\n" + text + "data: 1]}\n\n"
			}
			s := newServer(t, listen(t), modern, onCall(stream(text, "\n", answerEvent)))
			defer s.close()
			limits := small()
			limits.NoiseBytes, limits.ResultBytes, limits.EventLines = 64<<20, 16<<20, 1<<20
			r, shutdown := newRig(t, sessions.Target{ServerName: "stream", Transport: sessions.TransportHTTP, URL: s.url}, limits, nil)
			defer shutdown()
			return allocated(func() {
				if got := r.call(context.Background(), nil); got != "ok" {
					t.Errorf("%s: %s", name, got)
				}
			})
		}
		const n = 10_000
		cost(n) // what is allocated once and kept
		one, four := cost(n), cost(4*n)
		t.Logf("%s: %d bytes for n, %d for 4 n", name, one, four)
		if four > 6*one+(1<<20) {
			t.Errorf("%s: %d bytes for n, %d for 4 n", name, one, four)
		}
	}
}
