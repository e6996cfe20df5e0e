package api

import (
	"context"

	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

func (s *callService) ListInteractions(ctx context.Context, in *pb.ListInteractionsRequest) (*pb.ListInteractionsResponse, error) {
	all, err := s.calls.Interactions(ctx, caller(ctx), in.GetCallId())
	if err != nil {
		return nil, err
	}
	return &pb.ListInteractionsResponse{Interactions: each(all, interactionMessage)}, nil
}

func (s *callService) RespondInteraction(ctx context.Context, in *pb.RespondInteractionRequest) (*pb.Interaction, error) {
	i, err := s.calls.Respond(ctx, caller(ctx), in.GetCallId(), in.GetInteractionId(), calls.Answer{
		Action: calls.Action(in.GetAction().String()), Content: in.GetContent().GetRaw(), Result: in.GetResult().GetRaw(),
	})
	if err != nil {
		return nil, err
	}
	return interactionMessage(*i), nil
}

func interactionMessage(i calls.Interaction) *pb.Interaction {
	v := i.View()
	out := &pb.Interaction{
		InteractionId: i.ID, CallId: i.CallID, Round: int32(i.Round), Kind: word[pb.Interaction_Kind](pb.Interaction_Kind_value, string(i.Kind)),
		State: word[pb.Interaction_State](pb.Interaction_State_value, string(i.State)), Refusal: i.Refusal, Message: foreign(v.Message),
		Sampling: raw(v.Sampling), Findings: each(v.Findings, callFinding), Server: i.Server, Origin: i.Origin, Untrusted: true,
		CreateTime: stamp(i.CreateTime), ExpireTime: stamp(i.ExpireTime), AnswerTime: stampOf(i.AnswerTime), AnsweredBy: i.AnsweredBy,
	}
	if v.Schema != nil {
		out.Form = &pb.Interaction_Form{RequestedSchema: raw(v.Schema)}
	}
	if v.URL != "" {
		out.Link = &pb.Interaction_Link{Url: v.URL, Host: v.Host}
	}
	return out
}
