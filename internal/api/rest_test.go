package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestREST_BadInput(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const keys = "/v1/keys"
	const id = "key_00000000000000000000000000"
	for name, c := range map[string]struct {
		method, path, body string
		headers            []string
		code               int
		reason, field      string
	}{
		"no credential":            {"GET", keys, "", nil, 401, "UNAUTHENTICATED", ""},
		"unknown credential":       {"GET", keys, "", as("nobody"), 401, "UNAUTHENTICATED", ""},
		"two credentials (FO-120)": {"GET", keys, "", append(as("admin"), as("admin")...), 401, "UNAUTHENTICATED", ""},
		"wrong role":               {"GET", keys, "", as("service"), 403, "ROLE_NOT_ALLOWED", ""},
		"bad user header":          {"GET", keys, "", asUser("service", "%00"), 400, "INVALID_ARGUMENT", "Bulkhead-User: "},
		"unknown path":             {"GET", "/v1/nothing", "", as("admin"), 404, "ROUTE_NOT_FOUND", ""},
		"outside":                  {"GET", "/nothing", "", as("admin"), 404, "ROUTE_NOT_FOUND", ""},
		"trailing slash":           {"GET", keys + "/", "", as("admin"), 404, "ROUTE_NOT_FOUND", ""},
		"double slash":             {"GET", "/v1//keys", "", as("admin"), 404, "ROUTE_NOT_FOUND", ""},
		"wrong method":             {"PUT", keys, "{}", jsonAs("admin"), 405, "METHOD_NOT_ALLOWED", ""},
		"no method of ours":        {"TRACE", keys, "", as("admin"), 405, "METHOD_NOT_ALLOWED", ""},
		"method override (FO-119)": {"POST", keys + "/" + id, "", append(jsonAs("admin"), "X-HTTP-Method-Override", "DELETE"), 405, "METHOD_NOT_ALLOWED", ""},
		"form override (FO-119)":   {"POST", keys + "/" + id, "a=b", append(as("admin"), "Content-Type", "application/x-www-form-urlencoded", "X-HTTP-Method-Override", "DELETE"), 415, "UNSUPPORTED_MEDIA_TYPE", ""},
		"form as get (FO-119)":     {"POST", "/v1/servers/a/contracts/1", "", append(as("admin"), "Content-Type", "application/x-www-form-urlencoded"), 415, "UNSUPPORTED_MEDIA_TYPE", ""},
		"text":                     {"POST", keys, "{}", append(as("admin"), "Content-Type", "text/plain"), 415, "UNSUPPORTED_MEDIA_TYPE", ""},
		"not json":                 {"POST", keys, "displayName=a", jsonAs("admin"), 400, "INVALID_ARGUMENT", "body: must be a JSON object"},
		"wrong type":               {"POST", keys, `{"displayName":7}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "displayName: must be a string"},
		"unknown member":           {"POST", keys, `{"displayName":"a","admin":true}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "admin: unknown field"},
		"miscased (FO-070)":        {"POST", keys, `{"displayName":"a","displayname":"b"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "displayname: unknown field; it is written displayName"},
		"duplicate":                {"POST", keys, `{"displayName":"a","displayName":"b"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "displayName: appears twice"},
		"duplicate in json":        {"POST", "/v1/servers/a/contracts", `{"contract":{"x":{"a":1,"a":2}}}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "contract.x.a: appears twice"},
		"NUL":                      {"POST", keys, `{"displayName":"a\u0000"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "displayName: holds the character U+0000"},
		"lone surrogate":           {"POST", keys, `{"displayName":"\udead"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "displayName: holds a lone surrogate"},
		"enum zero":                {"POST", keys, `{"displayName":"a","role":"ROLE_UNSPECIFIED"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "role: must be one of"},
		"enum number":              {"POST", keys, `{"displayName":"a","role":2}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "role: must be one of"},
		"enum missing":             {"POST", keys, `{"displayName":"a"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "role: "},
		"enum not allowed":         {"POST", keys, `{"displayName":"a","role":"OPERATOR"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "role: "},
		"empty body":               {"POST", keys, "", jsonAs("admin"), 400, "INVALID_ARGUMENT", "displayName: "},
		"too long":                 {"POST", keys, `{"displayName":"` + strings.Repeat("a", 201) + `","role":"ADMIN"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "displayName: must be at most 200 characters"},
		"list item":                {"POST", keys, `{"displayName":"a","role":"SERVICE","servers":["ok","No"]}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "servers[1]: "},
		"none of a oneof":          {"POST", "/v1/servers/a/contracts", `{}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "source: "},
		"large body (FO-117)":      {"POST", keys, `{"displayName":"` + strings.Repeat("a", 10<<20) + `"}`, jsonAs("admin"), 413, "REQUEST_TOO_LARGE", ""},
		"just over (FO-117)":       {"POST", keys, strings.Repeat(" ", testLimit+1), jsonAs("admin"), 413, "REQUEST_TOO_LARGE", ""},
		"query of POST":            {"POST", keys + "?displayName=a", `{}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "query: "},
		"query of DELETE":          {"DELETE", keys + "/" + id + "?force=1", "", as("admin"), 400, "INVALID_ARGUMENT", "query: "},
		"query where none":         {"GET", "/v1/servers/a/contracts/1?x=1", "", as("admin"), 400, "INVALID_ARGUMENT", "query: "},
		"unknown in query":         {"GET", keys + "?pagesize=1", "", as("admin"), 400, "INVALID_ARGUMENT", "pagesize: unknown field; it is written pageSize"},
		"twice in query":           {"GET", keys + "?pageSize=1&pageSize=2", "", as("admin"), 400, "INVALID_ARGUMENT", "pageSize: must appear once"},
		"type in query":            {"GET", keys + "?pageSize=ten", "", as("admin"), 400, "INVALID_ARGUMENT", "pageSize: must be an integer"},
		"range in query":           {"GET", keys + "?pageSize=201", "", as("admin"), 400, "INVALID_ARGUMENT", "pageSize: "},
		"enum in query":            {"GET", "/v1/consents?state=1", "", as("approver"), 400, "INVALID_ARGUMENT", "state: must be one of PENDING"},
		"zero enum in query":       {"GET", "/v1/consents?state=STATE_UNSPECIFIED", "", as("approver"), 400, "INVALID_ARGUMENT", "state: must be one of PENDING"},
		"NUL in query":             {"GET", "/v1/keys?pageToken=%00", "", as("admin"), 400, "INVALID_ARGUMENT", "pageToken: holds the character"},
		"UTF-8 in query":           {"GET", "/v1/keys?pageToken=%ff", "", as("admin"), 400, "INVALID_ARGUMENT", "pageToken: is not valid UTF-8"},
		"odd query":                {"GET", "/v1/keys?a;b", "", as("admin"), 400, "INVALID_ARGUMENT", "query: "},
		"path field in query":      {"GET", "/v1/servers/a/contracts?server=b", "", as("admin"), 400, "INVALID_ARGUMENT", "server: is part of the path"},
		"path field in body":       {"POST", "/v1/servers/a/contracts", `{"server":"b","yaml":"x"}`, jsonAs("admin"), 400, "INVALID_ARGUMENT", "server: is part of the path"},
		"page token of another":    {"GET", keys + "?pageToken=AAAAAAAAAAAAAAAA", "", as("admin"), 400, "INVALID_ARGUMENT", "pageToken: must be the nextPageToken"},
		"integer in path":          {"GET", "/v1/servers/a/contracts/one", "", as("admin"), 400, "INVALID_ARGUMENT", "revision: must be an integer"},
		"zero in path":             {"GET", "/v1/servers/a/contracts/0", "", as("admin"), 400, "INVALID_ARGUMENT", "revision: "},
		"encoded slash (FO-116)":   {"GET", "/v1/servers/a%2Fb/contracts/1", "", as("admin"), 400, "INVALID_ARGUMENT", "server: "},
		"double coded (FO-116)":    {"GET", "/v1/servers/a%252Fb/contracts/1", "", as("admin"), 400, "INVALID_ARGUMENT", "server: "},
		"slash routes (FO-116)":    {"GET", "/v1/servers/a%2Fcontracts%2F1", "", as("admin"), 400, "INVALID_ARGUMENT", "server: "},
		"dots (FO-116)":            {"GET", "/v1/servers/%2e%2e/contracts/1", "", as("admin"), 400, "INVALID_ARGUMENT", "server: "},
		"space (FO-116)":           {"GET", "/v1/servers/a%20b/contracts/1", "", as("admin"), 400, "INVALID_ARGUMENT", "server: "},
		"wide (FO-116)":            {"GET", "/v1/servers/%E5%90%8D/contracts/1", "", as("admin"), 400, "INVALID_ARGUMENT", "server: "},
		"NUL in path":              {"GET", "/v1/servers/a%00/contracts/1", "", as("admin"), 400, "INVALID_ARGUMENT", "server: "},
		"colon (FO-121)":           {"DELETE", keys + "/user:12", "", as("admin"), 400, "INVALID_ARGUMENT", "keyId: "},
		"colon verb (FO-121)":      {"POST", "/v1/consents/x:y:decide", `{"decision":"DENY"}`, jsonAs("approver"), 400, "INVALID_ARGUMENT", "consentId: "},
		"coded verb (FO-121)":      {"POST", "/v1/consents/x%3Adecide", `{"decision":"DENY"}`, jsonAs("approver"), 405, "METHOD_NOT_ALLOWED", ""},
		"verb of GET (FO-121)":     {"GET", "/v1/consents/x:decide", "", as("approver"), 400, "INVALID_ARGUMENT", "consentId: "},
		"bare verb (FO-121)":       {"POST", "/v1/consents/:decide", `{"decision":"DENY"}`, jsonAs("approver"), 405, "METHOD_NOT_ALLOWED", ""},
		"chain order":              {"GET", "/v1/auditEntries?afterSequence=9007199254740993", "", as("auditor"), 400, "INVALID_ARGUMENT", "afterSequence: needs order CHAIN"},
	} {
		a := r.rest(c.method, c.path, c.body, c.headers...)
		if a.code != c.code || a.reason() != c.reason || !strings.HasPrefix(a.field(), c.field) {
			t.Errorf("%s: %d %s %q, want %d %s %q\n%s", name, a.code, a.reason(), a.field(), c.code, c.reason, c.field, a.body)
		}
		if a.header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: content type %q", name, a.header.Get("Content-Type"))
		}
		if c.code == 405 && a.header.Get("Allow") == "" {
			t.Errorf("%s: no Allow", name)
		}
		if calls := r.taken(); len(calls) > 0 {
			t.Errorf("%s: reached %v", name, calls)
		}
	}
}

func TestREST_Works(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a := r.rest("POST", "/v1/keys", `{"displayName":"web","role":"SERVICE","requestId":"r1"}`, jsonAs("admin")...)
	want := `{"keyId":"key_1","displayName":"web","role":"SERVICE","subjectSpace":"","userPatterns":[],"servers":[],"networks":[],"mayDecide":false,` +
		`"requestId":"r1","secret":"bhk_secret","state":"ACTIVE","createdBy":""}`
	if a.code != 200 || string(a.body) != want || a.header.Get("Content-Type") != "application/json" || a.header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("%d %v\n%s\n%s", a.code, a.header, a.body, want)
	}
	for _, c := range [][3]string{
		{"DELETE", "/v1/keys/key_00000000000000000000000000", "RevokeKey key_00000000000000000000000000"},
		{"GET", "/v1/servers/calendar/contracts/3", "Contracts.Get calendar 3"},
		{"GET", "/v1/keys?pageSize=7", `ListKeys "" 8`},
		{"GET", "/v1/servers/calendar/contracts", "Contracts.List calendar 0 51"},
	} {
		r.taken()
		if a := r.rest(c[0], c[1], "", as("admin")...); a.code != 200 {
			t.Errorf("%v: %d %s", c, a.code, a.body)
		}
		if got := r.taken(); len(got) != 1 || got[0] != c[2] {
			t.Errorf("%v: %v", c, got)
		}
	}
	// An activation needs no body at all, and a contract keeps its bytes.
	if a := r.rest("POST", "/v1/servers/calendar/contracts/3:activate", "", as("admin")...); a.code != 200 || !strings.Contains(string(a.body), `"state":"ACTIVE"`) {
		t.Errorf("%d %s", a.code, a.body)
	}
	a = r.rest("POST", "/v1/servers/calendar/contracts", `{"contract":{"n": 1.0}}`, jsonAs("admin")...)
	if !strings.Contains(string(a.body), `"contract":{"n": 1.0}`) {
		t.Errorf("%s", a.body)
	}
}

func TestREST_IdentityAndRequestID(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a := r.rest("GET", "/v1/consents", "", append(asUser("service", "%E5%90%8D"), "Bulkhead-Groups", "a,b", "X-Request-Id", "abc-1",
		"Grpc-Metadata-Authorization", "Bearer admin", "Grpc-Timeout", "1n")...)
	if a.code != 200 || a.header.Get("X-Request-Id") != "abc-1" {
		t.Fatalf("%d %s", a.code, a.body)
	}
	r.mu.Lock()
	got := r.who
	r.mu.Unlock()
	if got.User != "名" || !slices.Equal(got.Groups, []string{"a", "b"}) {
		t.Errorf("%+v", got)
	}
	for name := range a.header {
		if strings.HasPrefix(name, "Grpc-") {
			t.Errorf("answer has header %s", name)
		}
	}
	a = r.rest("GET", "/v1/consents", "", append(as("approver"), "X-Request-Id", "a b\t")...)
	if id := a.header.Get("X-Request-Id"); !strings.HasPrefix(id, "req_") {
		t.Errorf("request id %q", id)
	}
	// An id of the caller's credential without Authorization proper does nothing.
	if a := r.rest("GET", "/v1/consents", "", "Grpc-Metadata-Authorization", "Bearer admin"); a.code != 401 || a.header.Get("WWW-Authenticate") != "Bearer" {
		t.Errorf("%d %v", a.code, a.header)
	}
}

func TestPaging(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a := r.rest("GET", "/v1/tenants?pageSize=3", "", as("operator")...)
	var list struct {
		Tenants       []map[string]any
		NextPageToken string
	}
	if err := json.Unmarshal(a.body, &list); err != nil || len(list.Tenants) != 3 || list.NextPageToken == "" {
		t.Fatalf("%s", a.body)
	}
	r.taken()
	r.rest("GET", "/v1/tenants?pageSize=2&pageToken="+list.NextPageToken, "", as("operator")...)
	if got := r.taken(); len(got) != 1 || got[0] != `ListTenants "ten_00000000000000000000000000" 3` {
		t.Errorf("%v", got)
	}
	if a := r.rest("GET", "/v1/keys?pageToken="+list.NextPageToken, "", as("admin")...); a.code != 400 {
		t.Errorf("a token of another list gave %d", a.code)
	}
	a = r.rest("GET", "/v1/tenants", "", as("operator")...)
	if !strings.Contains(string(a.body), `"nextPageToken":""`) {
		t.Errorf("%s", a.body)
	}
}

func TestPlainPaths(t *testing.T) {
	t.Parallel()
	var ready error
	var mu sync.Mutex
	r := newRig(t, func(c *Config) {
		c.Ready = func(context.Context) error { mu.Lock(); defer mu.Unlock(); return ready }
	})
	for path, want := range map[string]string{"/healthz": "ok", "/readyz": "ready", "/openapi.json": `"/v1/sessions/{sessionId}/calls"`} {
		if a := r.rest("GET", path, ""); a.code != 200 || !strings.Contains(string(a.body), want) {
			t.Errorf("%s: %d %s", path, a.code, a.body)
		}
	}
	if a := r.rest("POST", "/healthz", "{}"); a.code != 405 || a.header.Get("Allow") == "" {
		t.Errorf("%d %v", a.code, a.header)
	}
	mu.Lock()
	ready = errors.New("postgres at 10.0.0.1 is down")
	mu.Unlock()
	if a := r.rest("GET", "/readyz", ""); a.code != 503 || a.reason() != "NOT_READY" || strings.Contains(string(a.body), "10.0.0.1") {
		t.Errorf("%d %s", a.code, a.body)
	}
}

// A body that does not arrive is answered and its connection is not kept; one
// that was cut off is never acted on, even where what came is valid JSON.
func TestREST_BodyMustArrive(t *testing.T) {
	t.Parallel()
	d := &fakeDomain{}
	s := newRig(t).server
	e := s.edge
	local := &channel{edge: e, methods: map[string]localMethod{}, streams: map[string]localStream{}}
	gateway := newGateway(e)
	if err := d.services().register(local, gateway, local, d); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(s.handler(&rest{mux: gateway, edge: e, limit: testLimit}, testLimit, 20*time.Millisecond))
	defer srv.Close()
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const head = "POST /v1/keys HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
	if _, err := io.WriteString(conn, head+`{"displayName":"a","role":"ADMIN"}`); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(conn) // ends because the server closes
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 408 ") || !strings.Contains(string(answer), "REQUEST_TIMEOUT") {
		t.Errorf("%v\n%s", err, answer)
	}
	// The same where the request is refused before its body is read.
	refused, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer refused.Close()
	if _, err := io.WriteString(refused, strings.Replace(head, "Bearer", "Basic", 1)); err != nil {
		t.Fatal(err)
	}
	answer, err = io.ReadAll(refused)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 401 ") {
		t.Errorf("%v\n%s", err, answer)
	}
	half, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	if _, err := io.WriteString(half, head+`{"displayName":"a","role":"ADMIN"}`); err != nil {
		t.Fatal(err)
	}
	if err := half.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	answer, err = io.ReadAll(half)
	if err != nil || !strings.Contains(string(answer), "REQUEST_CUT_OFF") {
		t.Errorf("%v\n%s", err, answer)
	}
	if calls := d.taken(); len(calls) > 0 {
		t.Errorf("reached %v", calls)
	}
}
