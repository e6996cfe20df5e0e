package e2e

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/redis/redistest"
	"github.com/bulkhead-mcp/bulkhead/test/npm"
)

// patience bounds every wait of these tests. A busy machine is slow; a hanging
// service is not slow.
const patience = 90 * time.Second

// theService is the one that all tests call; each has a tenant of its own.
var theService *service

// service is a running server process.
type service struct {
	binary  string
	url     string // http://127.0.0.1:port
	metrics string
	conn    *grpc.ClientConn
	db      *pgtest.DB
	log     *logFile

	operatorKey string
	// root is what the runtime "filesystem" serves, and outside lies beside it.
	root, outside string
	// wire is where the runtime "filesystem-wire" writes what it is sent.
	wire string
}

func startService(t testing.TB) *service {
	dir := t.TempDir()
	s := &service{binary: buildServer(t, dir), operatorKey: "bho_" + rand.Text() + rand.Text()}
	s.root, s.outside = filepath.Join(dir, "files", "root"), filepath.Join(dir, "files")
	s.wire = filepath.Join(dir, "wire.log")
	must(t, os.MkdirAll(s.root, 0o755))
	t.Cleanup(func() {
		if err := pgtest.Stop(); err != nil {
			t.Errorf("stop PostgreSQL: %v", err)
		}
	})
	s.db = pgtest.New(t)
	redis := redistest.New(t)
	var kek [32]byte
	_, _ = rand.Read(kek[:]) // never fails
	s.start(t, []string{
		"BULKHEAD_MODE=production",
		"BULKHEAD_LISTEN=127.0.0.1:0", "BULKHEAD_METRICS_LISTEN=127.0.0.1:0",
		"BULKHEAD_DATABASE_URL=" + s.db.URL, "BULKHEAD_REDIS_URL=" + redis.URL,
		"BULKHEAD_KEK_FILE=" + write(t, dir, "kek", "e2e:"+base64.StdEncoding.EncodeToString(kek[:])+"\n"),
		"BULKHEAD_OPERATOR_KEY_FILE=" + write(t, dir, "operator.key", s.operatorKey+"\n"),
		"BULKHEAD_RUNTIMES_FILE=" + write(t, dir, "runtimes.json", s.runtimes(t)),
		"BULKHEAD_EGRESS_ALLOW=127.0.0.0/8",
		"BULKHEAD_LOG_LEVEL=debug",
	})
	conn, err := grpc.NewClient(strings.TrimPrefix(s.url, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20)))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	s.conn = conn
	return s
}

// buildServer builds the server with the flags of this test binary.
func buildServer(t testing.TB, dir string) string {
	t.Helper()
	out := filepath.Join(dir, "server")
	cmd := exec.Command("go", append(append([]string{"build"}, buildFlags...), "-o", out, "github.com/bulkhead-mcp/bulkhead/cmd/server")...)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, b)
	}
	return out
}

// runtimes declares the stdio servers that tenants may name.
func (s *service) runtimes(t testing.TB) string {
	type runtime struct {
		Command    []string `json:"command"`
		ReadRoots  []string `json:"readRoots,omitempty"`
		WriteRoots []string `json:"writeRoots,omitempty"`
	}
	files := npm.FilesystemStdio(t, s.root)
	// What arrives at the server passes through tee on its way.
	script := `tee -a "$1" | exec "$2" "$3" "$4"`
	b, err := json.Marshal(map[string]runtime{
		"everything":      {Command: npm.EverythingStdio(t)},
		"filesystem":      {Command: files, ReadRoots: []string{s.root}, WriteRoots: []string{s.root}},
		"filesystem-wire": {Command: append([]string{"/bin/sh", "-c", script, "sh", s.wire}, files...)},
	})
	must(t, err)
	return string(b)
}

// start starts the process and waits until it serves; it is stopped with t.
func (s *service) start(t testing.TB, env []string) {
	cmd := exec.Command(s.binary)
	cmd.Env = append(env, "PATH="+os.Getenv("PATH"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := cmd.StderrPipe()
	must(t, err)
	must(t, cmd.Start())
	s.log = &logFile{serving: make(chan struct{}), ended: make(chan struct{})}
	go s.log.follow(bufio.NewReaderSize(stderr, 1<<20))
	t.Cleanup(func() { s.stop(t, cmd) })
	select {
	case <-s.log.serving:
		s.url, s.metrics = "http://"+s.log.address, "http://"+s.log.metrics
	case <-s.log.ended:
		t.Fatalf("the server ended:\n%s", s.log.tail())
	case <-time.After(patience):
		t.Fatalf("the server does not serve:\n%s", s.log.tail())
	}
}

// stop sends SIGTERM and wants a clean end, without a data race on the way.
func (s *service) stop(t testing.TB, cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.log.ended:
	case <-time.After(patience):
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

// logFile is everything that the server logged.
type logFile struct {
	serving chan struct{} // closed once it serves
	ended   chan struct{} // closed at the end of its output
	address string        // set before serving is closed
	metrics string

	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logFile) follow(r *bufio.Reader) {
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

func (l *logFile) contains(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.buf.Bytes(), []byte(s))
}

func (l *logFile) tail() string {
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
