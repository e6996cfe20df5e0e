package contract

import (
	"strings"
	"testing"
	"unicode"

	"golang.org/x/text/unicode/norm"
	"golang.org/x/text/width"
)

func TestWithin(t *testing.T) {
	t.Parallel()
	inside := []string{
		"/data", "/data/", "/data/a", "/data/a/", "/data/a/b.txt", "/data/.hidden", "/data/a.b.c", "/data/a b", "/data/100%",
		"/data/100% sure.txt", "/data/résumé.pdf", "/data/日本語", "/data/مرحبا", "/data/a~1", "/data/a;b", "/data/a:b", "/data/x*?", "/data/e\u0301",
		"/data/" + strings.Repeat("x", 4000),
	}
	for _, p := range inside {
		if !within(p, "/data") || !within(p, "/data/") || !within(p, "/") {
			t.Errorf("%q is not within", p)
		}
	}
	outside := []string{
		"", "/", "//", "/dat", "/data-evil", "/data-evil/x", "/database", "/DATA/x", "/etc/passwd", "/other/data/x",
		"data", "data/x", "./data/x", "../data/x", "~/data", "file:///data/x", "C:/data/x", " /data/x",
		"/data/..", "/data/../", "/data/../etc", "/data/a/../../etc", "/data/a/..", "/data/.", "/data/./a", "/data/a/.", "/./data/a",
		"/data/...", "/data/.../a", "/data/..a", "/data/..;/etc", "/data/..;x/etc", "/data/.. /etc", "/data/. ./x.", "/data/a.", "/data/a./b", "/data/a ", "/data/a /b", "/data/a. ", "/data/ ",
		"//data/a", "/data//a", "/data/a//", "/data//", "///data", "/data///etc/passwd",
		`\data\a`, `/data\..\etc`, `/data/a\b`, `/data/..\`, `/data\`,
		"/data/a\x00", "/data/\x00/../etc", "/data/a\nb", "/data/\x1b", "/data/a\x7f", "/data/\t",
		"/data/%2e%2e/etc", "/data/%2E%2E/etc", "/data/.%2e/etc", "/data/%2e./etc", "/data/..%2fetc", "/data/..%2Fetc", "/data%2f..%2fetc",
		"/data/%5c..%5cetc", "/data/..%5Cetc", "/data/%252e%252e/etc", "/data/%25%32%65", "/data/..%252fetc", "/data/%00", "/data/%c0%ae%c0%ae/etc",
		"/data/%c0%afetc", "/data/%ef%bc%8e", "/data/%u002e%u002e/", "/data/%U002F", "/data/a%20b", "%2fdata%2fa",
		"/data/．．/etc", "/data/\uff0e\uff0e/etc", "/data/a\uff0fb", "/data/..\uff0fetc", "/data\uff0f..", "/data/\u2024\u2024/etc", "/data/\u2025/etc", "/data/\u2026",
		"/data/a\u2215b", "/data/a\u2044b", "/data/a\u29f8b", "/data/a\u29f5b", "/data/a\u29f9b", "/data/a\u2216b", "/data/a\uff3cb", "/data/a\ufe68b", "/data/\ufe52\ufe52", "/data/\ufe19",
		"/data/\u3002\u3002", "/data/\uff61", "/data/\u2571", "/data/\u2488", "/data/\u2105", "/data/\u33a7", "/data/\u00bd", "/data/a\uff05b", "/data/a\u00a5b", "/data/a\u20a9b",
		"/data/.\u200b./etc", "/data/..\u200b/etc", "/data/.\u200d./etc", "/data/..\u00ad/etc", "/data/x\u202e", "/data/\ufeff", "/data/a\u2060", "/data/.\u034f./x", "/data/x\u034f", "/data/x\ufe0f", "/data/x\U000e0100", "/data/x\u115f", "/data/x\u3164", "/data/x\uffa0",
		"/data/a\u00a0b", "/data/a\u3000b", "/data/a\u2028b", "/data/a\u0338b", "/data/a\u0337b", "/data/\ua78f\ua78f", "/data/\u3033", "/data/\ue000", "/data/\ufffd", "/data/a\u0085",
		"/data/\xff", "/data/\xc0\xae\xc0\xae/etc", "/data/\xed\xa0\x80", "\uff0fdata/a",
		"/data/" + strings.Repeat("x", 4096),
	}
	for _, p := range outside {
		if within(p, "/data") {
			t.Errorf("%q is within /data", p)
		}
	}
	for _, root := range []string{"", "data", "/data/..", "/data/.", "//data", "/data//", `/data\`, "/%64ata", "/data\x00"} {
		if within("/data/a", root) || within(root, root) {
			t.Errorf("root %q has something within", root)
		}
	}
	if !within("/", "/") || within("/", "/data") || !within("/a", "/") {
		t.Error("the root of all is wrong")
	}
}

// TestSafeRunesStaySafe walks all of Unicode: no compatibility form of a safe
// character, and no width folding, has anything in it that within refuses.
func TestSafeRunesStaySafe(t *testing.T) {
	t.Parallel()
	forms := map[string]func(string) string{"NFKC": norm.NFKC.String, "NFKD": norm.NFKD.String, "NFC": norm.NFC.String,
		"fold": width.Fold.String, "narrow": width.Narrow.String, "upper": strings.ToUpper, "lower": strings.ToLower}
	safe := 0
	for r := rune(0x80); r <= unicode.MaxRune; r++ {
		if !safeRune(r) {
			continue
		}
		safe++
		for name, form := range forms {
			s := form(string(r))
			if s == "" || strings.ContainsAny(s, "./%") || !safeText(s) {
				t.Errorf("%U %c is safe, but its %s is %q", r, r, name, s)
			}
		}
	}
	if safe < 100_000 {
		t.Errorf("only %d characters are safe", safe)
	}
	for _, r := range []rune{0xFF0E, 0xFF0F, 0x2024, 0x2025, 0x2026, 0x2215, 0x2044, 0x29F8, 0xFF3C, 0x200B, 0x202E, 0xFEFF} {
		if safeRune(r) {
			t.Errorf("%U is safe", r)
		}
	}
}

func TestResourcePatterns(t *testing.T) {
	t.Parallel()
	tests := []struct {
		pattern string
		yes, no []string
	}{
		{"calendar://availability/**",
			[]string{"calendar://availability/a", "calendar://availability/a/b", "calendar://availability/2026-05-04T09:00", "calendar://availability/a%20b", "calendar://availability/caf%C3%A9", "calendar://availability/a/"},
			[]string{"calendar://availability", "calendar://availability/", "calendar://availabilityx/a", "calendar://events/a", "CALENDAR://availability/a",
				"calendar://availability/../events", "calendar://availability/%2e%2e/events", "calendar://availability/.%2E/events", "calendar://availability/a%2f..%2fb",
				"calendar://availability/a%5cb", `calendar://availability/a\b`, "calendar://availability/%252e%252e/b", "calendar://availability//a", "calendar://availability/a//b",
				"calendar://availability/\uff0e\uff0e/b", "calendar://availability/%EF%BC%8E%EF%BC%8E/b", "calendar://availability/%00", "calendar://availability/%ff", "calendar://availability/%zz", "calendar://availability/a\n",
				"calendar://availability/.", "calendar://availability/..;/x", "", "availability/a", "calendar://availability/" + strings.Repeat("x", 2048)}},
		{"file:///data/*.txt", []string{"file:///data/a.txt", "file:///data/.txt"},
			[]string{"file:///data/a.txt.exe", "file:///data/b/a.txt", "file:///data/..txt", "file:///data/a%2etxt", "file://host/data/a.txt", "file:///data/a.tx"}},
		{"repo://a/*/readme", []string{"repo://a/b/readme", "repo://a/b.c/readme"}, []string{"repo://a/b/c/readme", "repo://a/readme", "repo://a/../readme", "repo://a//readme"}},
		{"urn:note:*", []string{"urn:note:1"}, []string{"urn:note:1/2", "urn:x:1"}},
		{"demo://exact/..%2fthing", []string{"demo://exact/..%2fthing"}, []string{"demo://exact/../thing", "demo://exact/..%2Fthing"}},
	}
	for _, tt := range tests {
		r, rule := newResource(tt.pattern)
		if rule != "" {
			t.Fatalf("%s: %s", tt.pattern, rule)
		}
		for _, uri := range tt.yes {
			if !r.Matches(uri) {
				t.Errorf("%s does not match %q", tt.pattern, uri)
			}
		}
		for _, uri := range tt.no {
			if r.Matches(uri) {
				t.Errorf("%s matches %q", tt.pattern, uri)
			}
		}
	}
}

func FuzzWithin(f *testing.F) {
	for _, s := range []string{"/data/a", "/data/../x", "/data/%2e", "/data/．", "/data/a\u0338"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, p string) {
		if !within(p, "/data") {
			return
		}
		for range 3 {
			for _, s := range []string{p, norm.NFKC.String(p), norm.NFKD.String(p), strings.ToValidUTF8(p, "")} {
				if !strings.HasPrefix(s+"/", "/data/") || strings.Contains(s, "/../") || strings.HasSuffix(s, "/..") || strings.ContainsAny(s, "\\\x00") {
					t.Fatalf("%q is within, and reads as %q", p, s)
				}
			}
			p = strings.ReplaceAll(p, "%%", "%")
		}
	})
}
