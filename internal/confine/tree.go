package confine

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// rounds bounds the attempts to stop a tree that goes on to grow.
const rounds = 64

// descendants returns the living processes below this one. It reads the table of
// all processes, since not every kernel tells a process's children.
func descendants() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	children := map[int][]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if parent, living := parentOf(pid); living {
			children[parent] = append(children[parent], pid)
		}
	}
	var out []int
	next := []int{os.Getpid()}
	for len(next) > 0 {
		more := children[next[0]]
		out, next = append(out, more...), append(next[1:], more...)
	}
	return out
}

// parentOf reads the parent of a process. A zombie is there no longer, and has no
// children.
func parentOf(pid int) (parent int, living bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false
	}
	// pid (name) state parent …; the name may hold anything.
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return 0, false
	}
	f := bytes.Fields(b[i+1:])
	if len(f) < 2 || f[0][0] == 'Z' || f[0][0] == 'X' {
		return 0, false
	}
	parent, err = strconv.Atoi(string(f[1]))
	return parent, err == nil
}

// signalTree sends a signal to every descendant.
func signalTree(sig unix.Signal) {
	for _, pid := range descendants() {
		unix.Kill(pid, sig) //nolint:errcheck // it has ended meanwhile
	}
}

// killTree ends every descendant. They are stopped first: what is stopped starts
// nothing, and still counts against the bound of processes, so that a tree that
// grows as fast as it can comes to rest before it is ended.
func killTree() {
	var stopped []int
	for range rounds {
		all := descendants()
		fresh := slices.DeleteFunc(slices.Clone(all), func(pid int) bool { return slices.Contains(stopped, pid) })
		if len(fresh) == 0 || len(all) == 1 {
			break
		}
		for _, pid := range fresh {
			unix.Kill(pid, unix.SIGSTOP) //nolint:errcheck // it has ended meanwhile
		}
		stopped = append(stopped, fresh...)
	}
	signalTree(unix.SIGKILL)
}

// removeTree removes a directory with all that is in it, also where its owner
// took their own permissions away. Nobody may work in it any longer.
func removeTree(dir string) {
	if os.RemoveAll(dir) == nil {
		return
	}
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error { //nolint:errcheck // the removal tells
		if d != nil && d.IsDir() && err == nil {
			os.Chmod(path, 0o700) //nolint:errcheck // the removal tells
		}
		return nil
	})
	os.RemoveAll(dir) //nolint:errcheck // what stays is in a temporary directory
}
