package api

import (
	"context"

	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Consents shows and decides questions; *consent.Service is one.
type Consents interface {
	Get(ctx context.Context, p tenant.Principal, id string) (consent.View, error)
	List(ctx context.Context, p tenant.Principal, f consent.Filter) ([]consent.View, error)
	Decide(ctx context.Context, p tenant.Principal, id string, d consent.Decision) (consent.Consent, error)
}

type consentService struct {
	pb.UnimplementedConsentServiceServer
	consents Consents
}

func (s *consentService) ListConsents(ctx context.Context, in *pb.ListConsentsRequest) (*pb.ListConsentsResponse, error) {
	f := consent.Filter{SessionID: in.GetSessionId()}
	if in.GetState() != pb.Consent_STATE_UNSPECIFIED {
		f.State = consent.State(in.GetState().String())
	}
	p, err := readPage(in, "consents", string(f.State), f.SessionID)
	if err != nil {
		return nil, err
	}
	f.After, f.Limit = p.after, p.limit+1
	vs, err := s.consents.List(ctx, caller(ctx), f)
	if err != nil {
		return nil, err
	}
	vs, next := cut(p, vs, func(v consent.View) string { return v.ID })
	return &pb.ListConsentsResponse{Consents: each(vs, consentMessage), NextPageToken: next}, nil
}

func (s *consentService) GetConsent(ctx context.Context, in *pb.GetConsentRequest) (*pb.Consent, error) {
	v, err := s.consents.Get(ctx, caller(ctx), in.GetConsentId())
	if err != nil {
		return nil, err
	}
	return consentMessage(v), nil
}

// DecideConsent answers with the arguments too: who decided sees what exactly.
func (s *consentService) DecideConsent(ctx context.Context, in *pb.DecideConsentRequest) (*pb.Consent, error) {
	d := consent.Decision{Approve: in.GetDecision() == pb.DecideConsentRequest_APPROVE, Reason: in.GetReason()}
	c, err := s.consents.Decide(ctx, caller(ctx), in.GetConsentId(), d)
	if err != nil {
		return nil, err
	}
	v, err := s.consents.Get(ctx, caller(ctx), c.ID)
	if err != nil {
		return nil, err
	}
	// The call may have used the consent up meanwhile; the answer is the decision.
	v.Consent = c
	return consentMessage(v), nil
}

func consentMessage(v consent.View) *pb.Consent {
	out := &pb.Consent{
		ConsentId: v.ID, State: word[pb.Consent_State](pb.Consent_State_value, string(v.State)),
		CallId: v.CallID, SessionId: v.SessionID, Subject: v.Subject.String(),
		Server: v.ServerName, Origin: v.Origin,
		Effect:    word[pb.Tool_Effect](pb.Tool_Effect_value, v.Effect),
		Rule:      word[pb.Tool_ConsentRule](pb.Tool_ConsentRule_value, string(v.Rule)),
		Arguments: raw(v.Arguments), ArgumentsDigest: v.ArgumentsDigest, DefinitionDigest: v.DefinitionDigest,
		ContractId: v.ContractID, ContractRevision: int32(v.ContractRevision), Scopes: v.Scopes,
		DecidedBy: v.DecidedBy, How: v.DecidedHow, Reason: v.Reason,
		CreateTime: stamp(v.CreateTime), ExpireTime: stamp(v.ExpireTime), DecideTime: stampOf(v.DecideTime),
	}
	switch contract.Kind(v.Kind) {
	case contract.KindResource:
		out.Resource = v.Name
	case contract.KindPrompt:
		out.Prompt = v.Name
	default:
		out.Tool = v.Name
	}
	return out
}
