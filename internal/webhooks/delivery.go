package webhooks

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The states of a delivery. One that FAILED is not tried any more.
const (
	Pending   = "PENDING"
	Delivered = "DELIVERED"
	Failed    = "FAILED"
)

// Delivery is one event on its way to one endpoint.
type Delivery struct {
	ID         string
	EndpointID string
	// EventID is what the endpoint gets as webhook-id; a redelivery has the same.
	EventID   string
	EventType Type
	State     string
	// Error is why it failed, or failed last.
	Error      Error
	NextTime   *time.Time
	CreateTime time.Time
	FinishTime *time.Time
	// Attempts are all that were made, oldest first.
	Attempts []Attempt
}

// Attempt is one try of a delivery.
type Attempt struct {
	Number int
	// Status is the HTTP status of the answer, 0 when there was none.
	Status   int
	Error    Error
	Duration time.Duration
	Time     time.Time
}

// DeliveryFilter narrows ListDeliveries. Before is the id of the last one seen.
type DeliveryFilter struct {
	State  string
	Before string
	Limit  int
}

const deliverySQL = `SELECT d.webhook_delivery_id, d.webhook_endpoint_id, d.webhook_event_id, v.type, d.state, d.error, d.next_time,
	d.create_time, d.finish_time FROM webhook_deliveries d JOIN webhook_events v USING (tenant_id, webhook_event_id) `

func scanDelivery(row pgx.CollectableRow) (d Delivery, err error) {
	err = row.Scan(&d.ID, &d.EndpointID, &d.EventID, &d.EventType, &d.State, &d.Error, &d.NextTime, &d.CreateTime, &d.FinishTime)
	return d, err
}

// ListDeliveries returns the deliveries to an endpoint with their attempts, the
// newest first.
func (s *Service) ListDeliveries(ctx context.Context, p tenant.Principal, endpointID string, f DeliveryFilter) (ds []Delivery, err error) {
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if _, err := getEndpoint(ctx, tx, endpointID, ""); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, deliverySQL+`WHERE d.tenant_id = $1 AND d.webhook_endpoint_id = $2 AND ($3 = '' OR d.state = $3)
			AND ($4 = '' OR d.webhook_delivery_id < $4) ORDER BY d.webhook_delivery_id DESC LIMIT $5`,
			tx.Tenant(), endpointID, f.State, f.Before, f.Limit)
		if err != nil {
			return err
		}
		if ds, err = pgx.CollectRows(rows, scanDelivery); err != nil {
			return err
		}
		return addAttempts(ctx, tx, ds)
	})
	return ds, err
}

func addAttempts(ctx context.Context, tx tenant.Tx, ds []Delivery) error {
	at := make(map[string]int, len(ds))
	ids := make([]string, len(ds))
	for i, d := range ds {
		at[d.ID], ids[i] = i, d.ID
	}
	rows, err := tx.Query(ctx, `SELECT webhook_delivery_id, attempt, status, error, duration_us, attempt_time FROM webhook_attempts
		WHERE tenant_id = $1 AND webhook_delivery_id = ANY ($2) ORDER BY webhook_delivery_id, attempt`, tx.Tenant(), ids)
	if err != nil {
		return err
	}
	var id string
	var a Attempt
	var took int64
	_, err = pgx.ForEachRow(rows, []any{&id, &a.Number, &a.Status, &a.Error, &took, &a.Time}, func() error {
		a.Duration = time.Duration(took) * time.Microsecond
		ds[at[id]].Attempts = append(ds[at[id]].Attempts, a)
		return nil
	})
	return err
}

func getDelivery(ctx context.Context, tx tenant.Tx, endpointID, id string) (Delivery, error) {
	rows, err := tx.Query(ctx, deliverySQL+`WHERE d.tenant_id = $1 AND d.webhook_endpoint_id = $2 AND d.webhook_delivery_id = $3`,
		tx.Tenant(), endpointID, id)
	if err != nil {
		return Delivery{}, err
	}
	d, err := pgx.CollectExactlyOneRow(rows, scanDelivery)
	if errors.Is(err, pgx.ErrNoRows) {
		return Delivery{}, fault.New(fault.NotFound, "WEBHOOK_DELIVERY_NOT_FOUND", "no such delivery to this endpoint")
	}
	return d, err
}

// TestEndpoint sends an event of type webhook.test to an active endpoint, whatever
// types it chose.
func (s *Service) TestEndpoint(ctx context.Context, p tenant.Principal, endpointID string) (Delivery, error) {
	return s.sendTo(ctx, p, endpointID, func(context.Context, tenant.Tx) (outgoing, error) {
		return outgoing{event: Event{Type: Test, Data: TestData{WebhookEndpointID: endpointID}}}, nil
	})
}

// Redeliver sends the event of a delivery to its endpoint once more, under the
// same webhook-id, as a delivery of its own.
func (s *Service) Redeliver(ctx context.Context, p tenant.Principal, endpointID, deliveryID string) (Delivery, error) {
	return s.sendTo(ctx, p, endpointID, func(ctx context.Context, tx tenant.Tx) (outgoing, error) {
		d, err := getDelivery(ctx, tx, endpointID, deliveryID)
		if err != nil {
			return outgoing{}, err
		}
		if d.State == Pending {
			return outgoing{}, fault.New(fault.Precondition, "WEBHOOK_DELIVERY_PENDING", "the delivery is still under way")
		}
		err = s.record(ctx, tx, p, "redelivered", endpointID, map[string]any{"webhookDeliveryId": deliveryID, "webhookEventId": d.EventID})
		return outgoing{id: d.EventID}, err
	})
}

// sendTo queues one event for one active endpoint.
func (s *Service) sendTo(ctx context.Context, p tenant.Principal, endpointID string, what func(context.Context, tenant.Tx) (outgoing, error)) (d Delivery, err error) {
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		e, err := getEndpoint(ctx, tx, endpointID, "")
		if err != nil {
			return err
		}
		if e.State != Active {
			return fault.New(fault.Precondition, "WEBHOOK_ENDPOINT_DISABLED", "the endpoint is disabled: make it active first")
		}
		o, err := what(ctx, tx)
		if err != nil {
			return err
		}
		o.endpoints = []string{e.ID}
		ids, err := s.enqueue(ctx, tx, []outgoing{o})
		if err != nil {
			return err
		}
		d, err = getDelivery(ctx, tx, endpointID, ids[0])
		return err
	})
	return d, err
}
