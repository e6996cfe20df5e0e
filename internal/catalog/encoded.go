package catalog

import "github.com/bulkhead-mcp/bulkhead/internal/tenant"

// answerKey names an encoded answer. Everything that changes its bytes is here:
// the revision, how stale or noisy it is, and the allowed set.
type answerKey struct {
	tenant   tenant.ID
	revision string
	remarks  string
	allowed  string
}

// Encoded returns the encoded answer for a revision and one distinct allowed
// set, which allowedKey names together with the format. It calls build once and
// keeps the bytes while there is room; callers must not change them.
func (s *Service) Encoded(r *Revision, allowedKey string, build func() []byte) []byte {
	k := answerKey{tenant: r.Tenant, revision: r.ID, allowed: allowedKey}
	for _, f := range r.Findings {
		k.remarks = string(appendText(appendText([]byte(k.remarks), f.Code), f.Detail))
	}
	if b, ok := s.answers.get(k); ok {
		return b
	}
	b := build()
	s.answers.put(k, b, int64(len(b)+len(allowedKey)+len(k.remarks)+256))
	return b
}
