package sessions

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// wire carries JSON-RPC messages to one server. Both transports implement it.
type wire interface {
	// exchange sends one request and waits for its answer. The reply's phase is a
	// fact also beside an error.
	exchange(ctx context.Context, x *exchange) (reply, error)
	// notify sends a notification.
	notify(ctx context.Context, body []byte) error
	// speak tells the wire what was negotiated.
	speak(era, version string)
	// watch opens a stream of changes and reads it until it ends.
	watch(ctx context.Context, w *watch) watchEnd
	// close ends the connection. It is called once.
	close(ctx context.Context)
}

// exchange is one request on its way.
type exchange struct {
	id         int64
	method     string
	body       []byte
	headers    map[string]string
	limit      int64 // bytes of the result
	beforeSend func() error
	// patient is set for requests that must not be cancelled at the server.
	patient bool
	// beside is what goes on beside the request, nil for nothing.
	beside *talk
	// hold is what the answer has of the budget; nil counts nothing.
	hold *lease
}

// reply is what came back for an exchange.
type reply struct {
	msg        message
	phase      Phase
	status     int
	challenge  string
	retryAfter time.Duration
	// said is the beginning of a refusal that is no JSON-RPC.
	said string
	// renew means that the connection must not be used again, and doubt that it was
	// the refusal that spoke against it.
	renew, doubt bool
	// sessionID is the one a legacy server assigned with this answer.
	sessionID string
}

// counters count what a server sent that nobody wanted.
type counters struct {
	stray, garbage atomic.Int64
}

// tasks runs short background work and waits for it at the end.
type tasks struct {
	mu     sync.Mutex
	closed bool
	wg     sync.WaitGroup
}

// begin announces work; it is false once wait was called. Work that began ends
// with wg.Done.
func (t *tasks) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.wg.Add(1)
	}
	return !t.closed
}

// run runs fn on a goroutine of its own, or in place once wait was called.
func (t *tasks) run(fn func()) {
	if !t.begin() {
		fn()
		return
	}
	go func() {
		defer t.wg.Done()
		fn()
	}()
}

// wait lets no new work begin and waits for what runs.
func (t *tasks) wait() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.wg.Wait()
}

func failure(kind fault.Kind, layer fault.Layer, reason, message string) *fault.Error {
	return fault.New(kind, reason, "%s", message).In(layer)
}

func protocolError(reason, message string) *fault.Error {
	return failure(fault.Unavailable, fault.Protocol, reason, message)
}

// ended turns the end of a context into a fault.
func ended(ctx context.Context) *fault.Error {
	if context.Cause(ctx) == context.DeadlineExceeded || ctx.Err() == context.DeadlineExceeded {
		return failure(fault.Deadline, fault.Transport, "TIMEOUT", "the server did not answer in time")
	}
	return failure(fault.Canceled, fault.Host, "CANCELLED", "the request was cancelled")
}

var tooLarge = failure(fault.TooLarge, fault.Server, "RESULT_TOO_LARGE", "the server's answer exceeds the limit for results")

// tooManyQuestions ends a request whose server asks and asks instead of answering.
var tooManyQuestions = failure(fault.TooLarge, fault.Server, "TOO_MANY_QUESTIONS", "the server asked more in a minute than it may before it answered")

// emptyAnswer is what comes of an answer with the right id and nothing else. It
// does not tell whether the request was carried out.
var emptyAnswer = protocolError("ANSWER_EMPTY", "the server's answer carries neither a result nor an error")

// knownVersions are the protocol versions this build speaks, newest first.
var knownVersions = mcp.ValidProtocolVersions

// modernMeta is the _meta of the protocol for a modern request that declares these
// capabilities, without the closing brace.
func modernMeta(name, version string, declared Capabilities) []byte {
	info, err := json.Marshal(map[string]string{"name": name, "version": version})
	if err != nil {
		panic(err) // two strings always encode
	}
	return []byte(`{"` + mcp.MetaKeyProtocolVersion + `":"` + mcp.ProtocolVersion20260728 + `","` +
		mcp.MetaKeyClientInfo + `":` + string(info) + `,"` + mcp.MetaKeyClientCapabilities + `":` + declared.modern())
}

// encodeRequest writes a JSON-RPC request around raw parameters. meta is the open
// object of modernMeta, or nil for a legacy request.
func encodeRequest(id int64, method string, params []byte, meta []byte, extra map[string]json.RawMessage) []byte {
	params = bytes.TrimSpace(params)
	if len(params) == 0 {
		params = []byte("{}")
	}
	b := make([]byte, 0, len(params)+len(meta)+len(method)+128)
	b = append(b, `{"jsonrpc":"2.0","id":`...)
	b = strconv.AppendInt(b, id, 10)
	b = append(b, `,"method":"`...)
	b = append(b, method...)
	b = append(b, `","params":`...)
	if meta == nil && len(extra) == 0 {
		b = append(b, params...)
		return append(b, '}')
	}
	b = append(b, params[:len(params)-1]...)
	if len(bytes.TrimSpace(params[1:len(params)-1])) > 0 {
		b = append(b, ',')
	}
	b = append(b, `"_meta":`...)
	if meta == nil {
		meta = []byte{'{'}
	}
	b = append(b, meta...)
	first := len(meta) == 1
	for _, k := range sortedKeys(extra) {
		if !first {
			b = append(b, ',')
		}
		first = false
		name, _ := json.Marshal(k)
		b = append(append(append(b, name...), ':'), extra[k]...)
	}
	return append(b, "}}}"...)
}

func sortedKeys(m map[string]json.RawMessage) []string {
	if len(m) == 0 {
		return nil
	}
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func encodeNotification(method, params string) []byte {
	return []byte(`{"jsonrpc":"2.0","method":"` + method + `","params":` + params + `}`)
}

func encodeCancel(id int64) []byte {
	return encodeNotification(string(mcp.MethodNotificationCancelled), `{"requestId":`+strconv.FormatInt(id, 10)+`,"reason":"the caller stopped waiting"}`)
}

// checkParams refuses parameters that are no JSON object or bring their own _meta.
func checkParams(params []byte) error {
	if len(params) == 0 {
		return nil
	}
	s := scanner{data: params}
	err := s.object(0, func(name []byte) error {
		if string(name) == "_meta" {
			return errEnvelope
		}
		return s.value(1)
	})
	if err == nil {
		err = s.end()
	}
	if err != nil {
		return fault.New(fault.Internal, "PARAMS_INVALID", "the parameters of the request are no JSON object without _meta").Cause(err)
	}
	return nil
}

func checkMeta(meta map[string]json.RawMessage) error {
	for k, v := range meta {
		if strings.HasPrefix(k, "io.modelcontextprotocol/") || k == "progressToken" || !json.Valid(v) {
			return fault.New(fault.Internal, "META_INVALID", "a member of _meta is reserved or no JSON")
		}
	}
	return nil
}

// listKinds maps the notifications of changed lists to kinds.
var listKinds = map[string]string{
	string(mcp.MethodNotificationToolsListChanged):     KindTool,
	string(mcp.MethodNotificationPromptsListChanged):   KindPrompt,
	string(mcp.MethodNotificationResourcesListChanged): KindResourceTemplate,
}

func formatID(id int64) string { return strconv.FormatInt(id, 10) }
