package api

import (
	"context"
	"strconv"
	"strings"

	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Contracts stores contracts; *authz.Service is one.
type Contracts interface {
	Create(ctx context.Context, p tenant.Principal, server string, source []byte, requestID string) (authz.Record, error)
	Get(ctx context.Context, p tenant.Principal, server string, revision int) (authz.Record, error)
	List(ctx context.Context, p tenant.Principal, server string, before, limit int) ([]authz.Record, error)
	Activate(ctx context.Context, p tenant.Principal, server string, revision int) (authz.Record, error)
}

type contractService struct {
	pb.UnimplementedContractServiceServer
	contracts Contracts
	calls     Calls
	servers   Servers
}

func (s *contractService) CreateContract(ctx context.Context, in *pb.CreateContractRequest) (*pb.Contract, error) {
	// JSON is YAML too, so that one parser reads both.
	source := []byte(in.GetYaml())
	if in.GetContract() != nil {
		source = in.GetContract().GetRaw()
	}
	id := minted(in.GetRequestId())
	r, err := s.contracts.Create(ctx, caller(ctx), in.GetServer(), source, id)
	if err != nil {
		return nil, err
	}
	out := contractMessage(r)
	out.RequestId = &id
	return out, nil
}

func (s *contractService) GetContract(ctx context.Context, in *pb.GetContractRequest) (*pb.Contract, error) {
	r, err := s.contracts.Get(ctx, caller(ctx), in.GetServer(), int(in.GetRevision()))
	if err != nil {
		return nil, err
	}
	return contractMessage(r), nil
}

func (s *contractService) ListContracts(ctx context.Context, in *pb.ListContractsRequest) (*pb.ListContractsResponse, error) {
	p, err := readPage(in, "contracts", in.GetServer())
	if err != nil {
		return nil, err
	}
	before := 0
	if p.after != "" {
		if before, err = strconv.Atoi(p.after); err != nil || before < 1 {
			return nil, fault.Field1("pageToken", "must be the nextPageToken of an answer to the same request")
		}
	}
	rs, err := s.contracts.List(ctx, caller(ctx), in.GetServer(), before, p.limit+1)
	if err != nil {
		return nil, err
	}
	rs, next := cut(p, rs, func(r authz.Record) string { return strconv.Itoa(r.Revision) })
	return &pb.ListContractsResponse{Contracts: each(rs, contractMessage), NextPageToken: next}, nil
}

func (s *contractService) ActivateContract(ctx context.Context, in *pb.ActivateContractRequest) (*pb.Contract, error) {
	r, err := s.contracts.Activate(ctx, caller(ctx), in.GetServer(), int(in.GetRevision()))
	if err != nil {
		return nil, err
	}
	return contractMessage(r), nil
}

// CheckContract decides a call that is not made.
func (s *contractService) CheckContract(ctx context.Context, in *pb.CheckContractRequest) (*pb.CheckContractResponse, error) {
	source := []byte(in.GetYaml())
	if in.GetContract() != nil {
		source = in.GetContract().GetRaw()
	}
	who := in.GetSubject()
	r, err := s.calls.Check(ctx, caller(ctx), s.servers, calls.DryRun{
		Server: in.GetServer(), Revision: int(in.GetRevision()), Source: source,
		Subject: subjectOf(who.GetUser()), Groups: who.GetGroups(), Project: who.GetProject(),
		Tool: in.GetTool(), Resource: in.GetResource(), Prompt: in.GetPrompt(), Arguments: in.GetArguments().GetRaw(),
	})
	if err != nil {
		return nil, err
	}
	return &pb.CheckContractResponse{
		Decision: decisionMessage(r.Decision, ""), Effect: word[pb.Tool_Effect](pb.Tool_Effect_value, string(r.Effect)),
		Consent: word[pb.Tool_ConsentRule](pb.Tool_ConsentRule_value, r.Consent), ArgumentsDigest: r.ArgumentsDigest,
	}, nil
}

// subjectOf reads source|value; without a source it is the default space.
func subjectOf(user string) tenant.Subject {
	if source, value, ok := strings.Cut(user, "|"); ok {
		return tenant.Subject{Source: source, Value: value}
	}
	if user == "" {
		return tenant.Subject{}
	}
	return tenant.Subject{Source: tenant.DefaultSubjectSpace, Value: user}
}

func contractMessage(r authz.Record) *pb.Contract {
	return &pb.Contract{
		ContractId: r.ContractID, Server: r.ServerName, ServerId: r.ServerID, Revision: int32(r.Revision),
		State: word[pb.Contract_State](pb.Contract_State_value, r.State), Contract: raw(r.Canonical),
		CreateTime: stamp(r.CreateTime), ActivateTime: stampOf(r.ActivateTime), RetireTime: stampOf(r.RetireTime),
		CreatedBy: r.CreatedBy,
	}
}

func decisionMessage(d authz.Decision, reason string) *pb.Decision {
	return &pb.Decision{
		Outcome:    word[pb.Decision_Outcome](pb.Decision_Outcome_value, string(d.Outcome)),
		ContractId: d.ContractID, ContractRevision: int32(d.ContractRevision), DefinitionDigest: d.DefinitionDigest,
		FirstFailed: string(d.FirstFailed), Reason: reason,
		Checks: each(d.Checks, func(r authz.Result) *pb.Decision_Check {
			return &pb.Decision_Check{Check: string(r.Check), Passed: r.Passed, Detail: foreign(r.Detail)}
		}),
	}
}
