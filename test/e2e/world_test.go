package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// transports are the two faces of the API.
var transports = []string{"grpc", "rest"}

// world is one test's tenant, with a client for each of its people.
type world struct {
	t         testing.TB
	ctx       context.Context
	transport string
	http      *http.Client
	tenantID  string

	adminKey, serviceKey, approverKey, auditorKey string

	admin, alice, bob, approver, auditor *client
}

// newWorld makes a tenant and its keys.
func newWorld(t testing.TB, transport string) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	rt := &http.Transport{}
	t.Cleanup(rt.CloseIdleConnections)
	w := &world{t: t, ctx: ctx, transport: transport, http: &http.Client{Transport: rt}}
	made, err := w.client(theService.OperatorKey).CreateTenant(ctx, &pb.CreateTenantRequest{DisplayName: t.Name()})
	must(t, err)
	w.tenantID, w.adminKey = made.GetTenantId(), made.GetAdminKey()
	w.admin = w.client(w.adminKey)
	w.serviceKey = w.key(&pb.CreateKeyRequest{DisplayName: "frontend", Role: pb.Key_SERVICE})
	w.approverKey = w.key(&pb.CreateKeyRequest{DisplayName: "approver", Role: pb.Key_APPROVER})
	w.auditorKey = w.key(&pb.CreateKeyRequest{DisplayName: "auditor", Role: pb.Key_AUDITOR})
	w.alice, w.bob = w.user("alice"), w.user("bob")
	w.approver, w.auditor = w.client(w.approverKey), w.client(w.auditorKey)
	return w
}

func (w *world) key(in *pb.CreateKeyRequest) string {
	w.t.Helper()
	k, err := w.admin.CreateKey(w.ctx, in)
	must(w.t, err)
	return k.GetSecret()
}

// client calls with a key and more headers, name and value in turn.
func (w *world) client(key string, more ...string) *client {
	header := map[string]string{"Authorization": "Bearer " + key}
	for i := 0; i < len(more); i += 2 {
		header[more[i]] = more[i+1]
	}
	if w.transport == "grpc" {
		return newClient(grpcConn{theService.conn, header})
	}
	return newClient(restConn{w.http, theService.URL, header})
}

// user calls with the service key on behalf of a user.
func (w *world) user(name string, more ...string) *client {
	return w.client(w.serviceKey, append([]string{"Bulkhead-User", name}, more...)...)
}

// raw makes a REST request with a body as it is.
func (w *world) raw(verb, path, body string, key string, more ...string) (int, string) {
	w.t.Helper()
	header := map[string]string{"Authorization": "Bearer " + key}
	for i := 0; i < len(more); i += 2 {
		header[more[i]] = more[i+1]
	}
	var b []byte
	if body != "" {
		b = []byte(body)
	}
	code, _, answer, err := send(w.ctx, w.http, verb, theService.URL+path, b, header)
	must(w.t, err)
	return code, string(answer)
}

// until polls until ok, at most patience long.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			w.t.Fatalf("never: %s", what)
		}
	}
}

// startDemo starts a demo calendar in this process.
func startDemo(t testing.TB, o demo.Options) *demo.Server {
	t.Helper()
	s, err := demo.Start(o)
	must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the demo: %v", err)
		}
	})
	return s
}

// httpServer registers a server by its URL.
func (w *world) httpServer(name, url string) *pb.Server {
	w.t.Helper()
	s, err := w.admin.CreateServer(w.ctx, &pb.CreateServerRequest{Name: name, DisplayName: name,
		Transport: &pb.CreateServerRequest_Http{Http: &pb.Server_Http{Url: url}}})
	must(w.t, err)
	return s
}

// sseServer registers a server of HTTP+SSE by the URL of its stream.
func (w *world) sseServer(name, url string) *pb.Server {
	w.t.Helper()
	s, err := w.admin.CreateServer(w.ctx, &pb.CreateServerRequest{Name: name, DisplayName: name,
		Transport: &pb.CreateServerRequest_Sse{Sse: &pb.Server_Sse{Url: url}}})
	must(w.t, err)
	return s
}

// stdioServer registers a declared runtime.
func (w *world) stdioServer(name, runtime string) *pb.Server {
	w.t.Helper()
	s, err := w.admin.CreateServer(w.ctx, &pb.CreateServerRequest{Name: name, DisplayName: name,
		Transport: &pb.CreateServerRequest_Stdio{Stdio: &pb.Server_Stdio{Runtime: runtime}}})
	must(w.t, err)
	return s
}

// definitions lists the tools that a server offers, by name.
func (w *world) definitions(server string, refresh bool) map[string]*pb.Definition {
	w.t.Helper()
	res, err := w.admin.ListDefinitions(w.ctx, &pb.ListDefinitionsRequest{Server: server, Refresh: refresh, Kind: pb.Definition_TOOL})
	must(w.t, err)
	out := map[string]*pb.Definition{}
	for _, d := range res.GetDefinitions() {
		out[d.GetName()] = d
	}
	return out
}

// obj is a JSON object.
type obj map[string]any

// toolRule is what a contract says of one tool; its digest is put in by review.
type toolRule struct {
	name, effect, consent, when string
	more                        obj
}

// review writes a contract that pins the tools as the server offers them now,
// and activates it. more replaces members of the contract.
func (w *world) review(s *pb.Server, more obj, rules ...toolRule) *pb.Contract {
	w.t.Helper()
	defs := w.definitions(s.GetName(), true)
	transport, versions := "http", []string{"2026-07-28", "2025-11-25", "2025-06-18"}
	switch {
	case s.GetStdio() != nil:
		transport = "stdio"
	case s.GetSse() != nil:
		transport, versions = "sse", versions[1:]
	}
	tools := []obj{}
	for _, r := range rules {
		tool := obj{"name": r.name, "definition": defs[r.name].GetDefinitionDigest(), "effect": r.effect}
		if r.consent != "" {
			tool["consent"] = r.consent
		}
		if r.when != "" {
			tool["when"] = r.when
		}
		for k, v := range r.more {
			tool[k] = v
		}
		tools = append(tools, tool)
	}
	c := obj{"server": s.GetName(), "transport": transport, "origin": s.GetOrigin(), "tools": tools,
		"protocol": obj{"versions": versions, "downgrade": "forbid"}}
	for k, v := range more {
		c[k] = v
	}
	return w.activate(s.GetName(), &pb.CreateContractRequest{Server: s.GetName(),
		Source: &pb.CreateContractRequest_Contract{Contract: raw(c)}})
}

func (w *world) activate(server string, in *pb.CreateContractRequest) *pb.Contract {
	w.t.Helper()
	draft, err := w.admin.CreateContract(w.ctx, in)
	must(w.t, err)
	active, err := w.admin.ActivateContract(w.ctx, &pb.ActivateContractRequest{Server: server, Revision: draft.GetRevision()})
	must(w.t, err)
	return active
}

// calendar registers a demo calendar under the contract that it is shipped with.
func (w *world) calendar(d *demo.Server) *pb.Server {
	w.t.Helper()
	s := w.httpServer(demo.ServerName, d.URL())
	digests := map[string]string{}
	for name, def := range w.definitions(s.GetName(), true) {
		digests[name] = def.GetDefinitionDigest()
	}
	w.activate(s.GetName(), &pb.CreateContractRequest{Server: s.GetName(),
		Source: &pb.CreateContractRequest_Yaml{Yaml: string(demo.Contract(d.Origin(), d.URL(), digests))}})
	return s
}

func (w *world) session(c *client, servers ...string) string {
	w.t.Helper()
	s, err := c.OpenSession(w.ctx, &pb.OpenSessionRequest{Servers: servers})
	must(w.t, err)
	return s.GetSessionId()
}

// tools lists a session's tools by name.
func (w *world) tools(c *client, session string) map[string]*pb.Tool {
	w.t.Helper()
	res, err := c.ListTools(w.ctx, &pb.ListToolsRequest{SessionId: session})
	must(w.t, err)
	out := map[string]*pb.Tool{}
	for _, tool := range res.GetTools() {
		out[tool.GetName()] = tool
	}
	return out
}

// propose makes a call that must come to be, in whatever state.
func (w *world) propose(c *client, session, server, tool string, args any) *pb.Call {
	w.t.Helper()
	call, err := c.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: session, Server: server, Tool: tool, Arguments: raw(args),
		Wait: durationpb.New(30 * time.Second)})
	must(w.t, err)
	return call
}

// ask proposes a call that must need consent.
func (w *world) ask(c *client, session, server, tool string, args any) *pb.Call {
	w.t.Helper()
	call := w.propose(c, session, server, tool, args)
	wantState(w.t, call, pb.Call_CONSENT_REQUIRED)
	if call.GetConsent().GetConsentId() == "" {
		w.t.Fatalf("%s has no consent to decide", call.GetCallId())
	}
	return call
}

func (w *world) decide(call *pb.Call, d pb.DecideConsentRequest_Decision) *pb.Consent {
	w.t.Helper()
	c, err := w.approver.DecideConsent(w.ctx, &pb.DecideConsentRequest{ConsentId: call.GetConsent().GetConsentId(), Decision: d, Reason: "as " + d.String()})
	must(w.t, err)
	return c
}

// ended waits until a call has an end.
func (w *world) ended(c *client, call *pb.Call) *pb.Call {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	for !final(call) {
		next, err := c.GetCall(ctx, &pb.GetCallRequest{CallId: call.GetCallId(), Wait: durationpb.New(20 * time.Second),
			AfterRevision: call.GetRevision()})
		if err != nil {
			w.t.Fatalf("%s stays %s: %v", call.GetCallId(), call.GetState(), err)
		}
		call = next
	}
	return call
}

func final(c *pb.Call) bool {
	return slices.Contains([]pb.Call_State{pb.Call_DENIED, pb.Call_SUCCEEDED, pb.Call_FAILED, pb.Call_CANCELLED, pb.Call_UNCERTAIN}, c.GetState())
}

func wantState(t testing.TB, c *pb.Call, want pb.Call_State) {
	t.Helper()
	if c.GetState() != want {
		t.Fatalf("%s of %s is %s (first failed %q %s, error %v), want %s", c.GetCallId(), c.GetName(), c.GetState(),
			c.GetDecision().GetFirstFailed(), detailOf(c), c.GetError(), want)
	}
}

// wantDenied wants a denial by a check.
func wantDenied(t testing.TB, c *pb.Call, check string) {
	t.Helper()
	wantState(t, c, pb.Call_DENIED)
	if got := c.GetDecision().GetFirstFailed(); got != check {
		t.Fatalf("denied by %q (%s), want %q", got, detailOf(c), check)
	}
	if len(c.GetAttempts()) > 0 || c.GetResult() != nil {
		t.Fatalf("denied, and yet attempted: %v", c)
	}
}

func detailOf(c *pb.Call) string {
	for _, ch := range c.GetDecision().GetChecks() {
		if ch.GetCheck() == c.GetDecision().GetFirstFailed() {
			return ch.GetDetail()
		}
	}
	return ""
}

// entries lists the audit of the tenant that fits the filter, all pages.
func (w *world) entries(in *pb.ListAuditEntriesRequest) (out []*pb.AuditEntry) {
	w.t.Helper()
	for {
		res, err := w.auditor.ListAuditEntries(w.ctx, in)
		must(w.t, err)
		out = append(out, res.GetAuditEntries()...)
		if in.PageToken = res.GetNextPageToken(); in.PageToken == "" {
			return out
		}
	}
}

// verified waits until the sealer has caught up and wants a record without
// problems.
func (w *world) verified() {
	w.t.Helper()
	var res *pb.VerifyAuditEntriesResponse
	w.until("everything is sealed", func() bool {
		var err error
		res, err = w.auditor.VerifyAuditEntries(w.ctx, &pb.VerifyAuditEntriesRequest{})
		must(w.t, err)
		return res.GetUnsealed() == 0
	})
	if !res.GetOk() || res.GetLost() != 0 || len(res.GetProblems()) > 0 || !res.GetDetailsChecked() || res.GetEntries() == 0 {
		w.t.Fatalf("the audit: %v", res)
	}
}

// raw is v as JSON; a string is taken as it is.
func raw(v any) *pb.Json {
	if s, ok := v.(string); ok {
		return &pb.Json{Raw: []byte(s)}
	}
	b, err := encode(v)
	if err != nil {
		panic(err)
	}
	return &pb.Json{Raw: b}
}

// text returns the texts of a tool result.
func resultText(t testing.TB, c *pb.Call) string {
	t.Helper()
	var r struct {
		Content []struct{ Type, Text string }
	}
	if err := json.Unmarshal(c.GetResult().GetRaw(), &r); err != nil {
		t.Fatalf("result %q: %v", c.GetResult().GetRaw(), err)
	}
	var b strings.Builder
	for _, part := range r.Content {
		fmt.Fprintln(&b, part.Text)
	}
	return b.String()
}

// both runs a test over each transport, in parallel.
func both(t *testing.T, test func(t *testing.T, w *world)) {
	t.Parallel()
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			t.Parallel()
			test(t, newWorld(t, tr))
		})
	}
}

// wantField wants bad input to be refused with the field named.
func wantField(t testing.TB, err error, field string) {
	t.Helper()
	if codeOf(err) != codes.InvalidArgument {
		t.Errorf("error %v, want INVALID_ARGUMENT", err)
		return
	}
	var fields []string
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range bad.GetFieldViolations() {
				fields = append(fields, v.GetField())
				if v.GetDescription() == "" {
					t.Errorf("no rule is told for %s", v.GetField())
				}
			}
		}
	}
	if !slices.Contains(fields, field) {
		t.Errorf("fields %q, want %q: %v", fields, field, err)
	}
}

// fieldsOf are the fields that a refusal names; one empty one when there is none.
func fieldsOf(err error) (out []string) {
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range bad.GetFieldViolations() {
				out = append(out, v.GetField())
			}
		}
	}
	if len(out) == 0 {
		out = []string{""}
	}
	return out
}
