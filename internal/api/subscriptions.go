package api

import (
	"context"

	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/bulkhead-mcp/bulkhead/internal/calls"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Subscriptions are the resources that sessions hear of; *calls.Service is one.
type Subscriptions interface {
	Subscribe(ctx context.Context, p tenant.Principal, sessionID, server, uri string) (*calls.Subscription, error)
	Subscriptions(ctx context.Context, p tenant.Principal, sessionID string) ([]*calls.Subscription, error)
	Unsubscribe(ctx context.Context, p tenant.Principal, sessionID, id string) error
}

func (s *catalogService) CreateResourceSubscription(ctx context.Context, in *pb.CreateResourceSubscriptionRequest) (*pb.ResourceSubscription, error) {
	x, err := s.follows.Subscribe(ctx, caller(ctx), in.GetSessionId(), in.GetServer(), in.GetUri())
	if err != nil {
		return nil, err
	}
	return subscriptionMessage(x), nil
}

func (s *catalogService) ListResourceSubscriptions(ctx context.Context, in *pb.ListResourceSubscriptionsRequest) (*pb.ListResourceSubscriptionsResponse, error) {
	xs, err := s.follows.Subscriptions(ctx, caller(ctx), in.GetSessionId())
	if err != nil {
		return nil, err
	}
	return &pb.ListResourceSubscriptionsResponse{ResourceSubscriptions: each(xs, subscriptionMessage)}, nil
}

func (s *catalogService) DeleteResourceSubscription(ctx context.Context, in *pb.DeleteResourceSubscriptionRequest) (*emptypb.Empty, error) {
	if err := s.follows.Unsubscribe(ctx, caller(ctx), in.GetSessionId(), in.GetSubscriptionId()); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func subscriptionMessage(x *calls.Subscription) *pb.ResourceSubscription {
	return &pb.ResourceSubscription{
		SubscriptionId: x.ID, SessionId: x.SessionID, Server: x.ServerName, Uri: foreign(x.URI),
		State:  word[pb.ResourceSubscription_State](pb.ResourceSubscription_State_value, x.State),
		Reason: foreign(x.Reason), Updates: x.Updates, LastUpdateTime: stampOf(x.LastUpdate), CreateTime: stamp(x.CreateTime),
	}
}
