package calls

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// An answer that nobody waits for any more is refused, and says why; it is never
// taken for given, nor for one that somebody else gave.
func TestRespond_AfterTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.node(quick())
	modern := func(ctx, sent, int) (response, error) { return asks(`"s"`, form("a"), form("b")) }
	closing := func(sc *scene, _ *Call) {
		if _, err := sc.store.Close(context.Background(), sc.alice, sc.session.ID); err != nil {
			sc.t.Error(err)
		}
	}
	cancelling := func(sc *scene, c *Call) {
		if _, err := sc.Cancel(context.Background(), sc.alice, c.ID); err != nil {
			sc.t.Error(err)
		}
		sc.until(c.ID, Cancelled, Uncertain)
	}
	for name, c := range map[string]struct {
		script func(ctx, sent, int) (response, error)
		end    func(sc *scene, c *Call)
		reason string
	}{
		"modern, closed": {modern, closing, "SESSION_CLOSED"},
		"modern, closed and ended": {modern, func(sc *scene, c *Call) {
			closing(sc, c)
			sc.sweep(sc.t)
			sc.until(c.ID, Cancelled, Uncertain)
		}, "SESSION_CLOSED"},
		"modern, session expired": {modern, func(sc *scene, c *Call) {
			sc.w.exec(`UPDATE sessions SET expire_time = now() WHERE session_id = $1`, c.SessionID)
		}, "SESSION_CLOSED"},
		"modern, cancelled": {modern, cancelling, "CALL_ENDED"},
		"modern, declined otherwise": {func(ctx, sent, int) (response, error) { return asks(`"s"`, form("a"), sampling("b")) }, func(sc *scene, c *Call) {
			if _, err := sc.respond(c, 1, Answer{Action: Decline}); err != nil {
				sc.t.Error(detail(err))
			}
		}, "CALL_ENDED"},
		"modern, expired": {modern, func(sc *scene, c *Call) {
			sc.w.exec(`UPDATE interactions SET expire_time = now() WHERE call_id = $1`, c.ID)
		}, "INTERACTION_ENDED"},
		"legacy, closed and ended": {legacy(form("")), func(sc *scene, c *Call) {
			closing(sc, c)
			sc.until(c.ID, Succeeded)
		}, "SESSION_CLOSED"},
		"legacy, cancelled": {legacy(form("")), cancelling, "CALL_ENDED"},
	} {
		for _, tool := range []string{"read", "write"} {
			t.Run(name+" "+tool, func(t *testing.T) {
				w.sender.answer(c.script)
				sc := w.scene(n, reverseContract...)
				sc.t = t
				call := sc.get(sc.propose(tool).ID)
				if call.State != InputRequired {
					t.Fatalf("%+v", call)
				}
				c.end(sc, call)
				for _, a := range []Answer{{Action: Accept, Content: json.RawMessage(`{"acct":"1"}`)}, {Action: Dismiss}, {Action: Decline}} {
					_, err := sc.respond(call, 0, a)
					if f, ok := fault.As(err); !ok || f.Reason != c.reason {
						t.Errorf("%s: %v", a.Action, err)
					}
				}
				if n := w.count(`SELECT count(*) FROM interactions WHERE call_id = $1 AND interaction_id = $2 AND answered_how = 'API'`, call.ID, call.Interactions[0].ID); n != 0 {
					t.Error("the answer was written")
				}
			})
		}
	}
}

// A call whose questions are all answered is on its way: who waits for its end
// gets the end, although it is INPUT_REQUIRED until its holder has seen the answer.
func TestRespond_WaitingGoesOnAfterTheAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	slow := quick()
	slow.Poll = 300 * time.Millisecond // and nobody tells it
	a, b := w.node(slow), w.node(quick())
	sc := w.scene(a, reverseContract...)
	w.sender.answer(legacy(form("")))
	for _, tool := range []string{"read", "write"} {
		c := sc.propose(tool)
		if _, err := b.Respond(t.Context(), sc.alice, c.ID, c.Interactions[0].ID, Answer{Action: Decline}); err != nil {
			t.Fatal(detail(err))
		}
		got, err := b.Get(t.Context(), sc.alice, c.ID, time.Minute, 0)
		if err != nil || got.State != Succeeded {
			t.Fatalf("%s: %s %v", tool, got.State, err)
		}
	}
}

// Nobody asks for ever about a call whose server is gone.
func TestStatusQuery_StopsWhenTheServerIsGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	w.sender.answer(broke)
	c := sc.propose("write_query")
	if c.State != Uncertain {
		t.Fatal(c.State)
	}
	if err := sc.catalog.DeleteServer(t.Context(), sc.admin, "calendar"); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		w.exec(`UPDATE calls SET resolve_after = now() - interval '1 second' WHERE call_id = $1 AND resolve_after IS NOT NULL`, c.ID)
		sc.sweep(t)
	}
	if n := w.count(`SELECT count(*) FROM calls WHERE resolve_after IS NULL AND state = 'UNCERTAIN'`); n != 1 {
		t.Error("it is asked about for ever")
	}
	if n := strings.Count(w.logs.String(), "cannot be asked about any more"); n != 1 {
		t.Errorf("%d lines\n%s", n, w.logs)
	}
}
