package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Probe is what came of asking a server what it offers.
type Probe struct {
	// Reachable says that the server listed at least one kind.
	Reachable            bool
	Era, ProtocolVersion string
	// Capabilities and ServerInfo are untrusted JSON and may be empty.
	Capabilities, ServerInfo json.RawMessage
	Negotiation, Discovery   time.Duration
	// Kinds are those that were asked for, in the order of Kinds.
	Kinds []ProbedKind
	// Failure says why the server could not be used; nil when it could.
	Failure *fault.Error
}

// ProbedKind is what a probe found of one kind.
type ProbedKind struct {
	Kind     Kind
	Revision *Revision // nil when Failure is set
	// Callable and Quarantined count definitions.
	Callable, Quarantined int
	Failure               *fault.Error
}

// adminContext is the context in which an admin looks at a server: one of its
// own, so that a probe neither uses nor fills what a user sees.
func adminContext(p tenant.Principal) Context {
	return Context{Tenant: p.Tenant, Subject: tenant.Subject{Source: "bulkhead:admin", Value: firstText(p.KeyID, "admin")},
		Session: "probe-" + firstText(p.KeyID, "admin"), Probe: true}
}

// ProbeServer lists everything that a server offers, now, and remembers the era
// and the version it negotiated. A server that cannot be used is an answer.
func (s *Service) ProbeServer(ctx context.Context, p tenant.Principal, idOrName string) (Probe, error) {
	v, err := s.GetServer(ctx, p, idOrName)
	if err != nil {
		return Probe{}, err
	}
	probe := &prober{Lister: s.o.Lister}
	out := Probe{}
	for _, kind := range Kinds {
		if kind != Tool && !Declares(out.capabilities(probe), kind) {
			continue
		}
		k, err := s.probeKind(ctx, v, adminContext(p), kind, probe)
		if err != nil {
			return Probe{}, err
		}
		out.Kinds = append(out.Kinds, k)
		if k.Failure != nil && out.Failure == nil {
			out.Failure = k.Failure
		}
		out.Reachable = out.Reachable || k.Revision != nil
		if kind == Tool && !out.Reachable {
			break
		}
	}
	out.Capabilities, out.ServerInfo = probe.last.Capabilities, probe.last.ServerInfo
	out.Negotiation, out.Discovery = probe.last.Negotiation, probe.took
	if !out.Reachable {
		return out, nil
	}
	tools := out.Kinds[0].Revision
	out.Era, out.ProtocolVersion = tools.Era, tools.ProtocolVersion
	out.Capabilities = out.capabilities(probe)
	out.Failure = nil
	return out, s.Learned(ctx, p.Tenant, v.ID, v.Registration, out.Era, out.ProtocolVersion)
}

// prober keeps what a Listing says beside the definitions.
type prober struct {
	Lister
	last Listing
	took time.Duration
}

// ListDefinitions implements Lister.
func (p *prober) ListDefinitions(ctx context.Context, v Server, c Context, kind Kind) (Listing, error) {
	began := time.Now()
	l, err := p.Lister.ListDefinitions(ctx, v, c, kind)
	if err == nil {
		negotiation := max(p.last.Negotiation, l.Negotiation)
		p.took += max(0, time.Since(began)-l.Negotiation)
		p.last = l
		p.last.Negotiation = negotiation
	}
	return l, err
}

// capabilities are those that the server just sent, or those of the revision
// when another probe of the same admin made the list.
func (p Probe) capabilities(via *prober) json.RawMessage {
	if len(via.last.Capabilities) == 0 && len(p.Kinds) > 0 && p.Kinds[0].Revision != nil {
		return p.Kinds[0].Revision.Capabilities
	}
	return via.last.Capabilities
}

func (s *Service) probeKind(ctx context.Context, v Server, c Context, kind Kind, via *prober) (ProbedKind, error) {
	out := ProbedKind{Kind: kind}
	w, err := s.wish(v, c, kind)
	if err != nil {
		return out, err
	}
	w.via = via
	if err := s.await(ctx, w, true); err != nil {
		if errors.Is(ctx.Err(), context.Canceled) {
			return out, err
		}
		f, ok := fault.As(err)
		if !ok {
			return out, err
		}
		out.Failure = f
		return out, nil
	}
	got, err := s.look(ctx, &w, time.Hour)
	if err != nil {
		return out, err
	}
	if got.fresh {
		out.Revision, err = s.revision(ctx, w, got, "")
	} else {
		out.Revision, err = s.lastGood(ctx, w, got, nil)
	}
	if err != nil {
		return out, err
	}
	for i := range out.Revision.Definitions {
		if out.Revision.Definitions[i].Callable() {
			out.Callable++
		} else {
			out.Quarantined++
		}
	}
	return out, nil
}

// Declares reports whether capabilities name the feature that lists a kind.
func Declares(capabilities json.RawMessage, kind Kind) bool {
	members := decodeMembers(capabilities)
	feature := map[Kind]string{Tool: "tools", Resource: "resources", ResourceTemplate: "resources", Prompt: "prompts"}[kind]
	raw, ok := members[feature]
	return ok && string(raw) != "null"
}

// Definitions returns everything that a server offers of one kind, callable or
// not: the latest list that any context of the tenant saw, or a new one in the
// admin's own context when there is none or refresh is set. Stale says that the
// list is known to be out of date.
func (s *Service) Definitions(ctx context.Context, p tenant.Principal, idOrName string, kind Kind, refresh bool) (*Revision, error) {
	v, err := s.GetServer(ctx, p, idOrName)
	if err != nil {
		return nil, err
	}
	if refresh {
		return s.Current(ctx, v, adminContext(p), kind, 0)
	}
	row, err := s.latest(ctx, p.Tenant, v, kind)
	if err != nil {
		return nil, err
	}
	if row == nil {
		return s.Current(ctx, v, adminContext(p), kind, time.Hour)
	}
	c, err := s.content(ctx, p.Tenant, v.Name, row.revisionID, row.contentDigest)
	if err != nil {
		return nil, err
	}
	r := c.revision(p.Tenant, row)
	if row.invalidated > row.generation || row.failures > 0 {
		r.Stale, r.StaleReason = true, firstText(row.staleReason, "a later list failed")
	}
	return r, nil
}

// latest returns the row of the list made last, nil when there is none.
func (s *Service) latest(ctx context.Context, t tenant.ID, v Server, kind Kind) (*seen, error) {
	var row *seen
	err := s.o.DB.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(`SELECT `+seenColumns+seenFrom+`
			   AND c.registration = $4 AND c.revision_id IS NOT NULL
			 ORDER BY c.generation DESC
			 LIMIT 1`, t, v.ID, kind, v.Registration).Query(func(rows pgx.Rows) error {
			list, err := pgx.CollectRows(rows, scanSeen)
			if len(list) > 0 {
				row = &list[0]
			}
			return err
		})
	})
	return row, err
}

// Completes reports whether the server completes arguments. Before 2025-03-26 a
// server had no way to declare it.
func (r *Revision) Completes() bool {
	return len(decodeMembers(r.Capabilities)["completions"]) > 0 || r.ProtocolVersion < "2025-03-26"
}
