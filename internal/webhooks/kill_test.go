package webhooks

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const childVariable = "BULKHEAD_TEST_WEBHOOKS_CHILD"

// runChild is a replica that delivers until it is killed. Its orders are the
// address of the database.
func runChild(url string) {
	ctx := context.Background()
	err := func() error {
		app, err := postgres.Open(ctx, url, tenant.AppRole, postgres.Options{})
		if err != nil {
			return err
		}
		system, err := postgres.Open(ctx, url, tenant.SystemRole, postgres.Options{})
		if err != nil {
			return err
		}
		db, err := tenant.NewDB(app, system)
		if err != nil {
			return err
		}
		kek, err := seal.NewLocalKEK("k1", make([]byte, 32))
		if err != nil {
			return err
		}
		ring, err := seal.NewRing(kek)
		if err != nil {
			return err
		}
		s, err := New(Options{DB: db, Vault: tenant.NewVault(db, ring), Recorder: &recorder{}, Egress: egress.New(egress.Policy{Development: true}),
			Queue: riverpgxv5.New(system), Retry: quick, Poll: 10 * time.Millisecond})
		if err != nil {
			return err
		}
		return s.Start(ctx)
	}()
	fmt.Println(err)
	<-time.After(5 * time.Minute) // it is killed long before
}

// startChild starts another replica, in a process of its own.
func (w *world) startChild() *exec.Cmd {
	w.t.Helper()
	binary, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.CommandContext(w.t.Context(), binary)
	cmd.Env = append(os.Environ(), childVariable+"="+w.pg.URL)
	out, err := cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "<nil>\n" {
		w.t.Fatalf("the replica says %q, %v", line, err)
	}
	return cmd
}

// kill ends a replica without a word, and lets the time pass after which others
// take it to be dead.
func (w *world) kill(cmd *exec.Cmd) {
	w.t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		w.t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	w.exec(`DELETE FROM river.river_leader`)
	w.exec(`UPDATE river.river_job SET attempted_at = attempted_at - interval '1 hour' WHERE state = 'running'`)
}

// A replica that is killed in the middle of deliveries loses none of them.
func TestKill_AnotherReplicaDeliversWhatTheDeadOneHad(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	hold, began := make(chan struct{}), make(chan struct{}, 100)
	v := newReceiver(t, func(n int, _ http.ResponseWriter, r *http.Request) {
		if n > 4 {
			return
		}
		began <- struct{}{}
		select {
		case <-hold:
		case <-r.Context().Done():
		}
	})
	w.endpoint(w.admin, v.URL, "call.finished")
	dying := w.startChild()
	var events []Event
	for i := range 20 {
		events = append(events, someCall(fmt.Sprintf("call-%d", i)))
	}
	w.announce(w.admin, events[:4]...)
	for range 4 {
		<-began
	}
	w.announce(w.admin, events[4:]...)
	w.kill(dying)
	close(hold)
	if n := w.count(`SELECT count(*) FROM river.river_job WHERE state = 'running'`); n < 4 {
		t.Errorf("only %d jobs were under way", n)
	}
	w.start(w.svc)
	w.until("every delivery", func() bool { return w.count(`SELECT count(*) FROM webhook_deliveries WHERE state = 'DELIVERED'`) == 20 })
	seen := map[string]bool{}
	for _, m := range v.messages() {
		var p struct{ Data CallData }
		if err := json.Unmarshal(m.body, &p); err != nil {
			t.Fatal(err)
		}
		seen[p.Data.Name] = true
	}
	if len(seen) != 20 {
		t.Errorf("%d of 20 arrived", len(seen))
	}
}

// A stop waits for deliveries within its time, then cuts them short; they are made
// by the next replica.
func TestStop_CutsShortAndLosesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	began := make(chan struct{}, 10)
	v := newReceiver(t, func(n int, _ http.ResponseWriter, r *http.Request) {
		if n == 1 {
			began <- struct{}{}
			<-r.Context().Done()
		}
	})
	e := w.endpoint(w.admin, v.URL, "call.finished")
	w.announce(w.admin, someCall("x"))
	if err := w.svc.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-began
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if err := w.svc.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if d := w.deliveries(w.admin, e.ID)[0]; d.State != Pending || len(d.Attempts) != 0 {
		t.Errorf("%+v", d)
	}
	if n := w.count(`SELECT count(*) FROM river.river_job WHERE state = 'running'`); n != 0 {
		t.Errorf("%d jobs are still marked as under way", n)
	}
	w.start(w.service())
	w.until("the delivery", func() bool { return w.count(`SELECT count(*) FROM webhook_deliveries WHERE state = 'DELIVERED'`) == 1 })
}
