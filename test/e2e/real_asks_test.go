package e2e

import (
	"strings"
	"testing"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// asked proposes a call of which the server wants to know something first, and
// returns the question.
func (r *realWorld) asked(session, tool string, kind pb.Interaction_Kind) (*pb.Call, *pb.Interaction) {
	r.t.Helper()
	call := r.propose(r.alice, session, "real", tool, obj{})
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
	call, q := r.asked(ses, "order", pb.Interaction_ELICITATION_FORM)
	if q.GetMessage() != "Which size?" || !strings.Contains(string(q.GetForm().GetRequestedSchema().GetRaw()), `"enum":["S","M","L"]`) {
		t.Errorf("the form: %v", q)
	}
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_ACCEPT, Content: raw(obj{"size": "L"})}),
		"size L; state: state of order")

	call, q = r.asked(ses, "order", pb.Interaction_ELICITATION_FORM)
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_ACCEPT, Content: raw(obj{})}), "size M")

	call, q = r.asked(ses, "order", pb.Interaction_ELICITATION_FORM)
	wantText(t, r.respond(call, q, &pb.RespondInteractionRequest{Action: pb.RespondInteractionRequest_DECLINE}), "decline; state: state of order")

	call, _ = r.asked(ses, "order", pb.Interaction_ELICITATION_FORM)
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
	call, q := r.asked(ses, "sample", pb.Interaction_SAMPLING)
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
