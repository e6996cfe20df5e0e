package sessions

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/confine"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// raceLimits let a program run that was built with the race detector, which maps
// terabytes.
var raceLimits = confine.Limits{Memory: 1 << 50, AddressSpace: 1 << 50}

func childRuntime(t testing.TB, env ...string) Runtime {
	t.Helper()
	self, err := filepath.Abs(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	r := Runtime{Command: []string{self}, Env: map[string]string{"BULKHEAD_TEST_CHILD": "server", "ERA": "legacy"}, ReadRoots: []string{self},
		User: strconv.Itoa(os.Getuid()), Limits: raceLimits}
	for _, kv := range env {
		k, v, _ := strings.Cut(kv, "=")
		r.Env[k] = v
	}
	return r
}

// stdioPool returns a pool with one runtime and its target.
func stdioPool(t testing.TB, r Runtime, change func(*PoolConfig)) (*Pool, Target) {
	t.Helper()
	p := newPool(t, func(c *PoolConfig) {
		c.Runtimes = map[string]Runtime{"child": r}
		if change != nil {
			change(c)
		}
	})
	return p, Target{ServerName: "child", Transport: TransportStdio, Runtime: "child", Origin: "stdio:child"}
}

func tool(name string) Request {
	return Request{Method: "tools/call", Name: name, Params: json.RawMessage(fmt.Sprintf("{\"name\":%q,\n\"arguments\":{}}", name)), Timeout: 20 * time.Second}
}

// said returns the text of a result.
func said(t testing.TB, resp Response, err error) string {
	t.Helper()
	succeed(t, resp, err)
	var r struct{ Content []struct{ Text string } }
	if err := json.Unmarshal(resp.Result, &r); err != nil || len(r.Content) != 1 {
		t.Fatalf("%s: %v", resp.Result, err)
	}
	return r.Content[0].Text
}

func TestStdio_BothEras(t *testing.T) {
	t.Parallel()
	for era, want := range map[string]string{"legacy": EraLegacy, "modern": EraModern} {
		p, target := stdioPool(t, childRuntime(t, "ERA="+era), nil)
		k := keyOf(t, "a")
		resp, err := p.Do(t.Context(), k, target, tool("echo"))
		if said(t, resp, err) != "ok" || resp.Era != want {
			t.Fatalf("%s: %+v", era, resp)
		}
		l, err := p.List(t.Context(), k, target, KindTool)
		if err != nil || len(l.Items) != 1 || !l.ListChanged {
			t.Fatalf("%+v %v", l, err)
		}
		if p.eras[registrationOf(k)].version != resp.ProtocolVersion {
			t.Fatalf("%s: %+v is remembered", era, p.eras[registrationOf(k)])
		}
	}
}

func TestStdio_SilentProbeAndSlowStart(t *testing.T) {
	t.Parallel()
	limits := func(c *PoolConfig) { c.Limits.Probe, c.Limits.Connect = 100*time.Millisecond, time.Hour }
	// Silence after the first byte leads to initialize, but is not remembered.
	p, target := stdioPool(t, childRuntime(t, "ERA=silent"), limits)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), target, tool("echo"))
	if said(t, resp, err); resp.Era != EraLegacy || p.eras[registrationOf(keyOf(t, "a"))].legacy {
		t.Fatalf("%+v, %+v", resp, p.eras[registrationOf(keyOf(t, "a"))])
	}
	target.DowngradeForbidden = true
	resp, err = p.Do(t.Context(), keyOf(t, "b"), target, tool("echo"))
	expect(t, resp, err, "ERA_UNKNOWN", fault.Transport, NotSent)
	// A start slower than the probe's time is no sign at all.
	p, target = stdioPool(t, childRuntime(t, "ERA=modern", "START_DELAY=700ms"), limits)
	resp, err = p.Do(t.Context(), keyOf(t, "a"), target, tool("echo"))
	if said(t, resp, err); resp.Era != EraModern {
		t.Fatalf("%+v", resp)
	}
}

func TestFO127_NoiseOnStdout(t *testing.T) {
	t.Parallel()
	p, target := stdioPool(t, childRuntime(t), func(c *PoolConfig) { c.Limits.LineBytes = 1 << 20 })
	k := keyOf(t, "a")
	for range 2 {
		resp, err := p.Do(t.Context(), k, target, tool("noise"))
		if said(t, resp, err) != "ok" {
			t.Fatal("no answer")
		}
	}
	all := func(Key) bool { return true }
	eventually(t, "noise is counted", func() bool {
		info := p.Connections(k.Tenant, all)[0]
		return info.Garbage == 2*41 && info.Stray == 2
	})
	// A line above the limit ends this connection and no other.
	other := keyOf(t, "b")
	resp, err := p.Do(t.Context(), other, target, tool("echo"))
	said(t, resp, err)
	first := p.Connections(k.Tenant, func(x Key) bool { return x == other })[0].ID
	resp, err = p.Do(t.Context(), k, target, tool("long line"))
	expect(t, resp, err, "SERVER_ENDED", fault.Transport, MaybeSent)
	resp, err = p.Do(t.Context(), other, target, tool("echo"))
	said(t, resp, err)
	if now := p.Connections(k.Tenant, func(x Key) bool { return x == other })[0].ID; now != first {
		t.Fatal("the other connection was lost")
	}
	resp, err = p.Do(t.Context(), k, target, tool("echo"))
	said(t, resp, err)
	infos := p.Connections(k.Tenant, func(x Key) bool { return x == k })
	if len(infos) != 2 || infos[1].State != StateClosed || !strings.Contains(infos[1].Reason, "too long") {
		t.Fatalf("%+v", infos)
	}
}

func TestFO129_CleanEnvironmentAndDescriptors(t *testing.T) {
	t.Setenv("BULKHEAD_PLANTED_SECRET", "s3cret")
	// A descriptor without close-on-exec, as a careless parent leaves one.
	leak, err := os.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer leak.Close()
	fd, err := syscall.Dup(int(leak.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	p, target := stdioPool(t, childRuntime(t, "OWN=1"), nil)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), target, tool("look"))
	var view struct {
		Env, Fds  []string
		Cwd       string
		Pgid, Pid int
	}
	if err := json.Unmarshal([]byte(said(t, resp, err)), &view); err != nil {
		t.Fatal(err)
	}
	allowed := map[string]bool{"PATH": true, "HOME": true, "TMPDIR": true, "LANG": true, "OWN": true, "ERA": true, "BULKHEAD_TEST_CHILD": true}
	for _, kv := range view.Env {
		if k, _, _ := strings.Cut(kv, "="); !allowed[k] {
			t.Errorf("the child sees %s", k)
		}
	}
	if len(view.Fds) != 3 {
		t.Errorf("descriptors: %q", view.Fds)
	}
	if view.Pgid != view.Pid || view.Pgid == syscall.Getpgrp() {
		t.Errorf("group %d of process %d", view.Pgid, view.Pid)
	}
	info, err := os.Stat(view.Cwd)
	if err != nil || info.Mode().Perm() != 0o700 || !strings.HasPrefix(filepath.Base(view.Cwd), "bulkhead-stdio-") {
		t.Fatalf("working directory %s: %v %v", view.Cwd, info, err)
	}
	p.CloseKey(func(Key) bool { return true })
	eventually(t, "the directory is removed", func() bool { _, err := os.Stat(view.Cwd); return os.IsNotExist(err) })
}

func TestStdio_DeathIsNoticedAtOnce(t *testing.T) {
	t.Parallel()
	var changes sync.Map
	p, target := stdioPool(t, childRuntime(t), nil)
	p.OnChange(func(c Change) { changes.Store(c, true) })
	k := keyOf(t, "a")
	resp, err := p.Do(t.Context(), k, target, tool("crash"))
	expect(t, resp, err, "SERVER_ENDED", fault.Transport, MaybeSent)
	eventually(t, "the gap is told", func() bool { _, ok := changes.Load(Change{Key: k}); return ok })
	// The next use starts a new process; what a dying one still said counts.
	resp, err = p.Do(t.Context(), k, target, tool("answer and crash"))
	if said(t, resp, err) != "last words" {
		t.Fatal("the answer was lost")
	}
	none := func() bool { return len(p.matching(func(Key) bool { return true })) == 0 }
	eventually(t, "the connection is gone", none)
	// A death between calls is noticed without a call.
	resp, err = p.Do(t.Context(), k, target, tool("spawn"))
	pid, _ := strconv.Atoi(strings.Fields(said(t, resp, err))[0])
	syscall.Kill(pid, syscall.SIGKILL)
	eventually(t, "the connection is gone", none)
	resp, err = p.Do(t.Context(), k, target, tool("close output"))
	expect(t, resp, err, "SERVER_ENDED", fault.Transport, MaybeSent)
}

func TestStdio_WritesDoNotBlock(t *testing.T) {
	t.Parallel()
	p, target := stdioPool(t, childRuntime(t), func(c *PoolConfig) { c.Limits.Write = 300 * time.Millisecond })
	k := keyOf(t, "a")
	resp, err := p.Do(t.Context(), k, target, tool("stop reading"))
	said(t, resp, err)
	big := tool("echo")
	big.Timeout = time.Hour // only the limit for writing can end it
	big.Params = json.RawMessage(`{"name":"echo","arguments":{"x":"` + strings.Repeat("x", 1<<20) + `"}}`)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			resp, err := p.Do(context.Background(), k, target, big)
			if err == nil || resp.Phase != NotSent {
				t.Errorf("%+v %v", resp, err)
			}
		})
	}
	wg.Wait()
	resp, err = p.Do(t.Context(), k, target, tool("echo"))
	said(t, resp, err) // by a new process
}

func TestStdio_CancelNullErrorStringIDAndRequests(t *testing.T) {
	t.Parallel()
	var changes sync.Map
	p, target := stdioPool(t, childRuntime(t), nil)
	p.OnChange(func(c Change) { changes.Store(c, true) })
	k := keyOf(t, "a")
	r := tool("hang")
	r.Timeout = 400 * time.Millisecond
	resp, err := p.Do(t.Context(), k, target, r)
	expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
	// The child tells of a change when it is told of the cancellation.
	eventually(t, "cancellation arrived", func() bool { _, ok := changes.Load(Change{Key: k, Kind: KindTool}); return ok })

	resp, err = p.Do(t.Context(), k, target, tool("null error"))
	if err != nil || resp.Error == nil || resp.Error.Code != -32700 {
		t.Fatalf("%+v %v", resp, err)
	}
	resp, err = p.Do(t.Context(), k, target, tool("string id"))
	succeed(t, resp, err)
	resp, err = p.Do(t.Context(), k, target, tool("ask"))
	succeed(t, resp, err)
	if !strings.Contains(string(resp.Result), `\"id\":\"a1\",\"error\":{\"code\":-32601`) || !strings.Contains(string(resp.Result), `\"id\":\"a2\",\"result\":{}`) {
		t.Fatalf("%s", resp.Result)
	}
	// With two calls in flight an error without an id ends neither.
	hang := make(chan error, 1)
	go func() {
		r := tool("hang")
		r.Timeout = time.Second
		_, err := p.Do(context.Background(), k, target, r)
		hang <- err
	}()
	r = tool("null error")
	r.Timeout = 300 * time.Millisecond
	time.Sleep(50 * time.Millisecond)
	resp, err = p.Do(t.Context(), k, target, r)
	expect(t, resp, err, "TIMEOUT", fault.Transport, MaybeSent)
	if err := <-hang; !fault.Is(err, fault.Deadline) {
		t.Fatal(err)
	}
}

func TestStdio_ChangesAreToldSparingly(t *testing.T) {
	t.Parallel()
	for _, era := range []string{"legacy", "modern"} {
		var mu sync.Mutex
		var told []Change
		p, target := stdioPool(t, childRuntime(t, "ERA="+era), func(c *PoolConfig) { c.Limits.Coalesce = 200 * time.Millisecond })
		p.OnChange(func(c Change) { mu.Lock(); told = append(told, c); mu.Unlock() })
		k := keyOf(t, "a")
		resp, err := p.Do(t.Context(), k, target, tool("change"))
		said(t, resp, err)
		eventually(t, "a change is told", func() bool { mu.Lock(); defer mu.Unlock(); return len(told) > 0 })
		time.Sleep(300 * time.Millisecond)
		mu.Lock()
		if len(told) > 4 {
			t.Errorf("%s: told %d times", era, len(told))
		}
		mu.Unlock()
	}
}

func TestStdio_Limits(t *testing.T) {
	t.Parallel()
	p, target := stdioPool(t, childRuntime(t), func(c *PoolConfig) { c.Limits.TenantProcesses = 1 })
	resp, err := p.Do(t.Context(), keyOf(t, "a"), target, tool("echo"))
	said(t, resp, err)
	resp, err = p.Do(t.Context(), keyOf(t, "b"), target, tool("echo"))
	expect(t, resp, err, "PROCESSES_EXHAUSTED", fault.Host, NotSent)
	p.CloseKey(func(Key) bool { return true })
	eventually(t, "the place is free again", func() bool {
		resp, err := p.Do(t.Context(), keyOf(t, "b"), target, tool("echo"))
		return err == nil && resp.Result != nil
	})
	target.Runtime, target.Origin = "other", ""
	resp, err = p.Do(t.Context(), keyOf(t, "c"), target, tool("echo"))
	expect(t, resp, err, "RUNTIME_UNKNOWN", fault.Host, NotSent)
	p, target = stdioPool(t, Runtime{Command: []string{"no-such-program-anywhere"}}, nil)
	resp, err = p.Do(t.Context(), keyOf(t, "a"), target, tool("echo"))
	expect(t, resp, err, "START_FAILED", fault.Transport, NotSent)
}

// isGone reports whether a process ended; a zombie that nobody reaps has.
func isGone(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(rest, "Z") || strings.HasPrefix(rest, "X")
}

func pids(t testing.TB, text string) (out []int) {
	t.Helper()
	for _, f := range strings.Fields(text) {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, n)
	}
	return out
}

func TestFO128_GroupIsGoneAfterClose(t *testing.T) {
	t.Parallel()
	r := childRuntime(t, "STUBBORN=1")
	r.Command = []string{"sh", "-c", `"$0"; exit 0`, r.Command[0]}
	p, target := stdioPool(t, r, nil)
	resp, err := p.Do(t.Context(), keyOf(t, "a"), target, tool("spawn"))
	procs := pids(t, said(t, resp, err))
	p.CloseKey(func(Key) bool { return true })
	for _, pid := range procs {
		eventually(t, "process is gone", func() bool { return isGone(pid) })
	}
	// Nothing of it is left as a zombie of ours.
	eventually(t, "no child is left", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
		for _, pid := range strings.Fields(string(b)) {
			for _, mine := range procs {
				if pid == strconv.Itoa(mine) {
					return false
				}
			}
		}
		return true
	})
}

func TestFO128_NothingSurvivesTheHostsSIGKILL(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	host := exec.Command(os.Args[0])
	host.Env = []string{"BULKHEAD_TEST_CHILD=host", "TEMP_DIR=" + dir, "PATH=" + os.Getenv("PATH")}
	host.Stderr = os.Stderr
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var r struct{ Content []struct{ Text string } }
	if err := json.Unmarshal(line, &r); err != nil {
		t.Fatal(err)
	}
	procs := pids(t, r.Content[0].Text)
	for _, pid := range procs {
		if isGone(pid) {
			t.Fatal("it did not even run")
		}
	}
	host.Process.Signal(syscall.SIGKILL)
	host.Wait() //nolint:errcheck // it was killed
	for _, pid := range procs {
		eventually(t, "process is gone", func() bool { return isGone(pid) })
	}
	eventually(t, "the private directory is removed", func() bool {
		left, _ := os.ReadDir(dir)
		return len(left) == 0
	})
}
