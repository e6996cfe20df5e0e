package hostile_test

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// statuses are refusals and other statuses that say something absurd.
func statuses() []misbehaviour {
	const none = "PROTOCOL NO_ANSWER, maybe sent"
	const redirected = "SERVER REDIRECTED, "
	const away = "SERVER REDIRECTED_AWAY, "
	page := "<html><body>" + strings.Repeat("Bad gateway ", 5000) + "</body></html>"
	html := "Content-Type: text/html\r\n"
	return []misbehaviour{
		{name: "204 as the answer", scripts: onCall(raw("HTTP/1.1 204 No Content\r\n\r\n")), want: none},
		{name: "202 as the answer", scripts: onCall(status(202, "", "")), want: none},
		{name: "200 with nothing", scripts: onCall(status(200, jsonType, "")), want: none},
		{name: "205 with a result", scripts: onCall(status(205, jsonType, `{"jsonrpc":"2.0","id":$ID,"result":{}}`)), want: "ok"},
		{name: "206 with a part", scripts: onCall(status(206, jsonType+"Content-Range: bytes 0-9/100\r\n", `{"jsonrpc"`)), want: "PROTOCOL ANSWER_INVALID, maybe sent"},
		{name: "status 999", scripts: onCall(status(999, jsonType, `{"jsonrpc":"2.0","id":$ID,"result":{}}`)), want: "SERVER SERVER_ERROR, maybe sent"},
		{name: "status 600 with an error", scripts: onCall(status(600, jsonType, `{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":"x"}}`)), want: "error 1"},
		{name: "300", scripts: onCall(status(300, "", "")), want: redirected + "maybe sent"},
		{name: "301 to another origin", scripts: onCall(status(301, "Location: http://127.0.0.2:1/mcp\r\n", "")), want: away + "maybe sent"},
		{name: "302 without a place", scripts: onCall(status(302, "", "")), want: redirected + "maybe sent"},
		{name: "303 to itself", scripts: onCall(status(303, "Location: /mcp\r\n", "")), want: redirected + "maybe sent"},
		{name: "304", scripts: onCall(raw("HTTP/1.1 304 Not Modified\r\n\r\n")), want: redirected + "maybe sent"},
		{name: "307 to another origin", scripts: onCall(status(307, "Location: http://127.0.0.2:1/mcp\r\n", "")), want: away + "answered"},
		{name: "307 to itself", scripts: onCall(status(307, "Location: /mcp\r\n", "")), want: redirected + "answered"},
		{name: "308 to another scheme", scripts: onCall(func(p *peer) {
			status(308, "Location: https://"+p.LocalAddr().String()+"/mcp\r\n", "")(p)
		}), want: away + "answered"},
		{name: "307 with a user name", scripts: onCall(func(p *peer) {
			status(307, "Location: http://admin:x@"+p.LocalAddr().String()+"/mcp\r\n", "")(p)
		}), want: away + "answered"},
		{name: "307 to a file", scripts: onCall(status(307, "Location: file:///etc/passwd\r\n", "")), want: away + "answered"},
		{name: "307 to no URL", scripts: onCall(status(307, "Location: http://[::1\r\n", "")), want: away + "answered"},
		{name: "redirects without end when connecting", version: modern, scripts: map[string]script{"server/discover": func(p *peer) {
			status(307, fmt.Sprintf("Location: /mcp/%d\r\n", p.n), "")(p)
		}}, want: "SERVER REDIRECT_LOOP, not sent"},
		{name: "401 without a challenge", scripts: onCall(status(401, "", "")), want: "SERVER AUTHORIZATION_REQUIRED, answered"},
		{name: "401 with a result", scripts: onCall(status(401, jsonType, `{"jsonrpc":"2.0","id":$ID,"result":{}}`)), want: "SERVER AUTHORIZATION_REQUIRED, answered"},
		{name: "a challenge of 60 KiB", scripts: onCall(status(401, "WWW-Authenticate: Bearer realm=\""+strings.Repeat("x", 60_000)+"\"\r\n", "")),
			do: challenged, want: "SERVER AUTHORIZATION_REQUIRED, answered"},
		{name: "500 challenges", scripts: onCall(status(401, strings.Repeat("WWW-Authenticate: Bearer realm=\"xxxxxxxxxxxxxxxxxxxxxxxx\"\r\n", 500), "")),
			do: challenged, want: "SERVER AUTHORIZATION_REQUIRED, answered"},
		{name: "a challenge with control characters", scripts: onCall(status(401, "WWW-Authenticate: Bearer \x1b[31m\x07\xff\r\n", "")),
			want: "TRANSPORT SERVER_UNREACHABLE, maybe sent"},
		{name: "407", scripts: onCall(status(407, "Proxy-Authenticate: Basic\r\n", "")), want: "SERVER SERVER_REFUSED, maybe sent"},
		{name: "429 with a century", scripts: onCall(status(429, "Retry-After: 3153600000\r\n", "")), do: paused, want: "SERVER RATE_LIMITED_BY_SERVER, answered"},
		{name: "429 with a number beyond all bounds", scripts: onCall(status(429, "Retry-After: "+strings.Repeat("9", 1000)+"\r\n", "")), do: paused, want: "SERVER RATE_LIMITED_BY_SERVER, answered"},
		{name: "429 with a date far away", scripts: onCall(status(429, "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT\r\n", "")), do: paused, want: "SERVER RATE_LIMITED_BY_SERVER, answered"},
		{name: "429 with a date long ago", scripts: onCall(status(429, "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n", "")), do: paused, want: "SERVER RATE_LIMITED_BY_SERVER, answered"},
		{name: "503 with a negative pause", scripts: onCall(status(503, "Retry-After: -5\r\n", "")), do: paused, want: "SERVER SERVER_ERROR, maybe sent"},
		{name: "429 for a century when connecting", version: modern, scripts: map[string]script{"server/discover": status(429, "Retry-After: 3153600000\r\n", "")},
			do: again(20, nil), want: "SERVER RATE_LIMITED_BY_SERVER, not sent", requests: 1, stays: true},
		{name: "storm of 429", scripts: onCall(status(429, "", "")), do: again(20, nil), want: "SERVER RATE_LIMITED_BY_SERVER, answered", requests: 24},
		{name: "storm of 503", scripts: onCall(status(503, "", page)), do: again(20, nil), want: "SERVER SERVER_ERROR, maybe sent", requests: 24, alloc: 6 << 20},
		{name: "HTML page as 502", scripts: onCall(status(502, html, page)), want: "SERVER SERVER_ERROR, maybe sent"},
		{name: "HTML page as 403", scripts: onCall(status(403, html, page)), want: "SERVER FORBIDDEN_BY_SERVER, answered"},
		{name: "HTML page as 400", scripts: onCall(status(400, html, page)), want: "SERVER SERVER_REFUSED, answered"},
		{name: "endless page as 500", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 500 X\r\n" + html + "\r\n")
			p.forever("x")
		}), want: "SERVER SERVER_ERROR, maybe sent", alloc: 2 << 20},
		{name: "a page of 500 that never ends and says nothing", scripts: onCall(func(p *peer) {
			p.write("HTTP/1.1 500 X\r\n" + html + "\r\n<html>")
			p.hang()
		}), request: timeout(400 * time.Millisecond), want: "SERVER SERVER_ERROR, maybe sent"},
		{name: "404 for ever", scripts: onCall(status(404, "", "")), do: again(10, nil), requests: 40,
			want: "SERVER SERVER_REFUSED, answered", legacy: "PROTOCOL SESSION_LOST, answered"},
	}
}

// challenged makes a call and checks that what is kept of a challenge is bounded.
func challenged(ctx context.Context, r *rig, _ *server) string {
	resp, err := r.pool.Do(ctx, r.key, r.target, call())
	if n := len(resp.WWWAuthenticate); n == 0 || n > 8<<10 {
		return fmt.Sprintf("a challenge of %d bytes is kept", n)
	}
	return outcome(resp, err)
}

// paused makes a call and checks that the pause that was asked for is bounded.
func paused(ctx context.Context, r *rig, _ *server) string {
	resp, err := r.pool.Do(ctx, r.key, r.target, call())
	f, ok := fault.As(err)
	if !ok || f.RetryAfter < 0 || f.RetryAfter > time.Hour || resp.RetryAfter < 0 || resp.RetryAfter > time.Hour {
		return fmt.Sprintf("a pause of %v: %v", resp.RetryAfter, err)
	}
	return outcome(resp, err)
}

// asking are servers that ask back in the middle of a call.
func asking() []misbehaviour {
	var out []misbehaviour
	ask := func(id, method string) string {
		return event(`{"jsonrpc":"2.0","id":` + id + `,"method":"` + method + `","params":{}}`)
	}
	const many = "SERVER TOO_MANY_QUESTIONS, maybe sent"
	for _, method := range []string{"ping", "roots/list", "sampling/createMessage", "elicitation/create", "tasks/get", "x"} {
		out = append(out, misbehaviour{
			name: "20,000 requests " + method, version: legacy, requests: 24, want: many, alloc: 4 << 20,
			scripts: onCall(func(p *peer) {
				p.head(sseType)
				for i := range 20_000 {
					if !p.write(ask(fmt.Sprint(i), method)) {
						return
					}
				}
				p.write(answerEvent)
			}),
		})
	}
	out = append(out,
		misbehaviour{name: "20,000 requests of a modern server", version: modern, want: many, alloc: 4 << 20,
			scripts: onCall(endless(sseType, "", ask("1", "sampling/createMessage")))},
		misbehaviour{name: "a few requests of a modern server", version: modern, want: "ok",
			scripts: onCall(stream(ask("1", "ping"), ask("2", "roots/list"), answerEvent))},
		misbehaviour{name: "requests with ids twice", version: legacy, want: "ok",
			scripts: onCall(stream(ask("1", "ping"), ask("1", "ping"), ask(`"1"`, "ping"), answerEvent))},
		misbehaviour{name: "requests with ids that are none", version: legacy, want: "ok",
			scripts: onCall(stream(ask("[1]", "ping"), ask(`{"a":1}`, "ping"), ask("true", "ping"), ask("1.5", "ping"), answerEvent))},
		misbehaviour{name: "request with an id of 60 KiB", version: legacy, want: "ok",
			scripts: onCall(stream(ask(`"`+strings.Repeat("x", 60_000)+`"`, "ping"), answerEvent))},
		misbehaviour{name: "request with a null id", version: legacy, want: "ok",
			scripts: onCall(stream(ask("null", "ping"), answerEvent))},
		misbehaviour{name: "a request that is an answer too", version: legacy, want: "ok",
			scripts: onCall(stream(event(`{"jsonrpc":"2.0","id":$ID,"method":"ping","result":{}}`), answerEvent))},
		misbehaviour{name: "a request as the JSON answer", version: legacy, want: "PROTOCOL NO_ANSWER, maybe sent",
			scripts: onCall(body(`{"jsonrpc":"2.0","id":1,"method":"ping"}`))},
		misbehaviour{name: "answers to its requests are refused", version: legacy, want: "ok", requests: 12,
			scripts: map[string]script{"tools/call": stream(ask("1", "ping"), ask("2", "ping"), answerEvent), "POST": status(500, "", "no")}},
		misbehaviour{name: "answers to its requests are never taken", version: legacy, want: "ok", requests: 12,
			scripts: map[string]script{"tools/call": stream(ask("1", "ping"), answerEvent), "POST": (*peer).hang}},
	)
	return out
}

// onConnect scripts how the era is settled.
func onConnect(discover, initialize script) map[string]script {
	out := map[string]script{}
	if discover != nil {
		out["server/discover"] = discover
	}
	if initialize != nil {
		out["initialize"] = initialize
	}
	return out
}

// negotiations are lies about versions and sessions.
func negotiations() []misbehaviour {
	const unsupported = "PROTOCOL VERSION_UNSUPPORTED, not sent"
	says := func(version string) script {
		return result(`{"protocolVersion":` + version + `,"capabilities":{"tools":{}},"serverInfo":{}}`)
	}
	session := func(id string) script {
		return func(p *peer) {
			p.full(200, jsonType+"Mcp-Session-Id: "+id+"\r\n", `{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}}`)
		}
	}
	var many strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&many, `"20%02d-01-%02d",`, i%100, i%30)
	}
	deep := strings.Repeat(`{"tools":`, 200) + "1" + strings.Repeat("}", 200)
	return []misbehaviour{
		{name: "initialize answers a version without a handshake", version: legacy, scripts: onConnect(nil, says(`"2026-07-28"`)), want: unsupported},
		{name: "initialize answers an unknown version", version: legacy, scripts: onConnect(nil, says(`"2031-01-01"`)), want: unsupported},
		{name: "initialize answers the draft", version: legacy, scripts: onConnect(nil, says(`"DRAFT-2026-v1"`)), want: unsupported},
		{name: "initialize answers a number", version: legacy, scripts: onConnect(nil, says(`20251125`)), want: unsupported},
		{name: "initialize answers a version of 60 KiB", version: legacy, scripts: onConnect(nil, says(`"`+strings.Repeat("2", 60_000)+`"`)), want: unsupported},
		{name: "initialize answers no version", version: legacy, scripts: onConnect(nil, result(`{}`)), want: unsupported},
		{name: "initialize answers a version twice", version: legacy, scripts: onConnect(nil, result(`{"protocolVersion":"2025-11-25","protocolVersion":"2024-11-05"}`)), want: unsupported},
		{name: "initialize answers null", version: legacy, scripts: onConnect(nil, result(`null`)), want: unsupported},
		{name: "downgrade that is forbidden", version: legacy, scripts: onConnect(nil, says(`"2025-03-26"`)), want: "PROTOCOL DOWNGRADE_REFUSED, not sent", stays: true,
			target: func(t *sessions.Target) { t.DowngradeForbidden, t.KnownVersion = true, "2025-11-25" }},
		{name: "downgrade of the era that is forbidden", version: modern, scripts: onConnect(body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"x"}}`), says(`"2025-11-25"`)),
			target: func(t *sessions.Target) { t.DowngradeForbidden, t.KnownVersion = true, "2026-07-28" }, want: "PROTOCOL DOWNGRADE_REFUSED, not sent"},
		{name: "initialize refuses", version: legacy, scripts: onConnect(nil, body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-1,"message":"`+strings.Repeat("x", 10_000)+`"}}`)), want: "PROTOCOL INITIALIZE_REFUSED, not sent"},
		{name: "initialize asks first", version: legacy, scripts: onConnect(nil, stream(
			event(`{"jsonrpc":"2.0","id":1,"method":"sampling/createMessage","params":{}}`), event(`{"jsonrpc":"2.0","id":2,"method":"ping"}`),
			event(`{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}}`))), want: "ok", requests: 12},
		{name: "initialize asks without end", version: legacy, scripts: onConnect(nil, endless(sseType, "", event(`{"jsonrpc":"2.0","id":1,"method":"ping"}`))),
			want: "SERVER TOO_MANY_QUESTIONS, not sent", requests: 24},
		{name: "initialized is refused", version: legacy, scripts: map[string]script{"notifications/initialized": status(500, "", "no")}, want: "ok"},
		{name: "initialized is answered without end", version: legacy, scripts: map[string]script{"notifications/initialized": endless(sseType, "", ": x\n")}, want: "ok"},
		{name: "server/discover without end", version: modern, scripts: onConnect(endless(jsonType, "", " "), nil), want: "PROTOCOL INITIALIZE_REFUSED, not sent", alloc: 3 << 20},
		{name: "server/discover is silent and initialize too", scripts: onConnect((*peer).hang, (*peer).hang), limits: hasty, want: "TRANSPORT TIMEOUT, not sent"},
		{name: "server/discover offers 5,000 versions", version: modern, scripts: onConnect(result(`{"supportedVersions":[`+many.String()+`"2026-07-28"],"capabilities":{}}`), nil),
			want: unsupported},
		{name: "server/discover offers nothing", version: modern, scripts: onConnect(result(`{"supportedVersions":[]}`), nil), want: "PROTOCOL INITIALIZE_REFUSED, not sent"},
		{name: "server/discover offers an object", version: modern, scripts: onConnect(result(`{"supportedVersions":{"2026-07-28":true}}`), nil), want: "PROTOCOL INITIALIZE_REFUSED, not sent"},
		{name: "server/discover offers only what nobody knows", version: modern, scripts: onConnect(body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"x","data":{"supported":["1999-01-01"]}}}`), nil), want: unsupported},
		{name: "server/discover offers the very version it refuses", version: modern, scripts: onConnect(body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"x","data":{"supported":["2026-07-28"]}}}`), nil),
			want: unsupported},
		{name: "capabilities nested 200 deep", version: modern, scripts: onConnect(result(`{"supportedVersions":["2026-07-28"],"capabilities":`+deep+`}`), nil), want: "ok"},
		{name: "capabilities of 200 KiB", version: modern, scripts: onConnect(result(`{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{},"x":"`+strings.Repeat("x", 200_000)+`"}}`), nil), want: "ok", alloc: 4 << 20},
		{name: "capabilities that are no object", version: modern, scripts: onConnect(result(`{"supportedVersions":["2026-07-28"],"capabilities":[1,"tools",null]}`), nil), want: "HOST CAPABILITY_MISSING, not sent", stays: true},
		{name: "another answer to each server/discover", version: modern, scripts: onConnect(func(p *peer) {
			result(fmt.Sprintf(`{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{},"x%d":{}}}`, p.n))(p)
		}, nil), do: reconnecting(10), want: "ok", requests: 40},
		{name: "the era changes with each connection", version: modern, requests: 80, scripts: onConnect(func(p *peer) {
			if p.n%2 == 0 {
				body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"x"}}`)(p)
				return
			}
			p.plain()
		}, says(`"2025-11-25"`)), do: reconnecting(10), want: "ok"},
		{name: "the version is refused for ever", version: modern, scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"x","data":{"supported":["2026-07-28"]}}}`)), want: "error -32022"},
		{name: "the version is no longer known", version: modern, scripts: onCall(body(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"x","data":{"supported":["2025-11-25"]}}}`)), want: "error -32022"},
		{name: "session id with control characters", version: legacy, scripts: onConnect(nil, session("a\x01b")), want: "TRANSPORT SERVER_UNREACHABLE, not sent"},
		{name: "session id in another alphabet", version: legacy, scripts: onConnect(nil, session("séssion")), want: "PROTOCOL SESSION_ID_INVALID, not sent"},
		{name: "session id of 2 KiB", version: legacy, scripts: onConnect(nil, session(strings.Repeat("s", 2048))), want: "PROTOCOL SESSION_ID_INVALID, not sent"},
		{name: "session id with a space", version: legacy, scripts: onConnect(nil, session("a b")), want: "PROTOCOL SESSION_ID_INVALID, not sent"},
		{name: "folded session id", version: legacy, scripts: onConnect(nil, session("a\r\n b")), want: "PROTOCOL SESSION_ID_INVALID, not sent"},
		{name: "every session is lost at once", version: legacy, scripts: onCall(status(404, "", "")), do: again(10, nil), want: "PROTOCOL SESSION_LOST, answered", requests: 40},
		{name: "every session is lost at each list", version: legacy, scripts: map[string]script{"tools/list": status(404, "", "")}, want: "PROTOCOL SESSION_LOST",
			do: func(ctx context.Context, r *rig, _ *server) string { return r.list(ctx) }, requests: 12},
		{name: "the end of a session hangs", version: legacy, scripts: map[string]script{"DELETE": endless("", "", "x")}, want: "ok",
			do: func(ctx context.Context, r *rig, _ *server) string {
				got := r.call(ctx, nil)
				r.pool.CloseKey(func(sessions.Key) bool { return true })
				return got
			}},
	}
}

// hasty are limits for servers that say nothing.
func hasty(l *sessions.Limits) { l.Probe, l.Connect = 50*time.Millisecond, 150*time.Millisecond }

// reconnecting calls on n connections, one after the other.
func reconnecting(n int) func(context.Context, *rig, *server) string {
	return func(ctx context.Context, r *rig, _ *server) (got string) {
		for range n {
			if got = r.call(ctx, nil); got != "ok" {
				return got
			}
			r.pool.CloseKey(func(sessions.Key) bool { return true })
		}
		return got
	}
}
