package confine

import (
	"os"

	"golang.org/x/sys/unix"
)

// orders are what the host tells the keeper, and the keeper the entry.
type orders struct {
	Path, Dir, Private    string
	Args, Env             []string
	ReadRoots, WriteRoots []string
	Network               bool
	Who                   identity
	Limits                Limits
	// Keeper is the number of the keeper.
	Keeper int
}

// word is what the host tells the keeper later.
type word string

const (
	wordTerm word = "TERM" // ask all of the tree to leave
	wordKill word = "KILL" // end all of it
)

// report is what the keeper tells the host: first that the program runs or why
// it does not, then how it ended.
type report struct {
	PID, UID int
	Error    string
	Exited   string
}

// The names under which this binary is started to keep or to enter, in place of
// its first argument, and the descriptors that it then has.
const (
	keeperName = "bulkhead-keeper"
	entryName  = "bulkhead-entry"

	keeperLink  = 3 // socket to the host
	entryOrders = 3 // orders of the keeper
	entryStatus = 4 // why the program cannot start; closed by its start
)

// selfEnv is the environment of the keeper and of the entry: none, but that a
// build with the race detector does not sleep for a second at its end.
var selfEnv = []string{"GORACE=atexit_sleep_ms=0"}

// self is this binary, also when another has taken its place.
const self = "/proc/self/exe"

func init() {
	if len(os.Args) != 1 {
		return
	}
	switch os.Args[0] {
	case keeperName:
		os.Exit(keep(os.NewFile(keeperLink, "link")))
	case entryName:
		os.Exit(enter(os.NewFile(entryOrders, "orders"), os.NewFile(entryStatus, "status")))
	}
}

// closeOnExec keeps from the next program what this process has open beyond its
// standard files. Go opens everything so, but what this process inherited without
// the flag would pass through.
func closeOnExec() {
	if unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC) == nil {
		return
	}
	for fd := 3; fd < 4096; fd++ { // a kernel before 5.11
		unix.CloseOnExec(fd)
	}
}
