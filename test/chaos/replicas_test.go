package chaos

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

// pair is two servers on one PostgreSQL and one Redis, and a user's session seen
// through both.
type pair struct {
	*world
	cal  *calendar
	a, b *process
	at   [2]user
}

func newPair(t testing.TB, pol policy) *pair {
	t.Helper()
	p := &pair{world: newWorld(t), cal: startCalendar(t)}
	p.a = p.start()
	p.register(p.a, "calendar", p.cal.mcp, pol)
	p.b = p.start()
	u := p.open(p.a, "alice")
	p.at = [2]user{u, u.at(p.b)}
	// Both know the session, the contract and the key from here on.
	for _, u := range p.at {
		if c, err := u.propose(proposal{server: "calendar", tool: find, args: obj{"requestId": "none"}, wait: time.Minute}); err != nil || c.State != "SUCCEEDED" {
			t.Fatalf("first call: %v %v", c, err)
		}
	}
	return p
}

// draft proposes a write at a server without waiting for it.
func (p *pair) draft(u user, title string) call {
	p.t.Helper()
	c, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs(title), wait: time.Millisecond})
	p.must(err)
	return c
}

// flows are what two servers owe to each other, with Redis and without.
var flows = []struct {
	name string
	run  func(t *testing.T, p *pair, round string)
}{
	{"consent decided at the other server", consentElsewhere},
	{"cancel of a write at the other server", cancelWriteElsewhere},
	{"cancel of a read at the other server", cancelReadElsewhere},
	{"changed list", changedList},
	{"session closed at the other server", sessionClosedElsewhere},
	{"contract activated at the other server", contractElsewhere},
	{"key revoked at the other server", keyRevokedElsewhere},
	{"question answered at the other server", questionElsewhere},
	{"registration changed at the other server", registrationElsewhere},
}

// TestTwoServers goes through all flows with Redis, with Redis gone, and with
// Redis back again.
func TestTwoServers(t *testing.T) {
	t.Parallel()
	for _, f := range flows {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, policy{})
			f.run(t, p, "redis")
			p.redis.Stop()
			f.run(t, p, "no redis")
			p.redis.Start(t)
			f.run(t, p, "redis again")
			p.settled()
			p.consistent(p.b)
		})
	}
}

// consentElsewhere decides at B what a caller waits for at A.
func consentElsewhere(t *testing.T, p *pair, round string) {
	c := p.draft(p.at[0], round)
	type answer struct {
		c   call
		err error
	}
	done := make(chan answer, 1)
	go func() {
		for after := c.Revision; ; {
			got, err := p.at[0].next(c.CallID, after, 30*time.Second)
			if err != nil || got.State != "DISPATCHING" && got.State != "CONSENT_REQUIRED" || got.Revision == after {
				done <- answer{got, err}
				return
			}
			after = got.Revision
		}
	}()
	p.must(p.decide(p.b, c, "APPROVE"))
	select {
	case got := <-done:
		if got.err != nil || got.c.State != "SUCCEEDED" {
			t.Errorf("%s: the waiter got %v %v", round, got.c, got.err)
		}
	case <-time.After(25 * time.Second):
		t.Errorf("%s: the waiter was not woken within its wait", round)
	}
	if n := p.number(`SELECT count(*) FROM attempts WHERE call_id = $1`, c.CallID); n != 1 {
		t.Errorf("%s: %d attempts", round, n)
	}
}

// hang makes the next call of the tool never end, and returns once it arrived.
func (p *pair) hang(tool string, begin func()) {
	p.t.Helper()
	before := p.cal.arrivals(tool)
	p.cal.fault(tool, fault{DelayBefore: "10m", Times: 1})
	begin()
	p.cal.awaitArrivals(tool, before+1)
}

func cancelWriteElsewhere(t *testing.T, p *pair, round string) {
	c := p.draft(p.at[0], round)
	p.hang(draft, func() { p.must(p.decide(p.a, c, "APPROVE")) })
	_, err := p.at[1].cancel(c.CallID)
	p.must(err)
	got := p.awaitState(p.at[1], c.CallID, "UNCERTAIN", "CANCELLED", "FAILED", "SUCCEEDED")
	if got.State != "UNCERTAIN" {
		t.Errorf("%s: a write that was sent and cancelled: %v", round, got)
	}
}

func cancelReadElsewhere(t *testing.T, p *pair, round string) {
	var c call
	p.hang(read, func() {
		var err error
		c, err = p.at[0].propose(proposal{server: "calendar", tool: read, args: readArgs(), wait: time.Millisecond})
		p.must(err)
	})
	_, err := p.at[1].cancel(c.CallID)
	p.must(err)
	got := p.awaitState(p.at[1], c.CallID, "UNCERTAIN", "CANCELLED", "FAILED", "SUCCEEDED")
	if got.State != "CANCELLED" {
		t.Errorf("%s: a read that was cancelled: %v", round, got)
	}
}

// tool returns how the session's list shows a tool at a server.
func (u user) tool(name string) (found string) {
	var list struct {
		Tools []struct{ Name, DefinitionDigest string }
	}
	if err := u.get("/v1/sessions/"+u.session+"/tools", &list); err != nil {
		return "error: " + err.Error()
	}
	for _, d := range list.Tools {
		if d.Name == name {
			return d.DefinitionDigest
		}
	}
	return ""
}

// changedList changes a pinned tool. Only A's connection is told, yet B neither
// shows nor sends it any more; it comes back with its reviewed definition.
func changedList(t *testing.T, p *pair, round string) {
	p.watching(p.at[0])
	reviewed := "Creates a draft event. Nobody is invited."
	for _, u := range p.at {
		eventually(t, round+": the reviewed tool", func() bool { return strings.HasPrefix(u.tool(draft), "doc-1:") })
	}
	p.cal.control("PUT", "tools/"+draft, obj{"description": "Changed in " + round})
	for i, u := range p.at {
		eventually(t, fmt.Sprintf("%s: the changed tool to vanish at server %d", round, i), func() bool { return u.tool(draft) == "" })
		c := p.draft(u, "changed "+round)
		if c.State != "DENIED" || c.Decision.FirstFailed != "definition" {
			t.Errorf("%s: a changed definition was called at server %d: %v", round, i, c)
		}
	}
	p.cal.control("PUT", "tools/"+draft, obj{"description": reviewed})
	for i, u := range p.at {
		eventually(t, fmt.Sprintf("%s: the reviewed tool to come back at server %d", round, i), func() bool { return u.tool(draft) != "" })
	}
}

// sessionClosedElsewhere closes a session at B: what waits is void, and A
// dispatches nothing more for it.
func sessionClosedElsewhere(t *testing.T, p *pair, round string) {
	u := p.open(p.a, "bob")
	c := p.draft(u, round)
	p.must(u.at(p.b).do("DELETE", "/v1/sessions/"+u.session, nil, nil))
	if err := p.decide(p.a, c, "APPROVE"); err == nil {
		t.Errorf("%s: a consent of a closed session could be given", round)
	}
	if got := p.awaitState(u, c.CallID, "DENIED"); got.Decision.Reason != "VOID" {
		t.Errorf("%s: the waiting call: %v", round, got)
	}
	// A may remember the session for 5 s; a write is looked up in any case.
	before := p.cal.arrivals(draft)
	if c, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs("late"), wait: time.Millisecond}); err == nil && c.State != "DENIED" {
		t.Errorf("%s: a closed session made a call: %v", round, c)
	}
	eventually(t, round+": server A to refuse the session", func() bool {
		c, err := u.propose(proposal{server: "calendar", tool: read, args: readArgs(), wait: time.Minute})
		return err != nil || c.State == "DENIED"
	})
	if n := p.cal.arrivals(draft); n != before {
		t.Errorf("%s: %d writes were sent for a closed session", round, n-before)
	}
}

// contractElsewhere activates another contract at A: what waits for consent
// through B is void.
func contractElsewhere(t *testing.T, p *pair, round string) {
	c := p.draft(p.at[1], round)
	p.activate(p.a, "calendar", p.cal.mcp, policy{readRetry: 1 + len(round)%3, writeAge: fmt.Sprintf("%ds", 50+len(round))})
	if err := p.decide(p.b, c, "APPROVE"); err == nil {
		t.Errorf("%s: a consent under a retired contract could be given", round)
	}
	if got := p.awaitState(p.at[1], c.CallID, "DENIED"); got.Decision.Reason != "VOID" {
		t.Errorf("%s: the waiting call: %v", round, got)
	}
	// B goes on under the new one.
	c = p.draft(p.at[1], "again "+round)
	if c.State != "CONSENT_REQUIRED" {
		t.Fatalf("%s: under the new contract: %v", round, c)
	}
	p.must(p.decide(p.a, c, "APPROVE"))
	p.awaitState(p.at[1], c.CallID, "SUCCEEDED")
}

// keyRevokedElsewhere revokes at A a key that B knows: no write of it is
// dispatched from then on, and B lets it in no more.
func keyRevokedElsewhere(t *testing.T, p *pair, round string) {
	secret, id := p.newKey(p.a, "SERVICE")
	u := p.open(p.b, "carol")
	u.key = secret
	if c, err := u.propose(proposal{server: "calendar", tool: read, args: readArgs(), wait: time.Minute}); err != nil || c.State != "SUCCEEDED" {
		t.Fatalf("%s: %v %v", round, c, err)
	}
	c := p.draft(u, round)
	before := p.cal.arrivals(draft)
	p.must(p.a.as(p.admin).do("DELETE", "/v1/keys/"+id, nil, nil))
	if err := p.decide(p.b, c, "APPROVE"); err == nil {
		w := user{caller: p.b.as(p.service).on("carol"), session: u.session}
		p.awaitState(w, c.CallID, "DENIED")
	}
	eventually(t, round+": server B to refuse the key", func() bool {
		return status(u.get("/v1/sessions/"+u.session, nil)) == 401
	})
	if n := p.cal.arrivals(draft); n != before {
		t.Errorf("%s: a write of a revoked key was sent", round)
	}
}

// registrationElsewhere changes, suspends and deletes at A what both are connected
// to. The sessions that they have at the MCP server end, B's as A's, although
// nobody uses them again; what B is connected to anew stays.
func registrationElsewhere(t *testing.T, p *pair, round string) {
	name := "moving-" + strings.ReplaceAll(round, " ", "-")
	first := p.startAsker(p.a, name, mcptest.Legacy)
	use := func(s *asker) {
		t.Helper()
		begun := s.Count("initialize")
		u := p.open(p.a, "alice")
		for _, u := range []user{u, u.at(p.b)} {
			// Without a signal a server may remember the registration for 5 s.
			eventually(t, round+": a call under the new registration", func() bool {
				c, err := u.propose(proposal{server: name, tool: "look", args: obj{"how": "plainly"}, wait: time.Minute})
				return err == nil && c.State == "SUCCEEDED"
			})
		}
		if n := s.Count("initialize"); n < begun+1 {
			t.Fatalf("%s: no session at the server but the %d before", round, begun)
		}
	}
	ended := func(s *asker, why string) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s: all sessions to end when the server is %s", round, why), func() bool {
			return s.Count("DELETE") == s.Count("initialize")
		})
	}
	use(first)
	moved := p.newAsker(mcptest.Legacy)
	p.must(p.a.as(p.admin).do("PATCH", "/v1/servers/"+name, obj{"http": obj{"url": moved.URL}}, nil))
	ended(first, "moved")

	p.contract(p.a, name, mcptest.Legacy, moved)
	use(moved)
	p.suspend(true)
	ended(moved, "of a suspended tenant")
	p.suspend(false)
	eventually(t, round+": the tenant to be let in", func() bool {
		return p.a.as(p.admin).get("/v1/servers/"+name, nil) == nil && p.b.as(p.admin).get("/v1/servers/"+name, nil) == nil
	})

	use(moved)
	p.must(p.a.as(p.admin).do("DELETE", "/v1/servers/"+name, nil, nil))
	ended(moved, "deleted")
	first.Close()
	moved.Close()
}

// suspend suspends the tenant, or lets it go on.
func (w *world) suspend(yes bool) {
	w.t.Helper()
	state := map[bool]string{true: "SUSPENDED", false: "ACTIVE"}[yes]
	_, err := w.owner.Exec(context.Background(), `UPDATE tenants SET state = $1 WHERE tenant_id = $2`, state, w.tenant)
	w.must(err)
}
