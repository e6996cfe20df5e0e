package confine

import (
	"fmt"
	"os"
	"reflect"
	"runtime"

	"golang.org/x/sys/unix"
)

// The parts of struct seccomp_data that the filter reads. Both processors that are
// served put the low half of an argument first.
const (
	seccompNumber   = 0
	seccompArch     = 4
	seccompArgument = 16
)

// seccompArches are the processors for which the filter can be made; their numbers
// of calls come from unix.
var seccompArches = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// mayFilter reports whether the kernel filters system calls.
func mayFilter() bool {
	_, err := os.Stat("/proc/sys/kernel/seccomp/actions_avail")
	return err == nil && seccompArches[runtime.GOARCH] != 0
}

// closeNetwork leaves a program only sockets within the machine: of the file
// system, and to ask the kernel about its interfaces. Landlock's rules are about
// TCP, and about UDP on newer kernels; other protocols, as multipath TCP, pass
// them by.
func closeNetwork() error {
	if !mayFilter() {
		return nil // Confinement tells
	}
	const x32 = 0x40000000 // marks the numbers of another interface of amd64
	deny := func(e unix.Errno) uint32 { return unix.SECCOMP_RET_ERRNO | uint32(e) }
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	equal := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	end := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	filter := []unix.SockFilter{
		load(seccompArch),
		equal(seccompArches[runtime.GOARCH], 1, 0),
		end(deny(unix.ENOSYS)),
		load(seccompNumber),
		{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: x32, Jt: 0, Jf: 1},
		end(deny(unix.ENOSYS)),
		equal(unix.SYS_IO_URING_SETUP, 0, 1), // which opens sockets, too
		end(deny(unix.ENOSYS)),
		equal(unix.SYS_SOCKET, 1, 0),
		end(unix.SECCOMP_RET_ALLOW),
		load(seccompArgument),
		equal(unix.AF_UNIX, 2, 0),
		equal(unix.AF_NETLINK, 1, 0),
		end(deny(unix.EACCES)),
		end(unix.SECCOMP_RET_ALLOW),
	}
	program := &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, reflect.ValueOf(program).Pointer(), 0, 0)
	runtime.KeepAlive(program)
	if err != nil {
		return fmt.Errorf("close the network: %w", err)
	}
	return nil
}
