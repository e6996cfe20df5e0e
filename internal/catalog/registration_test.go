package catalog

import (
	"slices"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

func ptr[T any](v T) *T { return &v }

func TestCreateServer_Validation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	cases := []struct {
		name   string
		spec   ServerSpec
		fields []string
	}{
		{"no transport", ServerSpec{Name: "a"}, []string{"http"}},
		{"both transports", ServerSpec{Name: "a", URL: "https://a.example/", Runtime: "filesystem"}, []string{"stdio"}},
		{"http and sse", ServerSpec{Name: "a", URL: "https://a.example/", StreamURL: "https://a.example/sse"}, []string{"sse"}},
		{"sse and stdio", ServerSpec{Name: "a", StreamURL: "https://a.example/", Runtime: "filesystem"}, []string{"stdio"}},
		{"sse at a metadata address", ServerSpec{Name: "a", StreamURL: "http://169.254.169.254/"}, []string{"sse.url"}},
		{"sse over plain http", ServerSpec{Name: "a", StreamURL: "http://93.184.216.34/sse"}, []string{"sse.url"}},
		{"bad name", ServerSpec{Name: "Calendar", URL: "https://a.example/"}, []string{"name"}},
		{"id as name", ServerSpec{Name: "srv_00000000000000000000000000", URL: "https://a.example/"}, []string{"name"}},
		{"plain http", ServerSpec{Name: "a", URL: "http://93.184.216.34/mcp"}, []string{"http.url"}},
		{"metadata address", ServerSpec{Name: "a", URL: "http://169.254.169.254/"}, []string{"http.url"}},
		{"userinfo", ServerSpec{Name: "a", URL: "https://u:p@a.example/"}, []string{"http.url"}},
		{"fragment", ServerSpec{Name: "a", URL: "https://a.example/#x"}, []string{"http.url"}},
		{"long URL", ServerSpec{Name: "a", URL: "https://a.example/" + strings.Repeat("x", 3000)}, []string{"http.url"}},
		{"other scheme", ServerSpec{Name: "a", URL: "ftp://a.example/"}, []string{"http.url"}},
		{"undeclared runtime", ServerSpec{Name: "a", Runtime: "bash"}, []string{"stdio.runtime"}},
		{"unknown isolation", ServerSpec{Name: "a", URL: "https://a.example/", Isolation: "SHARED"}, []string{"isolation"}},
		{"per tenant unacknowledged", ServerSpec{Name: "a", URL: "https://a.example/", Isolation: PerTenant}, []string{"sharedStateAcknowledged"}},
		{"per tenant with credentials", ServerSpec{Name: "a", URL: "https://a.example/", Isolation: PerTenant, SharedStateAcknowledged: true, AuthorizationMode: "OAUTH"}, []string{"authorization.mode", "authorization.mode"}},
		{"other authorization", ServerSpec{Name: "a", URL: "https://a.example/", AuthorizationMode: "OAUTH"}, []string{"authorization.mode"}},
		{"display name", ServerSpec{Name: "a", URL: "https://a.example/", DisplayName: "x\x00"}, []string{"displayName"}},
		{"all at once", ServerSpec{Name: "", Runtime: "bash", Isolation: "X"}, []string{"name", "stdio.runtime", "isolation"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			_, err := w.one.CreateServer(t.Context(), p, tc.spec, "req")
			f, ok := fault.As(err)
			if !ok || f.Kind != fault.Invalid {
				t.Fatalf("error %v", err)
			}
			var got []string
			for _, field := range f.Fields {
				got = append(got, field.Path)
			}
			if !slices.Equal(got, tc.fields) {
				t.Errorf("fields %v, want %v", f.Fields, tc.fields)
			}
		})
	}
	if n := w.rows(`SELECT server_id FROM servers UNION ALL SELECT request_id FROM create_requests`); len(n) != 0 {
		t.Errorf("bad input left rows: %v", n)
	}
}

func TestCreateServer_OriginsAndDefaults(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	for url, origin := range map[string]string{
		"https://Calendar.Example:443/mcp": "https://calendar.example",
		"https://calendar.example:8443/":   "https://calendar.example:8443",
		"http://127.0.0.1:9000/mcp?x=1":    "http://127.0.0.1:9000",
		"https://[2606:4700::1]/":          "https://[2606:4700::1]",
	} {
		v, err := w.one.CreateServer(t.Context(), p, ServerSpec{Name: "s", URL: url}, "")
		if err != nil || v.Origin != origin || v.URL != url {
			t.Fatalf("%s: %v, origin %q", url, err, v.Origin)
		}
		if err := w.one.DeleteServer(t.Context(), p, "s"); err != nil {
			t.Fatal(err)
		}
	}
	v, err := w.one.CreateServer(t.Context(), p, ServerSpec{Name: "files", Runtime: "filesystem"}, "")
	if err != nil || v.Origin != "stdio:filesystem" || v.Transport != Stdio || v.Isolation != PerUser ||
		v.AuthorizationMode != AuthorizationNone || v.DisplayName != "files" || v.Registration != 1 {
		t.Fatalf("%v %+v", err, v)
	}
}

// HTTP+SSE is spoken with a server only because it was registered so.
func TestCreateServer_SSE(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v, err := w.one.CreateServer(t.Context(), p, ServerSpec{Name: "old", StreamURL: "https://Old.example/sse"}, "r1")
	if err != nil || v.Transport != SSE || v.URL != "https://Old.example/sse" || v.Origin != "https://old.example" || v.Runtime != "" {
		t.Fatalf("%v %+v", err, v)
	}
	if _, err := w.one.CreateServer(t.Context(), p, ServerSpec{Name: "old", URL: "https://Old.example/sse"}, "r1"); !fault.Is(err, fault.Exists) {
		t.Errorf("the same request for another transport: %v", err)
	}
	if _, err := w.one.UpdateServer(t.Context(), p, "old", ServerUpdate{URL: ptr("https://old.example/mcp")}); !fault.Is(err, fault.Invalid) {
		t.Errorf("another transport: %v", err)
	}
	v, err = w.one.UpdateServer(t.Context(), p, "old", ServerUpdate{StreamURL: ptr("https://new.example/sse")})
	if err != nil || v.Transport != SSE || v.Registration != 2 || v.Origin != "https://new.example" {
		t.Fatalf("%v %+v", err, v)
	}
	if got := w.rows(`SELECT transport FROM servers`); !slices.Equal(got, []string{"SSE"}) {
		t.Errorf("stored %v", got)
	}
}

func TestCreateServer_RequestIDAndName(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	spec := ServerSpec{Name: "calendar", URL: "https://calendar.example/mcp"}
	first, err := w.one.CreateServer(t.Context(), p, spec, "r1")
	if err != nil {
		t.Fatal(err)
	}
	again, err := w.two.CreateServer(t.Context(), p, spec, "r1")
	if err != nil || again.ID != first.ID {
		t.Fatalf("repeat: %v %s", err, again.ID)
	}
	other := spec
	other.URL = "https://other.example/mcp"
	if _, err := w.one.CreateServer(t.Context(), p, other, "r1"); !fault.Is(err, fault.Exists) {
		t.Errorf("other body: %v", err)
	}
	if _, err := w.one.CreateServer(t.Context(), p, spec, "r2"); !fault.Is(err, fault.Exists) {
		t.Errorf("name in use: %v", err)
	}
	if got := w.rows(`SELECT kind FROM audit_entries WHERE kind LIKE 'server.%' ORDER BY ordinal`); !slices.Equal(got, []string{"server.created"}) {
		t.Errorf("audit %v", got)
	}
}

func TestUpdateServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	w.exec(`UPDATE servers SET era = 'MODERN', protocol_version = '2026-07-28'`)

	up, err := w.one.UpdateServer(t.Context(), p, "calendar", ServerUpdate{DisplayName: ptr("Team calendar")})
	if err != nil || up.DisplayName != "Team calendar" || up.Registration != 1 || up.Era != "MODERN" {
		t.Fatalf("%v %+v", err, up)
	}
	if got := w.voids.take(); len(got) != 0 {
		t.Errorf("a display name voided %v", got)
	}
	up, err = w.one.UpdateServer(t.Context(), p, v.ID, ServerUpdate{URL: ptr("https://new.example:444/mcp")})
	if err != nil || up.Registration != 2 || up.Era != "" || up.ProtocolVersion != "" || up.Origin != "https://new.example:444" {
		t.Fatalf("%v %+v", err, up)
	}
	if got := w.voids.take(); !slices.Equal(got, []string{"server " + p.Tenant.String() + " " + v.ID + ` ""`}) {
		t.Errorf("voided %v", got)
	}
	if up, err = w.one.UpdateServer(t.Context(), p, v.ID, ServerUpdate{Isolation: ptr(PerSession)}); err != nil || up.Registration != 3 {
		t.Fatalf("%v %+v", err, up)
	}
	w.voids.take()
	if up, err = w.one.UpdateServer(t.Context(), p, v.ID, ServerUpdate{Isolation: ptr(PerSession)}); err != nil || up.Registration != 3 {
		t.Fatalf("an update without a change: %v %+v", err, up)
	}
	for name, bad := range map[string]ServerUpdate{
		"stdio":                   {Runtime: ptr("filesystem")},
		"http.url":                {URL: ptr("ftp://x/")},
		"sse":                     {StreamURL: ptr("https://x.example/sse")},
		"isolation":               {Isolation: ptr(Isolation(""))},
		"sharedStateAcknowledged": {Isolation: ptr(PerTenant)},
		"authorization.mode":      {AuthorizationMode: ptr("STATIC")},
	} {
		_, err := w.one.UpdateServer(t.Context(), p, v.ID, bad)
		if f, ok := fault.As(err); !ok || f.Kind != fault.Invalid || f.Fields[0].Path != name {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := w.voids.take(); len(got) != 0 {
		t.Errorf("refused updates voided %v", got)
	}
	got := w.rows(`SELECT kind FROM audit_entries WHERE kind LIKE 'server.%' ORDER BY ordinal`)
	if !slices.Equal(got, []string{"server.created", "server.updated", "server.updated", "server.updated"}) {
		t.Errorf("audit %v", got)
	}
}

func TestDeleteServer_VoidsAndFreesTheName(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	if _, err := w.two.GetServer(t.Context(), p, "calendar"); err != nil {
		t.Fatal(err)
	}
	w.hears(w.two)
	if err := w.one.DeleteServer(t.Context(), p, "calendar"); err != nil {
		t.Fatal(err)
	}
	if got := w.voids.take(); len(got) != 1 {
		t.Errorf("voided %v", got)
	}
	for _, id := range []string{v.ID, "calendar"} {
		if _, err := w.one.GetServer(t.Context(), p, id); !fault.Is(err, fault.NotFound) {
			t.Errorf("%s after the delete: %v", id, err)
		}
		if err := w.one.DeleteServer(t.Context(), p, id); !fault.Is(err, fault.NotFound) {
			t.Errorf("second delete by %s: %v", id, err)
		}
		if _, err := w.one.UpdateServer(t.Context(), p, id, ServerUpdate{DisplayName: ptr("x")}); !fault.Is(err, fault.NotFound) {
			t.Errorf("update by %s: %v", id, err)
		}
	}
	next := w.server(p, "calendar")
	if next.ID == v.ID {
		t.Error("the id came back")
	}
	// The other replica learns it by the signal, or when five seconds are over.
	w.later(confirmFor)
	if got, err := w.two.GetServer(t.Context(), p, "calendar"); err != nil || got.ID != next.ID {
		t.Errorf("other replica: %v %s", err, got.ID)
	}
	// Lists of the dead registration are not served.
	if err := w.db.InTx(t.Context(), p.Tenant, func(ctx ctx, tx tenant.Tx) error {
		_, err := w.one.LockServer(ctx, tx, v.ID)
		return err
	}); !fault.Is(err, fault.NotFound) {
		t.Errorf("a dispatch finds the deleted server: %v", err)
	}
}

func TestListServers_ByNameAndWithinTheKeysServers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	for _, n := range []string{"b", "a", "c-1", "c"} {
		w.server(p, n)
	}
	get := func(p tenant.Principal, after string, limit int) (out []string) {
		vs, err := w.one.ListServers(t.Context(), p, after, limit)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range vs {
			out = append(out, v.Name)
		}
		return out
	}
	if got := get(p, "", 3); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("first page %v", got)
	}
	if got := get(p, "c", 3); !slices.Equal(got, []string{"c-1"}) {
		t.Errorf("second page %v", got)
	}
	narrow := p
	narrow.Servers = []string{"b"}
	if got := get(narrow, "", 10); !slices.Equal(got, []string{"b"}) {
		t.Errorf("a narrow key lists %v", got)
	}
	if _, err := w.one.GetServer(t.Context(), narrow, "a"); !fault.Is(err, fault.NotFound) {
		t.Errorf("a narrow key gets another server: %v", err)
	}
	if err := w.one.DeleteServer(t.Context(), narrow, "a"); !fault.Is(err, fault.NotFound) {
		t.Errorf("a narrow key deletes another server: %v", err)
	}
}

// TestIsolation walks every method that reaches the tables with another
// tenant's ids.
func TestIsolation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.admin("Acme"), w.admin("Bolt")
	v := w.server(a, "calendar")
	r := w.current(w.one, v, user(a, "ann"), 0)
	w.server(b, "calendar") // the same name is free for another tenant
	notFound := map[string]error{}
	_, notFound["GetServer"] = w.one.GetServer(t.Context(), b, v.ID)
	_, notFound["UpdateServer"] = w.one.UpdateServer(t.Context(), b, v.ID, ServerUpdate{DisplayName: ptr("mine")})
	notFound["DeleteServer"] = w.one.DeleteServer(t.Context(), b, v.ID)
	_, notFound["ProbeServer"] = w.one.ProbeServer(t.Context(), b, v.ID)
	_, notFound["Definitions"] = w.one.Definitions(t.Context(), b, v.ID, Tool, false)
	_, notFound["content"] = w.two.content(t.Context(), b.Tenant, "calendar", r.ID, "")
	notFound["LockServer"] = w.db.InTx(t.Context(), b.Tenant, func(ctx ctx, tx tenant.Tx) error {
		_, err := w.one.LockServer(ctx, tx, v.ID)
		return err
	})
	for name, err := range notFound {
		if !fault.Is(err, fault.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if vs, err := w.one.ListServers(t.Context(), b, "", 10); err != nil || len(vs) != 1 || vs[0].ID == v.ID {
		t.Errorf("ListServers: %v %v", err, vs)
	}
	// A registration that was handed over from another tenant's code path: nothing
	// is stored for it and nothing of the other tenant comes back.
	if _, err := w.one.Current(t.Context(), v, user(b, "ann"), Tool, 0); err == nil {
		t.Error("Current served another tenant's server")
	}
	if err := w.one.Invalidate(t.Context(), Change{Tenant: b.Tenant, ServerID: v.ID}); err != nil {
		t.Error(err)
	}
	err := w.db.InTx(t.Context(), b.Tenant, func(ctx ctx, tx tenant.Tx) error {
		p, err := w.one.LockDefinition(ctx, tx, v.ID, r.Context, Tool, "a")
		if p.Digest != "" || p.RevisionID != "" || !p.Stale {
			t.Errorf("LockDefinition: %+v", p)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	got := w.rows(`SELECT tenant_id FROM catalog_current WHERE invalidated > generation OR tenant_id <> $1`, a.Tenant.String())
	if len(got) != 0 {
		t.Errorf("rows of another tenant, or marked by it: %v", got)
	}
	if again := w.current(w.one, v, user(a, "ann"), 0); again.ID != r.ID {
		t.Error("the first tenant's list changed")
	}
}
