package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// told is an endpoint of a tenant, and what it was told.
type told struct {
	*httptest.Server
	mu   sync.Mutex
	got  []string // type:state of each event
	raws map[string][]byte
}

func newTold(t *testing.T) *told {
	v := &told{raws: map[string][]byte{}}
	v.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		var p struct {
			Type string
			Data struct{ State, Name string }
		}
		if err := json.Unmarshal(body, &p); err != nil {
			t.Errorf("%v in %s", err, body)
		}
		v.mu.Lock()
		defer v.mu.Unlock()
		word := strings.Join([]string{p.Type, p.Data.State, p.Data.Name}, " ")
		v.got = append(v.got, word)
		v.raws[p.Type] = body
	}))
	t.Cleanup(v.Close)
	return v
}

func (v *told) has(words ...string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := "\n" + strings.Join(v.got, "\n") + "\n"
	for _, word := range words {
		if !strings.Contains(all, "\n"+word+"\n") {
			return false
		}
	}
	return true
}

// A tenant's endpoint is told of consents, ends of calls and changed definitions,
// each as its published schema says, and never of arguments or results; another
// tenant's endpoint is told nothing.
func TestWebhooks_TellWhatHappens(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d := startDemo(t, demo.Options{})
		w.calendar(d)
		v, stranger := newTold(t), newTold(t)
		other := newWorld(t, transports[0])
		all := []string{"consent.requested", "consent.decided", "call.finished", "call.uncertain", "definition.changed", "security.*"}
		e, err := w.admin.CreateWebhookEndpoint(w.ctx, &pb.CreateWebhookEndpointRequest{Url: v.URL + "/hook", EventTypes: all})
		must(t, err)
		if !strings.HasPrefix(e.GetSecret(), "whsec_") {
			t.Errorf("the secret is %q", e.GetSecret())
		}
		_, err = other.admin.CreateWebhookEndpoint(w.ctx, &pb.CreateWebhookEndpointRequest{Url: stranger.URL, EventTypes: all})
		must(t, err)

		ses := w.session(w.alice)
		w.ended(w.alice, w.propose(w.alice, ses, "calendar", "get_availability", obj{"from": monday + "08:00:00Z", "to": monday + "18:00:00Z"}))
		draft := func(title string) *pb.Call {
			return w.propose(w.alice, ses, "calendar", "create_draft_event", obj{"title": title, "start": monday + "10:00:00Z", "end": monday + "11:00:00Z"})
		}
		approved := draft("Zanzibar")
		w.decide(approved, pb.DecideConsentRequest_APPROVE)
		w.ended(w.alice, approved)
		denied := draft("No")
		w.decide(denied, pb.DecideConsentRequest_DENY)
		cancelled := draft("Never mind")
		_, err = w.alice.CancelCall(w.ctx, &pb.CancelCallRequest{CallId: cancelled.GetCallId()})
		must(t, err)
		w.until("all is told", func() bool {
			return v.has("call.finished SUCCEEDED get_availability", "consent.requested PENDING create_draft_event",
				"consent.decided APPROVED create_draft_event", "call.finished SUCCEEDED create_draft_event",
				"consent.decided DENIED create_draft_event", "call.finished DENIED create_draft_event",
				"consent.decided VOID create_draft_event", "call.finished CANCELLED create_draft_event")
		})
		v.mu.Lock()
		defer v.mu.Unlock()
		for typ, body := range v.raws {
			matches(t, typ, body)
			if bytes.Contains(body, []byte("Zanzibar")) || bytes.Contains(body, []byte(`"free"`)) {
				t.Errorf("%s holds arguments or a result: %s", typ, body)
			}
		}
		if len(stranger.got) != 0 {
			t.Errorf("another tenant was told %v", stranger.got)
		}
		list, err := w.admin.ListWebhookDeliveries(w.ctx, &pb.ListWebhookDeliveriesRequest{WebhookEndpointId: e.GetWebhookEndpointId(), PageSize: 2})
		must(t, err)
		if ds := list.GetWebhookDeliveries(); len(ds) != 2 || list.GetNextPageToken() == "" || ds[0].GetWebhookDeliveryId() < ds[1].GetWebhookDeliveryId() {
			t.Errorf("%v", list)
		}
	})
}

// matches holds a payload against the schema that is published for it.
func matches(t *testing.T, typ string, body []byte) {
	t.Helper()
	code, _, schema, err := send(t.Context(), http.DefaultClient, "GET", theService.URL+"/schemas/"+typ+".json", nil, nil)
	must(t, err)
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil || code != 200 {
		t.Fatalf("schema of %s: %d, %v", typ, code, err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	must(t, c.AddResource("mem:schema", doc))
	s, err := c.Compile("mem:schema")
	must(t, err)
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	must(t, err)
	if err := s.Validate(value); err != nil {
		t.Errorf("%s: %v\n%s", typ, err, body)
	}
}
