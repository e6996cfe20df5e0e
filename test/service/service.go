// Package service gives tests the built server as a process of its own, in
// production mode, on a PostgreSQL and a Redis of its own. Tests reach it by its
// public API only.
package service

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/redis/redistest"
)

// Patience bounds every wait for the server. A busy machine is slow; a hanging
// service is not slow.
const Patience = 90 * time.Second

// Runtime is a command that stdio servers may run, as the operator declares it.
type Runtime struct {
	Command    []string `json:"command"`
	ReadRoots  []string `json:"readRoots,omitempty"`
	WriteRoots []string `json:"writeRoots,omitempty"`
	Network    bool     `json:"network,omitempty"`
	// User is whom it runs as; empty means the tests' own user, who makes the files
	// that it works on.
	User string `json:"user"`
}

// Service is a running server process.
type Service struct {
	// Binary is the program.
	Binary string
	// URL and Metrics are http://127.0.0.1:port.
	URL, Metrics string
	// DB is its database, for what no API shows.
	DB *pgtest.DB
	// Redis is its Redis.
	Redis *redistest.Server
	// OperatorKey is the credential that makes tenants.
	OperatorKey string

	log *log
}

// Start builds the server, starts it with the runtimes, lets it reach servers on
// loopback, and waits until it serves. It is stopped with t, which must see a
// clean end.
func Start(t testing.TB, runtimes map[string]Runtime) *Service {
	t.Helper()
	dir := t.TempDir()
	s := &Service{Binary: build(t, dir), OperatorKey: "bho_" + rand.Text() + rand.Text()}
	t.Cleanup(func() {
		if err := pgtest.Stop(); err != nil {
			t.Errorf("stop PostgreSQL: %v", err)
		}
	})
	s.DB = pgtest.New(t)
	s.Redis = redistest.New(t)
	all := maps.Clone(runtimes)
	for name, r := range all {
		if r.User == "" {
			r.User = strconv.Itoa(os.Getuid())
			all[name] = r
		}
	}
	declared, err := json.Marshal(all)
	must(t, err)
	var kek [32]byte
	_, _ = rand.Read(kek[:]) // never fails
	s.start(t, []string{
		"BULKHEAD_MODE=production",
		"BULKHEAD_LISTEN=127.0.0.1:0", "BULKHEAD_METRICS_LISTEN=127.0.0.1:0",
		"BULKHEAD_DATABASE_URL=" + s.DB.URL, "BULKHEAD_REDIS_URL=" + s.Redis.URL,
		"BULKHEAD_KEK_FILE=" + write(t, dir, "kek", "test:"+base64.StdEncoding.EncodeToString(kek[:])+"\n"),
		"BULKHEAD_OPERATOR_KEY_FILE=" + write(t, dir, "operator.key", s.OperatorKey+"\n"),
		"BULKHEAD_RUNTIMES_FILE=" + write(t, dir, "runtimes.json", string(declared)),
		"BULKHEAD_EGRESS_ALLOW=127.0.0.0/8,::1/128",
		"BULKHEAD_LOG_LEVEL=debug",
	})
	return s
}

// Logged reports whether the server has logged the text.
func (s *Service) Logged(text string) bool { return s.log.contains(text) }

// Tail returns the end of what the server has logged.
func (s *Service) Tail() string { return s.log.tail() }

// build builds the server with the flags of this test binary.
func build(t testing.TB, dir string) string {
	t.Helper()
	out := filepath.Join(dir, "server")
	cmd := exec.Command("go", append(append([]string{"build"}, buildFlags...), "-o", out, "github.com/bulkhead-mcp/bulkhead/cmd/server")...)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, b)
	}
	return out
}

// start starts the process and waits until it serves; it is stopped with t.
func (s *Service) start(t testing.TB, env []string) {
	t.Helper()
	cmd := exec.Command(s.Binary)
	cmd.Env = append(env, "PATH="+os.Getenv("PATH"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := cmd.StderrPipe()
	must(t, err)
	must(t, cmd.Start())
	s.log = &log{serving: make(chan struct{}), ended: make(chan struct{})}
	go s.log.follow(bufio.NewReaderSize(stderr, 1<<20))
	t.Cleanup(func() { s.stop(t, cmd) })
	select {
	case <-s.log.serving:
		s.URL, s.Metrics = "http://"+s.log.address, "http://"+s.log.metrics
	case <-s.log.ended:
		t.Fatalf("the server ended:\n%s", s.log.tail())
	case <-time.After(Patience):
		t.Fatalf("the server does not serve:\n%s", s.log.tail())
	}
}

// stop sends SIGTERM and wants a clean end, without a data race on the way.
func (s *Service) stop(t testing.TB, cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.log.ended:
	case <-time.After(Patience):
		_ = cmd.Process.Kill()
		<-s.log.ended
		t.Errorf("the server did not stop:\n%s", s.log.tail())
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the server stopped with %v:\n%s", err, s.log.tail())
	}
	if s.log.contains("WARNING: DATA RACE") {
		t.Errorf("the server has a data race:\n%s", s.log.tail())
	}
}

// log is everything that the server logged.
type log struct {
	serving chan struct{} // closed once it serves
	ended   chan struct{} // closed at the end of its output
	address string        // set before serving is closed
	metrics string

	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *log) follow(r *bufio.Reader) {
	defer close(l.ended)
	serving := false
	for {
		line, err := r.ReadBytes('\n')
		l.mu.Lock()
		l.buf.Write(line)
		l.mu.Unlock()
		var m struct{ Msg, Address, Metrics string }
		if !serving && json.Unmarshal(line, &m) == nil && m.Msg == "serving" {
			serving, l.address, l.metrics = true, m.Address, m.Metrics
			close(l.serving)
		}
		if err != nil {
			return
		}
	}
}

func (l *log) contains(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.buf.Bytes(), []byte(s))
}

func (l *log) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.buf.Bytes()
	return string(b[max(0, len(b)-8192):])
}

func write(t testing.TB, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
