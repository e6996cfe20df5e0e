package canonical

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestForms(t *testing.T) {
	t.Parallel()
	tests := []struct{ in, args, doc string }{
		{`null`, `null`, `null`},
		{" \t\r\n[ true , false ] \n", `[true,false]`, `[true,false]`},
		{`{}`, `{}`, `{}`},
		{`[]`, `[]`, `[]`},
		{`""`, `""`, `""`},
		{`{"b":1,"a":2}`, `{"a":2,"b":1}`, `{"a":2,"b":1}`},
		{`{"b":{"z":1,"y":[{"d":1,"c":2}]},"a":2}`, `{"a":2,"b":{"y":[{"c":2,"d":1}],"z":1}}`, `{"a":2,"b":{"y":[{"c":2,"d":1}],"z":1}}`},
		{`[1,1.0,1e0,"1"]`, `[1,1.0,1e0,"1"]`, `[1,1,1,"1"]`},
		{`[-0,0.000,0e400,-0.0E-3]`, `[-0,0.000,0e400,-0.0E-3]`, `[0,0,0,0]`},
		{`[10,1E1,100e-1,0.1e2]`, `[10,1E1,100e-1,0.1e2]`, `[10,10,10,10]`},
		{`[0.000001,0.0000001,-1.50e-7]`, `[0.000001,0.0000001,-1.50e-7]`, `[0.000001,1e-7,-1.5e-7]`},
		{`[100000000000000000000,1e20,1e21,12e20]`, `[100000000000000000000,1e20,1e21,12e20]`, `[100000000000000000000,100000000000000000000,1e+21,1.2e+21]`},
		{`[9007199254740993,0.1000000000000000055511151231257827]`, `[9007199254740993,0.1000000000000000055511151231257827]`, `[9007199254740993,0.1000000000000000055511151231257827]`},
		{`[12.5,1e+400,1E-0400]`, `[12.5,1e+400,1E-0400]`, `[12.5,1e+400,1e-400]`},
		{`"\u0041\/\u00e9\u20ac\ud83d\ude00\u0000\u001F\u007f\b\f\n\r\t\"\\"`,
			"\"A/é€😀\\u0000\\u001f\u007f\\b\\f\\n\\r\\t\\\"\\\\\"",
			"\"A/é€😀\\u0000\\u001f\u007f\\b\\f\\n\\r\\t\\\"\\\\\""},
		// RFC 8785 section 3.2.3: sorted by UTF-16, so that 😀 comes before U+FB33.
		{`{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7}`,
			"{\"\\r\":2,\"1\":4,\"\u0080\":6,\"ö\":7,\"€\":1,\"😀\":5,\"\ufb33\":3}",
			"{\"\\r\":2,\"1\":4,\"\u0080\":6,\"ö\":7,\"€\":1,\"😀\":5,\"\ufb33\":3}"},
		// Order is that of the unescaped names: " (22) before # (23), \ (5c) after A (41).
		{`{"\\":1,"A":2,"#":3,"\"":4,"":5,"AA":6}`, `{"":5,"\"":4,"#":3,"A":2,"AA":6,"\\":1}`, `{"":5,"\"":4,"#":3,"A":2,"AA":6,"\\":1}`},
	}
	for _, tt := range tests {
		if got, err := Args([]byte(tt.in)); err != nil || string(got) != tt.args {
			t.Errorf("Args(%s) = %s, %v; want %s", tt.in, got, err, tt.args)
		}
		if got, err := Doc([]byte(tt.in)); err != nil || string(got) != tt.doc {
			t.Errorf("Doc(%s) = %s, %v; want %s", tt.in, got, err, tt.doc)
		}
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	tests := []struct{ name, in, path, rule string }{
		{"empty", "", "", "is empty"},
		{"only space", " \n", "", "is empty"},
		{"byte order mark", "\xef\xbb\xbf{}", "", "byte order mark"},
		{"trailing value", `{} {}`, "", "byte 3: nothing may follow"},
		{"trailing comma", `[1,]`, "[1]", "a value was expected"},
		{"trailing member comma", `{"a":1,}`, "", "a member's name was expected"},
		{"no end of object", `{"a":1`, "", "a comma or }"},
		{"no end of array", `{"a":[1`, "a", "a comma or ]"},
		{"no end of string", `"a`, "", "a string has no end"},
		{"no end of escape", `"\`, "", "a string has no end"},
		{"no end after escape", `"\n`, "", "a string has no end"},
		{"no colon", `{"a" 1}`, "", "a colon was expected"},
		{"unquoted name", `{a:1}`, "", "a member's name was expected"},
		{"single quotes", `'a'`, "", "a value was expected"},
		{"word", `nul`, "", "a value was expected"},
		{"longer word", `nulls`, "", "nothing may follow"},
		{"not a number", `[NaN]`, "[0]", "a value was expected"},
		{"comment", `[1/*x*/]`, "", "a comma or ]"},
		{"duplicate", `{"x":[{"a":1,"a":2}]}`, "x[0].a", "stands more than once"},
		{"duplicate apart", `{"a":1,"b":2,"a":3}`, "a", "stands more than once"},
		{"duplicate after unescaping", `{"a":1,"\u0061":2}`, "a", "stands more than once"},
		{"duplicate of an odd name", `{"a b":1,"a\u0020b":2}`, `["a b"]`, "stands more than once"},
		{"lone high surrogate", `{"a":["\ud800"]}`, "a[0]", "lone surrogate"},
		{"lone low surrogate", `"\udc00"`, "", "lone surrogate"},
		{"high and no low", `"\ud800\u0041"`, "", "lone surrogate"},
		{"two high", `"\ud800\ud800"`, "", "lone surrogate"},
		{"lone surrogate in a name", `{"\ud800":1}`, "", "lone surrogate"},
		{"raw surrogate", "\"\xed\xa0\x80\"", "", "not valid UTF-8"},
		{"bad UTF-8", "{\"a\":\"x\xff\"}", "a", "not valid UTF-8"},
		{"bad UTF-8 after an escape", "\"\\n\xc3\"", "", "not valid UTF-8"},
		{"overlong UTF-8", "\"\xc0\xaf\"", "", "not valid UTF-8"},
		{"raw control", "\"a\x00\"", "", "must be escaped"},
		{"raw control after an escape", "\"\\n\x1f\"", "", "must be escaped"},
		{"bad escape", `"\x41"`, "", "no such escape"},
		{"short unicode escape", `"\u12"`, "", "four hexadecimal digits"},
		{"bad unicode escape", `"\u12g4"`, "", "four hexadecimal digits"},
		{"too deep", deep(65), strings.Repeat("[0]", 64), "deeper than 64"},
		{"too deep in objects", strings.Repeat(`{"a":`, 65), strings.Repeat("a.", 63) + "a", "deeper than 64"},
		{"leading zero", `01`, "", "must not begin with 0"},
		{"minus alone", `-`, "", "a digit was expected"},
		{"plus", `+1`, "", "a value was expected"},
		{"point alone", `1.`, "", "after the point"},
		{"no whole part", `.5`, "", "a value was expected"},
		{"no exponent", `1e`, "", "in the exponent"},
		{"sign and no exponent", `1e+`, "", "in the exponent"},
		{"129 digits", `{"n":` + strings.Repeat("1", 129) + `}`, "n", "more than 128 digits"},
		{"129 digits with fraction", "0." + strings.Repeat("1", 128), "", "more than 128 digits"},
		{"exponent 401", `[1e401]`, "[0]", "beyond ±400"},
		{"exponent -401", `[1e-401]`, "[0]", "beyond ±400"},
		{"huge exponent", "1e" + strings.Repeat("9", 5000), "", "beyond ±400"},
		{"endless exponent zeros", "1e" + strings.Repeat("0", 5000), "", "beyond ±400"},
	}
	for _, tt := range tests {
		for profile, canon := range map[string]func([]byte) ([]byte, error){"args": Args, "doc": Doc} {
			got, err := canon([]byte(tt.in))
			var e *Error
			if !errors.As(err, &e) {
				t.Errorf("%s, %s: got %s, %v; want an error", tt.name, profile, got, err)
				continue
			}
			if e.Path != tt.path || !strings.Contains(e.Rule, tt.rule) {
				t.Errorf("%s, %s: got %q %q; want %q %q", tt.name, profile, e.Path, e.Rule, tt.path, tt.rule)
			}
		}
	}
	if _, err := Args([]byte(deep(64))); err != nil {
		t.Errorf("depth 64: %v", err)
	}
	if _, err := Args([]byte(strings.Repeat("1", 128) + "e400")); err != nil {
		t.Errorf("args-1 bounds the written exponent only: %v", err)
	}
	for _, in := range []string{strings.Repeat("1", 128) + "e400", "0.01e-400"} {
		if _, err := Doc([]byte(in)); err == nil {
			t.Errorf("doc-1 took %s, whose normal form it would refuse", in)
		}
	}
}

func TestPathsAreBounded(t *testing.T) {
	t.Parallel()
	name := strings.Repeat("é", 500)
	_, err := Args([]byte(`{"` + name + `":[1e999]}`))
	var e *Error
	if !errors.As(err, &e) || len(e.Path) > 100 || !strings.HasSuffix(e.Path, `…"][0]`) {
		t.Errorf("got %v", err)
	}
}

// randomValue returns two texts of one value: they differ in the order of
// members, in white space and in escapes only.
func randomValue(r *rand.Rand, depth int) (a, b string) {
	pad := func(s string) string { return strings.Repeat(" ", r.IntN(2)) + s + strings.Repeat("\n", r.IntN(2)) }
	text := func() (string, string) {
		plain, escaped := `"`, `"`
		for range r.IntN(4) {
			c := []rune("aZ0_é€\ue000\uffff😀𝄞 /")[r.IntN(12)]
			plain += string(c)
			switch {
			case c > 0xFFFF:
				escaped += fmt.Sprintf(`\u%04x\u%04X`, 0xD800+(c-0x10000)>>10, 0xDC00+(c-0x10000)&0x3FF)
			case r.IntN(2) == 0:
				escaped += fmt.Sprintf(`\u%04x`, c)
			default:
				escaped += string(c)
			}
		}
		return plain + `"`, escaped + `"`
	}
	kind := r.IntN(6)
	if depth == 0 {
		kind = r.IntN(4)
	}
	switch kind {
	case 0:
		return text()
	case 1, 2:
		n := fmt.Sprintf("%d", r.IntN(2000)-1000)
		if r.IntN(2) == 0 {
			n += fmt.Sprintf(".%de%d", r.IntN(1000), r.IntN(60)-30)
		}
		return n, pad(n)
	case 3:
		return "true", pad("true")
	case 4:
		var as, bs []string
		for range r.IntN(4) {
			x, y := randomValue(r, depth-1)
			as, bs = append(as, x), append(bs, pad(y))
		}
		return "[" + strings.Join(as, ",") + "]", "[" + strings.Join(bs, ",") + "]"
	}
	var as, bs []string
	seen := map[string]bool{}
	for range r.IntN(6) {
		k, e := text()
		if seen[k] {
			continue
		}
		seen[k] = true
		x, y := randomValue(r, depth-1)
		as, bs = append(as, k+":"+x), append(bs, pad(e)+":"+pad(y))
	}
	r.Shuffle(len(bs), func(i, j int) { bs[i], bs[j] = bs[j], bs[i] })
	return "{" + strings.Join(as, ",") + "}", "{" + strings.Join(bs, ",") + "}"
}

func TestProperties(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		a, b := randomValue(r, 4)
		for profile, canon := range map[string]func([]byte) ([]byte, error){"args": Args, "doc": Doc} {
			x, err := canon([]byte(a))
			if err != nil {
				t.Fatalf("%s(%s): %v", profile, a, err)
			}
			y, err := canon([]byte(b))
			if err != nil || !bytes.Equal(x, y) {
				t.Fatalf("%s: %s and %s are one value, but %s and %s (%v)", profile, a, b, x, y, err)
			}
			again, err := canon(x)
			if err != nil || !bytes.Equal(again, x) {
				t.Fatalf("%s: %s becomes %s (%v)", profile, x, again, err)
			}
			if d := Diff(x, y); d != nil {
				t.Fatalf("Diff of equal values: %v", d)
			}
		}
	}
}

// TestDocNumbersKeepTheirValue compares with arbitrary precision rationals.
func TestDocNumbersKeepTheirValue(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 4))
	seen := map[string]string{}
	for range 5000 {
		digits := fmt.Sprintf("%d", r.IntN(1000))
		in := digits
		if r.IntN(2) == 0 {
			in += "." + strings.Repeat("0", r.IntN(9)) + fmt.Sprint(r.IntN(1000))
		}
		if r.IntN(2) == 0 {
			in += fmt.Sprintf("e%d", r.IntN(80)-40)
		}
		out, err := Doc([]byte(in))
		if err != nil {
			t.Fatalf("%s: %v", in, err)
		}
		want, _ := new(big.Rat).SetString(in)
		got, ok := new(big.Rat).SetString(string(out))
		if !ok || want.Cmp(got) != 0 {
			t.Fatalf("%s became %s", in, out)
		}
		if prior, ok := seen[want.RatString()]; ok && prior != string(out) {
			t.Fatalf("one value, two texts: %s and %s", prior, out)
		}
		seen[want.RatString()] = string(out)
	}
}

func TestDigests(t *testing.T) {
	t.Parallel()
	canon := []byte(`{"a":1}`)
	const hex = "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
	for got, want := range map[string]string{
		ArgsDigest(canon): "args-1:sha256:" + hex,
		DocDigest(canon):  "doc-1:sha256:" + hex,
		ContractID(canon): "mcp-host-contract@sha256:" + hex,
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestDefinitionDigest(t *testing.T) {
	t.Parallel()
	want := DocDigest([]byte(`{"definition":{"inputSchema":{"maximum":1},"name":"x"},"kind":"tool"}`))
	for _, raw := range []string{
		`{"name":"x","inputSchema":{"maximum":1}}`,
		`{"inputSchema":{"maximum":1.0}, "name":"x"}`,
		`{"_meta":{"a":[1,"}"]},"name":"x","inputSchema":{"maximum":1}}`,
		`{"name":"x","inputSchema":{"maximum":1},"\u005fmeta":null}`,
	} {
		if got, err := DefinitionDigest("tool", []byte(raw)); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", raw, got, err, want)
		}
	}
	for _, raw := range []string{
		`{"name":"y","inputSchema":{"maximum":1}}`,
		`{"name":"x","inputSchema":{"maximum":1,"_meta":{}}}`,
		`{"name":"x","inputSchema":{"maximum":1},"meta":1}`,
	} {
		if got, err := DefinitionDigest("tool", []byte(raw)); err != nil || got == want {
			t.Errorf("%s: %s, %v; want another digest", raw, got, err)
		}
	}
	if got, _ := DefinitionDigest("prompt", []byte(`{"name":"x","inputSchema":{"maximum":1}}`)); got == want {
		t.Error("the kind is not bound")
	}
	if got, err := DefinitionDigest("tool", []byte(`{"_meta":1}`)); err != nil || got != DocDigest([]byte(`{"definition":{},"kind":"tool"}`)) {
		t.Errorf("empty definition: %s, %v", got, err)
	}
	for kind, raw := range map[string]string{"tool": `[]`, "x": `{}`, "prompt": `{"_meta":{"a":1,"a":2}}`} {
		if _, err := DefinitionDigest(kind, []byte(raw)); err == nil {
			t.Errorf("%s %s was taken", kind, raw)
		}
	}
}

func TestDecode(t *testing.T) {
	t.Parallel()
	in := `{"a":[1,-5,1.0,0.1,1e2,9223372036854775807,9223372036854775808,1e400,1e-400,5e-324,9007199254740993.0,0.1000000000000000055,18446744073709551616],` +
		`"b":{"":"\"\\\n\u0001é😀","x":null},"c":[true,false,[],{}]}`
	canon, err := Args([]byte(in))
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(canon)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"a": []any{int64(1), int64(-5), 1.0, 0.1, 100.0, int64(9223372036854775807), Inexact("9223372036854775808"),
			Inexact("1e400"), Inexact("1e-400"), 5e-324, Inexact("9007199254740993.0"), Inexact("0.1000000000000000055"), Inexact("18446744073709551616")},
		"b": map[string]any{"": "\"\\\n\x01é😀", "x": nil},
		"c": []any{true, false, []any{}, map[string]any{}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %#v\nwant %#v", got, want)
	}
	for _, bad := range []string{``, `{`, `[1`, `{"a"}`, `{"a":}`, `"a`, `[1 2]`, `1 `, `{"a":1]`, `x`, `[1,`, strings.Repeat("[", 200)} {
		if v, err := Decode([]byte(bad)); err == nil {
			t.Errorf("Decode(%q) = %v", bad, v)
		}
	}
}

func TestDiff(t *testing.T) {
	t.Parallel()
	var many, others []string
	for i := range 50 {
		many, others = append(many, fmt.Sprint(i)), append(others, fmt.Sprint(i+1))
	}
	tests := []struct {
		a, b string
		want []string
	}{
		{`{"a":1}`, `{"a":1}`, nil},
		{`{"a":1}`, `{"a":1.0}`, []string{"a"}},
		{`{"a":1}`, `[]`, []string{""}},
		{`1`, `2`, []string{""}},
		{`{"a":{"b":[1,2,{"c":3}]},"z":1}`, `{"a":{"b":[1,5,{"c":4}]},"z":1}`, []string{"a.b[1]", "a.b[2].c"}},
		{`{"a":1,"c":3}`, `{"b":2,"c":3}`, []string{"a", "b"}},
		{`{"a":[1]}`, `{"a":[1,2,3]}`, []string{"a[1]", "a[2]"}},
		{`{"a":{}}`, `{"a":{"x y":1}}`, []string{`a["x y"]`}},
		{`{"a":"{\"b\":1}"}`, `{"a":{"b":1}}`, []string{"a"}},
		{`{"😀":1,"\ufb33":1}`, `{"\ufb33":2}`, []string{`["😀"]`, "[\"\ufb33\"]"}},
	}
	for _, tt := range tests {
		a, _ := Args([]byte(tt.a))
		b, _ := Args([]byte(tt.b))
		if got := Diff(a, b); !slices.Equal(got, tt.want) {
			t.Errorf("Diff(%s, %s) = %q, want %q", tt.a, tt.b, got, tt.want)
		}
	}
	got := Diff([]byte("["+strings.Join(many, ",")+"]"), []byte("["+strings.Join(others, ",")+"]"))
	if len(got) != MaxDiff {
		t.Errorf("%d paths", len(got))
	}
	if got := At("arguments", "a[1]"); got != "arguments.a[1]" {
		t.Error(got)
	}
	if got := At("arguments", "[1]"); got != "arguments[1]" {
		t.Error(got)
	}
}

// FuzzCanonical holds the parser against encoding/json: what we take, it takes
// too, and with the same value; our output is a fixed point; and what it takes
// and we refuse is one of the stated refusals.
func FuzzCanonical(f *testing.F) {
	for _, s := range []string{`{"b":1,"a":[1.0,"x\u0041"]}`, `[1e400,-0]`, `"\ud83d\ude00"`, `{"a":1,"\u0061":2}`, "\"\xff\"", `{"\\":1,"\"":2}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, canon := range []func([]byte) ([]byte, error){Args, Doc} {
			out, err := canon(raw)
			if err != nil {
				var e *Error
				if !errors.As(err, &e) {
					t.Fatalf("not an *Error: %v", err)
				}
				if json.Valid(raw) && strings.Contains(e.Rule, "is not JSON") {
					t.Fatalf("refused as no JSON: %q: %v", raw, err)
				}
				continue
			}
			if !json.Valid(raw) || !json.Valid(out) {
				t.Fatalf("took %q and wrote %q", raw, out)
			}
			again, err := canon(out)
			if err != nil || !bytes.Equal(again, out) {
				t.Fatalf("%q became %q (%v)", out, again, err)
			}
			if !sameJSON(t, raw, out) {
				t.Fatalf("%q and %q are two values", raw, out)
			}
			if _, err := Decode(out); err != nil {
				t.Fatalf("cannot decode %q: %v", out, err)
			}
			if d := Diff(out, again); d != nil {
				t.Fatalf("Diff: %v", d)
			}
		}
		// Bytes that are not canonical must not panic.
		_, _ = Decode(raw)
		Diff(raw, []byte(`{"a":[1]}`))
		_, _ = DefinitionDigest("tool", raw)
	})
}

func sameJSON(t *testing.T, a, b []byte) bool {
	t.Helper()
	read := func(raw []byte) any {
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		var v any
		if err := d.Decode(&v); err != nil {
			t.Fatal(err)
		}
		return rational(v)
	}
	return reflect.DeepEqual(read(a), read(b))
}

func rational(v any) any {
	switch v := v.(type) {
	case json.Number:
		r, _ := new(big.Rat).SetString(v.String())
		return r.RatString()
	case []any:
		for i := range v {
			v[i] = rational(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = rational(v[k])
		}
	}
	return v
}

var small = []byte(`{"title":"Quarterly review of the roadmap","start":"2026-05-04T09:00:00Z","end":"2026-05-04T10:00:00Z",` +
	`"attendees":["a@example.com","b@example.com"],"location":{"room":"4.12","building":"North"},"reminder":15,"priority":0.5,"private":true}`)

func BenchmarkArgs(b *testing.B) {
	b.SetBytes(int64(len(small)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Args(small); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDoc(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Doc(small); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	canon, _ := Args(small)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Decode(canon); err != nil {
			b.Fatal(err)
		}
	}
}
