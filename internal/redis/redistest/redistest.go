// Package redistest gives tests a Redis of their own that they can stop and
// start again: a real redis-server where one is on the PATH, else the
// in-process one.
package redistest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/bulkhead-mcp/bulkhead/internal/redis"
)

// Server is a Redis of one test.
type Server struct {
	// URL is its address; it stays the same over Stop and Start.
	URL string
	// Kind is "redis-server" or "in-process".
	Kind string

	start func() error
	stop  func()
}

// Stop ends the server and what it holds. Stopping twice is harmless.
func (s *Server) Stop() { s.stop() }

// Start brings the server back, empty, at the same address.
func (s *Server) Start(t testing.TB) {
	t.Helper()
	if err := s.start(); err != nil {
		t.Fatalf("start %s again: %v", s.Kind, err)
	}
}

// Client returns a client with a timeout that a busy machine does not reach,
// closed when t ends.
func (s *Server) Client(t testing.TB) *redis.Client {
	t.Helper()
	c, err := redis.Open(t.Context(), s.URL, redis.Options{Timeout: 5 * time.Second})
	if err != nil {
		t.Fatalf("open %s: %v", s.Kind, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// Holds reports whether any key, or any value of a string, list, hash, set or
// stream, has the text in it.
func (s *Server) Holds(t testing.TB, text string) bool {
	t.Helper()
	o, err := goredis.ParseURL(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	c := goredis.NewClient(o)
	defer c.Close() //nolint:errcheck // only read from
	keys, err := c.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range keys {
		if strings.Contains(k, text) {
			return true
		}
		var value any
		switch kind, _ := c.Type(t.Context(), k).Result(); kind {
		case "string":
			value, err = c.Get(t.Context(), k).Result()
		case "list":
			value, err = c.LRange(t.Context(), k, 0, -1).Result()
		case "hash":
			value, err = c.HGetAll(t.Context(), k).Result()
		case "set":
			value, err = c.SMembers(t.Context(), k).Result()
		case "zset":
			value, err = c.ZRange(t.Context(), k, 0, -1).Result()
		case "stream":
			value, err = c.XRange(t.Context(), k, "-", "+").Result()
		}
		if err != nil && !errors.Is(err, goredis.Nil) {
			t.Fatal(err)
		}
		if strings.Contains(fmt.Sprint(value), text) {
			return true
		}
	}
	return false
}

// New returns the best Redis of this machine and logs which it is. It is
// stopped when t ends.
func New(t testing.TB) *Server {
	t.Helper()
	if path, err := exec.LookPath("redis-server"); err == nil {
		return started(t, real(t, path))
	}
	return started(t, inProcess(t))
}

// Each runs a test against the in-process Redis and, where redis-server is on the
// PATH, against a real one. It says so when it is not.
func Each(t *testing.T, test func(t *testing.T, s *Server)) {
	t.Run("in-process", func(t *testing.T) {
		test(t, started(t, inProcess(t)))
	})
	t.Run("redis-server", func(t *testing.T) {
		path, err := exec.LookPath("redis-server")
		if err != nil {
			t.Skip("no redis-server on the PATH: only the in-process Redis is tested")
		}
		test(t, started(t, real(t, path)))
	})
}

func started(t testing.TB, s *Server) *Server {
	t.Helper()
	t.Logf("redis: %s", s.Kind)
	t.Cleanup(s.Stop)
	return s
}

func inProcess(t testing.TB) *Server {
	t.Helper()
	e, err := redis.StartEmbedded()
	if err != nil {
		t.Fatal(err)
	}
	return &Server{URL: e.URL(), Kind: "in-process", start: e.Restart, stop: e.Close}
}

// real runs redis-server on a Unix socket, so that no port is taken and the
// address can be used again.
func real(t testing.TB, path string) *Server {
	t.Helper()
	// Not t.TempDir: a socket's path has at most 107 bytes.
	dir, err := os.MkdirTemp("/tmp", "bhredis-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c := &child{path: path, dir: dir}
	s := &Server{URL: c.url(), Kind: "redis-server", start: c.start, stop: c.stop}
	s.Start(t)
	return s
}

// child is a redis-server process.
type child struct {
	path, dir string
	cmd       *exec.Cmd
	exited    chan struct{}
}

func (c *child) socket() string { return filepath.Join(c.dir, "sock") }

func (c *child) url() string {
	u := url.URL{Scheme: "unix", Path: c.socket()}
	return u.String()
}

func (c *child) start() error {
	// Not exec.CommandContext: the thread that starts the process must live as
	// long, because of the parent-death signal.
	cmd := exec.Command(c.path, "--port", "0", "--unixsocket", c.socket(), "--save", "", "--appendonly", "no", "--dir", c.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	c.cmd, c.exited = cmd, make(chan struct{})
	began := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(c.exited)
		err := cmd.Start()
		began <- err
		if err == nil {
			cmd.Wait()
		}
	}()
	if err := <-began; err != nil {
		return err
	}
	return c.awaitReady()
}

func (c *child) awaitReady() error {
	opt, err := goredis.ParseURL(c.url())
	if err != nil {
		return err
	}
	rdb := goredis.NewClient(opt)
	defer rdb.Close()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(c.socket()); err != nil {
			continue
		}
		if rdb.Ping(context.Background()).Err() == nil {
			return nil
		}
	}
	c.stop()
	return fmt.Errorf("redis-server did not answer")
}

func (c *child) stop() {
	if c.cmd == nil || c.cmd.Process == nil {
		return
	}
	c.cmd.Process.Kill()
	<-c.exited
	os.Remove(c.socket())
}
