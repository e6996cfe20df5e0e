package calls

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

var errReusedElsewhere = fault.New(fault.Exists, "REQUEST_ID_REUSED", "requestId was used for another call")

// replica is this process in the table of replicas. Postgres decides who is
// alive; a replica that cannot write its heartbeat stops dispatching before
// anybody may take it for dead.
type replica struct {
	db  *tenant.DB
	cfg Config

	mu    sync.Mutex
	epoch int64
	// beat is when the last heartbeat that arrived was sent, by the monotonic clock.
	beat time.Time
	// ended says that this replica has stopped and takes no other epoch.
	ended bool
}

// register takes a new epoch. A sole replica declares all earlier ones dead.
func (r *replica) register(ctx context.Context) error {
	sent := time.Now()
	var epoch int64
	err := r.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if r.cfg.Sole {
			if _, err := tx.Exec(ctx, `UPDATE replicas SET state = 'DEAD' WHERE state = 'ALIVE'`); err != nil {
				return err
			}
		}
		return tx.QueryRow(ctx, `INSERT INTO replicas (name) VALUES ($1) RETURNING epoch`, r.cfg.Name).Scan(&epoch)
	})
	if err != nil {
		return err
	}
	r.mu.Lock()
	ended := r.ended
	if !ended {
		r.epoch, r.beat = epoch, sent
	}
	r.mu.Unlock()
	if ended { // it stopped while it registered again
		return r.leave(ctx, epoch)
	}
	return nil
}

// heartbeat says that this replica lives. One that was declared dead meanwhile
// goes on under a new epoch: what it had under the old one is no longer its own.
func (r *replica) heartbeat(ctx context.Context) error {
	sent := time.Now()
	r.mu.Lock()
	epoch, ended := r.epoch, r.ended
	r.mu.Unlock()
	if ended {
		return nil
	}
	alive := false
	err := r.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE replicas SET heartbeat = clock_timestamp() WHERE epoch = $1 AND state = 'ALIVE'`, epoch)
		alive = tag.RowsAffected() == 1
		return err
	})
	if err != nil {
		return err
	}
	if !alive {
		return r.register(ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.beat = sent
	return nil
}

// mayDispatch returns the epoch and whether the replica was heard of lately.
func (r *replica) mayDispatch() (int64, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.epoch, !r.ended && time.Since(r.beat) < r.cfg.Isolation
}

// bury declares replicas dead whose heartbeat is too old.
func (r *replica) bury(ctx context.Context) (n int64, err error) {
	err = r.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE replicas SET state = 'DEAD'
			WHERE state = 'ALIVE' AND heartbeat < clock_timestamp() - $1::interval`, r.cfg.Death)
		n = tag.RowsAffected()
		return err
	})
	return n, err
}

// stopped says that this replica has ended in order.
func (r *replica) stopped(ctx context.Context) error {
	r.mu.Lock()
	r.ended = true
	epoch := r.epoch
	r.mu.Unlock()
	return r.leave(ctx, epoch)
}

func (r *replica) leave(ctx context.Context, epoch int64) error {
	return r.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE replicas SET state = 'STOPPED' WHERE epoch = $1 AND state = 'ALIVE'`, epoch)
		return err
	})
}

// Run keeps the heartbeat and the recovery of interrupted calls going until ctx
// ends. Both loops are waited for.
func (s *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	loop := func(every time.Duration, what string, fn func(context.Context) error) {
		wg.Go(func() {
			t := time.NewTicker(every)
			defer t.Stop()
			for {
				if err := fn(ctx); err != nil && ctx.Err() == nil {
					s.log.WarnContext(ctx, what, "error", detail(err))
				}
				select {
				case <-t.C:
				case <-ctx.Done():
					return
				}
			}
		})
	}
	loop(s.cfg.Heartbeat, "heartbeat", func(ctx context.Context) error {
		// A heartbeat that takes longer than its interval is no sign of life.
		ctx, cancel := context.WithTimeout(ctx, s.cfg.Heartbeat)
		defer cancel()
		return s.replica.heartbeat(ctx)
	})
	loop(time.Second, "recover calls", s.Sweep)
	wg.Go(func() { s.noteUpdates(ctx) })
	wg.Wait()
	return nil
}

// Drain makes waiters answer early; nothing new is admitted.
func (s *Service) Drain() {
	s.drainOnce.Do(func() {
		s.mu.Lock()
		s.draining = true
		s.mu.Unlock()
		close(s.drain)
	})
}

// Stop drains, lets the calls in execution end until ctx is over, then cancels
// them and records what is known of each. It loses no accepted call.
func (s *Service) Stop(ctx context.Context) error {
	s.Drain()
	ended := make(chan struct{})
	go func() {
		s.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
	s.stopWork()
	<-ended
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return s.replica.stopped(last)
}

// enter takes a place for a proposal; it is refused while draining and when too
// many calls are in execution.
func (s *Service) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.draining:
		return fault.New(fault.Unavailable, "DRAINING", "this replica is stopping; try another").Retry(time.Second)
	case len(s.live) >= s.cfg.MaxLive:
		return fault.New(fault.Unavailable, "TOO_MANY_CALLS", "this replica executes as many calls as it can; try again").Retry(time.Second)
	}
	s.running.Add(1)
	return nil
}
