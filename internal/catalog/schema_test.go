package catalog

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func args(t *testing.T, text string) any {
	t.Helper()
	canon, err := canonical.Args([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	v, err := canonical.Decode(canon)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// validate checks arguments and returns "ok", "skipped" or the broken paths.
func validate(t *testing.T, d *Definition, text string) string {
	t.Helper()
	skipped, err := d.ValidateArguments(args(t, text))
	if skipped != "" {
		return "skipped"
	}
	if err == nil {
		return "ok"
	}
	f, ok := fault.As(err)
	if !ok || f.Kind != fault.Invalid {
		t.Fatalf("error %v", err)
	}
	var paths []string
	for _, field := range f.Fields {
		paths = append(paths, field.Path)
	}
	return strings.Join(paths, " ")
}

func only(t *testing.T, raw string) *Definition {
	t.Helper()
	c := built(t, json.RawMessage(raw))
	if !c.definitions[0].Callable() {
		t.Fatal(c.definitions[0].Quarantine)
	}
	return &c.definitions[0]
}

func TestValidateArguments(t *testing.T) {
	t.Parallel()
	d := only(t, `{"name":"a","inputSchema":{"type":"object","additionalProperties":false,"required":["title"],"properties":{
		"title":{"type":"string","minLength":2,"maxLength":5,"pattern":"^[a-z]+$"},
		"n":{"type":"integer","minimum":1,"maximum":9007199254740993,"multipleOf":1},
		"price":{"type":"number","multipleOf":0.01},
		"tags":{"type":"array","items":{"enum":["a","b"]},"uniqueItems":true,"maxItems":3},
		"who":{"anyOf":[{"type":"string"},{"type":"object","required":["id"]}]},
		"when":{"const":"now"}}}}`)
	for text, want := range map[string]string{
		`{"title":"abc"}`:                                 "ok",
		`{}`:                                              "arguments.title",
		`{"title":"a"}`:                                   "arguments.title",
		`{"title":"ABC"}`:                                 "arguments.title",
		`{"title":7}`:                                     "arguments.title",
		`{"title":"abc","x":1}`:                           "arguments.x",
		`{"title":"abc","we ird":1}`:                      `arguments["we ird"]`,
		`{"title":"abc","n":1.5}`:                         "arguments.n",
		`{"title":"abc","n":0}`:                           "arguments.n",
		`{"title":"abc","n":9007199254740993}`:            "ok",
		`{"title":"abc","n":9007199254740994}`:            "arguments.n",
		`{"title":"abc","n":99999999999999999999}`:        "arguments.n",
		`{"title":"abc","price":0.1}`:                     "ok",
		`{"title":"abc","price":0.105}`:                   "arguments.price",
		`{"title":"abc","price":12345678901234567890.12}`: "ok",
		`{"title":"abc","tags":["a","b"]}`:                "ok",
		`{"title":"abc","tags":["a","c"]}`:                "arguments.tags[1]",
		`{"title":"abc","tags":["a","a"]}`:                "arguments.tags",
		`{"title":"abc","who":{"id":1}}`:                  "ok",
		`{"title":"abc","who":{}}`:                        "arguments.who",
		`{"title":"abc","when":"later"}`:                  "arguments.when",
		`[]`:                                              "arguments",
	} {
		if got := validate(t, d, text); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	_, err := d.ValidateArguments(args(t, `{"title":"SECRET-VALUE","when":"SECRET-VALUE","price":"SECRET-VALUE"}`))
	f, _ := fault.As(err)
	if strings.Contains(fmt.Sprint(f.Fields), "SECRET") || strings.Contains(f.Message, "SECRET") {
		t.Errorf("a value is in the error: %v", f.Fields)
	}
}

func TestValidateArguments_LeavesTheValueAlone(t *testing.T) {
	t.Parallel()
	d := only(t, `{"name":"a","inputSchema":{"type":"object"}}`)
	v := args(t, `{"a":[1,{"b":99999999999999999999}],"c":"x"}`)
	before := fmt.Sprintf("%#v", v)
	if _, err := d.ValidateArguments(v); err != nil {
		t.Fatal(err)
	}
	if after := fmt.Sprintf("%#v", v); after != before {
		t.Errorf("%s became %s", before, after)
	}
}

func TestFO057_RecursiveSchema(t *testing.T) {
	t.Parallel()
	const node = `{"type":"object","properties":{"root":{"$ref":"#/$defs/Node"}},"$defs":{"Node":{"type":"object","required":["id"],"properties":{"id":{"type":"integer"},"children":{"type":"array","items":{"$ref":"#/$defs/Node"}}}}}}`
	raw := `{"name":"tree","inputSchema":` + node + `,"outputSchema":` + node + `}`
	d := only(t, raw)
	if len(d.Findings) != 0 || string(d.Raw) != raw || string(d.InputSchema) != node || string(d.OutputSchema) != node {
		t.Errorf("findings %v, raw changed %v", d.Findings, string(d.Raw) != raw)
	}
	if got := validate(t, d, `{"root":{"id":1,"children":[{"id":2,"children":[{"id":3}]}]}}`); got != "ok" {
		t.Error(got)
	}
	if got := validate(t, d, `{"root":{"id":1,"children":[{"id":2,"children":[{"id":"x"}]}]}}`); got != "arguments.root.children[0].children[0].id" {
		t.Error(got)
	}
	if skipped, err := d.ValidateResult(args(t, `{"root":{}}`)); skipped != "" || err == nil ||
		!strings.Contains(err.Error(), "structuredContent.root.id") {
		t.Errorf("result: %q %v", skipped, err)
	}
}

func TestFO058_BrokenReferenceIsSkippedAlone(t *testing.T) {
	t.Parallel()
	d := only(t, `{"name":"a","inputSchema":{"type":"object","required":["n"],"properties":{
		"n":{"type":"integer"},
		"role":{"$ref":"#/$defs/X","$defs":{"X":{"type":"string"}},"type":"integer"}}}}`)
	if !hasFinding(d.Findings, FindingReferenceBroken) {
		t.Errorf("findings %v", d.Findings)
	}
	for text, want := range map[string]string{
		`{"n":1}`: "ok", `{"n":1,"role":"x"}`: "ok", `{"n":1,"role":{}}`: "ok", `{"n":"1"}`: "arguments.n",
	} {
		if got := validate(t, d, text); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	remote := only(t, `{"name":"a","inputSchema":{"type":"object","properties":{"p":{"$ref":"https://evil.test/schema.json"},"n":{"type":"integer"}}}}`)
	if !hasFinding(remote.Findings, FindingReferenceRemote) {
		t.Errorf("findings %v", remote.Findings)
	}
	if got := validate(t, remote, `{"p":1,"n":"x"}`); got != "arguments.n" {
		t.Error(got)
	}
	// With ids the compiler decides, and it loads nothing.
	withID := only(t, `{"name":"a","inputSchema":{"$id":"https://s.test/a","type":"object","properties":{"p":{"$ref":"file:///etc/passwd"}}}}`)
	if got := validate(t, withID, `{"p":1}`); got != "skipped" {
		t.Error(got)
	}
	anchored := only(t, `{"name":"a","inputSchema":{"type":"object","properties":{"p":{"$ref":"#num"}},"$defs":{"x":{"$anchor":"num","type":"number"}}}}`)
	if got := validate(t, anchored, `{"p":"x"}`); got != "arguments.p" || len(anchored.Findings) != 0 {
		t.Errorf("%s %v", got, anchored.Findings)
	}
}

func TestFO059_OldDialects(t *testing.T) {
	t.Parallel()
	values := make([]string, 5000)
	for i := range values {
		values[i] = fmt.Sprintf("%q", fmt.Sprintf("v%d", i))
	}
	cases := []struct{ name, schema, args, want string }{
		{"draft-04 id", `{"$schema":"http://json-schema.org/draft-04/schema#","id":"http://s.test/a","type":"object","properties":{"n":{"type":"integer","minimum":1,"exclusiveMinimum":true}}}`, `{"n":1}`, "arguments.n"},
		{"draft-04 exclusive ok", `{"$schema":"http://json-schema.org/draft-04/schema#","type":"object","properties":{"n":{"minimum":1,"exclusiveMinimum":true}}}`, `{"n":2}`, "ok"},
		{"boolean bound without dialect", `{"type":"object","properties":{"n":{"minimum":1,"exclusiveMinimum":true}}}`, `{"n":1}`, "skipped"},
		{"type list", `{"type":"object","properties":{"s":{"type":["string","null"]}}}`, `{"s":null}`, "ok"},
		{"type list refuses", `{"type":"object","properties":{"s":{"type":["string","null"]}}}`, `{"s":1}`, "arguments.s"},
		{"draft-07 tuple", `{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","properties":{"t":{"items":[{"type":"string"},{"type":"integer"}]}}}`, `{"t":["a","b"]}`, "arguments.t[1]"},
		{"big enum", `{"type":"object","properties":{"e":{"enum":[` + strings.Join(values, ",") + `]}}}`, `{"e":"v4999"}`, "ok"},
		{"big enum refuses", `{"type":"object","properties":{"e":{"enum":[` + strings.Join(values, ",") + `]}}}`, `{"e":"v5000"}`, "arguments.e"},
		{"unknown dialect", `{"$schema":"https://example.test/my-dialect","type":"object","properties":{"n":{"type":"integer"}}}`, `{"n":"x"}`, "skipped"},
		{"format is a remark", `{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","properties":{"u":{"type":"string","format":"uri"}}}`, `{"u":"not a uri"}`, "ok"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			raw := `{"name":"a","inputSchema":` + tc.schema + `}`
			d := only(t, raw)
			if got := validate(t, d, tc.args); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
			if string(d.Raw) != raw {
				t.Error("the raw bytes changed")
			}
		})
	}
	if d := only(t, `{"name":"a","inputSchema":{"$schema":"https://example.test/x","type":"object"}}`); !hasFinding(d.Findings, FindingDialectUnknown) {
		t.Errorf("findings %v", d.Findings)
	}
}

func TestFO060_ExpensiveSchemasAreBounded(t *testing.T) {
	t.Parallel()
	branches := make([]string, 10_000)
	for i := range branches {
		branches[i] = fmt.Sprintf(`{"const":%d}`, i)
	}
	// Each definition refers to the next one twice: 2^40 paths.
	var chain strings.Builder
	for i := range 40 {
		fmt.Fprintf(&chain, `"d%d":{"anyOf":[{"$ref":"#/$defs/d%d"},{"$ref":"#/$defs/d%d"}]},`, i, i+1, i+1)
	}
	doubling := `{"type":"object","properties":{"x":{"$ref":"#/$defs/d0"}},"$defs":{` + chain.String() + `"d40":{"type":"string"}}}`
	numbers := make([]string, 4000)
	for i := range numbers {
		numbers[i] = fmt.Sprintf("%d.5", i)
	}
	rows := strings.TrimSuffix(strings.Repeat("0.25,", 20_000), ",")
	cases := []struct{ name, schema, args, want, finding string }{
		{"nested quantifiers", `{"type":"object","properties":{"p":{"pattern":"^(a+)+$"}}}`, `{"p":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}`, "arguments.p", ""},
		{"look-ahead", `{"type":"object","properties":{"p":{"type":"string","pattern":"^(?=.*x).+$"},"n":{"type":"integer"}}}`, `{"p":"abc","n":"x"}`, "arguments.n", FindingPatternUnsupported},
		{"pattern names", `{"type":"object","additionalProperties":false,"patternProperties":{"^(?!_)":{"type":"string"}}}`, `{"anything":1}`, "ok", FindingPatternUnsupported},
		{"costly pattern", `{"type":"object","properties":{"p":{"pattern":"((a{50}){50}){50}"}}}`, `{"p":"b"}`, "ok", FindingPatternUnsupported},
		{"ten thousand branches", `{"type":"object","properties":{"x":{"anyOf":[` + strings.Join(branches, ",") + `]}}}`, `{"x":-1}`, "skipped", FindingSchemaTooLarge},
		{"doubling references", doubling, `{"x":1}`, "skipped", ""},
		{"long enum of numbers and many rows", `{"type":"object","properties":{"r":{"items":{"enum":[` + strings.Join(numbers, ",") + `]}}}}`, `{"r":[` + rows + `]}`, "skipped", ""},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			d := only(t, `{"name":"a","inputSchema":`+tc.schema+`}`)
			if got := validate(t, d, tc.args); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
			if tc.finding != "" && !hasFinding(d.Findings, tc.finding) {
				t.Errorf("findings %v, want %s", d.Findings, tc.finding)
			}
		})
	}
}

func TestValidateArguments_ConcurrentUseOfOneChecker(t *testing.T) {
	t.Parallel()
	d := only(t, `{"name":"a","inputSchema":{"type":"object","required":["x"]}}`)
	good, bad := args(t, `{"x":1}`), args(t, `{}`)
	done := make(chan string, 32)
	for i := range 32 {
		go func() {
			v, want := good, false
			if i%2 == 1 {
				v, want = bad, true
			}
			skipped, err := d.ValidateArguments(v)
			if skipped != "" || (err != nil) != want {
				done <- fmt.Sprintf("%d: %q %v", i, skipped, err)
				return
			}
			done <- ""
		}()
	}
	for range 32 {
		if s := <-done; s != "" {
			t.Error(s)
		}
	}
}
