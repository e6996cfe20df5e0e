package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/authz"
	"github.com/bulkhead-mcp/bulkhead/internal/consent"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeDomain answers every service with what a test sets, and notes what came.
type fakeDomain struct {
	mu    sync.Mutex
	calls []string
	who   tenant.OnBehalf
	err   error
	panic any
	block chan struct{} // when set, calls wait for it or their context
	big   []byte
}

func (d *fakeDomain) note(ctx context.Context, format string, args ...any) error {
	d.mu.Lock()
	d.calls = append(d.calls, fmt.Sprintf(format, args...))
	err, p, block := d.err, d.panic, d.block
	d.mu.Unlock()
	if p != nil {
		panic(p)
	}
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}

func (d *fakeDomain) taken() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.calls
	d.calls = nil
	return c
}

func (d *fakeDomain) set(err error, p any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err, d.panic = err, p
}

var someTenant = func() (id tenant.ID) {
	if err := id.Scan("ten_00000000000000000000000000"); err != nil {
		panic(err)
	}
	return id
}()

// Authenticate knows one key for each role, named like it, and "may" for a
// service key with mayDecide.
func (d *fakeDomain) Authenticate(_ context.Context, credential string, who tenant.OnBehalf, remote netip.Addr) (tenant.Principal, error) {
	d.mu.Lock()
	d.who = who
	d.mu.Unlock()
	if !remote.IsLoopback() {
		return tenant.Principal{}, fmt.Errorf("remote address is %v", remote)
	}
	p := tenant.Principal{Tenant: someTenant, KeyID: "key_" + credential, Role: tenant.ParseRole(strings.ToUpper(credential))}
	if credential == "may" {
		p.Role, p.MayDecide = tenant.RoleService, true
	}
	switch {
	case p.Role == tenant.RoleNone:
		return tenant.Principal{}, fault.New(fault.Unauthenticated, "UNAUTHENTICATED", "no valid credential")
	case p.Role == tenant.RoleOperator:
		p.Tenant = tenant.ID{}
	case who.User != "":
		p.Subject = tenant.Subject{Source: "default", Value: who.User}
		p.Groups, p.Project = who.Groups, who.Project
	}
	return p, nil
}

func (d *fakeDomain) CreateTenant(ctx context.Context, name, requestID string) (tenant.Tenant, tenant.NewKey, error) {
	return tenant.Tenant{ID: someTenant, DisplayName: name, State: "ACTIVE"}, tenant.NewKey{Secret: "bhk_x"}, d.note(ctx, "CreateTenant %s", name)
}
func (d *fakeDomain) GetTenant(ctx context.Context, id string) (tenant.Tenant, error) {
	return tenant.Tenant{ID: someTenant}, d.note(ctx, "GetTenant %s", id)
}
func (d *fakeDomain) ListTenants(ctx context.Context, after string, limit int) ([]tenant.Tenant, error) {
	return slices.Repeat([]tenant.Tenant{{ID: someTenant}}, min(limit, 4)), d.note(ctx, "ListTenants %q %d", after, limit)
}
func (d *fakeDomain) CreateKey(ctx context.Context, p tenant.Principal, spec tenant.KeySpec, requestID string) (tenant.NewKey, error) {
	return tenant.NewKey{Key: tenant.Key{ID: "key_1", KeySpec: spec, State: "ACTIVE"}, Secret: "bhk_secret"}, d.note(ctx, "CreateKey %s %s", spec.DisplayName, spec.Role)
}
func (d *fakeDomain) ListKeys(ctx context.Context, p tenant.Principal, after string, limit int) ([]tenant.Key, error) {
	return nil, d.note(ctx, "ListKeys %q %d", after, limit)
}
func (d *fakeDomain) RevokeKey(ctx context.Context, p tenant.Principal, id string) (tenant.Key, error) {
	return tenant.Key{ID: id, State: "REVOKED"}, d.note(ctx, "RevokeKey %s", id)
}

type fakeContracts struct{ *fakeDomain }

func (d fakeContracts) Create(ctx context.Context, p tenant.Principal, server string, source []byte, requestID string) (authz.Record, error) {
	return authz.Record{ServerName: server, Revision: 1, State: "DRAFT", Canonical: source}, d.note(ctx, "Contracts.Create %s %s", server, source)
}
func (d fakeContracts) Get(ctx context.Context, p tenant.Principal, server string, revision int) (authz.Record, error) {
	return authz.Record{ServerName: server, Revision: revision}, d.note(ctx, "Contracts.Get %s %d", server, revision)
}
func (d fakeContracts) List(ctx context.Context, p tenant.Principal, server string, before, limit int) ([]authz.Record, error) {
	return nil, d.note(ctx, "Contracts.List %s %d %d", server, before, limit)
}
func (d fakeContracts) Activate(ctx context.Context, p tenant.Principal, server string, revision int) (authz.Record, error) {
	return authz.Record{ServerName: server, Revision: revision, State: "ACTIVE"}, d.note(ctx, "Contracts.Activate %s %d", server, revision)
}

type fakeConsents struct{ *fakeDomain }

func (d fakeConsents) Get(ctx context.Context, p tenant.Principal, id string) (consent.View, error) {
	return consent.View{Consent: consent.Consent{ID: id, State: consent.Approved, Rule: consent.RuleCall, Effect: "WRITE"}, Arguments: []byte(`{"n":1.0}`)},
		d.note(ctx, "Consents.Get %s", id)
}
func (d fakeConsents) List(ctx context.Context, p tenant.Principal, f consent.Filter) ([]consent.View, error) {
	return nil, d.note(ctx, "Consents.List %s", f.State)
}
func (d fakeConsents) Decide(ctx context.Context, p tenant.Principal, id string, c consent.Decision) (consent.Consent, error) {
	return consent.Consent{ID: id}, d.note(ctx, "Consents.Decide %s %v", id, c.Approve)
}

type fakeAudit struct{ *fakeDomain }

func (d fakeAudit) List(ctx context.Context, t tenant.ID, f audit.Filter) ([]audit.Record, string, error) {
	return []audit.Record{{ID: "aud_1", Sequence: 9007199254740993, Details: d.big}}, "", d.note(ctx, "Audit.List %s %d", t, f.AfterSequence)
}
func (d fakeAudit) Verify(ctx context.Context, t tenant.ID, c *audit.Checkpoint) (audit.Report, error) {
	return audit.Report{OK: true}, d.note(ctx, "Audit.Verify %v", c != nil)
}

type rig struct {
	*fakeDomain
	t      testing.TB
	url    string
	conn   *grpc.ClientConn
	server *Server
	log    *bytes.Buffer
	logM   *sync.Mutex
}

type lockedWriter struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

const testLimit = 64 << 10

func newRig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	d := &fakeDomain{}
	r := &rig{fakeDomain: d, t: t, log: &bytes.Buffer{}, logM: &sync.Mutex{}}
	c := Config{MaxRequestBytes: testLimit, Log: telemetry.NewLogger(lockedWriter{r.logM, r.log}, slog.LevelInfo), Auth: d, Authority: d,
		Services: d.services()}
	for _, f := range change {
		f(&c)
	}
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	r.server = s
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.url = "http://" + l.Addr().String()
	r.conn, err = grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l, 5*time.Second) }()
	t.Cleanup(func() {
		if err := r.conn.Close(); err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return r
}

type restAnswer struct {
	code   int
	header http.Header
	body   []byte
	status struct {
		Code    int
		Message string
		Details []map[string]any
	}
}

func (a restAnswer) reason() string {
	for _, d := range a.status.Details {
		if r, ok := d["reason"].(string); ok {
			return r
		}
	}
	return ""
}

// field returns "path: rule" of the first violation.
func (a restAnswer) field() string {
	for _, d := range a.status.Details {
		if vs, ok := d["fieldViolations"].([]any); ok && len(vs) > 0 {
			v := vs[0].(map[string]any)
			return fmt.Sprintf("%s: %s", v["field"], v["description"])
		}
	}
	return ""
}

func (r *rig) rest(method, path, body string, headers ...string) restAnswer {
	r.t.Helper()
	req, err := http.NewRequest(method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	if body == "" {
		req.Body = http.NoBody
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	a := restAnswer{code: res.StatusCode, header: res.Header}
	if a.body, err = io.ReadAll(res.Body); err != nil {
		r.t.Fatal(err)
	}
	if a.code >= 300 {
		if err := json.Unmarshal(a.body, &a.status); err != nil {
			r.t.Fatalf("%s %s: %d with a body that is no Status: %s", method, path, a.code, a.body)
		}
	}
	return a
}

func as(key string) []string { return []string{"Authorization", "Bearer " + key} }

func asUser(key, user string) []string { return append(as(key), "Bulkhead-User", user) }

func jsonAs(key string) []string { return append(as(key), "Content-Type", "application/json") }
