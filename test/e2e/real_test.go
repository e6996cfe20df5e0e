package e2e

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

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
