package tenant_test

import (
	"reflect"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Every method of the service is either the operator's or shows and changes one
// tenant alone. A new method without a case here fails.
func TestIsolation_EveryMethodOfTheService(t *testing.T) {
	t.Parallel()
	w := setup(t)
	_, a, _ := w.newTenant(t, "A")
	_, b, secretB := w.newTenant(t, "B")
	keyOfB, err := w.svc.CreateKey(t.Context(), b, tenant.KeySpec{DisplayName: "b", Role: tenant.RoleService}, "same-request")
	if err != nil {
		t.Fatal(err)
	}
	operators := map[string]string{
		"CreateTenant": "the operator's; makes a tenant of its own",
		"GetTenant":    "the operator's, by the role table of the API",
		"ListTenants":  "the operator's, by the role table of the API",
		"ForgetKey":    "drops memory only",
	}
	cases := map[string]func(t *testing.T){
		"CreateKey": func(t *testing.T) {
			// The same request id in two tenants is two requests.
			k, err := w.svc.CreateKey(t.Context(), a, tenant.KeySpec{DisplayName: "a", Role: tenant.RoleService}, "same-request")
			if err != nil || k.ID == keyOfB.ID || k.Secret == "" {
				t.Fatalf("%+v, %v", k.Key, err)
			}
		},
		"ListKeys": func(t *testing.T) {
			ks, err := w.svc.ListKeys(t.Context(), a, "", 100)
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range ks {
				if k.ID == keyOfB.ID {
					t.Error("A sees B's key")
				}
			}
		},
		"RevokeKey": func(t *testing.T) {
			if _, err := w.svc.RevokeKey(t.Context(), a, keyOfB.ID); !fault.Is(err, fault.NotFound) {
				t.Errorf("A revokes B's key: %v", err)
			}
			if _, err := w.svc.Authenticate(t.Context(), keyOfB.Secret, tenant.OnBehalf{}, local); err != nil {
				t.Errorf("B's key is dead: %v", err)
			}
		},
		"Reauthorize": func(t *testing.T) {
			p, err := w.svc.Reauthorize(t.Context(), keyOfB.ID, tenant.OnBehalf{User: "alice"})
			if err != nil || p.Tenant != b.Tenant || p.KeyID != keyOfB.ID || p.Subject.Value != "alice" {
				t.Errorf("%+v, %v", p, err)
			}
		},
		"Authenticate": func(t *testing.T) {
			p, err := w.svc.Authenticate(t.Context(), secretB, tenant.OnBehalf{}, local)
			if err != nil || p.Tenant != b.Tenant || p.Tenant == a.Tenant {
				t.Errorf("%+v, %v", p, err)
			}
		},
	}
	typ := reflect.TypeOf(w.svc)
	for i := range typ.NumMethod() {
		name := typ.Method(i).Name
		run, ok := cases[name]
		if !ok {
			if operators[name] == "" {
				t.Errorf("method %s has no case with two tenants", name)
			}
			continue
		}
		t.Run(name, run)
	}
}
