package api

import (
	"context"
	"fmt"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Services are the parts of the domain that the API offers. All are needed.
type Services struct {
	Tenants   Tenants
	Keys      Keys
	Contracts Contracts
	Consents  Consents
	Audit     Audit
}

// register offers every service on r, and its REST form on the gateway, which
// reaches it through conn.
func (s Services) register(r grpc.ServiceRegistrar, gateway *runtime.ServeMux, conn grpc.ClientConnInterface) error {
	for _, part := range []struct {
		name  string
		given bool
	}{
		{"Tenants", s.Tenants != nil}, {"Keys", s.Keys != nil}, {"Contracts", s.Contracts != nil},
		{"Consents", s.Consents != nil}, {"Audit", s.Audit != nil},
	} {
		if !part.given {
			return fmt.Errorf("api: %s is needed", part.name)
		}
	}
	pb.RegisterTenantServiceServer(r, &tenantService{tenants: s.Tenants})
	pb.RegisterKeyServiceServer(r, &keyService{keys: s.Keys})
	pb.RegisterContractServiceServer(r, &contractService{contracts: s.Contracts})
	pb.RegisterConsentServiceServer(r, &consentService{consents: s.Consents})
	pb.RegisterAuditServiceServer(r, &auditService{audit: s.Audit})
	ctx := context.Background()
	for _, err := range []error{
		pb.RegisterTenantServiceHandlerClient(ctx, gateway, pb.NewTenantServiceClient(conn)),
		pb.RegisterKeyServiceHandlerClient(ctx, gateway, pb.NewKeyServiceClient(conn)),
		pb.RegisterContractServiceHandlerClient(ctx, gateway, pb.NewContractServiceClient(conn)),
		pb.RegisterConsentServiceHandlerClient(ctx, gateway, pb.NewConsentServiceClient(conn)),
		pb.RegisterAuditServiceHandlerClient(ctx, gateway, pb.NewAuditServiceClient(conn)),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}
