package calls

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// target is what a proposal calls, and the field that named it.
type target struct {
	kind  contract.Kind
	name  string
	field string
}

// readTarget reads which one of a tool, a resource and a prompt is called.
func readTarget(tool, resource, prompt string, args []byte) (target, []fault.Field) {
	var given []target
	for _, t := range []target{{contract.KindTool, tool, "tool"}, {contract.KindResource, resource, "resource"}, {contract.KindPrompt, prompt, "prompt"}} {
		if t.name != "" {
			given = append(given, t)
		}
	}
	if len(given) != 1 {
		const rule = "exactly one of tool, resource and prompt must be given"
		if len(given) > 1 {
			return target{}, []fault.Field{{Path: given[1].field, Rule: rule}}
		}
		return target{}, []fault.Field{{Path: "tool", Rule: rule}}
	}
	to, most := given[0], catalog.MaxName
	if to.kind == contract.KindResource {
		most = catalog.MaxURI
	}
	var bad []fault.Field
	if !isWord(to.name, most) {
		bad = append(bad, fault.Field{Path: to.field, Rule: fmt.Sprintf("must have 1 to %d bytes of text without control characters", most)})
	}
	if to.kind == contract.KindResource && len(args) > 0 {
		bad = append(bad, fault.Field{Path: "arguments", Rule: "must be left out for a resource, which takes none"})
	}
	return to, bad
}

// decidedBy is the kind of list that a call is decided on. A resource needs no
// definition, but what the server declares.
func decidedBy(k contract.Kind) catalog.Kind {
	switch k {
	case contract.KindTool:
		return catalog.Tool
	case contract.KindPrompt:
		return catalog.Prompt
	}
	return catalog.Declaration
}

// methodCall is the method of a tool call, and of a status query.
const methodCall = "tools/call"

// onWire is what a call says to its server.
func onWire(c *Call) (method string, params json.RawMessage) {
	switch c.Kind {
	case contract.KindResource:
		return "resources/read", append(canonical.AppendString([]byte(`{"uri":`), c.Name), '}')
	case contract.KindPrompt:
		return "prompts/get", callParams(c.Name, c.Arguments)
	}
	return methodCall, callParams(c.Name, c.Arguments)
}

func callParams(name string, args []byte) json.RawMessage {
	out := make([]byte, 0, len(args)+len(name)+32)
	out = append(out, `{"name":`...)
	out = canonical.AppendString(out, name)
	out = append(out, `,"arguments":`...)
	return append(append(out, args...), '}')
}

// The codes by which servers say that a resource is not there: that of today, and
// that of the revisions before.
const (
	codeInvalidParams    = -32602
	codeResourceNotFound = -32002
)

// protocolFailure is a JSON-RPC error as the failure of a call. A resource that is
// not there has one code, whichever the server used.
func protocolFailure(k contract.Kind, e *sessions.RPCError) *Error {
	out := &Error{Layer: LayerProtocol, Code: strconv.FormatInt(e.Code, 10), Message: cleanText(e.Message, 2000), Data: cleanJSON(e.Data)}
	if k != contract.KindResource || e.Code != codeInvalidParams && e.Code != codeResourceNotFound {
		return out
	}
	data := `{"code":` + out.Code
	if len(out.Data) > 0 {
		data += `,"data":` + string(out.Data)
	}
	out.Code, out.Data = "RESOURCE_NOT_FOUND", []byte(data+"}")
	return out
}

// readOddities are findings about a resource's contents or a prompt's messages that
// are not as the protocol has them.
func readOddities(k contract.Kind, result []byte) []string {
	name := "contents"
	if k == contract.KindPrompt {
		name = "messages"
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(result, &members) == nil && len(members[name]) > 0 && members[name][0] == '[' {
		return nil
	}
	return []string{"CONTENT_INVALID: the result's " + name + " are not an array"}
}

// Declares reads whether the server declares what a kind of call needs.
func Declares(r *catalog.Revision, k contract.Kind) bool {
	kind := catalog.Resource
	if k != contract.KindResource {
		kind = decidedBy(k)
	}
	return catalog.Declares(r.Capabilities, kind)
}
