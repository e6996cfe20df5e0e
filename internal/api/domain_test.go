package api

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

func (d *fakeDomain) services() Services {
	return Services{Tenants: d, Keys: d, Servers: fakeServers{d}, Offers: fakeServers{d}, Contracts: fakeContracts{d}, ActiveContracts: fakeServers{d},
		Sessions: fakeSessions{d}, Connections: fakeSessions{d}, Calls: fakeCalls{d}, Subscriptions: fakeCalls{d}, Consents: fakeConsents{d}, Audit: fakeAudit{d},
		WebhookEndpoints: fakeWebhooks{d}, WebhookDeliveries: fakeWebhooks{d}, Events: fakeEvents{d}}
}

const (
	calendarID = "srv_00000000000000000000000001"
	mailID     = "srv_00000000000000000000000002"
	sessionOne = "ses_00000000000000000000000001"
	callOne    = "call_00000000000000000000000001"
	digestOne  = "doc-1:sha256:1111111111111111111111111111111111111111111111111111111111111111"
	digestTwo  = "doc-1:sha256:2222222222222222222222222222222222222222222222222222222222222222"
)

type fakeServers struct{ *fakeDomain }

func (d fakeServers) server(idOrName string) (catalog.Server, error) {
	for _, v := range []catalog.Server{
		{ID: calendarID, Name: "calendar", Transport: catalog.HTTP, URL: "https://calendar.example/mcp", Origin: "https://calendar.example",
			Isolation: catalog.PerUser, AuthorizationMode: "NONE", Registration: 2, Era: "MODERN", ActiveContract: 3, ActiveContractID: "mcp-host-contract@sha256:00"},
		{ID: mailID, Name: "mail", Transport: catalog.Stdio, Runtime: "mail", Origin: "stdio:mail", Isolation: catalog.PerSession, AuthorizationMode: "NONE"},
		{ID: "srv_00000000000000000000000009", Name: "old", Transport: catalog.SSE, URL: "https://old.example/sse", Origin: "https://old.example", AuthorizationMode: "NONE", Era: "LEGACY"},
	} {
		if v.ID == idOrName || v.Name == idOrName {
			return v, nil
		}
	}
	return catalog.Server{}, fault.New(fault.NotFound, "SERVER_NOT_FOUND", "no such server")
}

func (d fakeServers) CreateServer(ctx context.Context, p tenant.Principal, spec catalog.ServerSpec, requestID string) (catalog.Server, error) {
	return catalog.Server{ID: calendarID, Name: spec.Name, Transport: catalog.HTTP, URL: spec.URL}, d.note(ctx, "CreateServer %+v", spec)
}
func (d fakeServers) GetServer(ctx context.Context, p tenant.Principal, idOrName string) (catalog.Server, error) {
	return d.server(idOrName)
}
func (d fakeServers) ListServers(ctx context.Context, p tenant.Principal, after string, limit int) ([]catalog.Server, error) {
	return nil, d.note(ctx, "ListServers %q %d", after, limit)
}
func (d fakeServers) UpdateServer(ctx context.Context, p tenant.Principal, idOrName string, up catalog.ServerUpdate) (catalog.Server, error) {
	text, _ := json.Marshal(up)
	v, err := d.server(idOrName)
	if err != nil {
		return v, err
	}
	return v, d.note(ctx, "UpdateServer %s", text)
}
func (d fakeServers) DeleteServer(ctx context.Context, p tenant.Principal, idOrName string) error {
	return d.note(ctx, "DeleteServer %s", idOrName)
}
func (d fakeServers) ProbeServer(ctx context.Context, p tenant.Principal, idOrName string) (catalog.Probe, error) {
	if idOrName == "mail" {
		return catalog.Probe{Failure: fault.New(fault.Unavailable, "CONNECT_FAILED", "no answer").In(fault.Transport)}, d.note(ctx, "Probe")
	}
	return catalog.Probe{Reachable: true, Era: "MODERN", ProtocolVersion: "2026-07-28", Capabilities: []byte(`{"tools": {}}`),
		ServerInfo: []byte(`{"name":"Cal\u00e9ndar","version":"1"}`), Kinds: []catalog.ProbedKind{{Kind: catalog.Tool, Callable: 2, Quarantined: 1}}}, d.note(ctx, "Probe")
}
func (d fakeServers) Definitions(ctx context.Context, p tenant.Principal, idOrName string, kind catalog.Kind, refresh bool) (*catalog.Revision, error) {
	return d.revision(kind), d.note(ctx, "Definitions %s %v", kind, refresh)
}
func (d fakeServers) revision(kind catalog.Kind) *catalog.Revision {
	def := func(name, digest, quarantine string) catalog.Definition {
		return catalog.Definition{Kind: kind, Name: name, ModelName: "calendar__" + name, Digest: digest, Title: "Title of " + name,
			Raw: json.RawMessage(`{"name": "` + name + `","n":1.0}`), Quarantine: quarantine}
	}
	r := &catalog.Revision{ID: "cat_1", Tenant: someTenant, ServerID: calendarID, Kind: kind, ProtocolVersion: "2026-07-28", Era: "MODERN",
		Capabilities: []byte(`{"tools":{},"resources":{},"prompts":{}}`)}
	switch kind {
	case catalog.Tool:
		r.Findings = []catalog.Finding{{Code: "CATALOG_STALE", Detail: "no answer"}}
		r.Definitions = []catalog.Definition{
			def("free", digestOne, ""), def("draft", digestTwo, ""), def("staff_only", digestOne, ""), def("unnamed", digestOne, ""), def("draft", digestTwo, "twice"),
			def("twins", digestTwo, "twice")}
	case catalog.Resource:
		r.Definitions = []catalog.Definition{def("c://a/1", digestOne, ""), def("c://b/1", digestOne, ""), def("c://a/../b", digestOne, ""),
			def("c://a/staff/1", digestOne, ""), def("c://a/2", digestOne, "it is bad")}
	case catalog.ResourceTemplate:
		r.Definitions = []catalog.Definition{def("c://a/{id}", digestOne, ""), def("c://b/{id}", digestOne, ""), def("c://{all}", digestOne, "")}
	case catalog.Prompt:
		r.Definitions = []catalog.Definition{def("weekly", digestOne, ""), def("daily", digestTwo, ""), def("unnamed", digestOne, "")}
	}
	return r
}
func (d fakeServers) Current(ctx context.Context, v catalog.Server, c catalog.Context, kind catalog.Kind, maxAge time.Duration) (*catalog.Revision, error) {
	return d.revision(kind), d.note(ctx, "Current %s %s %s %s", v.Name, c.Subject, c.Session, maxAge)
}
func (d fakeServers) Encoded(r *catalog.Revision, allowedKey string, build func() []byte) []byte {
	return build()
}
func (d fakeServers) Active(ctx context.Context, t tenant.ID, serverID string) (*authz.Active, error) {
	if serverID != calendarID {
		return nil, nil
	}
	c, err := contract.Parse([]byte(`
server: calendar
transport: http
protocol: {versions: ["2026-07-28"], downgrade: forbid}
origin: https://calendar.example
methods: [tools/list, tools/call, resources/read, resources/list, resources/templates/list, prompts/get, prompts/list]
resources: [{uri: "c://a/staff/*", subjects: {groups: [staff]}, consent: call}, {uri: "c://a/*"}]
prompts: [{name: weekly}, {name: daily, definition: "` + digestOne + `"}, {name: hourly, consent: call}]
tools:
  - {name: free, definition: "` + digestOne + `", effect: read, consent: none}
  - {name: draft, definition: "` + digestOne + `", effect: write, consent: call}
  - {name: gone, definition: any, effect: read, consent: none}
  - {name: twins, definition: any, effect: read, consent: none}
  - {name: staff_only, definition: any, effect: destructive, consent: call, subjects: {groups: [staff]}}
`))
	return &authz.Active{Contract: c, Revision: 3}, err
}

type fakeSessions struct{ *fakeDomain }

func (d fakeSessions) session(id string, p tenant.Principal) *sessions.Session {
	return &sessions.Session{ID: id, Subject: p.Subject, ServerIDs: []string{calendarID, mailID, "srv_gone"}, State: "OPEN", ExpireTime: time.Now().Add(time.Hour)}
}
func (d fakeSessions) Create(ctx context.Context, p tenant.Principal, r sessions.OpenRequest) (*sessions.Session, error) {
	return d.session(sessionOne, p), d.note(ctx, "Create %v %s %s", r.Servers, r.TTL, r.RequestID)
}
func (d fakeSessions) Get(ctx context.Context, p tenant.Principal, id string) (*sessions.Session, error) {
	return d.session(id, p), nil
}
func (d fakeSessions) List(ctx context.Context, p tenant.Principal, after string, limit int) ([]*sessions.Session, error) {
	return []*sessions.Session{d.session(sessionOne, p)}, d.note(ctx, "Sessions.List %q %d", after, limit)
}
func (d fakeSessions) Close(ctx context.Context, p tenant.Principal, id string) (*sessions.Session, error) {
	return d.session(id, p), d.note(ctx, "Close %s", id)
}
func (d fakeSessions) Connections(t tenant.ID, match func(sessions.Key) bool) (out []sessions.ConnectionInfo) {
	alice, bob := tenant.Subject{Source: "default", Value: "alice"}, tenant.Subject{Source: "default", Value: "bob"}
	for i, k := range []sessions.Key{
		{Tenant: t, Server: calendarID, Subject: alice}, {Tenant: t, Server: calendarID, Subject: bob},
		{Tenant: t, Server: mailID, Subject: alice, Session: sessionOne}, {Tenant: t, Server: mailID, Subject: alice, Session: "ses_other"},
		{Tenant: t, Server: "srv_other", Subject: alice}, {Tenant: t, Server: calendarID},
	} {
		if match(k) {
			out = append(out, sessions.ConnectionInfo{ID: fmt.Sprintf("con_%d", i), Key: k, Transport: "HTTP", State: "DISCOVERED"})
		}
	}
	return out
}

type fakeCalls struct{ *fakeDomain }

func (d fakeCalls) call(id string) *calls.Call {
	end := time.Unix(1_790_000_001, 0)
	return &calls.Call{ID: id, SessionID: sessionOne, Subject: tenant.Subject{Source: "default", Value: "alice"}, ServerName: "calendar", Origin: "https://calendar.example",
		Kind: "TOOL", Name: "free", RequestID: "r1", Arguments: []byte(`{"n":1.0}`), State: calls.Failed, Revision: 3, Effect: calls.Read, Recorded: true,
		ConsentID: "cns_1", ConsentExpire: &end, Result: []byte(`{"isError": true}`), Error: &calls.Error{Layer: calls.LayerTool, Code: "TOOL_ERROR", Message: "bad\xff", Data: []byte(`{"a": 1.0}`)},
		Findings: []string{"CATALOG_STALE: no answer: yet"}, Decision: authz.Decision{Outcome: authz.Ask, FirstFailed: authz.CheckConsent,
			Checks: []authz.Result{{Check: authz.CheckProtocol, Passed: true}, {Check: authz.CheckConsent, Detail: "ask"}}},
		Attempts: []calls.Attempt{{Number: 1, Phase: calls.Answered, Outcome: "FAILED", StartTime: end, EndTime: &end}}, FinishTime: &end}
}
func (d fakeCalls) Propose(ctx context.Context, p tenant.Principal, r calls.Proposal) (*calls.Call, error) {
	return d.call(callOne), d.note(ctx, "Propose %s %s %s %s %s %s for %s", r.SessionID, r.Server, r.Tool+r.Resource+r.Prompt, r.Arguments, r.RequestID, r.Wait, p.Subject)
}
func (d fakeCalls) Get(ctx context.Context, p tenant.Principal, id string, wait time.Duration, after int) (*calls.Call, error) {
	return d.call(id), d.note(ctx, "Calls.Get %s %s %d", id, wait, after)
}
func (d fakeCalls) List(ctx context.Context, p tenant.Principal, f calls.Filter) ([]*calls.Call, error) {
	return nil, d.note(ctx, "Calls.List %+v", f)
}
func (d fakeCalls) Cancel(ctx context.Context, p tenant.Principal, id string) (*calls.Call, error) {
	return d.call(id), d.note(ctx, "Cancel %s", id)
}
func (d fakeCalls) Subscribe(ctx context.Context, p tenant.Principal, sessionID, server, uri string) (*calls.Subscription, error) {
	return &calls.Subscription{ID: "sub_1", SessionID: sessionID, ServerName: server, URI: uri, State: calls.SubscriptionActive, Updates: 7}, d.note(ctx, "Subscribe %s %s %s", sessionID, server, uri)
}
func (d fakeCalls) Subscriptions(ctx context.Context, p tenant.Principal, sessionID string) ([]*calls.Subscription, error) {
	return nil, d.note(ctx, "Subscriptions %s", sessionID)
}
func (d fakeCalls) Unsubscribe(ctx context.Context, p tenant.Principal, sessionID, id string) error {
	return d.note(ctx, "Unsubscribe %s %s", sessionID, id)
}
func (d fakeCalls) Complete(ctx context.Context, p tenant.Principal, q calls.Query) (calls.Suggestions, error) {
	return calls.Suggestions{Server: catalog.Server{Name: "calendar", Origin: "https://calendar.example"}, Values: []string{"a\xff", "b"}, Total: ptr(7), More: true},
		d.note(ctx, "Complete %s %s %s%s %s %s %s", q.SessionID, q.Server, q.Prompt, q.Template, q.Argument, q.Value, q.Context)
}
func (d fakeCalls) Check(ctx context.Context, p tenant.Principal, defs calls.Definitions, r calls.DryRun) (calls.DryRunResult, error) {
	return calls.DryRunResult{Decision: authz.Decision{Outcome: authz.Deny}, Effect: calls.Write, Consent: "CALL", ArgumentsDigest: "args-1:sha256:00"},
		d.note(ctx, "Check %s %d %s %s %s %s", r.Server, r.Revision, r.Source, r.Subject, r.Tool+r.Resource+r.Prompt, r.Arguments)
}

// Each request reaches the domain with what it said, in the default and in the
// given case.
func TestServices_PassOn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	admin, alice := jsonAs("admin"), append(jsonAs("service"), "Bulkhead-User", "alice")
	for _, c := range []struct {
		method, path, body string
		headers            []string
		want               string
	}{
		{"POST", "/v1/servers", `{"name":"cal","http":{"url":"https://c.example/mcp"},"isolation":"PER_SESSION","authorization":{"mode":"NONE"}}`, admin,
			`CreateServer {Name:cal DisplayName: URL:https://c.example/mcp StreamURL: Runtime: Isolation:PER_SESSION AuthorizationMode:NONE SharedStateAcknowledged:false}`},
		{"POST", "/v1/servers", `{"name":"fs","stdio":{"runtime":"files"}}`, admin,
			`CreateServer {Name:fs DisplayName: URL: StreamURL: Runtime:files Isolation: AuthorizationMode: SharedStateAcknowledged:false}`},
		{"POST", "/v1/servers", `{"name":"old","sse":{"url":"https://c.example/sse"}}`, admin,
			`CreateServer {Name:old DisplayName: URL: StreamURL:https://c.example/sse Runtime: Isolation: AuthorizationMode: SharedStateAcknowledged:false}`},
		{"PATCH", "/v1/servers/calendar", `{"sse":{"url":"https://d.example/sse"},"updateMask":"sse.url"}`, admin,
			`UpdateServer {"DisplayName":null,"URL":null,"StreamURL":"https://d.example/sse","Runtime":null,"Isolation":null,"AuthorizationMode":null,"SharedStateAcknowledged":null}`},
		{"PATCH", "/v1/servers/calendar", `{"displayName":"","http":{"url":"https://d.example"}}`, admin,
			`UpdateServer {"DisplayName":"","URL":"https://d.example","StreamURL":null,"Runtime":null,"Isolation":null,"AuthorizationMode":null,"SharedStateAcknowledged":null}`},
		{"PATCH", "/v1/servers/calendar", `{"isolation":"PER_TENANT","updateMask":"isolation,sharedStateAcknowledged"}`, admin,
			`UpdateServer {"DisplayName":null,"URL":null,"StreamURL":null,"Runtime":null,"Isolation":"PER_TENANT","AuthorizationMode":null,"SharedStateAcknowledged":false}`},
		{"DELETE", "/v1/servers/calendar", "", admin, "DeleteServer calendar"},
		{"GET", "/v1/servers?pageSize=200", "", admin, `ListServers "" 201`},
		{"GET", "/v1/servers/calendar/definitions?refresh=true", "", admin, "Definitions tool true"},
		{"GET", "/v1/servers/calendar/definitions?kind=RESOURCE_TEMPLATE", "", admin, "Definitions resource_template false"},
		{"POST", "/v1/servers/calendar/contracts:check", `{"tool":"free","subject":{"user":"alice"},"arguments":{"a": 1.0}}`, admin, `Check calendar 0  default|alice free {"a": 1.0}`},
		{"POST", "/v1/servers/calendar/contracts:check", `{"tool":"free","subject":{"user":"idp|bob"},"yaml":"server: calendar"}`, admin, `Check calendar 0 server: calendar idp|bob free `},
		{"POST", "/v1/servers/calendar/contracts:check", `{"tool":"free","revision":7}`, admin, `Check calendar 7   free `},
		{"POST", "/v1/sessions", `{"servers":["calendar"],"ttl":"8h","requestId":"r"}`, alice, "Create [calendar] 8h0m0s r"},
		{"POST", "/v1/sessions/" + sessionOne + "/completions", `{"server":"calendar","ref":{"prompt":"weekly"},"argument":{"name":"day","value":"Mo"},"context":{"a": "b"}}`, alice,
			"Complete " + sessionOne + ` calendar weekly day Mo {"a": "b"}`},
		{"POST", "/v1/sessions/" + sessionOne + "/completions", `{"server":"calendar","ref":{"resourceTemplate":"c://{id}"},"argument":{"name":"id"}}`, alice,
			"Complete " + sessionOne + ` calendar c://{id} id  `},
		{"POST", "/v1/sessions/" + sessionOne + "/resourceSubscriptions", `{"server":"calendar","uri":"c://a"}`, alice, "Subscribe " + sessionOne + " calendar c://a"},
		{"GET", "/v1/sessions/" + sessionOne + "/resourceSubscriptions", "", alice, "Subscriptions " + sessionOne},
		{"DELETE", "/v1/sessions/" + sessionOne + "/resourceSubscriptions/sub_00000000000000000000000001", "", alice, "Unsubscribe " + sessionOne + " sub_00000000000000000000000001"},
		{"DELETE", "/v1/sessions/" + sessionOne, "", alice, "Close " + sessionOne},
		{"POST", "/v1/sessions/" + sessionOne + "/calls", `{"server":"calendar","tool":"free","arguments":{"a": 1.0},"requestId":"r"}`, alice,
			"Propose " + sessionOne + ` calendar free {"a": 1.0} r 10s for default|alice`},
		{"POST", "/v1/sessions/" + sessionOne + "/calls", `{"server":"calendar","tool":"free","wait":"0s"}`, alice,
			"Propose " + sessionOne + ` calendar free   0s for default|alice`},
		{"POST", "/v1/sessions/" + sessionOne + "/calls", `{"server":"calendar","resource":"calendar://a/b","wait":"0s"}`, alice,
			"Propose " + sessionOne + ` calendar calendar://a/b   0s for default|alice`},
		{"POST", "/v1/sessions/" + sessionOne + "/calls", `{"server":"calendar","prompt":"weekly","arguments":{"a":"b"},"wait":"0s"}`, alice,
			"Propose " + sessionOne + ` calendar weekly {"a":"b"}  0s for default|alice`},
		{"POST", "/v1/servers/calendar/contracts:check", `{"resource":"calendar://a","revision":7}`, admin, `Check calendar 7   calendar://a `},
		{"GET", "/v1/calls/" + callOne + "?wait=5s&afterRevision=2", "", alice, "Calls.Get " + callOne + " 5s 2"},
		{"GET", "/v1/calls/" + callOne, "", alice, "Calls.Get " + callOne + " 0s 0"},
		{"POST", "/v1/calls/" + callOne + ":cancel", "", alice, "Cancel " + callOne},
		{"GET", "/v1/sessions/" + sessionOne + "/calls?state=UNCERTAIN&pageSize=3", "", alice, "Calls.List {SessionID:" + sessionOne + " State:UNCERTAIN Kind: Before: Limit:4}"},
		{"GET", "/v1/sessions/" + sessionOne + "/calls?kind=PROMPT", "", alice, "Calls.List {SessionID:" + sessionOne + " State: Kind:PROMPT Before: Limit:51}"},
		{"GET", "/v1/consents?state=PENDING", "", alice, "Consents.List PENDING"},
		{"POST", "/v1/consents/cns_00000000000000000000000001:decide", `{"decision":"APPROVE"}`, jsonAs("approver"), "Consents.Decide cns_00000000000000000000000001 true"},
		{"POST", "/v1/auditEntries:verify", "", jsonAs("auditor"), "Audit.Verify false"},
	} {
		r.taken()
		a := r.rest(c.method, c.path, c.body, c.headers...)
		if got := r.taken(); a.code != 200 || len(got) == 0 || got[0] != c.want {
			t.Errorf("%s %s: %d, %q, want %q\n%s", c.method, c.path, a.code, got, c.want, a.body)
		}
	}
}

func TestServices_Refuse(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	admin, alice := jsonAs("admin"), append(jsonAs("service"), "Bulkhead-User", "alice")
	calls, completions := "/v1/sessions/"+sessionOne+"/calls", "/v1/sessions/"+sessionOne+"/completions"
	for _, c := range []struct {
		method, path, body string
		headers            []string
		field              string
	}{
		{"POST", "/v1/servers", `{"name":"Cal","http":{"url":"https://c.example"}}`, admin, "name: "},
		{"POST", "/v1/servers", `{"name":"cal","http":{"url":"no url"}}`, admin, "http.url: "},
		{"POST", "/v1/servers", `{"name":"cal","sse":{"url":"no url"}}`, admin, "sse.url: "},
		{"POST", "/v1/servers", `{"name":"cal","sse":{"url":"https://a.example"},"http":{"url":"https://a.example"}}`, admin, "http: "},
		{"POST", "/v1/servers", `{"name":"cal"}`, admin, "transport: "},
		{"PATCH", "/v1/servers/calendar", `{"updateMask":"sse"}`, admin, "sse: is named by updateMask but absent"},
		{"POST", "/v1/servers", `{"name":"cal","stdio":{"runtime":"x"},"authorization":{}}`, admin, "authorization.mode: "},
		{"PATCH", "/v1/servers/calendar", `{"name":"x"}`, admin, "name: unknown field"},
		{"PATCH", "/v1/servers/calendar", `{"displayName":"x","updateMask":"isolation"}`, admin, ""},
		{"PATCH", "/v1/servers/calendar", `{"updateMask":"isolation"}`, admin, "isolation: is named by updateMask but absent"},
		{"PATCH", "/v1/servers/calendar", `{"updateMask":"serverId"}`, admin, "updateMask: names serverId"},
		{"POST", "/v1/sessions", `{"ttl":"1s"}`, alice, "ttl: "},
		{"POST", "/v1/sessions", `{"ttl":"169h"}`, alice, "ttl: "},
		{"POST", "/v1/sessions", `{"servers":["a","a"]}`, alice, "servers: "},
		{"POST", calls, `{"server":"calendar","tool":"` + strings.Repeat("a", 257) + `"}`, alice, "tool: "},
		{"POST", calls, `{"server":"calendar","resource":"x:` + strings.Repeat("é", 1024) + `"}`, alice, "resource: "},
		{"POST", completions, `{"server":"calendar","ref":{},"argument":{"name":"a"}}`, alice, "ref.target: "},
		{"POST", completions, `{"server":"calendar","argument":{"name":"a"}}`, alice, "ref: "},
		{"POST", completions, `{"server":"calendar","ref":{"prompt":"a"}}`, alice, "argument: "},
		{"POST", completions, `{"server":"calendar","ref":{"prompt":"a","resourceTemplate":"b"},"argument":{"name":"a"}}`, alice, "ref."},
		{"POST", calls, `{"server":"calendar","tool":"a","wait":"61s"}`, alice, "wait: "},
		{"POST", calls, `{"server":"calendar","tool":"a","wait":"-1s"}`, alice, "wait: "},
		{"POST", calls, `{"server":"calendar","tool":"a","requestId":"a b"}`, alice, "requestId: "},
		{"POST", calls, `{"server":"calendar","tool":"a","sampling":"x"}`, alice, "sampling: unknown field"},
		{"POST", "/v1/consents/cns_00000000000000000000000001:decide", `{"decision":"APPROVE","grant":{}}`, jsonAs("approver"), "grant: unknown field"},
		{"POST", "/v1/consents/cns_00000000000000000000000001:decide", `{}`, jsonAs("approver"), "decision: "},
		{"GET", "/v1/sessions/" + sessionOne + "/tools?format=OPENAI", "", alice, "format: must be one of MCP"},
		{"POST", "/v1/auditEntries:verify", `{"checkpoint":{}}`, jsonAs("auditor"), "checkpoint."},
	} {
		r.taken()
		a := r.rest(c.method, c.path, c.body, c.headers...)
		if got := r.taken(); a.code != 400 || !strings.HasPrefix(a.field(), c.field) || len(got) > 0 {
			t.Errorf("%s %s: %d %q, want %q, reached %q\n%s", c.method, c.path, a.code, a.field(), c.field, got, a.body)
		}
	}
}

func TestTools_EqualOverBoth(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	wantFindings := []string{"CATALOG_STALE calendar: no answer",
		"DEFINITION_CHANGED calendar: draft: its definition is not the one that the contract pins",
		"TOOL_NOT_OFFERED calendar: gone: the contract has it, but the server does not offer it",
		"DEFINITION_QUARANTINED calendar: twins: twice"}
	for groups, want := range map[string]string{"": "free", "staff": "free staff_only"} {
		headers := asUser("service", "alice")
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer service", "bulkhead-user", "alice")
		if groups != "" {
			headers = append(headers, "Bulkhead-Groups", groups)
			ctx = metadata.AppendToOutgoingContext(ctx, "bulkhead-groups", groups)
		}
		a := r.rest("GET", "/v1/sessions/"+sessionOne+"/tools", "", headers...)
		if a.code != 200 {
			t.Fatalf("%d %s", a.code, a.body)
		}
		viaREST := &pb.ListToolsResponse{}
		if err := decodeBody(a.body, viaREST); err != nil {
			t.Fatalf("%v in %s", err, a.body)
		}
		viaGRPC, err := pb.NewCatalogServiceClient(r.conn).ListTools(ctx, &pb.ListToolsRequest{SessionId: sessionOne})
		if err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(viaREST, viaGRPC) {
			t.Errorf("REST %v\ngRPC %v", viaREST, viaGRPC)
		}
		var names []string
		for _, tool := range viaREST.GetTools() {
			names = append(names, tool.GetName())
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("groups %q see %q, want %q", groups, got, want)
		}
		if !strings.Contains(string(a.body), `"definition":{"name": "free","n":1.0}`) {
			t.Errorf("a definition was changed: %s", a.body)
		}
		if got := findingLines(viaREST.GetFindings()); !slices.Equal(got, wantFindings) {
			t.Errorf("findings %q, want %q", got, wantFindings)
		}
		again := r.rest("GET", "/v1/sessions/"+sessionOne+"/tools", "", headers...)
		if string(again.body) != string(a.body) {
			t.Error("the same list is encoded differently")
		}
		if q := r.rest("GET", "/v1/sessions/"+sessionOne+"/tools?query=TITLE%20staff", "", headers...); strings.Contains(string(q.body), `"name":"staff_only"`) != (groups != "") ||
			strings.Contains(string(q.body), `"name":"free"`) {
			t.Errorf("query: %s", q.body)
		}
	}
}

// The other lists are equal over both ways too, and hold what the contract covers
// for this user and nothing else.
func TestLists_EqualOverBoth(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := pb.NewCatalogServiceClient(r.conn)
	for _, tt := range []struct {
		path, groups string
		into         proto.Message
		viaGRPC      func(ctx context.Context) (proto.Message, error)
		items        func(m proto.Message) []string
		want         string
		findings     []string
	}{
		{"resources", "", &pb.ListResourcesResponse{}, func(ctx context.Context) (proto.Message, error) {
			return client.ListResources(ctx, &pb.ListResourcesRequest{SessionId: sessionOne})
		}, func(m proto.Message) []string {
			return each(m.(*pb.ListResourcesResponse).GetResources(), (*pb.Resource).GetUri)
		},
			"c://a/1", []string{"DEFINITION_QUARANTINED calendar: c://a/2: it is bad"}},
		{"resources", "staff", &pb.ListResourcesResponse{}, func(ctx context.Context) (proto.Message, error) {
			return client.ListResources(ctx, &pb.ListResourcesRequest{SessionId: sessionOne})
		}, func(m proto.Message) []string {
			return each(m.(*pb.ListResourcesResponse).GetResources(), (*pb.Resource).GetUri)
		},
			"c://a/1 c://a/staff/1", []string{"DEFINITION_QUARANTINED calendar: c://a/2: it is bad"}},
		{"resourceTemplates", "", &pb.ListResourceTemplatesResponse{}, func(ctx context.Context) (proto.Message, error) {
			return client.ListResourceTemplates(ctx, &pb.ListResourceTemplatesRequest{SessionId: sessionOne})
		}, func(m proto.Message) []string {
			return each(m.(*pb.ListResourceTemplatesResponse).GetResourceTemplates(), (*pb.ResourceTemplate).GetUriTemplate)
		}, "c://a/{id} c://{all}", nil},
		{"prompts", "", &pb.ListPromptsResponse{}, func(ctx context.Context) (proto.Message, error) {
			return client.ListPrompts(ctx, &pb.ListPromptsRequest{SessionId: sessionOne})
		}, func(m proto.Message) []string {
			return each(m.(*pb.ListPromptsResponse).GetPrompts(), (*pb.Prompt).GetName)
		},
			"weekly", []string{"DEFINITION_CHANGED calendar: daily: its definition is not the one that the contract pins",
				"PROMPT_NOT_OFFERED calendar: hourly: the contract has it, but the server does not offer it"}},
	} {
		headers := append(asUser("service", "alice"), "Bulkhead-Groups", tt.groups)
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer service", "bulkhead-user", "alice", "bulkhead-groups", tt.groups)
		if tt.groups == "" {
			headers = asUser("service", "alice")
			ctx = metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer service", "bulkhead-user", "alice")
		}
		a := r.rest("GET", "/v1/sessions/"+sessionOne+"/"+tt.path, "", headers...)
		if err := decodeBody(a.body, tt.into); err != nil || a.code != 200 {
			t.Fatalf("%s: %v in %d %s", tt.path, err, a.code, a.body)
		}
		got, err := tt.viaGRPC(ctx)
		if err != nil || !proto.Equal(got, tt.into) {
			t.Errorf("%s: REST %v\ngRPC %v, %v", tt.path, tt.into, got, err)
		}
		if names := strings.Join(tt.items(got), " "); names != tt.want {
			t.Errorf("%s for %q: %s, want %s", tt.path, tt.groups, names, tt.want)
		}
		findings := got.(interface{ GetFindings() []*pb.Finding }).GetFindings()
		if lines := findingLines(findings); !slices.Equal(lines, tt.findings) && len(lines)+len(tt.findings) > 0 {
			t.Errorf("%s: findings %q", tt.path, lines)
		}
		if !strings.Contains(string(a.body), `"source":{"server":"calendar","origin":"https://calendar.example","untrusted":true}`) {
			t.Errorf("%s: no source in %s", tt.path, a.body)
		}
		if q := r.rest("GET", "/v1/sessions/"+sessionOne+"/"+tt.path+"?query=nowhere", "", headers...); !strings.Contains(string(q.body), `"`+tt.path+`":[]`) {
			t.Errorf("query: %s", q.body)
		}
	}
}

func findingLines(fs []*pb.Finding) []string {
	return each(fs, func(f *pb.Finding) string { return f.GetCode() + " " + f.GetDetail() })
}

// Each tool that is missing is told, up to a bound, and only to whom may use it.
func TestTools_Missing(t *testing.T) {
	t.Parallel()
	names := []string{}
	for i := range maxMissing + 5 {
		names = append(names, fmt.Sprintf(`{name: t%d, definition: any, effect: read, consent: none}`, i))
	}
	source := func(tools ...string) *contract.Contract {
		c, err := contract.Parse([]byte("server: calendar\ntransport: http\nprotocol: {versions: [\"2026-07-28\"], downgrade: forbid}\n" +
			"origin: https://calendar.example\nmethods: [tools/list, tools/call]\ntools:\n  - " + strings.Join(tools, "\n  - ") + "\n"))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	offer := func(c *contract.Contract, groups ...string) *offer {
		o := &offer{noun: tools, server: catalog.Server{Name: "calendar"}, contract: c, revision: fakeServers{}.revision(catalog.Tool)}
		o.allow(tenant.Principal{Groups: groups}, nil)
		return o
	}
	o := offer(source(names...))
	if got := findingLines(o.findings); len(got) != maxMissing+1 || got[0] != "TOOL_NOT_OFFERED calendar: t0: the contract has it, but the server does not offer it" ||
		got[maxMissing] != "MORE_TOOLS_MISSING calendar: and 5 more tools of the contract are not shown" {
		t.Errorf("%q", got)
	}
	if got := offer(source(names[:maxMissing]...)).findings; len(got) != maxMissing {
		t.Errorf("%d findings", len(got))
	}
	staff := source(`{name: free, definition: any, effect: read, consent: none}`, `{name: secret, definition: any, effect: read, consent: none, subjects: {groups: [staff]}}`)
	if o := offer(staff); len(o.findings) != 0 || len(o.allowed) != 1 {
		t.Errorf("a stranger is told of %v", o.findings)
	}
	if o := offer(staff, "staff"); len(o.findings) != 1 || !strings.Contains(o.findings[0].GetDetail(), "secret") {
		t.Errorf("staff is told %v", o.findings)
	}
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	alice := asUser("service", "alice")
	for path, wants := range map[string][]string{
		"/v1/calls/" + callOne: {`"state":"FAILED"`, `"recorded":"DURABLE"`, `"result":{"isError": true}`, `"arguments":{"n":1.0}`, `"layer":"TOOL"`, `"message":"bad` + "\ufffd" + `"`,
			`"data":{"a": 1.0}`, `"untrusted":true,"findings":[{"code":"CATALOG_STALE","detail":"no answer: yet"}]`, `"url":""`, `"firstFailed":"consent"`,
			`{"check":"protocol","passed":true,"detail":""}`, `"phase":"ANSWERED"`, `"timings":{"negotiation":"0s"`, `"effect":"READ"`, `"subject":"default|alice"`},
		"/v1/sessions/" + sessionOne: {`"servers":[{"server":"calendar","serverId":"` + calendarID + `"},{"server":"mail","serverId":"` + mailID + `"},{"server":"","serverId":"srv_gone"}]`,
			`"state":"OPEN"`},
		"/v1/sessions/" + sessionOne + "/connections": {`"connectionId":"con_0"`, `"connectionId":"con_2"`, `"connectionId":"con_5"`},
		"/v1/servers/calendar":                        {`"http":{"url":"https://calendar.example/mcp"}`, `"activeContract":{"contractId":"mcp-host-contract@sha256:00","revision":3}`, `"era":"MODERN"`},
		"/v1/servers/mail":                            {`"stdio":{"runtime":"mail"}`, `"isolation":"PER_SESSION"`, `"era":"ERA_UNSPECIFIED"`},
		"/v1/servers/old":                             {`"sse":{"url":"https://old.example/sse"}`, `"origin":"https://old.example"`, `"era":"LEGACY"`},
	} {
		a := r.rest("GET", path, "", alice...)
		for _, want := range wants {
			if a.code != 200 || !strings.Contains(string(a.body), want) {
				t.Errorf("%s: no %s in %d %s", path, want, a.code, a.body)
			}
		}
		if strings.HasSuffix(path, "connections") && strings.Count(string(a.body), "connectionId") != 3 {
			t.Errorf("foreign connections: %s", a.body)
		}
	}
	admin := as("admin")
	c := r.rest("POST", "/v1/sessions/"+sessionOne+"/completions", `{"server":"calendar","ref":{"prompt":"weekly"},"argument":{"name":"day"}}`, append(jsonAs("service"), "Bulkhead-User", "alice")...)
	if want := "{\"values\":[\"a\ufffd\",\"b\"]" + `,"total":7,"hasMore":true,"source":{"server":"calendar","origin":"https://calendar.example","untrusted":true}}`; string(c.body) != want {
		t.Errorf("completion %s, want %s", c.body, want)
	}
	a := r.rest("GET", "/v1/servers/calendar/definitions", "", admin...)
	for _, want := range []string{`"name":"free","definitionDigest":"` + digestOne + `","definition":{"name": "free","n":1.0},"review":"PINNED","pinnedDigest":"` + digestOne + `"`,
		`"review":"CHANGED","pinnedDigest":"` + digestOne + `"`, `"review":"ANY"`, `"review":"UNPINNED"`, `"quarantine":"twice"`,
		`{"kind":"RESOURCE","name":"c://a/1"`, `{"kind":"RESOURCE_TEMPLATE","name":"c://b/{id}"`, `{"kind":"PROMPT","name":"daily"`} {
		if !strings.Contains(string(a.body), want) {
			t.Errorf("no %s in %s", want, a.body)
		}
	}
	a = r.rest("POST", "/v1/servers/calendar:probe", "", admin...)
	for _, want := range []string{`"reachable":true`, `"implementationName":"Caléndar"`, `"tools":3`, `"capabilities":{"tools": {}}`, `"era":"MODERN"`} {
		if !strings.Contains(string(a.body), want) {
			t.Errorf("no %s in %s", want, a.body)
		}
	}
	a = r.rest("POST", "/v1/servers/mail:probe", "", admin...)
	if !strings.Contains(string(a.body), `"failure":{"layer":"TRANSPORT","code":"CONNECT_FAILED","message":"no answer"}`) {
		t.Errorf("%s", a.body)
	}
	a = r.rest("POST", "/v1/servers/calendar/contracts:check", `{"tool":"free"}`, jsonAs("admin")...)
	if !strings.Contains(string(a.body), `"outcome":"DENY"`) || !strings.Contains(string(a.body), `"effect":"WRITE","consent":"CALL","argumentsDigest":"args-1:sha256:00"`) {
		t.Errorf("%s", a.body)
	}
}
