package demo

import (
	"errors"
	"testing"
)

func TestSessionIDsForget(t *testing.T) {
	t.Parallel()
	s := newSessionIDs(3)
	a, b, c := s.Generate(), s.Generate(), s.Generate()
	if _, err := s.Validate(a); err != nil {
		t.Fatalf("a live session: %v", err)
	}
	d := s.Generate() // b is the least recently used
	if _, err := s.Validate(b); !errors.Is(err, errUnknownSession) {
		t.Errorf("the least recently used session is live: %v", err)
	}
	for _, id := range []string{a, c, d} {
		if _, err := s.Validate(id); err != nil {
			t.Errorf("a recent session was forgotten: %v", err)
		}
	}
	for range 2 { // ending twice is no error
		if notAllowed, err := s.Terminate(a); notAllowed || err != nil {
			t.Errorf("terminate: %v, %v", notAllowed, err)
		}
	}
	if terminated, err := s.Validate(a); terminated || err == nil {
		t.Error("an ended session is remembered")
	}
	if s.len() != 2 || len(s.live) != 2 {
		t.Errorf("%d and %d sessions kept, want 2", s.len(), len(s.live))
	}
}
