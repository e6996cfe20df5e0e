package sessions

import (
	"fmt"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

func TestInput_Read(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/call",
		mcptest.Result(`{"resultType":"input_required","requestState":"s\u0041","inputRequests":{"b":{"method":"roots/list"},"a":{"method":"elicitation/create","params":{"mode":"url","url":"https://x"}},"c":{"method":"sampling/createMessage","params":{"maxTokens":1}}}}`),
		mcptest.Result(`{"resultType":"input_required","requestState":""}`),
		mcptest.Result(`{"resultType":"input_required","inputRequests":{"k":{"method":"elicitation/create","params":{"message":"?"}}}}`))
	p := newPool(t, nil)
	k, target := keyOf(t, "a"), declaring(s.URL, everything)
	resp, err := p.Do(t.Context(), k, target, echo())
	if err != nil || resp.ResultType != ResultInputRequired || string(resp.RequestState) != `"s\u0041"` || len(resp.Asks) != 3 {
		t.Fatalf("%+v %v", resp, err)
	}
	for i, want := range []Ask{{"a", "elicitation/create", []byte(`{"mode":"url","url":"https://x"}`)}, {"b", "roots/list", []byte(`{}`)}, {"c", "sampling/createMessage", []byte(`{"maxTokens":1}`)}} {
		if got := resp.Asks[i]; got.Key != want.Key || got.Method != want.Method || string(got.Params) != string(want.Params) {
			t.Errorf("%d: %+v", i, got)
		}
	}
	resp, err = p.Do(t.Context(), k, target, echo())
	if err != nil || string(resp.RequestState) != `""` || len(resp.Asks) != 0 || resp.ResultType != ResultInputRequired {
		t.Fatalf("an empty state: %+v %v", resp, err)
	}
	resp, err = p.Do(t.Context(), k, target, echo())
	if err != nil || resp.RequestState != nil || len(resp.Asks) != 1 {
		t.Fatalf("no state: %+v %v", resp, err)
	}
}

func TestInput_Refused(t *testing.T) {
	t.Parallel()
	many := make([]string, maxAsks+1)
	for i := range many {
		many[i] = fmt.Sprintf(`"k%d":{"method":"roots/list"}`, i)
	}
	form := Capabilities{ElicitationForm: true, Sampling: true}
	s := mcptest.New(t, mcptest.Modern)
	s.Capabilities(`{"tools":{},"completions":{}}`)
	p := newPool(t, nil)
	for name, c := range map[string]struct {
		declared Capabilities
		members  string
	}{
		"neither":          {everything, ``},
		"empty map":        {everything, `,"inputRequests":{}`},
		"state no string":  {everything, `,"requestState":7`},
		"state too long":   {everything, `,"requestState":"` + strings.Repeat("x", maxRequestState) + `"`},
		"no map":           {everything, `,"inputRequests":[]`},
		"too many":         {everything, `,"inputRequests":{` + strings.Join(many, ",") + `}`},
		"twice":            {everything, `,"inputRequests":{"a":{"method":"roots/list"},"a":{"method":"roots/list"}}`},
		"key with NUL":     {everything, `,"inputRequests":{"a\u0000":{"method":"roots/list"}}`},
		"surrogate in key": {everything, `,"inputRequests":{"a\ud800":{"method":"roots/list"}}`},
		"bytes in key":     {everything, ",\"inputRequests\":{\"a\xff\":{\"method\":\"roots/list\"}}"},
		"bytes in state":   {everything, ",\"requestState\":\"a\xff\""},
		"state twice":      {everything, `,"requestState":"SECRET","inputRequests":{"a":{"method":"roots/list"}},"request\u0053tate":"SECRET"`},
		"questions twice":  {everything, `,"inputRequests":{"a":{"method":"roots/list"}},"inputRequests":{"b":{"method":"roots/list"}}`},
		"method twice":     {everything, `,"inputRequests":{"a":{"method":"roots/list","method":"roots/list"}}`},
		"params twice":     {everything, `,"inputRequests":{"a":{"method":"roots/list","params":{},"params":{}}}`},
		"URL twice":        {everything, `,"inputRequests":{"a":{"method":"elicitation/create","params":{"mode":"url","url":"https://x","url":"https://y"}}}`},
		"field twice":      {everything, `,"inputRequests":{"a":{"method":"elicitation/create","params":{"mode":"form","requestedSchema":{"properties":{"n":{},"n":{}}}}}}`},
		"type twice":       {everything, `,"requestState":"SECRET","resultType":"complete"`},
		"long key":         {everything, `,"inputRequests":{"` + strings.Repeat("k", maxAskKey+1) + `":{"method":"roots/list"}}`},
		"unknown method":   {everything, `,"inputRequests":{"a":{"method":"tools/call"}}`},
		"no method":        {everything, `,"inputRequests":{"a":{}}`},
		"params no object": {everything, `,"inputRequests":{"a":{"method":"roots/list","params":[]}}`},
		"params too large": {everything, `,"inputRequests":{"a":{"method":"elicitation/create","params":{"x":"` + strings.Repeat("x", maxAsk) + `"}}}`},
		"roots undeclared": {form, `,"requestState":"s","inputRequests":{"a":{"method":"roots/list"}}`},
		"url undeclared":   {form, `,"requestState":"s","inputRequests":{"a":{"method":"elicitation/create","params":{"mode":"url"}}}`},
		"sampling's tools": {form, `,"inputRequests":{"a":{"method":"sampling/createMessage","params":{"tools":[{}]}}}`},
		"nothing declared": {Capabilities{}, `,"inputRequests":{"a":{"method":"elicitation/create","params":{}}}`},
	} {
		s.On("tools/call", mcptest.Result(`{"resultType":"input_required"`+c.members+`}`))
		resp, err := p.Do(t.Context(), keyOf(t, "a"), declaring(s.URL, c.declared), echo())
		if f, ok := fault.As(err); !ok || f.Reason != ResultInvalid || resp.Phase != Answered || resp.Asks != nil || resp.RequestState != nil || resp.ResultType != "" ||
			(resp.Result == nil) != strings.Contains(c.members, "requestState") || strings.Contains(fmt.Sprintf("%s %v", resp.Result, err), "SECRET") {
			t.Errorf("%s: %+v %v", name, resp, err)
		}
		// In the protocol's form, and only for more or other than it may.
		asked := map[string]bool{"too many": true, "long key": true, "unknown method": true, "params too large": true, "roots undeclared": true,
			"url undeclared": true, "sampling's tools": true, "nothing declared": true, "key with NUL": true, "bytes in key": true}
		if resp.OnlyAsked != asked[name] {
			t.Errorf("%s: only asked: %v", name, resp.OnlyAsked)
		}
	}
	// Whatever a result is, the state in it is for nobody to see.
	for result, want := range map[string]string{
		`{"requestState":"SECRET","content":[],"a":{"b":1}}`:                                   `{"content":[],"a":{"b":1}}`,
		`{"content":[{"type":"text","text":"x"}],"REQUESTSTATE":"SECRET","requestState":[{}]}`: `{"content":[{"type":"text","text":"x"}]}`,
		`{"requestState":"SECRET"}`:                                                            `{}`,
	} {
		s.On("tools/call", mcptest.Result(result))
		resp, err := p.Do(t.Context(), keyOf(t, "a"), declaring(s.URL, everything), echo())
		if succeed(t, resp, err); string(resp.Result) != want {
			t.Errorf("%s became %s", result, resp.Result)
		}
	}
	s.On("completion/complete", mcptest.Result(`{"resultType":"input_required","requestState":"s"}`))
	resp, err := p.Do(t.Context(), keyOf(t, "a"), declaring(s.URL, everything), Request{Method: "completion/complete", Params: []byte(`{}`)})
	expect(t, resp, err, "RESULT_TYPE_INVALID", fault.Protocol, Answered)
}
