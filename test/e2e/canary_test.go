package e2e

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// canary is one secret and where it was put.
type canary struct {
	place, secret string
	// call says that it is part of a call, which its user sees, and those who see
	// the calls of the whole tenant. Nobody sees the others.
	call bool
}

// canaries plants secrets through one user of one server.
type canaries struct {
	server string
	all    []canary
}

func (k *canaries) plant(place string, call bool) string {
	c := canary{place: k.server + ": " + place, secret: "canary-" + rand.Text(), call: call}
	k.all = append(k.all, c)
	return c.secret
}

// nest is a server with an isolation mode that gives away secrets of the user who
// calls the tool "tell", in every part of an answer.
type nest struct {
	*canaries
	m         *mcptest.Server
	isolation pb.Server_Isolation
	modern    bool
	sessions  atomic.Int64
}

func (w *world) nest(t *testing.T, name string, isolation pb.Server_Isolation, version string) *nest {
	t.Helper()
	n := &nest{canaries: &canaries{server: name}, m: mcptest.New(t, version), isolation: isolation, modern: version == mcptest.Modern}
	n.m.Capabilities(`{"tools":{"listChanged":true},"resources":{},"logging":{}}`)
	cursor := n.plant("cursor", false)
	n.m.On("tools/list", func(rw http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		page := `{"resultType":"complete","tools":[{"name":"tell","inputSchema":{"type":"object"}}],"nextCursor":"` + cursor + `"}`
		if strings.Contains(r.Body, cursor) {
			page = `{"resultType":"complete","tools":[{"name":"say","inputSchema":{"type":"object"}}]}`
		}
		mcptest.WithHeader("X-Secret", cursor, mcptest.Result(page))(rw, raw, r)
	})
	if !n.modern {
		session := n.plant("session id", false)
		n.m.On("initialize", func(rw http.ResponseWriter, raw *http.Request, r *mcptest.Request) {

			mcptest.WithHeader("Mcp-Session-Id", fmt.Sprintf("%s-%d", session, n.sessions.Add(1)),
				mcptest.Result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{"listChanged":true},"resources":{},"logging":{}},"serverInfo":{"name":"nest","version":"1"}}`))(rw, raw, r)
		})
		n.m.On("logging/setLevel", mcptest.Result(`{}`))
	}
	result, header, cookie, event := n.plant("result", true), n.plant("header", false), n.plant("cookie", false), n.plant("event id", false)
	progress, log, failure, data := n.plant("progress", false), n.plant("log message", false), n.plant("error of a tool", true), n.plant("error of the protocol", true)
	content, state := n.plant("resource", true), n.plant("requestState", false)
	question := state // where nobody may be asked, nobody sees it
	if n.asks() {
		question = n.plant("question", true)
	}
	n.m.On("tools/call", func(rw http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		with := func(a mcptest.Answer) mcptest.Answer {
			return mcptest.WithHeader("X-Secret", header, mcptest.WithHeader("Set-Cookie", "s="+cookie, a))
		}
		switch {
		case strings.Contains(r.Body, `"how":"fail"`):
			with(mcptest.Result(`{"resultType":"complete","isError":true,"content":[{"type":"text","text":"`+failure+`"}]}`))(rw, raw, r)
		case strings.Contains(r.Body, `"how":"refuse"`):
			with(mcptest.Error(-32000, data, `{"why":"`+data+`"}`))(rw, raw, r)
		case strings.Contains(r.Body, `"inputResponses"`):
			if !strings.Contains(r.Body, state) {
				w.t.Error("the state did not come back")
			}
			with(mcptest.Result(`{"resultType":"complete","content":[{"type":"text","text":"thanks"}]}`))(rw, raw, r)
		case strings.Contains(r.Body, `"how":"ask"`):
			with(mcptest.Result(`{"resultType":"input_required","requestState":"`+state+`","inputRequests":{"a":{"method":"elicitation/create","params":{"mode":"form","message":"`+question+
				`","requestedSchema":{"type":"object","properties":{"note":{"type":"string"}}}}}}}`))(rw, raw, r)
		case strings.Contains(r.Body, `"how":"plainly"`):
			with(mcptest.Result(`{"resultType":"complete","content":[{"type":"text","text":"nothing"}]}`))(rw, raw, r)
		default:
			with(mcptest.Stream("id: "+event+"\n"+mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"`+progress+`","progress":1,"message":"`+progress+`"}}`),
				mcptest.Event(`{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"error","data":"`+log+`"}}`),
				mcptest.ResultEvent(`{"resultType":"complete","content":[{"type":"text","text":"`+result+`"}],"structuredContent":{"a":"`+result+`"},"_meta":{"example.com/x":"`+result+`"}}`)))(rw, raw, r)
		}
	})
	n.m.On("resources/list", mcptest.Result(`{"resultType":"complete","resources":[]}`))
	n.m.On("resources/templates/list", mcptest.Result(`{"resultType":"complete","resourceTemplates":[]}`))
	n.m.On("resources/read", func(rw http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		text := content
		if strings.Contains(r.Body, "nest://a/plain") {
			text = "nothing"
		}
		mcptest.Result(`{"resultType":"complete","contents":[{"uri":"nest://a/x","text":"`+text+`"}]}`)(rw, raw, r)
	})
	yes := isolation == pb.Server_PER_TENANT
	s, err := w.admin.CreateServer(w.ctx, &pb.CreateServerRequest{Name: name, Isolation: isolation, SharedStateAcknowledged: yes,
		Transport: &pb.CreateServerRequest_Http{Http: &pb.Server_Http{Url: n.m.URL}}})
	must(t, err)
	w.review(s, obj{"methods": []string{"tools/list", "tools/call", "resources/list", "resources/templates/list", "resources/read"},
		"resources": []obj{{"uri": "nest://a/**"}}, "reverse": obj{"elicitation": obj{"form": true}}, "limits": obj{"definition_age": obj{"read": "15m"}}},
		toolRule{name: "tell", effect: "read"}, toolRule{name: "say", effect: "write", consent: "call"})
	return n
}

// says makes one user say and hear every secret of a nest.
func (w *world) says(u *client, n *nest, session string) []*pb.Call {
	w.t.Helper()
	calls := []*pb.Call{w.propose(u, session, n.server, "tell", obj{"x": n.plant("argument", true)})}
	wantState(w.t, calls[0], pb.Call_SUCCEEDED)
	for _, how := range []string{"fail", "refuse"} {
		calls = append(calls, w.propose(u, session, n.server, "tell", obj{"how": how}))
		wantState(w.t, calls[len(calls)-1], pb.Call_FAILED)
	}
	if n.modern {
		calls = append(calls, w.asked(u, n, w.propose(u, session, n.server, "tell", obj{"how": "ask"})))
	}
	read, err := u.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: session, Server: n.server, Resource: "nest://a/secret/" + n.plant("URI", true), Wait: durationpb.New(patience / 3)})
	must(w.t, err)
	wantState(w.t, read, pb.Call_SUCCEEDED)
	return append(calls, read, w.ask(u, session, n.server, "say", obj{"x": n.plant("argument of a consent", true)}))
}

// asks reports whether the server may ask its user.
func (n *nest) asks() bool { return n.modern && n.isolation != pb.Server_PER_TENANT }

// asked answers what a server asks, where it may ask; a question on a connection
// that all users share reaches nobody.
func (w *world) asked(u *client, n *nest, call *pb.Call) *pb.Call {
	w.t.Helper()
	if !n.asks() {
		wantState(w.t, call, pb.Call_FAILED)
		return call
	}
	wantState(w.t, call, pb.Call_INPUT_REQUIRED)
	asked, err := u.ListInteractions(w.ctx, &pb.ListInteractionsRequest{CallId: call.GetCallId()})
	must(w.t, err)
	_, err = u.RespondInteraction(w.ctx, &pb.RespondInteractionRequest{CallId: call.GetCallId(), InteractionId: asked.GetInteractions()[0].GetInteractionId(),
		Action: pb.RespondInteractionRequest_ACCEPT, Content: raw(obj{"note": n.plant("answer", false)})})
	must(w.t, err)
	call = w.ended(u, call)
	wantState(w.t, call, pb.Call_SUCCEEDED)
	return call
}

// path is one way by which somebody looks at something.
type path struct {
	name string
	look func() (proto.Message, error)
	// own says that the calls of the user who planted the secrets are seen there.
	own bool
}

// told is everything that a path tells, errors with all their details too.
func (p path) told() string {
	m, err := p.look()
	if err != nil {
		return prototext.Format(status.Convert(err).Proto())
	}
	return prototext.Format(m)
}

// ways are the paths of one caller; mine are the caller's own session and calls.
func (w *world) ways(who string, c *client, session string, theirs []string, calls []*pb.Call, own bool) (out []path) {
	add := func(name string, own bool, look func() (proto.Message, error)) {
		out = append(out, path{who + " " + name, look, own})
	}
	for _, ses := range append([]string{session}, theirs...) {
		add("session", false, func() (proto.Message, error) { return c.GetSession(w.ctx, &pb.GetSessionRequest{SessionId: ses}) })
		add("connections", false, func() (proto.Message, error) {
			return c.ListConnections(w.ctx, &pb.ListConnectionsRequest{SessionId: ses})
		})
		add("tools", false, func() (proto.Message, error) { return c.ListTools(w.ctx, &pb.ListToolsRequest{SessionId: ses}) })
		add("resources", false, func() (proto.Message, error) {
			return c.ListResources(w.ctx, &pb.ListResourcesRequest{SessionId: ses})
		})
		add("calls of the session", own, func() (proto.Message, error) { return c.ListCalls(w.ctx, &pb.ListCallsRequest{SessionId: ses}) })
	}
	for _, call := range calls {
		add("call", own, func() (proto.Message, error) { return c.GetCall(w.ctx, &pb.GetCallRequest{CallId: call.GetCallId()}) })
		add("interactions", own, func() (proto.Message, error) {
			return c.ListInteractions(w.ctx, &pb.ListInteractionsRequest{CallId: call.GetCallId()})
		})
		add("consent", own, func() (proto.Message, error) {
			return c.GetConsent(w.ctx, &pb.GetConsentRequest{ConsentId: call.GetConsent().GetConsentId()})
		})
	}
	add("sessions", false, func() (proto.Message, error) { return c.ListSessions(w.ctx, &pb.ListSessionsRequest{}) })
	add("calls", own, func() (proto.Message, error) { return c.ListCalls(w.ctx, &pb.ListCallsRequest{}) })
	add("consents", own, func() (proto.Message, error) { return c.ListConsents(w.ctx, &pb.ListConsentsRequest{}) })
	add("servers", false, func() (proto.Message, error) { return c.ListServers(w.ctx, &pb.ListServersRequest{}) })
	return out
}

// office are the paths of those who run a tenant, beside their calls.
func (w *world) office(who string, admin, auditor *client, servers []string) (out []path) {
	for _, s := range servers {
		out = append(out,
			path{who + " server", func() (proto.Message, error) { return admin.GetServer(w.ctx, &pb.GetServerRequest{Server: s}) }, false},
			path{who + " definitions", func() (proto.Message, error) {
				return admin.ListDefinitions(w.ctx, &pb.ListDefinitionsRequest{Server: s})
			}, false},
			path{who + " probe", func() (proto.Message, error) { return admin.ProbeServer(w.ctx, &pb.ProbeServerRequest{Server: s}) }, false},
			path{who + " contracts", func() (proto.Message, error) {
				return admin.ListContracts(w.ctx, &pb.ListContractsRequest{Server: s})
			}, false})
	}
	return append(out,
		path{who + " keys", func() (proto.Message, error) { return admin.ListKeys(w.ctx, &pb.ListKeysRequest{}) }, false},
		path{who + " audit", func() (proto.Message, error) {
			return auditor.ListAuditEntries(w.ctx, &pb.ListAuditEntriesRequest{PageSize: 500})
		}, false},
		path{who + " verification", func() (proto.Message, error) {
			return auditor.VerifyAuditEntries(w.ctx, &pb.VerifyAuditEntriesRequest{})
		}, false})
}

// A secret of one user, put into every part of what goes to and comes from servers
// of every isolation mode, is found on no path but those that show the user's own
// calls: not by another user, session or tenant, not by who runs the tenant, in no
// list, log, metric, error, cache or record, nor at a server on another's behalf.
func TestCanary_NothingOfOneUserIsSeenByAnother(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		var nests []*nest
		var servers []string
		for name, isolation := range map[string]pb.Server_Isolation{"user": pb.Server_PER_USER, "session": pb.Server_PER_SESSION, "tenant": pb.Server_PER_TENANT} {
			nests = append(nests, w.nest(t, name+"-legacy", isolation, mcptest.Legacy), w.nest(t, name+"-modern", isolation, mcptest.Modern))
			servers = append(servers, name+"-legacy", name+"-modern")
		}
		alices, alices2, bobs := w.session(w.alice), w.session(w.alice), w.session(w.bob)
		var planted []*pb.Call
		for _, n := range nests {
			planted = append(planted, w.says(w.alice, n, alices)...)
		}
		// Then the others do what they may.
		w.wantCleanWire(t, nests, w.bob, bobs, pb.Server_PER_USER, pb.Server_PER_SESSION)
		w.wantCleanWire(t, nests, w.alice, alices2, pb.Server_PER_SESSION)
		other := newWorld(t, w.transport)
		others := other.session(other.alice)
		shown := w.ways("alice", w.alice, alices, nil, planted, true)
		ways := slices.Concat(shown,
			w.ways("alice in another session", w.alice, alices2, nil, nil, true),
			w.ways("bob", w.bob, bobs, []string{alices, alices2}, planted, false),
			w.ways("the admin", w.admin, alices, []string{bobs}, planted, true),
			w.ways("another tenant's user", other.alice, others, []string{alices, bobs}, planted, false),
			w.ways("another tenant's admin", other.admin, others, []string{alices}, planted, false),
			w.office("the tenant's", w.admin, w.auditor, servers),
			w.office("another tenant's", other.admin, other.auditor, servers))
		found := map[string]bool{}
		for _, p := range ways {
			text := p.told()
			for _, n := range nests {
				for _, c := range n.all {
					if !strings.Contains(text, c.secret) {
						continue
					}
					// What was read is in the record as what was called is.
					audited := p.name == "the tenant's audit" && strings.HasSuffix(c.place, "URI")
					if found[c.place] = true; !c.call || !p.own && !audited {
						t.Errorf("%s sees the %s", p.name, c.place)
					}
				}
			}
		}
		w.wantCanariesNowhere(t, nests, found)
	})
}

// wantCleanWire lets somebody use all nests and wants none of the secrets to go
// with that. In the modes apart the session at the server is one of its own.
func (w *world) wantCleanWire(t *testing.T, nests []*nest, u *client, session string, apart ...pb.Server_Isolation) {
	t.Helper()
	for _, n := range nests {
		n.m.Reset()
		wantState(t, w.propose(u, session, n.server, "tell", obj{"how": "plainly"}), pb.Call_SUCCEEDED)
		read, err := u.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: session, Server: n.server, Resource: "nest://a/plain"})
		must(t, err)
		wantState(t, read, pb.Call_SUCCEEDED)
		if n.m.Count("tools/call") != 1 || n.m.Count("resources/read") != 1 {
			t.Fatalf("%s saw %d calls", n.server, n.m.Count("tools/call"))
		}
		for _, r := range n.m.Requests() {
			for _, c := range n.all {
				header := fmt.Sprint(r.Header)
				switch {
				case strings.HasSuffix(c.place, "session id"): // the first one was the planter's
					if slices.Contains(apart, n.isolation) && strings.Contains(header, c.secret+"-1]") {
						t.Errorf("%s for another goes into the %s", r.Method, c.place)
					}
				case strings.HasSuffix(c.place, "cursor"): // whoever lists gets it anew
				case strings.Contains(r.Body, c.secret) || strings.Contains(header, c.secret):
					t.Errorf("%s for another carries the %s", r.Method, c.place)
				}
			}
		}
	}
}

// wantCanariesNowhere looks where no caller does, and wants those that belong to
// calls to have been found by who may see them.
func (w *world) wantCanariesNowhere(t *testing.T, nests []*nest, found map[string]bool) {
	t.Helper()
	_, _, metrics, err := send(w.ctx, w.http, "GET", theService.Metrics+"/metrics", nil, nil)
	must(t, err)
	stored := tablesWith(t, nests)
	for _, n := range nests {
		for _, c := range n.all {
			switch {
			case strings.Contains(string(metrics), c.secret):
				t.Errorf("the metrics hold the %s", c.place)
			case theService.Logged(c.secret):
				t.Errorf("the log holds the %s", c.place)
			case theService.Redis.Holds(t, c.secret):
				t.Errorf("Redis holds the %s", c.place)
			case c.call && !found[c.place]:
				t.Errorf("nobody sees the %s, not even its user", c.place)
			}
			for _, where := range stored[c.secret] {
				if !c.call || !slices.Contains([]string{"calls.arguments", "calls.result", "calls.error", "calls.name", "consents.name"}, where) {
					t.Errorf("%s holds the %s in the clear", where, c.place)
				}
			}
		}
	}
}

// tablesWith names the columns that hold each secret in the clear.
func tablesWith(t *testing.T, nests []*nest) map[string][]string {
	t.Helper()
	db, err := pgx.Connect(t.Context(), theService.DB.OwnerURL)
	must(t, err)
	defer func() { _ = db.Close(t.Context()) }()
	rows, err := db.Query(t.Context(), `SELECT c.table_name || '.' || c.column_name, c.table_name, c.column_name, c.data_type FROM information_schema.columns c
		JOIN information_schema.tables t USING (table_schema, table_name)
		WHERE c.table_schema = 'public' AND t.table_type = 'BASE TABLE' AND c.data_type IN ('text', 'bytea', 'ARRAY', 'jsonb', 'json')`)
	must(t, err)
	type column struct{ Full, Table, Name, Type string }
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[column])
	must(t, err)
	if len(columns) < 50 {
		t.Fatalf("only %d columns were looked at", len(columns))
	}
	var secrets []string
	for _, n := range nests {
		for _, c := range n.all {
			secrets = append(secrets, c.secret)
		}
	}
	out := map[string][]string{}
	for _, c := range columns {
		name, table := pgx.Identifier{c.Name}.Sanitize(), pgx.Identifier{c.Table}.Sanitize()
		holds := `position(s in ` + name + `::text) > 0`
		if c.Type == "bytea" {
			holds = `position(convert_to(s, 'UTF8') in ` + name + `) > 0`
		}
		rows, err := db.Query(t.Context(), `SELECT DISTINCT s FROM unnest($1::text[]) s, `+table+` WHERE `+name+` IS NOT NULL AND `+holds, secrets)
		must(t, err)
		hits, err := pgx.CollectRows(rows, pgx.RowTo[string])
		must(t, err)
		for _, s := range hits {
			out[s] = append(out[s], c.Full)
		}
	}
	if raw, err := json.Marshal(out); err != nil || len(out) == 0 {
		t.Fatalf("no secret is stored at all, so nothing was looked at: %s %v", raw, err)
	}
	return out
}
