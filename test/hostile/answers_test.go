package hostile_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// onCall scripts the answer to a call.
func onCall(f script) map[string]script { return map[string]script{"tools/call": f} }

const answerBegin = `{"jsonrpc":"2.0","id":$ID,"result":{"x":`

// bodies are answers whose bytes are wrong, whatever they should say.
func bodies() []misbehaviour {
	const invalid = "PROTOCOL ANSWER_INVALID, maybe sent"
	const large = "SERVER RESULT_TOO_LARGE, maybe sent"
	const brokenOff = "TRANSPORT ANSWER_BROKEN, maybe sent"
	whole := `{"jsonrpc":"2.0","id":1,"result":` + good + `}`
	return []misbehaviour{
		{name: "truncated JSON", scripts: onCall(body(whole[:60])), want: invalid},
		{name: "two messages in one body", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"result":{}}{"jsonrpc":"2.0","id":$ID,"result":{}}`)), want: invalid},
		{name: "endless body", scripts: onCall(endless(jsonType, answerBegin+`"`, "x")), want: large},
		{name: "endless digits", scripts: onCall(endless(jsonType, answerBegin, "1")), want: large},
		{name: "endless whitespace", scripts: onCall(endless(jsonType, "", " \n\t")), want: large},
		{name: "endless body without a type", scripts: onCall(endless("", "", "x")), want: large},
		{name: "nested 100,000 deep", scripts: onCall(body(answerBegin + strings.Repeat("[", 50_000) + strings.Repeat("]", 50_000) + "}}")),
			limits: wide, want: invalid, alloc: 4 << 20},
		{name: "objects nested 20,000 deep", scripts: onCall(body(answerBegin + strings.Repeat(`{"a":`, 20_000) + "1" + strings.Repeat("}", 20_000) + "}}")),
			limits: wide, want: invalid, alloc: 4 << 20},
		{name: "bytes that are no UTF-8", scripts: onCall(body(answerBegin + "\"\xff\xfe\xc0\x80\"}}")), want: "ok"},
		{name: "overlong UTF-8", scripts: onCall(body(answerBegin + "\"\xe0\x80\xaf\"}}")), want: "ok"},
		{name: "a surrogate in UTF-8", scripts: onCall(body(answerBegin + "\"\xed\xa0\x80\"}}")), want: "ok"},
		// Escaped, a lone surrogate is JSON; what reads the text judges it.
		{name: "a lone surrogate, escaped", scripts: onCall(body(answerBegin + `"\ud800"}}`)), want: "ok"},
		{name: "byte order mark", scripts: onCall(body("\xef\xbb\xbf" + `{"jsonrpc":"2.0","id":$ID,"result":{}}`)), want: invalid},
		{name: "NUL bytes", scripts: onCall(body("\x00\x00\x00\x00")), want: invalid},
		{name: "NUL bytes behind the answer", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"result":{}}` + "\x00\x00")), want: invalid},
		{name: "UTF-16", scripts: onCall(body("\xff\xfe" + strings.Join(strings.Split(`{"jsonrpc":"2.0","id":1,"result":{}}`, ""), "\x00") + "\x00")), want: invalid},
		{name: "gzip bomb", scripts: onCall(status(200, jsonType+"Content-Encoding: gzip\r\n", zipped("", 64<<20))), want: large, alloc: 2 << 20},
		{name: "gzip bomb in a stream", scripts: onCall(status(200, sseType+"Content-Encoding: gzip\r\n", zipped("data: ", 64<<20))), want: large, alloc: 2 << 20},
		{name: "nested gzip", scripts: onCall(status(200, jsonType+"Content-Encoding: gzip, gzip\r\n", "x")), want: "PROTOCOL ENCODING_UNSUPPORTED, maybe sent"},
		{name: "gzip in gzip", scripts: onCall(status(200, jsonType+"Content-Encoding: gzip\r\n", zip(zip(whole)))), want: invalid},
		{name: "gzip that is none", scripts: onCall(status(200, jsonType+"Content-Encoding: gzip\r\n", whole)), want: brokenOff},
		{name: "truncated gzip", scripts: onCall(status(200, jsonType+"Content-Encoding: gzip\r\n", zip(whole)[:30])), want: brokenOff},
		{name: "brotli", scripts: onCall(status(200, jsonType+"Content-Encoding: br\r\n", "x")), want: "PROTOCOL ENCODING_UNSUPPORTED, maybe sent"},
		{name: "Content-Length too short", scripts: onCall(raw("HTTP/1.1 200 OK\r\n" + jsonType + "Content-Length: 30\r\n\r\n" + whole)), want: invalid},
		{name: "Content-Length too long", scripts: onCall(raw("HTTP/1.1 200 OK\r\n" + jsonType + "Content-Length: 3000\r\n\r\n" + whole)), want: brokenOff},
		{name: "Content-Length of a terabyte", scripts: onCall(raw("HTTP/1.1 200 OK\r\n" + jsonType + "Content-Length: 1099511627776\r\n\r\n" + whole)), want: large},
		{name: "Content-Length just within the limit and nothing", scripts: onCall(raw("HTTP/1.1 200 OK\r\n" + jsonType + "Content-Length: 120000\r\n\r\n")), want: brokenOff},
		{name: "garbage in chunks", scripts: onCall(raw("HTTP/1.1 200 OK\r\n" + jsonType + "Transfer-Encoding: chunked\r\n\r\nzz\r\n")), want: brokenOff},
		{name: "a chunk of 2^63 bytes", scripts: onCall(endless(jsonType+"Transfer-Encoding: chunked\r\n", "7fffffffffffffff\r\n", " ")), want: large},
		{name: "endless chunk extension", scripts: onCall(endless(jsonType+"Transfer-Encoding: chunked\r\n", "1;", "a=b;")), want: brokenOff},
		{name: "endless tiny chunks with extensions", scripts: onCall(endless(jsonType+"Transfer-Encoding: chunked\r\n", "", "1;a="+strings.Repeat("x", 200)+"\r\n \r\n")), want: brokenOff},
		{name: "trailers", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 200 OK\r\n" + jsonType + "Trailer: Mcp-Session-Id\r\nTransfer-Encoding: chunked\r\n\r\n")
			p.chunk(`{"jsonrpc":"2.0","id":$ID,"result":{}}`)
			p.keep = p.write("0\r\nMcp-Session-Id: evil\r\n\r\n")
		}), want: "ok"},
		{name: "endless trailers", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 200 OK\r\n" + jsonType + "Transfer-Encoding: chunked\r\n\r\n")
			p.chunk(`{"jsonrpc":"2.0","id":$ID,"result":{}}`)
			p.write("0\r\n")
			p.forever("a: b\r\n")
		}), want: brokenOff},
		{name: "HTML page as 200", scripts: onCall(status(200, "Content-Type: text/html\r\n", "<html>"+strings.Repeat("x", 1000))), want: "PROTOCOL CONTENT_TYPE_UNSUPPORTED, maybe sent"},
		{name: "plain text", scripts: onCall(status(200, "Content-Type: text/plain\r\n", whole)), want: "PROTOCOL CONTENT_TYPE_UNSUPPORTED, maybe sent"},
		{name: "multipart", scripts: onCall(status(200, "Content-Type: multipart/mixed; boundary=x\r\n", "--x\r\n\r\n"+whole)), want: "PROTOCOL CONTENT_TYPE_UNSUPPORTED, maybe sent"},
		{name: "no content type", scripts: onCall(func(p *peer) { p.full(200, "", `{"jsonrpc":"2.0","id":$ID,"result":{}}`) }), want: "ok"},
		{name: "two content types", scripts: onCall(func(p *peer) { p.full(200, jsonType+sseType, `{"jsonrpc":"2.0","id":$ID,"result":{}}`) }), want: "ok"},
		{name: "JSON that calls itself a stream", scripts: onCall(func(p *peer) { p.full(200, sseType, `{"jsonrpc":"2.0","id":$ID,"result":{}}`) }), want: "TRANSPORT STREAM_ENDED, maybe sent"},
		{name: "a content type of 60 KiB", scripts: onCall(func(p *peer) {
			p.full(200, "Content-Type: application/json;"+strings.Repeat("x", 60_000)+"\r\n", `{"jsonrpc":"2.0","id":$ID,"result":{}}`)
		}), want: "ok"},
	}
}

func wide(l *sessions.Limits) { l.ResultBytes = 1 << 20 }

func zip(text string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, text) //nolint:errcheck // into memory
	w.Close()
	return b.String()
}

var bombs = map[string]string{}

// zipped is a gzip stream that begins with a text and unfolds to n further bytes.
func zipped(begin string, n int) string {
	if made, ok := bombs[begin]; ok {
		return made
	}
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, begin) //nolint:errcheck // into memory
	for block := make([]byte, 1<<20); n > 0; n -= len(block) {
		w.Write(bytes.ReplaceAll(block, []byte{0}, []byte{' '})) //nolint:errcheck // into memory
	}
	w.Close()
	bombs[begin] = b.String()
	return b.String()
}

// messages are answers that are JSON, but not the answer that was asked for.
func messages() []misbehaviour {
	const invalid = "PROTOCOL ANSWER_INVALID, maybe sent"
	const other = "PROTOCOL NO_ANSWER, maybe sent"
	const flawed = "PROTOCOL ERROR_INVALID, answered"
	cases := []misbehaviour{
		{name: "another id", scripts: onCall(body(`{"jsonrpc":"2.0","id":99999,"result":{}}`)), want: other},
		{name: "id as a string", scripts: onCall(body(`{"jsonrpc":"2.0","id":"$ID","result":{}}`)), want: "ok"},
		{name: "null id beside a result", scripts: onCall(body(`{"jsonrpc":"2.0","id":null,"result":{}}`)), want: other},
		{name: "null id beside an error", scripts: onCall(body(`{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"x"}}`)), want: "error -32700"},
		{name: "no id", scripts: onCall(body(`{"jsonrpc":"2.0","result":{}}`)), want: other},
		{name: "id as a fraction", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID.0,"result":{}}`)), want: other},
		{name: "id with an exponent", scripts: onCall(body(`{"jsonrpc":"2.0","id":$IDe0,"result":{}}`)), want: other},
		{name: "id as an object", scripts: onCall(body(`{"jsonrpc":"2.0","id":{"a":$ID},"result":{}}`)), want: other},
		{name: "id as an array", scripts: onCall(body(`{"jsonrpc":"2.0","id":[$ID],"result":{}}`)), want: other},
		{name: "id of 60 KiB", scripts: onCall(body(`{"jsonrpc":"2.0","id":"` + strings.Repeat("7", 60_000) + `","result":{}}`)), want: other},
		{name: "id twice", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"id":$ID,"result":{}}`)), want: invalid},
		{name: "result twice", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"result":{"a":1},"result":{"a":2}}`)), want: invalid},
		{name: "result twice, once escaped", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"result":{},"\u0072esult":{}}`)), want: invalid},
		{name: "result and error", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"result":{},"error":{"code":1,"message":"x"}}`)), want: invalid},
		{name: "another version of JSON-RPC", scripts: onCall(body(`{"jsonrpc":"1.0","id":$ID,"result":{}}`)), want: invalid},
		{name: "its own request as the answer", scripts: onCall(func(p *peer) { body(p.body)(p) }), want: other},
		{name: "a batch where none is allowed", scripts: onCall(body(`[{"jsonrpc":"2.0","id":$ID,"result":{}}]`)), want: invalid},
		{name: "batch of 10,000", version: "2025-03-26", scripts: onCall(body("[" + strings.Repeat(`{"jsonrpc":"2.0","method":"x"},`, 2000) + `{"jsonrpc":"2.0","id":$ID,"result":{}}]`)),
			want: invalid},
		{name: "batch with the answer twice", version: "2025-03-26", scripts: onCall(body(`[{"jsonrpc":"2.0","id":$ID,"result":{}},{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":"x"}}]`)),
			want: "ok"},
		{name: "batch within a batch", version: "2025-03-26", scripts: onCall(body(`[[{"jsonrpc":"2.0","id":$ID,"result":{}}]]`)), want: invalid},
		{name: "result that is no object", scripts: onCall(result(`[1,2]`)), want: "PROTOCOL RESULT_INVALID, answered"},
		{name: "result that is null", scripts: onCall(result(`null`)), want: "PROTOCOL RESULT_INVALID, answered"},
		{name: "isError twice", scripts: onCall(result(`{"isError":false,"isError":true}`)), want: "PROTOCOL RESULT_INVALID, answered"},
		{name: "error without a code", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"error":{"message":"x"}}`)), want: flawed},
		{name: "error code of 1e400", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":1e400,"message":"x"}}`)), want: flawed},
		{name: "error code beyond 64 bits", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":99999999999999999999,"message":"x"}}`)), want: flawed},
		{name: "error with a text of 60 KiB", scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":"` + strings.Repeat("é", 30_000) + `"}}`)), want: "error 1"},
		{name: "resultType unknown", scripts: onCall(result(`{"resultType":"partial"}`)), want: "PROTOCOL RESULT_TYPE_INVALID, answered", legacy: "ok"},
		{name: "resultType as a number", scripts: onCall(result(`{"resultType":1}`)), want: "PROTOCOL RESULT_TYPE_INVALID, answered", legacy: "ok"},
	}
	return cases
}

// streams are event streams that go wrong.
func streams() []misbehaviour {
	const large = "SERVER RESULT_TOO_LARGE, maybe sent"
	return []misbehaviour{
		{name: "truncated stream", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 200 OK\r\n" + sseType + "Transfer-Encoding: chunked\r\n\r\n")
			p.chunk(answerEvent[:40])
		}), want: "TRANSPORT ANSWER_BROKEN, maybe sent"},
		{name: "stream that ends without an answer", scripts: onCall(stream(": hello\n\n")), want: "TRANSPORT STREAM_ENDED, maybe sent"},
		{name: "endless comments", scripts: onCall(endless(sseType, "", ": x\n")), want: large, alloc: 2 << 20},
		{name: "endless empty data lines", scripts: onCall(endless(sseType, "", "data:\n")), want: large},
		{name: "endless blank lines", scripts: onCall(endless(sseType, "", "\n")), want: large},
		{name: "endless empty events", scripts: onCall(endless(sseType, "", "event: x\n\n")), want: large},
		{name: "endless line", scripts: onCall(endless(sseType, "data: ", "x")), want: large},
		{name: "endless event", scripts: onCall(endless(sseType, "", "data: "+strings.Repeat("x", 500)+"\n")), want: large},
		{name: "endless carriage returns", scripts: onCall(endless(sseType, "", "\r")), want: large},
		{name: "endless event ids", scripts: onCall(endless(sseType, "", "id: "+strings.Repeat("x", 900)+"\n\n")), want: large},
		{name: "endless garbage events", scripts: onCall(endless(sseType, "", event("{"))), want: large},
		{name: "endless notifications", scripts: onCall(endless(sseType, "", event(`{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}`))), want: large},
		{name: "endless changes of the list", scripts: onCall(endless(sseType, "", event(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`))), want: large},
		{name: "20,000 answers to other requests", scripts: onCall(stream(strings.Repeat(event(`{"jsonrpc":"2.0","id":77777,"result":{}}`), 20_000), answerEvent)), want: large, alloc: 12 << 20},
		{name: "20,000 notices of progress for unknown tokens", scripts: onCall(stream(strings.Repeat(event(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"x","progress":1}}`), 20_000), answerEvent)),
			limits: noisy, want: "ok", alloc: 64 << 20},
		{name: "progress that goes back, is NaN or beyond all numbers", scripts: onCall(stream(
			progress("5"), progress("4"), progress("-1"), progress("NaN"), progress("1e400"), progress("-1e400"), progress(`"x"`), progress("null"), progress("{}"), progress("[]"),
			answerEvent)), want: "ok"},
		{name: "20,000 log messages", scripts: onCall(stream(strings.Repeat(event(`{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"emergency","logger":"x","data":"y"}}`), 20_000), answerEvent)),
			limits: noisy, want: "ok", alloc: 64 << 20},
		{name: "two different answers", scripts: onCall(stream(answerEvent, event(`{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":"x"}}`))), want: "ok"},
		{name: "answer within an event of another name", scripts: onCall(stream("event: other\n" + answerEvent)), want: "TRANSPORT STREAM_ENDED, maybe sent"},
		{name: "UTF-16 stream", scripts: onCall(stream("\xff\xfed\x00a\x00t\x00a\x00:\x00\n\x00\n\x00")), want: "TRANSPORT STREAM_ENDED, maybe sent"},
		{name: "answer one byte at a time", scripts: onCall(func(p *peer) {
			p.head(sseType)
			p.drip(answerEvent)
		}), want: "ok", alloc: 4 << 20},
		{name: "drip without end", scripts: onCall(func(p *peer) {
			p.head(sseType)
			for p.drip(": still here\n\n") {
				time.Sleep(time.Millisecond)
			}
		}), request: timeout(400 * time.Millisecond), want: "TRANSPORT TIMEOUT, maybe sent", alloc: 4 << 20},
		{name: "stream resumed for ever", version: legacy, scripts: map[string]script{
			"tools/call": stream("retry: 1\nid: 1\ndata:\n\n"), "GET": stream("retry: 1\nid: 2\ndata:\n\n"),
		}, want: "TRANSPORT STREAM_ENDED, maybe sent", requests: 24, alloc: 2 << 20},
		{name: "stream resumed elsewhere", version: legacy, scripts: map[string]script{
			"tools/call": stream("retry: 1\nid: 1\ndata:\n\n"), "GET": status(302, "Location: http://127.0.0.1:1/\r\n", ""),
		}, want: "TRANSPORT STREAM_ENDED, maybe sent"},
		{name: "retry after a month", version: legacy, scripts: map[string]script{"tools/call": stream("retry: 2147483647\nid: 1\ndata:\n\n")},
			request: timeout(400 * time.Millisecond), want: "TRANSPORT TIMEOUT, maybe sent"},
	}
}

func progress(n string) string {
	return event(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":$ID,"progress":` + n + `,"total":` + n + `}}`)
}

func noisy(l *sessions.Limits) { l.NoiseBytes = 8 << 20 }

// again makes n calls and returns the last outcome.
func again(n int, change func(*sessions.Request)) func(context.Context, *rig, *server) string {
	return func(ctx context.Context, r *rig, _ *server) (got string) {
		for range n {
			got = r.call(ctx, change)
		}
		return got
	}
}

// orBroken makes calls of which each may find its connection broken, when the news
// of it comes while the request goes out; none gets another's answer.
func orBroken(ctx context.Context, r *rig, s *server) string { return among(1)(ctx, r, s) }

// among makes calls of some users in turn, each of which may end so, too.
func among(users int, also ...string) func(context.Context, *rig, *server) string {
	also = append(also, "ok", "TRANSPORT SERVER_UNREACHABLE, maybe sent")
	return func(ctx context.Context, r *rig, _ *server) string {
		own := r.key
		defer func() { r.key = own }()
		for i := range 6 {
			r.key = own
			if i%users > 0 {
				r.key.Subject.Value += fmt.Sprint(i % users)
			}
			if got := r.call(ctx, nil); !slices.Contains(also, got) {
				return got
			}
		}
		return "ok"
	}
}

// behind writes an answer and, on its heels, another one that nobody asked for.
func behind(p *peer, ahead int) {
	var id int
	fmt.Sscan(p.id, &id) //nolint:errcheck // 0 is as wrong
	first := fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"result":{}}`, id)
	second := fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"error":{"code":666,"message":"smuggled"}}`, id+ahead)
	p.write(fmt.Sprintf("HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%sHTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s",
		jsonType, len(first), first, jsonType, len(second), second))
	p.keep = true
}

// connections are connections that go wrong below the message.
func connections() []misbehaviour {
	const broke = "TRANSPORT SERVER_UNREACHABLE, maybe sent"
	return []misbehaviour{
		{name: "a header of 1 MiB", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 200 OK\r\nX-Big: ")
			p.forever("x")
		}), want: broke},
		{name: "endless headers", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 200 OK\r\n")
			p.forever("X-A: b\r\n")
		}), want: broke, alloc: 2 << 20},
		{name: "endless status line", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 200 ")
			p.forever("O")
		}), want: broke},
		{name: "no HTTP at all", scripts: onCall(func(p *peer) { p.forever("220 smtp.example ESMTP\r\n") }), want: broke},
		{name: "settings of HTTP/2 in the clear", scripts: onCall(raw("\x00\x00\x00\x04\x00\x00\x00\x00\x00PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")), want: broke},
		{name: "HTTP/9.9", scripts: onCall(raw("HTTP/9.9 200 OK\r\n" + jsonType + "Content-Length: 2\r\n\r\n{}")), want: "PROTOCOL ANSWER_INVALID, maybe sent"},
		{name: "HTTP/1.0", scripts: onCall(raw("HTTP/1.0 200 OK\r\n" + jsonType + "\r\n" + `{"jsonrpc":"2.0","id":$ID,"result":{}}`)), want: "ok"},
		{name: "HTTP/0.9", scripts: onCall(raw(`{"jsonrpc":"2.0","id":$ID,"result":{}}`)), want: broke},
		{name: "closed at once", scripts: onCall(func(*peer) {}), want: broke},
		{name: "half closed", scripts: onCall(func(p *peer) {
			p.Conn.(interface{ CloseWrite() error }).CloseWrite() //nolint:errcheck // it is closed in a moment
			p.hang()
		}), want: broke},
		{name: "reset", scripts: onCall((*peer).reset), want: broke},
		{name: "reset after the headers", scripts: onCall(func(p *peer) {
			p.head(jsonType)
			p.reset()
		}), want: "TRANSPORT ANSWER_BROKEN, maybe sent"},
		{name: "reset in the middle of the answer", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 200 OK\r\n" + jsonType + "Content-Length: 100\r\n\r\n{\"jsonrpc\":")
			p.reset()
		}), want: "TRANSPORT ANSWER_BROKEN, maybe sent"},
		{name: "accepted and never answered", scripts: onCall((*peer).hang), request: timeout(400 * time.Millisecond), want: "TRANSPORT TIMEOUT, maybe sent"},
		{name: "headers and then silence", scripts: onCall(func(p *peer) {
			p.head(jsonType)
			p.hang()
		}), request: timeout(400 * time.Millisecond), want: "TRANSPORT TIMEOUT, maybe sent"},
		{name: "a stream of silence", scripts: onCall(func(p *peer) {
			p.head(sseType)
			p.hang()
		}), request: timeout(400 * time.Millisecond), want: "TRANSPORT TIMEOUT, maybe sent"},
		{name: "flood of 1xx", scripts: onCall(func(p *peer) { p.forever("HTTP/1.1 102 Processing\r\n\r\n") }), want: broke, alloc: 8 << 20},
		{name: "1xx with huge headers", scripts: onCall(func(p *peer) {
			p.forever("HTTP/1.1 103 Early Hints\r\nLink: " + strings.Repeat("x", 30_000) + "\r\n\r\n")
		}), want: broke},
		{name: "switching protocols", scripts: onCall(raw("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + strings.Repeat("x", 1000))), want: "SERVER SERVER_REFUSED, maybe sent"},
		// The second is meant for the request that follows. If that goes out before the
		// connection is seen to be spoilt, the server has answered it, only early.
		{name: "a second answer behind the first", scripts: onCall(func(p *peer) { behind(p, 1) }),
			do: among(1, "error 666", "PROTOCOL NO_ANSWER, maybe sent"), want: "ok", requests: 28},
		// Those who share a connection count their requests apart: what is meant for one
		// is no answer for another who is as far.
		{name: "a second answer for another user", scripts: onCall(func(p *peer) { behind(p, 0) }),
			do: among(2, "PROTOCOL NO_ANSWER, maybe sent"), want: "ok", requests: 28},
		{name: "answers on a connection that it then breaks", scripts: onCall(func(p *peer) {
			p.full(200, jsonType, `{"jsonrpc":"2.0","id":$ID,"result":{}}`)
			p.keep = false
		}), do: orBroken, want: "ok", requests: 24},
	}
}
