package api

import (
	"context"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Audit reads and verifies the record; *audit.Log is one.
type Audit interface {
	List(ctx context.Context, t tenant.ID, f audit.Filter) (records []audit.Record, next string, err error)
	Verify(ctx context.Context, t tenant.ID, external *audit.Checkpoint) (audit.Report, error)
}

type auditService struct {
	pb.UnimplementedAuditServiceServer
	audit Audit
}

func (s *auditService) ListAuditEntries(ctx context.Context, in *pb.ListAuditEntriesRequest) (*pb.ListAuditEntriesResponse, error) {
	f := audit.Filter{
		CallID: in.GetCallId(), SessionID: in.GetSessionId(), Kind: in.GetKind(),
		AfterSequence: in.GetAfterSequence(), PageToken: in.GetPageToken(), PageSize: int(in.GetPageSize()),
	}
	switch {
	case in.GetOrder() == pb.ListAuditEntriesRequest_CHAIN:
		f.Order = audit.ByChain
	case in.GetAfterSequence() > 0:
		return nil, fault.Field1("afterSequence", "needs order CHAIN")
	}
	rs, next, err := s.audit.List(ctx, caller(ctx).Tenant, f)
	if err != nil {
		return nil, err
	}
	return &pb.ListAuditEntriesResponse{AuditEntries: each(rs, auditMessage), NextPageToken: next}, nil
}

func (s *auditService) VerifyAuditEntries(ctx context.Context, in *pb.VerifyAuditEntriesRequest) (*pb.VerifyAuditEntriesResponse, error) {
	var external *audit.Checkpoint
	if c := in.GetCheckpoint(); c != nil {
		external = &audit.Checkpoint{
			TenantID: c.GetTenantId(), Sequence: c.GetSequence(), Digest: c.GetDigest(),
			Time: c.GetCreateTime().AsTime(), KeyID: c.GetKeyId(), Signature: c.GetSignature(),
		}
	}
	r, err := s.audit.Verify(ctx, caller(ctx).Tenant, external)
	if err != nil {
		return nil, err
	}
	out := &pb.VerifyAuditEntriesResponse{
		Ok: r.OK, Entries: r.Entries, Unsealed: r.Unsealed, Lost: r.Lost, DetailsChecked: r.DetailsChecked,
		Problems: each(r.Problems, problemMessage), MoreProblems: r.MoreProblems,
		LastSequence: r.LastSequence, LastDigest: r.LastDigest,
	}
	if c := r.Checkpoint; c != nil {
		out.Checkpoint = &pb.AuditCheckpoint{
			TenantId: c.TenantID, Sequence: c.Sequence, Digest: c.Digest,
			KeyId: c.KeyID, Signature: c.Signature, CreateTime: stamp(c.Time),
		}
	}
	return out, nil
}

func problemMessage(p audit.Problem) *pb.VerifyAuditEntriesResponse_Problem {
	return &pb.VerifyAuditEntriesResponse_Problem{Kind: p.Kind, Sequence: p.Sequence, AuditEntryId: p.EntryID, Detail: p.Detail}
}

func auditMessage(r audit.Record) *pb.AuditEntry {
	return &pb.AuditEntry{
		AuditEntryId: r.ID, Sequence: r.Sequence, PreviousDigest: r.PreviousDigest, Digest: r.Digest, Kind: r.Kind,
		SessionId: r.SessionID, CallId: r.CallID, ConsentId: r.ConsentID, ServerId: r.ServerID,
		Subject: r.Subject.String(), Actor: r.Actor, CreateTime: stamp(r.Time),
		Details: raw(r.Details), DetailsDigest: r.DetailsDigest,
	}
}
