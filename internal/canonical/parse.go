package canonical

import (
	"bytes"
	"slices"
	"strconv"
	"unicode/utf8"
)

// parser reads in once from left to right and appends the canonical text to
// out. Its methods neither keep nor hand on its address, so that it and its
// first members stay on the stack.
type parser struct {
	in      []byte
	pos     int
	out     []byte
	doc     bool
	depth   int
	members []span // of all open objects, innermost last
	scratch []byte
}

// span is one member already written: its unescaped name, and where its text
// lies in out.
type span struct {
	name       []byte
	start, end int
}

func canonical(raw []byte, doc bool) ([]byte, error) {
	if bytes.HasPrefix(raw, []byte("\xef\xbb\xbf")) {
		return nil, &Error{Rule: "begins with a byte order mark"}
	}
	var first [16]span
	p := parser{in: raw, out: make([]byte, 0, len(raw)), doc: doc, members: first[:0]}
	p.space()
	if p.pos == len(p.in) {
		return nil, &Error{Rule: "is empty"}
	}
	if err := p.value(); err != nil {
		return nil, err
	}
	p.space()
	if p.pos != len(p.in) {
		return nil, p.syntax("nothing may follow the value")
	}
	return p.out, nil
}

func (p *parser) syntax(rule string) *Error {
	return &Error{Rule: "is not JSON at byte " + strconv.Itoa(p.pos) + ": " + rule}
}

func (p *parser) space() {
	for p.pos < len(p.in) {
		switch p.in[p.pos] {
		case ' ', '\t', '\n', '\r':
			p.pos++
		default:
			return
		}
	}
}

// peek returns the next byte that is not white space, or 0 at the end.
func (p *parser) peek() byte {
	p.space()
	if p.pos == len(p.in) {
		return 0
	}
	return p.in[p.pos]
}

func (p *parser) value() *Error {
	switch c := p.peek(); c {
	case '{', '[':
		if p.depth == MaxDepth {
			return &Error{Rule: "is nested deeper than " + strconv.Itoa(MaxDepth)}
		}
		p.depth++
		var err *Error
		if c == '{' {
			err = p.object()
		} else {
			err = p.array()
		}
		p.depth--
		return err
	case '"':
		_, err := p.text(false)
		return err
	case 't':
		return p.literal("true")
	case 'f':
		return p.literal("false")
	case 'n':
		return p.literal("null")
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return p.number()
	}
	return p.syntax("a value was expected")
}

func (p *parser) literal(word string) *Error {
	if !bytes.HasPrefix(p.in[p.pos:], []byte(word)) {
		return p.syntax("a value was expected")
	}
	p.pos += len(word)
	p.out = append(p.out, word...)
	return nil
}

func (p *parser) array() *Error {
	p.pos++
	p.out = append(p.out, '[')
	if p.peek() == ']' {
		p.pos++
		p.out = append(p.out, ']')
		return nil
	}
	for i := 0; ; i++ {
		if err := p.value(); err != nil {
			return err.element(i)
		}
		switch p.peek() {
		case ',':
			p.pos++
			p.out = append(p.out, ',')
		case ']':
			p.pos++
			p.out = append(p.out, ']')
			return nil
		default:
			return p.syntax("a comma or ] was expected")
		}
	}
}

func (p *parser) object() *Error {
	p.pos++
	base, body, sorted := len(p.members), len(p.out)+1, true
	p.out = append(p.out, '{')
	if p.peek() == '}' {
		p.pos++
		p.out = append(p.out, '}')
		return nil
	}
	for {
		m, err := p.member()
		if err != nil {
			return err
		}
		if n := len(p.members); n > base && compareUTF16(p.members[n-1].name, m.name) >= 0 {
			sorted = false
		}
		p.members = append(p.members, m)
		switch p.peek() {
		case ',':
			p.pos++
			p.out = append(p.out, ',')
			continue
		case '}':
			p.pos++
		default:
			return p.syntax("a comma or } was expected")
		}
		break
	}
	if !sorted {
		if err := p.sort(p.members[base:], body); err != nil {
			return err
		}
	}
	p.members = p.members[:base]
	p.out = append(p.out, '}')
	return nil
}

func (p *parser) member() (span, *Error) {
	if p.peek() != '"' {
		return span{}, p.syntax("a member's name was expected")
	}
	m := span{start: len(p.out)}
	name, err := p.text(true)
	if err != nil {
		return span{}, err
	}
	if p.peek() != ':' {
		return span{}, p.syntax("a colon was expected")
	}
	p.pos++
	p.out = append(p.out, ':')
	if err := p.value(); err != nil {
		return span{}, err.member(name)
	}
	m.name, m.end = name, len(p.out)
	return m, nil
}

// sort puts the members whose text begins at body into order, and finds the
// names that stand twice.
func (p *parser) sort(ms []span, body int) *Error {
	slices.SortStableFunc(ms, func(a, b span) int { return compareUTF16(a.name, b.name) })
	p.scratch = append(p.scratch[:0], p.out[body:]...)
	p.out = p.out[:body]
	for i, m := range ms {
		if i > 0 {
			if bytes.Equal(ms[i-1].name, m.name) {
				return (&Error{Rule: "stands more than once"}).member(m.name)
			}
			p.out = append(p.out, ',')
		}
		p.out = append(p.out, p.scratch[m.start-body:m.end-body]...)
	}
	return nil
}

// compareUTF16 orders two UTF-8 texts by their UTF-16 code units. That is the
// order of bytes except that code points above U+FFFF, whose UTF-16 begins with
// a surrogate (D800 to DBFF), come before U+E000 to U+FFFF.
func compareUTF16(a, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		x, y := a[i], b[i]
		if x == y {
			continue
		}
		if x >= 0xEE && y >= 0xEE && (x >= 0xF0) != (y >= 0xF0) {
			x, y = y, x
		}
		if x < y {
			return -1
		}
		return 1
	}
	return len(a) - len(b)
}

// text reads a string and writes it in canonical escaping. For a name it
// returns the unescaped text, which lies in p.in where nothing was escaped.
func (p *parser) text(name bool) ([]byte, *Error) {
	start, i := p.pos, p.pos+1
	for i < len(p.in) {
		switch c := p.in[i]; {
		case c == '"':
			p.pos = i + 1
			p.out = append(p.out, p.in[start:p.pos]...)
			return p.in[start+1 : i], nil
		case c == '\\':
			at := len(p.out) + 1
			p.out = append(p.out, p.in[start:i]...)
			p.pos = i
			if err := p.escaped(); err != nil {
				return nil, err
			}
			if !name {
				return nil, nil
			}
			return []byte(unescape(p.out[at : len(p.out)-1])), nil
		case c < 0x20:
			p.pos = i
			return nil, p.syntax("a control character in a string must be escaped")
		case c < utf8.RuneSelf:
			i++
		default:
			r, size := utf8.DecodeRune(p.in[i:])
			if r == utf8.RuneError && size == 1 {
				return nil, &Error{Rule: "is not valid UTF-8 at byte " + strconv.Itoa(i)}
			}
			i += size
		}
	}
	p.pos = len(p.in)
	return nil, p.syntax("a string has no end")
}

// escaped goes on with a string at its first backslash.
func (p *parser) escaped() *Error {
	for p.pos < len(p.in) {
		c := p.in[p.pos]
		switch {
		case c == '"':
			p.pos++
			p.out = append(p.out, '"')
			return nil
		case c == '\\':
			r, err := p.escape()
			if err != nil {
				return err
			}
			p.out = appendRune(p.out, r)
		case c < 0x20:
			return p.syntax("a control character in a string must be escaped")
		case c < utf8.RuneSelf:
			p.out = append(p.out, c)
			p.pos++
		default:
			r, size := utf8.DecodeRune(p.in[p.pos:])
			if r == utf8.RuneError && size == 1 {
				return &Error{Rule: "is not valid UTF-8 at byte " + strconv.Itoa(p.pos)}
			}
			p.out = append(p.out, p.in[p.pos:p.pos+size]...)
			p.pos += size
		}
	}
	return p.syntax("a string has no end")
}

// escape reads one escape sequence, or two that are a surrogate pair.
func (p *parser) escape() (rune, *Error) {
	if p.pos+1 == len(p.in) {
		return 0, p.syntax("a string has no end")
	}
	switch c := p.in[p.pos+1]; c {
	case '"', '\\', '/':
		p.pos += 2
		return rune(c), nil
	case 'b', 'f', 'n', 'r', 't':
		p.pos += 2
		return rune(unescapeByte(c)), nil
	case 'u':
	default:
		return 0, p.syntax("there is no such escape")
	}
	r, ok := hex4(p.in[p.pos:])
	if !ok {
		return 0, p.syntax("\\u wants four hexadecimal digits")
	}
	if r < 0xD800 || r > 0xDFFF {
		p.pos += 6
		return r, nil
	}
	low, ok := hex4(p.in[p.pos+6:])
	if r > 0xDBFF || !ok || low < 0xDC00 || low > 0xDFFF {
		return 0, &Error{Rule: "has a lone surrogate at byte " + strconv.Itoa(p.pos)}
	}
	p.pos += 12
	return 0x10000 + (r-0xD800)<<10 + (low - 0xDC00), nil
}

// hex4 reads \uXXXX at the beginning of b.
func hex4(b []byte) (rune, bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	var r rune
	for _, c := range b[2:6] {
		switch {
		case '0' <= c && c <= '9':
			r = r<<4 | rune(c-'0')
		case 'a' <= c && c <= 'f':
			r = r<<4 | rune(c-'a'+10)
		case 'A' <= c && c <= 'F':
			r = r<<4 | rune(c-'A'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

// appendRune writes one character as RFC 8785 section 3.2.2.2 says.
func appendRune(out []byte, r rune) []byte {
	switch r {
	case '"', '\\':
		return append(out, '\\', byte(r))
	case '\b':
		return append(out, `\b`...)
	case '\f':
		return append(out, `\f`...)
	case '\n':
		return append(out, `\n`...)
	case '\r':
		return append(out, `\r`...)
	case '\t':
		return append(out, `\t`...)
	}
	if r < 0x20 {
		const digits = "0123456789abcdef"
		return append(out, '\\', 'u', '0', '0', digits[r>>4], digits[r&15])
	}
	return utf8.AppendRune(out, r)
}

// AppendString appends s as a canonical JSON string. Bytes that are not UTF-8
// become U+FFFD.
func AppendString(out []byte, s string) []byte {
	out = append(out, '"')
	for _, r := range s {
		out = appendRune(out, r)
	}
	return append(out, '"')
}
