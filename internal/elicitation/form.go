// Package elicitation reads what servers ask people in the middle of a call: the
// forms of elicitation/create with their restricted JSON Schema, and the URLs
// that it sends people to. It fills in defaults, holds answers against the form,
// and finds forms that ask for secrets. It is pure: it fetches nothing, keeps
// nothing, and all that it reads is foreign and bounded.
package elicitation

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
)

// The bounds of a form and of its answer.
const (
	// MaxParams is the greatest length of a question in bytes.
	MaxParams = 64 << 10
	// MaxMessage is the greatest length of its message in bytes.
	MaxMessage = 8 << 10
	// MaxContent is the greatest length of an answer in bytes.
	MaxContent = 64 << 10
	maxFields  = 64
	maxChoices = 1_000
	// maxPattern bounds a pattern in bytes, maxProgram in instructions.
	maxPattern = 1_000
	maxProgram = 2_000
)

// Form is a question that is answered by filling in fields.
type Form struct {
	// Message is what the server says, foreign text.
	Message string
	// Schema is the requestedSchema as received: the server's order of its fields is
	// the one that people are shown.
	Schema json.RawMessage
	fields []field // sorted by name
}

// ErrMalformed is the cause of every error about a question that is not as the
// protocol has it.
var ErrMalformed = errors.New("elicitation: the question is malformed")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// members are the members of an object under their exact names.
type members map[string]json.RawMessage

func objectOf(raw []byte) (members, bool) {
	var m members
	if len(raw) == 0 || raw[0] != '{' || json.Unmarshal(raw, &m) != nil {
		return nil, false
	}
	return m, true
}

func textOf(raw []byte) (string, bool) {
	var s string
	if len(raw) == 0 || raw[0] != '"' || json.Unmarshal(raw, &s) != nil {
		return "", false
	}
	return s, true
}

func textsOf(raw []byte) ([]string, bool) {
	var items []json.RawMessage
	if len(raw) == 0 || raw[0] != '[' || json.Unmarshal(raw, &items) != nil {
		return nil, false
	}
	out := make([]string, len(items))
	for i, item := range items {
		var ok bool
		if out[i], ok = textOf(item); !ok {
			return nil, false
		}
	}
	return out, true
}

// read makes the members of a question's params, with its message.
func read(params []byte) (members, string, error) {
	if len(params) > MaxParams {
		return nil, "", malformed("it has more than %d bytes", MaxParams)
	}
	canon, err := canonical.Args(params)
	if err != nil {
		return nil, "", malformed("it is not clean JSON")
	}
	m, ok := objectOf(canon)
	if !ok {
		return nil, "", malformed("it is no object")
	}
	message, ok := textOf(m["message"])
	if !ok || len(message) > MaxMessage {
		return nil, "", malformed("message must be text of at most %d bytes", MaxMessage)
	}
	return m, message, nil
}

// Mode returns the mode of a question, form where it names none.
func Mode(params []byte) (string, error) {
	m, ok := objectOf(params)
	if !ok {
		return "", malformed("it is no object")
	}
	if m["mode"] == nil {
		return "form", nil
	}
	switch mode, _ := textOf(m["mode"]); mode {
	case "form", "url":
		return mode, nil
	}
	return "", malformed("its mode is neither form nor url")
}

// rootWords are what may stand beside the properties without changing what an
// answer looks like.
var rootWords = []string{"$schema", "$id", "$comment", "type", "title", "description", "properties", "required", "additionalProperties"}

// ParseForm reads the params of an elicitation/create in form mode: a flat object
// of strings, numbers, booleans and choices (revision 2025-11-25 and later, with
// enumNames of the one before). Anything else is malformed.
func ParseForm(params []byte) (*Form, error) {
	m, message, err := read(params)
	if err != nil {
		return nil, err
	}
	schema, ok := objectOf(m["requestedSchema"])
	if !ok {
		return nil, malformed("requestedSchema must be an object")
	}
	if t, _ := textOf(schema["type"]); t != "object" {
		return nil, malformed("requestedSchema must have the type object")
	}
	for word, value := range schema {
		if !slices.Contains(rootWords, word) || word == "additionalProperties" && !isBoolean(value) {
			return nil, malformed("requestedSchema has a %.60q that forms do not have", word)
		}
	}
	properties, ok := objectOf(schema["properties"])
	if !ok || len(properties) > maxFields {
		return nil, malformed("properties must be an object of at most %d fields", maxFields)
	}
	received, _ := objectOf(params) // clean, since its canonical form was made
	f := &Form{Message: message, Schema: received["requestedSchema"]}
	for name, raw := range properties {
		one, err := parseField(name, raw)
		if err != nil {
			return nil, err
		}
		f.fields = append(f.fields, one)
	}
	slices.SortFunc(f.fields, func(a, b field) int { return bytes.Compare([]byte(a.name), []byte(b.name)) })
	return f, f.require(schema["required"])
}

func (f *Form) require(raw json.RawMessage) error {
	if raw == nil {
		return nil
	}
	names, ok := textsOf(raw)
	if !ok {
		return malformed("required must be a list of names")
	}
	for _, name := range names {
		i := slices.IndexFunc(f.fields, func(x field) bool { return x.name == name })
		if i < 0 {
			return malformed("required names %.60q, which is no field", name)
		}
		f.fields[i].required = true
	}
	return nil
}

func isBoolean(raw []byte) bool { return string(raw) == "true" || string(raw) == "false" }
