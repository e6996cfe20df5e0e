package chaos

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestDevelopmentSurvivesKill kills a server in development mode, which carries
// its database and its calendar with it. What was committed is there again, and
// the next server takes everything up.
func TestDevelopmentSurvivesKill(t *testing.T) {
	t.Parallel()
	// Directly in /tmp, where the account that runs PostgreSQL for root gets to.
	dir, err := os.MkdirTemp("/tmp", "bhchaos-dev-")
	if err == nil {
		err = os.Chmod(dir, 0o711)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) }) //nolint:errcheck // a temporary directory
	w := &world{t: t, secrets: map[string]string{}, env: []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir,
		"BULKHEAD_LISTEN=127.0.0.1:0", "BULKHEAD_METRICS_LISTEN=127.0.0.1:0", "BULKHEAD_DATA_DIR=" + dir, "BULKHEAD_LOG_LEVEL=debug"}}
	var keys struct{ URL, AdminKey, ServiceKey, ApproverKey, AuditorKey, OperatorKey string }
	start := func() *process {
		t.Helper()
		p := w.launch()
		p.awaitServing()
		eventually(t, "the demo tenant", func() bool {
			raw, err := os.ReadFile(filepath.Join(dir, "demo.json"))
			return err == nil && json.Unmarshal(raw, &keys) == nil && keys.URL == p.url
		})
		w.tenant, w.admin, w.service, w.approver, w.auditor = "demo", keys.AdminKey, keys.ServiceKey, keys.ApproverKey, keys.AuditorKey
		return p
	}
	a := start()
	for what, key := range map[string]string{"admin key": keys.AdminKey, "service key": keys.ServiceKey, "operator key": keys.OperatorKey} {
		if key == "" {
			t.Fatalf("demo.json has no %s", what)
		}
	}
	var u user
	var c call
	eventually(t, "the demo contract", func() bool {
		u = w.open(a, "alice")
		c, err = u.propose(proposal{server: "calendar", tool: draft, args: draftArgs("Development"), wait: time.Millisecond})
		return err == nil && c.State == "CONSENT_REQUIRED"
	})
	w.must(w.decide(a, c, "APPROVE"))
	w.awaitState(u, c.CallID, "SUCCEEDED")
	open, err := u.propose(proposal{server: "calendar", tool: draft, args: draftArgs("Open"), wait: time.Millisecond})
	w.must(err)
	first := keys
	a.kill()

	b := start()
	first.URL = keys.URL
	if keys != first {
		t.Error("the keys of the demo tenant changed")
	}
	u = u.at(b)
	if got := w.awaitState(u, c.CallID, "SUCCEEDED"); len(got.Result) == 0 {
		t.Errorf("the result is gone: %v", got)
	}
	// The question from before the kill can still be answered; the calendar is a
	// new one, whose definitions are the reviewed ones.
	w.must(w.decide(b, open, "APPROVE"))
	w.awaitState(u, open.CallID, "SUCCEEDED")
	w.verifies(b)
	b.kill()
	// stdout is for people and shows the keys once, the log never does.
	for _, p := range []*process{a, b} {
		checkLog(t, p.stderr.String(), map[string]string{"admin key": keys.AdminKey, "service key": keys.ServiceKey,
			"approver key": keys.ApproverKey, "auditor key": keys.AuditorKey, "operator key": keys.OperatorKey})
	}
}
