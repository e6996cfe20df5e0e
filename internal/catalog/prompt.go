package catalog

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// MaxPromptArguments is the greatest number of arguments of a prompt.
const MaxPromptArguments = 256

// promptArgument is one argument that a prompt knows. Its value is always a text.
type promptArgument struct {
	name     string
	required bool
}

// readPromptArguments reads the arguments of a prompt's definition. The second
// result says why the prompt cannot be used, and is empty when it can.
func readPromptArguments(raw json.RawMessage) ([]promptArgument, string) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, ""
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, "its arguments are no list"
	}
	if len(list) > MaxPromptArguments {
		return nil, fmt.Sprintf("it has %d arguments, more than %d", len(list), MaxPromptArguments)
	}
	out := make([]promptArgument, 0, len(list))
	for i, item := range list {
		members := decodeMembers(item)
		name, ok := text(members["name"])
		if !ok || name == "" || len(name) > MaxName || hasControl(name) {
			return nil, fmt.Sprintf("its argument %d has no usable name", i+1)
		}
		if slices.ContainsFunc(out, func(a promptArgument) bool { return a.name == name }) {
			return nil, "conflict: two of its arguments have one name"
		}
		required := boolean(members["required"])
		if raw := members["required"]; required == nil && len(raw) > 0 && string(raw) != "null" {
			return nil, fmt.Sprintf("its argument %d is required neither truly nor falsely", i+1)
		}
		out = append(out, promptArgument{name: name, required: required != nil && *required})
	}
	return out, ""
}

// checkPromptArguments holds the arguments of a call against the known ones.
func checkPromptArguments(known []promptArgument, v any) error {
	given, ok := v.(map[string]any)
	if !ok {
		return fault.Field1("arguments", "must be an object")
	}
	var bad []fault.Field
	for _, name := range slices.Sorted(maps.Keys(given)) {
		at := canonical.Member("arguments", name)
		if _, text := given[name].(string); !text {
			bad = append(bad, fault.Field{Path: at, Rule: "must be a string, as every argument of a prompt"})
		}
		if !slices.ContainsFunc(known, func(a promptArgument) bool { return a.name == name }) {
			bad = append(bad, fault.Field{Path: at, Rule: "is no argument of this prompt"})
		}
	}
	for _, a := range known {
		if _, there := given[a.name]; a.required && !there {
			bad = append(bad, fault.Field{Path: canonical.Member("arguments", a.name), Rule: "is required"})
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return fault.InvalidFields(bad[:min(len(bad), maxCheckFields)]...)
}

// templateVariables returns the names of the variables of a URI template (RFC 6570),
// without operators and modifiers.
func templateVariables(template string) (out []string) {
	for {
		_, rest, ok := strings.Cut(template, "{")
		if !ok {
			return out
		}
		expression, rest, ok := strings.Cut(rest, "}")
		if !ok {
			return out
		}
		template = rest
		for name := range strings.SplitSeq(strings.TrimLeft(expression, "+#./;?&"), ",") {
			name, _, _ = strings.Cut(strings.TrimSuffix(name, "*"), ":")
			out = append(out, name)
		}
	}
}
