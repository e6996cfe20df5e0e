package api

import (
	"context"
	"encoding/json"
	"strings"

	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Servers keeps registrations and asks servers what they offer;
// *catalog.Service is one.
type Servers interface {
	CreateServer(ctx context.Context, p tenant.Principal, spec catalog.ServerSpec, requestID string) (catalog.Server, error)
	GetServer(ctx context.Context, p tenant.Principal, idOrName string) (catalog.Server, error)
	ListServers(ctx context.Context, p tenant.Principal, after string, limit int) ([]catalog.Server, error)
	UpdateServer(ctx context.Context, p tenant.Principal, idOrName string, up catalog.ServerUpdate) (catalog.Server, error)
	DeleteServer(ctx context.Context, p tenant.Principal, idOrName string) error
	ProbeServer(ctx context.Context, p tenant.Principal, idOrName string) (catalog.Probe, error)
	Definitions(ctx context.Context, p tenant.Principal, idOrName string, kind catalog.Kind, refresh bool) (*catalog.Revision, error)
}

type serverService struct {
	pb.UnimplementedServerServiceServer
	servers Servers
	active  ActiveContracts
}

func (s *serverService) CreateServer(ctx context.Context, in *pb.CreateServerRequest) (*pb.Server, error) {
	id := minted(in.GetRequestId())
	spec := catalog.ServerSpec{
		Name: in.GetName(), DisplayName: in.GetDisplayName(), URL: in.GetHttp().GetUrl(), StreamURL: in.GetSse().GetUrl(), Runtime: in.GetStdio().GetRuntime(),
		SharedStateAcknowledged: in.GetSharedStateAcknowledged(),
	}
	if in.GetIsolation() != pb.Server_ISOLATION_UNSPECIFIED {
		spec.Isolation = catalog.Isolation(in.GetIsolation().String())
	}
	if in.GetAuthorization() != nil {
		spec.AuthorizationMode = in.GetAuthorization().GetMode().String()
	}
	v, err := s.servers.CreateServer(ctx, caller(ctx), spec, id)
	if err != nil {
		return nil, err
	}
	out := serverMessage(v)
	out.RequestId = &id
	return out, nil
}

func (s *serverService) GetServer(ctx context.Context, in *pb.GetServerRequest) (*pb.Server, error) {
	v, err := s.servers.GetServer(ctx, caller(ctx), in.GetServer())
	if err != nil {
		return nil, err
	}
	return serverMessage(v), nil
}

func (s *serverService) ListServers(ctx context.Context, in *pb.ListServersRequest) (*pb.ListServersResponse, error) {
	p, err := readPage(in, "servers")
	if err != nil {
		return nil, err
	}
	vs, err := s.servers.ListServers(ctx, caller(ctx), p.after, p.limit+1)
	if err != nil {
		return nil, err
	}
	vs, next := cut(p, vs, func(v catalog.Server) string { return v.Name })
	return &pb.ListServersResponse{Servers: each(vs, serverMessage), NextPageToken: next}, nil
}

// updatable are the fields of UpdateServerRequest that a mask may name.
var updatable = map[string]bool{
	"display_name": true, "http": true, "http.url": true, "sse": true, "sse.url": true, "isolation": true,
	"authorization": true, "authorization.mode": true, "shared_state_acknowledged": true,
}

func (s *serverService) UpdateServer(ctx context.Context, in *pb.UpdateServerRequest) (*pb.Server, error) {
	up, err := serverUpdate(in)
	if err != nil {
		return nil, err
	}
	v, err := s.servers.UpdateServer(ctx, caller(ctx), in.GetServer(), up)
	if err != nil {
		return nil, err
	}
	return serverMessage(v), nil
}

// serverUpdate reads what is to change. Without a mask that is what is present;
// with one, a field that is named but absent is set to its default, which only
// displayName and sharedStateAcknowledged have.
func serverUpdate(in *pb.UpdateServerRequest) (up catalog.ServerUpdate, err error) {
	named := map[string]bool{}
	for _, path := range in.GetUpdateMask().GetPaths() {
		if !updatable[path] {
			return up, fault.Field1("updateMask", "names %s, which cannot be updated", jsonName(path))
		}
		top, _, _ := strings.Cut(path, ".")
		named[top] = true
	}
	present := map[string]bool{
		"display_name": in.DisplayName != nil, "http": in.Http != nil, "sse": in.Sse != nil, "isolation": in.Isolation != nil,
		"authorization": in.Authorization != nil, "shared_state_acknowledged": in.SharedStateAcknowledged != nil,
	}
	if in.GetUpdateMask() == nil {
		named = present
	}
	for name, given := range present {
		if given && !named[name] {
			return up, fault.Field1(jsonName(name), "is not named by updateMask")
		}
		if !given && named[name] && name != "display_name" && name != "shared_state_acknowledged" {
			return up, fault.Field1(jsonName(name), "is named by updateMask but absent")
		}
	}
	if named["display_name"] {
		up.DisplayName = ptr(in.GetDisplayName())
	}
	if named["http"] {
		up.URL = ptr(in.GetHttp().GetUrl())
	}
	if named["sse"] {
		up.StreamURL = ptr(in.GetSse().GetUrl())
	}
	if named["isolation"] {
		up.Isolation = ptr(catalog.Isolation(in.GetIsolation().String()))
	}
	if named["authorization"] {
		up.AuthorizationMode = ptr(in.GetAuthorization().GetMode().String())
	}
	if named["shared_state_acknowledged"] {
		up.SharedStateAcknowledged = ptr(in.GetSharedStateAcknowledged())
	}
	return up, nil
}

func (s *serverService) DeleteServer(ctx context.Context, in *pb.DeleteServerRequest) (*emptypb.Empty, error) {
	if err := s.servers.DeleteServer(ctx, caller(ctx), in.GetServer()); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (s *serverService) ProbeServer(ctx context.Context, in *pb.ProbeServerRequest) (*pb.ProbeServerResponse, error) {
	probe, err := s.servers.ProbeServer(ctx, caller(ctx), in.GetServer())
	if err != nil {
		return nil, err
	}
	out := &pb.ProbeServerResponse{
		Reachable: probe.Reachable, Era: word[pb.Server_Era](pb.Server_Era_value, probe.Era), ProtocolVersion: foreign(probe.ProtocolVersion),
		Capabilities: raw(probe.Capabilities), Negotiation: duration(probe.Negotiation), Discovery: duration(probe.Discovery),
	}
	var info struct{ Name, Version string }
	if json.Unmarshal(probe.ServerInfo, &info) == nil { // foreign: what is not as expected is left out
		out.ImplementationName, out.ImplementationVersion = shortened(info.Name), shortened(info.Version)
	}
	for _, k := range probe.Kinds {
		switch n := int32(k.Callable + k.Quarantined); k.Kind {
		case catalog.Tool:
			out.Tools = n
		case catalog.Resource:
			out.Resources = n
		case catalog.ResourceTemplate:
			out.ResourceTemplates = n
		case catalog.Prompt:
			out.Prompts = n
		}
		if k.Revision != nil {
			out.Findings = append(out.Findings, each(k.Revision.Findings, findingMessage)...)
		}
		if k.Failure != nil && probe.Reachable {
			out.Findings = append(out.Findings, &pb.Finding{Code: k.Failure.Reason, Detail: foreign(k.Failure.Message)})
		}
	}
	if f := probe.Failure; f != nil {
		out.Failure = &pb.ProbeServerResponse_Failure{
			Layer: word[pb.ProbeServerResponse_Failure_Layer](pb.ProbeServerResponse_Failure_Layer_value, string(f.Layer)),
			Code:  f.Reason, Message: foreign(f.Message),
		}
	}
	return out, nil
}

func (s *serverService) ListDefinitions(ctx context.Context, in *pb.ListDefinitionsRequest) (*pb.ListDefinitionsResponse, error) {
	p := caller(ctx)
	v, err := s.servers.GetServer(ctx, p, in.GetServer())
	if err != nil {
		return nil, err
	}
	active, err := s.active.Active(ctx, p.Tenant, v.ID)
	if err != nil {
		return nil, err
	}
	first := firstKind(in.GetKind())
	r, err := s.servers.Definitions(ctx, p, v.ID, first, in.GetRefresh())
	if err != nil {
		return nil, err
	}
	out := &pb.ListDefinitionsResponse{Revision: r.ID, ObserveTime: stamp(r.Observed), Stale: r.Stale, StaleReason: foreign(r.StaleReason),
		Definitions: definitionMessages(r, active)}
	if in.GetKind() != pb.Definition_KIND_UNSPECIFIED {
		return out, nil
	}
	for _, kind := range catalog.Kinds {
		if kind == first || !catalog.Declares(r.Capabilities, kind) {
			continue
		}
		more, err := s.servers.Definitions(ctx, p, v.ID, kind, in.GetRefresh())
		switch f, ok := fault.As(err); {
		case err == nil:
			out.Definitions = append(out.Definitions, definitionMessages(more, active)...)
			out.Findings = append(out.Findings, each(more.Findings, findingMessage)...)
		case !ok || f.Kind == fault.Internal || ctx.Err() != nil:
			return nil, err
		default:
			out.Findings = append(out.Findings, &pb.Finding{Code: f.Reason, Detail: kind + ": " + foreign(f.Message)})
		}
	}
	return out, nil
}

// firstKind is the kind that the answer is about, tools unless another is asked for.
func firstKind(k pb.Definition_Kind) catalog.Kind {
	if k == pb.Definition_KIND_UNSPECIFIED {
		return catalog.Tool
	}
	return strings.ToLower(k.String())
}

func definitionMessages(r *catalog.Revision, active *authz.Active) (out []*pb.Definition) {
	for i := range r.Definitions {
		out = append(out, definitionMessage(&r.Definitions[i], active))
	}
	return out
}

func serverMessage(v catalog.Server) *pb.Server {
	out := &pb.Server{
		ServerId: v.ID, Name: v.Name, DisplayName: v.DisplayName, Origin: v.Origin,
		Isolation:               word[pb.Server_Isolation](pb.Server_Isolation_value, string(v.Isolation)),
		Authorization:           &pb.Server_Authorization{Mode: word[pb.Server_Authorization_Mode](pb.Server_Authorization_Mode_value, v.AuthorizationMode)},
		SharedStateAcknowledged: v.SharedStateAcknowledged, Revision: int32(v.Registration),
		Era: word[pb.Server_Era](pb.Server_Era_value, v.Era), ProtocolVersion: v.ProtocolVersion,
		CreateTime: stamp(v.CreateTime), UpdateTime: stamp(v.UpdateTime),
	}
	switch v.Transport {
	case catalog.HTTP:
		out.Transport = &pb.Server_Http_{Http: &pb.Server_Http{Url: v.URL}}
	case catalog.SSE:
		out.Transport = &pb.Server_Sse_{Sse: &pb.Server_Sse{Url: v.URL}}
	default:
		out.Transport = &pb.Server_Stdio_{Stdio: &pb.Server_Stdio{Runtime: v.Runtime}}
	}
	if v.ActiveContract > 0 {
		out.ActiveContract = &pb.Server_ActiveContract{ContractId: v.ActiveContractID, Revision: int32(v.ActiveContract)}
	}
	return out
}

func definitionMessage(d *catalog.Definition, active *authz.Active) *pb.Definition {
	out := &pb.Definition{
		Kind: word[pb.Definition_Kind](pb.Definition_Kind_value, strings.ToUpper(d.Kind)), Name: foreign(d.Name), DefinitionDigest: d.Digest, Definition: raw(d.Raw),
		Review: pb.Definition_UNPINNED, Quarantine: foreign(d.Quarantine), Findings: each(d.Findings, findingMessage),
	}
	if active == nil {
		return out
	}
	var t *contract.Terms
	for _, n := range []*noun{tools, resources, resourceTemplates, prompts} {
		if n.kind == d.Kind {
			t = n.terms(active.Contract, d.Name, func(*contract.Terms) bool { return true })
		}
	}
	switch {
	case t == nil:
	case t.Definition == contract.DefinitionAny:
		out.Review = pb.Definition_ANY
	case t.Pins(d.Digest):
		out.Review, out.PinnedDigest = pb.Definition_PINNED, t.Definition
	default:
		out.Review, out.PinnedDigest = pb.Definition_CHANGED, t.Definition
	}
	return out
}

func findingMessage(f catalog.Finding) *pb.Finding {
	return &pb.Finding{Code: f.Code, Detail: foreign(f.Detail)}
}
