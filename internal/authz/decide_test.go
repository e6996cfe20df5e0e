package authz

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const pinned = "doc-1:sha256:0000000000000000000000000000000000000000000000000000000000000001"

func parse(t testing.TB, changes ...string) *contract.Contract {
	t.Helper()
	src := `server: calendar
transport: http
protocol: {versions: ["2026-07-28"]}
origin: "https://calendar.example"
audience: "https://calendar.example/mcp"
scopes: [drafts]
methods: [tools/list, tools/call]
limits: {request_bytes: 100, calls_per_session: 5, ceiling: 1m, timeout: 30s}
tools:
  - {name: look, definition: "` + pinned + `", effect: read}
  - {name: put, definition: "` + pinned + `", effect: write, consent: call, when: "args.n < 10", subjects: {groups: [staff], users: ["web|alice"], projects: [p1]}}
  - {name: share, definition: "` + pinned + `", effect: write, consent: session}
  - {name: erase, definition: any, effect: destructive}
`
	for i := 0; i+1 < len(changes); i += 2 {
		if !strings.Contains(src, changes[i]) {
			t.Fatalf("no %q", changes[i])
		}
		src = strings.ReplaceAll(src, changes[i], changes[i+1])
	}
	c, err := contract.Parse([]byte(src))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// good is an input for which every check but consent passes.
func good(t testing.TB, tool, args string) Input {
	t.Helper()
	decoded, err := canonical.Decode([]byte(args))
	if err != nil {
		t.Fatal(err)
	}
	return Input{
		Principal: tenant.Principal{Role: tenant.RoleService, Subject: tenant.Subject{Source: "web", Value: "alice"},
			Groups: []string{"staff"}, Project: "p1"},
		SessionID: "ses_1", SessionOpen: true, InSession: true, Servers: []string{"srv_1"},
		Server: Server{ID: "srv_1", Name: "calendar", Origin: "https://calendar.example", Transport: "HTTP",
			URL: "https://calendar.example/mcp", Authorization: "NONE", Active: true},
		Contract: parse(t), Revision: 3, ProtocolVersion: "2026-07-28", Declared: true,
		Definition: Definition{Offered: true, Digest: pinned, ValidateArguments: func(any) error { return nil }},
		Proposal:   Proposal{Kind: contract.KindTool, Name: tool, Arguments: []byte(args), Decoded: decoded, RequestID: "r1"},
	}
}

var order = []Check{CheckProtocol, CheckHost, CheckClient, CheckServer, CheckOrigin, CheckTransport, CheckMethod, CheckCapability,
	CheckSubject, CheckDefinition, CheckAudience, CheckScopes, CheckArguments, CheckPayload, CheckConsent, CheckTimeout, CheckBudget}

// failing makes each check, and only it, fail. put is the tool.
var failing = map[Check][]func(testing.TB, *Input){
	CheckProtocol: {func(_ testing.TB, in *Input) { in.ProtocolVersion = "2025-11-25" }, func(_ testing.TB, in *Input) { in.ProtocolVersion = "" }},
	CheckHost:     {func(_ testing.TB, in *Input) { in.SessionOpen = false }},
	CheckClient: {func(_ testing.TB, in *Input) { in.InSession = false },
		func(_ testing.TB, in *Input) { in.Principal.Servers = []string{"other"} }},
	CheckServer: {func(_ testing.TB, in *Input) { in.Server.Active = false },
		func(_ testing.TB, in *Input) { in.Server.Name, in.Principal.Servers = "calendar2", nil }},
	CheckOrigin: {func(_ testing.TB, in *Input) { in.Server.Origin = "https://calendar.example:8443" },
		func(_ testing.TB, in *Input) { in.Server.Origin = "" }},
	CheckTransport: {func(_ testing.TB, in *Input) { in.Server.Transport = "STDIO" }, func(_ testing.TB, in *Input) { in.Server.Transport = "http" }},
	CheckMethod: {func(t testing.TB, in *Input) {
		in.Contract = parse(t, "methods: [tools/list, tools/call]", "methods: [tools/list]")
	}},
	CheckCapability: {func(_ testing.TB, in *Input) { in.Declared = false }},
	CheckSubject: {func(_ testing.TB, in *Input) { in.Principal.Groups = []string{"Staff"} },
		func(_ testing.TB, in *Input) { in.Principal.Groups = nil },
		func(_ testing.TB, in *Input) { in.Principal.Subject.Source = "other" },
		func(_ testing.TB, in *Input) { in.Principal.Subject = tenant.Subject{Source: "", Value: "web|alice"} },
		func(_ testing.TB, in *Input) { in.Principal.Project = "" }},
	CheckDefinition: {func(_ testing.TB, in *Input) { in.Definition.Offered = false },
		func(_ testing.TB, in *Input) { in.Definition.Digest = strings.Replace(pinned, "1", "2", 1) },
		func(_ testing.TB, in *Input) { in.Definition.Digest = "" },
		func(_ testing.TB, in *Input) { in.Definition.Quarantine = "conflict" },
		func(_ testing.TB, in *Input) { in.Definition.Stale = "the list failed" }},
	CheckAudience: {func(_ testing.TB, in *Input) { in.Server.URL = "https://calendar.example/mcp/" }},
	CheckScopes:   {func(_ testing.TB, in *Input) { in.Server.Authorization = "OAUTH" }},
	CheckArguments: {func(_ testing.TB, in *Input) {
		in.Definition.ValidateArguments = func(any) error { return errors.New("no n") }
	},
		func(t testing.TB, in *Input) { *in = good(t, "put", `{"n":10}`) },
		func(t testing.TB, in *Input) { *in = good(t, "put", `{"n":"1"}`) },
		func(t testing.TB, in *Input) { *in = good(t, "put", `{}`) },
		func(t testing.TB, in *Input) { *in = good(t, "put", `{"n":9223372036854775808}`) }},
	CheckPayload: {func(t testing.TB, in *Input) { *in = good(t, "put", `{"n":1,"x":"`+strings.Repeat("a", 100)+`"}`) }},
	CheckTimeout: {func(_ testing.TB, in *Input) { in.Proposal.Timeout = time.Minute + 1 }},
	CheckBudget:  {func(_ testing.TB, in *Input) { in.Calls = 5 }, func(_ testing.TB, in *Input) { in.Calls = 1 << 40 }},
}

func TestDecide_EachCheckAloneDeniesAndIsNamed(t *testing.T) {
	t.Parallel()
	for _, check := range order {
		if check == CheckConsent {
			continue
		}
		if len(failing[check]) == 0 {
			t.Fatalf("nothing fails %s", check)
		}
		for i, change := range failing[check] {
			in := good(t, "put", `{"n":1}`)
			change(t, &in)
			d := Decide(in)
			if d.Outcome != Deny || d.FirstFailed != check {
				t.Errorf("%s %d: %s, first failed %s", check, i, d.Outcome, d.FirstFailed)
				continue
			}
			if r, ok := d.Failed(); !ok || r.Check != check || r.Passed || r.Detail == "" {
				t.Errorf("%s %d: failed %+v", check, i, r)
			}
			// Without consent too, it is the denial that is named: no consent could help.
			for _, r := range d.Checks {
				if want := r.Check != check && r.Check != CheckConsent; r.Passed != want {
					t.Errorf("%s %d: check %s passed: %v", check, i, r.Check, r.Passed)
				}
			}
		}
	}
}

func TestDecide_TheFixedOrderWhateverFails(t *testing.T) {
	t.Parallel()
	for i, first := range order {
		if first == CheckConsent {
			continue
		}
		for _, second := range order[i+1:] {
			if second == CheckConsent {
				continue
			}
			in := good(t, "put", `{"n":1}`)
			failing[second][0](t, &in)
			if first != CheckArguments && first != CheckPayload { // these replace the input as a whole
				failing[first][0](t, &in)
			}
			d := Decide(in)
			want := first
			if first == CheckPayload {
				want = second
			}
			if first == CheckArguments {
				failing[first][0](t, &in)
				d = Decide(in)
			}
			if d.Outcome != Deny || d.FirstFailed != want {
				t.Errorf("%s and %s: %s", first, second, d.FirstFailed)
			}
			var got []Check
			for _, r := range d.Checks {
				got = append(got, r.Check)
			}
			if !slices.Equal(got, order) {
				t.Fatalf("checks %v", got)
			}
		}
	}
}

func TestDecide_Consent(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		tool    string
		granted bool
		want    Outcome
		first   Check
	}{
		{"look", false, Allow, ""}, {"look", true, Allow, ""},
		{"put", false, Ask, CheckConsent}, {"put", true, Ask, CheckConsent}, // a grant never covers the call rule
		{"share", false, Ask, CheckConsent}, {"share", true, Allow, ""},
		{"erase", false, Ask, CheckConsent}, {"erase", true, Ask, CheckConsent},
	} {
		in := good(t, c.tool, `{"n":1}`)
		in.Granted = c.granted
		d := Decide(in)
		if d.Outcome != c.want || d.FirstFailed != c.first || d.ContractID != in.Contract.ID || d.ContractRevision != 3 || d.DefinitionDigest != pinned {
			t.Errorf("%s, granted %v: %+v", c.tool, c.granted, d)
		}
	}
}

func TestDecide_NoContractDeniesAtTheFirstCheck(t *testing.T) {
	t.Parallel()
	in := good(t, "look", `{}`)
	in.Contract = nil
	if d := Decide(in); d.Outcome != Deny || d.FirstFailed != CheckProtocol || len(d.Checks) != len(order) || d.ContractID != "" {
		t.Fatalf("%+v", d)
	}
	if d := Decide(Input{}); d.Outcome != Deny {
		t.Fatalf("nothing at all: %+v", d)
	}
}

// FO-096: there is no other door to a tool: no alias, qualified or folded name.
func TestFO096_NoOtherDoorToATool(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"calendar__look", "calendar.look", "calendar/look", "mcp__calendar__look", "LOOK", "look ", " look", "look\x00",
		"lооk" /* Cyrillic */, "", "tools/call"} {
		in := good(t, "look", `{}`)
		in.Proposal.Name, in.Granted = name, true
		if d := Decide(in); d.Outcome != Deny || d.FirstFailed != CheckDefinition {
			t.Errorf("%q: %s %s", name, d.Outcome, d.FirstFailed)
		}
	}
}

// FO-097: what no rule names is denied, also when the server offers it; there is
// no default that allows.
func TestFO097_NothingIsAllowedByDefault(t *testing.T) {
	t.Parallel()
	in := good(t, "drop", `{}`)
	if d := Decide(in); d.Outcome != Deny || d.FirstFailed != CheckDefinition {
		t.Errorf("%+v", d)
	}
	in = good(t, "put", `{"n":1}`)
	in.Contract = parse(t, `when: "args.n < 10"`, `when: "args.m < 10"`) // the rule names another member
	if d := Decide(in); d.Outcome != Deny || d.FirstFailed != CheckArguments {
		t.Errorf("%+v", d)
	}
}

// FO-098: what a server says of its own tools never enters a decision; the
// contract's effect does, and a finding does not change it.
func TestFO098_HintsOfTheServerGrantNothing(t *testing.T) {
	t.Parallel()
	in := good(t, "erase", `{}`)
	in.Definition.Findings = []string{"readOnlyHint is true"}
	if d := Decide(in); d.Outcome != Ask {
		t.Errorf("%+v", d)
	}
	// A stale list stops everything that is not a read by contract.
	in.Definition.Stale = "down"
	if d := Decide(in); d.Outcome != Deny || d.FirstFailed != CheckDefinition {
		t.Errorf("%+v", d)
	}
	in = good(t, "look", `{}`)
	in.Definition.Stale = "down"
	if d := Decide(in); d.Outcome != Allow {
		t.Errorf("%+v", d)
	}
}

// Details are shown to callers: they hold no argument.
func TestDecide_DetailsHoldNoPayload(t *testing.T) {
	t.Parallel()
	for _, args := range []string{`{"n":"s3cret"}`, `{"n":11,"x":"s3cret"}`, `{"s3cret":1}`, `{"n":1,"x":"s3cret` + strings.Repeat("a", 100) + `"}`} {
		for _, r := range Decide(good(t, "put", args)).Checks {
			if strings.Contains(r.Detail, "s3cret") {
				t.Errorf("%s: %s", args, r.Detail)
			}
		}
	}
}

func TestDecide_IsPureAndLeavesItsInputAlone(t *testing.T) {
	t.Parallel()
	in := good(t, "put", `{"n":1}`)
	one, two := Decide(in), Decide(in)
	if one.Outcome != two.Outcome || !slices.Equal(one.Checks, two.Checks) || string(in.Proposal.Arguments) != `{"n":1}` {
		t.Fatal("it differs from itself")
	}
	one.Checks[0].Passed = false
	if !Decide(in).Checks[0].Passed {
		t.Fatal("decisions share memory")
	}
}

// The checks of resources and prompts: each by its own method, feature and words.
func TestDecide_Kinds(t *testing.T) {
	t.Parallel()
	c := parse(t, "methods: [tools/list, tools/call]", "methods: [tools/list, tools/call, resources/read, prompts/get, prompts/list]",
		"tools:\n", `resources:
  - {uri: "a://b/staff/*", subjects: {groups: [admins]}}
  - {uri: "a://b/*"}
prompts: [{name: look, definition: "`+pinned+`"}, {name: "any"}]
tools:
`)
	of := func(kind contract.Kind, name string) Input {
		in := good(t, name, `{}`)
		in.Contract, in.Proposal.Kind = c, kind
		return in
	}
	for _, tt := range []struct {
		kind   contract.Kind
		name   string
		change func(*Input)
		first  Check
		detail string
	}{
		{contract.KindResource, "a://b/c", func(in *Input) { in.Definition = Definition{Stale: "down"} }, "", ""},
		{contract.KindResource, "a://b/c/d", nil, CheckDefinition, "does not name this resource"},
		{contract.KindResource, "look", nil, CheckDefinition, "does not name this resource"},
		{contract.KindResource, "a://b/staff/c", nil, CheckSubject, "use the resource"},
		{contract.KindResource, "a://b/c", func(in *Input) { in.Declared = false }, CheckCapability, "does not declare resources"},
		{contract.KindResource, "a://b/c", func(in *Input) { in.Contract = parse(t) }, CheckMethod, "does not allow resources/read"},
		{contract.KindPrompt, "look", func(in *Input) { in.Definition.Stale = "down" }, "", ""},
		{contract.KindPrompt, "any", func(in *Input) { in.Definition.Digest = "doc-1:sha256:x" }, "", ""},
		{contract.KindPrompt, "look", func(in *Input) { in.Definition.Digest = "doc-1:sha256:x" }, CheckDefinition, "not the reviewed one"},
		{contract.KindPrompt, "look", func(in *Input) { in.Definition = Definition{} }, CheckDefinition, "does not offer this prompt"},
		{contract.KindPrompt, "look", func(in *Input) { in.Definition.Quarantine = "conflict" }, CheckDefinition, "quarantined"},
		{contract.KindPrompt, "put", nil, CheckDefinition, "does not name this prompt"},
		{contract.KindTool, "any", nil, CheckDefinition, "does not name this tool"},
		{"", "look", nil, CheckMethod, "does not allow"},
		{"OTHER", "a://b/c", nil, CheckMethod, "does not allow"},
	} {
		in := of(tt.kind, tt.name)
		if tt.change != nil {
			tt.change(&in)
		}
		d := Decide(in)
		if r, _ := d.Failed(); d.FirstFailed != tt.first || !strings.Contains(r.Detail, tt.detail) || tt.first == "" && d.Outcome != Allow {
			t.Errorf("%s %s: %s, %s %q", tt.kind, tt.name, d.Outcome, d.FirstFailed, r.Detail)
		}
	}
}
