package sessions

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
)

// Bounds of what a server asks for.
const (
	// maxAsks bounds the questions of one answer, and of one error that wants URLs
	// to be visited.
	maxAsks = 16
	// maxAskKey bounds the key of a question, and a server's id for one.
	maxAskKey = 256
	// maxAsk bounds the parameters of a question.
	maxAsk = 256 << 10
	// maxRequestState bounds the state that a server wants back.
	maxRequestState = 64 << 10
)

// checkAsk judges a question by what was declared: an error of JSON-RPC for one
// that may not be asked, else nil.
func checkAsk(declared Capabilities, method string, params []byte) *RPCError {
	refuse := func(code int64, format string, args ...any) *RPCError {
		return &RPCError{Code: code, Message: fmt.Sprintf(format, args...)}
	}
	offered := false
	switch method {
	case string(mcp.MethodElicitationCreate):
		offered = declared.ElicitationForm || declared.ElicitationURL
	case string(mcp.MethodSamplingCreateMessage):
		offered = declared.Sampling
	case string(mcp.MethodListRoots):
		offered = declared.Roots
	}
	if !offered {
		return refuse(mcp.METHOD_NOT_FOUND, "method not found: this client does not offer it")
	}
	if len(params) > 0 && params[0] != '{' || len(params) > maxAsk {
		return refuse(mcp.INVALID_PARAMS, "the parameters are not an object of at most %d bytes", maxAsk)
	}
	if len(params) > 0 && !unambiguous(params) {
		return refuse(mcp.INVALID_PARAMS, "the parameters have a member twice")
	}
	switch method {
	case string(mcp.MethodElicitationCreate):
		mode, known := "form", true
		if raw := member(params, "mode"); raw != nil {
			mode, known = text(raw)
		}
		if !known || mode != "form" && mode != "url" || mode == "form" && !declared.ElicitationForm || mode == "url" && !declared.ElicitationURL {
			return refuse(mcp.INVALID_PARAMS, "this client does not offer elicitation in this mode")
		}
	case string(mcp.MethodSamplingCreateMessage):
		for _, name := range []string{"tools", "toolChoice"} {
			if raw := member(params, name); raw != nil && string(raw) != "null" {
				return refuse(mcp.INVALID_PARAMS, "this client does not offer sampling with %s", name)
			}
		}
	}
	return nil
}

// input is what a server wants before it goes on.
type input struct {
	asks  []Ask
	state json.RawMessage
}

// readInput reads the members of a result of the type input_required. flaw says
// why it cannot be served, empty if it can.
func readInput(declared Capabilities, m *message) (in input, flaw string) {
	found, twice := lift(m.result, requestState, "inputRequests")
	if twice != "" {
		return in, "has the member " + twice + " twice"
	}
	if raw := found[requestState]; raw != nil {
		if m.repaired && bytes.Contains(raw, []byte("\uFFFD")) {
			return in, "has a requestState that is not valid UTF-8"
		}
		if raw[0] != '"' {
			return in, "has a requestState that is not a string"
		}
		if len(raw) > maxRequestState {
			return in, fmt.Sprintf("has a requestState of more than %d bytes", maxRequestState)
		}
		in.state = raw
	}
	if raw := found["inputRequests"]; raw != nil {
		if in.asks, flaw = readAsks(declared, raw); flaw != "" {
			return input{}, flaw
		}
	}
	if in.state == nil && len(in.asks) == 0 {
		return in, "wants input and says neither which nor has it a state"
	}
	return in, ""
}

// readAsks reads a map of questions, sorted by key.
func readAsks(declared Capabilities, raw []byte) (asks []Ask, flaw string) {
	s := scanner{data: raw}
	err := s.object(1, func(name []byte) error {
		v, err := s.raw(2)
		if err != nil {
			return err
		}
		a := Ask{Key: string(name), Params: json.RawMessage("{}")}
		if len(asks) >= maxAsks {
			flaw = fmt.Sprintf("asks more than %d questions at once", maxAsks)
			return errEnvelope
		}
		if len(name) > maxAskKey || slices.ContainsFunc(asks, func(b Ask) bool { return b.Key == a.Key }) {
			flaw = "has a question whose key is too long or comes twice"
			return errEnvelope
		}
		if !storable(a.Key) {
			flaw = "has a question whose key is no readable text"
			return errEnvelope
		}
		if !unambiguous(v) {
			flaw = "has a question with a member that comes twice"
			return errEnvelope
		}
		a.Method, _ = text(member(v, "method"))
		if p := member(v, "params"); p != nil {
			a.Params = p
		}
		if e := checkAsk(declared, a.Method, a.Params); e != nil {
			flaw = fmt.Sprintf("asks with %q what it may not: %s", shorten(a.Method, 64), e.Message)
			return errEnvelope
		}
		asks = append(asks, a)
		return nil
	})
	if err != nil && flaw == "" {
		flaw = "has inputRequests that are not an object of questions"
	}
	if flaw != "" {
		return nil, flaw
	}
	slices.SortFunc(asks, func(a, b Ask) int { return strings.Compare(a.Key, b.Key) })
	return asks, ""
}

// asksOnly reports whether a result that cannot be served is still a question in
// the protocol's form: an object of questions that each name their method.
func asksOnly(result []byte) bool {
	canon, err := canonical.Args(result)
	var asks map[string]map[string]json.RawMessage
	if err != nil || json.Unmarshal(member(canon, "inputRequests"), &asks) != nil || len(asks) == 0 {
		return false
	}
	for _, ask := range asks {
		method, ok := text(ask["method"])
		if params := ask["params"]; !ok || method == "" || len(params) > 0 && params[0] != '{' {
			return false
		}
	}
	return true
}

// visits reads the URLs that a legacy server wants a person to visit before the
// request is sent again; nil when the error is another one, is not to be read, or
// was not declared to be served.
func (c *conn) visits(t *Target, e *RPCError) []Ask {
	if e == nil || e.Code != mcp.URL_ELICITATION_REQUIRED || c.era != EraLegacy || c.version < mcp.ProtocolVersion20251125 || !t.Declare.ElicitationURL {
		return nil
	}
	var asks []Ask
	s := scanner{data: member(e.Data, "elicitations")}
	err := s.array(1, func() error {
		v, err := s.raw(2)
		if err != nil {
			return err
		}
		id, named := text(member(v, "elicitationId"))
		mode, _ := text(member(v, "mode"))
		_, where := text(member(v, "url"))
		if len(asks) >= maxAsks || len(v) > maxAsk || len(id) > maxAskKey || !storable(id) || !unambiguous(v) || !named || !where || mode != "url" ||
			slices.ContainsFunc(asks, func(a Ask) bool { return a.Key == id }) {
			return errEnvelope
		}
		asks = append(asks, Ask{Key: id, Method: string(mcp.MethodElicitationCreate), Params: v})
		return nil
	})
	if err != nil {
		return nil
	}
	slices.SortFunc(asks, func(a, b Ask) int { return strings.Compare(a.Key, b.Key) })
	return asks
}
