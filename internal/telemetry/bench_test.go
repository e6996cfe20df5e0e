package telemetry

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"
)

// BenchmarkRequestLine is the line that every request costs.
func BenchmarkRequestLine(b *testing.B) {
	log := NewLogger(io.Discard, slog.LevelInfo)
	ctx := With(context.Background(), Scope{Request: "req_01kb9xq4h2e8zv5w3t7m6n0r4c", Tenant: "ten_01kb9xq4h2e8zv5w3t7m6n0r4c",
		Session: "ses_01kb9xq4h2e8zv5w3t7m6n0r4c", Call: "call_01kb9xq4h2e8zv5w3t7m6n0r4c"})
	b.ReportAllocs()
	for b.Loop() {
		log.LogAttrs(ctx, slog.LevelInfo, "request", slog.String("transport", "rest"),
			slog.String("method", "/bulkhead.v1.CallService/CreateCall"), slog.String("code", "OK"),
			slog.Duration("took", time.Millisecond), slog.String("key_id", "key_01kb9xq4h2e8zv5w3t7m6n0r4c"), slog.String("remote", "127.0.0.1"))
	}
}
