package e2e

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// everyMethod are the methods of a contract that allows all that a server has.
var everyMethod = []string{"tools/list", "tools/call", "resources/list", "resources/templates/list", "resources/read", "prompts/list",
	"prompts/get", "completion/complete"}

// allow reviews a contract for the tools as writes that need no consent, and opens
// a session.
func (r *realWorld) allow(more obj, tools ...string) (session string) {
	r.t.Helper()
	var rules []toolRule
	for _, name := range tools {
		rules = append(rules, toolRule{name: name, effect: "write", consent: "none"})
	}
	r.review(r.server, more, rules...)
	return r.session(r.alice, "real")
}

// start proposes a call that does not end by itself.
func (r *realWorld) start(session, tool string, args obj) *pb.Call {
	r.t.Helper()
	call, err := r.alice.CreateCall(r.ctx, &pb.CreateCallRequest{SessionId: session, Server: "real", Tool: tool, Arguments: raw(args),
		Wait: durationpb.New(0)})
	must(r.t, err)
	wantState(r.t, call, pb.Call_DISPATCHING)
	return call
}

// listed wants a session to show a resource, a template and a prompt; an empty one
// is not looked for.
func (r *realWorld) listed(t *testing.T, session, uri, template, prompt string) {
	t.Helper()
	resources, err := r.alice.ListResources(r.ctx, &pb.ListResourcesRequest{SessionId: session})
	must(t, err)
	templates, err := r.alice.ListResourceTemplates(r.ctx, &pb.ListResourceTemplatesRequest{SessionId: session})
	must(t, err)
	prompts, err := r.alice.ListPrompts(r.ctx, &pb.ListPromptsRequest{SessionId: session})
	must(t, err)
	for want, has := range map[string]bool{
		uri:      slices.ContainsFunc(resources.GetResources(), func(x *pb.Resource) bool { return x.GetUri() == uri }),
		template: slices.ContainsFunc(templates.GetResourceTemplates(), func(x *pb.ResourceTemplate) bool { return x.GetUriTemplate() == template }),
		prompt:   slices.ContainsFunc(prompts.GetPrompts(), func(x *pb.Prompt) bool { return x.GetName() == prompt }),
	} {
		if want != "" && !has {
			t.Errorf("%s is not among %v, %v, %v", want, resources, templates, prompts)
		}
	}
}

// read and prompt make a call of their kind and wait for it.
func (r *realWorld) read(session, uri string) *pb.Call {
	r.t.Helper()
	call, err := r.alice.CreateCall(r.ctx, &pb.CreateCallRequest{SessionId: session, Server: "real", Resource: uri, Wait: durationpb.New(patience / 2)})
	must(r.t, err)
	return call
}

func (r *realWorld) prompt(session, name string, args obj) *pb.Call {
	r.t.Helper()
	in := &pb.CreateCallRequest{SessionId: session, Server: "real", Prompt: name, Wait: durationpb.New(patience / 2)}
	if args != nil {
		in.Arguments = raw(args)
	}
	call, err := r.alice.CreateCall(r.ctx, in)
	must(r.t, err)
	return call
}

// completes wants these values to be suggested.
func (r *realWorld) completes(t *testing.T, in *pb.CreateCompletionRequest, want ...string) {
	t.Helper()
	got, err := r.alice.CreateCompletion(r.ctx, in)
	must(t, err)
	if !slices.Equal(got.GetValues(), want) || !got.GetSource().GetUntrusted() {
		t.Errorf("suggested is %v, want %q", got, want)
	}
}

// wantText wants a call of any kind to have succeeded with the text in its result.
func wantText(t *testing.T, c *pb.Call, text string) {
	t.Helper()
	wantState(t, c, pb.Call_SUCCEEDED)
	if !strings.Contains(string(c.GetResult().GetRaw()), text) {
		t.Errorf("%.400s does not contain %q", c.GetResult().GetRaw(), text)
	}
}

func everythingFeatures(sent func(*testing.T, *realWorld) string) map[string]func(*testing.T, *realWorld) {
	return map[string]func(*testing.T, *realWorld){
		"elicitation":               everythingElicitation,
		"sampling refused, allowed": everythingSampling,
		"roots refused, given":      everythingRoots,
		"call": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "get-sum", "echo", "get-tiny-image", "get-structured-content")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "get-sum", obj{"a": 40, "b": 2}), "42")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "echo", obj{"message": "grüße"}), "grüße")
			image := r.propose(r.alice, ses, "real", "get-tiny-image", obj{})
			wantState(t, image, pb.Call_SUCCEEDED)
			if !strings.Contains(string(image.GetResult().GetRaw()), `"mimeType":"image/png"`) {
				t.Errorf("the image: %.200s", image.GetResult().GetRaw())
			}
			weather := r.propose(r.alice, ses, "real", "get-structured-content", obj{"location": "Chicago"})
			wantState(t, weather, pb.Call_SUCCEEDED)
			if !strings.Contains(string(weather.GetResult().GetRaw()), `"structuredContent":{`) {
				t.Errorf("the weather: %s", weather.GetResult().GetRaw())
			}
		},
		"resources": func(t *testing.T, r *realWorld) {
			ses := r.allow(obj{"methods": everyMethod, "resources": []obj{{"uri": "demo://resource/dynamic/text/*"}, {"uri": "demo://resource/static/document/*"}}})
			r.listed(t, ses, "demo://resource/static/document/features.md", "demo://resource/dynamic/text/{resourceId}", "")
			wantText(t, r.read(ses, "demo://resource/static/document/features.md"), "Everything Server")
			wantText(t, r.read(ses, "demo://resource/dynamic/text/7"), "Resource 7")
			wantDenied(t, r.read(ses, "demo://resource/dynamic/blob/7"), "definition")
		},
		"completion": func(t *testing.T, r *realWorld) {
			ses := r.allow(obj{"methods": everyMethod, "prompts": []obj{{"name": "completable-prompt"}}})
			in := &pb.CreateCompletionRequest{SessionId: ses, Server: "real",
				Ref:      &pb.CreateCompletionRequest_Ref{Target: &pb.CreateCompletionRequest_Ref_Prompt{Prompt: "completable-prompt"}},
				Argument: &pb.CreateCompletionRequest_Argument{Name: "department", Value: "S"}}
			r.completes(t, in, "Sales", "Support")
			in.Argument, in.Context = &pb.CreateCompletionRequest_Argument{Name: "name", Value: "A"}, raw(obj{"department": "Engineering"})
			r.completes(t, in, "Alice")
		},
		"prompts": func(t *testing.T, r *realWorld) {
			ses := r.allow(obj{"methods": everyMethod, "prompts": []obj{{"name": "args-prompt"}, {"name": "simple-prompt"}}})
			r.listed(t, ses, "", "", "args-prompt")
			wantText(t, r.prompt(ses, "args-prompt", obj{"city": "Graz"}), "Graz")
			wantText(t, r.prompt(ses, "simple-prompt", nil), "simple prompt")
			wantDenied(t, r.prompt(ses, "args-prompt", obj{}), "arguments")
			wantDenied(t, r.prompt(ses, "completable-prompt", obj{"department": "Sales", "name": "x"}), "definition")
		},
		"cancel": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "trigger-long-running-operation")
			call := r.start(ses, "trigger-long-running-operation", obj{"duration": 60, "steps": 2})
			r.until("it was sent", func() bool { return strings.Contains(sent(t, r), `"trigger-long-running-operation"`) })
			ended, err := r.alice.CancelCall(r.ctx, &pb.CancelCallRequest{CallId: call.GetCallId()})
			must(t, err)
			wantState(t, r.ended(r.alice, ended), pb.Call_UNCERTAIN)
			r.until("the server is told", func() bool { return strings.Contains(sent(t, r), `"method":"notifications/cancelled"`) })
		},
	}
}

func modernFeatures(header string) map[string]func(*testing.T, *realWorld) {
	return map[string]func(*testing.T, *realWorld){
		"call": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "echo", "region", "fail")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "echo", obj{"message": "grüße"}), "grüße")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "region", obj{"region": "north"}), "north in the body, "+header+" in the header")
			failed := r.propose(r.alice, ses, "real", "fail", obj{})
			wantState(t, failed, pb.Call_FAILED)
			if failed.GetError().GetLayer() != pb.Call_Error_TOOL || !strings.Contains(string(failed.GetResult().GetRaw()), "it failed") {
				t.Errorf("the failure: %v", failed)
			}
		},
		"resources": func(t *testing.T, r *realWorld) {
			ses := r.allow(obj{"methods": everyMethod, "resources": []obj{{"uri": "note://book/*"}}}, "write-note")
			r.listed(t, ses, "note://book/one", "note://book/{name}", "")
			wantText(t, r.read(ses, "note://book/two"), "the second note")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "write-note", obj{"name": "two", "text": "another"}), "written")
			wantText(t, r.read(ses, "note://book/two"), "another")
			missing := r.read(ses, "note://book/three")
			wantState(t, missing, pb.Call_FAILED)
			if missing.GetError().GetLayer() != pb.Call_Error_PROTOCOL {
				t.Errorf("what is not there: %v", missing.GetError())
			}
		},
		"completion": func(t *testing.T, r *realWorld) {
			ses := r.allow(obj{"methods": everyMethod, "prompts": []obj{{"name": "summarize"}}, "resources": []obj{{"uri": "note://book/*"}}})
			r.completes(t, &pb.CreateCompletionRequest{SessionId: ses, Server: "real",
				Ref:      &pb.CreateCompletionRequest_Ref{Target: &pb.CreateCompletionRequest_Ref_Prompt{Prompt: "summarize"}},
				Argument: &pb.CreateCompletionRequest_Argument{Name: "tone", Value: "dr"}}, "dry", "droll")
			r.completes(t, &pb.CreateCompletionRequest{SessionId: ses, Server: "real",
				Ref:      &pb.CreateCompletionRequest_Ref{Target: &pb.CreateCompletionRequest_Ref_ResourceTemplate{ResourceTemplate: "note://book/{name}"}},
				Argument: &pb.CreateCompletionRequest_Argument{Name: "name", Value: "t"}}, "two")
		},
		"elicitation":               modernElicitation,
		"progress and log messages": modernNotices,
		"sampling refused, allowed": modernSampling,
		"roots refused, given":      modernRoots,
		"prompts": func(t *testing.T, r *realWorld) {
			ses := r.allow(obj{"methods": everyMethod, "prompts": []obj{{"name": "summarize"}}})
			r.listed(t, ses, "", "", "summarize")
			wantText(t, r.prompt(ses, "summarize", obj{"tone": "dry"}), "in a dry tone")
			wantDenied(t, r.prompt(ses, "summarize", obj{"tone": "dry", "more": "x"}), "arguments")
		},
		"cancel": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "hold", "counts")
			call := r.start(ses, "hold", obj{})
			counts := func(want string) func() bool {
				return func() bool {
					return strings.Contains(resultText(t, r.propose(r.alice, ses, "real", "counts", obj{})), want)
				}
			}
			r.until("the server holds the call", counts("1 held, 0 cancelled"))
			ended, err := r.alice.CancelCall(r.ctx, &pb.CancelCallRequest{CallId: call.GetCallId()})
			must(t, err)
			wantState(t, r.ended(r.alice, ended), pb.Call_UNCERTAIN)
			r.until("the server noticed", counts("1 held, 1 cancelled"))
		},
		"list changed": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "grow")
			r.until("the stream for changes is open", func() bool {
				res, err := r.alice.ListConnections(r.ctx, &pb.ListConnectionsRequest{SessionId: ses})
				must(t, err)
				return len(res.GetConnections()) == 1 && res.GetConnections()[0].GetWatching()
			})
			r.tools(r.alice, ses)
			wantSucceeded(t, r.propose(r.alice, ses, "real", "grow", obj{"name": "later"}), "grown")
			// The server lets its list be kept for ten minutes: only its notice makes the
			// next look a new one.
			r.until("the new tool is known", func() bool {
				r.tools(r.alice, ses)
				return r.definitions("real", false)["later"] != nil
			})
		},
	}
}

func filesystemCall(t *testing.T, r *realWorld) {
	dir := ownDir(t)
	write(t, dir, "note.txt", "kept below the root")
	ses := r.allow(nil, "read_text_file", "list_directory")
	wantSucceeded(t, r.propose(r.alice, ses, "real", "read_text_file", obj{"path": filepath.Join(dir, "note.txt")}), "kept below")
	wantSucceeded(t, r.propose(r.alice, ses, "real", "list_directory", obj{"path": dir}), "[FILE] note.txt")
	outside := r.propose(r.alice, ses, "real", "read_text_file", obj{"path": filepath.Join(theService.outside, "memory.jsonl")})
	wantState(t, outside, pb.Call_FAILED)
	if outside.GetError().GetLayer() != pb.Call_Error_TOOL || !strings.Contains(resultText(t, outside), "Access denied") {
		t.Errorf("outside of the root: %v", outside)
	}
}

func memoryCall(t *testing.T, r *realWorld) {
	ses := r.allow(nil, "create_entities", "search_nodes", "delete_entities")
	wantState(t, r.propose(r.alice, ses, "real", "create_entities",
		obj{"entities": []obj{{"name": "Bulkhead", "entityType": "host", "observations": []string{"keeps tenants apart"}}}}), pb.Call_SUCCEEDED)
	wantSucceeded(t, r.propose(r.alice, ses, "real", "search_nodes", obj{"query": "Bulkhead"}), "keeps tenants apart")
	wantState(t, r.propose(r.alice, ses, "real", "delete_entities", obj{"entityNames": []string{"Bulkhead"}}), pb.Call_SUCCEEDED)
	if found := r.propose(r.alice, ses, "real", "search_nodes", obj{"query": "Bulkhead"}); strings.Contains(resultText(t, found), "tenants") {
		t.Errorf("still there: %v", found)
	}
}

func thinkingCall(t *testing.T, r *realWorld) {
	ses := r.allow(nil, "sequentialthinking")
	for n := 1; n <= 2; n++ {
		call := r.propose(r.alice, ses, "real", "sequentialthinking", obj{"thought": "one thing after the other", "thoughtNumber": n,
			"totalThoughts": 2, "nextThoughtNeeded": n < 2})
		// The server counts the thoughts of its process, so the second finds the first.
		wantSucceeded(t, call, `"thoughtHistoryLength": `+string(rune('0'+n)))
	}
}
