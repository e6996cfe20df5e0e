package calls

import (
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// A server that refuses a call for its protocol version may have carried it out all
// the same: it says so itself, late or wrongly. Only a read, and a write with a key
// that the contract trusts, goes out once more, and then as an attempt that the audit
// log knows.
func TestWire_VersionRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), append([]string{`versions: ["2026-07-28"]`, `versions: ["2025-11-25", "2026-07-28"]`}, reverseContract...)...)
	const named, other = `,"data":{"supported":["2026-07-28","2025-11-25"]}`, `,"data":{"supported":["2025-06-18"]}`
	body := func(data string) string {
		return `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"no"` + data + `}}`
	}
	progress := mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"p","progress":1}}`)
	for name, refusal := range map[string]mcptest.Answer{
		"400":             mcptest.Status(400, "application/json", body(other)),
		"400, named":      mcptest.Status(400, "application/json", body(named)),
		"200":             mcptest.JSON(body("")),
		"stream":          mcptest.Stream(mcptest.Event(body(other))),
		"after progress":  mcptest.Stream(progress, mcptest.Event(body(other))),
		"progress, named": mcptest.Stream(progress, mcptest.Event(body(named))),
	} {
		for _, version := range []string{mcptest.Modern, mcptest.Legacy} {
			server := mcptest.New(t, version)
			w.wired(server)
			for tool, want := range map[string]struct {
				state State
				sends int
			}{"read": {Succeeded, 2}, "write": {Failed, 1}, "destroy": {Failed, 1}, "write_key": {Succeeded, 2}} {
				before := server.Count("tools/call")
				server.On("tools/call", refusal, mcptest.Result(okResult))
				c := sc.propose(tool)
				if c.State == ConsentRequired {
					sc.decide(c, true)
					sc.sweep(t)
					c = sc.until(c.ID, Succeeded, Failed, Uncertain)
				}
				sent := server.Count("tools/call") - before
				if c.State != want.state || sent != want.sends || len(c.Attempts) != want.sends || c.Attempts[0].Phase != Answered {
					t.Errorf("%s, %s: %s is %s after %d sends: %+v %+v", name, version, tool, c.State, sent, c.Error, c.Attempts)
				}
				if n := w.attempts(c.ID); tool != "read" && n != want.sends {
					t.Errorf("%s, %s: %d attempts of %s were audited", name, version, n, tool)
				}
			}
		}
		// A round that carries answers is a call like any other.
		server := mcptest.New(t, mcptest.Modern)
		w.wired(server)
		server.On("tools/call", mcptest.Result(`{"resultType":"input_required","requestState":"s","inputRequests":{"k":{"method":"elicitation/create","params":`+formParams+`}}}`),
			refusal, mcptest.Result(okResult))
		c := sc.get(sc.propose("write").ID)
		if c.State != InputRequired {
			t.Fatalf("%s %+v", c.State, c.Error)
		}
		sc.accept(c, 0, `{"acct":"7"}`)
		if c = sc.until(c.ID, Failed, Succeeded, Uncertain); c.State != Failed || server.Count("tools/call") != 2 || w.attempts(c.ID) != 2 {
			t.Errorf("%s: a round with answers is %s after %d sends: %+v", name, c.State, server.Count("tools/call"), c.Attempts)
		}
	}
}

// attempts counts those of a call's attempts that the audit log knows.
func (w *world) attempts(callID string) int {
	return w.count(`SELECT count(*) FROM audit_entries WHERE call_id = $1 AND kind = $2`, callID, audit.CallDispatched)
}
