package chaos

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// checkLog fails for lines that are no JSON object with time, level and msg, and
// for every secret that occurs in them.
func checkLog(t testing.TB, log string, secrets map[string]string) {
	t.Helper()
	bad := 0
	for line := range strings.Lines(log) {
		if strings.TrimSpace(line) == "" {
			continue
		}
		var l struct{ Time, Level, Msg string }
		if err := json.Unmarshal([]byte(line), &l); (err != nil || l.Time == "" || l.Level == "" || l.Msg == "") && bad < 20 {
			bad++
			t.Errorf("a line of the log is no entry: %s", line)
		}
	}
	for what, secret := range secrets {
		if i := strings.Index(log, secret); i >= 0 {
			t.Errorf("the log holds the %s: %q", what, log[max(0, i-200):min(len(log), i+20)])
		}
	}
}

// TestMetricsAndLogs makes calls of every ending and looks at what the servers
// tell of them: in the metrics each by its state and tenant, in the log whose
// work it was, and nowhere a secret, an argument or a result.
func TestMetricsAndLogs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cal := startCalendar(t)
	p := w.start()
	w.register(p, "calendar", cal.mcp, policy{query: "uncertain"})
	u := w.open(p, "alice")
	// A title goes out as an argument and comes back in the results of reads.
	title := "planted-" + random(16)
	w.hide("argument and result", title)
	write := func() call {
		t.Helper()
		c, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs(title), wait: time.Millisecond})
		w.must(err)
		return c
	}
	ends := map[string]string{}
	done := func(c call, state string) {
		t.Helper()
		if got := w.awaitState(u, c.CallID, state); got.State == state {
			ends[c.CallID] = state
		}
	}
	c := write()
	w.must(w.decide(p, c, "APPROVE"))
	done(c, "SUCCEEDED")
	c = write()
	w.must(w.decide(p, c, "DENY"))
	done(c, "DENIED")
	c = write()
	_, err := u.cancel(c.CallID)
	w.must(err)
	done(c, "CANCELLED")
	cal.fault(draft, fault{DelayBefore: "10m", Times: 1})
	c = write()
	w.must(w.decide(p, c, "APPROVE"))
	cal.awaitArrivals(draft, 2)
	_, err = u.cancel(c.CallID)
	w.must(err)
	done(c, "UNCERTAIN")
	c, err = u.propose(proposal{server: "calendar", tool: read, args: readArgs(), wait: time.Minute})
	w.must(err)
	done(c, "SUCCEEDED")
	if !strings.Contains(string(c.Result), title) {
		t.Fatalf("the result does not carry the planted title: %v", c)
	}
	c, err = u.propose(proposal{server: "calendar", tool: read, args: obj{"from": "x" + title, "to": "y"}, wait: time.Minute})
	w.must(err)
	if c.State != "FAILED" && c.State != "DENIED" {
		t.Errorf("bad arguments: %v", c)
	}
	// What is refused, and who is not let in, is told without what was brought.
	if _, err := u.propose(proposal{server: "calendar", tool: draft, args: obj{"title": title, "unknown": title}, wait: time.Minute}); err != nil && status(err) == 0 {
		t.Error(err)
	}
	stranger := "bhk_" + random(24)
	w.hide("key of a stranger", stranger)
	if err := p.as(stranger).get("/v1/sessions/"+u.session, nil); status(err) != 401 {
		t.Errorf("a stranger got %v", err)
	}

	text := scrape(t, p)
	for _, state := range []string{"SUCCEEDED", "DENIED", "CANCELLED", "UNCERTAIN"} {
		found := false
		for line := range strings.Lines(text) {
			found = found || strings.HasPrefix(line, "bulkhead_calls_total{") && strings.Contains(line, `state="`+state+`"`) &&
				strings.Contains(line, `tenant="`+w.tenant+`"`)
		}
		if !found {
			t.Errorf("the metrics count no call of the tenant as %s", state)
		}
	}
	for what, secret := range w.secrets {
		if strings.Contains(text, secret) {
			t.Errorf("the metrics hold the %s", what)
		}
	}
	p.signal(syscall.SIGTERM)
	p.awaitExit()
	log := p.stderr.String()
	for id := range ends {
		if !told(log, w.tenant, u.session, id) {
			t.Errorf("no line of the log belongs to tenant, session and call %s", id)
		}
	}
}

func scrape(t *testing.T, p *process) string {
	t.Helper()
	resp, err := http.Get(p.metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	raw, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("metrics: %s %v", resp.Status, err)
	}
	return string(raw)
}

// told reports whether a line of the log carries all three.
func told(log, tenant, session, id string) bool {
	for line := range strings.Lines(log) {
		var l struct{ Tenant, Session, Call string }
		if json.Unmarshal([]byte(line), &l) == nil && l.Tenant == tenant && l.Session == session && l.Call == id {
			return true
		}
	}
	return false
}
