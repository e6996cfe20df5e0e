package chaos

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bulkhead-mcp/bulkhead/internal/postgres/pgtest"
	"github.com/bulkhead-mcp/bulkhead/internal/redis/redistest"
)

// world is one test's stores, tenant and keys, and the servers on them.
type world struct {
	t           testing.TB
	databaseURL string
	owner       *pgxpool.Pool // sees past row-level security
	redis       *redistest.Server
	env         []string

	tenant, operator, admin, service, approver, auditor string

	mu      sync.Mutex
	secrets map[string]string // what must not be in any log, by what it is
	servers []*process
}

// newWorld makes the stores; the first server that start brings up gets the
// tenant.
func newWorld(t testing.TB) *world {
	t.Helper()
	db := pgtest.New(t)
	return worldOn(t, db.URL, db.Owner(t))
}

func worldOn(t testing.TB, databaseURL string, owner *pgxpool.Pool) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{t: t, databaseURL: databaseURL, owner: owner, redis: redistest.New(t), secrets: map[string]string{}}
	kek, operator := random(32), "bho_"+random(24)
	w.operator = operator
	w.hide("operator key", operator)
	w.hide("key-encryption key", kek)
	w.env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + dir,
		"BULKHEAD_MODE=production", "BULKHEAD_LISTEN=127.0.0.1:0", "BULKHEAD_METRICS_LISTEN=127.0.0.1:0",
		"BULKHEAD_DATABASE_URL=" + databaseURL, "BULKHEAD_REDIS_URL=" + w.redis.URL,
		"BULKHEAD_KEK_FILE=" + write(t, dir, "kek", kek), "BULKHEAD_OPERATOR_KEY_FILE=" + write(t, dir, "operator", operator),
		"BULKHEAD_EGRESS_ALLOW=127.0.0.0/8", "BULKHEAD_DATA_DIR=" + dir, "BULKHEAD_LOG_LEVEL=debug",
	}
	// Registered before any server is, so it runs when all have ended.
	t.Cleanup(w.checkLogs)
	return w
}

func random(n int) string {
	b := make([]byte, n)
	rand.Read(b) //nolint:errcheck // never fails
	return hex.EncodeToString(b)
}

func write(t testing.TB, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// hide notes a value that no process may write to its log.
func (w *world) hide(what, value string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.secrets[what] = value
}

// start brings up another server on the world's stores.
func (w *world) start(more ...string) *process {
	w.t.Helper()
	p := w.launch(more...)
	p.awaitServing()
	if w.tenant == "" {
		w.makeTenant(p)
	}
	return p
}

func (w *world) launch(more ...string) *process {
	w.t.Helper()
	p := spawn(w.t, append(append([]string{}, w.env...), more...), binary)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.servers = append(w.servers, p)
	return p
}

func (w *world) makeTenant(p *process) {
	w.t.Helper()
	var t struct{ TenantID, AdminKey string }
	w.must(p.as(w.operator).post("/v1/tenants", obj{"displayName": "chaos"}, &t))
	w.tenant, w.admin = t.TenantID, t.AdminKey
	w.hide("admin key", t.AdminKey)
	for role, dst := range map[string]*string{"SERVICE": &w.service, "APPROVER": &w.approver, "AUDITOR": &w.auditor} {
		*dst, _ = w.newKey(p, role)
	}
}

func (w *world) newKey(p *process, role string) (secret, id string) {
	w.t.Helper()
	var k struct{ Secret, KeyID string }
	w.must(p.as(w.admin).post("/v1/keys", obj{"displayName": strings.ToLower(role), "role": role}, &k))
	w.hide(role+" "+k.KeyID, k.Secret)
	return k.Secret, k.KeyID
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// presumeDead lets the death time of a server pass at once: nobody alive writes
// its heartbeat, and the next sweep finds it 15 s old. It is for processes that
// the test has killed or frozen itself.
func (w *world) presumeDead(p *process) {
	w.t.Helper()
	tag, err := w.owner.Exec(context.Background(),
		`UPDATE replicas SET heartbeat = heartbeat - interval '1 hour' WHERE state = 'ALIVE' AND name LIKE '%/' || $1`, fmt.Sprint(p.pid))
	if err != nil || tag.RowsAffected() == 0 {
		w.t.Fatalf("age the heartbeat of %d: %v (%v)", p.pid, err, tag)
	}
}

// number reads one integer from the database.
func (w *world) number(sql string, args ...any) (n int) {
	w.t.Helper()
	if err := w.owner.QueryRow(context.Background(), sql, args...).Scan(&n); err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// none fails for rows that must not be.
func (w *world) none(what, sql string, args ...any) {
	w.t.Helper()
	rows, err := w.owner.Query(context.Background(), sql, args...)
	if err != nil {
		w.t.Fatalf("%s: %v", what, err)
	}
	defer rows.Close()
	for i := 0; rows.Next() && i < 10; i++ {
		v, err := rows.Values()
		w.t.Errorf("%s: %v %v", what, v, err)
	}
	if err := rows.Err(); err != nil {
		w.t.Fatalf("%s: %v", what, err)
	}
}

// settled waits until no call is under way and none waits for a dispatch that
// its consent already allows.
func (w *world) settled() {
	w.t.Helper()
	eventually(w.t, "all calls to settle", func() bool {
		return w.number(`SELECT count(*) FROM calls c LEFT JOIN consents k USING (tenant_id, consent_id)
			WHERE c.state = 'DISPATCHING' OR c.state = 'CONSENT_REQUIRED' AND k.state = 'APPROVED'`) == 0
	})
}

// consistent checks what must hold whatever happened, once calls are settled.
func (w *world) consistent(p *process) {
	w.t.Helper()
	w.none("a call's end without its time, or a time without an end", `SELECT call_id, state FROM calls
		WHERE (state IN ('DENIED', 'SUCCEEDED', 'FAILED', 'CANCELLED', 'UNCERTAIN')) <> (finish_time IS NOT NULL)`)
	w.none("a call that was sent without its consent being consumed, or the other way", `SELECT c.call_id, c.state, c.attempt, k.state
		FROM calls c JOIN consents k USING (tenant_id, consent_id) WHERE (c.attempt > 0) <> (k.state = 'CONSUMED')`)
	w.none("a waiting call without an open consent", `SELECT c.call_id FROM calls c LEFT JOIN consents k USING (tenant_id, consent_id)
		WHERE c.state = 'CONSENT_REQUIRED' AND k.state IS DISTINCT FROM 'PENDING'`)
	w.none("an open consent of a call that does not wait", `SELECT c.call_id, c.state, k.state FROM calls c JOIN consents k USING (tenant_id, consent_id)
		WHERE c.state <> 'CONSENT_REQUIRED' AND k.state IN ('PENDING', 'APPROVED')`)
	w.none("a write that was sent without consent or grant where one is asked for", `SELECT call_id FROM calls
		WHERE consent_rule IN ('SESSION', 'CALL') AND attempt > 0 AND consent_id = '' AND grant_id = ''`)
	w.none("a use of a grant that no call has", `SELECT g.grant_id, g.uses_spent, g.uses_reserved, count(c.call_id) FROM grants g
		LEFT JOIN calls c ON c.tenant_id = g.tenant_id AND c.grant_id = g.grant_id AND c.attempt > 0
		GROUP BY g.grant_id, g.uses_spent, g.uses_reserved HAVING g.uses_spent + g.uses_reserved > count(c.call_id)`)
	w.none("a write whose attempts and audited dispatches differ", `SELECT c.call_id, c.attempt, count(a.*) FROM calls c
		LEFT JOIN audit_entries a ON a.tenant_id = c.tenant_id AND a.call_id = c.call_id AND a.kind = 'call.dispatched'
		WHERE c.effect <> 'READ' GROUP BY c.call_id, c.attempt HAVING count(a.*) <> c.attempt`)
	w.none("an attempt that is not recorded", `SELECT c.call_id, c.attempt, count(a.*) FROM calls c
		LEFT JOIN attempts a ON a.tenant_id = c.tenant_id AND a.call_id = c.call_id
		GROUP BY c.call_id, c.attempt HAVING count(a.*) <> c.attempt`)
	w.none("an end that is audited not once", `SELECT c.call_id, c.state, count(a.*) FROM calls c
		LEFT JOIN audit_entries a ON a.tenant_id = c.tenant_id AND a.call_id = c.call_id
		 AND a.kind IN ('call.finished', 'call.cancelled', 'call.uncertain', 'call.denied')
		WHERE c.finish_time IS NOT NULL GROUP BY c.call_id, c.state HAVING count(a.*) <> 1`)
	w.none("a receipt that is no audit entry of the call", `SELECT c.call_id, c.state, c.receipt FROM calls c
		WHERE c.finish_time IS NOT NULL AND NOT EXISTS (SELECT FROM audit_entries a
		 WHERE a.tenant_id = c.tenant_id AND a.audit_entry_id = c.receipt AND a.call_id = c.call_id)`)
	w.verifies(p)
}

// verifies checks the audit over the API, once everything is sealed.
func (w *world) verifies(p *process) {
	w.t.Helper()
	var last string
	eventually(w.t, "the audit to verify", func() bool {
		var v struct {
			Ok             bool
			Unsealed, Lost string
			Problems       []map[string]any
		}
		err := p.as(w.auditor).post("/v1/auditEntries:verify", obj{}, &v)
		if err == nil && (len(v.Problems) > 0 || v.Lost != "0") {
			w.t.Fatalf("the audit has problems: %+v", v)
		}
		last = fmt.Sprintf("%+v %v", v, err)
		return err == nil && v.Ok && v.Unsealed == "0"
	})
	_ = last
}

// checkLogs looks for secrets in everything that the servers wrote, and for
// lines that are no JSON.
func (w *world) checkLogs() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.servers {
		p.kill()
		checkLog(w.t, p.stdout.String()+p.stderr.String(), w.secrets)
		if w.t.Failed() {
			w.t.Logf("log of server %d:\n%s", p.pid, tail(p.stderr.String()))
		}
	}
}

// history is what the audit says of a call.
func (w *world) history(p *process, id string) (lines []string) {
	w.t.Helper()
	var list struct {
		AuditEntries []struct {
			Kind, Actor, CreateTime string
			Details                 json.RawMessage
		}
	}
	w.must(p.as(w.auditor).get("/v1/auditEntries?callId="+id, &list))
	for _, e := range list.AuditEntries {
		lines = append(lines, fmt.Sprintf("%s %s by %s: %s", e.CreateTime, e.Kind, e.Actor, e.Details))
	}
	return lines
}
