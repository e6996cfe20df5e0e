package calls

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	// maxLogs bounds the log lines that are kept of a call, the newest; maxLogData the
	// bytes of what one of them holds.
	maxLogs    = 16
	maxLogData = 4 << 10
	// noticePause is the least time between two records of progress and logs.
	noticePause = time.Second
)

// Progress is how far a server says that it is; foreign.
type Progress struct {
	Progress float64 `json:"progress"`
	// Total is nil when the server named none.
	Total   *float64  `json:"total,omitempty"`
	Message string    `json:"message,omitempty"`
	Time    time.Time `json:"time"`
}

// LogLine is a log message of a server about a call; foreign.
type LogLine struct {
	Time   time.Time `json:"time"`
	Level  string    `json:"level"`
	Logger string    `json:"logger,omitempty"`
	// Data is raw JSON.
	Data json.RawMessage `json:"data,omitempty"`
}

// notices is what is stored of them.
type notices struct {
	Progress *Progress `json:"progress,omitempty"`
	Logs     []LogLine `json:"logs,omitempty"`
}

// onNotice keeps the newest of what a server says of a call under way. It is shown
// with the call and makes no revision: whoever waits for a change is not woken by
// a server that talks.
func (e *execution) onNotice(n sessions.Notice) {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := *e.call
	switch n.Kind {
	case sessions.NoticeProgress:
		c.Progress = &Progress{Progress: n.Progress, Total: n.Total, Message: cleanText(n.Message, 1000), Time: n.Time}
	case sessions.NoticeLog:
		c.Logs = append(slices.Clip(c.Logs), LogLine{Time: n.Time, Level: cleanText(n.Level, 20), Logger: cleanText(n.Logger, 200), Data: logData(n.Data)})
		c.Logs = c.Logs[max(0, len(c.Logs)-maxLogs):]
	default:
		return
	}
	e.call, e.noticed = &c, true
	e.recordNotices()
}

// recordNotices sees to it that what was noticed of a recorded call is written
// down. The caller holds e.mu, and a place among what Stop waits for.
func (e *execution) recordNotices() {
	if !e.call.Recorded || !e.noticed || e.noting {
		return
	}
	e.noting = true
	e.s.running.Add(1)
	go e.keepNotices()
}

// logData cuts what is too long to its beginning, as a text.
func logData(raw json.RawMessage) json.RawMessage {
	raw = cleanJSON(raw)
	if len(raw) <= maxLogData {
		return slices.Clone(raw)
	}
	out, err := json.Marshal(strings.ToValidUTF8(string(raw[:maxLogData]), "") + "…")
	if err != nil {
		return nil
	}
	return out
}

// keepNotices writes down what was noticed, no more often than noticePause allows,
// until nothing new comes or the execution ends.
func (e *execution) keepNotices() {
	defer e.s.running.Done()
	ctx := context.WithoutCancel(e.s.work)
	for {
		e.mu.Lock()
		if !e.noticed {
			e.noting = false
			e.mu.Unlock()
			return
		}
		e.noticed = false
		c := e.call
		e.mu.Unlock()
		if err := e.s.writeNotices(ctx, c); err != nil {
			e.s.log.InfoContext(e.scoped(ctx), "record what a server says of a call", "tenant", e.key.tenant, "call", e.key.id, "error", detail(err))
		} else if e.s.deps.Events != nil {
			e.s.deps.Events.Progress(e.key.tenant, c.SessionID, c.ID)
		}
		t := time.NewTimer(noticePause)
		select {
		case <-t.C:
		case <-e.done:
		}
		t.Stop()
	}
}

func (s *Service) writeNotices(ctx context.Context, c *Call) error {
	raw, err := json.Marshal(notices{c.Progress, c.Logs})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return s.deps.DB.InTx(ctx, c.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO call_notices (tenant_id, call_id, notices) VALUES ($1, $2, $3)
			ON CONFLICT (call_id) DO UPDATE SET notices = excluded.notices, update_time = clock_timestamp()`, tx.Tenant(), c.ID, raw)
		return err
	})
}

// takeNotices reads what is stored with a call.
func (c *Call) takeNotices(raw []byte) {
	var n notices
	if raw != nil && json.Unmarshal(raw, &n) == nil {
		c.Progress, c.Logs = n.Progress, n.Logs
	}
}
