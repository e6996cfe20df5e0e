package chaos

import (
	"fmt"
	"strings"
)

// The demo calendar's tools.
const (
	read  = "get_availability"
	draft = "create_draft_event"
	find  = "find_draft"
)

// policy is the contract that a test registers the calendar under. The zero
// value asks for consent to each write, retries nothing, has no status query and
// records reads with their outcome.
type policy struct {
	consent    string // of the write; "call" by default
	key        bool   // the write carries an idempotency key in requestId
	writeRetry int
	readRetry  int
	record     string // before_answer by default
	query      string // the absent rule of a status query; none when empty
	settle     string // of the query
	ceiling    string // 5m by default
	writeAge   string // 60s by default
	extra      string // more tools
}

func (p policy) yaml(name, origin, mcp string, digests map[string]string) string {
	or := func(s, d string) string {
		if s == "" {
			return d
		}
		return s
	}
	ceiling := or(p.ceiling, "5m")
	timeout := "2m"
	if p.ceiling != "" {
		timeout = p.ceiling
	}
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("server: %s\ntransport: http\nprotocol: {versions: [\"2026-07-28\", \"2025-11-25\"], downgrade: forbid}", name)
	line("origin: %q\naudience: %q\nmethods: [tools/list, tools/call]", origin, mcp)
	line("limits: {timeout: %s, ceiling: %s, calls_per_session: 100000, definition_age: {write: %s, read: 15m}}", timeout, ceiling, or(p.writeAge, "60s"))
	line("record: {reads: %s}\ntools:", or(p.record, "before_answer"))
	line("  - {name: %s, definition: %q, effect: read, consent: none, retry: {max: %d}}", read, digests[read], p.readRetry)
	line("  - {name: %s, definition: %q, effect: read, consent: none}", find, digests[find])
	line("  - name: %s\n    definition: %q\n    effect: write\n    consent: %s", draft, digests[draft], or(p.consent, "call"))
	if p.key || p.query != "" {
		line("    idempotency: {argument: requestId}")
	}
	if p.writeRetry > 0 {
		line("    retry: {max: %d}", p.writeRetry)
	}
	if p.query != "" {
		line("    status_query: {tool: %s, arguments: {requestId: \"call.idempotencyKey\"}, succeeded: \"result.found\", side_effect_id: \"result.id\", absent: %s, settle: %s}",
			find, p.query, or(p.settle, "60s"))
	}
	b.WriteString(p.extra)
	return b.String()
}

// register registers the calendar at the address, which may be a proxy's, and
// activates the contract for what it offers now.
func (w *world) register(p *process, name, mcp string, pol policy) {
	w.t.Helper()
	admin := p.as(w.admin)
	w.must(admin.post("/v1/servers", obj{"name": name, "http": obj{"url": mcp}}, nil))
	w.must(admin.post("/v1/servers/"+name+":probe", obj{}, nil))
	w.activate(p, name, mcp, pol)
}

// activate puts a contract in force that pins what the server offers.
func (w *world) activate(p *process, name, mcp string, pol policy) {
	w.t.Helper()
	admin := p.as(w.admin)
	digests := w.digests(p, name)
	var made struct{ Revision int }
	text := pol.yaml(name, strings.TrimSuffix(mcp, "/mcp"), mcp, digests)
	w.must(admin.post("/v1/servers/"+name+"/contracts", obj{"yaml": text}, &made))
	w.must(admin.post(fmt.Sprintf("/v1/servers/%s/contracts/%d:activate", name, made.Revision), obj{}, nil))
}

func (w *world) digests(p *process, name string) map[string]string {
	w.t.Helper()
	var list struct {
		Definitions []struct{ Name, Digest, DefinitionDigest string }
	}
	w.must(p.as(w.admin).get("/v1/servers/"+name+"/definitions", &list))
	out := map[string]string{}
	for _, d := range list.Definitions {
		out[d.Name] = d.Digest + d.DefinitionDigest
	}
	return out
}

// draftArgs are the arguments of a write that nobody else makes.
func draftArgs(title string) obj {
	return obj{"title": title, "start": "2026-12-01T09:00:00Z", "end": "2026-12-01T10:00:00Z"}
}

func readArgs() obj {
	return obj{"from": "2026-12-01T00:00:00Z", "to": "2026-12-02T00:00:00Z"}
}
