package confine

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestStart_CleanEnvironment(t *testing.T) {
	t.Setenv("BULKHEAD_PLANTED_SECRET", "s3cret")
	p := shell(`env; echo dir: $(pwd) $(stat -c %a .); cat /proc/$PPID/environ; touch own; mkdir -m 0 closed`)
	p.Env = map[string]string{"OWN": "1", "LANG": "C"}
	out, errs, status := run(t, p)
	if status != "exit status 0" {
		t.Errorf("%s: %s", status, errs)
	}
	if strings.Contains(out+errs, "s3cret") || strings.Contains(out+errs, "PLANTED") {
		t.Errorf("it sees the host's environment: %q", out)
	}
	for line := range strings.Lines(out) {
		if !regexp.MustCompile(`^(PATH|HOME|TMPDIR|LANG|OWN|PWD|SHLVL|_|OLDPWD)=|^dir:`).MatchString(line) {
			t.Errorf("it sees %q", line)
		}
	}
	wantLine(t, out, "OWN=1")
	wantLine(t, out, "LANG=C")
	if !regexp.MustCompile(`(?m)^dir: /\S+/bulkhead-stdio-\d+ 700$`).MatchString(out) {
		t.Errorf("no private directory of mode 0700: %q", out)
	}
}

func TestStart_NothingIsInherited(t *testing.T) {
	leak, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer leak.Close()
	leaked := carelessly(t, leak)
	defer leaked()
	// The shell's own list: opening it takes the number 3.
	out, _, _ := run(t, shell(`exec ls /proc/self/fd`))
	if got := strings.Fields(out); len(got) != 4 {
		t.Errorf("it has %q open", got)
	}
}

func TestStart_NoPrivileges(t *testing.T) {
	t.Parallel()
	r := start(t, shell(`grep -e ^NoNewPrivs -e ^Cap -e ^Uid -e ^Gid -e ^Groups /proc/$$/status | tr -s '\t ' ' '; read x`))
	eventually(t, "it has told", func() bool { return strings.Contains(r.said(), "NoNewPrivs") })
	out := r.said()
	wantLine(t, out, "NoNewPrivs: 1")
	for _, c := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		wantLine(t, out, c+": 0000000000000000")
	}
	wantLine(t, out, fmt.Sprintf("Uid: %[1]d %[1]d %[1]d %[1]d", r.UID))
	if group, err := groupOf(r.PID); err != nil || group != r.PID {
		t.Errorf("group %d of process %d: %v", group, r.PID, err)
	}
	if os.Geteuid() != 0 {
		return
	}
	wantLine(t, out, "CapBnd: 0000000000000000")
	wantLine(t, out, "Groups: ")
	other := start(t, shell(`read x`))
	if r.UID < firstUser || other.UID == r.UID {
		t.Errorf("users %d and %d", r.UID, other.UID)
	}
}

func TestStart_SetuidProgramGainsNothing(t *testing.T) {
	t.Parallel()
	dir := openDir(t)
	id, err := os.ReadFile("/usr/bin/id")
	if err != nil {
		t.Fatal(err)
	}
	// As root it is a program that would make root of anybody.
	path := write(t, filepath.Join(dir, "id"), string(id), 0o4755)
	p := shell(`"$1" -u`, path)
	p.ReadRoots = []string{dir}
	r := start(t, p)
	<-r.Gone()
	wantLine(t, r.said(), fmt.Sprint(r.UID))
	if os.Geteuid() == 0 {
		// Root that was asked for has no capability: it cannot become anybody.
		p := shell(`grep ^CapEff /proc/$$/status; chown 1 . || echo refused`)
		p.User = "root"
		out, errs, _ := run(t, p)
		wantLine(t, out, "CapEff:\t0000000000000000")
		wantLine(t, out, "refused")
		_ = errs
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	needs(t, abiTruncate)
	base := openDir(t)
	for _, d := range []string{"read", "write", "write/a", "write/b", "out"} {
		if err := os.MkdirAll(filepath.Join(base, d), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(base, d), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(base, "read/f"), "readable\n", 0o666)
	write(t, filepath.Join(base, "out/f"), "outside\n", 0o666)
	if err := os.Symlink(filepath.Join(base, "out/f"), filepath.Join(base, "write/link")); err != nil {
		t.Fatal(err)
	}
	p := shell(`cd "$1"; try() { name=$1; shift; if "$@" >/dev/null 2>&1; then echo "$name: yes"; else echo "$name: no"; fi; }
put() { echo x > "$1"; }
try 'read root' cat read/f
try 'write to read root' put read/new
try 'overwrite in read root' put read/f
try 'truncate in read root' truncate -s 0 read/f
try 'read outside' cat out/f
try 'list outside' ls out
try 'write outside' put out/new
try 'remove outside' rm -f out/f
try 'write root' put write/a/f
try 'rename within' mv write/a/f write/b/f
try 'rename outside' mv write/b/f out/g
try 'link outside' ln out/f write/hard
try 'through a symbolic link' cat write/link
try 'write through it' put write/link
try 'private' put "$HOME/f"
try 'passwd' cat /etc/passwd
try 'the root' ls /
try 'tmp' put /tmp/bulkhead-planted
try 'host process' cat /proc/$PPID/cmdline
try 'null' put /dev/null`, base)
	p.ReadRoots, p.WriteRoots = []string{base + "/read"}, []string{base + "/write"}
	out, errs, status := run(t, p)
	if status != "exit status 0" || errs != "" {
		t.Errorf("%s: %s", status, errs)
	}
	want := "read root,write root,rename within,private,null"
	var may []string
	for line := range strings.Lines(out) {
		if name, ok := strings.CutSuffix(line, ": yes\n"); ok {
			may = append(may, name)
		}
	}
	if got := strings.Join(may, ","); got != want || strings.Count(out, "\n") != 20 {
		t.Errorf("it may %s\nwant   %s\nof %q", got, want, out)
	}
	if b, err := os.ReadFile(base + "/out/f"); string(b) != "outside\n" {
		t.Errorf("outside is %q, %v", b, err)
	}
}

func TestNetwork(t *testing.T) {
	t.Parallel()
	if !mayFilter() {
		t.Skip("the kernel does not filter system calls")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for network, want := range map[bool]string{false: "permission denied", true: "<nil>"} {
		p := asTests(Program{Command: []string{self0(t), "dial", l.Addr().String()}, Network: network})
		out, errs, _ := run(t, p)
		lines := strings.Split(out, "\n")
		if len(lines) != 3 || !strings.HasSuffix(lines[0], want) || !strings.HasPrefix(lines[0], "dial:") || !network && !strings.HasSuffix(lines[1], want) {
			t.Errorf("network %v: %q %q", network, out, errs)
		}
	}
}

func TestLimits_Kernel(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, script string
		limits       Limits
		want         func(out, errs, status string) bool
	}{
		{"memory", `x=$(head -c 300000000 /dev/zero | tr '\0' x); echo got ${#x}`, Limits{Memory: 64 << 20},
			func(out, _, _ string) bool { return !strings.Contains(out, "got 300000000") }},
		{"address space", `x=$(head -c 300000000 /dev/zero | tr '\0' x); echo got ${#x}`, Limits{AddressSpace: 128 << 20},
			func(out, _, _ string) bool { return !strings.Contains(out, "got 300000000") }},
		{"file", `head -c 2000000 /dev/zero > f; stat -c %s f`, Limits{FileSize: 1 << 20},
			func(out, _, _ string) bool { return out == "1048576\n" }},
		{"files", `ulimit -n; ulimit -Hn`, Limits{OpenFiles: 32}, func(out, _, _ string) bool { return out == "32\n32\n" }},
		{"processes", `i=0; while sleep 1000 & do i=$((i+1)); echo $i; done`, Limits{Processes: 24}, func(out, errs, _ string) bool {
			n := strings.Count(out, "\n")
			// The user's other processes come and go, where the program has no user of its own.
			return n == 23 || os.Geteuid() != 0 && n < 24*10
		}},
		{"core", `ulimit -c; ulimit -Hc; ulimit -t`, Limits{CPUSeconds: 77}, func(out, _, _ string) bool { return out == "0\n0\n77\n" }},
		{"processor time", `while :; do :; done`, Limits{CPUSeconds: 1},
			func(_, _, status string) bool { return status == "ended by SIGXCPU" || status == "ended by SIGKILL" }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := shell(tt.script)
			p.Limits = tt.limits
			if out, errs, status := run(t, p); !tt.want(out, errs, status) {
				t.Errorf("%q %q %s", out, errs, status)
			}
		})
	}
}

func TestStart_SaysWhyNot(t *testing.T) {
	t.Parallel()
	root := os.Geteuid() == 0
	dir := openDir(t)
	closed := filepath.Join(dir, "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(closed, "program"), "#!/bin/sh\n", 0o700)
	notExecutable := write(t, filepath.Join(dir, "text"), "text", 0o644)
	for _, tt := range []struct {
		name, want string
		skip       bool
		p          Program
	}{
		{"no command", "declares no command", false, Program{}},
		{"not in PATH", "not in the PATH", false, Program{Command: []string{"no-such-program-anywhere"}}},
		{"missing", "no such file", false, Program{Command: []string{"/nonexistent"}}},
		{"not executable", "may not be executed by user", false, Program{Command: []string{notExecutable}}},
		{"missing root", "a declared root: stat /nonexistent", false, Program{Command: []string{"/bin/true"}, ReadRoots: []string{"/nonexistent"}}},
		{"unknown user", "does not exist here", false, Program{Command: []string{"/bin/true"}, User: "no-such-user"}},
		{"another user", "only root can", root, Program{Command: []string{"/bin/true"}, User: "12345"}},
		{"closed program", "may not be executed by user", !root, Program{Command: []string{filepath.Join(closed, "program")}}},
		{"closed root", "may not read the declared root", !root, Program{Command: []string{"/bin/true"}, ReadRoots: []string{closed}}},
		{"root not writable", "may not write the declared root", !root, Program{Command: []string{"/bin/true"}, WriteRoots: []string{dir}}},
		{"working directory", "does not reach the working directory", !root, Program{Command: []string{"/bin/true"}, Dir: closed}},
	} {
		if tt.skip {
			continue
		}
		private := openDir(t)
		x, err := Start(tt.p, private)
		if err == nil {
			go x.Reap()
			x.End(0)
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		if left, _ := os.ReadDir(private); len(left) > 0 {
			t.Errorf("%s: %v is left", tt.name, left)
		}
	}
	if !root {
		return
	}
	if _, err := Start(Program{Command: []string{"/bin/true"}}, closed); err == nil || !strings.Contains(err.Error(), "does not reach the private directory") {
		t.Errorf("closed directory for private ones: %v", err)
	}
}

func TestConfinement_TellsWhatTheKernelLacks(t *testing.T) {
	t.Parallel()
	for version, want := range map[int]string{
		0:  "no new privileges|files, truncation, no TCP, devices, signals and abstract sockets, sockets in the file system, no UDP",
		4:  "no network, no new privileges, files, truncation|devices, signals and abstract sockets, sockets in the file system",
		3:  "no new privileges, files, truncation|no TCP, devices, signals and abstract sockets, sockets in the file system, no UDP",
		10: "no new privileges, files, truncation, no TCP, devices, signals and abstract sockets, sockets in the file system, no UDP|",
	} {
		enforced, lacking := confinement(Program{}, version, version == 4)
		if got := strings.Join(enforced, ", ") + "|" + strings.Join(lacking, ", "); got != want {
			t.Errorf("version %d: %s", version, got)
		}
	}
	if enforced, lacking := confinement(Program{Network: true}, 0, true); strings.Contains(strings.Join(append(enforced, lacking...), ","), "TCP") {
		t.Error("a program with the network is told to have none")
	}
}

func TestMaps(t *testing.T) {
	t.Parallel()
	for table, want := range map[string]bool{
		"         0          0 4294967295\n": true,
		"0 100000 65536\n":                   false,
		"0 1000 1\n1 100000 4294967290\n":    true,
		"":                                   false,
		"x y z\n":                            false,
	} {
		if got := maps(table, firstUser, mostUsers); got != want {
			t.Errorf("%q: %v", table, got)
		}
	}
}
