package tenant

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
)

// Event is something that this package does and the audit keeps. Details hold
// no secret.
type Event struct {
	Kind    string
	Actor   string
	Details map[string]any
}

// Recorder keeps events in the transaction of what they record.
type Recorder interface {
	Record(ctx context.Context, tx Tx, e Event) error
}

// Tenant is a row of tenants.
type Tenant struct {
	ID          ID
	DisplayName string
	State       string
	CreateTime  time.Time
}

// Service creates tenants and keys and authenticates callers.
type Service struct {
	db          *DB
	ring        *seal.Ring
	rec         Recorder
	now         func() time.Time
	operatorKey [sha256.Size]byte
	hasOperator bool
	cache       *keyCache
}

// NewService returns the service. operatorKey is the credential that creates
// tenants; without one no caller is the operator.
func NewService(db *DB, ring *seal.Ring, rec Recorder, operatorKey string) (*Service, error) {
	if db == nil || ring == nil || rec == nil {
		return nil, errors.New("tenant: db, ring and recorder are needed")
	}
	s := &Service{db: db, ring: ring, rec: rec, now: time.Now, cache: newKeyCache()}
	if operatorKey != "" {
		if len(operatorKey) < 32 {
			return nil, fault.Field1("BULKHEAD_OPERATOR_KEY_FILE", "must hold at least 32 characters")
		}
		s.operatorKey, s.hasOperator = sha256.Sum256([]byte(operatorKey)), true
	}
	return s, nil
}

// BodyDigest returns the digest by which a repeated create is compared.
func BodyDigest(request any) string {
	raw, err := json.Marshal(request)
	if err != nil {
		panic(fmt.Sprintf("tenant: request type %T cannot be encoded: %v", request, err))
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// CreateTenant makes a tenant with its data key and one admin key, in one
// transaction. The secret comes back once: a repeat with the same requestID
// returns the tenant with no secret. DisplayName has 1 to 200 characters.
func (s *Service) CreateTenant(ctx context.Context, displayName, requestID string) (Tenant, NewKey, error) {
	if err := checkDisplayName(displayName); err != nil {
		return Tenant{}, NewKey{}, err
	}
	id := ID{resource.NewID(resource.Tenant)}
	wrapped, _, err := s.ring.NewDataKey(ctx, dataKeyAAD(id))
	if err != nil {
		return Tenant{}, NewKey{}, fault.Wrap(err, "make data key")
	}
	digest := BodyDigest(displayName)
	var t Tenant
	var key NewKey
	err = s.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			INSERT INTO tenants (tenant_id, display_name, data_key, request_id, request_digest)
			VALUES ($1, $2, $3, nullif($4, ''), $5)
			ON CONFLICT (request_id) DO NOTHING`, id, displayName, wrapped, requestID, digest)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			t, err = earlierTenant(ctx, tx, requestID, digest)
			return err
		}
		t, err = getTenant(ctx, tx, id.value)
		if err != nil {
			return err
		}
		// From here on the transaction is the new tenant's own.
		if _, err := tx.Exec(ctx, "SET LOCAL ROLE "+AppRole); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, setTenant, id.value); err != nil {
			return err
		}
		own := Tx{tx: tx, tenant: id, after: &[]func(){}}
		err = s.rec.Record(ctx, own, Event{Kind: "tenant.created", Actor: "OPERATOR", Details: map[string]any{"displayName": displayName}})
		if err != nil {
			return err
		}
		key, err = s.insertKey(ctx, own, KeySpec{DisplayName: "first admin", Role: RoleAdmin}, "OPERATOR")
		return err
	})
	if err != nil {
		return Tenant{}, NewKey{}, err
	}
	return t, key, nil
}

func earlierTenant(ctx context.Context, tx pgx.Tx, requestID, digest string) (Tenant, error) {
	var id, was string
	err := tx.QueryRow(ctx, `SELECT tenant_id, request_digest FROM tenants WHERE request_id = $1`, requestID).Scan(&id, &was)
	if err != nil {
		return Tenant{}, err
	}
	if was != digest {
		return Tenant{}, fault.New(fault.Exists, "REQUEST_ID_REUSED", "requestId was used for another request").With("resource", id)
	}
	return getTenant(ctx, tx, id)
}

const tenantColumns = `tenant_id, display_name, state, create_time`

func scanTenant(row pgx.CollectableRow) (t Tenant, err error) {
	err = row.Scan(&t.ID, &t.DisplayName, &t.State, &t.CreateTime)
	return t, err
}

func getTenant(ctx context.Context, tx pgx.Tx, id string) (Tenant, error) {
	rows, err := tx.Query(ctx, `SELECT `+tenantColumns+` FROM tenants WHERE tenant_id = $1`, id)
	if err != nil {
		return Tenant{}, err
	}
	t, err := pgx.CollectExactlyOneRow(rows, scanTenant)
	if errors.Is(err, pgx.ErrNoRows) {
		return Tenant{}, fault.New(fault.NotFound, "TENANT_NOT_FOUND", "no such tenant")
	}
	return t, err
}

// GetTenant returns one tenant; for the operator.
func (s *Service) GetTenant(ctx context.Context, id string) (t Tenant, err error) {
	err = s.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		t, err = getTenant(ctx, tx, id)
		return err
	})
	return t, err
}

// ListTenants returns at most limit tenants after the given id, in id order;
// for the operator.
func (s *Service) ListTenants(ctx context.Context, after string, limit int) (ts []Tenant, err error) {
	err = s.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT `+tenantColumns+` FROM tenants WHERE tenant_id > $1 ORDER BY tenant_id LIMIT $2`, after, limit)
		if err != nil {
			return err
		}
		ts, err = pgx.CollectRows(rows, scanTenant)
		return err
	})
	return ts, err
}

const displayNameRule = "must have 1 to 200 characters and no control characters"

func checkDisplayName(s string) error {
	if n := utf8.RuneCountInString(s); n < 1 || n > 200 || strings.ContainsFunc(s, unicode.IsControl) {
		return fault.Field1("displayName", displayNameRule)
	}
	return nil
}
