package contract

import (
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/common/types/traits"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Check says whether the rule holds. What has no rule always passes.
// It is false with a short reason when the rule is false, when something that
// it reads is missing or of another type, and when it costs too much. The
// reason names members, never values.
func (t *Terms) Check(v Vars) (ok bool, detail string) {
	if t.when == nil {
		return true, ""
	}
	ok, reason := t.when.evalBool(&v)
	switch {
	case reason != "":
		return false, reason
	case !ok:
		return false, "the contract's rule for this tool is not met"
	}
	return true, ""
}

// StatusQuery asks the server, by a tool that reads, whether a write happened.
type StatusQuery struct {
	Tool   string
	Absent Absent
	// Settle is how long after the last attempt an absence is not yet evidence.
	Settle time.Duration

	arguments     []queryArgument
	argumentBytes int
	succeeded     *rule
	sideEffectID  *rule
}

// queryArgument is one argument of the query, in the order of names.
type queryArgument struct {
	name string
	rule *rule
}

// Verdict is what the answer to a status query says of the write.
type Verdict uint8

// The verdicts. Unknown means that the rule could not be evaluated on this
// answer, which is evidence for nothing.
const (
	VerdictUnknown Verdict = iota
	VerdictSucceeded
	VerdictAbsent
)

// String returns the verdict in upper case, for audit and logs.
func (v Verdict) String() string {
	switch v {
	case VerdictSucceeded:
		return "SUCCEEDED"
	case VerdictAbsent:
		return "ABSENT"
	}
	return "UNKNOWN"
}

// Judge reads the answer in v.Result. Absent is final evidence only when the
// contract says so and Settle has passed; the caller sees to that. The detail
// says why a verdict is unknown.
func (q *StatusQuery) Judge(v Vars) (verdict Verdict, detail string) {
	ok, reason := q.succeeded.evalBool(&v)
	switch {
	case reason != "":
		return VerdictUnknown, reason
	case ok:
		return VerdictSucceeded, ""
	}
	return VerdictAbsent, ""
}

// SideEffectID returns what the write made, as the contract reads it from the
// answer in v.Result, or empty when it reads none.
func (q *StatusQuery) SideEffectID(v Vars) string {
	if q.sideEffectID == nil {
		return ""
	}
	value, reason := q.sideEffectID.eval(&v, &meter{})
	id, ok := value.(types.String)
	if reason != "" || !ok || len(id) > maxSideEffectID || !utf8.ValidString(string(id)) || strings.ContainsRune(string(id), 0) {
		return ""
	}
	return string(id)
}

// maxSideEffectID bounds in bytes what a server may have us keep as an id.
const maxSideEffectID = 1024

// Arguments returns the arguments of the query in args-1. It fails with a
// Precondition fault when an expression has no value or they are too large.
func (q *StatusQuery) Arguments(v Vars) ([]byte, error) {
	out, m := []byte{'{'}, &meter{}
	for i, a := range q.arguments {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(canonical.AppendString(out, a.name), ':')
		value, reason := a.rule.eval(&v, m)
		if reason == "" {
			out, reason = q.appendJSON(out, value, 1)
		}
		if reason != "" {
			return nil, fault.New(fault.Precondition, "STATUS_QUERY_ARGUMENTS",
				"the status query has no argument %s: %s", canonical.Member("", a.name), reason)
		}
	}
	canon, err := canonical.Args(append(out, '}'))
	if err != nil {
		return nil, fault.New(fault.Precondition, "STATUS_QUERY_ARGUMENTS", "the status query's arguments are refused: %v", err)
	}
	return canon, nil
}

// appendJSON writes a CEL value. The reason is why it cannot, else empty.
func (q *StatusQuery) appendJSON(out []byte, v ref.Val, depth int) (written []byte, reason string) {
	if depth > canonical.MaxDepth {
		return out, "a value is nested too deep"
	}
	switch v := v.(type) {
	case types.Null:
		out = append(out, "null"...)
	case types.Bool:
		out = strconv.AppendBool(out, bool(v))
	case types.Int:
		out = strconv.AppendInt(out, int64(v), 10)
	case types.Uint:
		out = strconv.AppendUint(out, uint64(v), 10)
	case types.Double:
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			return out, "a number is not finite"
		}
		out = strconv.AppendFloat(out, float64(v), 'g', -1, 64)
	case types.String:
		out = canonical.AppendString(out, string(v))
	case traits.Mapper:
		return q.appendObject(out, v, depth)
	case traits.Lister:
		return q.appendList(out, v, depth)
	default:
		return out, "a value has no form in JSON"
	}
	if len(out) > q.argumentBytes {
		return out, "the arguments are larger than limits.request_bytes"
	}
	return out, ""
}

func (q *StatusQuery) appendList(out []byte, l traits.Lister, depth int) (written []byte, reason string) {
	out = append(out, '[')
	for it, first := l.Iterator(), true; it.HasNext() == types.True; first = false {
		if !first {
			out = append(out, ',')
		}
		if out, reason = q.appendJSON(out, it.Next(), depth+1); reason != "" {
			return out, reason
		}
	}
	return append(out, ']'), ""
}

func (q *StatusQuery) appendObject(out []byte, m traits.Mapper, depth int) (written []byte, reason string) {
	out = append(out, '{')
	for it, first := m.Iterator(), true; it.HasNext() == types.True; first = false {
		if !first {
			out = append(out, ',')
		}
		key := it.Next()
		name, ok := key.(types.String)
		if !ok {
			return out, "an object has a name that is no string"
		}
		out = append(canonical.AppendString(out, string(name)), ':')
		if out, reason = q.appendJSON(out, m.Get(key), depth+1); reason != "" {
			return out, reason
		}
	}
	return append(out, '}'), ""
}
