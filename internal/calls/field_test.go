package calls

import (
	"encoding/json"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

func TestFO090_NoTransparentRetryOfAWrite(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	w.sender.answer(broke)
	c := sc.propose("write")
	if c.State != Uncertain || w.sender.count("write") != 1 {
		t.Fatalf("cut after it was executed: %s after %d sends", c.State, w.sender.count("write"))
	}
	// Nothing sends it again later, at whatever replica.
	other := w.node(quick())
	w.exec(`UPDATE calls SET resolve_after = now(), update_time = now() - interval '1 hour'`)
	sc.sweep(t)
	other.sweep(t)
	if w.sender.count("write") != 1 || sc.get(c.ID).State != Uncertain {
		t.Fatalf("%d sends, %s", w.sender.count("write"), sc.get(c.ID).State)
	}
	w.sender.answer(rpcError)
	c = sc.propose("write", func(r *Proposal) { r.Arguments = []byte(`{"second":1}`) })
	if c.State != Failed || c.Error.Layer != LayerProtocol || c.Error.Code != "-32602" || w.sender.count("write") != 2 {
		t.Fatalf("invalid params: %s %+v after %d sends", c.State, c.Error, w.sender.count("write"))
	}
}

func TestFO106_RefusalsAreRecorded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	denied := sc.propose("erase")
	refused, expired, cancelled, void := sc.propose("write_call"), sc.propose("write_call"), sc.propose("write_call"), sc.propose("destroy")
	sc.decide(refused, false)
	w.exec(`UPDATE consents SET expire_time = now() - interval '1 second' WHERE consent_id = $1`, expired.ConsentID)
	sc.sweep(t)
	if _, err := sc.Cancel(t.Context(), sc.alice, cancelled.ID); err != nil {
		t.Fatal(err)
	}
	sc.change("destroy", "second")
	for _, c := range []struct {
		call   *Call
		kind   string
		reason string
	}{{denied, audit.CallDenied, ""}, {refused, audit.CallDenied, "REFUSED"}, {expired, audit.CallDenied, "EXPIRED"},
		{cancelled, audit.CallCancelled, ""}, {void, audit.CallDenied, "VOID"}} {
		rs, _, err := w.audit.List(t.Context(), sc.alice.Tenant, audit.Filter{CallID: c.call.ID, Kind: c.kind})
		if err != nil || len(rs) != 1 {
			t.Fatalf("%s: %d entries, %v", c.call.Name, len(rs), err)
		}
		e := rs[0]
		var d struct{ Server, Name, ArgumentsDigest, DefinitionDigest, Reason, FirstFailed string }
		if err := json.Unmarshal(e.Details, &d); err != nil {
			t.Fatal(err)
		}
		if e.Actor == "" || e.Subject != sc.alice.Subject || e.ServerID != sc.server.ID || e.SessionID != sc.session.ID || d.Server != "calendar" ||
			d.Name != c.call.Name || d.ArgumentsDigest != c.call.ArgumentsDigest || d.DefinitionDigest != c.call.DefinitionDigest || d.Reason != c.reason {
			t.Errorf("%s: %+v %+v", c.call.Name, e, d)
		}
		if got := sc.get(c.call.ID); got.Receipt != e.ID {
			t.Errorf("the receipt is %s, the entry %s", got.Receipt, e.ID)
		}
	}
}

func TestFO107_ThreeOutcomesThatATransportCallsSuccess(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	seen := map[string]bool{}
	for _, script := range []func(ctx, sent, int) (response, error){status(502), rpcError, func(ctx, sent, int) (response, error) {
		return answered(`{"isError":true,"content":[]}`)
	}, func(ctx, sent, int) (response, error) {
		return sessions.Response{Phase: sessions.NotSent}, fault.New(fault.Denied, "BLOCKED", "no").In(fault.Host)
	}} {
		w.sender.answer(script)
		c := sc.propose("read")
		if c.State != Failed || c.Error == nil || seen[string(c.Error.Layer)] {
			t.Errorf("%s %+v", c.State, c.Error)
			continue
		}
		seen[string(c.Error.Layer)] = true
		rs, _, err := w.audit.List(t.Context(), sc.alice.Tenant, audit.Filter{CallID: c.ID})
		if err != nil || len(rs) != 1 {
			t.Fatalf("%d entries, %v", len(rs), err)
		}
		var d struct{ Layer, Code string }
		if err := json.Unmarshal(rs[0].Details, &d); err != nil || d.Layer != string(c.Error.Layer) || d.Code != c.Error.Code {
			t.Errorf("audit %+v, call %+v, %v", d, c.Error, err)
		}
	}
}
