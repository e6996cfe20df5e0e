package sessions

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/confine"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Runtime is a command that the operator declared for stdio servers, and what it
// may have. A tenant gives only its name.
type Runtime = confine.Program

// tellConfinement logs for each runtime what the kernel holds it to.
func (p *Pool) tellConfinement() {
	for _, name := range slices.Sorted(maps.Keys(p.runtimes)) {
		enforced, lacking := confine.Confinement(p.runtimes[name])
		log := p.log.Info
		if len(lacking) > 0 {
			log = p.log.Warn
		}
		log("runtime is confined", "runtime", name, "enforced", strings.Join(enforced, ", "), "kernelLacks", strings.Join(lacking, ", "))
	}
}

// startChild starts the runtime's command for a connection, within the bounds of
// its tenant and of the process.
func (p *Pool) startChild(c *conn) (*confine.Process, error) {
	r, ok := p.runtimes[c.target.Runtime]
	if !ok {
		return nil, failure(fault.Precondition, fault.Host, "RUNTIME_UNKNOWN", "no such runtime is declared")
	}
	if c.target.Origin != "" && c.target.Origin != "stdio:"+c.target.Runtime {
		return nil, failure(fault.Precondition, fault.Host, "ORIGIN_MISMATCH", "the server's runtime is not the origin in its contract")
	}
	if err := p.admitChild(c.key.Tenant); err != nil {
		return nil, err
	}
	log := p.log.With("tenant", c.key.Tenant.String(), "server", c.key.Server, "connection", c.id, "runtime", c.target.Runtime)
	began := time.Now()
	proc, err := confine.Start(r, p.tempDir)
	if err != nil {
		p.releaseChild(c.key.Tenant)
		log.Warn("server's program could not be started", "error", err)
		return nil, failure(fault.Unavailable, fault.Transport, "START_FAILED", "the server's program could not be started").Cause(err)
	}
	log.Info("server's program started", "process", proc.PID, "user", proc.UID, "took", time.Since(began))
	p.tasks.run(func() {
		proc.Reap()
		p.releaseChild(c.key.Tenant)
		log.Info("server's program ended", "process", proc.PID, "status", proc.Status(), "lived", time.Since(began))
	})
	return proc, nil
}

// admitChild counts one more child of a tenant, if its bound allows.
func (p *Pool) admitChild(t tenant.ID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.children[t] >= p.limits.TenantProcesses || p.running >= p.limits.Processes {
		return failure(fault.Exhausted, fault.Host, "PROCESSES_EXHAUSTED", "too many programs of servers are running")
	}
	p.children[t]++
	p.running++
	return nil
}

func (p *Pool) releaseChild(t tenant.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	if p.children[t]--; p.children[t] <= 0 {
		delete(p.children, t)
	}
}
