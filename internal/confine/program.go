package confine

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Program is what to start and what it may have.
type Program struct {
	// Command is the program and its arguments. A program without a slash is
	// looked up in the PATH of Env.
	Command []string
	// Env is the whole environment, over PATH, HOME, TMPDIR and LANG.
	Env map[string]string
	// ReadRoots and WriteRoots are the files and directories that the program may
	// use, beside itself, the system's programs and libraries, and its private
	// directory. They must exist.
	ReadRoots, WriteRoots []string
	// Dir is the working directory, which may be read; empty means the private
	// one.
	Dir string
	// Network allows sockets beyond this machine's own.
	Network bool
	// User is a name, a number, or two numbers with a colon between user and
	// group. Empty means: if the host is root, a user that no other living program
	// has, else the host's own.
	User string
	// Limits bound what it uses; zero members mean defaults.
	Limits Limits
}

// Limits are what the kernel bounds, for each process of a program; Processes is
// for all of them.
type Limits struct {
	// Memory bounds what a process can write to and shares with nobody, in bytes.
	Memory uint64
	// AddressSpace bounds all that a process maps, in bytes. Runtimes with garbage
	// collectors reserve far more than they use.
	AddressSpace uint64
	// FileSize bounds a file that it writes, in bytes.
	FileSize uint64
	// OpenFiles bounds descriptors.
	OpenFiles uint64
	// Processes bounds processes and threads.
	Processes uint64
	// CPUSeconds bounds the processor time that a process uses in its life.
	CPUSeconds uint64
}

const (
	defaultMemory       = 2048 << 20
	defaultAddressSpace = 65536 << 20
	defaultFileSize     = 1024 << 20
	defaultOpenFiles    = 1024
	defaultProcesses    = 256
	defaultCPUTime      = time.Hour
)

func (l Limits) withDefaults() Limits {
	for _, d := range []struct {
		v    *uint64
		when uint64
	}{
		{&l.Memory, defaultMemory}, {&l.AddressSpace, defaultAddressSpace}, {&l.FileSize, defaultFileSize},
		{&l.OpenFiles, defaultOpenFiles}, {&l.Processes, defaultProcesses}, {&l.CPUSeconds, uint64(defaultCPUTime / time.Second)},
	} {
		if *d.v == 0 {
			*d.v = d.when
		}
	}
	return l
}

const systemPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// environment returns the clean environment; nothing is inherited.
func (p Program) environment(home string) map[string]string {
	env := map[string]string{"PATH": systemPath, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
	for k, v := range p.Env {
		env[k] = v
	}
	return env
}

// lookup finds the program in its own PATH.
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

// The users of programs whose user is not declared, where the host is root: the
// keeper's process number, which no other living process has, is added to the
// first. The range belongs to nobody by the usual conventions.
const (
	firstUser = 1_900_000_000
	mostUsers = 1 << 22 // the kernel's greatest number of processes
	// nobody is the user where a user namespace does not have that range.
	nobody = 65534
)

// identity is the user that a program runs as.
type identity struct {
	// Switch says that the user is another than the host's.
	Switch bool `json:"switch"`
	// Own asks the keeper for the user of its own number.
	Own      bool `json:"own"`
	UID, GID int
}

// identity decides the user of a program.
func (p Program) identity() (identity, error) {
	root := os.Geteuid() == 0
	if p.User == "" {
		if !root {
			return identity{UID: os.Geteuid(), GID: os.Getegid()}, nil
		}
		if err := maySwitch(); err != nil {
			return identity{}, err
		}
		if b, err := os.ReadFile("/proc/self/uid_map"); err == nil && !maps(string(b), firstUser, mostUsers) {
			return identity{Switch: true, UID: nobody, GID: nobody}, nil
		}
		return identity{Switch: true, Own: true}, nil
	}
	id, err := parseUser(p.User)
	if err != nil {
		return identity{}, err
	}
	switch {
	case id.UID == os.Geteuid():
		id.Switch = root
	case !root:
		return identity{}, fmt.Errorf("the runtime's user is %s, and only root can run programs as another user", p.User)
	default:
		id.Switch = true
		err = maySwitch()
	}
	return id, err
}

// parseUser reads a name, "uid" or "uid:gid".
func parseUser(s string) (identity, error) {
	u, g, two := strings.Cut(s, ":")
	uid, err := strconv.ParseUint(u, 10, 31)
	if err != nil {
		who, err := user.Lookup(s)
		if err != nil {
			return identity{}, fmt.Errorf("the runtime's user %q does not exist here", s)
		}
		u, g, two = who.Uid, who.Gid, true
		uid, _ = strconv.ParseUint(u, 10, 31) // numbers on this system
	}
	gid := uid
	if two {
		if gid, err = strconv.ParseUint(g, 10, 31); err != nil {
			return identity{}, fmt.Errorf("the runtime's user %q has no group that is a number", s)
		}
	} else if who, err := user.LookupId(u); err == nil {
		gid, _ = strconv.ParseUint(who.Gid, 10, 31) // a number on this system
	}
	return identity{UID: int(uid), GID: int(gid)}, nil
}

// maps reports whether a map of a user namespace has all of a range.
func maps(table string, first, count uint64) bool {
	for line := range strings.Lines(table) {
		var inside, outside, n uint64
		if _, err := fmt.Sscan(line, &inside, &outside, &n); err == nil && inside <= first && first+count <= inside+n {
			return true
		}
	}
	return false
}

// maySwitch says what root lacks to run and to end programs of other users.
func maySwitch() error {
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return nil // what it lacks shows when it is used
	}
	for _, c := range []uint{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_KILL, unix.CAP_SETGID, unix.CAP_SETUID} {
		if data[0].Effective&(1<<c) == 0 {
			return errors.New("root lacks the capabilities CHOWN, DAC_OVERRIDE, KILL, SETGID and SETUID here, without which it cannot run programs as users of their own: " +
				"add them, run the host as an ordinary user, or declare the runtime's user as root")
		}
	}
	return nil
}
