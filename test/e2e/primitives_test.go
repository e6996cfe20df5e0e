package e2e

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// read proposes the read of a resource, get that of a prompt.
func (w *world) read(c *client, session, server, uri string) *pb.Call {
	w.t.Helper()
	call, err := c.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: session, Server: server, Resource: uri})
	must(w.t, err)
	return call
}

func (w *world) get(c *client, session, server, prompt string, args any) *pb.Call {
	w.t.Helper()
	in := &pb.CreateCallRequest{SessionId: session, Server: server, Prompt: prompt}
	if args != nil {
		in.Arguments = raw(args)
	}
	call, err := c.CreateCall(w.ctx, in)
	must(w.t, err)
	return call
}

// primitives is a contract for the resources and prompts of server-everything.
func (w *world) primitives(s *pb.Server) {
	w.t.Helper()
	all, err := w.admin.ListDefinitions(w.ctx, &pb.ListDefinitionsRequest{Server: s.GetName(), Kind: pb.Definition_PROMPT})
	must(w.t, err)
	digest := ""
	for _, d := range all.GetDefinitions() {
		if d.GetName() == "args-prompt" && d.GetKind() == pb.Definition_PROMPT {
			digest = d.GetDefinitionDigest()
		}
	}
	w.review(s, obj{
		"methods": []string{"tools/list", "tools/call", "resources/list", "resources/templates/list", "resources/read", "prompts/list", "prompts/get", "completion/complete", "resources/subscribe"},
		"resources": []obj{{"uri": "demo://resource/static/document/features.md", "consent": "call"},
			{"uri": "demo://resource/dynamic/blob/*", "subjects": obj{"groups": []string{"staff"}}}, {"uri": "demo://resource/dynamic/**"}},
		"prompts": []obj{{"name": "args-prompt", "definition": digest}, {"name": "completable-prompt"}, {"name": "gone"}},
	}, toolRule{name: "toggle-subscriber-updates", effect: "write", consent: "none"})
}

// TestPrimitives reads resources and gets prompts of a server that this project did
// not write: listed, called, denied and audited like tools, over both faces.
func TestPrimitives(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		s := w.stdioServer("real", "everything-wire")
		w.primitives(s)
		ses := w.session(w.alice, "real")

		res, err := w.alice.ListResources(w.ctx, &pb.ListResourcesRequest{SessionId: ses})
		must(t, err)
		if len(res.GetResources()) != 1 || res.GetResources()[0].GetUri() != "demo://resource/static/document/features.md" ||
			res.GetResources()[0].GetConsent() != pb.Tool_CALL || !res.GetResources()[0].GetSource().GetUntrusted() || res.GetRevision() == "" {
			t.Errorf("resources: %v", res)
		}
		templates, err := w.alice.ListResourceTemplates(w.ctx, &pb.ListResourceTemplatesRequest{SessionId: ses, Query: "text"})
		must(t, err)
		if len(templates.GetResourceTemplates()) != 1 || templates.GetResourceTemplates()[0].GetUriTemplate() != "demo://resource/dynamic/text/{resourceId}" {
			t.Errorf("templates: %v", templates)
		}
		prompts, err := w.alice.ListPrompts(w.ctx, &pb.ListPromptsRequest{SessionId: ses})
		must(t, err)
		var names []string
		for _, p := range prompts.GetPrompts() {
			names = append(names, p.GetName())
		}
		if slices.Sort(names); !slices.Equal(names, []string{"args-prompt", "completable-prompt"}) || len(prompts.GetFindings()) != 1 || prompts.GetFindings()[0].GetCode() != "PROMPT_NOT_OFFERED" {
			t.Errorf("prompts: %v", prompts)
		}

		text := w.read(w.alice, ses, "real", "demo://resource/dynamic/text/7")
		wantState(t, text, pb.Call_SUCCEEDED)
		if text.GetKind() != pb.Call_RESOURCE || text.GetSource().GetResource() != "demo://resource/dynamic/text/7" || text.GetSource().GetTool() != "" ||
			!text.GetSource().GetUntrusted() || !strings.Contains(string(text.GetResult().GetRaw()), "Resource 7: This is a plaintext resource") || text.GetReceipt() == "" {
			t.Errorf("the text: %v", text)
		}
		prompt := w.get(w.alice, ses, "real", "args-prompt", obj{"city": "Köln"})
		wantState(t, prompt, pb.Call_SUCCEEDED)
		if prompt.GetKind() != pb.Call_PROMPT || prompt.GetSource().GetPrompt() != "args-prompt" || prompt.GetSource().GetDefinitionDigest() == "" ||
			!strings.Contains(string(prompt.GetResult().GetRaw()), "What's weather in Köln?") {
			t.Errorf("the prompt: %v", prompt)
		}
		gone := w.read(w.alice, ses, "real", "demo://resource/dynamic/none/1")
		wantState(t, gone, pb.Call_FAILED)
		if e := gone.GetError(); e.GetLayer() != pb.Call_Error_PROTOCOL || e.GetCode() != "RESOURCE_NOT_FOUND" || !strings.Contains(string(e.GetData().GetRaw()), `"code":-32`) {
			t.Errorf("what is not there: %v", e)
		}

		asked := w.read(w.alice, ses, "real", "demo://resource/static/document/features.md")
		wantState(t, asked, pb.Call_CONSENT_REQUIRED)
		question, err := w.approver.GetConsent(w.ctx, &pb.GetConsentRequest{ConsentId: asked.GetConsent().GetConsentId()})
		must(t, err)
		if question.GetResource() != "demo://resource/static/document/features.md" || question.GetTool() != "" {
			t.Errorf("the question: %v", question)
		}
		w.decide(asked, pb.DecideConsentRequest_APPROVE)
		wantState(t, w.ended(w.alice, asked), pb.Call_SUCCEEDED)

		w.deniedPrimitives(ses)
		w.completions(ses)
		w.subscriptions(ses)

		list, err := w.alice.ListCalls(w.ctx, &pb.ListCallsRequest{SessionId: ses, Kind: pb.Call_PROMPT, State: pb.Call_SUCCEEDED})
		must(t, err)
		if len(list.GetCalls()) != 1 || list.GetCalls()[0].GetCallId() != prompt.GetCallId() {
			t.Errorf("prompts that succeeded: %v", list)
		}
		w.verified()
		entries := w.entries(&pb.ListAuditEntriesRequest{CallId: text.GetCallId()})
		if len(entries) == 0 || !strings.Contains(string(entries[len(entries)-1].GetDetails().GetRaw()), `"demo://resource/dynamic/text/7"`) {
			t.Errorf("the audit of the read: %v", entries)
		}
	})
}

// deniedPrimitives tries every door to what the contract does not have.
func (w *world) deniedPrimitives(ses string) {
	t := w.t
	for uri, check := range map[string]string{
		"demo://resource/static/document/architecture.md": "definition", // listed by the server, not in the contract
		"file:///etc/passwd":                              "definition",
		"demo://resource/dynamic/../static":               "definition",
		"demo://resource/dynamic/%2e%2e/x":                "definition",
		"args-prompt":                                     "definition",
		"demo://resource/dynamic/blob/1":                  "subject",
	} {
		wantDenied(t, w.read(w.alice, ses, "real", uri), check)
	}
	wantDenied(t, w.get(w.alice, ses, "real", "simple-prompt", nil), "definition")
	wantDenied(t, w.get(w.alice, ses, "real", "gone", nil), "definition")
	wantDenied(t, w.get(w.alice, ses, "real", "args-prompt", nil), "arguments")
	wantDenied(t, w.get(w.alice, ses, "real", "args-prompt", obj{"city": "x", "planet": "y"}), "arguments")
	wantDenied(t, w.get(w.alice, ses, "real", "args-prompt", obj{"city": 1}), "arguments")
	wantDenied(t, w.propose(w.alice, ses, "real", "args-prompt", obj{"city": "x"}), "definition")
	check, err := w.admin.CheckContract(w.ctx, &pb.CheckContractRequest{Server: "real", Resource: "file:///etc/passwd", Subject: &pb.CheckContractRequest_Subject{User: "alice"}})
	must(t, err)
	if check.GetDecision().GetFirstFailed() != "definition" {
		t.Errorf("the dry run: %v", check)
	}
	staff := w.user("alice", "Bulkhead-Groups", "staff")
	theirs := w.session(staff, "real")
	wantState(t, w.read(staff, theirs, "real", "demo://resource/dynamic/blob/1"), pb.Call_SUCCEEDED)
	for name, in := range map[string]*pb.CreateCallRequest{
		"resource": {SessionId: ses, Server: "real", Resource: "demo://resource/dynamic/text/1"},
		"prompt":   {SessionId: ses, Server: "real", Prompt: "args-prompt", Arguments: raw(obj{"city": "x"})},
	} {
		if _, err := w.bob.CreateCall(w.ctx, in); status.Code(err) != codes.NotFound {
			t.Errorf("another user's session, %s: %v", name, err)
		}
		other := newWorld(t, w.transport)
		if _, err := other.alice.CreateCall(w.ctx, in); status.Code(err) != codes.NotFound {
			t.Errorf("another tenant's session, %s: %v", name, err)
		}
	}
	if _, err := w.bob.ListPrompts(w.ctx, &pb.ListPromptsRequest{SessionId: ses}); status.Code(err) != codes.NotFound {
		t.Errorf("another user's prompts: %v", err)
	}
	_, err = w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "real", Prompt: "args-prompt", Resource: "demo://x"})
	wantField(t, err, "prompt")
	_, err = w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "real"})
	wantField(t, err, "tool")
}

// completions asks for values of arguments.
func (w *world) completions(ses string) {
	t := w.t
	ask := func(c *client, ref *pb.CreateCompletionRequest_Ref, name, value string, chosen any) (*pb.Completion, error) {
		in := &pb.CreateCompletionRequest{SessionId: ses, Server: "real", Ref: ref, Argument: &pb.CreateCompletionRequest_Argument{Name: name, Value: value}}
		if chosen != nil {
			in.Context = raw(chosen)
		}
		return c.CreateCompletion(w.ctx, in)
	}
	team := &pb.CreateCompletionRequest_Ref{Target: &pb.CreateCompletionRequest_Ref_Prompt{Prompt: "completable-prompt"}}
	got, err := ask(w.alice, team, "name", "D", obj{"department": "Sales"})
	must(t, err)
	if !slices.Equal(got.GetValues(), []string{"David"}) || !got.GetSource().GetUntrusted() {
		t.Errorf("names of the department: %v", got)
	}
	text := &pb.CreateCompletionRequest_Ref{Target: &pb.CreateCompletionRequest_Ref_ResourceTemplate{ResourceTemplate: "demo://resource/dynamic/text/{resourceId}"}}
	got, err = ask(w.alice, text, "resourceId", "12", nil)
	must(t, err)
	if !slices.Equal(got.GetValues(), []string{"12"}) {
		t.Errorf("ids: %v", got)
	}
	simple := &pb.CreateCompletionRequest_Ref{Target: &pb.CreateCompletionRequest_Ref_Prompt{Prompt: "resource-prompt"}}
	if _, err := ask(w.alice, simple, "resourceType", "", nil); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a prompt that the contract does not have: %v", err)
	}
	if _, err := ask(w.bob, team, "name", "D", nil); status.Code(err) != codes.NotFound {
		t.Errorf("another user's session: %v", err)
	}
}

// subscriptions has the session hear of a resource that its server says changes.
func (w *world) subscriptions(ses string) {
	t := w.t
	const uri = "demo://resource/dynamic/text/1"
	made, err := w.alice.CreateResourceSubscription(w.ctx, &pb.CreateResourceSubscriptionRequest{SessionId: ses, Server: "real", Uri: uri})
	must(t, err)
	if made.GetState() != pb.ResourceSubscription_ACTIVE || made.GetUri() != uri || made.GetUpdates() != 0 {
		t.Errorf("the subscription: %v", made)
	}
	_, err = w.alice.CreateResourceSubscription(w.ctx, &pb.CreateResourceSubscriptionRequest{SessionId: ses, Server: "real", Uri: "demo://resource/static/document/architecture.md"})
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("a resource that the contract does not have: %v", err)
	}
	list := func(c *client) ([]*pb.ResourceSubscription, error) {
		res, err := c.ListResourceSubscriptions(w.ctx, &pb.ListResourceSubscriptionsRequest{SessionId: ses})
		return res.GetResourceSubscriptions(), err
	}
	if _, err := list(w.bob); status.Code(err) != codes.NotFound {
		t.Errorf("another user's subscriptions: %v", err)
	}
	wantState(t, w.propose(w.alice, ses, "real", "toggle-subscriber-updates", obj{}), pb.Call_SUCCEEDED)
	w.until("the update is told", func() bool {
		all, err := list(w.alice)
		must(t, err)
		return len(all) == 1 && all[0].GetUpdates() > 0 && all[0].GetLastUpdateTime() != nil
	})
	_, err = w.alice.DeleteResourceSubscription(w.ctx, &pb.DeleteResourceSubscriptionRequest{SessionId: ses, SubscriptionId: made.GetSubscriptionId()})
	must(t, err)
	if all, err := list(w.alice); err != nil || len(all) > 0 {
		t.Errorf("after its end: %v, %v", all, err)
	}
}
