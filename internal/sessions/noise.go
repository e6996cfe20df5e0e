package sessions

import "time"

// noise counts what a child writes beside answers, or to standard error, so that
// one that writes without end is ended and does not keep this process reading.
type noise struct {
	most  int64 // bytes in a minute
	bytes int64
	since time.Time // when counting began
}

// lineCost is what a line counts at least: an empty one is work too.
const lineCost = 16

// hear counts one line and reports whether it is more than may be.
func (n *noise) hear(line int) bool {
	n.bytes += int64(max(line, lineCost))
	if n.bytes <= n.most {
		return false
	}
	now := time.Now()
	tooMuch := now.Sub(n.since) < time.Minute
	n.bytes, n.since = 0, now
	return tooMuch
}
