package audit

import (
	"crypto/ed25519"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/seal"
)

func kinds(rep Report) (ks []string) {
	for _, p := range rep.Problems {
		ks = append(ks, fmt.Sprintf("%s@%d", p.Kind, p.Sequence))
	}
	return ks
}

// rebuild writes the chain anew from the stored entries, as one who knows the
// form and owns the database would, and sets the head.
func (w *world) rebuild(tb testing.TB) {
	tb.Helper()
	ctx := tb.Context()
	rows, err := w.log.readRows(ctx, w.t, recordColumns+` AND sequence IS NOT NULL ORDER BY sequence`, []any{w.t})
	if err != nil {
		tb.Fatal(err)
	}
	w.exec(tb, `UPDATE audit_entries SET sequence = -sequence WHERE tenant_id = $1`, w.t)
	previous := ""
	for i, r := range rows {
		e := r.link
		e.Sequence, e.PreviousDigest = int64(i+1), previous
		previous = e.digest(w.t.String())
		w.exec(tb, `UPDATE audit_entries SET sequence = $2, previous_digest = $3, digest = $4 WHERE audit_entry_id = $1`,
			e.ID, e.Sequence, e.PreviousDigest, previous)
	}
	w.exec(tb, `UPDATE audit_heads SET sequence = $2, digest = $3 WHERE tenant_id = $1`, w.t, len(rows), previous)
}

// Each way to tamper, done by the owner of the tables to a chain of ten with a
// checkpoint at ten, and what Verify must call it and where.
func TestVerify_NamesEachTampering(t *testing.T) {
	t.Parallel()
	const at = ` WHERE sequence = 5`
	cases := map[string]struct {
		tamper func(*testing.T, *world)
		want   []string
	}{
		"changed":   {sql(`UPDATE audit_entries SET actor = 'mallory'` + at), []string{"entry.changed@5", "details.mismatch@5"}},
		"details":   {sql(`UPDATE audit_entries SET details = set_byte(details, 30, get_byte(details, 30) # 1)` + at), []string{"details.unreadable@5"}},
		"no detail": {sql(`UPDATE audit_entries SET details = ''` + at), []string{"details.unreadable@5"}},
		"swapped details": {sql(`UPDATE audit_entries SET details = (SELECT details FROM audit_entries WHERE sequence = 6)` + at),
			[]string{"details.unreadable@5"}},
		"removed":  {sql(`DELETE FROM audit_entries` + at), []string{"entry.removed@5"}},
		"first":    {sql(`DELETE FROM audit_entries WHERE sequence <= 2`), []string{"entry.removed@1"}},
		"unsealed": {sql(`UPDATE audit_entries SET sequence = NULL` + at), []string{"entry.removed@5"}},
		"reordered": {sql(`UPDATE audit_entries SET sequence = -6`+at, `UPDATE audit_entries SET sequence = 5 WHERE sequence = 6`,
			`UPDATE audit_entries SET sequence = 6 WHERE sequence = -6`),
			[]string{"entry.moved@5", "chain.broken@5", "entry.moved@6", "chain.broken@6", "chain.broken@7"}},
		"tail cut":      {sql(`DELETE FROM audit_entries WHERE sequence > 8`), []string{"head.mismatch@10", "tail.cut@10"}},
		"tail and head": {cutTo(8), []string{"tail.cut@10"}},
		"all":           {sql(`DELETE FROM audit_entries`, `DELETE FROM audit_heads`), []string{"tail.cut@10"}},
		"head":          {sql(`UPDATE audit_heads SET digest = 'x'`), []string{"head.mismatch@10"}},
		"no head":       {sql(`DELETE FROM audit_heads`), []string{"head.mismatch@0"}},
		"head back":     {sql(`UPDATE audit_heads SET sequence = 9`), []string{"head.mismatch@9"}},
		"removed and rebuilt": {func(t *testing.T, w *world) {
			sql(`DELETE FROM audit_entries`+at)(t, w)
			w.rebuild(t)
			w.add(t, w.t, 1)
			w.sealNow(t, w.t)
		}, []string{"chain.replaced@10"}},
		"changed and rebuilt, checkpoints gone": {func(t *testing.T, w *world) {
			sql(`UPDATE audit_entries SET actor = 'mallory'`+at, `DELETE FROM audit_checkpoints`)(t, w)
			w.rebuild(t)
		}, []string{"details.mismatch@5"}},
		"checkpoint's digest": {sql(`UPDATE audit_checkpoints SET digest = 'x'`), []string{"checkpoint.forged@10"}},
		"checkpoint's time":   {sql(`UPDATE audit_checkpoints SET create_time = create_time + interval '1 s'`), []string{"checkpoint.forged@10"}},
		"checkpoint's place":  {sql(`UPDATE audit_checkpoints SET sequence = 9`), []string{"checkpoint.forged@9"}},
		"checkpoint's key":    {sql(`UPDATE audit_checkpoints SET key_id = 'ed25519:00'`), []string{"checkpoint.unknown_key@10"}},
		"checkpoints gone, later": {func(t *testing.T, w *world) {
			sql(`DELETE FROM audit_checkpoints`)(t, w)
			w.clock.advance(uncoveredLimit + time.Minute)
		}, []string{"checkpoint.missing@1"}},
		"checkpoint of another key": {func(t *testing.T, w *world) {
			other := seal.NewSigner(seal.DeriveSeed(make([]byte, 32), "mallory"))
			forged := w.newLog(t, other).sign(w.t.String(), 10, "x")
			w.exec(t, `UPDATE audit_checkpoints SET digest = 'x', key_id = $1, signature = $2`, forged.KeyID, forged.Signature)
		}, []string{"checkpoint.unknown_key@10"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.add(t, w.t, 10)
			w.flush(t)
			w.mustOK(t, w.t, 10)
			c.tamper(t, w)
			rep := w.verify(t, w.t, nil)
			if rep.OK || !slices.Equal(kinds(rep), c.want) {
				t.Errorf("OK %v, got %q, want %q", rep.OK, kinds(rep), c.want)
			}
			for _, p := range rep.Problems {
				if p.Detail == "" {
					t.Errorf("%s without a detail", p.Kind)
				}
			}
		})
	}
}

// Which of two entries with one sequence is read first is up to their ids.
func TestVerify_NamesADuplicate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 10)
	w.flush(t)
	sql(`DROP INDEX audit_entries_by_sequence`, `UPDATE audit_entries SET sequence = 5 WHERE sequence = 6`)(t, w)
	rep := w.verify(t, w.t, nil)
	for _, want := range []string{"entry.moved@5", "entry.duplicate@5", "entry.removed@6"} {
		if rep.OK || !slices.Contains(kinds(rep), want) {
			t.Errorf("OK %v, %q without %s", rep.OK, kinds(rep), want)
		}
	}
}

func sql(statements ...string) func(*testing.T, *world) {
	return func(t *testing.T, w *world) {
		t.Helper()
		for _, s := range statements {
			w.exec(t, s)
		}
	}
}

// cutTo removes the tail and sets the head back, so that the chain is sound in
// itself.
func cutTo(n int) func(*testing.T, *world) {
	return func(t *testing.T, w *world) {
		t.Helper()
		w.exec(t, `DELETE FROM audit_entries WHERE sequence > $1`, n)
		w.exec(t, `UPDATE audit_heads SET sequence = $1, digest = (SELECT digest FROM audit_entries WHERE sequence = $1)`, n)
	}
}

// A checkpoint kept outside finds what the database no longer can.
func TestVerify_AgainstAnOutsideCheckpoint(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 10)
	w.flush(t)
	kept := *w.mustOK(t, w.t, 10).Checkpoint
	if !kept.SignedBy(signer.Public()) || kept.Sequence != 10 {
		t.Fatalf("got %+v", kept)
	}
	w.add(t, w.t, 2)
	w.flush(t)
	if rep := w.verify(t, w.t, &kept); !rep.OK || rep.Checkpoint.Sequence != 12 {
		t.Fatalf("a sound chain: %+v", rep)
	}

	changed := kept
	changed.Sequence = 9
	if got := kinds(w.verify(t, w.t, &changed)); !slices.Equal(got, []string{"checkpoint.forged@9"}) {
		t.Errorf("a changed checkpoint: %q", got)
	}
	foreign := w.newLog(t, seal.NewSigner(seal.DeriveSeed(make([]byte, 32), "other"))).sign(w.t.String(), 10, kept.Digest)
	if got := kinds(w.verify(t, w.t, &foreign)); !slices.Equal(got, []string{"checkpoint.unknown_key@10"}) {
		t.Errorf("a foreign checkpoint: %q", got)
	}

	cutTo(8)(t, w)
	w.exec(t, `DELETE FROM audit_checkpoints`)
	if rep := w.verify(t, w.t, nil); !rep.OK {
		t.Errorf("without the outside checkpoint a fresh cut cannot be seen, yet: %q", kinds(rep))
	}
	if got := kinds(w.verify(t, w.t, &kept)); !slices.Equal(got, []string{"tail.cut@10"}) {
		t.Errorf("cut: %q", got)
	}
	w.add(t, w.t, 5) // the chain grows over the cut
	w.sealNow(t, w.t)
	if got := kinds(w.verify(t, w.t, &kept)); !slices.Equal(got, []string{"chain.replaced@10"}) {
		t.Errorf("cut and grown: %q", got)
	}
}

func TestVerify_KnowsEarlierKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 1)
	w.flush(t)
	next := seal.NewSigner(seal.DeriveSeed(make([]byte, 32), "next"))
	if rep, err := w.newLog(t, next).Verify(t.Context(), w.t, nil); err != nil || rep.OK {
		t.Errorf("an unknown key passes: %+v, %v", rep, err)
	}
	l, err := New(w.db, w.vault, next, Options{Now: w.clock.Now, KnownKeys: []ed25519.PublicKey{signer.Public()}})
	if err != nil {
		t.Fatal(err)
	}
	if rep, err := l.Verify(t.Context(), w.t, nil); err != nil || !rep.OK {
		t.Errorf("a known key is refused: %+v, %v", rep, err)
	}
}

// An entry changed, or made up, before it is sealed is found by its keyed
// digest, before and after.
func TestVerify_FindsForgeriesBeforeSealing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 3)
	w.exec(t, `UPDATE audit_entries SET kind = 'call.denied' WHERE ordinal = (SELECT min(ordinal) FROM audit_entries)`)
	w.exec(t, `INSERT INTO audit_entries (tenant_id, audit_entry_id, kind, details, details_digest, create_time)
		SELECT tenant_id, 'aud_made_up', 'consent.decided', details, details_digest, create_time FROM audit_entries ORDER BY ordinal LIMIT 1`)
	if got := kinds(w.verify(t, w.t, nil)); !slices.Equal(got, []string{"details.mismatch@0", "details.unreadable@0"}) {
		t.Errorf("before: %q", got)
	}
	w.flush(t)
	if got := kinds(w.verify(t, w.t, nil)); !slices.Equal(got, []string{"details.mismatch@1", "details.unreadable@4"}) {
		t.Errorf("after: %q", got)
	}
}

func TestVerify_SurvivesErasureOfTheKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 3)
	w.flush(t)
	w.exec(t, `UPDATE tenants SET data_key = ''`)
	fresh, err := New(w.db, w.freshVault(t), signer, Options{Now: w.clock.Now})
	if err != nil {
		t.Fatal(err)
	}
	rep, err := fresh.Verify(t.Context(), w.t, nil)
	if err != nil || !rep.OK || rep.DetailsChecked || rep.Entries != 3 {
		t.Errorf("got %+v, %v", rep, err)
	}
	rs, _, err := fresh.List(t.Context(), w.t, Filter{})
	if err != nil || len(rs) != 3 || rs[0].Details != nil || rs[0].CallID == "" {
		t.Errorf("list: %+v, %v", rs, err)
	}
	w.exec(t, `UPDATE audit_entries SET actor = 'mallory' WHERE sequence = 2`)
	if rep, err = fresh.Verify(t.Context(), w.t, nil); err != nil || !slices.Equal(kinds(rep), []string{"entry.changed@2"}) {
		t.Errorf("tampering after erasure: %+v, %v", rep, err)
	}
}

func TestVerify_ListsLostRanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 1)
	w.append(t, Entry{Kind: SegmentLost, Details: []byte(`{"atMost":256}`)})
	w.flush(t)
	rep := w.verify(t, w.t, nil)
	if !rep.OK || rep.Lost != 1 || !slices.Equal(kinds(rep), []string{"range.lost@2"}) {
		t.Errorf("got %+v", rep)
	}
}

// The report stays bounded, and long chains need a checkpoint for each thousand.
func TestVerify_BoundsAndSpacing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 2500)
	w.sealNow(t, w.t)
	rep := w.mustOK(t, w.t, 2500)
	if rep.Checkpoint == nil || rep.Checkpoint.Sequence != 2000 {
		t.Fatalf("checkpoint %+v", rep.Checkpoint)
	}
	w.exec(t, `DELETE FROM audit_checkpoints WHERE sequence = 1000`)
	if got := kinds(w.verify(t, w.t, nil)); !slices.Equal(got, []string{"checkpoint.missing@1"}) {
		t.Errorf("one checkpoint gone: %q", got)
	}
	w.exec(t, `DELETE FROM audit_checkpoints`)
	if got := kinds(w.verify(t, w.t, nil)); !slices.Equal(got, []string{"checkpoint.missing@1"}) {
		t.Errorf("all checkpoints gone: %q", got)
	}
	w.exec(t, `UPDATE audit_entries SET actor = 'mallory' WHERE sequence <= 300`)
	rep = w.verify(t, w.t, nil)
	if len(rep.Problems) != maxProblems || rep.MoreProblems != 600+1-maxProblems {
		t.Errorf("%d problems and %d more", len(rep.Problems), rep.MoreProblems)
	}
}

// Property: whatever single row is changed in whatever column that means
// something, Verify finds it, and it names the row's own sequence or, when the
// row lost it, the hole.
func TestVerify_FindsEverySingleRowMutation(t *testing.T) {
	t.Parallel()
	const n = 12
	w := newWorld(t)
	other := w.newTenant(t)
	w.add(t, w.t, n)
	w.flush(t)
	w.exec(t, `ALTER TABLE audit_entries ALTER COLUMN ordinal SET GENERATED BY DEFAULT`)
	for _, table := range []string{"audit_entries", "audit_heads", "audit_checkpoints"} {
		w.exec(t, fmt.Sprintf(`CREATE TABLE saved_%[1]s AS SELECT * FROM %[1]s`, table))
	}
	entry := map[string]string{
		"tenant_id": `'` + other.String() + `'`, "audit_entry_id": text("audit_entry_id"), "ordinal": `ordinal + 1000 + $R`,
		"kind": text("kind"), "session_id": text("session_id"), "call_id": text("call_id"), "consent_id": text("consent_id"),
		"server_id": text("server_id"), "actor": text("actor"), "subject_source": text("subject_source"), "subject": text("subject"),
		"details":        `set_byte(details, $R % length(details), (get_byte(details, $R % length(details)) + 1) % 256)`,
		"details_digest": text("details_digest"), "create_time": `create_time + interval '1 microsecond' * (1 + $R)`,
		"sequence": `sequence + 100 + $R`, "previous_digest": text("previous_digest"), "digest": text("digest"),
	}
	var columns []string
	rows, err := w.owner.Query(t.Context(), `SELECT column_name::text FROM information_schema.columns WHERE table_name = 'audit_entries'`)
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var c string
		if err := rows.Scan(&c); err != nil {
			t.Fatal(err)
		}
		columns = append(columns, c)
	}
	if len(columns) != len(entry) {
		t.Fatalf("the table has columns %q; mutate them all", columns)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, column := range columns {
		for range 4 {
			target := 1 + rng.IntN(n)
			set := strings.ReplaceAll(entry[column], "$R", fmt.Sprint(rng.IntN(500)))
			w.exec(t, fmt.Sprintf(`UPDATE audit_entries SET %s = %s WHERE sequence = %d`, column, set, target))
			rep := w.verify(t, w.t, nil)
			if named := slices.ContainsFunc(rep.Problems, func(p Problem) bool { return p.Sequence == int64(target) }); rep.OK || !named {
				// The last entry's hole shows as a head and a checkpoint without it.
				t.Errorf("entry %d, %s = %s: OK %v, %q", target, column, set, rep.OK, kinds(rep))
			}
			w.restore(t)
		}
	}
	for _, m := range []string{
		`audit_heads SET sequence = sequence + 1`, `audit_heads SET digest = digest || 'x'`,
		`audit_checkpoints SET sequence = sequence - 1`, `audit_checkpoints SET digest = digest || 'x'`,
		`audit_checkpoints SET signature = set_byte(signature, 7, (get_byte(signature, 7) + 1) % 256)`,
		`audit_checkpoints SET key_id = key_id || 'x'`, `audit_checkpoints SET create_time = create_time - interval '1 microsecond'`,
	} {
		w.exec(t, `UPDATE `+m+` WHERE tenant_id = $1`, w.t)
		if w.verify(t, w.t, nil).OK {
			t.Errorf("not found: %s", m)
		}
		w.restore(t)
	}
	w.mustOK(t, w.t, n)
}

// text is SQL for another value of a text column.
func text(column string) string { return column + ` || chr(97 + $R % 26)` }

func (w *world) restore(t *testing.T) {
	t.Helper()
	for _, table := range []string{"audit_entries", "audit_heads", "audit_checkpoints"} {
		w.exec(t, `DELETE FROM `+table)
		w.exec(t, fmt.Sprintf(`INSERT INTO %[1]s SELECT * FROM saved_%[1]s`, table))
	}
}
