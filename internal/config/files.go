package config

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
)

// maxFile bounds a file named by a setting, in bytes.
const maxFile = 1 << 20

// file reads a file that a setting names. The rule it reports names the cause
// but not the content.
func (l *loader) file(name, path string) ([]byte, bool) {
	f, err := os.Open(path)
	if err != nil {
		l.refuse(name, "names a file that %s", whyUnreadable(err))
		return nil, false
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		l.refuse(name, "names a file that %s", whyUnreadable(err))
		return nil, false
	case len(b) > maxFile:
		l.refuse(name, "names a file of more than %d bytes", maxFile)
		return nil, false
	}
	return b, true
}

func whyUnreadable(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "does not exist"
	case errors.Is(err, fs.ErrPermission):
		return "may not be read by this account"
	}
	return "cannot be read"
}

func isRoot() bool { return os.Geteuid() == 0 }

// operatorKey reads one line of 32 to 256 printable characters without spaces.
func (l *loader) operatorKey() Secret {
	const name = "OPERATOR_KEY_FILE"
	if l.raw.OperatorKeyFile == "" {
		return ""
	}
	b, ok := l.file(name, l.raw.OperatorKeyFile)
	if !ok {
		return ""
	}
	key := strings.TrimSpace(string(b))
	if len(key) < 32 || len(key) > 256 {
		l.refuse(name, "must hold a key of 32 to 256 characters")
		return ""
	}
	for _, c := range []byte(key) {
		if c <= ' ' || c > '~' {
			l.refuse(name, "must hold one line of printable ASCII without spaces")
			return ""
		}
	}
	return Secret(key)
}

func (l *loader) keks() []KEK {
	if l.raw.KEKFile == "" {
		return nil
	}
	b, ok := l.file("KEK_FILE", l.raw.KEKFile)
	if !ok {
		return nil
	}
	keys, rule := parseKEKs(b)
	if rule != "" {
		l.refuse("KEK_FILE", "%s", rule)
	}
	return keys
}

func (l *loader) runtimes() map[string]Runtime {
	if l.raw.RuntimesFile == "" {
		return nil
	}
	b, ok := l.file("RUNTIMES_FILE", l.raw.RuntimesFile)
	if !ok {
		return nil
	}
	rs, bad := parseRuntimes(b)
	for _, f := range bad {
		l.refuse("RUNTIMES_FILE", "%s: %s", f.Path, f.Rule)
	}
	return rs
}
