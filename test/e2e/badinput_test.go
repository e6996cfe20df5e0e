package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// rows is what the database holds of a tenant, as its owner sees it: for each
// table the number of rows and a digest of them.
func (w *world) rows() map[string]string {
	w.t.Helper()
	pool := theService.DB.Owner(w.t)
	defer pool.Close()
	ctx := context.WithoutCancel(w.ctx)
	names, err := pool.Query(ctx, `SELECT table_name FROM information_schema.columns
		WHERE table_schema = 'public' AND column_name = 'tenant_id' ORDER BY table_name`)
	must(w.t, err)
	var tables []string
	for names.Next() {
		var n string
		must(w.t, names.Scan(&n))
		tables = append(tables, n)
	}
	must(w.t, names.Err())
	if len(tables) < 15 {
		w.t.Fatalf("only %v have tenants", tables)
	}
	out := map[string]string{}
	for _, table := range tables {
		var n int
		var sum string
		must(w.t, pool.QueryRow(ctx, `SELECT count(*), COALESCE(md5(string_agg(r::text, '|' ORDER BY r::text)), '') FROM `+table+` r
			WHERE tenant_id = $1`, w.tenantID).Scan(&n, &sum))
		switch table {
		case "audit_heads", "audit_checkpoints": // the sealer's own pace
		case "audit_entries":
			out[table] = fmt.Sprint(n) // the sealer numbers them
		default:
			out[table] = fmt.Sprint(n, " ", sum)
		}
	}
	return out
}

// wantNoTrace runs fn and wants the database to be as before.
func (w *world) wantNoTrace(t *testing.T, fn func()) {
	t.Helper()
	before := w.rows()
	fn()
	for table, now := range w.rows() {
		if before[table] != now {
			t.Errorf("table %s is %s, was %s", table, now, before[table])
		}
	}
}

// refusal is an error as REST tells it.
type refusal struct {
	Code    int
	Message string
	Details []struct {
		Type            string `json:"@type"`
		Reason          string
		FieldViolations []struct{ Field, Description string }
	}
}

func (r refusal) fields() (out []string) {
	for _, d := range r.Details {
		for _, v := range d.FieldViolations {
			out = append(out, v.Field)
		}
	}
	return out
}

// endpoint is one method that makes or changes something, with a good body.
type endpoint struct {
	name, verb, path, key string
	user                  bool
	body                  map[string]string // member: JSON
}

func (w *world) endpoints(ses string, call *pb.Call) []endpoint {
	calendar := "/v1/servers/calendar"
	contract := `{"server":"calendar"}`
	return []endpoint{
		{"CreateTenant", "POST", "/v1/tenants", theService.OperatorKey, false, map[string]string{"displayName": `"x"`, "requestId": `"r"`}},
		{"CreateKey", "POST", "/v1/keys", w.adminKey, false, map[string]string{"displayName": `"x"`, "role": `"SERVICE"`, "subjectSpace": `"s"`,
			"userPatterns": `["a*"]`, "servers": `["calendar"]`, "networks": `["10.0.0.0/8"]`, "mayDecide": `true`, "expireTime": `"2036-01-01T00:00:00Z"`, "requestId": `"r"`}},
		{"CreateServer", "POST", "/v1/servers", w.adminKey, false, map[string]string{"name": `"other"`, "displayName": `"x"`, "http": `{"url":"http://127.0.0.1:1/mcp"}`,
			"isolation": `"PER_USER"`, "authorization": `{"mode":"NONE"}`, "sharedStateAcknowledged": `false`, "requestId": `"r"`}},
		{"UpdateServer", "PATCH", calendar, w.adminKey, false, map[string]string{"displayName": `"x"`, "isolation": `"PER_SESSION"`, "http": `{"url":"http://127.0.0.1:1/mcp"}`}},
		{"ProbeServer", "POST", calendar + ":probe", w.adminKey, false, map[string]string{}},
		{"CreateContract", "POST", calendar + "/contracts", w.adminKey, false, map[string]string{"contract": contract, "requestId": `"r"`}},
		{"CreateContract/yaml", "POST", calendar + "/contracts", w.adminKey, false, map[string]string{"yaml": `"server: calendar"`}},
		{"ActivateContract", "POST", calendar + "/contracts/1:activate", w.adminKey, false, map[string]string{}},
		{"CheckContract", "POST", calendar + "/contracts:check", w.adminKey, false, map[string]string{"revision": `1`, "tool": `"get_availability"`, "arguments": `{}`,
			"subject": `{"user":"alice"}`}},
		{"OpenSession", "POST", "/v1/sessions", w.serviceKey, true, map[string]string{"servers": `["calendar"]`, "ttl": `"60s"`, "requestId": `"r"`}},
		{"CreateCall", "POST", "/v1/sessions/" + ses + "/calls", w.serviceKey, true, map[string]string{"server": `"calendar"`, "tool": `"create_draft_event"`,
			"arguments": `{"title":"x"}`, "requestId": `"r"`, "wait": `"1s"`}},
		{"CancelCall", "POST", "/v1/calls/" + call.GetCallId() + ":cancel", w.serviceKey, true, map[string]string{}},
		{"DecideConsent", "POST", "/v1/consents/" + call.GetConsent().GetConsentId() + ":decide", w.approverKey, false,
			map[string]string{"decision": `"APPROVE"`, "reason": `"x"`}},
		{"VerifyAuditEntries", "POST", "/v1/auditEntries:verify", w.auditorKey, false, map[string]string{"checkpoint": `{"tenantId":"x"}`}},
	}
}

// with is the body with one member replaced or added.
func (e endpoint) with(member, value string) string {
	all := maps.Clone(e.body)
	all[member] = value
	return join(all)
}

func join(members map[string]string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(members)) {
		parts = append(parts, fmt.Sprintf("%q:%s", k, members[k]))
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// bad is one bad body and what its refusal names.
type bad struct {
	name, body string
	field      string // named in the refusal, or a member of the field
	code       int
}

// breakages are the bad bodies that are made from any good one.
func (e endpoint) breakages() []bad {
	deep := strings.Repeat("[", 200) + strings.Repeat("]", 200)
	out := []bad{
		{"cut off", `{`, "", 400}, {"a list", `[]`, "", 400}, {"null", `null`, "", 400}, {"a text", `"x"`, "", 400},
		{"two values", `{} {}`, "", 400}, {"a comment", "{} // x", "", 400}, {"a bare NUL", "{}\x00", "", 400},
		{"a NUL in a name", e.with(`a`+"\\u0000", `1`), "", 400},
		{"unknown member", e.with("bogus", `1`), "bogus", 400},
		{"unknown deep member", e.with("bogus", deep), "", 400},
		{"10 MB", e.with("bogus", `"`+strings.Repeat("a", 10<<20)+`"`), "", 413},
		{"10 MB of space", strings.Repeat(" ", 10<<20), "", 413},
	}
	for member, good := range e.body {
		lower := strings.ToUpper(member[:1]) + member[1:]
		out = append(out,
			bad{member + " twice", strings.TrimSuffix(join(e.body), "}") + fmt.Sprintf(",%q:%s}", member, good), member, 400},
			bad{member + " miscased", e.with(lower, good), lower, 400},
			bad{member + " null", e.with(member, `null`), member, 400})
		for _, wrong := range []string{`7`, `"\u0001"`, `{"bogus":1}`, `[[]]`, `true`, `1e400`} {
			if right(member, wrong) {
				continue
			}
			out = append(out, bad{member + " as " + wrong, e.with(member, wrong), member, 400})
		}
		if !strings.HasPrefix(good, `"`) {
			continue
		}
		for name, text := range map[string]string{"NUL": `"a\u0000b"`, "lone surrogate": `"a\ud800b"`, "lone low surrogate": `"\udc00"`,
			"invalid UTF-8": "\"a\xffb\"", "overlong": "\"\xc0\xaf\"", "encoded surrogate": "\"\xed\xa0\x80\"", "raw control": "\"a\x01b\"", "bad escape": `"\x"`} {
			out = append(out, bad{member + " with " + name, e.with(member, text), member, 400})
		}
	}
	return out
}

// right says that the value is good for the member.
func right(member, value string) bool {
	switch member {
	case "mayDecide", "sharedStateAcknowledged":
		return value == `true`
	case "revision":
		return value == `7`
	case "arguments": // any object
		return value == `{"bogus":1}`
	case "reason", "displayName", "subjectSpace", "tool": // any text but NUL
		return value == `"\u0001"`
	}
	return false
}

// TestBadInput sends every method that makes or changes something bad bodies,
// wants a clear refusal that names the member, and nothing in the database.
func TestBadInput(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rest")
	d := startDemo(t, demo.Options{})
	w.calendar(d)
	ses := w.session(w.alice)
	call := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("Review"))
	tenants := func() (n int) {
		pool := theService.DB.Owner(t)
		defer pool.Close()
		must(t, pool.QueryRow(w.ctx, `SELECT count(*) FROM tenants WHERE display_name NOT LIKE 'Test%'`).Scan(&n))
		return n
	}
	before := tenants()
	for _, e := range w.endpoints(ses, call) {
		t.Run(e.name, func(t *testing.T) {
			w.wantNoTrace(t, func() {
				for _, b := range e.breakages() {
					w.wantRefused(t, e, b)
				}
			})
		})
	}
	if after := tenants(); after != before {
		t.Errorf("%d tenants more", after-before)
	}
	if n := d.Arrivals(demo.CreateDraftEvent); n != 0 {
		t.Errorf("%d calls arrived", n)
	}
}

func (w *world) wantRefused(t *testing.T, e endpoint, b bad) {
	t.Helper()
	var more []string
	if e.user {
		more = []string{"Bulkhead-User", "alice"}
	}
	code, answer := w.raw(e.verb, e.path, b.body, e.key, more...)
	var r refusal
	if code != b.code {
		t.Errorf("%s: HTTP %d, want %d: %.300s", b.name, code, b.code, answer)
		return
	}
	if err := json.Unmarshal([]byte(answer), &r); err != nil || r.Message == "" || len(r.Details) == 0 || len(answer) > 8192 {
		t.Errorf("%s: %v: %.300s", b.name, err, answer)
		return
	}
	if b.code == http.StatusRequestEntityTooLarge {
		return
	}
	named := slices.ContainsFunc(r.fields(), func(f string) bool {
		// The paths of a contract begin in it, whether it came as JSON or YAML.
		if strings.HasPrefix(e.name, "CreateContract") && (b.field == "contract" || b.field == "yaml") {
			return true
		}
		return f == b.field || strings.HasPrefix(f, b.field+".") || strings.HasPrefix(f, b.field+"[")
	})
	if len(r.fields()) == 0 || b.field != "" && !named {
		t.Errorf("%s: fields %q, want %q: %s", b.name, r.fields(), b.field, r.Message)
	}
	if strings.Contains(answer, e.key) {
		t.Errorf("%s: the key is in the answer", b.name)
	}
}

// badArguments are arguments of a call that make no call, with the path named.
var badArguments = map[string]struct{ json, field string }{
	"a name twice":           {`{"title":"a","title":"b"}`, "arguments.title"},
	"a name twice escaped":   {`{"title":"a","titl\u0065":"b"}`, "arguments.title"},
	"a deep name twice":      {`{"a":[{"b":{"c":1,"c":1}}]}`, "arguments.a[0].b.c"},
	"NUL":                    {`{"title":"a\u0000"}`, "arguments.title"},
	"NUL in a name":          {`{"a\u0000":1}`, "arguments"},
	"lone surrogate":         {`{"title":"\ud800"}`, "arguments.title"},
	"swapped surrogates":     {`{"title":"\udc00\ud800"}`, "arguments.title"},
	"lone surrogate in name": {`{"\udfff":1}`, "arguments"},
	"invalid UTF-8":          {"{\"title\":\"\xff\"}", "arguments.title"},
	"overlong NUL":           {"{\"title\":\"\xc0\x80\"}", "arguments.title"},
	"too deep":               {`{"a":` + strings.Repeat("[", 80) + strings.Repeat("]", 80) + `}`, ""},
	"a long number":          {`{"a":` + strings.Repeat("9", 200) + `}`, "arguments.a"},
	"a wide exponent":        {`{"a":1e999}`, "arguments.a"},
	"a list":                 {`[1]`, "arguments"},
	"a text":                 {`"x"`, "arguments"},
}

func TestBadArguments(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d := startDemo(t, demo.Options{})
		w.calendar(d)
		ses := w.session(w.alice)
		w.tools(w.alice, ses)
		w.wantNoTrace(t, func() {
			for name, b := range badArguments {
				t.Run(name, func(t *testing.T) {
					var err error
					if w.transport == "grpc" {
						_, err = w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "calendar", Tool: demo.CreateDraftEvent, Arguments: raw(b.json)})
					} else { // the client would mend some of it
						code, answer := w.raw("POST", "/v1/sessions/"+ses+"/calls", `{"server":"calendar","tool":"create_draft_event","arguments":`+b.json+`}`,
							w.serviceKey, "Bulkhead-User", "alice")
						err = restError(code, []byte(answer))
					}
					if b.field == "" {
						b.field = fieldsOf(err)[0]
						if !strings.HasPrefix(b.field, "arguments") {
							t.Errorf("field %q", b.field)
						}
					}
					wantField(t, err, b.field)
				})
			}
		})
	})
}

// TestOtherTenantsIDs uses every id of one tenant as another.
func TestOtherTenantsIDs(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d := startDemo(t, demo.Options{})
		s := w.calendar(d)
		ses := w.session(w.alice)
		call := w.ask(w.alice, ses, "calendar", demo.CreateDraftEvent, draft("Review"))
		keys, err := w.admin.ListKeys(w.ctx, &pb.ListKeysRequest{})
		must(t, err)
		id, cid, nid, kid := s.GetServerId(), call.GetCallId(), call.GetConsent().GetConsentId(), keys.GetKeys()[0].GetKeyId()

		o := newWorld(t, w.transport)
		o.calendar(startDemo(t, demo.Options{}))
		own := o.session(o.alice)
		o.tools(o.alice, own)
		check := func() {
			for name, fn := range map[string]func() error{
				"GetServer": func() error { _, err := o.admin.GetServer(o.ctx, &pb.GetServerRequest{Server: id}); return err },
				"UpdateServer": func() error {
					_, err := o.admin.UpdateServer(o.ctx, &pb.UpdateServerRequest{Server: id, DisplayName: new("x")})
					return err
				},
				"DeleteServer": func() error { _, err := o.admin.DeleteServer(o.ctx, &pb.DeleteServerRequest{Server: id}); return err },
				"ProbeServer":  func() error { _, err := o.admin.ProbeServer(o.ctx, &pb.ProbeServerRequest{Server: id}); return err },
				"ListDefinitions": func() error {
					_, err := o.admin.ListDefinitions(o.ctx, &pb.ListDefinitionsRequest{Server: id})
					return err
				},
				"ListContracts": func() error { _, err := o.admin.ListContracts(o.ctx, &pb.ListContractsRequest{Server: id}); return err },
				"GetContract": func() error {
					_, err := o.admin.GetContract(o.ctx, &pb.GetContractRequest{Server: id, Revision: 1})
					return err
				},
				"ActivateContract": func() error {
					_, err := o.admin.ActivateContract(o.ctx, &pb.ActivateContractRequest{Server: id, Revision: 1})
					return err
				},
				"CreateContract": func() error {
					_, err := o.admin.CreateContract(o.ctx, &pb.CreateContractRequest{Server: id, Source: &pb.CreateContractRequest_Yaml{
						Yaml: "server: calendar\ntransport: http\norigin: " + d.Origin() + "\nprotocol: {versions: [\"2026-07-28\"]}\n"}})
					return err
				},
				"CheckContract": func() error {
					_, err := o.admin.CheckContract(o.ctx, &pb.CheckContractRequest{Server: id, Tool: "get_availability"})
					return err
				},
				"DeleteKey":  func() error { _, err := o.admin.DeleteKey(o.ctx, &pb.DeleteKeyRequest{KeyId: kid}); return err },
				"GetSession": func() error { _, err := o.alice.GetSession(o.ctx, &pb.GetSessionRequest{SessionId: ses}); return err },
				"CloseSession": func() error {
					_, err := o.alice.CloseSession(o.ctx, &pb.CloseSessionRequest{SessionId: ses})
					return err
				},
				"ListConnections": func() error {
					_, err := o.alice.ListConnections(o.ctx, &pb.ListConnectionsRequest{SessionId: ses})
					return err
				},
				"ListTools":  func() error { _, err := o.alice.ListTools(o.ctx, &pb.ListToolsRequest{SessionId: ses}); return err },
				"ListCalls":  func() error { _, err := o.alice.ListCalls(o.ctx, &pb.ListCallsRequest{SessionId: ses}); return err },
				"GetCall":    func() error { _, err := o.alice.GetCall(o.ctx, &pb.GetCallRequest{CallId: cid}); return err },
				"CancelCall": func() error { _, err := o.alice.CancelCall(o.ctx, &pb.CancelCallRequest{CallId: cid}); return err },
				"CreateCall": func() error {
					_, err := o.alice.CreateCall(o.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "calendar", Tool: "get_availability"})
					return err
				},
				"CreateCall with their server": func() error {
					_, err := o.alice.CreateCall(o.ctx, &pb.CreateCallRequest{SessionId: own, Server: id, Tool: "get_availability"})
					return err
				},
				"GetConsent": func() error {
					_, err := o.approver.GetConsent(o.ctx, &pb.GetConsentRequest{ConsentId: nid})
					return err
				},
				"DecideConsent": func() error {
					_, err := o.approver.DecideConsent(o.ctx, &pb.DecideConsentRequest{ConsentId: nid, Decision: pb.DecideConsentRequest_APPROVE})
					return err
				},
			} {
				if err := fn(); codeOf(err) != codes.NotFound {
					t.Errorf("%s: %v, want NOT_FOUND", name, err)
				}
			}
			_, err := o.alice.OpenSession(o.ctx, &pb.OpenSessionRequest{Servers: []string{id}})
			wantField(t, err, "servers")
		}
		o.wantNoTrace(t, func() { w.wantNoTrace(t, check) })
		// Bob of the same tenant reaches nothing of Alice's either.
		for name, fn := range map[string]func() error{
			"GetSession": func() error { _, err := w.bob.GetSession(w.ctx, &pb.GetSessionRequest{SessionId: ses}); return err },
			"GetCall":    func() error { _, err := w.bob.GetCall(w.ctx, &pb.GetCallRequest{CallId: cid}); return err },
			"CancelCall": func() error { _, err := w.bob.CancelCall(w.ctx, &pb.CancelCallRequest{CallId: cid}); return err },
			"GetConsent": func() error { _, err := w.bob.GetConsent(w.ctx, &pb.GetConsentRequest{ConsentId: nid}); return err },
		} {
			if err := fn(); codeOf(err) != codes.NotFound {
				t.Errorf("bob: %s: %v, want NOT_FOUND", name, err)
			}
		}
	})
}

// TestBadContracts wants each broken rule of a contract to be named by its path.
func TestBadContracts(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d := startDemo(t, demo.Options{})
		s := w.calendar(d)
		tools := func(more string) string {
			return `{"server":"calendar","transport":"http","origin":"` + s.GetOrigin() + `","protocol":{"versions":["2026-07-28"]},"tools":[` +
				`{"name":"find_draft","definition":"any","effect":"read"},{"name":"create_draft_event","definition":"any","effect":"write"` + more + `}]}`
		}
		w.wantNoTrace(t, func() {
			for name, tt := range map[string]struct{ contract, field string }{
				"rule that does not parse":   {tools(`,"when":"args.title ="`), "tools[1].when"},
				"rule of an unknown name":    {tools(`,"when":"arguments.title == 'x'"`), "tools[1].when"},
				"rule that is no bool":       {tools(`,"when":"args.title.size()"`), "tools[1].when"},
				"rule that costs too much":   {tools(`,"when":"args.a.all(x, args.b.all(y, args.c.all(z, x == y && y == z)))"`), "tools[1].when"},
				"rule with an unclean root":  {tools(`,"when":"within(args.path, '/data/../etc')"`), "tools[1].when"},
				"unknown member":             {tools(`,"whenn":"true"`), "tools[1].whenn"},
				"miscased member":            {tools(`,"When":"true"`), "tools[1].When"},
				"member twice":               {tools(`,"when":"true","when":"false"`), ""},
				"effect of the wrong type":   {tools(`,"consent":1`), "tools[1].consent"},
				"a boolean for a number":     {tools(`,"retry":{"max":true}`), "tools[1].retry.max"},
				"record after the answer":    {strings.Replace(tools(""), `"tools"`, `"record":{"reads":"after_answer"},"tools"`, 1), "record.reads"},
				"another server's name":      {strings.Replace(tools(""), `"calendar"`, `"other"`, 1), "server"},
				"an origin with a path":      {strings.Replace(tools(""), s.GetOrigin(), s.GetOrigin()+"/x", 1), "origin"},
				"a timeout without an end":   {strings.Replace(tools(""), `"tools"`, `"limits":{"timeout":"inf"},"tools"`, 1), "limits.timeout"},
				"a scope twice":              {strings.Replace(tools(""), `"tools"`, `"scopes":["a","a"],"tools"`, 1), "scopes[1]"},
				"nothing":                    {`{}`, "server"},
				"status query to nowhere":    {tools(`,"status_query":{"tool":"nope","succeeded":"result.found"}`), "tools[1].status_query.tool"},
				"grows without consent rule": {tools(`,"consent":"always"`), "tools[1].consent"},
			} {
				for _, form := range []string{"contract", "yaml"} {
					in := &pb.CreateContractRequest{Server: "calendar", Source: &pb.CreateContractRequest_Yaml{Yaml: tt.contract}}
					if form == "contract" {
						in.Source = &pb.CreateContractRequest_Contract{Contract: raw(tt.contract)}
					}
					_, err := w.admin.CreateContract(w.ctx, in)
					if tt.field != "" {
						wantField(t, err, tt.field)
					} else if fields := fieldsOf(err); codeOf(err) != codes.InvalidArgument || !strings.Contains(fields[0], "tools[1].when") {
						t.Errorf("%s: %v, fields %v", name, err, fields)
					}
					if t.Failed() {
						t.Fatalf("%s as %s", name, form)
					}
				}
			}
		})
	})
}
