//go:build !race

package chaos

// raceEnabled makes the server's binary report data races too.
const raceEnabled = false
