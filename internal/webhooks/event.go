package webhooks

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Type says what an event tells.
type Type string

// The types of event. A later version of a type's data would have another number
// in Version and keep what the earlier one has.
const (
	ConsentRequested         Type = "consent.requested"
	ConsentDecided           Type = "consent.decided"
	CallFinished             Type = "call.finished"
	CallUncertain            Type = "call.uncertain"
	DefinitionChanged        Type = "definition.changed"
	AccountNeedsAuth         Type = "account.needs_authorization"
	SecurityDowngradeRefused Type = "security.downgrade_refused"
	SecurityOriginRefused    Type = "security.origin_refused"
	// Test is sent to an endpoint on request, whatever it chose.
	Test Type = "webhook.test"
)

// AllSecurity stands for every type of security event, later ones too.
const AllSecurity = "security.*"

// choices are the types that an endpoint can choose.
var choices = []string{string(ConsentRequested), string(ConsentDecided), string(CallFinished), string(CallUncertain),
	string(DefinitionChanged), string(AccountNeedsAuth), AllSecurity}

// choice returns the word by which endpoints choose the type.
func (t Type) choice() string {
	if strings.HasPrefix(string(t), "security.") {
		return AllSecurity
	}
	return string(t)
}

// Version is that of every payload.
const Version = 1

// Event is something to tell. Data is of the type that belongs to Type.
type Event struct {
	Type Type
	Data any
}

// ConsentData belongs to consent.requested and consent.decided. The state is
// PENDING, or how the question ended: APPROVED, DENIED, EXPIRED or VOID.
type ConsentData struct {
	ConsentID        string     `json:"consentId"`
	CallID           string     `json:"callId"`
	SessionID        string     `json:"sessionId"`
	ServerID         string     `json:"serverId"`
	Server           string     `json:"server"`
	Kind             string     `json:"kind"`
	Name             string     `json:"name"`
	Effect           string     `json:"effect"`
	State            string     `json:"state"`
	ArgumentsDigest  string     `json:"argumentsDigest"`
	DefinitionDigest string     `json:"definitionDigest"`
	ContractID       string     `json:"contractId"`
	ExpireTime       *time.Time `json:"expireTime,omitempty"`
}

// CallData belongs to call.finished and call.uncertain.
type CallData struct {
	CallID           string `json:"callId"`
	SessionID        string `json:"sessionId"`
	ServerID         string `json:"serverId"`
	Server           string `json:"server"`
	Kind             string `json:"kind"`
	Name             string `json:"name"`
	State            string `json:"state"`
	ArgumentsDigest  string `json:"argumentsDigest"`
	DefinitionDigest string `json:"definitionDigest"`
	Receipt          string `json:"receipt"`
}

// DefinitionData belongs to definition.changed. Without a NewDigest the definition
// vanished or was set aside. More counts the changes of one list that have no
// event of their own; the other members on definitions are then empty.
type DefinitionData struct {
	ServerID  string `json:"serverId"`
	Server    string `json:"server"`
	Kind      string `json:"kind"`
	Name      string `json:"name,omitempty"`
	OldDigest string `json:"oldDigest,omitempty"`
	NewDigest string `json:"newDigest,omitempty"`
	More      int    `json:"more,omitempty"`
}

// SecurityData belongs to the security events of a server.
type SecurityData struct {
	ServerID     string `json:"serverId"`
	Server       string `json:"server"`
	Registration int64  `json:"registration"`
}

// TestData belongs to webhook.test.
type TestData struct {
	WebhookEndpointID string `json:"webhookEndpointId"`
}

// payload is what an endpoint is sent.
type payload struct {
	Type      Type   `json:"type"`
	Timestamp string `json:"timestamp"`
	Version   int    `json:"version"`
	Data      any    `json:"data"`
}

// encode returns the bytes that are stored, signed and sent.
func (e Event) encode(at time.Time) ([]byte, error) {
	out, err := json.Marshal(payload{Type: e.Type, Timestamp: at.UTC().Format("2006-01-02T15:04:05.000Z"), Version: Version, Data: e.Data})
	return out, fault.Wrap(err, "encode event")
}

// wanted is what the active endpoints of a tenant chose, as of a moment ago.
type wanted struct {
	choices []string
	until   time.Time
}

const (
	// wantedTime is how long a replica may not know of another's new endpoint.
	wantedTime = 5 * time.Second
	maxTenants = 10_000
)

const wantedSQL = `SELECT DISTINCT unnest(event_types) FROM webhook_endpoints WHERE tenant_id = $1 AND state = 'ACTIVE'`

// Wants reports whether any endpoint of the tenant may want one of the types. It
// reads at most every five seconds, outside any transaction.
func (s *Service) Wants(ctx context.Context, t tenant.ID, types ...Type) (bool, error) {
	w, ok := s.known(t)
	if !ok {
		err := s.o.DB.Read(ctx, t, func(b *pgx.Batch) {
			b.Queue(wantedSQL, t).Query(func(rows pgx.Rows) (err error) {
				w, err = pgx.CollectRows(rows, pgx.RowTo[string])
				return err
			})
		})
		if err != nil {
			return false, fault.Wrap(err, "read what webhooks want")
		}
		s.remember(t, w)
	}
	return slices.ContainsFunc(types, func(t Type) bool { return slices.Contains(w, t.choice()) }), nil
}

func (s *Service) known(t tenant.ID) ([]string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w, ok := s.wants[t]
	return w.choices, ok && s.now().Before(w.until)
}

func (s *Service) remember(t tenant.ID, choices []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.wants) >= maxTenants {
		clear(s.wants) // refilled by one read each
	}
	s.wants[t] = wanted{choices: choices, until: s.now().Add(wantedTime)}
}

func (s *Service) forget(t tenant.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.wants, t)
}

// Announce stores the events in the transaction of what they tell, and queues
// their deliveries to the endpoints that want them. What nobody wants is not
// stored.
func (s *Service) Announce(ctx context.Context, tx tenant.Tx, events ...Event) error {
	choices, ok := s.known(tx.Tenant())
	if !ok {
		rows, err := tx.Query(ctx, wantedSQL, tx.Tenant())
		if err != nil {
			return fault.Wrap(err, "read what webhooks want")
		}
		if choices, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return fault.Wrap(err, "read what webhooks want")
		}
		s.remember(tx.Tenant(), choices)
	}
	events = slices.DeleteFunc(slices.Clone(events), func(e Event) bool { return !slices.Contains(choices, e.Type.choice()) })
	if len(events) == 0 {
		return nil
	}
	endpoints, err := activeEndpoints(ctx, tx)
	if err != nil {
		return err
	}
	var out []outgoing
	for _, e := range events {
		o := outgoing{event: e}
		for _, p := range endpoints {
			if slices.Contains(p.EventTypes, e.Type.choice()) {
				o.endpoints = append(o.endpoints, p.ID)
			}
		}
		out = append(out, o)
	}
	_, err = s.enqueue(ctx, tx, out)
	return err
}

// outgoing is an event with the endpoints that it goes to. An event that is
// stored already has an id.
type outgoing struct {
	event     Event
	id        string
	endpoints []string
}

// enqueue stores events, deliveries and jobs, and returns the ids of the
// deliveries.
func (s *Service) enqueue(ctx context.Context, tx tenant.Tx, out []outgoing) (ids []string, err error) {
	b := &pgx.Batch{}
	var jobs []river.InsertManyParams
	now := s.now()
	for _, o := range out {
		if len(o.endpoints) == 0 {
			continue
		}
		if o.id == "" {
			o.id = resource.NewID(resource.WebhookEvent)
			body, err := o.event.encode(now)
			if err != nil {
				return nil, err
			}
			b.Queue(`INSERT INTO webhook_events (tenant_id, webhook_event_id, type, payload, create_time) VALUES ($1, $2, $3, $4, $5)`,
				tx.Tenant(), o.id, string(o.event.Type), body, now)
		}
		for _, endpoint := range o.endpoints {
			id := resource.NewID(resource.WebhookDelivery)
			ids = append(ids, id)
			b.Queue(`INSERT INTO webhook_deliveries (tenant_id, webhook_delivery_id, webhook_endpoint_id, webhook_event_id,
				next_time, give_up_time, create_time) VALUES ($1, $2, $3, $4, $5, $6, $5)`,
				tx.Tenant(), id, endpoint, o.id, now, now.Add(s.o.Retry.GiveUp))
			jobs = append(jobs, river.InsertManyParams{Args: deliveryArgs{Tenant: tx.Tenant().String(), Endpoint: endpoint, Delivery: id},
				InsertOpts: &river.InsertOpts{MaxAttempts: maxJobAttempts}})
		}
	}
	if len(jobs) == 0 {
		return nil, nil
	}
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return nil, fault.Wrap(err, "store event")
	}
	if _, err := s.queue.InsertManyTx(ctx, tx.Bare(), jobs); err != nil {
		return nil, fault.Wrap(err, "queue delivery")
	}
	return ids, nil
}
