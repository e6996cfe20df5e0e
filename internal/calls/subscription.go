package calls

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Follower subscribes to resources at servers, over all connections of a key, and
// tells of changes by what it was given; *sessions.Pool is one.
type Follower interface {
	Subscribe(ctx context.Context, k sessions.Key, t sessions.Target, uri string) error
	Unsubscribe(k sessions.Key, uri string)
}

// The states of a subscription.
const (
	// SubscriptionActive means that changes are heard of.
	SubscriptionActive = "ACTIVE"
	// SubscriptionLost means that they are not, for the reason beside it.
	SubscriptionLost  = "LOST"
	subscriptionEnded = "ENDED"
)

// Subscription is a session's wish to hear when a resource changes.
type Subscription struct {
	ID, SessionID, ServerID, ServerName, URI string
	State, Reason                            string
	Updates                                  int64
	LastUpdate                               *time.Time
	CreateTime                               time.Time

	subject tenant.Subject
	epoch   int64
}

const (
	// maxFollowed bounds the subscriptions of one session.
	maxFollowed = 64
	// followTime bounds asking a server to be told.
	followTime = 15 * time.Second
	// lookAgain is how often a subscription is held against the contract in force,
	// and one that is lost for now tried again.
	lookAgain      = time.Minute
	methodFollow   = "resources/subscribe"
	noFollower     = "this replica follows no resources"
	lostForGood    = "the server does not grant it any more"
	maxLostDetails = 300
)

// Subscribe has a session hear when a resource changes. The contract must cover the
// resource for the user and allow the method. Wishing the same again returns the
// first subscription.
func (s *Service) Subscribe(ctx context.Context, p tenant.Principal, sessionID, server, uri string) (*Subscription, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.running.Done()
	if uri == "" || !isWord(uri, catalog.MaxURI) {
		return nil, fault.Field1("uri", "must have 1 to %d bytes of text without control characters", catalog.MaxURI)
	}
	ses, srv, active, err := s.place(ctx, p, sessionID, server)
	if err != nil {
		return nil, err
	}
	if err := s.mayFollow(ctx, p, ses, srv, active, uri); err != nil {
		return nil, err
	}
	if s.deps.Follower == nil {
		return nil, fault.New(fault.Unavailable, "SUBSCRIPTIONS_UNAVAILABLE", noFollower)
	}
	epoch, ok := s.replica.mayDispatch()
	if !ok {
		return nil, errIsolated
	}
	sub := &Subscription{ID: resource.NewID(resource.Subscription), SessionID: ses.ID, ServerID: srv.ID, ServerName: srv.Name, URI: uri,
		State: SubscriptionActive, subject: ses.Subject, epoch: epoch}
	// The row is first: whatever happens to this replica now, somebody knows of it.
	first, err := s.insertSubscription(ctx, p, sub)
	if err != nil || first != nil {
		return first, err
	}
	if err := s.listenTo(ctx, srv, active.Contract, p.Tenant, sub); err != nil {
		return nil, errors.Join(err, s.dropSubscription(context.WithoutCancel(ctx), p.Tenant, sub, p.Actor(), "refused"))
	}
	return sub, nil
}

// listenTo asks the server to tell of one resource.
func (s *Service) listenTo(ctx context.Context, srv catalog.Server, c *contract.Contract, t tenant.ID, sub *Subscription) error {
	ctx, cancel := context.WithTimeout(ctx, followTime)
	defer cancel()
	return s.deps.Follower.Subscribe(ctx, keyOf(srv, t, sub.subject, sub.SessionID), TargetOf(srv, c), sub.URI)
}

// mayFollow decides as for a read of the resource.
func (s *Service) mayFollow(ctx context.Context, p tenant.Principal, ses *sessions.Session, srv catalog.Server, active *authz.Active, uri string) error {
	if srv.Isolation == catalog.PerTenant {
		return fault.New(fault.Precondition, "SUBSCRIPTION_SHARED", "a server that all users share is not asked to tell one of them")
	}
	rev, err := s.deps.Catalog.Current(ctx, srv, contextOf(p.Tenant, ses.Subject, ses.ID), catalog.Declaration, active.Contract.Limits.DefinitionAge.Read)
	if err != nil {
		return err
	}
	d := authz.Decide(authz.Input{Principal: p, SessionID: ses.ID, SessionOpen: ses.Open(s.now()), InSession: ses.Has(srv.ID), Servers: ses.ServerIDs,
		Server: ServerFacts(srv), Contract: active.Contract, Revision: active.Revision, ProtocolVersion: rev.ProtocolVersion,
		Declared: Declares(rev, contract.KindResource), Proposal: authz.Proposal{Kind: contract.KindResource, Name: uri}})
	return permitted(d, active.Contract, methodFollow, false)
}

const subscriptionColumns = `subscription_id, session_id, subject_source, subject, server_id, server_name, uri, state, reason,
	replica_epoch, updates, last_update, create_time`

func scanSubscription(row pgx.CollectableRow) (*Subscription, error) {
	x := &Subscription{}
	err := row.Scan(&x.ID, &x.SessionID, &x.subject.Source, &x.subject.Value, &x.ServerID, &x.ServerName, &x.URI, &x.State, &x.Reason,
		&x.epoch, &x.Updates, &x.LastUpdate, &x.CreateTime)
	return x, err
}

func subscriptions(ctx context.Context, tx tenant.Tx, where string, args ...any) ([]*Subscription, error) {
	rows, err := tx.Query(ctx, `SELECT `+subscriptionColumns+` FROM resource_subscriptions WHERE tenant_id = $1 AND `+where, append([]any{tx.Tenant()}, args...)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanSubscription)
}

// insertSubscription stores a subscription of an open session. It returns the one
// that is there already for the same resource.
func (s *Service) insertSubscription(ctx context.Context, p tenant.Principal, sub *Subscription) (first *Subscription, err error) {
	err = s.deps.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		var open bool
		// The lock makes the count of its subscriptions exact.
		err := tx.QueryRow(ctx, `SELECT state = 'OPEN' AND expire_time > clock_timestamp() FROM sessions
			WHERE tenant_id = $1 AND session_id = $2 FOR UPDATE`, tx.Tenant(), sub.SessionID).Scan(&open)
		if err != nil {
			return err
		}
		if !open {
			return fault.New(fault.Precondition, "SESSION_CLOSED", "the session is closed or has expired")
		}
		all, err := subscriptions(ctx, tx, `session_id = $2 AND state <> 'ENDED'`, sub.SessionID)
		if err != nil {
			return err
		}
		for _, other := range all {
			if other.ServerID == sub.ServerID && other.URI == sub.URI {
				first = other
				return nil
			}
		}
		if len(all) >= maxFollowed {
			return fault.New(fault.Exhausted, "TOO_MANY_SUBSCRIPTIONS", "a session has at most %d subscriptions", maxFollowed)
		}
		err = tx.QueryRow(ctx, `INSERT INTO resource_subscriptions (tenant_id, subscription_id, session_id, subject_source, subject, server_id,
			server_name, uri, replica_epoch, due_time) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, clock_timestamp() + $10::interval) RETURNING create_time`,
			tx.Tenant(), sub.ID, sub.SessionID, sub.subject.Source, sub.subject.Value, sub.ServerID, sub.ServerName, sub.URI, sub.epoch, lookAgain).
			Scan(&sub.CreateTime)
		if err != nil {
			return err
		}
		return s.recordSubscription(ctx, tx, sub, p.Actor(), "subscription.created", "")
	})
	return first, err
}

func (s *Service) recordSubscription(ctx context.Context, tx tenant.Tx, sub *Subscription, actor, kind, reason string) error {
	_, err := s.deps.Audit.Append(ctx, tx, audit.Entry{Kind: kind, SessionID: sub.SessionID, ServerID: sub.ServerID, Subject: sub.subject,
		Actor: actor, Time: s.now(), Details: fmt.Appendf(nil, `{"subscriptionId":%q,"uri":%s,"updates":%d,"reason":%s}`,
			sub.ID, quoted(sub.URI), sub.Updates, quoted(reason))})
	return err
}

// Subscriptions returns those of a session, oldest first.
func (s *Service) Subscriptions(ctx context.Context, p tenant.Principal, sessionID string) (out []*Subscription, err error) {
	ses, err := s.deps.Sessions.Get(ctx, p, sessionID)
	if err != nil {
		return nil, err
	}
	err = s.deps.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		out, err = subscriptions(ctx, tx, `session_id = $2 AND state <> 'ENDED' AND (COALESCE(cardinality($3::text[]), 0) = 0 OR server_name = ANY ($3))
			ORDER BY subscription_id`, ses.ID, p.Servers)
		return err
	})
	return out, err
}

var errNoSubscription = fault.New(fault.NotFound, "SUBSCRIPTION_NOT_FOUND", "no such subscription")

// Unsubscribe ends a subscription of a session.
func (s *Service) Unsubscribe(ctx context.Context, p tenant.Principal, sessionID, id string) error {
	all, err := s.Subscriptions(ctx, p, sessionID)
	if err != nil {
		return err
	}
	for _, sub := range all {
		if sub.ID == id {
			return s.dropSubscription(ctx, p.Tenant, sub, p.Actor(), "deleted")
		}
	}
	return errNoSubscription
}

// dropSubscription ends a subscription. The replica that follows it stops doing so:
// this one at once, another one at its next look.
func (s *Service) dropSubscription(ctx context.Context, t tenant.ID, sub *Subscription, actor, why string) error {
	mine := false
	epoch, _ := s.replica.mayDispatch()
	err := s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		var was string
		err := tx.QueryRow(ctx, `SELECT state, replica_epoch FROM resource_subscriptions WHERE tenant_id = $1 AND subscription_id = $2 FOR UPDATE`,
			tx.Tenant(), sub.ID).Scan(&was, &sub.epoch)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		if was != subscriptionEnded {
			if err := s.recordSubscription(ctx, tx, sub, actor, "subscription.ended", why); err != nil {
				return err
			}
		}
		if mine = sub.epoch == epoch || sub.epoch == 0; mine {
			_, err = tx.Exec(ctx, `DELETE FROM resource_subscriptions WHERE tenant_id = $1 AND subscription_id = $2`, tx.Tenant(), sub.ID)
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE resource_subscriptions SET state = 'ENDED', due_time = clock_timestamp()
			WHERE tenant_id = $1 AND subscription_id = $2`, tx.Tenant(), sub.ID)
		return err
	})
	if err != nil || !mine {
		return err
	}
	return s.unfollow(ctx, t, sub)
}

// unfollow tells the server, unless another session of the same connection wants to
// go on hearing of the resource.
func (s *Service) unfollow(ctx context.Context, t tenant.ID, sub *Subscription) error {
	srv, err := s.deps.Catalog.GetServer(ctx, tenant.Principal{Tenant: t}, sub.ServerID)
	if err != nil || s.deps.Follower == nil {
		return nil //nolint:nilerr // without its server the connection is gone too
	}
	k := keyOf(srv, t, sub.subject, sub.SessionID)
	wanted := false
	err = s.deps.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		return tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM resource_subscriptions WHERE tenant_id = $1 AND server_id = $2 AND subject_source = $3
			AND subject = $4 AND uri = $5 AND state <> 'ENDED' AND ($6 = '' OR session_id = $6))`,
			tx.Tenant(), sub.ServerID, sub.subject.Source, sub.subject.Value, sub.URI, k.Session).Scan(&wanted)
	})
	if err == nil && !wanted {
		s.deps.Follower.Unsubscribe(k, sub.URI)
	}
	return err
}
