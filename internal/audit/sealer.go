package audit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	sealInterval = time.Second
	// maxBatch is how many entries one transaction seals.
	maxBatch = 5000
	// A checkpoint follows the last one after so many entries, or when the oldest
	// entry it does not cover is so old. Verify counts on the first.
	checkpointEntries = 1000
	checkpointAge     = time.Minute
	// tenantPage is how many tenants one look for work lists.
	tenantPage = 1000
	// sealWorkers bounds the connections that a round takes.
	sealWorkers = 4
	maxRetries  = 1024
)

// Run seals what is committed, each second until ctx ends, and then returns
// nil. Any number of replicas may run it. A tenant whose chain cannot be sealed
// holds up no other: it is tried again after a pause that doubles from a second
// to a minute, with a line in the log each time. At the end of the server, call
// Flush after Run.
func (l *Log) Run(ctx context.Context) error {
	tick := l.tick
	if tick == nil {
		t := time.NewTicker(sealInterval)
		defer t.Stop()
		tick = t.C
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick:
		}
		// The zero ID stands for the search itself, which may fail too.
		if l.resting(tenant.ID{}) {
			continue
		}
		l.settle(ctx, tenant.ID{}, l.round(ctx, whenDue))
	}
}

// Flush seals every committed entry and puts a checkpoint on every chain that
// has entries after its last.
func (l *Log) Flush(ctx context.Context) error { return l.round(ctx, atOnce) }

// SealNow seals one tenant's committed entries, waiting for another sealer, and
// signs a checkpoint if one is due.
func (l *Log) SealNow(ctx context.Context, t tenant.ID) error {
	for {
		b, err := l.sealBatch(ctx, t, lockWaiting, whenDue)
		if err != nil {
			return err
		}
		if !b.full {
			return nil
		}
	}
}

// urgency says when a pass that sealed entries signs a checkpoint.
type urgency uint8

const (
	whenDue urgency = iota
	atOnce
)

// round visits each tenant that has something to seal or to sign. It returns the
// error of the search only; tenants' errors are logged unless it is a Flush,
// whose caller gets them.
func (l *Log) round(ctx context.Context, u urgency) error {
	var first error
	for after := ""; ; {
		ts, err := l.findWork(ctx, after, u)
		if err != nil || len(ts) == 0 {
			return errors.Join(first, err)
		}
		var g errgroup.Group
		g.SetLimit(sealWorkers)
		for _, t := range ts {
			if u == whenDue && l.resting(t) {
				continue
			}
			g.Go(func() error {
				err := l.sealAll(ctx, t, u)
				if u == atOnce {
					return err
				}
				l.settle(ctx, t, err)
				return nil
			})
		}
		if err := g.Wait(); first == nil {
			first = err
		}
		after = ts[len(ts)-1].String()
	}
}

// sealAll seals a tenant's entries batch by batch until none is left or another
// sealer is at it.
func (l *Log) sealAll(ctx context.Context, t tenant.ID, u urgency) error {
	for {
		b, err := l.sealBatch(ctx, t, lockSkipping, u)
		if err != nil || b.busy || !b.full {
			return err
		}
	}
}

// The recursion hops from tenant to tenant in the index of unsealed entries
// instead of reading all of a backlog.
const findSQL = `
WITH RECURSIVE unsealed (tenant_id, n) AS (
  (SELECT tenant_id, 1 FROM audit_entries
    WHERE sequence IS NULL AND tenant_id > $1 ORDER BY tenant_id LIMIT 1)
  UNION ALL
  SELECT (SELECT e.tenant_id FROM audit_entries e
           WHERE e.sequence IS NULL AND e.tenant_id > u.tenant_id ORDER BY e.tenant_id LIMIT 1), u.n + 1
    FROM unsealed u WHERE u.tenant_id IS NOT NULL AND u.n < $3
), due AS (
  SELECT tenant_id FROM audit_heads
   WHERE uncovered_since <= $2 AND tenant_id > $1 ORDER BY tenant_id LIMIT $3
)
SELECT tenant_id FROM unsealed WHERE tenant_id IS NOT NULL
 UNION
SELECT tenant_id FROM due
 ORDER BY tenant_id
 LIMIT $3`

func (l *Log) findWork(ctx context.Context, after string, u urgency) (ts []tenant.ID, err error) {
	due := l.now().Add(-checkpointAge)
	if u == atOnce {
		due = l.now().Add(24 * time.Hour)
	}
	err = l.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, findSQL, after, due, tenantPage)
		if err != nil {
			return err
		}
		ts, err = pgx.CollectRows(rows, pgx.RowTo[tenant.ID])
		return err
	})
	return ts, fault.Wrap(err, "find unsealed audit entries")
}

// head is the row of audit_heads.
type head struct {
	sequence           int64
	digest             string
	checkpointSequence int64
	uncoveredSince     *time.Time
}

type batch struct {
	busy        bool // another sealer holds the head
	full        bool // there may be more
	checkpoints []Checkpoint
}

// sealBatch seals up to maxBatch entries in one transaction that holds the
// tenant's head, so that one sealer at a time extends a chain.
func (l *Log) sealBatch(ctx context.Context, t tenant.ID, lock string, u urgency) (batch, error) {
	var out batch
	err := l.db.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		h, held, err := lockHead(ctx, tx, lock)
		if err != nil || !held {
			out.busy = !held
			return err
		}
		entries, err := readUnsealed(ctx, tx)
		if err != nil {
			return err
		}
		out.full = len(entries) == maxBatch
		if out.checkpoints = l.extend(t, &h, entries, u); len(entries) == 0 && len(out.checkpoints) == 0 {
			return nil
		}
		return store(ctx, tx, h, entries, out.checkpoints)
	})
	if err != nil {
		return out, fault.Wrap(err, "seal audit entries")
	}
	for _, c := range out.checkpoints {
		l.log.InfoContext(ctx, "audit checkpoint", "tenant", c.TenantID, "sequence", c.Sequence,
			"digest", c.Digest, "time", c.Time, "key", c.KeyID, "signature", c.Signature)
	}
	return out, nil
}

const selectHead = `
SELECT sequence, digest, checkpoint_sequence, uncovered_since
  FROM audit_heads WHERE tenant_id = $1 FOR UPDATE`

const (
	lockWaiting  = selectHead
	lockSkipping = selectHead + ` SKIP LOCKED`
)

func lockHead(ctx context.Context, tx tenant.Tx, lock string) (h head, held bool, err error) {
	scan := func() error {
		return tx.QueryRow(ctx, lock, tx.Tenant()).Scan(&h.sequence, &h.digest, &h.checkpointSequence, &h.uncoveredSince)
	}
	if err = scan(); !errors.Is(err, pgx.ErrNoRows) {
		return h, err == nil, err
	}
	// No row, or a row that another sealer holds: the insert tells.
	tag, err := tx.Exec(ctx, `INSERT INTO audit_heads (tenant_id) VALUES ($1) ON CONFLICT DO NOTHING`, tx.Tenant())
	if err != nil || tag.RowsAffected() == 1 {
		return h, err == nil, err
	}
	if err = scan(); errors.Is(err, pgx.ErrNoRows) {
		return h, false, nil
	}
	return h, err == nil, err
}

// By ordinal, so that of two entries of which one waited for the other's commit
// the earlier is sealed first.
const unsealedSQL = `
SELECT audit_entry_id, ordinal, kind, session_id, call_id, consent_id, server_id, actor,
       subject_source, subject, create_time, details_digest
  FROM audit_entries
 WHERE tenant_id = $1 AND sequence IS NULL
 ORDER BY ordinal
 LIMIT $2`

func readUnsealed(ctx context.Context, tx tenant.Tx) ([]link, error) {
	rows, err := tx.Query(ctx, unsealedSQL, tx.Tenant(), maxBatch)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (e link, err error) {
		err = row.Scan(&e.ID, &e.Ordinal, &e.Kind, &e.SessionID, &e.CallID, &e.ConsentID, &e.ServerID, &e.Actor,
			&e.Subject.Source, &e.Subject.Value, &e.Time, &e.DetailsDigest)
		return e, err
	})
}

// extend places entries behind the head and returns the checkpoints due on the
// way. It does no I/O.
func (l *Log) extend(t tenant.ID, h *head, entries []link, u urgency) (cs []Checkpoint) {
	now := l.now()
	checkpoint := func() {
		cs = append(cs, l.sign(t.String(), h.sequence, h.digest))
		h.checkpointSequence, h.uncoveredSince = h.sequence, nil
	}
	for i := range entries {
		e := &entries[i]
		h.sequence++
		e.Sequence, e.PreviousDigest = h.sequence, h.digest
		e.Digest = e.digest(t.String())
		h.digest = e.Digest
		if h.uncoveredSince == nil {
			since := e.Time
			if since.After(now) {
				since = now
			}
			h.uncoveredSince = &since
		}
		if h.sequence-h.checkpointSequence >= checkpointEntries {
			checkpoint()
		}
	}
	if h.uncoveredSince != nil && (u == atOnce || now.Sub(*h.uncoveredSince) >= checkpointAge) {
		checkpoint()
	}
	return cs
}

const placeSQL = `
UPDATE audit_entries e
   SET sequence = p.sequence, previous_digest = p.previous_digest, digest = p.digest
  FROM unnest($2::bigint[], $3::bigint[], $4::text[], $5::text[]) AS p (ordinal, sequence, previous_digest, digest)
 WHERE e.tenant_id = $1 AND e.ordinal = p.ordinal AND e.sequence IS NULL`

// A checkpoint that exists for a sequence is never replaced: if the chain was
// cut and grew again, the old one is the evidence.
const checkpointSQL = `
INSERT INTO audit_checkpoints (tenant_id, sequence, digest, key_id, signature, create_time)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT DO NOTHING`

const headSQL = `
UPDATE audit_heads
   SET sequence = $2, digest = $3, checkpoint_sequence = $4, uncovered_since = $5, update_time = now()
 WHERE tenant_id = $1`

func store(ctx context.Context, tx tenant.Tx, h head, entries []link, cs []Checkpoint) error {
	n := len(entries)
	ordinals, sequences := make([]int64, n), make([]int64, n)
	previous, digests := make([]string, n), make([]string, n)
	for i, e := range entries {
		ordinals[i], sequences[i], previous[i], digests[i] = e.Ordinal, e.Sequence, e.PreviousDigest, e.Digest
	}
	b := &pgx.Batch{}
	b.Queue(placeSQL, tx.Tenant(), ordinals, sequences, previous, digests)
	for _, c := range cs {
		b.Queue(checkpointSQL, tx.Tenant(), c.Sequence, c.Digest, c.KeyID, c.Signature, c.Time)
	}
	b.Queue(headSQL, tx.Tenant(), h.sequence, h.digest, h.checkpointSequence, h.uncoveredSince)
	res := tx.SendBatch(ctx, b)
	tag, err := res.Exec()
	if cerr := res.Close(); err == nil {
		err = cerr
	}
	if err == nil && tag.RowsAffected() != int64(n) {
		err = fmt.Errorf("placed %d of %d entries", tag.RowsAffected(), n)
	}
	return err
}

// retry says when a tenant that failed is tried again.
type retry struct {
	pause time.Duration
	at    time.Time
}

func (l *Log) resting(t tenant.ID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.now().Before(l.retries[t].at)
}

// settle notes the outcome of a try and logs a failure.
func (l *Log) settle(ctx context.Context, t tenant.ID, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		delete(l.retries, t)
		return
	}
	if ctx.Err() != nil {
		return // the server stops; Flush comes
	}
	r := l.retries[t]
	r.pause = min(max(2*r.pause, sealInterval), time.Minute)
	r.at = l.now().Add(r.pause)
	if len(l.retries) < maxRetries {
		l.retries[t] = r
	}
	text := err.Error()
	if f, ok := fault.As(err); ok {
		text = f.Detail()
	}
	l.log.ErrorContext(ctx, "audit entries not sealed", "tenant", t.String(), "error", text, "retry_in", r.pause)
}
