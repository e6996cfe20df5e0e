package telemetry

import (
	"context"
	"log/slog"
	"strings"
	"testing"
)

func TestTrace_IsReadAsTheStandardSays(t *testing.T) {
	t.Parallel()
	const id, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	good := "00-" + id + "-" + span + "-01"
	for _, c := range []struct {
		name    string
		parents []string
		want    string
	}{
		{"plain", []string{good}, good},
		{"not sampled", []string{"00-" + id + "-" + span + "-00"}, "00-" + id + "-" + span + "-00"},
		{"unknown flags", []string{"00-" + id + "-" + span + "-ff"}, good},
		{"a later version", []string{"cc-" + id + "-" + span + "-01-what-comes-then"}, good},
		{"a later version, no more", []string{"cc-" + id + "-" + span + "-01"}, good},
		{"none", nil, ""},
		{"two", []string{good, good}, ""},
		{"longer", []string{good + "-x"}, ""},
		{"later, run on", []string{"cc-" + id + "-" + span + "-01x"}, ""},
		{"version ff", []string{"ff-" + id + "-" + span + "-01"}, ""},
		{"upper case", []string{strings.ToUpper(good)}, ""},
		{"zero trace", []string{"00-" + strings.Repeat("0", 32) + "-" + span + "-01"}, ""},
		{"zero span", []string{"00-" + id + "-" + strings.Repeat("0", 16) + "-01"}, ""},
		{"short", []string{good[:54]}, ""},
		{"no hex", []string{strings.Replace(good, "4b", "4g", 1)}, ""},
		{"injection", []string{good[:50] + "\r\nX: 1-01"}, ""},
		{"empty", []string{""}, ""},
		{"endless", []string{"cc-" + id + "-" + span + "-01-" + strings.Repeat("x", 300)}, ""},
	} {
		got := ReadTrace(c.parents, nil)
		if got.Parent() != c.want || c.want != "" && got.ID() != id || c.want == "" && got.ID() != "" {
			t.Errorf("%s: %q, id %q", c.name, got.Parent(), got.ID())
		}
		child := got.Child()
		if c.want == "" {
			if child != (Trace{}) {
				t.Errorf("%s: a child of nothing: %+v", c.name, child)
			}
			continue
		}
		if child.ID() != id || child.Parent() == got.Parent() || child.Child().Parent() == child.Parent() ||
			TraceOf(child.Parent(), child.State()) != child || child.Parent()[53:] != got.Parent()[53:] {
			t.Errorf("%s: the child is %+v", c.name, child)
		}
	}
	for state, want := range map[string]bool{
		"congo=t61rcWkgMzE": true, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE": true, "a@b=1, c=2": true,
		"": false, "novalue": false, "a=": false, "A=1": false, "a=1,a=2": false, "a=b=c": false, "a=\x01": false, ",": false,
		"a=" + strings.Repeat("x", 600): false, strings.Repeat("a=1,", 40): false,
	} {
		if got := ReadTrace([]string{good}, []string{state}); (got.State() != "") != want || got.Parent() == "" {
			t.Errorf("tracestate %q: %+v", state, got)
		}
	}
	if got := ReadTrace([]string{good}, []string{"a=1", "b=2"}); got.State() != "a=1,b=2" {
		t.Errorf("two lines: %q", got.State())
	}
}

func TestTrace_IsInTheLogLines(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	NewLogger(&b, slog.LevelInfo).InfoContext(With(context.Background(), Scope{Trace: "abc"}), "x")
	if !strings.Contains(b.String(), `"trace":"abc"`) {
		t.Error(b.String())
	}
}
