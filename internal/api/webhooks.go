package api

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// WebhookEndpoints keeps the endpoints of webhooks; *webhooks.Service is one.
type WebhookEndpoints interface {
	CreateEndpoint(ctx context.Context, p tenant.Principal, spec webhooks.EndpointSpec, requestID string) (webhooks.NewEndpoint, error)
	GetEndpoint(ctx context.Context, p tenant.Principal, id string) (webhooks.Endpoint, error)
	ListEndpoints(ctx context.Context, p tenant.Principal, after string, limit int) ([]webhooks.Endpoint, error)
	UpdateEndpoint(ctx context.Context, p tenant.Principal, id string, up webhooks.EndpointUpdate) (webhooks.Endpoint, error)
	DeleteEndpoint(ctx context.Context, p tenant.Principal, id string) error
	RotateSecret(ctx context.Context, p tenant.Principal, id string, overlap *time.Duration, requestID string) (webhooks.NewEndpoint, error)
}

// WebhookDeliveries shows and makes deliveries; *webhooks.Service is one.
type WebhookDeliveries interface {
	TestEndpoint(ctx context.Context, p tenant.Principal, endpointID string) (webhooks.Delivery, error)
	ListDeliveries(ctx context.Context, p tenant.Principal, endpointID string, f webhooks.DeliveryFilter) ([]webhooks.Delivery, error)
	Redeliver(ctx context.Context, p tenant.Principal, endpointID, deliveryID string) (webhooks.Delivery, error)
}

type webhookService struct {
	pb.UnimplementedWebhookServiceServer
	endpoints  WebhookEndpoints
	deliveries WebhookDeliveries
}

func (s *webhookService) CreateWebhookEndpoint(ctx context.Context, in *pb.CreateWebhookEndpointRequest) (*pb.WebhookEndpoint, error) {
	id := minted(in.GetRequestId())
	e, err := s.endpoints.CreateEndpoint(ctx, caller(ctx),
		webhooks.EndpointSpec{DisplayName: in.GetDisplayName(), URL: in.GetUrl(), EventTypes: in.GetEventTypes()}, id)
	if err != nil {
		return nil, err
	}
	return newEndpointMessage(e, id), nil
}

func (s *webhookService) GetWebhookEndpoint(ctx context.Context, in *pb.GetWebhookEndpointRequest) (*pb.WebhookEndpoint, error) {
	e, err := s.endpoints.GetEndpoint(ctx, caller(ctx), in.GetWebhookEndpointId())
	if err != nil {
		return nil, err
	}
	return endpointMessage(e), nil
}

func (s *webhookService) ListWebhookEndpoints(ctx context.Context, in *pb.ListWebhookEndpointsRequest) (*pb.ListWebhookEndpointsResponse, error) {
	p, err := readPage(in, "webhookEndpoints")
	if err != nil {
		return nil, err
	}
	es, err := s.endpoints.ListEndpoints(ctx, caller(ctx), p.after, p.limit+1)
	if err != nil {
		return nil, err
	}
	es, next := cut(p, es, func(e webhooks.Endpoint) string { return e.ID })
	return &pb.ListWebhookEndpointsResponse{WebhookEndpoints: each(es, endpointMessage), NextPageToken: next}, nil
}

func (s *webhookService) UpdateWebhookEndpoint(ctx context.Context, in *pb.UpdateWebhookEndpointRequest) (*pb.WebhookEndpoint, error) {
	up, err := endpointUpdate(in)
	if err != nil {
		return nil, err
	}
	e, err := s.endpoints.UpdateEndpoint(ctx, caller(ctx), in.GetWebhookEndpointId(), up)
	if err != nil {
		return nil, err
	}
	return endpointMessage(e), nil
}

// endpointUpdate reads what is to change. Without a mask that is what is present;
// with one, a field that is named but absent is refused, but for displayName,
// which is then empty.
func endpointUpdate(in *pb.UpdateWebhookEndpointRequest) (up webhooks.EndpointUpdate, err error) {
	present := map[string]bool{"display_name": in.DisplayName != nil, "url": in.Url != nil, "event_types": len(in.GetEventTypes()) > 0, "state": in.State != nil}
	named := present
	if in.GetUpdateMask() != nil {
		named = map[string]bool{}
		for _, path := range in.GetUpdateMask().GetPaths() {
			if _, ok := present[path]; !ok {
				return up, fault.Field1("updateMask", "names %s, which cannot be updated", jsonName(path))
			}
			named[path] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(present)) {
		given := present[name]
		if given && !named[name] {
			return up, fault.Field1(jsonName(name), "is not named by updateMask")
		}
		if !given && named[name] && name != "display_name" {
			return up, fault.Field1(jsonName(name), "is named by updateMask but absent")
		}
	}
	if named["display_name"] {
		up.DisplayName = ptr(in.GetDisplayName())
	}
	if named["event_types"] {
		up.EventTypes = in.GetEventTypes()
	}
	up.URL = in.Url
	if in.State != nil {
		up.State = ptr(in.GetState().String())
	}
	return up, nil
}

func (s *webhookService) DeleteWebhookEndpoint(ctx context.Context, in *pb.DeleteWebhookEndpointRequest) (*emptypb.Empty, error) {
	if err := s.endpoints.DeleteEndpoint(ctx, caller(ctx), in.GetWebhookEndpointId()); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (s *webhookService) RotateWebhookSecret(ctx context.Context, in *pb.RotateWebhookSecretRequest) (*pb.WebhookEndpoint, error) {
	id := minted(in.GetRequestId())
	var overlap *time.Duration
	if in.GetOverlap() != nil {
		overlap = ptr(in.GetOverlap().AsDuration())
	}
	e, err := s.endpoints.RotateSecret(ctx, caller(ctx), in.GetWebhookEndpointId(), overlap, id)
	if err != nil {
		return nil, err
	}
	return newEndpointMessage(e, id), nil
}

func (s *webhookService) TestWebhookEndpoint(ctx context.Context, in *pb.TestWebhookEndpointRequest) (*pb.WebhookDelivery, error) {
	d, err := s.deliveries.TestEndpoint(ctx, caller(ctx), in.GetWebhookEndpointId())
	if err != nil {
		return nil, err
	}
	return deliveryMessage(d), nil
}

func (s *webhookService) ListWebhookDeliveries(ctx context.Context, in *pb.ListWebhookDeliveriesRequest) (*pb.ListWebhookDeliveriesResponse, error) {
	state := ""
	if in.GetState() != pb.WebhookDelivery_STATE_UNSPECIFIED {
		state = in.GetState().String()
	}
	p, err := readPage(in, "webhookDeliveries", in.GetWebhookEndpointId(), state)
	if err != nil {
		return nil, err
	}
	ds, err := s.deliveries.ListDeliveries(ctx, caller(ctx), in.GetWebhookEndpointId(),
		webhooks.DeliveryFilter{State: state, Before: p.after, Limit: p.limit + 1})
	if err != nil {
		return nil, err
	}
	ds, next := cut(p, ds, func(d webhooks.Delivery) string { return d.ID })
	return &pb.ListWebhookDeliveriesResponse{WebhookDeliveries: each(ds, deliveryMessage), NextPageToken: next}, nil
}

func (s *webhookService) RedeliverWebhook(ctx context.Context, in *pb.RedeliverWebhookRequest) (*pb.WebhookDelivery, error) {
	d, err := s.deliveries.Redeliver(ctx, caller(ctx), in.GetWebhookEndpointId(), in.GetWebhookDeliveryId())
	if err != nil {
		return nil, err
	}
	return deliveryMessage(d), nil
}

func newEndpointMessage(e webhooks.NewEndpoint, requestID string) *pb.WebhookEndpoint {
	out := endpointMessage(e.Endpoint)
	out.RequestId = &requestID
	if e.Secret != "" {
		out.Secret = &e.Secret
	}
	return out
}

func endpointMessage(e webhooks.Endpoint) *pb.WebhookEndpoint {
	return &pb.WebhookEndpoint{
		WebhookEndpointId: e.ID, DisplayName: e.DisplayName, Url: e.URL, EventTypes: e.EventTypes,
		State:          word[pb.WebhookEndpoint_State](pb.WebhookEndpoint_State_value, e.State),
		DisabledReason: word[pb.WebhookEndpoint_DisabledReason](pb.WebhookEndpoint_DisabledReason_value, e.DisabledReason),
		FailingSince:   stampOf(e.FailingSince), FailingError: errorWord(e.FailingError),
		PreviousSecretExpireTime: stampOf(e.PreviousSecretExpire), CreatedBy: e.CreatedBy,
		CreateTime: stamp(e.CreateTime), UpdateTime: stamp(e.UpdateTime),
	}
}

func deliveryMessage(d webhooks.Delivery) *pb.WebhookDelivery {
	return &pb.WebhookDelivery{
		WebhookDeliveryId: d.ID, WebhookEndpointId: d.EndpointID, WebhookEventId: d.EventID, EventType: string(d.EventType),
		State: word[pb.WebhookDelivery_State](pb.WebhookDelivery_State_value, d.State), Error: errorWord(d.Error),
		NextTime: stampOf(d.NextTime), CreateTime: stamp(d.CreateTime), FinishTime: stampOf(d.FinishTime),
		Attempts: each(d.Attempts, func(a webhooks.Attempt) *pb.WebhookDelivery_Attempt {
			return &pb.WebhookDelivery_Attempt{Number: int32(a.Number), Status: int32(a.Status), Error: errorWord(a.Error),
				Duration: duration(a.Duration), AttemptTime: stamp(a.Time)}
		}),
	}
}

func errorWord(e webhooks.Error) pb.WebhookDelivery_Error {
	return word[pb.WebhookDelivery_Error](pb.WebhookDelivery_Error_value, string(e))
}

// schemaPath is where the schemas of webhooks are public.
const schemaPath = "/schemas/"

func (s *Server) serveSchema(w http.ResponseWriter, r *http.Request) {
	raw, ok := webhooks.Schema(strings.TrimPrefix(r.URL.Path, schemaPath))
	if !ok {
		s.edge.refused(r.Context(), w, r, errNoRoute)
		return
	}
	plain(w, r, raw)
}
