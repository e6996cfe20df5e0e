package webhooks

import (
	"context"
	"errors"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The states of an endpoint.
const (
	Active   = "ACTIVE"
	Disabled = "DISABLED"
	deleted  = "DELETED"
)

const (
	// MaxEndpoints is how many a tenant may have.
	MaxEndpoints = 50
	// maxName is the greatest length of a display name in characters.
	maxName = 200
	// defaultOverlap is how long the previous secret signs too, maxOverlap how long
	// it may.
	defaultOverlap = 24 * time.Hour
	maxOverlap     = 7 * 24 * time.Hour
)

// EndpointSpec is what an admin asks for. EventTypes are those of Types.
type EndpointSpec struct {
	DisplayName string
	URL         string
	EventTypes  []string
}

// Endpoint is a place that a tenant wants to be told at, without its secrets.
type Endpoint struct {
	ID string
	EndpointSpec
	State string
	// DisabledReason is ADMIN, GONE or FAILING while it is disabled.
	DisabledReason string
	// PreviousSecretExpire is until when the previous secret signs, too; nil when
	// only one does.
	PreviousSecretExpire *time.Time
	// FailingSince is set while deliveries fail and none came through since.
	FailingSince *time.Time
	FailingError Error
	CreatedBy    string
	CreateTime   time.Time
	UpdateTime   time.Time
}

// NewEndpoint is an endpoint with a secret that was just made, the only time that
// it is shown. The secret is empty when a repeated request found what an earlier
// one did.
type NewEndpoint struct {
	Endpoint
	Secret string
}

// EndpointUpdate is what to change; nil leaves it.
type EndpointUpdate struct {
	DisplayName *string
	URL         *string
	EventTypes  []string
	// State is Active or Disabled.
	State *string
}

// Types are the types of event that an endpoint can choose.
func Types() []string { return slices.Clone(choices) }

func (s *Service) checkSpec(spec EndpointSpec) error {
	var bad []fault.Field
	if !isName(spec.DisplayName) {
		bad = append(bad, fault.Field{Path: "displayName", Rule: "must have at most 200 characters and no control characters"})
	}
	if len(spec.EventTypes) == 0 || len(spec.EventTypes) > len(choices) {
		bad = append(bad, fault.Field{Path: "eventTypes", Rule: "must name at least one type of event, and each once"})
	}
	for i, v := range spec.EventTypes {
		if !slices.Contains(choices, v) {
			bad = append(bad, fault.Field{Path: "eventTypes", Rule: "must be of " + strings.Join(choices, ", ")})
			break
		}
		if slices.Contains(spec.EventTypes[:i], v) {
			bad = append(bad, fault.Field{Path: "eventTypes", Rule: "must name each type once"})
			break
		}
	}
	if _, err := s.o.Egress.CheckURL("url", spec.URL); err != nil {
		f, ok := fault.As(err)
		if !ok || len(bad) == 0 {
			return err
		}
		bad = append(bad, f.Fields...)
	}
	if len(bad) > 0 {
		return fault.InvalidFields(bad...)
	}
	return nil
}

func isName(v string) bool {
	return utf8.ValidString(v) && utf8.RuneCountInString(v) <= maxName && !strings.ContainsFunc(v, unicode.IsControl)
}

// CreateEndpoint makes an endpoint for the caller's tenant, with a secret.
func (s *Service) CreateEndpoint(ctx context.Context, p tenant.Principal, spec EndpointSpec, requestID string) (NewEndpoint, error) {
	if err := s.checkSpec(spec); err != nil {
		return NewEndpoint{}, err
	}
	id := resource.NewID(resource.WebhookEndpoint)
	raw, shown := mintSecret()
	sealed, err := s.sealSecret(ctx, p.Tenant, id, raw)
	if err != nil {
		return NewEndpoint{}, err
	}
	var out NewEndpoint
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		earlier, err := tenant.RememberCreate(ctx, tx, "webhook_endpoint", p.KeyID, requestID, tenant.BodyDigest(spec), id)
		if err != nil {
			return err
		}
		if earlier != "" {
			out = NewEndpoint{}
			out.Endpoint, err = getEndpoint(ctx, tx, earlier, "")
			return err
		}
		if err := s.insertEndpoint(ctx, tx, p, id, spec, sealed); err != nil {
			return err
		}
		out.Secret = shown
		out.Endpoint, err = getEndpoint(ctx, tx, id, "")
		return err
	})
	return out, err
}

func (s *Service) insertEndpoint(ctx context.Context, tx tenant.Tx, p tenant.Principal, id string, spec EndpointSpec, sealed []byte) error {
	// One after the other, so that the number of endpoints is counted right.
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended('webhooks:' || $1, 0))`, tx.Tenant().String()); err != nil {
		return err
	}
	var n int
	err := tx.QueryRow(ctx, `SELECT count(*) FROM webhook_endpoints WHERE tenant_id = $1 AND state <> 'DELETED'`, tx.Tenant()).Scan(&n)
	if err != nil {
		return err
	}
	if n >= MaxEndpoints {
		return fault.New(fault.Exhausted, "TOO_MANY_ENDPOINTS", "a tenant has at most %d webhook endpoints", MaxEndpoints)
	}
	_, err = tx.Exec(ctx, `INSERT INTO webhook_endpoints (tenant_id, webhook_endpoint_id, display_name, url, event_types, secret, created_by)
		VALUES ($1, $2, $3, $4, $5, $6, $7)`, tx.Tenant(), id, spec.DisplayName, spec.URL, spec.EventTypes, sealed, p.Actor())
	if err != nil {
		return err
	}
	tx.AfterCommit(func() { s.forget(tx.Tenant()) })
	return s.record(ctx, tx, p, "created", id, map[string]any{"origin": originOf(spec.URL), "eventTypes": spec.EventTypes})
}

func (s *Service) record(ctx context.Context, tx tenant.Tx, p tenant.Principal, what, id string, details map[string]any) error {
	if details == nil {
		details = map[string]any{}
	}
	details["webhookEndpointId"] = id
	return s.o.Recorder.Record(ctx, tx, tenant.Event{Kind: "webhook_endpoint." + what, Actor: p.Actor(), Details: details})
}

const endpointColumns = `webhook_endpoint_id, display_name, url, event_types, state, disabled_reason,
	CASE WHEN previous_expire_time > clock_timestamp() THEN previous_expire_time END, failing_since, failing_error,
	created_by, create_time, update_time`

func scanEndpoint(row pgx.CollectableRow) (e Endpoint, err error) {
	err = row.Scan(&e.ID, &e.DisplayName, &e.URL, &e.EventTypes, &e.State, &e.DisabledReason, &e.PreviousSecretExpire,
		&e.FailingSince, &e.FailingError, &e.CreatedBy, &e.CreateTime, &e.UpdateTime)
	return e, err
}

var errNoEndpoint = fault.New(fault.NotFound, "WEBHOOK_ENDPOINT_NOT_FOUND", "no such webhook endpoint")

// getEndpoint reads an endpoint that is not deleted; lock is a locking clause.
func getEndpoint(ctx context.Context, tx tenant.Tx, id, lock string) (Endpoint, error) {
	if !resource.IsID(resource.WebhookEndpoint, id) {
		return Endpoint{}, errNoEndpoint
	}
	rows, err := tx.Query(ctx, `SELECT `+endpointColumns+` FROM webhook_endpoints
		WHERE tenant_id = $1 AND webhook_endpoint_id = $2 AND state <> 'DELETED' `+lock, tx.Tenant(), id)
	if err != nil {
		return Endpoint{}, err
	}
	e, err := pgx.CollectExactlyOneRow(rows, scanEndpoint)
	if errors.Is(err, pgx.ErrNoRows) {
		return Endpoint{}, errNoEndpoint
	}
	return e, err
}

func activeEndpoints(ctx context.Context, tx tenant.Tx) ([]Endpoint, error) {
	rows, err := tx.Query(ctx, `SELECT `+endpointColumns+` FROM webhook_endpoints
		WHERE tenant_id = $1 AND state = 'ACTIVE' ORDER BY webhook_endpoint_id`, tx.Tenant())
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanEndpoint)
}

// GetEndpoint returns an endpoint of the caller's tenant.
func (s *Service) GetEndpoint(ctx context.Context, p tenant.Principal, id string) (e Endpoint, err error) {
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		e, err = getEndpoint(ctx, tx, id, "")
		return err
	})
	return e, err
}

// ListEndpoints returns at most limit endpoints of the caller's tenant after the
// given id.
func (s *Service) ListEndpoints(ctx context.Context, p tenant.Principal, after string, limit int) (es []Endpoint, err error) {
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		rows, err := tx.Query(ctx, `SELECT `+endpointColumns+` FROM webhook_endpoints
			WHERE tenant_id = $1 AND state <> 'DELETED' AND webhook_endpoint_id > $2
			ORDER BY webhook_endpoint_id LIMIT $3`, tx.Tenant(), after, limit)
		if err != nil {
			return err
		}
		es, err = pgx.CollectRows(rows, scanEndpoint)
		return err
	})
	return es, err
}

// UpdateEndpoint changes an endpoint. Deliveries under way go to where it points
// when they are tried next. An endpoint that is made active again starts anew.
func (s *Service) UpdateEndpoint(ctx context.Context, p tenant.Principal, id string, up EndpointUpdate) (e Endpoint, err error) {
	if up.State != nil && *up.State != Active && *up.State != Disabled {
		return Endpoint{}, fault.Field1("state", "must be ACTIVE or DISABLED")
	}
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		before, err := getEndpoint(ctx, tx, id, "FOR NO KEY UPDATE")
		if err != nil {
			return err
		}
		spec, state, reason, details := before.updated(up)
		if err := s.checkSpec(spec); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE webhook_endpoints SET display_name = $3, url = $4, event_types = $5, state = $6, disabled_reason = $7,
			failing_since = CASE WHEN $8 THEN NULL ELSE failing_since END, failing_error = CASE WHEN $8 THEN '' ELSE failing_error END,
			update_time = now() WHERE tenant_id = $1 AND webhook_endpoint_id = $2`,
			tx.Tenant(), id, spec.DisplayName, spec.URL, spec.EventTypes, state, reason, state == Active && before.State != Active)
		if err != nil {
			return err
		}
		tx.AfterCommit(func() { s.forget(tx.Tenant()) })
		if err := s.record(ctx, tx, p, "updated", id, details); err != nil {
			return err
		}
		e, err = getEndpoint(ctx, tx, id, "")
		return err
	})
	return e, err
}

// updated returns the endpoint as it is to be, and what of it the record names.
func (e Endpoint) updated(up EndpointUpdate) (spec EndpointSpec, state, reason string, details map[string]any) {
	spec, state, reason, details = e.EndpointSpec, e.State, e.DisabledReason, map[string]any{}
	if up.DisplayName != nil {
		spec.DisplayName = *up.DisplayName
		details["displayName"] = true
	}
	if up.URL != nil {
		spec.URL = *up.URL
		details["origin"] = originOf(spec.URL)
	}
	if up.EventTypes != nil {
		spec.EventTypes = up.EventTypes
		details["eventTypes"] = spec.EventTypes
	}
	if up.State != nil && *up.State != e.State {
		state, reason = *up.State, ""
		if state == Disabled {
			reason = reasonAdmin
		}
		details["state"] = state
	}
	return spec, state, reason, details
}

// originOf is what the record names of an address, whose path and query may be as
// good as a password.
func originOf(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return ""
	}
	return egress.Origin(u)
}

// DeleteEndpoint ends an endpoint and its secrets. What is not delivered by then
// is not delivered any more.
func (s *Service) DeleteEndpoint(ctx context.Context, p tenant.Principal, id string) error {
	return s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if _, err := getEndpoint(ctx, tx, id, "FOR NO KEY UPDATE"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE webhook_endpoints SET state = $3, secret = '', previous_secret = NULL, previous_expire_time = NULL,
			update_time = now() WHERE tenant_id = $1 AND webhook_endpoint_id = $2`, tx.Tenant(), id, deleted)
		if err != nil {
			return err
		}
		tx.AfterCommit(func() { s.forget(tx.Tenant()) })
		return s.record(ctx, tx, p, "deleted", id, nil)
	})
}

// RotateSecret gives an endpoint another secret. The one it had signs too for the
// time of overlap, by default a day and at most seven; one before that ends at
// once.
func (s *Service) RotateSecret(ctx context.Context, p tenant.Principal, id string, overlap *time.Duration, requestID string) (NewEndpoint, error) {
	if overlap == nil {
		overlap = new(defaultOverlap)
	}
	if *overlap < 0 || *overlap > maxOverlap {
		return NewEndpoint{}, fault.Field1("overlap", "must be from 0s to 604800s")
	}
	raw, shown := mintSecret()
	sealed, err := s.sealSecret(ctx, p.Tenant, id, raw)
	if err != nil {
		return NewEndpoint{}, err
	}
	var out NewEndpoint
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if _, err := getEndpoint(ctx, tx, id, "FOR NO KEY UPDATE"); err != nil {
			return err
		}
		earlier, err := tenant.RememberCreate(ctx, tx, "webhook_secret", p.KeyID, requestID, tenant.BodyDigest([]any{id, overlap.String()}), id)
		if err != nil {
			return err
		}
		out = NewEndpoint{}
		if earlier == "" {
			_, err := tx.Exec(ctx, `UPDATE webhook_endpoints SET previous_secret = secret, previous_expire_time = $3, secret = $4, update_time = now()
				WHERE tenant_id = $1 AND webhook_endpoint_id = $2`, tx.Tenant(), id, s.now().Add(*overlap), sealed)
			if err != nil {
				return err
			}
			out.Secret = shown
			if err := s.record(ctx, tx, p, "secret_rotated", id, map[string]any{"overlap": overlap.String()}); err != nil {
				return err
			}
		}
		out.Endpoint, err = getEndpoint(ctx, tx, id, "")
		return err
	})
	return out, err
}
