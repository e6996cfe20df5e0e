package redis

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strconv"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const (
	// MaxValue bounds a cached value, in bytes.
	MaxValue = 2 << 20
	// maxKey is the length beyond which a key is stored by its digest.
	maxKey = 512
	// valueMark begins each stored value: an empty answer then always means that
	// the key is not there, and values of another format are misses.
	valueMark = "1"
)

// Key names a cached value. Two keys are the same only when all of tenant, kind
// and parts are.
type Key struct {
	// Tenant owns the value and is never empty.
	Tenant string
	// Kind is a word of the program, such as "catalog".
	Kind string
	// Parts are whatever else tells one value from another.
	Parts []string
}

// encode writes each field behind its length, so that no content of one field
// can look like the border to the next.
func (k Key) encode() string {
	if k.Tenant == "" || k.Kind == "" {
		panic("redis: a key without tenant or kind")
	}
	b := make([]byte, 0, 64)
	for _, f := range append([]string{k.Kind, k.Tenant}, k.Parts...) {
		b = appendField(b, f)
	}
	if len(b) <= maxKey {
		return ":" + string(b)
	}
	sum := sha256.Sum256(b)
	return "#" + hex.EncodeToString(sum[:])
}

func appendField(b []byte, f string) []byte {
	b = strconv.AppendInt(b, int64(len(f)), 10)
	b = append(b, ':')
	return append(b, f...)
}

// Cache keeps bytes for a while. Whoever reads them checks them against a
// digest from the database: what is in Redis is believed by nobody.
type Cache struct{ c *Client }

// NewCache returns a cache on c.
func NewCache(c *Client) *Cache { return &Cache{c: c} }

// Get returns the value of k. It is a miss when there is none, when Redis is
// away, and when the value is larger than MaxValue.
func (c *Cache) Get(ctx context.Context, k Key) ([]byte, bool) {
	name := c.name(k)
	var value []byte
	err := c.c.do(ctx, func(ctx context.Context) (err error) {
		// GETRANGE and not GET: it bounds what a foreign writer could make us read.
		value, err = c.c.rdb.GetRange(ctx, name, 0, MaxValue+1).Bytes()
		return err
	})
	if err != nil || len(value) == 0 || len(value) > MaxValue+1 || string(value[:1]) != valueMark {
		return nil, false
	}
	return value[1:], true
}

// Set keeps value for ttl, at least a millisecond. It reports whether it was
// stored; a value larger than MaxValue never is.
func (c *Cache) Set(ctx context.Context, k Key, value []byte, ttl time.Duration) bool {
	name := c.name(k)
	if len(value) > MaxValue || ttl < time.Millisecond {
		return false
	}
	stored := append([]byte(valueMark), value...)
	return c.c.do(ctx, func(ctx context.Context) error {
		return c.c.rdb.Set(ctx, name, stored, ttl).Err()
	}) == nil
}

// Delete forgets k. It reports whether Redis confirmed that; when it did not, the
// value may be read until its time is over.
func (c *Cache) Delete(ctx context.Context, k Key) bool {
	name := c.name(k)
	err := c.c.do(ctx, func(ctx context.Context) error {
		return c.c.rdb.Del(ctx, name).Err()
	})
	return err == nil || errors.Is(err, goredis.Nil)
}

func (c *Cache) name(k Key) string { return c.c.namespace + ":cache" + k.encode() }
