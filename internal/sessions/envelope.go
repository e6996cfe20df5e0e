package sessions

import (
	"bytes"
	"errors"
	"strconv"

	"github.com/mark3labs/mcp-go/mcp"
)

var errEnvelope = errors.New("not a JSON-RPC 2.0 message")

// message is one JSON-RPC message, its parts still raw. Members with any other
// name, or the same name in another case, are ignored.
type message struct {
	id         []byte // the raw token; nil if absent, "null" if null
	method     string
	params     []byte
	result     []byte
	members    members
	err        *RPCError
	errFlaw    string // why err is no error of JSON-RPC
	overBudget bool   // nothing but the id was held
	repaired   bool   // bytes that were no UTF-8 were replaced
	hold       *lease // what the bytes have of the budget, on stdio
}

func (m *message) isResponse() bool {
	return m.method == "" && (m.result != nil || m.err != nil)
}

func (m *message) isRequest() bool { return m.method != "" && m.id != nil }

func (m *message) hasNullID() bool { return m.id == nil || string(m.id) == "null" }

// answers reports whether the message is the response to request id. A numeric
// id that came back as a string is accepted, because our own ids are never
// strings, so it is not ambiguous; other spellings of the number are not.
func (m *message) answers(id int64) bool {
	var buf [24]byte
	want := strconv.AppendInt(buf[:0], id, 10)
	got := m.id
	if len(got) > 2 && got[0] == '"' {
		got = got[1 : len(got)-1]
	}
	return bytes.Equal(got, want)
}

// parseMessage checks one JSON-RPC message and splits it. Protocol members that
// come twice make it invalid, since two readers could see different values. Bytes
// that are no UTF-8 become the replacement character, and the message says so:
// what was done cannot be undone because its text was broken.
func parseMessage(data []byte) (message, error) {
	m, err := parseExact(data)
	if !errors.Is(err, errUTF8) || len(data) > maxRepaired {
		return m, err
	}
	m, err = parseExact(bytes.ToValidUTF8(data, []byte("\uFFFD")))
	m.repaired = true
	return m, err
}

func parseExact(data []byte) (message, error) {
	var m message
	s := scanner{data: data}
	if err := m.scan(&s); err != nil {
		return message{}, err
	}
	return m, s.end()
}

// parseBatch is parseMessage for a body that may hold an array of messages, as
// revision 2025-03-26 lets servers send.
func parseBatch(data []byte, most int) ([]message, error) {
	s := scanner{data: data}
	var all []message
	err := s.array(0, func() error {
		if len(all) >= most {
			return errEnvelope
		}
		var m message
		if err := m.scan(&s); err != nil {
			return err
		}
		all = append(all, m)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return all, s.end()
}

// takesBatches reports whether a server that speaks this version may send arrays
// of messages.
func takesBatches(version string) bool { return version == mcp.ProtocolVersion20250326 }

// parseMessages is parseMessage for what may be a batch where batches are allowed.
// room is used again from one event to the next.
func parseMessages(room []message, data []byte, batches bool) ([]message, error) {
	if data = bytes.TrimSpace(data); batches && len(data) > 0 && data[0] == '[' {
		return parseBatch(data, batchMessages)
	}
	m, err := parseMessage(data)
	if err != nil {
		return nil, err
	}
	return append(room[:0], m), nil
}

const (
	seenVersion = 1 << iota
	seenID
	seenMethod
	seenParams
	seenResult
	seenError
)

func (m *message) scan(s *scanner) error {
	var seen uint8
	version := false
	once := func(bit uint8) error {
		if seen&bit != 0 {
			return errEnvelope
		}
		seen |= bit
		return nil
	}
	var failed []byte
	err := s.object(0, func(name []byte) (err error) {
		var raw []byte
		switch string(name) {
		case "jsonrpc":
			if err = once(seenVersion); err == nil {
				raw, err = s.raw(1)
				version = string(raw) == `"2.0"`
			}
		case "id":
			if err = once(seenID); err == nil {
				m.id, err = s.raw(1)
			}
		case "method":
			if err = once(seenMethod); err == nil {
				raw, err = s.raw(1)
				m.method, _ = text(raw)
			}
		case "params":
			if err = once(seenParams); err == nil {
				m.params, err = s.raw(1)
			}
		case "result":
			if err = once(seenResult); err == nil {
				err = m.scanResult(s)
			}
		case "error":
			if err = once(seenError); err == nil {
				failed, err = s.raw(1)
			}
		default:
			err = s.value(1)
		}
		return err
	})
	if err != nil {
		return err
	}
	if failed != nil && string(failed) != "null" {
		if m.err, m.errFlaw, err = parseError(failed); err != nil {
			return err
		}
		if string(m.result) == "null" {
			m.result = nil
		}
	}
	if !version || (m.result != nil && m.err != nil) || (seen&seenMethod != 0 && (m.method == "" || m.result != nil || m.err != nil)) {
		return errEnvelope
	}
	return nil
}

func (m *message) scanResult(s *scanner) error {
	s.space()
	start := s.pos
	err := m.members.scan(s)
	m.result = s.data[start:s.pos:s.pos]
	return err
}

// maxErrorMessage bounds the text of a JSON-RPC error that is kept.
const maxErrorMessage = 4096

// parseError reads an error object; some servers send a bare string. flaw says
// what is wrong with an error that has no code or a message that is no text.
func parseError(raw []byte) (e *RPCError, flaw string, err error) {
	e = &RPCError{}
	if raw[0] != '{' {
		e.Message, _ = text(raw)
		e.Message = shorten(e.Message, maxErrorMessage)
		return e, "it is not an object", nil
	}
	s := scanner{data: raw}
	var code, msg, badMessage bool
	flaw = "it has no code"
	err = s.object(1, func(name []byte) error {
		v, err := s.raw(2)
		if err != nil {
			return err
		}
		switch string(name) {
		case "code":
			if code {
				return errEnvelope
			}
			code = true
			var bad error
			if e.Code, bad = strconv.ParseInt(string(v), 10, 64); bad != nil {
				e.Code, flaw = 0, "its code is not an integer"
			} else if flaw == "it has no code" {
				flaw = ""
			}
		case "message":
			if msg {
				return errEnvelope
			}
			msg = true
			var ok bool
			if e.Message, ok = text(v); !ok {
				badMessage = true
			}
			e.Message = shorten(e.Message, maxErrorMessage)
		case "data":
			if e.Data != nil {
				return errEnvelope
			}
			e.Data = v
		}
		return nil
	})
	if flaw == "" && badMessage {
		flaw = "its message is not text"
	}
	return e, flaw, err
}
