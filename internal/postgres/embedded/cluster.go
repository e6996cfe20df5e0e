package embedded

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// account is who runs the server. The zero value is this process's own account.
type account struct {
	name     string
	uid, gid uint32
	switched bool
}

// serverAccount picks the account: PostgreSQL refuses to run as root, so root
// switches to postgres, else nobody. It must have a passwd entry, which initdb
// reads.
func serverAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{uid: uint32(os.Geteuid()), gid: uint32(os.Getegid())}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil && uid != 0 {
			return account{name: name, uid: uint32(uid), gid: uint32(gid), switched: true}, nil
		}
	}
	return account{}, errors.New("running as root, and neither account postgres nor nobody exists to run PostgreSQL as")
}

func (a account) credential() *syscall.Credential {
	if !a.switched {
		return nil
	}
	return &syscall.Credential{Uid: a.uid, Gid: a.gid}
}

// reaches reports whether the account may pass through every directory down to
// path.
func (a account) reaches(path string) (bool, error) {
	for dir := path; ; dir = filepath.Dir(dir) {
		var st syscall.Stat_t
		if err := syscall.Stat(dir, &st); err != nil {
			return false, fmt.Errorf("%s: %w", dir, err)
		}
		bit := uint32(0o001)
		switch {
		case st.Uid == a.uid:
			bit = 0o100
		case st.Gid == a.gid:
			bit = 0o010
		}
		if st.Mode&bit == 0 {
			return false, nil
		}
		if dir == filepath.Dir(dir) {
			return true, nil
		}
	}
}

// cluster is one data directory:
//
//	root/                 the product's, passable by the server's account
//	root/postgres.lock    held while a server runs
//	root/postgres/        the server account's, 0700
//	root/postgres/pgdata  the cluster
type cluster struct {
	root    string
	account account
	fast    bool
}

func (c cluster) dir() string       { return filepath.Join(c.root, "postgres") }
func (c cluster) pgdata() string    { return filepath.Join(c.dir(), "pgdata") }
func (c cluster) logPath() string   { return filepath.Join(c.dir(), "postgres.log") }
func (c cluster) socketRef() string { return filepath.Join(c.dir(), "socket") }

func (c cluster) prepareRoot() error {
	mode := fs.FileMode(0o700)
	if c.account.switched {
		mode = 0o711
	}
	if err := os.MkdirAll(c.root, mode); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	if c.account.switched {
		ok, err := c.account.reaches(c.root)
		if err != nil {
			return fmt.Errorf("data directory: %w", err)
		}
		if !ok {
			return fmt.Errorf("data directory %s is out of reach for account %s, which runs PostgreSQL for root; "+
				"choose one outside private directories, such as /var/lib/bulkhead", c.root, c.account.name)
		}
	}
	return c.mkdirOwned(c.dir())
}

// mkdirOwned makes a directory, 0700, of the server's account.
func (c cluster) mkdirOwned(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("data directory: %w", err)
	}
	return c.own(path)
}

func (c cluster) own(path string) error {
	if !c.account.switched {
		return nil
	}
	return os.Lchown(path, int(c.account.uid), int(c.account.gid))
}

// lockFile takes an exclusive lock that ends with this process. The file is
// opened close-on-exec, so that no child inherits the lock.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w", filepath.Dir(path), ErrInUse)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// create runs initdb unless the cluster exists. It works in pgdata.new and
// renames at the end: a crash in the middle never leaves half a cluster that
// looks whole.
func (c cluster) create(ctx context.Context, bin string) error {
	have, err := os.ReadFile(filepath.Join(c.pgdata(), "PG_VERSION"))
	if err == nil {
		return checkVersion(ctx, c, bin, strings.TrimSpace(string(have)))
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("data directory: %w", err)
	}
	fresh := c.pgdata() + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	args := []string{"-D", fresh, "-U", OwnerRole, "-A", "trust", "-E", "UTF8", "--locale=C"}
	if c.fast {
		args = append(args, "--no-sync")
	} else {
		args = append(args, "--data-checksums")
	}
	if out, err := c.run(ctx, filepath.Join(bin, "initdb"), args...); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, lastLine(out))
	}
	if err := os.Rename(fresh, c.pgdata()); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	return nil
}

// checkVersion refuses binaries of another major version than the cluster's
// before postgres would, in words that say what to do.
func checkVersion(ctx context.Context, c cluster, bin, have string) error {
	out, err := c.run(ctx, filepath.Join(bin, "postgres"), "--version")
	if err != nil {
		return fmt.Errorf("postgres --version: %w: %s", err, lastLine(out))
	}
	if v := versionOf(out); v != have {
		return fmt.Errorf("the data in %s is of PostgreSQL %s, the binaries in %s are %s; install version %s or remove the data",
			c.pgdata(), have, bin, v, have)
	}
	return nil
}

// versionOf reads the major version from "postgres (PostgreSQL) 15.18 (Debian …)".
func versionOf(out string) string {
	for _, word := range strings.Fields(out) {
		if word[0] >= '0' && word[0] <= '9' {
			major, _, _ := strings.Cut(word, ".")
			return major
		}
	}
	return "unknown"
}

// run executes a short command as the server's account and returns what it
// printed, at most 64 KiB. The thread stays locked because of the parent-death
// signal; see launch.
func (c cluster) run(ctx context.Context, path string, args ...string) (string, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := c.command(path, args...)
	var out tail
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	defer stop()
	err := cmd.Wait()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return out.String(), err
}

// tail keeps the last 64 KiB written to it.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if over := len(t.b) - 64<<10; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string { return string(t.b) }

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// serverArgs are the settings of the server. They go by the command line and
// not into the cluster's files, so that a later version of ours may change them.
func (c cluster) serverArgs(socketDir string) []string {
	set := []string{
		"listen_addresses=", // no port, so no clash and nothing to reach from elsewhere
		"unix_socket_directories=" + socketDir,
		"unix_socket_permissions=0700",
		"max_connections=100",
		"shared_buffers=64MB",
		"log_min_messages=warning",
		"log_timezone=UTC",
		"timezone=UTC",
		"logging_collector=off",
	}
	if c.fast {
		set = append(set, "fsync=off", "synchronous_commit=off", "full_page_writes=off",
			"max_connections=300", "shared_buffers=32MB", "autovacuum=off", "max_wal_size=256MB")
	}
	args := []string{"-D", c.pgdata()}
	for _, s := range set {
		args = append(args, "-c", s)
	}
	return args
}

// makeSocketDir makes a fresh, short directory for the socket (its path is
// bound to 107 bytes) and removes the one a killed run left behind.
func (c cluster) makeSocketDir() (string, error) {
	if raw, err := os.ReadFile(c.socketRef()); err == nil {
		// Only a directory of ours directly in /tmp, whatever the file says.
		if old := filepath.Clean(string(raw)); strings.HasPrefix(old, socketPrefix) && filepath.Dir(old) == filepath.Dir(socketPrefix) {
			os.RemoveAll(old)
		}
	}
	dir, err := os.MkdirTemp("/tmp", filepath.Base(socketPrefix)+"*")
	if err != nil {
		return "", fmt.Errorf("socket directory: %w", err)
	}
	if err = c.own(dir); err == nil {
		err = os.WriteFile(c.socketRef(), []byte(dir), 0o600)
	}
	if err != nil {
		os.RemoveAll(dir)
		return "", fmt.Errorf("socket directory: %w", err)
	}
	return dir, nil
}

const socketPrefix = "/tmp/bhpg-"

// maxLog is the size beyond which the server's log is begun anew at a start.
const maxLog = 1 << 20

func (c cluster) openLog() (*os.File, error) {
	if st, err := os.Lstat(c.logPath()); err == nil && st.Size() > maxLog {
		os.Rename(c.logPath(), c.logPath()+".1")
	}
	f, err := os.OpenFile(c.logPath(), os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("server log: %w", err)
	}
	return f, nil
}

// logTail returns the last line of the server's log.
func (c cluster) logTail() string {
	f, err := os.Open(c.logPath())
	if err != nil {
		return "no log"
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil {
		f.Seek(max(0, st.Size()-4096), io.SeekStart)
	}
	b, _ := io.ReadAll(io.LimitReader(f, 4096))
	return lastLine(string(b))
}
