package confine

import (
	"fmt"
	"os"

	"github.com/landlock-lsm/go-landlock/landlock"
	llsyscall "github.com/landlock-lsm/go-landlock/landlock/syscall"
)

// What every program may read and execute: the system's programs and libraries,
// what finds them, certificates and time zones, and what the kernel tells about
// the machine and about the program itself. Accounts, names of hosts and all else
// in /etc are not there, and neither are other processes, whose command lines may
// tell secrets. A process that the program starts finds its own directory in
// /proc closed, too; a runtime that needs it declares /proc.
var (
	systemRead = []string{
		"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
		"/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld-musl-x86_64.path", "/etc/ld-musl-aarch64.path",
		"/etc/alternatives", "/etc/localtime", "/etc/timezone", "/etc/locale.alias",
		"/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/crypto-policies",
		"/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/loadavg", "/proc/version", "/proc/filesystems",
		"/proc/sys/vm", "/proc/sys/kernel/random", "/proc/sys/kernel/osrelease", "/proc/sys/kernel/ngroups_max", "/proc/sys/kernel/cap_last_cap",
		"/proc/sys/kernel/pid_max", "/proc/sys/net/core/somaxconn",
		"/sys/devices/system/cpu", "/sys/fs/cgroup", "/sys/kernel/mm/transparent_hugepage",
		"/dev/random", "/dev/urandom",
	}
	systemWrite = []string{"/dev/null", "/dev/zero", "/dev/full"}
	// networkRead is for programs that may use the network.
	networkRead = []string{"/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols", "/run/systemd/resolve"}
)

// The versions of the kernel's interface from which on Landlock restricts more.
const (
	abiFiles    = 1
	abiRename   = 2
	abiTruncate = 3
	abiTCP      = 4
	abiIoctl    = 5
	abiScope    = 6
	abiUnix     = 9
	abiUDP      = 10
)

// abi is the kernel's version, 0 without Landlock.
func abi() int {
	v, err := llsyscall.LandlockGetABIVersion()
	if err != nil {
		return 0
	}
	return v
}

// Confinement tells what the kernel holds a program to, beside its user and its
// limits, and what this kernel cannot.
func Confinement(p Program) (enforced, lacking []string) {
	return confinement(p, abi(), mayFilter())
}

func confinement(p Program, version int, filter bool) (enforced, lacking []string) {
	if filter && !p.Network {
		enforced = append(enforced, "no network")
	}
	for _, x := range []struct {
		from int
		what string
		off  bool
	}{
		{0, "no new privileges", false},
		{abiFiles, "files", false},
		{abiTruncate, "truncation", false},
		{abiTCP, "no TCP", filter || p.Network},
		{abiIoctl, "devices", false},
		{abiScope, "signals and abstract sockets", false},
		{abiUnix, "sockets in the file system", false},
		{abiUDP, "no UDP", filter || p.Network},
	} {
		switch {
		case x.off:
		case version >= x.from:
			enforced = append(enforced, x.what)
		default:
			lacking = append(lacking, x.what)
		}
	}
	return enforced, lacking
}

// ruleset makes the Landlock rules of a program; -1 where the kernel has none.
func (o *orders) ruleset() (int, error) {
	version := abi()
	config := landlock.V11
	if o.Network {
		config.HandledAccessNet = 0
	}
	var rules []landlock.Rule
	allow := func(paths []string, write, must bool) error {
		for _, p := range paths {
			info, err := os.Stat(p)
			if err != nil {
				if must {
					return fmt.Errorf("a declared root: %w", err)
				}
				continue
			}
			rules = append(rules, rule(p, info.IsDir(), write, version))
		}
		return nil
	}
	declared := append([]string{o.Path}, o.ReadRoots...)
	if o.Dir != "" {
		declared = append(declared, o.Dir)
	}
	system := systemRead
	if o.Network {
		system = append(append([]string(nil), systemRead...), networkRead...)
	}
	if err := allow(declared, false, true); err != nil {
		return -1, err
	}
	if err := allow(append([]string{o.Private}, o.WriteRoots...), true, true); err != nil {
		return -1, err
	}
	allow(system, false, false)     //nolint:errcheck // what is missing is let out
	allow(systemWrite, true, false) //nolint:errcheck // what is missing is let out
	fd, _, err := config.BestEffort().NewRulesetFD(rules...)
	if err != nil {
		return -1, fmt.Errorf("make the rules of Landlock: %w", err)
	}
	return fd, nil
}

func rule(path string, dir, write bool, version int) landlock.Rule {
	switch {
	case dir && write && version >= abiRename:
		return landlock.RWDirs(path).WithRefer()
	case dir && write:
		return landlock.RWDirs(path)
	case dir:
		return landlock.RODirs(path)
	case write:
		return landlock.RWFiles(path)
	}
	return landlock.ROFiles(path)
}
