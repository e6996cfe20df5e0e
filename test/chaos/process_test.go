package chaos

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// output keeps everything that a process wrote.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// process is a child of the test.
type process struct {
	t      testing.TB
	cmd    *exec.Cmd
	pid    int
	stdout output
	stderr output
	exited chan struct{}
	code   int // set before exited is closed

	// url and metrics are the addresses of a server.
	url, metrics string
}

// spawn starts a program that the kernel kills when this process ends. The
// signal follows the thread that started the child, so the thread stays.
func spawn(t testing.TB, env []string, path string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(path, args...), exited: make(chan struct{})}
	p.cmd.Env = env
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.WaitDelay = 10 * time.Second
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	began := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.exited)
		err := p.cmd.Start()
		began <- err
		if err == nil {
			_ = p.cmd.Wait()
			p.code = p.cmd.ProcessState.ExitCode()
		}
	}()
	if err := <-began; err != nil {
		t.Fatalf("start %s: %v", path, err)
	}
	p.pid = p.cmd.Process.Pid
	t.Cleanup(p.kill)
	return p
}

// kill is kill -9, and waits until the process is gone.
func (p *process) kill() {
	select {
	case <-p.exited:
		return
	default:
	}
	_ = p.cmd.Process.Kill()
	<-p.exited
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("signal %v: %v", s, err)
	}
}

// awaitExit waits for the process to end and returns its exit code.
func (p *process) awaitExit() int {
	p.t.Helper()
	select {
	case <-p.exited:
		return p.code
	case <-time.After(patience):
		p.t.Fatalf("the process did not end; its log:\n%s", tail(p.stderr.String()))
		return 0
	}
}

// awaitServing waits for the log line that names the addresses.
func (p *process) awaitServing() {
	p.t.Helper()
	eventually(p.t, "the server to serve", func() bool {
		for line := range strings.Lines(p.stderr.String()) {
			var l struct{ Msg, Address, Metrics string }
			if json.Unmarshal([]byte(line), &l) == nil && l.Msg == "serving" {
				p.url, p.metrics = "http://"+l.Address, "http://"+l.Metrics
				return true
			}
		}
		select {
		case <-p.exited:
			p.t.Fatalf("the server ended at its start with code %d:\n%s", p.code, tail(p.stderr.String()))
		default:
		}
		return false
	})
}

// eventually polls until ok, up to a deadline.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		if ok() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// glance is the time between two looks of something that waits in a select.
func glance() <-chan time.Time { return time.After(20 * time.Millisecond) }

func tail(s string) string {
	const most = 6000
	if len(s) > most {
		return "…" + s[len(s)-most:]
	}
	return s
}

// calendar is a demo calendar in a process of its own, which outlives every
// server under test.
type calendar struct {
	*process
	mcp, origin string
}

func startCalendar(t testing.TB, args ...string) *calendar {
	t.Helper()
	c := &calendar{process: spawn(t, []string{}, binary, append([]string{"demo-calendar", "--control"}, args...)...)}
	eventually(t, "the demo calendar", func() bool {
		var ready struct{ URL, Origin string }
		if json.Unmarshal([]byte(c.stdout.String()), &ready) != nil {
			return false
		}
		c.mcp, c.origin = ready.URL, ready.Origin
		return true
	})
	return c
}

// counts reads how often tools were reached ("arrivals") or took effect
// ("executions").
func (c *calendar) counts(what string) map[string]int {
	c.t.Helper()
	resp, err := http.Get(c.origin + "/" + what)
	if err != nil {
		c.t.Fatalf("the calendar's %s: %v", what, err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	var out map[string]int
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		c.t.Fatalf("the calendar's %s: %v", what, err)
	}
	return out
}

func (c *calendar) arrivals(tool string) int   { c.t.Helper(); return c.counts("arrivals")[tool] }
func (c *calendar) executions(tool string) int { c.t.Helper(); return c.counts("executions")[tool] }

func (c *calendar) awaitArrivals(tool string, n int) {
	c.t.Helper()
	eventually(c.t, strconv.Itoa(n)+" arrivals of "+tool, func() bool { return c.arrivals(tool) >= n })
}

func (c *calendar) control(method, path string, body any) {
	c.t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		c.t.Fatal(err)
	}
	req, err := http.NewRequest(method, c.origin+"/control/"+path, bytes.NewReader(raw))
	if err != nil {
		c.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		c.t.Fatalf("control the calendar: %v", err)
	}
	resp.Body.Close() //nolint:errcheck // empty
	if resp.StatusCode >= 300 {
		c.t.Fatalf("control the calendar: %s %s: %s", method, path, resp.Status)
	}
}

// fault is what goes wrong with a tool; see demo.Fault.
type fault struct {
	DelayBefore string `json:"delayBefore,omitempty"`
	DelayAfter  string `json:"delayAfter,omitempty"`
	DropAfter   bool   `json:"dropAfter,omitempty"`
	Detached    bool   `json:"detached,omitempty"`
	Times       int    `json:"times,omitempty"`
}

func (c *calendar) fault(tool string, f fault) { c.t.Helper(); c.control("PUT", "faults/"+tool, f) }
