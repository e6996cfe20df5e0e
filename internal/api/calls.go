package api

import (
	"context"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Calls is the machine of calls; *calls.Service is one.
type Calls interface {
	Propose(ctx context.Context, p tenant.Principal, r calls.Proposal) (*calls.Call, error)
	Get(ctx context.Context, p tenant.Principal, id string, wait time.Duration, afterRevision int) (*calls.Call, error)
	List(ctx context.Context, p tenant.Principal, f calls.Filter) ([]*calls.Call, error)
	Cancel(ctx context.Context, p tenant.Principal, id string) (*calls.Call, error)
	Interactions(ctx context.Context, p tenant.Principal, callID string) ([]calls.Interaction, error)
	Respond(ctx context.Context, p tenant.Principal, callID, id string, a calls.Answer) (*calls.Interaction, error)
	Complete(ctx context.Context, p tenant.Principal, q calls.Query) (calls.Suggestions, error)
	Check(ctx context.Context, p tenant.Principal, defs calls.Definitions, r calls.DryRun) (calls.DryRunResult, error)
}

const (
	defaultWait = 10 * time.Second
	// waitMargin is what a wait leaves of the caller's deadline for the answer to
	// be written.
	waitMargin = 200 * time.Millisecond
)

type callService struct {
	pb.UnimplementedCallServiceServer
	calls Calls
}

func (s *callService) CreateCall(ctx context.Context, in *pb.CreateCallRequest) (*pb.Call, error) {
	wait := defaultWait
	if in.GetWait() != nil {
		wait = in.GetWait().AsDuration()
	}
	c, err := s.calls.Propose(ctx, caller(ctx), calls.Proposal{
		SessionID: in.GetSessionId(), Server: in.GetServer(), Tool: in.GetTool(), Resource: in.GetResource(), Prompt: in.GetPrompt(),
		Arguments: in.GetArguments().GetRaw(), RequestID: in.GetRequestId(), Wait: withinDeadline(ctx, wait),
		Trace: traceOf(ctx),
	})
	if err != nil {
		return nil, err
	}
	return callMessage(c), nil
}

func (s *callService) GetCall(ctx context.Context, in *pb.GetCallRequest) (*pb.Call, error) {
	c, err := s.calls.Get(ctx, caller(ctx), in.GetCallId(), withinDeadline(ctx, in.GetWait().AsDuration()), int(in.GetAfterRevision()))
	if err != nil {
		return nil, err
	}
	return callMessage(c), nil
}

// withinDeadline cuts a wait so that its answer comes before the deadline.
func withinDeadline(ctx context.Context, wait time.Duration) time.Duration {
	if d, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(d)-waitMargin)
	}
	return max(wait, 0)
}

func (s *callService) ListCalls(ctx context.Context, in *pb.ListCallsRequest) (*pb.ListCallsResponse, error) {
	f := calls.Filter{SessionID: in.GetSessionId()}
	if in.GetState() != pb.Call_STATE_UNSPECIFIED {
		f.State = calls.State(in.GetState().String())
	}
	if in.GetKind() != pb.Call_KIND_UNSPECIFIED {
		f.Kind = contract.Kind(in.GetKind().String())
	}
	p, err := readPage(in, "calls", f.SessionID, string(f.State), string(f.Kind))
	if err != nil {
		return nil, err
	}
	f.Before, f.Limit = p.after, p.limit+1
	cs, err := s.calls.List(ctx, caller(ctx), f)
	if err != nil {
		return nil, err
	}
	cs, next := cut(p, cs, func(c *calls.Call) string { return c.ID })
	return &pb.ListCallsResponse{Calls: each(cs, callMessage), NextPageToken: next}, nil
}

func (s *callService) CancelCall(ctx context.Context, in *pb.CancelCallRequest) (*pb.Call, error) {
	c, err := s.calls.Cancel(ctx, caller(ctx), in.GetCallId())
	if err != nil {
		return nil, err
	}
	return callMessage(c), nil
}

func callMessage(c *calls.Call) *pb.Call {
	out := &pb.Call{
		CallId: c.ID, SessionId: c.SessionID, Revision: int32(c.Revision), Server: c.ServerName,
		Kind: word[pb.Call_Kind](pb.Call_Kind_value, string(c.Kind)), Name: c.Name,
		Effect:    word[pb.Tool_Effect](pb.Tool_Effect_value, string(c.Effect)),
		Arguments: raw(c.Arguments), ArgumentsDigest: c.ArgumentsDigest, RequestId: c.RequestID,
		State:    word[pb.Call_State](pb.Call_State_value, string(c.State)),
		Decision: decisionMessage(c.Decision, string(c.Reason)), Attempts: each(c.Attempts, attemptMessage),
		Timings: &pb.Call_Timings{
			Negotiation: duration(c.Timings.Negotiation), Discovery: duration(c.Timings.Discovery),
			Decision: duration(c.Timings.Decision), Execution: duration(c.Timings.Execution),
		},
		Result: raw(c.Result), Receipt: c.Receipt, SideEffectId: foreign(c.SideEffectID),
		CreateTime: stamp(c.CreateTime), UpdateTime: stamp(c.UpdateTime), EndTime: stampOf(c.FinishTime),
		Subject: c.Subject.String(), TraceId: c.Trace.ID(), Interactions: each(c.Interactions, interactionMessage),
	}
	addNotices(out, c)
	if c.Recorded {
		out.Recorded = pb.Call_DURABLE
	}
	if c.ConsentID != "" {
		out.Consent = &pb.Call_Question{ConsentId: c.ConsentID, ExpireTime: stampOf(c.ConsentExpire)}
	}
	if e := c.Error; e != nil {
		out.Error = &pb.Call_Error{
			Layer: word[pb.Call_Error_Layer](pb.Call_Error_Layer_value, string(e.Layer)),
			Code:  foreign(e.Code), Message: foreign(e.Message), Data: raw(e.Data),
		}
	}
	if len(c.Result) > 0 || c.Error != nil && c.Error.Layer != calls.LayerHost && c.Error.Layer != calls.LayerTransport {
		out.Source = &pb.Call_Source{
			Server: c.ServerName, Origin: c.Origin, DefinitionDigest: c.DefinitionDigest,
			Untrusted: true, Findings: each(c.Findings, callFinding),
		}
		switch c.Kind {
		case contract.KindResource:
			out.Source.Resource = c.Name
		case contract.KindPrompt:
			out.Source.Prompt = c.Name
		default:
			out.Source.Tool = c.Name
		}
	}
	return out
}

// callFinding takes a stored remark, "CODE: sentence", apart.
func callFinding(s string) *pb.Finding {
	code, text, _ := strings.Cut(s, ": ")
	return &pb.Finding{Code: code, Detail: foreign(text)}
}

func attemptMessage(a calls.Attempt) *pb.Call_Attempt {
	return &pb.Call_Attempt{
		Number: int32(a.Number), Phase: word[pb.Call_Attempt_Phase](pb.Call_Attempt_Phase_value, string(a.Phase)),
		StartTime: stamp(a.StartTime), EndTime: stampOf(a.EndTime),
		Outcome: a.Outcome, Detail: foreign(a.Detail), Evidence: a.Evidence,
	}
}
