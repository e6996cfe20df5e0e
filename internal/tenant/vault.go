package tenant

import (
	"context"
	"encoding/binary"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
)

const (
	maxCachedKeys = 4096
	dataKeyTTL    = 5 * time.Minute
)

// Vault seals a tenant's secrets under the tenant's data key, which is itself
// wrapped by the installation's key-encryption key. Erasing a tenant's data key
// erases all that was sealed under it, at the latest dataKeyTTL later.
type Vault struct {
	db   *DB
	ring *seal.Ring
	now  func() time.Time

	mu   sync.Mutex
	keys map[ID]cachedDataKey // at most maxCachedKeys
}

type cachedDataKey struct {
	key   *seal.DataKey
	until time.Time
}

// NewVault returns a vault that unwraps data keys with ring.
func NewVault(db *DB, ring *seal.Ring) *Vault {
	return &Vault{db: db, ring: ring, now: time.Now, keys: map[ID]cachedDataKey{}}
}

const dataKeySQL = `SELECT data_key FROM tenants WHERE tenant_id = $1`

// Key returns the tenant's data key, from memory or unwrapped from its row.
func (v *Vault) Key(ctx context.Context, t ID) (*seal.DataKey, error) {
	if k := v.cached(t); k != nil {
		return k, nil
	}
	var wrapped []byte
	err := v.db.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(dataKeySQL, t).QueryRow(func(row pgx.Row) error { return row.Scan(&wrapped) })
	})
	if err != nil {
		return nil, fault.Wrap(err, "read data key")
	}
	k, err := v.ring.OpenDataKey(ctx, wrapped, dataKeyAAD(t))
	if err != nil {
		return nil, fault.Wrap(err, "unwrap data key")
	}
	v.remember(t, k)
	return k, nil
}

// KeyIn is Key inside a transaction of the tenant: it reads the row through tx,
// so that it sees a tenant that tx itself creates, and takes no second
// connection, for which transactions could wait on each other. The key is
// remembered when tx commits.
func (v *Vault) KeyIn(ctx context.Context, tx Tx) (*seal.DataKey, error) {
	t := tx.Tenant()
	if k := v.cached(t); k != nil {
		return k, nil
	}
	var wrapped []byte
	if err := tx.QueryRow(ctx, dataKeySQL, t).Scan(&wrapped); err != nil {
		return nil, fault.Wrap(postgres.Translate(err), "read data key")
	}
	k, err := v.ring.OpenDataKey(ctx, wrapped, dataKeyAAD(t))
	if err != nil {
		return nil, fault.Wrap(err, "unwrap data key")
	}
	tx.AfterCommit(func() { v.remember(t, k) })
	return k, nil
}

func (v *Vault) cached(t ID) *seal.DataKey {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c, ok := v.keys[t]; ok && v.now().Before(c.until) {
		return c.key
	}
	return nil
}

func (v *Vault) remember(t ID, k *seal.DataKey) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.keys) >= maxCachedKeys {
		clear(v.keys) // refilled by one read each; rare enough not to keep an order
	}
	v.keys[t] = cachedDataKey{key: k, until: v.now().Add(dataKeyTTL)}
}

// Seal encrypts plain so that only the same tenant, kind, id and field open it.
func (v *Vault) Seal(ctx context.Context, t ID, kind, id, field string, plain []byte) ([]byte, error) {
	k, err := v.Key(ctx, t)
	if err != nil {
		return nil, err
	}
	return k.Seal(plain, sealAAD(t, kind, id, field))
}

// Open decrypts what Seal made for the same tenant, kind, id and field.
func (v *Vault) Open(ctx context.Context, t ID, kind, id, field string, sealed []byte) ([]byte, error) {
	k, err := v.Key(ctx, t)
	if err != nil {
		return nil, err
	}
	return k.Open(sealed, sealAAD(t, kind, id, field))
}

func dataKeyAAD(t ID) []byte { return sealAAD(t, "tenant", t.value, "data_key") }

// Each part is preceded by its length: no two tuples share their bytes.
func sealAAD(t ID, parts ...string) []byte {
	out := make([]byte, 0, 128)
	for _, p := range append([]string{t.value}, parts...) {
		out = binary.BigEndian.AppendUint32(out, uint32(len(p)))
		out = append(out, p...)
	}
	return out
}
