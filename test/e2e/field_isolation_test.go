package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// counter is a stateful legacy server: each session has a count of its own.
type counter struct {
	mu       sync.Mutex
	sessions int
	counts   map[string]int
}

func (c *counter) initialize(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
	c.mu.Lock()
	c.sessions++
	id := fmt.Sprintf("session-%d", c.sessions)
	c.mu.Unlock()
	mcptest.WithHeader("Mcp-Session-Id", id, mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"counter","version":"1"}}`))(w, raw, r)
}

func (c *counter) increment(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
	id := raw.Header.Get("Mcp-Session-Id")
	c.mu.Lock()
	c.counts[id]++
	n := c.counts[id]
	c.mu.Unlock()
	mcptest.Result(fmt.Sprintf(`{"content":[{"type":"text","text":"count %d"}]}`, n))(w, raw, r)
}

// Users of one key and one open server share no session at it, and one's
// cancelled call ends nobody else's.
func TestFO050_NoUpstreamSessionIsShared(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		m, s := w.scripted(t, mcptest.Legacy, `[{"name":"increment","inputSchema":{"type":"object"}}]`)
		c := &counter{counts: map[string]int{}}
		m.On("initialize", c.initialize)
		m.On("tools/call", c.increment)
		w.review(s, nil, toolRule{name: "increment", effect: "read"})
		alices, bobs := w.session(w.alice), w.session(w.bob)
		wantSucceeded(t, w.propose(w.alice, alices, "scripted", "increment", obj{}), "count 1")
		wantSucceeded(t, w.propose(w.alice, alices, "scripted", "increment", obj{}), "count 2")
		wantSucceeded(t, w.propose(w.bob, bobs, "scripted", "increment", obj{}), "count 1")

		// A's call is cancelled while B's runs.
		release := make(chan struct{})
		m.On("tools/call", m.Hang(), m.After(release, c.increment))
		before := m.Count("tools/call")
		start := func(u *client, ses string) *pb.Call {
			call, err := u.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "scripted", Tool: "increment", Wait: durationpb.New(0)})
			must(t, err)
			return call
		}
		a := start(w.alice, alices)
		m.Wait(t, "tools/call", before+1)
		b := start(w.bob, bobs)
		m.Wait(t, "tools/call", before+2)
		_, err := w.alice.CancelCall(w.ctx, &pb.CancelCallRequest{CallId: a.GetCallId()})
		must(t, err)
		wantState(t, w.ended(w.alice, a), pb.Call_CANCELLED)
		close(release)
		wantSucceeded(t, w.ended(w.bob, b), "count 2")
		for _, r := range m.Seen("tools/call") {
			if r.Header.Get("Mcp-Session-Id") == "" {
				t.Error("a call without a session")
			}
		}
	})
}

// A write whose connection breaks is not sent again by itself, and an ordinary
// error of the tool is an answer.
func TestFO090_NothingRunsAWriteTwice(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d := startDemo(t, demo.Options{Faults: map[string]demo.Fault{demo.CreateDraftEvent: {DropAfter: true}}})
		s := w.httpServer("calendar", d.URL())
		w.review(s, nil, toolRule{name: demo.CreateDraftEvent, effect: "write", consent: "none"})
		ses := w.session(w.alice)
		call := w.propose(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("once"))
		wantState(t, call, pb.Call_UNCERTAIN)
		if d.Arrivals(demo.CreateDraftEvent) != 1 || d.Executions(demo.CreateDraftEvent) != 1 || len(call.GetAttempts()) != 1 ||
			call.GetAttempts()[0].GetPhase() != pb.Call_Attempt_MAYBE_SENT {
			t.Errorf("%d arrivals, %d executions, attempts %v", d.Arrivals(demo.CreateDraftEvent), d.Executions(demo.CreateDraftEvent), call.GetAttempts())
		}

		// With an idempotency key that the contract trusts it may be repeated, and
		// takes effect once.
		w.review(s, nil, toolRule{name: demo.CreateDraftEvent, effect: "write", consent: "none", more: obj{"idempotency": obj{"argument": "requestId"}, "retry": obj{"max": 2}}})
		d.SetFault(demo.CreateDraftEvent, demo.Fault{DropAfter: true, Times: 1})
		call = w.ended(w.alice, w.propose(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("again")))
		wantState(t, call, pb.Call_SUCCEEDED)
		if d.Executions(demo.CreateDraftEvent) != 2 || d.Arrivals(demo.CreateDraftEvent) != 3 || len(call.GetAttempts()) != 2 {
			t.Errorf("%d executions, %d arrivals, attempts %v", d.Executions(demo.CreateDraftEvent), d.Arrivals(demo.CreateDraftEvent), call.GetAttempts())
		}

		m, s := w.scripted(t, mcptest.Modern, plainTool, mcptest.Error(-32602, "Invalid params: no such order", ""))
		w.review(s, nil, toolRule{name: "act", effect: "write", consent: "none"})
		call = w.propose(w.alice, w.session(w.alice, "scripted"), "scripted", "act", obj{})
		wantState(t, call, pb.Call_FAILED)
		if call.GetError().GetLayer() != pb.Call_Error_PROTOCOL || !strings.Contains(call.GetError().GetMessage(), "no such order") || m.Count("tools/call") != 1 {
			t.Errorf("%v after %d calls", call.GetError(), m.Count("tools/call"))
		}
		w.verified()
	})
}

// Many users of a server that is down share its back-off.
func TestFO091_ReconnectStorm(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		var mu sync.Mutex
		dials := 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				mu.Lock()
				dials++
				mu.Unlock()
				_ = c.Close()
			}
		}()
		stop := sync.OnceFunc(func() { _ = l.Close(); <-done })
		t.Cleanup(stop)
		s := w.httpServer("scripted", "http://"+l.Addr().String()+"/mcp")
		w.activate("scripted", &pb.CreateContractRequest{Server: "scripted", Source: &pb.CreateContractRequest_Contract{Contract: raw(obj{
			"server": "scripted", "transport": "http", "origin": s.GetOrigin(), "protocol": obj{"versions": []string{"2026-07-28", "2025-11-25"}},
			"tools": []obj{{"name": "act", "definition": "any", "effect": "read"}}})}})
		const users, calls = 40, 5
		var wg sync.WaitGroup
		for i := range users {
			wg.Go(func() {
				u := w.user(fmt.Sprintf("user-%d", i))
				ses, err := u.OpenSession(w.ctx, &pb.OpenSessionRequest{Servers: []string{"scripted"}})
				if err != nil {
					t.Error(err)
					return
				}
				for range calls {
					_, _ = u.ListTools(w.ctx, &pb.ListToolsRequest{SessionId: ses.GetSessionId()})
					call, err := u.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses.GetSessionId(), Server: "scripted", Tool: "act", Wait: durationpb.New(0)})
					if err == nil && call.GetState() == pb.Call_SUCCEEDED {
						t.Error("a call to a server that is down succeeded")
					}
				}
			})
		}
		wg.Wait()
		stop()
		mu.Lock()
		defer mu.Unlock()
		// Those who come at the same moment as the first failure may each try once.
		if dials == 0 || dials > 3*users {
			t.Errorf("%d connections for %d users and %d requests", dials, users, users*calls*2)
		}
		// It comes back at the same address.
		again, err := net.Listen("tcp", l.Addr().String())
		must(t, err)
		m := mcptest.New(t, mcptest.Modern)
		m.On("tools/list", mcptest.Result(`{"resultType":"complete","tools":`+plainTool+`}`))
		front := &http.Server{Handler: passTo(m.URL)}
		go func() { _ = front.Serve(again) }()
		t.Cleanup(func() { _ = front.Close() })
		for i := range 3 {
			u := w.user(fmt.Sprintf("user-%d", i))
			ses := w.session(u, "scripted")
			w.until("a user works again", func() bool {
				call, err := u.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "scripted", Tool: "act"})
				return err == nil && call.GetState() == pb.Call_SUCCEEDED
			})
		}
	})
}

// passTo passes POSTs on to a URL as they are.
func passTo(url string) http.Handler {
	rt := &http.Transport{DisableKeepAlives: true}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		out, err := http.NewRequestWithContext(r.Context(), r.Method, url, r.Body)
		if err != nil {
			return
		}
		out.Header, out.ContentLength = r.Header.Clone(), r.ContentLength
		res, err := rt.RoundTrip(out)
		if err != nil {
			http.Error(w, "gone", http.StatusBadGateway)
			return
		}
		defer func() { _ = res.Body.Close() }()
		for k, v := range res.Header {
			w.Header()[k] = v
		}
		w.WriteHeader(res.StatusCode)
		_, _ = io.Copy(w, res.Body) // the caller may be gone
	})
}

// A server that goes down and comes back is usable after every time.
func TestFO092_NoOutageIsForEver(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d, err := demo.Start(demo.Options{})
		must(t, err)
		address := strings.TrimPrefix(d.Origin(), "http://")
		w.calendar(d)
		ses := w.session(w.alice)
		for range 10 {
			must(t, d.Close())
			call, err := w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "calendar", Tool: demo.GetAvailability, Arguments: raw(week), Wait: durationpb.New(0)})
			if err == nil {
				call = w.ended(w.alice, call)
				if call.GetState() != pb.Call_FAILED || call.GetError().GetLayer() != pb.Call_Error_TRANSPORT {
					t.Errorf("a call to a server that is down is %s: %v", call.GetState(), call.GetError())
				}
			}
			w.until("the server starts at its address", func() bool {
				d, err = demo.Start(demo.Options{Address: address})
				return err == nil
			})
			w.until("it is usable again", func() bool {
				call, err := w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "calendar", Tool: demo.GetAvailability, Arguments: raw(week)})
				return err == nil && call.GetState() == pb.Call_SUCCEEDED
			})
		}
		must(t, d.Close())
		w.verified()
	})
}

// No address that a tenant gives or a server answers leads inward.
func TestFO122_NoWayInward(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.wantNoTrace(t, func() {
			for _, url := range []string{"file:///etc/passwd", "ftp://127.0.0.1/", "gopher://127.0.0.1/", "http://user:pass@127.0.0.1/mcp", "http://", "//127.0.0.1/mcp", "/mcp", "http://127.0.0.1/mcp#x"} {
				_, err := w.admin.CreateServer(w.ctx, &pb.CreateServerRequest{Name: "inner", Transport: &pb.CreateServerRequest_Http{Http: &pb.Server_Http{Url: url}}})
				wantField(t, err, "http.url")
			}
		})
		// Allowed to be registered or not, nothing is sent there; and what the answer
		// says does not depend on whether something listens.
		answers := map[string]bool{}
		for i, url := range []string{"http://169.254.169.254/latest/meta-data", "https://169.254.169.254/", "https://10.0.0.5/mcp", "https://192.168.1.1/mcp",
			"https://[::1]:8080/mcp", "https://[fe80::1]/mcp", "https://[::ffff:10.0.0.5]/mcp", "https://0.0.0.0/mcp", "https://100.64.0.1/mcp",
			"http://2130706433/mcp", "http://0x7f.1/mcp", "http://127.1/mcp"} {
			name := fmt.Sprintf("inner-%d", i)
			_, err := w.admin.CreateServer(w.ctx, &pb.CreateServerRequest{Name: name, Transport: &pb.CreateServerRequest_Http{Http: &pb.Server_Http{Url: url}}})
			if err != nil {
				wantField(t, err, "http.url")
				continue
			}
			p, err := w.admin.ProbeServer(w.ctx, &pb.ProbeServerRequest{Server: name})
			must(t, err)
			if p.GetReachable() {
				t.Errorf("%s was reached", url)
			}
			answers[p.GetFailure().GetCode()] = true
		}
		if len(answers) > 1 {
			t.Errorf("the answers tell addresses apart: %v", answers)
		}

		inner := mcptest.New(t, mcptest.Modern)
		for i, location := range []string{inner.URL, "http://169.254.169.254/", "file:///etc/passwd"} {
			m := mcptest.New(t, mcptest.Modern)
			redirect := mcptest.WithHeader("Location", location, mcptest.Status(http.StatusTemporaryRedirect, "", ""))
			for _, method := range []string{"server/discover", "initialize", "tools/list", "GET"} {
				m.On(method, redirect)
			}
			name := fmt.Sprintf("moved-%d", i)
			w.httpServer(name, m.URL)
			p, err := w.admin.ProbeServer(w.ctx, &pb.ProbeServerRequest{Server: name})
			must(t, err)
			if p.GetReachable() {
				t.Errorf("the redirect to %s was followed", location)
			}
		}
		if inner.Count("server/discover")+inner.Count("initialize")+inner.Count("tools/list")+inner.Count("GET") != 0 {
			t.Error("a redirect led to another server")
		}
	})
}

// Only an admin names an address that is reached, and only as that of a server or
// of a webhook endpoint. The URI of a resource is a server's own name for it and is
// reached by nobody here.
func TestFO123_NoParameterNamesAnAddress(t *testing.T) {
	t.Parallel()
	allowed := map[string]bool{"bulkhead.v1.CreateServerRequest": true, "bulkhead.v1.UpdateServerRequest": true,
		"bulkhead.v1.CreateWebhookEndpointRequest": true, "bulkhead.v1.UpdateWebhookEndpointRequest": true,
		"bulkhead.v1.CreateResourceSubscriptionRequest": true}
	methods := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("bulkhead.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			for j := range f.Services().Get(i).Methods().Len() {
				in := f.Services().Get(i).Methods().Get(j).Input()
				methods++
				if path := addressField(in, map[protoreflect.FullName]bool{}); path != "" && !allowed[string(in.FullName())] {
					t.Errorf("%s takes an address: %s", in.FullName(), path)
				}
			}
		}
		return true
	})
	if methods < 20 {
		t.Errorf("only %d methods were looked at", methods)
	}
	w := newWorld(t, "grpc")
	for name, c := range map[string]*client{"alice": w.alice, "approver": w.approver, "auditor": w.auditor} {
		if _, err := c.CreateServer(w.ctx, &pb.CreateServerRequest{Name: "x", Transport: &pb.CreateServerRequest_Http{Http: &pb.Server_Http{Url: "http://127.0.0.1:1/"}}}); codeOf(err).String() != "PermissionDenied" {
			t.Errorf("%s registers a server: %v", name, err)
		}
		if _, err := c.CreateWebhookEndpoint(w.ctx, &pb.CreateWebhookEndpointRequest{Url: "http://127.0.0.1:1/", EventTypes: []string{"call.finished"}}); codeOf(err).String() != "PermissionDenied" {
			t.Errorf("%s makes a webhook endpoint: %v", name, err)
		}
	}
}

func addressField(d protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) string {
	if seen[d.FullName()] {
		return ""
	}
	seen[d.FullName()] = true
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		name := strings.ToLower(string(f.Name()))
		if strings.HasSuffix(name, "_id") {
			continue // one of our own
		}
		for _, word := range []string{"url", "uri", "endpoint", "metadata", "issuer", "origin", "host"} {
			if strings.Contains(name, word) {
				return string(f.FullName())
			}
		}
		if f.Message() != nil {
			if path := addressField(f.Message(), seen); path != "" {
				return path
			}
		}
	}
	return ""
}

// A cookie that a server sets is never another user's, another session's or
// another server's.
func TestFO051_CookiesDoNotCross(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		m, s := w.scripted(t, mcptest.Legacy, plainTool)
		c := &counter{counts: map[string]int{}}
		m.On("initialize", func(rw http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
			c.mu.Lock()
			n := c.sessions + 1
			c.mu.Unlock()
			rw.Header().Add("Set-Cookie", fmt.Sprintf("route=session-%d; Path=/", n))
			c.initialize(rw, raw, r)
		})
		m.On("tools/call", c.increment)
		w.review(s, nil, toolRule{name: "act", effect: "read"})
		for range 2 {
			for _, u := range []*client{w.alice, w.bob} {
				wantState(t, w.propose(u, w.session(u), "scripted", "act", obj{}), pb.Call_SUCCEEDED)
			}
		}
		for _, r := range m.Seen("tools/call") {
			if cookie := r.Header.Get("Cookie"); cookie != "" && cookie != "route="+r.Header.Get("Mcp-Session-Id") {
				t.Errorf("the session %s sends the cookie %q", r.Header.Get("Mcp-Session-Id"), cookie)
			}
		}
		for _, r := range m.Seen("initialize") {
			if cookie := r.Header.Get("Cookie"); cookie != "" {
				t.Errorf("a new session begins with the cookie %q", cookie)
			}
		}
	})
}
