// Package audit keeps each tenant's record of what happened and proves that the
// record is whole. An entry is inserted in the transaction of what it records;
// a sealer, one at a time for a tenant, gives committed entries their sequence
// and a digest that covers the entry before, so that no call waits for a chain;
// signed checkpoints fix the chain from outside the database; Verify walks it.
//
// What each part defends: the chain shows changes, removals and new orders; the
// checkpoints, signed by a key outside the database, show a chain rebuilt or
// cut below them; the keyed digest in each entry, made under the tenant's data
// key when the entry is prepared, shows an entry written or changed by whoever
// has the database but not the key, sealed or not. Details are stored encrypted
// and enter the chain by that digest only, so that erasing the tenant's key
// erases them and leaves a chain that can still be verified.
//
// Kinds are written noun.happened: a resource in the singular, a dot, and what
// became of it. Entries hold digests and redacted summaries, never arguments,
// results or secrets; redacting is the caller's duty.
package audit

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The kinds that are known when this was written. Others may be added where
// they happen; only SegmentLost means something to this package.
const (
	CallProposed      = "call.proposed"
	CallDenied        = "call.denied"
	CallDispatched    = "call.dispatched"
	CallFinished      = "call.finished"
	CallUncertain     = "call.uncertain"
	CallResolved      = "call.resolved"
	CallReopened      = "call.reopened"
	CallCancelled     = "call.cancelled"
	ConsentRequested  = "consent.requested"
	ConsentDecided    = "consent.decided"
	ConsentExpired    = "consent.expired"
	ConsentVoided     = "consent.voided"
	GrantOpened       = "grant.opened"
	GrantEnded        = "grant.ended"
	ContractCreated   = "contract.created"
	ContractActivated = "contract.activated"
	ContractRetired   = "contract.retired"
	ServerCreated     = "server.created"
	ServerUpdated     = "server.updated"
	ServerDeleted     = "server.deleted"
	DefinitionChanged = "definition.changed"
	SessionOpened     = "session.opened"
	SessionClosed     = "session.closed"
	KeyCreated        = "key.created"
	KeyRevoked        = "key.revoked"
	TenantCreated     = "tenant.created"
	// A server fell back to an older protocol than it had proved, or is or leads to
	// another origin than it was reviewed with; one entry for an episode.
	SecurityDowngradeRefused = "security.downgrade_refused"
	SecurityOriginRefused    = "security.origin_refused"
	// SegmentLost says that reads of a dead replica may be missing; its details
	// say how many at most. Verify lists it.
	SegmentLost = "segment.lost"
)

// Limits of an entry, in bytes.
const (
	MaxDetails = 16 << 10
	maxKind    = 64
	maxText    = 2 << 10
)

// Entry is something that happened. Everything but Kind may be empty.
type Entry struct {
	// Kind is written noun.happened in a-z, '_' and '.', at most 64 bytes.
	Kind string
	// SessionID, CallID, ConsentID and ServerID name what it is about, and Actor
	// who did it; each at most 1 KiB of UTF-8.
	SessionID string
	CallID    string
	ConsentID string
	ServerID  string
	Actor     string
	// Subject is the person on whose behalf it happened.
	Subject tenant.Subject
	// Time is when it happened, kept to the microsecond; zero means now.
	Time time.Time
	// Details is a JSON object of at most 16 KiB, already redacted.
	Details []byte
}

// Options are a log's settings; a zero field takes the default.
type Options struct {
	// Log gets one line for each checkpoint, which is a copy of it outside the
	// database, and one for each failure of the sealer. Default: nothing.
	Log *slog.Logger
	// Now is the clock. Default: time.Now.
	Now func() time.Time
	// Tick starts a round of the sealer. Default: every second.
	Tick <-chan time.Time
	// KnownKeys are public keys that signed checkpoints before the present one.
	KnownKeys []ed25519.PublicKey
}

// Log is the audit of all tenants. It is safe for concurrent use.
type Log struct {
	db     *tenant.DB
	vault  *tenant.Vault
	signer *seal.Signer
	keys   map[string]ed25519.PublicKey
	log    *slog.Logger
	now    func() time.Time
	tick   <-chan time.Time

	mu      sync.Mutex
	retries map[tenant.ID]retry // tenants whose chain could not be sealed; at most maxRetries
}

// New returns the log. It starts nothing: Run does.
func New(db *tenant.DB, vault *tenant.Vault, signer *seal.Signer, o Options) (*Log, error) {
	if db == nil || vault == nil || signer == nil {
		return nil, errors.New("audit: database, vault and signer are needed")
	}
	l := &Log{db: db, vault: vault, signer: signer, log: o.Log, now: o.Now, tick: o.Tick,
		keys: map[string]ed25519.PublicKey{signer.KeyID(): signer.Public()}, retries: map[tenant.ID]retry{}}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	if l.now == nil {
		l.now = time.Now
	}
	for _, k := range o.KnownKeys {
		if len(k) != ed25519.PublicKeySize {
			return nil, errors.New("audit: a known key is not an Ed25519 public key")
		}
		l.keys[seal.KeyID(k)] = k
	}
	return l, nil
}

// Prepared is an entry ready to be inserted, of one tenant.
type Prepared struct {
	tenant  tenant.ID
	content content
	details []byte // sealed
	digest  string // keyed, over content and the details' plaintext
}

// ID returns the id of the entry, aud_….
func (p Prepared) ID() string { return p.content.ID }

const insertSQL = `
INSERT INTO audit_entries (tenant_id, audit_entry_id, kind, session_id, call_id, consent_id, server_id,
       actor, subject_source, subject, details, details_digest, create_time)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`

func (p Prepared) args() []any {
	c := p.content
	return []any{p.tenant, c.ID, c.Kind, c.SessionID, c.CallID, c.ConsentID, c.ServerID,
		c.Actor, c.Subject.Source, c.Subject.Value, p.details, p.digest, c.Time}
}

// Queue adds the insert to a batch, which must run in a transaction of the
// entry's tenant, the one of what the entry records.
func (p Prepared) Queue(b *pgx.Batch) { b.Queue(insertSQL, p.args()...) }

// Prepare checks an entry, mints its id and seals its details. It does no I/O
// once the tenant's data key is in memory. An entry that breaks a limit is a
// mistake of the program, hence an internal error that names the member.
func (l *Log) Prepare(ctx context.Context, t tenant.ID, e Entry) (Prepared, error) {
	key, err := l.vault.Key(ctx, t)
	if err != nil {
		return Prepared{}, err
	}
	return l.prepare(key, t, e)
}

func (l *Log) prepare(key *seal.DataKey, t tenant.ID, e Entry) (Prepared, error) {
	if len(e.Details) == 0 {
		e.Details = []byte("{}")
	}
	if err := e.check(); err != nil {
		return Prepared{}, err
	}
	if e.Time.IsZero() {
		e.Time = l.now()
	}
	p := Prepared{tenant: t, content: content{
		ID: resource.NewID(resource.AuditEntry), Kind: e.Kind,
		SessionID: e.SessionID, CallID: e.CallID, ConsentID: e.ConsentID, ServerID: e.ServerID,
		Actor: e.Actor, Subject: e.Subject, Time: e.Time.UTC().Truncate(time.Microsecond),
	}}
	var err error
	if p.details, err = key.Seal(e.Details, detailsAAD(t.String(), p.content.ID)); err != nil {
		return Prepared{}, fault.Wrap(err, "seal audit details")
	}
	p.digest = detailsDigest(key, t.String(), p.content, e.Details)
	return p, nil
}

// Append inserts an entry in the transaction of what it records and returns its
// id.
func (l *Log) Append(ctx context.Context, tx tenant.Tx, e Entry) (string, error) {
	key, err := l.vault.KeyIn(ctx, tx)
	if err != nil {
		return "", err
	}
	p, err := l.prepare(key, tx.Tenant(), e)
	if err != nil {
		return "", err
	}
	if _, err := tx.Exec(ctx, insertSQL, p.args()...); err != nil {
		return "", fault.Wrap(err, "append audit entry")
	}
	return p.ID(), nil
}

// Record appends an event of package tenant; it makes Log a tenant.Recorder.
func (l *Log) Record(ctx context.Context, tx tenant.Tx, e tenant.Event) error {
	details, err := json.Marshal(e.Details)
	if err != nil {
		return fmt.Errorf("audit: details of %s: %w", e.Kind, err)
	}
	if e.Details == nil {
		details = nil
	}
	_, err = l.Append(ctx, tx, Entry{Kind: e.Kind, Actor: e.Actor, Details: details})
	return err
}

func (e Entry) check() error {
	if !isKind(e.Kind) {
		return fmt.Errorf("audit: kind %q is not written noun.happened", e.Kind)
	}
	for _, f := range [...]struct{ name, value string }{
		{"session", e.SessionID}, {"call", e.CallID}, {"consent", e.ConsentID}, {"server", e.ServerID},
		{"actor", e.Actor}, {"subject source", e.Subject.Source}, {"subject", e.Subject.Value},
	} {
		if len(f.value) > maxText || !isText(f.value) {
			return fmt.Errorf("audit: %s of a %s entry is not UTF-8 without NUL of at most %d bytes", f.name, e.Kind, maxText)
		}
	}
	if len(e.Details) > MaxDetails {
		return fmt.Errorf("audit: details of a %s entry have %d bytes, over %d", e.Kind, len(e.Details), MaxDetails)
	}
	if e.Details[0] != '{' || !json.Valid(e.Details) || !utf8.Valid(e.Details) {
		return fmt.Errorf("audit: details of a %s entry are no JSON object", e.Kind)
	}
	return nil
}

// isText reports whether the database takes s as text.
func isText(s string) bool { return strings.IndexByte(s, 0) < 0 && utf8.ValidString(s) }

func isKind(s string) bool {
	if len(s) > maxKind {
		return false
	}
	dots, last := 0, byte('.')
	for _, c := range []byte(s) {
		switch {
		case c == '.' && last != '.':
			dots++
		case c >= 'a' && c <= 'z', c == '_' && last != '.':
		default:
			return false
		}
		last = c
	}
	return dots == 1 && last != '.'
}
