package api

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

func TestRules_CoverEveryMethod(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	protoregistry.GlobalFiles.RangeFilesByPackage("bulkhead.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			sd := f.Services().Get(i)
			for j := range sd.Methods().Len() {
				name := fmt.Sprintf("/%s/%s", sd.FullName(), sd.Methods().Get(j).Name())
				seen[name] = true
				if r, ok := rules[name]; !ok || len(r.roles) == 0 {
					t.Errorf("%s has no roles", name)
				}
			}
		}
		return true
	})
	for name := range rules {
		if !seen[name] {
			t.Errorf("%s does not exist", name)
		}
	}
	if len(seen) < 30 {
		t.Fatalf("only %d methods", len(seen))
	}
}

func TestRules_Permit(t *testing.T) {
	t.Parallel()
	alice := tenant.Subject{Source: "s", Value: "alice"}
	principal := func(role tenant.Role, s tenant.Subject, may bool) tenant.Principal {
		return tenant.Principal{Tenant: someTenant, Role: role, Subject: s, MayDecide: may}
	}
	for _, c := range []struct {
		method string
		p      tenant.Principal
		reason string
	}{
		{pb.TenantService_CreateTenant_FullMethodName, tenant.Principal{Role: tenant.RoleOperator}, ""},
		{pb.TenantService_CreateTenant_FullMethodName, principal(tenant.RoleAdmin, tenant.Subject{}, false), "ROLE_NOT_ALLOWED"},
		{pb.KeyService_CreateKey_FullMethodName, tenant.Principal{Role: tenant.RoleOperator}, "ROLE_NOT_ALLOWED"},
		{pb.KeyService_CreateKey_FullMethodName, tenant.Principal{Role: tenant.RoleAdmin}, "TENANT_REQUIRED"},
		{pb.KeyService_CreateKey_FullMethodName, principal(tenant.RoleService, alice, true), "ROLE_NOT_ALLOWED"},
		{pb.ServerService_GetServer_FullMethodName, principal(tenant.RoleService, tenant.Subject{}, false), ""},
		{pb.ServerService_GetServer_FullMethodName, principal(tenant.RoleApprover, tenant.Subject{}, false), "ROLE_NOT_ALLOWED"},
		{pb.ServerService_ListDefinitions_FullMethodName, principal(tenant.RoleService, alice, false), "ROLE_NOT_ALLOWED"},
		{pb.CallService_CreateCall_FullMethodName, principal(tenant.RoleService, tenant.Subject{}, false), "USER_REQUIRED"},
		{pb.CallService_CreateCall_FullMethodName, principal(tenant.RoleService, alice, false), ""},
		{pb.CallService_CreateCall_FullMethodName, principal(tenant.RoleAdmin, tenant.Subject{}, false), "ROLE_NOT_ALLOWED"},
		{pb.CallService_CreateCall_FullMethodName, principal(tenant.RoleApprover, tenant.Subject{}, false), "ROLE_NOT_ALLOWED"},
		{pb.ConsentService_DecideConsent_FullMethodName, principal(tenant.RoleApprover, tenant.Subject{}, false), ""},
		{pb.ConsentService_DecideConsent_FullMethodName, principal(tenant.RoleService, alice, false), "PROPOSER_MAY_NOT_DECIDE"},
		{pb.ConsentService_DecideConsent_FullMethodName, principal(tenant.RoleService, alice, true), ""},
		{pb.ConsentService_DecideConsent_FullMethodName, principal(tenant.RoleUser, alice, false), ""},
		{pb.ConsentService_ListConsents_FullMethodName, principal(tenant.RoleService, tenant.Subject{}, false), "USER_REQUIRED"},
		{pb.AuditService_ListAuditEntries_FullMethodName, principal(tenant.RoleAuditor, tenant.Subject{}, false), ""},
		{pb.AuditService_ListAuditEntries_FullMethodName, principal(tenant.RoleService, alice, false), "ROLE_NOT_ALLOWED"},
		{"/bulkhead.v1.Unknown/Method", principal(tenant.RoleAdmin, alice, true), "ROLE_NOT_ALLOWED"},
	} {
		reason := ""
		if f, ok := fault.As(rules[c.method].permit(c.p)); ok {
			reason = f.Reason
		}
		if reason != c.reason {
			t.Errorf("%s as %s: %q, want %q", c.method, c.p.Role, reason, c.reason)
		}
	}
}

func TestIdentity(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("%C3%A4", 256)
	for name, c := range map[string]struct {
		headers http.Header
		want    identity
		err     string
	}{
		"plain":          {http.Header{"Authorization": {"Bearer abc"}}, identity{credential: "abc"}, ""},
		"any case":       {http.Header{"Authorization": {"bearer abc"}}, identity{credential: "abc"}, ""},
		"none":           {http.Header{}, identity{}, "send Authorization"},
		"basic":          {http.Header{"Authorization": {"Basic abcdef"}}, identity{}, "send Authorization"},
		"empty":          {http.Header{"Authorization": {"Bearer "}}, identity{}, "send Authorization"},
		"two (FO-120)":   {http.Header{"Authorization": {"Bearer a", "Bearer b"}}, identity{}, "more than once"},
		"two in one":     {http.Header{"Authorization": {"Bearer a, Bearer b"}}, identity{}, "characters that no credential has"},
		"control byte":   {http.Header{"Authorization": {"Bearer a\x01b"}}, identity{}, "characters that no credential has"},
		"high byte":      {http.Header{"Authorization": {"Bearer a\xffb"}}, identity{}, "characters that no credential has"},
		"too long":       {http.Header{"Authorization": {"Bearer " + strings.Repeat("a", 9000)}}, identity{}, "too long"},
		"user":           {who("alice", "", ""), identity{"abc", tenant.OnBehalf{User: "alice"}}, ""},
		"encoded user":   {who("%E5%90%8D%20x%2B+", "", ""), identity{"abc", tenant.OnBehalf{User: "名 x++"}}, ""},
		"long user":      {who(long, "", ""), identity{"abc", tenant.OnBehalf{User: strings.Repeat("ä", 256)}}, ""},
		"too long user":  {who(long+"a", "", ""), identity{}, "Bulkhead-User: must have 1 to 256"},
		"raw UTF-8 user": {who("名", "", ""), identity{}, "Bulkhead-User: must be percent-encoded"},
		"bad UTF-8 user": {who("%ff", "", ""), identity{}, "Bulkhead-User: must be percent-encoded"},
		"bad escape":     {who("%zz", "", ""), identity{}, "Bulkhead-User: must be percent-encoded"},
		"newline":        {who("a%0Ab", "", ""), identity{}, "Bulkhead-User: must have printable"},
		"NUL":            {who("a%00b", "", ""), identity{}, "Bulkhead-User: must have printable"},
		"invisible":      {who("a%E2%80%8Bb", "", ""), identity{}, "Bulkhead-User: must have printable"},
		"space":          {who("a%20", "", ""), identity{}, "begin or end with a space"},
		"two users":      {http.Header{"Authorization": {"Bearer abc"}, "Bulkhead-User": {"a", "b"}}, identity{}, "Bulkhead-User: must appear once"},
		"empty user":     {http.Header{"Authorization": {"Bearer abc"}, "Bulkhead-User": {""}}, identity{}, "Bulkhead-User: must have 1 to 256"},
		"groups":         {who("a", "staff, b%2Cc,staff", "p1"), identity{"abc", tenant.OnBehalf{User: "a", Groups: []string{"staff", "b,c"}, Project: "p1"}}, ""},
		"empty group":    {who("a", "staff,,x", ""), identity{}, "Bulkhead-Groups[1]: must have 1 to 256"},
		"many groups":    {who("a", strings.Repeat("x,", 100)+"x", ""), identity{}, "at most 100 groups"},
	} {
		got, err := readIdentity(c.headers.Values)
		switch {
		case c.err == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("%s: %v, want %q", name, err, c.err)
		case c.err == "" && (got.credential != c.want.credential || got.onBehalf.User != c.want.onBehalf.User ||
			got.onBehalf.Project != c.want.onBehalf.Project || !slices.Equal(got.onBehalf.Groups, c.want.onBehalf.Groups)):
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

func who(user, groups, project string) http.Header {
	h := http.Header{"Authorization": {"Bearer abc"}}
	for k, v := range map[string]string{headerUser: user, headerGroups: groups, headerProject: project} {
		if v != "" {
			h.Set(k, v)
		}
	}
	return h
}
