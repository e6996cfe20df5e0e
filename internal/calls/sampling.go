package calls

import (
	"encoding/json"
	"fmt"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/elicitation"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const (
	// maxMessages bounds the messages that a server has a model asked with.
	maxMessages = 128
	// maxSampling bounds the question in bytes, maxCompletion the model's answer.
	maxSampling   = 256 << 10
	maxCompletion = 256 << 10
)

// examineSampling holds a sampling/createMessage against what was declared: text,
// images and sound, and no tools.
func examineSampling(q question, modern bool) question {
	shown, err := readSampling(q.params)
	if err != nil && modern {
		q.violation = "the server asked for sampling as the protocol does not have it: " + err.Error()
		return q
	}
	if err != nil {
		return q.refused(WasCancelled, refusedMalformed, err.Error(), rejected(codeInvalidParams, "the request is malformed"))
	}
	q.params = shown
	return q
}

// readSampling returns the params as they are shown: includeContext counts as none,
// since nothing of other servers or sessions is ever mixed in.
func readSampling(params []byte) (json.RawMessage, error) {
	wrong := func(format string, args ...any) (json.RawMessage, error) {
		return nil, fmt.Errorf("%w: %s", elicitation.ErrMalformed, fmt.Sprintf(format, args...))
	}
	if len(params) > maxSampling {
		return wrong("it has more than %d bytes", maxSampling)
	}
	canon, err := canonical.Args(params)
	var m map[string]json.RawMessage
	if err != nil || json.Unmarshal(canon, &m) != nil {
		return wrong("it is no clean JSON object")
	}
	if m["tools"] != nil || m["toolChoice"] != nil {
		return wrong("tools were not offered")
	}
	if n, ok := canonical.Number(m["maxTokens"]); !ok {
		return wrong("maxTokens must be a number")
	} else if tokens, ok := n.(int64); !ok || tokens < 1 {
		return wrong("maxTokens must be a positive integer")
	}
	var messages []map[string]json.RawMessage
	if json.Unmarshal(m["messages"], &messages) != nil || len(messages) == 0 || len(messages) > maxMessages {
		return wrong("messages must be a list of 1 to %d", maxMessages)
	}
	for i, one := range messages {
		if role := string(one["role"]); role != `"user"` && role != `"assistant"` {
			return wrong("messages[%d].role must be user or assistant", i)
		}
		if !plainContent(one["content"]) {
			return wrong("messages[%d].content must be text, images or sound", i)
		}
	}
	delete(m, "includeContext")
	delete(m, "_meta")
	out, err := json.Marshal(m)
	if err != nil {
		return wrong("it cannot be written")
	}
	return out, nil
}

// plainContent reports whether a content is one block or a list of blocks, of
// types that need no declared tools.
func plainContent(raw json.RawMessage) bool {
	var blocks []map[string]json.RawMessage
	if len(raw) > 0 && raw[0] == '{' {
		blocks = make([]map[string]json.RawMessage, 1)
		if json.Unmarshal(raw, &blocks[0]) != nil {
			return false
		}
	} else if len(raw) == 0 || raw[0] != '[' || json.Unmarshal(raw, &blocks) != nil || len(blocks) == 0 {
		return false
	}
	for _, b := range blocks {
		switch string(b["type"]) {
		case `"text"`:
			if t := b["text"]; len(t) == 0 || t[0] != '"' {
				return false
			}
		case `"image"`, `"audio"`:
			if d := b["data"]; len(d) == 0 || d[0] != '"' {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// completion holds what the frontend's model said against the protocol and
// returns it in canonical form.
func completion(raw json.RawMessage) (json.RawMessage, error) {
	if len(raw) > maxCompletion {
		return nil, fault.Field1("result", "must have at most %d bytes", maxCompletion)
	}
	canon, err := canonical.Args(raw)
	var m map[string]json.RawMessage
	if err != nil || json.Unmarshal(canon, &m) != nil || m == nil {
		return nil, fault.Field1("result", "must be an object without duplicate members")
	}
	var wrong []fault.Field
	if string(m["role"]) != `"assistant"` {
		wrong = append(wrong, fault.Field{Path: "result.role", Rule: "must be assistant"})
	}
	if !plainContent(m["content"]) {
		wrong = append(wrong, fault.Field{Path: "result.content", Rule: "must be a block or a list of blocks of text, image or audio"})
	}
	var model string
	if json.Unmarshal(m["model"], &model) != nil || model == "" {
		wrong = append(wrong, fault.Field{Path: "result.model", Rule: "must name the model that answered"})
	}
	if stop := m["stopReason"]; stop != nil && stop[0] != '"' || string(stop) == `"toolUse"` {
		wrong = append(wrong, fault.Field{Path: "result.stopReason", Rule: "must be text other than toolUse"})
	}
	if len(wrong) > 0 {
		return nil, fault.InvalidFields(wrong...)
	}
	return canon, nil
}
