package config

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

const (
	kekSize  = 32
	maxKEKs  = 16
	maxKEKID = 64
	// onlyKEK is the id of a key whose file names none. To rotate such a file,
	// write it anew as lines and keep this id for the old key.
	onlyKEK = "default"
)

// KEK is a key-encryption key of 32 bytes. Printing it shows its id only.
type KEK struct {
	ID  string
	Key []byte
}

// String returns the id.
func (k KEK) String() string { return "kek " + k.ID }

// Format prints the id under every verb.
func (k KEK) Format(f fmt.State, _ rune) { io.WriteString(f, k.String()) } //nolint:errcheck // fmt keeps its own error

// LogValue returns the id.
func (k KEK) LogValue() slog.Value { return slog.StringValue(k.String()) }

// MarshalText returns the id, for JSON and the like.
func (k KEK) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// parseKEKs reads a key file: exactly 32 raw bytes, or one key in hex or base64,
// or lines of id:key of which the first is the primary. Empty lines and lines
// that begin with # are skipped. It returns the broken rule, or "".
func parseKEKs(b []byte) ([]KEK, string) {
	if len(b) == kekSize {
		return checkKEKs([]KEK{{ID: onlyKEK, Key: bytes.Clone(b)}})
	}
	var keys []KEK
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		id, text, named := strings.Cut(line, ":")
		if !named {
			id, text = onlyKEK, line
		}
		if !validKEKID(id) {
			return nil, fmt.Sprintf("line %d: an id has 1 to %d characters of a-z, 0-9, '.', '_', '-'", n, maxKEKID)
		}
		key, ok := decodeKEK(strings.TrimSpace(text))
		if !ok {
			return nil, fmt.Sprintf("line %d: a key is %d bytes in base64 or hex", n, kekSize)
		}
		keys = append(keys, KEK{ID: id, Key: key})
	}
	return checkKEKs(keys)
}

func checkKEKs(keys []KEK) ([]KEK, string) {
	if len(keys) == 0 {
		return nil, "holds no key"
	}
	if len(keys) > maxKEKs {
		return nil, fmt.Sprintf("holds more than %d keys", maxKEKs)
	}
	for i, k := range keys {
		if bytes.Count(k.Key, k.Key[:1]) == kekSize {
			return nil, fmt.Sprintf("key %q is one byte repeated, not a random key", k.ID)
		}
		for _, other := range keys[:i] {
			if k.ID == other.ID {
				return nil, fmt.Sprintf("the id %q occurs twice", k.ID)
			}
			if bytes.Equal(k.Key, other.Key) {
				return nil, fmt.Sprintf("the ids %q and %q have the same key", other.ID, k.ID)
			}
		}
	}
	return keys, ""
}

// decodeKEK tries hex first: 64 hex digits are base64 of 48 bytes as well, so
// nothing is ambiguous.
func decodeKEK(s string) ([]byte, bool) {
	if b, err := hex.DecodeString(s); err == nil && len(b) == kekSize {
		return b, true
	}
	s = strings.TrimRight(s, "=")
	for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		if b, err := enc.Strict().DecodeString(s); err == nil && len(b) == kekSize {
			return b, true
		}
	}
	return nil, false
}

func validKEKID(id string) bool {
	for _, c := range []byte(id) {
		if !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return len(id) >= 1 && len(id) <= maxKEKID
}

// DevelopmentKEK returns the key-encryption keys of development mode from the
// file "kek" in dir, which it makes, mode 0600, when it is not there. One process
// at a time may call it, as the holder of the data directory does.
func DevelopmentKEK(dir string) ([]KEK, error) {
	path := filepath.Join(dir, "kek")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return makeKEK(path)
	}
	if err != nil {
		return nil, fault.Wrap(err, "read the development key")
	}
	keys, rule := parseKEKs(b)
	if rule != "" {
		return nil, fault.Field1(path, "%s", rule)
	}
	return keys, nil
}

// makeKEK writes beside and renames, so that a crash never leaves half a key
// under which something could be sealed.
func makeKEK(path string) ([]KEK, error) {
	key := make([]byte, kekSize)
	rand.Read(key) //nolint:errcheck // crypto/rand.Read never fails since Go 1.24
	line := "development:" + base64.StdEncoding.EncodeToString(key) + "\n"
	fresh := path + ".new"
	if err := os.WriteFile(fresh, []byte(line), 0o600); err != nil {
		return nil, fault.Wrap(err, "write the development key")
	}
	if err := os.Rename(fresh, path); err != nil {
		return nil, fault.Wrap(err, "write the development key")
	}
	return []KEK{{ID: "development", Key: key}}, nil
}
