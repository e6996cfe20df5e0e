package consent

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// teller keeps what is announced.
type teller struct {
	mu   sync.Mutex
	told []string
	last webhooks.ConsentData
	fail error
}

// Announce implements Announcer.
func (a *teller) Announce(_ context.Context, _ tenant.Tx, events ...webhooks.Event) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range events {
		a.last = e.Data.(webhooks.ConsentData)
		a.told = append(a.told, string(e.Type)+" "+a.last.State)
	}
	return a.fail
}

// Each consent is told when it is asked for and once when it ends, however it does,
// and what cannot be told does not happen.
func TestAnnounce_RequestsAndEveryEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := &teller{}
	w.svc.AnnounceTo(a)
	decide := func(id string, approve bool) error {
		_, err := w.svc.Decide(t.Context(), w.boss, id, Decision{Approve: approve})
		return err
	}
	for end, run := range map[string]func(id string) error{
		"APPROVED": func(id string) error { return decide(id, true) },
		"DENIED":   func(id string) error { return decide(id, false) },
		"EXPIRED": func(id string) error {
			w.exec(`UPDATE consents SET expire_time = now() - interval '1 second' WHERE consent_id = $1`, id)
			_, err := w.svc.Expire(t.Context())
			return err
		},
		"VOID": func(id string) error {
			return w.tx(func(ctx context.Context, tx tenant.Tx) error {
				return w.svc.VoidCall(ctx, tx, w.text(`SELECT call_id FROM consents WHERE consent_id = $1`, id), "", "")
			})
		},
	} {
		a.told = nil
		id := w.ask(RuleCall, "WRITE").ConsentID
		if a.last.ExpireTime == nil || a.last.ConsentID != id || a.last.Server != "calendar" || a.last.Name != "put" || a.last.Effect != "WRITE" {
			t.Errorf("asked: %+v", a.last)
		}
		if err := run(id); err != nil {
			t.Fatal(err)
		}
		if want := []string{"consent.requested PENDING", "consent.decided " + end}; !slices.Equal(a.told, want) || a.last.ConsentID != id || a.last.ExpireTime != nil {
			t.Errorf("told %v, want %v; %+v", a.told, want, a.last)
		}
		if end == "APPROVED" {
			w.exec(`UPDATE consents SET state = 'CONSUMED' WHERE consent_id = $1`, id)
		}
	}
	id := w.ask(RuleCall, "WRITE").ConsentID
	a.fail = errors.New("not told")
	if err := decide(id, true); err == nil || w.state(id) != Pending {
		t.Errorf("%v, %s", err, w.state(id))
	}
}
