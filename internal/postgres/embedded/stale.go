package embedded

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// zombieGrace is how long a dead postmaster that nobody has reaped may keep its
// lock file. Where process 1 never reaps it would keep it for ever.
const zombieGrace = 2 * time.Second

// clearStale deals with the postmaster.pid of an earlier run. It is called while
// our own lock is held, so no other launcher is at work here.
//
//   - a postmaster of ours that still runs is asked to stop and waited for;
//   - a zombie is waited for shortly, then the file goes;
//   - a number that belongs to another program by now: the file goes;
//   - a number nobody has: PostgreSQL removes the file itself, and looks for
//     left-over backends by it, so it stays.
func (c cluster) clearStale(ctx context.Context) error {
	path := filepath.Join(c.pgdata(), "postmaster.pid")
	pid, err := readPid(path)
	if err != nil || pid == 0 {
		return err
	}
	var zombieSince time.Time
	asked := false
	for {
		switch c.stateOf(pid) {
		case gone:
			return nil
		case foreign:
			return c.removePidFile(ctx, path)
		case zombie:
			if zombieSince.IsZero() {
				zombieSince = time.Now()
			}
			if time.Since(zombieSince) > zombieGrace {
				return c.removePidFile(ctx, path)
			}
		case alive:
			if !asked {
				_ = syscall.Kill(pid, syscall.SIGINT)
				asked = true
			}
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("an earlier PostgreSQL (process %d) still holds %s: %w", pid, c.pgdata(), err)
		}
	}
}

// removePidFile removes the file once no backend of the dead postmaster works
// in the data directory any more.
func (c cluster) removePidFile(ctx context.Context, path string) error {
	for c.anyWorker() {
		if err := pause(ctx); err != nil {
			return fmt.Errorf("an earlier PostgreSQL still works in %s: %w", c.pgdata(), err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("stale lock file: %w", err)
	}
	return nil
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(20 * time.Millisecond):
		return nil
	}
}

// readPid returns the process in a postmaster.pid, 0 when there is none or it
// says nothing sensible.
func readPid(path string) (int, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("stale lock file: %w", err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || pid <= 1 {
		return 0, nil
	}
	return pid, nil
}

type procState uint8

const (
	gone procState = iota
	zombie
	foreign
	alive
)

// stateOf looks a process up in /proc. It counts as ours when its command line
// names the data directory.
func (c cluster) stateOf(pid int) procState {
	dir := fmt.Sprintf("/proc/%d", pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return gone
	}
	// The name in brackets may hold anything, brackets too; the state follows
	// the last one.
	rest := stat[bytes.LastIndexByte(stat, ')')+1:]
	if f := bytes.Fields(rest); len(f) > 0 && (string(f[0]) == "Z" || string(f[0]) == "X") {
		return zombie
	}
	cmdline, err := os.ReadFile(dir + "/cmdline")
	if err != nil {
		return gone
	}
	if bytes.Contains(cmdline, []byte(c.pgdata())) {
		return alive
	}
	return foreign
}

// anyWorker reports whether a live process has the data directory as its
// working directory, as every PostgreSQL process has.
func (c cluster) anyWorker() bool {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil && to == c.pgdata() {
			return true
		}
	}
	return false
}
