// Package embedded runs a private PostgreSQL as a child process: for
// development, where nothing but the product should have to be started, and for
// tests. The server listens on a Unix socket in a directory of its own that
// only this account can enter, never on a port, and ends with this process
// however that ends. The data stays where it is and is taken up again at the
// next start, after a crash too.
//
// Linux only: it relies on parent-death signals and /proc.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
)

const (
	// OwnerRole is the superuser of the cluster. It owns the schema and serves
	// for migrations only.
	OwnerRole = "bulkhead_owner"
	// LoginRole is what the server process logs in as: no superuser, bypasses
	// nothing, owns nothing.
	LoginRole = "bulkhead"
	// Database is the name of the database that Start creates.
	Database = "bulkhead"
)

// startTimeout bounds the start, crash recovery included.
const startTimeout = 2 * time.Minute

// ErrNoBinaries says that no PostgreSQL was found and how to get one. It is one
// line, for the process to print as it is.
var ErrNoBinaries = errors.New("no PostgreSQL server binaries found: run `apt-get install postgresql`, " +
	"or install npm so that they can be fetched, or set BULKHEAD_DATABASE_URL")

// ErrInUse says that another process holds the data directory.
var ErrInUse = errors.New("data directory is in use by another process")

// Options says where and how to run.
type Options struct {
	// DataDir is required. The cluster lies in its sub-directory "postgres". As
	// root it must be within reach of the account that runs the server, so not
	// below root's home.
	DataDir string
	// BinDir is a directory with initdb and postgres to use instead of searching.
	BinDir string
	// Fast gives up durability for speed. Tests only.
	Fast bool
	// Log receives what the launcher does; nil discards it.
	Log *slog.Logger
}

// Server is a running PostgreSQL. It is safe for concurrent use.
type Server struct {
	socketDir string
	lock      *os.File
	child     *os.Process
	exited    chan struct{} // closed when the postmaster has been reaped
	stopOnce  sync.Once
	stopErr   error
}

// Start brings the server up, creating the cluster and the database at first
// use, and returns when it accepts connections. A directory in use by another
// process is refused at once with ErrInUse, a machine without PostgreSQL with
// ErrNoBinaries.
func Start(ctx context.Context, o Options) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if !filepath.IsAbs(o.DataDir) {
		return nil, fmt.Errorf("data directory %q is not an absolute path", o.DataDir)
	}
	acct, err := serverAccount()
	if err != nil {
		return nil, err
	}
	c := cluster{root: filepath.Clean(o.DataDir), account: acct, fast: o.Fast}
	if err := c.prepareRoot(); err != nil {
		return nil, err
	}
	lock, err := lockFile(filepath.Join(c.root, "postgres.lock"))
	if err != nil {
		return nil, err
	}
	s, err := startLocked(ctx, c, o)
	if err != nil {
		lock.Close()
		return nil, err
	}
	s.lock = lock
	return s, nil
}

func startLocked(ctx context.Context, c cluster, o Options) (*Server, error) {
	bin, err := search{given: o.BinDir, glob: debianGlob, root: c.root, log: o.Log}.find(ctx)
	if err != nil {
		return nil, err
	}
	if err := c.create(ctx, bin); err != nil {
		return nil, err
	}
	if err := c.clearStale(ctx); err != nil {
		return nil, err
	}
	socketDir, err := c.makeSocketDir()
	if err != nil {
		return nil, err
	}
	s := &Server{socketDir: socketDir, exited: make(chan struct{})}
	if err := s.launch(c, bin); err != nil {
		os.RemoveAll(socketDir)
		return nil, err
	}
	if err := s.awaitReady(ctx, c); err != nil {
		s.Stop(context.WithoutCancel(ctx))
		return nil, err
	}
	o.Log.InfoContext(ctx, "private PostgreSQL is up", "binaries", bin, "data", c.pgdata())
	return s, nil
}

// launch starts the postmaster on a thread that stays with it: the kernel sends
// the parent-death signal when the *thread* that started a child ends, not when
// the process does.
func (s *Server) launch(c cluster, bin string) error {
	out, err := c.openLog()
	if err != nil {
		return err
	}
	cmd := c.command(filepath.Join(bin, "postgres"), c.serverArgs(s.socketDir)...)
	cmd.Stdout, cmd.Stderr = out, out
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(s.exited)
		err := cmd.Start()
		out.Close()
		s.child = cmd.Process
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		<-s.exited
		return fmt.Errorf("start postgres: %w", err)
	}
	return nil
}

// awaitReady polls until a connection succeeds, and makes the database.
func (s *Server) awaitReady(ctx context.Context, c cluster) error {
	for {
		conn, err := pgx.Connect(ctx, s.urlFor(OwnerRole, "postgres"))
		if err == nil {
			defer conn.Close(ctx)
			return ensureDatabase(ctx, conn)
		}
		select {
		case <-s.exited:
			return fmt.Errorf("postgres ended while starting: %s", c.logTail())
		case <-ctx.Done():
			return fmt.Errorf("postgres did not come up in time: %s", c.logTail())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func ensureDatabase(ctx context.Context, conn *pgx.Conn) error {
	var exists bool
	if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, Database).Scan(&exists); err != nil {
		return err
	}
	if exists {
		return nil
	}
	_, err := conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{Database}.Sanitize())
	return err
}

// URL returns the address of the database for its owner, a superuser: for
// migrations and PrepareLogin, not for serving.
func (s *Server) URL() string { return s.urlFor(OwnerRole, Database) }

// URLFor returns the address of the database for a role, without a password:
// the socket's directory admits this account only.
func (s *Server) URLFor(role string) string { return s.urlFor(role, Database) }

func (s *Server) urlFor(role, database string) string {
	u := url.URL{Scheme: "postgres", User: url.User(role), Path: "/" + database}
	u.RawQuery = url.Values{"host": {s.socketDir}, "sslmode": {"disable"}}.Encode()
	return u.String()
}

// Exited is closed when the server has ended, by Stop or by itself.
func (s *Server) Exited() <-chan struct{} { return s.exited }

// Stop ends the server: a fast shutdown that it waits for; an immediate one,
// which costs a recovery at the next start, when ctx ends first. It may be
// called more than once.
func (s *Server) Stop(ctx context.Context) error {
	s.stopOnce.Do(func() {
		s.stopErr = s.stop(ctx)
		os.RemoveAll(s.socketDir)
		if s.lock != nil {
			s.lock.Close()
		}
	})
	return s.stopErr
}

func (s *Server) stop(ctx context.Context) error {
	_ = s.child.Signal(syscall.SIGINT)
	select {
	case <-s.exited:
		return nil
	case <-ctx.Done():
	}
	_ = s.child.Signal(syscall.SIGQUIT)
	select {
	case <-s.exited:
		return fmt.Errorf("postgres had to be stopped at once: %w", ctx.Err())
	case <-time.After(5 * time.Second):
	}
	_ = s.child.Kill()
	<-s.exited
	return fmt.Errorf("postgres had to be killed: %w", ctx.Err())
}

// PrepareLogin makes LoginRole in the cluster and lets it take the two
// application roles, which the migrations have created. It may be repeated.
func PrepareLogin(ctx context.Context, ownerURL string) error {
	return postgres.PrepareLogin(ctx, ownerURL, postgres.Login{Name: LoginRole})
}

// command returns a command that runs as the server's account, in the cluster's
// directory, with a clean environment.
func (c cluster) command(path string, args ...string) *exec.Cmd {
	cmd := exec.Command(path, args...)
	cmd.Dir = c.dir()
	cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=" + c.dir(), "LC_ALL=C", "TZ=UTC"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		// A group of its own, so that Ctrl-C in a terminal reaches this process
		// only and the database outlives the draining.
		Setpgid:    true,
		Pdeathsig:  syscall.SIGINT,
		Credential: c.account.credential(),
	}
	return cmd
}
