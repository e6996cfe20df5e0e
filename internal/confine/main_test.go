package confine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// The test binary plays programs, too, told so by its first argument.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "dial" {
		c, err := net.Dial("tcp", os.Args[2])
		if err == nil {
			err = c.Close()
		}
		fmt.Println("dial:", err)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			err = l.Close()
		}
		fmt.Println("listen:", err)
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "host" {
		playHost(os.Args[2])
		return
	}
	goleak.VerifyTestMain(m)
}

// playHost starts a program that starts others, tells their numbers, and waits to
// be killed.
func playHost(dir string) {
	x, err := Start(shell(hostile), dir)
	if err != nil {
		fmt.Println(err)
		return
	}
	io.Copy(os.Stdout, io.LimitReader(x.Stdout, 1<<20)) //nolint:errcheck // until it is killed
}

// hostile starts processes that leave its group and its session, forks twice, and
// lets nobody ask it to leave. Each tells its number.
const hostile = `trap '' TERM HUP INT
setsid sh -c 'trap "" TERM HUP; echo $$; while :; do sleep 1000; done' &
(setsid sh -c '(trap "" TERM; echo $(exec sh -c "echo \$PPID"); sleep 1000; sleep 1000) & ' &)
sleep 1000 & echo $!
echo $$
while :; do sleep 1000; done`

// hostileCount is how many numbers it tells.
const hostileCount = 4

func shell(script string, args ...string) Program {
	return Program{Command: append([]string{"/bin/sh", "-c", script, "sh"}, args...)}
}

// asTests lets a program run as the tests' own user, with what a program built
// with the race detector maps.
func asTests(p Program) Program {
	p.User, p.Limits = strconv.Itoa(os.Getuid()), Limits{Memory: 1 << 50, AddressSpace: 1 << 50}
	return p
}

// running is a program with all that it has said.
type running struct {
	*Process
	mu  sync.Mutex
	out strings.Builder
	err strings.Builder
}

// openDir returns a directory that every user may enter.
func openDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bulkhead-confine-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeTree(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// start starts a program; the test ends when everything of it is gone.
func start(t testing.TB, p Program) *running {
	t.Helper()
	dir := openDir(t)
	x, err := Start(p, dir)
	if err != nil {
		t.Fatal(err)
	}
	r := &running{Process: x}
	var all sync.WaitGroup
	all.Go(x.Reap)
	all.Go(func() { r.read(x.Stdout, &r.out); x.Drained() })
	all.Go(func() { r.read(x.Stderr, &r.err) })
	t.Cleanup(func() {
		x.End(0)
		all.Wait()
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("left in the directory of private directories: %v %v", left, err)
		}
	})
	return r
}

func (r *running) read(from io.Reader, to *strings.Builder) {
	in := bufio.NewReader(from)
	for {
		line, err := in.ReadString('\n')
		r.mu.Lock()
		to.WriteString(line)
		r.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (r *running) said() string { r.mu.Lock(); defer r.mu.Unlock(); return r.out.String() }

// run runs a program to its end and returns what it said.
func run(t testing.TB, p Program) (out, errs, status string) {
	t.Helper()
	r := start(t, p)
	select {
	case <-r.Gone():
	case <-time.After(time.Minute):
		t.Fatalf("it does not end; it said %q", r.said())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.out.String(), r.err.String(), r.Status()
}

// numbers waits until a program has told so many numbers.
func (r *running) numbers(t testing.TB, n int) (pids []int) {
	t.Helper()
	eventually(t, "all processes tell their numbers", func() bool { return strings.Count(r.said(), "\n") >= n })
	return parse(t, r.said())
}

func parse(t testing.TB, text string) (pids []int) {
	t.Helper()
	for _, s := range strings.Fields(text) {
		pid, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("said %q", text)
		}
		pids = append(pids, pid)
	}
	return pids
}

func wantGone(t testing.TB, pids []int) {
	t.Helper()
	for _, pid := range pids {
		eventually(t, fmt.Sprintf("process %d is gone", pid), func() bool {
			_, living := parentOf(pid)
			return !living
		})
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// needs skips a test of what this kernel's Landlock cannot.
func needs(t testing.TB, version int) {
	t.Helper()
	if have := abi(); have < version {
		t.Skipf("the kernel's Landlock has version %d, this needs %d", have, version)
	}
}

func write(t testing.TB, path, text string, mode os.FileMode) string {
	t.Helper()
	err := os.WriteFile(path, []byte(text), mode)
	if err == nil {
		err = os.Chmod(path, mode)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func wantLine(t testing.TB, text, line string) {
	t.Helper()
	if !strings.Contains("\n"+text, "\n"+line+"\n") {
		t.Errorf("no line %q in %q", line, text)
	}
}

func self0(t testing.TB) string {
	t.Helper()
	path, err := filepath.Abs(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// descriptors counts what this process has open.
func descriptors(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// children returns the processes of this one, zombies too.
func children(t testing.TB) (pids []string) {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(b), ") ")
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(os.Getpid()) {
			pids = append(pids, path)
		}
	}
	return pids
}
