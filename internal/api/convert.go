package api

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// each converts a list; nil stays an empty list in JSON.
func each[T, M any](items []T, convert func(T) M) []M {
	out := make([]M, len(items))
	for i, item := range items {
		out[i] = convert(item)
	}
	return out
}

// stamp is nil for the zero time, which is then absent in JSON.
func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func stampOf(t *time.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return stamp(*t)
}

func duration(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

// raw is absent in JSON when there is no text.
func raw(b []byte) *pb.Json {
	if len(b) == 0 {
		return nil
	}
	return &pb.Json{Raw: b}
}

// foreign makes text of a server fit for a protobuf string.
func foreign(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// shortened is foreign text for people, cut where nobody reads on.
func shortened(s string) string {
	const most = 256
	s = foreign(s)
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

func ptr[T any](v T) *T { return &v }

// minted returns the caller's id of a create request, or a new one.
func minted(requestID string) string {
	if requestID != "" {
		return requestID
	}
	return resource.NewID("req")
}

// word returns the enum value of a domain word, 0 for one it does not know.
func word[E ~int32](values map[string]int32, s string) E { return E(values[s]) }
