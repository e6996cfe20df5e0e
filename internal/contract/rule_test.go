package contract

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func value(t testing.TB, raw string) Value {
	t.Helper()
	canon, err := canonical.Args([]byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	v, err := NewValue(canon)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func ruled(t testing.TB, when string) *Tool {
	t.Helper()
	quoted := strings.ReplaceAll(when, "'", "''")
	return mustParse(t, tool("effect: write, idempotency: {meta: true}, when: '"+quoted+"'")).Tools[0]
}

func TestCheck(t *testing.T) {
	t.Parallel()
	vars := Vars{
		Principal: Principal{Subject: "alice", Source: "web", Groups: []string{"staff", "eng"}, Role: "USER"},
		Session:   Session{ID: "ses_1", Servers: []string{"calendar"}},
		Call:      Call{IdempotencyKey: "k1", RequestID: "r1", Server: "s", Tool: "t"},
	}
	const (
		notMet    = "the contract's rule for this tool is not met"
		badType   = "a value has a type that the rule does not expect"
		missing   = "the rule reads a member that is missing"
		inexact   = "arguments hold a number that cannot be read exactly, at "
		noBool    = "the rule gave no true or false"
		tooCostly = "the rule costs too much"
	)
	tests := []struct {
		when, args string
		detail     string // empty means allowed
	}{
		{`true`, `{}`, ""},
		{`false`, `{}`, notMet},
		{`args.title.size() <= 200 && !has(args.attendees)`, `{"title":"Review"}`, ""},
		{`args.title.size() <= 200 && !has(args.attendees)`, `{"title":"Review","attendees":[]}`, notMet},
		{`args.title.size() <= 200 && !has(args.attendees)`, `{"title":"` + strings.Repeat("é", 201) + `"}`, notMet},
		{`args.title.size() <= 200`, `{}`, missing + ": title"},
		{`args["title"] == "x"`, `{}`, missing + ": title"},
		{`args[args.k] == "x"`, `{"k":"secret"}`, missing},
		{`args.title.size() <= 200`, `{"title":5}`, badType},
		{`args.title.size() <= 200`, `{"title":null}`, badType},
		{`args.flag`, `{"flag":true}`, ""},
		{`args.flag`, `{"flag":"true"}`, noBool},
		{`args.flag`, `{"flag":1}`, noBool},
		{`!args.flag`, `{"flag":"x"}`, badType},
		{`args.n == 1`, `{"n":1}`, ""},
		{`args.n == 1`, `{"n":1.0}`, ""},
		{`args.n == 1`, `{"n":"1"}`, notMet},
		{`args.n != 1`, `{"n":9223372036854775808}`, inexact + "n"},
		{`args != {"n": 1}`, `{"n":9223372036854775808}`, inexact + "n"},
		{`args.title == "x"`, `{"title":"x","deep":[{"n":1e400}]}`, inexact + "deep[0].n"},
		{`principal.subject == "alice"`, `{"n":1e400}`, ""},
		{`args.price <= 0.3`, `{"price":0.1}`, ""},
		{`args.big == 9007199254740993`, `{"big":9007199254740993}`, ""},
		{`args.big == 9007199254740993`, `{"big":9007199254740992}`, notMet},
		{`int(args.s) > 0`, `{"s":"hunter2"}`, "the rule cannot be evaluated"},
		{`args.a / args.b == 1`, `{"a":1,"b":0}`, "the rule cannot be evaluated"},
		{`args.l[5] == 1`, `{"l":[1]}`, "the rule cannot be evaluated"},
		{`args.l.all(x, x < 3)`, `{"l":[1,2]}`, ""},
		{`args.l.all(x, x < 3)`, `{"l":[1,3]}`, notMet},
		{`args.to.all(x, x.endsWith("@example.com"))`, `{"to":["a@example.com","b@evil.com"]}`, notMet},
		{`args.mail.matches("^[a-z]+@example[.]com$")`, `{"mail":"a@example.com"}`, ""},
		{`principal.subject == "alice" && principal.source == "web" && "eng" in principal.groups && principal.project == "" && principal.role == "USER"`, `{}`, ""},
		{`session.id == "ses_1" && "calendar" in session.servers`, `{}`, ""},
		{`call.idempotencyKey == "k1" && call.requestId == "r1" && call.server == "s" && call.tool == "t"`, `{}`, ""},
		{`within(args.path, "/data")`, `{"path":"/data/a"}`, ""},
		{`within(args.path, "/data")`, `{"path":"/data/../etc/passwd"}`, notMet},
		{`within(args.path, "/data")`, `{"path":"/data/\uff0e\uff0e/etc"}`, notMet},
		{`within(args.path, "/data")`, `{"path":5}`, notMet},
		{`within(args.path, "/data")`, `{"path":["/data/a"]}`, notMet},
		{`within(args.path, "/data")`, `{"path":null}`, notMet},
		{`within(args.path, "/data")`, `{}`, missing + ": path"},
		{`within(args.path, args.root)`, `{"path":"/data/a","root":5}`, notMet},
		{`args.paths.all(p, within(p, "/data"))`, `{"paths":["/data/a","/data/b/../../x"]}`, notMet},
		{`within(args.path, "/home/" + principal.subject)`, `{"path":"/home/alice/x"}`, ""},
		{`within(args.path, "/home/" + principal.subject)`, `{"path":"/home/alicex"}`, notMet},
		{`args.l.all(x, within(args.path, "/data"))`, `{"path":"/data/` + strings.Repeat("x", 4000) + `","l":[` + strings.Repeat("1,", 5000) + `1]}`, tooCostly},
		{`args.l.all(x, args.l.all(y, x <= y || x > y))`, `{"l":[` + strings.Repeat("1,", 5000) + `1]}`, tooCostly},
	}
	for _, tt := range tests {
		v := vars
		v.Args = value(t, tt.args)
		ok, detail := ruled(t, tt.when).Check(v)
		if ok != (tt.detail == "") || detail != tt.detail {
			t.Errorf("%s with %.60s: %v %q, want %q", tt.when, tt.args, ok, detail, tt.detail)
		}
	}
	if ok, detail := mustParse(t, tool("effect: read")).Tools[0].Check(Vars{}); !ok || detail != "" {
		t.Errorf("no rule: %v %q", ok, detail)
	}
	if ok, detail := ruled(t, `!has(args.a) && principal.groups.size() == 0`).Check(Vars{}); !ok {
		t.Errorf("zero variables: %s", detail)
	}
	if _, err := NewValue([]byte(`[1]`)); !fault.Is(err, fault.Invalid) {
		t.Errorf("a list as arguments: %v", err)
	}
}

func TestSubjects(t *testing.T) {
	t.Parallel()
	s := mustParse(t, tool("effect: read, subjects: {groups: [staff, eng], users: ['web|alice', 'web|bob'], projects: [p]}")).Tools[0].Subjects
	tests := []struct {
		user    string
		groups  []string
		project string
		want    bool
	}{
		{"web|alice", []string{"eng"}, "p", true},
		{"crm|alice", []string{"eng"}, "p", false},
		{"web|alice", []string{"guests"}, "p", false},
		{"web|alice", nil, "p", false},
		{"web|alice", []string{"staff"}, "", false},
		{"", nil, "", false},
	}
	for _, tt := range tests {
		if got := s.Allow(tt.user, tt.groups, tt.project); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
	if !(Subjects{}).Allow("x|y", nil, "") {
		t.Error("nobody may use a tool without subjects")
	}
}

const queried = `tools:
  - {name: find, definition: any, effect: read}
  - name: make
    definition: any
    effect: write
    idempotency: {meta: true}
    status_query:
      tool: find
      arguments: {key: call.idempotencyKey, "it's": "[args.n, args.f, {'b': null, 'a': true}]", who: principal.subject}
      succeeded: result.found && result.id != ""
      side_effect_id: result.id
      absent: final
      settle: 0s
`

func TestStatusQuery(t *testing.T) {
	t.Parallel()
	q := mustParse(t, least+queried).Tools[1].StatusQuery
	if q.Absent != AbsentFinal || q.Settle != 0 {
		t.Errorf("%+v", q)
	}
	v := Vars{Args: value(t, `{"n":9007199254740993,"f":1.5}`), Call: Call{IdempotencyKey: "k\"1"}, Principal: Principal{Subject: "alice"}}
	got, err := q.Arguments(v)
	if want := `{"it's":[9007199254740993,1.5,{"a":true,"b":null}],"key":"k\"1","who":"alice"}`; err != nil || string(got) != want {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
	for _, args := range []string{`{}`, `{"n":1e400,"f":1}`, `{"n":1,"f":"` + strings.Repeat("x", 70000) + `"}`} {
		v.Args = value(t, args)
		if got, err := q.Arguments(v); !fault.Is(err, fault.Precondition) {
			t.Errorf("%.40s: %.40s, %v", args, got, err)
		}
	}
	tests := []struct {
		result  string
		verdict Verdict
		id      string
	}{
		{`{"found":true,"id":"ev_1"}`, VerdictSucceeded, "ev_1"},
		{`{"found":false,"id":"ev_1"}`, VerdictAbsent, "ev_1"},
		{`{"found":true,"id":""}`, VerdictAbsent, ""},
		{`{"found":"yes","id":"ev_1"}`, VerdictUnknown, "ev_1"},
		{`{"found":true}`, VerdictUnknown, ""},
		{`{}`, VerdictUnknown, ""},
		{`{"found":true,"id":5}`, VerdictSucceeded, ""},
		{`{"found":true,"id":"a\u0000b"}`, VerdictSucceeded, ""},
		{`{"found":true,"id":"a","n":1e400}`, VerdictUnknown, ""},
		{`{"found":true,"id":"` + strings.Repeat("x", 1025) + `"}`, VerdictSucceeded, ""},
	}
	for _, tt := range tests {
		v.Result = value(t, tt.result)
		verdict, detail := q.Judge(v)
		if verdict != tt.verdict || (detail != "") != (verdict == VerdictUnknown) || q.SideEffectID(v) != tt.id {
			t.Errorf("%.60s: %s %q %q", tt.result, verdict, detail, q.SideEffectID(v))
		}
	}
	for _, bad := range []string{`b"x"`, `duration("1s")`, `{1: 2}`, `double("NaN")`, `type(1)`} {
		src := strings.Replace(least+queried, "principal.subject", "'"+strings.ReplaceAll(bad, "'", "''")+"'", 1)
		v := Vars{Args: value(t, `{"n":1,"f":1}`)}
		if got, err := mustParse(t, src).Tools[1].StatusQuery.Arguments(v); err == nil {
			t.Errorf("%s became %s", bad, got)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	c := mustParse(t, calendar)
	loop := ruled(t, `args.l.all(x, x < 100)`)
	draft, _ := c.Tool("create_draft_event")
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				v := Vars{Args: value(t, fmt.Sprintf(`{"title":"%d","l":[%d]}`, g, i%2*200)), Call: Call{IdempotencyKey: fmt.Sprint(g)}}
				if ok, detail := draft.Check(v); !ok {
					t.Error(detail)
				}
				if ok, _ := loop.Check(v); ok != (i%2 == 0) {
					t.Error("a loop saw another's arguments")
				}
				if got, err := draft.StatusQuery.Arguments(v); err != nil || string(got) != fmt.Sprintf(`{"requestId":"%d"}`, g) {
					t.Errorf("%s, %v", got, err)
				}
			}
		})
	}
	wg.Wait()
}

func BenchmarkCheck(b *testing.B) {
	draft, _ := mustParse(b, calendar).Tool("create_draft_event")
	v := Vars{Args: value(b, `{"title":"Quarterly review","start":"2026-05-04T09:00:00Z"}`)}
	b.ReportAllocs()
	for b.Loop() {
		if ok, detail := draft.Check(v); !ok {
			b.Fatal(detail)
		}
	}
}

// BenchmarkLimit shows how long a rule runs that ends at the limit of its cost.
func BenchmarkLimit(b *testing.B) {
	t := ruled(b, `args.l.all(x, args.l.all(y, x <= y || x > y))`)
	v := Vars{Args: value(b, `{"l":[`+strings.Repeat("1,", 5000)+`1]}`)}
	for b.Loop() {
		if ok, _ := t.Check(v); ok {
			b.Fatal("no limit")
		}
	}
}

func BenchmarkParse(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		mustParse(b, calendar)
	}
}
