package catalog

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Revision is an immutable list of definitions together with how one
// authorization context saw it. It is safe for concurrent use.
type Revision struct {
	// ID is cat_ and a digest of the content: contexts that see the same list
	// have the same revision.
	ID       string
	Tenant   tenant.ID
	ServerID string
	Kind     Kind
	// Context is the stored name of the authorization context whose list this is;
	// calls keep it so that the dispatch transaction can look again.
	Context string
	// Observed is when the list was begun, by the clock of the database.
	Observed time.Time
	// Stale says that the list could not be renewed; StaleReason why, for people.
	Stale       bool
	StaleReason string
	// Pending says of a stale list that nothing failed: it was not ready in time.
	Pending bool
	// ProtocolVersion and Era are those of the connection.
	ProtocolVersion, Era string
	// Capabilities is what the server declared: untrusted JSON, maybe empty.
	Capabilities json.RawMessage
	// Findings are remarks about the list as a whole.
	Findings []Finding
	// Definitions are all of them in the server's order, quarantined ones too.
	Definitions []Definition

	byName  map[string]int
	byModel map[string]int
}

// Finding codes about a list as a whole.
const (
	FindingStale      = "CATALOG_STALE"
	FindingNoisy      = "CATALOG_NOISY"
	FindingIncomplete = "CATALOG_INCOMPLETE"
)

// Find returns the definition with this name. It is false for a name that is
// not offered and for one in quarantine.
func (r *Revision) Find(name string) (*Definition, bool) { return r.find(r.byName, name) }

// FindModel returns the definition with this model name, in the same way.
func (r *Revision) FindModel(modelName string) (*Definition, bool) {
	return r.find(r.byModel, modelName)
}

func (r *Revision) find(index map[string]int, name string) (*Definition, bool) {
	i, ok := index[name]
	if !ok {
		return nil, false
	}
	return &r.Definitions[i], true
}

// content is what the id of a revision covers, with the raw definitions. It is
// shared by all Revisions that show it.
type content struct {
	id                   string
	serverID             string
	kind                 Kind
	protocolVersion, era string
	capabilities         []byte
	findings             []Finding
	definitions          []Definition
	byName, byModel      map[string]int
	encoded              []byte
	stored               bool // PostgreSQL has these very bytes
}

// seal computes the id once everything else is set.
func (c *content) seal() {
	h := sha256.Sum256(c.append(nil, false))
	c.id = revisionPrefix + hex.EncodeToString(h[:])
}

const revisionPrefix = "cat_"

// index prepares the look-ups and what is derived from the raw definitions.
// Checkers come from the given source, so that an unchanged definition keeps
// its compiled schema.
func (c *content) index(server string, checkers func(digest, part string, raw []byte) *checker) {
	c.byName = make(map[string]int, len(c.definitions))
	c.byModel = make(map[string]int, len(c.definitions))
	for i := range c.definitions {
		d := &c.definitions[i]
		d.fill(server)
		if !d.Callable() {
			continue
		}
		c.byName[d.Name] = i
		c.byModel[d.ModelName] = i
		d.input = checkers(d.Digest, "input", d.InputSchema)
		if len(d.OutputSchema) > 0 && d.OutputSchema[0] == '{' {
			d.output = checkers(d.Digest, "output", d.OutputSchema)
		}
	}
}

// The encoding of a revision: every text and number is length-prefixed, so that
// no two contents have the same bytes. The raw definitions are outside of what
// the id covers, because definition digests stand for them.
const encodingMark = "bulkhead catalog 1"

func (c *content) append(b []byte, raw bool) []byte {
	b = appendText(b, encodingMark)
	for _, s := range []string{c.serverID, c.kind, c.protocolVersion, c.era, string(c.capabilities)} {
		b = appendText(b, s)
	}
	b = appendFindings(b, c.findings)
	b = binary.AppendUvarint(b, uint64(len(c.definitions)))
	for i := range c.definitions {
		d := &c.definitions[i]
		b = appendText(b, d.Name)
		b = appendText(b, d.Digest)
		b = appendText(b, d.Quarantine)
		b = appendFindings(b, d.Findings)
		if raw {
			b = binary.AppendUvarint(b, uint64(len(d.Raw)))
			b = append(b, d.Raw...)
		}
	}
	return b
}

func appendText(b []byte, s string) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

func appendFindings(b []byte, fs []Finding) []byte {
	b = binary.AppendUvarint(b, uint64(len(fs)))
	for _, f := range fs {
		b = appendText(b, f.Code)
		b = appendText(b, f.Detail)
	}
	return b
}

var errEncoding = errors.New("catalog: not an encoded revision")

// decodeContent reads what append wrote with the raw definitions. Its result
// keeps slices of b.
func decodeContent(b []byte) (*content, error) {
	r := reader{rest: b}
	if r.text() != encodingMark {
		return nil, errEncoding
	}
	c := &content{serverID: r.text(), kind: r.text(), protocolVersion: r.text(), era: r.text()}
	c.capabilities = r.bytes()
	c.findings = r.findings()
	n := r.count(4)
	c.definitions = make([]Definition, 0, n)
	for range n {
		d := Definition{Kind: c.kind, Name: r.text(), Digest: r.text(), Quarantine: r.text()}
		d.Findings = r.findings()
		d.Raw = r.bytes()
		c.definitions = append(c.definitions, d)
	}
	if r.bad || len(r.rest) != 0 || !ValidKind(c.kind) {
		return nil, errEncoding
	}
	c.seal()
	c.encoded = b
	return c, nil
}

// reader takes apart an encoding; bad stays set after the first mistake.
type reader struct {
	rest []byte
	bad  bool
}

func (r *reader) number() uint64 {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 {
		r.bad, r.rest = true, nil
		return 0
	}
	r.rest = r.rest[size:]
	return n
}

// count reads the length of a list whose elements take at least least bytes, so
// that a forged length cannot reserve memory.
func (r *reader) count(least int) int {
	n := r.number()
	if n > uint64(len(r.rest)/least) {
		r.bad, r.rest = true, nil
		return 0
	}
	return int(n)
}

func (r *reader) bytes() []byte {
	n := r.number()
	if n > uint64(len(r.rest)) {
		r.bad, r.rest = true, nil
		return nil
	}
	out := r.rest[:n:n]
	r.rest = r.rest[n:]
	return out
}

func (r *reader) text() string { return string(r.bytes()) }

func (r *reader) findings() []Finding {
	n := r.count(2)
	if n == 0 {
		return nil
	}
	out := make([]Finding, 0, n)
	for range n {
		out = append(out, Finding{Code: r.text(), Detail: r.text()})
	}
	return out
}

// contentDigest is the digest by which bytes from a cache are recognized.
func contentDigest(encoded []byte) string {
	sum := sha256.Sum256(encoded)
	return hex.EncodeToString(sum[:])
}

// Findings are stored as one text each.
func findingText(f Finding) string { return f.Code + ": " + f.Detail }

func parseFinding(s string) Finding {
	code, detail, _ := strings.Cut(s, ": ")
	return Finding{Code: code, Detail: detail}
}

func findingTexts(fs []Finding) []string {
	out := make([]string, len(fs))
	for i, f := range fs {
		out[i] = findingText(f)
	}
	return out
}

func parseFindings(texts []string) []Finding {
	if len(texts) == 0 {
		return nil
	}
	out := make([]Finding, len(texts))
	for i, s := range texts {
		out[i] = parseFinding(s)
	}
	return out
}
