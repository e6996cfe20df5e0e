package calls

import (
	"context"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// Announcer tells a tenant's own systems what happened, in the transaction in
// which it happens. *webhooks.Service is one.
type Announcer interface {
	// Wants reports whether anybody is to be told of one of the types; it is cheap.
	Wants(ctx context.Context, t tenant.ID, types ...webhooks.Type) (bool, error)
	Announce(ctx context.Context, tx tenant.Tx, events ...webhooks.Event) error
}

// announce tells of calls that reached an end, or that nobody knows the end of.
func (s *Service) announce(ctx context.Context, tx tenant.Tx, cs ...*Call) error {
	if s.deps.Announcer == nil {
		return nil
	}
	events := make([]webhooks.Event, len(cs))
	for i, c := range cs {
		t := webhooks.CallFinished
		if c.State == Uncertain {
			t = webhooks.CallUncertain
		}
		events[i] = webhooks.Event{Type: t, Data: webhooks.CallData{CallID: c.ID, SessionID: c.SessionID, ServerID: c.ServerID, Server: c.ServerName,
			Kind: string(c.Kind), Name: c.Name, State: string(c.State), ArgumentsDigest: c.ArgumentsDigest,
			DefinitionDigest: c.DefinitionDigest, Receipt: c.Receipt}}
	}
	return s.deps.Announcer.Announce(ctx, tx, events...)
}

// announceAs is announce for a call whose new state is in the tables only.
func (s *Service) announceAs(ctx context.Context, tx tenant.Tx, c *Call, state State, receipt string) error {
	as := *c
	as.State, as.Receipt = state, receipt
	return s.announce(ctx, tx, &as)
}

// endsWanted reports whether anybody is to be told of plain reads that end.
func (s *Service) endsWanted(ctx context.Context, t tenant.ID) (bool, error) {
	if s.deps.Announcer == nil {
		return false, nil
	}
	return s.deps.Announcer.Wants(ctx, t, webhooks.CallFinished, webhooks.CallUncertain)
}
