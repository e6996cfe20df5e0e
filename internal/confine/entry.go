package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	llsyscall "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

// outOfMemory makes the kernel, when memory is short, end a program rather than
// the host or its database.
const outOfMemory = "500"

// enter is the main function of the entry: it gives up what the program may not
// have, and becomes the program. It returns when that fails.
func enter(in, status *os.File) int {
	runtime.LockOSThread() // what the thread gives up is what the program lacks
	unix.CloseOnExec(entryOrders)
	unix.CloseOnExec(entryStatus)
	var o orders
	err := json.NewDecoder(in).Decode(&o)
	if err == nil {
		err = o.enter()
	}
	fmt.Fprint(status, err) //nolint:errcheck // without a keeper nobody asks
	return 125
}

func (o *orders) enter() error {
	os.WriteFile("/proc/self/oom_score_adj", []byte(outOfMemory), 0) //nolint:errcheck // a courtesy
	// Opened before the user changes, who need not reach what lies above.
	rules, err := o.ruleset()
	if err != nil {
		return err
	}
	if err := o.dropPrivileges(); err != nil {
		return err
	}
	if err := o.reachable(); err != nil {
		return err
	}
	tasks := 0
	if !o.Who.Own {
		tasks = tasksOf(o.Who.UID)
	}
	if rules >= 0 {
		if err := llsyscall.LandlockRestrictSelf(rules, 0); err != nil {
			return fmt.Errorf("landlock_restrict_self: %w", err)
		}
	}
	if !o.Network {
		if err := closeNetwork(); err != nil {
			return err
		}
	}
	// A change of user clears it, so it comes after that.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("end with the keeper: %w", err)
	}
	if os.Getppid() != o.Keeper {
		return errors.New("the keeper is gone")
	}
	closeOnExec()
	if err := o.Limits.apply(tasks); err != nil {
		return err
	}
	err = syscall.Exec(o.Path, o.Args, o.Env)
	if errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%s may not be executed by user %d: let it read and execute that file and its directories, or declare another user of the runtime", o.Path, o.Who.UID)
	}
	return fmt.Errorf("execute %s: %w", o.Path, err)
}

// dropPrivileges changes the user and gives up every capability, for good.
func (o *orders) dropPrivileges() error {
	if os.Geteuid() == 0 {
		for c := range uintptr(64) {
			if unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0) != nil {
				break // beyond the last, or without SETPCAP: no_new_privs holds as well
			}
		}
	}
	if o.Who.Switch {
		if err := syscall.Setgroups([]int{}); err != nil {
			return fmt.Errorf("leave all groups: %w", err)
		}
		if err := syscall.Setresgid(o.Who.GID, o.Who.GID, o.Who.GID); err != nil {
			return fmt.Errorf("become group %d: %w", o.Who.GID, err)
		}
		if err := syscall.Setresuid(o.Who.UID, o.Who.UID, o.Who.UID); err != nil {
			return fmt.Errorf("become user %d: %w", o.Who.UID, err)
		}
	}
	unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) //nolint:errcheck // before Linux 4.3 there are none
	var none [2]unix.CapUserData
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
		return fmt.Errorf("give up all capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	return nil
}

// reachable makes sure that the user reaches what was declared, and enters the
// working directory.
func (o *orders) reachable() error {
	if err := unix.Chdir(o.Private); err != nil {
		return fmt.Errorf("user %d does not reach the private directory %s (%w): set TMPDIR to a directory that everybody may enter, or declare another user of the runtime", o.Who.UID, o.Private, err)
	}
	for _, want := range []struct {
		name  string
		paths []string
		mode  uint32
	}{{"read", o.ReadRoots, unix.R_OK}, {"write", o.WriteRoots, unix.W_OK}} {
		for _, p := range want.paths {
			if err := unix.Faccessat(unix.AT_FDCWD, p, want.mode, unix.AT_EACCESS); err != nil {
				return fmt.Errorf("user %d may not %s the declared root %s (%w): change its permissions, or declare another user of the runtime", o.Who.UID, want.name, p, err)
			}
		}
	}
	if o.Dir != "" {
		if err := unix.Chdir(o.Dir); err != nil {
			return fmt.Errorf("user %d does not reach the working directory %s: %w", o.Who.UID, o.Dir, err)
		}
	}
	return nil
}

// apply sets the limits, never above those that the host has itself. tasks is
// how many processes and threads the user has already.
func (l Limits) apply(tasks int) error {
	for _, r := range []struct {
		name     string
		resource int
		value    uint64
	}{
		{"CORE", unix.RLIMIT_CORE, 0},
		{"NOFILE", unix.RLIMIT_NOFILE, l.OpenFiles},
		{"NPROC", unix.RLIMIT_NPROC, l.Processes + uint64(tasks)},
		{"CPU", unix.RLIMIT_CPU, l.CPUSeconds},
		{"FSIZE", unix.RLIMIT_FSIZE, l.FileSize},
		{"DATA", unix.RLIMIT_DATA, l.Memory},
		{"AS", unix.RLIMIT_AS, l.AddressSpace},
	} {
		var have syscall.Rlimit
		if err := syscall.Getrlimit(r.resource, &have); err != nil {
			return fmt.Errorf("read the limit %s: %w", r.name, err)
		}
		v := min(r.value, have.Max)
		if err := syscall.Setrlimit(r.resource, &syscall.Rlimit{Cur: v, Max: v}); err != nil {
			return fmt.Errorf("set the limit %s: %w", r.name, err)
		}
	}
	return nil
}

// tasksOf counts the processes and threads of a user, which is what the kernel
// compares with the limit.
func tasksOf(uid int) (n int) {
	entries, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		return 0
	}
	for _, path := range entries {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		threads, owned := 0, false
		for line := range strings.Lines(string(b)) {
			name, value, _ := strings.Cut(line, ":")
			switch f := strings.Fields(value); {
			case len(f) == 0:
			case name == "Uid":
				owned = f[0] == strconv.Itoa(uid)
			case name == "Threads":
				threads, _ = strconv.Atoi(f[0]) // a number, by the kernel
			}
		}
		if owned {
			n += threads
		}
	}
	return n
}
