package catalog

import (
	"context"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Change says that what a server offers may not be what was seen last.
type Change struct {
	Tenant   tenant.ID
	ServerID string
	// Context is whose list it is, with only the members that the server's
	// isolation distinguishes. Nil means that of everyone.
	Context *Context
	// Kind is empty when anything may have changed.
	Kind Kind
	// Own spares the list that is shared by all users of the tenant: it is known
	// to be watched by others.
	Own bool
	// Connected says that the server announced nothing: a connection to it was
	// made, and what was listed before may be out of date.
	Connected bool
	// Opened is when that connection began to be made: a list that has ended since,
	// or that is under way, was made over it and is not out of date.
	Opened time.Time
	// Reason is for people: "the server announced a change", "reconnected".
	Reason string
}

// markEvery bounds how often the marks of one slot are written.
const markEvery = 200 * time.Millisecond

// quietAfter and quietMost bound how often a server is listed that announces a
// change with every list.
const (
	quietAfter = 5 * time.Second
	quietMost  = time.Minute
	echoTime   = 2 * time.Second
)

// noise notices a server that answers every list with an announcement, which
// would otherwise be listed without end.
type noise struct {
	listing bool
	ended   time.Time // of the last list
	echoed  bool      // an announcement came with or right after the last list
	echoes  int       // lists in a row with an echo
	quiet   time.Time // until then announcements do not count

	marked   time.Time // of the last mark written
	trailing bool      // a mark will be written
}

func (n *noise) begin() {
	if !n.echoed {
		n.echoes = 0
	}
	n.listing, n.echoed = true, false
}

func (n *noise) end(now time.Time) { n.listing, n.ended = false, now }

// heard counts one announcement.
func (n *noise) heard(now time.Time) {
	if n.echoed || !n.listing && (n.ended.IsZero() || now.Sub(n.ended) > echoTime) {
		return
	}
	n.echoed = true
	n.echoes++
	if n.echoes >= 2 {
		n.quiet = now.Add(min(quietMost, quietAfter<<min(n.echoes-2, 8)))
	}
}

// Invalidate makes replicas list again before they next use what the change is
// about. It is cheap to call often: marks of one context are written at most
// every 200 ms. An error means that other replicas may not know yet; this one
// does.
func (s *Service) Invalidate(ctx context.Context, c Change) error {
	if c.Tenant.IsZero() || c.Kind != "" && !ValidKind(c.Kind) {
		return fault.Wrap(errEncoding, "invalidate without a tenant or with an unknown kind")
	}
	kinds := allKinds
	if c.Kind != "" {
		kinds = withSame(c.Kind)
	}
	if c.Context == nil {
		return s.mark(ctx, c.Tenant, c.ServerID, nil, kinds, c.Reason)
	}
	var due []Kind
	for _, kind := range kinds {
		k := slotKey{c.Tenant, c.ServerID, c.Context.name(s.o.Declared), kind}
		if s.heard(ctx, k, c) {
			due = append(due, kind)
		}
	}
	if len(due) == 0 {
		return nil
	}
	name := c.Context.name(s.o.Declared)
	names := []string{name, publicName(s.o.Declared)}
	if c.Own {
		names = names[:1]
	}
	err := s.mark(ctx, c.Tenant, c.ServerID, names, due, c.Reason)
	if err != nil {
		s.keepPending(c.Tenant, c.ServerID, name, due)
	}
	return err
}

// heard notes an announcement and reports whether its mark is to be written now;
// otherwise one is written soon.
func (s *Service) heard(ctx context.Context, k slotKey, c Change) bool {
	sl := s.slots.getOrAdd(k, 1, func() *slot { return &slot{} })
	now := s.o.Now()
	sl.mu.Lock()
	defer sl.mu.Unlock()
	if !c.Connected {
		sl.noise.heard(now)
	} else if !c.Opened.IsZero() && (sl.flight != nil || sl.noise.ended.After(c.Opened)) {
		return false
	}
	// What does not count yet is not written either: a dispatch, which believes
	// every mark, would refuse what readers are still shown.
	wait := max(markEvery, sl.noise.quiet.Sub(now))
	if wait == markEvery && (sl.noise.marked.IsZero() || now.Sub(sl.noise.marked) >= markEvery) {
		sl.noise.marked = now
		return true
	}
	sl.pending = true
	if !sl.noise.trailing {
		sl.noise.trailing = s.run(func() { s.markLater(context.WithoutCancel(ctx), k, sl, wait, c.Reason) })
	}
	return false
}

// markLater writes the mark for announcements that came too fast, unless a list
// of this replica began after them: its number is later than what they annul.
func (s *Service) markLater(ctx context.Context, k slotKey, sl *slot, wait time.Duration, reason string) {
	ctx, cancel := context.WithTimeout(ctx, wait+15*time.Second)
	defer cancel()
	defer context.AfterFunc(s.stopped, cancel)()
	select {
	case <-time.After(wait):
	case <-ctx.Done():
	}
	sl.mu.Lock()
	sl.noise.trailing = false
	sl.noise.marked = s.o.Now()
	wanted := sl.pending
	sl.mu.Unlock()
	if !wanted || ctx.Err() != nil {
		return
	}
	// On failure the slot stays pending, which makes this replica list again.
	if err := s.mark(ctx, k.tenant, k.server, []string{k.context, publicName(s.o.Declared)}, []Kind{k.kind}, reason); err == nil {
		sl.mu.Lock()
		sl.pending = false
		sl.mu.Unlock()
	}
}

func (s *Service) keepPending(t tenant.ID, serverID, contextName string, kinds []Kind) {
	for _, kind := range kinds {
		sl := s.slots.getOrAdd(slotKey{t, serverID, contextName, kind}, 1, func() *slot { return &slot{} })
		sl.mu.Lock()
		sl.pending = true
		sl.mu.Unlock()
	}
}

func (s *Service) mark(ctx context.Context, t tenant.ID, serverID string, contexts, kinds []string, reason string) error {
	err := s.o.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		return invalidate(ctx, tx, serverID, contexts, kinds, firstText(printable(reason), "the server announced a change"))
	})
	s.announce(ctx, t, serverID)
	return err
}
