package calls

import (
	"context"
	"strconv"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func (sc *scene) query(change func(*Query)) Query {
	q := Query{SessionID: sc.session.ID, Server: "calendar", Prompt: "greet", Argument: "who", Value: "Bo"}
	change(&q)
	return q
}

// A completion goes out once, on the user's own connection and in the protocol's
// words, and leaves no call and no entry behind.
func TestComplete(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	many := make([]string, 150)
	for i := range many {
		many[i] = strconv.Itoa(i)
	}
	long := strings.Repeat("x", maxSuggestion+1)
	for _, tt := range []struct {
		change       func(*Query)
		params       string
		answer, want string
		total        int
		more         bool
	}{
		{func(q *Query) { q.Context = []byte(`{"tone": "warm"}`) },
			`{"ref":{"type":"ref/prompt","name":"greet"},"argument":{"name":"who","value":"Bo"},"context":{"arguments":{"tone":"warm"}}}`,
			`{"completion":{"values":["Bob","Bo\u0000"],"total":7,"hasMore":true}}`, "Bob,Bo\uFFFD", 7, true},
		{func(q *Query) { q.Prompt, q.Template, q.Argument, q.Value = "", "note://n/{id}", "id", `"` },
			`{"ref":{"type":"ref/resource","uri":"note://n/{id}"},"argument":{"name":"id","value":"\""}}`,
			`{"completion":{"values":[1,null,"` + long + `","a"],"total":-1}}`, "a", -1, false},
		{func(q *Query) {}, `{"ref":{"type":"ref/prompt","name":"greet"},"argument":{"name":"who","value":"Bo"}}`,
			`{"completion":{"values":["` + strings.Join(many, `","`) + `"]}}`, strings.Join(many[:100], ","), -1, true},
		{func(q *Query) {}, `{"ref":{"type":"ref/prompt","name":"greet"},"argument":{"name":"who","value":"Bo"}}`,
			`{"completion":{"values":[]}}`, "", -1, false},
	} {
		w.sender.answer(func(context.Context, sent, int) (sessions.Response, error) { return answered(tt.answer) })
		got, err := sc.Complete(t.Context(), sc.alice, sc.query(tt.change))
		if err != nil || strings.Join(got.Values, ",") != tt.want || got.More != tt.more || got.Server.Name != "calendar" ||
			(got.Total == nil) != (tt.total < 0) || got.Total != nil && *got.Total != tt.total {
			t.Errorf("%s: %+v, %v", tt.params, got, err)
		}
		sends := w.sender.all()
		if last := sends[len(sends)-1]; last.method != "completion/complete" || string(last.r.Params) != tt.params || last.key.Subject != sc.alice.Subject {
			t.Errorf("sent %+v, want %s", last, tt.params)
		}
	}
	if n := w.count(`SELECT (SELECT count(*) FROM calls) + (SELECT count(*) FROM audit_entries WHERE kind LIKE 'call.%')`); n > 0 {
		t.Errorf("%d rows of calls", n)
	}
}

// What the contract does not let the user use is completed by no server, and what
// is not well formed is asked of none.
func TestComplete_Refused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	sc, other := w.scene(n), w.scene(n)
	bob := w.key(sc.admin, tenant.KeySpec{Role: tenant.RoleService}, tenant.OnBehalf{User: "bob"})
	without := w.scene(n, ", completion/complete", "")
	unlisted := w.scene(n, ", resources/templates/list", "")
	template := func(uri, variable string) func(*Query) {
		return func(q *Query) { q.Prompt, q.Template, q.Argument = "", uri, variable }
	}
	for name, tt := range map[string]struct {
		sc     *scene
		who    tenant.Principal
		change func(*Query)
		kind   fault.Kind
		text   string
	}{
		"method":                   {without, without.alice, func(*Query) {}, fault.Denied, "does not allow completion/complete"},
		"templates not listed":     {unlisted, unlisted.alice, template("note://n/{id}", "id"), fault.Denied, "resources/templates/list"},
		"prompt not in contract":   {sc, sc.alice, func(q *Query) { q.Prompt = "other" }, fault.Denied, "definition"},
		"prompt not offered":       {sc, sc.alice, func(q *Query) { q.Prompt = "gone" }, fault.Denied, "does not offer"},
		"template not covered":     {sc, sc.alice, template("file:///{path}", "path"), fault.Denied, "covers no such"},
		"template not offered":     {sc, sc.alice, template("note://n/{other}", "other"), fault.Denied, "covers no such"},
		"argument of no prompt":    {sc, sc.alice, func(q *Query) { q.Argument = "why" }, fault.Invalid, "argument.name"},
		"variable of no template":  {sc, sc.alice, template("note://n/{id}", "x"), fault.Invalid, "argument.name"},
		"another user":             {sc, bob, func(*Query) {}, fault.NotFound, ""},
		"another tenant":           {sc, other.alice, func(*Query) {}, fault.NotFound, ""},
		"no ref":                   {sc, sc.alice, func(q *Query) { q.Prompt = "" }, fault.Invalid, "ref"},
		"two refs":                 {sc, sc.alice, func(q *Query) { q.Template = "note://n/{id}" }, fault.Invalid, "ref"},
		"value too long":           {sc, sc.alice, func(q *Query) { q.Value = strings.Repeat("x", maxQueryValue+1) }, fault.Invalid, "argument.value"},
		"context no object":        {sc, sc.alice, func(q *Query) { q.Context = []byte(`[]`) }, fault.Invalid, "context"},
		"context with a number":    {sc, sc.alice, func(q *Query) { q.Context = []byte(`{"a":1}`) }, fault.Invalid, "context"},
		"context with a null":      {sc, sc.alice, func(q *Query) { q.Context = []byte(`{"a":null}`) }, fault.Invalid, "context"},
		"context that is no JSON":  {sc, sc.alice, func(q *Query) { q.Context = []byte(`{`) }, fault.Invalid, "context"},
		"control character in ref": {sc, sc.alice, func(q *Query) { q.Prompt = "a\x00" }, fault.Invalid, "ref.prompt"},
	} {
		_, err := n.Complete(t.Context(), tt.who, tt.sc.query(tt.change))
		f, ok := fault.As(err)
		if !ok || f.Kind != tt.kind || tt.kind == fault.Denied && !strings.Contains(f.Message, tt.text) ||
			tt.kind == fault.Invalid && (len(f.Fields) != 1 || f.Fields[0].Path != tt.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
	w.lister.capabilities = `{"tools":{},"prompts":{},"resources":{}}`
	bare := w.scene(n)
	if _, err := n.Complete(t.Context(), bare.alice, bare.query(func(*Query) {})); !fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), "completions") {
		t.Errorf("not declared: %v", err)
	}
	if sends := w.sender.all(); len(sends) > 0 {
		t.Errorf("sent %+v", sends)
	}
}

// Whatever a server answers, a completion is a bounded list of texts or an error.
func TestComplete_BadAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for answer, kind := range map[string]fault.Kind{
		`{}`: fault.Unavailable, `{"completion":null}`: fault.Unavailable, `{"completion":{"values":null}}`: fault.Unavailable,
		`{"completion":{"values":{}}}`: fault.Unavailable, `{"completion":{"Values":["a"]}}`: fault.Unavailable,
	} {
		w.sender.answer(func(context.Context, sent, int) (sessions.Response, error) { return answered(answer) })
		if got, err := sc.Complete(t.Context(), sc.alice, sc.query(func(*Query) {})); !fault.Is(err, kind) {
			t.Errorf("%s: %+v, %v", answer, got, err)
		}
	}
	w.sender.answer(func(context.Context, sent, int) (sessions.Response, error) {
		return sessions.Response{Phase: sessions.Answered, Error: &sessions.RPCError{Code: -32602, Message: strings.Repeat("no", 1000)}}, nil
	})
	_, err := sc.Complete(t.Context(), sc.alice, sc.query(func(*Query) {}))
	if f, ok := fault.As(err); !ok || f.Reason != "COMPLETION_REFUSED" || len(f.Message) > 500 {
		t.Errorf("%v", err)
	}
}
