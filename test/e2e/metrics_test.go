package e2e

import (
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// A deleted server leaves no series behind, under its name or its id; those of
// the tenant stay.
func TestDeletedServerLeavesNoSeries(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		v := w.calendar(startDemo(t, demo.Options{}))
		ses := w.session(w.alice)
		w.ended(w.alice, w.propose(w.alice, ses, "calendar", "get_availability", obj{"from": "2026-12-07T08:00:00Z", "to": "2026-12-07T18:00:00Z"}))
		series := func() (n int) {
			_, _, body, err := send(w.ctx, w.http, "GET", theService.Metrics+"/metrics", nil, nil)
			must(t, err)
			for line := range strings.Lines(string(body)) {
				if strings.Contains(line, `tenant="`+w.tenantID+`"`) && strings.Contains(line, `server="`) {
					n++
				}
			}
			return n
		}
		if n := series(); n < 3 {
			t.Fatalf("%d series while the server is there", n)
		}
		_, err := w.admin.DeleteServer(w.ctx, &pb.DeleteServerRequest{Server: v.GetName()})
		must(t, err)
		w.until("the series are gone", func() bool { return series() == 0 })
	})
}
