package e2e

import (
	"strings"
	"testing"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// asked proposes a call of which the server wants to know something first, and
// returns the question.
func (r *realWorld) asked(session, tool string, args obj, kind pb.Interaction_Kind) (*pb.Call, *pb.Interaction) {
	r.t.Helper()
	call := r.propose(r.alice, session, "real", tool, args)
	wantState(r.t, call, pb.Call_INPUT_REQUIRED)
	if len(call.GetInteractions()) != 1 {
		r.t.Fatalf("%d questions: %v", len(call.GetInteractions()), call)
	}
	q := call.GetInteractions()[0]
	if q.GetKind() != kind || q.GetState() != pb.Interaction_PENDING || q.GetServer() != "real" || !q.GetUntrusted() || q.GetRefusal() != "" {
		r.t.Fatalf("the question: %v", q)
	}
	return call, q
}

// respond answers a question and returns how the call ended.
func (r *realWorld) respond(call *pb.Call, q *pb.Interaction, in *pb.RespondInteractionRequest) *pb.Call {
	r.t.Helper()
	in.CallId, in.InteractionId = call.GetCallId(), q.GetInteractionId()
	_, err := r.alice.RespondInteraction(r.ctx, in)
	must(r.t, err)
	return r.ended(r.alice, call)
}

func modernElicitation(t *testing.T, r *realWorld) {
	ses := r.allow(obj{"reverse": obj{"elicitation": obj{"form": true}}}, "order")
	call, q := r.asked(ses, "order", obj{}, pb.Interaction_ELICITATION_FORM)
	if q.GetMessage() != "Which size?" || !strings.Contains(string(q.GetForm().GetRequestedSchema().GetRaw()), `"enum":["S","M","L"]`) {
		t.Errorf("the form: %v", q)
	}
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_ACCEPT, Content: raw(obj{"size": "L"})}),
		"size L; state: state of order")

	call, q = r.asked(ses, "order", obj{}, pb.Interaction_ELICITATION_FORM)
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_ACCEPT, Content: raw(obj{})}), "size M")

	call, q = r.asked(ses, "order", obj{}, pb.Interaction_ELICITATION_FORM)
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_DECLINE}), "decline; state: state of order")

	call, _ = r.asked(ses, "order", obj{}, pb.Interaction_ELICITATION_FORM)
	r.expire(call)
	// It was a write and the server has begun, so nobody knows.
	wantState(t, r.ended(r.alice, call), pb.Call_UNCERTAIN)

	ses = r.allow(nil, "order")
	refused := r.propose(r.alice, ses, "real", "order", obj{})
	if !final(refused) || refused.GetState() == pb.Call_SUCCEEDED || len(refused.GetInteractions()) > 0 {
		t.Errorf("asked for without being declared: %v", refused)
	}
}

// expire lets the time of a call's questions be over.
func (r *realWorld) expire(call *pb.Call) {
	r.t.Helper()
	pool := theService.DB.Owner(r.t)
	for _, table := range []string{"call_inputs", "interactions"} {
		_, err := pool.Exec(r.ctx, "UPDATE "+table+" SET expire_time = clock_timestamp() WHERE call_id = $1", call.GetCallId())
		must(r.t, err)
	}
}

func modernSampling(t *testing.T, r *realWorld) {
	ses := r.allow(nil, "sample")
	refused := r.propose(r.alice, ses, "real", "sample", obj{})
	if !final(refused) || refused.GetState() == pb.Call_SUCCEEDED || len(refused.GetInteractions()) > 0 {
		t.Errorf("sampling without a contract for it: %v", refused)
	}
	ses = r.allow(obj{"reverse": obj{"sampling": true}}, "sample")
	call, q := r.asked(ses, "sample", obj{}, pb.Interaction_SAMPLING)
	if !strings.Contains(string(q.GetSampling().GetRaw()), "Say hello") {
		t.Errorf("what the model is asked: %v", q)
	}
	answer := obj{"role": "assistant", "model": "some-model", "stopReason": "endTurn", "content": obj{"type": "text", "text": "hello"}}
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_ACCEPT, Result: raw(answer)}),
		"the model said hello")
}

func modernRoots(t *testing.T, r *realWorld) {
	ses := r.allow(nil, "where")
	refused := r.propose(r.alice, ses, "real", "where", obj{})
	if !final(refused) || refused.GetState() == pb.Call_SUCCEEDED {
		t.Errorf("roots without a contract for them: %v", refused)
	}
	ses = r.allow(obj{"reverse": obj{"roots": []string{"file:///srv/shared"}}}, "where")
	wantText(t, r.propose(r.alice, ses, "real", "where", obj{}), "roots file:///srv/shared")
}

// allowAsking is allow for a tool of a legacy server that exists only for clients
// which declare what it asks for. An admin's look declares nothing and does not
// show it, so nothing can be pinned.
func (r *realWorld) allowAsking(reverse obj, tool string) (session string) {
	r.t.Helper()
	r.review(r.server, obj{"reverse": reverse}, toolRule{name: tool, effect: "write", consent: "none", more: obj{"definition": "any"}})
	return r.session(r.alice, "real")
}

// appears waits for a tool that the server adds after the handshake, which only
// its notice of a changed list tells.
func (r *realWorld) appears(session, tool string) {
	r.t.Helper()
	r.until(tool+" is offered", func() bool { return r.tools(r.alice, session)[tool] != nil })
}

func everythingElicitation(t *testing.T, r *realWorld) {
	const tool = "trigger-elicitation-request"
	ses := r.allowAsking(obj{"elicitation": obj{"form": true}}, tool)
	r.appears(ses, tool)
	call, q := r.asked(ses, tool, obj{}, pb.Interaction_ELICITATION_FORM)
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_ACCEPT, Content: raw(obj{"name": "Ada"})}),
		`- Name: Ada\n- Favorite Integer: 42\n- Favorite Number: 3.14`)

	call, q = r.asked(ses, tool, obj{}, pb.Interaction_ELICITATION_FORM)
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_DECLINE}), "User declined")

	call, q = r.asked(ses, tool, obj{}, pb.Interaction_ELICITATION_FORM)
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_CANCEL}), "User cancelled")

	call, _ = r.asked(ses, tool, obj{}, pb.Interaction_ELICITATION_FORM)
	r.expire(call)
	// What is not answered in time is told the server as dismissed; the call runs on.
	wantText(t, r.ended(r.alice, call), "User cancelled")

	r.notOffered(t, tool)
}

// notOffered wants a tool not to be there for a client that declares nothing.
func (r *realWorld) notOffered(t *testing.T, tool string) {
	t.Helper()
	ses := r.allowAsking(obj{}, tool)
	r.until(tool+" is offered no more", func() bool { return r.tools(r.alice, ses)[tool] == nil })
	wantDenied(t, r.propose(r.alice, ses, "real", tool, obj{"prompt": "Say hello"}), "definition")
}

func everythingSampling(t *testing.T, r *realWorld) {
	const tool = "trigger-sampling-request"
	ses := r.allowAsking(obj{"sampling": true}, tool)
	r.appears(ses, tool)
	call, q := r.asked(ses, tool, obj{"prompt": "Say hello"}, pb.Interaction_SAMPLING)
	answer := obj{"role": "assistant", "model": "some-model", "stopReason": "endTurn", "content": obj{"type": "text", "text": "hello"}}
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_ACCEPT, Result: raw(answer)}), "some-model")

	call, q = r.asked(ses, tool, obj{"prompt": "Say hello"}, pb.Interaction_SAMPLING)
	refused := r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_DECLINE})
	wantState(t, refused, pb.Call_FAILED)
	if refused.GetError().GetLayer() != pb.Call_Error_TOOL {
		t.Errorf("the model was refused: %v", refused)
	}
	r.notOffered(t, tool)
}

func everythingRoots(t *testing.T, r *realWorld) {
	const tool = "get-roots-list"
	ses := r.allowAsking(obj{"roots": []string{"file:///srv/shared"}}, tool)
	r.appears(ses, tool)
	wantText(t, r.propose(r.alice, ses, "real", tool, obj{}), "URI: file:///srv/shared")
	r.notOffered(t, tool)
}

// modernNotices wants the newest progress and the log messages of a call to be
// shown with it while it runs, the latter from the contract's level on.
func modernNotices(t *testing.T, r *realWorld) {
	for level, wanted := range map[string]bool{"info": true, "error": false} {
		ses := r.allow(obj{"reverse": obj{"logging": level}}, "hold", "release")
		call := r.start(ses, "hold", obj{})
		r.until("the newest progress is shown", func() bool {
			var err error
			call, err = r.alice.GetCall(r.ctx, &pb.GetCallRequest{CallId: call.GetCallId()})
			must(t, err)
			return call.GetProgress().GetMessage() == "step 2" && (!wanted || len(call.GetLogs()) > 0)
		})
		if p := call.GetProgress(); string(p.GetProgress().GetRaw()) != "2" || string(p.GetTotal().GetRaw()) != "3" {
			t.Errorf("the progress: %v", p)
		}
		if wanted && !strings.Contains(string(call.GetLogs()[0].GetData().GetRaw()), "holding") || !wanted && len(call.GetLogs()) > 0 {
			t.Errorf("asked for %s: %v", level, call.GetLogs())
		}
		wantSucceeded(t, r.propose(r.alice, ses, "real", "release", obj{}), "done")
		wantText(t, r.ended(r.alice, call), "released")
	}
}
