package sessions

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/mark3labs/mcp-go/mcp"
)

const (
	// noticePace is the least time between two notices to one request.
	noticePace = 250 * time.Millisecond
	// maxNoticeText bounds a text of a notice.
	maxNoticeText = 2048
	// maxLogData bounds the data of a log message; more is cut and becomes a string.
	maxLogData = 4096
	// maxLogs bounds the log messages that are kept of a connection.
	maxLogs = 16
	// maxLogger bounds the name of a logger.
	maxLogger = 256
)

// logLevels are the levels of log messages, the least severe first.
var logLevels = []string{"debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"}

// levelOf numbers a level from 1; 0 is none.
func levelOf(name string) int { return slices.Index(logLevels, name) + 1 }

// notices hands progress and log messages to a request, the newest of what comes
// within noticePace.
type notices struct {
	conn  *conn
	token string
	level int // the least severe level that was asked for with the request, 0 for none
	fn    func(Notice)

	telling sync.Mutex // held while fn is called, so that it is told in order

	mu       sync.Mutex
	began    bool // there was a progress
	progress float64
	wait     [2]*Notice // progress and log message not told yet
	told     time.Time
	timer    *time.Timer
	over     bool
}

// newNotices takes a token that nobody can guess and listens to it.
func (c *conn) newNotices(t *Target, fn func(Notice)) *notices {
	n := &notices{conn: c, token: rand.Text(), fn: fn}
	if c.era == EraModern && c.offers&offersLogging != 0 {
		n.level = levelOf(t.LogLevel)
	}
	c.talkMu.Lock()
	defer c.talkMu.Unlock()
	if c.tokens == nil {
		c.tokens = map[string]*notices{}
	}
	c.tokens[n.token] = n
	return n
}

// meta adds to the open object of a request's _meta what the notices need.
func (n *notices) meta(base []byte) []byte {
	out := append(make([]byte, 0, len(base)+128), base...)
	switch {
	case len(out) == 0:
		out = append(out, '{')
	default:
		out = append(out, ',')
	}
	out = append(append(append(out, `"progressToken":"`...), n.token...), '"')
	if n.level > 0 {
		out = append(append(append(out, `,"`+mcp.MetaKeyLogLevel+`":"`...), logLevels[n.level-1]...), '"')
	}
	return out
}

// end stops listening and tells what was not told yet.
func (n *notices) end() {
	if n == nil {
		return
	}
	n.conn.talkMu.Lock()
	delete(n.conn.tokens, n.token)
	n.conn.talkMu.Unlock()
	n.mu.Lock()
	n.over = true
	if n.timer != nil && n.timer.Stop() {
		n.conn.pool.tasks.wg.Done()
	}
	n.mu.Unlock()
	n.tell()
}

// add takes a notice in, to be told when the time has come.
func (n *notices) add(slot int, v Notice) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.over {
		return
	}
	n.wait[slot] = &v
	if n.timer != nil || !n.conn.pool.tasks.begin() {
		return
	}
	n.timer = time.AfterFunc(max(0, noticePace-time.Since(n.told)), func() {
		defer n.conn.pool.tasks.wg.Done()
		n.tell()
	})
}

func (n *notices) tell() {
	n.telling.Lock()
	defer n.telling.Unlock()
	n.mu.Lock()
	wait := n.wait
	n.wait, n.timer, n.told = [2]*Notice{}, nil, time.Now()
	n.mu.Unlock()
	for _, v := range wait {
		if v != nil {
			n.fn(*v)
		}
	}
}

// grows notes a progress and reports whether it is more than the one before.
func (n *notices) grows(progress float64) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.began && progress <= n.progress {
		return false
	}
	n.began, n.progress = true, progress
	return true
}

// noticed judges a notification. own is the request on whose stream it came, nil
// for a channel that all share. The message's bytes are only read before this
// returns, and it never waits.
func (c *conn) noticed(m *message, own *talk, modern bool) {
	switch m.method {
	case string(mcp.MethodNotificationProgress):
		c.progressed(m.params, own, modern)
	case string(mcp.MethodNotificationMessage):
		c.logged(m.params, own, modern)
	case mcp.MethodNotificationResourceUpdated:
		c.resourceUpdated(m.params)
	case string(mcp.MethodNotificationCancelled):
		if !modern {
			c.takenBack(m.params)
		}
	default:
		if kind, ok := listKinds[m.method]; ok {
			c.changed(kind)
		}
	}
}

// progressed hands a progress to the request whose token it has. A modern server
// tells it on the stream of that very request.
func (c *conn) progressed(params []byte, own *talk, modern bool) {
	token, _ := text(member(params, "progressToken"))
	c.talkMu.Lock()
	n := c.tokens[token]
	c.talkMu.Unlock()
	progress, err := strconv.ParseFloat(string(member(params, "progress")), 64)
	if n == nil || err != nil || modern && own != nil && own.notices != n || !n.grows(progress) {
		c.count.stray.Add(1)
		return
	}
	v := Notice{Kind: NoticeProgress, Time: time.Now(), Progress: progress}
	if total, err := strconv.ParseFloat(string(member(params, "total")), 64); err == nil {
		v.Total = &total
	}
	v.Message, _ = text(member(params, "message"))
	v.Message = shorten(v.Message, maxNoticeText)
	n.add(0, v)
}

// logged keeps a log message that was asked for, and hands it to the request it
// belongs to.
func (c *conn) logged(params []byte, own *talk, modern bool) {
	name, _ := text(member(params, "level"))
	level, least := levelOf(name), int(c.logLevel.Load())
	var to *notices
	if own != nil {
		to = own.notices
	}
	if modern {
		if own == nil {
			to = c.onlyNotices()
		}
		if least = 0; to != nil {
			least = to.level
		}
	}
	if level == 0 || least == 0 || level < least {
		c.count.stray.Add(1)
		return
	}
	v := Notice{Kind: NoticeLog, Time: time.Now(), Level: name, Data: logData(member(params, "data"))}
	v.Logger, _ = text(member(params, "logger"))
	v.Logger = shorten(v.Logger, maxLogger)
	c.talkMu.Lock()
	if len(c.logs) >= maxLogs {
		c.logs = append(c.logs[:0], c.logs[1:]...)
	}
	c.logs = append(c.logs, v)
	c.talkMu.Unlock()
	if to != nil {
		to.add(1, v)
	}
}

// onlyNotices returns the notices of the only request that wants some, if there is
// only one: on a pipe nothing else says whose a log message is.
func (c *conn) onlyNotices() *notices {
	c.talkMu.Lock()
	defer c.talkMu.Unlock()
	if len(c.tokens) == 1 {
		for _, n := range c.tokens {
			return n
		}
	}
	return nil
}

// logData is a copy of the data of a log message, as a string when it is too large.
func logData(raw []byte) json.RawMessage {
	if len(raw) <= maxLogData {
		return bytes.Clone(raw)
	}
	s, ok := text(raw)
	if !ok {
		s = string(raw)
	}
	b, _ := json.Marshal(shorten(s, maxLogData-2)) // a string always encodes
	return b
}
