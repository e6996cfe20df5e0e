package chaos

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// childVariable makes the test binary a server on stdio, which writes its
// process id and that of a program it starts into the file of this name.
const childVariable = "BULKHEAD_TEST_CHAOS_CHILD"

// serveStdio is an MCP server of the legacy era with one tool. It ignores
// SIGTERM and starts a program that outlives it if nobody sees to that.
func serveStdio() {
	stubborn := exec.Command("/bin/sleep", "3600")
	if err := stubborn.Start(); err != nil {
		os.Exit(1)
	}
	pids := fmt.Sprintf("%d %d\n", os.Getpid(), stubborn.Process.Pid)
	if os.WriteFile(os.Getenv(childVariable), []byte(pids), 0o600) != nil {
		os.Exit(1)
	}
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return // the program that was started stays behind
		}
		var m struct {
			ID     json.RawMessage
			Method string
			Params struct{ ProtocolVersion string }
		}
		if json.Unmarshal(line, &m) != nil || m.ID == nil {
			continue
		}
		answer := `"error":{"code":-32601,"message":"no such method"}`
		switch m.Method {
		case "initialize":
			answer = `"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"child","version":"1"}}`
		case "ping":
			answer = `"result":{}`
		case "tools/list":
			answer = `"result":{"tools":[{"name":"echo","inputSchema":{"type":"object"}}]}`
		case "tools/call":
			answer = `"result":{"content":[{"type":"text","text":"hello"}]}`
		}
		fmt.Printf(`{"jsonrpc":"2.0","id":%s,%s}`+"\n", m.ID, answer)
	}
}

// TestNoProcessIsLeft ends a server that has a child on stdio, in order and by
// kill -9, and looks for the child, for what the child started, and for what
// both had in the file system.
func TestNoProcessIsLeft(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		signal syscall.Signal
		code   int
	}{{"stop in order", syscall.SIGTERM, 0}, {"kill -9", syscall.SIGKILL, -1}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			dir := t.TempDir()
			file := filepath.Join(dir, "pids")
			self, err := os.Executable()
			w.must(err)
			runtimes, err := json.Marshal(obj{"child": obj{"command": []string{self}, "env": obj{childVariable: file}, "readRoots": []string{self},
				"writeRoots": []string{dir}, "user": strconv.Itoa(os.Getuid()), "limits": obj{"memoryBytes": 1 << 50, "addressSpaceBytes": 1 << 50}}})
			w.must(err)
			p := w.start("BULKHEAD_RUNTIMES_FILE="+write(t, dir, "runtimes.json", string(runtimes)), "TMPDIR="+dir, "BULKHEAD_GRACE_PERIOD=5s")
			admin := p.as(w.admin)
			w.must(admin.post("/v1/servers", obj{"name": "child", "stdio": obj{"runtime": "child"}}, nil))
			text := "server: child\ntransport: stdio\nprotocol: {versions: [\"2025-11-25\"]}\norigin: \"stdio:child\"\nmethods: [tools/list, tools/call]\n" +
				"tools:\n  - {name: echo, definition: any, effect: read, consent: none}\n"
			w.must(admin.post("/v1/servers/child/contracts", obj{"yaml": text}, nil))
			w.must(admin.post("/v1/servers/child/contracts/1:activate", obj{}, nil))
			u := w.open(p, "alice")
			c, err := u.propose(proposal{server: "child", tool: "echo", args: obj{}, wait: time.Minute})
			if err != nil || c.State != "SUCCEEDED" {
				t.Fatalf("call over stdio: %v %v", c, err)
			}
			raw, err := os.ReadFile(file)
			w.must(err)
			pids := strings.Fields(string(raw))
			if len(pids) != 2 {
				t.Fatalf("pids %q", raw)
			}
			p.signal(tt.signal)
			if code := p.awaitExit(); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			for _, s := range pids {
				pid, err := strconv.Atoi(s)
				w.must(err)
				eventually(t, "process "+s+" to be gone", func() bool { return gone(pid) })
			}
			eventually(t, "the private directories to be removed", func() bool {
				left, err := filepath.Glob(filepath.Join(dir, "bulkhead-*"))
				return err == nil && len(left) == 0
			})
		})
	}
}

// gone reports whether no process has the id, or only one that nobody has
// reaped yet.
func gone(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(after, "Z")
}
