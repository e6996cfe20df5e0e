package sessions

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Runtime is a command that the operator declared for stdio servers. A tenant
// gives only its name.
type Runtime struct {
	// Command is the program and its arguments. A program without a slash is
	// looked up in the PATH of Env.
	Command []string
	// Env is the whole environment, over PATH, HOME, TMPDIR and LANG.
	Env map[string]string
	// ReadRoots and WriteRoots are the directories the program is meant to use.
	// They are for contracts and documentation; nothing here enforces them.
	ReadRoots, WriteRoots []string
	// Dir is the working directory; empty means a private temporary one.
	Dir string
}

const childPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// environment returns the clean environment of a child; nothing is inherited.
func (r Runtime) environment(home string) map[string]string {
	env := map[string]string{"PATH": childPath, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
	for k, v := range r.Env {
		env[k] = v
	}
	return env
}

// lookup finds the program in the child's own PATH.
func lookup(program, path string) (string, error) {
	if strings.Contains(program, "/") {
		return program, nil
	}
	for _, dir := range filepath.SplitList(path) {
		full := filepath.Join(dir, program)
		if info, err := os.Stat(full); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 && filepath.IsAbs(full) {
			return full, nil
		}
	}
	return "", fmt.Errorf("program %q is not in the PATH of its runtime", program)
}

// spawner starts processes from one locked thread, because the signal a child gets
// at its parent's death (PR_SET_PDEATHSIG) is tied to the thread that forked it.
type spawner struct {
	once sync.Once
	over sync.Once
	work chan func()
	done chan struct{}
}

func newSpawner() *spawner {
	return &spawner{work: make(chan func()), done: make(chan struct{})}
}

func (s *spawner) start(fn func()) {
	s.once.Do(func() {
		go func() {
			defer close(s.done)
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			for fn := range s.work {
				fn()
			}
		}()
	})
	ran := make(chan struct{})
	s.work <- func() {
		defer close(ran)
		fn()
	}
	<-ran
}

// stop ends the thread. All children must have ended. It may be called twice.
func (s *spawner) stop() {
	s.once.Do(func() { close(s.done) })
	s.over.Do(func() { close(s.work) })
	<-s.done
}

// process is a child with its own process group, and a guard beside it.
type process struct {
	leader   *os.Process
	dir      string // private directory to remove
	stdin    *os.File
	stdout   *os.File
	stderr   *os.File
	guard    *os.Process
	lifeline *os.File
	exited   chan struct{} // closed when the leader has exited, before it is reaped
	gone     chan struct{} // closed when the group is gone and all is cleaned up
	drained  chan struct{} // closed by the reader of stdout at its end
}

// startProcess starts a runtime's command.
func startProcess(s *spawner, r Runtime, tempDir string) (*process, error) {
	if len(r.Command) == 0 {
		return nil, errors.New("the runtime declares no command")
	}
	private, err := os.MkdirTemp(tempDir, "bulkhead-stdio-")
	if err != nil {
		return nil, err
	}
	p := &process{dir: private, exited: make(chan struct{}), gone: make(chan struct{}), drained: make(chan struct{})}
	if err := p.prepare(s, r); err != nil {
		os.RemoveAll(private) //nolint:errcheck // it is empty
		return nil, err
	}
	return p, nil
}

func (p *process) prepare(s *spawner, r Runtime) error {
	env := r.environment(p.dir)
	program, err := lookup(r.Command[0], env["PATH"])
	if err != nil {
		return err
	}
	list := make([]string, 0, len(env))
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	dir := r.Dir
	if dir == "" {
		dir = p.dir
	}
	return p.launch(s, program, r.Command, list, dir)
}

func (p *process) launch(s *spawner, program string, args, env []string, dir string) error {
	var theirs [3]*os.File
	var err error
	defer func() {
		for _, f := range theirs {
			if f != nil {
				f.Close() //nolint:errcheck // the child has its own
			}
		}
		if err != nil {
			p.closePipes()
		}
	}()
	if theirs[0], p.stdin, err = os.Pipe(); err != nil {
		return err
	}
	if p.stdout, theirs[1], err = os.Pipe(); err != nil {
		return err
	}
	if p.stderr, theirs[2], err = os.Pipe(); err != nil {
		return err
	}
	attr := &os.ProcAttr{Dir: dir, Env: env, Files: theirs[:], Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}}
	s.start(func() {
		// Go opens everything close-on-exec, but what this process inherited without
		// the flag would pass through.
		unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC) //nolint:errcheck // kernels before 5.11 lack it
		p.leader, err = os.StartProcess(program, args, attr)
	})
	if err != nil {
		return err
	}
	p.startGuard(s)
	return nil
}

func (p *process) closePipes() {
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
		if f != nil {
			f.Close() //nolint:errcheck // closed for good
		}
	}
}

// guardScript waits on its input. A line means that the child was ended in order;
// an end without one means that this process died, so the whole group is killed
// and its directory removed.
const guardScript = `read -r x || { kill -s KILL -- "-$1"; rm -rf -- "$2"; }`

// startGuard starts a small shell beside the child. The parent-death signal ends
// the child itself; what the child started in its group is ended by the guard.
// Without a shell only the first holds.
func (p *process) startGuard(s *spawner) {
	r, w, err := os.Pipe()
	if err != nil {
		return
	}
	defer r.Close() //nolint:errcheck // the guard has its own
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		w.Close() //nolint:errcheck // no guard
		return
	}
	defer null.Close() //nolint:errcheck // the guard has its own
	s.start(func() {
		p.guard, err = os.StartProcess("/bin/sh", []string{"sh", "-c", guardScript, "guard", strconv.Itoa(p.leader.Pid), p.dir},
			&os.ProcAttr{Dir: "/", Env: []string{"PATH=" + childPath}, Files: []*os.File{r, null, null}, Sys: &syscall.SysProcAttr{Setpgid: true}})
	})
	if err != nil {
		w.Close() //nolint:errcheck // no guard
		return
	}
	p.lifeline = w
}

// reap waits for the leader, ends what is left of its group, and cleans up. The
// leader stays a zombie until the group was signalled, so that its number cannot
// belong to somebody else meanwhile.
func (p *process) reap() {
	for {
		err := unix.Waitid(unix.P_PID, p.leader.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	close(p.exited)
	p.signal(syscall.SIGTERM)
	// The last words of the child are read before its relatives are cut off.
	select {
	case <-p.drained:
	case <-time.After(250 * time.Millisecond):
	}
	p.signal(syscall.SIGKILL)
	p.leader.Wait() //nolint:errcheck // how it ended is of no interest
	p.closePipes()
	if p.lifeline != nil {
		p.lifeline.Write([]byte("\n")) //nolint:errcheck // the guard may be gone
		p.lifeline.Close()             //nolint:errcheck // nothing more to say
		p.guard.Wait()                 //nolint:errcheck // how it ended is of no interest
	}
	os.RemoveAll(p.dir) //nolint:errcheck // what stays is in a temporary directory
	close(p.gone)
}

func (p *process) signal(sig syscall.Signal) {
	syscall.Kill(-p.leader.Pid, sig) //nolint:errcheck // no such group is as good
}

// end asks the process to leave, ever less politely, and returns when it is gone.
func (p *process) end(grace time.Duration) {
	p.stdin.Close() //nolint:errcheck // the end of input is the first request to leave
	for _, sig := range []syscall.Signal{0, syscall.SIGTERM, syscall.SIGKILL} {
		if sig != 0 {
			p.signal(sig)
		}
		t := time.NewTimer(grace)
		select {
		case <-p.exited:
			t.Stop()
			<-p.gone
			return
		case <-t.C:
		}
	}
	<-p.gone
}
