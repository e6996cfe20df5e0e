package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/bulkhead-mcp/bulkhead/test/npm"
	"github.com/bulkhead-mcp/bulkhead/test/service"
)

// patience bounds every wait of these tests.
const patience = service.Patience

// theService is the one that all tests call; each has a tenant of its own.
var theService *running

// running is the server process and what lies around it.
type running struct {
	*service.Service
	conn *grpc.ClientConn
	// root is what the runtime "filesystem" serves, and outside lies beside it.
	root, outside string
	// wire and everythingWire are where the runtimes "filesystem-wire" and
	// "everything-wire" write what they are sent.
	wire, everythingWire string
}

func startService(t testing.TB) *running {
	dir := t.TempDir()
	s := &running{root: filepath.Join(dir, "files", "root"), outside: filepath.Join(dir, "files"), wire: filepath.Join(dir, "wire.log"),
		everythingWire: filepath.Join(dir, "everything.log")}
	must(t, os.MkdirAll(s.root, 0o755))
	s.Service = service.Start(t, s.runtimes(t))
	conn, err := grpc.NewClient(strings.TrimPrefix(s.URL, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20)))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	s.conn = conn
	return s
}

// runtimes declares the stdio servers that tenants may name.
func (s *running) runtimes(t testing.TB) map[string]service.Runtime {
	files := npm.FilesystemStdio(t, s.root)
	// What arrives at the server passes through tee on its way.
	tee := func(to string, command []string) []string {
		return append([]string{"/bin/sh", "-c", `to=$1; shift; tee -a "$to" | exec "$@"`, "sh", to}, command...)
	}
	for _, path := range []string{s.wire, s.everythingWire} {
		write(t, filepath.Dir(path), filepath.Base(path), "")
	}
	modules := []string{npm.Install(t)}
	return map[string]service.Runtime{
		"everything":      {Command: npm.EverythingStdio(t), ReadRoots: modules},
		"filesystem":      {Command: files, ReadRoots: modules, WriteRoots: []string{s.root}},
		"filesystem-wire": {Command: tee(s.wire, files), ReadRoots: modules, WriteRoots: []string{s.root, s.wire}},
		"everything-wire": {Command: tee(s.everythingWire, npm.EverythingStdio(t)), ReadRoots: modules, WriteRoots: []string{s.everythingWire}},
		"memory":          {Command: npm.MemoryStdio(t, filepath.Join(s.outside, "memory.jsonl")), ReadRoots: modules, WriteRoots: []string{s.outside}},
		"thinking":        {Command: npm.ThinkingStdio(t), ReadRoots: modules},
		"modern":          {Command: npm.ModernStdio(t), ReadRoots: []string{filepath.Dir(modules[0])}},
	}
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
