package contract

import (
	"maps"
	"slices"

	"cel.dev/cel-go/interpreter"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Vars is what the rules of a contract see. A rule reads it and nothing else.
type Vars struct {
	Args      Value // the proposed arguments
	Principal Principal
	Session   Session
	Call      Call
	Result    Value // what a status query answered; for succeeded and side_effect_id only
}

// Principal is who calls, as principal.subject, principal.source,
// principal.groups, principal.project and principal.role. Missing parts are
// empty strings.
type Principal struct {
	Subject string
	Source  string
	Groups  []string
	Project string
	Role    string
}

// Session is session.id and session.servers.
type Session struct {
	ID      string
	Servers []string
}

// Call is call.idempotencyKey, call.requestId, call.server and call.tool.
type Call struct {
	IdempotencyKey string
	RequestID      string
	Server         string
	Tool           string
}

// Value is a JSON object as rules see it. The zero Value is the empty object.
// It is read only and safe for concurrent use.
type Value struct {
	members map[string]any
	// inexact is the path of a number that a rule cannot see as it is.
	inexact string
}

// NewValue decodes canonical bytes, which must be an object. A number that
// neither an int64 nor a double stands for (canonical.Number) is no error here:
// it makes every rule deny that reads this value.
func NewValue(canon []byte) (Value, error) {
	decoded, err := canonical.Decode(canon)
	if err != nil {
		return Value{}, fault.Wrap(err, "decode canonical JSON for a rule")
	}
	return ValueOf(decoded)
}

// ValueOf is NewValue for a caller that has already decoded the bytes with
// canonical.Decode. The value must not be changed afterwards.
func ValueOf(decoded any) (Value, error) {
	m, ok := decoded.(map[string]any)
	if !ok {
		return Value{}, fault.Field1("arguments", "must be an object, not %s", typeName(decoded))
	}
	v := Value{members: m}
	if anyInexact(decoded) {
		v.inexact, _ = findInexact("", decoded)
	}
	return v, nil
}

func anyInexact(v any) bool {
	switch v := v.(type) {
	case canonical.Inexact:
		return true
	case []any:
		return slices.ContainsFunc(v, anyInexact)
	case map[string]any:
		for _, e := range v {
			if anyInexact(e) {
				return true
			}
		}
	}
	return false
}

// findInexact returns the first path in the order of names, so that an answer
// does not depend on the order of a map.
func findInexact(path string, v any) (string, bool) {
	switch v := v.(type) {
	case canonical.Inexact:
		return path, true
	case []any:
		for i, e := range v {
			if at, ok := findInexact(element(path, i), e); ok {
				return at, true
			}
		}
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			if at, ok := findInexact(canonical.Member(path, name), v[name]); ok {
				return at, true
			}
		}
	}
	return "", false
}

func (v Value) object() map[string]any {
	if v.members == nil {
		return map[string]any{}
	}
	return v.members
}

// activation gives CEL the variables one by one, so that nothing is converted
// that the rule does not read. Groups and servers are never nil.
type activation struct {
	*Vars
	meter *meter
}

// ResolveName implements interpreter.Activation.
func (a activation) ResolveName(name string) (any, bool) {
	switch name {
	case "args":
		return a.Args.object(), true
	case "result":
		return a.Result.object(), true
	case "principal.subject":
		return a.Principal.Subject, true
	case "principal.source":
		return a.Principal.Source, true
	case "principal.groups":
		return a.Principal.Groups, true
	case "principal.project":
		return a.Principal.Project, true
	case "principal.role":
		return a.Principal.Role, true
	case "session.id":
		return a.Session.ID, true
	case "session.servers":
		return a.Session.Servers, true
	case "call.idempotencyKey":
		return a.Call.IdempotencyKey, true
	case "call.requestId":
		return a.Call.RequestID, true
	case "call.server":
		return a.Call.Server, true
	case "call.tool":
		return a.Call.Tool, true
	case meterName:
		return a.meter, true
	}
	return nil, false
}

// Parent implements interpreter.Activation.
func (a activation) Parent() interpreter.Activation { return nil }
