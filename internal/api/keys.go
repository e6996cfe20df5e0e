package api

import (
	"context"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// Keys keeps API keys; *tenant.Service is one.
type Keys interface {
	CreateKey(ctx context.Context, p tenant.Principal, spec tenant.KeySpec, requestID string) (tenant.NewKey, error)
	ListKeys(ctx context.Context, p tenant.Principal, after string, limit int) ([]tenant.Key, error)
	RevokeKey(ctx context.Context, p tenant.Principal, id string) (tenant.Key, error)
}

type keyService struct {
	pb.UnimplementedKeyServiceServer
	keys Keys
}

func (s *keyService) CreateKey(ctx context.Context, in *pb.CreateKeyRequest) (*pb.Key, error) {
	id := minted(in.GetRequestId())
	spec := tenant.KeySpec{
		DisplayName: in.GetDisplayName(), Role: tenant.ParseRole(in.GetRole().String()), SubjectSpace: in.GetSubjectSpace(),
		UserPatterns: in.GetUserPatterns(), Servers: in.GetServers(), Networks: in.GetNetworks(), MayDecide: in.GetMayDecide(),
	}
	if in.GetExpireTime() != nil {
		spec.ExpireTime = in.GetExpireTime().AsTime()
	}
	k, err := s.keys.CreateKey(ctx, caller(ctx), spec, id)
	if err != nil {
		return nil, err
	}
	out := keyMessage(k.Key)
	out.RequestId = &id
	if k.Secret != "" {
		out.Secret = &k.Secret
	}
	return out, nil
}

func (s *keyService) ListKeys(ctx context.Context, in *pb.ListKeysRequest) (*pb.ListKeysResponse, error) {
	p, err := readPage(in, "keys")
	if err != nil {
		return nil, err
	}
	ks, err := s.keys.ListKeys(ctx, caller(ctx), p.after, p.limit+1)
	if err != nil {
		return nil, err
	}
	ks, next := cut(p, ks, func(k tenant.Key) string { return k.ID })
	return &pb.ListKeysResponse{Keys: each(ks, keyMessage), NextPageToken: next}, nil
}

func (s *keyService) DeleteKey(ctx context.Context, in *pb.DeleteKeyRequest) (*pb.Key, error) {
	k, err := s.keys.RevokeKey(ctx, caller(ctx), in.GetKeyId())
	if err != nil {
		return nil, err
	}
	return keyMessage(k), nil
}

func keyMessage(k tenant.Key) *pb.Key {
	return &pb.Key{
		KeyId: k.ID, DisplayName: k.DisplayName, Role: word[pb.Key_Role](pb.Key_Role_value, k.Role.String()),
		SubjectSpace: k.SubjectSpace, UserPatterns: k.UserPatterns, Servers: k.Servers, Networks: k.Networks,
		MayDecide: k.MayDecide, CreateTime: stamp(k.CreateTime), ExpireTime: stamp(k.ExpireTime),
		State: word[pb.Key_State](pb.Key_State_value, k.State), CreatedBy: k.CreatedBy,
	}
}
