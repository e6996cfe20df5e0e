package api

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// BenchmarkEncode compares the writer with protojson on one answer; protojson
// still would have to splice the Json fields in afterwards.
func BenchmarkEncode(b *testing.B) {
	small := []byte(`{"content":[{"type":"text","text":"free"}],"structuredContent":{"slots":[]}}`)
	large, _ := json.Marshal(map[string]string{"text": strings.Repeat("lorem ipsum ", 64<<10/12)})
	for name, result := range map[string][]byte{"small": small, "64KiB": large} {
		m := benchCall(result)
		b.Run("writer/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				marshal(m)
			}
		})
		b.Run("protojson/"+name, func(b *testing.B) {
			b.ReportAllocs()
			bare := proto.Clone(m).(*pb.Call)
			bare.Arguments, bare.Result = nil, nil
			for b.Loop() {
				if _, err := (protojson.MarshalOptions{EmitDefaultValues: true}).Marshal(bare); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkDecode compares the reader with protojson, which does not find
// duplicate names in Json and cannot keep its bytes.
func BenchmarkDecode(b *testing.B) {
	body := []byte(`{"server":"calendar","tool":"create_draft_event","arguments":{"title":"Review","attendees":["a","b"]},"requestId":"r-1","wait":"10s"}`)
	b.Run("reader", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := decodeBody(body, &pb.CreateCallRequest{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("protojson", func(b *testing.B) {
		b.ReportAllocs()
		bare := []byte(`{"server":"calendar","tool":"create_draft_event","requestId":"r-1","wait":"10s"}`)
		for b.Loop() {
			if err := protojson.Unmarshal(bare, &pb.CreateCallRequest{}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkEdge measures the whole edge with a domain that costs nothing: the
// time of a request from a client in the same process, its own CPU included.
func BenchmarkEdge(b *testing.B) {
	r := newRig(b)
	path := "/v1/calls/" + callOne
	b.Run("rest", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if a := r.rest("GET", path, "", asUser("service", "alice")...); a.code != 200 {
				b.Fatalf("%d %s", a.code, a.body)
			}
		}
	})
	b.Run("grpc", func(b *testing.B) {
		b.ReportAllocs()
		ctx := metadata.AppendToOutgoingContext(b.Context(), "authorization", "Bearer service", "bulkhead-user", "alice")
		client := pb.NewCallServiceClient(r.conn)
		for b.Loop() {
			if _, err := client.GetCall(ctx, &pb.GetCallRequest{CallId: callOne}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("handler", func(b *testing.B) {
		b.ReportAllocs()
		req := httptest.NewRequest("GET", path, nil)
		req.Header.Set("Authorization", "Bearer service")
		req.Header.Set("Bulkhead-User", "alice")
		req.RemoteAddr = "127.0.0.1:1"
		for b.Loop() {
			w := httptest.NewRecorder()
			r.server.http.Handler.ServeHTTP(w, req)
			if w.Code != 200 {
				b.Fatal(w.Code)
			}
		}
	})
}
