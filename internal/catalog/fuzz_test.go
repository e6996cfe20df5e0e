package catalog

import (
	"encoding/json"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

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
