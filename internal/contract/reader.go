package contract

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// maxViolations is the most violations that one answer names.
const maxViolations = 20

// reader walks a decoded document and collects what is wrong with it. Its
// methods return false after they noted a violation.
type reader struct{ fields []fault.Field }

func (r *reader) fail(path, format string, args ...any) {
	if len(r.fields) == maxViolations {
		return
	}
	if path == "" {
		path = "contract"
	}
	r.fields = append(r.fields, fault.Field{Path: path, Rule: fmt.Sprintf(format, args...)})
}

func (r *reader) failed() bool { return len(r.fields) > 0 }

func (r *reader) err() error { return fault.InvalidFields(r.fields...) }

// typeName names the JSON type of a decoded value.
func typeName(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case string:
		return "a string"
	case bool:
		return "a boolean"
	case []any:
		return "a list"
	case map[string]any:
		return "an object"
	}
	return "a number"
}

// object is one object with its place in the document.
type object struct {
	r       *reader
	path    string
	members map[string]any
}

func (r *reader) object(path string, v any, known ...string) (object, bool) {
	m, ok := v.(map[string]any)
	if !ok {
		r.fail(path, "must be an object, not %s", typeName(v))
		return object{}, false
	}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if !slices.Contains(known, name) {
			r.fail(canonical.Member(path, name), "is unknown here; known are %s", strings.Join(known, ", "))
		}
	}
	return object{r: r, path: path, members: m}, true
}

func (o object) at(name string) string { return canonical.At(o.path, name) }

// get returns a member that may be left out.
func (o object) get(name string) (v any, path string, ok bool) {
	v, ok = o.members[name]
	return v, o.at(name), ok
}

// need returns a member that must be there.
func (o object) need(name string) (v any, path string, ok bool) {
	if v, path, ok = o.get(name); !ok {
		o.r.fail(path, "is required")
	}
	return v, path, ok
}

func (r *reader) text(path string, v any, maxRunes int) (string, bool) {
	s, ok := v.(string)
	if !ok {
		r.fail(path, "must be a string, not %s", typeName(v))
		return "", false
	}
	if n := utf8.RuneCountInString(s); n == 0 || n > maxRunes {
		r.fail(path, "must have 1 to %d characters", maxRunes)
		return "", false
	}
	return s, true
}

// printable reads a text without control, format and line characters, and
// without space at its ends.
func (r *reader) printable(path string, v any, maxRunes int) (string, bool) {
	s, ok := r.text(path, v, maxRunes)
	if !ok {
		return "", false
	}
	odd := func(c rune) bool { return !unicode.IsPrint(c) }
	if strings.IndexFunc(s, odd) >= 0 || strings.TrimSpace(s) != s {
		r.fail(path, "must be printable, without space at its ends")
		return "", false
	}
	return s, true
}

func (r *reader) boolean(path string, v any) (bool, bool) {
	b, ok := v.(bool)
	if !ok {
		r.fail(path, "must be true or false, not %s", typeName(v))
	}
	return b, ok
}

func (r *reader) integer(path string, v any, low, high int) (int, bool) {
	switch n := v.(type) {
	case int64:
		if n >= int64(low) && n <= int64(high) {
			return int(n), true
		}
	case float64, canonical.Inexact:
	default:
		r.fail(path, "must be a whole number, not %s", typeName(v))
		return 0, false
	}
	r.fail(path, "must be a whole number from %d to %d", low, high)
	return 0, false
}

func (r *reader) list(path string, v any, low, high int) ([]any, bool) {
	l, ok := v.([]any)
	if !ok {
		r.fail(path, "must be a list, not %s", typeName(v))
		return nil, false
	}
	if len(l) < low || len(l) > high {
		r.fail(path, "must have %d to %d entries", low, high)
		return nil, false
	}
	return l, true
}

func element(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

// texts reads a list of unique strings, each by read.
func (r *reader) texts(path string, v any, low, high int, read func(path string, v any) (string, bool)) []string {
	l, ok := r.list(path, v, low, high)
	if !ok {
		return nil
	}
	out := make([]string, 0, len(l))
	for i, v := range l {
		s, ok := read(element(path, i), v)
		if !ok {
			continue
		}
		if slices.Contains(out, s) {
			r.fail(element(path, i), "stands in the list twice")
			continue
		}
		out = append(out, s)
	}
	return out
}

// word reads one of a few words; it is returned in upper case.
func (r *reader) word(path string, v any, words ...string) (string, bool) {
	s, ok := v.(string)
	if !ok {
		r.fail(path, "must be a string, not %s", typeName(v))
		return "", false
	}
	if !slices.Contains(words, s) {
		r.fail(path, "must be one of %s", strings.Join(words, ", "))
		return "", false
	}
	return strings.ToUpper(s), true
}

// duration reads a whole number with a unit, or several, such as 90s or 1h30m.
func (r *reader) duration(path string, v any, low, high time.Duration) (time.Duration, bool) {
	s, ok := v.(string)
	if !ok {
		r.fail(path, "must be a duration such as \"30s\", not %s", typeName(v))
		return 0, false
	}
	d, err := time.ParseDuration(s)
	if err != nil || len(s) > 20 || strings.ContainsAny(s, "+-.nuµμ") || s == "0" {
		r.fail(path, "must be a duration such as \"30s\", \"5m\" or \"1h30m\" in h, m, s and ms")
		return 0, false
	}
	if d < low || d > high {
		r.fail(path, "must be from %s to %s", short(low), short(high))
		return 0, false
	}
	return d, true
}

// short writes a duration without zero parts: 1h, not 1h0m0s.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}
