package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// leaving is how long what a program left behind has to leave by itself after
	// the program's end.
	leaving = 250 * time.Millisecond
	// again is the pause between two rounds of SIGKILL.
	again = 10 * time.Millisecond
)

// keeper stands between the host and one program.
type keeper struct {
	link    *os.File
	host    *json.Encoder
	leader  int
	exited  bool // the leader has
	killing bool
}

// keep is the main function of the keeper. It returns when nothing is left.
func keep(link *os.File) int {
	runtime.LockOSThread() // the program's death signal is tied to this thread
	unix.CloseOnExec(keeperLink)
	k := &keeper{link: link, host: json.NewEncoder(link)}
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	// Taken, not ignored, since the program would inherit that.
	signal.Notify(make(chan os.Signal, 1), unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE, unix.SIGTSTP, unix.SIGUSR1, unix.SIGUSR2)
	words := json.NewDecoder(link)
	var o orders
	if err := words.Decode(&o); err != nil {
		return 2
	}
	defer removeTree(o.Private)
	if err := k.start(&o); err != nil {
		k.leader = 0 // its end is nothing to tell beside the error
		k.endTree(died)
		k.host.Encode(report{Error: err.Error()}) //nolint:errcheck // without a host nobody asks
		return 0
	}
	k.host.Encode(report{PID: k.leader, UID: o.Who.UID}) //nolint:errcheck // without a host the words end
	said := make(chan word)
	go func() {
		defer close(said) // the host is gone
		for {
			var w word
			if words.Decode(&w) != nil {
				return
			}
			said <- w
		}
	}()
	k.run(died, said)
	return 0
}

// start starts the entry and waits until it has become the program.
func (k *keeper) start(o *orders) error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("adopt what the program leaves: %w", err)
	}
	o.Keeper = os.Getpid()
	if o.Who.Own {
		o.Who.UID = firstUser + os.Getpid()
		o.Who.GID = o.Who.UID
	}
	if o.Who.Switch {
		if err := os.Chown(o.Private, o.Who.UID, o.Who.GID); err != nil {
			return fmt.Errorf("give the private directory to user %d: %w", o.Who.UID, err)
		}
	}
	ordersRead, ordersWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	statusRead, statusWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	entry, err := os.StartProcess(self, []string{entryName}, &os.ProcAttr{Dir: "/", Env: selfEnv,
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, ordersRead, statusWrite}, Sys: &syscall.SysProcAttr{Setsid: true}})
	ordersRead.Close()  //nolint:errcheck // the entry has its own
	statusWrite.Close() //nolint:errcheck // the entry has its own
	if err != nil {
		return err
	}
	k.leader = entry.Pid
	// Held open, so that the kernel does not make this directory anew when memory
	// is short: the entry's rule is about the one that is there now.
	unix.Open(fmt.Sprintf("/proc/%d", k.leader), unix.O_PATH|unix.O_CLOEXEC, 0) //nolint:errcheck // the program reads about itself for convenience only
	entry.Release()                                                             //nolint:errcheck // waited for by number, as all of the tree
	if err := letGo(); err != nil {
		return err
	}
	err = json.NewEncoder(ordersWrite).Encode(o)
	ordersWrite.Close() //nolint:errcheck // all was written
	why, readErr := io.ReadAll(io.LimitReader(statusRead, 4096))
	statusRead.Close() //nolint:errcheck // all was read
	switch {
	case len(why) > 0:
		return errors.New(string(why))
	case err != nil:
		return err
	}
	return readErr
}

// letGo lets go of the program's ends of the pipes, so that the host sees their
// end.
func letGo() error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	for fd := range 3 {
		if err := unix.Dup3(int(null.Fd()), fd, 0); err != nil {
			return err
		}
	}
	return nil
}

// run waits for ends and for words, until no process is left.
func (k *keeper) run(died <-chan os.Signal, said <-chan word) {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	for {
		was := k.exited
		if !k.reap() {
			return
		}
		if k.exited && !was && !k.killing {
			// Whoever is left serves nobody.
			signalTree(unix.SIGTERM)
			timer.Reset(leaving)
		}
		select {
		case <-died:
		case w, ok := <-said:
			if ok && w == wordTerm {
				signalTree(unix.SIGTERM)
				continue
			}
			if !ok {
				said = nil
			}
			k.killing = true
			killTree()
			timer.Reset(again)
		case <-timer.C:
			k.killing = true
			killTree()
			timer.Reset(again)
		}
	}
}

// endTree ends all processes at once.
func (k *keeper) endTree(died <-chan os.Signal) {
	kill := make(chan word)
	close(kill)
	k.run(died, kill)
}

// reap takes note of all that ended and reports whether any process is left.
func (k *keeper) reap() bool {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return false
		case pid == 0:
			return true
		}
		if pid == k.leader {
			k.exited = true
			k.host.Encode(report{Exited: statusText(status)}) //nolint:errcheck // without a host nobody asks
		}
	}
}

func statusText(s unix.WaitStatus) string {
	if s.Signaled() {
		return "ended by " + unix.SignalName(s.Signal())
	}
	return fmt.Sprintf("exit status %d", s.ExitStatus())
}
