package catalog

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
)

// Kind is what a definition describes.
type Kind = string

// The kinds of definition; the words are part of the digests.
const (
	Tool             = "tool"
	Resource         = "resource"
	ResourceTemplate = "resource_template"
	Prompt           = "prompt"
	// Declaration describes nothing: its revisions are empty, and say what a server
	// declares and which version it speaks, for calls that need no definition.
	Declaration = "declaration"
)

// Kinds are the kinds of definitions, in the order in which they are listed.
var Kinds = []Kind{Tool, Resource, ResourceTemplate, Prompt}

// allKinds are those of which a revision is kept.
var allKinds = append(slices.Clone(Kinds), Declaration)

// ValidKind reports whether k is one of Kinds or Declaration.
func ValidKind(k Kind) bool { return slices.Contains(allKinds, k) }

// withSame returns the kinds that one announcement is about: a server tells of its
// resources and its templates in one.
func withSame(k Kind) []Kind {
	if k == Resource || k == ResourceTemplate {
		return []Kind{Resource, ResourceTemplate}
	}
	return []Kind{k}
}

// The bounds of one definition.
const (
	// MaxDefinition is the greatest length of one definition in bytes.
	MaxDefinition = 256 << 10
	// MaxName is the greatest length of a name in bytes (MCP: 128 characters).
	MaxName = 128
	// MaxURI is the greatest length in bytes of a resource's URI, or of a template's.
	MaxURI = 2048
)

// Finding codes about a definition as a whole.
const (
	FindingContradictingHints = "CONTRADICTING_HINTS"
	FindingUnusualName        = "UNUSUAL_NAME"
)

// Finding is a remark for people and policies about something a server sent.
type Finding struct {
	// Code is a stable word in UPPER_SNAKE_CASE.
	Code string
	// Detail is a sentence. Foreign text in it is quoted, escaped and cut.
	Detail string
}

// Hints are the annotations of a tool. They are the server's word about itself
// and may only raise what a call is taken for.
type Hints struct {
	// ReadOnly and Destructive are nil where the server said nothing.
	ReadOnly, Destructive *bool
}

// Definition is one tool, resource, resource template or prompt as the server
// described it. It is immutable and safe for concurrent use. Raw and what is cut out of
// it are the server's bytes, never changed; callers must not change them.
type Definition struct {
	Kind Kind
	// Name is what goes upstream. The name of a resource is its uri, and that of a
	// resource template its uriTemplate, because only they are unique. Empty where
	// none could be read.
	Name string
	// ModelName is the name for a model; see ModelName.
	ModelName string
	// Title and Description are foreign text, as decoded; they may be empty. The
	// title of a resource or a template without one is its name.
	Title, Description string
	// Digest is doc-1:sha256:…, or raw-1:sha256:… over the bytes of a definition
	// that is no canonical JSON.
	Digest string
	// Raw is the definition. It is empty where it was larger than MaxDefinition.
	Raw json.RawMessage
	// InputSchema and OutputSchema are a tool's; the second may be empty.
	InputSchema, OutputSchema json.RawMessage
	// Hints are those of a tool.
	Hints Hints
	// Findings are remarks; they do not keep a definition from being used.
	Findings []Finding
	// Quarantine says why the definition must not be used, and is empty when it
	// may be.
	Quarantine string

	input, output *checker
	arguments     []promptArgument // of a prompt
}

// ValidateArguments checks decoded arguments (see canonical.Decode) against the
// input schema of a tool, or against the arguments of a prompt. The error is an Invalid fault with paths below "arguments".
// Skipped says why arguments were not checked, and is empty when they were: the
// server decides then. The work is bounded in size and time.
func (d *Definition) ValidateArguments(v any) (skipped string, err error) {
	if d.Kind == Prompt {
		return "", checkPromptArguments(d.arguments, v)
	}
	if d.input == nil {
		return "", nil
	}
	return d.input.check("arguments", v)
}

// ValidateResult checks decoded structured content against the output schema, in
// the same way, with paths below "structuredContent". A definition without an
// output schema takes anything.
func (d *Definition) ValidateResult(v any) (skipped string, err error) {
	if d.output == nil {
		return "", nil
	}
	return d.output.check("structuredContent", v)
}

// HasArgument reports whether a prompt has an argument of this name, or a resource
// template a variable.
func (d *Definition) HasArgument(name string) bool {
	if d.Kind == ResourceTemplate {
		return slices.Contains(templateVariables(d.Name), name)
	}
	return slices.ContainsFunc(d.arguments, func(a promptArgument) bool { return a.name == name })
}

// Callable reports whether the definition is well formed and unique by name.
func (d *Definition) Callable() bool { return d.Quarantine == "" }

// mcpName is what MCP says a name should be (2025-11-25, tool names).
var mcpName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,128}$`)

// readDefinition examines one item of a listing. It never fails: what cannot be
// used is quarantined with its reason.
func readDefinition(kind Kind, raw []byte) Definition {
	d := Definition{Kind: kind}
	if len(raw) > MaxDefinition {
		d.Digest = rawDigest(raw)
		d.Quarantine = fmt.Sprintf("it has %d bytes, more than %d", len(raw), MaxDefinition)
		return d
	}
	d.Raw = raw
	digest, err := canonical.DefinitionDigest(kind, raw)
	if err != nil {
		d.Digest = rawDigest(raw)
		d.Quarantine = bounded("it is not acceptable JSON: " + err.Error())
		return d
	}
	d.Digest = digest
	members := decodeMembers(raw)
	d.readNames(members)
	d.scanText()
	if a, b := miscased(members); a != "" && d.Quarantine == "" {
		d.Quarantine = fmt.Sprintf("members %s and %s differ in case only", quoteShort(a), quoteShort(b))
	}
	switch kind {
	case Tool:
		d.readTool(members)
	case Prompt:
		if _, bad := readPromptArguments(members["arguments"]); bad != "" && d.Quarantine == "" {
			d.Quarantine = bad
		}
	}
	return d
}

// fill sets what is derived from Raw but not stored, for a definition whose
// verdict is known.
func (d *Definition) fill(server string) {
	d.ModelName = ModelName(server, d.Name)
	if strings.HasPrefix(d.Digest, rawPrefix) {
		return
	}
	members := decodeMembers(d.Raw)
	d.Title, _ = text(members["title"])
	d.Description, _ = text(members["description"])
	if d.Title == "" && (d.Kind == Resource || d.Kind == ResourceTemplate) {
		d.Title, _ = text(members["name"])
	}
	if d.Kind == Prompt {
		d.arguments, _ = readPromptArguments(members["arguments"])
	}
	if d.Kind != Tool {
		return
	}
	d.InputSchema = members["inputSchema"]
	d.OutputSchema = members["outputSchema"]
	d.Hints = readHints(members)
}

const rawPrefix = "raw-1:sha256:"

func rawDigest(raw []byte) string {
	sum := sha256.Sum256(raw)
	return rawPrefix + hex.EncodeToString(sum[:])
}

// decodeMembers splits an object that canonical has accepted. Names are compared
// exactly: decoding into a struct would let Name override name.
func decodeMembers(raw []byte) map[string]json.RawMessage {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return nil
	}
	return members
}

func text(raw json.RawMessage) (string, bool) {
	if len(raw) == 0 || raw[0] != '"' {
		return "", false
	}
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		return "", false
	}
	return s, true
}

func (d *Definition) readNames(members map[string]json.RawMessage) {
	member, most := "name", MaxName
	switch d.Kind {
	case Resource:
		member, most = "uri", MaxURI
	case ResourceTemplate:
		member, most = "uriTemplate", MaxURI
	}
	name, ok := text(members[member])
	switch {
	case !ok:
		d.Quarantine = "it has no " + member
		return
	case name == "":
		d.Quarantine = "its " + member + " is empty"
		return
	case len(name) > most:
		d.Quarantine = fmt.Sprintf("its %s has %d bytes, more than %d", member, len(name), most)
		return
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r >= 0x7f && r <= 0x9f }):
		d.Quarantine = "its " + member + " holds a control character"
		return
	}
	d.Name = name
	if d.Kind == Tool && !mcpName.MatchString(name) {
		d.add(FindingUnusualName, "the name is not 1 to 128 of letters, digits, _, - and .")
	}
}

func (d *Definition) add(code, format string, args ...any) {
	d.Findings = append(d.Findings, Finding{Code: code, Detail: bounded(fmt.Sprintf(format, args...))})
}

// maxReason bounds every reason and detail in bytes: they hold paths made of
// foreign names.
const maxReason = 500

func bounded(s string) string {
	if len(s) <= maxReason {
		return s
	}
	return strings.ToValidUTF8(s[:maxReason-3], "") + "..."
}

// scanText looks at every string of the definition, _meta too.
func (d *Definition) scanText() {
	for _, f := range TextFindings(d.Raw) {
		d.add(f.Code, "%s", f.Detail)
	}
}

func (d *Definition) readTool(members map[string]json.RawMessage) {
	if bad := d.readInputSchema(members["inputSchema"]); bad != "" && d.Quarantine == "" {
		d.Quarantine = bad
	}
	if raw, ok := members["outputSchema"]; ok {
		if raw[0] != '{' {
			d.add(FindingOutputSchema, "outputSchema is no object; results are not checked")
		} else {
			d.addSchema("outputSchema", readSchema(raw))
		}
	}
	if h := readHints(members); h.ReadOnly != nil && *h.ReadOnly && h.Destructive != nil && *h.Destructive {
		d.add(FindingContradictingHints, "annotations say both readOnlyHint and destructiveHint; the worse one counts")
	}
}

// readInputSchema returns why the schema makes a tool unusable, or "".
func (d *Definition) readInputSchema(raw json.RawMessage) string {
	if len(raw) == 0 {
		return "it has no inputSchema"
	}
	if raw[0] != '{' {
		return "its inputSchema is no object"
	}
	types := decodeMembers(raw)["type"]
	var list []string
	switch {
	case len(types) == 0 || string(types) == "null":
		d.add(FindingSchemaUntyped, "inputSchema does not say type object")
	case json.Unmarshal(types, &list) == nil:
		if !slices.Contains(list, "object") {
			return "its inputSchema does not describe an object"
		}
		d.add(FindingSchemaUntyped, "inputSchema allows other types than object")
	default:
		if s, _ := text(types); s != "object" {
			return "its inputSchema does not describe an object"
		}
	}
	d.addSchema("inputSchema", readSchema(raw))
	return ""
}

func (d *Definition) addSchema(member string, shape schemaShape) {
	for _, f := range shape.findings {
		d.add(f.Code, "%s: %s", member, f.Detail)
	}
}

func readHints(members map[string]json.RawMessage) Hints {
	annotations := decodeMembers(members["annotations"])
	return Hints{ReadOnly: boolean(annotations["readOnlyHint"]), Destructive: boolean(annotations["destructiveHint"])}
}

func boolean(raw json.RawMessage) *bool {
	switch string(raw) {
	case "true", "false":
		b := string(raw) == "true"
		return &b
	}
	return nil
}

// miscased returns two members of the object or of its annotations whose names
// differ only in case: decoders that fold case see one of them, others the
// other, so what was reviewed would not be what is used.
func miscased(members map[string]json.RawMessage) (string, string) {
	for _, m := range []map[string]json.RawMessage{members, decodeMembers(members["annotations"])} {
		seen := make(map[string]string, len(m))
		// In order, because the reason is part of a revision's content.
		for _, name := range slices.Sorted(maps.Keys(m)) {
			folded := fold(name)
			if other, ok := seen[folded]; ok {
				return other, name
			}
			seen[folded] = name
		}
	}
	return "", ""
}

// fold maps names that are equal under Unicode's simple case folding, which is
// what encoding/json compares by, to one string.
func fold(s string) string {
	return strings.Map(func(r rune) rune {
		least := r
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			least = min(least, f)
		}
		return least
	}, s)
}

// quarantineDuplicates sets aside every definition whose name is on the list
// more than once: none of them is the one that was reviewed.
func quarantineDuplicates(defs []Definition) {
	count := make(map[string]int, len(defs))
	for i := range defs {
		if defs[i].Name != "" {
			count[defs[i].Name]++
		}
	}
	for i := range defs {
		if n := count[defs[i].Name]; n > 1 {
			defs[i].Quarantine = fmt.Sprintf("conflict: %d definitions have this name", n)
		}
	}
}
