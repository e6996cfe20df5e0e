package e2e

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// strictTool has a schema for what it returns.
const strictTool = `[{"name":"act","inputSchema":{"type":"object"},
	"outputSchema":{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}}]`

// Whatever a server answers reaches the frontend as it came, block by block and
// digit by digit, over both transports; what is odd about it is said beside it.
func TestResultsArriveAsTheyCame(t *testing.T) {
	const six = `[{"type":"text","text":"a","annotations":{"audience":["user"],"priority":0.5},"_meta":{"x/y":1}},
		{"type":"image","data":"aGk=","mimeType":"image/png","annotations":{"priority":1},"_meta":{"x/y":2}},
		{"type":"audio","data":"aGk=","mimeType":"audio/wav","_meta":{"x/y":3}},
		{"type":"resource","resource":{"uri":"file:///a","mimeType":"text/plain","text":"t"},"annotations":{"priority":0},"_meta":{"x/y":4}},
		{"type":"resource","resource":{"uri":"file:///b","blob":"aGk="},"_meta":{"x/y":5}},
		{"type":"resource_link","uri":"http://127.0.0.1:1/never-fetched","name":"n","title":"t","size":9007199254740993,"_meta":{"x/y":6}}]`
	both(t, func(t *testing.T, w *world) {
		for _, c := range []struct {
			name, tools, result string
			want                string // what arrives; empty: as it was sent
			state               pb.Call_State
			finding, errorText  string
		}{
			{name: "six kinds of content", tools: plainTool, result: `{"resultType":"complete","content":` + six + `}`, state: pb.Call_SUCCEEDED},
			{name: "a kind from the future", tools: plainTool, state: pb.Call_SUCCEEDED,
				result: `{"resultType":"complete","content":[{"type":"text","text":"a"},{"type":"hologram","data":{"deep":[1,2]}},{"type":"text","text":"b"}]}`},
			{name: "structured content alone", tools: plainTool, result: `{"resultType":"complete","structuredContent":{"n":1}}`, state: pb.Call_SUCCEEDED},
			{name: "content null", tools: plainTool, result: `{"resultType":"complete","content":null,"structuredContent":{"n":1}}`, state: pb.Call_SUCCEEDED},
			{name: "large integers", tools: plainTool, state: pb.Call_SUCCEEDED,
				result: `{"resultType":"complete","content":[],"structuredContent":{"id":9007199254740993,"neg":-7108510333361982070,"f":1.0,"e":1e2}}`},
			{name: "a lone surrogate", tools: plainTool, state: pb.Call_SUCCEEDED, finding: "TEXT_REPAIRED",
				result: `{"resultType":"complete","content":[{"type":"text","text":"ok \ud83d end"}]}`,
				want:   `{"resultType":"complete","content":[{"type":"text","text":"ok \ufffd end"}]}`},
			{name: "a byte that is no text", tools: plainTool, state: pb.Call_SUCCEEDED, finding: "TEXT_REPAIRED",
				result: "{\"resultType\":\"complete\",\"content\":[{\"type\":\"text\",\"text\":\"caf\xe9\"}]}",
				want:   `{"resultType":"complete","content":[{"type":"text","text":"caf\ufffd"}]}`},
			{name: "an error that breaks the schema", tools: strictTool, state: pb.Call_FAILED, errorText: "auth failed",
				result: `{"resultType":"complete","isError":true,"content":[{"type":"text","text":"auth failed"}],"structuredContent":{"code":1}}`},
			{name: "a schema and no structured content", tools: strictTool, state: pb.Call_SUCCEEDED, finding: "SCHEMA_MISMATCH",
				result: `{"resultType":"complete","content":[{"type":"text","text":"done"}]}`},
			{name: "a member too many", tools: strictTool, state: pb.Call_SUCCEEDED, finding: "SCHEMA_MISMATCH",
				result: `{"resultType":"complete","content":[],"structuredContent":{"n":1,"more":true}}`},
			{name: "the schema kept", tools: strictTool, state: pb.Call_SUCCEEDED, result: `{"resultType":"complete","content":[],"structuredContent":{"n":1}}`},
		} {
			v := newWorld(t, w.transport)
			m, s := v.scripted(t, mcptest.Modern, c.tools, mcptest.Result(c.result))
			v.review(s, nil, toolRule{name: "act", effect: "write", consent: "none"})
			call := v.propose(v.alice, v.session(v.alice), "scripted", "act", obj{})
			if call.GetState() != c.state {
				t.Errorf("%s: %s, %v", c.name, call.GetState(), call.GetError())
				continue
			}
			want := c.want
			if want == "" {
				want = c.result
			}
			if got := exactly(t, call.GetResult().GetRaw()); got != exactly(t, []byte(want)) {
				t.Errorf("%s: %s", c.name, got)
			}
			var codes []string
			for _, f := range call.GetSource().GetFindings() {
				codes = append(codes, f.GetCode())
			}
			if got := strings.Join(codes, " "); got != c.finding || !call.GetSource().GetUntrusted() {
				t.Errorf("%s: findings %q", c.name, got)
			}
			if c.errorText != "" && (call.GetError().GetLayer() != pb.Call_Error_TOOL || call.GetError().GetMessage() != c.errorText) {
				t.Errorf("%s: %v", c.name, call.GetError())
			}
			if n := m.Count("tools/call"); n != 1 {
				t.Errorf("%s: sent %d times", c.name, n)
			}
		}
	})
}

// exactly is JSON without white space, with every number in its own digits.
func exactly(t testing.TB, raw []byte) string {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	must(t, d.Decode(&v))
	out, err := json.Marshal(v)
	must(t, err)
	return string(out)
}
