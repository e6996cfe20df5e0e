package events_test

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func reason(err error) string {
	if f, ok := fault.As(err); ok {
		return f.Reason
	}
	return ""
}

// A ticket works once, at whichever replica, and is kept as a digest only.
func TestTicket_WorksOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	a, b := w.service(nil, quick()), w.service(nil, quick())
	pl.who.Groups, pl.who.Project = []string{"staff"}, "apollo"
	ticket, expire, err := a.IssueTicket(t.Context(), pl.who, pl.session)
	must(t, err)
	if left := time.Until(expire); left <= 0 || left > 31*time.Second {
		t.Errorf("it lasts %s", left)
	}
	var shown int
	must(t, w.owner.QueryRow(t.Context(), `SELECT count(*) FROM event_tickets x WHERE position($1 in x::text) > 0`, strings.TrimPrefix(ticket, "bht_")).Scan(&shown))
	if shown != 0 {
		t.Error("the ticket stands in the database")
	}
	var wg sync.WaitGroup
	var won atomic.Int32
	for i := range 8 {
		s := a
		if i%2 == 1 {
			s = b
		}
		wg.Go(func() {
			got, err := s.RedeemTicket(t.Context(), ticket)
			if err == nil {
				won.Add(1)
				if got.SessionID != pl.session || got.KeyID != pl.who.KeyID || got.Who.User != "alice" || got.Who.Project != "apollo" || !slices.Equal(got.Who.Groups, []string{"staff"}) {
					t.Errorf("%+v", got)
				}
			} else if reason(err) != "TICKET_INVALID" {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("it worked %d times", won.Load())
	}
}

func TestTicket_TooOldUnknownOrTooMany(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pl := w.place(w.tenant())
	s := w.service(nil, quick())
	ticket, _, err := s.IssueTicket(t.Context(), pl.who, pl.session)
	must(t, err)
	_, err = w.owner.Exec(t.Context(), `UPDATE event_tickets SET expire_time = now() - interval '1 second'`)
	must(t, err)
	for _, bad := range []string{ticket, "bht_unknown", "bhk_key", ""} {
		if _, err := s.RedeemTicket(t.Context(), bad); reason(err) != "TICKET_INVALID" {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for i := 0; ; i++ {
		_, _, err := s.IssueTicket(t.Context(), pl.who, pl.session)
		if err != nil {
			if reason(err) != "TOO_MANY_TICKETS" || i != 32 {
				t.Errorf("ticket %d: %v", i, err)
			}
			break
		}
	}
	if _, _, err := s.IssueTicket(t.Context(), pl.who, w.place(pl.who).session); err != nil {
		t.Errorf("another session: %v", err)
	}
}
