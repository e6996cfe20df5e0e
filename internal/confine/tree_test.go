package confine

import (
	"bufio"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// carelessly duplicates a file without close-on-exec, as a careless library does.
func carelessly(t testing.TB, f *os.File) (closeIt func()) {
	t.Helper()
	fd, err := syscall.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return func() { syscall.Close(fd) }
}

func groupOf(pid int) (int, error) { return syscall.Getpgid(pid) }

func TestTree_IsGoneAfterTheProgram(t *testing.T) {
	t.Parallel()
	r := start(t, shell(hostile))
	pids := r.numbers(t, hostileCount)
	syscall.Kill(r.PID, syscall.SIGKILL)
	<-r.Gone()
	if r.Status() != "ended by SIGKILL" {
		t.Error(r.Status())
	}
	wantGone(t, pids)
}

func TestTree_IsGoneAfterEnd(t *testing.T) {
	t.Parallel()
	r := start(t, shell(hostile))
	pids := r.numbers(t, hostileCount)
	r.End(20 * time.Millisecond)
	wantGone(t, pids)
}

func TestTree_IsGoneAfterTheHost(t *testing.T) {
	t.Parallel()
	dir := openDir(t)
	host := exec.Command(self0(t), "host", dir)
	host.Env = []string{}
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for in := bufio.NewScanner(out); strings.Count(text.String(), "\n") < hostileCount && in.Scan(); {
		text.WriteString(in.Text() + "\n")
	}
	pids := parse(t, text.String())
	if len(pids) != hostileCount {
		t.Fatalf("%q", text.String())
	}
	if err := host.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	host.Wait() //nolint:errcheck // it was killed
	wantGone(t, pids)
	eventually(t, "the private directory is removed", func() bool {
		left, err := os.ReadDir(dir)
		return err == nil && len(left) == 0
	})
}

func TestTree_TheProgramEndsWithItsKeeper(t *testing.T) {
	t.Parallel()
	r := start(t, shell(`sleep 1000 & echo $!; echo $$; while :; do sleep 1000; done`))
	pids := r.numbers(t, 2)
	r.keeper.Kill() //nolint:errcheck // a fault
	<-r.Gone()
	if r.Status() != "its keeper was killed" {
		t.Error(r.Status())
	}
	wantGone(t, pids)
}

func TestTree_ThatGrowsComesToAnEnd(t *testing.T) {
	t.Parallel()
	p := shell(`exec perl -e '$SIG{TERM} = "IGNORE"; $| = 1; print "begun\n"; fork while 1'`)
	p.Limits.Processes = 48
	if _, err := exec.LookPath("perl"); err != nil {
		t.Skip("no perl to play the bomb")
	}
	r := start(t, p)
	size := func() int {
		n := 0
		for _, pid := range descendants() {
			if b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline"); err == nil && strings.Contains(string(b), "fork while 1") {
				n++
			}
		}
		return n
	}
	eventually(t, "the bomb has gone off", func() bool { return size() > 24 })
	if n := size(); n > 48 && os.Geteuid() == 0 {
		t.Errorf("%d processes", n)
	}
	r.End(time.Millisecond)
	eventually(t, "nothing is left of it", func() bool { return size() == 0 })
}

func TestEnd_AsksEverLessPolitely(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, script, want string }{
		{"by the end of its input", `echo 1; read x; exit 5`, "exit status 5"},
		{"by SIGTERM", `trap 'exit 7' TERM; echo 1; while :; do sleep 0.05; done`, "exit status 7"},
		{"by SIGKILL", `trap '' TERM; echo 1; while :; do sleep 0.05; done`, "ended by SIGKILL"},
		{"with its output closed", `echo 1; exec >&- 2>&-; exec sleep 1000`, "ended by SIGTERM"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, shell(tt.script))
			r.numbers(t, 1)
			// A pause that a busy machine does not exceed when leaving takes no time.
			r.End(time.Second)
			if r.Status() != tt.want {
				t.Errorf("%s, want %s", r.Status(), tt.want)
			}
		})
	}
}

// It is sequential, since it counts what the whole process has.
func TestNothingIsLeft(t *testing.T) {
	before := descriptors(t)
	for i := range 8 {
		script := hostile
		if i%2 == 0 {
			script = "exit 0"
		}
		x, err := Start(shell(script), openDir(t))
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() { defer close(done); x.Reap() }()
		x.End(time.Millisecond)
		<-done
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
	if left := children(t); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
}
