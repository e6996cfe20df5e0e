package contract

import "testing"

// A template is shown when it may make a URI that a pattern covers, and never where
// the fixed text of the two disagrees.
func TestOverlaps(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		pattern, template string
		want              bool
	}{
		{"a://b/**", "a://b/{id}", true},
		{"a://b/**", "a://b/c/{id}", true},
		{"a://b/c/*", "a://b/{id}", true},
		{"a://b/c/*", "a://b/d/{id}", false},
		{"a://b/c", "a://b/{id}", true},
		{"a://b/c", "a://b/c/{id}", false},
		{"a://b/c", "a://{host}/c", true},
		{"a://b/*", "x://b/{id}", false},
		{"a://b/*", "a://b/fixed", true},
		{"a://b/*", "a://b/fixed/deep", false},
		{"a://b/*", "{+uri}", true},
		{"a://b/*", "", false},
	} {
		r, rule := newResource(tt.pattern)
		if rule != "" {
			t.Fatal(rule)
		}
		if got := r.Overlaps(tt.template); got != tt.want {
			t.Errorf("%s, %s: %v", tt.pattern, tt.template, got)
		}
	}
}
