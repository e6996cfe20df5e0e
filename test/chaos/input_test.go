package chaos

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// question is what the tests look at of an interaction.
type question struct{ InteractionID, State, Kind string }

func (u user) questions(id string) (open []question, err error) {
	var list struct{ Interactions []question }
	err = u.get("/v1/calls/"+id+"/interactions", &list)
	for _, q := range list.Interactions {
		if q.State == "PENDING" {
			open = append(open, q)
		}
	}
	return open, err
}

// answer answers the one question of a call.
func (u user) answer(id string) error {
	open, err := u.questions(id)
	if err != nil || len(open) != 1 {
		u.p.t.Errorf("call %s has the questions %v (%v), want one", id, open, err)
		return err
	}
	return u.post("/v1/calls/"+id+"/interactions/"+open[0].InteractionID+":respond",
		obj{"action": "ACCEPT", "content": obj{"account": "7"}}, nil)
}

// begin makes a call and waits until it is as far as the server's first answer.
func (w *world) begin(u user, server, tool, how, state string) call {
	w.t.Helper()
	c, err := u.propose(proposal{server: server, tool: tool, args: obj{"how": how}, wait: time.Millisecond})
	w.must(err)
	if tool == "change" {
		w.must(w.decide(u.p, c, "APPROVE"))
	}
	return w.awaitState(u, c.CallID, state)
}

// ask is a call under way when the server ends, and what becomes of it.
type ask struct {
	server, tool, how string
	before            string // its state when the server ends
	after             map[syscall.Signal]string
	user              user
	call              call
}

var both = []string{"look", "change"}

func always(state string) map[syscall.Signal]string {
	return map[syscall.Signal]string{syscall.SIGKILL: state, syscall.SIGTERM: state}
}

// TestRestartWhileServersAsk ends the server, by kill -9 and in order, in the
// middle of rounds, tasks and held questions, and starts another on the same
// stores. What only waits goes on where it was, and is sent on exactly once; what
// hung on the old process ends as what is known of it.
func TestRestartWhileServersAsk(t *testing.T) {
	t.Parallel()
	for name, signal := range map[string]syscall.Signal{"kill -9": syscall.SIGKILL, "stop in order": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a := w.start("BULKHEAD_GRACE_PERIOD=2s")
			modern, legacy := w.startAsker(a, "modern", mcptest.Modern), w.startAsker(a, "legacy", mcptest.Legacy)
			var asks []*ask
			for _, tool := range both {
				// A question that was lost with its server is not put again; one that an
				// orderly stop dismisses is left to its server, which ends the call.
				ended, cut := always("FAILED"), map[syscall.Signal]string{syscall.SIGKILL: "CANCELLED", syscall.SIGTERM: "SUCCEEDED"}
				if tool == "change" {
					ended, cut[syscall.SIGKILL] = always("UNCERTAIN"), "UNCERTAIN"
				}
				for _, k := range []ask{
					{server: "modern", how: "asked", before: "INPUT_REQUIRED", after: always("SUCCEEDED")},
					{server: "modern", how: "answered", before: "INPUT_REQUIRED", after: always("SUCCEEDED")},
					{server: "modern", how: "sent", before: "INPUT_REQUIRED", after: ended},
					{server: "modern", how: "task", before: "DISPATCHING", after: always("SUCCEEDED")},
					{server: "modern", how: "task asks", before: "INPUT_REQUIRED", after: always("SUCCEEDED")},
					{server: "legacy", how: "held", before: "INPUT_REQUIRED", after: cut},
				} {
					k.tool, k.user = tool, w.open(a, "alice")
					asks = append(asks, &k)
				}
			}
			for _, k := range asks {
				k.call = w.begin(k.user, k.server, k.tool, k.how, k.before)
			}
			release := w.beforeTheEnd(asks, modern)
			a.signal(signal)
			a.awaitExit()
			release()
			if signal == syscall.SIGKILL {
				w.presumeDead(a)
			}
			b := w.start()
			w.letClaimsPass()
			for _, k := range asks {
				u := k.user.at(b)
				switch k.how {
				case "asked":
					if got := w.awaitState(u, k.call.CallID, "INPUT_REQUIRED"); got.Revision != k.call.Revision {
						t.Errorf("%s: the restart changed %v into %v", k.tool, k.call, got)
					}
					w.must(u.answer(k.call.CallID))
				case "task asks":
					w.must(u.answer(k.call.CallID))
					modern.end(k.tool + " " + k.how)
				case "task":
					modern.end(k.tool + " " + k.how)
				}
			}
			for _, k := range asks {
				got := w.awaitState(k.user.at(b), k.call.CallID, "SUCCEEDED", "FAILED", "CANCELLED", "UNCERTAIN", "DENIED")
				if want := k.after[signal]; got.State != want || want == "SUCCEEDED" && !strings.Contains(string(got.Result), "thanks") {
					t.Errorf("%s %s: %v, want %s", k.tool, k.how, got, want)
				}
			}
			w.wantSentOnce(modern, legacy)
			w.settled()
			w.consistent(b)
		})
	}
}

// beforeTheEnd brings the calls to where the server's end finds them. What is
// answered there waits for a lock, and is answered and not sent when it ends.
func (w *world) beforeTheEnd(asks []*ask, modern *asker) (release func()) {
	w.t.Helper()
	tx, err := w.owner.Begin(context.Background())
	w.must(err)
	for _, k := range asks {
		switch k.how {
		case "answered":
			w.lock(tx, k.user.session)
			w.must(k.user.answer(k.call.CallID))
		case "sent":
			w.must(k.user.answer(k.call.CallID))
			eventually(w.t, "the answer to be sent", func() bool { return len(modern.calls(k.tool, k.how)) == 2 })
		case "task":
			eventually(w.t, "a look at the task", func() bool { return modern.looks(k.tool+" "+k.how) > 0 })
		}
	}
	for _, k := range asks {
		if n := w.number(`SELECT count(*) FROM call_inputs WHERE call_id = $1 AND phase = 'READY'`, k.call.CallID); k.how == "answered" && n != 1 {
			w.t.Errorf("%s: the answer was sent before the server ended", k.tool)
		}
	}
	return func() { w.must(tx.Rollback(context.Background())) }
}

// lock keeps a session's calls from being dispatched until the transaction ends.
func (w *world) lock(tx pgx.Tx, session string) {
	w.t.Helper()
	_, err := tx.Exec(context.Background(), `SELECT FROM sessions WHERE session_id = $1 FOR UPDATE`, session)
	w.must(err)
}

// letClaimsPass lets the time pass for which a server that has ended looks after a
// task alone.
func (w *world) letClaimsPass() {
	w.t.Helper()
	_, err := w.owner.Exec(context.Background(), `UPDATE call_tasks SET claim_until = clock_timestamp() WHERE claim_until > clock_timestamp()`)
	w.must(err)
}

// wantSentOnce wants each round to have been answered by one further request, each
// task to have been made and told its answer once, and no held question twice.
func (w *world) wantSentOnce(modern, legacy *asker) {
	w.t.Helper()
	for _, tool := range both {
		for _, how := range []string{"asked", "answered", "sent"} {
			modern.wantRound(tool, how)
		}
		for _, how := range []string{"task", "task asks"} {
			if n := len(modern.calls(tool, how)); n != 1 {
				w.t.Errorf("%s %s: %d requests", tool, how, n)
			}
		}
		if told := modern.updates(tool + " task asks"); len(told) != 1 || !strings.Contains(told[0].Body, `{"k1":{"action":"accept","content":{"account":"7","n":2}}}`) {
			w.t.Errorf("%s: the task was told %v", tool, told)
		}
		if n := len(legacy.calls(tool, "held")); n != 1 {
			w.t.Errorf("%s held: %d requests", tool, n)
		}
	}
	w.none("a call with another number of consents than one, or one that is not consumed", `SELECT call_id, count(*) FROM consents
		GROUP BY call_id HAVING count(*) <> 1 OR bool_or(state <> 'CONSUMED')`)
}

// questionElsewhere is asked at one server and answered at the other: a round, a
// question that A holds, and a task's.
func questionElsewhere(t *testing.T, p *pair, round string) {
	name := strings.ReplaceAll(round, " ", "-")
	for _, kind := range []struct{ version, how string }{{mcptest.Modern, "asked"}, {mcptest.Legacy, "held"}, {mcptest.Modern, "task asks"}} {
		server := strings.ReplaceAll(name+"-"+kind.how, " ", "-")
		s := p.startAsker(p.a, server, kind.version)
		u := p.open(p.a, "alice")
		for _, tool := range both {
			c := p.begin(u, server, tool, kind.how, "INPUT_REQUIRED")
			p.must(u.at(p.b).answer(c.CallID))
			s.end(tool + " " + kind.how)
			for _, at := range []user{u, u.at(p.b)} {
				if got := p.awaitState(at, c.CallID, "SUCCEEDED", "FAILED", "CANCELLED", "UNCERTAIN"); got.State != "SUCCEEDED" || !strings.Contains(string(got.Result), "thanks") {
					t.Errorf("%s: %s %s became %v", round, tool, kind.how, got)
				}
			}
			if kind.how == "asked" {
				s.wantRound(tool, kind.how)
			} else if n := len(s.calls(tool, kind.how)); n != 1 {
				t.Errorf("%s: %s %s was sent %d times", round, tool, kind.how, n)
			}
		}
		s.Close()
	}
}
