package calls

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

type (
	ctx      = context.Context
	response = sessions.Response
)

// sent is one request that left this host.
type sent struct {
	tool, args string
	key        sessions.Key
	meta       map[string]json.RawMessage
	// inputs and state are what a repeated request brings.
	inputs, state, method string
	r                     sessions.Request
	target                sessions.Target
}

// sender is the server of a test. It runs BeforeSend as the pool does, counts
// what was sent, and answers by its script.
type sender struct {
	w *world

	mu     sync.Mutex
	sends  []sent
	refuse []error // what BeforeSend returned when it refused
	script func(ctx context.Context, s sent, n int) (sessions.Response, error)
	// before runs before BeforeSend, for a pause at the worst moment.
	before func(s sent)
}

func answered(result string) (sessions.Response, error) {
	return sessions.ReadResult(json.RawMessage(result))
}

const okResult = `{"content":[{"type":"text","text":"done"}]}`

func (s *sender) Do(ctx context.Context, k sessions.Key, t sessions.Target, r sessions.Request) (sessions.Response, error) {
	var p struct{ Arguments, InputResponses, RequestState json.RawMessage }
	if err := json.Unmarshal(r.Params, &p); err != nil {
		panic(err)
	}
	one := sent{tool: r.Name, args: string(p.Arguments), key: k, meta: r.Meta, inputs: string(p.InputResponses),
		state: string(p.RequestState), method: r.Method, r: r, target: t}
	s.mu.Lock()
	before := s.before
	s.mu.Unlock()
	if before != nil {
		before(one)
	}
	if ctx.Err() != nil {
		return sessions.Response{}, ctx.Err()
	}
	if r.BeforeSend != nil {
		if err := r.BeforeSend(); err != nil {
			s.mu.Lock()
			s.refuse = append(s.refuse, err)
			s.mu.Unlock()
			return sessions.Response{}, err
		}
	}
	s.mu.Lock()
	s.sends = append(s.sends, one)
	n := 0
	for _, x := range s.sends {
		if x.tool == one.tool && x.args == one.args {
			n++
		}
	}
	script := s.script
	s.mu.Unlock()
	if script == nil {
		return answered(okResult)
	}
	return script(ctx, one, n)
}

func (s *sender) answer(script func(ctx context.Context, s sent, n int) (sessions.Response, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.script = script
}

func (s *sender) pause(before func(s sent)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = before
}

func (s *sender) all() []sent {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.sends)
}

func (s *sender) count(tool string) (n int) {
	for _, x := range s.all() {
		if x.tool == tool {
			n++
		}
	}
	return n
}

// hang answers nothing until its context ends, as a server that was reached.
func hang(ctx context.Context, _ sent, _ int) (sessions.Response, error) {
	<-ctx.Done()
	return sessions.Response{Phase: sessions.MaybeSent}, ctx.Err()
}

// gate lets a test decide when requests to one tool are answered.
type gate struct {
	arrived chan sent
	open    chan struct{}
	once    sync.Once
}

// newGate returns a closed gate, which opens at the latest when the test ends.
func newGate(t testing.TB) *gate {
	g := &gate{arrived: make(chan sent, 64), open: make(chan struct{})}
	t.Cleanup(g.release)
	return g
}

func (g *gate) release() { g.once.Do(func() { close(g.open) }) }

func (g *gate) script(then func(ctx context.Context, s sent, n int) (sessions.Response, error)) func(context.Context, sent, int) (sessions.Response, error) {
	return func(ctx context.Context, s sent, n int) (sessions.Response, error) {
		g.arrived <- s
		<-g.open // as a server does that does not care who still listens
		return then(ctx, s, n)
	}
}

func okAnswer(context.Context, sent, int) (sessions.Response, error) { return answered(okResult) }
