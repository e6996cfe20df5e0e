package api

import (
	"context"
	"encoding/json"
	"strings"

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

// addNotices adds what the server says of a call under way.
func addNotices(out *pb.Call, c *calls.Call) {
	if p := c.Progress; p != nil {
		out.Progress = &pb.Call_Progress{Progress: number(p.Progress), Message: foreign(p.Message), Time: stamp(p.Time)}
		if p.Total != nil {
			out.Progress.Total = number(*p.Total)
		}
	}
	out.Logs = each(c.Logs, func(l calls.LogLine) *pb.Call_Log {
		return &pb.Call_Log{Time: stamp(l.Time), Level: foreign(l.Level), Logger: foreign(l.Logger), Data: raw(l.Data)}
	})
	if t := c.Task; t != nil {
		out.Task = &pb.Call_Task{Status: word[pb.Call_Task_Status](pb.Call_Task_Status_value, strings.ToUpper(t.Status)),
			StatusMessage: foreign(t.StatusMessage), StartTime: stamp(t.StartTime), PollTime: stamp(t.PollTime)}
	}
}

// number is a JSON number that says exactly this float.
func number(f float64) *pb.Json {
	text, err := json.Marshal(f)
	if err != nil {
		return nil // no JSON has infinities
	}
	return raw(text)
}
