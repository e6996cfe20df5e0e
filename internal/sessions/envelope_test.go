package sessions

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func TestParseMessage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, in string
		ok       bool
		check    func(m message) bool
	}{
		{"result", `{"jsonrpc":"2.0","id":7,"result":{"a":[1,2]}}`, true, func(m message) bool { return string(m.result) == `{"a":[1,2]}` && m.isResponse() && m.answers(7) }},
		{"result type", `{"result":{"x":{"resultType":"no"},"resultType":"input_required"},"id":7,"jsonrpc":"2.0"}`, true, func(m message) bool { return string(m.members.raw[memberResultType]) == `"input_required"` }},
		{"result type twice", `{"result":{"resultType":"a","resultType":"b"},"id":7,"jsonrpc":"2.0"}`, true, func(m message) bool { return m.members.flaw("tools/list", m.result) != "" }},
		{"error", `{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"no","data":{"x":1}}}`, true, func(m message) bool {
			return m.hasNullID() && m.err.Code == -32601 && m.err.Message == "no" && string(m.err.Data) == `{"x":1}`
		}},
		{"error as text", `{"jsonrpc":"2.0","error":"broken"}`, true, func(m message) bool { return m.isResponse() && m.err.Message == "broken" && m.hasNullID() }},
		{"error null beside a result", `{"jsonrpc":"2.0","id":1,"result":{},"error":null}`, true, func(m message) bool { return m.isResponse() && m.err == nil }},
		{"result null beside an error", `{"jsonrpc":"2.0","id":1,"result":null,"error":{"code":1,"message":""}}`, true, func(m message) bool { return m.err != nil && m.result == nil }},
		{"result and error", `{"jsonrpc":"2.0","id":1,"result":{},"error":{"code":1,"message":""}}`, false, nil},
		{"request", `{"jsonrpc":"2.0","id":"a","method":"ping"}`, true, func(m message) bool { return m.isRequest() && !m.isResponse() }},
		{"notification", `{"jsonrpc":"2.0","method":"notifications/x","params":{}}`, true, func(m message) bool { return !m.isRequest() && string(m.params) == "{}" }},
		{"escaped names", `{"jsonrpc":"2.0","\u0069d":7,"resul\u0074":{}}`, true, func(m message) bool { return m.answers(7) && m.isResponse() }},
		{"no version", `{"id":7,"result":{}}`, false, nil},
		{"other version", `{"jsonrpc":"1.0","id":7,"result":{}}`, false, nil},
		{"id twice", `{"jsonrpc":"2.0","id":7,"id":8,"result":{}}`, false, nil},
		{"result twice by escape", `{"jsonrpc":"2.0","id":7,"result":{},"resul\u0074":{}}`, false, nil},
		{"method and result", `{"jsonrpc":"2.0","id":7,"method":"x","result":{}}`, false, nil},
		{"array", `[]`, false, nil}, {"text", `"x"`, false, nil}, {"empty", ``, false, nil}, {"two values", `{"jsonrpc":"2.0","id":1,"result":{}} {}`, false, nil},
		{"bad utf-8", "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"a\":\"\xff\"}}", true, func(m message) bool { return m.repaired && string(m.result) == "{\"a\":\"\uFFFD\"}" }},
		{"bad utf-8 outside of text", "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":\xff}", false, nil},
		{"too much of bad utf-8", "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"a\":\"" + strings.Repeat("\xff", maxRepaired) + "\"}}", false, nil},
		{"control character", "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"a\":\"\n\"}}", false, nil},
		{"depth", `{"jsonrpc":"2.0","id":1,"result":{"a":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + `}}`, false, nil},
	} {
		m, err := parseMessage([]byte(c.in))
		if (err == nil) != c.ok || (c.ok && !c.check(m)) {
			t.Errorf("%s: %+v, %v", c.name, m, err)
		}
	}
}

func TestFO068_IDsOfResponses(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]bool{
		`7`: true, `"7"`: true, `7.0`: false, `"07"`: false, `07`: false, `70`: false, `"7 "`: false, `null`: false, `""`: false, `"`: false, `[7]`: false, ``: false,
	} {
		m := message{id: []byte(id)}
		if m.answers(7) != want {
			t.Errorf("id %s: %v", id, !want)
		}
	}
}

func TestFO070_MemberNamesInAnotherCaseAreIgnored(t *testing.T) {
	t.Parallel()
	m, err := parseMessage([]byte(`{"jsonrpc":"2.0","id":7,"ID":8,"Result":{"a":"evil"},"result":{"a":"good"},"Error":{"code":1,"message":"x"}}`))
	if err != nil || !m.answers(7) || string(m.result) != `{"a":"good"}` || m.err != nil {
		t.Fatalf("%+v %v", m, err)
	}
	if m, err := parseMessage([]byte(`{"jsonrpc":"2.0","id":7,"Result":{}}`)); err != nil || m.isResponse() {
		t.Fatalf("a miscased result was taken: %+v %v", m, err)
	}
	m, err = parseMessage([]byte(`{"jsonrpc":"2.0","id":7,"error":{"Code":1,"code":2,"Message":"evil","message":"good"}}`))
	if err != nil || m.err.Code != 2 || m.err.Message != "good" {
		t.Fatalf("%+v %v", m.err, err)
	}
}

func TestParseBatch(t *testing.T) {
	t.Parallel()
	all, err := parseBatch([]byte(`[{"jsonrpc":"2.0","method":"x"},{"jsonrpc":"2.0","id":1,"result":{}}]`), 4)
	if err != nil || len(all) != 2 || !all[1].answers(1) {
		t.Fatalf("%v %v", all, err)
	}
	if _, err := parseBatch([]byte(`[{"jsonrpc":"2.0","method":"x"},{"jsonrpc":"2.0","method":"x"}]`), 1); !errors.Is(err, errEnvelope) {
		t.Fatal(err)
	}
}

func FuzzParseMessage(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":7,"result":{"resultType":"complete","a":[1,-2.5e+3,"\u00e9",null,true]}}`,
		`{"jsonrpc":"2.0","id":"7","error":{"code":-32601,"message":"x","data":[]}}`, `{"jsonrpc":"2.0","method":"ping","id":1}`, `[{}]`, `{"a":1e}`, `{"a":01}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		m, err := parseMessage(in)
		s := scanner{data: in}
		_, skipErr := s.raw(0)
		if skipErr == nil {
			skipErr = s.end()
		}
		// What this scanner takes for JSON must be JSON for the standard library.
		if skipErr == nil && !json.Valid(in) {
			t.Fatalf("%q is no JSON", in)
		}
		if json.Valid(in) && errors.Is(skipErr, errJSON) {
			t.Fatalf("%q is JSON", in)
		}
		if err != nil {
			return
		}
		for _, part := range [][]byte{m.id, m.params, m.result, m.members.raw[0], m.members.raw[1], m.members.raw[2], m.members.raw[3]} {
			if part != nil && !json.Valid(part) {
				t.Fatalf("%q: part %q is no JSON", in, part)
			}
		}
		if m.result != nil && m.err != nil {
			t.Fatalf("%q: result and error", in)
		}
	})
}

func BenchmarkParseMessage64K(b *testing.B) {
	in := []byte(`{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"` + strings.Repeat("lorem ipsum ", 5400) + `"}]}}`)
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parseMessage(in); err != nil {
			b.Fatal(err)
		}
	}
}
