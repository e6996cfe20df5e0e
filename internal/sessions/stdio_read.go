package sessions

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"time"

	"github.com/mark3labs/mcp-go/mcp"
)

// read reads the child's output to its end. Lines that are no messages are
// skipped and counted; a line above the limit ends the connection.
func (w *stdioWire) read(stdout io.Reader) {
	r := bufio.NewReaderSize(stdout, 16<<10)
	var line []byte
	hold := w.conn.pool.lease(w.conn.key.Tenant)
	beside := noise{most: w.limits.NoiseBytes, since: time.Now()}
	for {
		part, err := r.ReadSlice('\n')
		if len(part) > 0 {
			w.first.Do(func() { close(w.alive) })
		}
		if int64(len(line)+len(part)) > w.limits.LineBytes {
			hold.release()
			w.quit(r, "the server's program wrote a line that is too long")
			return
		}
		if hold.grow(cap(line)+len(part)) != nil {
			hold.release()
			part = append(line, part...)
			w.giveUp(part)
			err = skipLine(r, err, w.limits.LineBytes-int64(len(part)))
			if errors.Is(err, errTooLarge) {
				w.quit(r, "the server's program wrote a line that is too long")
				return
			}
			line, part = nil, nil
			if err == nil {
				continue
			}
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			line = append(room(line, len(part), w.limits.LineBytes), part...)
			continue
		}
		if len(line) > 0 {
			part = append(room(line, len(part), w.limits.LineBytes), part...)
		}
		if w.line(bytes.TrimSpace(part), len(line) > 0, hold) {
			hold = w.conn.pool.lease(w.conn.key.Tenant)
		} else if beside.hear(len(part)) {
			w.quit(r, "the server's program writes too much that is no answer")
			return
		}
		line = nil
		if err != nil {
			w.fail("the server's program closed its output")
			return
		}
	}
}

// quit ends the connection, and reads on so that the child is not stuck meanwhile.
func (w *stdioWire) quit(r io.Reader, why string) {
	w.fail(why)
	io.Copy(io.Discard, r) //nolint:errcheck // it ends with the child
}

// skipLine reads the rest of a line that began with a read that ended with err,
// most bytes at most.
func skipLine(r *bufio.Reader, err error, most int64) error {
	for errors.Is(err, bufio.ErrBufferFull) {
		var part []byte
		part, err = r.ReadSlice('\n')
		if most -= int64(len(part)); most < 0 {
			return errTooLarge
		}
	}
	return err
}

// giveUp ends the request whose answer began with these bytes and could not be
// held. When nobody can say whose it was, the connection ends, since that request
// would wait for ever.
func (w *stdioWire) giveUp(begin []byte) {
	if w.requests.giveUp(begin) {
		return
	}
	w.tasks.run(func() { w.fail("the server's program wrote more than can be held at this time") })
}

// line judges one line, which is the reader's buffer unless it is owned, and
// reports whether it was an answer that some request has, or had wanted. What the
// line has of the budget goes with an answer and is given back for all else.
func (w *stdioWire) line(data []byte, owned bool, hold *lease) (answer bool) {
	if len(data) == 0 {
		return false
	}
	taken := false
	defer func() {
		if !taken {
			hold.release()
		}
	}()
	w.mu.Lock()
	batch := data[0] == '[' && w.version == mcp.ProtocolVersion20250326
	w.mu.Unlock()
	if batch {
		all, err := parseBatch(bytes.Clone(data), batchMessages)
		if err == nil {
			for i := range all {
				if m := &all[i]; !taken && m.isResponse() {
					m.hold = hold // the first answer holds the line for all
					taken = w.take(m)
					continue
				}
				w.take(&all[i])
			}
			return taken
		}
	}
	if data[0] != '{' {
		w.garbage()
		return false
	}
	m, err := parseMessage(data)
	if err == nil && m.isResponse() && !owned {
		m, err = parseMessage(bytes.Clone(data)) // the line's buffer is used again
	}
	if err != nil {
		w.garbage()
		return false
	}
	m.hold = hold
	taken = w.take(&m)
	return taken || m.isResponse() && w.requests.late()
}

// garbage counts a line that is no message. It is logged at growing distances,
// and never with its text, which may hold anything.
func (w *stdioWire) garbage() {
	n := w.conn.count.garbage.Add(1)
	for n >= 10 && n%10 == 0 {
		n /= 10
	}
	if n == 1 {
		w.log.Warn("server wrote a line that is no message", "count", w.conn.count.garbage.Load())
	}
}

// take judges one message of the child and reports whether a request has it now.
func (w *stdioWire) take(m *message) (delivered bool) {
	w.conn.unanswered.Store(0)
	switch {
	case m.method == "":
		return w.deliver(m)
	case m.isRequest():
		w.mu.Lock()
		modern := w.modern
		w.mu.Unlock()
		if modern {
			w.conn.count.stray.Add(1) // a modern server must not ask
			return false
		}
		w.conn.asked(w, m, nil)
	case m.method != "":
		w.mu.Lock()
		listens, modern := w.listens, w.modern
		w.mu.Unlock()
		var listen *watch
		for _, l := range listens { // the newest of those that it may belong to
			if l.owns(m) {
				listen = l
			}
		}
		if listen == nil {
			if len(listens) == 0 {
				w.conn.noticed(m, nil, modern)
			} else {
				w.conn.count.stray.Add(1) // of a stream that is closed
			}
			return false
		}
		if listen.note(m, nil, modern) {
			w.deliver(&message{id: []byte(formatID(listen.id)), result: []byte("{}")})
		}
	default:
		w.conn.count.stray.Add(1)
	}
	return false
}

// deliver hands a response to its request, and counts one that has none.
func (w *stdioWire) deliver(m *message) bool {
	ok := w.requests.deliver(m)
	if !ok {
		w.conn.count.stray.Add(1)
	}
	return ok
}

// diagnostics logs what the child writes to standard error, up to the limit, and
// drains the rest. A child that writes there without end is ended.
func (w *stdioWire) diagnostics(stderr io.Reader) {
	r := bufio.NewReaderSize(stderr, 4<<10)
	var logged int64
	all := noise{most: w.limits.DiagnosticBytes, since: time.Now()}
	for {
		part, err := r.ReadSlice('\n')
		if len(part) > 0 {
			w.first.Do(func() { close(w.alive) })
		}
		if logged < w.limits.StderrBytes && len(part) > 0 {
			logged += int64(len(part))
			w.log.Debug("server diagnostics", "text", shorten(string(bytes.ToValidUTF8(bytes.TrimSpace(part), []byte("?"))), 1024))
			if logged >= w.limits.StderrBytes {
				w.log.Warn("server diagnostics exceed their limit; the rest is dropped")
			}
		}
		if all.hear(len(part)) {
			w.quit(r, "the server's program writes diagnostics without end")
			return
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}
