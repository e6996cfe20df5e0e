package calls

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// FuzzCleanResult: what comes out is text that every JSON decoder reads; what was
// good is not touched; cleaning twice changes nothing more; JSON stays JSON.
func FuzzCleanResult(f *testing.F) {
	for _, s := range []string{okResult, `"\ud83d"`, `"\\\ud83d\ude00"`, "\"\xff\"", `{"isError":true}`, `"\u`, `\`, `"\ud83d\u`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		before := bytes.Clone(in)
		out, findings := cleanResult(in)
		if !bytes.Equal(in, before) {
			t.Fatal("the input was changed")
		}
		if !utf8.Valid(out) {
			t.Fatalf("%q is not UTF-8", out)
		}
		if (findings == nil) != bytes.Equal(out, in) {
			t.Fatalf("%q → %q says %v", in, out, findings)
		}
		if again, f := cleanResult(out); f != nil || !bytes.Equal(again, out) {
			t.Fatalf("%q → %q → %q", in, out, again)
		}
		if json.Valid(in) && !json.Valid(out) {
			t.Fatalf("%q is JSON, %q is not", in, out)
		}
		if json.Valid(in) {
			if r, err := sessions.ReadResult(out); err == nil {
				toolError(r.Parts)
				structuredContent(r.Parts)
			}
		}
	})
}
