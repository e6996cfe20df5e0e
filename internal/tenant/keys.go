package tenant

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"net/netip"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
)

// DefaultSubjectSpace is the subject space of service keys that name none, so
// that a rotated key reaches the same users.
const DefaultSubjectSpace = "default"

// KeySpec is what an admin asks for. Lists hold at most 50 entries; a pattern is
// text with * for any run of characters; networks are CIDR prefixes of callers.
type KeySpec struct {
	DisplayName string
	Role        Role
	// SubjectSpace, UserPatterns and Servers limit SERVICE and APPROVER keys, and
	// are refused for all others, which act on the whole tenant. A SERVICE key
	// without a space has DefaultSubjectSpace, an APPROVER key without one every
	// space.
	SubjectSpace string
	UserPatterns []string
	Servers      []string
	Networks     []string
	MayDecide    bool
	ExpireTime   time.Time
}

// Key is a stored API key without its secret.
type Key struct {
	ID string
	KeySpec
	State      string
	CreatedBy  string
	CreateTime time.Time
}

// NewKey is a key at its creation, the only time that its secret is known. The
// secret is empty when a repeated request found an earlier key.
type NewKey struct {
	Key
	Secret string
}

// CreateKey makes an API key for the caller's tenant.
func (s *Service) CreateKey(ctx context.Context, p Principal, spec KeySpec, requestID string) (NewKey, error) {
	if err := spec.check(s.now()); err != nil {
		return NewKey{}, err
	}
	var out NewKey
	err := s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx Tx) error {
		id := resource.NewID(resource.Key)
		earlier, err := RememberCreate(ctx, tx, "key", p.KeyID, requestID, BodyDigest(spec), id)
		if err != nil {
			return err
		}
		if earlier != "" {
			out.Key, err = getKey(ctx, tx, earlier)
			return err
		}
		out, err = s.insertKeyAs(ctx, tx, id, spec, p.Actor())
		return err
	})
	return out, err
}

func (s *Service) insertKey(ctx context.Context, tx Tx, spec KeySpec, actor string) (NewKey, error) {
	return s.insertKeyAs(ctx, tx, resource.NewID(resource.Key), spec, actor)
}

func (s *Service) insertKeyAs(ctx context.Context, tx Tx, id string, spec KeySpec, actor string) (NewKey, error) {
	if spec.SubjectSpace == "" && spec.Role == RoleService {
		spec.SubjectSpace = DefaultSubjectSpace
	}
	var random [32]byte
	rand.Read(random[:]) //nolint:errcheck // crypto/rand.Read never fails since Go 1.24
	secret := "bhk_" + strings.TrimPrefix(id, "key_") + "_" + base64.RawURLEncoding.EncodeToString(random[:])
	hash := sha256.Sum256([]byte(secret))
	var expire *time.Time
	if !spec.ExpireTime.IsZero() {
		expire = &spec.ExpireTime
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO keys (tenant_id, key_id, display_name, role, secret_hash, subject_space,
		                  user_patterns, servers, networks, may_decide, created_by, expire_time)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)`,
		tx.Tenant(), id, spec.DisplayName, spec.Role.String(), hash[:], spec.SubjectSpace,
		texts(spec.UserPatterns), texts(spec.Servers), texts(spec.Networks), spec.MayDecide, actor, expire)
	if err != nil {
		return NewKey{}, err
	}
	err = s.rec.Record(ctx, tx, Event{Kind: "key.created", Actor: actor, Details: map[string]any{
		"keyId": id, "role": spec.Role.String(), "mayDecide": spec.MayDecide, "subjectSpace": spec.SubjectSpace}})
	if err != nil {
		return NewKey{}, err
	}
	k, err := getKey(ctx, tx, id)
	return NewKey{Key: k, Secret: secret}, err
}

// A nil slice would be NULL in the table.
func texts(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

const keyColumns = `key_id, display_name, role, subject_space, user_patterns, servers, networks,
	may_decide, state, created_by, create_time, expire_time`

func scanKey(row pgx.CollectableRow) (k Key, err error) {
	var role string
	var expire *time.Time
	err = row.Scan(&k.ID, &k.DisplayName, &role, &k.SubjectSpace, &k.UserPatterns, &k.Servers, &k.Networks,
		&k.MayDecide, &k.State, &k.CreatedBy, &k.CreateTime, &expire)
	k.Role = ParseRole(role)
	if expire != nil {
		k.ExpireTime = *expire
	}
	return k, err
}

func getKey(ctx context.Context, tx Tx, id string) (Key, error) {
	rows, err := tx.Query(ctx, `SELECT `+keyColumns+` FROM keys WHERE tenant_id = $1 AND key_id = $2`, tx.Tenant(), id)
	if err != nil {
		return Key{}, err
	}
	k, err := pgx.CollectExactlyOneRow(rows, scanKey)
	if errors.Is(err, pgx.ErrNoRows) {
		return Key{}, fault.New(fault.NotFound, "KEY_NOT_FOUND", "no such key")
	}
	return k, err
}

// ListKeys returns at most limit keys of the caller's tenant after the given id,
// revoked ones too.
func (s *Service) ListKeys(ctx context.Context, p Principal, after string, limit int) (ks []Key, err error) {
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx Tx) error {
		rows, err := tx.Query(ctx, `SELECT `+keyColumns+` FROM keys
			WHERE tenant_id = $1 AND key_id > $2 ORDER BY key_id LIMIT $3`, tx.Tenant(), after, limit)
		if err != nil {
			return err
		}
		ks, err = pgx.CollectRows(rows, scanKey)
		return err
	})
	return ks, err
}

// RevokeKey ends a key at once for everything that is dispatched, and within
// five seconds for what replicas hold in memory. Revoking twice is no error. The
// last admin key that works is kept: fault.Precondition.
func (s *Service) RevokeKey(ctx context.Context, p Principal, id string) (k Key, err error) {
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx Tx) error {
		if err := keepsAnAdmin(ctx, tx, id); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `UPDATE keys SET state = 'REVOKED', revoke_time = now()
			WHERE tenant_id = $1 AND key_id = $2 AND state = 'ACTIVE'`, tx.Tenant(), id)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 1 {
			err = s.rec.Record(ctx, tx, Event{Kind: "key.revoked", Actor: p.Actor(), Details: map[string]any{"keyId": id}})
			if err != nil {
				return err
			}
		}
		k, err = getKey(ctx, tx, id)
		return err
	})
	if err == nil {
		s.cache.forget(id)
	}
	return k, err
}

// keepsAnAdmin refuses to revoke the tenant's last admin key that works, without
// which nobody could make another. It locks all of them in one order, so that of
// two who revoke at once the second sees what the first has left.
func keepsAnAdmin(ctx context.Context, tx Tx, id string) error {
	rows, err := tx.Query(ctx, `SELECT key_id FROM keys WHERE tenant_id = $1 AND role = 'ADMIN' AND state = 'ACTIVE'
		AND (expire_time IS NULL OR expire_time > clock_timestamp()) ORDER BY key_id FOR UPDATE`, tx.Tenant())
	if err != nil {
		return err
	}
	admins, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err == nil && len(admins) == 1 && admins[0] == id {
		err = fault.New(fault.Precondition, "LAST_ADMIN_KEY", "this is the tenant's last admin key that works: make another one first")
	}
	return err
}

func (k KeySpec) check(now time.Time) error {
	var bad []fault.Field
	add := func(path, rule string) { bad = append(bad, fault.Field{Path: path, Rule: rule}) }
	if checkDisplayName(k.DisplayName) != nil {
		add("displayName", displayNameRule)
	}
	switch k.Role {
	case RoleAdmin, RoleService, RoleApprover, RoleAuditor:
	default:
		add("role", "must be ADMIN, SERVICE, APPROVER or AUDITOR")
	}
	if k.MayDecide && k.Role != RoleService {
		add("mayDecide", "is for SERVICE keys only")
	}
	if k.Role == RoleAdmin || k.Role == RoleAuditor {
		for _, limit := range []struct {
			path  string
			given bool
		}{{"subjectSpace", k.SubjectSpace != ""}, {"userPatterns", len(k.UserPatterns) > 0}, {"servers", len(k.Servers) > 0}} {
			if limit.given {
				add(limit.path, "is for SERVICE and APPROVER keys only")
			}
		}
	}
	if len(k.SubjectSpace) > 128 || strings.ContainsAny(k.SubjectSpace, "|\x00") {
		add("subjectSpace", "must have at most 128 bytes and no |")
	}
	for name, list := range map[string][]string{"userPatterns": k.UserPatterns, "servers": k.Servers, "networks": k.Networks} {
		if len(list) > 50 {
			add(name, "must have at most 50 entries")
		}
		for _, v := range list {
			if v == "" || len(v) > 256 {
				add(name, "entries must have 1 to 256 bytes")
				break
			}
		}
	}
	for _, v := range k.Servers {
		if !resource.IsServerName(v) {
			add("servers", resource.ServerNameRule)
			break
		}
	}
	for _, v := range k.Networks {
		if _, err := netip.ParsePrefix(v); err != nil {
			add("networks", "must be CIDR prefixes")
			break
		}
	}
	if !k.ExpireTime.IsZero() && !k.ExpireTime.After(now) {
		add("expireTime", "must be in the future")
	}
	if len(bad) > 0 {
		return fault.InvalidFields(bad...)
	}
	return nil
}

// secretMatches compares in constant time, by digests of equal length.
func secretMatches(credential string, hash []byte) bool {
	sum := sha256.Sum256([]byte(credential))
	return subtle.ConstantTimeCompare(sum[:], hash) == 1
}
