package seal

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
)

// Signer signs statements with Ed25519 (RFC 8032). What is signed must start
// with a label of its purpose; the signer adds none. It is safe for concurrent
// use.
type Signer struct {
	id  string
	pub ed25519.PublicKey
	// key is a function for the reason given at DataKey.
	key func() ed25519.PrivateKey
}

// NewSigner returns the signer of a 32-byte seed, which DeriveSeed makes. Any
// other length is a mistake of the program and panics.
func NewSigner(seed []byte) *Signer {
	key := ed25519.NewKeyFromSeed(seed)
	pub := append(ed25519.PublicKey(nil), key[ed25519.SeedSize:]...)
	return &Signer{id: KeyID(pub), pub: pub, key: func() ed25519.PrivateKey { return key }}
}

// KeyID returns the name of a public key: "ed25519:" and the first 16 bytes of
// its SHA-256 in hex.
func KeyID(pub ed25519.PublicKey) string {
	sum := sha256.Sum256(pub)
	return "ed25519:" + hex.EncodeToString(sum[:16])
}

// KeyID returns the name of the signer's public key.
func (s *Signer) KeyID() string { return s.id }

// Public returns a copy of the public key.
func (s *Signer) Public() ed25519.PublicKey { return append(ed25519.PublicKey(nil), s.pub...) }

// Sign returns the 64-byte signature of message.
func (s *Signer) Sign(message []byte) []byte { return ed25519.Sign(s.key(), message) }

// Verify reports whether sig is the signature of message under pub. A key of
// the wrong length verifies nothing.
func Verify(pub ed25519.PublicKey, message, sig []byte) bool {
	return len(pub) == ed25519.PublicKeySize && ed25519.Verify(pub, message, sig)
}

// String names the public key only.
func (s Signer) String() string { return "signer " + s.id }

// GoString names the public key only.
func (s Signer) GoString() string { return s.String() }

// Format names the public key only, under every verb.
func (s Signer) Format(f fmt.State, _ rune) { io.WriteString(f, s.String()) } //nolint:errcheck // fmt keeps its own error

// LogValue names the public key only.
func (s Signer) LogValue() slog.Value { return slog.StringValue(s.String()) }
