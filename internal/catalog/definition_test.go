package catalog

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
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
	if d := readDefinition(Resource, []byte(`{"name":"file","uri":"file:///a"}`)); d.Quarantine != "" || d.Name != "file:///a" {
		t.Errorf("resource: %q %q", d.Name, d.Quarantine)
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
