package api

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const interactionOne = "int_00000000000000000000000001"

func (d fakeCalls) Interactions(ctx context.Context, p tenant.Principal, callID string) ([]calls.Interaction, error) {
	return []calls.Interaction{
		{ID: interactionOne, CallID: callID, Server: "calendar", Origin: "https://calendar.example", Round: 1, Kind: calls.ElicitationForm, State: calls.Pending,
			Request: json.RawMessage(`{"message":"Which?","requestedSchema":{"type":"object","properties":{"a":{"type":"string"}}}}`)},
		{ID: interactionOne, CallID: callID, Round: 1, Kind: calls.ElicitationURL, State: calls.Pending,
			Request: json.RawMessage(`{"mode":"url","message":"Go","url":"https://xn--pple-43d.example/x"}`)},
		{ID: interactionOne, CallID: callID, Round: 1, Kind: calls.ElicitationForm, State: calls.WasDeclined, Refusal: "ASKS_FOR_SECRET"},
	}, d.note(ctx, "Interactions %s", callID)
}
func (d fakeCalls) Respond(ctx context.Context, p tenant.Principal, callID, id string, a calls.Answer) (*calls.Interaction, error) {
	return &calls.Interaction{ID: id, CallID: callID, Kind: calls.ElicitationForm, State: calls.WasAnswered},
		d.note(ctx, "Respond %s %s %s %s%s", callID, id, a.Action, a.Content, a.Result)
}

func TestInteractions_ShowWhatMayBeShown(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a := r.rest("GET", "/v1/calls/"+callOne+"/interactions", "", append(jsonAs("service"), "Bulkhead-User", "alice")...)
	for _, want := range []string{`"form":{"requestedSchema":{"type":"object","properties":{"a":{"type":"string"}}}}`, `"message":"Which?"`, `"untrusted":true`,
		`"server":"calendar"`, `"link":{"url":"https://xn--pple-43d.example/x","host":"xn--pple-43d.example"}`, `"code":"PUNYCODE_HOST"`,
		`"state":"DECLINED","message":"","refusal":"ASKS_FOR_SECRET"`} {
		if !strings.Contains(string(a.body), want) {
			t.Errorf("no %s in %s", want, a.body)
		}
	}
}

func TestInteractions_AnswersReachTheDomainAsTheyCame(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	alice := append(jsonAs("service"), "Bulkhead-User", "alice")
	path := "/v1/calls/" + callOne + "/interactions/" + interactionOne + ":respond"
	for body, want := range map[string]string{
		`{"action":"ACCEPT","content":{"a": 1.0}}`: "Respond " + callOne + " " + interactionOne + ` ACCEPT {"a": 1.0}`,
		`{"action":"ACCEPT","result":{"b":[]}}`:    "Respond " + callOne + " " + interactionOne + ` ACCEPT {"b":[]}`,
		`{"action":"CANCEL"}`:                      "Respond " + callOne + " " + interactionOne + ` CANCEL `,
	} {
		r.taken()
		a := r.rest("POST", path, body, alice...)
		if got := r.taken(); a.code != 200 || len(got) == 0 || got[0] != want {
			t.Errorf("%s: %d, %q\n%s", body, a.code, got, a.body)
		}
	}
	for _, body := range []string{`{}`, `{"action":"ACTION_UNSPECIFIED"}`, `{"action":"YES"}`, `{"action":"ACCEPT","contents":{}}`} {
		r.taken()
		if a := r.rest("POST", path, body, alice...); a.code != 400 || len(r.taken()) != 0 {
			t.Errorf("%s: %d %s", body, a.code, a.body)
		}
	}
	for _, role := range []string{"admin", "approver", "auditor"} {
		if a := r.rest("POST", path, `{"action":"DECLINE"}`, jsonAs(role)...); a.code != 403 {
			t.Errorf("%s: %d %s", role, a.code, a.body)
		}
	}
}
