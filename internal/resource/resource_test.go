package resource

import (
	"strings"
	"testing"
	"time"
)

func TestNewID_SortsByTimeAndIsUnique(t *testing.T) {
	at := time.UnixMilli(1_790_000_000_000)
	prev := ""
	seen := map[string]bool{}
	for i := range 1000 {
		id := newIDAt(Call, at.Add(time.Duration(i)*time.Millisecond))
		if id <= prev {
			t.Fatalf("%q does not sort after %q", id, prev)
		}
		if seen[id] || !IsID(Call, id) || strings.Contains(id, ":") {
			t.Fatalf("bad id %q", id)
		}
		seen[id], prev = true, id
	}
}

func TestIsID_RefusesOtherKindsAndShapes(t *testing.T) {
	id := NewID(Session)
	for _, s := range []string{"", "ses_", id[:len(id)-1], id + "0", "call" + id[3:], strings.ToUpper(id), "ses_" + strings.Repeat("u", 26)} {
		if IsID(Session, s) {
			t.Errorf("IsID(%q) = true", s)
		}
	}
}

func TestIsServerName(t *testing.T) {
	for s, want := range map[string]bool{
		"calendar": true, "a-1": true, "": false, "1a": false, "A": false, "a_b": false, "a:b": false,
		strings.Repeat("a", 63): true, strings.Repeat("a", 64): false, "a\n": false,
	} {
		if IsServerName(s) != want {
			t.Errorf("IsServerName(%q) != %v", s, want)
		}
	}
}
