package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// scripted registers a server that offers the tools, given as JSON, and answers
// calls by script.
func (w *world) scripted(t *testing.T, version, tools string, answers ...mcptest.Answer) (*mcptest.Server, *pb.Server) {
	t.Helper()
	m := mcptest.New(t, version)
	m.On("tools/list", mcptest.Result(`{"resultType":"complete","tools":`+tools+`}`))
	if len(answers) > 0 {
		m.On("tools/call", answers...)
	}
	return m, w.httpServer("scripted", m.URL)
}

const plainTool = `[{"name":"act","inputSchema":{"type":"object"}}]`

// kindsOf are the kinds of the audit entries of a call.
func (w *world) kindsOf(c *pb.Call) string {
	w.t.Helper()
	var kinds []string
	for _, e := range w.entries(&pb.ListAuditEntriesRequest{CallId: c.GetCallId()}) {
		kinds = append(kinds, e.GetKind())
	}
	return strings.Join(kinds, " ")
}

// A tool that a user may not call is denied by whatever name and way it is
// called, each time with an entry, and the answer does not tell whether the
// server has it.
func TestFO096_FilterOnListingAndOnCalling(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d := startDemo(t, demo.Options{})
		s := w.calendar(d)
		ses := w.session(w.alice)
		invite := obj{"id": "ev_1", "attendees": []string{"eve@example.com"}}
		model := w.tools(w.alice, ses)[demo.CreateDraftEvent].GetModelName()
		for _, server := range []string{"calendar", s.GetServerId()} {
			for _, name := range []string{demo.SendInvitations, "calendar__send_invitations", "calendar/send_invitations", "calendar.send_invitations",
				"Send_invitations", "send_invitations ", "send-invitations", "mcp__calendar__send_invitations", model} {
				call := w.propose(w.alice, ses, server, name, invite)
				wantDenied(t, call, "definition")
				if got := w.kindsOf(call); got != "call.denied" {
					t.Errorf("%s by %s: entries %q, want one call.denied", name, server, got)
				}
			}
		}
		// What exists and is hidden reads as what does not exist.
		shape := func(name string) string {
			c := w.propose(w.alice, ses, "calendar", name, obj{"id": 1})
			return fmt.Sprint(c.GetDecision().GetDefinitionDigest(), c.GetDecision().GetChecks(), c.GetEffect(), c.GetError())
		}
		if hidden, none := shape(demo.SendInvitations), shape("no_such_tool"); hidden != none {
			t.Errorf("the answer tells that a hidden tool exists:\n%s\n%s", hidden, none)
		}
		// A consent from before the denial.
		saved := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("saved"))
		w.review(s, nil, toolRule{name: demo.GetAvailability, effect: "read"})
		if _, err := w.approver.DecideConsent(w.ctx, &pb.DecideConsentRequest{ConsentId: saved.GetConsent().GetConsentId(), Decision: pb.DecideConsentRequest_APPROVE}); err == nil {
			t.Error("a consent for a tool that is not allowed any more was approved")
		}
		wantState(t, w.ended(w.alice, saved), pb.Call_DENIED)
		if n := d.Arrivals(demo.SendInvitations) + d.Arrivals(demo.CreateDraftEvent); n != 0 {
			t.Errorf("%d calls arrived", n)
		}
		w.verified()
	})
}

// What no rule names is denied, so a misspelled rule allows nothing; a dry run
// shows that it matches nothing.
func TestFO097_ARuleThatNeverMatches(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		m, s := w.scripted(t, mcptest.Modern, `[{"name":"drop","inputSchema":{"type":"object"}}]`)
		w.review(s, nil)
		var rules []obj
		for _, n := range []string{"mcp__db__drop", "db.drop", "DROP", "comes_later"} {
			rules = append(rules, obj{"name": n, "definition": "any", "effect": "read"})
		}
		w.activate("scripted", &pb.CreateContractRequest{Server: "scripted", Source: &pb.CreateContractRequest_Contract{Contract: raw(obj{
			"server": "scripted", "transport": "http", "origin": s.GetOrigin(), "protocol": obj{"versions": []string{"2026-07-28"}}, "tools": rules})}})
		ses := w.session(w.alice)
		for _, r := range rules {
			got, err := w.admin.CheckContract(w.ctx, &pb.CheckContractRequest{Server: "scripted", Tool: r["name"].(string), Subject: &pb.CheckContractRequest_Subject{User: "alice"}})
			must(t, err)
			if got.GetDecision().GetFirstFailed() != "definition" || !strings.Contains(fmt.Sprint(got.GetDecision().GetChecks()), "does not offer") {
				t.Errorf("the dry run of %s: %v", r["name"], got.GetDecision())
			}
		}
		wantDenied(t, w.propose(w.alice, ses, "scripted", "drop", obj{}), "definition")
		m.On("tools/list", mcptest.Result(`{"resultType":"complete","tools":[{"name":"drop","inputSchema":{"type":"object"}},{"name":"comes_later","inputSchema":{"type":"object"}},{"name":"later_too","inputSchema":{"type":"object"}}]}`))
		w.definitions("scripted", true)
		w.until("the later tool is offered", func() bool {
			w.session(w.bob)
			return w.propose(w.bob, w.session(w.bob), "scripted", "comes_later", obj{}).GetState() == pb.Call_SUCCEEDED
		})
		wantDenied(t, w.propose(w.bob, w.session(w.bob), "scripted", "later_too", obj{}), "definition")
		if n := m.Count("tools/call"); n != 1 {
			t.Errorf("%d calls arrived, want 1", n)
		}
	})
}

// What a server says of its own tool grants nothing.
func TestFO098_SelfDeclaredReadOnlyGrantsNothing(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		m, s := w.scripted(t, mcptest.Modern, `[{"name":"delete_all","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true,"destructiveHint":false}},`+
			`{"name":"both","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true,"destructiveHint":true}}]`)
		w.review(s, nil, toolRule{name: "delete_all", effect: "destructive"}, toolRule{name: "both", effect: "write"})
		ses := w.session(w.alice)
		tools := w.tools(w.alice, ses)
		if tools["delete_all"].GetEffect() != pb.Tool_DESTRUCTIVE || tools["both"].GetEffect() != pb.Tool_WRITE {
			t.Errorf("effects %s, %s", tools["delete_all"].GetEffect(), tools["both"].GetEffect())
		}
		w.ask(w.alice, ses, "scripted", "delete_all", obj{})
		w.ask(w.alice, ses, "scripted", "both", obj{})
		if n := m.Count("tools/call"); n != 0 {
			t.Errorf("%d calls arrived", n)
		}
	})
}

// Every refusal has an entry that says who, what and why.
func TestFO106_RefusalsAreRecorded(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d := startDemo(t, demo.Options{})
		s := w.calendar(d)
		ses := w.session(w.alice)
		policy := w.propose(w.alice, ses, "calendar", demo.SendInvitations, obj{})
		schema := w.propose(w.alice, ses, "calendar", demo.CreateDraftEvent, obj{"title": 7})
		rule := w.propose(w.alice, ses, "calendar", demo.CreateDraftEvent, obj{"title": "x", "start": monday + "10:00:00Z", "end": monday + "11:00:00Z", "attendees": []string{}})
		refused := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("refused"))
		w.decide(refused, pb.DecideConsentRequest_DENY)
		cancelled := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("cancelled"))
		_, err := w.alice.CancelCall(w.ctx, &pb.CancelCallRequest{CallId: cancelled.GetCallId()})
		must(t, err)
		void := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("void"))
		_, err = w.alice.CloseSession(w.ctx, &pb.CloseSessionRequest{SessionId: ses})
		must(t, err)
		closed := w.propose(w.alice, ses, "calendar", demo.GetAvailability, week)

		for name, tt := range map[string]struct {
			call  *pb.Call
			kind  string
			words []string
		}{
			"policy":          {policy, "call.denied", []string{"definition"}},
			"schema":          {schema, "call.denied", []string{"arguments"}},
			"rule":            {rule, "call.denied", []string{"arguments"}},
			"refused":         {refused, "call.denied", []string{"REFUSED"}},
			"cancelled":       {cancelled, "call.cancelled", nil},
			"session ended":   {void, "call.denied", []string{"VOID"}},
			"session is over": {closed, "call.denied", []string{"host"}},
		} {
			found := false
			for _, e := range w.entries(&pb.ListAuditEntriesRequest{CallId: tt.call.GetCallId(), Kind: tt.kind}) {
				found = true
				details := string(e.GetDetails().GetRaw())
				for _, word := range append(tt.words, tt.call.GetArgumentsDigest()) {
					if !strings.Contains(details, word) {
						t.Errorf("%s: the details %s lack %s", name, details, word)
					}
				}
				if e.GetActor() == "" || e.GetSubject() != "default|alice" || e.GetServerId() != s.GetServerId() || e.GetSessionId() != ses {
					t.Errorf("%s: %v", name, e)
				}
			}
			if !found {
				t.Errorf("%s: no entry %s among %q", name, tt.kind, w.kindsOf(tt.call))
			}
		}
		w.verified()
	})
}

// An answer is not a success: each way to fail is told apart.
func TestFO107_TransportSuccessIsNotToolSuccess(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		_, s := w.scripted(t, mcptest.Modern, plainTool,
			mcptest.Status(http.StatusBadGateway, "text/html", "<h1>bad gateway</h1>"),
			mcptest.Error(-32000, "out of paper", `{"tray":2}`),
			mcptest.Result(`{"resultType":"complete","isError":true,"content":[{"type":"text","text":"no such order"}]}`))
		w.review(s, nil, toolRule{name: "act", effect: "read"})
		ses := w.session(w.alice)
		seen := map[string]bool{}
		for _, tt := range []struct {
			layer       pb.Call_Error_Layer
			has, result string
		}{
			{pb.Call_Error_SERVER, "502", ""}, {pb.Call_Error_PROTOCOL, "out of paper", ""}, {pb.Call_Error_TOOL, "", "no such order"},
		} {
			call := w.propose(w.alice, ses, "scripted", "act", obj{})
			wantState(t, call, pb.Call_FAILED)
			if call.GetError().GetLayer() != tt.layer || !strings.Contains(call.GetError().GetCode()+" "+call.GetError().GetMessage(), tt.has) ||
				!strings.Contains(string(call.GetResult().GetRaw()), tt.result) {
				t.Errorf("error %v, result %s, want layer %s", call.GetError(), call.GetResult().GetRaw(), tt.layer)
			}
			for _, e := range w.entries(&pb.ListAuditEntriesRequest{CallId: call.GetCallId(), Kind: "call.finished"}) {
				details := string(e.GetDetails().GetRaw())
				if !strings.Contains(details, tt.layer.String()) {
					t.Errorf("the entry %s does not tell the layer %s", details, tt.layer)
				}
				seen[tt.layer.String()] = true
			}
		}
		if len(seen) != 3 {
			t.Errorf("the audit tells apart %v", seen)
		}
	})
}

// No secret that travels in arguments, results, errors or addresses is in a log,
// a metric, the audit or the answer to a bad request.
func TestFO108_SecretsInLogsAndAudit(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		marks := map[string]string{}
		mark := func(where string) string {
			marks[where] = "hunter2" + strings.ReplaceAll(w.tenantID, "_", "") + where
			return marks[where]
		}
		m := mcptest.New(t, mcptest.Modern)
		m.On("tools/list", mcptest.Result(`{"resultType":"complete","tools":`+plainTool+`}`))
		m.On("tools/call",
			mcptest.Error(-32001, "client_secret="+mark("inAProvidersError")+" is wrong", `{"code":"`+mark("inErrorData")+`"}`),
			mcptest.Status(http.StatusInternalServerError, "text/plain", "panic: token "+mark("inAServersPage")),
			mcptest.Result(`{"resultType":"complete","content":[{"type":"text","text":"`+mark("inAResult")+`"}]}`))
		s := w.httpServer("scripted", m.URL+"?userToken="+mark("inAURL"))
		w.review(s, nil, toolRule{name: "act", effect: "read"})
		ses := w.session(w.alice)
		args := obj{"headers": obj{"Authorization": "Bearer " + mark("inAHeader")}, "text": "my token is " + mark("inFreeText"),
			"link": "https://example.com/f?sig=" + mark("inASignedURL"), mark("asAName"): 1}
		for range 3 {
			w.propose(w.alice, ses, "scripted", "act", args)
		}
		w.propose(w.alice, ses, "scripted", "hidden", args)
		_, err := w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "scripted", Tool: "act",
			Arguments: raw(`{"password":"` + mark("inABadRequest") + `","password":"\ud800"}`)})
		wantField(t, err, "arguments.password")
		if strings.Contains(err.Error(), marks["inABadRequest"]) {
			t.Errorf("the refusal repeats the value: %v", err)
		}
		if m.Count("tools/call") != 3 {
			t.Errorf("%d calls arrived, want 3", m.Count("tools/call"))
		}
		entries := fmt.Sprint(w.entries(&pb.ListAuditEntriesRequest{}))
		_, _, metrics, err := send(w.ctx, w.http, "GET", theService.Metrics+"/metrics", nil, nil)
		must(t, err)
		for where, secret := range marks {
			if theService.Logged(secret) {
				t.Errorf("the log holds the secret %s", where)
			}
			if strings.Contains(entries, secret) {
				t.Errorf("the audit holds the secret %s", where)
			}
			if strings.Contains(string(metrics), secret) {
				t.Errorf("the metrics hold the secret %s", where)
			}
		}
		for name, key := range map[string]string{"admin": w.adminKey, "service": w.serviceKey, "operator": theService.OperatorKey} {
			if theService.Logged(key) || strings.Contains(entries, key) {
				t.Errorf("the %s key is in the log or the audit", name)
			}
		}
		if !strings.Contains(string(metrics), w.tenantID) {
			t.Error("no metric of the tenant: nothing was looked at")
		}
	})
}
