package sessions

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"time"
)

var (
	errEventTooLarge  = errors.New("event of the stream is too large")
	errStreamTooLarge = errors.New("stream is too large")
)

// streamLimits bound an event stream.
type streamLimits struct {
	// event is the greatest number of bytes of one event's data, and of one line.
	event int64
	// lines is the greatest number of lines of one event.
	lines int
	// total is the greatest number of bytes of the whole stream.
	total int64
}

// event is one event of a text/event-stream.
type event struct {
	name string
	data []byte
}

// eventReader reads a text/event-stream as HTML section 9.2 defines it: lines end
// with CR, LF or CRLF, whichever way they are cut into segments. It is linear in
// the input, and returns each event as soon as its last byte is there.
type eventReader struct {
	r     io.Reader
	lim   streamLimits
	chunk []byte // the buffer that is read into
	rest  []byte // the unread part of chunk
	lf    int    // position of the next LF in rest, -1 for none, -2 for not looked
	err   error
	total int64

	partial []byte // the beginning of a line that is not complete yet
	// blocks come before partial in a line of more than a block; they are joined
	// once, at its end. blocked is their length.
	blocks  [][]byte
	blocked int
	skipLF  bool // the last line ended with CR; a LF that follows belongs to it
	started bool // the first line was seen, so a byte order mark is data

	data  []byte
	lines int // data lines of the event so far
	count int // all lines of the event so far
	name  string

	// lastID is the id of the last whole event, and retry the last hint, 0 if none
	// came.
	lastID string
	retry  time.Duration
	newID  string // of the event that is being read, if hasID
	hasID  bool
	// hold counts what is kept of an event; nil counts nothing.
	hold *lease
	// giveUp is told how the data of an event began that could not be held, when it
	// is set; the rest of that event is skipped then.
	giveUp   func(begin []byte)
	skipping bool
	// activity is called for every line, comments too, when it is set.
	activity func()
}

// maxEventID bounds an event id that is remembered; longer ones are ignored.
const maxEventID = 1024

func newEventReader(r io.Reader, lim streamLimits) *eventReader {
	return &eventReader{r: r, lim: lim, lf: -2}
}

// next returns the next event that has data. Its data is valid until the call
// after. At the end it returns io.EOF; an event that only lacks its empty line at
// a clean end is returned too, since the JSON inside proves its completeness.
func (e *eventReader) next() (event, error) {
	e.reset()
	for {
		line, err := e.line()
		if err != nil {
			if err == io.EOF && e.lines > 0 && len(e.data) > 0 {
				e.confirm()
				return event{name: e.name, data: e.data}, nil
			}
			return event{}, err
		}
		if e.activity != nil {
			e.activity()
		}
		if len(line) == 0 {
			e.confirm()
			if len(e.data) > 0 {
				return event{name: e.name, data: e.data}, nil
			}
			e.reset()
			continue
		}
		if err := e.field(line); err != nil {
			return event{}, err
		}
	}
}

// wholeLine is more than the buffer that is read into holds, so that a longer line
// is never a part of it.
const wholeLine = 64 << 10

// blockBytes is the size of the blocks that a long line is kept in meanwhile.
const blockBytes = 1 << 20

// join ends the line that is put together in blocks and partial.
func (e *eventReader) join(end []byte) []byte {
	if e.blocks == nil {
		e.partial = append(e.partial, end...)
		return e.partial
	}
	e.partial = joined(e.blocks, e.blocked, e.partial, end)
	e.blocks, e.blocked = nil, 0
	return e.partial
}

// room makes room for n more bytes in a text that is put together, of at most most
// bytes. A large one doubles: append adds a quarter, and would copy a text of many
// megabytes five times over.
func room(buf []byte, n int, most int64) []byte {
	need := len(buf) + n
	if need <= cap(buf) || need < blockBytes {
		return buf
	}
	size := int(min(int64(2*cap(buf)), most+1)) // a byte more for what separates lines
	return append(make([]byte, 0, max(need, size)), buf...)
}

// keep hands the data of the last event over to the caller for good.
func (e *eventReader) keep() { e.data = nil }

// confirm makes the id of a whole event the one after which to go on. That of an
// event which breaks off never is: it would be left out.
func (e *eventReader) confirm() {
	if e.hasID {
		e.lastID = e.newID
	}
}

func (e *eventReader) reset() {
	// A large event must not stay in memory for the life of a stream.
	if cap(e.data) > 64<<10 {
		e.data = nil
	}
	e.data, e.lines, e.count, e.name, e.hasID, e.skipping = e.data[:0], 0, 0, "", false, false
}

func (e *eventReader) field(line []byte) error {
	if e.count++; e.count > e.lim.lines {
		return errEventTooLarge
	}
	if e.skipping {
		return nil
	}
	name, value, _ := bytes.Cut(line, []byte{':'})
	value = bytes.TrimPrefix(value, []byte{' '})
	switch string(name) {
	case "data":
		if int64(len(e.data)+len(value)+1) > e.lim.event {
			return errEventTooLarge
		}
		e.lines++
		if e.lines == 1 && len(value) > wholeLine {
			// The line was put together in partial, which becomes the data.
			e.data, e.partial = value, nil
			return e.grow(cap(e.data))
		}
		if e.data = room(e.data, len(value)+1, e.lim.event); e.lines > 1 {
			e.data = append(e.data, '\n')
		}
		e.data = append(e.data, value...)
		return e.grow(cap(e.partial) + cap(e.data))
	case "event":
		e.name = shorten(string(value), 64)
	case "id":
		if len(value) <= maxEventID && bytes.IndexByte(value, 0) < 0 {
			e.newID, e.hasID = string(value), true
		}
	case "retry":
		if ms, err := strconv.ParseUint(string(value), 10, 31); err == nil {
			e.retry = time.Duration(ms) * time.Millisecond
		}
	}
	return nil
}

// grow counts what is kept of the event.
func (e *eventReader) grow(n int) error {
	if e.skipping {
		return nil
	}
	err := e.hold.grow(n)
	if err == nil || e.giveUp == nil {
		return err
	}
	begin := e.data
	if len(begin) == 0 && e.blocks != nil {
		e.partial = e.blocks[0]
	}
	if len(begin) == 0 {
		begin = bytes.TrimPrefix(e.partial, []byte("data:"))
	}
	e.giveUp(begin)
	e.hold.release()
	e.data, e.partial, e.skipping = nil, nil, true
	e.blocks, e.blocked = nil, 0
	return e.err
}

// line returns the next line without its end. It is valid until the next call.
func (e *eventReader) line() ([]byte, error) {
	if cap(e.partial) > 64<<10 {
		e.partial = nil
	}
	e.partial = e.partial[:0]
	for {
		if e.skipLF && len(e.rest) > 0 {
			if e.rest[0] == '\n' {
				e.advance(1)
			}
			e.skipLF = false
		}
		if end := e.lineEnd(); end >= 0 {
			line := e.rest[:end]
			e.skipLF = e.rest[end] == '\r'
			e.advance(end + 1)
			if len(e.partial) > 0 {
				line = e.join(line)
			}
			return e.first(line), nil
		}
		if int64(e.blocked+len(e.partial)+len(e.rest)) > e.lim.event+64 {
			return nil, errEventTooLarge
		}
		if err := e.grow(cap(e.data) + e.blocked + cap(e.partial) + len(e.rest)); err != nil {
			return nil, err
		}
		if cap(e.partial) >= blockBytes && len(e.partial)+len(e.rest) > cap(e.partial) {
			e.blocks, e.blocked = append(e.blocks, e.partial), e.blocked+len(e.partial)
			e.partial = make([]byte, 0, blockBytes+len(e.rest))
		}
		e.partial = append(e.partial, e.rest...)
		if e.skipping {
			e.partial = append(e.partial[:0], ':') // of a line that is skipped, only that it is not empty matters
		}
		e.rest, e.lf = nil, -2
		if err := e.fill(); err != nil {
			if err == io.EOF && len(e.partial) > 0 {
				line := e.first(e.join(nil))
				e.partial = nil
				return line, nil
			}
			return nil, err
		}
	}
}

// lineEnd returns the position of the first CR or LF in rest, or -1. The position
// of the next LF is remembered, because looking for it again behind every lone CR
// would be quadratic.
func (e *eventReader) lineEnd() int {
	if len(e.rest) == 0 {
		return -1
	}
	if e.lf == -2 {
		e.lf = bytes.IndexByte(e.rest, '\n')
	}
	upTo := e.rest
	if e.lf >= 0 {
		upTo = e.rest[:e.lf]
	}
	if cr := bytes.IndexByte(upTo, '\r'); cr >= 0 {
		return cr
	}
	return e.lf
}

func (e *eventReader) advance(n int) {
	e.rest = e.rest[n:]
	switch {
	case e.lf >= n:
		e.lf -= n
	case e.lf >= 0:
		e.lf = -2
	}
}

func (e *eventReader) first(line []byte) []byte {
	if !e.started {
		e.started = true
		line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
	}
	return line
}

func (e *eventReader) fill() error {
	if e.err != nil {
		return e.err
	}
	if e.chunk == nil {
		e.chunk = make([]byte, 4<<10)
	}
	for range 16 {
		n, err := e.r.Read(e.chunk)
		e.total += int64(n)
		if e.total > e.lim.total {
			e.err = errStreamTooLarge
			return e.err
		}
		e.err = err
		if n > 0 {
			e.rest, e.lf = e.chunk[:n], -2
			if n == len(e.chunk) && n < 32<<10 {
				e.chunk = make([]byte, 2*n)
			}
			return nil
		}
		if err != nil {
			return err
		}
	}
	e.err = io.ErrNoProgress
	return e.err
}
