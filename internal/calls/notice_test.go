package calls

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// What a server says of a call under way is shown, kept, bounded, and wakes nobody.
func TestNotice_NewestIsKeptWithoutAStorm(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.node(quick()), w.node(quick())
	sc := w.scene(a)
	w.exec(`CREATE TABLE written (n bigint GENERATED ALWAYS AS IDENTITY);
		CREATE FUNCTION log_notice() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN INSERT INTO written DEFAULT VALUES; RETURN NEW; END $$;
		CREATE TRIGGER log_notice AFTER INSERT OR UPDATE ON call_notices FOR EACH ROW EXECUTE FUNCTION log_notice()`)
	g := newGate(t)
	total := 200.0
	w.sender.answer(func(ctx ctx, s sent, n int) (response, error) {
		for i := range 200 {
			s.r.OnNotice(sessions.Notice{Kind: sessions.NoticeProgress, Time: time.Now(), Progress: float64(i + 1), Total: &total, Message: fmt.Sprint("step ", i+1)})
			s.r.OnNotice(sessions.Notice{Kind: sessions.NoticeLog, Time: time.Now(), Level: "info", Logger: "x", Data: json.RawMessage(fmt.Sprint(i + 1))})
		}
		s.r.OnNotice(sessions.Notice{Kind: sessions.NoticeLog, Level: "error", Data: json.RawMessage(`"` + strings.Repeat("é", maxLogData) + `"`)})
		return g.script(okAnswer)(ctx, s, n)
	})
	for _, tool := range []string{"write", "read"} {
		c := sc.propose(tool, func(p *Proposal) { p.Wait = 0 })
		<-g.arrived
		check := func(got *Call) {
			t.Helper()
			if p := got.Progress; p == nil || p.Progress != 200 || *p.Total != 200 || p.Message != "step 200" || len(got.Logs) != maxLogs ||
				string(got.Logs[maxLogs-2].Data) != "200" || got.Logs[maxLogs-1].Level != "error" || !json.Valid(got.Logs[maxLogs-1].Data) || len(got.Logs[maxLogs-1].Data) > maxLogData+16 {
				t.Fatalf("%+v %+v", got.Progress, got.Logs)
			}
		}
		w.eventually(func() bool {
			got := sc.on(b).get(c.ID)
			return len(got.Logs) > 0 && got.Logs[len(got.Logs)-1].Level == "error"
		},
			func() string { return "another replica sees no progress" })
		if tool == "write" {
			if got := sc.on(b).get(c.ID); got.Revision != c.Revision {
				t.Errorf("progress made %d revisions", got.Revision-c.Revision)
			}
		}
		g.release()
		check(sc.until(c.ID, Succeeded))
	}
	if n := w.count(`SELECT count(*) FROM written`); n > 6 {
		t.Errorf("%d writes", n)
	}
}
