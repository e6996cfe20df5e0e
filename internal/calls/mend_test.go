package calls

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func lost() (sessions.Response, error) {
	return sessions.Response{Phase: sessions.Answered, HTTPStatus: 404},
		fault.New(fault.Unavailable, sessions.SessionLost, "the server forgot the session; the request was not carried out").In(fault.Protocol)
}

func doubted() (sessions.Response, error) {
	return sessions.Response{Phase: sessions.Answered, HTTPStatus: 400, Doubted: true, Error: &sessions.RPCError{Code: -32000, Message: "Server not initialized"}}, nil
}

// A server that forgot the session, or that speaks another era than it did,
// carried nothing out: a read is tried once more, a write is the caller's to
// repeat, and one with a key that the contract trusts is repeated in its budget.
func TestRefusedUnexecuted_ReadsGoOnAndWritesEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for name, refusal := range map[string]func() (sessions.Response, error){"session lost": lost, "doubted": doubted} {
		for tool, want := range map[string]struct {
			state State
			sends int
		}{"read": {Succeeded, 2}, "read_retry": {Succeeded, 2}, "write": {Failed, 1}, "write_key": {Succeeded, 2}} {
			w.sender.answer(func(_ context.Context, _ sent, n int) (sessions.Response, error) {
				if n == 1 {
					return refusal()
				}
				return answered(okResult)
			}) // n counts requests with the same arguments
			args := fmt.Sprintf(`{"title":%q}`, name+tool)
			before := w.sender.count(tool)
			c := sc.propose(tool, func(r *Proposal) { r.Arguments, r.RequestID = []byte(args), name+tool })
			if c.State == ConsentRequired {
				sc.decide(c, true)
				sc.sweep(t)
				c = sc.until(c.ID, Succeeded, Failed, Uncertain)
			}
			if c.State != want.state || w.sender.count(tool)-before != want.sends {
				t.Errorf("%s of %s is %s after %d sends (%+v)", name, tool, c.State, w.sender.count(tool)-before, c.Error)
			}
			if c.State == Failed && (c.Attempts[0].Phase != Answered || c.Error.Layer != LayerProtocol) {
				t.Errorf("%s of %s: %+v, %+v", name, tool, c.Error, c.Attempts)
			}
		}
		// Once more, and no more.
		w.sender.answer(func(context.Context, sent, int) (sessions.Response, error) { return refusal() })
		before := w.sender.count("read")
		c := sc.propose("read", func(r *Proposal) { r.Arguments = []byte(`{"title":"again and again"}`) })
		if c.State != Failed || w.sender.count("read")-before != 2 {
			t.Errorf("%s: a read is %s after %d sends", name, c.State, w.sender.count("read")-before)
		}
	}
}

// Headers that do not fit show that the definition is not what it was: the list is
// made anew for everyone; a read that stands on the same definition is tried once
// more; a write has not been carried out and says so.
func TestHeaderMismatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	mismatch := func(_ context.Context, _ sent, n int) (sessions.Response, error) {
		if n == 1 {
			return sessions.Response{Phase: sessions.Answered, HTTPStatus: 400, Error: &sessions.RPCError{Code: -32020, Message: "header mismatch"}}, nil
		}
		return answered(okResult)
	}
	w.sender.answer(mismatch)
	lists := len(w.lister.kinds())
	c := sc.propose("write", func(r *Proposal) { r.Arguments = []byte(`{"title":"w"}`) })
	if c.State != Failed || c.Error.Code != "-32020" || !strings.Contains(c.Error.Message, "nothing was carried out") || w.sender.count("write") != 1 ||
		c.Attempts[0].Phase != Answered {
		t.Fatalf("%s %+v %+v", c.State, c.Error, c.Attempts)
	}
	// The next proposal lists first, whatever age the contract allows.
	if c = sc.propose("write", func(r *Proposal) { r.Arguments = []byte(`{"title":"w"}`) }); c.State != Succeeded {
		t.Fatalf("%s %+v", c.State, c.Error)
	}
	if n := len(w.lister.kinds()); n <= lists+1 {
		t.Errorf("%d lists, %d before", n, lists)
	}
	lists = len(w.lister.kinds())
	if c = sc.propose("read", func(r *Proposal) { r.Arguments = []byte(`{"title":"r"}`) }); c.State != Succeeded || w.sender.count("read") != 2 {
		t.Fatalf("%s %+v, %d sends", c.State, c.Error, w.sender.count("read"))
	}
	if n := len(w.lister.kinds()); n == lists {
		t.Error("the read went on without a new list")
	}
	// A definition that is another one by now is not what was decided on.
	w.sender.answer(func(ctx context.Context, s sent, n int) (sessions.Response, error) {
		w.lister.set("read", "something else")
		return mismatch(ctx, s, n)
	})
	c = sc.propose("read", func(r *Proposal) { r.Arguments = []byte(`{"title":"changed"}`) })
	if c.State != Failed || c.Error.Code != "-32020" || w.sender.count("read") != 3 {
		t.Fatalf("%s %+v, %d sends", c.State, c.Error, w.sender.count("read"))
	}
}

// Where the contract pins no definition, the new one counts, if it takes the same
// arguments.
func TestHeaderMismatch_UnpinnedReadTakesTheNewDefinition(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), `"D:read"`, `"any"`)
	w.sender.answer(func(_ context.Context, _ sent, n int) (sessions.Response, error) {
		if n == 1 {
			w.lister.set("read", "something else")
			return sessions.Response{Phase: sessions.Answered, Error: &sessions.RPCError{Code: -32020, Message: "header mismatch"}}, nil
		}
		return answered(okResult)
	})
	c := sc.propose("read")
	if c.State != Succeeded || c.DefinitionDigest != digest(t, "read", "something else") {
		t.Fatalf("%s %+v by %s", c.State, c.Error, c.DefinitionDigest)
	}
	if got := sc.get(c.ID); got.DefinitionDigest != c.DefinitionDigest {
		t.Errorf("recorded by %s", got.DefinitionDigest)
	}
}

// A write that waited for the calls of others past its window is dispatched anew,
// with all checks, until its turn comes.
func TestQueuedWriteIsDispatchedAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	w.sender.answer(func(_ context.Context, _ sent, n int) (sessions.Response, error) {
		if n <= 4 {
			return sessions.Response{}, fault.New(fault.Unavailable, sessions.TurnNotCome, "others took too long").In(fault.Host)
		}
		return answered(okResult)
	})
	c := sc.propose("write")
	if c = sc.until(c.ID, Succeeded, Failed, Uncertain); c.State != Succeeded || len(c.Attempts) != 5 || c.Attempts[3].Phase != NotSent {
		t.Fatalf("%s %+v after %d attempts", c.State, c.Error, len(c.Attempts))
	}
}

// The caller's trace goes on to the server with a span of each attempt, and into
// the record of the call; nothing goes where there is none.
func TestTraceGoesOn(t *testing.T) {
	t.Parallel()
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	tr := telemetry.ReadTrace([]string{"00-" + id + "-00f067aa0ba902b7-01"}, []string{"vendor=1"})
	w.sender.answer(func(_ context.Context, _ sent, n int) (sessions.Response, error) {
		if n == 1 {
			return lost()
		}
		return answered(okResult)
	})
	c := sc.propose("read", func(r *Proposal) { r.Trace = tr })
	call := sc.propose("write_call", func(r *Proposal) { r.Trace = tr })
	sc.decide(call, true)
	sc.sweep(t)
	sc.until(call.ID, Failed, Succeeded)
	spans := []string{tr.Parent(), c.Trace.Parent()}
	for _, s := range w.sender.all() {
		var parent, state string
		if err := json.Unmarshal(s.meta["traceparent"], &parent); err != nil {
			t.Fatalf("%s has %q", s.tool, s.meta)
		}
		if err := json.Unmarshal(s.meta["tracestate"], &state); err != nil || state != "vendor=1" || len(s.meta) != 2 {
			t.Errorf("%s has %q", s.tool, s.meta)
		}
		if !strings.HasPrefix(parent, "00-"+id+"-") || slices.Contains(spans, parent) {
			t.Errorf("%s goes on with %s", s.tool, parent)
		}
		spans = append(spans, parent)
	}
	if len(spans) != 5 {
		t.Errorf("%d spans", len(spans))
	}
	for _, id2 := range []string{c.ID, call.ID} {
		if got := sc.get(id2); got.Trace.ID() != id || got.Trace.State() != "vendor=1" {
			t.Errorf("recorded with %+v", got.Trace)
		}
	}
	if c = sc.propose("read", func(r *Proposal) { r.Arguments = []byte(`{"title":"untraced"}`) }); c.Trace.ID() != "" {
		t.Errorf("%+v", c.Trace)
	}
	if last := w.sender.all(); last[len(last)-1].meta["traceparent"] != nil {
		t.Error("a trace was made up")
	}
}

// Each call to a server that the whole tenant shares says so, and goes out for
// nobody in particular.
func TestPerTenant_EachCallSaysThatStateIsShared(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	shared := catalog.PerTenant
	yes := true
	if _, err := sc.catalog.UpdateServer(t.Context(), sc.admin, "calendar", catalog.ServerUpdate{Isolation: &shared}); !fault.Is(err, fault.Invalid) {
		t.Fatalf("shared without acknowledgement: %v", err)
	}
	if _, err := sc.catalog.UpdateServer(t.Context(), sc.admin, "calendar", catalog.ServerUpdate{Isolation: &shared, SharedStateAcknowledged: &yes}); err != nil {
		t.Fatal(err)
	}
	bob := sc.alice
	bob.Subject.Value = "bob"
	for _, p := range []struct {
		who  string
		call *Call
	}{{"alice", sc.propose("read")}, {"bob", proposeAs(t, sc, bob)}} {
		if p.call.State != Succeeded || !slices.ContainsFunc(p.call.Findings, func(f string) bool { return strings.HasPrefix(f, "SHARED_STATE: ") }) {
			t.Errorf("%s: %s %v", p.who, p.call.State, p.call.Findings)
		}
	}
	for _, s := range w.sender.all() {
		if !s.key.Subject.IsZero() || s.key.Session != "" || s.key.Tenant != sc.alice.Tenant {
			t.Errorf("sent as %+v", s.key)
		}
	}
}

func proposeAs(t *testing.T, sc *scene, p tenant.Principal) *Call {
	t.Helper()
	r := sc.proposal("read")
	r.SessionID, r.Wait = sc.open(p).ID, 10*time.Second
	c, err := sc.Propose(t.Context(), p, r)
	if err != nil {
		t.Fatal(detail(err))
	}
	return c
}
