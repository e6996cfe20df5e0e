package catalog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// minAge is the age up to which a list counts as new, whatever a caller asks
// for, so that callers of one moment share one list.
const minAge = time.Second

// Anew as a maxAge asks PostgreSQL first whether a list still counts, instead of
// believing what this replica confirmed lately, and wants it no older than one
// moment's callers share.
const Anew = -1 * time.Nanosecond

// slot is what this replica knows about what one context sees.
type slot struct {
	mu    sync.Mutex // guards what follows
	view  view
	at    time.Time // when view was read; zero before
	drops uint64    // dropCount when view was read
	// pending says that a mark is not, or not surely, in PostgreSQL.
	pending bool
	flight  *flight
	landed  int // lists of this replica that ended
	noise   noise
}

// flight is a list under way in this replica; err is set when done is closed.
type flight struct {
	done chan struct{}
	err  error
}

// verdict is what a slot says about one wish.
type verdict struct {
	row    *seen // nil when nothing was seen
	fresh  bool
	noisy  bool
	reason string        // why it is not fresh
	retry  time.Duration // what is left of the wait after failures
	hidden bool
}

// Current returns what a context sees of one kind, not older than maxAge. It
// lists again when the last list is older, out of date or of another
// registration; one replica does so for all, and all callers wait for it.
//
// When that fails, or takes longer than Options.Wait or the context's deadline,
// the last good revision comes back with Stale and StaleReason set: callers
// refuse writes (CATALOG_STALE) and go on with reads. Without a last good one
// the error is a fault: Unavailable, or Denied with reason
// AUTHORIZATION_REQUIRED when the server refused this user's credentials, which
// also hides what the user saw before.
func (s *Service) Current(ctx context.Context, v Server, c Context, kind Kind, maxAge time.Duration) (*Revision, error) {
	w, err := s.wish(v, c, kind)
	if err != nil {
		return nil, err
	}
	var cause error
	for round := 0; ; round++ {
		got, err := s.look(ctx, &w, maxAge)
		if err != nil {
			return nil, err
		}
		if got.fresh {
			return s.revision(ctx, w, got, "")
		}
		// More than one list is for marks that came during the one before: while
		// users connect, each of them may bring one.
		if cause != nil || got.retry > 0 || round == maxRounds {
			return s.lastGood(ctx, w, got, cause)
		}
		if cause = s.await(ctx, w, false); cause != nil && errors.Is(ctx.Err(), context.Canceled) {
			return nil, postgres.Translate(ctx.Err())
		}
	}
}

// pendingReason is the reason of the fault that a list was not ready in time.
const pendingReason = "CATALOG_PENDING"

// maxRounds bounds the lists that one call of Current asks for.
const maxRounds = 8

// wish is a request for a slot.
type wish struct {
	key    slotKey
	server Server
	scope  Context
	slot   *slot
	via    Lister // who asks the server

	// What the last look saw: lists that ended here, and the newest anywhere.
	landed int
	known  int64
}

func (s *Service) wish(v Server, c Context, kind Kind) (wish, error) {
	if !ValidKind(kind) || c.Tenant.IsZero() || v.ID == "" {
		return wish{}, fault.Wrap(fmt.Errorf("catalog: kind %q, server %q", kind, v.ID), "find the catalog")
	}
	scope := v.scope(c)
	if v.Isolation != PerTenant && scope.Subject.IsZero() || v.Isolation == PerSession && scope.Session == "" {
		return wish{}, fault.New(fault.Precondition, "SUBJECT_REQUIRED", "this server is used for one user at a time; name the user")
	}
	k := slotKey{c.Tenant, v.ID, scope.name(s.o.Declared), kind}
	return wish{key: k, server: v, scope: scope, via: s.o.Lister, slot: s.slots.getOrAdd(k, 1, func() *slot { return &slot{} })}, nil
}

// look judges what is remembered, after asking PostgreSQL when it was last
// confirmed more than five seconds ago or a signal came.
func (s *Service) look(ctx context.Context, w *wish, maxAge time.Duration) (verdict, error) {
	now, drops := s.o.Now(), s.dropCount(w.key.server)
	sl := w.slot
	sl.mu.Lock()
	if maxAge != Anew && !sl.at.IsZero() && now.Sub(sl.at) < confirmFor && sl.drops == drops {
		defer sl.mu.Unlock()
		w.landed, w.known = sl.landed, sl.view.newest()
		return sl.judge(now, w.server.Registration, maxAge), nil
	}
	w.landed = sl.landed
	sl.mu.Unlock()
	v, err := s.readView(ctx, w.key)
	if err != nil {
		return verdict{}, err
	}
	sl.mu.Lock()
	defer sl.mu.Unlock()
	if !sl.at.After(now) {
		sl.view, sl.at, sl.drops = v, now, drops
	}
	w.known = sl.view.newest()
	return sl.judge(now, w.server.Registration, maxAge), nil
}

func (sl *slot) judge(now time.Time, registration int64, maxAge time.Duration) verdict {
	v := sl.view // a copy: rows of the verdict must not change later
	passed := max(0, now.Sub(sl.at))
	out := verdict{retry: v.own.retry - passed, hidden: v.own.hidden, noisy: now.Before(sl.noise.quiet)}
	if v.own.hidden {
		out.reason = v.own.staleReason
		return out
	}
	row := v.effective(registration)
	if row == nil {
		out.reason = v.own.staleReason
		return out
	}
	out.row = row
	marked := sl.pending || max(v.own.invalidated, row.invalidated) > row.generation
	limit := max(maxAge, minAge)
	if row.ttl > 0 {
		limit = min(limit, max(row.ttl, minAge))
	}
	switch age := row.age + passed; {
	case marked && !out.noisy:
		out.reason = firstText(row.staleReason, v.own.staleReason, "the server announced a change")
	case age > limit:
		out.reason = firstText(v.own.staleReason, "the list is older than its reader allows")
	default:
		out.fresh = true
	}
	return out
}

func firstText(texts ...string) string {
	for _, s := range texts {
		if s != "" {
			return s
		}
	}
	return ""
}

// lastGood answers when no fresh list could be had.
func (s *Service) lastGood(ctx context.Context, w wish, got verdict, cause error) (*Revision, error) {
	f, isFault := fault.As(cause)
	if got.hidden || isFault && f.Kind == fault.Denied {
		if isFault && f.Kind == fault.Denied {
			return nil, cause
		}
		return nil, refused().Retry(max(0, got.retry))
	}
	if got.row != nil {
		reason := got.reason
		if isFault {
			reason = f.Message
		}
		r, err := s.revision(ctx, w, got, firstText(reason, "it could not be listed again"))
		if err == nil {
			r.Pending = got.retry <= 0 && (cause == nil || isFault && f.Reason == pendingReason)
		}
		return r, err
	}
	if cause != nil {
		return nil, cause
	}
	return nil, fault.New(fault.Unavailable, "CATALOG_UNAVAILABLE", "%s",
		firstText(got.reason, "the server's definitions could not be listed")).In(fault.Server).Retry(max(got.retry, minAge))
}

// revision joins the shared content with what this context knows about it.
func (s *Service) revision(ctx context.Context, w wish, got verdict, stale string) (*Revision, error) {
	c, err := s.content(ctx, w.key.tenant, w.server.Name, got.row.revisionID, got.row.contentDigest)
	if err != nil {
		return nil, err
	}
	r := c.revision(w.key.tenant, got.row)
	r.Stale, r.StaleReason = stale != "", stale
	if r.Stale {
		r.Findings = append(r.Findings[:len(r.Findings):len(r.Findings)], Finding{Code: FindingStale, Detail: stale})
	}
	if got.noisy {
		r.Findings = append(r.Findings[:len(r.Findings):len(r.Findings)], Finding{Code: FindingNoisy,
			Detail: "the server announces a change with every list; it is listed less often"})
	}
	return r, nil
}

func (c *content) revision(t tenant.ID, row *seen) *Revision {
	return &Revision{ID: c.id, Tenant: t, ServerID: c.serverID, Kind: c.kind, Context: row.context,
		Observed: row.observed, ProtocolVersion: c.protocolVersion, Era: c.era, Capabilities: c.capabilities,
		Findings: c.findings, Definitions: c.definitions, byName: c.byName, byModel: c.byModel}
}

// content returns a revision's content from memory, from the cache when the
// bytes are those that PostgreSQL names, or from PostgreSQL.
func (s *Service) content(ctx context.Context, t tenant.ID, serverName, id, digest string) (*content, error) {
	k := contentKey{t, id}
	if c, ok := s.contents.get(k); ok {
		return c, nil
	}
	return s.loads.do(ctx, k, func() (*content, error) {
		if s.o.Cache != nil {
			if b, ok := s.o.Cache.Get(ctx, cacheKey(t, id)); ok && contentDigest(b) == digest {
				if c, err := decodeContent(b); err == nil && c.id == id {
					s.keep(t, serverName, c)
					return c, nil
				}
			}
		}
		c, err := s.readContent(ctx, t, id)
		if err != nil {
			return nil, err
		}
		s.keep(t, serverName, c)
		if s.o.Cache != nil {
			s.o.Cache.Set(ctx, cacheKey(t, id), c.encoded, cacheFor)
		}
		return c, nil
	})
}

// definitionCost is what a definition takes in memory beside its bytes.
const definitionCost = 1 << 10

func (s *Service) keep(t tenant.ID, serverName string, c *content) {
	c.index(serverName, func(digest, part string, raw []byte) *checker {
		if len(raw) == 0 {
			return nil
		}
		return s.checkers.getOrAdd(checkerKey{t, digest, part}, 1, func() *checker { return newChecker(raw) })
	})
	s.contents.put(contentKey{t, c.id}, c, int64(2*len(c.encoded)+definitionCost*len(c.definitions)+definitionCost))
}
