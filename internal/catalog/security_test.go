package catalog

import (
	"slices"
	"sync"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// An episode has one audit entry, whoever notices it and how often; another
// registration, and an hour of quiet, begin another.
func TestRefused_RecordsAnEpisodeOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	entries := func() []string {
		return w.rows(`SELECT kind FROM audit_entries WHERE tenant_id = $1 AND kind LIKE 'security.%' ORDER BY ordinal`, p.Tenant)
	}
	refused := func(s *Service, tn tenant.ID, registration int64, event string) bool {
		first, err := s.Refused(t.Context(), tn, v.ID, registration, event)
		if err != nil {
			t.Error(err)
		}
		return first
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	began := 0
	for i := range 10 {
		wg.Go(func() {
			s := w.one
			if i%2 == 1 {
				s = w.two
			}
			if refused(s, p.Tenant, 1, "downgrade_refused") {
				mu.Lock()
				began++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if got := entries(); began != 1 || !slices.Equal(got, []string{"security.downgrade_refused"}) {
		t.Fatalf("%d began, %v", began, got)
	}
	if got := w.told.take(); len(got) != 1 || got[0].Type != webhooks.SecurityDowngradeRefused ||
		got[0].Data != (webhooks.SecurityData{ServerID: v.ID, Server: "calendar", Registration: 1}) {
		t.Errorf("told %+v", got)
	}
	if !refused(w.two, p.Tenant, 0, "origin_refused") || refused(w.one, p.Tenant, 1, "origin_refused") {
		t.Error("the present registration is not the one of 0")
	}
	w.exec(`UPDATE security_episodes SET last_time = last_time - interval '59 minutes'`)
	if refused(w.one, p.Tenant, 1, "downgrade_refused") {
		t.Error("59 minutes later it is another episode")
	}
	w.exec(`UPDATE security_episodes SET last_time = last_time - interval '61 minutes'`)
	if !refused(w.one, p.Tenant, 1, "downgrade_refused") {
		t.Error("an hour later it is the same episode")
	}
	if !refused(w.one, p.Tenant, 2, "downgrade_refused") {
		t.Error("another registration is the same episode")
	}
	other := w.admin("Other")
	if refused(w.one, other.Tenant, 1, "downgrade_refused") {
		t.Error("another tenant records something about the server")
	}
	if _, err := w.one.Refused(t.Context(), p.Tenant, v.ID, 1, "something"); err == nil {
		t.Error("an unknown event is recorded")
	}
	if got := w.rows(`SELECT kind FROM audit_entries WHERE tenant_id = $1 AND kind LIKE 'security.%'`, other.Tenant); len(got) != 0 {
		t.Errorf("the other tenant's audit has %v", got)
	}
	if n := len(entries()); n != 4 {
		t.Errorf("%d entries: %v", n, entries())
	}
}

// What a connection proved is known to every replica and after a restart, until
// the server is another one; a probe of an older version does not lower it.
func TestLearned_IsKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	w.hears(w.two)
	see := func(what, era, version, newest string) {
		t.Helper()
		for _, s := range []*Service{w.one, w.two, w.replica()} {
			w.later(confirmFor)
			got, err := s.GetServer(t.Context(), p, v.ID)
			if err != nil || got.Era != era || got.ProtocolVersion != version || got.NewestVersion != newest {
				t.Errorf("%s: %+v, %v", what, got, err)
			}
		}
	}
	learned := func(tn tenant.ID, registration int64, era, version string) {
		t.Helper()
		if err := w.one.Learned(t.Context(), tn, v.ID, registration, era, version); err != nil {
			t.Fatal(err)
		}
	}
	see("at first", "", "", "")
	learned(p.Tenant, 1, "MODERN", "2026-07-28")
	see("proved", "MODERN", "2026-07-28", "2026-07-28")
	learned(w.admin("Other").Tenant, 1, "LEGACY", "2024-11-05")
	learned(p.Tenant, 7, "LEGACY", "2024-11-05")
	see("said of another", "MODERN", "2026-07-28", "2026-07-28")
	learned(p.Tenant, 1, "LEGACY", "2025-11-25")
	see("older", "LEGACY", "2025-11-25", "2026-07-28")
	url := "https://calendar.example/other"
	if _, err := w.one.UpdateServer(t.Context(), p, v.ID, ServerUpdate{URL: &url}); err != nil {
		t.Fatal(err)
	}
	see("moved", "", "", "")
	learned(p.Tenant, 1, "MODERN", "2026-07-28")
	see("said of what was there before", "", "", "")
}
