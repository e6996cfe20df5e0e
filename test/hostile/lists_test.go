package hostile_test

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// onList plays a list of tools.
func onList(f script) map[string]script { return map[string]script{"tools/list": f} }

// lists are lists that do not end, or hold what is no definition.
func lists() []misbehaviour {
	doList := func(ctx context.Context, r *rig, _ *server) string { return r.list(ctx) }
	cursor := func(next func(n int) string) script {
		return func(p *peer) { result(`{"tools":[{"name":"a"}],"nextCursor":` + next(p.n) + `}`)(p) }
	}
	fixed := func(text string) func(int) string { return func(int) string { return text } }
	var marked strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&marked, `"p%d":{"type":"string","x-mcp-header":"H%d"},`, i, i)
	}
	nested := strings.Repeat(`{"type":"object","properties":{"a":`, 60) + `{"type":"string","x-mcp-header":"A"}` + strings.Repeat("}}", 60)
	roomy := func(l *sessions.Limits) { l.ListBytes, l.ListItems = 8<<20, 5000 }
	cases := []misbehaviour{
		{name: "one cursor for ever", scripts: onList(cursor(fixed(`"x"`))), want: "1 items, 0 rejected"},
		{name: "two cursors in turn", scripts: onList(cursor(func(n int) string { return fmt.Sprintf(`"%d"`, n%2) })), want: "1 items, 0 rejected"},
		{name: "ever new cursors", scripts: onList(cursor(func(n int) string { return fmt.Sprintf(`"%d"`, n) })), want: "PROTOCOL LIST_TOO_LONG", requests: 20},
		{name: "one cursor in many spellings", scripts: onList(cursor(func(n int) string {
			return `"` + strings.Repeat(`\u0061`, n%2) + strings.Repeat(`a`, 1-n%2) + `"`
		})), want: "1 items, 0 rejected"},
		{name: "cursor as a number", scripts: onList(cursor(fixed(`7`))), want: "PROTOCOL CURSOR_INVALID"},
		{name: "cursor as an object", scripts: onList(cursor(fixed(`{"a":1}`))), want: "PROTOCOL CURSOR_INVALID"},
		{name: "cursor as a boolean", scripts: onList(cursor(fixed(`false`))), want: "PROTOCOL CURSOR_INVALID"},
		{name: "cursor of 100 KiB", scripts: onList(cursor(fixed(`"` + strings.Repeat("x", 100_000) + `"`))), want: "PROTOCOL CURSOR_INVALID"},
		{name: "cursor twice", scripts: onList(result(`{"tools":[],"nextCursor":"a","nextCursor":"b"}`)), want: "PROTOCOL CURSOR_INVALID"},
		{name: "100,000 items", scripts: onList(result(`{"tools":[` + strings.Repeat(`{},`, 100_000) + `{}]}`)), limits: roomy, want: "PROTOCOL LIST_TOO_LONG", alloc: 8 << 20},
		{name: "items without end", scripts: onList(endless(jsonType, `{"jsonrpc":"2.0","id":$ID,"result":{"tools":[{}`, ",{}")), want: "SERVER RESULT_TOO_LARGE"},
		{name: "pages that are too much together", scripts: onList(func(p *peer) {
			result(fmt.Sprintf(`{"tools":[{"name":"%s"}],"nextCursor":"%d"}`, strings.Repeat("x", 60_000), p.n))(p)
		}), want: "SERVER RESULT_TOO_LARGE", requests: 20, alloc: 6 << 20},
		{name: "items that are no objects", scripts: onList(result(`{"tools":[1,"x",null,[],true,{"name":"a"}]}`)), want: "6 items, 0 rejected"},
		{name: "tools as an object", scripts: onList(result(`{"tools":{"a":{}}}`)), want: "PROTOCOL LIST_INVALID"},
		{name: "tools twice", scripts: onList(result(`{"tools":[],"tools":[{}]}`)), want: "PROTOCOL LIST_INVALID"},
		{name: "no tools", scripts: onList(result(`{}`)), want: "PROTOCOL LIST_INVALID"},
		{name: "3,000 marks for headers in one tool", version: modern, scripts: onList(result(`{"tools":[{"name":"a","inputSchema":{"type":"object","properties":{` + marked.String() + `"z":{"type":"string"}}}}]}`)),
			want: "1 items, 0 rejected", alloc: 24 << 20},
		{name: "marks for headers 60 deep", version: modern, scripts: onList(result(`{"tools":[{"name":"a","inputSchema":` + nested + `}]}`)), want: "1 items, 0 rejected", alloc: 8 << 20},
		{name: "a header's name with a line break", version: modern, scripts: onList(result(`{"tools":[{"name":"a","inputSchema":{"type":"object","properties":{"a":{"type":"string","x-mcp-header":"A\r\nEvil: x"}}}}]}`)),
			want: "0 items, 1 rejected"},
		{name: "a time to live beyond all numbers", version: modern, scripts: onList(result(`{"tools":[],"ttlMs":1e400,"cacheScope":"everybody"}`)), want: "0 items, 0 rejected"},
		{name: "a negative time to live", version: modern, scripts: onList(result(`{"tools":[],"ttlMs":-1}`)), want: "0 items, 0 rejected"},
		{name: "a list that wants input", version: modern, scripts: onList(result(`{"resultType":"input_required","inputRequests":{},"tools":[]}`)), want: "PROTOCOL RESULT_TYPE_INVALID"},
		{name: "a list that becomes a task", version: modern, scripts: onList(result(`{"resultType":"task","taskId":"x","tools":[]}`)), want: "PROTOCOL RESULT_TYPE_INVALID"},
	}
	for i := range cases {
		cases[i].do = doList
	}
	return cases
}

// changes are streams of changes that lie or never end.
func changes() []misbehaviour {
	announce := result(`{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{"listChanged":true}}}`)
	listen := func(f script) map[string]script {
		return map[string]script{"server/discover": announce, "subscriptions/listen": f}
	}
	const ack = `{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{}}`
	const changed = `{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`
	// watched makes a call, waits for a change or a broken stream to be told, and
	// calls again.
	watched := func(ctx context.Context, r *rig, _ *server) string {
		if got := r.call(ctx, nil); got != "ok" {
			return got
		}
		select {
		case <-r.told:
		case <-ctx.Done():
			return "nothing is told"
		}
		return r.call(ctx, nil)
	}
	// reopened waits until the stream was opened so often.
	reopened := func(n int) func(context.Context, *rig, *server) string {
		return func(ctx context.Context, r *rig, s *server) string {
			got := r.call(ctx, nil)
			for s.count("subscriptions/listen")+s.count("GET") < n && ctx.Err() == nil {
				pause(ctx)
			}
			return got
		}
	}
	slowly := func(l *sessions.Limits) { l.Reopen, l.MaxReopen = 20*time.Millisecond, time.Second }
	return []misbehaviour{
		{name: "changes without end", version: modern, scripts: listen(endless(sseType, event(ack), event(changed))), do: watched, want: "ok", requests: 200, alloc: 32 << 20, sent: 256 << 20},
		{name: "changes before they are acknowledged", version: modern, scripts: listen(stream(event(changed), event(ack))), do: watched, want: "ok", requests: 200, alloc: 4 << 20},
		{name: "acknowledged 1,000 times", version: modern, scripts: listen(stream(strings.Repeat(event(ack), 1000))), do: watched, want: "ok", requests: 200, alloc: 8 << 20},
		{name: "a result for the subscription at once", version: modern, scripts: listen(result(`{}`)), do: watched, want: "ok"},
		{name: "an error for the subscription on its stream", version: modern, scripts: listen(stream(event(`{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":"x"}}`))), do: watched, want: "ok"},
		{name: "a subscription cancelled by the server at once", version: modern, limits: slowly,
			scripts: listen(stream(event(ack), event(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":$ID}}`))), do: reopened(3), want: "ok", requests: 16},
		{name: "a stream of changes that ends at once", version: modern, scripts: listen(stream("")), limits: slowly, do: reopened(3), want: "ok", requests: 16},
		{name: "a stream of changes that asks without end", version: legacy, limits: slowly, scripts: map[string]script{
			"initialize": result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{"listChanged":true}}}`),
			"GET":        endless(sseType, "", event(`{"jsonrpc":"2.0","id":1,"method":"sampling/createMessage","params":{}}`)),
		}, do: reopened(2), want: "ok", requests: 80, alloc: 4 << 20},
		{name: "a stream of changes with a retry of a month", version: legacy, scripts: map[string]script{
			"initialize": result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{"listChanged":true}}}`),
			"GET":        stream("retry: 2147483647\n\n"),
		}, do: reopened(1), want: "ok"},
		{name: "an endless line in the stream of changes", version: modern, limits: slowly, scripts: listen(endless(sseType, event(ack)+"data: ", "x")), do: reopened(2), want: "ok", requests: 16, alloc: 4 << 20},
		{name: "a stream of changes that is a page", version: modern, scripts: listen(status(200, "Content-Type: text/html\r\n", "<html>")), do: watched, want: "ok"},
	}
}
