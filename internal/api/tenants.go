package api

import (
	"context"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Tenants keeps tenants; *tenant.Service is one.
type Tenants interface {
	CreateTenant(ctx context.Context, displayName, requestID string) (tenant.Tenant, tenant.NewKey, error)
	GetTenant(ctx context.Context, id string) (tenant.Tenant, error)
	ListTenants(ctx context.Context, after string, limit int) ([]tenant.Tenant, error)
}

type tenantService struct {
	pb.UnimplementedTenantServiceServer
	tenants Tenants
}

func (s *tenantService) CreateTenant(ctx context.Context, in *pb.CreateTenantRequest) (*pb.Tenant, error) {
	id := minted(in.GetRequestId())
	t, key, err := s.tenants.CreateTenant(ctx, in.GetDisplayName(), id)
	if err != nil {
		return nil, err
	}
	out := tenantMessage(t)
	out.RequestId = &id
	if key.Secret != "" {
		out.AdminKey = &key.Secret
	}
	return out, nil
}

func (s *tenantService) GetTenant(ctx context.Context, in *pb.GetTenantRequest) (*pb.Tenant, error) {
	t, err := s.tenants.GetTenant(ctx, in.GetTenantId())
	if err != nil {
		return nil, err
	}
	return tenantMessage(t), nil
}

func (s *tenantService) ListTenants(ctx context.Context, in *pb.ListTenantsRequest) (*pb.ListTenantsResponse, error) {
	p, err := readPage(in, "tenants")
	if err != nil {
		return nil, err
	}
	ts, err := s.tenants.ListTenants(ctx, p.after, p.limit+1)
	if err != nil {
		return nil, err
	}
	ts, next := cut(p, ts, func(t tenant.Tenant) string { return t.ID.String() })
	return &pb.ListTenantsResponse{Tenants: each(ts, tenantMessage), NextPageToken: next}, nil
}

func tenantMessage(t tenant.Tenant) *pb.Tenant {
	return &pb.Tenant{
		TenantId: t.ID.String(), DisplayName: t.DisplayName,
		State: word[pb.Tenant_State](pb.Tenant_State_value, t.State), CreateTime: stamp(t.CreateTime),
	}
}
