package contract

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const digestA = "doc-1:sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

// calendar is the contract of the API's description, with the query's tool.
const calendar = `
server: calendar
transport: http                    # http | sse | stdio
protocol: {versions: ["2026-07-28", "2025-11-25"], downgrade: forbid}
origin: https://calendar.example
audience: https://calendar.example/mcp
scopes: [calendar:drafts:write, calendar:availability:read]
methods: [tools/list, tools/call, resources/read]
limits: {timeout: 30s, ceiling: 5m, request_bytes: 65536, result_bytes: 1048576, calls_per_session: 200, definition_age: {write: 60s, read: 15m}}
record: {reads: before_answer}
tools:
  - name: get_availability
    definition: "` + digestA + `"
    effect: read
    consent: none
    retry: {max: 2}
  - name: create_draft_event
    definition: "` + digestA + `"
    effect: write
    consent: call
    subjects: {groups: [staff]}
    when: args.title.size() <= 200 && !has(args.attendees)
    idempotency: {argument: requestId}
    status_query: {tool: find_draft, arguments: {requestId: "call.idempotencyKey"}, succeeded: "result.found", absent: uncertain, settle: 60s}
  - {name: find_draft, definition: any, effect: read}
resources: [{uri: "calendar://availability/**"}]
prompts: [{name: weekly_summary}]
reverse: {elicitation: {form: true, url: ["https://calendar.example"]}, sampling: false, roots: [], logging: warning}
`

// least is the shortest contract; tests put more members behind it.
const least = "server: s\ntransport: http\nprotocol: {versions: [2026-07-28]}\norigin: https://s.example\n"

// tool is least with one tool that has these members.
func tool(members string) string {
	return least + "tools: [{name: t, definition: any, " + members + "}]\n"
}

func mustParse(t testing.TB, src string) *Contract {
	t.Helper()
	c, err := Parse([]byte(src))
	if err != nil {
		f, _ := fault.As(err)
		t.Fatalf("%v %+v\n%s", err, f, src)
	}
	return c
}

func TestParseCalendar(t *testing.T) {
	t.Parallel()
	c := mustParse(t, calendar)
	got := *c
	got.Tools, got.tools, got.ID, got.Canonical, got.Resources = nil, nil, "", nil, nil
	reading := Terms{Definition: DefinitionAny, Effect: EffectRead, Consent: ConsentNone, Retry: Retry{Max: 2}, Timeout: 30 * time.Second}
	want := Contract{
		Server: "calendar", Transport: TransportHTTP,
		Versions: []string{"2026-07-28", "2025-11-25"}, DowngradeForbidden: true,
		Origin: "https://calendar.example", Audience: "https://calendar.example/mcp",
		Scopes:  []string{"calendar:drafts:write", "calendar:availability:read"},
		Methods: []string{"tools/list", "tools/call", "resources/read"},
		Limits: Limits{Timeout: 30 * time.Second, Ceiling: 5 * time.Minute, RequestBytes: 65536, ResultBytes: 1048576,
			CallsPerSession: 200, DefinitionAge: DefinitionAge{Write: time.Minute, Read: 15 * time.Minute}},
		Record:  RecordBeforeAnswer,
		Prompts: []*Prompt{{Name: "weekly_summary", Terms: reading}},
		Reverse: Reverse{ElicitationForm: true, ElicitationURL: []string{"https://calendar.example"}, Roots: []string{}, Logging: "warning"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	draft, ok := c.Tool("create_draft_event")
	if !ok || draft != c.Tools[1] {
		t.Fatal("no create_draft_event in its place")
	}
	if draft.Effect != EffectWrite || draft.Consent != ConsentCall || draft.Idempotency.Argument != "requestId" ||
		!slices.Equal(draft.Subjects.Groups, []string{"staff"}) || !draft.Pins(digestA) || draft.Pins("doc-1:sha256:b") ||
		draft.Timeout != 30*time.Second || draft.Retry.Max != 0 {
		t.Errorf("create_draft_event: %+v", draft)
	}
	if q := draft.StatusQuery; q == nil || q.Tool != "find_draft" || q.Absent != AbsentUncertain || q.Settle != time.Minute {
		t.Errorf("status query: %+v", q)
	}
	read := c.Tools[0]
	if read.Consent != ConsentNone || read.Retry.Max != 2 {
		t.Errorf("get_availability: %+v", read)
	}
	if !c.AllowsMethod("resources/read") || c.AllowsMethod("prompts/get") || !c.AllowsVersion("2025-11-25") ||
		c.AllowsVersion("2024-11-05") {
		t.Error("an Allows function is wrong")
	}
	for _, tt := range []struct {
		kind Kind
		name string
		want bool
	}{
		{KindPrompt, "weekly_summary", true}, {KindPrompt, "x", false}, {KindPrompt, "find_draft", false},
		{KindResource, "calendar://availability/today", true}, {KindResource, "calendar://events/1", false},
		{KindResource, "weekly_summary", false}, {KindTool, "find_draft", true}, {KindTool, "weekly_summary", false}, {"", "find_draft", false},
	} {
		if got, ok := c.Terms(tt.kind, tt.name); ok != tt.want || ok && tt.kind != KindTool && !reflect.DeepEqual(*got, reading) {
			t.Errorf("%s %s: %+v, %v", tt.kind, tt.name, got, ok)
		}
	}
}

// The first pattern that matches counts, so that an exception stands above its rule.
func TestTermsOfReads(t *testing.T) {
	t.Parallel()
	c := mustParse(t, least+`limits: {timeout: 7s}
resources:
  - {uri: "a://b/secret/**", consent: call, subjects: {groups: [staff]}}
  - {uri: "a://b/**", consent: session}
prompts: [{name: p, definition: "`+digestA+`", consent: call, subjects: {projects: [x]}}, {name: "q r"}]
`)
	secret, _ := c.Terms(KindResource, "a://b/secret/x")
	other, _ := c.Terms(KindResource, "a://b/c")
	p, _ := c.Terms(KindPrompt, "p")
	q, ok := c.Terms(KindPrompt, "q r")
	if secret.Consent != ConsentCall || !slices.Equal(secret.Subjects.Groups, []string{"staff"}) || other.Consent != ConsentSession ||
		len(other.Subjects.Groups) > 0 || other.Timeout != 7*time.Second || !other.Pins("") {
		t.Errorf("%+v, %+v", secret, other)
	}
	if p.Consent != ConsentCall || !p.Pins(digestA) || p.Pins("") || p.Effect != EffectRead || !ok || q.Consent != ConsentNone {
		t.Errorf("%+v, %+v", p, q)
	}
	if _, ok := c.Terms(KindResource, "a://b/secret/../c"); ok {
		t.Error("a traversal matches")
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	c := mustParse(t, tool("effect: read"))
	wantLimits := Limits{Timeout: 30 * time.Second, Ceiling: 5 * time.Minute, RequestBytes: 65536, ResultBytes: 1 << 20,
		CallsPerSession: 1000, DefinitionAge: DefinitionAge{Write: time.Minute, Read: 15 * time.Minute}}
	if c.Limits != wantLimits || !c.DowngradeForbidden || c.Record != RecordBeforeAnswer || c.Audience != "" ||
		len(c.Scopes) != 0 || !slices.Equal(c.Methods, []string{"tools/list", "tools/call"}) ||
		!reflect.DeepEqual(c.Reverse, Reverse{}) || c.Tools[0].Consent != ConsentNone {
		t.Errorf("%+v", c)
	}
	for effect, want := range map[string]Consent{"read": ConsentNone, "write": ConsentCall, "destructive": ConsentCall} {
		if got := mustParse(t, tool("effect: "+effect)).Tools[0].Consent; got != want {
			t.Errorf("%s: consent %s", effect, got)
		}
	}
	if q := mustParse(t, least+`tools: [{name: q, definition: any, effect: read},
  {name: t, definition: any, effect: write, status_query: {tool: q, succeeded: "true"}}]`).Tools[1].StatusQuery; q.Settle != time.Minute || q.Absent != AbsentUncertain {
		t.Errorf("%+v", q)
	}
	if tm := mustParse(t, tool("effect: read, timeout: 2m")).Tools[0].Timeout; tm != 2*time.Minute {
		t.Error(tm)
	}
	stdio := mustParse(t, "server: s\ntransport: stdio\nprotocol: {versions: ['2025-06-18'], downgrade: allow}\norigin: stdio:filesystem\n")
	if stdio.Origin != "stdio:filesystem" || stdio.DowngradeForbidden || stdio.Transport != TransportStdio {
		t.Errorf("%+v", stdio)
	}
}

// TestIdentity holds that the id is that of the document's content: neither its
// syntax nor its order nor a default that is left out matters.
func TestIdentity(t *testing.T) {
	t.Parallel()
	c := mustParse(t, calendar)
	fromJSON := mustParse(t, string(c.Canonical))
	var indented bytes.Buffer
	if err := json.Indent(&indented, c.Canonical, "", "\t"); err != nil {
		t.Fatal(err)
	}
	spaced := mustParse(t, strings.ReplaceAll(indented.String(), "65536", "6.5536E+4"))
	if c.ID != fromJSON.ID || c.ID != spaced.ID || c.ID != canonical.ContractID(c.Canonical) {
		t.Errorf("%s, %s, %s", c.ID, fromJSON.ID, spaced.ID)
	}
	if !strings.HasPrefix(c.ID, "mcp-host-contract@sha256:") {
		t.Error(c.ID)
	}
	a, b := mustParse(t, least), mustParse(t, least+"record: {reads: before_answer}\n")
	if a.ID == b.ID {
		t.Error("a default was filled in before addressing")
	}
	if flow := mustParse(t, "{server: s, transport: http, protocol: {versions: [2026-07-28]}, origin: 'https://s.example'}"); flow.ID != a.ID {
		t.Error("a flow mapping is another document")
	}
}

func TestViolations(t *testing.T) {
	t.Parallel()
	at := func(paths ...string) []string { return paths }
	origin := func(o string) string { return strings.Replace(least, "https://s.example", o, 1) }
	stdio := "server: s\ntransport: stdio\nprotocol: {versions: [2026-07-28]}\norigin: stdio:fs\n"
	tests := []struct {
		name, src string
		paths     []string
		rule      string
	}{
		// The text itself.
		{"empty", "", at("contract"), "is empty"},
		{"comment only", "# x\n", at("contract"), ""},
		{"a list", "[]", at("contract"), "must be an object, not a list"},
		{"null", "~", at("contract"), "must be an object, not null"},
		{"no YAML", "a: b: c", at("contract"), "is not YAML"},
		{"two documents", least + "---\n" + least, at("contract"), "not several"},
		{"second document empty", least + "---\n", at("contract"), "not several"},
		{"too large", least + "#" + strings.Repeat("x", MaxBytes), at("contract"), "at most 262144 bytes"},
		{"not UTF-8", least + "#\xff", at("contract"), "not valid UTF-8"},
		{"byte order mark", "\ufeff" + least, at("contract"), "byte order mark"},
		{"anchor", strings.Replace(least, "server: s", "server: &a s", 1), at("server"), "anchor"},
		{"alias", least + "scopes: &x [a]\nmethods: *x\n", at("scopes", "methods"), "anchor"},
		{"merge key", least + "limits: {<<: {timeout: 1s}}\n", at("limits"), "merge key"},
		{"duplicate name", least + "server: t\n", at("server"), "more than once"},
		{"duplicate deep", tool("effect: read, effect: write"), at("tools[0].effect"), "more than once"},
		{"duplicate in JSON", `{"server":"a","server":"b"}`, at("server"), "more than once"},
		{"trailing JSON", `{"server":"a"} x`, at("contract"), "nothing may follow"},
		{"number as a name", least + "1: x\n", at(`["1"]`), "must be quoted"},
		{"boolean as a name", least + "true: x\n", at("true"), "must be quoted"},
		{"list as a name", least + "[a]: x\n", at("contract"), "plain strings"},
		{"tag", strings.Replace(least, "server: s", "server: !!str s", 1), at("server"), "YAML tag"},
		{"own tag", strings.Replace(least, "server: s", "server: !x s", 1), at("server"), "YAML tag"},
		{"octal", least + "limits: {request_bytes: 0o17}\n", at("limits.request_bytes"), "as JSON writes it"},
		{"old octal", least + "limits: {request_bytes: 0100}\n", at("limits.request_bytes"), "as JSON writes it"},
		{"underscores", least + "limits: {request_bytes: 65_536}\n", at("limits.request_bytes"), "as JSON writes it"},
		{"infinity", least + "limits: {request_bytes: .inf}\n", at("limits.request_bytes"), "as JSON writes it"},
		{"too many digits", least + "limits: {request_bytes: " + strings.Repeat("1", 129) + "}\n", at("limits.request_bytes"), "128 digits"},
		{"too deep", least + "reverse: " + strings.Repeat("[", 80) + strings.Repeat("]", 80), at("reverse" + strings.Repeat("[0]", 64)), "deeper than 64"},
		// Top level.
		{"nothing there", "{}", at("server", "transport", "protocol", "origin"), "is required"},
		{"unknown member", least + "tool: []\n", at("tool"), "is unknown here"},
		{"unknown odd member", least + "'to ol': []\n", at(`["to ol"]`), "is unknown here"},
		{"server in capitals", strings.Replace(least, "server: s", "server: S", 1), at("server"), "must match"},
		{"server is a number", strings.Replace(least, "server: s", "server: 5", 1), at("server"), "not a number"},
		{"server is null", strings.Replace(least, "server: s", "server:", 1), at("server"), "not null"},
		{"transport", strings.Replace(least, "http\n", "https\n", 1), at("transport"), "one of http, sse, stdio"},
		{"no versions", strings.Replace(least, "[2026-07-28]", "[]", 1), at("protocol.versions"), "1 to 5 entries"},
		{"unknown version", strings.Replace(least, "2026-07-28", "2026-07-29", 1), at("protocol.versions[0]"), "must be one of"},
		{"version twice", strings.Replace(least, "[2026-07-28]", "[2026-07-28, '2026-07-28']", 1), at("protocol.versions[1]"), "twice"},
		{"versions missing", strings.Replace(least, "{versions: [2026-07-28]}", "{}", 1), at("protocol.versions"), "is required"},
		{"downgrade", strings.Replace(least, "[2026-07-28]}", "[2026-07-28], downgrade: no}", 1), at("protocol.downgrade"), "forbid, allow"},
		{"modern over sse", strings.Replace(least, "http\n", "sse\n", 1), at("protocol.versions[0]"), "cannot be spoken"},
		// Reach.
		{"origin with a path", origin("https://s.example/"), at("origin"), "without a slash"},
		{"origin in capitals", origin("https://S.example"), at("origin"), "lower-case"},
		{"origin with default port", origin("https://s.example:443"), at("origin"), "default port"},
		{"origin with port 0", origin("https://s.example:0"), at("origin"), "1 to 65535"},
		{"origin with odd port", origin("https://s.example:08443"), at("origin"), "1 to 65535"},
		{"origin with no port", origin("'https://s.example:'"), at("origin"), "after the colon"},
		{"origin with a user", origin("https://u@s.example"), at("origin"), "must be an origin"},
		{"origin of another scheme", origin("ftp://s.example"), at("origin"), "must be an origin"},
		{"origin with a wildcard", origin("'https://*.example'"), at("origin"), "lower-case ASCII"},
		{"origin beyond ASCII", origin("https://bücher.example"), at("origin"), ""},
		{"origin with short address", origin("https://127.1"), at("origin"), "normal form"},
		{"origin with hex address", origin("https://0x7f000001"), at("origin"), "normal form"},
		{"origin with long IPv6", origin("'https://[0:0:0:0:0:0:0:1]'"), at("origin"), "normal form"},
		{"origin with a query", origin("https://s.example?x"), at("origin"), ""},
		{"origin of a runtime over http", origin("stdio:fs"), at("origin"), "must be an origin"},
		{"web origin over stdio", strings.Replace(stdio, "stdio:fs", "https://s.example", 1), at("origin"), "declared runtime"},
		{"runtime with a path", strings.Replace(stdio, "stdio:fs", "stdio:../fs", 1), at("origin"), "declared runtime"},
		{"audience over stdio", stdio + "audience: https://s.example\n", at("audience"), "left out"},
		{"scopes over stdio", stdio + "scopes: [a]\n", at("scopes"), "left out"},
		{"audience relative", least + "audience: /mcp\n", at("audience"), "absolute"},
		{"audience with fragment", least + "audience: 'https://s.example/#x'\n", at("audience"), "fragment"},
		{"audience with a password", least + "audience: https://u:p@s.example/\n", at("audience"), "user or password"},
		{"scope twice", least + "scopes: [a, b, a]\n", at("scopes[2]"), "twice"},
		{"scope with a space", least + "scopes: ['a b']\n", at("scopes[0]"), "RFC 6749"},
		{"scope is a boolean", least + "scopes: [true]\n", at("scopes[0]"), "not a boolean"},
		{"scopes as a string", least + "scopes: a b\n", at("scopes"), "must be a list"},
		{"unknown method", least + "methods: [tools/list, tools/drop]\n", at("methods[1]"), "must be one of"},
		{"no methods", least + "methods: []\n", at("methods"), "1 to"},
		// Limits.
		{"boolean is no number", least + "limits: {request_bytes: true}\n", at("limits.request_bytes"), "not a boolean"},
		{"string is no number", least + "limits: {request_bytes: '5'}\n", at("limits.request_bytes"), "not a string"},
		{"fraction", least + "limits: {calls_per_session: 1.5}\n", at("limits.calls_per_session"), "whole number"},
		{"negative", least + "limits: {calls_per_session: -1}\n", at("limits.calls_per_session"), "from 1 to"},
		{"beyond int64", least + "limits: {calls_per_session: 9223372036854775808}\n", at("limits.calls_per_session"), "from 1 to"},
		{"number is no duration", least + "limits: {timeout: 30}\n", at("limits.timeout"), "not a number"},
		{"duration without unit", least + "limits: {timeout: '30'}\n", at("limits.timeout"), "must be a duration"},
		{"duration with a sign", least + "limits: {timeout: -30s}\n", at("limits.timeout"), "must be a duration"},
		{"duration with a fraction", least + "limits: {timeout: 1.5s}\n", at("limits.timeout"), "must be a duration"},
		{"infinite duration", least + "limits: {timeout: inf}\n", at("limits.timeout"), "must be a duration"},
		{"duration overflows", least + "limits: {timeout: 99999999999h}\n", at("limits.timeout"), "must be a duration"},
		{"duration is zero", least + "limits: {timeout: 0s}\n", at("limits.timeout"), "from 1ms to 10m"},
		{"ceiling too long", least + "limits: {ceiling: 25h}\n", at("limits.ceiling"), "from 1ms to 24h"},
		{"timeout over ceiling", least + "limits: {timeout: 60s, ceiling: 30s}\n", at("limits.timeout"), "exceed the ceiling"},
		{"ceiling under default timeout", least + "limits: {ceiling: 10s}\n", at("limits.ceiling"), "exceed the ceiling"},
		{"unknown limit", least + "limits: {definition_age: {writes: 1s}}\n", at("limits.definition_age.writes"), "is unknown here"},
		{"age too short", least + "limits: {definition_age: {read: 1ms}}\n", at("limits.definition_age.read"), "from 1s"},
		{"after_answer", least + "record: {reads: after_answer}\n", at("record.reads"), "is not offered yet"},
		{"record of writes", least + "record: {reads: before_send, writes: before_send}\n", at("record.writes"), "is unknown here"},
		{"record empty", least + "record: {}\n", at("record.reads"), "is required"},
		// Tools.
		{"tool empty", least + "tools: [{}]\n", at("tools[0].name", "tools[0].definition", "tools[0].effect"), "is required"},
		{"tool twice", least + "tools: [{name: t, definition: any, effect: read}, {name: t, definition: any, effect: write}]\n", at("tools[1].name"), "twice"},
		{"tool name empty", least + "tools: [{name: '', definition: any, effect: read}]\n", at("tools[0].name"), "1 to 128"},
		{"tool name too long", least + "tools: [{name: " + strings.Repeat("é", 129) + ", definition: any, effect: read}]\n", at("tools[0].name"), "1 to 128"},
		{"tool name with a zero width space", least + "tools: [{name: \"a\\u200bb\", definition: any, effect: read}]\n", at("tools[0].name"), "printable"},
		{"tool name with a space", least + "tools: [{name: a b, definition: any, effect: read}]\n", at("tools[0].name"), "space"},
		{"tool name NUL", least + "tools: [{name: \"a\\0\", definition: any, effect: read}]\n", at("tools[0].name"), "printable"},
		{"definition short", least + "tools: [{name: t, definition: 'doc-1:sha256:ab', effect: read}]\n", at("tools[0].definition"), "64 lower-case"},
		{"definition any in capitals", least + "tools: [{name: t, definition: ANY, effect: read}]\n", at("tools[0].definition"), "any"},
		{"effect", tool("effect: readonly"), at("tools[0].effect"), "read, write, destructive"},
		{"destructive by session", tool("effect: destructive, consent: session"), at("tools[0].consent"), "must be call"},
		{"destructive by none", tool("effect: destructive, consent: none"), at("tools[0].consent"), "must be call"},
		{"consent", tool("effect: write, consent: once"), at("tools[0].consent"), "none, session, call"},
		{"subjects empty", tool("effect: read, subjects: {}"), at("tools[0].subjects"), "must name"},
		{"groups empty", tool("effect: read, subjects: {groups: []}"), at("tools[0].subjects.groups"), "1 to 256"},
		{"user without source", tool("effect: read, subjects: {users: [alice]}"), at("tools[0].subjects.users[0]"), "source and a value"},
		{"subject kind", tool("effect: read, subjects: {roles: [a]}"), at("tools[0].subjects.roles"), "is unknown here"},
		{"retry of a write", tool("effect: write, retry: {max: 1}"), at("tools[0].retry"), "only for effect read"},
		{"retry too often", tool("effect: read, retry: {max: 6}"), at("tools[0].retry.max"), "from 0 to 5"},
		{"retry empty", tool("effect: read, retry: {}"), at("tools[0].retry.max"), "is required"},
		{"idempotency both", tool("effect: write, idempotency: {argument: a, meta: true}"), at("tools[0].idempotency"), "exactly one"},
		{"idempotency none", tool("effect: write, idempotency: {}"), at("tools[0].idempotency"), "exactly one"},
		{"idempotency meta false", tool("effect: write, idempotency: {meta: false}"), at("tools[0].idempotency.meta"), "must be true"},
		{"idempotency meta a string", tool("effect: write, idempotency: {meta: 'true'}"), at("tools[0].idempotency.meta"), "not a string"},
		{"tool timeout over ceiling", tool("effect: read, timeout: 6m"), at("tools[0].timeout"), "limits.ceiling (5m)"},
		// Rules.
		{"when is a boolean", tool("effect: read, when: true"), at("tools[0].when"), "not a boolean"},
		{"when is empty", tool("effect: read, when: ' '"), at("tools[0].when"), "must not be empty"},
		{"when too long", tool("effect: read, when: '" + strings.Repeat("a", 4097) + "'"), at("tools[0].when"), "4096 bytes"},
		{"when does not parse", tool("effect: read, when: 'args. =='"), at("tools[0].when"), "does not compile at 1:7"},
		{"when unknown variable", tool("effect: read, when: 'arg.x == 1'"), at("tools[0].when"), "undeclared reference to 'arg'"},
		{"when unknown member", tool("effect: read, when: 'principal.subjct == \"a\"'"), at("tools[0].when"), "undeclared reference"},
		{"when reads result", tool("effect: read, when: 'result.x'"), at("tools[0].when"), "undeclared reference to 'result'"},
		{"when of another type", tool("effect: read, when: 'principal.subject'"), at("tools[0].when"), "must be of type bool, not string"},
		{"when mixes types", tool("effect: read, when: 'principal.subject == 1'"), at("tools[0].when"), "no matching overload"},
		{"when has an unknown function", tool("effect: read, when: 'inside(args.path, \"/d\")'"), at("tools[0].when"), "undeclared reference to 'inside'"},
		{"within an unclean root", tool("effect: read, when: 'within(args.path, \"data\")'"), at("tools[0].when"), "clean absolute path"},
		{"pattern from outside", tool("effect: read, when: 'args.a.matches(args.b)'"), at("tools[0].when"), "as a literal"},
		{"bad pattern", tool("effect: read, when: \"args.a.matches('(')\""), at("tools[0].when"), "invalid matches argument"},
		{"huge pattern", tool("effect: read, when: \"args.a.matches('((a{100}){100}){10}')\""), at("tools[0].when"), "does not compile"},
		{"three loops", tool("effect: read, when: 'args.a.all(x, x.all(y, y.all(z, z == 1)))'"), at("tools[0].when"), "nesting"},
		{"too costly", tool("effect: read, when: 'args.a.all(x, args.b.all(y, args.c.contains(x + y) || args.d.contains(x + y) || x + y + x + y == y + x))'"), at("tools[0].when"), "costs too much"},
		{"key without idempotency", tool("effect: read, when: 'call.idempotencyKey == \"\"'"), at("tools[0].when"), "no idempotency"},
		{"second tool's rule", least + "tools: [{name: a, definition: any, effect: read}, {name: b, definition: any, effect: read, when: x}]\n", at("tools[1].when"), "undeclared"},
		// Status queries.
		{"query of an unknown tool", tool("effect: write, status_query: {tool: q, succeeded: 'true'}"), at("tools[0].status_query.tool"), "must be a tool of this contract"},
		{"query of itself", tool("effect: write, status_query: {tool: t, succeeded: 'true'}"), at("tools[0].status_query.tool"), "whose effect is read"},
		{"query of a read", tool("effect: read, status_query: {tool: t, succeeded: 'true'}"), at("tools[0].status_query"), "only for a tool that writes"},
		{"query empty", tool("effect: write, status_query: {}"), at("tools[0].status_query.tool", "tools[0].status_query.succeeded"), "is required"},
		{"query reads no result", tool("effect: write, status_query: {tool: t, succeeded: 'result'}"), at("tools[0].status_query.succeeded", "tools[0].status_query.tool"), "must be of type bool"},
		{"query argument reads result", tool("effect: write, status_query: {tool: t, arguments: {a b: result.x}, succeeded: 'true'}"), at(`tools[0].status_query.arguments["a b"]`, "tools[0].status_query.tool"), "undeclared"},
		{"query argument reads a key", tool("effect: write, status_query: {tool: t, arguments: {k: call.idempotencyKey}, succeeded: 'true'}"), at("tools[0].status_query.arguments.k", "tools[0].status_query.tool"), "no idempotency"},
		{"query argument a number", tool("effect: write, status_query: {tool: t, arguments: {k: 5}, succeeded: 'true'}"), at("tools[0].status_query.arguments.k", "tools[0].status_query.tool"), "as a string"},
		{"query absent", tool("effect: write, status_query: {tool: t, succeeded: 'true', absent: never}"), at("tools[0].status_query.absent", "tools[0].status_query.tool"), "uncertain, final"},
		{"query settle", tool("effect: write, status_query: {tool: t, succeeded: 'true', settle: 25h}"), at("tools[0].status_query.settle", "tools[0].status_query.tool"), "to 24h"},
		{"query side effect", tool("effect: write, status_query: {tool: t, succeeded: 'true', side_effect_id: '1'}"), at("tools[0].status_query.side_effect_id", "tools[0].status_query.tool"), "must be of type string"},
		// The rest.
		{"resource without scheme", least + "resources: [{uri: /a}]\n", at("resources[0].uri"), "with its scheme"},
		{"resource wildcard host", least + "resources: [{uri: 'https://*/a'}]\n", at("resources[0].uri"), "authority"},
		{"resource inner **", least + "resources: [{uri: 'a://b/**/c'}]\n", at("resources[0].uri"), "last segment"},
		{"resource two stars", least + "resources: [{uri: 'a://b/*x*'}]\n", at("resources[0].uri"), "one *"},
		{"resource as a string", least + "resources: ['a://b']\n", at("resources[0]"), "must be an object"},
		{"prompt twice", least + "prompts: [{name: a}, {name: a}]\n", at("prompts[1].name"), "twice"},
		{"prompt without name", least + "prompts: [{}]\n", at("prompts[0].name"), "is required"},
		{"resource twice", least + "resources: [{uri: 'a://b'}, {uri: 'a://b'}]\n", at("resources[1].uri"), "twice"},
		{"resource with a definition", least + "resources: [{uri: 'a://b', definition: any}]\n", at("resources[0].definition"), "unknown here"},
		{"resource consent", least + "resources: [{uri: 'a://b', consent: often}]\n", at("resources[0].consent"), "none, session, call"},
		{"resource subjects", least + "resources: [{uri: 'a://b', subjects: {}}]\n", at("resources[0].subjects"), "must name groups"},
		{"prompt definition", least + "prompts: [{name: a, definition: one}]\n", at("prompts[0].definition"), "64 lower-case"},
		{"prompt effect", least + "prompts: [{name: a, effect: read}]\n", at("prompts[0].effect"), "unknown here"},
		{"elicitation", least + "reverse: {elicitation: true}\n", at("reverse.elicitation"), "not a boolean"},
		{"elicitation form", least + "reverse: {elicitation: {form: 1}}\n", at("reverse.elicitation.form"), "not a number"},
		{"elicitation url with path", least + "reverse: {elicitation: {url: ['https://a.example/x']}}\n", at("reverse.elicitation.url[0]"), "without a slash"},
		{"sampling", least + "reverse: {sampling: ask}\n", at("reverse.sampling"), "not a string"},
		{"logging", least + "reverse: {logging: loud}\n", at("reverse.logging"), "debug"},
		{"logging as a boolean", least + "reverse: {logging: true}\n", at("reverse.logging"), "not a boolean"},
		{"roots", least + "reverse: {roots: ['file:///a/../b']}\n", at("reverse.roots[0]"), "clean absolute"},
		{"roots of the web", least + "reverse: {roots: ['https://a.example']}\n", at("reverse.roots[0]"), "clean absolute"},
		// Several at once.
		{"many", least + "limits: {timeout: 1, ceiling: x}\ntools: [{name: t, definition: x, effect: y}]\nfoo: 1\n",
			at("foo", "limits.timeout", "limits.ceiling", "tools[0].definition", "tools[0].effect"), "is unknown here"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := Parse([]byte(tt.src))
			f, ok := fault.As(err)
			if !ok || f.Kind != fault.Invalid {
				t.Fatalf("got %v, want an invalid fault", err)
			}
			var paths []string
			for _, field := range f.Fields {
				paths = append(paths, field.Path)
			}
			if !slices.Equal(paths, tt.paths) || !strings.Contains(f.Fields[0].Rule, tt.rule) {
				t.Errorf("got %+v\nwant %q, %q", f.Fields, tt.paths, tt.rule)
			}
		})
	}
}

func TestViolationsAreBounded(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	b.WriteString(least + "tools:\n")
	for i := range 50 {
		fmt.Fprintf(&b, "  - {name: t%d, definition: any, effect: %d}\n", i, i)
	}
	_, err := Parse([]byte(b.String()))
	f, _ := fault.As(err)
	if len(f.Fields) != maxViolations || f.Fields[19].Path != "tools[19].effect" {
		t.Errorf("%d: %+v", len(f.Fields), f.Fields)
	}
}

// TestSchema holds the published schema against the parser: what is good for one
// is good for the other, and each member of a contract is in it.
func TestSchema(t *testing.T) {
	t.Parallel()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("contract.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := compiler.Compile("contract.json")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(src string) error {
		canon, err := normalise([]byte(src))
		if err != nil {
			t.Fatal(err)
		}
		v, err := jsonschema.UnmarshalJSON(bytes.NewReader(canon))
		if err != nil {
			t.Fatal(err)
		}
		return s.Validate(v)
	}
	good := []string{calendar, least, tool("effect: read, when: 'true', timeout: 1m30s"), tool("effect: write, idempotency: {meta: true}, subjects: {users: ['a|b']}")}
	for _, src := range good {
		mustParse(t, src)
		if err := validate(src); err != nil {
			t.Errorf("%v\n%s", err, src)
		}
	}
	bad := []string{
		"{}", least + "x: 1\n", strings.Replace(least, "server: s", "server: S", 1), strings.Replace(least, "http\n", "tcp\n", 1),
		least + "limits: {timeout: 30}\n", least + "limits: {timeout: 1.5s}\n", least + "limits: {request_bytes: true}\n",
		least + "limits: {result_bytes: 99999999}\n", least + "scopes: [a, a]\n", least + "methods: [x]\n",
		least + "record: {reads: never}\n", least + "resources: [{uri: a}]\n", least + "prompts: [{}]\n",
		least + "reverse: {sampling: 1}\n", least + "reverse: {roots: [/a]}\n", least + "tools: [{}]\n",
		tool("effect: x"), tool("effect: destructive, consent: none"), tool("effect: read, subjects: {}"),
		tool("effect: read, subjects: {users: [a]}"), tool("effect: read, retry: {max: 9}"), tool("effect: write, idempotency: {meta: false}"),
		tool("effect: write, idempotency: {}"), tool("effect: write, status_query: {}"), tool("effect: read, foo: 1"),
	}
	for _, src := range bad {
		if _, err := Parse([]byte(src)); err == nil {
			t.Errorf("the parser took %s", src)
		}
		if validate(src) == nil {
			t.Errorf("the schema took %s", src)
		}
	}
	changed := Schema()
	changed[0] = 'x'
	if Schema()[0] != '{' {
		t.Error("the schema can be changed from outside")
	}
}

// FuzzParse holds that no input makes Parse panic or give anything but a
// contract or an invalid fault, and that what it takes keeps its identity.
func FuzzParse(f *testing.F) {
	for _, s := range []string{calendar, least, tool("effect: read, when: 'args.a == 1'"), "{}", `{"server":"a"}`, "a: &x 1\nb: *x", "? [a]\n: b", "!!binary x", "- - -", "a: |\n  b\n---\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		c, err := Parse(src)
		if err != nil {
			fields, ok := fault.As(err)
			if !ok || fields.Kind != fault.Invalid || len(fields.Fields) == 0 || len(fields.Fields) > maxViolations {
				t.Fatalf("%T %v", err, err)
			}
			for _, field := range fields.Fields {
				if field.Path == "" || field.Rule == "" {
					t.Fatalf("%+v", fields.Fields)
				}
			}
			return
		}
		again, err := Parse(c.Canonical)
		if err != nil || again.ID != c.ID {
			t.Fatalf("%v: %s", err, c.Canonical)
		}
	})
}
