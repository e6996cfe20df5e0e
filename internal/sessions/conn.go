package sessions

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mark3labs/mcp-go/mcp"
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
	fellBack     bool         // to an older version than the server had proved
	steppedDown  bool         // once, to a version that a server named when it refused ours
	declared     Capabilities // what a legacy server was told
	caps, info   json.RawMessage
	offers       uint8           // what the server declares, as bits
	announced    map[string]bool // kinds of list whose changes are announced
	negotiation  time.Duration
	opened       time.Time
	// watchTried is closed once the first attempt to watch is open or has failed;
	// nil where nothing is watched.
	watchTried chan struct{}
	refusal    reply         // the HTTP answer that ended the negotiation, if one did
	attempts   int           // to connect, this one and those before it that failed
	gone       chan struct{} // closed when it was dropped
	// turn holds one token where calls run one at a time.
	turn chan struct{}

	unanswered atomic.Int32 // requests in a row whose time ran out without a sign of life

	answering atomic.Int32 // requests of the server that are being answered
	logLevel  atomic.Int32 // the least severe log message that a legacy server was asked for

	talkMu sync.Mutex
	talks  map[*talk]struct{}            // what goes on beside the requests in flight
	asks   map[string]context.CancelFunc // questions with a person, by the server's id
	tokens map[string]*notices           // who hears of progress, by token
	logs   []Notice                      // the newest log messages

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
	watchOpen  int  // streams of changes that are open
	watchDone  bool // watchTried is closed
	listed     bool // a list began before the stream of changes was open
	watchCtx   context.Context
	stopWatch  context.CancelFunc
	watcher    *watcher        // holds the stream of changes
	taking     *watcher        // is to take over
	keeper     *subscriber     // has subscriptions here, so that this is never idle
	told       time.Time       // when the last change was reported
	untold     map[string]bool // changes that wait for the next report
	tellTimer  *time.Timer
	tellClosed bool
	pinging    bool
	pinged     time.Time // when the last ping began
	missed     int       // pings in a row without an answer
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
	c.offers = offersOf(caps, c.version)
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
			ch = Change{Key: c.key, Connected: true, Opened: c.opened}
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

// do sends one request and judges the answer. again means that the server says it
// refused it for its protocol version; whether it is sent once more depends on what
// the request may have done all the same.
func (c *conn) do(ctx context.Context, t *Target, r *Request) (resp Response, again bool, err error) {
	started := time.Now()
	if err := c.gate(t, r.Method); err != nil {
		return Response{Era: c.era, ProtocolVersion: c.version}, false, err
	}
	limit := r.ResultBytes
	if limit <= 0 {
		limit = c.pool.limits.ResultBytes
	}
	timeout := r.Timeout
	if timeout <= 0 {
		timeout = c.pool.limits.Call
	}
	var beside *talk
	if r.OnNotice != nil || r.OnAsk != nil && c.era == EraLegacy {
		c.awaitStream(ctx)
		beside = c.talk(ctx, t, r, timeout)
		defer beside.end()
		ctx = beside.ctx
	} else {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	hold := c.pool.lease(c.key.Tenant)
	x := &exchange{id: c.nextID.Add(1), method: r.Method, limit: limit, beforeSend: r.BeforeSend, hold: hold, beside: beside}
	if x.headers, err = c.headers(r); err != nil {
		return Response{Era: c.era, ProtocolVersion: c.version}, false, err
	}
	x.body = encodeRequest(x.id, r.Method, r.Params, c.meta(t, beside), r.Meta)
	rep, err := c.wire.exchange(ctx, x)
	c.judgeSilence(ctx, rep.phase, err)
	resp, err = c.respond(t, r, &rep, err)
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
		again, resp.Doubted = true, true
	}
	return resp, again, err
}

// meta is the protocol's _meta for a request of this connection, nil for none.
func (c *conn) meta(t *Target, beside *talk) (base []byte) {
	if c.era == EraModern {
		base = c.pool.meta[t.Declare.index()]
	}
	if beside != nil && beside.notices != nil {
		return beside.notices.meta(base)
	}
	return base
}

// respond turns a reply into a response and checks what the protocol demands.
func (c *conn) respond(t *Target, r *Request, rep *reply, err error) (Response, error) {
	resp := Response{
		Result: rep.msg.result, Parts: rep.msg.parts(), Error: rep.msg.err, HTTPStatus: rep.status, WWWAuthenticate: rep.challenge,
		RetryAfter: rep.retryAfter, Phase: rep.phase, Era: c.era, ProtocolVersion: c.version,
	}
	switch {
	case err != nil:
	case rep.msg.result != nil:
		if rep.msg.members.state {
			resp.Result = without(rep.msg.result, requestState) // it is the server's alone
		}
		err = c.readResult(t, r, &rep.msg, &resp)
	case rep.msg.errFlaw != "":
		err = protocolError(ErrorInvalid, "the server answered with an error that is none of JSON-RPC: "+rep.msg.errFlaw).
			With("serverMessage", shorten(rep.msg.err.Message, 200))
	case rep.msg.err != nil:
		if f := capabilityRequired(rep.msg.err); f != nil {
			return resp, f
		}
		if resp.Asks = c.visits(t, rep.msg.err); resp.Asks != nil {
			resp.ResultType = ResultInputRequired
		}
	}
	return resp, err
}

// readResult applies the rules for resultType: absent is complete; input_required
// and task only where they are allowed; anything else is invalid. Legacy servers do
// not know it.
func (c *conn) readResult(t *Target, r *Request, m *message, resp *Response) error {
	flaw := m.members.flaw(r.Method, m.result)
	if flaw == "" && c.era == EraModern {
		kind := ResultComplete
		if raw := m.members.raw[memberResultType]; raw != nil {
			kind, _ = text(raw)
		}
		switch {
		case r.Method == string(mcp.MethodTasksGet) && (kind == ResultComplete || kind == ResultTask):
			kind = ResultComplete // servers follow either of two pages of the extension
			if resp.Task, flaw = readTask(t.Declare, m.result); flaw == "" && resp.Task.ID != r.Name {
				flaw = "is about another task"
			}
		case kind == ResultComplete:
		case kind == ResultInputRequired && mcp.MethodRequiresNameHeader(mcp.MCPMethod(r.Method)):
			var in input
			in, flaw = readInput(t.Declare, m)
			resp.Asks, resp.RequestState = in.asks, in.state
		case kind == ResultTask && r.Method == string(mcp.MethodToolsCall) && t.Declare.Tasks && c.offers&offersTasks != 0:
			resp.Task, flaw = readTask(t.Declare, m.result)
		default:
			return protocolError(ResultTypeInvalid, "the server's result is of a type that was not asked for")
		}
		resp.ResultType = kind
	}
	if flaw != "" {
		resp.OnlyAsked = resp.ResultType == ResultInputRequired && asksOnly(m.result)
		resp.ResultType, resp.Asks, resp.RequestState, resp.Task = "", nil, nil, nil
		if m.members.state {
			resp.Result = nil // the state is not for anybody to see, and the rest of no use without it
		}
		return protocolError(ResultInvalid, "the server's result "+flaw)
	}
	if resp.ResultType == "" {
		resp.ResultType = ResultComplete
	}
	return nil
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
