package calls

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
)

// lister answers with one list of tools for everybody, which a test changes.
type lister struct {
	mu    sync.Mutex
	tools map[string]string            // description by name
	own   map[string]map[string]string // the same for one server, by its id
	err   error

	capabilities string // instead of those that declare everything
	asked        []catalog.Kind
}

// promptDefinition is the one prompt, whose name is required.
func promptDefinition(description string) json.RawMessage {
	return fmt.Appendf(nil, `{"name":"greet","description":%q,"arguments":[{"name":"who","required":true},{"name":"tone"}]}`, description)
}

func newLister() *lister {
	l := &lister{tools: map[string]string{}, own: map[string]map[string]string{}}
	for _, name := range toolNames {
		l.tools[name] = "first"
	}
	l.tools["greet"] = "first"
	return l
}

func (l *lister) set(name, description string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tools[name] = description
}

// of sets the description of tools at one server.
func (l *lister) of(server, description string, names ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.own[server] == nil {
		l.own[server] = map[string]string{}
	}
	for _, n := range names {
		l.own[server][n] = description
	}
}

func (l *lister) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

func definition(name, description string) json.RawMessage {
	return fmt.Appendf(nil, `{"name":%q,"description":%q,"inputSchema":{"type":"object"}}`, name, description)
}

func digest(t testing.TB, name, description string) string {
	t.Helper()
	d, err := canonical.DefinitionDigest("tool", definition(name, description))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (l *lister) ListDefinitions(_ context.Context, v catalog.Server, _ catalog.Context, kind catalog.Kind) (catalog.Listing, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := catalog.Listing{ProtocolVersion: "2026-07-28", Era: "MODERN", Capabilities: json.RawMessage(`{"tools":{},"resources":{},"prompts":{},"completions":{}}`)}
	if l.err != nil {
		return out, l.err
	}
	if l.capabilities != "" {
		out.Capabilities = json.RawMessage(l.capabilities)
	}
	l.asked = append(l.asked, kind)
	if kind == catalog.Prompt {
		out.Items = append(out.Items, promptDefinition(l.tools["greet"]))
	}
	if kind == catalog.ResourceTemplate {
		for _, uri := range []string{"note://n/{id}", "note://n/staff/{+id,x*}", "file:///{path}"} {
			out.Items = append(out.Items, fmt.Appendf(nil, `{"name":"t","uriTemplate":%q}`, uri))
		}
	}
	if kind == catalog.Tool {
		for _, name := range toolNames {
			description, ok := l.own[v.ID][name]
			if !ok {
				description = l.tools[name]
			}
			out.Items = append(out.Items, definition(name, description))
		}
	}
	return out, nil
}

// The tools: what the contract says of each is in its name.
var toolNames = []string{"read", "read_retry", "read_early", "read_call", "write", "write_call", "write_session", "write_key", "write_query",
	"write_final", "destroy", "find"}

// contractSource is the contract of the scripted server; changes are made by
// replacing text in it. Definitions are pinned to what is listed first.
func contractSource(t testing.TB, changes ...string) []byte {
	t.Helper()
	src := `server: calendar
transport: http
protocol: {versions: ["2026-07-28"]}
origin: "https://calendar.example"
methods: [tools/list, tools/call, resources/read, prompts/list, prompts/get, completion/complete, resources/templates/list, resources/subscribe]
limits: {timeout: 20s, ceiling: 1m, calls_per_session: 1000000, definition_age: {write: 1h, read: 1h}}
record: {reads: RECORD}
tools:
  - {name: read, definition: "D:read", effect: read}
  - {name: read_retry, definition: "D:read_retry", effect: read, retry: {max: 2}}
  - {name: read_early, definition: "D:read_early", effect: read, consent: session, retry: {max: 1}}
  - {name: read_call, definition: "D:read_call", effect: read, consent: call, retry: {max: 1}}
  - {name: write, definition: "D:write", effect: write, consent: none}
  - {name: write_call, definition: "D:write_call", effect: write, consent: call}
  - {name: write_session, definition: "D:write_session", effect: write, consent: session}
  - {name: write_key, definition: "D:write_key", effect: write, consent: call, idempotency: {argument: key}, retry: {max: 2}}
  - {name: write_query, definition: "D:write_query", effect: write, consent: none, status_query: {tool: find, arguments: {id: call.requestId}, succeeded: result.found, side_effect_id: result.id}}
  - {name: write_final, definition: "D:write_final", effect: write, consent: none, status_query: {tool: find, arguments: {id: call.requestId}, succeeded: result.found, absent: final, settle: SETTLE}}
  - {name: destroy, definition: "D:destroy", effect: destructive, consent: call}
  - {name: find, definition: "D:find", effect: read}
resources:
  - {uri: "note://n/secret/*", consent: call}
  - {uri: "note://n/shared/*", consent: session}
  - {uri: "note://n/staff/*", subjects: {groups: [staff]}}
  - {uri: "note://n/**"}
prompts: [{name: greet, definition: "D:greet"}, {name: gone}]
`
	for i := 0; i+1 < len(changes); i += 2 {
		if !strings.Contains(src, changes[i]) {
			t.Fatalf("the contract has no %q", changes[i])
		}
		src = strings.ReplaceAll(src, changes[i], changes[i+1])
	}
	src = strings.ReplaceAll(strings.ReplaceAll(src, "RECORD", "before_answer"), "SETTLE", "0s")
	greet, err := canonical.DefinitionDigest("prompt", promptDefinition("first"))
	if err != nil {
		t.Fatal(err)
	}
	src = strings.ReplaceAll(src, "D:greet", greet)
	for _, name := range toolNames {
		src = strings.ReplaceAll(src, `"D:`+name+`"`, `"`+digest(t, name, "first")+`"`)
	}
	return []byte(src)
}

// kinds returns what was listed so far.
func (l *lister) kinds() []catalog.Kind {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.asked)
}
