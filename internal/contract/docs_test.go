package contract

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// TestDocumented holds docs/contract.md against the schema: its example is a
// contract, and its table has a row for each member, with the default.
func TestDocumented(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../docs/contract.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(raw)
	_, rest, _ := strings.Cut(page, "```yaml\n")
	example, _, _ := strings.Cut(rest, "```")
	mustParse(t, example)

	var s map[string]any
	if err := json.Unmarshal(Schema(), &s); err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for line := range strings.Lines(page) {
		if member, rest, ok := strings.Cut(strings.TrimPrefix(line, "| `"), "` | "); ok {
			rows[member] = strings.ReplaceAll(rest, ",", "")
		}
	}
	walkSchema(t, s, s, "", func(path string, leaf map[string]any) {
		row, ok := rows[path]
		if !ok {
			t.Errorf("%s is not documented", path)
			return
		}
		for _, key := range []string{"default", "minimum", "maximum", "maxItems"} {
			bound, has := leaf[key]
			if _, list := bound.([]any); !has || list || path == "protocol.versions" {
				continue
			}
			text, _ := json.Marshal(bound)
			word := strings.Trim(string(text), `"`)
			if !strings.Contains(row, word) {
				t.Errorf("%s: the row does not tell %s %s", path, key, word)
			}
		}
	})
}

// walkSchema visits each member that has no members of its own.
func walkSchema(t *testing.T, root, s map[string]any, path string, visit func(string, map[string]any)) {
	if name, ok := s["$ref"].(string); ok {
		merged := map[string]any{}
		for k, v := range root["$defs"].(map[string]any)[strings.TrimPrefix(name, "#/$defs/")].(map[string]any) {
			merged[k] = v
		}
		for k, v := range s {
			if k != "$ref" {
				merged[k] = v
			}
		}
		walkSchema(t, root, merged, path, visit)
		return
	}
	if variants, ok := s["oneOf"].([]any); ok {
		for _, v := range variants {
			walkSchema(t, root, v.(map[string]any), path, visit)
		}
		return
	}
	if properties, ok := s["properties"].(map[string]any); ok {
		for name, p := range properties {
			at := name
			if path != "" {
				at = path + "." + name
			}
			walkSchema(t, root, p.(map[string]any), at, visit)
		}
		return
	}
	if items, ok := s["items"].(map[string]any); ok {
		if items["$ref"] == "#/$defs/tool" || items["properties"] != nil {
			walkSchema(t, root, items, path+"[]", visit)
			return
		}
	}
	visit(path, s)
}
