package catalog

import (
	"crypto/sha256"
	"encoding/base32"
	"regexp"
	"strings"
)

// MaxModelName is the greatest length of a model name in characters. It is
// what the strictest model providers take.
const MaxModelName = 64

// hashChars is the length of the suffix of a model name that had to be changed:
// 100 bits, so that a server cannot make two of its names collide.
const hashChars = 20

var (
	plainName  = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
	hashSuffix = regexp.MustCompile(`_[a-z2-7]{20}$`)
	unplain    = regexp.MustCompile(`[^A-Za-z0-9-]+`)
	suffixText = base32.StdEncoding.WithPadding(base32.NoPadding)
)

// ModelName returns the name under which a model sees a definition:
// server__name where that matches [A-Za-z0-9_-]{1,64}, else a readable part and
// a hash of both names. It depends on the two names alone, so it is the same
// after a restart and on every replica. A name that is plain but looks as if it
// had a hash gets one too, so that no plain name equals a changed one. Server
// names hold no underscore, so that no two servers share a model name.
func ModelName(server, name string) string {
	plain := server + "__" + name
	if len(plain) <= MaxModelName && plainName.MatchString(name) && !hashSuffix.MatchString(plain) {
		return plain
	}
	sum := sha256.Sum256([]byte("bulkhead model name\x00" + server + "\x00" + name))
	suffix := strings.ToLower(suffixText.EncodeToString(sum[:]))[:hashChars]
	readable := server
	if words := strings.Trim(unplain.ReplaceAllString(name, "_"), "_"); words != "" {
		readable += "__" + words
	}
	const room = MaxModelName - 1 - hashChars
	if len(readable) > room {
		readable = strings.TrimRight(readable[:room], "_")
	}
	return readable + "_" + suffix
}
