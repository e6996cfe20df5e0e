package elicitation

import (
	"encoding/json"
	"math/big"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"unicode/utf8"
)

// The types of a field.
const (
	typeString  = "string"
	typeNumber  = "number"
	typeInteger = "integer"
	typeBoolean = "boolean"
	typeArray   = "array"
)

// field is one field of a form. Bounds that the server did not give are nil.
type field struct {
	name, title, description string
	kind, format             string
	pattern                  *regexp.Regexp // nil also for one that only other engines read
	shortest, longest        *big.Rat       // of a text in characters
	least, most              *big.Rat       // of a number
	fewest, manyest          *big.Rat       // of choices
	choices                  []string       // of a choice, or of several
	closed                   bool           // only choices are answers
	byDefault                json.RawMessage
	required                 bool
}

// noted are what every field may have without changing what an answer looks like.
var noted = []string{"type", "title", "description", "default", "$comment", "examples", "deprecated", "readOnly", "writeOnly"}

var wordsOf = map[string][]string{
	typeString:  {"minLength", "maxLength", "pattern", "format", "enum", "enumNames", "oneOf"},
	typeNumber:  {"minimum", "maximum"},
	typeInteger: {"minimum", "maximum"},
	typeBoolean: nil,
	typeArray:   {"items", "minItems", "maxItems", "uniqueItems"},
}

func parseField(name string, raw json.RawMessage) (field, error) {
	f := field{name: name}
	m, ok := objectOf(raw)
	if !ok {
		return f, malformed("the field %.60q is no object", name)
	}
	f.title, _ = textOf(m["title"])
	f.description, _ = textOf(m["description"])
	f.kind, _ = textOf(m["type"])
	allowed, ok := wordsOf[f.kind]
	if !ok {
		return f, malformed("the field %.60q has a type that forms do not have", name)
	}
	for word := range m {
		if !slices.Contains(noted, word) && !slices.Contains(allowed, word) && !strings.HasPrefix(word, "x-") {
			return f, malformed("the field %.60q has a %.60q that forms do not have", name, word)
		}
	}
	for _, part := range []func(members) bool{f.bounds, f.text, f.choice, f.several} {
		if !part(m) {
			return f, malformed("the field %.60q has a rule that cannot be read", name)
		}
	}
	if d := m["default"]; d != nil {
		// A default that is no answer is none; the person is asked all the same.
		if f.check(d) == "" {
			f.byDefault = d
		}
	}
	return f, nil
}

func (f *field) bounds(m members) bool {
	for word, to := range map[string]**big.Rat{"minLength": &f.shortest, "maxLength": &f.longest, "minimum": &f.least, "maximum": &f.most,
		"minItems": &f.fewest, "maxItems": &f.manyest} {
		if m[word] == nil {
			continue
		}
		n, ok := numberOf(m[word])
		if !ok || word != "minimum" && word != "maximum" && (!n.IsInt() || n.Sign() < 0) {
			return false
		}
		*to = n
	}
	return true
}

func (f *field) text(m members) bool {
	if raw := m["format"]; raw != nil {
		var ok bool
		if f.format, ok = textOf(raw); !ok {
			return false
		}
	}
	if raw := m["pattern"]; raw != nil {
		p, ok := textOf(raw)
		if !ok || len(p) > maxPattern {
			return false
		}
		f.pattern = compile(p)
	}
	return true
}

// compile returns nil for a pattern that this engine does not read, or that is too
// large for it: the server writes for another one, and checks what it gets by
// itself.
func compile(pattern string) *regexp.Regexp {
	tree, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil || weight(tree) > maxProgram {
		return nil
	}
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil
	}
	return re
}

// weight estimates how many instructions a pattern becomes, which repeats within
// each other multiply.
func weight(t *syntax.Regexp) int {
	n := 1 + len(t.Rune)
	for _, sub := range t.Sub {
		n = min(n+weight(sub), maxProgram+1)
	}
	if t.Op == syntax.OpRepeat {
		n *= max(t.Min, t.Max, 1)
	}
	return min(n, maxProgram+1)
}

// choice reads enum, with enumNames, or oneOf.
func (f *field) choice(m members) (ok bool) {
	if m["enum"] != nil {
		if f.choices, ok = textsOf(m["enum"]); !ok || m["oneOf"] != nil {
			return false
		}
		if raw := m["enumNames"]; raw != nil {
			if names, ok := textsOf(raw); !ok || len(names) != len(f.choices) {
				return false
			}
		}
		f.closed = true
	} else if m["enumNames"] != nil {
		return false
	}
	if raw := m["oneOf"]; raw != nil {
		if f.choices, ok = titled(raw); !ok {
			return false
		}
		f.closed = true
	}
	return len(f.choices) <= maxChoices && (!f.closed || len(f.choices) > 0)
}

// several reads the items of an array, of which each must be a choice.
func (f *field) several(m members) bool {
	if f.kind != typeArray {
		return true
	}
	items, ok := objectOf(m["items"])
	if !ok {
		return false
	}
	for word := range items {
		if !slices.Contains([]string{"type", "enum", "anyOf", "title", "description"}, word) {
			return false
		}
	}
	if t := items["type"]; t != nil && string(t) != `"string"` {
		return false
	}
	switch {
	case items["enum"] != nil && items["anyOf"] == nil:
		f.choices, ok = textsOf(items["enum"])
	case items["anyOf"] != nil && items["enum"] == nil:
		f.choices, ok = titled(items["anyOf"])
	default:
		return false
	}
	f.closed = true
	return ok && len(f.choices) > 0 && len(f.choices) <= maxChoices
}

// titled reads [{const, title}].
func titled(raw json.RawMessage) (out []string, ok bool) {
	var items []json.RawMessage
	if raw[0] != '[' || json.Unmarshal(raw, &items) != nil {
		return nil, false
	}
	for _, item := range items {
		m, ok := objectOf(item)
		if !ok {
			return nil, false
		}
		for word := range m {
			if word != "const" && word != "title" && word != "description" {
				return nil, false
			}
		}
		value, ok := textOf(m["const"])
		if !ok {
			return nil, false
		}
		out = append(out, value)
	}
	return out, true
}

// numberOf reads a number token exactly. Canonical JSON bounds its digits and its
// exponent, and so what this costs.
func numberOf(raw []byte) (*big.Rat, bool) {
	if len(raw) == 0 || raw[0] != '-' && (raw[0] < '0' || raw[0] > '9') {
		return nil, false
	}
	return new(big.Rat).SetString(string(raw))
}

func length(s string) *big.Rat { return new(big.Rat).SetInt64(int64(utf8.RuneCountInString(s))) }
