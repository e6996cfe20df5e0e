package api

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

const (
	endpointOne = "whe_00000000000000000000000001"
	deliveryOne = "whd_00000000000000000000000001"
)

type fakeWebhooks struct{ *fakeDomain }

func (d fakeWebhooks) endpoint() webhooks.Endpoint {
	return webhooks.Endpoint{ID: endpointOne, EndpointSpec: webhooks.EndpointSpec{URL: "https://x.example/", EventTypes: []string{"security.*"}},
		State: webhooks.Disabled, DisabledReason: "GONE", FailingError: webhooks.TimedOut, FailingSince: ptr(time.Unix(1, 0))}
}
func (d fakeWebhooks) CreateEndpoint(ctx context.Context, p tenant.Principal, spec webhooks.EndpointSpec, requestID string) (webhooks.NewEndpoint, error) {
	return webhooks.NewEndpoint{Endpoint: d.endpoint(), Secret: "whsec_x"}, d.note(ctx, "CreateEndpoint %+v", spec)
}
func (d fakeWebhooks) GetEndpoint(ctx context.Context, p tenant.Principal, id string) (webhooks.Endpoint, error) {
	return d.endpoint(), d.note(ctx, "GetEndpoint %s", id)
}
func (d fakeWebhooks) ListEndpoints(ctx context.Context, p tenant.Principal, after string, limit int) ([]webhooks.Endpoint, error) {
	return []webhooks.Endpoint{d.endpoint()}, d.note(ctx, "ListEndpoints %q %d", after, limit)
}
func (d fakeWebhooks) UpdateEndpoint(ctx context.Context, p tenant.Principal, id string, up webhooks.EndpointUpdate) (webhooks.Endpoint, error) {
	text, _ := json.Marshal(up)
	return d.endpoint(), d.note(ctx, "UpdateEndpoint %s %s", id, text)
}
func (d fakeWebhooks) DeleteEndpoint(ctx context.Context, p tenant.Principal, id string) error {
	return d.note(ctx, "DeleteEndpoint %s", id)
}
func (d fakeWebhooks) RotateSecret(ctx context.Context, p tenant.Principal, id string, overlap *time.Duration, requestID string) (webhooks.NewEndpoint, error) {
	if overlap == nil {
		return webhooks.NewEndpoint{}, d.note(ctx, "RotateSecret %s", id)
	}
	return webhooks.NewEndpoint{}, d.note(ctx, "RotateSecret %s %v", id, *overlap)
}
func (d fakeWebhooks) TestEndpoint(ctx context.Context, p tenant.Principal, endpointID string) (webhooks.Delivery, error) {
	return webhooks.Delivery{ID: deliveryOne}, d.note(ctx, "TestEndpoint %s", endpointID)
}
func (d fakeWebhooks) ListDeliveries(ctx context.Context, p tenant.Principal, endpointID string, f webhooks.DeliveryFilter) ([]webhooks.Delivery, error) {
	return []webhooks.Delivery{{ID: deliveryOne, EndpointID: endpointOne, EventType: webhooks.CallFinished, State: webhooks.Pending, Error: webhooks.BadStatus,
			Attempts: []webhooks.Attempt{{Number: 1, Status: 500, Error: webhooks.BadStatus, Duration: 20 * time.Millisecond, Time: time.Unix(1, 0)}}}},
		d.note(ctx, "ListDeliveries %s %+v", endpointID, f)
}
func (d fakeWebhooks) Redeliver(ctx context.Context, p tenant.Principal, endpointID, deliveryID string) (webhooks.Delivery, error) {
	return webhooks.Delivery{ID: deliveryOne}, d.note(ctx, "Redeliver %s %s", endpointID, deliveryID)
}

func TestWebhooks_RESTReachesTheService(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	one := "/v1/webhookEndpoints/" + endpointOne
	for _, c := range []struct{ method, path, body, call, shows string }{
		{"POST", "/v1/webhookEndpoints", `{"url":"https://x.example/","eventTypes":["call.finished"]}`,
			"CreateEndpoint {DisplayName: URL:https://x.example/ EventTypes:[call.finished]}", `"secret":"whsec_x"`},
		{"GET", "/v1/webhookEndpoints?pageSize=3", "", `ListEndpoints "" 4`, `"disabledReason":"GONE"`},
		{"GET", one, "", "GetEndpoint " + endpointOne, `"failingError":"TIMEOUT"`},
		{"PATCH", one, `{"state":"ACTIVE"}`, "UpdateEndpoint " + endpointOne + ` {"DisplayName":null,"URL":null,"EventTypes":null,"State":"ACTIVE"}`, ""},
		{"PATCH", one, `{"updateMask":"displayName"}`, "UpdateEndpoint " + endpointOne + ` {"DisplayName":"","URL":null,"EventTypes":null,"State":null}`, ""},
		{"DELETE", one, "", "DeleteEndpoint " + endpointOne, ""},
		{"POST", one + ":rotateSecret", `{}`, "RotateSecret " + endpointOne, `"requestId"`},
		{"POST", one + ":rotateSecret", `{"overlap":"0s"}`, "RotateSecret " + endpointOne + " 0s", ""},
		{"POST", one + ":test", `{}`, "TestEndpoint " + endpointOne, deliveryOne},
		{"GET", one + "/deliveries?state=PENDING", "", "ListDeliveries " + endpointOne + " {State:PENDING Before: Limit:51}", `"status":500,"error":"STATUS","duration":"0.020s"`},
		{"POST", one + "/deliveries/" + deliveryOne + ":redeliver", `{}`, "Redeliver " + endpointOne + " " + deliveryOne, ""},
	} {
		a := r.rest(c.method, c.path, c.body, jsonAs("admin")...)
		if got := strings.Join(r.taken(), ";"); a.code != 200 || got != c.call || !strings.Contains(string(a.body), c.shows) {
			t.Errorf("%s %s: %d %s\n called %s\n wanted %s", c.method, c.path, a.code, a.body, got, c.call)
		}
		if a := r.rest(c.method, c.path, c.body, jsonAs("service")...); a.reason() != "ROLE_NOT_ALLOWED" {
			t.Errorf("%s %s as service: %d %s", c.method, c.path, a.code, a.body)
		}
	}
	for body, field := range map[string]string{
		`{"url":"https://x.example/"}`:                           "eventTypes",
		`{"eventTypes":["call.finished"]}`:                       "url",
		`{"url":"https://x","eventTypes":["a","a"]}`:             "eventTypes",
		`{"url":"https://x","eventTypes":["a"],"requestId":"é"}`: "requestId",
	} {
		if a := r.rest("POST", "/v1/webhookEndpoints", body, jsonAs("admin")...); a.code != 400 || !strings.HasPrefix(a.field(), field) {
			t.Errorf("%s: %d %s", body, a.code, a.body)
		}
	}
	for body, field := range map[string]string{
		`{"updateMask":"url"}`:                           "url",
		`{"url":"https://x","updateMask":"displayName"}`: "url",
		`{"updateMask":"secret"}`:                        "updateMask",
		`{"state":"STATE_UNSPECIFIED"}`:                  "state",
	} {
		if a := r.rest("PATCH", one, body, jsonAs("admin")...); a.code != 400 || !strings.HasPrefix(a.field(), field) {
			t.Errorf("%s: %d %s", body, a.code, a.body)
		}
	}
	if a := r.rest("POST", one+":rotateSecret", `{"overlap":"604801s"}`, jsonAs("admin")...); a.code != 400 || !strings.HasPrefix(a.field(), "overlap") {
		t.Errorf("%d %s", a.code, a.body)
	}
}

func TestWebhooks_SchemasArePublic(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if a := r.rest("GET", "/schemas/call.finished.json", ""); a.code != 200 || !json.Valid(a.body) || !strings.Contains(string(a.body), `"call.finished"`) {
		t.Errorf("%d %s", a.code, a.body)
	}
	for _, path := range []string{"/schemas/", "/schemas/nothing.json", "/schemas/..%2fschema.go", "/schemas/x/y"} {
		if a := r.rest("GET", path, ""); a.code != 404 {
			t.Errorf("%s: %d", path, a.code)
		}
	}
	if a := r.rest("POST", "/schemas/call.finished.json", "{}"); a.code != 405 {
		t.Errorf("%d", a.code)
	}
}
