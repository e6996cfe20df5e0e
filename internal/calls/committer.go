package calls

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// maxGroup bounds the reads that one transaction records.
const maxGroup = 64

// committer records finished reads, many in one transaction. While one commit of
// a tenant is under way the next ones gather; nobody waits for a timer.
type committer struct {
	s  *Service
	mu sync.Mutex
	// waiting holds a queue for each tenant whose commit loop runs.
	waiting map[tenant.ID][]*member
}

// member is one read that waits for its commit.
type member struct {
	call     *Call
	prepared audit.Prepared
	// repeated says that the request id belongs to another call.
	repeated bool
	done     chan error
}

func newCommitter(s *Service) *committer {
	return &committer{s: s, waiting: map[tenant.ID][]*member{}}
}

// commit records the call and its audit entry and returns once they are durable.
// It reports whether the request id was taken by another call.
func (k *committer) commit(ctx context.Context, c *Call, p audit.Prepared) (repeated bool, err error) {
	m := &member{call: c, prepared: p, done: make(chan error, 1)}
	k.mu.Lock()
	queue, running := k.waiting[c.Tenant]
	k.waiting[c.Tenant] = append(queue, m)
	if !running {
		k.s.running.Add(1) // the caller itself is counted, so the count is not zero
		go func() {
			defer k.s.running.Done()
			k.loop(c.Tenant)
		}()
	}
	k.mu.Unlock()
	select {
	case err = <-m.done:
		return m.repeated, err
	case <-ctx.Done():
		// The commit may still happen; a repeat of it finds the call recorded.
		return false, ctx.Err()
	}
}

func (k *committer) loop(t tenant.ID) {
	for {
		k.mu.Lock()
		queue := k.waiting[t]
		if len(queue) == 0 {
			delete(k.waiting, t)
			k.mu.Unlock()
			return
		}
		n := min(len(queue), maxGroup)
		group := slices.Clone(queue[:n])
		k.waiting[t] = queue[n:]
		k.mu.Unlock()
		// One order of request ids for all committers: they wait for each other where
		// an id is taken.
		slices.SortFunc(group, func(a, b *member) int { return cmp.Compare(a.call.RequestID, b.call.RequestID) })
		k.record(t, group)
	}
}

// record commits the group in one round trip. When that fails each member is
// committed alone, which also tells whose request id is taken: one bad member
// must not cost the others their record.
func (k *committer) record(t tenant.ID, group []*member) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := k.together(ctx, t, group)
	for _, m := range group {
		if err != nil {
			m.done <- k.alone(ctx, t, m)
			continue
		}
		m.done <- nil
	}
	k.s.recorded(t)
}

// together records the group in one round trip, unless somebody is to be told. A call whose request id is taken
// is not inserted, its attempt then belongs to no call, and all of it fails.
func (k *committer) together(ctx context.Context, t tenant.ID, group []*member) error {
	rows := make([][]any, len(group))
	for i, m := range group {
		var err error
		if rows[i], err = insertArgs(m.call); err != nil {
			return err
		}
	}
	queue := func(b *pgx.Batch) {
		for _, args := range rows {
			b.Queue(insertSQL, args...)
		}
		queueRest(b, t, group)
	}
	told, err := k.s.endsWanted(ctx, t)
	if err != nil {
		return err
	}
	if !told {
		return k.s.deps.DB.Write(ctx, t, queue)
	}
	return k.s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		b := &pgx.Batch{}
		queue(b)
		if err := tx.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
		return k.s.announce(ctx, tx, callsOf(group)...)
	})
}

func callsOf(group []*member) []*Call {
	out := make([]*Call, len(group))
	for i, m := range group {
		out[i] = m.call
	}
	return out
}

// alone records one member, or learns that its request id is taken.
func (k *committer) alone(ctx context.Context, t tenant.ID, m *member) error {
	return k.s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		err := k.s.insert(ctx, tx, m.call)
		if m.repeated = errors.Is(err, errRepeated); m.repeated {
			return nil
		}
		if err != nil {
			return err
		}
		b := &pgx.Batch{}
		queueRest(b, t, []*member{m})
		if err := tx.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
		return k.s.announce(ctx, tx, m.call)
	})
}

// queueRest queues what goes with the calls: attempts, audit entries and the
// sessions' counts.
func queueRest(b *pgx.Batch, t tenant.ID, group []*member) {
	counts := map[string]int{}
	var order []string
	for _, m := range group {
		for _, a := range m.call.Attempts {
			b.Queue(insertAttemptSQL, attemptArgs(m.call, a)...)
		}
		m.prepared.Queue(b)
		if counts[m.call.SessionID] == 0 {
			order = append(order, m.call.SessionID)
		}
		counts[m.call.SessionID]++
	}
	slices.Sort(order) // one order of row locks for all committers
	for _, id := range order {
		sessions.QueueCount(b, t, id, counts[id])
	}
}

// finishPlain records a read with its outcome, in one commit.
func (e *execution) finishPlain(o outcome, state State) {
	end := e.finished(o, state)
	e.persist(func(ctx context.Context) error {
		// Each try has a call of its own: one that timed out may still be committing.
		again := *end
		c := &again
		p, err := e.s.deps.Audit.Prepare(ctx, c.Tenant, e.s.entry(c, endKind(c.State), e.actor, endDetails(c)))
		if err != nil {
			return err
		}
		c.Receipt = p.ID()
		repeated, err := e.s.committer.commit(ctx, c, p)
		if err != nil {
			return err
		}
		if repeated {
			return e.adopt(ctx, c)
		}
		c.Recorded = true
		e.mu.Lock()
		e.call = c
		e.mu.Unlock()
		e.s.observe(c)
		return nil
	})
	// Nobody elsewhere can wait for a call that was not recorded before: no signal.
	e.s.hub.wake(e.key)
}

// adopt shows the call that already has this request id: this read's own commit
// that was thought lost, or the same read on another replica.
func (e *execution) adopt(ctx context.Context, c *Call) error {
	first, err := e.s.first(ctx, c)
	if err != nil && !errors.Is(err, errReusedElsewhere) {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.err = err
		return nil
	}
	e.call = first
	return nil
}

// first returns the recorded call that has this call's request id.
func (s *Service) first(ctx context.Context, c *Call) (*Call, error) {
	var first *Call
	err := s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) (err error) {
		first, err = byRequest(ctx, tx, c.Subject, c.RequestID)
		return err
	})
	if err == nil && first.requestDigest != c.requestDigest {
		err = errReusedElsewhere
	}
	if err != nil {
		return nil, err
	}
	return first, nil
}
