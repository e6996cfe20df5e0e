package sessions

import (
	"errors"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// freeAnswer is how much of each answer is not counted, so that ordinary answers
// never touch the budget.
const freeAnswer = 64 << 10

var (
	errBudget = errors.New("sessions: too many bytes of answers are held")

	overBudget = failure(fault.Exhausted, fault.Host, "RESULT_BUDGET", "too many large answers are read or held at this time; this one was given up").Retry(time.Second)
)

// budget bounds the bytes of answers that are being read or held, of a tenant and
// in all. It never waits: who waits would hold what it has read meanwhile.
type budget struct {
	total, each int64

	mu      sync.Mutex
	used    int64
	tenants map[tenant.ID]int64 // only tenants that hold something
}

func newBudget(total, each int64) *budget {
	return &budget{total: total, each: each, tenants: map[tenant.ID]int64{}}
}

func (b *budget) take(t tenant.ID, n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n > b.total || b.tenants[t]+n > b.each {
		return false
	}
	b.used += n
	b.tenants[t] += n
	return true
}

func (b *budget) give(t tenant.ID, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if b.tenants[t] -= n; b.tenants[t] <= 0 {
		delete(b.tenants, t)
	}
}

// lease is the part of the budget that one answer has. It belongs to one
// goroutine at a time; nil counts nothing.
type lease struct {
	budget *budget
	tenant tenant.ID
	held   int64
}

func (p *Pool) lease(t tenant.ID) *lease { return &lease{budget: p.answers, tenant: t} }

// grow makes the lease cover n bytes of the answer, or fails with errBudget.
func (l *lease) grow(n int) error {
	if l == nil {
		return nil
	}
	more := int64(n) - freeAnswer - l.held
	if more <= 0 {
		return nil
	}
	if !l.budget.take(l.tenant, more) {
		return errBudget
	}
	l.held += more
	return nil
}

// adopt takes over what another lease holds.
func (l *lease) adopt(from *lease) {
	if l == nil || from == nil {
		from.release()
		return
	}
	l.held += from.held
	from.held = 0
}

// release gives everything back. It may be called again.
func (l *lease) release() {
	if l == nil || l.held == 0 {
		return
	}
	l.budget.give(l.tenant, l.held)
	l.held = 0
}
