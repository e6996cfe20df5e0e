package api

import (
	"context"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/ratelimit"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// maxLimitedTenants bounds the buckets of a TenantLimit.
const maxLimitedTenants = 100_000

// TenantLimit is a Limiter with one bucket for each tenant, so that no tenant
// can take the share of another. The operator has one of its own.
type TenantLimit struct {
	buckets *ratelimit.Limiter[tenant.ID]
	refused func(tenant string)
}

// NewTenantLimit returns the limit. refused is told of each refusal, for
// metrics; it may be nil.
func NewTenantLimit(l ratelimit.Limit, refused func(tenant string)) *TenantLimit {
	return &TenantLimit{buckets: ratelimit.New[tenant.ID](l, maxLimitedTenants, time.Now), refused: refused}
}

// Allow implements Limiter.
func (l *TenantLimit) Allow(_ context.Context, p tenant.Principal, _ string) error {
	after, ok := l.buckets.Allow(p.Tenant)
	if ok {
		return nil
	}
	if l.refused != nil {
		l.refused(p.Tenant.String())
	}
	return fault.New(fault.Exhausted, "RATE_LIMITED", "the tenant makes too many requests").Retry(after)
}
