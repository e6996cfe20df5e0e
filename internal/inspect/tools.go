// Package inspect shows what a session's user may use: for each server of the
// session what is offered, cut to what the contract names and pins and to whom
// it lets use it. It calls nothing.
package inspect

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	// listWait bounds how long one server may hold up the list of all.
	listWait = 8 * time.Second
	// listAtOnce bounds the servers asked at a time for one list.
	listAtOnce = 8
)

// Sessions finds the session whose tools are listed.
type Sessions interface {
	Get(ctx context.Context, p tenant.Principal, id string) (*sessions.Session, error)
}

// Catalog finds registrations and what they offer.
type Catalog interface {
	GetServer(ctx context.Context, p tenant.Principal, idOrName string) (catalog.Server, error)
	Current(ctx context.Context, srv catalog.Server, c catalog.Context, kind catalog.Kind, maxAge time.Duration) (*catalog.Revision, error)
}

// Contracts finds the policy of a server.
type Contracts interface {
	Active(ctx context.Context, t tenant.ID, serverID string) (*authz.Active, error)
}

// Service lists tools.
type Service struct {
	sessions  Sessions
	catalog   Catalog
	contracts Contracts
}

// NewService returns the service.
func NewService(s Sessions, c Catalog, k Contracts) (*Service, error) {
	if s == nil || c == nil || k == nil {
		return nil, errors.New("inspect: sessions, catalog and contracts are needed")
	}
	return &Service{sessions: s, catalog: c, contracts: k}, nil
}

// Tool is one tool that the user may propose to call.
type Tool struct {
	Server     string
	Origin     string
	Definition *catalog.Definition
	Rule       *contract.Tool
}

// Finding is a remark about one server of the list.
type Finding struct {
	Code   string
	Detail string
}

// Tools is what a user may use. Revision changes exactly when the list does, so
// that an answer encoded once can be kept by it.
type Tools struct {
	Revision string
	Tools    []Tool
	Findings []Finding
}

// Finding codes of a list.
const (
	FindingUnavailable = "SERVER_UNAVAILABLE"
	FindingNoContract  = "NO_ACTIVE_CONTRACT"
	FindingVersion     = "VERSION_NOT_ALLOWED"
)

// Tools lists what the caller's user may use in a session. A server that cannot
// be asked within eight seconds is a finding and holds up nothing. A query keeps
// the tools whose name, title or description contains each of its words.
func (s *Service) Tools(ctx context.Context, p tenant.Principal, sessionID, query string) (Tools, error) {
	ses, err := s.sessions.Get(ctx, p, sessionID)
	if err != nil {
		return Tools{}, err
	}
	if !ses.Open(time.Now()) {
		return Tools{}, fault.New(fault.Precondition, "SESSION_CLOSED", "the session is closed or has expired")
	}
	parts := make([]part, len(ses.ServerIDs))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(listAtOnce)
	for i, id := range ses.ServerIDs {
		g.Go(func() (err error) {
			parts[i], err = s.server(gctx, p, ses, id)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return Tools{}, err
	}
	return assemble(parts, strings.Fields(strings.ToLower(query))), nil
}

// part is what one server gives to a list.
type part struct {
	key      string // changes when the tools do
	tools    []Tool
	findings []Finding
}

func (s *Service) server(ctx context.Context, p tenant.Principal, ses *sessions.Session, id string) (part, error) {
	srv, err := s.catalog.GetServer(ctx, p, id)
	if fault.Is(err, fault.NotFound) {
		return part{key: "gone " + id}, nil
	}
	if err != nil {
		return part{}, err
	}
	active, err := s.contracts.Active(ctx, p.Tenant, id)
	if err != nil {
		return part{}, err
	}
	if active == nil {
		return note(id, FindingNoContract, srv.Name+" has no active contract"), nil
	}
	wait, cancel := context.WithTimeout(ctx, listWait)
	defer cancel()
	rev, err := s.catalog.Current(wait, srv, catalog.Context{Tenant: p.Tenant, Subject: ses.Subject, Session: ses.ID},
		catalog.Tool, active.Contract.Limits.DefinitionAge.Read)
	if err != nil {
		if ctx.Err() != nil {
			return part{}, fault.New(fault.Deadline, "DEADLINE", "the list was not ready in time").Cause(err)
		}
		return note(id, FindingUnavailable, srv.Name+": "+publicText(err)), nil
	}
	return allowed(p, srv, active, rev), nil
}

func note(id, code, detail string) part {
	return part{key: code + id + detail, findings: []Finding{{Code: code, Detail: detail}}}
}

func publicText(err error) string {
	if f, ok := fault.As(err); ok && f.Kind != fault.Internal {
		return f.Message
	}
	return "its tools cannot be listed now"
}

// allowed cuts what is offered to what the contract and the principal allow.
func allowed(p tenant.Principal, srv catalog.Server, a *authz.Active, rev *catalog.Revision) part {
	c := a.Contract
	if !c.AllowsVersion(rev.ProtocolVersion) {
		return note(srv.ID, FindingVersion, srv.Name+" speaks version "+rev.ProtocolVersion+", which its contract does not allow")
	}
	out := part{}
	key := []string{srv.ID, srv.Name, srv.Origin, c.ID, rev.ID}
	if rev.Stale {
		out.findings = append(out.findings, Finding{Code: catalog.FindingStale, Detail: srv.Name + ": " + rev.StaleReason})
		key = append(key, rev.StaleReason)
	}
	for _, f := range rev.Findings {
		out.findings = append(out.findings, Finding{Code: f.Code, Detail: srv.Name + ": " + f.Detail})
	}
	for i := range rev.Definitions {
		d := &rev.Definitions[i]
		t, ok := c.Tool(d.Name)
		if !ok || !d.Callable() || !t.Pins(d.Digest) || !c.AllowsMethod("tools/call") ||
			!t.Subjects.Allow(p.Subject.String(), p.Groups, p.Project) {
			continue
		}
		out.tools = append(out.tools, Tool{Server: srv.Name, Origin: srv.Origin, Definition: d, Rule: t})
		key = append(key, d.Digest)
	}
	out.key = strings.Join(key, "\x00")
	return out
}

func assemble(parts []part, words []string) Tools {
	out := Tools{}
	h := sha256.New()
	for _, p := range parts {
		h.Write([]byte(p.key))
		h.Write([]byte{1})
		for _, t := range p.tools {
			if contains(t.Definition, words) {
				out.Tools = append(out.Tools, t)
			}
		}
		out.Findings = append(out.Findings, p.findings...)
	}
	h.Write([]byte(strings.Join(words, " ")))
	out.Revision = hex.EncodeToString(h.Sum(nil)[:16])
	return out
}

func contains(d *catalog.Definition, words []string) bool {
	if len(words) == 0 {
		return true
	}
	text := strings.ToLower(d.Name + "\x00" + d.Title + "\x00" + d.Description)
	return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) })
}
