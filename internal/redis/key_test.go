package redis

import (
	"strings"
	"testing"
)

func TestKey_Encode(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 600)
	keys := []Key{
		{Tenant: "t", Kind: "k"},
		{Tenant: "k", Kind: "t"},
		{Tenant: "t", Kind: "k", Parts: []string{""}},
		{Tenant: "t", Kind: "k", Parts: []string{"", ""}},
		{Tenant: "t", Kind: "k", Parts: []string{"a", "b"}},
		{Tenant: "t", Kind: "k", Parts: []string{"ab"}},
		{Tenant: "t", Kind: "k", Parts: []string{"a1:b"}},
		{Tenant: "t1:a", Kind: "k", Parts: []string{"b"}},
		{Tenant: "t", Kind: "k", Parts: []string{long}},
		{Tenant: "t", Kind: "k", Parts: []string{long, ""}},
		{Tenant: "u", Kind: "k", Parts: []string{long}},
	}
	seen := map[string]int{}
	for i, k := range keys {
		e := k.encode()
		if j, dup := seen[e]; dup {
			t.Errorf("keys %d and %d are both %q", j, i, e)
		}
		if len(e) > maxKey+1 {
			t.Errorf("key %d has %d bytes", i, len(e))
		}
		seen[e] = i
	}
}

func TestKey_NeedsTenantAndKind(t *testing.T) {
	t.Parallel()
	for _, k := range []Key{{Kind: "k"}, {Tenant: "t"}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v was encoded", k)
				}
			}()
			k.encode()
		}()
	}
}

func FuzzKey_Injective(f *testing.F) {
	f.Add("t", "k", "a", "t", "k", "a")
	f.Add("t", "k", "a1:b", "t", "k", "a")
	f.Fuzz(func(t *testing.T, t1, k1, p1, t2, k2, p2 string) {
		if t1 == "" || k1 == "" || t2 == "" || k2 == "" {
			return
		}
		a := Key{Tenant: t1, Kind: k1, Parts: []string{p1}}.encode()
		b := Key{Tenant: t2, Kind: k2, Parts: []string{p2}}.encode()
		if (a == b) != (t1 == t2 && k1 == k2 && p1 == p2) {
			t.Errorf("%q and %q", a, b)
		}
	})
}

func FuzzParsePayload(f *testing.F) {
	f.Add("1:t1:i")
	f.Add("01:t0:")
	f.Add("1:t-1:")
	f.Fuzz(func(t *testing.T, s string) {
		tenant, id, ok := parsePayload(s)
		if ok && string(appendField(appendField(nil, tenant), id)) != s {
			t.Errorf("%q parsed as %q, %q", s, tenant, id)
		}
	})
}
