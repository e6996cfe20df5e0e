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
	// wire is where the runtime "filesystem-wire" writes what it is sent.
	wire string
}

func startService(t testing.TB) *running {
	dir := t.TempDir()
	s := &running{root: filepath.Join(dir, "files", "root"), outside: filepath.Join(dir, "files"), wire: filepath.Join(dir, "wire.log")}
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
	script := `tee -a "$1" | exec "$2" "$3" "$4"`
	return map[string]service.Runtime{
		"everything":      {Command: npm.EverythingStdio(t)},
		"filesystem":      {Command: files, ReadRoots: []string{s.root}, WriteRoots: []string{s.root}},
		"filesystem-wire": {Command: append([]string{"/bin/sh", "-c", script, "sh", s.wire}, files...)},
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
