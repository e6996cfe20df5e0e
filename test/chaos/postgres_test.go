package chaos

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/embedded"
	"github.com/bulkhead-mcp/bulkhead/migrations"
)

// database is a PostgreSQL of one test that can be stopped and started; a
// forwarder gives it an address that stays.
type database struct {
	t   testing.TB
	dir string
	ln  net.Listener

	mu     sync.Mutex
	server *embedded.Server // nil while stopped
	conns  map[net.Conn]bool
	wg     sync.WaitGroup
}

func newDatabase(t testing.TB) *database {
	t.Helper()
	// Directly in /tmp, where the account that runs PostgreSQL for root gets to.
	dir, err := os.MkdirTemp("/tmp", "bhchaos-pg-")
	if err == nil {
		err = os.Chmod(dir, 0o711)
	}
	if err != nil {
		t.Fatal(err)
	}
	d := &database{t: t, dir: dir, conns: map[net.Conn]bool{}}
	if d.ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	d.wg.Go(d.serve)
	t.Cleanup(func() {
		d.stop()
		d.ln.Close()      //nolint:errcheck // the test is over
		d.wg.Wait()       // all connections are cut
		os.RemoveAll(dir) //nolint:errcheck // a temporary directory
	})
	d.start()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err = postgres.Migrate(ctx, d.url(embedded.OwnerRole), migrations.FS, slog.New(slog.DiscardHandler))
	if err == nil {
		err = embedded.PrepareLogin(ctx, d.url(embedded.OwnerRole))
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *database) start() {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := embedded.Start(ctx, embedded.Options{DataDir: d.dir})
	if err != nil {
		d.t.Fatal(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server = s
}

func (d *database) stop() {
	d.mu.Lock()
	s := d.server
	d.server = nil
	for c := range d.conns {
		c.Close() //nolint:errcheck // that is the point
	}
	d.mu.Unlock()
	if s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Stop(ctx); err != nil {
		d.t.Errorf("stop PostgreSQL: %v", err)
	}
}

func (d *database) url(role string) string {
	u := url.URL{Scheme: "postgres", User: url.User(role), Host: d.ln.Addr().String(), Path: "/" + embedded.Database, RawQuery: "sslmode=disable"}
	return u.String()
}

func (d *database) serve() {
	for {
		c, err := d.ln.Accept()
		if err != nil {
			return
		}
		up := d.dial()
		if up == nil {
			c.Close() //nolint:errcheck // nothing behind it
			continue
		}
		d.mu.Lock()
		d.conns[c], d.conns[up] = true, true
		d.mu.Unlock()
		for _, way := range [][2]net.Conn{{c, up}, {up, c}} {
			d.wg.Go(func() {
				_, _ = io.Copy(way[0], way[1])
				c.Close()  //nolint:errcheck // both ends go
				up.Close() //nolint:errcheck // both ends go
				d.mu.Lock()
				defer d.mu.Unlock()
				delete(d.conns, way[1])
			})
		}
	}
}

func (d *database) dial() net.Conn {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server == nil {
		return nil
	}
	u, err := url.Parse(d.server.URL())
	if err != nil {
		return nil
	}
	up, err := net.Dial("unix", filepath.Join(u.Query().Get("host"), ".s.PGSQL.5432"))
	if err != nil {
		return nil
	}
	return up
}

// TestDatabaseRestarts stops PostgreSQL while calls are under way at a server:
// their outcomes are recorded once it is back, nothing runs twice, and readiness
// says so meanwhile.
func TestDatabaseRestarts(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	ctx := context.Background()
	owner, err := pgxpool.New(ctx, d.url(embedded.OwnerRole))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(owner.Close)
	w := worldOn(t, d.url(embedded.LoginRole), owner)
	cal := startCalendar(t)
	p := w.start()
	w.register(p, "calendar", cal.mcp, policy{})
	px := newProxy(t, cal)
	w.register(p, "held", px.url, policy{})
	u := w.open(p, "alice")

	c, err := u.propose(proposal{server: "held", tool: draft, args: draftArgs("Outage"), wait: time.Millisecond})
	w.must(err)
	px.holdBack("tools/call")
	w.must(w.decide(p, c, "APPROVE"))
	px.awaitHeld() // the effect has happened, the answer is on its way
	answered := make(chan error, 1)
	go func() {
		got, err := u.propose(proposal{server: "held", tool: read, args: readArgs(), requestID: "r1", wait: time.Minute})
		if err == nil && got.State != "SUCCEEDED" {
			err = &refusal{status: 200, body: got.String()}
		}
		answered <- err
	}()
	cal.awaitArrivals(read, 1)
	if !ready(p) {
		t.Error("not ready before the outage")
	}
	d.stop()
	px.release() // both answers arrive while nothing can be recorded
	eventually(t, "readiness to drop", func() bool { return !ready(p) })
	if _, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs("Meanwhile"), wait: time.Millisecond}); err == nil {
		t.Error("a call was accepted without a database")
	}
	d.start()
	eventually(t, "readiness to come back", func() bool { return ready(p) })
	got := w.awaitState(u, c.CallID, "SUCCEEDED", "UNCERTAIN", "FAILED")
	if got.State != "SUCCEEDED" {
		t.Errorf("the write that was answered during the outage: %v", got)
	}
	if err := <-answered; err != nil {
		t.Errorf("the read that was answered during the outage: %v", err)
	}
	if n := cal.arrivals(draft); n != 1 {
		t.Errorf("%d writes arrived", n)
	}
	// The next one goes its whole way.
	c, err = u.propose(proposal{server: "calendar", tool: draft, args: draftArgs("After"), wait: time.Millisecond})
	w.must(err)
	w.must(w.decide(p, c, "APPROVE"))
	w.awaitState(u, c.CallID, "SUCCEEDED")
	w.settled()
	w.consistent(p)
}
