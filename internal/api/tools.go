package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// ActiveContracts finds compiled contracts; *authz.Service is one.
type ActiveContracts interface {
	Active(ctx context.Context, t tenant.ID, serverID string) (*authz.Active, error)
}

// Offers are the lists of servers as users see them, and the encoded answers
// made of them; *catalog.Service is one.
type Offers interface {
	Current(ctx context.Context, v catalog.Server, c catalog.Context, kind catalog.Kind, maxAge time.Duration) (*catalog.Revision, error)
	Encoded(r *catalog.Revision, allowedKey string, build func() []byte) []byte
}

const (
	// maxListing bounds the servers that one request asks at a time.
	maxListing = 8
	// maxMissing bounds the findings about single tools of a server.
	maxMissing = 20
)

type catalogService struct {
	pb.UnimplementedCatalogServiceServer
	sessions Sessions
	servers  Servers
	active   ActiveContracts
	offers   Offers
	now      func() time.Time
}

// offer is what one server of a session offers to its user.
type offer struct {
	server   catalog.Server
	revision *catalog.Revision
	contract *contract.Contract
	allowed  []int // places in revision.Definitions
	findings []*pb.Finding
	key      string // equal for equal lists of this server
}

// ListTools answers offered ∩ contract ∩ principal. A server that cannot be
// listed is a finding and hides no other.
func (s *catalogService) ListTools(ctx context.Context, in *pb.ListToolsRequest) (*pb.ListToolsResponse, error) {
	p := caller(ctx)
	ses, err := s.sessions.Get(ctx, p, in.GetSessionId())
	if err != nil {
		return nil, err
	}
	if !ses.Open(s.now()) {
		return nil, fault.New(fault.Precondition, "SESSION_CLOSED", "the session is closed or has expired")
	}
	words := strings.Fields(strings.ToLower(in.GetQuery()))
	offers := make([]*offer, len(ses.ServerIDs))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(maxListing)
	for i, id := range ses.ServerIDs {
		g.Go(func() (err error) {
			offers[i], err = s.offer(gctx, p, ses, id, words)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return s.answer(ctx, offers, len(words) == 0), nil
}

// offer finds what one server offers; nil when it is none of the caller's.
func (s *catalogService) offer(ctx context.Context, p tenant.Principal, ses *sessions.Session, id string, words []string) (*offer, error) {
	v, err := s.servers.GetServer(ctx, p, id)
	if fault.Is(err, fault.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	active, err := s.active.Active(ctx, p.Tenant, id)
	if err != nil || active == nil {
		return nil, err
	}
	o := &offer{server: v, contract: active.Contract}
	where := catalog.Context{Tenant: p.Tenant, Subject: ses.Subject, Session: ses.ID}
	o.revision, err = s.offers.Current(ctx, v, where, catalog.Tool, o.contract.Limits.DefinitionAge.Read)
	if err != nil {
		f, ok := fault.As(err)
		if !ok || f.Kind == fault.Internal || ctx.Err() != nil {
			return nil, err
		}
		o.note(f.Reason, f.Message)
		return o, nil
	}
	for _, f := range o.revision.Findings {
		o.note(f.Code, f.Detail)
	}
	if check, ok := mismatch(p, ses, o, active.Revision); !ok {
		o.note("CONTRACT_MISMATCH", string(check.Check)+": "+check.Detail)
		return o, nil
	}
	o.allow(p, words)
	return o, nil
}

func (o *offer) note(code, text string) {
	o.findings = append(o.findings, &pb.Finding{Code: code, Detail: o.server.Name + ": " + foreign(text)})
}

// aboutServer are the checks of a decision that do not depend on the tool.
var aboutServer = map[authz.Check]bool{
	authz.CheckProtocol: true, authz.CheckHost: true, authz.CheckClient: true, authz.CheckServer: true, authz.CheckOrigin: true,
	authz.CheckTransport: true, authz.CheckMethod: true, authz.CheckCapability: true, authz.CheckAudience: true, authz.CheckScopes: true,
}

// mismatch asks the decision itself whether any call to this server could pass,
// so that no tool is shown that every call would be denied.
func mismatch(p tenant.Principal, ses *sessions.Session, o *offer, revision int) (authz.Result, bool) {
	d := authz.Decide(authz.Input{
		Principal: p, SessionID: ses.ID, SessionOpen: true, InSession: true, Servers: ses.ServerIDs,
		Server: calls.ServerFacts(o.server), Contract: o.contract, Revision: revision,
		ProtocolVersion: o.revision.ProtocolVersion, Declared: calls.Declares(o.revision, contract.KindTool),
		Proposal: authz.Proposal{Kind: contract.KindTool},
	})
	for _, c := range d.Checks {
		if aboutServer[c.Check] && !c.Passed {
			return c, false
		}
	}
	return authz.Result{}, true
}

// allow keeps the definitions that are pinned and that the principal may use,
// and notes what the contract has for this principal but cannot be shown.
func (o *offer) allow(p tenant.Principal, words []string) {
	subject := p.Subject.String()
	bits := make([]byte, (len(o.revision.Definitions)+7)/8)
	shown := 0
	for i := range o.revision.Definitions {
		d := &o.revision.Definitions[i]
		t, ok := o.contract.Tool(d.Name)
		if !ok || !d.Callable() || !t.Pins(d.Digest) || !t.Subjects.Allow(subject, p.Groups, p.Project) {
			continue
		}
		shown++ // names are unique among what is callable
		if mentions(d, words) {
			o.allowed = append(o.allowed, i)
			bits[i/8] |= 1 << (i % 8)
		}
	}
	o.key = strings.Join([]string{"mcp", o.server.ID, o.server.Name, o.server.Origin, o.contract.ID, string(bits)}, "\x00")
	var usable []*contract.Tool
	for _, t := range o.contract.Tools {
		if t.Subjects.Allow(subject, p.Groups, p.Project) {
			usable = append(usable, t)
		}
	}
	if shown < len(usable) {
		o.noteMissing(usable)
	}
}

// noteMissing says of each tool why it is not shown, whatever was searched for.
func (o *offer) noteMissing(usable []*contract.Tool) {
	offered := make(map[string]*catalog.Definition, len(o.revision.Definitions))
	for i := range o.revision.Definitions {
		d := &o.revision.Definitions[i]
		if offered[d.Name] == nil || d.Callable() {
			offered[d.Name] = d
		}
	}
	missing := 0
	for _, t := range usable {
		code, why := "", ""
		switch d := offered[t.Name]; {
		case d == nil:
			code, why = "TOOL_NOT_OFFERED", "the contract has it, but the server does not offer it"
		case !d.Callable():
			code, why = "DEFINITION_QUARANTINED", d.Quarantine
		case !t.Pins(d.Digest):
			code, why = "DEFINITION_CHANGED", "its definition is not the one that the contract pins"
		default:
			continue
		}
		if missing++; missing <= maxMissing {
			o.note(code, t.Name+": "+why)
		}
	}
	if missing > maxMissing {
		o.note("MORE_TOOLS_MISSING", fmt.Sprintf("and %d more tools of the contract are not shown", missing-maxMissing))
	}
}

func mentions(d *catalog.Definition, words []string) bool {
	if len(words) == 0 {
		return true
	}
	text := strings.ToLower(d.Name + "\n" + d.Title + "\n" + d.Description)
	for _, w := range words {
		if !strings.Contains(text, w) {
			return false
		}
	}
	return true
}

// answer puts the offers together: over REST from bytes that are encoded once
// for each distinct list, over gRPC from messages.
func (s *catalogService) answer(ctx context.Context, offers []*offer, keep bool) *pb.ListToolsResponse {
	out := &pb.ListToolsResponse{}
	digest := sha256.New()
	for _, o := range offers {
		if o == nil {
			continue
		}
		out.Findings = append(out.Findings, o.findings...)
		if len(o.allowed) > 0 {
			digest.Write([]byte(o.revision.ID + "\x00" + o.key + "\x01"))
		}
	}
	out.Revision = hex.EncodeToString(digest.Sum(nil)[:16])
	if overREST(ctx) {
		answerEncoded(ctx, s.encode(out, offers, keep))
		return out
	}
	for _, o := range offers {
		if o != nil {
			out.Tools = append(out.Tools, each(o.allowed, o.tool)...)
		}
	}
	return out
}

// encode writes the answer; keep says that its parts are worth remembering.
func (s *catalogService) encode(head *pb.ListToolsResponse, offers []*offer, keep bool) []byte {
	parts := make([][]byte, 0, len(offers))
	size := 256
	for _, o := range offers {
		if o == nil || len(o.allowed) == 0 {
			continue
		}
		part := []byte(nil)
		if keep {
			part = s.offers.Encoded(o.revision, o.key, o.encode)
		} else {
			part = o.encode()
		}
		parts, size = append(parts, part), size+len(part)+1
	}
	findings := marshal(&pb.ListToolsResponse{Revision: head.GetRevision(), Findings: head.GetFindings()})
	const hole = `"tools":[`
	at := strings.Index(string(findings), hole) + len(hole)
	b := append(make([]byte, 0, size+len(findings)), findings[:at]...)
	for i, part := range parts {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, part...)
	}
	return append(b, findings[at:]...)
}

// encode writes the tools of one server, separated by commas.
func (o *offer) encode() []byte {
	var b []byte
	for i, at := range o.allowed {
		if i > 0 {
			b = append(b, ',')
		}
		m := o.tool(at).ProtoReflect()
		b = appendMessage(b, m, planOf(m.Descriptor()))
	}
	return b
}

func (o *offer) tool(at int) *pb.Tool {
	d := &o.revision.Definitions[at]
	t, _ := o.contract.Tool(d.Name)
	return &pb.Tool{
		Server: o.server.Name, Name: foreign(d.Name), ModelName: d.ModelName, Definition: raw(d.Raw), DefinitionDigest: d.Digest,
		Effect:   word[pb.Tool_Effect](pb.Tool_Effect_value, string(t.Effect)),
		Consent:  word[pb.Tool_ConsentRule](pb.Tool_ConsentRule_value, string(t.Consent)),
		Source:   &pb.Tool_Source{Server: o.server.Name, Origin: o.server.Origin, Untrusted: true},
		Findings: each(d.Findings, findingMessage),
	}
}
