package catalog

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// TestHostileDefinitions reads definitions that are made to cost much or to reach
// out, and checks arguments against those that are usable. Each ends, with memory
// within a multiple of the largest definition, and none makes the next one fail.
// It is not parallel, because memory is counted for the whole process.
func TestHostileDefinitions(t *testing.T) {
	named := func(schema string) string { return `{"name":"a","inputSchema":` + schema + `}` }
	object := func(members string) string { return named(`{"type":"object",` + members + `}`) }
	many := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format+",", i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	deep := func(open, end string, n int) string { return strings.Repeat(open, n) + "1" + strings.Repeat(end, n) }
	for name, raw := range map[string]string{
		"a reference to itself":              object(`"$ref":"#"`),
		"all of itself":                      object(`"allOf":[{"$ref":"#"}]`),
		"any of itself, twice, below itself": object(`"properties":{"x":{"anyOf":[{"$ref":"#"},{"$ref":"#"}]}}`),
		"two references to each other":       object(`"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"properties":{"x":{"$ref":"#/$defs/a"}}`),
		"not itself":                         object(`"not":{"$ref":"#"}`),
		"a dynamic reference to itself":      object(`"$dynamicAnchor":"n","properties":{"x":{"$dynamicRef":"#n"}}`),
		"a reference to the network":         object(`"properties":{"x":{"$ref":"http://127.0.0.1:1/schema"}}`),
		"a reference to a file":              object(`"properties":{"x":{"$ref":"file:///etc/passwd"}}`),
		"a base in the network":              object(`"$id":"http://127.0.0.1:1/","properties":{"x":{"$ref":"other"}}`),
		"a dialect in the network":           object(`"$schema":"http://127.0.0.1:1/schema"`),
		"one id many times":                  object(`"$defs":{` + many(500, `"d%d":{"$id":"urn:x:same"}`) + `}`),
		"properties without end":             object(`"properties":{` + many(8000, `"p%d":{"type":"string"}`) + `}`),
		"required without end":               object(`"required":[` + many(20_000, `"p%d"`) + `]`),
		"patterns without end":               object(`"patternProperties":{` + many(2000, `"^(a|b)*%d$":{}`) + `}`),
		"patterns that count, without end":   object(`"properties":{` + many(2400, `"p%d":{"pattern":"((ab?c?d){20}){15}%[1]d"}`) + `}`),
		"a pattern that counts":              object(`"properties":{"x":{"pattern":"(x{1000}){1000}"}}`),
		"a pattern of 100 KiB":               object(`"properties":{"x":{"pattern":"` + strings.Repeat("(a*)*", 20_000) + `"}}`),
		"a pattern nested 5,000 deep":        object(`"properties":{"x":{"pattern":"` + deep("(", ")", 5000) + `"}}`),
		"patterns that look back":            object(`"properties":{"x":{"pattern":"(?<=a)b"},"y":{"pattern":"(a)\\1"}}`),
		"a pattern that is none":             object(`"properties":{"x":{"pattern":"[z-a"}}`),
		"numbers beyond all bounds":          object(`"properties":{"x":{"minimum":1e400,"maximum":-1e400,"multipleOf":1e-400}}`),
		"numbers of 200 digits":              object(`"properties":{"x":{"multipleOf":0.` + strings.Repeat("3", 100) + `,"minimum":` + strings.Repeat("9", 100) + `}}`),
		"lengths that are none":              object(`"properties":{"x":{"maxLength":-1,"minItems":1.5,"maxItems":"x"}}`),
		"an enumeration of 20,000":           object(`"properties":{"x":{"enum":[` + many(20_000, `%d`) + `]}}`),
		"a constant 60 deep":                 object(`"const":` + deep("[", "]", 55)),
		"a schema 100,000 deep":              named(deep(`{"not":`, "}", 20_000)),
		"arrays 100,000 deep":                named(`{"type":"object","x":` + deep("[", "]", 100_000) + `}`),
		"types that are none":                object(`"properties":{"x":{"type":"everything"},"y":{"type":[]},"z":{"type":7}}`),
		"keywords of the wrong kind":         object(`"properties":[],"required":{},"allOf":{},"items":"x","enum":1,"additionalProperties":"x"`),
		"null keywords":                      object(`"properties":null,"required":null,"allOf":null`),
		"a name with a line break":           `{"name":"a\nb","inputSchema":{"type":"object"}}`,
		"a name of 100 KiB":                  `{"name":"` + strings.Repeat("x", 100_000) + `","inputSchema":{"type":"object"}}`,
		"a name that runs backwards":         `{"name":"a\u202eb","inputSchema":{"type":"object"}}`,
		"a lone surrogate":                   `{"name":"\ud800","inputSchema":{"type":"object"}}`,
		"a description that hides":           `{"name":"a","description":"\u200b\u2066x\u0000","inputSchema":{"type":"object"}}`,
		"a definition of 1 MiB":              `{"name":"a","description":"` + strings.Repeat("x", 1<<20) + `"}`,
		"no object":                          `[1,2,3]`,
		"members without end":                `{"name":"a","inputSchema":{"type":"object"},` + many(10_000, `"m%d":1`) + `}`,
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		c, err := buildContent(Server{ID: "srv_x", Name: "s"}, Tool, Listing{Items: []json.RawMessage{json.RawMessage(raw), tool("good", okSchema)}})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		c.index("s", func(_, _ string, raw []byte) *checker { return newChecker(raw) })
		for i := range c.definitions {
			if d := &c.definitions[i]; d.Callable() {
				for _, text := range []string{`{}`, `{"x":{"x":{"x":1}}}`, `{"x":"` + strings.Repeat("a", 2000) + `!"}`} {
					if _, err := d.ValidateArguments(args(t, text)); err != nil && len(err.Error()) > 4096 {
						t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
					}
				}
			}
		}
		runtime.ReadMemStats(&after)
		if d := &c.definitions[1]; !d.Callable() || d.Name != "good" {
			t.Errorf("%s: the good definition beside it is %+v", name, d)
		}
		n := int64(after.TotalAlloc - before.TotalAlloc)
		if most := int64(64 << 20); n > most {
			t.Errorf("%s: %d bytes are allocated for a definition of %d", name, n, len(raw))
		}
		t.Logf("%s: %d KiB for %d KiB, callable %v", name, n>>10, len(raw)>>10, c.definitions[0].Callable())
	}
}
