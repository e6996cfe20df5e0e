package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
	"github.com/bulkhead-mcp/bulkhead/test/npm"
)

// realServer is a server that this project did not write, over one transport.
// What it has is listed in full, so that what it lacks is wanted to be absent.
type realServer struct {
	name     string
	register func(t *testing.T, r *realWorld) *pb.Server
	era      pb.Server_Era
	version  string
	// capabilities and tools are all that it declares and offers to a client that
	// declares nothing.
	capabilities, tools []string
	// try are its features, by name.
	try map[string]func(t *testing.T, r *realWorld)
}

// realWorld is a tenant with one real server.
type realWorld struct {
	*world
	server *pb.Server
	proxy  *proxy
}

var everythingTools = []string{"echo", "get-annotated-message", "get-env", "get-resource-links", "get-resource-reference",
	"get-structured-content", "get-sum", "get-tiny-image", "gzip-file-as-resource", "simulate-research-query", "toggle-simulated-logging",
	"toggle-subscriber-updates", "trigger-long-running-operation"}

var everythingCapabilities = []string{"completions", "logging", "prompts", "resources", "tasks", "tools"}

var modernTools = []string{"counts", "echo", "fail", "grow", "hold", "order", "region", "release", "sample", "where", "write-note"}

var modernCapabilities = []string{"completions", "logging", "prompts", "resources", "tools"}

func realServers() []realServer {
	stdio := func(runtime string) func(*testing.T, *realWorld) *pb.Server {
		return func(_ *testing.T, r *realWorld) *pb.Server { return r.stdioServer("real", runtime) }
	}
	return []realServer{
		{name: "everything over stdio", register: stdio("everything-wire"), era: pb.Server_LEGACY, version: "2025-11-25",
			capabilities: everythingCapabilities, tools: everythingTools, try: everythingFeatures(wireOfFile)},
		{name: "everything over HTTP", era: pb.Server_LEGACY, version: "2025-11-25",
			register: func(t *testing.T, r *realWorld) *pb.Server {
				r.proxy = startProxy(t, npm.Everything(t))
				return r.httpServer("real", r.proxy.url)
			},
			capabilities: everythingCapabilities, tools: everythingTools, try: everythingFeatures(wireOfProxy)},
		{name: "everything over SSE", era: pb.Server_LEGACY, version: "2025-11-25",
			register: func(t *testing.T, r *realWorld) *pb.Server {
				r.proxy = startProxy(t, npm.EverythingSSE(t))
				return r.sseServer("real", r.proxy.url)
			},
			capabilities: everythingCapabilities, tools: everythingTools, try: everythingFeatures(wireOfProxy)},
		{name: "filesystem over stdio", register: stdio("filesystem"), era: pb.Server_LEGACY, version: "2025-11-25",
			capabilities: []string{"tools"}, tools: []string{"create_directory", "directory_tree", "edit_file", "get_file_info",
				"list_allowed_directories", "list_directory", "list_directory_with_sizes", "move_file", "read_file", "read_media_file",
				"read_multiple_files", "read_text_file", "search_files", "write_file"},
			try: map[string]func(*testing.T, *realWorld){"call": filesystemCall}},
		{name: "memory over stdio", register: stdio("memory"), era: pb.Server_LEGACY, version: "2025-11-25",
			capabilities: []string{"resources", "tools"}, tools: []string{"add_observations", "create_entities", "create_relations", "delete_entities",
				"delete_observations", "delete_relations", "open_nodes", "read_graph", "search_nodes"},
			try: map[string]func(*testing.T, *realWorld){"call": memoryCall}},
		{name: "sequential thinking over stdio", register: stdio("thinking"), era: pb.Server_LEGACY, version: "2025-11-25",
			capabilities: []string{"tools"}, tools: []string{"sequentialthinking"},
			try: map[string]func(*testing.T, *realWorld){"call": thinkingCall}},
		{name: "modern over stdio", register: stdio("modern"), era: pb.Server_MODERN, version: "2026-07-28",
			capabilities: modernCapabilities, tools: modernTools, try: modernFeatures("nothing")},
		{name: "modern over HTTP", era: pb.Server_MODERN, version: "2026-07-28",
			register:     func(t *testing.T, r *realWorld) *pb.Server { return r.httpServer("real", npm.Modern(t)) },
			capabilities: modernCapabilities, tools: modernTools, try: modernFeatures("north")},
	}
}

// TestReal holds what servers in the wild do against the product: each is started
// once, listed, and every feature that it has is tried, one after the other.
func TestReal(t *testing.T) {
	t.Parallel()
	for _, s := range realServers() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			r := &realWorld{world: newWorld(t, "grpc")}
			r.server = s.register(t, r)
			offered(t, r, s)
			for _, feature := range slices.Sorted(maps.Keys(s.try)) {
				t.Run(feature, func(t *testing.T) { s.try[feature](t, r) })
			}
		})
	}
}

// offered wants the server to be and to offer what the table says.
func offered(t *testing.T, r *realWorld, s realServer) {
	t.Helper()
	probe, err := r.admin.ProbeServer(r.ctx, &pb.ProbeServerRequest{Server: "real"})
	must(t, err)
	if !probe.GetReachable() || probe.GetEra() != s.era || probe.GetProtocolVersion() != s.version {
		t.Fatalf("the server: %v", probe)
	}
	var declared map[string]json.RawMessage
	must(t, json.Unmarshal(probe.GetCapabilities().GetRaw(), &declared))
	if got := slices.Sorted(maps.Keys(declared)); !slices.Equal(got, s.capabilities) {
		t.Errorf("it declares %q, want %q", got, s.capabilities)
	}
	var tools []string
	for name, d := range r.definitions("real", false) {
		if d.GetKind() == pb.Definition_TOOL {
			tools = append(tools, name)
		}
		if d.GetQuarantine() != "" {
			t.Errorf("%s is set aside: %s", name, d.GetQuarantine())
		}
	}
	if slices.Sort(tools); !slices.Equal(tools, s.tools) {
		t.Errorf("it offers %q, want %q", tools, s.tools)
	}
}

// allow reviews a contract for the tools as writes that need no consent, and
// opens a session.
func (r *realWorld) allow(more obj, tools ...string) (session string) {
	r.t.Helper()
	var rules []toolRule
	for _, name := range tools {
		rules = append(rules, toolRule{name: name, effect: "write", consent: "none"})
	}
	r.review(r.server, more, rules...)
	return r.session(r.alice, "real")
}

// wireOfFile and wireOfProxy return what was sent to server-everything.
func wireOfFile(t *testing.T, _ *realWorld) string {
	b, err := os.ReadFile(theService.everythingWire)
	must(t, err)
	return string(b)
}

func wireOfProxy(_ *testing.T, r *realWorld) string { return r.proxy.sent() }

// proxy stands before a server over HTTP and keeps what is sent to it.
type proxy struct {
	url string

	mu     sync.Mutex
	bodies bytes.Buffer
}

func startProxy(t *testing.T, target string) *proxy {
	t.Helper()
	to, err := url.Parse(target)
	must(t, err)
	p := &proxy{}
	forward := &httputil.ReverseProxy{FlushInterval: -1, Transport: &http.Transport{},
		// Callers that go away are the rule here.
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
		Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: to.Scheme, Host: to.Host}) }}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the sender is gone
		}
		p.mu.Lock()
		p.bodies.Write(append(body, '\n'))
		p.mu.Unlock()
		r.Body = io.NopCloser(bytes.NewReader(body))
		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		front.CloseClientConnections() // streams for changes are open until then
		front.Close()
		forward.Transport.(*http.Transport).CloseIdleConnections()
	})
	p.url = front.URL + to.Path
	return p
}

func (p *proxy) sent() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bodies.String()
}

func everythingFeatures(sent func(*testing.T, *realWorld) string) map[string]func(*testing.T, *realWorld) {
	return map[string]func(*testing.T, *realWorld){
		"call": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "get-sum", "echo", "get-tiny-image", "get-structured-content")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "get-sum", obj{"a": 40, "b": 2}), "42")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "echo", obj{"message": "grüße"}), "grüße")
			image := r.propose(r.alice, ses, "real", "get-tiny-image", obj{})
			wantState(t, image, pb.Call_SUCCEEDED)
			if !strings.Contains(string(image.GetResult().GetRaw()), `"mimeType":"image/png"`) {
				t.Errorf("the image: %.200s", image.GetResult().GetRaw())
			}
			weather := r.propose(r.alice, ses, "real", "get-structured-content", obj{"location": "Chicago"})
			wantState(t, weather, pb.Call_SUCCEEDED)
			if !strings.Contains(string(weather.GetResult().GetRaw()), `"structuredContent":{`) {
				t.Errorf("the weather: %s", weather.GetResult().GetRaw())
			}
		},
		"cancel": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "trigger-long-running-operation")
			call := r.start(ses, "trigger-long-running-operation", obj{"duration": 60, "steps": 2})
			r.until("it was sent", func() bool { return strings.Contains(sent(t, r), `"trigger-long-running-operation"`) })
			ended, err := r.alice.CancelCall(r.ctx, &pb.CancelCallRequest{CallId: call.GetCallId()})
			must(t, err)
			wantState(t, r.ended(r.alice, ended), pb.Call_UNCERTAIN)
			r.until("the server is told", func() bool { return strings.Contains(sent(t, r), `"method":"notifications/cancelled"`) })
		},
	}
}

// start proposes a call that does not end by itself.
func (r *realWorld) start(session, tool string, args obj) *pb.Call {
	r.t.Helper()
	call, err := r.alice.CreateCall(r.ctx, &pb.CreateCallRequest{SessionId: session, Server: "real", Tool: tool, Arguments: raw(args),
		Wait: durationpb.New(0)})
	must(r.t, err)
	wantState(r.t, call, pb.Call_DISPATCHING)
	return call
}

func modernFeatures(header string) map[string]func(*testing.T, *realWorld) {
	return map[string]func(*testing.T, *realWorld){
		"call": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "echo", "region", "fail")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "echo", obj{"message": "grüße"}), "grüße")
			wantSucceeded(t, r.propose(r.alice, ses, "real", "region", obj{"region": "north"}), "north in the body, "+header+" in the header")
			failed := r.propose(r.alice, ses, "real", "fail", obj{})
			wantState(t, failed, pb.Call_FAILED)
			if failed.GetError().GetLayer() != pb.Call_Error_TOOL || !strings.Contains(string(failed.GetResult().GetRaw()), "it failed") {
				t.Errorf("the failure: %v", failed)
			}
		},
		"cancel": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "hold", "counts")
			call := r.start(ses, "hold", obj{})
			counts := func(want string) func() bool {
				return func() bool {
					return strings.Contains(resultText(t, r.propose(r.alice, ses, "real", "counts", obj{})), want)
				}
			}
			r.until("the server holds the call", counts("1 held, 0 cancelled"))
			ended, err := r.alice.CancelCall(r.ctx, &pb.CancelCallRequest{CallId: call.GetCallId()})
			must(t, err)
			wantState(t, r.ended(r.alice, ended), pb.Call_UNCERTAIN)
			r.until("the server noticed", counts("1 held, 1 cancelled"))
		},
		"list changed": func(t *testing.T, r *realWorld) {
			ses := r.allow(nil, "grow")
			r.until("the stream for changes is open", func() bool {
				res, err := r.alice.ListConnections(r.ctx, &pb.ListConnectionsRequest{SessionId: ses})
				must(t, err)
				return len(res.GetConnections()) == 1 && res.GetConnections()[0].GetWatching()
			})
			r.tools(r.alice, ses)
			wantSucceeded(t, r.propose(r.alice, ses, "real", "grow", obj{"name": "later"}), "grown")
			// The server lets its list be kept for ten minutes: only its notice makes the
			// next look a new one.
			r.until("the new tool is known", func() bool {
				r.tools(r.alice, ses)
				return r.definitions("real", false)["later"] != nil
			})
		},
	}
}

func filesystemCall(t *testing.T, r *realWorld) {
	dir := ownDir(t)
	write(t, dir, "note.txt", "kept below the root")
	ses := r.allow(nil, "read_text_file", "list_directory")
	wantSucceeded(t, r.propose(r.alice, ses, "real", "read_text_file", obj{"path": filepath.Join(dir, "note.txt")}), "kept below")
	wantSucceeded(t, r.propose(r.alice, ses, "real", "list_directory", obj{"path": dir}), "[FILE] note.txt")
	outside := r.propose(r.alice, ses, "real", "read_text_file", obj{"path": filepath.Join(theService.outside, "memory.jsonl")})
	wantState(t, outside, pb.Call_FAILED)
	if outside.GetError().GetLayer() != pb.Call_Error_TOOL || !strings.Contains(resultText(t, outside), "Access denied") {
		t.Errorf("outside of the root: %v", outside)
	}
}

func memoryCall(t *testing.T, r *realWorld) {
	ses := r.allow(nil, "create_entities", "search_nodes", "delete_entities")
	wantState(t, r.propose(r.alice, ses, "real", "create_entities",
		obj{"entities": []obj{{"name": "Bulkhead", "entityType": "host", "observations": []string{"keeps tenants apart"}}}}), pb.Call_SUCCEEDED)
	wantSucceeded(t, r.propose(r.alice, ses, "real", "search_nodes", obj{"query": "Bulkhead"}), "keeps tenants apart")
	wantState(t, r.propose(r.alice, ses, "real", "delete_entities", obj{"entityNames": []string{"Bulkhead"}}), pb.Call_SUCCEEDED)
	if found := r.propose(r.alice, ses, "real", "search_nodes", obj{"query": "Bulkhead"}); strings.Contains(resultText(t, found), "tenants") {
		t.Errorf("still there: %v", found)
	}
}

func thinkingCall(t *testing.T, r *realWorld) {
	ses := r.allow(nil, "sequentialthinking")
	for n := 1; n <= 2; n++ {
		call := r.propose(r.alice, ses, "real", "sequentialthinking", obj{"thought": "one thing after the other", "thoughtNumber": n,
			"totalThoughts": 2, "nextThoughtNeeded": n < 2})
		// The server counts the thoughts of its process, so the second finds the first.
		wantSucceeded(t, call, `"thoughtHistoryLength": `+string(rune('0'+n)))
	}
}
