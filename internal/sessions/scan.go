package sessions

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"strings"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
)

// maxDepth bounds the nesting of a message from a server.
const maxDepth = 256

var (
	errJSON  = errors.New("not valid JSON")
	errDepth = errors.New("JSON is nested too deeply")
	errUTF8  = errors.New("JSON is not valid UTF-8")
)

// scanner walks over JSON once, checks it, and lets the caller lift the raw bytes
// of the members it names. It decodes nothing and allocates nothing.
type scanner struct {
	data []byte
	pos  int
}

func (s *scanner) space() {
	for s.pos < len(s.data) {
		switch s.data[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}

// peek returns the next byte that is no white space, or 0 at the end.
func (s *scanner) peek() byte {
	s.space()
	if s.pos < len(s.data) {
		return s.data[s.pos]
	}
	return 0
}

func (s *scanner) end() error {
	if s.peek(); s.pos != len(s.data) {
		return errJSON
	}
	return nil
}

// raw skips one value and returns its bytes, a part of the input.
func (s *scanner) raw(depth int) ([]byte, error) {
	s.space()
	start := s.pos
	if err := s.value(depth); err != nil {
		return nil, err
	}
	return s.data[start:s.pos:s.pos], nil
}

func (s *scanner) value(depth int) error {
	switch c := s.peek(); {
	case c == '{':
		return s.object(depth, nil)
	case c == '[':
		return s.array(depth, nil)
	case c == '"':
		_, err := s.str()
		return err
	case c == '-' || c >= '0' && c <= '9':
		return s.number()
	case c == 't':
		return s.word("true")
	case c == 'f':
		return s.word("false")
	case c == 'n':
		return s.word("null")
	}
	return errJSON
}

func (s *scanner) word(w string) error {
	if !bytes.HasPrefix(s.data[s.pos:], []byte(w)) {
		return errJSON
	}
	s.pos += len(w)
	return nil
}

func (s *scanner) digits() bool {
	start := s.pos
	for s.pos < len(s.data) && s.data[s.pos] >= '0' && s.data[s.pos] <= '9' {
		s.pos++
	}
	return s.pos > start
}

func (s *scanner) at(chars string) bool {
	return s.pos < len(s.data) && bytes.IndexByte([]byte(chars), s.data[s.pos]) >= 0
}

func (s *scanner) number() error {
	if s.at("-") {
		s.pos++
	}
	if s.at("0") {
		s.pos++
	} else if !s.digits() {
		return errJSON
	}
	if s.at(".") {
		s.pos++
		if !s.digits() {
			return errJSON
		}
	}
	if s.at("eE") {
		s.pos++
		if s.at("+-") {
			s.pos++
		}
		if !s.digits() {
			return errJSON
		}
	}
	return nil
}

// str skips a string and returns what is between its quotes, still escaped.
func (s *scanner) str() ([]byte, error) {
	s.pos++
	start, ascii := s.pos, true
	for i := s.pos; i < len(s.data); i++ {
		for i+8 <= len(s.data) && plain(binary.LittleEndian.Uint64(s.data[i:])) {
			i += 8
		}
		if i == len(s.data) {
			break
		}
		switch c := s.data[i]; {
		case c == '"':
			s.pos = i + 1
			if !ascii && !utf8.Valid(s.data[start:i]) {
				return nil, errUTF8
			}
			return s.data[start:i], nil
		case c == '\\':
			n := escapeLength(s.data[i:])
			if n == 0 {
				return nil, errJSON
			}
			i += n - 1
		case c < 0x20:
			return nil, errJSON
		case c >= 0x80:
			ascii = false
		}
	}
	return nil, errJSON
}

// plain reports whether none of eight bytes of a string needs a closer look: no
// quote, no backslash, no control character, nothing outside ASCII.
func plain(x uint64) bool {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	quote, slash := x^ones*'"', x^ones*'\\'
	return (x|(x-ones*0x20)|(quote-ones)&^quote|(slash-ones)&^slash)&tops == 0
}

// escapeLength returns the length of the escape at the start of b, or 0.
func escapeLength(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if len(b) < 6 {
			return 0
		}
		for _, c := range b[2:6] {
			if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F') {
				return 0
			}
		}
		return 6
	}
	return 0
}

// object walks over an object. For each member it calls each with the name and
// the scanner before the value; each must consume the value. A nil each skips.
func (s *scanner) object(depth int, each func(name []byte) error) error {
	if depth >= maxDepth {
		return errDepth
	}
	if s.peek() != '{' {
		return errJSON
	}
	s.pos++
	if s.peek() == '}' {
		s.pos++
		return nil
	}
	for {
		if s.peek() != '"' {
			return errJSON
		}
		name, err := s.str()
		if err != nil {
			return err
		}
		if s.peek() != ':' {
			return errJSON
		}
		s.pos++
		if each == nil {
			err = s.value(depth + 1)
		} else {
			err = each(unescape(name))
		}
		if err != nil {
			return err
		}
		switch s.peek() {
		case ',':
			s.pos++
		case '}':
			s.pos++
			return nil
		default:
			return errJSON
		}
	}
}

// array walks over an array, like object.
func (s *scanner) array(depth int, each func() error) error {
	if depth >= maxDepth {
		return errDepth
	}
	if s.peek() != '[' {
		return errJSON
	}
	s.pos++
	if s.peek() == ']' {
		s.pos++
		return nil
	}
	for {
		var err error
		if each == nil {
			err = s.value(depth + 1)
		} else {
			err = each()
		}
		if err != nil {
			return err
		}
		switch s.peek() {
		case ',':
			s.pos++
		case ']':
			s.pos++
			return nil
		default:
			return errJSON
		}
	}
}

// unescape resolves escapes in a member's name, so that a spelling like
// "\u0069d" is the same member here as for every other reader.
func unescape(name []byte) []byte {
	if bytes.IndexByte(name, '\\') < 0 {
		return name
	}
	var out string
	if json.Unmarshal(append(append([]byte{'"'}, name...), '"'), &out) != nil {
		return name
	}
	return []byte(out)
}

// text decodes a raw JSON string; ok is false for any other value.
func text(raw []byte) (string, bool) {
	if len(raw) < 2 || raw[0] != '"' {
		return "", false
	}
	inner := raw[1 : len(raw)-1]
	if bytes.IndexByte(inner, '\\') < 0 {
		return string(inner), true
	}
	var out string
	err := json.Unmarshal(raw, &out)
	return out, err == nil
}

// shorten cuts s to at most n bytes at a character's end.
func shorten(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// member returns the raw value of one member of an object, or nil when raw is no
// object or has no such member. A member that comes twice counts as absent.
// What another reading of it could do harm with is taken by lift.
func member(raw []byte, want string) (found []byte) {
	s := scanner{data: raw}
	twice := false
	err := s.object(0, func(name []byte) error {
		v, err := s.raw(1)
		if err == nil && string(name) == want {
			found, twice = v, twice || found != nil
		}
		return err
	})
	if err != nil || twice {
		return nil
	}
	return found
}

// lift returns the raw values of some members of an object, and the name of one
// that came twice: whoever acts on such an object must refuse it, because another
// reader could see another value.
func lift(raw []byte, want ...string) (found map[string][]byte, twice string) {
	found = make(map[string][]byte, len(want))
	s := scanner{data: raw}
	err := s.object(0, func(name []byte) error {
		v, err := s.raw(1)
		if err != nil {
			return err
		}
		for _, w := range want {
			if string(name) != w {
				continue
			}
			if found[w] != nil {
				twice = w
			}
			found[w] = v
		}
		return nil
	})
	if err != nil {
		return nil, ""
	}
	return found, twice
}

// unambiguous reports whether no object in a value, however deep, has a member
// twice.
func unambiguous(raw []byte) bool {
	s := scanner{data: raw}
	var walk func(depth int) error
	walk = func(depth int) error {
		switch s.peek() {
		case '{':
			seen := map[string]bool{}
			return s.object(depth, func(name []byte) error {
				if seen[string(name)] {
					return errEnvelope
				}
				seen[string(name)] = true
				return walk(depth + 1)
			})
		case '[':
			return s.array(depth, func() error { return walk(depth + 1) })
		}
		return s.value(depth)
	}
	return walk(0) == nil
}

// without returns an object less the members with a name in any case, written anew.
func without(raw []byte, unwanted string) []byte {
	out := append(make([]byte, 0, len(raw)), '{')
	s := scanner{data: raw}
	err := s.object(0, func(name []byte) error {
		v, err := s.raw(1)
		if err != nil || bytes.EqualFold(name, []byte(unwanted)) {
			return err
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(canonical.AppendString(out, string(name)), ':'), v...)
		return nil
	})
	if err != nil {
		return nil
	}
	return append(out, '}')
}

// storable reports whether a text of a server is what it sent, to the byte, and can
// be kept as one: a replaced character and U+0000 speak against it.
func storable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsAny(s, "\x00\uFFFD")
}
