package chaos

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	mixSeed    = 20260728
	mixKills   = 30
	mixCallers = 6
)

// mix is a load of all kinds of calls, made by callers that repeat a request
// until it is answered, as a product's frontend would.
type mix struct {
	w    *world
	base time.Time

	server atomic.Pointer[process]
	writes atomic.Int64 // numbers the writes; each has an hour of its own
	begun  atomic.Int64 // requests that were begun

	mu    sync.Mutex
	made  []*mixed
	gate  *sync.RWMutex // held for writing while the server is away
	ended atomic.Bool
}

// mixed is one call of the load.
type mixed struct {
	user      user
	p         proposal
	title     string // of a write
	id        string
	write     bool
	approve   bool
	cancelled bool
}

// caller makes calls until the load ends.
func (m *mix) caller(u user, r *rand.Rand) {
	for i := 0; !m.ended.Load(); i++ {
		c := m.choose(u, r, i)
		for c.id == "" && !m.ended.Load() {
			// An answer that was lost: the same request finds the call, or makes it.
			m.gate.RLock()
			err := m.carry(c, r)
			m.gate.RUnlock()
			if err != nil {
				time.Sleep(5 * time.Millisecond) // the server is gone; its successor comes
			}
		}
		m.mu.Lock()
		m.made = append(m.made, c)
		m.mu.Unlock()
	}
}

func (m *mix) choose(u user, r *rand.Rand, i int) *mixed {
	c := &mixed{user: u, p: proposal{requestID: fmt.Sprintf("%s-%d", u.user, i), wait: time.Duration(r.IntN(300)) * time.Millisecond}}
	switch n := r.IntN(10); {
	case n < 3:
		c.p.server, c.p.tool, c.p.args = "plain", read, readArgs()
	case n < 5:
		c.p.server, c.p.tool, c.p.args = "recorded", read, readArgs()
	default:
		c.write, c.p.tool = true, draft
		c.p.server = []string{"plain", "recorded"}[r.IntN(2)]
		c.approve = r.IntN(10) > 0
		c.cancelled = r.IntN(8) == 0
		k := m.writes.Add(1)
		from := m.base.Add(time.Duration(k) * time.Hour)
		c.title = fmt.Sprintf("write %d", k)
		c.p.args = obj{"title": c.title, "start": from.Format(time.RFC3339), "end": from.Add(time.Hour).Format(time.RFC3339)}
	}
	return c
}

// carry makes one request, and what follows from its answer. Errors are what
// this test is about; the database tells later what came of them.
func (m *mix) carry(c *mixed, r *rand.Rand) error {
	s := m.server.Load()
	m.begun.Add(1)
	got, err := c.user.at(s).propose(c.p)
	if err != nil {
		return err
	}
	c.id = got.CallID
	if got.State == "CONSENT_REQUIRED" && c.approve && got.Consent != nil {
		_ = s.as(m.w.approver).post("/v1/consents/"+got.Consent.ConsentID+":decide", obj{"decision": "APPROVE"}, nil)
	}
	if c.cancelled {
		_, _ = c.user.at(s).cancel(c.id)
		return nil
	}
	_, _ = c.user.at(s).next(c.id, got.Revision, time.Duration(r.IntN(200))*time.Millisecond)
	return nil
}

// TestKillAtRandomMoments kills the server over and over under a mixed load.
func TestKillAtRandomMoments(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cal := startCalendar(t)
	p := w.start()
	w.register(p, "plain", cal.mcp, policy{readRetry: 2})
	w.register(p, "recorded", cal.mcp, policy{record: "before_send", readRetry: 1, consent: "session"})
	cal.fault(draft, fault{DelayBefore: "15ms", DelayAfter: "15ms"})
	cal.fault(read, fault{DelayBefore: "20ms"})

	m := &mix{w: w, base: time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC), gate: &sync.RWMutex{}}
	m.server.Store(p)
	t.Logf("seed %d", mixSeed)
	var callers sync.WaitGroup
	for i := range mixCallers {
		u := w.open(p, fmt.Sprintf("user%d", i))
		callers.Go(func() { m.caller(u, rand.New(rand.NewPCG(mixSeed, uint64(i)))) })
	}
	r := rand.New(rand.NewPCG(mixSeed, 1000))
	for i := range mixKills {
		// At a random moment after a random number of further requests.
		enough := m.begun.Load() + 1 + r.Int64N(3*mixCallers)
		eventually(t, "the load to go on", func() bool { return m.begun.Load() >= enough })
		pause(t, time.Duration(r.IntN(60))*time.Millisecond)
		p.kill()
		m.gate.Lock()
		w.presumeDead(p)
		p = w.start()
		m.server.Store(p)
		w.settled()
		w.consistent(p)
		if i == mixKills-1 {
			m.ended.Store(true)
		}
		m.gate.Unlock()
		if t.Failed() {
			m.ended.Store(true)
			break
		}
	}
	callers.Wait()
	w.settled()
	w.consistent(p)
	m.check(t, cal, p)
}

// pause lets the load run for a while. Nothing is concluded from its length.
func pause(t testing.TB, d time.Duration) {
	t.Helper()
	time.Sleep(d)
}

// check compares what is recorded with what the calendar holds.
func (m *mix) check(t *testing.T, cal *calendar, p *process) {
	t.Helper()
	events := m.events(t, p)
	states := map[string]int{}
	for _, c := range m.made {
		if c.id == "" {
			// The load ended before it was answered; it may have been made.
			states["?"]++
			if events[c.title] > 1 {
				t.Errorf("%s ran %d times", c.title, events[c.title])
			}
			continue
		}
		got, err := c.user.at(p).call(c.id)
		if status(err) == 404 && !c.write && c.p.server == "plain" {
			states["lost read"]++ // it was still in memory, as its contract allows
			continue
		}
		if err != nil {
			t.Errorf("call %s: %v", c.id, err)
			continue
		}
		states[got.State+" "+got.Effect]++
		if got.State == "DENIED" && c.approve && !got.stale() {
			t.Errorf("nobody denied, closed or changed anything, and yet: %v %v", got, m.w.history(p, c.id))
		}
		if !c.write {
			continue
		}
		n := events[c.title]
		switch {
		case n > 1:
			t.Errorf("%s ran %d times: %v", c.title, n, got)
		case got.State == "SUCCEEDED" && n != 1:
			t.Errorf("%s has succeeded and is not there: %v", c.title, got)
		case n != 0 && got.State != "SUCCEEDED" && got.State != "UNCERTAIN":
			t.Errorf("%s is there, and yet its call says %v", c.title, got)
		}
	}
	t.Logf("%d calls: %v", len(m.made), states)
	if states["SUCCEEDED WRITE"] == 0 || states["UNCERTAIN WRITE"] == 0 || states["SUCCEEDED READ"] == 0 {
		t.Errorf("the load met too little: %v", states)
	}
	sent := m.w.number(`SELECT coalesce(sum(attempt), 0) FROM calls WHERE name = $1`, draft)
	if n := cal.arrivals(draft); n > sent {
		t.Errorf("%d writes arrived, %d were dispatched", n, sent)
	}
}

// events counts the calendar's events by title, read through the server.
func (m *mix) events(t *testing.T, p *process) map[string]int {
	t.Helper()
	cal := m.w.open(p, "counter")
	out := map[string]int{}
	last := m.base.Add(time.Duration(m.writes.Load()+2) * time.Hour)
	for from := m.base; from.Before(last); from = from.Add(10 * 24 * time.Hour) {
		c, err := cal.propose(proposal{server: "plain", tool: read, wait: time.Minute,
			args: obj{"from": from.Format(time.RFC3339), "to": from.Add(10 * 24 * time.Hour).Format(time.RFC3339)}})
		if err != nil || c.State != "SUCCEEDED" {
			t.Fatalf("read the calendar: %v %v", c, err)
		}
		var result struct {
			StructuredContent struct {
				Busy []struct{ Title, Start string }
			}
		}
		if err := json.Unmarshal(c.Result, &result); err != nil {
			t.Fatal(err)
		}
		for _, b := range result.StructuredContent.Busy {
			out[b.Title]++
		}
	}
	return out
}
