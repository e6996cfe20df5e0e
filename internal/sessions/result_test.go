package sessions

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

func TestReadResult(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]struct {
		flaw       string
		isError    bool
		structured string
		content    string
		miscased   []string
	}{
		`{}`:                             {},
		`{"content":[]}`:                 {content: `[]`},
		`{"content":null}`:               {content: `null`},
		`{"isError":true,"content":"x"}`: {isError: true, content: `"x"`},
		`{"isError":true,"content":{}}`:  {isError: true, content: `{}`},
		`{"isError":true,"ISERROR":false,"content":[]}`:                      {isError: true, content: `[]`, miscased: []string{"isError"}},
		`{"IsError":true,"iserror":1}`:                                       {miscased: []string{"isError"}},
		`{"\u0069sError":true}`:                                              {isError: true},
		`{"structuredContent":{"a":1},"STRUCTUREDCONTENT":{"id":"x"}}`:       {structured: `{"a":1}`, miscased: []string{"structuredContent"}},
		`{"STRUCTUREDCONTENT":{"id":"x"},"Content":[]}`:                      {miscased: []string{"structuredContent", "content"}},
		`{"content":[{"isError":true,"isError":1}],"_meta":{"isError":"x"}}`: {content: `[{"isError":true,"isError":1}]`},
		`{"isError":"true"}`:                                                 {flaw: "neither true nor false"},
		`{"isError":1}`:                                                      {flaw: "neither true nor false"},
		`{"isError":null}`:                                                   {flaw: "neither true nor false"},
		`{"isError":false,"isError":true}`:                                   {flaw: "isError twice"},
		`{"isError":true,"isErro\u0072":true}`:                               {flaw: "isError twice"},
		`{"content":[],"content":[]}`:                                        {flaw: "content twice"},
		`{"structuredContent":{},"structuredContent":{}}`:                    {flaw: "structuredContent twice"},
		`{"resultType":"complete","resultType":"x"}`:                         {flaw: "resultType twice"},
		`[]`:     {flaw: "not an object"},
		`null`:   {flaw: "not an object"},
		`"text"`: {flaw: "not an object"},
	} {
		r, err := ReadResult(json.RawMessage(in))
		if want.flaw != "" {
			f, ok := fault.As(err)
			if !ok || f.Reason != ResultInvalid || f.Layer != fault.Protocol || r.Phase != Answered || string(r.Result) != in || !strings.Contains(f.Message, want.flaw) {
				t.Errorf("%s: %+v, %v", in, r, err)
			}
			continue
		}
		p := r.Parts
		if err != nil || p.IsError != want.isError || string(p.StructuredContent) != want.structured || string(p.Content) != want.content || !slices.Equal(p.Miscased, want.miscased) {
			t.Errorf("%s: %+v, %v", in, p, err)
		}
	}
}

// A list has no isError of the protocol; that of a server's own does no harm.
func TestMembersOfOtherResults(t *testing.T) {
	t.Parallel()
	var m members
	raw := []byte(`{"isError":"x","content":1,"content":2,"tools":[]}`)
	if err := m.scan(&scanner{data: raw}); err != nil || m.flaw("tools/list", raw) != "" || m.flaw("tools/call", raw) == "" {
		t.Fatalf("%+v %v", m, err)
	}
}

// FuzzMembers compares the scan with a walk over the first level by encoding/json.
func FuzzMembers(f *testing.F) {
	for _, s := range []string{`{"isError":true,"content":[{"isError":false}]}`, `{"ISERROR":1,"\u0069sError":false,"i\u017fError":2}`,
		`{"content":[],"content":{},"structuredContent":{"content":1}}`, `[]`, ` {"resultType" : "complete" } `, `{"a":{"resultType":"x"}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var m members
		s := scanner{data: in}
		if m.scan(&s) != nil || s.end() != nil {
			return
		}
		d := json.NewDecoder(bytes.NewReader(in))
		if tok, err := d.Token(); err != nil {
			t.Fatalf("%q: %v", in, err)
		} else if tok != json.Delim('{') {
			if m.flaw("tools/call", bytes.TrimSpace(in)) == "" {
				t.Fatalf("%q passes for an object", in)
			}
			return
		}
		var values [memberCount][]json.RawMessage
		var folded [memberCount]bool
		for d.More() {
			name, err := d.Token()
			if err != nil {
				t.Fatalf("%q: %v", in, err)
			}
			var v json.RawMessage
			if err := d.Decode(&v); err != nil {
				t.Fatalf("%q: %v", in, err)
			}
			for i, want := range memberNames {
				if name == want {
					values[i] = append(values[i], v)
				} else if strings.EqualFold(name.(string), want) {
					folded[i] = true
				}
			}
		}
		for i, name := range memberNames {
			all := values[i]
			if (len(all) > 1) != (m.twice&(1<<i) != 0) || (m.raw[i] != nil) != (len(all) > 0) || folded[i] != (m.miscased&(1<<i) != 0) {
				t.Fatalf("%q: %s: %q against %+v", in, name, all, m)
			}
			if len(all) > 0 && !bytes.Equal(bytes.TrimSpace(all[len(all)-1]), m.raw[i]) {
				t.Fatalf("%q: %s is %q, not %q", in, name, m.raw[i], all[len(all)-1])
			}
		}
	})
}

func TestFlawedAnswers(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]struct {
		reason, text string
		phase        Phase
	}{
		`{"jsonrpc":"2.0","id":$ID,"error":{"code":"x","message":5}}`:      {ErrorInvalid, "code is not an integer", Answered},
		`{"jsonrpc":"2.0","id":$ID,"error":{"code":1.5,"message":"boom"}}`: {ErrorInvalid, "code is not an integer", Answered},
		`{"jsonrpc":"2.0","id":$ID,"error":{"message":"boom"}}`:            {ErrorInvalid, "no code", Answered},
		`{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":5}}`:        {ErrorInvalid, "message is not text", Answered},
		`{"jsonrpc":"2.0","id":$ID,"error":"boom"}`:                        {ErrorInvalid, "not an object", Answered},
		`{"jsonrpc":"2.0","id":$ID,"result":{"isError":1}}`:                {ResultInvalid, "isError", Answered},
		`{"jsonrpc":"2.0","id":$ID}`:                                       {"ANSWER_EMPTY", "neither a result nor an error", MaybeSent},
		`{"jsonrpc":"2.0","id":$ID,"error":null}`:                          {"ANSWER_EMPTY", "neither a result nor an error", MaybeSent},
		`{"jsonrpc":"2.0","id":$ID,"Result":{}}`:                           {"ANSWER_EMPTY", "neither a result nor an error", MaybeSent},
	} {
		for _, answer := range []mcptest.Answer{mcptest.JSON(body), mcptest.Stream(mcptest.Event(body))} {
			s := mcptest.New(t, mcptest.Modern)
			s.On("tools/call", answer)
			resp, err := newPool(t, nil).Do(t.Context(), keyOf(t, "a"), httpTarget(s.URL), echo())
			expect(t, resp, err, want.reason, fault.Protocol, want.phase)
			if !strings.Contains(err.Error(), want.text) {
				t.Errorf("%s: %v", body, err)
			}
		}
	}
}
