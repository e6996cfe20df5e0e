package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"strings"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const defaultPageSize = 50

// pageBinding is the length of the digest by which a page token is bound to the
// list and filter that it came from.
const pageBinding = 9

// pageRequest is what every paged request message has.
type pageRequest interface {
	GetPageSize() int32
	GetPageToken() string
}

// page is where a list goes on and how many items it answers.
type page struct {
	after string
	limit int
	bound []byte
}

// readPage reads the page that a request asks for. filter is everything else
// that the request selects by; a token of another list or filter is refused.
func readPage(in pageRequest, filter ...string) (page, error) {
	sum := sha256.Sum256([]byte(strings.Join(filter, "\x00")))
	p := page{limit: int(in.GetPageSize()), bound: sum[:pageBinding]}
	if p.limit == 0 {
		p.limit = defaultPageSize
	}
	if in.GetPageToken() == "" {
		return p, nil
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(in.GetPageToken())
	if err != nil || len(raw) <= pageBinding || subtle.ConstantTimeCompare(raw[:pageBinding], p.bound) != 1 {
		return page{}, fault.Field1("pageToken", "must be the nextPageToken of an answer to the same request")
	}
	p.after = string(raw[pageBinding:])
	return p, nil
}

// token returns the token of the page after the item with this key.
func (p page) token(after string) string {
	return base64.RawURLEncoding.EncodeToString(append(p.bound[:len(p.bound):len(p.bound)], after...))
}

// cut takes the one item too many off a list that was read with limit+1, and
// returns the token of the next page, "" after the last.
func cut[T any](p page, items []T, key func(T) string) ([]T, string) {
	if len(items) <= p.limit {
		return items, ""
	}
	items = items[:p.limit]
	return items, p.token(key(items[p.limit-1]))
}
