package audit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The kinds of problem that Verify reports.
const (
	// EntryChanged: the entry's columns do not give its chain digest.
	EntryChanged = "entry.changed"
	// EntryMoved: the entry was sealed at another sequence.
	EntryMoved = "entry.moved"
	// EntryRemoved: sequences are missing.
	EntryRemoved = "entry.removed"
	// EntryDuplicate: two entries have one sequence.
	EntryDuplicate = "entry.duplicate"
	// ChainBroken: the entry does not follow on the one before it.
	ChainBroken = "chain.broken"
	// ChainReplaced: a signed checkpoint has another digest for this sequence.
	ChainReplaced = "chain.replaced"
	// TailCut: the chain ends before a signed checkpoint.
	TailCut = "tail.cut"
	// HeadMismatch: the stored head is not the last entry.
	HeadMismatch = "head.mismatch"
	// DetailsMismatch: content and details do not give the keyed digest: they were
	// changed, or written by someone without the tenant's key.
	DetailsMismatch = "details.mismatch"
	// DetailsUnreadable: the encrypted details do not open.
	DetailsUnreadable = "details.unreadable"
	// CheckpointForged: the signature is not one of the key it names.
	CheckpointForged = "checkpoint.forged"
	// CheckpointUnknownKey: the key it names is not known to this server.
	CheckpointUnknownKey = "checkpoint.unknown_key"
	// CheckpointMissing: a stretch of the chain that should have a checkpoint has
	// none.
	CheckpointMissing = "checkpoint.missing"
	// RangeLost is an entry segment.lost: what a dead replica did not record.
	RangeLost = "range.lost"
)

const (
	maxProblems = 100
	verifyPage  = 500
	// uncoveredLimit is how old an entry without a checkpoint may be. A running
	// sealer signs after a minute.
	uncoveredLimit = 5 * time.Minute
	// moveWindow is how far from its place Verify looks for a moved entry's own.
	moveWindow = 1000
)

// Problem is one thing that is not as it was sealed.
type Problem struct {
	Kind string
	// Sequence is where, 0 for an entry that is not sealed.
	Sequence int64
	EntryID  string
	Detail   string
}

// Report is what Verify found.
type Report struct {
	// OK says that nothing recorded was changed, as far as can be known. It does
	// not depend on Lost, nor on Unsealed.
	OK bool
	// Entries counts the sealed entries that were read.
	Entries      int64
	LastSequence int64
	LastDigest   string
	// Unsealed counts entries that have no place in the chain yet.
	Unsealed int64
	// Lost counts the entries that say that something was not recorded.
	Lost int64
	// DetailsChecked is false when the tenant's data key is erased: then the chain
	// was verified, and the entries' keyed digests were not.
	DetailsChecked bool
	// Problems are the first 100, losses included; MoreProblems counts the rest.
	Problems     []Problem
	MoreProblems int64
	// Checkpoint is the last stored one whose signature and digest hold; keep it
	// outside and give it to a later Verify.
	Checkpoint *Checkpoint
}

// Verify reads a tenant's whole chain, page by page, and reports what is not as
// it was sealed. external is a checkpoint kept outside the database, or nil. It
// writes nothing; what is sealed after its start is left to the next. An error
// means that it could not read, never that it found something.
func (l *Log) Verify(ctx context.Context, t tenant.ID, external *Checkpoint) (Report, error) {
	if external != nil && external.TenantID != t.String() {
		return Report{}, fault.Field1("checkpoint.tenantId", "must be the caller's tenant")
	}
	v := &verifier{l: l, tenant: t, rep: &Report{OK: true}}
	if external != nil && v.holds(*external, "given") {
		v.external = external
	}
	if err := v.run(ctx); err != nil {
		return Report{}, fault.Wrap(err, "verify audit")
	}
	return *v.rep, nil
}

// isErased reports whether a data key is gone for good, as opposed to out of
// reach.
func isErased(err error) bool {
	return errors.Is(err, seal.ErrFormat) || fault.Is(err, fault.NotFound)
}

type verifier struct {
	l        *Log
	tenant   tenant.ID
	external *Checkpoint // signed by a known key, or nil
	rep      *Report
	key      *seal.DataKey // nil when erased

	// Where the chain stands: the last entry read.
	last    link
	headSeq int64
	headDig string
	end     int64 // the last sequence at the start
	arrived int64 // the last ordinal at the start

	checkpoints  []Checkpoint // a page of them, not yet reached
	read         int64        // sequence of the last checkpoint read
	lastStored   int64        // sequence of the last checkpoint at the start
	covered      int64        // sequence of the last valid checkpoint
	uncoveredAge time.Time    // time of the first entry after it
}

func (v *verifier) run(ctx context.Context) error {
	key, erased, err := v.l.key(ctx, v.tenant)
	if err != nil {
		return err
	}
	v.key, v.rep.DetailsChecked = key, !erased
	if err := v.begin(ctx); err != nil {
		return err
	}
	if err := v.sealed(ctx); err != nil {
		return err
	}
	if err := v.tail(ctx); err != nil {
		return err
	}
	return v.unsealed(ctx)
}

func (v *verifier) problem(kind string, e link, format string, args ...any) {
	if kind != RangeLost {
		v.rep.OK = false
	}
	if len(v.rep.Problems) >= maxProblems {
		v.rep.MoreProblems++
		return
	}
	v.rep.Problems = append(v.rep.Problems, Problem{Kind: kind, Sequence: e.Sequence, EntryID: e.ID, Detail: fmt.Sprintf(format, args...)})
}

// One statement, hence one snapshot: a sealer at work makes no difference.
const beginSQL = `
SELECT COALESCE(h.sequence, 0), COALESCE(h.digest, ''),
       COALESCE((SELECT max(sequence) FROM audit_entries WHERE tenant_id = $1 AND sequence IS NOT NULL), 0),
       COALESCE((SELECT max(ordinal) FROM audit_entries WHERE tenant_id = $1), 0),
       COALESCE((SELECT max(sequence) FROM audit_checkpoints WHERE tenant_id = $1), 0)
  FROM (SELECT 1) AS one
  LEFT JOIN audit_heads h ON h.tenant_id = $1`

func (v *verifier) begin(ctx context.Context) error {
	return v.l.db.Read(ctx, v.tenant, func(b *pgx.Batch) {
		b.Queue(beginSQL, v.tenant).QueryRow(func(r pgx.Row) error {
			return r.Scan(&v.headSeq, &v.headDig, &v.end, &v.arrived, &v.lastStored)
		})
	})
}

// sealed walks the chain. The ordinal is part of the key of a page because a
// duplicate sequence must not hide at its edge.
func (v *verifier) sealed(ctx context.Context) error {
	const sql = recordColumns + `
   AND sequence IS NOT NULL AND sequence <= $2 AND (sequence, ordinal) > ($3, $4)
 ORDER BY sequence, ordinal
 LIMIT $5`
	afterSeq, afterOrdinal := int64(math.MinInt64), int64(math.MinInt64)
	for {
		rows, err := v.l.readRows(ctx, v.tenant, sql, []any{v.tenant, v.end, afterSeq, afterOrdinal, verifyPage})
		if err != nil {
			return err
		}
		for _, r := range rows {
			if err := v.entry(ctx, r); err != nil {
				return err
			}
		}
		if len(rows) < verifyPage {
			return nil
		}
		afterSeq, afterOrdinal = rows[len(rows)-1].Sequence, rows[len(rows)-1].Ordinal
	}
}

func (v *verifier) entry(ctx context.Context, r row) error {
	v.rep.Entries++
	e := r.link
	follows := e.Sequence == v.last.Sequence+1
	switch {
	case follows:
	case e.Sequence <= v.last.Sequence:
		v.problem(EntryDuplicate, e, "sequence %d comes after sequence %d", e.Sequence, v.last.Sequence)
	default:
		v.problem(EntryRemoved, link{Sequence: v.last.Sequence + 1}, "entries %d to %d are missing", v.last.Sequence+1, e.Sequence-1)
	}
	if sum := e.digest(v.tenant.String()); sum != e.Digest {
		v.changed(e)
	}
	if follows && e.PreviousDigest != v.last.Digest {
		v.problem(ChainBroken, e, "the previous digest is not that of entry %d", v.last.Sequence)
	}
	v.details(r)
	if e.Kind == SegmentLost {
		v.rep.Lost++
		v.problem(RangeLost, e, "the entry says how much may be missing")
	}
	if v.uncoveredAge.IsZero() {
		v.uncoveredAge = e.Time
	}
	if x := v.external; x != nil && x.Sequence == e.Sequence && x.Digest != e.Digest {
		v.problem(ChainReplaced, e, "the given checkpoint has another digest")
	}
	v.last = e
	return v.reach(ctx, e)
}

// changed tells a moved entry from a changed one: a moved one has the digest of
// another sequence.
func (v *verifier) changed(e link) {
	if len(v.rep.Problems) < maxProblems {
		for offset := int64(-moveWindow); offset <= moveWindow; offset++ {
			probe := e
			probe.Sequence += offset
			if probe.digest(v.tenant.String()) == e.Digest {
				v.problem(EntryMoved, e, "the entry was sealed as number %d", probe.Sequence)
				return
			}
		}
	}
	v.problem(EntryChanged, e, "the entry does not give its digest")
}

func (v *verifier) details(r row) {
	if v.key == nil {
		return
	}
	plain, err := v.key.Open(r.details, detailsAAD(v.tenant.String(), r.ID))
	if err != nil {
		v.problem(DetailsUnreadable, r.link, "the details do not open")
		return
	}
	if detailsDigest(v.key, v.tenant.String(), r.content, plain) != r.DetailsDigest {
		v.problem(DetailsMismatch, r.link, "content and details do not give their keyed digest")
	}
}

const checkpointsSQL = `
SELECT sequence, digest, key_id, signature, create_time
  FROM audit_checkpoints
 WHERE tenant_id = $1 AND sequence > $2 AND sequence <= $3
 ORDER BY sequence
 LIMIT $4`

// fill reads the next page of checkpoints when the present one is used up.
func (v *verifier) fill(ctx context.Context) error {
	if len(v.checkpoints) > 0 || v.read >= v.lastStored {
		return nil
	}
	err := v.l.db.Read(ctx, v.tenant, func(b *pgx.Batch) {
		b.Queue(checkpointsSQL, v.tenant, v.read, v.lastStored, verifyPage).Query(func(rows pgx.Rows) (err error) {
			v.checkpoints, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (Checkpoint, error) {
				c := Checkpoint{TenantID: v.tenant.String()}
				err := r.Scan(&c.Sequence, &c.Digest, &c.KeyID, &c.Signature, &c.Time)
				c.Time = c.Time.UTC()
				return c, err
			})
			return err
		})
	})
	if err != nil {
		return err
	}
	v.read = v.lastStored
	if n := len(v.checkpoints); n == verifyPage {
		v.read = v.checkpoints[n-1].Sequence
	}
	return nil
}

// reach compares the checkpoints up to entry e with the chain.
func (v *verifier) reach(ctx context.Context, e link) error {
	for {
		if err := v.fill(ctx); err != nil {
			return err
		}
		if len(v.checkpoints) == 0 || v.checkpoints[0].Sequence > e.Sequence {
			return nil
		}
		c := v.checkpoints[0]
		v.checkpoints = v.checkpoints[1:]
		if !v.holds(c, "stored") {
			continue
		}
		if c.Sequence == e.Sequence && c.Digest != e.Digest {
			v.problem(ChainReplaced, e, "the stored checkpoint of %s has another digest", c.Time.Format(time.RFC3339))
			continue
		}
		v.covers(c.Sequence)
		if c.Sequence == e.Sequence {
			v.rep.Checkpoint = &c
			v.uncoveredAge = time.Time{}
		}
	}
}

// holds checks the signature of a checkpoint, stored or given.
func (v *verifier) holds(c Checkpoint, origin string) bool {
	at := link{Sequence: c.Sequence}
	pub, known := v.l.keys[c.KeyID]
	switch {
	case !known:
		v.problem(CheckpointUnknownKey, at, "the %s checkpoint names key %q, which this server does not know", origin, bounded(c.KeyID))
	case !c.SignedBy(pub):
		v.problem(CheckpointForged, at, "the signature of the %s checkpoint is not one of key %s", origin, c.KeyID)
	default:
		return true
	}
	return false
}

// bounded keeps a foreign text out of the report beyond its first 100 bytes.
func bounded(s string) string { return s[:min(len(s), 100)] }

func (v *verifier) covers(sequence int64) {
	if sequence-v.covered > checkpointEntries {
		v.problem(CheckpointMissing, link{Sequence: v.covered + 1}, "entries %d to %d have no checkpoint", v.covered+1, sequence-1)
	}
	v.covered = sequence
}

// tail checks what lies at and beyond the end of the chain.
func (v *verifier) tail(ctx context.Context) error {
	e := v.last
	v.rep.LastSequence, v.rep.LastDigest = e.Sequence, e.Digest
	if v.headSeq != e.Sequence || v.headDig != e.Digest {
		v.problem(HeadMismatch, link{Sequence: v.headSeq}, "the head says entry %d, the chain ends with entry %d", v.headSeq, e.Sequence)
	}
	cut := v.external != nil && v.external.Sequence > e.Sequence
	if cut {
		v.problem(TailCut, link{Sequence: v.external.Sequence}, "the given checkpoint has entry %d, the chain ends with entry %d", v.external.Sequence, e.Sequence)
	}
	for {
		if err := v.fill(ctx); err != nil {
			return err
		}
		if len(v.checkpoints) == 0 {
			break
		}
		for _, c := range v.checkpoints {
			if v.holds(c, "stored") && !cut {
				cut = true
				v.problem(TailCut, link{Sequence: c.Sequence}, "a stored checkpoint has entry %d, the chain ends with entry %d", c.Sequence, e.Sequence)
			}
		}
		v.checkpoints = nil
	}
	if cut {
		return nil
	}
	old := !v.uncoveredAge.IsZero() && v.l.now().Sub(v.uncoveredAge) > uncoveredLimit
	if e.Sequence-v.covered > checkpointEntries || old && e.Sequence > v.covered {
		v.problem(CheckpointMissing, link{Sequence: v.covered + 1}, "entries %d to %d have no checkpoint", v.covered+1, e.Sequence)
	}
	return nil
}

// unsealed counts the entries that had no place at the start, and holds them
// against the tenant's key: until they have one, nothing else defends them. Those
// sealed since are among them, or they would be counted nowhere.
func (v *verifier) unsealed(ctx context.Context) error {
	const sql = recordColumns + `
   AND (sequence IS NULL OR sequence > $5) AND ordinal > $2 AND ordinal <= $3
 ORDER BY ordinal
 LIMIT $4`
	after := int64(math.MinInt64)
	for {
		rows, err := v.l.readRows(ctx, v.tenant, sql, []any{v.tenant, after, v.arrived, verifyPage, v.end})
		if err != nil {
			return err
		}
		for _, r := range rows {
			v.rep.Unsealed++
			v.details(r)
		}
		if len(rows) < verifyPage {
			return nil
		}
		after = rows[len(rows)-1].Ordinal
	}
}
