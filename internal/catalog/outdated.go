package catalog

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Registered names a registration of a server as somebody is connected to it.
type Registered struct {
	Tenant       tenant.ID
	ServerID     string
	Registration int64
}

// Outdated returns those of the registrations that are not in force any more: the
// server was deleted or registered anew, or its tenant is not active.
func (s *Service) Outdated(ctx context.Context, all []Registered) (out []Registered, err error) {
	if len(all) == 0 {
		return nil, nil
	}
	tenants, servers, numbers := make([]string, len(all)), make([]string, len(all)), make([]int64, len(all))
	for i, r := range all {
		tenants[i], servers[i], numbers[i] = r.Tenant.String(), r.ServerID, r.Registration
	}
	err = s.o.DB.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
			SELECT x.n::int - 1 FROM unnest($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS x (tenant_id, server_id, registration, n)
			 WHERE NOT EXISTS (
			   SELECT 1 FROM servers s JOIN tenants t ON t.tenant_id = s.tenant_id
			    WHERE s.tenant_id = x.tenant_id AND s.server_id = x.server_id AND s.registration = x.registration
			      AND s.state = 'ACTIVE' AND t.state = 'ACTIVE')
			 ORDER BY x.n`, tenants, servers, numbers)
		if err != nil {
			return err
		}
		var i int
		out = nil
		_, err = pgx.ForEachRow(rows, []any{&i}, func() error { out = append(out, all[i]); return nil })
		return err
	})
	return out, err
}
