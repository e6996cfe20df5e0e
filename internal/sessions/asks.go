package sessions

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"

	"github.com/mark3labs/mcp-go/mcp"
)

const (
	// maxOpenAsks bounds the questions of one request that wait for an answer.
	maxOpenAsks = 8
	// maxAnswering bounds the answers to a server that are on their way on one
	// connection, besides those of people; what it asks beyond gets none.
	maxAnswering = 16
	// maxRootsShown bounds the roots that a server is told.
	maxRootsShown = 64
)

// errorInternal is the code of JSON-RPC for a failure of this side.
const errorInternal = mcp.INTERNAL_ERROR

// asked serves a request of a legacy server. own is the request on whose stream it
// came, nil for a channel that all share. The message's bytes are only read before
// this returns, and it never waits.
func (c *conn) asked(w wire, m *message, own *talk) {
	if len(m.id) > maxAskKey || m.hasNullID() || m.id[0] == '{' || m.id[0] == '[' {
		c.count.stray.Add(1)
		return
	}
	id := string(m.id)
	if m.method == string(mcp.MethodPing) {
		c.say(w, encodeAnswer(id, Answer{Result: json.RawMessage("{}")}))
		return
	}
	if e := checkAsk(c.declared, m.method, m.params); e != nil {
		c.say(w, encodeAnswer(id, Answer{Error: e}))
		return
	}
	if m.method == string(mcp.MethodListRoots) {
		c.say(w, encodeAnswer(id, Answer{Result: RootsResult(c.target.Roots)}))
		return
	}
	k, e := c.belongs(own)
	if e != nil {
		c.count.stray.Add(1)
		c.say(w, encodeAnswer(id, Answer{Error: e}))
		return
	}
	a := Ask{Method: m.method, Params: bytes.Clone(m.params)}
	if len(a.Params) == 0 {
		a.Params = json.RawMessage("{}")
	}
	c.pass(w, k, id, a)
}

// belongs finds the request that a question belongs to: the one on whose stream it
// came, or else the only one in flight that takes questions.
func (c *conn) belongs(own *talk) (*talk, *RPCError) {
	if own != nil {
		if own.onAsk == nil {
			return nil, &RPCError{Code: mcp.INVALID_REQUEST, Message: "nobody attends to this request, so it takes no questions"}
		}
		return own, nil
	}
	c.talkMu.Lock()
	defer c.talkMu.Unlock()
	var found *talk
	for k := range c.talks {
		if k.onAsk == nil {
			continue
		}
		if found != nil {
			return nil, &RPCError{Code: mcp.INVALID_REQUEST, Message: "several requests are in flight, and which of them this belongs to cannot be told"}
		}
		found = k
	}
	if found == nil {
		return nil, &RPCError{Code: mcp.INVALID_REQUEST, Message: "no request is in flight that this could belong to"}
	}
	return found, nil
}

// pass hands a question to the request it belongs to, and its answer to the server.
func (c *conn) pass(w wire, k *talk, id string, a Ask) {
	ctx, cancel := context.WithCancel(k.ctx)
	c.talkMu.Lock()
	_, twice := c.asks[id]
	if !twice {
		if c.asks == nil {
			c.asks = map[string]context.CancelFunc{}
		}
		c.asks[id] = cancel
	}
	c.talkMu.Unlock()
	forget := func() {
		c.talkMu.Lock()
		delete(c.asks, id)
		c.talkMu.Unlock()
		cancel()
	}
	if twice {
		cancel()
		c.count.stray.Add(1)
		return
	}
	if !c.pool.tasks.begin() {
		forget()
		return
	}
	if !k.enter(c.pool.limits.ServerRequests) {
		forget()
		c.pool.tasks.wg.Done()
		c.count.stray.Add(1)
		c.say(w, encodeAnswer(id, Answer{Error: &RPCError{Code: errorInternal, Message: "too many questions in one request"}}))
		return
	}
	go func() {
		defer c.pool.tasks.wg.Done()
		answer, mute := Answer{}, false
		func() {
			defer k.leave()
			defer forget()
			answer = k.onAsk(ctx, a)
			mute = ctx.Err() != nil // the request is over, or the question was taken back
		}()
		if !mute {
			c.post(w, encodeAnswer(id, answer))
		}
	}()
}

// takenBack ends the question that a legacy server no longer wants answered.
// Others that it names are ignored.
func (c *conn) takenBack(params []byte) {
	id := member(params, "requestId")
	c.talkMu.Lock()
	cancel := c.asks[string(id)]
	c.talkMu.Unlock()
	if cancel != nil {
		cancel()
	}
}

// say sends an answer to the server, beside everything else, if not too many are on
// their way.
func (c *conn) say(w wire, body []byte) {
	if c.answering.Add(1) > maxAnswering || !c.pool.tasks.begin() {
		c.answering.Add(-1)
		c.count.stray.Add(1)
		return
	}
	go func() {
		defer c.pool.tasks.wg.Done()
		defer c.answering.Add(-1)
		c.post(w, body)
	}()
}

func (c *conn) post(w wire, body []byte) {
	ctx, cancel := context.WithTimeout(c.pool.ctx, c.pool.limits.Write)
	defer cancel()
	w.notify(ctx, body) //nolint:errcheck // the server learns nothing; the request's own time still ends it
}

// encodeAnswer writes the response to a request of the server. An answer that is
// no JSON object can only be a fault of ours.
func encodeAnswer(id string, a Answer) []byte {
	if a.Error == nil && (!json.Valid(a.Result) || bytes.TrimSpace(a.Result)[0] != '{') {
		a.Error = &RPCError{Code: errorInternal, Message: "the answer could not be made"}
	}
	if a.Error == nil {
		return []byte(`{"jsonrpc":"2.0","id":` + id + `,"result":` + string(a.Result) + `}`)
	}
	said, _ := json.Marshal(a.Error.Message) // a string always encodes
	out := `{"jsonrpc":"2.0","id":` + id + `,"error":{"code":` + strconv.FormatInt(a.Error.Code, 10) + `,"message":` + string(said)
	if json.Valid(a.Error.Data) {
		out += `,"data":` + string(a.Error.Data)
	}
	return []byte(out + "}}")
}

// RootsResult is the answer to roots/list, a raw JSON object with 64 URIs at most.
func RootsResult(roots []string) json.RawMessage {
	type root struct {
		URI string `json:"uri"`
	}
	list := []root{}
	for _, uri := range roots[:min(len(roots), maxRootsShown)] {
		list = append(list, root{uri})
	}
	b, _ := json.Marshal(map[string]any{"roots": list}) // strings always encode
	return b
}
