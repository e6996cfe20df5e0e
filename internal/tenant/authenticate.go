package tenant

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/singleflight"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const (
	// authorityTTL is how long a cached credential holds after Postgres last
	// confirmed it (design 8); dispatch transactions always read the row.
	authorityTTL   = 5 * time.Second
	maxCachedCreds = 10_000
)

// OnBehalf is the user that a service key acts for, as its caller asserts.
type OnBehalf struct {
	User    string
	Groups  []string
	Project string
}

// credential is a key's row with what authentication needs.
type credential struct {
	tenant  ID
	key     Key
	hash    []byte
	prefix  []netip.Prefix
	fetched time.Time
}

type keyCache struct {
	flight singleflight.Group
	mu     sync.Mutex
	byID   map[string]*credential // at most maxCachedCreds
}

func newKeyCache() *keyCache { return &keyCache{byID: map[string]*credential{}} }

func (c *keyCache) get(id string, now time.Time) *credential {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.byID[id]
	if k == nil || now.Sub(k.fetched) >= authorityTTL {
		return nil
	}
	return k
}

func (c *keyCache) put(id string, k *credential) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.byID) >= maxCachedCreds {
		clear(c.byID)
	}
	c.byID[id] = k
}

func (c *keyCache) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byID, id)
}

// ForgetKey drops a key from memory, for a signal of its revocation elsewhere.
func (s *Service) ForgetKey(id string) { s.cache.forget(id) }

var errUnauthenticated = fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "no valid credential")

// Authenticate verifies an API key and returns its principal. Every failure of
// the credential itself is the same fault, whatever was wrong with it. A remote
// address outside the key's networks and a user outside its patterns are
// fault.Denied.
func (s *Service) Authenticate(ctx context.Context, cred string, who OnBehalf, remote netip.Addr) (Principal, error) {
	if s.hasOperator && secretMatches(cred, s.operatorKey[:]) {
		if who.User != "" || who.Project != "" || len(who.Groups) > 0 {
			return Principal{}, fault.New(fault.Denied, "IDENTITY_NOT_ALLOWED", "the operator acts for no user")
		}
		return Principal{Role: RoleOperator, KeyID: "operator"}, nil
	}
	rest, ok := strings.CutPrefix(cred, "bhk_")
	id, _, ok2 := strings.Cut(rest, "_")
	if !ok || !ok2 || len(id) != 26 || len(cred) > 200 {
		return Principal{}, errUnauthenticated
	}
	c, err := s.credential(ctx, "key_"+id)
	if err != nil {
		return Principal{}, err
	}
	if c == nil || !secretMatches(cred, c.hash) || !c.stands(s.now()) {
		return Principal{}, errUnauthenticated
	}
	if len(c.prefix) > 0 && !contains(c.prefix, remote) {
		return Principal{}, fault.New(fault.Denied, "NETWORK_NOT_ALLOWED", "this key is not for callers of this network")
	}
	return c.principal(who)
}

// Reauthorize verifies that a key which was authenticated before still is what it
// was: for streams, which outlive the look at their beginning, and for tickets. The
// key's networks are not looked at: a ticket is used from elsewhere.
func (s *Service) Reauthorize(ctx context.Context, keyID string, who OnBehalf) (Principal, error) {
	c, err := s.credential(ctx, keyID)
	if err != nil {
		return Principal{}, err
	}
	if c == nil || !c.stands(s.now()) {
		return Principal{}, errUnauthenticated
	}
	return c.principal(who)
}

// stands reports whether the key is neither revoked nor over.
func (c *credential) stands(now time.Time) bool {
	return c.key.State == "ACTIVE" && (c.key.ExpireTime.IsZero() || now.Before(c.key.ExpireTime))
}

func (c *credential) principal(who OnBehalf) (Principal, error) {
	p := Principal{Tenant: c.tenant, KeyID: c.key.ID, Role: c.key.Role, MayDecide: c.key.MayDecide,
		Servers: c.key.Servers, SubjectSpace: c.key.SubjectSpace, UserPatterns: c.key.UserPatterns}
	if who.User == "" {
		if len(who.Groups) > 0 || who.Project != "" {
			return Principal{}, fault.New(fault.Denied, "IDENTITY_NOT_ALLOWED", "groups and project need a user")
		}
		return p, nil
	}
	if c.key.Role != RoleService {
		return Principal{}, fault.New(fault.Denied, "IDENTITY_NOT_ALLOWED", "only a SERVICE key names a user")
	}
	p.Subject = Subject{Source: c.key.SubjectSpace, Value: who.User}
	if !p.MayActFor(p.Subject) {
		return Principal{}, fault.New(fault.Denied, "USER_NOT_ALLOWED", "this key is not for this user")
	}
	p.Groups, p.Project = who.Groups, who.Project
	return p, nil
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	a = a.Unmap()
	for _, p := range prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func matchesAny(patterns []string, s string) bool {
	for _, p := range patterns {
		if matches(p, s) {
			return true
		}
	}
	return false
}

// matches takes * for any run of characters and everything else literally.
func matches(pattern, s string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == s
	}
	first, last := parts[0], parts[len(parts)-1]
	if !strings.HasPrefix(s, first) || !strings.HasSuffix(s[len(first):], last) {
		return false
	}
	s = s[len(first) : len(s)-len(last)]
	for _, mid := range parts[1 : len(parts)-1] {
		i := strings.Index(s, mid)
		if i < 0 {
			return false
		}
		s = s[i+len(mid):]
	}
	return true
}

// credential returns nil when no such key exists or its tenant is not active.
func (s *Service) credential(ctx context.Context, id string) (*credential, error) {
	if c := s.cache.get(id, s.now()); c != nil {
		return c, nil
	}
	// One caller reads for all that wait; its going away must not fail them.
	v, err, _ := s.cache.flight.Do(id, func() (any, error) {
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return s.readCredential(rctx, id)
	})
	if err != nil {
		return nil, err
	}
	return v.(*credential), nil
}

func (s *Service) readCredential(ctx context.Context, id string) (*credential, error) {
	c := &credential{fetched: s.now()}
	err := s.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `
			SELECT k.tenant_id, k.secret_hash FROM keys k JOIN tenants t USING (tenant_id)
			 WHERE k.key_id = $1 AND t.state = 'ACTIVE'`, id).Scan(&c.tenant, &c.hash)
		if err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `SELECT `+keyColumns+` FROM keys WHERE key_id = $1`, id)
		if err != nil {
			return err
		}
		c.key, err = pgx.CollectExactlyOneRow(rows, scanKey)
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, n := range c.key.Networks {
		p, err := netip.ParsePrefix(n)
		if err != nil {
			return nil, fault.Wrap(err, "stored network of a key")
		}
		c.prefix = append(c.prefix, p)
	}
	s.cache.put(id, c)
	return c, nil
}
