package canonical

import (
	"bytes"
	"iter"
	"strconv"
	"unicode/utf8"
)

// errNotCanonical is what reading back says of bytes that Args or Doc did not
// write.
func errNotCanonical() *Error { return &Error{Rule: "is not canonical JSON"} }

// skip returns how many bytes of b its first value takes, or 0 when b does not
// begin with one. It trusts b to be canonical as far as memory safety allows.
func skip(b []byte) int {
	if len(b) == 0 {
		return 0
	}
	switch b[0] {
	case '"':
		return skipString(b)
	case '{', '[':
		depth := 0
		for i := 0; i < len(b); i++ {
			switch b[i] {
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			case '"':
				n := skipString(b[i:])
				if n == 0 {
					return 0
				}
				i += n - 1
			}
		}
		return 0
	}
	for i, c := range b {
		if c == ',' || c == '}' || c == ']' || c == ':' {
			return i
		}
	}
	return len(b)
}

func skipString(b []byte) int {
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '"':
			return i + 1
		case '\\':
			i++
		}
	}
	return 0
}

// written is one member of a canonical object: "name":value, with the place of
// the colon.
type written struct {
	text  []byte
	colon int
}

func (m written) name() string  { return unescape(m.text[1 : m.colon-1]) }
func (m written) value() []byte { return m.text[m.colon+1:] }

// members walks the members of a canonical object and ends early at anything
// that is none.
func members(b []byte) iter.Seq[written] {
	return func(yield func(written) bool) {
		for i := 1; i < len(b) && b[i] == '"'; i++ {
			colon := skipString(b[i:])
			if colon == 0 || i+colon >= len(b) || b[i+colon] != ':' {
				return
			}
			n := skip(b[i+colon+1:])
			if n == 0 {
				return
			}
			end := i + colon + 1 + n
			if !yield(written{text: b[i:end], colon: colon}) {
				return
			}
			i = end
		}
	}
}

// elements walks the elements of a canonical array.
func elements(b []byte) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		at := 1
		for i := 0; at < len(b) && b[at] != ']'; i++ {
			n := skip(b[at:])
			if n == 0 || !yield(i, b[at:at+n]) {
				return
			}
			at += n + 1
		}
	}
}

func unescapeByte(c byte) byte {
	switch c {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c
}

// unescape returns the text of a canonical string's inside.
func unescape(b []byte) string {
	at := bytes.IndexByte(b, '\\')
	if at < 0 {
		return string(b)
	}
	out := append(make([]byte, 0, len(b)), b[:at]...)
	for i := at; i < len(b); i++ {
		if b[i] != '\\' || i+1 == len(b) {
			out = append(out, b[i])
			continue
		}
		if r, ok := hex4(b[i:]); ok {
			out = utf8.AppendRune(out, r)
			i += 5
			continue
		}
		i++
		out = append(out, unescapeByte(b[i]))
	}
	return string(out)
}

// Decode returns the Go value of canonical bytes: map[string]any, []any,
// string, bool, nil, and for numbers what Number returns. It is for bytes that
// Args or Doc returned; others give an *Error or a value of no meaning.
func Decode(canon []byte) (any, error) {
	v, n := decode(canon, 0)
	if n == 0 || n != len(canon) {
		return nil, errNotCanonical()
	}
	return v, nil
}

// decode returns the first value of b and its length, which is 0 when there is
// none.
func decode(b []byte, depth int) (any, int) {
	if len(b) == 0 || depth > MaxDepth {
		return nil, 0
	}
	switch b[0] {
	case '{':
		return decodeObject(b, depth+1)
	case '[':
		return decodeArray(b, depth+1)
	case '"':
		n := skipString(b)
		if n == 0 {
			return nil, 0
		}
		return unescape(b[1 : n-1]), n
	}
	n := skip(b)
	switch string(b[:n]) {
	case "true":
		return true, n
	case "false":
		return false, n
	case "null":
		return nil, n
	}
	v, ok := Number(b[:n])
	if !ok {
		return nil, 0
	}
	return v, n
}

func decodeObject(b []byte, depth int) (any, int) {
	m := map[string]any{}
	if len(b) > 1 && b[1] == '}' {
		return m, 2
	}
	for i := 1; i < len(b) && b[i] == '"'; i++ {
		colon := i + skipString(b[i:])
		if colon == i || colon >= len(b) || b[colon] != ':' {
			return nil, 0
		}
		v, n := decode(b[colon+1:], depth)
		end := colon + 1 + n
		if n == 0 || end >= len(b) {
			return nil, 0
		}
		m[unescape(b[i+1:colon-1])] = v
		if b[end] == '}' {
			return m, end + 1
		}
		if b[end] != ',' {
			return nil, 0
		}
		i = end
	}
	return nil, 0
}

func decodeArray(b []byte, depth int) (any, int) {
	list := []any{}
	if len(b) > 1 && b[1] == ']' {
		return list, 2
	}
	for i := 1; i < len(b); i++ {
		v, n := decode(b[i:], depth)
		if i += n; n == 0 || i >= len(b) {
			return nil, 0
		}
		list = append(list, v)
		if b[i] == ']' {
			return list, i + 1
		}
		if b[i] != ',' {
			return nil, 0
		}
	}
	return nil, 0
}

// Diff returns the paths at which two canonical values of one profile differ,
// in the order of the canonical form and at most MaxDiff of them. A member or
// element that only one of them has is named itself. The path of the whole
// value is empty; At puts a prefix to it. Equal values give nil.
func Diff(a, b []byte) []string {
	var paths []string
	diff(a, b, "", 0, &paths)
	return paths
}

func diff(a, b []byte, path string, depth int, paths *[]string) {
	if len(*paths) == MaxDiff || bytes.Equal(a, b) {
		return
	}
	if len(a) > 0 && len(b) > 0 && a[0] == b[0] && depth < MaxDepth {
		switch a[0] {
		case '{':
			diffObjects(a, b, path, depth+1, paths)
			return
		case '[':
			diffArrays(a, b, path, depth+1, paths)
			return
		}
	}
	*paths = append(*paths, path)
}

func diffObjects(a, b []byte, path string, depth int, paths *[]string) {
	nextA, stopA := iter.Pull(members(a))
	defer stopA()
	nextB, stopB := iter.Pull(members(b))
	defer stopB()
	ma, okA := nextA()
	mb, okB := nextB()
	for (okA || okB) && len(*paths) < MaxDiff {
		order := 0
		switch {
		case !okA:
			order = 1
		case !okB:
			order = -1
		default:
			order = compareUTF16([]byte(ma.name()), []byte(mb.name()))
		}
		switch {
		case order < 0:
			*paths = append(*paths, At(path, memberStep(ma.name())))
			ma, okA = nextA()
		case order > 0:
			*paths = append(*paths, At(path, memberStep(mb.name())))
			mb, okB = nextB()
		default:
			diff(ma.value(), mb.value(), At(path, memberStep(ma.name())), depth, paths)
			ma, okA = nextA()
			mb, okB = nextB()
		}
	}
}

func diffArrays(a, b []byte, path string, depth int, paths *[]string) {
	nextA, stopA := iter.Pull2(elements(a))
	defer stopA()
	nextB, stopB := iter.Pull2(elements(b))
	defer stopB()
	for i := 0; len(*paths) < MaxDiff; i++ {
		_, va, okA := nextA()
		_, vb, okB := nextB()
		step := At(path, "["+strconv.Itoa(i)+"]")
		switch {
		case !okA && !okB:
			return
		case okA && okB:
			diff(va, vb, step, depth, paths)
		default:
			*paths = append(*paths, step)
		}
	}
}
