package consent

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Stands reports whether anything is open or agreed to for a server: a consent
// that waits or was approved, or a living grant. It is a hint for work that can
// be spared, and locks nothing.
func (s *Service) Stands(ctx context.Context, t tenant.ID, serverID string) (stands bool, err error) {
	err = s.db.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(`
			SELECT EXISTS (SELECT 1 FROM consents WHERE tenant_id = $1 AND server_id = $2 AND state IN ('PENDING', 'APPROVED'))
			    OR EXISTS (SELECT 1 FROM grants WHERE tenant_id = $1 AND server_id = $2 AND state = 'ACTIVE')`,
			t, serverID).QueryRow(func(row pgx.Row) error { return row.Scan(&stands) })
	})
	return stands, err
}
