// Package seal keeps secrets unreadable at rest and statements unforgeable. It
// owns the envelope (a key-encryption key wraps a data key, a data key seals
// values), keyed digests, and the Ed25519 signer of audit checkpoints. It knows
// nothing of tenants or tables: what a value belongs to enters as additional
// data, for which AAD builds an unambiguous form.
//
// The cipher is XAES-256-GCM (c2sp.org/XAES-256-GCM): AES-256-GCM with a random
// 96-bit nonce under a key derived for each message from another 96 random
// bits. Plain AES-GCM with random nonces may seal 2^32 messages under one key;
// a busy tenant would reach that with audit details alone within months, and a
// tenant's data key lives as long as the tenant.
//
// No error of this package holds a key or a plaintext, and every type that
// holds a key prints as "[redacted]" under every verb of fmt and in slog.
package seal

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
)

// KeySize is the size in bytes of key-encryption keys and data keys.
const KeySize = 32

// Overhead is how many bytes a sealed value is longer than its plaintext: a
// version, two random parts of 12 and a tag of 16.
const Overhead = 1 + saltSize + nonceSize + tagSize

const (
	version   = 1
	saltSize  = 12
	nonceSize = 12
	tagSize   = 16
)

// ErrOpen means that a sealed value, its key or its additional data is not the
// one it was sealed with. Which of them is not told apart, nor can it be.
var ErrOpen = errors.New("seal: sealed value does not open")

// ErrFormat means that bytes are not in a form this package writes.
var ErrFormat = errors.New("seal: not a sealed value of a known version")

// AAD joins parts into additional data that no other list of parts yields: a
// count, then each part after its length.
func AAD(parts ...string) []byte {
	n := 4
	for _, p := range parts {
		n += 4 + len(p)
	}
	b := binary.BigEndian.AppendUint32(make([]byte, 0, n), uint32(len(parts)))
	for _, p := range parts {
		b = append(binary.BigEndian.AppendUint32(b, uint32(len(p))), p...)
	}
	return b
}

// DataKey seals values and makes keyed digests. It is safe for concurrent use.
// Its zero value is unusable; a Ring makes it.
type DataKey struct {
	// secret is a function because fmt looks behind pointers: under a verb that
	// does not fit, it prints what an unexported field of a caller's struct
	// points to, and asks no Formatter. It cannot look into a closure.
	secret func() *dataSecret
}

type dataSecret struct {
	root [KeySize]byte
	aead *box

	mu   sync.RWMutex
	macs map[string][]byte // subkeys by purpose; at most maxPurposes
}

// maxPurposes bounds the subkeys kept in memory; a further one is derived each
// time. Purposes are words of the program, a handful.
const maxPurposes = 16

// Labels keep apart what is derived from one root.
const (
	labelSeal = "bulkhead/seal/data/v1"
	labelMAC  = "bulkhead/seal/mac/v1"
	labelKEK  = "bulkhead/seal/kek/v1"
)

func newDataKey(root []byte) (*DataKey, error) {
	if len(root) != KeySize {
		return nil, fmt.Errorf("seal: a data key has %d bytes, not %d", KeySize, len(root))
	}
	b, err := newBox(expand(root, labelSeal, ""))
	if err != nil {
		return nil, err
	}
	s := &dataSecret{aead: b, macs: map[string][]byte{}}
	copy(s.root[:], root)
	return &DataKey{secret: func() *dataSecret { return s }}, nil
}

// Seal returns plain encrypted and bound to aad; two calls never return the
// same bytes. aad is not stored: Open needs it again.
func (k *DataKey) Seal(plain, aad []byte) ([]byte, error) {
	out := make([]byte, 1, Overhead+len(plain))
	out[0] = version
	return k.secret().aead.seal(out, plain, bind(labelSeal, aad))
}

// Open returns the plaintext of what Seal returned, ErrFormat for bytes that
// cannot be such, or ErrOpen.
func (k *DataKey) Open(sealed, aad []byte) ([]byte, error) {
	if len(sealed) < Overhead || sealed[0] != version {
		return nil, ErrFormat
	}
	return k.secret().aead.open(sealed[1:], bind(labelSeal, aad))
}

// MAC returns HMAC-SHA256 of data under a subkey that HKDF derives for
// purpose, so that digests of one purpose mean nothing for another.
func (k *DataKey) MAC(purpose string, data []byte) []byte {
	m := hmac.New(sha256.New, k.secret().macKey(purpose))
	m.Write(data)
	return m.Sum(nil)
}

func (s *dataSecret) macKey(purpose string) []byte {
	s.mu.RLock()
	key, ok := s.macs[purpose]
	s.mu.RUnlock()
	if ok {
		return key
	}
	key = expand(s.root[:], labelMAC, purpose)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.macs) < maxPurposes {
		s.macs[purpose] = key
	}
	return key
}

// DeriveSeed returns 32 bytes derived by HKDF-SHA256 (RFC 5869) from key for
// purpose. key must have at least 32 bytes of full entropy; a shorter one is a
// mistake of the program and panics.
func DeriveSeed(key []byte, purpose string) []byte {
	if len(key) < KeySize {
		panic("seal: DeriveSeed needs a key of at least 32 bytes")
	}
	prk, err := hkdf.Extract(sha256.New, key, []byte("bulkhead/seal/seed/v1"))
	if err != nil {
		panic("seal: hkdf: " + err.Error())
	}
	return expand(prk, "bulkhead/seal/seed/v1", purpose)
}

// expand is HKDF-Expand to one key. It can only fail in a FIPS mode that
// forbids SHA-256, where nothing of this package could work.
func expand(prk []byte, label, purpose string) []byte {
	out, err := hkdf.Expand(sha256.New, prk, string(AAD(label, purpose)), KeySize)
	if err != nil {
		panic("seal: hkdf: " + err.Error())
	}
	return out
}

// bind puts label, version and length before the caller's additional data.
func bind(label string, aad []byte) []byte {
	b := make([]byte, 0, 1+4+len(label)+4+len(aad))
	b = append(b, version)
	b = append(binary.BigEndian.AppendUint32(b, uint32(len(label))), label...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(aad))), aad...)
}

// box is XAES-256-GCM with its random 192-bit nonce in front of the output.
type box struct {
	c  cipher.Block
	k1 [aes.BlockSize]byte
}

func newBox(key []byte) (*box, error) {
	c, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	b := &box{c: c}
	c.Encrypt(b.k1[:], b.k1[:])
	var carry byte
	for i := len(b.k1) - 1; i >= 0; i-- {
		carry, b.k1[i] = b.k1[i]>>7, b.k1[i]<<1|carry
	}
	b.k1[len(b.k1)-1] ^= carry * 0b10000111
	return b, nil
}

// message returns the AEAD of the message whose nonce starts with salt.
func (b *box) message(salt []byte) (cipher.AEAD, error) {
	var k [2 * aes.BlockSize]byte
	for i := range 2 {
		half := k[i*aes.BlockSize : (i+1)*aes.BlockSize]
		half[1], half[2] = byte(i+1), 'X'
		copy(half[4:], salt)
		subtle.XORBytes(half, half, b.k1[:])
		b.c.Encrypt(half, half)
	}
	c, err := aes.NewCipher(k[:])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(c)
}

func (b *box) seal(dst, plain, aad []byte) ([]byte, error) {
	var salt [saltSize]byte
	rand.Read(salt[:]) //nolint:errcheck // crypto/rand.Read never fails since Go 1.24
	gcm, err := b.message(salt[:])
	if err != nil {
		return nil, err
	}
	return gcm.Seal(append(dst, salt[:]...), nil, plain, aad), nil
}

func (b *box) open(sealed, aad []byte) ([]byte, error) {
	if len(sealed) < saltSize+nonceSize+tagSize {
		return nil, ErrFormat
	}
	gcm, err := b.message(sealed[:saltSize])
	if err != nil {
		return nil, err
	}
	plain, err := gcm.Open(nil, nil, sealed[saltSize:], aad)
	if err != nil {
		return nil, ErrOpen
	}
	return plain, nil
}

const redacted = "[redacted]"

// String hides the key.
func (DataKey) String() string { return redacted }

// GoString hides the key.
func (DataKey) GoString() string { return redacted }

// Format hides the key under every verb, %d and %x too.
func (DataKey) Format(f fmt.State, _ rune) { io.WriteString(f, redacted) } //nolint:errcheck // fmt keeps its own error

// LogValue hides the key.
func (DataKey) LogValue() slog.Value { return slog.StringValue(redacted) }
