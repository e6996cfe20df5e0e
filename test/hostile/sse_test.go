package hostile_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// overSSE makes the scripts of a server of HTTP+SSE, a good one over which those of
// a case are laid.
func overSSE(l *line, change map[string]script) map[string]script {
	scripts := map[string]script{"GET": l.serve("event: endpoint\ndata: /messages\n\n"), "notifications/initialized": l.taken("")}
	scripts["initialize"] = l.taken(event(`{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":"2024-11-05","capabilities":{"tools":{}}}}`))
	scripts["tools/call"] = l.taken(answerEvent)
	for name, f := range change {
		scripts[name] = f
	}
	for name, f := range scripts {
		scripts[name] = func(p *peer) {
			p.line = l
			f(p)
		}
	}
	return scripts
}

// line is the one stream on which a server of HTTP+SSE answers.
type line struct {
	mu sync.Mutex
	to *peer
}

// serve opens the stream with a text and keeps it open.
func (l *line) serve(begin string) script {
	return func(p *peer) {
		l.mu.Lock()
		l.to = p // before the other side can answer the beginning
		ok := p.head(sseType) && (begin == "" || p.write(begin))
		l.mu.Unlock()
		if ok {
			p.hang()
		}
	}
}

// write writes on the stream.
func (l *line) write(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.to != nil && l.to.write(text)
}

// taken accepts a message and answers it on the stream.
func (l *line) taken(text string) script { return onStream(text) }

// onStream accepts a message and writes a text on the stream.
func onStream(text string) script {
	return func(p *peer) {
		status(202, "", "")(p)
		if text != "" {
			p.line.write(strings.ReplaceAll(text, "$ID", p.id))
		}
	}
}

// floodStream accepts a message and writes on the stream for as long as anybody reads.
func floodStream(text string) script {
	return func(p *peer) {
		status(202, "", "")(p)
		p.line.mu.Lock()
		defer p.line.mu.Unlock()
		p.line.to.forever(text)
	}
}

// legacyStreams are misbehaviours over HTTP+SSE.
func legacyStreams() []misbehaviour {
	endpoint := func(to string) map[string]script {
		return map[string]script{"GET": func(p *peer) { p.line.serve("event: endpoint\ndata: " + to + "\n\n")(p) }}
	}
	const large = "SERVER STREAM_TOO_LARGE, maybe sent"
	hurried := func(l *sessions.Limits) { l.Probe = 100 * time.Millisecond }
	cases := []misbehaviour{
		{name: "an endpoint of another origin", scripts: endpoint("http://127.0.0.2:9/messages"), want: "PROTOCOL ENDPOINT_FOREIGN, not sent"},
		{name: "an endpoint of another scheme", scripts: endpoint("file:///etc/passwd"), want: "PROTOCOL ENDPOINT_FOREIGN, not sent"},
		{name: "an endpoint that is no URL", scripts: endpoint("http://[::1"), want: "PROTOCOL ENDPOINT_INVALID, not sent"},
		{name: "an endpoint with a user name", scripts: map[string]script{"GET": func(p *peer) {
			p.line.serve("event: endpoint\ndata: http://a:b@" + p.LocalAddr().String() + "/x\n\n")(p)
		}}, want: "PROTOCOL ENDPOINT_INVALID, not sent"},
		{name: "an endpoint of 64 KiB", scripts: endpoint("/" + strings.Repeat("x", 64<<10)), want: "PROTOCOL ENDPOINT_INVALID, not sent"},
		{name: "no endpoint", scripts: map[string]script{"GET": func(p *peer) { p.line.serve("")(p) }}, limits: hurried, want: "PROTOCOL ENDPOINT_MISSING, not sent"},
		{name: "messages before the endpoint", scripts: map[string]script{"GET": func(p *peer) {
			p.line.serve(event(`{"jsonrpc":"2.0","id":1,"result":{}}`))(p)
		}}, want: "PROTOCOL ENDPOINT_MISSING, not sent"},
		{name: "a stream that is a page", scripts: map[string]script{"GET": status(200, "Content-Type: text/html\r\n", "<html>")}, want: "PROTOCOL TRANSPORT_UNSUPPORTED, not sent"},
		{name: "comments before the endpoint without end", scripts: map[string]script{"GET": endless(sseType, "", ": x\n")}, want: "SERVER STREAM_TOO_LARGE, not sent"},
		{name: "redirects of the stream without end", scripts: map[string]script{"GET": func(p *peer) {
			status(307, fmt.Sprintf("Location: /mcp/%d\r\n", p.n), "")(p)
		}}, want: "SERVER REDIRECT_LOOP, not sent"},
		{name: "comments on the stream without end", scripts: map[string]script{"tools/call": floodStream(": x\n")}, want: large},
		{name: "notifications on the stream without end", scripts: map[string]script{"tools/call": floodStream(event(`{"jsonrpc":"2.0","method":"x"}`))}, want: large, alloc: 4 << 20},
		{name: "a line on the stream without end", scripts: map[string]script{"tools/call": floodStream("x")}, want: large},
		{name: "the stream breaks in the call", scripts: map[string]script{"tools/call": func(p *peer) {
			status(202, "", "")(p)
			p.line.mu.Lock()
			defer p.line.mu.Unlock()
			p.line.to.reset()
		}}, want: "TRANSPORT STREAM_ENDED, maybe sent"},
		{name: "the answer to a POST instead of the stream", scripts: map[string]script{"tools/call": result(good)}, request: timeout(400 * time.Millisecond), want: "TRANSPORT TIMEOUT, maybe sent"},
		{name: "answers to another request on the stream", scripts: map[string]script{"tools/call": onStream(event(`{"jsonrpc":"2.0","id":4711,"result":{}}`))},
			request: timeout(400 * time.Millisecond), want: "TRANSPORT TIMEOUT, maybe sent"},
		{name: "two answers on the stream", scripts: map[string]script{"tools/call": onStream(answerEvent + event(`{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":"x"}}`))}, do: again(3, nil), want: "ok", requests: 12},
		{name: "a message that is refused", scripts: map[string]script{"tools/call": status(400, "", "no")}, want: "SERVER SERVER_REFUSED, answered"},
		{name: "a second endpoint", scripts: map[string]script{"tools/call": onStream("event: endpoint\ndata: http://127.0.0.2:9/x\n\n" + answerEvent)}, want: "PROTOCOL ENDPOINT_FOREIGN, maybe sent"},
	}
	for i := range cases {
		cases[i].version = "2024-11-05"
		l := &line{}
		cases[i].scripts, cases[i].healed = overSSE(l, cases[i].scripts), overSSE(l, nil)
		cases[i].target = func(t *sessions.Target) { t.Transport = sessions.TransportSSE }
	}
	return cases
}

// wishes are modern answers that want input or become tasks.
func wishes() []misbehaviour {
	const invalid = "PROTOCOL RESULT_INVALID, answered"
	asks := func(n int, key string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `,"%s%d":{"method":"elicitation/create","params":{"mode":"form","message":"x","requestedSchema":{"type":"object","properties":{}}}}`, key, i)
		}
		return "{" + strings.TrimPrefix(b.String(), ",") + "}"
	}
	input := func(members string) script { return result(`{"resultType":"input_required",` + members + `}`) }
	task := func(members string) script { return result(`{"resultType":"task",` + members + `}`) }
	declare := func(t *sessions.Target) { t.Declare = sessions.Capabilities{ElicitationForm: true, Tasks: true} }
	roomy := func(l *sessions.Limits) { l.ResultBytes = 4 << 20 }
	cases := []misbehaviour{
		{name: "10,000 questions", scripts: onCall(input(`"inputRequests":` + asks(10_000, "k"))), want: invalid, alloc: 24 << 20},
		{name: "a question whose key is huge", scripts: onCall(input(`"inputRequests":` + asks(1, strings.Repeat("k", 5000)))), want: invalid},
		{name: "questions with one key", scripts: onCall(input(`"inputRequests":{"a":{"method":"elicitation/create"},"a":{"method":"elicitation/create"}}`)), want: invalid},
		{name: "a question of another method", scripts: onCall(input(`"inputRequests":{"a":{"method":"tools/call","params":{}}}`)), want: invalid},
		{name: "a question that was not offered", scripts: onCall(input(`"inputRequests":{"a":{"method":"sampling/createMessage","params":{}}}`)), want: invalid},
		{name: "questions that are a list", scripts: onCall(input(`"inputRequests":[1,2,3]`)), want: invalid},
		{name: "a question of 1 MiB", scripts: onCall(input(`"inputRequests":{"a":{"method":"elicitation/create","params":{"message":"` + strings.Repeat("x", 1<<20) + `"}}}`)), want: invalid, alloc: 12 << 20},
		{name: "a state of 1 MiB", scripts: onCall(input(`"requestState":"` + strings.Repeat("x", 1<<20) + `"`)), want: invalid, alloc: 12 << 20},
		{name: "a state that is an object", scripts: onCall(input(`"requestState":{"a":1}`)), want: invalid},
		{name: "input without a question", scripts: onCall(input(`"x":1`)), want: invalid},
		{name: "input for ever", scripts: onCall(input(`"requestState":"again"`)), do: again(5, nil), want: "input_required", requests: 12},
		{name: "a task with a name of 100 KiB", scripts: onCall(task(`"taskId":"` + strings.Repeat("x", 100_000) + `","status":"working"`)), want: invalid, alloc: 4 << 20},
		{name: "a task without a name", scripts: onCall(task(`"status":"working"`)), want: invalid},
		{name: "a task in a state of its own", scripts: onCall(task(`"taskId":"x","status":"thinking"`)), want: invalid},
		{name: "a task that lives for ever and ever", scripts: onCall(task(`"taskId":"x","status":"working","ttlMs":1e400,"pollIntervalMs":-1`)), want: invalid},
		{name: "a task that is looked at in a thousand years", scripts: onCall(task(`"taskId":"x","status":"working","ttlMs":1e300,"pollIntervalMs":1e300`)), want: "task"},
	}
	for i := range cases {
		cases[i].version, cases[i].target, cases[i].limits = modern, declare, roomy
		cases[i].scripts["server/discover"] = result(`{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{},"extensions":{"io.modelcontextprotocol/tasks":{}}}}`)
	}
	return cases
}

// TestSSE_TheEndpointStays holds that the second endpoint of a stream is not followed.
func TestSSE_TheEndpointStays(t *testing.T) {
	t.Parallel()
	s := newServer(t, listen(t), "2024-11-05", overSSE(&line{}, map[string]script{
		"tools/call": onStream(answerEvent + "event: endpoint\ndata: /other\n\n"),
	}))
	r, shutdown := newRig(t, sessions.Target{ServerName: "hostile", Transport: sessions.TransportSSE, URL: s.url}, small(), nil)
	defer shutdown()
	defer s.close()
	for range 3 {
		if got := r.call(context.Background(), nil); got != "ok" && !strings.HasPrefix(got, "PROTOCOL ENDPOINT") && !strings.HasPrefix(got, "TRANSPORT") {
			t.Errorf("%s", got)
		}
	}
}
