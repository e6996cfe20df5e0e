package contract

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"cel.dev/cel-go/common/types"
)

// large is what a proposal may hold under the largest request_bytes.
func large() map[string]any {
	ones, texts, lists := make([]any, 400_000), make([]any, 8000), make([]any, 20_000)
	names := make(map[string]any, 200_000)
	for i := range ones {
		ones[i] = int64(1)
	}
	for i := range texts {
		texts[i] = fmt.Sprintf("%0500d", i)
	}
	for i := range lists {
		lists[i] = []any{int64(1), map[string]any{"a": "b"}}
	}
	for i := range 200_000 {
		names[fmt.Sprint("n", i)] = int64(i)
	}
	few, few2 := map[string]any{}, map[string]any{}
	for i := range 200 {
		few[fmt.Sprint(i)], few2[fmt.Sprint(i)] = int64(i), int64(i)
	}
	items := make([]any, 8000)
	for i := range items {
		items[i] = fmt.Sprint(i)
	}
	return map[string]any{
		"items": items, "prefix": "/data/" + strings.Repeat("p", 30_000), "ints": ones[:12_000],
		"mm": few, "mm2": few2,
		"l": ones, "l2": slices.Clone(ones), "thousand": ones[:1000], "few": ones[:600], "few2": slices.Clone(ones[:600]), "texts": texts, "lists": lists,
		"lists2": slices.Clone(lists), "m": names, "y": int64(2), "k": "absent", "c": strings.Repeat("é/", 2000),
		"s": strings.Repeat("a", 2_000_000), "t": strings.Repeat("a", 2_000_000), "b": strings.Repeat("a", 1_999_999) + "b",
		"text":  strings.Repeat("x", 500),
		"digit": strings.Repeat("0", 2_000_000) + "x",
	}
}

// some repeats a text n times, joined by sep.
func some(n int, sep, s string) string { return strings.Repeat(s+sep, n-1) + s }

var costly = []struct{ name, when string }{
	{"concatenate in a loop", `args.thousand.map(x, ` + some(40, "+", "args.s") + `).size() > 0`},
	{"concatenate a prefix", `args.items.map(i, args.prefix + i).all(p, p.startsWith("/data/"))`},
	{"search in a loop", `args.thousand.all(x, !(args.y in args.few))`},
	{"search in a long list", `args.ints.all(x, x in args.ints)`},
	{"search in lists", `args.thousand.all(x, x in args.l) && args.thousand.all(x, !(args.y in args.few))`},
	{"concatenate without a loop", some(6, " && ", `(`+some(40, "+", "args.s")+`).size() > 0`)},
	{"search without a loop", `!(` + some(180, " || ", `args.y in args.l`) + `)`},
	{"concatenate lists", some(40, "+", "args.l") + ` == []`},
	{"concatenate lists in a loop", `args.thousand.all(x, (args.few + args.few).size() > 0)`},
	{"list literals", `args.thousand.all(z, args.thousand.all(x, [` + some(300, ",", "x") + `].size() > 0))`},
	{"made lists compared", `args.thousand.all(x, args.thousand.map(y, {"a": y}) == args.thousand.map(y, {"a": y}))`},
	{"map literals", `args.thousand.all(z, args.thousand.all(x, {` + strings.Trim(mapLiteral(200), ",") + `}.size() > 0))`},
	{"map", `args.thousand.all(z, args.thousand.map(x, x + 1).size() > 0)`},
	{"filter", `args.thousand.all(z, args.thousand.filter(x, true).size() > 0)`},
	{"filter that keeps nothing", `args.thousand.all(z, args.thousand.filter(x, false).size() == 0)`},
	{"exists", `args.thousand.all(z, !args.thousand.exists(x, false))`},
	{"exists one", `args.thousand.all(z, !args.thousand.exists_one(x, x == 2))`},
	{"loop over a map", `!args.m.exists(k, false)`},
	{"open a map in a loop", `args.thousand.all(x, args.m.exists(k, true))`},
	{"equal texts", some(30, " && ", `args.s == args.t`)},
	{"unequal texts", some(30, " && ", `args.s != args.b`)},
	{"ordered texts", some(30, " && ", `args.s <= args.t`)},
	{"ordered texts >", some(30, " && ", `!(args.s > args.t)`)},
	{"equal short lists", `args.thousand.all(x, args.few == args.few2)`},
	{"equal short maps", `args.lists.all(x, args.lists[1] == args.lists2[2] && args.mm == args.mm2)`},
	{"equal lists", `args.l == args.l2`},
	{"equal deep lists", `args.lists == args.lists2 && args.lists == args.lists2`},
	{"equal maps", `args.m == args.m`},
	{"equal whole", `args != args || true`},
	{"list in lists", `args.lists[0] in args.lists && [1, 2] in args.lists && [3, 4] in args.lists`},
	{"text in texts", `args.texts.all(x, args.texts[7999] in args.texts)`},
	{"key in a map", `args.thousand.all(z, args.thousand.all(x, !(args.k in args.m)))`},
	{"long key in a map", some(30, " && ", `!(args.s in args.m)`)},
	{"contains", some(30, " && ", `args.s.contains(args.b) || true`)},
	{"startsWith", some(30, " && ", `args.s.startsWith(args.t)`)},
	{"endsWith", some(30, " && ", `args.s.endsWith(args.t)`)},
	{"matches in short texts", `args.texts.all(x, !x.matches("^(x?){100}y$") && !x.matches("(.*)(.*)(.*)(.*)(.*)[b-z]$"))`},
	{"matches in one text", `args.texts.all(z, !args.c.matches("(é|/)*(é|/)*(é|/)*x$"))`},
	{"matches", `args.s.matches("a*a*a*a*a*a*a*b") || true`},
	{"matches in a loop", `args.thousand.all(z, args.thousand.all(x, !args.text.matches("^(x?){100}y$")))`},
	{"size of a text", some(30, " && ", `args.s.size() > 0`)},
	{"bytes", some(30, " && ", `bytes(args.s).size() > 0`)},
	{"string of bytes", `string(bytes(args.s)) == args.s`},
	{"int of texts", `args.texts.all(x, int(x) >= 0 && double(x) >= 0.0 && string(bytes(x)) == x)`},
	{"bad texts", `args.texts.all(x, duration(x) > duration("1s") || timestamp(x) > timestamp("2026-01-01T00:00:00Z") || true)`},
	{"int", `(int(args.digit) > 0 || true) && (int(args.digit) > 0 || true)`},
	{"double", `double(args.digit) > 0.0 || true`},
	{"duration", `duration(args.s) > duration("1s") || true`},
	{"timestamp", `timestamp(args.s) > timestamp("2026-01-01T00:00:00Z") || true`},
	{"conversions", `args.thousand.all(z, args.thousand.all(x, string(x) == "1" && int(string(x)) == 1))`},
	{"time zones", `args.thousand.all(z, args.thousand.all(x, timestamp("2026-01-01T00:00:00Z").getHours("Europe/Zurich") == 1))`},
	{"absent keys", `args.thousand.all(z, args.thousand.all(x, args[args.s] == 1 || true))`},
	{"absent keys in has", `args.thousand.all(z, args.thousand.all(x, has(args.m[args.s].a) || true))`},
	{"absent keys made", `args.thousand.all(z, args.thousand.all(x, args["a" + args.s] == 1 || true))`},
	{"keys of a literal", `args.thousand.all(z, args.thousand.all(x, {args.s: 1}.size() == 1))`},
	{"within", `args.thousand.all(z, args.thousand.all(x, !within(args.c, "/data")))`},
	{"dynamic addition", some(40, "+", "args.y") + ` > 0 && ` + `args.thousand.all(z, args.thousand.all(x, x + x + x > x))`},
	{"errors", `args.thousand.all(z, args.thousand.all(x, x + "a" == "b" || true))`},
	{"loops in each other", `args.thousand.all(x, args.thousand.all(y, x <= y || x > y))`},
	{"constants", `args.thousand.all(z, args.thousand.all(x, ` + some(350, " && ", "true") + `))`},
	{"constant conditions", `args.thousand.all(z, args.thousand.all(x, [` + some(300, ",", "true ? 1 : 2") + `].size() > 0))`},
	{"a literal range", `args.thousand.all(z, [` + some(300, ",", "1") + `].all(x, ` + some(100, " && ", "true") + `))`},
	{"conditions", `args.thousand.all(z, args.thousand.all(x, x == 1 ? true : false))`},
	{"members", `args.thousand.all(z, args.thousand.all(x, has(args.m.a) || has(args.m.n1)))`},
}

func mapLiteral(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%d: x,", i)
	}
	return b.String()
}

// costlyRule compiles without the estimate, which refuses some of the table.
func costlyRule(t testing.TB, when string) *rule {
	t.Helper()
	r := &reader{}
	out := r.compileCosting("when", when, ruleWhen, &Tool{}, 1<<62)
	if out == nil {
		t.Fatalf("%.80s: %v", when, r.fields)
	}
	return out
}

// TestCosts holds that whatever a rule does with large values ends by its cost,
// and that it has made little until then. It is not parallel, as it measures
// what the process allocates.
func TestCosts(t *testing.T) {
	args, err := ValueOf(large())
	if err != nil {
		t.Fatal(err)
	}
	v := Vars{Args: args}
	for _, tt := range costly {
		u := costlyRule(t, tt.when)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		ok, reason := u.evalBool(&v)
		runtime.ReadMemStats(&after)
		if ok || reason != "the rule costs too much" {
			t.Errorf("%s: %v %q", tt.name, ok, reason)
		}
		if made := after.TotalAlloc - before.TotalAlloc; made > 32<<20 {
			t.Errorf("%s made %d bytes", tt.name, made)
		}
	}
}

// TestCostOfAQuery holds that the arguments of one query share their bounds.
func TestCostOfAQuery(t *testing.T) {
	t.Parallel()
	src := least + queried
	for i := range 8 {
		src = strings.Replace(src, "arguments: {", fmt.Sprintf(`arguments: {a%d: "args.s.size() + (args.s + args.s).size()", `, i), 1)
	}
	args, err := ValueOf(map[string]any{"s": strings.Repeat("a", 500_000), "n": int64(1), "f": 1.5})
	if err != nil {
		t.Fatal(err)
	}
	_, err = mustParse(t, src).Tools[1].StatusQuery.Arguments(Vars{Args: args})
	if err == nil || !strings.Contains(err.Error(), "the rule costs too much") {
		t.Error(err)
	}
}

// TestSameAsCEL holds that a metered rule has the value that CEL gives it.
func TestSameAsCEL(t *testing.T) {
	t.Parallel()
	envs, err := environments()
	if err != nil {
		t.Fatal(err)
	}
	args, err := ValueOf(map[string]any{
		"i": int64(3), "d": 1.5, "s": "abc", "e": "", "b": true, "n": nil, "when": "2026-05-04T09:10:11.012Z", "for": "90m",
		"l": []any{int64(1), "a", nil, 1.0, []any{int64(2)}}, "ints": []any{int64(3), int64(1), int64(2)},
		"m": map[string]any{"a": int64(1), "b": []any{"x"}, "c": map[string]any{"d": nil}},
	})
	if err != nil {
		t.Fatal(err)
	}
	v := Vars{Args: args, Principal: Principal{Groups: []string{"eng", "staff"}}}
	for _, src := range append(everyOperator(), sources...) {
		if strings.HasPrefix(src, "args.m.map(") {
			continue // in any order
		}
		checked, issues := envs[0].Compile(src)
		if issues.Err() != nil {
			continue
		}
		program, err := envs[0].Program(checked)
		if err != nil {
			continue // a literal that is no key
		}
		want, _, wantErr := program.Eval(activation{&v, &meter{}})
		r := &reader{}
		u := r.compile("x", src, ruleArgument, &Tool{})
		if u == nil {
			if !strings.HasPrefix(src, "{") || !strings.Contains(r.fields[0].Rule, "no text, number or bool") {
				t.Errorf("%s: %v", src, r.fields)
			}
			continue
		}
		got, _, gotErr := u.program.Eval(activation{&v, &meter{}})
		oddKey := strings.Contains(src, "[") || strings.HasPrefix(src, "{")
		switch {
		case oddKey && gotErr != nil && u.reason(gotErr) == "a value has a type that the rule does not expect":
			// CEL takes a list as the key of a literal, and says less of other keys.
		case (gotErr == nil) != (wantErr == nil):
			t.Errorf("%s: %v, %v; CEL has %v, %v", src, got, gotErr, want, wantErr)
		case gotErr != nil && u.reason(gotErr) != u.reason(wantErr):
			t.Errorf("%s: %v; CEL has %v", src, gotErr, wantErr)
		case gotErr == nil && types.Equal(got, want) != types.True && fmt.Sprint(want) != "NaN":
			t.Errorf("%s is %v, to CEL %v", src, got, want)
		}
	}
}

// everyOperator applies each operator and function to pairs of operands of
// each kind.
func everyOperator() []string {
	operands := []string{"args.i", "args.d", "args.s", "args.b", "args.n", "args.l", "args.m", "2", "2u", "'a'", "b'abc'", "[1]",
		"duration(args.for)", "timestamp('2026-01-01T00:00:00Z')", "args.ints", "0", "1.5", "'abc'", "true", "null", "[]", "{'a': 1}", "principal.groups", "timestamp(args.when)", "args.l[4]", "args.m.c", "dyn(2u)"}
	var out []string
	for _, a := range operands {
		for _, f := range []string{"size(%s)", "type(%s)", "-%s", "!%s", "bool(%s)", "bytes(%s)", "double(%s)", "duration(%s)", "dyn(%s)",
			"int(%s)", "string(%s)", "timestamp(%s)", "uint(%s)", "args.l[%s]", "args.m[%s]", "{%s: 1}", "%s.map(x, x)",
			"%s.all(x, x == x)", "%s.matches('^a')", "%s.getHours()", "[%[1]s, %[1]s]"} {
			out = append(out, fmt.Sprintf(f, a))
		}
		for _, b := range append(slices.Clone(operands[:6]), a) {
			for _, op := range []string{"+", "-", "*", "/", "%", "==", "!=", "<", "<=", ">", ">=", "in"} {
				out = append(out, a+" "+op+" "+b)
			}
			for _, f := range []string{"contains", "startsWith", "endsWith"} {
				out = append(out, a+"."+f+"("+b+")")
			}
			out = append(out, "within("+a+", dyn("+b+"))")
		}
	}
	return out
}

var sources = []string{
	`args.ints.map(x, x + 1)`, `args.ints.map(x, x > 1, x * 2)`, `args.ints.filter(x, x > 1) + [7]`, `args.ints.exists(x, x == 2)`,
	`args.ints.exists_one(x, x == 2)`, `args.ints.map(x, args.ints.map(y, x * y))`, `args.m.map(k, k in ["a"])`,
	`args.m.all(k, has(args.m.a) && args.m[k] != "z")`, `args.ints.map(x, {"n": x, args.s: [x]})`, `(args.ints + args.ints + [1])[5]`,
	`args.ints.map(i, args.ints[i - 1])`, `args.missing == 1 || true`, `args.m[args.s]`, `args[args.s] == 1`, `has(args.m[args.s].x)`,
	`args.b ? args.s + "x" : args.missing`, `args.n == null ? [args.i] : []`, `{"a": {"b": args.s + args.s}}.a.b`, `[args.s + "x"][0]`,
	`timestamp(args.when).getHours("Europe/Zurich")`, `timestamp(args.when).getFullYear()`, `timestamp(args.when).getMilliseconds()`,
	`timestamp(args.when).getDayOfWeek("+02:00")`, `duration(args.for).getMinutes()`, `duration(args.for).getHours()`,
	`timestamp(args.when) + duration(args.for)`, `timestamp(args.when) - timestamp(args.when)`, `string(timestamp(args.when))`,
	`int(timestamp(args.when))`, `args.s.matches("^[a-c]+$")`, `matches(args.s, "b")`, `args.i.matches("b")`, `size(args.ints) + args.s.size()`,
	`args.s in {"abc": 1}`, `args.i in [1, 2, 3]`, `args.d in [1, 1.5]`, `dyn(args.i) in [3u]`, `type(args.i) == int`, `1 / args.e.size()`,
	`args.e.size() == 0 || 1 / args.e.size() > 0`, `!(args.i > 2 && args.b)`, `args.m == {"a": 1, "b": ["x"], "c": {"d": null}}`,
	`args.l == [1, "a", null, 1.0, [2]]`, `[[args.i]] == [[3.0]]`, `[2] in args.l`, `[args.ints, args.l].map(l, l.size())`,
}

// TestEveryFunctionIsMetered holds that a new version of CEL brings no function
// whose cost nobody has thought about.
func TestEveryFunctionIsMetered(t *testing.T) {
	t.Parallel()
	envs, err := environments()
	if err != nil {
		t.Fatal(err)
	}
	known := strings.Fields(`_?_:_ _&&_ _||_ !_ @not_strictly_false __not_strictly_false__ _==_ _!=_ _+_ _/_ _%_ _*_ -_ _-_
		_<_ _<=_ _>_ _>=_ _[_] @in _in_ in size type bool bytes double duration dyn int string timestamp uint
		contains endsWith startsWith matches getFullYear getMonth getDayOfYear getDayOfMonth getDate getDayOfWeek
		getHours getMinutes getSeconds getMilliseconds within @key @range`)
	for name := range envs[1].Functions() {
		if !slices.Contains(known, name) {
			t.Errorf("%s is not known to the meter", name)
		}
	}
	r := &reader{}
	for _, src := range []string{`google.protobuf.Struct{}`, `{b'a': 1}`, `{null: 1}`, `@key(args)`, `@meter == 1`} {
		if r.compile("x", src, ruleArgument, &Tool{}) != nil {
			t.Errorf("%s compiles", src)
		}
	}
}

// TestNesting holds what the documentation says of nesting, and that an error
// without a place names none.
func TestNesting(t *testing.T) {
	t.Parallel()
	for src, fine := range map[string]bool{
		some(40, "+", "1") + " > 0":                                  true,
		some(60, "+", "1") + " > 0":                                  false,
		some(300, "&&", "true"):                                      true,
		some(300, "||", "true"):                                      true,
		strings.Repeat("[", 40) + strings.Repeat("]", 40) + " != []": true,
		strings.Repeat("[", 60) + strings.Repeat("]", 60) + " != []": false,
	} {
		r := &reader{}
		if got := r.compile("x", src, ruleWhen, &Tool{}) != nil; got != fine {
			t.Errorf("%.40s: %v %v", src, got, r.fields)
		}
		for _, f := range r.fields {
			if strings.Contains(f.Rule, "-1") {
				t.Errorf("%.40s: %s", src, f.Rule)
			}
		}
	}
}

// BenchmarkCostly shows how long the table takes until its limit.
func BenchmarkCostly(b *testing.B) {
	args, err := ValueOf(large())
	if err != nil {
		b.Fatal(err)
	}
	v := Vars{Args: args}
	for _, tt := range costly {
		u := costlyRule(b, tt.when)
		b.Run(tt.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if ok, _ := u.evalBool(&v); ok {
					b.Fatal("no limit")
				}
			}
		})
	}
}

// BenchmarkOrdinary shows what rules cost that people write.
func BenchmarkOrdinary(b *testing.B) {
	v := Vars{Args: value(b, `{"to":["a@example.com","b@example.com"],"path":"/data/reports/may.txt","title":"Review"}`),
		Principal: Principal{Subject: "alice", Groups: []string{"staff", "eng"}}}
	for _, when := range []string{
		`args.title.size() <= 200 && !has(args.attendees)`,
		`args.to.all(x, x.endsWith("@example.com"))`,
		`args.to.all(x, x.matches("^[a-z]+@example[.]com$"))`,
		`within(args.path, "/data") && "eng" in principal.groups`,
		`args.title in ["Review", "Planning"] && args.title + "/" + principal.subject != ""`,
	} {
		t := ruled(b, when)
		b.Run("", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if ok, detail := t.Check(v); !ok {
					b.Fatal(detail)
				}
			}
		})
	}
}
