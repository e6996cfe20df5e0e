package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// One key space over both transports: the same request is the first call again,
// another under its key is refused with what differs.
func TestFO113_SameKeyOtherRequest(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d := startDemo(t, demo.Options{})
		w.calendar(d)
		ses, second := w.session(w.alice), w.session(w.alice)
		other := *w // the same people over the other transport
		other.transport = map[string]string{"grpc": "rest", "rest": "grpc"}[w.transport]
		over := other.user("alice")
		ask := func(c *client, session, tool, args string, wait int64) (*pb.Call, error) {
			return c.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: session, Server: "calendar", Tool: tool, Arguments: raw(args),
				RequestId: "k", Wait: &durationpb.Duration{Seconds: wait}})
		}
		const args = `{"title":"Review","start":"2026-12-07T10:00:00Z","end":"2026-12-07T11:00:00Z"}`
		const reordered = `{ "end":"2026-12-07T11:00:00Z", "title":"R\u0065view" , "start":"2026-12-07T10:00:00Z"}`
		first, err := ask(w.alice, ses, demo.CreateDraftEvent, args, 1)
		must(t, err)
		wantState(t, first, pb.Call_CONSENT_REQUIRED)
		for name, again := range map[string]func() (*pb.Call, error){
			"reordered":            func() (*pb.Call, error) { return ask(w.alice, ses, demo.CreateDraftEvent, reordered, 0) },
			"another transport":    func() (*pb.Call, error) { return ask(over, ses, demo.CreateDraftEvent, args, 0) },
			"another wait":         func() (*pb.Call, error) { return ask(w.alice, ses, demo.CreateDraftEvent, args, 2) },
			"in another session":   func() (*pb.Call, error) { return ask(w.alice, second, demo.CreateDraftEvent, args, 0) },
			"of another transport": func() (*pb.Call, error) { return ask(over, ses, demo.CreateDraftEvent, reordered, 2) },
		} {
			if c, err := again(); err != nil || c.GetCallId() != first.GetCallId() {
				t.Errorf("%s: call %s, error %v, want the first call", name, c.GetCallId(), err)
			}
		}
		for name, tt := range map[string]struct {
			tool, args, field string
			who               *client
		}{
			"other arguments":        {demo.CreateDraftEvent, strings.Replace(args, "Review", "Lunch", 1), "arguments.title", w.alice},
			"other tool":             {demo.GetAvailability, args, "tool", w.alice},
			"over another transport": {demo.CreateDraftEvent, strings.Replace(args, `"title"`, `"notes":"x","title"`, 1), "arguments.notes", over},
			"a number as a text":     {demo.CreateDraftEvent, strings.Replace(args, `"Review"`, `1`, 1), "arguments.title", w.alice},
		} {
			_, err := ask(tt.who, ses, tt.tool, tt.args, 0)
			if codeOf(err) != codes.AlreadyExists || !strings.Contains(strings.Join(fieldsOf(err), " "), tt.field) {
				t.Errorf("%s: %v %v, want ALREADY_EXISTS naming %s", name, err, fieldsOf(err), tt.field)
			}
		}
		// Another user's key is another key.
		mine, err := w.bob.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: w.session(w.bob), Server: "calendar", Tool: demo.GetAvailability, Arguments: raw(week), RequestId: "k"})
		must(t, err)
		wantState(t, mine, pb.Call_SUCCEEDED)

		w.decide(first, pb.DecideConsentRequest_APPROVE)
		done := w.ended(w.alice, first)
		wantState(t, done, pb.Call_SUCCEEDED)
		again, err := ask(over, ses, demo.CreateDraftEvent, reordered, 2)
		must(t, err)
		if again.GetCallId() != first.GetCallId() || string(again.GetResult().GetRaw()) != string(done.GetResult().GetRaw()) || d.Executions(demo.CreateDraftEvent) != 1 {
			t.Errorf("the repeat of an ended call: %v after %d executions", again, d.Executions(demo.CreateDraftEvent))
		}

		// Creating what is no call follows the same rule.
		create := func(c *client, name string) (*pb.Server, error) {
			return c.CreateServer(w.ctx, &pb.CreateServerRequest{Name: name, RequestId: "k", Transport: &pb.CreateServerRequest_Http{Http: &pb.Server_Http{Url: d.URL()}}})
		}
		one, err := create(w.admin, "one")
		must(t, err)
		if same, err := create(other.client(w.adminKey), "one"); err != nil || same.GetServerId() != one.GetServerId() {
			t.Errorf("the same server again: %v, %v", same, err)
		}
		if _, err := create(other.client(w.adminKey), "two"); codeOf(err) != codes.AlreadyExists {
			t.Errorf("another server under the key: %v", err)
		}
	})
}

// Documented fields are always there.
func TestFO114_ZeroValuesAreThere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rest")
	d := startDemo(t, demo.Options{})
	w.calendar(d)
	ses := w.session(w.alice)
	call := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("x"))
	empty := w.session(w.alice)
	for path, tt := range map[string]struct {
		key  string
		want []string
	}{
		"/v1/consents/" + call.GetConsent().GetConsentId(): {w.approverKey, []string{`"state":"PENDING"`, `"decidedBy":""`, `"scopes":[]`, `"reason":""`}},
		"/v1/calls/" + call.GetCallId():                    {w.serviceKey, []string{`"attempts":[]`, `"receipt":""`, `"sideEffectId":""`, `"passed":false`, `"detail":""`, `"url":""`}},
		"/v1/sessions/" + empty + "/calls":                 {w.serviceKey, []string{`"calls":[]`, `"nextPageToken":""`}},
		"/v1/sessions/" + empty + "/tools?query=nothing":   {w.serviceKey, []string{`"tools":[]`, `"findings":[]`}},
		"/v1/servers/calendar":                             {w.adminKey, []string{`"sharedStateAcknowledged":false`}},
		"/v1/keys":                                         {w.adminKey, []string{`"mayDecide":false`, `"servers":[]`}},
	} {
		code, got := w.raw("GET", path, "", tt.key, "Bulkhead-User", "alice")
		if tt.key != w.serviceKey {
			code, got = w.raw("GET", path, "", tt.key)
		}
		for _, want := range tt.want {
			if code != http.StatusOK || !strings.Contains(got, want) {
				t.Errorf("%s: HTTP %d, no %s in %s", path, code, want, got)
			}
		}
	}
	// The zero of an enum is no state: it cannot be given.
	for path, body := range map[string]string{
		"/v1/keys": `{"displayName":"x","role":"ROLE_UNSPECIFIED"}`,
		"/v1/consents/" + call.GetConsent().GetConsentId() + ":decide": `{"decision":"DECISION_UNSPECIFIED"}`,
	} {
		key := w.adminKey
		if strings.Contains(path, "consents") {
			key = w.approverKey
		}
		if code, got := w.raw("POST", path, body, key); code != http.StatusBadRequest {
			t.Errorf("%s takes %s: HTTP %d %s", path, body, code, got)
		}
	}
}

// 64-bit integers are strings in answers, and numbers or strings in requests.
func TestFO115_LargeIntegers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rest")
	w.verified()
	_, got := w.raw("GET", "/v1/auditEntries?order=CHAIN", "", w.auditorKey)
	if !strings.Contains(got, `"sequence":"1"`) {
		t.Errorf("a sequence is no string: %s", got)
	}
	const beyond = "9007199254740993" // 2^53 + 1
	if code, got := w.raw("GET", "/v1/auditEntries?order=CHAIN&afterSequence="+beyond, "", w.auditorKey); code != http.StatusOK || !strings.Contains(got, `"auditEntries":[]`) {
		t.Errorf("a sequence beyond 2^53 in a query: HTTP %d %s", code, got)
	}
	for form, field := range map[string]string{beyond: "checkpoint.signature", `"` + beyond + `"`: "checkpoint.signature", `1.5`: "checkpoint.sequence",
		`"x"`: "checkpoint.sequence", `9223372036854775808`: "checkpoint.sequence", `true`: "checkpoint.sequence"} {
		// Read exactly, it gets as far as the missing signature.
		code, got := w.raw("POST", "/v1/auditEntries:verify", `{"checkpoint":{"tenantId":"`+w.tenantID+`","sequence":`+form+`,"digest":"x","keyId":"x","createTime":"2026-01-01T00:00:00Z"}}`, w.auditorKey)
		if err := restError(code, []byte(got)); code != http.StatusBadRequest || !strings.Contains(strings.Join(fieldsOf(err), " "), field) {
			t.Errorf("sequence %s: HTTP %d %s, want %s named", form, code, got, field)
		}
	}
	d := startDemo(t, demo.Options{})
	w.calendar(d)
	call := w.propose(w.alice, w.session(w.alice), "calendar", demo.FindDraft, `{"requestId":9007199254740993}`)
	if got := string(call.GetArguments().GetRaw()); got != `{"requestId":9007199254740993}` {
		t.Errorf("arguments come back as %s", got)
	}
}

// Names with separators reach their own tool and nothing else.
func TestFO116_NamesWithSeparators(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		names := []string{"a/b", "a%2Fb", "..", "b", "a", "a:cancel"}
		var tools []obj
		var rules []toolRule
		for _, n := range names {
			tools = append(tools, obj{"name": n, "inputSchema": obj{"type": "object"}})
			rules = append(rules, toolRule{name: n, effect: "read"})
		}
		m, s := w.scripted(t, mcptest.Modern, string(raw(tools).GetRaw()))
		w.review(s, nil, rules...)
		ses := w.session(w.alice)
		offered := w.tools(w.alice, ses)
		for _, n := range names {
			if offered[n] == nil {
				t.Errorf("%q is not offered", n)
				continue
			}
			before := m.Count("tools/call")
			call := w.propose(w.alice, ses, "scripted", n, obj{})
			wantState(t, call, pb.Call_SUCCEEDED)
			seen := m.Seen("tools/call")
			var p struct{ Name string }
			if len(seen) != before+1 || json.Unmarshal(seen[before].Params, &p) != nil || p.Name != n || call.GetName() != n {
				t.Errorf("%q became %q", n, p.Name)
			}
		}
		for _, n := range []string{"a b", "名", "a/", "A", "a/b/../b"} {
			wantDenied(t, w.propose(w.alice, ses, "scripted", n, obj{}), "definition")
		}
		for path, code := range map[string]int{
			"/v1/servers/scripted%2Fcontracts%2F1": 400, "/v1/servers/..%2Fservers%2Fscripted": 400, "/v1/servers/%2e%2e": 400,
			"/v1/servers/a%20b": 400, "/v1/servers/%E5%90%8D": 400, "/v1/servers/scripted/": 404, "/v1/servers//scripted": 404, "/v1//servers": 404,
		} {
			if got, answer := w.raw("GET", path, "", w.adminKey); got != code {
				t.Errorf("%s: HTTP %d %s, want %d", path, got, answer, code)
			}
		}
	})
}

// A result above gRPC's default limit and below ours passes; a body above ours
// is refused in our shape.
func TestFO117_LargeMessages(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		large := strings.Repeat("0123456789abcdef", 9<<19/16) // 4.5 MiB
		_, s := w.scripted(t, mcptest.Modern, plainTool, mcptest.Result(`{"resultType":"complete","content":[{"type":"text","text":"`+large+`"}]}`))
		w.review(s, obj{"limits": obj{"result_bytes": 8 << 20, "request_bytes": 4 << 20}}, toolRule{name: "act", effect: "read"})
		ses := w.session(w.alice)
		call := w.propose(w.alice, ses, "scripted", "act", obj{})
		wantState(t, call, pb.Call_SUCCEEDED)
		if got := resultText(t, call); got != large+"\n" {
			t.Errorf("%d bytes of %d came back", len(got)-1, len(large))
		}
		again, err := w.alice.GetCall(w.ctx, &pb.GetCallRequest{CallId: call.GetCallId()})
		must(t, err)
		if string(again.GetResult().GetRaw()) != string(call.GetResult().GetRaw()) {
			t.Error("the stored result is another one")
		}
		_, err = w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "scripted", Tool: "act", Arguments: raw(obj{"text": strings.Repeat("x", 4<<20)})})
		if codeOf(err) != codes.ResourceExhausted {
			t.Errorf("a request above the limit: %v", err)
		}
		if w.transport == "rest" {
			if f, ok := err.(*restFailure); !ok || f.http != http.StatusRequestEntityTooLarge || len(f.Details()) == 0 {
				t.Errorf("a body above the limit: %v", err)
			}
		}
	})
}

// The method of a request is its own.
func TestFO119_MethodOverride(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rest")
	d := startDemo(t, demo.Options{})
	w.calendar(d)
	w.wantNoTrace(t, func() {
		for _, override := range []string{"DELETE", "PATCH"} {
			for _, header := range []string{"X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"} {
				for _, kind := range []string{"application/x-www-form-urlencoded", "application/json", "multipart/form-data; boundary=x", "text/plain"} {
					code, got := w.raw("POST", "/v1/servers/calendar", "{}", w.adminKey, header, override, "Content-Type", kind)
					if code != http.StatusMethodNotAllowed && code != http.StatusUnsupportedMediaType {
						t.Errorf("%s: %s as %s: HTTP %d %s", header, override, kind, code, got)
					}
				}
			}
		}
	})
	_, err := w.admin.GetServer(w.ctx, &pb.GetServerRequest{Server: "calendar"})
	must(t, err)
}

// The caller's credential stays here, and odd ones are refused.
func TestFO120_AuthorizationIsNotForwarded(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		m, s := w.scripted(t, mcptest.Modern, plainTool)
		w.review(s, nil, toolRule{name: "act", effect: "read"})
		c := w.client(w.serviceKey, "Bulkhead-User", "alice", "Cookie", "session=hunter2", "X-Forwarded-For", "10.1.2.3", "X-Request-Id", "mine-1",
			"Grpc-Metadata-Authorization", "Bearer hunter2", "Proxy-Authorization", "Basic aHVudGVyMg")
		wantState(t, w.propose(c, w.session(c), "scripted", "act", obj{}), pb.Call_SUCCEEDED)
		for _, method := range []string{"server/discover", "tools/list", "tools/call"} {
			for _, r := range m.Seen(method) {
				all := fmt.Sprint(r.Header, r.Body)
				for _, secret := range []string{w.serviceKey, w.adminKey, "hunter2", "aHVudGVyMg", "10.1.2.3"} {
					if strings.Contains(all, secret) {
						t.Errorf("%s of the caller's reached the server: %s", secret, all)
					}
				}
				if r.Header.Get("Authorization") != "" || r.Header.Get("Cookie") != "" {
					t.Errorf("credentials without an account: %v", r.Header)
				}
			}
		}
		for name, lines := range map[string]string{
			"two":            "Authorization: Bearer " + w.adminKey + "\r\nAuthorization: Bearer " + w.adminKey,
			"two, one other": "Authorization: Bearer x\r\nAuthorization: Bearer " + w.adminKey,
			"in a list":      "Authorization: Bearer " + w.adminKey + ", Bearer x",
			"a control byte": "Authorization: Bearer " + w.adminKey + "\x01",
			"a tab":          "Authorization: Bearer\t" + w.adminKey,
			"another scheme": "Authorization: Basic " + w.adminKey,
			"by gRPC's name": "Grpc-Metadata-Authorization: Bearer " + w.adminKey,
		} {
			if code := rawRequest(t, "GET /v1/servers HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"+lines+"\r\n\r\n"); code != 400 && code != 401 {
				t.Errorf("%s: HTTP %d", name, code)
			}
		}
		if code := rawRequest(t, "GET /v1/servers HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "+w.adminKey+"\r\n\r\n"); code != 200 {
			t.Errorf("a good one: HTTP %d", code)
		}
	})
}

// rawRequest sends bytes and returns the status of the answer.
func rawRequest(t *testing.T, request string) int {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(theService.URL, "http://"))
	must(t, err)
	defer func() { _ = c.Close() }()
	_, err = c.Write([]byte(request))
	must(t, err)
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	must(t, err)
	_ = res.Body.Close()
	return res.StatusCode
}

// A colon in an id or a name is never a verb, and ours have none.
func TestFO121_ColonInTheLastSegment(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rest")
	d := startDemo(t, demo.Options{})
	s := w.calendar(d)
	ses := w.session(w.alice)
	call := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("x"))
	for _, id := range []string{s.GetServerId(), ses, call.GetCallId(), call.GetConsent().GetConsentId(), w.tenantID} {
		if strings.ContainsAny(id, ":/%.") {
			t.Errorf("the id %s has a separator", id)
		}
	}
	for _, name := range []string{"user:12", "x:cancel", "a:b:", "calendar:probe"} {
		if code, got := w.raw("POST", "/v1/servers", `{"name":"`+name+`","http":{"url":"`+d.URL()+`"}}`, w.adminKey); code != http.StatusBadRequest || !strings.Contains(got, `"field":"name"`) {
			t.Errorf("a server named %s: HTTP %d %s", name, code, got)
		}
		wantDenied(t, w.propose(w.alice, ses, "calendar", name, obj{}), "definition")
	}
	w.wantNoTrace(t, func() {
		for _, tt := range []struct{ verb, path string }{
			{"POST", "/v1/calls/" + call.GetCallId() + ":x:cancel"}, {"POST", "/v1/calls/" + call.GetCallId() + "%3Acancel"},
			{"POST", "/v1/calls/" + call.GetCallId() + ":cancel:"}, {"POST", "/v1/calls/" + call.GetCallId() + ":test"},
			{"GET", "/v1/calls/" + call.GetCallId() + ":cancel"}, {"DELETE", "/v1/servers/calendar:probe"}, {"POST", "/v1/servers/:probe"},
			{"DELETE", "/v1/servers/calendar:"}, {"GET", "/v1/servers/user:12"},
		} {
			key, more := w.serviceKey, []string{"Bulkhead-User", "alice"}
			if strings.Contains(tt.path, "servers") {
				key, more = w.adminKey, nil
			}
			body := ""
			if tt.verb == "POST" {
				body = "{}"
			}
			code, got := w.raw(tt.verb, tt.path, body, key, more...)
			if code != 400 && code != 404 && code != 405 {
				t.Errorf("%s %s: HTTP %d %s", tt.verb, tt.path, code, got)
			}
			if err := restError(code, []byte(got)); status.Code(err) == codes.Unknown {
				t.Errorf("%s %s answers in another shape: %s", tt.verb, tt.path, got)
			}
		}
	})
	still, err := w.alice.GetCall(w.ctx, &pb.GetCallRequest{CallId: call.GetCallId()})
	must(t, err)
	wantState(t, still, pb.Call_CONSENT_REQUIRED)
}

// Names of members in another case are refused here and mean nothing there:
// policy, consent, record and what is sent see one value.
func TestFO070_MembersInAnotherCase(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rest")
	m, s := w.scripted(t, mcptest.Modern, `[{"name":"act","Name":"hidden","inputSchema":{"type":"object"},"InputSchema":{"type":"object","required":["x"]}}]`,
		mcptest.JSON(`{"jsonrpc":"2.0","id":$ID,"Result":{"content":[{"type":"text","text":"other"}]},"result":{"resultType":"complete","content":[{"type":"text","text":"one"}]}}`))
	if def := w.definitions("scripted", true)["act"]; def.GetQuarantine() == "" {
		t.Errorf("the definition with two names is taken: %v", def)
	}
	m.On("tools/list", mcptest.Result(`{"resultType":"complete","tools":`+plainTool+`}`))
	w.until("the definition is good", func() bool { return w.definitions("scripted", true)["act"].GetQuarantine() == "" })
	w.review(s, nil, toolRule{name: "act", effect: "read"})
	ses := w.session(w.alice)
	w.tools(w.alice, ses)
	w.wantNoTrace(t, func() {
		for member, body := range map[string]string{
			"Tool": `{"server":"scripted","tool":"act","Tool":"hidden"}`, "Arguments": `{"server":"scripted","tool":"act","arguments":{},"Arguments":{"x":1}}`,
			"SERVER": `{"SERVER":"other","server":"scripted","tool":"act"}`, "request_ID": `{"server":"scripted","tool":"act","request_ID":"x"}`,
		} {
			code, got := w.raw("POST", "/v1/sessions/"+ses+"/calls", body, w.serviceKey, "Bulkhead-User", "alice")
			if code != http.StatusBadRequest {
				t.Errorf("%s: HTTP %d %s", body, code, got)
				continue
			}
			wantField(t, restError(code, []byte(got)), member)
		}
	})
	if n := m.Count("tools/call"); n != 0 {
		t.Errorf("%d calls arrived", n)
	}
	call := w.propose(w.alice, ses, "scripted", "act", `{"a":1,"A":2}`)
	wantSucceeded(t, call, "one")
	if strings.Contains(string(call.GetResult().GetRaw()), "other") {
		t.Errorf("the result %s", call.GetResult().GetRaw())
	}
	var p struct{ Arguments json.RawMessage }
	must(t, json.Unmarshal(m.Seen("tools/call")[0].Params, &p))
	if string(p.Arguments) != `{"A":2,"a":1}` || string(call.GetArguments().GetRaw()) != `{"A":2,"a":1}` {
		t.Errorf("sent %s, shown %s", p.Arguments, call.GetArguments().GetRaw())
	}
}
