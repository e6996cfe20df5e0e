package demo

import (
	"container/list"
	"crypto/rand"
	"errors"
	"sync"
)

// errUnknownSession makes the transport answer 404, which tells a legacy client
// to initialize again.
var errUnknownSession = errors.New("unknown session")

// sessionIDs issues and remembers the ids of live legacy sessions. The
// library's own stateful manager keeps every ended id for ever; this one
// forgets an ended session at once and the least recently used one at its
// bound. It implements server.SessionIdManager.
type sessionIDs struct {
	max int

	mu   sync.Mutex
	live map[string]*list.Element
	used *list.List // of string, most recently used in front
}

func newSessionIDs(limit int) *sessionIDs {
	return &sessionIDs{max: limit, live: map[string]*list.Element{}, used: list.New()}
}

// Generate issues an id with at least 128 bits of randomness.
func (s *sessionIDs) Generate() string {
	id := "cal-" + rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.used.Len() >= s.max {
		delete(s.live, s.used.Remove(s.used.Back()).(string))
	}
	s.live[id] = s.used.PushFront(id)
	return id
}

// Validate reports an error for an id that is not live.
func (s *sessionIDs) Validate(id string) (terminated bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.live[id]
	if !ok {
		return false, errUnknownSession
	}
	s.used.MoveToFront(e)
	return false, nil
}

// Terminate forgets the id. An unknown id is no error.
func (s *sessionIDs) Terminate(id string) (notAllowed bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := s.live[id]; ok {
		s.used.Remove(e)
		delete(s.live, id)
	}
	return false, nil
}

// len returns how many sessions are live.
func (s *sessionIDs) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used.Len()
}
