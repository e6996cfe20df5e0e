//go:build !race

package sessions

// raceEnabled says that memory is not what it is without the race detector.
const raceEnabled = false
