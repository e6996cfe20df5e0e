package elicitation

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func form(properties, required string) []byte {
	return []byte(`{"message":"Which one?","requestedSchema":{"type":"object","properties":` + properties + `,"required":` + required + `}}`)
}

const everything = `{
	"name":{"type":"string","title":"Name","minLength":2,"maxLength":4,"pattern":"^[a-z]"},
	"mail":{"type":"string","format":"email"},"page":{"type":"string","format":"uri"},
	"day":{"type":"string","format":"date"},"at":{"type":"string","format":"date-time"},"other":{"type":"string","format":"uuid"},
	"n":{"type":"integer","minimum":1,"maximum":10,"default":3},"x":{"type":"number","minimum":0.1},
	"ok":{"type":"boolean","default":false},
	"color":{"type":"string","enum":["r","g"],"enumNames":["Red","Green"],"default":"g"},
	"size":{"type":"string","oneOf":[{"const":"s","title":"Small"},{"const":"l","title":"Large"}]},
	"tags":{"type":"array","minItems":1,"maxItems":2,"items":{"type":"string","enum":["a","b","c"]}},
	"more":{"type":"array","items":{"anyOf":[{"const":"p","title":"P"}]},"default":["p"]},
	"bad_default":{"type":"integer","default":"three"}}`

func TestForm_FillsDefaultsAndNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	f, err := ParseForm(form(everything, `["name","n"]`))
	if err != nil {
		t.Fatal(err)
	}
	got, err := f.Fill([]byte(`{"name":"öab"}`))
	if err == nil {
		t.Fatalf("a name outside the pattern was taken: %s", got)
	}
	got, err = f.Fill([]byte(`{"tags":["b"], "name":"aöb","x":0.10}`))
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"color":"g","more":["p"],"n":3,"name":"aöb","ok":false,"tags":["b"],"x":0.10}`; string(got) != want {
		t.Fatalf("%s, not %s", got, want)
	}
	for content, want := range map[string]string{
		`{}`:                                 "content.name: is required",
		`{"name":"a"}`:                       "content.name: must have at least 2 characters",
		`{"name":"abcde"}`:                   "content.name: must have at most 4 characters",
		`{"name":"ABC"}`:                     "content.name: must match the form's pattern",
		`{"name":null}`:                      "content.name: must be a string",
		`{"name":"ab","mail":"x"}`:           "content.mail: must be an email address",
		`{"name":"ab","mail":"A <a@b.c>"}`:   "content.mail: must be an email address",
		`{"name":"ab","page":"/x"}`:          "content.page: must be a URI with its scheme",
		`{"name":"ab","day":"2026-02-30"}`:   "content.day: must be a date such as 2026-11-25",
		`{"name":"ab","at":"2026-02-03"}`:    "content.at: must be a time such as 2026-11-25T08:00:00Z",
		`{"name":"ab","n":0}`:                "content.n: must be at least 1",
		`{"name":"ab","n":10.5}`:             "content.n: must be an integer",
		`{"name":"ab","n":11}`:               "content.n: must be at most 10",
		`{"name":"ab","n":"3"}`:              "content.n: must be a number",
		`{"name":"ab","x":0.09999}`:          "content.x: must be at least 0.1",
		`{"name":"ab","ok":"true"}`:          "content.ok: must be true or false",
		`{"name":"ab","color":"Red"}`:        "content.color: must be one of the form's choices",
		`{"name":"ab","size":"m"}`:           "content.size: must be one of the form's choices",
		`{"name":"ab","tags":[]}`:            "content.tags: must have at least 1 choices",
		`{"name":"ab","tags":["a","b","c"]}`: "content.tags: must have at most 2 choices",
		`{"name":"ab","tags":["a","a"]}`:     "content.tags: must name each choice once",
		`{"name":"ab","tags":["d"]}`:         "content.tags: must hold only the form's choices",
		`{"name":"ab","tags":"a"}`:           "content.tags: must be a list of strings",
		`{"name":"ab","extra":1}`:            "content.extra: is not asked for",
		`{"name":"ab","name":"cd"}`:          "content.name: is there twice",
		`[]`:                                 "content: must be an object",
	} {
		_, err := f.Fill([]byte(content))
		e, ok := fault.As(err)
		if !ok || e.Kind != fault.Invalid || len(e.Fields) == 0 {
			t.Errorf("%s: %v", content, err)
			continue
		}
		if got := e.Fields[0].Path + ": " + e.Fields[0].Rule; got != want && !strings.Contains(content, `"cd"`) {
			t.Errorf("%s: %s, not %s", content, got, want)
		}
	}
	// Every field that is wrong is named.
	_, err = f.Fill([]byte(`{"n":0,"ok":1}`))
	if e, _ := fault.As(err); e == nil || len(e.Fields) != 3 {
		t.Errorf("%v", err)
	}
}

func TestParseForm_TakesFlatFormsOnly(t *testing.T) {
	t.Parallel()
	var many strings.Builder
	for i := range maxFields + 1 {
		if i > 0 {
			many.WriteByte(',')
		}
		many.WriteString(`"f` + string(rune('a'+i%26)) + string(rune('a'+i/26)) + `":{"type":"string"}`)
	}
	for _, params := range []string{
		`[]`, `{}`, `{"message":"x"}`, `{"message":1,"requestedSchema":{"type":"object","properties":{}}}`,
		`{"message":"x","requestedSchema":{"type":"array","properties":{}}}`,
		`{"message":"x","requestedSchema":{"Type":"object","properties":{}}}`,
		`{"message":"x","requestedSchema":{"type":"object","properties":{},"oneOf":[]}}`,
		`{"message":"x","requestedSchema":{"type":"object","properties":{},"$ref":"https://x.example/s"}}`,
		`{"message":"x","requestedSchema":{"type":"object","properties":{},"additionalProperties":{"type":"string"}}}`,
		`{"message":"x","message":"y","requestedSchema":{"type":"object","properties":{}}}`,
		string(form(`{"a":{"type":"object","properties":{}}}`, `[]`)),
		string(form(`{"a":{"type":"array","items":{"type":"object"}}}`, `[]`)),
		string(form(`{"a":{"type":"array","items":{"type":"string"}}}`, `[]`)),
		string(form(`{"a":{"type":["string","null"]}}`, `[]`)),
		string(form(`{"a":{"anyOf":[{"type":"string"}]}}`, `[]`)),
		string(form(`{"a":{"type":"string","minLength":-1}}`, `[]`)),
		string(form(`{"a":{"type":"string","minLength":1.5}}`, `[]`)),
		string(form(`{"a":{"type":"string","$ref":"#/x"}}`, `[]`)),
		string(form(`{"a":{"type":"string","enum":[]}}`, `[]`)),
		string(form(`{"a":{"type":"string","enum":[1]}}`, `[]`)),
		string(form(`{"a":{"type":"string","enum":["x"],"enumNames":["X","Y"]}}`, `[]`)),
		string(form(`{"a":{"type":"integer","minLength":1}}`, `[]`)),
		string(form(`{"a":{"type":"number","minimum":"1"}}`, `[]`)),
		string(form(`{"a":true}`, `[]`)),
		string(form(`{}`, `["a"]`)),
		string(form(`{`+many.String()+`}`, `[]`)),
		`{"message":"` + strings.Repeat("x", MaxMessage+1) + `","requestedSchema":{"type":"object","properties":{}}}`,
		`{"message":"x","pad":"` + strings.Repeat("x", MaxParams) + `","requestedSchema":{"type":"object","properties":{}}}`,
	} {
		if _, err := ParseForm([]byte(params)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%.120s: %v", params, err)
		}
	}
	if f, err := ParseForm(form(`{}`, `[]`)); err != nil || f.Message != "Which one?" {
		t.Errorf("a form of no fields: %v", err)
	}
}

func TestForm_FindsWhatAsksForASecret(t *testing.T) {
	t.Parallel()
	for properties, want := range map[string]bool{
		`{"password":{"type":"string"}}`:                                                  true,
		`{"userPassword":{"type":"string"}}`:                                              true,
		`{"API-Key":{"type":"string"}}`:                                                   true,
		`{"x":{"type":"string","title":"Your API key"}}`:                                  true,
		`{"x":{"type":"string","description":"the credit\u00adcard number, 16 digits"}}`:  true,
		`{"x":{"type":"string","format":"password"}}`:                                     true,
		`{"pin":{"type":"integer"}}`:                                                      true,
		`{"pin":{"type":"integer","minimum":0,"maximum":9999}}`:                           true,
		`{"x":{"type":"integer","minimum":1,"maximum":100,"description":"not your pin"}}`: false,
		`{"p\u200bin":{"type":"integer"}}`:                                                true,
		`{"githubToken":{"type":"string"}}`:                                               true,
		`{"cvv":{"type":"string"},"ok":{"type":"boolean"}}`:                               true,
		`{"x":{"type":"string"}}`:                                                         false,
		`{"pinned":{"type":"boolean"},"max_tokens":{"type":"integer"}}`:                   false,
		`{"reset_password":{"type":"boolean"}}`:                                           false,
		`{"secret":{"type":"string","enum":["rotate","keep"]}}`:                           false,
		`{"p_a_s_s_w_o_r_d":{"type":"string"}}`:                                           true,
		`{"API-KEY":{"type":"string"}}`:                                                   true,
		`{"pASSWORD":{"type":"string"}}`:                                                  true,
		`{"pas-sword":{"type":"string"}}`:                                                 true,
		`{"password2":{"type":"string"}}`:                                                 true,
		`{"x":{"type":"string","title":"P.I.N."}}`:                                        true,
		`{"x":{"type":"string","title":"P\u0430ssword"}}`:                                 true,
		`{"x":{"type":"string","title":"\u0420\u0410SSWORD"}}`:                            true,
		`{"x":{"type":"string","title":"p\u03b1ssw\u03bfrd"}}`:                            true,
		`{"x":{"type":"string","title":"ｐａｓｓｗｏｒｄ"}}`:                                      true,
		`{"x":{"type":"string","title":"𝐩𝐚𝐬𝐬𝐰𝐨𝐫𝐝"}}`:                                      true,
		`{"x":{"type":"string","title":"ᴘᴀꜱꜱᴡᴏʀᴅ"}}`:                                      true,
		`{"x":{"type":"string","title":"p\u0332a\u0332s\u0332s\u0332word"}}`:              true,
		`{"x":{"type":"string","title":"t\u3164oken"}}`:                                   true,
		`{"x":{"type":"string","title":"s\ufe0fe\u2063cret"}}`:                            true,
		`{"x":{"type":"string","title":"Contrasen\u0303a"}}`:                              true,
		`{"x":{"type":"string","title":"Give to Ken"}}`:                                   false,
		`{"x":{"type":"string","title":"Pick up in store"}}`:                              false,
		`{"x":{"type":"string","title":"Ваше имя и адрес"}}`:                              false,
		`{"x":{"type":"string","title":"Όνομα και διεύθυνση"}}`:                           false,
		`{"compass_code_name":{"type":"string"},"tokenizer":{"type":"string"}}`:           false,
		`{"spinner":{"type":"string"},"author":{"type":"string","title":"Keyboard"}}`:     false,
	} {
		f, err := ParseForm(form(properties, `[]`))
		if err != nil {
			t.Fatal(err)
		}
		if got := f.Secret(); (got != "") != want {
			t.Errorf("%s: %q", properties, got)
		}
	}
	for message, want := range map[string]bool{"Please enter your password.": true, "Reset your password?": false, "Paste the API_KEY here": true} {
		raw, _ := json.Marshal(message)
		f, err := ParseForm([]byte(`{"message":` + string(raw) + `,"requestedSchema":{"type":"object","properties":{"value":{"type":"string"}}}}`))
		if err != nil {
			t.Fatal(err)
		}
		if got := f.Secret(); (got != "") != want {
			t.Errorf("%s: %q", message, got)
		}
	}
}

func TestParseURL_LeadsOnlyWhereTheContractSays(t *testing.T) {
	t.Parallel()
	origins := []string{"https://login.example", "https://x.example:8443", "http://127.0.0.1:9000", "http://plain.example", "https://xn--pple-43d.example"}
	for url, want := range map[string]string{
		"https://login.example/a?b=c#d":      "login.example",
		"https://LOGIN.example:443/":         "login.example:443",
		"https://x.example:8443/":            "x.example:8443",
		"http://127.0.0.1:9000/":             "127.0.0.1:9000",
		"https://xn--pple-43d.example/":      "xn--pple-43d.example",
		"https://login.example.evil.example": "", "http://plain.example/": "", "https://login.example:8443/": "",
		"https://u:p@login.example/": "", "https://login.example@evil.example/": "", "javascript:alert(1)": "", "https:login.example": "",
		"https://evil.example/https://login.example": "", `https://evil.example\@login.example/`: "", "https://login.example/\n": "",
		"https://lоgin.example/": "", "https://login.example:/": "", "https://x.example:/": "", "http://127.0.0.1:/": "", "": "", "//login.example/": "", "https://login.example/" + strings.Repeat("x", MaxURL): "",
	} {
		raw, _ := json.Marshal(url)
		l, err := ParseURL([]byte(`{"mode":"url","message":"Sign in","url":` + string(raw) + `}`))
		if strings.HasSuffix(url, ":/") {
			if !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), "empty port") {
				t.Errorf("%s: %+v %v", url, l, err)
			}
		}
		if want == "" {
			if !errors.Is(err, ErrMalformed) && l.LeadsTo(origins) {
				t.Errorf("%s: %+v %v", url, l, err)
			}
			continue
		}
		if err != nil || !l.LeadsTo(origins) || l.Host != want || l.URL != url || l.Punycode != strings.HasPrefix(want, "xn--") {
			t.Errorf("%s: %+v %v", url, l, err)
		}
	}
}

// FuzzForm holds whatever a server may ask and whatever a person may answer: what
// is taken stays valid, and filling it in again changes nothing.
func FuzzForm(f *testing.F) {
	f.Add(form(everything, `["name"]`), []byte(`{"name":"aob","x":1}`))
	f.Add(form(`{"a":{"type":"string","pattern":"(((a{1,100}){1,100}))"}}`, `["a"]`), []byte(`{"a":"a"}`))
	f.Add([]byte(`{"mode":"url","message":"x","url":"https://a.example/"}`), []byte(`{}`))
	f.Fuzz(func(t *testing.T, params, content []byte) {
		if l, err := ParseURL(params); err == nil && l.LeadsTo([]string{"https://a.example"}) && l.Host != "a.example" && l.Host != "a.example:443" {
			t.Fatalf("%+v", l)
		}
		Mode(params) //nolint:errcheck // it must not panic
		form, err := ParseForm(params)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		form.Secret()
		got, err := form.Fill(content)
		if err != nil {
			if e, ok := fault.As(err); !ok || e.Kind != fault.Invalid || len(e.Fields) == 0 {
				t.Fatal(err)
			}
			return
		}
		again, err := form.Fill(got)
		if err != nil || string(again) != string(got) {
			t.Fatalf("%s became %s, %v", got, again, err)
		}
		if canon, err := canonical.Args(got); err != nil || string(canon) != string(got) {
			t.Fatalf("%s is not canonical: %v", got, err)
		}
	})
}

// People are shown the fields in the order in which the server wants them.
func TestParseForm_KeepsTheOrderOfFields(t *testing.T) {
	t.Parallel()
	const schema = `{"type":"object","properties":{"zip":{"type":"string"},"city":{"type":"string"},"age":{"type":"integer","default":1.0}}}`
	f, err := ParseForm([]byte(`{"message":"m","requestedSchema":` + schema + `}`))
	if err != nil || string(f.Schema) != schema {
		t.Errorf("%s, %v", f.Schema, err)
	}
}
