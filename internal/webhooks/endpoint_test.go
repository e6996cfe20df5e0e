package webhooks

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/test/npm"
)

func reason(err error) string {
	if f, ok := fault.As(err); ok {
		return f.Reason
	}
	return ""
}

func field(err error) string {
	if f, ok := fault.As(err); ok && len(f.Fields) > 0 {
		return f.Fields[0].Path
	}
	return ""
}

// check is what the independent implementation is asked about one message.
type check struct {
	Secret  string            `json:"secret"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
}

const verifier = `
const { Webhook } = require(process.argv[1]);
const checks = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(checks.map((c) => {
  try { new Webhook(c.secret).verify(c.body, c.headers); return ""; } catch (e) { return e.message; }
})));`

// verify says of each message what standardwebhooks of npm finds wrong with it.
func verify(t *testing.T, checks []check) (said []string) {
	t.Helper()
	in, err := json.Marshal(checks)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "node", "-e", verifier, filepath.Join(npm.Install(t), "standardwebhooks"))
	cmd.Stdin = bytes.NewReader(in)
	var out, errors bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errors
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, errors.String())
	}
	if err := json.Unmarshal(out.Bytes(), &said); err != nil {
		t.Fatal(err)
	}
	return said
}

func checkOf(secret string, m message) check {
	h := map[string]string{}
	for _, name := range []string{headerID, headerTimestamp, headerSignature} {
		h[name] = m.header.Get(name)
	}
	return check{secret, h, string(m.body)}
}

// Signatures hold before another implementation: with either secret while both
// live, with the later alone after that, and not when anything was altered.
func TestSecret_SignaturesHoldBeforeAnotherImplementation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := newReceiver(t, nil)
	e := w.endpoint(w.admin, v.URL, "consent.requested")
	w.start(w.svc)
	deliver := func(n int) message {
		t.Helper()
		if _, err := w.svc.TestEndpoint(t.Context(), w.admin, e.ID); err != nil {
			t.Fatal(err)
		}
		w.until("a delivery", func() bool { return len(v.messages()) == n })
		return v.messages()[n-1]
	}
	one := deliver(1)
	rotated, err := w.svc.RotateSecret(t.Context(), w.admin, e.ID, nil, "rotate-1")
	if err != nil || rotated.Secret == "" || rotated.Secret == e.Secret || rotated.PreviousSecretExpire == nil {
		t.Fatalf("%+v, %v", rotated, err)
	}
	if again, err := w.svc.RotateSecret(t.Context(), w.admin, e.ID, nil, "rotate-1"); err != nil || again.Secret != "" {
		t.Fatalf("a repeat rotated again: %v", err)
	}
	two := deliver(2)
	if n := strings.Count(two.header.Get(headerSignature), "v1,"); n != 2 {
		t.Errorf("%d signatures in the overlap", n)
	}
	now := time.Duration(0)
	third, err := w.svc.RotateSecret(t.Context(), w.admin, e.ID, &now, "")
	if err != nil || third.PreviousSecretExpire != nil {
		t.Fatalf("%+v, %v", third, err)
	}
	three := deliver(3)
	altered := checkOf(e.Secret, one)
	altered.Body = strings.Replace(altered.Body, "1", "2", 1)
	stale := checkOf(e.Secret, one)
	stale.Headers = map[string]string{headerID: "evt_other", headerTimestamp: stale.Headers[headerTimestamp], headerSignature: stale.Headers[headerSignature]}
	cases := []struct {
		what  string
		check check
		holds bool
	}{
		{"the first secret", checkOf(e.Secret, one), true}, {"a secret to come", checkOf(rotated.Secret, one), false},
		{"the old secret in the overlap", checkOf(e.Secret, two), true}, {"the new secret in the overlap", checkOf(rotated.Secret, two), true},
		{"an ended secret", checkOf(rotated.Secret, three), false}, {"the present secret", checkOf(third.Secret, three), true},
		{"an altered body", altered, false}, {"another id", stale, false},
	}
	var checks []check
	for _, c := range cases {
		checks = append(checks, c.check)
	}
	for i, said := range verify(t, checks) {
		if (said == "") != cases[i].holds {
			t.Errorf("%s: %q", cases[i].what, said)
		}
	}
	raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(e.Secret, "whsec_"))
	if err != nil || !strings.HasPrefix(e.Secret, "whsec_") || len(raw) < 24 || len(raw) > 64 {
		t.Errorf("a secret of %d bytes, %v", len(raw), err)
	}
	if n := w.count(`SELECT count(*) FROM webhook_endpoints WHERE position($1::bytea IN secret) > 0 OR position($1::bytea IN previous_secret) > 0`, raw); n != 0 {
		t.Error("a secret lies in the clear")
	}
	if kinds := w.audit.kinds(); !slices.Contains(kinds, "webhook_endpoint.created") || !slices.Contains(kinds, "webhook_endpoint.secret_rotated") {
		t.Errorf("recorded: %v", kinds)
	}
	details, _ := json.Marshal(w.audit.events)
	if strings.Contains(string(details), "whsec_") {
		t.Error("a secret was recorded")
	}
}

// The ways to check a signature that the page shows do so.
func TestDocs_ShowHowToCheckASignature(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/webhooks.md")
	if err != nil {
		t.Fatal(err)
	}
	block := func(lang, has string) string {
		for _, part := range strings.Split(string(page), "```"+lang+"\n")[1:] {
			if text, _, _ := strings.Cut(part, "```"); strings.Contains(text, has) {
				return text
			}
		}
		t.Fatalf("no block of %s with %s", lang, has)
		return ""
	}
	raw, secret := mintSecret()
	_, other := mintSecret()
	at, body := time.Now(), []byte(`{"type":"webhook.test"}`)
	signature := signatures([][]byte{make([]byte, 32), raw}, "evt_1", at, body)
	dir := t.TempDir()
	file := filepath.Join(dir, "body")
	program := filepath.Join(dir, "main.go")
	source := `package main
import ("crypto/hmac"; "crypto/sha256"; "encoding/base64"; "fmt"; "net/http"; "os"; "strconv"; "strings"; "time")
` + block("go", "func genuine") + `
func main() {
	h := http.Header{}
	h.Set("webhook-id", os.Args[2]); h.Set("webhook-timestamp", os.Args[3]); h.Set("webhook-signature", os.Args[4])
	body, _ := os.ReadFile(os.Args[5])
	if genuine(os.Args[1], h, body) { fmt.Println("genuine") } else { fmt.Println("forged") }
}
`
	for name, text := range map[string][]byte{file: body, program: []byte(source)} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	built := filepath.Join(dir, "check")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", built, program).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	stamp := strconv.FormatInt(at.Unix(), 10)
	for secret, want := range map[string]string{secret: "genuine", other: "forged"} {
		sh := exec.CommandContext(t.Context(), "sh", "-c", "SECRET=$1 WEBHOOK_ID=$2 WEBHOOK_TIMESTAMP=$3 WEBHOOK_SIGNATURE=$4 BODY_FILE=$5\n"+block("sh", "openssl"),
			"sh", secret, "evt_1", stamp, signature, file)
		if out, _ := sh.CombinedOutput(); strings.TrimSpace(string(out)) != want {
			t.Errorf("the shell says %q, want %s", out, want)
		}
		if out, err := exec.CommandContext(t.Context(), built, secret, "evt_1", stamp, signature, file).CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != want {
			t.Errorf("Go says %q, %v, want %s", out, err, want)
		}
	}
}

func TestEndpoint_CreateIsCheckedBoundedAndRepeatable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	spec := EndpointSpec{DisplayName: "a", URL: "http://127.0.0.1:1/", EventTypes: []string{"call.finished", "security.*"}}
	first, err := w.svc.CreateEndpoint(t.Context(), w.admin, spec, "r-1")
	if err != nil || first.Secret == "" || first.State != Active {
		t.Fatalf("%+v, %v", first, err)
	}
	again, err := w.svc.CreateEndpoint(t.Context(), w.admin, spec, "r-1")
	if err != nil || again.ID != first.ID || again.Secret != "" {
		t.Errorf("%+v, %v", again, err)
	}
	other := spec
	other.DisplayName = "b"
	if _, err := w.svc.CreateEndpoint(t.Context(), w.admin, other, "r-1"); reason(err) != "REQUEST_ID_REUSED" {
		t.Errorf("another body: %v", err)
	}
	for want, bad := range map[string]EndpointSpec{
		"displayName": {DisplayName: "a\n", URL: spec.URL, EventTypes: spec.EventTypes},
		"url":         {URL: "http://u:p@127.0.0.1/", EventTypes: spec.EventTypes},
		"eventTypes":  {URL: spec.URL, EventTypes: []string{"call.*"}},
	} {
		if _, err := w.svc.CreateEndpoint(t.Context(), w.admin, bad, ""); field(err) != want {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	for _, types := range [][]string{nil, {"call.finished", "call.finished"}} {
		if _, err := w.svc.UpdateEndpoint(t.Context(), w.admin, first.ID, EndpointUpdate{EventTypes: append([]string{}, types...)}); field(err) != "eventTypes" {
			t.Errorf("%v: %v", types, err)
		}
	}
	for range MaxEndpoints - 1 {
		if _, err := w.svc.CreateEndpoint(t.Context(), w.admin, spec, ""); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.svc.CreateEndpoint(t.Context(), w.admin, spec, ""); reason(err) != "TOO_MANY_ENDPOINTS" {
		t.Errorf("one more than allowed: %v", err)
	}
	if err := w.svc.DeleteEndpoint(t.Context(), w.admin, first.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := w.svc.GetEndpoint(t.Context(), w.admin, first.ID); reason(err) != "WEBHOOK_ENDPOINT_NOT_FOUND" {
		t.Errorf("deleted: %v", err)
	}
	if n := w.count(`SELECT count(*) FROM webhook_endpoints WHERE webhook_endpoint_id = $1 AND secret = '' AND previous_secret IS NULL`, first.ID); n != 1 {
		t.Error("a deleted endpoint keeps its secret")
	}
	if _, err := w.svc.CreateEndpoint(t.Context(), w.admin, spec, ""); err != nil {
		t.Errorf("a place that came free: %v", err)
	}
}

// What wants is known at once where an endpoint was made, and elsewhere soon.
func TestWants_FollowsTheEndpoints(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.service()
	now := time.Now()
	other.now = func() time.Time { return now }
	wants := func(s *Service, types ...Type) bool {
		t.Helper()
		ok, err := s.Wants(t.Context(), w.admin.Tenant, types...)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if wants(w.svc, CallFinished) || wants(other, CallFinished) {
		t.Error("wanted without an endpoint")
	}
	e := w.endpoint(w.admin, "http://127.0.0.1:1/", "call.finished", "security.*")
	if !wants(w.svc, CallUncertain, CallFinished) || !wants(w.svc, SecurityOriginRefused) || wants(w.svc, CallUncertain) {
		t.Error("not as the endpoint says")
	}
	if wants(other, CallFinished) {
		t.Error("the other replica has read again although it had read just now")
	}
	now = now.Add(wantedTime)
	if !wants(other, CallFinished) {
		t.Error("the other replica does not know after its time")
	}
	if err := w.svc.DeleteEndpoint(t.Context(), w.admin, e.ID); err != nil || wants(w.svc, CallFinished) {
		t.Errorf("wanted after the end: %v", err)
	}
}

// Every type has a schema, and what is sent is as it says.
func TestSchema_WhatIsSentIsAsItSays(t *testing.T) {
	t.Parallel()
	consent := ConsentData{ConsentID: "cns_00000000000000000000000001", CallID: "call_00000000000000000000000001", SessionID: "ses_00000000000000000000000001",
		ServerID: "srv_1", Server: "calendar", Kind: "TOOL", Name: "put", Effect: "WRITE", State: "PENDING", ArgumentsDigest: "a", DefinitionDigest: "d", ContractID: "c"}
	asked := consent
	asked.ExpireTime = new(time.Now())
	decided := consent
	decided.State = "APPROVED"
	uncertain := someCall("x").Data.(CallData)
	uncertain.State = "UNCERTAIN"
	for typ, data := range map[Type][]any{
		ConsentRequested: {asked}, ConsentDecided: {decided}, CallFinished: {someCall("x").Data}, CallUncertain: {uncertain},
		DefinitionChanged:        {DefinitionData{ServerID: "s", Server: "n", Kind: "TOOL", Name: "t", OldDigest: "o"}, DefinitionData{ServerID: "s", Server: "n", Kind: "PROMPT", More: 3}},
		AccountNeedsAuth:         {map[string]string{"serverId": "s", "server": "n", "accountId": "acc_1"}},
		SecurityDowngradeRefused: {SecurityData{ServerID: "s", Server: "n", Registration: 1}},
		SecurityOriginRefused:    {SecurityData{ServerID: "s", Server: "n", Registration: 2}},
		Test:                     {TestData{WebhookEndpointID: "whe_00000000000000000000000001"}},
	} {
		raw, ok := Schema(string(typ) + ".json")
		if !ok {
			t.Errorf("%s has no schema", typ)
			continue
		}
		for _, d := range data {
			if err := validate(raw, Event{Type: typ, Data: d}); err != nil {
				t.Errorf("%s: %v", typ, err)
			}
		}
		if validate(raw, Event{Type: "other", Data: data[0]}) == nil || validate(raw, Event{Type: typ, Data: map[string]any{}}) == nil {
			t.Errorf("%s: the schema takes anything", typ)
		}
	}
	for _, c := range Types() {
		if _, ok := Schema(c + ".json"); !ok && c != AllSecurity {
			t.Errorf("%s can be chosen and has no schema", c)
		}
	}
}

func validate(schema []byte, e Event) error {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil {
		return err
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("mem:schema", doc); err != nil {
		return err
	}
	s, err := c.Compile("mem:schema")
	if err != nil {
		return err
	}
	body, err := e.encode(time.Now())
	if err != nil {
		return err
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return err
	}
	return s.Validate(v)
}

// Every method shows and changes one tenant alone, and a tenant adds and sees its
// own jobs alone. A new method without a case here fails.
func TestIsolation_EveryMethod(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := newReceiver(t, nil)
	a, b := w.newAdmin("A"), w.admin
	e := w.endpoint(b, v.URL, "call.finished")
	w.announce(b, someCall("secret-of-b"))
	d := w.deliveries(b, e.ID)[0]
	none := func(err error) error {
		if reason(err) != "WEBHOOK_ENDPOINT_NOT_FOUND" {
			return fmt.Errorf("A reaches B's endpoint: %v", err)
		}
		return nil
	}
	ctx, state := t.Context(), Disabled
	cases := map[string]func() error{
		"CreateEndpoint": func() error {
			got, err := w.svc.CreateEndpoint(ctx, a, EndpointSpec{URL: v.URL, EventTypes: []string{"call.uncertain"}}, "")
			if err == nil && got.ID == e.ID {
				err = fmt.Errorf("it is B's")
			}
			return err
		},
		"GetEndpoint": func() error { _, err := w.svc.GetEndpoint(ctx, a, e.ID); return none(err) },
		"ListEndpoints": func() error {
			got, err := w.svc.ListEndpoints(ctx, a, "", 100)
			if slices.ContainsFunc(got, func(x Endpoint) bool { return x.ID == e.ID }) {
				err = fmt.Errorf("A sees %+v", got)
			}
			return err
		},
		"UpdateEndpoint": func() error {
			_, err := w.svc.UpdateEndpoint(ctx, a, e.ID, EndpointUpdate{State: &state})
			return none(err)
		},
		"DeleteEndpoint": func() error { return none(w.svc.DeleteEndpoint(ctx, a, e.ID)) },
		"RotateSecret":   func() error { _, err := w.svc.RotateSecret(ctx, a, e.ID, nil, ""); return none(err) },
		"TestEndpoint":   func() error { _, err := w.svc.TestEndpoint(ctx, a, e.ID); return none(err) },
		"ListDeliveries": func() error {
			_, err := w.svc.ListDeliveries(ctx, a, e.ID, DeliveryFilter{Limit: 10})
			return none(err)
		},
		"Redeliver": func() error { _, err := w.svc.Redeliver(ctx, a, e.ID, d.ID); return none(err) },
		"Wants": func() error {
			ok, err := w.svc.Wants(ctx, a.Tenant, CallFinished)
			if ok {
				err = fmt.Errorf("A wants what B does")
			}
			return err
		},
		"Announce": func() error {
			before := w.count(`SELECT count(*) FROM webhook_deliveries`)
			w.announce(a, someCall("of-a"))
			if n := w.count(`SELECT count(*) FROM webhook_deliveries`); n != before {
				return fmt.Errorf("A's event goes to B")
			}
			return nil
		},
	}
	typ := reflect.TypeOf(w.svc)
	for i := range typ.NumMethod() {
		name := typ.Method(i).Name
		if name == "Start" || name == "Stop" {
			continue // work of all tenants, each job in its own
		}
		if cases[name] == nil {
			t.Errorf("%s has no case", name)
		} else if err := cases[name](); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if now, err := w.svc.GetEndpoint(ctx, b, e.ID); err != nil || !reflect.DeepEqual(now, e.Endpoint) {
		t.Errorf("B's endpoint is %+v, was %+v, %v", now, e.Endpoint, err)
	}
	seen := func(p tenant.Principal, sql string) (n int) {
		t.Helper()
		err := w.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error { return tx.QueryRow(ctx, sql).Scan(&n) })
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		return n
	}
	for _, table := range []string{"webhook_events", "webhook_deliveries", "river.river_job"} {
		if n, m := seen(a, `SELECT count(*) FROM `+table), seen(b, `SELECT count(*) FROM `+table); n != 0 || m != 1 {
			t.Errorf("%s: A sees %d, B %d", table, n, m)
		}
	}
	err := w.db.InTx(ctx, a.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := w.svc.queue.InsertTx(ctx, tx.Bare(), deliveryArgs{Tenant: b.Tenant.String(), Endpoint: e.ID, Delivery: d.ID}, nil)
		return err
	})
	if err == nil {
		t.Error("A adds a job of B")
	}
}

// What the record says of an address leaves out what may be as good as a password.
func TestUpdated_RecordsTheOriginAlone(t *testing.T) {
	t.Parallel()
	address := "https://hooks.example/services/T0/planted-path?token=planted-query"
	spec, _, _, details := Endpoint{}.updated(EndpointUpdate{URL: &address})
	if spec.URL != address || details["origin"] != "https://hooks.example" || len(details) != 1 {
		t.Errorf("%v %v", spec, details)
	}
}
