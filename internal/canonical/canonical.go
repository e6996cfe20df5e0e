// Package canonical owns the one canonical form of JSON in Bulkhead, in two
// profiles, and the digests over it. It reads foreign bytes in a single pass of
// its own and never lets a number go through a float.
//
// Both profiles write UTF-8 without white space, with the members of an object
// sorted by the UTF-16 code units of their names and with strings escaped as in
// RFC 8785. Both refuse duplicate names (compared after unescaping), lone
// surrogates, invalid UTF-8, a byte order mark, anything after the value,
// nesting deeper than MaxDepth, numbers of more than MaxDigits digits and
// exponents beyond ±MaxExponent. The code point U+0000 is legal JSON and is
// kept, written as \u0000.
//
// Profile args-1 is for the arguments of calls: number tokens stay exactly as
// they were received, so 1, 1.0 and 1e0 are three different arguments. Profile
// doc-1 is for definitions and contracts: numbers are written by their exact
// decimal value, so those three are one document. The text of a doc-1 number
// has the layout of ECMAScript's Number.prototype.toString (RFC 8785 section
// 3.2.2.3) over all significant digits: 0.000001, 1e-7, 100, 1e+21. Minus zero
// is zero. Because that text must be acceptable input again, doc-1 also bounds
// the exponent of the normal form by ±MaxExponent.
//
// Sizes in bytes are not bounded here; whoever reads the bytes bounds them.
package canonical

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"unicode/utf8"
)

// The bounds of what is accepted.
const (
	// MaxDepth is the deepest nesting of arrays and objects; a scalar has depth 0.
	MaxDepth = 64
	// MaxDigits is the most digits before an exponent, and the most within one.
	MaxDigits = 128
	// MaxExponent is the largest magnitude of a decimal exponent.
	MaxExponent = 400
	// MaxDiff is the most paths that Diff returns.
	MaxDiff = 20
)

// Error says where JSON is refused and which rule it broke. Path is empty for
// the whole value, else written like tools[1].when; a name that is no plain
// word is quoted, as in headers["x-y z"]. Neither field holds a value.
type Error struct {
	Path string
	Rule string
}

// Error returns path and rule as one line.
func (e *Error) Error() string {
	if e.Path == "" {
		return e.Rule
	}
	return e.Path + ": " + e.Rule
}

// At returns path as seen from a value that itself lies at prefix, so that a
// caller can report arguments.a[2] for the path a[2].
func At(prefix, path string) string {
	switch {
	case path == "":
		return prefix
	case prefix == "" || path[0] == '[':
		return prefix + path
	}
	return prefix + "." + path
}

// Member returns the path of a member of the object at path, quoting a name that
// is no plain word and cutting a long one.
func Member(path, name string) string { return At(path, memberStep(name)) }

// Args returns the args-1 form of one JSON value. The result shares no memory
// with raw. An error is an *Error.
func Args(raw []byte) ([]byte, error) { return canonical(raw, false) }

// Doc returns the doc-1 form of one JSON value. The result shares no memory
// with raw. An error is an *Error.
func Doc(raw []byte) ([]byte, error) { return canonical(raw, true) }

// ArgsDigest returns args-1:sha256:<hex> over bytes that Args returned.
func ArgsDigest(canon []byte) string { return digest("args-1:sha256:", canon) }

// DocDigest returns doc-1:sha256:<hex> over bytes that Doc returned.
func DocDigest(canon []byte) string { return digest("doc-1:sha256:", canon) }

// ContractID returns mcp-host-contract@sha256:<hex> over a contract in doc-1.
func ContractID(canon []byte) string { return digest("mcp-host-contract@sha256:", canon) }

// DefinitionDigest returns the doc-1 digest of {"definition": …, "kind": …},
// where the definition is the raw object less its member _meta. The kind is
// tool, resource, resource_template or prompt. _meta is checked like the rest
// before it is left out. An error is an *Error.
func DefinitionDigest(kind string, raw []byte) (string, error) {
	switch kind {
	case "tool", "resource", "resource_template", "prompt":
	default:
		return "", &Error{Path: "kind", Rule: "must be tool, resource, resource_template or prompt"}
	}
	canon, err := Doc(raw)
	if err != nil {
		return "", err
	}
	if canon[0] != '{' {
		return "", &Error{Rule: "a definition must be an object"}
	}
	bound := make([]byte, 0, len(canon)+len(kind)+32)
	bound = append(bound, `{"definition":{`...)
	first := true
	for m := range members(canon) {
		if string(m.text[:m.colon]) == `"_meta"` {
			continue
		}
		if !first {
			bound = append(bound, ',')
		}
		first = false
		bound = append(bound, m.text...)
	}
	bound = append(bound, `},"kind":"`...)
	bound = append(bound, kind...)
	bound = append(bound, `"}`...)
	return DocDigest(bound), nil
}

func digest(prefix string, canon []byte) string {
	sum := sha256.Sum256(canon)
	b := make([]byte, 0, len(prefix)+2*len(sum))
	b = append(b, prefix...)
	return string(hex.AppendEncode(b, sum[:]))
}

// member puts one object member in front of the path.
func (e *Error) member(name []byte) *Error {
	e.Path = At(memberStep(string(name)), e.Path)
	return e
}

// element puts one array index in front of the path.
func (e *Error) element(i int) *Error {
	e.Path = At("["+strconv.Itoa(i)+"]", e.Path)
	return e
}

// maxStep bounds how much of a foreign name goes into a path.
const maxStep = 64

func memberStep(name string) string {
	plain := name != "" && len(name) <= maxStep
	for i := 0; i < len(name) && plain; i++ {
		c := name[i]
		plain = c == '_' || c == '$' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' ||
			i > 0 && (c == '-' || '0' <= c && c <= '9')
	}
	if plain {
		return name
	}
	tail := ""
	if len(name) > maxStep {
		cut := maxStep
		for !utf8.RuneStart(name[cut]) {
			cut--
		}
		name, tail = name[:cut], "…"
	}
	return "[" + strconv.Quote(name+tail) + "]"
}
