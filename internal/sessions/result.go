package sessions

import (
	"bytes"
	"encoding/json"

	"github.com/mark3labs/mcp-go/mcp"
)

// The protocol's members of a result. They count only under their exact names.
const (
	memberResultType = iota
	memberIsError
	memberStructured
	memberContent
	memberCount
)

var memberNames = [memberCount]string{"resultType", "isError", "structuredContent", "content"}

// members are the raw values of the protocol's members on the first level of a
// result, lifted in the scan that checks the message.
type members struct {
	raw      [memberCount][]byte
	twice    uint8 // a bit for each member that came more than once
	miscased uint8 // a bit for each that came in another case
	state    bool  // a requestState came, in any case
}

const requestState = "requestState"

// scan walks over one result of any kind. Members that come twice are noted, not
// refused: the server has answered, and that must not be lost.
func (m *members) scan(s *scanner) error {
	if s.peek() != '{' {
		return s.value(1)
	}
	return s.object(1, func(name []byte) (err error) {
		for i, want := range memberNames {
			if string(name) == want {
				if m.raw[i] != nil {
					m.twice |= 1 << i
				}
				m.raw[i], err = s.raw(2)
				return err
			}
		}
		for i, want := range memberNames {
			if bytes.EqualFold(name, []byte(want)) {
				m.miscased |= 1 << i
			}
		}
		m.state = m.state || bytes.EqualFold(name, []byte(requestState))
		return s.value(2)
	})
}

// flaw says why a result cannot be used, empty if it can. Only a tool's result has
// members of the protocol other than resultType.
func (m *members) flaw(method string, result []byte) string {
	if len(result) == 0 || result[0] != '{' {
		return "is not an object"
	}
	for i, name := range memberNames {
		if m.twice&(1<<i) != 0 && (i == memberResultType || method == string(mcp.MethodToolsCall)) {
			return "has the member " + name + " twice"
		}
	}
	if method != string(mcp.MethodToolsCall) {
		return ""
	}
	switch string(m.raw[memberIsError]) {
	case "", "true", "false":
		return ""
	}
	return "has an isError that is neither true nor false"
}

func (m *message) parts() Parts {
	p := m.members.parts()
	p.Repaired = m.repaired
	return p
}

func (m *members) parts() Parts {
	p := Parts{StructuredContent: m.raw[memberStructured], Content: m.raw[memberContent], IsError: string(m.raw[memberIsError]) == "true"}
	for i, name := range memberNames {
		if m.miscased&(1<<i) != 0 {
			p.Miscased = append(p.Miscased, name)
		}
	}
	return p
}

// ReadResult makes the response of a server of the modern era that answered
// tools/call with this result, as Do would for a target that declares everything.
// It is for what stands in for a Pool, and for the result of a task.
func ReadResult(result json.RawMessage) (Response, error) {
	c := conn{era: EraModern, version: mcp.ProtocolVersion20260728, offers: offersTasks}
	rep := reply{phase: Answered}
	s := scanner{data: result}
	if err := rep.msg.scanResult(&s); err != nil {
		return Response{Phase: MaybeSent}, protocolError("ANSWER_INVALID", "the server's answer is not valid JSON-RPC").Cause(err)
	}
	all := Target{Declare: declarationOf(declarations - 1)}
	return c.respond(&all, &Request{Method: string(mcp.MethodToolsCall)}, &rep, nil)
}
