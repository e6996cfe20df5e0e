package calls

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// ended is a call after everything is over, with what the server knows of it.
type ended struct {
	Call            *Call
	tag             string
	starts          []time.Time // of attempts with a dispatch transaction
	sends, executed int
}

func (x *interleaver) load() (out []*ended) {
	rows, err := x.w.owner.Query(x.t.Context(), selectSQL+` ORDER BY call_id`)
	if err != nil {
		x.t.Fatal(err)
	}
	calls, err := pgx.CollectRows(rows, scan)
	if err != nil {
		x.t.Fatal(err)
	}
	by := map[string]*ended{}
	for _, c := range calls {
		e := &ended{Call: c, tag: c.RequestID, sends: x.truth.sends[c.RequestID], executed: x.truth.executed[c.RequestID]}
		by[c.ID], out = e, append(out, e)
	}
	rows, err = x.w.owner.Query(x.t.Context(), `SELECT call_id, start_time FROM attempts WHERE send_by IS NOT NULL ORDER BY call_id, attempt`)
	if err != nil {
		x.t.Fatal(err)
	}
	var id string
	var at time.Time
	if _, err = pgx.ForEachRow(rows, []any{&id, &at}, func() error { by[id].starts = append(by[id].starts, at); return nil }); err != nil {
		x.t.Fatal(err)
	}
	return out
}

func (x *interleaver) check() {
	x.t.Helper()
	all := x.load()
	for _, e := range all {
		x.count(string(e.Call.State))
		if why := e.wrong(); why != "" {
			x.t.Errorf("%s %s (%s, %d attempts, %d sends, %d executed, %+v): %s", e.Call.Name, e.Call.ID, e.Call.State, e.Call.Attempt,
				e.sends, e.executed, e.Call.Error, why)
		}
	}
	x.checkVoids(all)
	x.checkTables()
	x.checkTransitions()
	for _, word := range []string{"deadlock", "40P01", "panic"} {
		if strings.Contains(x.w.logs.String(), word) {
			x.t.Errorf("the log says %s:\n%s", word, x.w.logs)
		}
	}
	tenants, err := x.w.db.Tenants(x.t.Context(), "", 100)
	if err != nil {
		x.t.Fatal(err)
	}
	for _, id := range tenants {
		x.w.verify(id)
	}
	for _, k := range slices.Sorted(maps.Keys(x.stats)) {
		x.t.Logf("%5d %s", x.stats[k], k)
	}
}

// wrong says what is wrong with one call by itself.
func (e *ended) wrong() string {
	c := e.Call
	effects := c.Effect == Write || c.Effect == Destructive
	most := 1
	switch c.Name {
	case "write_key", "read_retry":
		most = 3
	case "read_call":
		most = 2
	}
	switch {
	case e.sends > most:
		return "it was sent too often"
	case e.sends > max(c.Attempt, 0):
		return "it was sent without an attempt on record"
	case effects && e.executed > 1:
		return "it was executed twice"
	case c.State == Succeeded && e.executed == 0:
		return "it succeeded and was not executed"
	case effects && e.executed > 0 && (c.State == Failed || c.State == Cancelled || c.State == Denied):
		return "it was executed and claims that it was not"
	case (c.State == Denied || c.State == ConsentRequired) && c.Attempt > 0:
		return "it was dispatched without consent"
	case c.State == Dispatching || c.State == InputRequired || c.State == AuthorizationRequired:
		return "it never ended"
	case (c.State.Final() || c.State == Uncertain) && (c.FinishTime == nil || c.Receipt == ""):
		return "its end has no time or no receipt"
	case c.State != Denied && c.ConsentRule != "NONE" && c.ConsentID == "" && c.GrantID == "":
		return "it needed consent and has none"
	}
	return ""
}

// checkVoids: nothing was dispatched after what must prevent it was acknowledged.
// A dispatch reads the time of its attempt while it holds what it stands on, so
// an attempt that began later than the acknowledgement did not see it.
func (x *interleaver) checkVoids(all []*ended) {
	for _, v := range x.voids {
		x.count("acknowledged: " + v.what)
		for _, e := range all {
			c := e.Call
			starts := e.starts
			match := false
			switch v.column {
			case "call_id":
				match = c.ID == v.value
			case "first_call_id":
				match = c.ID == v.value
				starts = starts[:min(1, len(starts))]
			case "key_id":
				match = c.KeyID == v.value
			case "session_id":
				match = c.SessionID == v.value
			case "contract_id":
				match = c.ContractID == v.value && c.ServerID == v.server
			case "definition_digest":
				match = c.DefinitionDigest == v.value && c.ServerID == v.server
			}
			for _, at := range starts {
				if match && at.After(v.from) && (v.until.IsZero() || at.Before(v.until)) {
					x.t.Errorf("%s %s was dispatched at %s, after %s was acknowledged at %s", c.Name, c.ID, at, v.what, v.from)
				}
			}
		}
	}
}

func (x *interleaver) checkTables() {
	for what, sql := range map[string]string{
		"calls run on a consent that was not consumed": `SELECT count(*) FROM calls c JOIN consents k USING (tenant_id, consent_id)
			WHERE c.attempt > 0 AND k.state <> 'CONSUMED'`,
		"consents were consumed for nothing": `SELECT count(*) FROM calls c JOIN consents k USING (tenant_id, consent_id)
			WHERE c.attempt = 0 AND k.state = 'CONSUMED'`,
		"consents serve two calls": `SELECT count(*) FROM (SELECT 1 FROM calls WHERE consent_id <> '' GROUP BY consent_id HAVING count(*) > 1) x`,
		"consents of ended calls are open": `SELECT count(*) FROM calls c JOIN consents k USING (tenant_id, consent_id)
			WHERE c.state IN ('DENIED', 'CANCELLED') AND k.state IN ('PENDING', 'APPROVED')`,
		"waiting calls have a consent that ended": `SELECT count(*) FROM calls c JOIN consents k USING (tenant_id, consent_id)
			WHERE c.state = 'CONSENT_REQUIRED' AND k.state <> 'PENDING'`,
		"grants are over-spent":        `SELECT count(*) FROM grants WHERE uses_limit IS NOT NULL AND uses_reserved + uses_spent > uses_limit`,
		"uses of grants stay reserved": `SELECT count(*) FROM grants WHERE uses_reserved <> 0`,
		"grants do not know their uses": `SELECT count(*) FROM grants g WHERE uses_spent <> (SELECT count(*) FROM calls c
			WHERE c.tenant_id = g.tenant_id AND c.grant_id = g.grant_id AND NOT (c.state IN ('FAILED', 'CANCELLED')
			  AND NOT EXISTS (SELECT 1 FROM attempts a WHERE a.call_id = c.call_id AND a.phase <> 'NOT_SENT')))`,
		"attempts have no end":            `SELECT count(*) FROM attempts WHERE end_time IS NULL OR phase = ''`,
		"calls and attempts do not agree": `SELECT count(*) FROM calls c WHERE attempt <> (SELECT count(*) FROM attempts a WHERE a.call_id = c.call_id)`,
		"sessions count other calls than they have": `SELECT count(*) FROM session_usage u WHERE calls <>
			(SELECT count(*) FROM calls c WHERE c.session_id = u.session_id AND NOT (c.state = 'DENIED' AND c.consent_id = ''))`,
		"deadlocks": `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`,
	} {
		if n := x.w.count(sql); n != 0 {
			x.t.Errorf("%s: %d", what, n)
		}
	}
}

// checkTransitions holds what the database saw against the table of states.
func (x *interleaver) checkTransitions() {
	rows, err := x.w.owner.Query(x.t.Context(), `SELECT call_id, was, now FROM transitions ORDER BY n`)
	if err != nil {
		x.t.Fatal(err)
	}
	var id string
	var was, now State
	_, err = pgx.ForEachRow(rows, []any{&id, &was, &now}, func() error {
		born := was == "" && slices.Contains([]State{Denied, ConsentRequired, Dispatching, Succeeded, Failed, Cancelled}, now)
		reopened := was == Failed && now == Uncertain
		if reopened {
			x.count("reopened")
		}
		if !born && !was.May(now) && !reopened {
			x.t.Errorf("%s went from %q to %q", id, was, now)
		}
		return nil
	})
	if err != nil {
		x.t.Fatal(err)
	}
}
