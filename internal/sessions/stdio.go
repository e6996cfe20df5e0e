package sessions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/confine"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// stdioWire speaks with a child process over its standard input and output, one
// message a line.
type stdioWire struct {
	proc    *confine.Process
	conn    *conn
	limits  *Limits
	tasks   *tasks
	log     *slog.Logger
	writing chan struct{} // holds one token: whoever has it may write
	alive   chan struct{} // closed at the child's first byte
	dead    chan struct{} // closed when nothing more can come
	failed  atomic.Bool   // fail was called
	first   sync.Once

	requests *inflight

	mu      sync.Mutex
	modern  bool
	version string
	listens []*watch // open streams of changes, the newest last
	closing bool
}

// newStdioWire starts the runtime's command for a connection.
func newStdioWire(p *Pool, c *conn) (*stdioWire, error) {
	proc, err := p.startChild(c)
	if err != nil {
		return nil, err
	}
	w := &stdioWire{
		proc: proc, conn: c, limits: &p.limits, tasks: &p.tasks,
		log:     p.log.With("tenant", c.key.Tenant.String(), "server", c.key.Server, "connection", c.id),
		writing: make(chan struct{}, 1), alive: make(chan struct{}), dead: make(chan struct{}), requests: newInflight(),
	}
	p.tasks.run(func() { w.diagnostics(proc.Stderr) })
	drained := make(chan struct{})
	p.tasks.run(func() {
		w.read(proc.Stdout)
		close(drained)
		proc.Drained()
	})
	p.tasks.run(func() {
		<-proc.Exited()
		// Its last words count.
		select {
		case <-drained:
		case <-proc.Gone():
		}
		w.fail("the server's program ended")
	})
	return w, nil
}

func (w *stdioWire) speak(era, version string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.modern, w.version = era == EraModern, version
}

// fail takes the connection out of use and then ends everything that waits, once.
func (w *stdioWire) fail(why string) {
	if !w.failed.CompareAndSwap(false, true) {
		return
	}
	w.mu.Lock()
	closing := w.closing
	w.mu.Unlock()
	if !closing {
		// First of all, so that who is woken below does not get it again.
		w.conn.pool.crashed(w.conn)
		w.conn.pool.drop(w.conn, why, true)
	}
	close(w.dead)
}

// exchange implements wire.
func (w *stdioWire) exchange(ctx context.Context, x *exchange) (reply, error) {
	wait := w.requests.enter(x.id)
	defer w.requests.leave(x.id, wait)
	phase, err := w.write(ctx, x.body, x.beforeSend)
	if err != nil {
		return reply{phase: phase}, err
	}
	rep := reply{phase: MaybeSent}
	select {
	case m := <-wait.answer:
		return w.requests.judge(x, m)
	case <-ctx.Done():
		err = ended(ctx)
		if !x.patient {
			w.tasks.run(func() { w.notify(context.Background(), encodeCancel(x.id)) }) //nolint:errcheck // a courtesy
		}
	case <-w.dead:
		select {
		case m := <-wait.answer:
			return w.requests.judge(x, m)
		default:
		}
		err = failure(fault.Unavailable, fault.Transport, "SERVER_ENDED", "the server's program ended before it answered")
	}
	return rep, err
}

// notify implements wire.
func (w *stdioWire) notify(ctx context.Context, body []byte) error {
	_, err := w.write(ctx, body, nil)
	return err
}

// write sends one line. It never waits longer than the write limit for a child
// that does not read. The phase tells what of the line can have arrived.
func (w *stdioWire) write(ctx context.Context, body []byte, before func() error) (Phase, error) {
	line, err := oneLine(body)
	if err != nil {
		return NotSent, err
	}
	select {
	case w.writing <- struct{}{}:
	case <-ctx.Done():
		return NotSent, ended(ctx)
	case <-w.dead:
		return NotSent, failure(fault.Unavailable, fault.Transport, "SERVER_ENDED", "the server's program ended")
	}
	defer func() { <-w.writing }()
	if err := ctx.Err(); err != nil {
		return NotSent, ended(ctx)
	}
	if before != nil {
		if err := before(); err != nil {
			return NotSent, err
		}
	}
	n, err := w.put(ctx, line)
	if err == nil {
		return MaybeSent, nil
	}
	// A line without its end is no message, unless only the line feed is missing:
	// the end of input would complete it.
	phase := NotSent
	if n >= len(line)-1 {
		phase = MaybeSent
	}
	if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		w.fail("the server's program no longer reads")
	}
	if ctx.Err() != nil {
		return phase, ended(ctx)
	}
	return phase, failure(fault.Unavailable, fault.Transport, writeFailed, "the server's program does not take the request").Cause(err)
}

// writeFailed is the reason for a message that a child did not take in time.
const writeFailed = "WRITE_FAILED"

// put writes with a deadline that the end of ctx brings forward.
func (w *stdioWire) put(ctx context.Context, line []byte) (int, error) {
	if err := w.proc.Stdin.SetWriteDeadline(time.Now().Add(w.limits.Write)); err != nil {
		return 0, err
	}
	ran := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ran)
		w.proc.Stdin.SetWriteDeadline(time.Unix(1, 0)) //nolint:errcheck // the write fails by itself then
	})
	n, err := w.proc.Stdin.Write(line)
	if !stop() {
		<-ran // so that it does not cut the next writer short
	}
	return n, err
}

// oneLine ends a message with a line feed and makes sure there is no other.
func oneLine(body []byte) ([]byte, error) {
	if bytes.IndexByte(body, '\n') < 0 && bytes.IndexByte(body, '\r') < 0 {
		return append(body, '\n'), nil
	}
	var b bytes.Buffer
	if err := json.Compact(&b, body); err != nil {
		return nil, fault.New(fault.Internal, "PARAMS_INVALID", "the request is no JSON").Cause(err)
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}

// watch implements wire for modern servers: subscriptions/listen on the one pipe.
func (w *stdioWire) watch(ctx context.Context, want *watch) (end watchEnd) {
	wait := w.requests.enter(want.id)
	w.mu.Lock()
	w.listens = append(w.listens, want)
	w.mu.Unlock()
	defer func() {
		w.requests.leave(want.id, wait)
		w.mu.Lock()
		w.listens = slices.DeleteFunc(slices.Clone(w.listens), func(l *watch) bool { return l == want })
		w.mu.Unlock()
	}()
	began := time.Now()
	if _, err := w.write(ctx, want.body, nil); err != nil {
		return watchEnd{}
	}
	select {
	case m := <-wait.answer:
		m.hold.release()
		end.refused = m.err != nil
	case <-ctx.Done():
		if !w.conn.over() { // closing the stream is a message here
			w.tasks.run(func() { w.notify(context.Background(), encodeCancel(want.id)) }) //nolint:errcheck // what still comes is dropped
		}
	case <-w.dead:
		end.refused = true // a new process is a new connection
	}
	end.lived = time.Since(began)
	return end
}

// close implements wire: it ends the process and everything it started.
func (w *stdioWire) close(context.Context) {
	w.mu.Lock()
	w.closing = true
	w.mu.Unlock()
	w.proc.End(w.limits.Grace)
	w.fail("closed")
}
