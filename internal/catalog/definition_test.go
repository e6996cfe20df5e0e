package catalog

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const okSchema = `{"type":"object"}`

func tool(name, schema string) json.RawMessage {
	n, _ := json.Marshal(name)
	return json.RawMessage(`{"name":` + string(n) + `,"inputSchema":` + schema + `}`)
}

func hasFinding(fs []Finding, code string) bool {
	for _, f := range fs {
		if f.Code == code {
			return true
		}
	}
	return false
}

func built(t *testing.T, items ...json.RawMessage) *content {
	t.Helper()
	c, err := buildContent(Server{ID: "srv_x", Name: "s"}, Tool, Listing{Items: items})
	if err != nil {
		t.Fatal(err)
	}
	c.encoded = c.append(nil, true)
	c.index("s", func(_, _ string, raw []byte) *checker { return newChecker(raw) })
	return c
}

func TestFO053_ModelNamesFitEveryProvider(t *testing.T) {
	t.Parallel()
	valid := regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	long := strings.Repeat("x", 90)
	names := []string{"echo", "a.b/c", "my tool", long, long + "y", "日本語", "日本人", "a_b_c", "a b c", "a.b.c", "-", "_", "__"}
	seen := map[string]string{}
	for _, server := range []string{"s", "calendar", strings.Repeat("z", 63)} {
		for _, name := range names {
			m := ModelName(server, name)
			if !valid.MatchString(m) {
				t.Errorf("ModelName(%q, %q) = %q", server, name, m)
			}
			if other, ok := seen[m]; ok {
				t.Errorf("%q stands for %s and %s/%s", m, other, server, name)
			}
			seen[m] = server + "/" + name
		}
	}
	// Stable over releases: models and transcripts keep these names.
	for _, c := range [][3]string{
		{"calendar", "create_draft_event", "calendar__create_draft_event"},
		{"s", "a.b/c", "s__a_b_c_kcu4fw56fjdzq7a32up4"},
		{"s", "日本語", "s_npyh65p7jzwphpmdkgx5"},
		{"s", "my tool", "s__my_tool_dc5autm37mt6tbeesem6"},
	} {
		if got := ModelName(c[0], c[1]); got != c[2] {
			t.Errorf("ModelName(%q, %q) = %q, want %q", c[0], c[1], got, c[2])
		}
	}
	// A server that names a tool as another's hashed name gets no collision.
	forged := strings.TrimPrefix(ModelName("s", "my tool"), "s__")
	if ModelName("s", forged) == ModelName("s", "my tool") {
		t.Error("a plain name collides with a changed one")
	}
}

func TestFO054_SameToolOnTwoServersHasTwoModelNames(t *testing.T) {
	t.Parallel()
	if ModelName("x", "execute_sql") == ModelName("y", "execute_sql") {
		t.Error("one model name for two servers")
	}
}

func TestFO055_DuplicateNamesAreAllInConflict(t *testing.T) {
	t.Parallel()
	c := built(t, tool("pay", `{"type":"object","properties":{"amount":{"type":"number","maximum":10}}}`),
		tool("other", okSchema), tool("pay", okSchema))
	for _, i := range []int{0, 2} {
		if q := c.definitions[i].Quarantine; !strings.Contains(q, "conflict") {
			t.Errorf("definition %d: quarantine %q", i, q)
		}
	}
	r := &Revision{Definitions: c.definitions, byName: c.byName, byModel: c.byModel}
	if _, ok := r.Find("pay"); ok {
		t.Error("an ambiguous name is callable")
	}
	if d, ok := r.Find("other"); !ok || d.Name != "other" {
		t.Error("the other tool is gone")
	}
	if d, ok := r.FindModel("s__other"); !ok || d.Name != "other" {
		t.Error("the other tool has no model name")
	}
}

func TestFO056_BadDefinitionsAreSetAsideAlone(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name       string
		raw        string
		quarantine string // part of it; empty: usable
		finding    string
	}{
		{"string root", `{"name":"a","inputSchema":{"type":"string"}}`, "does not describe an object", ""},
		{"anyOf root", `{"name":"a","inputSchema":{"anyOf":[{"type":"object"}]}}`, "", FindingSchemaUntyped},
		{"required null", `{"name":"a","inputSchema":{"type":"object","required":null}}`, "", FindingSchemaNullMember},
		{"properties null", `{"name":"a","inputSchema":{"type":"object","properties":null}}`, "", FindingSchemaNullMember},
		{"no schema", `{"name":"a"}`, "no inputSchema", ""},
		{"schema true", `{"name":"a","inputSchema":true}`, "no object", ""},
		{"schema null", `{"name":"a","inputSchema":null}`, "no object", ""},
		{"marker only", `{"name":"a","inputSchema":{"$schema":"http://json-schema.org/draft-07/schema#"}}`, "", FindingSchemaUntyped},
		{"type list", `{"name":"a","inputSchema":{"type":["object","null"]}}`, "", FindingSchemaUntyped},
		{"type list without object", `{"name":"a","inputSchema":{"type":["string"]}}`, "does not describe", ""},
		{"no name", `{"inputSchema":{"type":"object"}}`, "no name", ""},
		{"number name", `{"name":7,"inputSchema":{"type":"object"}}`, "no name", ""},
		{"empty name", `{"name":"","inputSchema":{"type":"object"}}`, "is empty", ""},
		{"long name", `{"name":"` + strings.Repeat("n", 129) + `","inputSchema":{"type":"object"}}`, "more than 128", ""},
		{"NUL name", `{"name":"a\u0000b","inputSchema":{"type":"object"}}`, "control character", ""},
		{"broken JSON", `{"name":"a","inputSchema":{"type":"object"}`, "not acceptable JSON", ""},
		{"not an object", `["a"]`, "not acceptable JSON", ""},
		{"duplicate member", `{"name":"a","name":"b","inputSchema":{"type":"object"}}`, "not acceptable JSON", ""},
		{"lone surrogate", `{"name":"a","title":"\ud800","inputSchema":{"type":"object"}}`, "not acceptable JSON", ""},
		{"huge exponent", `{"name":"a","inputSchema":{"type":"object","maximum":1e999999}}`, "not acceptable JSON", ""},
		{"too large", `{"name":"a","description":"` + strings.Repeat("d", MaxDefinition) + `","inputSchema":{"type":"object"}}`, "bytes, more than", ""},
		{"output schema true", `{"name":"a","inputSchema":{"type":"object"},"outputSchema":true}`, "", FindingOutputSchema},
		{"contradiction", `{"name":"a","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true,"destructiveHint":true}}`, "", FindingContradictingHints},
		{"unusual name", `{"name":"my tool","inputSchema":{"type":"object"}}`, "", FindingUnusualName},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := built(t, json.RawMessage(tc.raw), tool("healthy", okSchema))
			d := c.definitions[0]
			if tc.quarantine == "" && d.Quarantine != "" || !strings.Contains(d.Quarantine, tc.quarantine) {
				t.Errorf("quarantine %q, want %q", d.Quarantine, tc.quarantine)
			}
			if tc.finding != "" && !hasFinding(d.Findings, tc.finding) {
				t.Errorf("findings %v, want %s", d.Findings, tc.finding)
			}
			if !c.definitions[1].Callable() || len(c.definitions[1].Findings) != 0 {
				t.Errorf("the healthy tool: %+v", c.definitions[1])
			}
			if d.Quarantine == "" && string(d.Raw) != tc.raw {
				t.Error("the raw bytes changed")
			}
		})
	}
}

func TestFO070_MiscasedMembersAreRefused(t *testing.T) {
	t.Parallel()
	for name, raw := range map[string]string{
		"name":        `{"name":"safe","Name":"evil","inputSchema":{"type":"object"}}`,
		"schema":      `{"name":"a","inputSchema":{"type":"object"},"inputschema":{"type":"object"}}`,
		"long s":      `{"name":"a","inputSchema":{"type":"object"},"input\u017fchema":{}}`,
		"annotations": `{"name":"a","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true,"readonlyhint":false}}`,
	} {
		d := readDefinition(Tool, []byte(raw))
		if !strings.Contains(d.Quarantine, "differ in case only") {
			t.Errorf("%s: quarantine %q", name, d.Quarantine)
		}
	}
	// Alone, a miscased member is an unknown one and counts for nothing.
	d := readDefinition(Tool, []byte(`{"Name":"evil","inputSchema":{"type":"object"}}`))
	if d.Name != "" || !strings.Contains(d.Quarantine, "no name") {
		t.Errorf("%q, %q", d.Name, d.Quarantine)
	}
}

func TestOtherKinds(t *testing.T) {
	t.Parallel()
	d := readDefinition(ResourceTemplate, []byte(`{"name":"file","uriTemplate":"file:///{path}"}`))
	if d.Quarantine != "" || d.Name != "file:///{path}" {
		t.Errorf("template: %q %q", d.Name, d.Quarantine)
	}
	if d := readDefinition(ResourceTemplate, []byte(`{"name":"file"}`)); d.Quarantine == "" {
		t.Error("a template without a URI is usable")
	}
	if d := readDefinition(Prompt, []byte(`{"name":"weekly summary"}`)); d.Quarantine != "" || d.Name != "weekly summary" {
		t.Errorf("prompt: %q %q", d.Name, d.Quarantine)
	}
}

func TestFO100_InvisibleCharactersAreFlaggedAtFirstSight(t *testing.T) {
	t.Parallel()
	const england = "\U0001F3F4\U000E0067\U000E0062\U000E0065\U000E006E\U000E0067\U000E007F"
	cases := []struct{ name, text, code string }{
		{"tags", "hi\U000E0041\U000E0042", FindingInvisibleText},
		{"direction", "abc\u202Edef", FindingInvisibleText},
		{"zero width", "sen\u200Bd", FindingInvisibleText},
		{"selector payload", "a\U000E0101\U000E0102", FindingInvisibleText},
		{"joiner between letters", "a\u200Db", FindingInvisibleText},
		{"ANSI", "\x1b[2Jhidden", FindingControlCharacter},
		{"C1", "\u009b31m", FindingControlCharacter},
		{"forged flag", "\U0001F3F4\U000E0041\U000E0042\U000E007F", FindingInvisibleText},
		{"flag", "made in " + england, ""},
		{"family", "\U0001F468\u200D\U0001F469", ""},
		{"heart", "\u2764\uFE0F\u200D\U0001F525 and 1\uFE0F\u20E3", ""},
		{"Persian", "\u0645\u06CC\u200C\u062E\u0648\u0627\u0647\u0645", ""},
		{"plain", "Schedules a meeting: für 日本語\n\tok", ""},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			text, _ := json.Marshal(tc.text)
			for place, raw := range map[string]string{
				"description":                          `{"name":"a","description":` + string(text) + `,"inputSchema":{"type":"object"}}`,
				"title":                                `{"name":"a","title":` + string(text) + `,"inputSchema":{"type":"object"}}`,
				"inputSchema.properties.p.description": `{"name":"a","inputSchema":{"type":"object","properties":{"p":{"description":` + string(text) + `}}}}`,
				"inputSchema.properties.p.enum[0]":     `{"name":"a","inputSchema":{"type":"object","properties":{"p":{"enum":[` + string(text) + `]}}}}`,
				"annotations.title":                    `{"name":"a","inputSchema":{"type":"object"},"annotations":{"title":` + string(text) + `}}`,
			} {
				d := readDefinition(Tool, []byte(raw))
				if d.Quarantine != "" {
					t.Fatalf("%s: %s", place, d.Quarantine)
				}
				if tc.code == "" {
					if len(d.Findings) != 0 {
						t.Errorf("%s: %v", place, d.Findings)
					}
					continue
				}
				if len(d.Findings) != 1 || d.Findings[0].Code != tc.code || !strings.Contains(d.Findings[0].Detail, place) {
					t.Errorf("%s: %v", place, d.Findings)
				}
				if !isPlainASCII(d.Findings[0].Detail) {
					t.Error("the finding repeats what it warns of")
				}
			}
		})
	}
	// A member's name is text too.
	d := readDefinition(Tool, []byte("{\"name\":\"a\",\"inputSchema\":{\"type\":\"object\",\"properties\":{\"to\u200B\":{}}}}"))
	if !hasFinding(d.Findings, FindingInvisibleText) {
		t.Errorf("name of a parameter: %v", d.Findings)
	}
}

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

func FuzzReadDefinition(f *testing.F) {
	for _, s := range []string{
		`{"name":"a","inputSchema":{"type":"object","properties":{"x":{"$ref":"#/properties/y"},"y":{"pattern":"a+"}}}}`,
		`{"name":"a\u202e","inputSchema":{"$id":"x","type":["object"],"allOf":[{"$ref":"#"}]},"outputSchema":{}}`,
		`{"name":"a","inputSchema":{"$schema":"http://json-schema.org/draft-04/schema#","definitions":{"a/b~":{"type":"null"}},"$ref":"#/definitions/a~1b~0"}}`,
		`{}`, `[]`, `{"name":`, "\xff",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > 4096 {
			return
		}
		for _, kind := range Kinds {
			c, err := buildContent(Server{ID: "srv_x", Name: "s"}, kind, Listing{Items: []json.RawMessage{raw, raw}})
			if err != nil {
				t.Fatal(err)
			}
			c.index("s", func(_, _ string, raw []byte) *checker { return newChecker(raw) })
			d := &c.definitions[0]
			if d.Callable() && d.Name != "" {
				t.Fatalf("a name that is there twice is callable: %q", d.Name)
			}
			for _, def := range c.definitions {
				for _, fd := range def.Findings {
					if len(fd.Detail) > maxReason || !isPlainASCII(fd.Detail) {
						t.Fatalf("finding %q", fd.Detail)
					}
				}
			}
			encoded := c.append(nil, true)
			back, err := decodeContent(encoded)
			if err != nil || back.id != c.id {
				t.Fatalf("round trip: %v", err)
			}
			single := readDefinition(kind, raw)
			single.fill("s")
			if single.Callable() {
				if ck := newChecker(single.InputSchema); ck != nil {
					single.input = ck
				}
				if _, err := single.ValidateArguments(map[string]any{"x": int64(1), "y": "aa"}); err != nil && !fault.Is(err, fault.Invalid) {
					t.Fatal(err)
				}
			}
		}
	})
}

func FuzzDecodeContent(f *testing.F) {
	c, err := buildContent(Server{ID: "srv_x", Name: "s"}, Tool, Listing{Items: []json.RawMessage{tool("a", okSchema), tool("my tool", `{}`)},
		Era: "MODERN", Incomplete: "loop", Capabilities: json.RawMessage(`{"tools":{}}`)})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(c.append(nil, true))
	f.Add([]byte{})
	f.Add([]byte("\x12bulkhead catalog 1\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeContent(b)
		if err != nil {
			return
		}
		if again, err := decodeContent(c.append(nil, true)); err != nil || again.id != c.id {
			t.Fatalf("not stable: %v", err)
		}
	})
}

func TestRevisionID_CoversContentAndNothingElse(t *testing.T) {
	t.Parallel()
	v := Server{ID: "srv_1", Name: "s"}
	build := func(v Server, l Listing) string {
		c, err := buildContent(v, Tool, l)
		if err != nil {
			t.Fatal(err)
		}
		return c.id
	}
	base := Listing{Items: []json.RawMessage{tool("a", okSchema), tool("b", okSchema)}, ProtocolVersion: "2026-07-28",
		Era: "MODERN", Capabilities: json.RawMessage(`{"a":1,"b":2}`)}
	id := build(v, base)
	same := base
	same.Capabilities = json.RawMessage(`{ "b":2, "a":1 }`)
	same.Items = []json.RawMessage{json.RawMessage(`{"_meta":{"n":1}, "name":"a","inputSchema":{"type":"object"}}`), base.Items[1]}
	if build(v, same) != id {
		t.Error("_meta, white space or the order of members made a new revision")
	}
	for name, change := range map[string]func(*Listing){
		"order":    func(l *Listing) { l.Items = []json.RawMessage{l.Items[1], l.Items[0]} },
		"missing":  func(l *Listing) { l.Items = l.Items[:1] },
		"version":  func(l *Listing) { l.ProtocolVersion = "2025-11-25" },
		"era":      func(l *Listing) { l.Era = "LEGACY" },
		"declared": func(l *Listing) { l.Capabilities = nil },
		"partial":  func(l *Listing) { l.Incomplete = "pagination loop" },
		"schema":   func(l *Listing) { l.Items = []json.RawMessage{tool("a", `{"type":"object","title":"x"}`), l.Items[1]} },
	} {
		l := base
		change(&l)
		if build(v, l) == id {
			t.Errorf("%s: the same revision", name)
		}
	}
	if build(Server{ID: "srv_2", Name: "s"}, base) == id {
		t.Error("two servers share a revision")
	}
}

func TestFO041_ListsAreBounded(t *testing.T) {
	t.Parallel()
	items := make([]json.RawMessage, MaxDefinitions+1)
	for i := range items {
		items[i] = json.RawMessage(`{}`)
	}
	if _, err := buildContent(Server{}, Tool, Listing{Items: items}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("too many: %v", err)
	}
	big := json.RawMessage(strings.Repeat(" ", MaxListing/2+1))
	if _, err := buildContent(Server{}, Tool, Listing{Items: []json.RawMessage{big, big}}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("too large: %v", err)
	}
}

func TestLRU_HoldsItsBound(t *testing.T) {
	t.Parallel()
	c := newLRU[int, int](10)
	for i := range 100 {
		c.put(i, i, 3)
	}
	if n := c.len(); n != 3 {
		t.Errorf("%d items", n)
	}
	c.get(97)
	c.put(100, 100, 3)
	if _, ok := c.get(97); !ok {
		t.Error("the one used last is gone")
	}
	if _, ok := c.get(98); ok {
		t.Error("the one not used for longest is there")
	}
	c.put(5, 5, 11)
	if _, ok := c.get(5); ok {
		t.Error("larger than the whole")
	}
}
