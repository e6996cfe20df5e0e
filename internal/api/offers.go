package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

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
	// maxMissing bounds the findings about single items of a server.
	maxMissing = 20
)

type catalogService struct {
	pb.UnimplementedCatalogServiceServer
	sessions Sessions
	servers  Servers
	active   ActiveContracts
	offers   Offers
	calls    Calls
	follows  Subscriptions
	now      func() time.Time
}

// noun is what one of the lists shows.
type noun struct {
	kind catalog.Kind
	call contract.Kind
	// method lists it; empty where every contract may.
	method string
	// field holds the items in the answer, one is the word for an item, and code the
	// same in the codes of findings.
	field, one, code string
	// planned are the names and terms that the contract has for it, for what is named
	// and not matched; nil for patterns.
	planned func(c *contract.Contract) []planned
	message func(o *offer, d *catalog.Definition, t *contract.Terms) proto.Message
}

type planned struct {
	name  string
	terms *contract.Terms
}

// terms returns what the contract says about an item, nil when it has nothing that
// lets the principal use it.
func (n *noun) terms(c *contract.Contract, name string, may func(*contract.Terms) bool) *contract.Terms {
	if n.kind != catalog.ResourceTemplate {
		if t, ok := c.Terms(n.call, name); ok && may(t) {
			return t
		}
		return nil
	}
	for _, r := range c.Resources {
		if r.Overlaps(name) && may(&r.Terms) {
			return &r.Terms
		}
	}
	return nil
}

// idle reports whether the contract has nothing of the kind, so that its server is
// not even asked.
func (n *noun) idle(c *contract.Contract) bool {
	switch n.call {
	case contract.KindResource:
		return len(c.Resources) == 0
	case contract.KindPrompt:
		return len(c.Prompts) == 0
	}
	return false
}

// offer is what one server of a session offers to its user.
type offer struct {
	noun     *noun
	server   catalog.Server
	revision *catalog.Revision
	contract *contract.Contract
	allowed  []item
	findings []*pb.Finding
	key      string // equal for equal lists of this server
}

// item is a place in the revision's definitions, and the terms it is shown with.
type item struct {
	at    int
	terms *contract.Terms
}

// listing is the answer to one of the lists, before it is written.
type listing struct {
	offers   []*offer
	revision string
	findings []*pb.Finding
	// keep says that its parts are worth remembering.
	keep bool
}

// list finds offered ∩ contract ∩ principal. A server that cannot be listed is a
// finding and hides no other.
func (s *catalogService) list(ctx context.Context, sessionID, query string, n *noun) (*listing, error) {
	p := caller(ctx)
	ses, err := s.sessions.Get(ctx, p, sessionID)
	if err != nil {
		return nil, err
	}
	if !ses.Open(s.now()) {
		return nil, fault.New(fault.Precondition, "SESSION_CLOSED", "the session is closed or has expired")
	}
	words := strings.Fields(strings.ToLower(query))
	offers := make([]*offer, len(ses.ServerIDs))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(maxListing)
	for i, id := range ses.ServerIDs {
		g.Go(func() (err error) {
			offers[i], err = s.offer(gctx, p, ses, id, n, words)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return compose(offers, len(words) == 0), nil
}

// compose puts the offers together.
func compose(offers []*offer, keep bool) *listing {
	out := &listing{keep: keep}
	digest := sha256.New()
	for _, o := range offers {
		if o == nil {
			continue
		}
		out.findings = append(out.findings, o.findings...)
		if len(o.allowed) > 0 {
			out.offers = append(out.offers, o)
			digest.Write([]byte(o.revision.ID + "\x00" + o.key + "\x01"))
		}
	}
	out.revision = hex.EncodeToString(digest.Sum(nil)[:16])
	return out
}

// offer finds what one server offers; nil when it is none of the caller's.
func (s *catalogService) offer(ctx context.Context, p tenant.Principal, ses *sessions.Session, id string, n *noun, words []string) (*offer, error) {
	v, err := s.servers.GetServer(ctx, p, id)
	if fault.Is(err, fault.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	active, err := s.active.Active(ctx, p.Tenant, id)
	if err != nil || active == nil || n.idle(active.Contract) {
		return nil, err
	}
	o := &offer{noun: n, server: v, contract: active.Contract}
	if n.method != "" && !o.contract.AllowsMethod(n.method) {
		o.note("CONTRACT_MISMATCH", string(authz.CheckMethod)+": the contract does not allow "+n.method)
		return o, nil
	}
	where := catalog.Context{Tenant: p.Tenant, Subject: ses.Subject, Session: ses.ID}
	o.revision, err = s.offers.Current(ctx, v, where, n.kind, o.contract.Limits.DefinitionAge.Read)
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

// aboutServer are the checks of a decision that do not depend on what is called.
var aboutServer = map[authz.Check]bool{
	authz.CheckProtocol: true, authz.CheckHost: true, authz.CheckClient: true, authz.CheckServer: true, authz.CheckOrigin: true,
	authz.CheckTransport: true, authz.CheckMethod: true, authz.CheckCapability: true, authz.CheckAudience: true, authz.CheckScopes: true,
}

// mismatch asks the decision itself whether any call to this server could pass,
// so that nothing is shown that every call would be denied.
func mismatch(p tenant.Principal, ses *sessions.Session, o *offer, revision int) (authz.Result, bool) {
	d := authz.Decide(authz.Input{
		Principal: p, SessionID: ses.ID, SessionOpen: true, InSession: true, Servers: ses.ServerIDs,
		Server: calls.ServerFacts(o.server), Contract: o.contract, Revision: revision,
		ProtocolVersion: o.revision.ProtocolVersion, Declared: calls.Declares(o.revision, o.noun.call),
		Proposal: authz.Proposal{Kind: o.noun.call},
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
	may := func(t *contract.Terms) bool { return t.Subjects.Allow(subject, p.Groups, p.Project) }
	bits := make([]byte, (len(o.revision.Definitions)+7)/8)
	var consents []byte // which terms are shown may depend on the principal
	shown, aside := 0, 0
	for i := range o.revision.Definitions {
		d := &o.revision.Definitions[i]
		t := o.noun.terms(o.contract, d.Name, may)
		if t == nil {
			continue
		}
		if !d.Callable() {
			if aside++; o.noun.planned == nil && aside <= maxMissing {
				o.note("DEFINITION_QUARANTINED", d.Name+": "+d.Quarantine)
			}
			continue
		}
		if !t.Pins(d.Digest) {
			continue
		}
		shown++ // names are unique among what is callable
		if mentions(d, words) {
			o.allowed = append(o.allowed, item{i, t})
			bits[i/8] |= 1 << (i % 8)
			consents = append(consents, t.Consent[0])
		}
	}
	o.key = strings.Join([]string{"mcp", o.server.ID, o.server.Name, o.server.Origin, o.contract.ID, string(bits), string(consents)}, "\x00")
	if o.noun.planned == nil {
		return
	}
	usable := slices.DeleteFunc(o.noun.planned(o.contract), func(x planned) bool { return !may(x.terms) })
	if shown < len(usable) {
		o.noteMissing(usable)
	}
}

// noteMissing says of each name why it is not shown, whatever was searched for.
func (o *offer) noteMissing(usable []planned) {
	offered := make(map[string]*catalog.Definition, len(o.revision.Definitions))
	for i := range o.revision.Definitions {
		d := &o.revision.Definitions[i]
		if offered[d.Name] == nil || d.Callable() {
			offered[d.Name] = d
		}
	}
	missing := 0
	for _, x := range usable {
		code, why := "", ""
		switch d := offered[x.name]; {
		case d == nil:
			code, why = o.noun.code+"_NOT_OFFERED", "the contract has it, but the server does not offer it"
		case !d.Callable():
			code, why = "DEFINITION_QUARANTINED", d.Quarantine
		case !x.terms.Pins(d.Digest):
			code, why = "DEFINITION_CHANGED", "its definition is not the one that the contract pins"
		default:
			continue
		}
		if missing++; missing <= maxMissing {
			o.note(code, x.name+": "+why)
		}
	}
	if missing > maxMissing {
		o.note("MORE_"+o.noun.code+"S_MISSING", fmt.Sprintf("and %d more %ss of the contract are not shown", missing-maxMissing, o.noun.one))
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

// encoded answers over REST from bytes that are encoded once for each distinct
// list, and reports whether it did; head is the answer without its items.
func (s *catalogService) encoded(ctx context.Context, l *listing, n *noun, head proto.Message) bool {
	if !overREST(ctx) {
		return false
	}
	parts := make([][]byte, 0, len(l.offers))
	size := 256
	for _, o := range l.offers {
		var part []byte
		if l.keep {
			part = s.offers.Encoded(o.revision, o.key, o.encode)
		} else {
			part = o.encode()
		}
		parts, size = append(parts, part), size+len(part)+1
	}
	frame := marshal(head)
	hole := `"` + n.field + `":[`
	at := strings.Index(string(frame), hole) + len(hole)
	b := append(make([]byte, 0, size+len(frame)), frame[:at]...)
	for i, part := range parts {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, part...)
	}
	answerEncoded(ctx, append(b, frame[at:]...))
	return true
}

// encode writes the items of one server, separated by commas.
func (o *offer) encode() []byte {
	var b []byte
	for i, x := range o.allowed {
		if i > 0 {
			b = append(b, ',')
		}
		m := o.message(x).ProtoReflect()
		b = appendMessage(b, m, planOf(m.Descriptor()))
	}
	return b
}

func (o *offer) message(x item) proto.Message {
	return o.noun.message(o, &o.revision.Definitions[x.at], x.terms)
}

// messages are the items of a list as they are sent over gRPC.
func messages[M proto.Message](l *listing) (out []M) {
	for _, o := range l.offers {
		for _, x := range o.allowed {
			out = append(out, o.message(x).(M))
		}
	}
	return out
}
