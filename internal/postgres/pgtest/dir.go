package pgtest

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// The directories lie directly in /tmp: the account that runs PostgreSQL for
// root must reach them, which a TMPDIR of root's own may prevent.
const (
	tempRoot  = "/tmp"
	dirPrefix = "bulkhead-pgtest-"
)

// sweepAge is how old a directory must be to be taken for left behind.
const sweepAge = 10 * time.Minute

// makeDir makes a data directory and removes those of killed test runs.
func makeDir() (string, error) {
	sweep()
	dir, err := os.MkdirTemp(tempRoot, dirPrefix+"*")
	if err != nil {
		return "", fmt.Errorf("directory for the server: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", fmt.Errorf("directory for the server: %w", err)
	}
	return dir, nil
}

// sweep removes directories of this account whose server's lock nobody holds.
func sweep() {
	dirs, _ := filepath.Glob(filepath.Join(tempRoot, dirPrefix+"*"))
	for _, dir := range dirs {
		st, err := os.Lstat(dir)
		if err != nil || !st.IsDir() || time.Since(st.ModTime()) < sweepAge || !mine(st) {
			continue
		}
		if f, err := os.OpenFile(filepath.Join(dir, "postgres.lock"), os.O_RDWR, 0); err == nil {
			free := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
			if free {
				os.RemoveAll(dir)
			}
			f.Close()
		}
	}
}

func mine(st os.FileInfo) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == os.Geteuid()
}
