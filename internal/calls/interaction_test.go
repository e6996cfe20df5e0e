package calls

import (
	"encoding/json"
	"strings"
	"testing"
)

// What a person is asked is looked through as definitions are: a text that shows
// something else than it says comes with a finding, wherever it stands.
func TestView_TellsWhatIsNotVisible(t *testing.T) {
	t.Parallel()
	form := func(message, title, description, label, name string) string {
		raw, err := json.Marshal(map[string]any{"message": message, "requestedSchema": map[string]any{"type": "object", "properties": map[string]any{
			name: map[string]any{"type": "string", "title": title, "description": description, "enum": []string{"a"}, "enumNames": []string{label}}}}})
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	sampling := func(text string) string {
		raw, err := json.Marshal(map[string]any{"maxTokens": 1, "messages": []any{map[string]any{"role": "user", "content": map[string]any{"type": "text", "text": text}}}})
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	const bidi, zero, bell = "pay \u202e100\u202c", "no\u200bw", "ring \u0007"
	for name, c := range map[string]struct {
		kind InteractionKind
		raw  string
		want []string // what findings begin with and where they point
	}{
		"clean form":      {ElicitationForm, form("Wählen Sie 👩\u200d👧", "Name", "Ваше имя", "می\u200cخواهم", "n"), nil},
		"message":         {ElicitationForm, form(bidi, "", "", "", "n"), []string{"INVISIBLE_TEXT message"}},
		"title":           {ElicitationForm, form("m", zero, "", "", "n"), []string{"INVISIBLE_TEXT requestedSchema.properties.n.title"}},
		"description":     {ElicitationForm, form("m", "", bell, "", "n"), []string{"CONTROL_CHARACTER requestedSchema.properties.n.description"}},
		"label":           {ElicitationForm, form("m", "", "", zero, "n"), []string{"INVISIBLE_TEXT enumNames[0]"}},
		"name of a field": {ElicitationForm, form("m", "", "", "", zero), []string{"INVISIBLE_TEXT requestedSchema.properties"}},
		"both kinds":      {ElicitationForm, form(bell+zero, "", "", "", "n"), []string{"CONTROL_CHARACTER message", "INVISIBLE_TEXT message"}},
		"clean sampling":  {Sampling, sampling("hello"), nil},
		"sampling":        {Sampling, sampling(bidi), []string{"INVISIBLE_TEXT messages[0].content.text"}},
		"clean URL":       {ElicitationURL, `{"mode":"url","message":"m","url":"https://login.example/"}`, nil},
		"URL":             {ElicitationURL, `{"mode":"url","message":"a\u2066b","url":"https://xn--a.example/"}`, []string{"PUNYCODE_HOST", "INVISIBLE_TEXT message"}},
	} {
		v := (&Interaction{Kind: c.kind, Request: json.RawMessage(c.raw)}).View()
		if len(v.Findings) != len(c.want) {
			t.Errorf("%s: %q", name, v.Findings)
			continue
		}
		for i, want := range c.want {
			code, where, _ := strings.Cut(want, " ")
			if !strings.HasPrefix(v.Findings[i], code+": ") || !strings.Contains(v.Findings[i], where) {
				t.Errorf("%s: %q, wanted %q", name, v.Findings[i], want)
			}
		}
	}
	if v := (&Interaction{Kind: ElicitationForm}).View(); v.Findings != nil {
		t.Errorf("what is not shown has findings: %q", v.Findings)
	}
}
