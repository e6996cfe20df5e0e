package catalog

import (
	"context"
	"errors"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
)

// await waits for a list of the slot that is under way in this replica, or
// begins one. The list goes on when the caller leaves: what it brings is stored
// for the next one.
func (s *Service) await(ctx context.Context, w wish, force bool) error {
	f, err := s.takeOff(ctx, w, force)
	if err != nil {
		return err
	}
	wait := s.o.Wait
	if force {
		wait = s.o.ListTimeout + minAge
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
	case <-timer.C:
	}
	return fault.New(fault.Unavailable, pendingReason, "the server has not listed its definitions yet").
		In(fault.Server).Retry(minAge)
}

// landed stands for a list that ended after the caller looked: it looks again.
var landed = func() *flight {
	f := &flight{done: make(chan struct{})}
	close(f.done)
	return f
}()

func (s *Service) takeOff(ctx context.Context, w wish, force bool) (*flight, error) {
	sl := w.slot
	sl.mu.Lock()
	defer sl.mu.Unlock()
	if sl.flight != nil {
		return sl.flight, nil
	}
	if !force && sl.landed != w.landed {
		return landed, nil
	}
	if err := s.admit(w.key); err != nil {
		return nil, err
	}
	f := &flight{done: make(chan struct{}), err: errPanicked}
	pending := sl.pending
	started := s.run(func() {
		defer s.discharge(w.key)
		s.fly(context.WithoutCancel(ctx), w, f, force, pending)
	})
	if !started {
		s.discharge(w.key)
		return nil, fault.New(fault.Unavailable, "SHUTTING_DOWN", "this replica is shutting down").Retry(minAge)
	}
	sl.flight, sl.pending = f, false
	sl.noise.begin()
	return f, nil
}

// admit bounds the lists under way, and those of one server, so that a server
// that never answers does not hold back the others.
func (s *Service) admit(k slotKey) error {
	server := contentKey{k.tenant, k.server}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lists >= maxLists || s.perList[server] >= maxServerLists {
		return fault.New(fault.Unavailable, "CATALOG_BUSY", "too many lists of this server are under way").Retry(minAge)
	}
	s.lists++
	s.perList[server]++
	return nil
}

func (s *Service) discharge(k slotKey) {
	server := contentKey{k.tenant, k.server}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lists--
	if s.perList[server]--; s.perList[server] == 0 {
		delete(s.perList, server)
	}
}

// fly makes one list and lets its waiters go.
func (s *Service) fly(ctx context.Context, w wish, f *flight, force, pending bool) {
	// Past the list itself there is only the database, with time-outs of its own.
	ctx, cancel := context.WithTimeout(ctx, s.o.ListTimeout+30*time.Second)
	defer cancel()
	defer context.AfterFunc(s.stopped, cancel)()
	err := errPanicked
	defer func() {
		sl := w.slot
		sl.mu.Lock()
		f.err = err
		sl.flight, sl.at = nil, time.Time{}
		sl.landed++
		sl.pending = sl.pending || pending && err != nil
		sl.noise.end(s.o.Now())
		sl.mu.Unlock()
		close(f.done)
	}()
	err = s.list(ctx, w, force)
}

// pollEvery is how often a replica looks whether the one that lists is done.
const pollEvery = 100 * time.Millisecond

// list makes a list, or waits for the replica that makes it.
func (s *Service) list(ctx context.Context, w wish, force bool) error {
	for {
		v, err := s.readView(ctx, w.key)
		if err != nil {
			return err
		}
		switch {
		case force:
		case v.newest() > w.known:
			return nil
		case v.own.retry > 0:
			return fault.New(fault.Unavailable, "CATALOG_UNAVAILABLE", "%s",
				firstText(v.own.staleReason, "the server's definitions could not be listed")).In(fault.Server).Retry(v.own.retry)
		}
		generation, err := s.begin(ctx, w, force)
		if err != nil {
			return err
		}
		if generation > 0 {
			return s.listAs(ctx, w, generation)
		}
		select {
		case <-ctx.Done():
			return postgres.Translate(ctx.Err())
		case <-time.After(pollEvery):
		}
	}
}

func (v *view) newest() int64 { return max(v.own.generation, v.public.generation) }

// listAs makes the list of this number.
func (s *Service) listAs(ctx context.Context, w wish, generation int64) (err error) {
	began := time.Now()
	defer func() {
		if s.o.Observer != nil {
			s.o.Observer.Listed(w.key.tenant, w.key.server, w.key.kind, time.Since(began), err)
		}
	}()
	listing, content, err := s.ask(ctx, w)
	if err != nil {
		f, hidden := listFault(err)
		reason := "listing failed: " + printable(f.Message)
		if failed := s.fail(ctx, w.key, generation, reason, hidden); failed != nil {
			return errors.Join(f, failed)
		}
		s.announce(ctx, w.key.tenant, w.key.server)
		return f
	}
	l := &made{key: w.key, server: w.server, scope: w.scope, generation: generation, content: content,
		public: listing.Public, ttlMillis: min(max(listing.TTL, 0), maxTTL).Milliseconds(),
		started: time.Since(began).Microseconds()}
	changed, err := s.swap(ctx, l)
	if err != nil {
		return errors.Join(err, s.release(ctx, w.key, generation))
	}
	if content.stored {
		s.keep(w.key.tenant, w.server.Name, content)
		if s.o.Cache != nil {
			s.o.Cache.Set(ctx, cacheKey(w.key.tenant, content.id), content.encoded, cacheFor)
		}
	}
	if changed > 0 && s.o.Observer != nil {
		s.o.Observer.Changed(w.key.tenant, w.key.server, w.key.kind, changed)
	}
	s.announce(ctx, w.key.tenant, w.key.server)
	return nil
}

// ask asks the server within the time of one list and examines the answer.
func (s *Service) ask(ctx context.Context, w wish) (Listing, *content, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.o.ListTimeout, errTimeout)
	defer cancel()
	listing, err := w.via.ListDefinitions(ctx, w.server, w.scope, w.key.kind)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = errors.Join(cause, err)
		}
		return Listing{}, nil, err
	}
	c, err := buildContent(w.server, w.key.kind, listing)
	return listing, c, err
}
