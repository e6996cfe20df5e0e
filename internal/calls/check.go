package calls

import (
	"context"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// DryRun is a call that is not made. Source is a contract to try, Revision a
// stored one; with neither it is the active one. The subject is who would call.
type DryRun struct {
	Server    string
	Revision  int
	Source    []byte
	Subject   tenant.Subject
	Groups    []string
	Project   string
	Tool      string
	Resource  string
	Prompt    string
	Arguments []byte
}

// DryRunResult is what the call would come to.
type DryRunResult struct {
	Decision        authz.Decision
	Effect          Effect
	Consent         string
	ArgumentsDigest string
}

// Definitions finds what admins see of a server.
type Definitions interface {
	Definitions(ctx context.Context, p tenant.Principal, idOrName string, kind catalog.Kind, refresh bool) (*catalog.Revision, error)
}

// Check decides a call exactly as Propose would, in a session that is open and
// has called nothing yet. Nothing is called and nothing is stored.
func (s *Service) Check(ctx context.Context, p tenant.Principal, defs Definitions, r DryRun) (DryRunResult, error) {
	srv, err := s.deps.Catalog.GetServer(ctx, p, r.Server)
	if err != nil {
		return DryRunResult{}, err
	}
	to, bad := readTarget(r.Tool, r.Resource, r.Prompt, r.Arguments)
	if len(bad) > 0 {
		return DryRunResult{}, fault.InvalidFields(bad...)
	}
	args, err := parseArguments(r.Arguments)
	if err != nil {
		return DryRunResult{}, err
	}
	who := tenant.Principal{Tenant: p.Tenant, Role: tenant.RoleService, Subject: r.Subject, Groups: r.Groups, Project: r.Project}
	pl := &plan{principal: who, session: sessions.Dry(r.Subject, srv.ID), server: srv}
	if pl.active, err = s.dryContract(ctx, p.Tenant, srv.ID, r); err != nil {
		return DryRunResult{}, err
	}
	if pl.active != nil {
		pl.terms, _ = pl.active.Contract.Terms(to.kind, to.name)
	}
	pl.call = &Call{Tenant: p.Tenant, ID: resource.NewID(resource.Call), SessionID: pl.session.ID, Subject: r.Subject, ServerID: srv.ID,
		ServerName: srv.Name, Origin: srv.Origin, Kind: to.kind, Name: to.name, RequestID: "dry-run"}
	if err := pl.carryKey(args); err != nil {
		return DryRunResult{}, err
	}
	rev, err := defs.Definitions(ctx, p, srv.ID, pl.decidedOn(), false)
	if err != nil {
		return DryRunResult{}, err
	}
	pl.adopt(rev)
	if err := s.decide(ctx, pl); err != nil {
		return DryRunResult{}, err
	}
	return DryRunResult{Decision: pl.decision, Effect: pl.call.Effect, Consent: string(pl.call.ConsentRule),
		ArgumentsDigest: pl.call.ArgumentsDigest}, nil
}

func (s *Service) dryContract(ctx context.Context, t tenant.ID, serverID string, r DryRun) (*authz.Active, error) {
	switch {
	case len(r.Source) > 0:
		c, err := contract.Parse(r.Source)
		if err != nil {
			return nil, err
		}
		return &authz.Active{Contract: c}, nil
	case r.Revision > 0:
		return s.deps.Contracts.At(ctx, t, serverID, r.Revision)
	}
	return s.deps.Contracts.Active(ctx, t, serverID)
}
