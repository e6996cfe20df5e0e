package webhooks

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestDeliver_OnlyWhatWasCommittedAndWanted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := newReceiver(t, nil)
	e := w.endpoint(w.admin, v.URL, "call.finished")
	w.start(w.svc)
	undone := errors.New("undone")
	err := w.db.InTx(t.Context(), w.admin.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		if err := w.svc.Announce(ctx, tx, someCall("undone")); err != nil {
			return err
		}
		return undone
	})
	if !errors.Is(err, undone) {
		t.Fatal(err)
	}
	w.announce(w.admin, Event{Type: CallUncertain, Data: CallData{}}, someCall("kept"))
	w.until("one delivery", func() bool { return w.count(`SELECT count(*) FROM webhook_deliveries WHERE state = 'DELIVERED'`) == 1 })
	if n := w.count(`SELECT count(*) FROM webhook_events`); n != 1 {
		t.Errorf("%d events are stored", n)
	}
	got := v.messages()
	if len(got) != 1 || !strings.Contains(string(got[0].body), `"name":"kept"`) {
		t.Fatalf("got %q", got)
	}
	ds := w.deliveries(w.admin, e.ID)
	if len(ds) != 1 || len(ds[0].Attempts) != 1 || ds[0].Attempts[0].Status != http.StatusNoContent || ds[0].FinishTime == nil || ds[0].NextTime != nil {
		t.Errorf("%+v", ds)
	}
	if got[0].header.Get("webhook-id") != ds[0].EventID || got[0].header.Get("Content-Type") != "application/json" {
		t.Errorf("%v", got[0].header)
	}
	w.until("the job to end", func() bool { return w.count(`SELECT count(*) FROM river.river_job WHERE state <> 'completed'`) == 0 })
	if n := w.count(`SELECT count(*) FROM river.river_job WHERE args::text LIKE '%kept%' OR metadata::text LIKE '%kept%'`); n != 0 {
		t.Error("a job holds what is told")
	}
}

var total = flag.Int("deliveries", 1000, "how many are made while a replica is killed")

// Every event reaches an endpoint that fails three times of ten, although a
// replica is killed in the middle.
func TestFO112_ManyToOneThatFailsOften(t *testing.T) {
	t.Parallel()
	w, total := newWorld(t), *total
	v := newReceiver(t, func(n int, out http.ResponseWriter, _ *http.Request) {
		if n%10 < 3 {
			out.WriteHeader(http.StatusInternalServerError)
		}
	})
	e := w.endpoint(w.admin, v.URL, "call.finished")
	dying := w.startChild()
	for i := 0; i < total; i += 50 {
		var events []Event
		for k := range 50 {
			events = append(events, someCall(fmt.Sprintf("call-%d", i+k)))
		}
		w.announce(w.admin, events...)
	}
	delivered := func() int { return w.count(`SELECT count(*) FROM webhook_deliveries WHERE state = 'DELIVERED'`) }
	w.until("a third of them", func() bool { return delivered() >= total/3 })
	w.kill(dying)
	left := total - delivered()
	w.start(w.svc)
	w.start(w.service())
	w.until("every delivery", func() bool { return delivered() == total })
	if left == 0 {
		t.Error("nothing was left when the replica was killed")
	}
	seen := map[string]bool{}
	for _, m := range v.messages() {
		for _, part := range strings.Split(string(m.body), `"`) {
			if strings.HasPrefix(part, "call-") {
				seen[part] = true
			}
		}
	}
	if len(seen) != total {
		t.Errorf("%d of %d events arrived", len(seen), total)
	}
	if n := w.count(`SELECT count(*) FROM webhook_attempts WHERE status = 500`); n < total/4 {
		t.Errorf("only %d attempts failed", n)
	}
	if e, err := w.svc.GetEndpoint(t.Context(), w.admin, e.ID); err != nil || e.State != Active {
		t.Errorf("%+v, %v", e, err)
	}
}

func TestDeliver_GivesUpAndSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *Options) { o.Retry.GiveUp = 1500 * time.Millisecond })
	v := newReceiver(t, func(_ int, out http.ResponseWriter, _ *http.Request) { out.WriteHeader(http.StatusBadGateway) })
	e := w.endpoint(w.admin, v.URL, "call.finished")
	w.start(w.svc)
	w.announce(w.admin, someCall("x"))
	w.until("giving up", func() bool { return w.count(`SELECT count(*) FROM webhook_deliveries WHERE state = 'FAILED'`) == 1 })
	d := w.deliveries(w.admin, e.ID)[0]
	if len(d.Attempts) < 3 || d.Error != BadStatus || d.Attempts[0].Status != 502 || d.NextTime != nil || d.FinishTime == nil {
		t.Errorf("%+v", d)
	}
	now, err := w.svc.GetEndpoint(t.Context(), w.admin, e.ID)
	if err != nil || now.State != Active || now.FailingSince == nil || now.FailingError != BadStatus {
		t.Errorf("%+v, %v", now, err)
	}
	w.until("every attempt is counted", func() bool {
		return w.outcome("given_up") == 1 && w.outcome("failed") == len(d.Attempts)-1
	})
	// After days of it the next one that is given up disables the endpoint.
	w.exec(`UPDATE webhook_endpoints SET failing_since = now() - interval '6 days'`)
	again, err := w.svc.Redeliver(t.Context(), w.admin, e.ID, d.ID)
	if err != nil || again.EventID != d.EventID || again.ID == d.ID {
		t.Fatalf("%+v, %v", again, err)
	}
	w.until("the end of it", func() bool { return w.count(`SELECT count(*) FROM webhook_endpoints WHERE state = 'DISABLED'`) == 1 })
	if _, err := w.svc.Redeliver(t.Context(), w.admin, e.ID, d.ID); reason(err) != "WEBHOOK_ENDPOINT_DISABLED" {
		t.Errorf("redelivered to a disabled endpoint: %v", err)
	}
	state := Active
	if e, err := w.svc.UpdateEndpoint(t.Context(), w.admin, e.ID, EndpointUpdate{State: &state}); err != nil || e.FailingSince != nil || e.DisabledReason != "" {
		t.Errorf("%+v, %v", e, err)
	}
}

func TestDeliver_GoneIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := newReceiver(t, func(_ int, out http.ResponseWriter, _ *http.Request) { out.WriteHeader(http.StatusGone) })
	e := w.endpoint(w.admin, v.URL, "call.finished")
	w.announce(w.admin, someCall("first"))
	w.start(w.svc)
	w.until("giving up", func() bool { return w.count(`SELECT count(*) FROM webhook_deliveries WHERE state = 'FAILED'`) == 1 })
	d := w.deliveries(w.admin, e.ID)[0]
	if len(d.Attempts) != 1 || d.Error != Gone || len(v.messages()) != 1 {
		t.Errorf("%+v", d)
	}
	if e, err := w.svc.GetEndpoint(t.Context(), w.admin, e.ID); err != nil || e.State != Disabled || e.DisabledReason != "GONE" {
		t.Errorf("%+v, %v", e, err)
	}
	w.announce(w.admin, someCall("second"))
	if n := w.count(`SELECT count(*) FROM webhook_events`); n != 1 {
		t.Errorf("%d events after the endpoint was gone", n)
	}
}

func TestDeliver_HonoursRetryAfterAndReadsLittle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var endless atomic.Int64
	v := newReceiver(t, func(n int, out http.ResponseWriter, r *http.Request) {
		if n == 1 {
			out.Header().Set("Retry-After", "7")
			out.WriteHeader(http.StatusServiceUnavailable)
		}
		for r.Context().Err() == nil && endless.Load() < 64<<20 { // until the other side has enough
			m, err := out.Write(make([]byte, 64<<10))
			endless.Add(int64(m))
			if err != nil {
				return
			}
		}
	})
	e := w.endpoint(w.admin, v.URL, "call.finished")
	w.start(w.svc)
	w.announce(w.admin, someCall("x"))
	w.until("the first attempt", func() bool { return w.count(`SELECT count(*) FROM webhook_attempts`) == 1 })
	d := w.deliveries(w.admin, e.ID)[0]
	if d.State != Pending || d.NextTime == nil || d.NextTime.Sub(d.Attempts[0].Time) < 7*time.Second {
		t.Errorf("%+v", d)
	}
	if n := endless.Load(); n >= 64<<20 {
		t.Errorf("%d bytes were read of an answer", n)
	}
}

func TestFO111_RefusesAddressesAndRedirects(t *testing.T) {
	t.Parallel()
	inner := newReceiver(t, nil)
	w := newWorld(t)
	v := newReceiver(t, func(_ int, out http.ResponseWriter, r *http.Request) {
		http.Redirect(out, r, inner.URL, http.StatusTemporaryRedirect)
	})
	redirects := w.endpoint(w.admin, v.URL, "call.finished")
	// Registered while it was allowed; now it is not.
	w.exec(`INSERT INTO webhook_endpoints (tenant_id, webhook_endpoint_id, url, event_types, secret, created_by)
		SELECT tenant_id, 'whe_00000000000000000000000001', 'http://10.0.0.1/', event_types, secret, '' FROM webhook_endpoints`)
	w.announce(w.admin, someCall("x"))
	w.start(w.svc)
	w.until("both attempts", func() bool { return w.count(`SELECT count(DISTINCT webhook_delivery_id) FROM webhook_attempts`) == 2 })
	if d := w.deliveries(w.admin, redirects.ID)[0]; d.Error != Redirected || d.Attempts[0].Status != 307 {
		t.Errorf("%+v", d)
	}
	var said string
	if err := w.owner.QueryRow(t.Context(), `SELECT min(a.error) FROM webhook_attempts a JOIN webhook_deliveries d USING (webhook_delivery_id)
		WHERE webhook_endpoint_id = 'whe_00000000000000000000000001'`).Scan(&said); err != nil {
		t.Fatal(err)
	}
	if said != string(Refused) || len(inner.messages()) != 0 {
		t.Errorf("%s; the target of the redirect got %d", said, len(inner.messages()))
	}
	strict := w.service(func(o *Options) { o.Egress = egress.New(egress.Policy{}) })
	// A name says nothing; what it leads to is looked at when it is dialled.
	named := sending{url: "https://localhost:1/", event: "evt_1", secret: w.sealed("whe_x"), endpoint: "whe_x"}
	if r, err := strict.post(t.Context(), w.admin.Tenant, &named); err != nil || r.err != Refused || r.status != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	for _, url := range []string{"http://127.0.0.1:1/", "https://192.168.0.1/", "https://[::1]/", "http://example.com/", "https://169.254.169.254/", "ws://example.com/", "https://user:word@example.com/"} {
		if _, err := strict.CreateEndpoint(t.Context(), w.admin, EndpointSpec{URL: url, EventTypes: []string{"call.finished"}}, ""); field(err) != "url" {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestFO112_ASlowEndpointStarvesNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *Options) { o.Workers, o.TenantWorkers, o.EndpointWorkers = 8, 6, 3 })
	release := make(chan struct{})
	slow := newReceiver(t, func(_ int, _ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	fast, other := newReceiver(t, nil), newReceiver(t, nil)
	w.endpoint(w.admin, slow.URL, "call.finished")
	second := w.newAdmin("Second")
	var events []Event
	for range 40 {
		events = append(events, someCall("x"))
	}
	w.announce(w.admin, events...)
	w.endpoint(w.admin, fast.URL, "call.finished")
	w.endpoint(second, other.URL, "call.finished")
	w.announce(w.admin, events[:5]...) // both endpoints of the first tenant
	w.announce(second, events[:5]...)
	w.start(w.svc)
	w.until("the others' deliveries", func() bool { return len(fast.messages()) == 5 && len(other.messages()) == 5 })
	if n := len(slow.messages()); n == 0 || n > 3 {
		t.Errorf("the slow endpoint had %d deliveries at once", n)
	}
	close(release)
	w.until("the slow endpoint's", func() bool { return w.count(`SELECT count(*) FROM webhook_deliveries WHERE state = 'DELIVERED'`) == 55 })
}
