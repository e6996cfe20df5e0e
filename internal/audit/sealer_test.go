package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func (w *world) freshVault(t *testing.T) *tenant.Vault {
	t.Helper()
	kek, err := seal.NewLocalKEK("k1", make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	ring, err := seal.NewRing(kek)
	if err != nil {
		t.Fatal(err)
	}
	return tenant.NewVault(w.db, ring)
}

func (w *world) append(t *testing.T, e Entry) string {
	t.Helper()
	var id string
	err := w.db.InTx(t.Context(), w.t, func(ctx context.Context, tx tenant.Tx) (err error) {
		id, err = w.log.Append(ctx, tx, e)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// Entries of a transaction that is rolled back, and of one that commits late,
// leave no hole and no lie.
func TestSealer_TransactionsThatRollBackOrCommitLate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append(t, w.sample(0)) // the key is in memory from here on
	gone := errors.New("gone")
	var late string
	err := w.db.InTx(t.Context(), w.t, func(ctx context.Context, tx tenant.Tx) (err error) {
		if late, err = w.log.Append(ctx, tx, w.sample(1)); err != nil {
			return err
		}
		err = w.db.InTx(ctx, w.t, func(ctx context.Context, tx tenant.Tx) error {
			if _, err := w.log.Append(ctx, tx, w.sample(2)); err != nil {
				return err
			}
			return gone
		})
		if !errors.Is(err, gone) {
			return fmt.Errorf("rolled back with %w", err)
		}
		w.append(t, w.sample(3))
		w.sealNow(t, w.t)
		w.mustOK(t, w.t, 2)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	w.sealNow(t, w.t)
	w.mustOK(t, w.t, 3)
	rs, _, err := w.log.List(t.Context(), w.t, Filter{Order: ByChain})
	if err != nil || len(rs) != 3 || rs[2].ID != late {
		t.Errorf("the late entry is not the last of the chain: %+v, %v", rs, err)
	}
}

// Two replicas seal while many write: one chain, no hole, nothing twice.
func TestSealer_TwoSealersRaceWithManyWriters(t *testing.T) {
	t.Parallel()
	const writers, each = 6, 40
	w := newWorld(t)
	other := w.newTenant(t)
	logs := []*Log{w.log, w.newLog(t, signer)}
	stop := make(chan struct{})
	var sealers, appenders sync.WaitGroup
	for _, l := range logs {
		sealers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := l.round(t.Context(), whenDue); err != nil {
					t.Errorf("round: %v", err)
				}
				if err := l.SealNow(t.Context(), w.t); err != nil {
					t.Errorf("seal now: %v", err)
				}
			}
		})
	}
	for i := range writers {
		appenders.Go(func() {
			for n := range each {
				to := w.t
				if n%4 == 0 {
					to = other
				}
				err := w.db.InTx(t.Context(), to, func(ctx context.Context, tx tenant.Tx) error {
					_, err := logs[i%2].Append(ctx, tx, w.sample(n))
					return err
				})
				if err != nil {
					t.Errorf("append: %v", err)
				}
			}
		})
	}
	appenders.Wait()
	close(stop)
	sealers.Wait()
	w.flush(t)
	w.mustOK(t, w.t, writers*each*3/4)
	w.mustOK(t, other, writers*each/4)
}

// A sealer that finds the head taken leaves the tenant to who has it.
func TestSealer_SkipsAHeldHead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(t, w.t, 1)
	w.sealNow(t, w.t)
	w.add(t, w.t, 1)
	err := w.db.InTx(t.Context(), w.t, func(ctx context.Context, tx tenant.Tx) error {
		if _, held, err := lockHead(ctx, tx, lockSkipping); err != nil || !held {
			return fmt.Errorf("head not held: %w", err)
		}
		b, err := w.log.sealBatch(ctx, w.t, lockSkipping, whenDue)
		if err != nil || !b.busy {
			t.Errorf("busy %v, %v", b.busy, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	w.sealNow(t, w.t)
	w.mustOK(t, w.t, 2)
}

func TestSealer_CheckpointsByAge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	count := func() (n int) {
		t.Helper()
		if err := w.owner.QueryRow(t.Context(), `SELECT count(*) FROM audit_checkpoints`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	round := func() {
		t.Helper()
		if err := w.log.round(t.Context(), whenDue); err != nil {
			t.Fatal(err)
		}
	}
	w.add(t, w.t, 1)
	round()
	if n := count(); n != 0 {
		t.Fatalf("%d checkpoints at once", n)
	}
	w.clock.advance(checkpointAge)
	round() // nothing to seal, but the minute is over
	if n := count(); n != 1 {
		t.Fatalf("%d checkpoints after a minute", n)
	}
	w.clock.advance(checkpointAge)
	round()
	if n := count(); n != 1 {
		t.Errorf("%d checkpoints without a new entry", n)
	}
	if rep := w.mustOK(t, w.t, 1); rep.Checkpoint == nil || rep.Checkpoint.Sequence != 1 {
		t.Errorf("checkpoint %+v", rep.Checkpoint)
	}
}

// Run seals at each tick, logs checkpoints, goes on past a tenant that cannot be
// sealed, and ends with its context.
func TestRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	broken := w.newTenant(t)
	var out lockedBuffer
	tick := make(chan time.Time)
	l, err := New(w.db, w.vault, signer, Options{Now: w.clock.Now, Tick: tick, Log: slog.New(slog.NewTextHandler(&out, nil))})
	if err != nil {
		t.Fatal(err)
	}
	w.log = l
	// A head set back onto a chain that is there: its next sequence is taken.
	w.add(t, broken, 2)
	w.sealNow(t, broken)
	w.exec(t, `UPDATE audit_heads SET sequence = 1 WHERE tenant_id = $1`, broken)
	w.add(t, broken, 1)
	w.add(t, w.t, maxBatch+10)

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- l.Run(ctx) }()
	tick <- time.Time{}
	tick <- time.Time{} // taken when the first round is over
	cancel()
	if err := <-done; err != nil {
		t.Errorf("run: %v", err)
	}
	rep := w.mustOK(t, w.t, maxBatch+10)
	if rep.Checkpoint == nil || rep.Checkpoint.Sequence != maxBatch {
		t.Errorf("checkpoint %+v", rep.Checkpoint)
	}
	text := out.String()
	if n := strings.Count(text, `msg="audit checkpoint"`); n != maxBatch/checkpointEntries {
		t.Errorf("%d checkpoints logged", n)
	}
	if n := strings.Count(text, `msg="audit entries not sealed" tenant=`+broken.String()); n != 1 {
		t.Errorf("the broken tenant was logged %d times in two rounds of one moment:\n%s", n, text)
	}
	if rep := w.verify(t, broken, nil); rep.OK || rep.Unsealed != 1 {
		t.Errorf("the broken tenant: %+v", rep)
	}
	if err := l.Flush(t.Context()); err == nil {
		t.Error("flush hides that a tenant could not be sealed")
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Verify reads while the sealer works: no false alarm.
func TestVerify_BesideASealer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stop := make(chan struct{})
	var g sync.WaitGroup
	g.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			w.add(t, w.t, 150)
			if err := w.log.Flush(t.Context()); err != nil {
				t.Errorf("flush: %v", err)
			}
		}
	})
	for range 20 {
		if rep := w.verify(t, w.t, nil); !rep.OK {
			t.Errorf("false alarm: %q", kinds(rep))
		}
	}
	close(stop)
	g.Wait()
}

func BenchmarkSeal(b *testing.B) {
	w := newWorld(b)
	for b.Loop() {
		b.StopTimer()
		w.add(b, w.t, 1000)
		b.StartTimer()
		w.sealNow(b, w.t)
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/1000, "us/entry")
}
