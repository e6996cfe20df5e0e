package events

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	// ticketTTL is how long a ticket can be used.
	ticketTTL = 30 * time.Second
	// maxTickets bounds the unused tickets of a session.
	maxTickets   = 32
	ticketPrefix = "bht_"
)

// Ticket is what a used ticket stood for.
type Ticket struct {
	SessionID string
	KeyID     string
	Who       tenant.OnBehalf
}

var errTicket = fault.New(fault.Unauthenticated, "TICKET_INVALID", "the ticket is unknown, used or too old; ask for another")

// IssueTicket returns a ticket for one stream of a session of the caller's. Only
// its digest is kept, in the database: it works at every replica, once.
func (s *Service) IssueTicket(ctx context.Context, p tenant.Principal, sessionID string) (ticket string, expire time.Time, err error) {
	var secret [32]byte
	rand.Read(secret[:]) //nolint:errcheck // crypto/rand.Read never fails
	ticket = ticketPrefix + base64.RawURLEncoding.EncodeToString(secret[:])
	hash := sha256.Sum256([]byte(ticket))
	who, err := json.Marshal(tenant.OnBehalf{User: p.Subject.Value, Groups: p.Groups, Project: p.Project})
	if err != nil {
		return "", time.Time{}, err
	}
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `DELETE FROM event_tickets WHERE tenant_id = $1 AND session_id = $2 AND expire_time < clock_timestamp()`, tx.Tenant(), sessionID)
		if err != nil {
			return err
		}
		err = tx.QueryRow(ctx, `INSERT INTO event_tickets (tenant_id, ticket_hash, session_id, key_id, who, expire_time)
			SELECT $1, $2, $3, $4, $5, clock_timestamp() + make_interval(secs => $6)
			 WHERE (SELECT count(*) FROM event_tickets WHERE tenant_id = $1 AND session_id = $3) < $7 RETURNING expire_time`,
			tx.Tenant(), hash[:], sessionID, p.KeyID, who, ticketTTL.Seconds(), maxTickets).Scan(&expire)
		if errors.Is(err, pgx.ErrNoRows) {
			return fault.New(fault.Exhausted, "TOO_MANY_TICKETS", "the session has %d tickets that were not used", maxTickets).Retry(ticketTTL)
		}
		return err
	})
	return ticket, expire, err
}

// RedeemTicket uses a ticket up and returns what it stood for. The key behind it
// has yet to be confirmed.
func (s *Service) RedeemTicket(ctx context.Context, ticket string) (out Ticket, err error) {
	if !strings.HasPrefix(ticket, ticketPrefix) || len(ticket) > 100 {
		return Ticket{}, errTicket
	}
	hash := sha256.Sum256([]byte(ticket))
	var t tenant.ID
	err = s.db.System(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT tenant_id FROM event_tickets WHERE ticket_hash = $1`, hash[:]).Scan(&t)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return Ticket{}, errTicket
	}
	if err != nil {
		return Ticket{}, err
	}
	var who []byte
	var fresh bool
	err = s.db.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		return tx.QueryRow(ctx, `DELETE FROM event_tickets WHERE tenant_id = $1 AND ticket_hash = $2
			RETURNING session_id, key_id, who, expire_time > clock_timestamp()`, tx.Tenant(), hash[:]).Scan(&out.SessionID, &out.KeyID, &who, &fresh)
	})
	if errors.Is(err, pgx.ErrNoRows) || err == nil && !fresh {
		return Ticket{}, errTicket
	}
	if err != nil {
		return Ticket{}, err
	}
	return out, json.Unmarshal(who, &out.Who)
}
