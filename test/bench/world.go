package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/embedded"
	"github.com/bulkhead-mcp/bulkhead/migrations"
	"github.com/bulkhead-mcp/bulkhead/test/load"
)

// world is everything that runs: each part is a process, so that its CPU time can
// be told from the others'.
type world struct {
	dir      string
	postgres *embedded.Server
	pgPID    int
	children []*child

	server, redis  *child
	redisKind      string
	url, metrics   string
	operatorKey    string
	upstream       *child // of the reads; the others only list, or answer large
	proxy          *child
	proxyURL       string
	upstreamURL    string
	largeURL       string
	proxyLargeURL  string
	hundredURL     string
	thousandURL    string
	tenants        []*load.Tenant
	idleResident   int64
	idleAnonymous  int64
	idleGoroutines float64
}

// Names of the registrations. The first is the one that load.Read uses.
const (
	largeServer    = "large"
	hundredServer  = "hundred"
	thousandServer = "thousand"
)

// newWorld starts all parts. serverPath is the server's binary, empty to build it.
func newWorld(ctx context.Context, serverPath string, tenants int) (w *world, err error) {
	// Not below a home directory: as root PostgreSQL runs as another account.
	dir, err := os.MkdirTemp("", "bulkhead-bench-*")
	if err != nil {
		return nil, err
	}
	w = &world{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if err := os.Chmod(dir, 0o711); err != nil {
		return w, err
	}
	if serverPath == "" {
		serverPath = filepath.Join(dir, "server")
		build := exec.Command("go", "build", "-o", serverPath, "github.com/bulkhead-mcp/bulkhead/cmd/server")
		if out, err := build.CombinedOutput(); err != nil {
			return w, fmt.Errorf("build the server: %w\n%s", err, out)
		}
	}
	for _, step := range []func() error{
		func() error { return w.startPostgres(ctx) },
		func() error { return w.startRedis(ctx) },
		func() error { return w.startUpstreams(ctx, serverPath) },
		func() error { return w.startProxies(ctx) },
		func() error { return w.startServer(ctx, serverPath) },
		func() error { return w.prepare(ctx, tenants) },
	} {
		if err := step(); err != nil {
			return w, err
		}
	}
	return w, nil
}

// close ends all parts and removes what they wrote.
func (w *world) close() error {
	var errs []error
	for i := len(w.children) - 1; i >= 0; i-- {
		errs = append(errs, w.children[i].stop())
	}
	if w.postgres != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		errs = append(errs, w.postgres.Stop(ctx))
	}
	return errors.Join(append(errs, os.RemoveAll(w.dir))...)
}

func (w *world) start(ctx context.Context, name string, env []string, wantLine bool, path string, args ...string) (*child, error) {
	c, err := start(ctx, w.dir, name, env, wantLine, path, args...)
	if err == nil {
		w.children = append(w.children, c)
	}
	return c, err
}

func (w *world) startPostgres(ctx context.Context) (err error) {
	data := filepath.Join(w.dir, "data")
	quiet := slog.New(slog.DiscardHandler)
	if w.postgres, err = embedded.Start(ctx, embedded.Options{DataDir: data, Log: quiet}); err != nil {
		return err
	}
	if err := postgres.Migrate(ctx, w.postgres.URL(), migrations.FS, quiet); err != nil {
		return err
	}
	if err := embedded.PrepareLogin(ctx, w.postgres.URL()); err != nil {
		return err
	}
	raw, err := os.ReadFile(filepath.Join(data, "postgres", "pgdata", "postmaster.pid"))
	if err != nil {
		return err
	}
	first, _, _ := bytes.Cut(raw, []byte("\n"))
	w.pgPID, err = strconv.Atoi(string(first))
	return err
}

// startRedis runs redis-server, or the in-process Redis of development mode in a
// process of its own when there is none.
func (w *world) startRedis(ctx context.Context) (err error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		w.redisKind = "embedded"
		self, err := os.Executable()
		if err != nil {
			return err
		}
		w.redis, err = w.start(ctx, "redis", nil, true, self, redisCommand)
		return err
	}
	w.redisKind = "redis-server"
	socket := filepath.Join(w.dir, "redis.sock")
	w.redis, err = w.start(ctx, "redis", nil, false, path, "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir", w.dir)
	if err != nil {
		return err
	}
	w.redis.line = (&url.URL{Scheme: "unix", Path: socket}).String()
	return await(ctx, "redis-server", func() error { _, err := os.Stat(socket); return err })
}

func (w *world) startUpstreams(ctx context.Context, path string) (err error) {
	for _, u := range []struct {
		name  string
		tools int
		url   *string
	}{
		{load.ReadServer, 0, &w.upstreamURL}, {largeServer, 0, &w.largeURL},
		{hundredServer, 96, &w.hundredURL}, {thousandServer, 996, &w.thousandURL},
	} {
		c, err := w.start(ctx, u.name, nil, true, path, "demo-calendar", "--with-stdin", "--tools", strconv.Itoa(u.tools))
		if err != nil {
			return err
		}
		var ready struct{ URL string }
		if err := json.Unmarshal([]byte(c.line), &ready); err != nil {
			return fmt.Errorf("the demo calendar %s did not start: %w", u.name, err)
		}
		*u.url = ready.URL
		if u.name == load.ReadServer {
			w.upstream = c
		}
	}
	return fillLarge(ctx, w.largeURL)
}

// largeEvents drafts of largeTitle bytes in their titles make the answer of the
// read about 64 KiB: the events come as structured content and as text.
const (
	largeEvents = 58
	largeTitle  = 460
)

func fillLarge(ctx context.Context, mcp string) error {
	base := strings.TrimSuffix(mcp, "/mcp")
	for i := range largeEvents {
		args := fmt.Sprintf(`{"title":"%s","start":"2026-12-01T09:00:00Z","end":"2026-12-01T10:00:00Z","requestId":"r%d"}`, strings.Repeat("x", largeTitle), i)
		c, err := dial(base, "POST", "/mcp", modern("tools/call", "create_draft_event"),
			modernBody("tools/call", `"name":"create_draft_event","arguments":`+args), `"draft"`)
		if err == nil {
			err = c.do(ctx)
			c.close()
		}
		if err != nil {
			return fmt.Errorf("fill the large calendar: %w", err)
		}
	}
	return nil
}

func (w *world) startProxies(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	large, err := w.start(ctx, "proxy-large", nil, true, self, proxyCommand, strings.TrimSuffix(w.largeURL, "/mcp"))
	if err != nil {
		return err
	}
	w.proxyLargeURL = strings.TrimSpace(large.line)
	w.proxy, err = w.start(ctx, "proxy", nil, true, self, proxyCommand, strings.TrimSuffix(w.upstreamURL, "/mcp"))
	if err != nil {
		return err
	}
	w.proxyURL = strings.TrimSpace(w.proxy.line)
	return nil
}

// startServer runs the server as in production: everything on, its log in a file.
func (w *world) startServer(ctx context.Context, path string) (err error) {
	var secret [64]byte
	rand.Read(secret[:]) //nolint:errcheck // crypto/rand.Read never fails since Go 1.24
	w.operatorKey = "bho_" + hex.EncodeToString(secret[:32])
	kek := filepath.Join(w.dir, "kek")
	operator := filepath.Join(w.dir, "operator.key")
	err = errors.Join(os.WriteFile(kek, []byte("bench:"+hex.EncodeToString(secret[32:])+"\n"), 0o600),
		os.WriteFile(operator, []byte(w.operatorKey+"\n"), 0o600))
	if err != nil {
		return err
	}
	env := []string{
		"BULKHEAD_MODE=production", "BULKHEAD_LISTEN=127.0.0.1:0", "BULKHEAD_METRICS_LISTEN=127.0.0.1:0",
		"BULKHEAD_DATA_DIR=" + w.dir, "BULKHEAD_KEK_FILE=" + kek, "BULKHEAD_OPERATOR_KEY_FILE=" + operator,
		"BULKHEAD_DATABASE_URL=" + w.postgres.URLFor(embedded.LoginRole), "BULKHEAD_REDIS_URL=" + strings.TrimSpace(w.redis.line),
		"BULKHEAD_EGRESS_ALLOW=127.0.0.0/8",
	}
	if w.server, err = w.start(ctx, "server", env, false, path); err != nil {
		return err
	}
	return await(ctx, "server", w.findAddresses)
}

// findAddresses reads the addresses from the line that the server logs when it
// serves.
func (w *world) findAddresses() error {
	raw, err := os.ReadFile(filepath.Join(w.dir, "server.log"))
	if err != nil {
		return err
	}
	for line := range bytes.Lines(raw) {
		var said struct{ Msg, Address, Metrics string }
		if json.Unmarshal(line, &said) == nil && said.Msg == "serving" {
			w.url, w.metrics = "http://"+said.Address, "http://"+said.Metrics
			return nil
		}
	}
	select {
	case <-w.server.exited:
		return fmt.Errorf("%w: %s", errEnded, raw)
	default:
		return errors.New("it has not said that it serves")
	}
}

var errEnded = errors.New("the process ended")

// await asks again and again until ready returns nil.
func await(ctx context.Context, name string, ready func() error) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w", name, err)
		case <-time.After(20 * time.Millisecond):
		}
		if errors.Is(err, errEnded) {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
}

// prepare makes the tenants. There are several because one may make no more than
// a bounded number of requests a second of one replica.
func (w *world) prepare(ctx context.Context, tenants int) error {
	c := load.NewREST(w.url, 4)
	defer c.Close()
	// Before the first request: what a process takes that does nothing.
	w.idleResident, w.idleAnonymous = residentOf(w.server.pid())
	m, err := w.scrape(ctx)
	if err != nil {
		return err
	}
	w.idleGoroutines = m["go_goroutines"]
	for i := range tenants {
		t, err := c.Prepare(ctx, w.operatorKey, fmt.Sprintf("bench %d", i+1),
			load.Server{Name: load.ReadServer, URL: w.upstreamURL}, load.Server{Name: largeServer, URL: w.largeURL},
			load.Server{Name: hundredServer, URL: w.hundredURL}, load.Server{Name: thousandServer, URL: w.thousandURL})
		if err != nil {
			return err
		}
		w.tenants = append(w.tenants, t)
	}
	return nil
}
