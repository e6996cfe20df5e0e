package api

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

func TestHealth(t *testing.T) {
	t.Parallel()
	down := make(chan error, 1)
	r := newRig(t, func(c *Config) {
		c.Ready = func(context.Context) error {
			select {
			case err := <-down:
				return err
			default:
				return nil
			}
		}
	})
	client := healthpb.NewHealthClient(r.conn)
	for service, want := range map[string]codes.Code{"": codes.OK, "bulkhead.v1.CallService": codes.OK, "bulkhead.v1.Nothing": codes.NotFound} {
		res, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if status.Code(err) != want || err == nil && res.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("%q: %v %v", service, res, err)
		}
	}
	down <- errors.New("password=hunter2")
	if res, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil || res.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("while not ready: %v %v", res, err)
	}
	if _, err := client.List(t.Context(), &healthpb.HealthListRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("List: %v", err)
	}
	watch, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err == nil {
		_, err = watch.Recv()
	}
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("Watch: %v", err)
	}
	if got := r.taken(); len(got) > 0 {
		t.Errorf("reached %v", got)
	}
}

func TestReflection(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	stream, err := reflectionv1.NewServerReflectionClient(r.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(in *reflectionv1.ServerReflectionRequest) *reflectionv1.ServerReflectionResponse {
		t.Helper()
		err := stream.Send(in)
		out := &reflectionv1.ServerReflectionResponse{}
		if err == nil {
			out, err = stream.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	var services []string
	list := &reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}
	for _, s := range ask(list).GetListServicesResponse().GetService() {
		services = append(services, s.GetName())
	}
	for name := range rules {
		if service, _, _ := strings.Cut(strings.TrimPrefix(name, "/"), "/"); !slices.Contains(services, service) {
			t.Errorf("%s is not shown", service)
		}
	}
	file := ask(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_FileContainingSymbol{
		FileContainingSymbol: "bulkhead.v1.CallService"}}).GetFileDescriptorResponse().GetFileDescriptorProto()
	fd := &descriptorpb.FileDescriptorProto{}
	if len(file) == 0 || proto.Unmarshal(file[0], fd) != nil || fd.GetPackage() != "bulkhead.v1" {
		t.Errorf("%d files, %v", len(file), fd)
	}
	for range maxOpenMessages - 2 {
		ask(list)
	}
	if err := stream.Send(list); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one message more than a stream takes: %v", err)
	}
}

// Only what is in the table is open, and nothing of the product's API is.
func TestOpen(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for method := range open {
		if strings.HasPrefix(method, "/bulkhead.") {
			t.Errorf("%s is open", method)
		}
	}
	for service, info := range r.server.grpc.GetServiceInfo() {
		for _, m := range info.Methods {
			name := "/" + service + "/" + m.Name
			if _, ruled := rules[name]; ruled == open[name] {
				t.Errorf("%s is neither in the table of roles nor open, or both", name)
			}
		}
	}
	ss, err := r.conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/bulkhead.v1.CallService/Watch")
	if err == nil {
		err = ss.CloseSend()
	}
	if err == nil {
		err = ss.RecvMsg(&healthpb.HealthCheckResponse{})
	}
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("an unknown stream: %v", err)
	}
	rec := r.rest("POST", "/grpc.health.v1.Health/Check", "")
	if rec.code != 404 {
		t.Errorf("over REST: %d", rec.code)
	}
}
