package npm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	initialize = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25",` +
		`"capabilities":{},"clientInfo":{"name":"npm-test","version":"1"}}}`
	initialized = `{"jsonrpc":"2.0","method":"notifications/initialized"}`
	listTools   = `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`
)

func TestEverythingOverStreamableHTTP(t *testing.T) {
	url := Everything(t)
	res := post(t, url, "", initialize)
	session := res.Header.Get("Mcp-Session-Id")
	if session == "" {
		t.Fatalf("no session, status %s", res.Status)
	}
	_ = readAll(t, res.Body)
	_ = readAll(t, post(t, url, session, initialized).Body)
	var data string // of the last event; the first only carries an id to resume from
	for line := range strings.Lines(readAll(t, post(t, url, session, listTools).Body)) {
		if rest, ok := strings.CutPrefix(line, "data: "); ok {
			data = rest
		}
	}
	wantTools(t, []byte(data), "echo", "get-sum")
}

func TestEverythingOverSSE(t *testing.T) {
	res, err := client(t).Get(EverythingSSE(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	line, err := bufio.NewReader(res.Body).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != "event: endpoint" {
		t.Fatalf("first line %q, err %v", line, err)
	}
}

func TestEverythingOverStdio(t *testing.T) {
	wantTools(t, overStdio(t, EverythingStdio(t), listTools), "echo", "get-sum")
}

func TestFilesystemOverStdio(t *testing.T) {
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "note.txt"), []byte("kept below the root"), 0o600); err != nil {
		t.Fatal(err)
	}
	command := FilesystemStdio(t, root)
	wantTools(t, overStdio(t, command, listTools), "read_text_file", "write_file")
	read := func(path string) string {
		call, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": map[string]any{
			"name": "read_text_file", "arguments": map[string]any{"path": path},
		}})
		if err != nil {
			t.Fatal(err)
		}
		return string(overStdio(t, command, string(call)))
	}
	if got := read(filepath.Join(root, "note.txt")); !strings.Contains(got, "kept below the root") {
		t.Errorf("reading below the root: %s", got)
	}
	if got := read("/etc/hostname"); !strings.Contains(got, "Access denied") {
		t.Errorf("reading above the root: %s", got)
	}
}

// overStdio initializes a child process, sends one request with id 2 and
// returns its response.
func overStdio(t *testing.T, command []string, request string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Env = []string{}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed on purpose
	}()
	if _, err := io.WriteString(in, initialize+"\n"+initialized+"\n"+request+"\n"); err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewReader(out); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			t.Fatalf("no response: %v", err)
		}
		var msg struct{ ID any }
		if json.Unmarshal(line, &msg) == nil && msg.ID == 2.0 {
			return line
		}
	}
}

func wantTools(t *testing.T, message []byte, want ...string) {
	t.Helper()
	var msg struct {
		Result struct{ Tools []struct{ Name string } }
	}
	if err := json.Unmarshal(message, &msg); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, tool := range msg.Result.Tools {
		names = append(names, tool.Name)
	}
	for _, w := range want {
		if !slices.Contains(names, w) {
			t.Errorf("tool %s is not among %v", w, names)
		}
	}
}

func client(t *testing.T) *http.Client {
	t.Helper()
	rt := &http.Transport{}
	t.Cleanup(rt.CloseIdleConnections)
	return &http.Client{Transport: rt}
}

func post(t *testing.T, url, session, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewBufferString(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	if session != "" {
		req.Header.Set("Mcp-Session-Id", session)
		req.Header.Set("Mcp-Protocol-Version", "2025-11-25")
	}
	res, err := client(t).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = res.Body.Close() })
	return res
}

func readAll(t *testing.T, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
