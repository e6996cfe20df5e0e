package audit

import (
	"context"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Sizes of a page of List.
const (
	defaultPage = 50
	maxPage     = 500
)

// Order is the order of a list.
type Order uint8

const (
	// ByArrival lists sealed and unsealed entries as they were inserted. An entry
	// whose transaction commits late may turn up before a page already read.
	ByArrival Order = iota
	// ByChain lists sealed entries only, by sequence: who follows it to the end
	// and later goes on from there misses nothing.
	ByChain
)

// Filter selects entries; empty members select all.
type Filter struct {
	CallID    string
	SessionID string
	Kind      string
	Order     Order
	// AfterSequence starts a list ByChain after this sequence. A PageToken wins.
	AfterSequence int64
	// PageToken is what List returned as next, with the other members unchanged.
	PageToken string
	// PageSize is at most 500, more is cut to that; 0 means 50.
	PageSize int
}

// Record is a stored entry.
type Record struct {
	ID string
	// Sequence is the place in the chain, 0 while unsealed.
	Sequence       int64
	PreviousDigest string
	Digest         string
	Kind           string
	SessionID      string
	CallID         string
	ConsentID      string
	ServerID       string
	Actor          string
	Subject        tenant.Subject
	Time           time.Time
	// Details is a JSON object, or nil when it can no longer be read because the
	// key was erased or the row was tampered with.
	Details       []byte
	DetailsDigest string
}

const recordColumns = `
SELECT audit_entry_id, ordinal, kind, session_id, call_id, consent_id, server_id, actor, subject_source, subject,
       create_time, details_digest, COALESCE(sequence, 0), previous_digest, digest, details
  FROM audit_entries
 WHERE tenant_id = $1`

// row is an entry with its encrypted details.
type row struct {
	link
	details []byte
}

func scanRow(r pgx.CollectableRow) (e row, err error) {
	err = r.Scan(&e.ID, &e.Ordinal, &e.Kind, &e.SessionID, &e.CallID, &e.ConsentID, &e.ServerID, &e.Actor,
		&e.Subject.Source, &e.Subject.Value, &e.Time, &e.DetailsDigest, &e.Sequence, &e.PreviousDigest, &e.Digest, &e.details)
	return e, err
}

// List returns a page of a tenant's entries with their details, and the token of
// the next page, "" after the last.
func (l *Log) List(ctx context.Context, t tenant.ID, f Filter) (records []Record, next string, err error) {
	sql, args, size, err := f.query(t)
	if err != nil {
		return nil, "", err
	}
	key, erased, err := l.key(ctx, t)
	if err != nil {
		return nil, "", err
	}
	rows, err := l.readRows(ctx, t, sql, args)
	if err != nil {
		return nil, "", fault.Wrap(err, "list audit entries")
	}
	if len(rows) > size {
		rows = rows[:size]
		next = f.Order.token(rows[size-1])
	}
	for _, r := range rows {
		rec := Record{ID: r.ID, Sequence: r.Sequence, PreviousDigest: r.PreviousDigest, Digest: r.Digest, Kind: r.Kind,
			SessionID: r.SessionID, CallID: r.CallID, ConsentID: r.ConsentID, ServerID: r.ServerID, Actor: r.Actor,
			Subject: r.Subject, Time: r.Time.UTC(), DetailsDigest: r.DetailsDigest}
		if !erased {
			// What does not open is shown as nil; Verify says why.
			rec.Details, _ = key.Open(r.details, detailsAAD(t.String(), r.ID))
		}
		records = append(records, rec)
	}
	return records, next, nil
}

func (l *Log) readRows(ctx context.Context, t tenant.ID, sql string, args []any) (rows []row, err error) {
	err = l.db.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(sql, args...).Query(func(r pgx.Rows) error {
			rows, err = pgx.CollectRows(r, scanRow)
			return err
		})
	})
	return rows, err
}

// key returns the tenant's data key, or says that it was erased.
func (l *Log) key(ctx context.Context, t tenant.ID) (key *seal.DataKey, erased bool, err error) {
	if key, err = l.vault.Key(ctx, t); isErased(err) {
		return nil, true, nil
	}
	return key, false, err
}

// query builds the statement of a page and one row more, which tells whether
// there is a next page.
func (f Filter) query(t tenant.ID) (sql string, args []any, size int, err error) {
	after, size, err := f.check()
	if err != nil {
		return "", nil, 0, err
	}
	args = []any{t}
	var b strings.Builder
	b.WriteString(recordColumns)
	and := func(condition string, value any) {
		args = append(args, value)
		fmt.Fprintf(&b, "\n   AND %s $%d", condition, len(args))
	}
	if f.CallID != "" {
		and("call_id <> '' AND call_id =", f.CallID)
	}
	if f.SessionID != "" {
		and("session_id <> '' AND session_id =", f.SessionID)
	}
	if f.Kind != "" {
		and("kind =", f.Kind)
		if f.Kind != CallProposed && f.Kind != CallDispatched && f.Kind != CallFinished {
			// The index by kind has this condition.
			b.WriteString("\n   AND kind NOT IN ('call.proposed', 'call.dispatched', 'call.finished')")
		}
	}
	column := "ordinal"
	if f.Order == ByChain {
		b.WriteString("\n   AND sequence IS NOT NULL")
		column = "sequence"
	}
	and(column+" >", after)
	args = append(args, size+1)
	fmt.Fprintf(&b, "\n ORDER BY %s\n LIMIT $%d", column, len(args))
	return b.String(), args, size, nil
}

func (f Filter) check() (after int64, size int, err error) {
	var bad []fault.Field
	refuse := func(path, rule string) { bad = append(bad, fault.Field{Path: path, Rule: rule}) }
	if f.CallID != "" && !resource.IsID(resource.Call, f.CallID) {
		refuse("callId", "must be the id of a call")
	}
	if f.SessionID != "" && !resource.IsID(resource.Session, f.SessionID) {
		refuse("sessionId", "must be the id of a session")
	}
	if f.Kind != "" && !isKind(f.Kind) {
		refuse("kind", "must be written noun.happened, as in call.finished")
	}
	if f.AfterSequence < 0 {
		refuse("afterSequence", "must not be negative")
	} else if f.AfterSequence > 0 && f.Order != ByChain {
		refuse("afterSequence", "goes only with the order of the chain")
	}
	after = f.AfterSequence
	if f.PageToken != "" {
		var ok bool
		if after, ok = f.Order.parse(f.PageToken); !ok {
			refuse("pageToken", "must be the nextPageToken of the same list")
		}
	}
	switch size = f.PageSize; {
	case size < 0:
		refuse("pageSize", "must not be negative")
	case size == 0:
		size = defaultPage
	default:
		size = min(size, maxPage)
	}
	if len(bad) > 0 {
		return 0, 0, fault.InvalidFields(bad...)
	}
	return after, size, nil
}

// A token names its order, so that it is not taken for a place in the other.
var tokenPrefix = [...]string{ByArrival: "o", ByChain: "s"}

func (o Order) token(last row) string {
	n := last.Ordinal
	if o == ByChain {
		n = last.Sequence
	}
	return base64.RawURLEncoding.EncodeToString([]byte(tokenPrefix[o] + strconv.FormatInt(n, 10)))
}

func (o Order) parse(token string) (after int64, ok bool) {
	if len(token) > 64 {
		return 0, false
	}
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		return 0, false
	}
	digits, found := strings.CutPrefix(string(raw), tokenPrefix[o])
	after, err = strconv.ParseInt(digits, 10, 64)
	return after, found && err == nil && after >= 0
}
