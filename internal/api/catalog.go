package api

import (
	"context"

	"google.golang.org/protobuf/proto"

	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// The nouns of the lists.
var (
	tools = &noun{kind: catalog.Tool, call: contract.KindTool, field: "tools", one: "tool", code: "TOOL",
		planned: func(c *contract.Contract) []planned {
			return each(c.Tools, func(t *contract.Tool) planned { return planned{t.Name, &t.Terms} })
		},
		message: func(o *offer, d *catalog.Definition, t *contract.Terms) proto.Message {
			return &pb.Tool{
				Server: o.server.Name, Name: foreign(d.Name), ModelName: d.ModelName, Definition: raw(d.Raw), DefinitionDigest: d.Digest,
				Effect: word[pb.Tool_Effect](pb.Tool_Effect_value, string(t.Effect)), Consent: consentRule(t),
				Source: o.source(), Findings: each(d.Findings, findingMessage),
			}
		}}
	resources = &noun{kind: catalog.Resource, call: contract.KindResource, method: "resources/list", field: "resources",
		message: func(o *offer, d *catalog.Definition, t *contract.Terms) proto.Message {
			return &pb.Resource{
				Server: o.server.Name, Uri: foreign(d.Name), Definition: raw(d.Raw), DefinitionDigest: d.Digest,
				Consent: consentRule(t), Source: o.source(), Findings: each(d.Findings, findingMessage),
			}
		}}
	resourceTemplates = &noun{kind: catalog.ResourceTemplate, call: contract.KindResource, method: "resources/templates/list", field: "resourceTemplates",
		message: func(o *offer, d *catalog.Definition, t *contract.Terms) proto.Message {
			return &pb.ResourceTemplate{
				Server: o.server.Name, UriTemplate: foreign(d.Name), Definition: raw(d.Raw), DefinitionDigest: d.Digest,
				Consent: consentRule(t), Source: o.source(), Findings: each(d.Findings, findingMessage),
			}
		}}
	prompts = &noun{kind: catalog.Prompt, call: contract.KindPrompt, method: "prompts/list", field: "prompts", one: "prompt", code: "PROMPT",
		planned: func(c *contract.Contract) []planned {
			return each(c.Prompts, func(p *contract.Prompt) planned { return planned{p.Name, &p.Terms} })
		},
		message: func(o *offer, d *catalog.Definition, t *contract.Terms) proto.Message {
			return &pb.Prompt{
				Server: o.server.Name, Name: foreign(d.Name), Definition: raw(d.Raw), DefinitionDigest: d.Digest,
				Consent: consentRule(t), Source: o.source(), Findings: each(d.Findings, findingMessage),
			}
		}}
)

func consentRule(t *contract.Terms) pb.Tool_ConsentRule {
	return word[pb.Tool_ConsentRule](pb.Tool_ConsentRule_value, string(t.Consent))
}

func (o *offer) source() *pb.Tool_Source {
	return &pb.Tool_Source{Server: o.server.Name, Origin: o.server.Origin, Untrusted: true}
}

func (s *catalogService) ListTools(ctx context.Context, in *pb.ListToolsRequest) (*pb.ListToolsResponse, error) {
	l, err := s.list(ctx, in.GetSessionId(), in.GetQuery(), tools)
	if err != nil {
		return nil, err
	}
	out := &pb.ListToolsResponse{Revision: l.revision, Findings: l.findings}
	if !s.encoded(ctx, l, tools, out) {
		out.Tools = messages[*pb.Tool](l)
	}
	return out, nil
}

func (s *catalogService) ListResources(ctx context.Context, in *pb.ListResourcesRequest) (*pb.ListResourcesResponse, error) {
	l, err := s.list(ctx, in.GetSessionId(), in.GetQuery(), resources)
	if err != nil {
		return nil, err
	}
	out := &pb.ListResourcesResponse{Revision: l.revision, Findings: l.findings}
	if !s.encoded(ctx, l, resources, out) {
		out.Resources = messages[*pb.Resource](l)
	}
	return out, nil
}

func (s *catalogService) ListResourceTemplates(ctx context.Context, in *pb.ListResourceTemplatesRequest) (*pb.ListResourceTemplatesResponse, error) {
	l, err := s.list(ctx, in.GetSessionId(), in.GetQuery(), resourceTemplates)
	if err != nil {
		return nil, err
	}
	out := &pb.ListResourceTemplatesResponse{Revision: l.revision, Findings: l.findings}
	if !s.encoded(ctx, l, resourceTemplates, out) {
		out.ResourceTemplates = messages[*pb.ResourceTemplate](l)
	}
	return out, nil
}

func (s *catalogService) ListPrompts(ctx context.Context, in *pb.ListPromptsRequest) (*pb.ListPromptsResponse, error) {
	l, err := s.list(ctx, in.GetSessionId(), in.GetQuery(), prompts)
	if err != nil {
		return nil, err
	}
	out := &pb.ListPromptsResponse{Revision: l.revision, Findings: l.findings}
	if !s.encoded(ctx, l, prompts, out) {
		out.Prompts = messages[*pb.Prompt](l)
	}
	return out, nil
}

func (s *catalogService) CreateCompletion(ctx context.Context, in *pb.CreateCompletionRequest) (*pb.Completion, error) {
	got, err := s.calls.Complete(ctx, caller(ctx), calls.Query{
		SessionID: in.GetSessionId(), Server: in.GetServer(), Prompt: in.GetRef().GetPrompt(), Template: in.GetRef().GetResourceTemplate(),
		Argument: in.GetArgument().GetName(), Value: in.GetArgument().GetValue(), Context: in.GetContext().GetRaw(),
	})
	if err != nil {
		return nil, err
	}
	out := &pb.Completion{Values: each(got.Values, foreign), HasMore: got.More,
		Source: &pb.Tool_Source{Server: got.Server.Name, Origin: got.Server.Origin, Untrusted: true}}
	if got.Total != nil {
		out.Total = ptr(int32(*got.Total))
	}
	return out, nil
}
