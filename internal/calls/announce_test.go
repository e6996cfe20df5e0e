package calls

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// teller keeps what is announced of each call and was committed.
type teller struct {
	mu    sync.Mutex
	wants bool
	fails int // so many announcements fail first
	told  map[string][]string
	last  webhooks.CallData
}

// Wants implements Announcer.
func (a *teller) Wants(context.Context, tenant.ID, ...webhooks.Type) (bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wants, nil
}

// Announce implements Announcer.
func (a *teller) Announce(_ context.Context, tx tenant.Tx, events ...webhooks.Event) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fails > 0 {
		a.fails--
		return errors.New("not told")
	}
	tx.AfterCommit(func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, e := range events {
			a.last = e.Data.(webhooks.CallData)
			a.told[a.last.CallID] = append(a.told[a.last.CallID], string(e.Type)+" "+a.last.State)
		}
	})
	return nil
}

func (a *teller) of(id string) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.told[id]
}

// Each end of a call is told once, in its transaction; plain reads only when
// somebody wants to know.
func TestAnnounce_EveryEndOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := &teller{told: map[string][]string{}}
	sc := w.scene(w.node(quick(), func(d *Deps) { d.Announcer = a }))
	if c := sc.propose("read"); c.State != Succeeded || len(a.of(c.ID)) != 0 {
		t.Errorf("nobody wants to know: %s, %v", c.State, a.of(c.ID))
	}
	a.wants = true
	check := func(c *Call, want ...string) {
		t.Helper()
		if got := a.of(c.ID); !slices.Equal(got, want) {
			t.Errorf("%s: told %v, want %v", c.ID, got, want)
		}
	}
	c := sc.propose("read")
	check(c, "call.finished SUCCEEDED")
	if a.last != (webhooks.CallData{CallID: c.ID, SessionID: c.SessionID, ServerID: c.ServerID, Server: c.ServerName, Kind: "TOOL", Name: "read",
		State: "SUCCEEDED", ArgumentsDigest: c.ArgumentsDigest, DefinitionDigest: c.DefinitionDigest, Receipt: c.Receipt}) {
		t.Errorf("%+v", a.last)
	}
	// What cannot be told is not recorded, until it can.
	a.fails = 2
	c = sc.propose("read")
	check(c, "call.finished SUCCEEDED")
	if n := w.count(`SELECT count(*) FROM calls WHERE call_id = $1`, c.ID); n != 1 || c.State != Succeeded {
		t.Errorf("recorded %d times, %s", n, c.State)
	}
	c = sc.propose("write_call")
	sc.decide(c, true)
	check(sc.until(c.ID, Succeeded), "call.finished SUCCEEDED")
	c = sc.propose("write_call")
	sc.decide(c, false)
	check(sc.until(c.ID, Denied), "call.finished DENIED")
	c = sc.propose("write_call")
	if _, err := sc.Cancel(t.Context(), sc.alice, c.ID); err != nil {
		t.Fatal(err)
	}
	check(c, "call.finished CANCELLED")
	// Nobody knows at first; then the status query does.
	result := `{"found":false}`
	w.sender.answer(finds(&result))
	c = sc.propose("write_query")
	check(c, "call.uncertain UNCERTAIN")
	result = `{"found":true,"id":"late"}`
	w.exec(`UPDATE calls SET resolve_after = now() WHERE call_id = $1`, c.ID)
	sc.sweep(t)
	check(sc.until(c.ID, Succeeded), "call.uncertain UNCERTAIN", "call.finished SUCCEEDED")
}
