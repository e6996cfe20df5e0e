package telemetry

import (
	"strings"
	"sync"
)

// The bounds of the labels. With them the largest metric, the histogram of
// calls, has 2,000 pairs of 18 series, of which one tenant decides at most 50.
const (
	maxTenants = 1000
	maxPairs   = 2000
	maxServers = 50 // of a tenant
	maxMethods = 256
	maxWords   = 256
	maxLabel   = 64 // bytes of one value
	// other stands for every value beyond a bound.
	other = "other"
)

type pair struct{ tenant, server string }

// bounds admits the first values of each label and calls the rest other. A
// decision stands for the life of the process, but for that about a server: it
// ends when the server is forgotten, and makes room for another.
type bounds struct {
	tenants, methods, words *set[string]
	pairs                   *pairs
}

func newBounds() *bounds {
	return &bounds{
		tenants: newSet[string](maxTenants), methods: newSet[string](maxMethods),
		words: newSet[string](maxWords), pairs: &pairs{members: map[pair]struct{}{}, of: map[string]int{}},
	}
}

func (b *bounds) tenant(t string) string {
	return orOther(b.tenants, label(t))
}

func (b *bounds) method(m string) string { return orOther(b.methods, label(m)) }
func (b *bounds) word(w string) string   { return orOther(b.words, label(w)) }

func (b *bounds) pair(tenant, server string) (string, string) {
	p := pair{b.tenant(tenant), label(server)}
	if p.tenant == other || !b.pairs.admits(p) {
		return p.tenant, other
	}
	return p.tenant, p.server
}

// forget makes room for another server of the tenant. It reports whether the
// pair was admitted.
func (b *bounds) forget(tenant, server string) (pair, bool) {
	p := pair{label(tenant), label(server)}
	return p, b.pairs.remove(p)
}

func orOther(s *set[string], v string) string {
	if s.admits(v) {
		return v
	}
	return other
}

// label makes a text fit for a label: Prometheus panics over invalid UTF-8.
func label(s string) string {
	if len(s) > maxLabel {
		s = s[:maxLabel]
	}
	return strings.ToValidUTF8(s, "")
}

// set is a set that takes no more than most members.
type set[K comparable] struct {
	most int

	mu      sync.RWMutex
	members map[K]struct{}
}

func newSet[K comparable](most int) *set[K] {
	return &set[K]{most: most, members: map[K]struct{}{}}
}

// admits reports whether k is a member, making it one while there is room.
func (s *set[K]) admits(k K) bool {
	s.mu.RLock()
	_, ok := s.members[k]
	full := len(s.members) >= s.most
	s.mu.RUnlock()
	if ok || full {
		return ok
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.members[k]; !ok && len(s.members) >= s.most {
		return false
	}
	s.members[k] = struct{}{}
	return true
}

// pairs are the servers that have labels of their own: at most maxPairs, and at
// most maxServers of each tenant.
type pairs struct {
	mu      sync.RWMutex
	members map[pair]struct{}
	of      map[string]int // members by tenant; none is zero
}

// admits reports whether p is a member, making it one while there is room.
func (s *pairs) admits(p pair) bool {
	s.mu.RLock()
	_, ok := s.members[p]
	full := len(s.members) >= maxPairs || s.of[p.tenant] >= maxServers
	s.mu.RUnlock()
	if ok || full {
		return ok
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.members[p]; ok {
		return true
	}
	if len(s.members) >= maxPairs || s.of[p.tenant] >= maxServers {
		return false
	}
	s.members[p] = struct{}{}
	s.of[p.tenant]++
	return true
}

// remove reports whether p was a member.
func (s *pairs) remove(p pair) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.members[p]; !ok {
		return false
	}
	delete(s.members, p)
	if s.of[p.tenant]--; s.of[p.tenant] == 0 {
		delete(s.of, p.tenant)
	}
	return true
}
