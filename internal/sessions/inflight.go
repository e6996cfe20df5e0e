package sessions

import "sync"

// inflight holds the requests in flight on a wire whose answers all come on one
// channel, and hands each answer to the request that it names.
type inflight struct {
	mu      sync.Mutex
	pending map[int64]*waiter
	owed    int // answers that nobody waits for any more
}

// waiter is a request in flight.
type waiter struct {
	answer chan message
}

func newInflight() *inflight { return &inflight{pending: map[int64]*waiter{}} }

// enter announces a request before it is sent. Every enter has its leave.
func (f *inflight) enter(id int64) *waiter {
	wait := &waiter{answer: make(chan message, 1)}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pending[id] = wait
	return wait
}

// leave ends the wait for an answer; one that came all the same is let go.
func (f *inflight) leave(id int64, wait *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pending[id] == wait {
		f.owed = min(f.owed+1, maxOwed)
		delete(f.pending, id)
	}
	select {
	case m := <-wait.answer:
		m.hold.release()
	default:
	}
}

// deliver hands a response to the request it names and reports whether there is
// one. An error without an id belongs to the only request in flight, if there is
// only one; so does an answer too large to be read as far as its id.
func (f *inflight) deliver(m *message) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	nameless := m.err != nil && m.hasNullID() || m.overBudget && m.id == nil
	for id, wait := range f.pending {
		if m.answers(id) || nameless && len(f.pending) == 1 {
			delete(f.pending, id)
			wait.answer <- *m
			return true
		}
	}
	return false
}

// maxOwed bounds how many late answers are expected.
const maxOwed = 256

// late reports whether an answer that was delivered to nobody may be one that was
// given up before. There are no more of them than were given up.
func (f *inflight) late() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.owed == 0 {
		return false
	}
	f.owed--
	return true
}

// judge turns the message that was delivered for an exchange into its reply.
func (f *inflight) judge(x *exchange, m message) (reply, error) {
	rep := reply{msg: m, phase: Answered}
	x.hold.adopt(m.hold)
	if m.overBudget || !m.isResponse() {
		rep.msg, rep.phase = message{}, MaybeSent
		if m.overBudget {
			return rep, overBudget
		}
		return rep, emptyAnswer
	}
	if int64(len(m.result)) > x.limit {
		rep.msg, rep.phase = message{}, MaybeSent
		return rep, tooLarge
	}
	return rep, nil
}

// giveUp ends the request whose answer began with these bytes and could not be
// held. It reports whether anybody can say whose it was.
func (f *inflight) giveUp(begin []byte) bool {
	m := message{overBudget: true}
	s := scanner{data: begin}
	s.object(0, func(name []byte) (err error) { //nolint:errcheck // it breaks off somewhere, by its nature
		raw, err := s.raw(1)
		if err == nil && string(name) == "id" {
			m.id = raw
		}
		return err
	})
	return f.deliver(&m)
}
