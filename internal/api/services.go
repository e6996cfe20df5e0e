package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Services are the parts of the domain that the API offers. All are needed; the
// comment of each interface names the type that cmd/server gives.
type Services struct {
	Tenants         Tenants
	Keys            Keys
	Servers         Servers
	Offers          Offers
	Contracts       Contracts
	ActiveContracts ActiveContracts
	Sessions        Sessions
	Connections     Connections
	Calls           Calls
	Subscriptions   Subscriptions
	Consents        Consents
	Audit           Audit
	Events          Events

	WebhookEndpoints  WebhookEndpoints
	WebhookDeliveries WebhookDeliveries
}

func (s Services) check() error {
	for _, part := range []struct {
		name  string
		given bool
	}{
		{"Tenants", s.Tenants != nil}, {"Keys", s.Keys != nil}, {"Servers", s.Servers != nil}, {"Offers", s.Offers != nil},
		{"Contracts", s.Contracts != nil}, {"ActiveContracts", s.ActiveContracts != nil}, {"Sessions", s.Sessions != nil},
		{"Connections", s.Connections != nil}, {"Calls", s.Calls != nil}, {"Subscriptions", s.Subscriptions != nil}, {"Consents", s.Consents != nil}, {"Audit", s.Audit != nil},
		{"WebhookEndpoints", s.WebhookEndpoints != nil}, {"WebhookDeliveries", s.WebhookDeliveries != nil}, {"Events", s.Events != nil},
	} {
		if !part.given {
			return fmt.Errorf("api: %s is needed", part.name)
		}
	}
	return nil
}

// register offers every service on r, and its REST form on the gateway, which
// reaches it through conn. authority says whether a stream's caller still may.
func (s Services) register(r grpc.ServiceRegistrar, gateway *runtime.ServeMux, conn grpc.ClientConnInterface, authority Authority) error {
	if err := s.check(); err != nil {
		return err
	}
	pb.RegisterTenantServiceServer(r, &tenantService{tenants: s.Tenants})
	pb.RegisterKeyServiceServer(r, &keyService{keys: s.Keys})
	pb.RegisterServerServiceServer(r, &serverService{servers: s.Servers, active: s.ActiveContracts})
	pb.RegisterContractServiceServer(r, &contractService{contracts: s.Contracts, calls: s.Calls, servers: s.Servers})
	pb.RegisterSessionServiceServer(r, &sessionService{sessions: s.Sessions, connections: s.Connections, servers: s.Servers})
	pb.RegisterCatalogServiceServer(r, &catalogService{sessions: s.Sessions, servers: s.Servers, active: s.ActiveContracts,
		offers: s.Offers, calls: s.Calls, follows: s.Subscriptions, now: time.Now})
	pb.RegisterCallServiceServer(r, &callService{calls: s.Calls})
	pb.RegisterConsentServiceServer(r, &consentService{consents: s.Consents})
	pb.RegisterAuditServiceServer(r, &auditService{audit: s.Audit})
	pb.RegisterWebhookServiceServer(r, &webhookService{endpoints: s.WebhookEndpoints, deliveries: s.WebhookDeliveries})
	pb.RegisterEventServiceServer(r, &eventService{events: s.Events, authority: authority, sessions: s.Sessions, servers: s.Servers, calls: s.Calls, now: time.Now})
	ctx := context.Background()
	return errors.Join(
		pb.RegisterTenantServiceHandlerClient(ctx, gateway, pb.NewTenantServiceClient(conn)),
		pb.RegisterKeyServiceHandlerClient(ctx, gateway, pb.NewKeyServiceClient(conn)),
		pb.RegisterServerServiceHandlerClient(ctx, gateway, pb.NewServerServiceClient(conn)),
		pb.RegisterContractServiceHandlerClient(ctx, gateway, pb.NewContractServiceClient(conn)),
		pb.RegisterSessionServiceHandlerClient(ctx, gateway, pb.NewSessionServiceClient(conn)),
		pb.RegisterCatalogServiceHandlerClient(ctx, gateway, pb.NewCatalogServiceClient(conn)),
		pb.RegisterCallServiceHandlerClient(ctx, gateway, pb.NewCallServiceClient(conn)),
		pb.RegisterConsentServiceHandlerClient(ctx, gateway, pb.NewConsentServiceClient(conn)),
		pb.RegisterAuditServiceHandlerClient(ctx, gateway, pb.NewAuditServiceClient(conn)),
		pb.RegisterWebhookServiceHandlerClient(ctx, gateway, pb.NewWebhookServiceClient(conn)),
		pb.RegisterEventServiceHandlerClient(ctx, gateway, pb.NewEventServiceClient(conn)),
	)
}
