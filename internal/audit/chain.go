package audit

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// content is what an entry says, from the moment it is prepared.
type content struct {
	ID        string
	Kind      string
	SessionID string
	CallID    string
	ConsentID string
	ServerID  string
	Actor     string
	Subject   tenant.Subject
	Time      time.Time
}

// link is a stored entry as the chain sees it: content, and its place.
type link struct {
	content
	Ordinal        int64
	DetailsDigest  string
	Sequence       int64
	PreviousDigest string
	Digest         string
}

// digest returns the chain digest of an entry, over every column of its row but
// the encrypted details, which DetailsDigest stands for. Fields are preceded by
// their lengths and the form is versioned: a new column is a new version.
func (e *link) digest(tenantID string) string {
	c := &e.content
	sum := sha256.Sum256(seal.AAD("bulkhead/audit/entry/v1", tenantID,
		number(e.Sequence), e.PreviousDigest, number(e.Ordinal),
		c.ID, c.Kind, c.SessionID, c.CallID, c.ConsentID, c.ServerID,
		c.Actor, c.Subject.Source, c.Subject.Value, number(c.Time.UnixMicro()), e.DetailsDigest))
	return "audit-1:sha256:" + hex.EncodeToString(sum[:])
}

// detailsDigest is keyed, so that nobody without the tenant's key can tell by
// trial what erased details said, nor make an entry up. It covers the content
// too: an entry is bound to the key before it has a place in the chain.
func detailsDigest(key *seal.DataKey, tenantID string, c content, details []byte) string {
	mac := key.MAC("audit/entry/v1", seal.AAD(tenantID,
		c.ID, c.Kind, c.SessionID, c.CallID, c.ConsentID, c.ServerID,
		c.Actor, c.Subject.Source, c.Subject.Value, number(c.Time.UnixMicro()), string(details)))
	return "audit-1:hmac-sha256:" + hex.EncodeToString(mac)
}

func detailsAAD(tenantID, entryID string) []byte {
	return seal.AAD("bulkhead/audit/details/v1", tenantID, entryID)
}

func number(n int64) string {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	return string(b[:])
}

// Checkpoint states that a tenant's chain had this digest at this sequence. Kept
// outside the database, it lets Verify find that the chain was cut or rebuilt.
type Checkpoint struct {
	TenantID string `json:"tenantId"`
	Sequence int64  `json:"sequence,string"`
	// Digest is the chain digest of the entry at Sequence.
	Digest string `json:"digest"`
	// Time is when it was signed, to the microsecond.
	Time time.Time `json:"createTime"`
	// KeyID names the Ed25519 key as seal.KeyID does.
	KeyID     string `json:"keyId"`
	Signature []byte `json:"signature"`
}

// SignedBy reports whether the checkpoint carries a signature of pub.
func (c Checkpoint) SignedBy(pub ed25519.PublicKey) bool {
	return c.KeyID == seal.KeyID(pub) && seal.Verify(pub, c.statement(), c.Signature)
}

func (c Checkpoint) statement() []byte {
	return seal.AAD("bulkhead/audit/checkpoint/v1", c.TenantID, number(c.Sequence), c.Digest,
		number(c.Time.UnixMicro()), c.KeyID)
}

func (l *Log) sign(tenantID string, sequence int64, digest string) Checkpoint {
	c := Checkpoint{TenantID: tenantID, Sequence: sequence, Digest: digest,
		Time: l.now().UTC().Truncate(time.Microsecond), KeyID: l.signer.KeyID()}
	c.Signature = l.signer.Sign(c.statement())
	return c
}
