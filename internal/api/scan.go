package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// maxDepth bounds the nesting of one JSON value from outside.
const maxDepth = 64

// maxShownName bounds how much of a foreign member name an error repeats.
const maxShownName = 64

// pathError is a rule that the JSON text at path broke. Its path grows from
// the inside out while the error returns, so that good input pays nothing.
type pathError struct {
	path string
	rule string
}

func (e *pathError) Error() string { return e.path + ": " + e.rule }

func broken(format string, args ...any) *pathError {
	return &pathError{rule: fmt.Sprintf(format, args...)}
}

// within places err below a member name or an index such as "[2]".
func (e *pathError) within(name string) *pathError {
	if len(name) > maxShownName {
		name = strings.ToValidUTF8(name[:maxShownName], "") + "…"
	}
	switch {
	case e.path == "":
		e.path = name
	case e.path[0] == '[':
		e.path = name + e.path
	default:
		e.path = name + "." + e.path
	}
	return e
}

// fault returns the error for the caller; path names the whole document when
// nothing more precise is known.
func (e *pathError) fault() *fault.Error {
	path := e.path
	if path == "" {
		path = "body"
	}
	return fault.Field1(path, "%s", e.rule)
}

// scanner reads JSON text strictly (RFC 8259, and RFC 7493 for names, UTF-8 and
// surrogates), one pass, without building values.
type scanner struct {
	b   []byte
	pos int
	// mixed tells that b is not valid UTF-8 somewhere, so that each string must
	// be looked at.
	mixed bool
	// names holds the raw member names of the objects that are open.
	names [][]byte
}

func newScanner(b []byte) *scanner {
	return &scanner{b: b, mixed: !utf8.Valid(b)}
}

// checkJSON verifies that b is exactly one JSON value within the rules.
func checkJSON(b []byte) *pathError {
	s := newScanner(b)
	if err := s.value(0); err != nil {
		return err
	}
	return s.end()
}

func (s *scanner) space() {
	for s.pos < len(s.b) {
		switch s.b[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}

// peek returns the next byte that is not space, 0 at the end.
func (s *scanner) peek() byte {
	s.space()
	if s.pos >= len(s.b) {
		return 0
	}
	return s.b[s.pos]
}

func (s *scanner) end() *pathError {
	s.space()
	if s.pos < len(s.b) {
		return broken("has data after the JSON value at byte %d", s.pos)
	}
	return nil
}

func (s *scanner) unexpected() *pathError {
	if s.pos >= len(s.b) {
		return broken("is cut off")
	}
	return broken("is not valid JSON at byte %d", s.pos)
}

// value skips one value, checking all of it.
func (s *scanner) value(depth int) *pathError {
	switch c := s.peek(); c {
	case '{':
		return s.object(depth, func(name []byte) *pathError { return s.value(depth + 1) })
	case '[':
		return s.array(depth, func(int) *pathError { return s.value(depth + 1) })
	case '"':
		_, err := s.text()
		return err
	case 't':
		return s.word("true")
	case 'f':
		return s.word("false")
	case 'n':
		return s.word("null")
	default:
		_, err := s.number()
		return err
	}
}

// raw skips one value and returns its bytes. Its nesting counts from itself.
func (s *scanner) raw() ([]byte, *pathError) {
	s.space()
	from := s.pos
	if err := s.value(0); err != nil {
		return nil, err
	}
	return s.b[from:s.pos], nil
}

func (s *scanner) word(w string) *pathError {
	if !bytes.HasPrefix(s.b[s.pos:], []byte(w)) {
		return s.unexpected()
	}
	s.pos += len(w)
	return nil
}

// object reads an object and calls member after each name, which it must
// consume the value of. Names are unescaped and unique.
func (s *scanner) object(depth int, member func(name []byte) *pathError) *pathError {
	if depth >= maxDepth {
		return broken("is nested deeper than %d", maxDepth)
	}
	s.pos++
	open := len(s.names)
	defer func() { s.names = s.names[:open] }()
	var many map[string]struct{}
	if s.peek() == '}' {
		s.pos++
		return nil
	}
	for {
		if s.peek() != '"' {
			return s.unexpected()
		}
		token, err := s.text()
		if err != nil {
			return err
		}
		name, twice := unquote(token), false
		if many, twice = s.seen(open, many, name); twice {
			return broken("appears twice").within(string(name))
		}
		if s.peek() != ':' {
			return s.unexpected()
		}
		s.pos++
		if err := member(name); err != nil {
			return err.within(string(name))
		}
		switch s.peek() {
		case ',':
			s.pos++
		case '}':
			s.pos++
			return nil
		default:
			return s.unexpected()
		}
	}
}

// seen notes a name of the innermost open object. Few names are compared one by
// one, many through a map.
func (s *scanner) seen(open int, many map[string]struct{}, name []byte) (map[string]struct{}, bool) {
	const few = 16
	mine := s.names[open:]
	if many == nil && len(mine) < few {
		for _, n := range mine {
			if bytes.Equal(n, name) {
				return nil, true
			}
		}
		s.names = append(s.names, name)
		return nil, false
	}
	if many == nil {
		many = make(map[string]struct{}, 2*few)
		for _, n := range mine {
			many[string(n)] = struct{}{}
		}
	}
	_, twice := many[string(name)]
	many[string(name)] = struct{}{}
	return many, twice
}

func (s *scanner) array(depth int, item func(i int) *pathError) *pathError {
	if depth >= maxDepth {
		return broken("is nested deeper than %d", maxDepth)
	}
	s.pos++
	if s.peek() == ']' {
		s.pos++
		return nil
	}
	for i := 0; ; i++ {
		if err := item(i); err != nil {
			return err.within("[" + strconv.Itoa(i) + "]")
		}
		switch s.peek() {
		case ',':
			s.pos++
		case ']':
			s.pos++
			return nil
		default:
			return s.unexpected()
		}
	}
}

// text reads a string and returns its token with the quotes.
func (s *scanner) text() ([]byte, *pathError) {
	from := s.pos
	s.pos++
	for s.pos < len(s.b) {
		switch c := s.b[s.pos]; {
		case c == '"':
			s.pos++
			token := s.b[from:s.pos]
			if s.mixed && !utf8.Valid(token) {
				return nil, broken("is not valid UTF-8")
			}
			return token, nil
		case c == '\\':
			if err := s.escape(); err != nil {
				return nil, err
			}
		case c < 0x20:
			return nil, broken("has an unescaped control character")
		default:
			s.pos++
		}
	}
	return nil, s.unexpected()
}

func (s *scanner) escape() *pathError {
	if s.pos+1 >= len(s.b) {
		s.pos = len(s.b)
		return s.unexpected()
	}
	switch s.b[s.pos+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.pos += 2
		return nil
	case 'u':
	default:
		return s.unexpected()
	}
	r, ok := hex4(s.b[s.pos:])
	if !ok {
		return s.unexpected()
	}
	s.pos += 6
	switch {
	case r == 0:
		return broken("holds the character U+0000")
	case r >= 0xDC00 && r <= 0xDFFF:
		return broken("holds a lone surrogate")
	case r >= 0xD800 && r <= 0xDBFF:
		low, ok := hex4(s.b[s.pos:])
		if !ok || low < 0xDC00 || low > 0xDFFF {
			return broken("holds a lone surrogate")
		}
		s.pos += 6
	}
	return nil
}

// hex4 reads \uXXXX at the start of b.
func hex4(b []byte) (rune, bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(b[2:6]), 16, 16)
	return rune(n), err == nil
}

// number reads a number by the grammar of RFC 8259, section 6.
func (s *scanner) number() ([]byte, *pathError) {
	from := s.pos
	digits := func() bool {
		n := s.pos
		for s.pos < len(s.b) && s.b[s.pos] >= '0' && s.b[s.pos] <= '9' {
			s.pos++
		}
		return s.pos > n
	}
	at := func(set string) bool {
		return s.pos < len(s.b) && bytes.IndexByte([]byte(set), s.b[s.pos]) >= 0
	}
	if at("-") {
		s.pos++
	}
	if at("0") {
		s.pos++
	} else if !digits() {
		return nil, s.unexpected()
	}
	if at(".") {
		s.pos++
		if !digits() {
			return nil, s.unexpected()
		}
	}
	if at("eE") {
		s.pos++
		if at("+-") {
			s.pos++
		}
		if !digits() {
			return nil, s.unexpected()
		}
	}
	return s.b[from:s.pos], nil
}

// unquote returns what a checked string token says. Without escapes it is a
// slice of the token.
func unquote(token []byte) []byte {
	inner := token[1 : len(token)-1]
	if bytes.IndexByte(inner, '\\') < 0 {
		return inner
	}
	var s string
	if err := json.Unmarshal(token, &s); err != nil {
		panic("api: a checked token cannot be unquoted: " + err.Error())
	}
	return []byte(s)
}
