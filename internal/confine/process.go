package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// startTime bounds the wait for a program to be started.
	startTime = 20 * time.Second
	// lastWords is how long the reader of a program's output is waited for when
	// all processes are gone.
	lastWords = 250 * time.Millisecond
)

// Process is a program that runs. Whoever started it calls Reap once, reads
// Stdout and calls Drained at its end, and reads Stderr.
type Process struct {
	// Stdin, Stdout and Stderr are the host's ends of the program's.
	Stdin, Stdout, Stderr *os.File
	// PID is the program's number, and UID the user that it runs as.
	PID, UID int

	dir     string
	keeper  *os.Process
	link    *os.File
	reports *json.Decoder
	drained chan struct{}
	drain   sync.Once
	exited  chan struct{}
	gone    chan struct{}
	status  string
}

// Start starts a program. Its private directory is made in tempDir, or in the
// system's temporary directory when that is empty. An error says what the
// operator can do, and may name paths.
func Start(p Program, tempDir string) (*Process, error) {
	if len(p.Command) == 0 {
		return nil, errors.New("the runtime declares no command")
	}
	who, err := p.identity()
	if err != nil {
		return nil, err
	}
	private, err := os.MkdirTemp(tempDir, "bulkhead-stdio-")
	if err != nil {
		return nil, err
	}
	if private, err = filepath.Abs(private); err != nil {
		return nil, err
	}
	o, err := p.orders(who, private)
	x := &Process{dir: private, drained: make(chan struct{}), exited: make(chan struct{}), gone: make(chan struct{})}
	if err == nil {
		err = x.launch()
	}
	if err == nil {
		if err = x.order(o); err != nil {
			x.abandon()
		}
	}
	if err != nil {
		os.RemoveAll(private) //nolint:errcheck // it is empty
		return nil, err
	}
	return x, nil
}

func (p Program) orders(who identity, private string) (orders, error) {
	env := p.environment(private)
	path, err := lookup(p.Command[0], env["PATH"])
	if err != nil {
		return orders{}, err
	}
	o := orders{Path: path, Dir: p.Dir, Private: private, Args: p.Command, ReadRoots: p.ReadRoots, WriteRoots: p.WriteRoots,
		Network: p.Network, Who: who, Limits: p.Limits.withDefaults()}
	for k, v := range env {
		o.Env = append(o.Env, k+"="+v)
	}
	return o, nil
}

// launch starts the keeper, which gets the program's ends of the pipes.
func (x *Process) launch() (err error) {
	var theirs [4]*os.File
	defer func() {
		for _, f := range theirs {
			if f != nil {
				f.Close() //nolint:errcheck // the keeper has its own
			}
		}
		if err != nil {
			x.closeAll()
		}
	}()
	if theirs[0], x.Stdin, err = os.Pipe(); err != nil {
		return err
	}
	if x.Stdout, theirs[1], err = os.Pipe(); err != nil {
		return err
	}
	if x.Stderr, theirs[2], err = os.Pipe(); err != nil {
		return err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	theirs[3] = os.NewFile(uintptr(pair[1]), "link")
	unix.SetNonblock(pair[0], true) //nolint:errcheck // a fresh socket
	x.link = os.NewFile(uintptr(pair[0]), "link")
	closeOnExec()
	x.keeper, err = os.StartProcess(self, []string{keeperName}, &os.ProcAttr{Dir: "/", Env: selfEnv, Files: theirs[:], Sys: &syscall.SysProcAttr{Setpgid: true}})
	return err
}

// order tells the keeper what to start, and waits for its answer.
func (x *Process) order(o orders) error {
	if err := x.link.SetDeadline(time.Now().Add(startTime)); err != nil {
		return err
	}
	if err := json.NewEncoder(x.link).Encode(o); err != nil {
		return fmt.Errorf("the keeper takes no orders: %w", err)
	}
	x.reports = json.NewDecoder(x.link)
	var r report
	if err := x.reports.Decode(&r); err != nil {
		return fmt.Errorf("the keeper does not answer: %w", err)
	}
	if r.Error != "" {
		return errors.New(r.Error)
	}
	x.PID, x.UID = r.PID, r.UID
	return x.link.SetDeadline(time.Time{})
}

// abandon ends a keeper that could not start its program.
func (x *Process) abandon() {
	x.closeAll()    // the keeper ends with its link
	x.keeper.Wait() //nolint:errcheck // how it ended is of no interest
}

func (x *Process) closeAll() {
	for _, f := range []*os.File{x.Stdin, x.Stdout, x.Stderr, x.link} {
		if f != nil {
			f.Close() //nolint:errcheck // closed for good
		}
	}
}

// Drained says that all output of the program was read.
func (x *Process) Drained() { x.drain.Do(func() { close(x.drained) }) }

// Exited is closed when the program has exited; others of its tree may remain.
func (x *Process) Exited() <-chan struct{} { return x.exited }

// Gone is closed when nothing is left: no process, no descriptor, no directory.
func (x *Process) Gone() <-chan struct{} { return x.gone }

// Status tells how the program ended, once Exited is closed.
func (x *Process) Status() string { <-x.exited; return x.status }

// Reap waits for the end of the program and of everything it started, and cleans
// up.
func (x *Process) Reap() {
	var r report
	x.reports.Decode(&r) //nolint:errcheck // without a report the keeper was killed
	if x.status = r.Exited; x.status == "" {
		x.status = "its keeper was killed"
	}
	close(x.exited)
	state, err := x.keeper.Wait()
	if err != nil || !state.Success() {
		// The keeper takes the program along; this is for what runs beside it.
		syscall.Kill(-x.PID, syscall.SIGKILL) //nolint:errcheck // no such group is as good
	}
	t := time.NewTimer(lastWords)
	select {
	case <-x.drained:
	case <-t.C:
	}
	t.Stop()
	x.closeAll()
	os.RemoveAll(x.dir) //nolint:errcheck // the keeper has, unless it was killed
	close(x.gone)
}

// End asks the program to leave, ever less politely, and returns when everything
// is gone: first its input ends, then its tree gets SIGTERM, then SIGKILL. grace
// is the pause after each of the first two.
func (x *Process) End(grace time.Duration) {
	x.Stdin.Close() //nolint:errcheck // the end of input is the first request to leave
	for _, w := range []word{"", wordTerm, wordKill} {
		if w != "" {
			json.NewEncoder(x.link).Encode(w) //nolint:errcheck // without a keeper all is over
		}
		t := time.NewTimer(grace)
		select {
		case <-x.gone:
			t.Stop()
			return
		case <-t.C:
		}
	}
	<-x.gone
}
