// Package npm gives tests MCP servers that this project did not write: the
// reference servers from npm, installed from the lock file in test/ and started
// on loopback. It needs node and npm on the PATH and fails the test without
// them; it never skips.
package npm

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	installTimeout = 5 * time.Minute
	startTimeout   = time.Minute // a Node server takes seconds on a busy machine
	stampName      = ".bulkhead-stamp"
)

// installed keeps the outcome of the first Install in this process.
var installed = sync.OnceValues(install)

// Install makes sure that the servers of test/package-lock.json are installed
// and returns the node_modules directory. One process of a checkout runs
// `npm ci` at a time, and only when the lock file changed since the last one.
func Install(t testing.TB) string {
	t.Helper()
	dir, err := installed()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func install() (string, error) {
	dir, err := testDir()
	if err != nil {
		return "", err
	}
	lock, err := os.Open(filepath.Join(dir, "package-lock.json"))
	if err != nil {
		return "", err
	}
	defer func() { _ = lock.Close() }() // which releases the lock, too
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	want, err := digest(filepath.Join(dir, "package.json"), lock.Name())
	if err != nil {
		return "", err
	}
	modules := filepath.Join(dir, "node_modules")
	stamp := filepath.Join(modules, stampName)
	if have, err := os.ReadFile(stamp); err == nil && string(have) == want {
		return modules, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), installTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
	cmd.Dir = dir
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm ci in %s: %w\n%s", dir, err, tail(out))
	}
	return modules, os.WriteFile(stamp, []byte(want), 0o644)
}

// testDir finds test/ of the module that the working directory lies in.
func testDir() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return filepath.Join(dir, "test"), nil
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory")
		}
		dir = parent
	}
}

// digest names the content of the files.
func digest(files ...string) (string, error) {
	h := sha256.New()
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		_, _ = fmt.Fprintf(h, "%d\n", len(b)) // a hash takes every write
		_, _ = h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Everything starts server-everything over Streamable HTTP (legacy era) and
// returns its endpoint. The server ends with the test.
func Everything(t testing.TB) (url string) {
	t.Helper()
	return "http://127.0.0.1:" + strconv.Itoa(serve(t, everything(t), "streamableHttp")) + "/mcp"
}

// EverythingSSE starts server-everything over the old HTTP+SSE pair and returns
// its endpoint.
func EverythingSSE(t testing.TB) (url string) {
	t.Helper()
	return "http://127.0.0.1:" + strconv.Itoa(serve(t, everything(t), "sse")) + "/sse"
}

// EverythingStdio returns the command of server-everything over stdio, with
// absolute paths; it needs no environment.
func EverythingStdio(t testing.TB) []string {
	t.Helper()
	return []string{node(t), everything(t), "stdio"}
}

// FilesystemStdio returns the command of server-filesystem over stdio, which
// serves the files below root and nothing else.
func FilesystemStdio(t testing.TB, root string) []string {
	t.Helper()
	return []string{
		node(t),
		filepath.Join(Install(t), "@modelcontextprotocol", "server-filesystem", "dist", "index.js"),
		root,
	}
}

// Conformance returns the command of the official conformance suite, with the
// Node that it needs, which is newer than many machines have.
func Conformance(t testing.TB) []string {
	t.Helper()
	arch, ok := map[string]string{"amd64": "x64", "arm64": "arm64"}[runtime.GOARCH]
	if !ok {
		t.Fatalf("no Node for %s in test/package.json", runtime.GOARCH)
	}
	modules := Install(t)
	return []string{
		filepath.Join(modules, "node-linux-"+arch, "bin", "node"),
		filepath.Join(modules, "@modelcontextprotocol", "conformance", "dist", "index.js"),
	}
}

// MemoryStdio returns the command of server-memory over stdio, which keeps its
// graph in file.
func MemoryStdio(t testing.TB, file string) []string {
	t.Helper()
	return []string{
		"/usr/bin/env", "MEMORY_FILE_PATH=" + file, node(t),
		filepath.Join(Install(t), "@modelcontextprotocol", "server-memory", "dist", "index.js"),
	}
}

// ThinkingStdio returns the command of server-sequential-thinking over stdio.
func ThinkingStdio(t testing.TB) []string {
	t.Helper()
	return []string{node(t), filepath.Join(Install(t), "@modelcontextprotocol", "server-sequential-thinking", "dist", "index.js")}
}

// Modern starts a server of 2026-07-28 on the newest TypeScript library, with
// every feature that has, and returns its endpoint. The server ends with the test.
func Modern(t testing.TB) (url string) {
	t.Helper()
	return "http://127.0.0.1:" + strconv.Itoa(serve(t, modern(t), "http")) + "/mcp"
}

// ModernStdio returns the command of the same server over stdio.
func ModernStdio(t testing.TB) []string {
	t.Helper()
	return []string{node(t), modern(t), "stdio"}
}

func modern(t testing.TB) string {
	t.Helper()
	return filepath.Join(filepath.Dir(Install(t)), "npm", "modern.mjs")
}

func everything(t testing.TB) string {
	t.Helper()
	return filepath.Join(Install(t), "@modelcontextprotocol", "server-everything", "dist", "index.js")
}

func node(t testing.TB) string {
	t.Helper()
	path, err := exec.LookPath("node")
	if err != nil {
		t.Fatal(err)
	}
	path, err = filepath.EvalSymlinks(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// serve runs a script that listens, on a free loopback port, until the test
// ends, and returns the port.
func serve(t testing.TB, script string, args ...string) int {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	shim := filepath.Join(filepath.Dir(Install(t)), "npm", "loopback.cjs")
	var stderr lastBytes
	cmd := exec.Command(node(t), append([]string{"--require", shim, script}, args...)...)
	cmd.Env = []string{} // nothing of ours is the server's business
	cmd.Dir = t.TempDir()
	cmd.Stderr = &stderr
	cmd.ExtraFiles = []*os.File{w}
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	stop, err := startOnOwnThread(cmd)
	_ = w.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	if err := r.SetReadDeadline(time.Now().Add(startTimeout)); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		t.Fatalf("%s did not start: %v\n%s", filepath.Base(script), err, stderr.String())
	}
	port, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// startOnOwnThread starts the command on a thread that lives as long as the
// process, because the parent-death signal is sent when the starting thread
// ends. stop kills the process group and waits.
func startOnOwnThread(cmd *exec.Cmd) (stop func(), err error) {
	started, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it is killed in the end, which is no news
		}
	}()
	if err := <-started; err != nil {
		<-ended
		return nil, err
	}
	return func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
	}, nil
}

// lastBytes is a writer that keeps the end of what was written.
type lastBytes struct {
	mu  sync.Mutex
	buf []byte
}

func (l *lastBytes) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = bytes.Clone(tail(append(l.buf, p...)))
	return len(p), nil
}

func (l *lastBytes) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.buf)
}

// tail returns at most the last 4 KiB.
func tail(b []byte) []byte { return b[max(0, len(b)-4096):] }
