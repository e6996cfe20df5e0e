package sessions

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

func TestFO068_StringIDOverHTTP(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	s.On("tools/call",
		mcptest.JSON(`{"jsonrpc":"2.0","id":"$ID","result":`+okResult+`}`),
		mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":99999,"result":{"content":[]}}`), mcptest.Event(`{"jsonrpc":"2.0","id":"0$ID","result":{"content":[]}}`), mcptest.ResultEvent(okResult)),
		mcptest.JSON(`{"jsonrpc":"2.0","id":$ID.0,"result":`+okResult+`}`),
		mcptest.JSON(`{"jsonrpc":"2.0","id":99999,"result":`+okResult+`}`),
	)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
		if string(resp.Result) != okResult {
			t.Fatalf("%s", resp.Result)
		}
	}
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, echo())
		expect(t, resp, err, "NO_ANSWER", fault.Protocol, MaybeSent)
	}
	if info := p.Connections(k.Tenant, func(Key) bool { return true })[0]; info.Stray != 4 {
		t.Fatalf("%d strays", info.Stray)
	}
}

func TestFO069_NullIDErrorEndsTheCall(t *testing.T) {
	t.Parallel()
	body := `{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"boom","data":{"x":1}}}`
	for name, answer := range map[string]mcptest.Answer{
		"200": mcptest.JSON(body), "400": mcptest.Status(400, "application/json", body), "500": mcptest.Status(500, "application/json", body),
		"stream": nil, "no id": mcptest.JSON(`{"jsonrpc":"2.0","error":{"code":-32603,"message":"boom","data":{"x":1}}}`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := mcptest.New(t, mcptest.Modern)
			p := newPool(t, nil)
			if answer == nil {
				answer = mcptest.StreamThen(s.Hang(), mcptest.Event(body))
			}
			release := make(chan struct{})
			s.On("tools/call", s.After(release, mcptest.Result(okResult)), answer)
			k, target := keyOf(t, "a"), httpTarget(s.URL)
			other := make(chan error, 1)
			go func() {
				resp, err := p.Do(context.Background(), k, target, echo())
				if err == nil && resp.Result == nil {
					err = errors.New("no result")
				}
				other <- err
			}()
			s.Wait(t, "tools/call", 1)
			resp, err := p.Do(t.Context(), k, target, echo())
			if err != nil || resp.Error == nil || resp.Error.Code != -32603 || resp.Error.Message != "boom" || string(resp.Error.Data) != `{"x":1}` || resp.Phase != Answered {
				t.Fatalf("%+v %v", resp, err)
			}
			close(release)
			if err := <-other; err != nil {
				t.Fatalf("the other call: %v", err)
			}
		})
	}
}

func TestFO071_ContentTypesWithParameters(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	body := `{"jsonrpc":"2.0","id":$ID,"result":` + okResult + `}`
	types := []string{"application/json; charset=utf-8", "APPLICATION/JSON", "application/json, application/json", "application/json ;x=y", "",
		"text/event-stream;charset=UTF-8", "Text/Event-Stream", "text/plain", "application/problem+json"}
	var answers []mcptest.Answer
	for _, ct := range types {
		b := body
		if strings.Contains(strings.ToLower(ct), "event-stream") {
			b = mcptest.Event(body)
		}
		if ct == "" {
			answers = append(answers, func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
				w.Header()["Content-Type"] = nil
				mcptest.Status(200, "", b)(w, raw, r)
			})
			continue
		}
		answers = append(answers, mcptest.Status(200, ct, b))
	}
	s.On("tools/call", answers...)
	for _, ct := range types {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		if ct == "text/plain" || ct == "application/problem+json" {
			expect(t, resp, err, "CONTENT_TYPE_UNSUPPORTED", fault.Protocol, MaybeSent)
			continue
		}
		succeed(t, resp, err)
	}
	if got := s.Seen("tools/call")[0].Header.Get("Content-Type"); got != "application/json" {
		t.Fatalf("sent as %q", got)
	}
}

func TestFO072_StreamCutBetweenCRAndLF(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	s.On("tools/call",
		mcptest.Stream("\xef\xbb\xbfdata: {\"jsonrpc\":\"2.0\",\"id\":$ID,\r", "\ndata: \"result\":"+okResult+"}\r", "\n\r", "\n"),
		mcptest.StreamThen(s.Hang(), ": ping\n\n", "data:\n\n", "event: ping\ndata: {}\n\n", "id: 9\n\n", "data: {\"jsonrpc\":\"2.0\",\"id\":$ID,\"result\":"+okResult+"}\r\r"),
	)
	for range 2 {
		resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
		succeed(t, resp, err)
	}
}

func TestFO074_LongLines(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	big := strings.Repeat("x", 5<<20)
	var written atomic.Int64 // MiB that the client took before it left
	endless := func(contentType, start string) mcptest.Answer {
		return func(w http.ResponseWriter, _ *http.Request, _ *mcptest.Request) {
			w.Header().Set("Content-Type", contentType)
			io.WriteString(w, start) //nolint:errcheck // the client leaves in the middle
			chunk := bytes.Repeat([]byte("x"), 1<<20)
			for range 200 {
				if _, err := w.Write(chunk); err != nil {
					return
				}
				written.Add(1)
			}
		}
	}
	s.On("tools/call",
		mcptest.Stream(mcptest.ResultEvent(`{"content":"`+big+`"}`)),
		endless("text/event-stream", "data: "),
		endless("application/json", `{"jsonrpc":"2.0","id":1,"result":{"x":"`),
		mcptest.Result(`{"content":"`+big+`"}`), // JSON over this request's own limit
		mcptest.Stream(mcptest.ResultEvent(okResult)),
	)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	for range 2 {
		resp, err = p.Do(t.Context(), k, target, echo())
		expect(t, resp, err, "RESULT_TOO_LARGE", fault.Server, MaybeSent)
	}
	if n := written.Load(); n > 100 {
		t.Fatalf("%d MiB were read", n)
	}
	r := echo()
	r.ResultBytes = 1 << 20
	resp, err = p.Do(t.Context(), k, target, r)
	expect(t, resp, err, "RESULT_TOO_LARGE", fault.Server, MaybeSent)
	resp, err = p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	if s.Count("server/discover") != 1 {
		t.Fatal("the connection was opened anew")
	}
}

func zipped(s string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, s) //nolint:errcheck // into memory
	w.Close()
	return b.String()
}

func TestFO080_CompressedAnswers(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	gz := func(ct, body string) mcptest.Answer {
		return func(w http.ResponseWriter, _ *http.Request, r *mcptest.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("Content-Type", ct)
			io.WriteString(w, zipped(strings.ReplaceAll(body, "$ID", string(r.ID)))) //nolint:errcheck // the client may leave
		}
	}
	body := `{"jsonrpc":"2.0","id":$ID,"result":` + okResult + `}`
	bomb := `{"jsonrpc":"2.0","id":$ID,"result":{"x":"` + strings.Repeat("0", 40<<20) + `"}}`
	s.On("tools/call", gz("application/json", body), gz("text/event-stream", mcptest.Event(body)), gz("application/json", bomb), gz("text/event-stream", mcptest.Event(bomb)),
		mcptest.WithHeader("Content-Encoding", "br", mcptest.Result(okResult)), mcptest.WithHeader("Content-Encoding", "gzip", mcptest.Result(okResult)))
	s.On("tools/list", gz("application/json", `{"jsonrpc":"2.0","id":$ID,"result":{"tools":[{"name":"a"}]}}`))
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, echo())
		succeed(t, resp, err)
	}
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, echo())
		expect(t, resp, err, "RESULT_TOO_LARGE", fault.Server, MaybeSent)
	}
	resp, err := p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "ENCODING_UNSUPPORTED", fault.Protocol, MaybeSent)
	resp, err = p.Do(t.Context(), k, target, echo())
	expect(t, resp, err, "ANSWER_BROKEN", fault.Transport, MaybeSent)
	if l, err := p.List(t.Context(), k, target, KindTool); err != nil || len(l.Items) != 1 {
		t.Fatalf("%+v %v", l, err)
	}
}

func TestFO095_ServerRequestsAreAnswered(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, nil)
	s.On("tools/call",
		mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":"p1","method":"ping"}`), mcptest.ResultEvent(okResult)),
		mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":1,"method":"roots/list"}`), mcptest.Event(`{"jsonrpc":"2.0","id":2,"method":"sampling/createMessage","params":{}}`),
			mcptest.Event(`{"jsonrpc":"2.0","id":3,"method":"x/unknown"}`), mcptest.ResultEvent(`{"content":[],"isError":true}`)),
		mcptest.StreamThen(s.Hang(), mcptest.Event(`{"jsonrpc":"2.0","id":4,"method":"elicitation/create","params":{}}`)),
	)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, target, echo())
	if err != nil || !resp.Parts.IsError || resp.ResultType != ResultComplete {
		t.Fatalf("what the server made of the refusals: %+v %v", resp, err)
	}
	r := echo()
	r.Timeout = 500 * time.Millisecond
	resp, err = p.Do(t.Context(), k, target, r)
	expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
	s.Wait(t, "POST", 5)
	var bodies []string
	for _, r := range s.Seen("POST") {
		bodies = append(bodies, r.Body)
	}
	all := strings.Join(bodies, "\n")
	for _, want := range []string{`{"jsonrpc":"2.0","id":"p1","result":{}}`, `"id":1,"error":{"code":-32601`, `"id":2,"error":{"code":-32601`, `"id":3,"error":{"code":-32601`, `"id":4,"error":{"code":-32601`} {
		if !strings.Contains(all, want) {
			t.Errorf("no answer %s in %s", want, all)
		}
	}
	if !strings.Contains(s.Seen("initialize")[0].Body, `"capabilities":{}`) {
		t.Error("capabilities were declared")
	}
}

func TestModern_ServerRequestsAreNotServed(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	s.On("tools/call", mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":1,"method":"roots/list"}`), mcptest.ResultEvent(okResult)))
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	if n := s.Count("POST"); n != 0 {
		t.Fatalf("%d answers were sent", n)
	}
}

func TestModern_ResultTypes(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), httpTarget(s.URL)
	s.On("tools/call", mcptest.Result(`{"content":[]}`), mcptest.Result(`{"resultType":"input_required","requestState":"s"}`), mcptest.Result(`{"resultType":"task"}`), mcptest.Result(`[]`), mcptest.Result(`{"resultType":7}`))
	resp, err := p.Do(t.Context(), k, target, echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, target, echo())
	if err != nil || resp.ResultType != ResultInputRequired || resp.Phase != Answered {
		t.Fatalf("%+v %v", resp, err)
	}
	for _, reason := range []string{"RESULT_TYPE_INVALID", "RESULT_INVALID", "RESULT_TYPE_INVALID"} {
		resp, err = p.Do(t.Context(), k, target, echo())
		expect(t, resp, err, reason, fault.Protocol, Answered)
	}
}

func TestModern_404WithAnErrorIsAnAnswer(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	p := newPool(t, nil)
	s.On("tools/call", mcptest.StatusError(404, -32601, "no tools here"), mcptest.Result(okResult))
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	if err != nil || resp.Error == nil || resp.Error.Code != -32601 || resp.HTTPStatus != 404 || resp.Phase != Answered {
		t.Fatalf("%+v %v", resp, err)
	}
	resp, err = p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	if s.Count("server/discover") != 1 {
		t.Fatal("it was taken for a lost session")
	}
}

func TestLegacy_StreamIsResumed(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	p := newPool(t, nil)
	var id string
	s.On("tools/call", func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		id = string(r.ID)
		mcptest.Stream("id: e1\nretry: 20\ndata:\n\n")(w, raw, r)
	})
	s.On("GET", mcptest.Stream("id: e2\ndata:\n\n"), func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		mcptest.Stream(mcptest.Event(`{"jsonrpc":"2.0","id":`+id+`,"result":`+okResult+`}`))(w, raw, r)
	})
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
	succeed(t, resp, err)
	got := s.Seen("GET")
	if len(got) != 2 || got[0].Header.Get("Last-Event-Id") != "e1" || got[1].Header.Get("Last-Event-Id") != "e2" || s.Count("tools/call") != 1 {
		t.Fatalf("%d", len(got))
	}
}

func TestLegacy_Batch(t *testing.T) {
	t.Parallel()
	batch := mcptest.JSON(`[{"jsonrpc":"2.0","method":"notifications/message","params":{}},{"jsonrpc":"2.0","id":$ID,"result":` + okResult + `}]`)
	old, newer := mcptest.New(t, "2025-03-26"), mcptest.New(t, "2025-06-18")
	old.On("tools/call", batch)
	newer.On("tools/call", batch)
	p := newPool(t, nil)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), httpTarget(old.URL), echo())
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), keyOf(t, "b"), Target{Transport: TransportHTTP, URL: newer.URL}, echo())
	expect(t, resp, err, "ANSWER_INVALID", fault.Protocol, MaybeSent)
}
