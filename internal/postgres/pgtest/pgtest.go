// Package pgtest gives each test a PostgreSQL database of its own, migrated and
// dropped again. The first use in a test binary starts a private server, or
// takes the one that BULKHEAD_TEST_DATABASE_URL names; there it makes databases
// and roles under random names and touches nothing it finds. Tests may run in
// parallel, and so may test binaries.
//
// A package that uses it declares
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
// or, with a leak check, goleak.VerifyTestMain(pgtest.Wrap(m)).
package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/embedded"
	"github.com/bulkhead-mcp/bulkhead/migrations"
)

// ServerVariable names the environment variable with the address of a server to
// use instead of a private one. Its role must be allowed to create databases
// and roles. It is a setting of the tests, so package config does not know it.
const ServerVariable = "BULKHEAD_TEST_DATABASE_URL"

// setupTimeout bounds each step outside the tests themselves.
const setupTimeout = 2 * time.Minute

// DB is one test's database.
type DB struct {
	// Name is the database's name.
	Name string
	// OwnerURL is its address for the owner of the tables.
	OwnerURL string
	// URL is its address for the unprivileged login role, as the server uses it.
	URL string

	server *server
}

// New returns a fresh, migrated database that is dropped when t ends. It fails
// the test when there is no server.
func New(t testing.TB) *DB {
	t.Helper()
	s, err := shared()
	if err != nil {
		t.Fatalf("database for the test: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
	defer cancel()
	name := randomName("bhtest_")
	if err := s.createDatabase(ctx, name, s.template); err != nil {
		t.Fatalf("clone the template: %v", err)
	}
	t.Cleanup(func() {
		if err := s.dropDatabase(name); err != nil {
			t.Errorf("drop the test's database: %v", err)
		}
	})
	return &DB{Name: name, OwnerURL: s.ownerURL(name), URL: s.urlAs(s.login, name), server: s}
}

// URLAs returns the database's address for another login role, which the test
// has made and drops itself: roles are the server's, not the database's.
func (d *DB) URLAs(l postgres.Login) string { return d.server.urlAs(l, d.Name) }

// Pool returns a pool that works as role, closed when t ends. Role is
// postgres.AppRole, postgres.SystemRole or "" for the bare login role.
func (d *DB) Pool(t testing.TB, role string) *pgxpool.Pool {
	return openPool(t, d.URL, role)
}

// Owner returns a pool of the owner, who sees past row-level security: to look
// at what was stored, not to do the work under test.
func (d *DB) Owner(t testing.TB) *pgxpool.Pool {
	return openPool(t, d.OwnerURL, "")
}

func openPool(t testing.TB, url, role string) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(t.Context(), url, role, postgres.Options{MaxConns: 8, ApplicationName: "bulkhead-test"})
	if err != nil {
		t.Fatalf("open the test's database: %v", err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// Main runs the tests and stops the server. The exit code is m's.
func Main(m *testing.M) { Wrap(m).Run() }

// Stop stops the server, for a TestMain that uses New outside the tests and has
// more to end before. New fails after it.
func Stop() error { return stopShared() }

// Wrap returns a test runner that stops the server after the tests, for
// goleak.VerifyTestMain.
func Wrap(m *testing.M) *Runner { return &Runner{m: m} }

// Runner runs a test binary's tests and cleans up behind them.
type Runner struct{ m *testing.M }

// Run runs the tests and returns their exit code.
func (r *Runner) Run() int {
	code := r.m.Run()
	if err := stopShared(); err != nil {
		fmt.Fprintf(os.Stderr, "pgtest: %v\n", err)
		if code == 0 {
			code = 1
		}
	}
	return code
}

// server is the cluster that the tests of this binary share.
type server struct {
	base      *url.URL // the owner's address, of any database
	login     postgres.Login
	template  string
	foreign   bool // named by ServerVariable
	private   *embedded.Server
	removeDir func()

	mu    sync.Mutex
	admin *pgx.Conn // in a database that no test uses; guarded by mu
}

var (
	once      sync.Once
	theServer *server
	serverErr error
)

func shared() (*server, error) {
	once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
		defer cancel()
		theServer, serverErr = start(ctx)
	})
	return theServer, serverErr
}

func stopShared() error {
	// A later New fails instead of starting a second server.
	once.Do(func() { serverErr = fmt.Errorf("the tests are over") })
	if theServer == nil {
		return nil
	}
	return theServer.stop()
}

func start(ctx context.Context) (*server, error) {
	s := &server{removeDir: func() {}}
	if err := s.reach(ctx); err != nil {
		return nil, err
	}
	if err := s.prepare(ctx); err != nil {
		return nil, fmt.Errorf("%w (and then: %v)", err, s.stop())
	}
	return s, nil
}

// reach takes the named server or starts a private one.
func (s *server) reach(ctx context.Context) error {
	// The one environment variable read outside package config: it belongs to
	// the tests, not to the product.
	if named := os.Getenv(ServerVariable); named != "" {
		u, err := url.Parse(named)
		if err != nil || u.Scheme == "" {
			return fmt.Errorf("%s is not an address", ServerVariable)
		}
		s.base, s.foreign = u, true
		s.login = postgres.Login{Name: randomName("bhtest_login_"), Password: rand.Text()}
		return nil
	}
	dir, err := makeDir()
	if err != nil {
		return err
	}
	s.removeDir = func() { os.RemoveAll(dir) }
	s.private, err = embedded.Start(ctx, embedded.Options{DataDir: dir, Fast: true})
	if err != nil {
		s.removeDir()
		return err
	}
	s.login = postgres.Login{Name: embedded.LoginRole}
	s.base, err = url.Parse(s.private.URL())
	return err
}

// prepare makes the template that the tests clone.
func (s *server) prepare(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.base.String())
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	s.admin = conn
	s.template = randomName("bhtest_template_")
	if err := s.createDatabase(ctx, s.template, "template0"); err != nil {
		return err
	}
	if err := postgres.Migrate(ctx, s.ownerURL(s.template), migrations.FS, slog.New(slog.DiscardHandler)); err != nil {
		return fmt.Errorf("migrate the template: %w", err)
	}
	return postgres.PrepareLogin(ctx, s.ownerURL(s.template), s.login)
}

func (s *server) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	defer s.removeDir()
	var err error
	if s.admin != nil && s.foreign {
		err = s.removeForeign(ctx)
	}
	if s.admin != nil {
		s.admin.Close(ctx)
	}
	if s.private != nil {
		return s.private.Stop(ctx)
	}
	return err
}

// removeForeign takes out of a server that outlives us what prepare put there.
func (s *server) removeForeign(ctx context.Context) error {
	if err := s.dropDatabase(s.template); err != nil {
		return err
	}
	_, err := s.admin.Exec(ctx, "DROP ROLE IF EXISTS "+pgx.Identifier{s.login.Name}.Sanitize())
	return err
}

func (s *server) createDatabase(ctx context.Context, name, template string) error {
	return s.exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()+
		" TEMPLATE "+pgx.Identifier{template}.Sanitize())
}

func (s *server) dropDatabase(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	return s.exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
}

func (s *server) exec(ctx context.Context, sql string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.admin.Exec(ctx, sql)
	return err
}

func (s *server) ownerURL(database string) string {
	u := *s.base
	u.Path = "/" + database
	return u.String()
}

func (s *server) urlAs(l postgres.Login, database string) string {
	u := *s.base
	u.Path = "/" + database
	u.User = url.User(l.Name)
	if l.Password != "" {
		u.User = url.UserPassword(l.Name, l.Password)
	}
	return u.String()
}

func randomName(prefix string) string {
	return prefix + strings.ToLower(rand.Text()[:16])
}
