package demo

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/mark3labs/mcp-go/mcp"
	"github.com/mark3labs/mcp-go/server"
)

// Fault makes calls of one tool go wrong on purpose.
type Fault struct {
	// DelayBefore passes before the tool takes effect. A call that is
	// cancelled meanwhile takes none, unless it is Detached.
	DelayBefore time.Duration
	// DelayAfter passes between the effect and the answer.
	DelayAfter time.Duration
	// DropAfter closes the connection after the effect, without an answer.
	DropAfter bool
	// Detached lets a call run on after its caller went away, as many real
	// servers do.
	Detached bool
	// Times is how many calls the fault applies to; 0 means every call until
	// it is cleared.
	Times int
}

// faults holds the faults in force.
type faults struct {
	mu     sync.Mutex
	byTool map[string]Fault
}

func newFaults(initial map[string]Fault) *faults {
	f := &faults{byTool: make(map[string]Fault, len(initial))}
	maps.Copy(f.byTool, initial)
	return f
}

func (f *faults) set(tool string, v Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.byTool[tool] = v
}

func (f *faults) clear(tool string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byTool, tool)
}

// take returns the fault that applies to the next call of the tool and uses up
// one of its times.
func (f *faults) take(tool string) Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, ok := f.byTool[tool]
	if !ok {
		return Fault{}
	}
	if v.Times == 1 {
		delete(f.byTool, tool)
	} else if v.Times > 1 {
		left := v
		left.Times--
		f.byTool[tool] = left
	}
	return v
}

// misbehave is the middleware round every tool: it counts the arrival and
// applies the tool's fault.
func (s *Server) misbehave(next server.ToolHandlerFunc) server.ToolHandlerFunc {
	return func(ctx context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		f := s.faults.take(req.Params.Name)
		s.counts.arrive(req.Params.Name)
		run := ctx
		if f.Detached {
			run = s.life
		}
		if err := pause(run, f.DelayBefore); err != nil {
			return nil, err
		}
		result, err := next(run, req)
		if perr := pause(run, f.DelayAfter); perr != nil {
			return nil, perr
		}
		if f.DropAfter {
			exchangeFrom(ctx).dropped.Store(true)
		}
		return result, err
	}
}

// pause waits for d or until the context ends, whichever is first.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// counts holds how often each tool was reached and took effect.
type counts struct {
	mu       sync.Mutex
	arrivals map[string]int
	effects  map[string]int
}

func newCounts() *counts {
	return &counts{arrivals: map[string]int{}, effects: map[string]int{}}
}

func (c *counts) arrive(tool string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.arrivals[tool]++
}

func (c *counts) execute(tool string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.effects[tool]++
}

func (c *counts) arrived(tool string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.arrivals[tool]
}

func (c *counts) executed(tool string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.effects[tool]
}

// snapshot returns copies of both maps; every named tool has an entry.
func (c *counts) snapshot(tools []string) (arrivals, effects map[string]int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	arrivals, effects = maps.Clone(c.arrivals), maps.Clone(c.effects)
	for _, t := range tools {
		arrivals[t] += 0
		effects[t] += 0
	}
	return arrivals, effects
}
