package catalog

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
)

// The findings about schemas. None of them hides a definition: the server has
// the last word on its arguments, and what cannot be checked here is left to it.
const (
	FindingSchemaUntyped      = "SCHEMA_UNTYPED"
	FindingSchemaNullMember   = "SCHEMA_NULL_MEMBER"
	FindingSchemaTooLarge     = "SCHEMA_TOO_LARGE"
	FindingReferenceBroken    = "REFERENCE_BROKEN"
	FindingReferenceRemote    = "REFERENCE_REMOTE"
	FindingPatternUnsupported = "PATTERN_UNSUPPORTED"
	FindingDialectUnknown     = "DIALECT_UNKNOWN"
	FindingOutputSchema       = "OUTPUT_SCHEMA_UNUSABLE"
)

// The bounds of a schema that is compiled; a larger one is kept and served but
// not used for checks. The compiler's time grows with the square of the number
// of subschemas.
const (
	maxSchemaNodes   = 40_000
	maxSubschemas    = 2_500
	maxPatternBytes  = 1_024
	maxPatternStates = 2_000
	// maxSchemaStates bounds the patterns of one schema together: a few bytes of a
	// pattern make thousands of states, and each is held as long as the schema is.
	maxSchemaStates = 20_000
	// patternCost is what a pattern counts in states beside those of its own.
	patternCost = 40
)

// dialects are the versions of JSON Schema that can be checked, without the
// scheme and an empty fragment.
var dialects = map[string]bool{
	"json-schema.org/schema":               true,
	"json-schema.org/draft/2020-12/schema": true,
	"json-schema.org/draft/2019-09/schema": true,
	"json-schema.org/draft-07/schema":      true,
	"json-schema.org/draft-06/schema":      true,
	"json-schema.org/draft-04/schema":      true,
}

// schemaShape is a schema made ready for the compiler: a copy without the parts
// that cannot be checked, with a finding for each kind of part left out.
type schemaShape struct {
	doc      any
	findings []Finding
	// skip says why nothing can be checked, and is empty when something can.
	skip string
}

// readSchema looks at one schema in canonical or raw JSON that canonical has
// accepted. It follows no reference and compiles nothing but patterns.
func readSchema(raw []byte) schemaShape {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var doc any
	if err := dec.Decode(&doc); err != nil {
		return schemaShape{skip: "the schema cannot be read"}
	}
	root, ok := doc.(map[string]any)
	if !ok {
		return schemaShape{skip: "the schema is not an object"}
	}
	p := &schemaPruner{root: root, anchors: map[string]bool{}, notes: map[string]string{}}
	p.scan(root)
	p.nested = p.ids
	if _, ok := root["$id"].(string); ok {
		p.nested--
	}
	out := schemaShape{doc: doc}
	switch {
	case p.foreign != "":
		p.note(FindingDialectUnknown, "$schema "+quoteShort(p.foreign)+" is not a known dialect; nothing is checked")
		out.skip = "its dialect is not known"
	case p.nodes > maxSchemaNodes || p.subschemas > maxSubschemas:
		p.note(FindingSchemaTooLarge, fmt.Sprintf("%d parts, %d subschemas; nothing is checked", p.nodes, p.subschemas))
		out.skip = "it is too large"
	default:
		p.prune("", root)
	}
	for _, code := range slices.Sorted(maps.Keys(p.notes)) {
		out.findings = append(out.findings, Finding{Code: code, Detail: p.notes[code]})
	}
	return out
}

// schemaPruner takes out of a schema, in place, what cannot be checked, so that
// the rest still is (a missing rule never refuses what the server would take).
type schemaPruner struct {
	root              map[string]any
	anchors           map[string]bool
	ids, nested       int // ids of all parts, and of those below the root
	foreign           string
	nodes, subschemas int
	states            int               // of all patterns so far
	notes             map[string]string // the first of each code
}

func (p *schemaPruner) note(code, detail string) {
	if _, ok := p.notes[code]; !ok {
		p.notes[code] = detail
	}
}

// scan counts, and collects anchors, ids and dialects of the whole document.
func (p *schemaPruner) scan(v any) {
	p.nodes++
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			p.scan(e)
		}
	case map[string]any:
		p.subschemas++
		for _, name := range []string{"$anchor", "$dynamicAnchor"} {
			if s, ok := v[name].(string); ok {
				p.anchors[s] = true
			}
		}
		for _, name := range []string{"$id", "id"} {
			if s, ok := v[name].(string); ok {
				if rest, is := strings.CutPrefix(s, "#"); is {
					p.anchors[rest] = true
				} else if name == "$id" {
					p.ids++
				}
			}
		}
		if s, ok := v["$schema"].(string); ok && p.foreign == "" && !knownDialect(s) {
			p.foreign = s
		}
		for _, e := range v {
			p.scan(e)
		}
	}
}

func knownDialect(s string) bool {
	s = strings.TrimSuffix(s, "#")
	if rest, ok := strings.CutPrefix(s, "https://"); ok {
		s = rest
	} else {
		s = strings.TrimPrefix(s, "http://")
	}
	return dialects[s]
}

// The keywords that hold subschemas: one, a list, or one for each name.
var (
	oneSchema = []string{"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
		"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
	listOfSchemas = []string{"allOf", "anyOf", "items", "oneOf", "prefixItems"}
	mapOfSchemas  = []string{"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)

func (p *schemaPruner) prune(path string, s map[string]any) {
	p.dropNulls(path, s)
	p.dropReferences(path, s)
	p.dropPatterns(path, s)
	// Formats are annotations for MCP (2020-12); older dialects would refuse
	// arguments by this library's idea of a format.
	delete(s, "format")
	for _, name := range oneSchema {
		if sub, ok := s[name].(map[string]any); ok {
			p.prune(memberPath(path, name), sub)
		}
	}
	for _, name := range listOfSchemas {
		list, _ := s[name].([]any)
		for i, e := range list {
			if sub, ok := e.(map[string]any); ok {
				p.prune(memberPath(path, name)+"["+strconv.Itoa(i)+"]", sub)
			}
		}
	}
	for _, name := range mapOfSchemas {
		m, _ := s[name].(map[string]any)
		for _, key := range slices.Sorted(maps.Keys(m)) {
			if sub, ok := m[key].(map[string]any); ok {
				p.prune(memberPath(memberPath(path, name), key), sub)
			}
		}
	}
}

// dropNulls takes out members such as required: null, which no dialect allows
// and which some servers write for "none".
func (p *schemaPruner) dropNulls(path string, s map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(s)) {
		if s[name] == nil && name != "const" && name != "default" {
			p.note(FindingSchemaNullMember, memberPath(path, name)+" is null and is left out of the check")
			delete(s, name)
		}
	}
}

// dropReferences empties a subschema whose reference leads nowhere. Nothing is
// ever fetched. Inside documents with ids of their own the compiler decides.
func (p *schemaPruner) dropReferences(path string, s map[string]any) {
	for _, name := range []string{"$ref", "$dynamicRef", "$recursiveRef"} {
		ref, ok := s[name].(string)
		if !ok {
			continue
		}
		fragment, local := strings.CutPrefix(ref, "#")
		at := memberPath(path, name)
		switch {
		case !local && p.ids == 0:
			p.note(FindingReferenceRemote, at+" points outside the definition; that part is not checked")
		case local && p.nested <= 0 && !p.resolves(fragment):
			p.note(FindingReferenceBroken, at+" leads nowhere; that part is not checked")
		default:
			continue
		}
		for k := range s {
			switch k {
			case "$defs", "definitions", "$id", "id", "$schema", "$anchor":
			default:
				delete(s, k)
			}
		}
		return
	}
}

// resolves reports whether a fragment names a place in the document: empty, a
// JSON pointer (RFC 6901, percent-encoded) or an anchor.
func (p *schemaPruner) resolves(fragment string) bool {
	if fragment == "" || p.anchors[fragment] {
		return true
	}
	if fragment[0] != '/' {
		return false
	}
	var at any = p.root
	for _, token := range strings.Split(fragment[1:], "/") {
		token = strings.NewReplacer("~1", "/", "~0", "~").Replace(unpercent(token))
		switch v := at.(type) {
		case map[string]any:
			next, ok := v[token]
			if !ok {
				return false
			}
			at = next
		case []any:
			i, err := strconv.Atoi(token)
			if err != nil || i < 0 || i >= len(v) {
				return false
			}
			at = v[i]
		default:
			return false
		}
	}
	switch at.(type) {
	case map[string]any, bool:
		return true
	}
	return false
}

func unpercent(s string) string {
	if !strings.Contains(s, "%") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				b.WriteByte(byte(n))
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func (p *schemaPruner) dropPatterns(path string, s map[string]any) {
	if text, ok := s["pattern"].(string); ok {
		if err := p.admit(text); err != nil {
			p.note(FindingPatternUnsupported, memberPath(path, "pattern")+" "+err.Error()+"; it is not checked")
			delete(s, "pattern")
		}
	}
	m, _ := s["patternProperties"].(map[string]any)
	for _, text := range slices.Sorted(maps.Keys(m)) {
		if err := p.admit(text); err != nil {
			p.note(FindingPatternUnsupported, memberPath(path, "patternProperties")+" "+err.Error()+"; it is not checked")
			delete(m, text)
			// Without the pattern these two would refuse what it let through.
			delete(s, "additionalProperties")
			delete(s, "unevaluatedProperties")
		}
	}
}

// admit says why a pattern is not used, also because those before it are enough.
func (p *schemaPruner) admit(text string) error {
	if p.states >= maxSchemaStates {
		return patternError("is too expensive beside the others")
	}
	re, err := compilePattern(text)
	if err != nil {
		p.states += maxPatternStates / 4 // what is refused was looked at, too
		return err
	}
	p.states += patternCost + re.states
	return nil
}

// pattern is a regular expression with the number of states of its program.
// The engine's time is linear in text × states (RE2), without backtracking.
type pattern struct {
	*regexp.Regexp
	states int
}

// patternError is why a pattern is not used.
type patternError string

func (e patternError) Error() string { return string(e) }

func compilePattern(text string) (*pattern, error) {
	if len(text) > maxPatternBytes {
		return nil, patternError("is longer than " + strconv.Itoa(maxPatternBytes) + " bytes")
	}
	tree, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return nil, patternError("is not supported by the engine")
	}
	prog, err := syntax.Compile(tree.Simplify())
	if err != nil || len(prog.Inst) > maxPatternStates {
		return nil, patternError("is too expensive")
	}
	re, err := regexp.Compile(text)
	if err != nil {
		return nil, patternError("is not supported by the engine")
	}
	return &pattern{Regexp: re, states: len(prog.Inst)}, nil
}
