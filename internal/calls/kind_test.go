package calls

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func resourceOf(uri string) func(*Proposal) {
	return func(r *Proposal) { r.Tool, r.Resource, r.Arguments = "", uri, nil }
}

func promptOf(name, args string) func(*Proposal) {
	return func(r *Proposal) { r.Tool, r.Prompt, r.Arguments = "", name, []byte(args) }
}

// A resource read and a prompt get are calls like any other: decided, sent once in
// the protocol's words, recorded with their outcome and audited.
func TestKinds_Succeed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	w.sender.answer(func(_ context.Context, s sent, _ int) (sessions.Response, error) {
		if s.method == "prompts/get" {
			return answered(`{"messages":[]}`)
		}
		return answered(`{"contents":[]}`) // which is not "not found"
	})
	for _, tt := range []struct {
		change             func(*Proposal)
		kind               contract.Kind
		method, name, args string
	}{
		{resourceOf("note://n/a\"b"), contract.KindResource, "resources/read", `note://n/a"b`, `{}`},
		{promptOf("greet", `{"who":"Bo"}`), contract.KindPrompt, "prompts/get", "greet", `{"who":"Bo"}`},
	} {
		c := sc.propose("", tt.change)
		if c.State != Succeeded || c.Kind != tt.kind || c.Name != tt.name || c.Effect != Read || len(c.Findings) > 0 || string(c.Arguments) != tt.args {
			t.Fatalf("%s: %s %+v, findings %v", tt.name, c.State, c.Error, c.Findings)
		}
		sends := w.sender.all()
		if last := sends[len(sends)-1]; last.method != tt.method || last.tool != tt.name {
			t.Errorf("sent %+v", last)
		}
		if got := sc.get(c.ID); got.State != Succeeded || got.Kind != tt.kind || !got.Recorded {
			t.Errorf("stored %+v", got)
		}
		if kinds := w.kinds(c.ID); !slices.Equal(kinds, []string{"call.finished"}) {
			t.Errorf("audit %v", kinds)
		}
		list, err := sc.List(t.Context(), sc.alice, Filter{SessionID: sc.session.ID, Kind: tt.kind, Limit: 10})
		if err != nil || len(list) != 1 || list[0].ID != c.ID {
			t.Errorf("list of %s: %v, %v", tt.kind, list, err)
		}
	}
	if slices.Contains(w.lister.asked, catalog.Resource) || slices.Contains(w.lister.asked, catalog.ResourceTemplate) || slices.Contains(w.lister.asked, catalog.Tool) {
		t.Errorf("asked for %v, which no such call needs", w.lister.asked)
	}
	w.verify(sc.alice.Tenant)
}

// No path leads to a resource or prompt that the contract does not have, or past
// what it asks for.
func TestKinds_Denied(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for _, tt := range []struct {
		name   string
		change func(*Proposal)
		check  authz.Check
	}{
		{"resource not covered", resourceOf("file:///etc/passwd"), authz.CheckDefinition},
		{"resource with the name of a tool", resourceOf("read"), authz.CheckDefinition},
		{"traversal", resourceOf("note://n/../m"), authz.CheckDefinition},
		{"encoded traversal", resourceOf("note://n/%2e%2e/m"), authz.CheckDefinition},
		{"subject", resourceOf("note://n/staff/x"), authz.CheckSubject},
		{"prompt not in the contract", promptOf("other", `{}`), authz.CheckDefinition},
		{"prompt not offered", promptOf("gone", `{}`), authz.CheckDefinition},
		{"prompt with the name of a tool", promptOf("read", `{}`), authz.CheckDefinition},
		{"tool with the name of a prompt", func(r *Proposal) { r.Tool = "greet" }, authz.CheckDefinition},
		{"argument missing", promptOf("greet", `{"tone":"x"}`), authz.CheckArguments},
		{"argument unknown", promptOf("greet", `{"who":"x","why":"y"}`), authz.CheckArguments},
		{"argument no string", promptOf("greet", `{"who":1}`), authz.CheckArguments},
		{"argument null", promptOf("greet", `{"who":"x","tone":null}`), authz.CheckArguments},
	} {
		if c := sc.propose("", tt.change); c.State != Denied || c.Decision.FirstFailed != tt.check {
			t.Errorf("%s: %s, %s", tt.name, c.State, c.Decision.FirstFailed)
		}
	}
	for name, changes := range map[string][]string{
		"method":              {", resources/read, prompts/list, prompts/get", ""},
		"prompts/list":        {"prompts/list, ", ""},
		"one method of three": {"resources/read, ", ""},
	} {
		sc := w.scene(w.node(quick()), changes...)
		r, p := sc.propose("", resourceOf("note://n/a")), sc.propose("", promptOf("greet", `{"who":"x"}`))
		if denied := r.State == Denied && r.Decision.FirstFailed == authz.CheckMethod; denied == (name == "prompts/list") {
			t.Errorf("%s: resource %s, %s", name, r.State, r.Decision.FirstFailed)
		}
		want := map[string]authz.Check{"method": authz.CheckMethod, "prompts/list": authz.CheckDefinition, "one method of three": ""}[name]
		if p.Decision.FirstFailed != want {
			t.Errorf("%s: prompt %s, %s", name, p.State, p.Decision.FirstFailed)
		}
	}
	w.lister.capabilities = `{"tools":{}}`
	bare := w.scene(w.node(quick()))
	for _, change := range []func(*Proposal){resourceOf("note://n/a"), promptOf("greet", `{"who":"x"}`)} {
		if c := bare.propose("", change); c.State != Denied || c.Decision.FirstFailed != authz.CheckCapability {
			t.Errorf("not declared: %s, %s", c.State, c.Decision.FirstFailed)
		}
	}
	for _, s := range w.sender.all() {
		if s.tool != "note://n/a" && s.tool != "greet" {
			t.Errorf("sent %+v", s)
		}
	}
}

// A request that names no, or more than one, thing to call makes no call.
func TestKinds_ExactlyOneTarget(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for name, tt := range map[string]struct {
		change func(*Proposal)
		field  string
	}{
		"none":               {func(r *Proposal) { r.Tool = "" }, "tool"},
		"tool and prompt":    {func(r *Proposal) { r.Prompt = "greet" }, "prompt"},
		"resource and tool":  {func(r *Proposal) { r.Resource, r.Arguments = "note://n/a", nil }, "resource"},
		"resource arguments": {func(r *Proposal) { r.Tool, r.Resource = "", "note://n/a" }, "arguments"},
		"control character":  {resourceOf("note://n/a\n"), "resource"},
		"long":               {resourceOf("note://n/" + strings.Repeat("a", 2048)), "resource"},
		"long prompt":        {promptOf(strings.Repeat("a", 129), `{}`), "prompt"},
	} {
		r := sc.proposal("read")
		tt.change(&r)
		_, err := sc.Propose(t.Context(), sc.alice, r)
		f, ok := fault.As(err)
		if !ok || f.Kind != fault.Invalid || len(f.Fields) != 1 || f.Fields[0].Path != tt.field {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := w.count(`SELECT count(*) FROM calls`); n > 0 {
		t.Errorf("%d calls", n)
	}
}

// Consent and grants bind the kind and the URI; what a session agreed to for one
// URI is good for no other.
func TestKinds_Consent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	c := sc.propose("", resourceOf("note://n/secret/a"))
	if c.State != ConsentRequired {
		t.Fatalf("%s %v", c.State, c.Decision.FirstFailed)
	}
	sc.decide(c, true)
	if sc.until(c.ID, Succeeded, Failed, Denied).State != Succeeded {
		t.Fatal("agreed to, and not read")
	}
	if kinds := w.kinds(c.ID); !slices.Contains(kinds, "call.dispatched") || !slices.Contains(kinds, "consent.decided") {
		t.Errorf("audit %v", kinds)
	}
	c = sc.propose("", resourceOf("note://n/shared/a"))
	sc.decide(c, true)
	sc.until(c.ID, Succeeded)
	if c = sc.propose("", resourceOf("note://n/shared/a")); c.State != Succeeded {
		t.Errorf("the grant does not cover the same URI: %s", c.State)
	}
	if c = sc.propose("", resourceOf("note://n/shared/b")); c.State != ConsentRequired {
		t.Errorf("the grant covers another URI: %s", c.State)
	}
}

// The pinned definition of a prompt that changes ends what was agreed to, and the
// call; a request id stands for one kind and name.
func TestKinds_PromptChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()), "{name: greet, definition: \"D:greet\"}", "{name: greet, definition: \"D:greet\", consent: call}")
	c := sc.propose("", promptOf("greet", `{"who":"x"}`), func(r *Proposal) { r.RequestID = "one" })
	if c.State != ConsentRequired {
		t.Fatalf("%s", c.State)
	}
	for name, change := range map[string]func(*Proposal){"prompt": promptOf("gone", `{"who":"x"}`), "tool": func(r *Proposal) { r.Tool, r.Arguments = "greet", []byte(`{"who":"x"}`) },
		"resource": resourceOf("greet"), "arguments.who": promptOf("greet", `{"who":"y"}`)} {
		r := sc.proposal("")
		change(&r)
		r.RequestID = "one"
		_, err := sc.Propose(t.Context(), sc.alice, r)
		if f, ok := fault.As(err); !ok || f.Reason != "REQUEST_ID_REUSED" || f.Fields[0].Path != name {
			t.Errorf("%s: %v", name, err)
		}
	}
	sc.w.lister.set("greet", "second")
	if err := sc.catalog.Invalidate(t.Context(), catalog.Change{Tenant: sc.alice.Tenant, ServerID: sc.server.ID, Kind: catalog.Prompt}); err != nil {
		t.Fatal(err)
	}
	if d := sc.propose("", promptOf("greet", `{"who":"x"}`)); d.State != Denied || d.Decision.FirstFailed != authz.CheckDefinition {
		t.Errorf("changed: %s, %s", d.State, d.Decision.FirstFailed)
	}
	if got := sc.get(c.ID); got.State != Denied || got.Reason != ReasonVoid {
		t.Errorf("it waits on: %s %s", got.State, got.Reason)
	}
}

// Failures of a read: one word for what is not there, and another attempt for one
// that may have been sent.
func TestKinds_Failures(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	rpc := func(code int64) func(context.Context, sent, int) (sessions.Response, error) {
		return func(context.Context, sent, int) (sessions.Response, error) {
			return sessions.Response{Phase: sessions.Answered, Error: &sessions.RPCError{Code: code, Message: "no", Data: []byte(`{"uri":"x"}`)}}, nil
		}
	}
	for _, tt := range []struct {
		code       int64
		change     func(*Proposal)
		want, data string
	}{
		{-32602, resourceOf("note://n/a"), "RESOURCE_NOT_FOUND", `{"code":-32602,"data":{"uri":"x"}}`},
		{-32002, resourceOf("note://n/a"), "RESOURCE_NOT_FOUND", `{"code":-32002,"data":{"uri":"x"}}`},
		{-32603, resourceOf("note://n/a"), "-32603", `{"uri":"x"}`},
		{-32602, promptOf("greet", `{"who":"x"}`), "-32602", `{"uri":"x"}`},
	} {
		w.sender.answer(rpc(tt.code))
		c := sc.propose("", tt.change)
		if c.State != Failed || c.Error.Layer != LayerProtocol || c.Error.Code != tt.want || string(c.Error.Data) != tt.data {
			t.Errorf("%d: %s %+v", tt.code, c.State, c.Error)
		}
	}
	w.sender.answer(func(_ context.Context, _ sent, n int) (sessions.Response, error) {
		if n <= 2 {
			return sessions.Response{Phase: sessions.MaybeSent}, fault.New(fault.Unavailable, "GONE", "the connection broke").In(fault.Transport)
		}
		return answered(`{"contents":5}`)
	})
	c := sc.propose("", resourceOf("note://n/retried"))
	if c.State != Succeeded || c.Attempt != 3 || len(c.Findings) != 1 || !strings.HasPrefix(c.Findings[0], "CONTENT_INVALID: ") {
		t.Errorf("%s after %d, %v", c.State, c.Attempt, c.Findings)
	}
	w.sender.answer(func(context.Context, sent, int) (sessions.Response, error) {
		return sessions.Response{Phase: sessions.MaybeSent}, fault.New(fault.Unavailable, "GONE", "the connection broke").In(fault.Transport)
	})
	if c := sc.propose("", promptOf("greet", `{"who":"z"}`)); c.State != Failed || c.Attempt != 3 {
		t.Errorf("never answered: %s after %d", c.State, c.Attempt)
	}
}

// Another user, and another tenant, reach neither the session nor the call.
func TestKinds_OthersReachNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	one, two := w.scene(n), w.scene(n)
	c := one.propose("", resourceOf("note://n/a"))
	bob := w.key(one.admin, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "bob"})
	for _, p := range []tenant.Principal{bob, two.alice} {
		r := one.proposal("")
		resourceOf("note://n/a")(&r)
		if _, err := n.Propose(t.Context(), p, r); !fault.Is(err, fault.NotFound) {
			t.Errorf("propose: %v", err)
		}
		if _, err := n.Get(t.Context(), p, c.ID, 0, 0); !fault.Is(err, fault.NotFound) {
			t.Errorf("get: %v", err)
		}
	}
}

// The dry run answers for every kind what a proposal would.
func TestKinds_DryRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for _, tt := range []struct {
		run     DryRun
		outcome authz.Outcome
		first   authz.Check
	}{
		{DryRun{Resource: "note://n/a"}, authz.Allow, ""},
		{DryRun{Resource: "note://n/secret/a"}, authz.Ask, authz.CheckConsent},
		{DryRun{Resource: "file:///etc/passwd"}, authz.Deny, authz.CheckDefinition},
		{DryRun{Prompt: "greet", Arguments: []byte(`{"who":"x"}`)}, authz.Allow, ""},
		{DryRun{Prompt: "greet"}, authz.Deny, authz.CheckArguments},
	} {
		tt.run.Server, tt.run.Subject = "calendar", sc.alice.Subject
		r, err := sc.Check(t.Context(), sc.admin, sc.catalog, tt.run)
		if err != nil || r.Decision.Outcome != tt.outcome || r.Decision.FirstFailed != tt.first || tt.outcome != authz.Deny && r.Effect != Read {
			t.Errorf("%+v: %+v, %v", tt.run, r, err)
		}
	}
	if _, err := sc.Check(t.Context(), sc.admin, sc.catalog, DryRun{Server: "calendar"}); !fault.Is(err, fault.Invalid) {
		t.Errorf("nothing named: %v", err)
	}
}
