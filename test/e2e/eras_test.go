package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// metric returns the value of one series, "" when there is none.
func (w *world) metric(series string) string {
	w.t.Helper()
	_, _, body, err := send(w.ctx, w.http, "GET", theService.Metrics+"/metrics", nil, nil)
	must(w.t, err)
	for line := range strings.Lines(string(body)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), series+" "); ok {
			return value
		}
	}
	return ""
}

// A server that proved to be modern and comes back as a legacy one is refused, for
// every user and each time; the audit has one entry for it and the metric counts.
// The connection says why it failed.
func TestDowngradeIsRefusedAndRecorded(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		m, s := w.scripted(t, mcptest.Modern, plainTool)
		w.review(s, nil, toolRule{name: "act", effect: "read"})
		alices := w.session(w.alice)
		wantState(t, w.propose(w.alice, alices, "scripted", "act", obj{}), pb.Call_SUCCEEDED)
		w.until("the era is kept", func() bool {
			got, err := w.admin.GetServer(w.ctx, &pb.GetServerRequest{Server: "scripted"})
			return err == nil && got.GetEra() == pb.Server_MODERN && got.GetProtocolVersion() == "2026-07-28"
		})

		m.On("server/discover", mcptest.Error(-32601, "no such method", ""))
		m.On("initialize", mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}`))
		for _, u := range []*client{w.bob, w.user("carol"), w.bob} {
			ses := w.session(u)
			call, err := u.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "scripted", Tool: "act"})
			if err == nil {
				if call = w.ended(u, call); call.GetState() == pb.Call_SUCCEEDED {
					t.Error("the call went out")
				}
			}
			res, err := u.ListConnections(w.ctx, &pb.ListConnectionsRequest{SessionId: ses})
			must(t, err)
			if len(res.GetConnections()) == 0 {
				t.Fatal("the failed connection is not shown")
			}
			c := res.GetConnections()[0]
			if c.GetState() != pb.Connection_FAILED || !strings.Contains(c.GetReason(), "older protocol version") || c.GetAttempts() < 1 ||
				len(c.GetStages()) < 2 || c.GetStages()[0].GetState() != pb.Connection_IDENTIFIED {
				t.Errorf("%s", prototext.Format(c))
			}
		}
		if m.Count("initialize") != 0 {
			t.Error("the handshake was tried")
		}
		series := fmt.Sprintf(`bulkhead_security_events_total{event="downgrade_refused",server="scripted",tenant=%q}`, w.tenantID)
		if n := w.metric(series); n == "" || n == "0" || n == "1" {
			t.Errorf("counted %q times", n)
		}
		var entries []*pb.AuditEntry
		w.until("it is recorded", func() bool {
			entries = w.entries(&pb.ListAuditEntriesRequest{Kind: "security.downgrade_refused"})
			return len(entries) > 0
		})
		if len(entries) != 1 || !strings.Contains(string(entries[0].GetDetails().GetRaw()), `"newestVersion":"2026-07-28"`) {
			t.Errorf("%v", entries)
		}
		if !theService.Logged(`"event":"downgrade_refused"`) {
			t.Error("nothing was logged")
		}
		// A new address is a new server.
		url := m.URL + "?moved"
		_, err := w.admin.UpdateServer(w.ctx, &pb.UpdateServerRequest{Server: "scripted", Http: &pb.Server_Http{Url: url}})
		must(t, err)
		w.until("it may be legacy there", func() bool {
			call, err := w.bob.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: w.session(w.bob), Server: "scripted", Tool: "act"})
			return err == nil && call.GetState() == pb.Call_SUCCEEDED
		})
		w.verified()
	})
}

// A connection shows each stage with its time, and a server that is down shows why
// and when it is tried again.
func TestConnectionsShowTheirStages(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		m, s := w.scripted(t, mcptest.Legacy, plainTool)
		w.review(s, nil, toolRule{name: "act", effect: "read"})
		ses := w.session(w.alice)
		wantState(t, w.propose(w.alice, ses, "scripted", "act", obj{}), pb.Call_SUCCEEDED)
		show := func() *pb.Connection {
			res, err := w.alice.ListConnections(w.ctx, &pb.ListConnectionsRequest{SessionId: ses})
			must(t, err)
			return res.GetConnections()[0]
		}
		c := show()
		var stages []string
		for i, st := range c.GetStages() {
			stages = append(stages, st.GetState().String())
			if !st.GetTime().IsValid() || i > 0 && st.GetTook().AsDuration() < 0 {
				t.Errorf("%v", st)
			}
		}
		if got := strings.Join(stages, " "); got != "IDENTIFIED NEGOTIATED INITIALIZED CATALOGUED" || c.GetState() != pb.Connection_CATALOGUED ||
			c.GetEra() != pb.Server_LEGACY || c.GetProtocolVersion() != "2025-11-25" || c.GetAttempts() != 1 || c.GetNextTryTime() != nil {
			t.Errorf("%s: %s", got, prototext.Format(c))
		}
		// The server forgets the session and then is down.
		m.On("tools/call", mcptest.Status(404, "", ""))
		m.On("initialize", mcptest.WithHeader("Retry-After", "600", mcptest.Status(503, "", "")))
		call := w.propose(w.alice, ses, "scripted", "act", obj{})
		wantState(t, call, pb.Call_FAILED)
		if c = show(); c.GetState() != pb.Connection_FAILED || c.GetReason() == "" || c.GetNextTryTime().AsTime().Before(c.GetCreateTime().AsTime()) {
			t.Errorf("%s", prototext.Format(c))
		}
	})
}

// The caller's trace goes on into what the server gets, by REST as by gRPC, with a
// span of its own; baggage does not, and nothing of it is a header there. Neither
// is an idempotency key.
func TestTraceGoesOnToTheServer(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		const id = "4bf92f3577b34da6a3ce929d0e0e4736"
		m, s := w.scripted(t, mcptest.Modern, plainTool)
		w.review(s, nil, toolRule{name: "act", effect: "write", consent: "none", more: obj{"idempotency": obj{"meta": true}}})
		traced := w.user("alice", "traceparent", "00-"+id+"-00f067aa0ba902b7-01", "tracestate", "vendor=1", "baggage", "tenant=secret")
		call, err := traced.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: w.session(w.alice), Server: "scripted", Tool: "act",
			RequestId: "the-key-of-the-call", Wait: durationpb.New(patience / 3)})
		must(t, err)
		wantState(t, call, pb.Call_SUCCEEDED)
		if call.GetTraceId() != id {
			t.Errorf("the call's trace is %q", call.GetTraceId())
		}
		arrived := m.Seen("tools/call")[0]
		var params struct {
			Meta map[string]json.RawMessage `json:"_meta"`
		}
		must(t, json.Unmarshal(arrived.Params, &params))
		parent := string(params.Meta["traceparent"])
		if !strings.HasPrefix(parent, `"00-`+id+"-") || strings.Contains(parent, "00f067aa0ba902b7") || string(params.Meta["tracestate"]) != `"vendor=1"` || params.Meta["baggage"] != nil {
			t.Errorf("%s", arrived.Params)
		}
		var key string
		for name, v := range params.Meta {
			if string(v) == `"the-key-of-the-call"` {
				key = name
			}
		}
		header := fmt.Sprint(arrived.Header)
		for _, secret := range []string{"the-key-of-the-call", id, "vendor=1", "tenant=secret"} {
			if strings.Contains(header, secret) {
				t.Errorf("%s is in a header: %s", secret, header)
			}
		}
		if key == "" || strings.Contains(string(arrived.Body), "tenant=secret") {
			t.Errorf("%s", arrived.Body)
		}
		for _, e := range w.entries(&pb.ListAuditEntriesRequest{CallId: call.GetCallId()}) {
			if !strings.Contains(string(e.GetDetails().GetRaw()), `"traceId":"`+id+`"`) {
				t.Errorf("%s has %s", e.GetKind(), e.GetDetails().GetRaw())
			}
		}
		if !theService.Logged(`"trace":"` + id + `"`) {
			t.Error("no log line names the trace")
		}
		// What is no trace is none, and no error.
		bad := w.user("alice", "traceparent", "00-zz-yy-01")
		call, err = bad.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: w.session(w.alice), Server: "scripted", Tool: "act", Wait: durationpb.New(patience / 3)})
		must(t, err)
		if wantState(t, call, pb.Call_SUCCEEDED); call.GetTraceId() != "" {
			t.Errorf("the trace is %q", call.GetTraceId())
		}
	})
}
