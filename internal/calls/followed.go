package calls

import (
	"context"
	"encoding/json"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func quoted(s string) []byte {
	b, _ := json.Marshal(s) // a string always encodes
	return b
}

// maxUnheard bounds the reports of changed resources that wait to be noted.
const maxUnheard = 1024

// Updated is told that a resource may have changed, or that its server grants its
// subscription no longer. It returns at once; Run notes it.
func (s *Service) Updated(u sessions.Updated) {
	select {
	case s.updated <- u:
	default:
		s.log.WarnContext(s.work, "a report of a changed resource is dropped", "tenant", u.Key.Tenant, "server", u.Key.Server)
	}
}

func (s *Service) noteUpdates(ctx context.Context) {
	for {
		select {
		case u := <-s.updated:
			if err := s.noteUpdate(ctx, u.Key, u.URI, u.Refused); err != nil && ctx.Err() == nil {
				s.log.WarnContext(ctx, "note a changed resource", "tenant", u.Key.Tenant, "server", u.Key.Server, "error", detail(err))
			}
		case <-ctx.Done():
			return
		}
	}
}

// noteUpdate writes what was told. A legacy server may name a resource beneath one
// that is followed.
func (s *Service) noteUpdate(ctx context.Context, k sessions.Key, uri string, refused bool) error {
	epoch, _ := s.replica.mayDispatch()
	return s.deps.DB.InTx(ctx, k.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		tx.AfterCommit(func() { s.recorded(k.Tenant) })
		const hit = ` WHERE tenant_id = $1 AND server_id = $2 AND subject_source = $3 AND subject = $4 AND ($5 = '' OR session_id = $5)
			AND state <> 'ENDED' AND replica_epoch = $7 AND `
		args := []any{tx.Tenant(), k.Server, k.Subject.Source, k.Subject.Value, k.Session, uri, epoch}
		if refused {
			_, err := tx.Exec(ctx, `UPDATE resource_subscriptions SET state = 'LOST', reason = $8, due_time = NULL`+hit+`uri = $6`, append(args, lostForGood)...)
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE resource_subscriptions SET updates = updates + 1, last_update = clock_timestamp()`+hit+
			`(uri = $6 OR starts_with($6, rtrim(uri, '/') || '/'))`, args...)
		return err
	})
}

// maxFollowing bounds the subscriptions that are looked at at a time.
const maxFollowing = 16

// followDue looks at the subscriptions whose time has come: those of this replica,
// those that nobody follows, and those of replicas that are dead.
func (s *Service) followDue(ctx context.Context) error {
	epoch, ok := s.replica.mayDispatch()
	if !ok || s.deps.Follower == nil {
		return nil
	}
	fs, err := s.search(ctx, `SELECT x.tenant_id, x.subscription_id FROM resource_subscriptions x
		JOIN sessions y ON y.tenant_id = x.tenant_id AND y.session_id = x.session_id
		WHERE (x.due_time <= clock_timestamp() OR y.state <> 'OPEN' OR y.expire_time <= clock_timestamp())
		  AND (x.replica_epoch = $1 OR NOT EXISTS (SELECT FROM replicas r WHERE r.epoch = x.replica_epoch AND r.state = 'ALIVE'))
		ORDER BY x.due_time NULLS LAST LIMIT $2`, epoch)
	if err != nil {
		return err
	}
	s.tendAll(fs, s.following, "follow a resource", s.followAgain)
	return nil
}

// followAgain holds a subscription against what it stands on now, and follows it.
func (s *Service) followAgain(ctx context.Context, t tenant.ID, id string) error {
	epoch, ok := s.replica.mayDispatch()
	if !ok {
		return nil
	}
	var sub *Subscription
	err := s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		// Whoever comes second finds that it is not due.
		_, err := tx.Exec(ctx, `UPDATE resource_subscriptions SET replica_epoch = $3, due_time = clock_timestamp() + $4::interval
			WHERE tenant_id = $1 AND subscription_id = $2 AND (due_time <= clock_timestamp() OR replica_epoch = $3 OR due_time IS NULL)`,
			tx.Tenant(), id, epoch, lookAgain)
		if err != nil {
			return err
		}
		found, err := subscriptions(ctx, tx, `subscription_id = $2 AND replica_epoch = $3`, id, epoch)
		if len(found) == 1 {
			sub = found[0]
		}
		return err
	})
	if err != nil || sub == nil {
		return err
	}
	p := tenant.Principal{Tenant: t, Subject: sub.subject, Role: tenant.RoleService}
	ses, srv, active, err := s.place(ctx, p, sub.SessionID, sub.ServerID)
	switch {
	case sub.State == subscriptionEnded, fault.Is(err, fault.NotFound), err == nil && !ses.Open(s.now()):
		return s.dropSubscription(ctx, t, sub, "system", "its session or server ended")
	case err == nil:
		p.Groups, p.Project = ses.Groups, ses.Project
		err = s.mayFollow(ctx, p, ses, srv, active, sub.URI)
	}
	allowed := err == nil
	if allowed {
		err = s.listenTo(ctx, srv, active.Contract, t, sub)
	}
	if f, ok := fault.As(err); err != nil && !allowed && ok && f.Kind == fault.Denied {
		_ = s.unfollowLost(ctx, t, sub)
	}
	return s.noteFollowed(ctx, t, sub, err)
}

// unfollowLost stops hearing of what the contract does not cover any more.
func (s *Service) unfollowLost(ctx context.Context, t tenant.ID, sub *Subscription) error {
	srv, err := s.deps.Catalog.GetServer(ctx, tenant.Principal{Tenant: t}, sub.ServerID)
	if err == nil {
		s.deps.Follower.Unsubscribe(keyOf(srv, t, sub.subject, sub.SessionID), sub.URI)
	}
	return err
}

// noteFollowed writes whether a subscription is followed. What may pass is tried
// again.
func (s *Service) noteFollowed(ctx context.Context, t tenant.ID, sub *Subscription, cause error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	state, reason := SubscriptionActive, ""
	if cause != nil {
		state, reason = SubscriptionLost, "it cannot be followed now"
		if f, ok := fault.As(cause); ok {
			reason = f.Reason + ": " + cleanText(f.Message, maxLostDetails)
		}
	}
	return s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE resource_subscriptions SET state = $3, reason = $4, due_time = clock_timestamp() + $5::interval
			WHERE tenant_id = $1 AND subscription_id = $2 AND state <> 'ENDED' AND replica_epoch = $6`, tx.Tenant(), sub.ID, state, reason, lookAgain, sub.epoch)
		return err
	})
}
