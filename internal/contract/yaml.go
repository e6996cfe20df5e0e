package contract

import (
	"bytes"
	"errors"
	"io"
	"regexp"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// normalise returns the doc-1 form of a contract in YAML or JSON.
func normalise(src []byte) ([]byte, error) {
	if len(src) > MaxBytes {
		return nil, fault.Field1("contract", "must have at most %d bytes", MaxBytes)
	}
	if !utf8.Valid(src) {
		return nil, fault.Field1("contract", "is not valid UTF-8")
	}
	if bytes.HasPrefix(src, []byte("\xef\xbb\xbf")) {
		return nil, fault.Field1("contract", "begins with a byte order mark")
	}
	var asJSON error
	if bytes.HasPrefix(bytes.TrimLeft(src, " \t\r\n"), []byte("{")) {
		canon, err := canonical.Doc(src)
		if err == nil {
			return canon, nil
		}
		// A YAML flow mapping begins like JSON. When it is neither, what JSON
		// said is the better answer.
		asJSON = canonicalFault(err)
	}
	canon, err := fromYAML(src)
	if err != nil && asJSON != nil {
		return nil, asJSON
	}
	return canon, err
}

func canonicalFault(err error) error {
	var e *canonical.Error
	if errors.As(err, &e) {
		return fault.Field1(orContract(e.Path), "%s", e.Rule)
	}
	return fault.Wrap(err, "canonical form of a contract")
}

func orContract(path string) string {
	if path == "" {
		return "contract"
	}
	return path
}

func fromYAML(src []byte) ([]byte, error) {
	d := yaml.NewDecoder(bytes.NewReader(src))
	var doc, more yaml.Node
	if err := d.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, fault.Field1("contract", "is empty")
		}
		return nil, yamlFault(err)
	}
	switch err := d.Decode(&more); {
	case err == nil:
		return nil, fault.Field1("contract", "must be one YAML document, not several")
	case !errors.Is(err, io.EOF):
		return nil, yamlFault(err)
	}
	w := yamlWriter{}
	w.node("", &doc, 0)
	if w.failed() {
		return nil, w.err()
	}
	canon, err := canonical.Doc(w.out)
	if err != nil {
		return nil, canonicalFault(err)
	}
	return canon, nil
}

func yamlFault(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if len(text) > 200 {
		text = strings.ToValidUTF8(text[:200], "") + "…"
	}
	return fault.Field1("contract", "is not YAML: %s", text)
}

// yamlWriter writes YAML nodes as JSON. It takes the part of YAML that has one
// meaning in JSON: no anchors, aliases, merge keys, tags or names that are no
// strings, and numbers only as JSON writes them, so that none is reinterpreted.
type yamlWriter struct {
	reader
	out []byte
}

// jsonNumber is the grammar of RFC 8259 section 6.
var jsonNumber = regexp.MustCompile(`^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$`)

func (w *yamlWriter) node(path string, n *yaml.Node, depth int) {
	switch {
	case n.Kind == yaml.AliasNode:
		w.fail(path, "must not be a YAML alias")
		return
	case n.Anchor != "":
		w.fail(path, "must not have a YAML anchor")
		return
	case n.Style&yaml.TaggedStyle != 0:
		w.fail(path, "must not have a YAML tag")
		return
	case depth > canonical.MaxDepth:
		w.fail(path, "is nested deeper than %d", canonical.MaxDepth)
		return
	}
	switch n.Kind {
	case yaml.DocumentNode:
		w.node(path, n.Content[0], depth)
	case yaml.MappingNode:
		w.mapping(path, n, depth)
	case yaml.SequenceNode:
		w.out = append(w.out, '[')
		for i, c := range n.Content {
			if i > 0 {
				w.out = append(w.out, ',')
			}
			w.node(element(path, i), c, depth+1)
		}
		w.out = append(w.out, ']')
	case yaml.ScalarNode:
		w.scalar(path, n)
	default:
		w.fail(path, "is no YAML value")
	}
}

func (w *yamlWriter) mapping(path string, n *yaml.Node, depth int) {
	w.out = append(w.out, '{')
	seen := make(map[string]bool, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		at := canonical.Member(path, key.Value)
		switch {
		case key.Kind != yaml.ScalarNode || key.Anchor != "" || key.Style&yaml.TaggedStyle != 0:
			w.fail(orContract(path), "must have plain strings as names (line %d)", key.Line)
			continue
		case key.ShortTag() == "!!merge":
			w.fail(orContract(path), "must not have a YAML merge key")
			continue
		case key.ShortTag() != "!!str":
			w.fail(at, "must be quoted to be a name")
			continue
		case seen[key.Value]:
			w.fail(at, "stands more than once")
			continue
		}
		if len(seen) > 0 {
			w.out = append(w.out, ',')
		}
		seen[key.Value] = true
		w.out = canonical.AppendString(w.out, key.Value)
		w.out = append(w.out, ':')
		w.node(at, n.Content[i+1], depth+1)
	}
	w.out = append(w.out, '}')
}

func (w *yamlWriter) scalar(path string, n *yaml.Node) {
	switch n.ShortTag() {
	case "!!null":
		w.out = append(w.out, "null"...)
	case "!!bool":
		w.out = append(w.out, strings.ToLower(n.Value)...)
	case "!!int", "!!float":
		if !jsonNumber.MatchString(n.Value) {
			w.fail(path, "must be a number as JSON writes it, or a quoted string")
			return
		}
		w.out = append(w.out, n.Value...)
	case "!!str", "!!timestamp", "!!merge":
		// YAML 1.2 has no time stamps: 2026-07-28 is a string.
		w.out = canonical.AppendString(w.out, n.Value)
	default:
		w.fail(path, "must not have a YAML tag")
	}
}
