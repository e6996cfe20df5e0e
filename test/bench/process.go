package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// child is a process of the run. It dies with this one.
type child struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.Closer
	exited chan struct{}
	// line is the first line of its standard output, when that was asked for.
	line string
}

// startTimeout bounds the start of a process until it is ready.
const startTimeout = 60 * time.Second

// start runs a program with a clean environment but env. With wantLine it waits
// for the first line of the output. Standard error goes to a file in dir.
func start(ctx context.Context, dir, name string, env []string, wantLine bool, path string, args ...string) (*child, error) {
	log, err := os.Create(filepath.Join(dir, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(path, args...)
	cmd.Env, cmd.Stderr = append([]string{}, env...), log // not nil, which would mean this process's
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	c := &child{name: name, cmd: cmd, exited: make(chan struct{})}
	var out io.ReadCloser
	if c.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if wantLine {
		if out, err = cmd.StdoutPipe(); err != nil {
			return nil, err
		}
	}
	began, line := make(chan error, 1), make(chan string, 1)
	go func() {
		// The parent-death signal comes when the thread ends that started the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(c.exited)
		err := cmd.Start()
		began <- err
		if err != nil {
			return
		}
		if out != nil {
			s, _ := bufio.NewReader(io.LimitReader(out, 4096)).ReadString('\n')
			line <- s
		}
		_ = cmd.Wait() // how it ended is seen by what it no longer answers
	}()
	if err := <-began; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	if !wantLine {
		return c, nil
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	select {
	case c.line = <-line:
		return c, nil
	case <-ctx.Done():
		return nil, errors.Join(fmt.Errorf("%s did not start: %w", name, ctx.Err()), c.stop())
	}
}

// stop asks the child to end and waits; after ten seconds it is killed.
func (c *child) stop() error {
	c.stdin.Close()
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.exited:
		return nil
	case <-time.After(10 * time.Second):
	}
	_ = c.cmd.Process.Kill()
	<-c.exited
	return fmt.Errorf("%s had to be killed", c.name)
}

func (c *child) pid() int { return c.cmd.Process.Pid }

// tick is the unit of times in /proc, USER_HZ, which is 100 on every platform
// that Go runs on.
const tick = 10 * time.Millisecond

// stat is what /proc/PID/stat tells of a process: its parent, its own CPU time,
// and that of children that it has waited for.
type stat struct {
	parent       int
	own, waitFor time.Duration
}

func readStat(pid int) (stat, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	// The name in parentheses may hold anything; what follows the last one counts.
	f := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(f) < 15 {
		return stat{}, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(f))
	}
	at := func(i int) int { n, _ := strconv.Atoi(f[i-3]); return n } // fields are counted from 1; the kernel writes numbers
	return stat{parent: at(4), own: tick * time.Duration(at(14)+at(15)), waitFor: tick * time.Duration(at(16)+at(17))}, nil
}

// cpuOf returns the CPU time of one process.
func cpuOf(pid int) time.Duration {
	s, err := readStat(pid)
	if err != nil {
		return 0
	}
	return s.own
}

// cpuOfTree returns the CPU time of a process and of all below it, those that
// ended and were waited for included.
func cpuOfTree(root int) time.Duration {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	all := make(map[int]stat, len(dirs))
	for _, d := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(d))
		if s, err := readStat(pid); err == nil {
			all[pid] = s
		}
	}
	var sum time.Duration
	for pid, s := range all {
		for p := pid; p > 1; p = all[p].parent {
			if p == root {
				sum += s.own + s.waitFor
				break
			}
		}
	}
	return sum
}

// busy returns the CPU time that the whole machine spent on work.
func busy() time.Duration {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(raw), "\n")
	f := strings.Fields(first)
	var sum int
	for i := 1; i < len(f); i++ {
		if i == 4 || i == 5 || i > 8 { // idle, iowait; guest is in user already
			continue
		}
		n, _ := strconv.Atoi(f[i])
		sum += n
	}
	return tick * time.Duration(sum)
}

// residentOf returns the resident memory of a process, and the part of it that
// is its own and not of files, in bytes.
func residentOf(pid int) (resident, anonymous int64) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0
	}
	for l := range strings.Lines(string(raw)) {
		name, rest, _ := strings.Cut(l, ":")
		n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		switch name {
		case "VmRSS":
			resident = n << 10
		case "RssAnon":
			anonymous = n << 10
		}
	}
	return resident, anonymous
}
