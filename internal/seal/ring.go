package seal

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
)

// maxWrapped bounds a wrapped data key; a KMS answers with some hundred bytes.
const maxWrapped = 4096

// maxKEKID bounds the name of a key-encryption key, in bytes.
const maxKEKID = 64

// ErrUnknownKEK means that a data key was wrapped by a key-encryption key that
// the ring does not hold.
var ErrUnknownKEK = errors.New("seal: wrapped by a key-encryption key that is not in the ring")

// KEK is a key-encryption key: it wraps data keys and does nothing else. A KMS
// driver implements it by two remote calls; LocalKEK holds its key in memory.
type KEK interface {
	// ID names the key in what it wrapped: 1 to 64 characters of a-z, 0-9, '.',
	// '_' and '-'. An id is never given to another key.
	ID() string
	// Wrap encrypts a data key, bound to aad.
	Wrap(ctx context.Context, dek, aad []byte) ([]byte, error)
	// Unwrap reverses Wrap. It returns an error that is ErrOpen when key, aad or
	// wrapped is not the one of Wrap.
	Unwrap(ctx context.Context, wrapped, aad []byte) ([]byte, error)
}

// NewLocalKEK returns a key-encryption key held in memory. key has 32 bytes and
// is copied.
func NewLocalKEK(id string, key []byte) (KEK, error) {
	if !validKEKID(id) {
		return nil, fmt.Errorf("seal: a key-encryption key's id has 1 to %d characters of a-z, 0-9, '.', '_', '-'", maxKEKID)
	}
	if len(key) != KeySize {
		return nil, fmt.Errorf("seal: a key-encryption key has %d bytes, not %d", KeySize, len(key))
	}
	b, err := newBox(expand(key, labelKEK, ""))
	if err != nil {
		return nil, err
	}
	return localKEK{id: id, box: func() *box { return b }}, nil
}

func validKEKID(id string) bool {
	for _, c := range []byte(id) {
		if !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return len(id) >= 1 && len(id) <= maxKEKID
}

type localKEK struct {
	id string
	// box is a function for the reason given at DataKey.
	box func() *box
}

func (k localKEK) ID() string { return k.id }

func (k localKEK) Wrap(_ context.Context, dek, aad []byte) ([]byte, error) {
	return k.box().seal(nil, dek, bind(labelKEK, aad))
}

func (k localKEK) Unwrap(_ context.Context, wrapped, aad []byte) ([]byte, error) {
	return k.box().open(wrapped, bind(labelKEK, aad))
}

func (k localKEK) String() string             { return "kek " + k.id + " " + redacted }
func (k localKEK) GoString() string           { return k.String() }
func (k localKEK) Format(f fmt.State, _ rune) { io.WriteString(f, k.String()) } //nolint:errcheck // fmt keeps its own error
func (k localKEK) LogValue() slog.Value       { return slog.StringValue(k.String()) }

// Ring holds the key-encryption keys in use: the primary wraps, all unwrap. To
// rotate, start with a new primary and the old one among others, Rewrap every
// wrapped key, then drop the old one. It is safe for concurrent use.
type Ring struct {
	primary KEK
	byID    map[string]KEK
}

// NewRing refuses a missing key, a malformed id and an id used twice.
func NewRing(primary KEK, others ...KEK) (*Ring, error) {
	r := &Ring{primary: primary, byID: make(map[string]KEK, 1+len(others))}
	for _, k := range append([]KEK{primary}, others...) {
		if k == nil {
			return nil, errors.New("seal: a ring needs every key-encryption key it is given")
		}
		id := k.ID()
		if !validKEKID(id) {
			return nil, errors.New("seal: malformed id of a key-encryption key")
		}
		if _, dup := r.byID[id]; dup {
			return nil, fmt.Errorf("seal: two key-encryption keys have the id %q", id)
		}
		r.byID[id] = k
	}
	return r, nil
}

// NewDataKey mints a data key and returns it with its wrapped form, which is
// bound to aad and is what may be stored.
func (r *Ring) NewDataKey(ctx context.Context, aad []byte) (wrapped []byte, k *DataKey, err error) {
	root := make([]byte, KeySize)
	rand.Read(root) //nolint:errcheck // crypto/rand.Read never fails since Go 1.24
	if k, err = newDataKey(root); err != nil {
		return nil, nil, err
	}
	if wrapped, err = r.wrap(ctx, root, aad); err != nil {
		return nil, nil, err
	}
	return wrapped, k, nil
}

// OpenDataKey unwraps a data key. It returns ErrFormat, ErrUnknownKEK, ErrOpen,
// or what the key-encryption key's driver returned.
func (r *Ring) OpenDataKey(ctx context.Context, wrapped, aad []byte) (*DataKey, error) {
	root, _, err := r.unwrap(ctx, wrapped, aad)
	if err != nil {
		return nil, err
	}
	return newDataKey(root)
}

// Rewrap returns wrapped under the primary key. changed is false, and the bytes
// are the same, when the primary wrapped them already. The data key, and so
// everything sealed under it, stays.
func (r *Ring) Rewrap(ctx context.Context, wrapped, aad []byte) (out []byte, changed bool, err error) {
	root, id, err := r.unwrap(ctx, wrapped, aad)
	if err != nil {
		return nil, false, err
	}
	if id == r.primary.ID() {
		return wrapped, false, nil
	}
	out, err = r.wrap(ctx, root, aad)
	return out, err == nil, err
}

// wrap writes: version, length of the id, id, what the key returned.
func (r *Ring) wrap(ctx context.Context, root, aad []byte) ([]byte, error) {
	id := r.primary.ID()
	b, err := r.primary.Wrap(ctx, root, r.aad(id, aad))
	if err != nil {
		return nil, fmt.Errorf("wrap data key by %q: %w", id, err)
	}
	out := append([]byte{version, byte(len(id))}, id...)
	if out = append(out, b...); len(out) > maxWrapped {
		return nil, fmt.Errorf("seal: key %q wraps a data key in more than %d bytes", id, maxWrapped)
	}
	return out, nil
}

func (r *Ring) unwrap(ctx context.Context, wrapped, aad []byte) (root []byte, id string, err error) {
	if len(wrapped) < 2 || len(wrapped) > maxWrapped || wrapped[0] != version {
		return nil, "", ErrFormat
	}
	n := int(wrapped[1])
	if len(wrapped) < 2+n || !validKEKID(string(wrapped[2:2+n])) {
		return nil, "", ErrFormat
	}
	id = string(wrapped[2 : 2+n])
	k, ok := r.byID[id]
	if !ok {
		return nil, "", fmt.Errorf("%w: %q", ErrUnknownKEK, id)
	}
	if root, err = k.Unwrap(ctx, wrapped[2+n:], r.aad(id, aad)); err != nil {
		return nil, "", fmt.Errorf("unwrap data key by %q: %w", id, err)
	}
	if len(root) != KeySize {
		return nil, "", ErrOpen
	}
	return root, id, nil
}

// aad binds the name of the wrapping key too: wrapped keys cannot be relabelled.
func (*Ring) aad(id string, aad []byte) []byte { return AAD("bulkhead/seal/ring/v1", id, string(aad)) }
