package catalog

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
)

// The findings about text. A person or a terminal does not see what a model
// reads, or sees something else.
const (
	FindingInvisibleText    = "INVISIBLE_TEXT"
	FindingControlCharacter = "CONTROL_CHARACTER"
)

// invisible are the characters that most fonts draw as nothing or that change
// the direction of what follows (Unicode TR 36 and TR 39): fillers, zero-width
// and bidirectional controls, variation selectors, tags.
var invisible = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x00AD, 0x00AD, 1}, {0x034F, 0x034F, 1}, {0x061C, 0x061C, 1}, {0x115F, 0x1160, 1},
		{0x17B4, 0x17B5, 1}, {0x180B, 0x180F, 1}, {0x200B, 0x200F, 1}, {0x2028, 0x202E, 1},
		{0x2060, 0x206F, 1}, {0x3164, 0x3164, 1}, {0xFE00, 0xFE0F, 1}, {0xFEFF, 0xFEFF, 1},
		{0xFFA0, 0xFFA0, 1}, {0xFFF0, 0xFFFB, 1},
	},
	R32: []unicode.Range32{
		{0x1BCA0, 0x1BCA3, 1}, {0x1D173, 0x1D17A, 1}, {0xE0000, 0xE0FFF, 1},
	},
	LatinOffset: 1,
}

// joined are the scripts in which the zero-width joiner and non-joiner are part
// of ordinary spelling.
var joined = []*unicode.RangeTable{
	unicode.Arabic, unicode.Syriac, unicode.Mongolian, unicode.Devanagari, unicode.Bengali, unicode.Gurmukhi,
	unicode.Gujarati, unicode.Oriya, unicode.Tamil, unicode.Telugu, unicode.Kannada, unicode.Malayalam,
	unicode.Sinhala, unicode.Khmer, unicode.Myanmar, unicode.Tibetan, unicode.Inherited,
}

// flags are the tag sequences in general use: England, Scotland and Wales.
var flags = []string{"gbeng", "gbsct", "gbwls"}

const (
	blackFlag = 0x1F3F4
	tagBase   = 0xE0000
	tagEnd    = 0xE007F
	zwnj      = 0x200C
	zwj       = 0x200D
	emojiLook = 0xFE0F
	textLook  = 0xFE0E
)

// TextFindings looks at every string of a JSON document of a server, names of
// members too, for what a person does not see or sees otherwise. One that is not
// clean JSON has none.
func TextFindings(raw []byte) []Finding {
	canon, err := canonical.Doc(raw)
	if err != nil {
		return nil
	}
	v, err := canonical.Decode(canon)
	if err != nil {
		return nil
	}
	var s textScan
	s.walk("", v)
	return s.findings()
}

// textScan collects what is wrong with the strings of one definition.
type textScan struct {
	seen map[string]*textHits
}

type textHits struct {
	count int
	paths []string
	runes []rune
}

// maxShown bounds the places and characters that one finding names.
const maxShown = 4

func (s *textScan) hit(code, path string, r rune) {
	if s.seen == nil {
		s.seen = map[string]*textHits{}
	}
	h := s.seen[code]
	if h == nil {
		h = &textHits{}
		s.seen[code] = h
	}
	h.count++
	if len(h.paths) < maxShown && !slices.Contains(h.paths, path) {
		h.paths = append(h.paths, path)
	}
	if len(h.runes) < maxShown && !slices.Contains(h.runes, r) {
		h.runes = append(h.runes, r)
	}
}

// findings returns one finding for each code, in the order of the codes.
func (s *textScan) findings() []Finding {
	var out []Finding
	for code, h := range s.seen {
		names := make([]string, len(h.runes))
		for i, r := range h.runes {
			names[i] = fmt.Sprintf("U+%04X", r)
		}
		out = append(out, Finding{Code: code, Detail: fmt.Sprintf("%d characters such as %s at %s",
			h.count, strings.Join(names, ", "), strings.Join(h.paths, ", "))})
	}
	slices.SortFunc(out, func(a, b Finding) int { return strings.Compare(a.Code, b.Code) })
	return out
}

// walk looks at every string of v, names of members too.
func (s *textScan) walk(path string, v any) {
	switch v := v.(type) {
	case string:
		s.text(path, v)
	case []any:
		for i, e := range v {
			s.walk(path+"["+strconv.Itoa(i)+"]", e)
		}
	case map[string]any:
		// In order, because findings are part of a revision's content.
		for _, name := range slices.Sorted(maps.Keys(v)) {
			at := memberPath(path, name)
			s.text(at, name)
			s.walk(at, v[name])
		}
	}
}

func (s *textScan) text(path, text string) {
	if isPlainASCII(text) {
		return
	}
	runes := []rune(text)
	for i := 0; i < len(runes); i++ {
		r := runes[i]
		switch {
		case r < ' ' && r != '\n' && r != '\t' && r != '\r', r >= 0x7f && r <= 0x9f:
			s.hit(FindingControlCharacter, path, r)
		case r == blackFlag:
			i += flagTags(runes[i+1:])
		case unicode.Is(invisible, r) && !ordinary(runes, i):
			s.hit(FindingInvisibleText, path, r)
		}
	}
}

func isPlainASCII(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; c >= 0x7f || c < ' ' && c != '\n' && c != '\t' && c != '\r' {
			return false
		}
	}
	return true
}

// flagTags returns how many runes after a black flag spell a known flag.
func flagTags(rest []rune) int {
	for _, f := range flags {
		n := len(f)
		if len(rest) <= n || rest[n] != tagEnd {
			continue
		}
		match := true
		for i := range n {
			match = match && rest[i] == tagBase+rune(f[i])
		}
		if match {
			return n + 1
		}
	}
	return 0
}

// ordinary reports whether the invisible character at i is where everyday text
// has one: a joiner inside an emoji or a word of a joining script, one look
// selector after a symbol.
func ordinary(runes []rune, i int) bool {
	if i == 0 {
		return false
	}
	before := runes[i-1]
	switch runes[i] {
	case textLook, emojiLook:
		return isSymbol(before) || before == '#' || before == '*' || unicode.IsDigit(before)
	case zwj, zwnj:
		if i+1 == len(runes) {
			return false
		}
		after := runes[i+1]
		if isSymbol(after) && (isSymbol(before) || before == emojiLook && i > 1 && isSymbol(runes[i-2])) {
			return runes[i] == zwj
		}
		return unicode.In(before, joined...) && unicode.In(after, joined...) &&
			!unicode.Is(invisible, before) && !unicode.Is(invisible, after)
	}
	return false
}

func isSymbol(r rune) bool { return r > 0xA0 && unicode.In(r, unicode.So, unicode.Sk, unicode.Sm) }

// memberPath appends one member's name to a path; foreign names that are no
// plain word are quoted, escaped and cut to 64 bytes.
func memberPath(path, name string) string {
	if plainMember(name) {
		if path == "" {
			return name
		}
		return path + "." + name
	}
	return path + "[" + quoteShort(name) + "]"
}

func plainMember(name string) bool {
	if name == "" || len(name) > 64 {
		return false
	}
	for i := 0; i < len(name); i++ {
		c := name[i]
		if c != '_' && c != '$' && c != '-' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

// quoteShort returns foreign text as a quoted ASCII word of bounded length.
func quoteShort(s string) string {
	const most = 64
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return strconv.QuoteToASCII(s)
}
