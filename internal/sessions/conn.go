package sessions

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// conn is one connection: a negotiated wire and what the server said of itself.
type conn struct {
	id     string
	pool   *Pool
	key    Key
	target Target
	wire   wire
	count  counters
	nextID atomic.Int64
	// doubted is set when a refusal spoke against what was negotiated.
	doubted atomic.Bool

	// Set while connecting, fixed afterwards.
	era, version string
	caps, info   json.RawMessage
	announced    map[string]bool // kinds of list whose changes are announced
	negotiation  time.Duration
	opened       time.Time
	// watchTried is closed once the first attempt to watch is open or has failed;
	// nil where nothing is watched.
	watchTried chan struct{}
	refusal    reply // the HTTP answer that ended the negotiation, if one did
	attempts   int   // to connect, this one and those before it that failed
	// turn holds one token where calls run one at a time.
	turn chan struct{}

	placed bool   // it was given out by the pool; guarded by the pool's mutex
	closed func() // tells of the end of a placed one; guarded likewise

	mu         sync.Mutex
	state      string
	stages     []Stage // at most one for each state
	queue      int     // calls that wait for their turn
	lastUsed   time.Time
	active     int
	ended      bool
	closing    bool
	watchOpen  bool
	listed     bool // a list began before the stream of changes was open
	stopWatch  context.CancelFunc
	told       time.Time       // when the last change was reported
	untold     map[string]bool // changes that wait for the next report
	tellTimer  *time.Timer
	tellClosed bool
}

// allowed reports whether a target's contract lets a version be spoken.
func (t Target) allowed(version string) bool {
	return slices.Contains(knownVersions, version) && (len(t.Versions) == 0 || slices.Contains(t.Versions, version))
}

// legacyVersions are the allowed versions with a handshake, newest first.
func (t Target) legacyVersions() []string {
	var out []string
	for _, v := range mcp.LegacyProtocolVersions() {
		if t.allowed(v) {
			out = append(out, v)
		}
	}
	return out
}

// learn takes in capabilities and server information.
func (c *conn) learn(caps, info []byte) {
	c.caps, c.info = slices.Clone(caps), slices.Clone(info)
	c.announced = map[string]bool{}
	for kind, name := range capabilityOf {
		if string(member(member(caps, name), "listChanged")) == "true" {
			c.announced[kind] = true
		}
	}
}

// capabilityOf names the server capability behind each kind of definition.
var capabilityOf = map[string]string{KindTool: "tools", KindResource: "resources", KindResourceTemplate: "resources", KindPrompt: "prompts"}

// over reports whether the connection ended.
func (c *conn) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// watchFirst is how long a first list waits for the stream of changes.
const watchFirst = time.Second

// afterWatch waits until the stream of changes is open, so that nothing changes
// unseen between a list and the stream. A list that does not wait for it is
// noted: the stream's opening is then a gap.
func (c *conn) afterWatch(ctx context.Context) {
	if c.watchTried == nil {
		return
	}
	t := time.NewTimer(watchFirst)
	defer t.Stop()
	select {
	case <-c.watchTried:
	case <-t.C:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.watchOpen {
		c.listed = true
	}
}

// watchOpened notes that the stream of changes is open, and reports a gap if
// lists were made before.
func (c *conn) watchOpened(tried func()) {
	c.mu.Lock()
	c.watchOpen = true
	gap := c.listed
	c.mu.Unlock()
	tried()
	if gap {
		c.changed("")
	}
}

func (c *conn) setWatching(open bool) (was bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, c.watchOpen = c.watchOpen, open
	return was
}

// connected is the kind under which a new connection is reported.
const connected = "\x00connected"

// changed reports a change at once when none was reported lately, and otherwise
// together with all others when the time has come.
func (c *conn) changed(kind string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tellClosed || c.pool.onChange.Load() == nil {
		return
	}
	if c.untold == nil {
		c.untold = map[string]bool{}
	}
	c.untold[kind] = true
	if c.tellTimer != nil {
		return
	}
	if !c.pool.tasks.begin() {
		return
	}
	wait := max(0, c.pool.limits.Coalesce-time.Since(c.told))
	c.tellTimer = time.AfterFunc(wait, func() {
		defer c.pool.tasks.wg.Done()
		c.tell()
	})
}

func (c *conn) tell() {
	c.mu.Lock()
	kinds := c.untold
	c.untold, c.tellTimer, c.told = nil, nil, time.Now()
	c.mu.Unlock()
	if kinds[""] {
		kinds = map[string]bool{"": true}
	}
	for kind := range kinds {
		ch := Change{Key: c.key, Kind: kind}
		if kind == connected {
			ch = Change{Key: c.key, Connected: true}
		}
		c.pool.tell(ch)
	}
}

// quiet ends the reports of this connection. What was not reported yet is
// reported as a gap by the caller, if at all.
func (c *conn) quiet() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tellClosed = true
	if c.tellTimer != nil && c.tellTimer.Stop() {
		c.pool.tasks.wg.Done()
	}
	c.tellTimer = nil
}

// do sends one request and judges the answer. again means that the server refused
// it for its protocol version and that it may be sent once more.
func (c *conn) do(ctx context.Context, r *Request) (resp Response, again bool, err error) {
	started := time.Now()
	limit := r.ResultBytes
	if limit <= 0 {
		limit = c.pool.limits.ResultBytes
	}
	timeout := r.Timeout
	if timeout <= 0 {
		timeout = c.pool.limits.Call
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	hold := c.pool.lease(c.key.Tenant)
	x := &exchange{id: c.nextID.Add(1), method: r.Method, limit: limit, beforeSend: r.BeforeSend, hold: hold}
	if x.headers, err = c.headers(r); err != nil {
		return Response{Era: c.era, ProtocolVersion: c.version}, false, err
	}
	x.body = encodeRequest(x.id, r.Method, r.Params, c.meta(), r.Meta)
	rep, err := c.wire.exchange(ctx, x)
	resp, err = c.respond(r.Method, &rep, err)
	if resp.hold = hold; resp.Result == nil && resp.Error == nil {
		resp.Release()
	}
	resp.Timings.Execution = time.Since(started)
	if resp.Doubted = rep.doubt; rep.doubt {
		c.doubted.Store(true)
	}
	if rep.renew {
		c.pool.drop(c, "the server refused the connection", true)
	}
	if resp.Error != nil && resp.Error.Code == mcp.UNSUPPORTED_PROTOCOL_VERSION && err == nil {
		if !slices.Contains(supportedVersions(resp.Error.Data, "supported"), c.version) {
			c.pool.forgetEra(c.key)
			c.pool.drop(c, "the server no longer speaks the negotiated version", true)
		}
		again = true
	}
	return resp, again, err
}

// meta is the protocol's _meta for a request of this connection, nil for legacy.
func (c *conn) meta() []byte {
	if c.era == EraModern {
		return c.pool.meta
	}
	return nil
}

// respond turns a reply into a response and checks what the protocol demands.
func (c *conn) respond(method string, rep *reply, err error) (Response, error) {
	resp := Response{
		Result: rep.msg.result, Parts: rep.msg.members.parts(), Error: rep.msg.err, HTTPStatus: rep.status, WWWAuthenticate: rep.challenge,
		RetryAfter: rep.retryAfter, Phase: rep.phase, Era: c.era, ProtocolVersion: c.version,
	}
	switch {
	case err != nil:
	case rep.msg.result != nil:
		resp.ResultType, err = c.resultType(method, &rep.msg)
	case rep.msg.errFlaw != "":
		err = protocolError(ErrorInvalid, "the server answered with an error that is none of JSON-RPC: "+rep.msg.errFlaw).
			With("serverMessage", shorten(rep.msg.err.Message, 200))
	}
	if rep.asked != "" && (err == nil || !fault.Is(err, fault.Canceled)) {
		err = failure(fault.Unimplemented, fault.Host, "SERVER_ASKED", "the server asked for something that is not supported here").With("method", rep.asked).Cause(err)
	}
	return resp, err
}

// resultType applies the rules for resultType: absent is complete; input_required
// only where it is allowed; anything else is invalid. Legacy servers do not know it.
func (c *conn) resultType(method string, m *message) (string, error) {
	if flaw := m.members.flaw(method, m.result); flaw != "" {
		return "", protocolError(ResultInvalid, "the server's result "+flaw)
	}
	if c.era != EraModern || m.members.raw[memberResultType] == nil {
		return ResultComplete, nil
	}
	kind, _ := text(m.members.raw[memberResultType])
	switch {
	case kind == ResultComplete:
		return kind, nil
	case kind == ResultInputRequired && mcp.MethodRequiresNameHeader(mcp.MCPMethod(method)):
		return kind, nil
	}
	return "", protocolError("RESULT_TYPE_INVALID", "the server's result is of a type that was not asked for")
}

// shutdown closes the wire and waits for the watcher. It is called once.
func (c *conn) shutdown(ctx context.Context) {
	c.mu.Lock()
	stop := c.stopWatch
	c.mu.Unlock()
	if stop != nil {
		stop()
	}
	c.quiet()
	c.wire.close(ctx)
}
