package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
	"github.com/bulkhead-mcp/bulkhead/test/npm"
)

// stage is one server that the flow runs against.
type stage struct {
	server *pb.Server
	era    pb.Server_Era
	// offered are all tools of the contract; hidden one that it leaves out.
	offered []string
	hidden  string

	read     string
	readArgs any
	readHas  string // in the result

	write     string
	writeArgs func(n int) any // the nth write
	writeHas  string          // in the result
	// done tells whether the nth write took effect; nil when the server cannot tell.
	done func(n int) bool
}

const monday = "2026-12-07T"

func calendarStage(o demo.Options, era pb.Server_Era) func(*testing.T, *world) stage {
	return func(t *testing.T, w *world) stage {
		d := startDemo(t, o)
		s := w.calendar(d)
		return stage{server: s, era: era,
			offered: []string{demo.GetAvailability, demo.CreateDraftEvent, demo.FindDraft}, hidden: demo.SendInvitations,
			read: demo.GetAvailability, readArgs: obj{"from": monday + "09:00:00Z", "to": monday + "17:00:00Z"}, readHas: `"free"`,
			write: demo.CreateDraftEvent, writeArgs: func(n int) any {
				return obj{"title": "Review", "start": monday + "10:00:00Z", "end": monday + "11:00:00Z", "notes": string(rune('a' + n))}
			}, writeHas: `"status":"draft"`,
			done: func(n int) bool { return d.Executions(demo.CreateDraftEvent) > n }}
	}
}

func everythingStage(register func(t *testing.T, w *world) *pb.Server) func(*testing.T, *world) stage {
	return func(t *testing.T, w *world) stage {
		s := register(t, w)
		w.review(s, nil, toolRule{name: "echo", effect: "read"}, toolRule{name: "get-sum", effect: "write"})
		return stage{server: s, era: pb.Server_LEGACY, offered: []string{"echo", "get-sum"}, hidden: "get-env",
			read: "echo", readArgs: obj{"message": "grüße"}, readHas: "grüße",
			write: "get-sum", writeArgs: func(n int) any { return obj{"a": 40, "b": n} }, writeHas: "40"}
	}
}

func filesystemStage(t *testing.T, w *world) stage {
	s := w.stdioServer("files", "filesystem")
	dir := ownDir(t)
	within := `within(args.path, "` + dir + `")`
	w.review(s, nil, toolRule{name: "read_text_file", effect: "read", when: within},
		toolRule{name: "write_file", effect: "write", when: within})
	write(t, dir, "note.txt", "kept below the root")
	path := func(n int) string { return filepath.Join(dir, "written-"+string(rune('a'+n))) }
	return stage{server: s, era: pb.Server_LEGACY, offered: []string{"read_text_file", "write_file"}, hidden: "move_file",
		read: "read_text_file", readArgs: obj{"path": filepath.Join(dir, "note.txt")}, readHas: "kept below the root",
		write: "write_file", writeArgs: func(n int) any { return obj{"path": path(n), "content": "by the flow"} }, writeHas: "Successfully",
		done: func(n int) bool {
			b, err := os.ReadFile(path(n))
			return err == nil && string(b) == "by the flow"
		}}
}

// ownDir makes a directory of the test below the root of the runtime.
func ownDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(theService.root, "dir")
	must(t, err)
	return dir
}

// TestFlow is the main job: session, tools, a read, writes approved, cancelled
// and denied, the record; over both transports against every kind of server.
func TestFlow(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(*testing.T, *world) stage{
		"calendar-modern": calendarStage(demo.Options{}, pb.Server_MODERN),
		"calendar-legacy": calendarStage(demo.Options{LegacyOnly: true}, pb.Server_LEGACY),
		"everything-http": everythingStage(func(t *testing.T, w *world) *pb.Server {
			return w.httpServer("everything", npm.Everything(t))
		}),
		"everything-sse": everythingStage(func(t *testing.T, w *world) *pb.Server {
			return w.sseServer("everything", npm.EverythingSSE(t))
		}),
		"everything-stdio": everythingStage(func(_ *testing.T, w *world) *pb.Server {
			return w.stdioServer("everything", "everything")
		}),
		"filesystem-stdio": filesystemStage,
	} {
		for _, tr := range transports {
			t.Run(name+"/"+tr, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, tr)
				flow(t, w, setup(t, w))
			})
		}
	}
}

func flow(t *testing.T, w *world, s stage) {
	name := s.server.GetName()
	ses := w.session(w.alice, name)
	tools := w.tools(w.alice, ses)
	wantTools(t, tools, s)

	read := w.propose(w.alice, ses, name, s.read, s.readArgs)
	wantSucceeded(t, read, s.readHas)
	if read.GetEffect() != pb.Tool_READ || read.GetConsent() != nil || read.GetSource().GetDefinitionDigest() != tools[s.read].GetDefinitionDigest() {
		t.Errorf("the read: %v", read)
	}
	wantDenied(t, w.propose(w.alice, ses, name, s.hidden, obj{}), "definition")

	approved := approve(t, w, ses, s)
	cancelled := cancel(t, w, ses, s)
	denied := deny(t, w, ses, s)
	for n := range 3 {
		if s.done != nil && s.done(n) != (n == 0) {
			t.Errorf("write %d took effect: %v", n, s.done(n))
		}
	}
	wantRecord(t, w, ses, read, approved, cancelled, denied)
	wantConnection(t, w, ses, s)
	if _, err := w.alice.CloseSession(w.ctx, &pb.CloseSessionRequest{SessionId: ses}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.alice.ListTools(w.ctx, &pb.ListToolsRequest{SessionId: ses}); codeOf(err) != codes.FailedPrecondition {
		t.Errorf("tools of a closed session: %v", err)
	}
	wantDenied(t, w.propose(w.alice, ses, name, s.read, s.readArgs), "host")
	w.verified()
}

func wantTools(t *testing.T, tools map[string]*pb.Tool, s stage) {
	t.Helper()
	for _, n := range s.offered {
		tool := tools[n]
		if tool == nil || !tool.GetSource().GetUntrusted() || tool.GetServer() != s.server.GetName() ||
			!strings.HasPrefix(tool.GetDefinitionDigest(), "doc-1:sha256:") || !strings.Contains(string(tool.GetDefinition().GetRaw()), `"inputSchema"`) {
			t.Errorf("tool %s: %v", n, tool)
		}
	}
	if len(tools) != len(s.offered) {
		t.Errorf("%d tools, want %v", len(tools), s.offered)
	}
	if tools[s.write].GetConsent() != pb.Tool_CALL || tools[s.write].GetEffect() != pb.Tool_WRITE || tools[s.read].GetConsent() != pb.Tool_NONE {
		t.Errorf("rules: %v, %v", tools[s.write], tools[s.read])
	}
}

func wantSucceeded(t *testing.T, c *pb.Call, has string) {
	t.Helper()
	wantState(t, c, pb.Call_SUCCEEDED)
	if got := resultText(t, c); !strings.Contains(got, has) {
		t.Errorf("result %q lacks %q", got, has)
	}
	if !c.GetSource().GetUntrusted() || c.GetSource().GetServer() != c.GetServer() || c.GetSource().GetOrigin() == "" {
		t.Errorf("source %v", c.GetSource())
	}
	if c.GetRecorded() != pb.Call_DURABLE || !strings.HasPrefix(c.GetReceipt(), "aud_") || len(c.GetAttempts()) != 1 {
		t.Errorf("recorded %s, receipt %q, attempts %v", c.GetRecorded(), c.GetReceipt(), c.GetAttempts())
	}
}

func approve(t *testing.T, w *world, ses string, s stage) *pb.Call {
	t.Helper()
	call := w.ask(w.alice, ses, s.server.GetName(), s.write, s.writeArgs(0))
	if call.GetDecision().GetOutcome() != pb.Decision_ASK || call.GetDecision().GetFirstFailed() != "consent" || len(call.GetDecision().GetChecks()) != 17 {
		t.Errorf("decision %v", call.GetDecision())
	}
	id := call.GetConsent().GetConsentId()
	seen, err := w.approver.GetConsent(w.ctx, &pb.GetConsentRequest{ConsentId: id})
	must(t, err)
	if string(seen.GetArguments().GetRaw()) != string(call.GetArguments().GetRaw()) || seen.GetArgumentsDigest() != call.GetArgumentsDigest() ||
		seen.GetState() != pb.Consent_PENDING || seen.GetCallId() != call.GetCallId() || seen.GetDefinitionDigest() != call.GetDecision().GetDefinitionDigest() {
		t.Errorf("the question %v is not about the call %v", seen, call)
	}
	// Who proposes does not decide.
	if _, err := w.alice.DecideConsent(w.ctx, &pb.DecideConsentRequest{ConsentId: id, Decision: pb.DecideConsentRequest_APPROVE}); codeOf(err) != codes.PermissionDenied {
		t.Errorf("the proposer decides: %v", err)
	}
	if got := w.decide(call, pb.DecideConsentRequest_APPROVE); got.GetDecidedBy() == "" || got.GetHow() == "" {
		t.Errorf("decided: %v", got)
	}
	call = w.ended(w.alice, call)
	wantSucceeded(t, call, s.writeHas)
	if _, err := w.approver.DecideConsent(w.ctx, &pb.DecideConsentRequest{ConsentId: id, Decision: pb.DecideConsentRequest_DENY}); codeOf(err) != codes.Aborted {
		t.Errorf("a second decision: %v", err)
	}
	after, err := w.approver.GetConsent(w.ctx, &pb.GetConsentRequest{ConsentId: id})
	must(t, err)
	if after.GetState() != pb.Consent_CONSUMED {
		t.Errorf("the consent is %s, want CONSUMED", after.GetState())
	}
	return call
}

func cancel(t *testing.T, w *world, ses string, s stage) *pb.Call {
	t.Helper()
	call := w.ask(w.alice, ses, s.server.GetName(), s.write, s.writeArgs(1))
	got, err := w.alice.CancelCall(w.ctx, &pb.CancelCallRequest{CallId: call.GetCallId()})
	must(t, err)
	wantState(t, got, pb.Call_CANCELLED)
	if _, err := w.approver.DecideConsent(w.ctx, &pb.DecideConsentRequest{ConsentId: call.GetConsent().GetConsentId(),
		Decision: pb.DecideConsentRequest_APPROVE}); codeOf(err) != codes.Aborted {
		t.Errorf("approving a cancelled call: %v", err)
	}
	return got
}

func deny(t *testing.T, w *world, ses string, s stage) *pb.Call {
	t.Helper()
	call := w.ask(w.alice, ses, s.server.GetName(), s.write, s.writeArgs(2))
	w.decide(call, pb.DecideConsentRequest_DENY)
	call = w.ended(w.alice, call)
	wantState(t, call, pb.Call_DENIED)
	if call.GetDecision().GetReason() != "REFUSED" {
		t.Errorf("reason %q, want REFUSED", call.GetDecision().GetReason())
	}
	return call
}

// wantRecord wants the audit of each call to tell its story, and the list of
// calls to have them all.
func wantRecord(t *testing.T, w *world, ses string, read, approved, cancelled, denied *pb.Call) {
	t.Helper()
	for _, tt := range []struct {
		call  *pb.Call
		kinds []string
	}{
		{read, []string{"call.finished"}},
		{approved, []string{"call.proposed", "consent.requested", "consent.decided", "call.dispatched", "call.finished"}},
		{cancelled, []string{"call.proposed", "consent.requested", "call.cancelled"}},
		{denied, []string{"call.proposed", "consent.requested", "consent.decided", "call.denied"}},
	} {
		var kinds []string
		receipt := false
		for _, e := range w.entries(&pb.ListAuditEntriesRequest{CallId: tt.call.GetCallId()}) {
			kinds = append(kinds, e.GetKind())
			receipt = receipt || e.GetAuditEntryId() == tt.call.GetReceipt()
			if e.GetSubject() != "default|alice" || e.GetActor() == "" {
				t.Errorf("entry %v", e)
			}
		}
		for _, k := range tt.kinds {
			if !slices.Contains(kinds, k) {
				t.Errorf("the record of the call that is %s: %v lacks %s", tt.call.GetState(), kinds, k)
			}
		}
		if !receipt {
			t.Errorf("the receipt %q of the call that is %s is none of its entries", tt.call.GetReceipt(), tt.call.GetState())
		}
	}
	list, err := w.alice.ListCalls(w.ctx, &pb.ListCallsRequest{SessionId: ses})
	must(t, err)
	if len(list.GetCalls()) != 5 { // and the hidden tool
		t.Errorf("%d calls in the list", len(list.GetCalls()))
	}
}

func wantConnection(t *testing.T, w *world, ses string, s stage) {
	t.Helper()
	res, err := w.alice.ListConnections(w.ctx, &pb.ListConnectionsRequest{SessionId: ses})
	must(t, err)
	for _, c := range res.GetConnections() {
		// A list that is everybody's may have come over another connection.
		ready := slices.Contains([]pb.Connection_State{pb.Connection_INITIALIZED, pb.Connection_DISCOVERED, pb.Connection_CATALOGUED}, c.GetState())
		if c.GetServer() == s.server.GetName() && c.GetEra() == s.era && ready && c.GetProtocolVersion() != "" {
			return
		}
	}
	t.Errorf("no connection of the era %s: %v", s.era, res)
}
