package sessions

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

var paramHeaderMark = []byte("x-mcp-header")

// headers returns the Mcp-* headers of a modern HTTP request: the method, the name
// and the arguments that the tool's schema marks. They equal what mcp.StandardHeaders
// would make, without decoding the parameters again.
func (c *conn) headers(r *Request) (map[string]string, error) {
	if c.era != EraModern || c.target.Transport != TransportHTTP {
		return nil, nil
	}
	method := mcp.MCPMethod(r.Method)
	h := map[string]string{mcp.HeaderMethod: r.Method}
	if mcp.MethodRequiresNameHeader(method) || isTask(r.Method) {
		if v, ok := mcp.EncodeHeaderValue(r.Name); ok {
			h[mcp.HeaderName] = v
		}
	}
	if method != mcp.MethodToolsCall || !bytes.Contains(r.Schema, paramHeaderMark) {
		return h, nil
	}
	tool := &mcp.Tool{Name: r.Name, RawInputSchema: r.Schema}
	params := mcp.GenerateParamHeaders(tool, r.Params)
	for _, b := range mcp.ExtractParamHeaderBindings(tool) {
		if _, ok := params[b.HeaderName()]; !ok && hasArgument(r.Params, b.Path) {
			// Left out, the server would see a call that differs from its headers.
			return nil, fault.New(fault.Invalid, "HEADER_ARGUMENT_INVALID", "an argument that the tool wants in a header cannot be carried there")
		}
	}
	for k, v := range params {
		h[k] = v
	}
	return h, nil
}

// hasArgument reports whether arguments hold something other than null at path.
func hasArgument(params []byte, path []string) bool {
	at := member(params, "arguments")
	for _, name := range path {
		if at = member(at, name); at == nil {
			return false
		}
	}
	return string(at) != "null"
}

// checkHeaderMarks applies the rules for x-mcp-header to one tool as listed over
// modern HTTP. Besides what the library checks, every mark must be reachable from
// the root through properties alone.
func checkHeaderMarks(item []byte) error {
	schema := member(item, "inputSchema")
	if !bytes.Contains(schema, paramHeaderMark) {
		return nil
	}
	if err := mcp.ValidateParamHeaderAnnotations(&mcp.Tool{RawInputSchema: schema}); err != nil {
		return err
	}
	var tree any
	if err := json.Unmarshal(schema, &tree); err != nil {
		return err
	}
	if misplacedMark(tree, true) {
		return errors.New("x-mcp-header stands where no argument is")
	}
	return nil
}

// misplacedMark looks for a mark in a schema that no chain of properties reaches.
// reachable is true for the root and for what lies in properties of such.
func misplacedMark(node any, reachable bool) bool {
	switch v := node.(type) {
	case []any:
		for _, e := range v {
			if misplacedMark(e, false) {
				return true
			}
		}
	case map[string]any:
		if _, marked := v["x-mcp-header"]; marked && !reachable {
			return true
		}
		for name, child := range v {
			props, isObject := child.(map[string]any)
			if name != "properties" || !isObject {
				// Examples and constants are data, not schemas.
				if name != "default" && name != "const" && name != "enum" && name != "examples" && misplacedMark(child, false) {
					return true
				}
				continue
			}
			for _, schema := range props {
				if misplacedMark(schema, reachable) {
					return true
				}
			}
		}
	}
	return false
}
