package sessions

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/confine"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// FuzzParseBatch compares a batch with its messages read one by one.
func FuzzParseBatch(f *testing.F) {
	for _, s := range []string{`[]`, `[{}]`, ` [ {"jsonrpc":"2.0","id":1,"result":{}} , {"jsonrpc":"2.0","method":"x"} ] `,
		`[{"jsonrpc":"2.0","id":"1","error":{"code":1,"message":""}}]`, `[[{"jsonrpc":"2.0","method":"x"}]]`, `[{"jsonrpc":"2.0","method":"x"},]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		const most = 5
		all, err := parseBatch(in, most)
		if err == nil && len(all) > most {
			t.Fatalf("%d messages", len(all))
		}
		if err == nil && !json.Valid(in) {
			t.Fatalf("%q is no JSON", in)
		}
		var parts []json.RawMessage
		if json.Unmarshal(in, &parts) != nil {
			return
		}
		good := len(parts) <= most && bytes.HasPrefix(bytes.TrimSpace(in), []byte("["))
		for i, part := range parts {
			m, bad := parseMessage(part)
			good = good && bad == nil
			if err == nil && (bad != nil || !bytes.Equal(m.id, all[i].id) || m.method != all[i].method || !bytes.Equal(m.result, all[i].result)) {
				t.Fatalf("%q: message %d is %+v, by itself %+v, %v", in, i, all[i], m, bad)
			}
		}
		if good != (err == nil) {
			t.Fatalf("%q: every message is good: %v, but the batch: %v", in, good, err)
		}
	})
}

// FuzzHeaders sends names and arguments through the Mcp-* headers and reads them
// back as a server does.
func FuzzHeaders(f *testing.F) {
	for _, s := range []string{"", "echo", " x", "x\t", "échо", "=?base64?eA==?=", "=?base64?", "a\r\nb: c", "\x00", "\x7f", "\xff", "日本", strings.Repeat("x", 300)} {
		f.Add(s, s, int64(len(s)), s == "")
	}
	f.Add("a", "b", int64(1)<<53, true)
	c := &conn{era: EraModern, version: mcp.ProtocolVersion20260728, target: Target{Transport: TransportHTTP}}
	schema := json.RawMessage(`{"type":"object","properties":{"s":{"type":"string","x-mcp-header":"S"},"n":{"type":"integer","x-mcp-header":"N"},
		"o":{"type":"object","properties":{"b":{"type":"boolean","x-mcp-header":"B"}}}}}`)
	listed := &mcp.Tool{RawInputSchema: schema}
	f.Fuzz(func(t *testing.T, name, text string, n int64, b bool) {
		params, err := json.Marshal(map[string]any{"name": name, "arguments": map[string]any{"s": text, "n": n, "o": map[string]any{"b": b}}})
		if err != nil {
			t.Fatal(err)
		}
		h, err := c.headers(&Request{Method: "tools/call", Name: name, Params: params, Schema: schema})
		if n > 1<<53-1 || n < -(1<<53-1) {
			if ft, ok := fault.As(err); !ok || ft.Reason != "HEADER_ARGUMENT_INVALID" {
				t.Fatalf("%d: %v", n, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range h {
			if strings.Trim(v, " ") != v || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Fatalf("%q: %q is not a header", k, v)
			}
		}
		if back, ok := mcp.DecodeHeaderValue(h[mcp.HeaderName]); !ok || back != name {
			t.Fatalf("the name %q is %q for the server, sent as %q", name, back, h[mcp.HeaderName])
		}
		if !utf8.ValidString(name) || !utf8.ValidString(text) {
			return // JSON carries other bytes than the header
		}
		for k, want := range mcp.StandardHeaders(mcp.ProtocolVersion20260728, mcp.MethodToolsCall, params) {
			if k != mcp.HeaderProtocolVersion && h[k] != want {
				t.Fatalf("%s: %q, the library says %q", k, h[k], want)
			}
		}
		if err := mcp.ValidateParamHeadersLookup(func(k string) (string, bool) { v, ok := h[k]; return v, ok }, listed, params); err != nil {
			t.Fatalf("a server refuses %q for %s: %v", h, params, err)
		}
	})
}

// FuzzRefusalHeaders reads what a refusal says in its headers.
func FuzzRefusalHeaders(f *testing.F) {
	for _, s := range []string{"", "0", "120", "-1", "1e9", "99999999999999999999", " 5 ", "Fri, 31 Dec 1999 23:59:59 GMT", "Sun, 06 Nov 9999 08:49:37 GMT",
		"Sunday, 06-Nov-94 08:49:37 GMT", "SundAY, 01-Nov-00 0:00:00 AAA", "Bearer realm=\"x\", scope=\"a\"", "\x00\xff", strings.Repeat("é", maxChallenge)} {
		f.Add(s, s, int64(0))
	}
	f.Fuzz(func(t *testing.T, after, asks string, now int64) {
		d := retryAfter(after, time.Unix(now%(1<<40), 0))
		if d < 0 || d > maxRetryAfter {
			t.Fatalf("%q: a pause of %v", after, d)
		}
		if _, bad := http.ParseTime(after); d > 0 && bad != nil && strings.ContainsAny(after, "-.eE") {
			t.Fatalf("%q: a pause of %v", after, d)
		}
		got := challenge(&http.Response{Header: http.Header{"Www-Authenticate": {asks, asks}}})
		if len(got) > maxChallenge || !strings.HasPrefix(asks+", "+asks, got) {
			t.Fatalf("%q became %q", asks, got)
		}
		if utf8.ValidString(asks) && !utf8.ValidString(got) {
			t.Fatalf("%q is cut inside a character", got)
		}
	})
}

// pagesWire answers every request with the next of its pages, and with the last
// one for ever.
type pagesWire struct {
	wire
	pages [][]byte
	asked int
	bytes int64
}

func (w *pagesWire) exchange(_ context.Context, x *exchange) (reply, error) {
	page := w.pages[min(w.asked, len(w.pages)-1)]
	w.asked++
	m, err := parseMessage(append(append([]byte(`{"jsonrpc":"2.0","id":1,"result":`), page...), '}'))
	if err != nil {
		return reply{phase: MaybeSent}, protocolError("ANSWER_INVALID", "no message").Cause(err)
	}
	if int64(len(m.result)) > x.limit {
		return reply{phase: MaybeSent}, tooLarge
	}
	w.bytes += int64(len(m.result))
	return reply{msg: m, phase: Answered}, nil
}

// FuzzPages lists what a server says in pages of any kind: it ends, within the
// bounds, and with each item as it came.
func FuzzPages(f *testing.F) {
	for _, s := range []string{
		`{"tools":[{"name":"a"}],"nextCursor":"1"}` + "\x00" + `{"tools":[{"name":"b"}]}`,
		`{"tools":[],"nextCursor":"1"}`, `{"tools":[],"nextCursor":""}`, `{"tools":[],"nextCursor":null}`, `{"tools":[],"nextCursor":7}`,
		`{"tools":[],"nextCursor":"1"}` + "\x00" + `{"tools":[],"nextCursor":"2"}` + "\x00" + `{"tools":[],"nextCursor":"1"}`,
		`{"tools":[1,"x",null,[],{}],"ttlMs":5,"cacheScope":"public"}`, `{"tools":[1,2,3,4,5,6,7,8,9]}`, `{"resultType":"input_required","tools":[]}`, `[]`,
		`{"tools":[{"name":"x","inputSchema":{"type":"object","properties":{"a":{"type":"string","x-mcp-header":"A"}}}}]}`,
		`{"tools":[{"inputSchema":{"properties":{"a":{"x-mcp-header":"A"}}}}],"nextCursor":"\ud800"}`,
	} {
		f.Add([]byte(s), true)
		f.Add([]byte(s), false)
	}
	f.Fuzz(func(t *testing.T, in []byte, modern bool) {
		p := &Pool{limits: Limits{ListItems: 8, ListPages: 6, ListBytes: 4 << 10}.withDefaults(), answers: newBudget(1<<20, 1<<20), eras: map[registration]eraNote{}}
		w := &pagesWire{pages: bytes.Split(in, []byte{0})}
		c := &conn{pool: p, era: EraLegacy, version: mcp.ProtocolVersion20251125, target: Target{Transport: TransportHTTP}, wire: w, caps: []byte(`{"tools":{}}`)}
		if modern {
			c.era, c.version = EraModern, mcp.ProtocolVersion20260728
		}
		out, err := c.list(t.Context(), &Target{}, KindTool)
		if w.asked > 6 || w.bytes > 4<<10 {
			t.Fatalf("%d pages with %d bytes were read", w.asked, w.bytes)
		}
		if p.answers.used != 0 {
			t.Fatalf("%d bytes of the budget are still taken", p.answers.used)
		}
		if err != nil {
			if ft, ok := fault.As(err); !ok || ft.Layer == fault.Host || ft.Kind == fault.Internal || out.Items != nil {
				t.Fatalf("%v with %d items", err, len(out.Items))
			}
			return
		}
		if len(out.Items)+len(out.Rejected) > 8 {
			t.Fatalf("%d items", len(out.Items)+len(out.Rejected))
		}
		for _, item := range out.Items {
			if !json.Valid(item) || !bytes.Contains(in, item) {
				t.Fatalf("item %q was not sent", item)
			}
		}
		if out.TTL < 0 || out.Scope != "public" && out.Scope != "private" || !modern && (out.TTL != 0 || out.Scope != "private" || out.Rejected != nil) {
			t.Fatalf("%+v", out)
		}
	})
}

// FuzzLines reads what a child writes, cut into pieces of any size: what is no
// message is counted, no request gets two answers, and nothing stays taken of the
// budget for answers.
func FuzzLines(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":1,"result":{}}` + "\n", `{"jsonrpc":"2.0","id":1,"result":{}}`, "\n\n\r\n", "no message\n{}\n[]\n",
		`{"jsonrpc":"2.0","id":"2","result":{"a":"` + strings.Repeat("x", 200) + `"}}` + "\r\n" + `{"jsonrpc":"2.0","id":2,"result":{}}` + "\n",
		`[{"jsonrpc":"2.0","id":1,"result":{}},{"jsonrpc":"2.0","id":2,"result":{}},{"jsonrpc":"2.0","id":1,"result":{}}]` + "\n",
		`{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"x"}}` + "\n", `{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}` + "\n",
		`{"jsonrpc":"2.0","id":[1],"method":"ping"}` + "\n", `{"jsonrpc":"2.0","id":"a","method":"roots/list"}` + "\n", "\xef\xbb\xbf{}\n", "{\"a\":\"\x00\"}\n",
	} {
		f.Add([]byte(s), uint16(3), false)
		f.Add([]byte(s), uint16(4096), true)
	}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { null.Close() })
	f.Fuzz(func(t *testing.T, in []byte, piece uint16, batches bool) {
		p := &Pool{ctx: context.Background(), log: quietLog(), limits: Limits{LineBytes: 1 << 10}.withDefaults(), answers: newBudget(1<<20, 1<<20), slots: map[Key]*slot{}}
		c := &conn{pool: p, key: Key{Tenant: tenantID(t, "ten_a")}}
		w := &stdioWire{proc: &confine.Process{Stdin: null}, conn: c, limits: &p.limits, tasks: &p.tasks, log: p.log, closing: true,
			writing: make(chan struct{}, 1), alive: make(chan struct{}), dead: make(chan struct{}), requests: newInflight()}
		if batches {
			w.version = mcp.ProtocolVersion20250326
		}
		waiting := map[int64]*waiter{}
		for id := range int64(3) {
			waiting[id] = w.requests.enter(id)
		}
		w.read(&pieces{in, int(piece%4096) + 1})
		select {
		case <-w.dead:
		default:
			t.Fatal("the end was not noticed")
		}
		for id, wait := range waiting {
			w.requests.leave(id, wait)
		}
		p.tasks.wait()
		if p.answers.used != 0 {
			t.Fatalf("%d bytes of the budget are still taken", p.answers.used)
		}
		if got, most := c.count.garbage.Load(), int64(bytes.Count(in, []byte{'\n'})+1); got > most {
			t.Fatalf("%d lines of garbage in %d", got, most)
		}
		if whole := int64(len(in)) <= p.limits.LineBytes; whole && bytes.IndexByte(in, '\n') < 0 {
			if _, err := parseMessage(bytes.TrimSpace(in)); err != nil && len(bytes.TrimSpace(in)) > 0 && c.count.garbage.Load() != 1 && !batches {
				t.Fatalf("%q was not counted", in)
			}
		}
	})
}

// pieces is a reader of pieces of one size.
type pieces struct {
	rest []byte
	size int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.rest[:min(p.size, len(p.rest))])
	p.rest = p.rest[n:]
	return n, nil
}

// FuzzSmallEvents reads event streams under narrow limits: it ends with a known
// error, and no event is larger than the limit.
func FuzzSmallEvents(f *testing.F) {
	for _, s := range []string{"data: x\n\n", strings.Repeat("data:\n", 20) + "\n", strings.Repeat(":\n", 50), "\xef\xbb\xbfid: 1\ndata: " + strings.Repeat("x", 90) + "\r\r",
		strings.Repeat("x", 200), "event: e\rdata\r\ndata: y\n\n" + strings.Repeat("\n", 300), "retry: 99999999999\nretry: 7\nid: \x00\n\n"} {
		f.Add(s, uint64(1))
	}
	known := []error{io.EOF, errEventTooLarge, errStreamTooLarge}
	f.Fuzz(func(t *testing.T, in string, seed uint64) {
		lim := streamLimits{event: 100, lines: 10, total: 400}
		hold := newBudget(1<<20, 1<<20)
		e := newEventReader(newCutter(in, seed), lim)
		e.hold = &lease{budget: hold}
		var got []string
		for {
			ev, err := e.next()
			if err != nil {
				if !slices.Contains(known, err) {
					t.Fatal(err)
				}
				if err == io.EOF && (len(in) > 400+1 || fmt.Sprintf("%q", got) != fmt.Sprintf("%q", texts(reference(in)))) {
					t.Fatalf("%q: %q", in, got)
				}
				break
			}
			if int64(len(ev.data)) > lim.event {
				t.Fatalf("%q: an event of %d bytes", in, len(ev.data))
			}
			got = append(got, string(ev.data))
		}
		if len(e.lastID) > maxEventID || strings.Contains(e.lastID, "\x00") || e.retry < 0 {
			t.Fatalf("id %q, retry %v", e.lastID, e.retry)
		}
	})
}

func texts(all []seenEvent) (out []string) {
	for _, e := range all {
		out = append(out, e.Data)
	}
	return out
}
