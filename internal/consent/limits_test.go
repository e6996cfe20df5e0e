package consent

import (
	"slices"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// What a limited credential lists, gets and decides is the same set: the SQL of
// List and the rule of Get agree, also for names that LIKE reads otherwise.
func TestLimits_ListGetAndDecideAgree(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	type row struct{ id, server, space, user string }
	var rows []row
	for _, server := range []string{"calendar", "mail"} {
		for _, space := range []string{"web", "other"} {
			for _, user := range []string{"alice", "a_ice", "a%e", `a\e`, "bob", "bobby", "*", "ALICE", "straße\ne"} {
				a := w.ask(RuleCall, "WRITE")
				w.exec(`UPDATE consents SET server_name = $2, subject_source = $3, subject = $4 WHERE consent_id = $1`, a.ConsentID, server, space, user)
				rows = append(rows, row{a.ConsentID, server, space, user})
			}
		}
	}
	service := w.alice
	service.Servers, service.MayDecide = []string{"mail"}, true
	stranger := service
	stranger.SubjectSpace = "other" // no key is like this, and it sees nothing
	for name, c := range map[string]struct {
		p    tenant.Principal
		sees func(r row) bool
	}{
		"no limit":    {w.boss, func(row) bool { return true }},
		"servers":     {limited(w.boss, "", nil, "mail", "x"), func(r row) bool { return r.server == "mail" }},
		"space":       {limited(w.boss, "web", nil), func(r row) bool { return r.space == "web" }},
		"user":        {limited(w.boss, "", []string{"bob"}), func(r row) bool { return r.user == "bob" }},
		"prefix":      {limited(w.boss, "", []string{"bob*"}), func(r row) bool { return r.user == "bob" || r.user == "bobby" }},
		"underscore":  {limited(w.boss, "", []string{"a_ice"}), func(r row) bool { return r.user == "a_ice" }},
		"per cent":    {limited(w.boss, "", []string{"a%e"}), func(r row) bool { return r.user == "a%e" }},
		"backslash":   {limited(w.boss, "", []string{`a\e`}), func(r row) bool { return r.user == `a\e` }},
		"both ends":   {limited(w.boss, "", []string{"a*e"}), func(r row) bool { return r.user[0] == 'a' && r.user[len(r.user)-1] == 'e' }},
		"across line": {limited(w.boss, "", []string{"str*e"}), func(r row) bool { return r.user == "straße\ne" }},
		"anybody":     {limited(w.boss, "", []string{"*"}), func(row) bool { return true }},
		"all three": {limited(w.boss, "other", []string{"x", "*b*"}, "calendar"), func(r row) bool {
			return r.server == "calendar" && r.space == "other" && (r.user == "bob" || r.user == "bobby")
		}},
		"service":  {service, func(r row) bool { return r.server == "mail" && r.space == "web" && r.user == "alice" }},
		"stranger": {stranger, func(row) bool { return false }},
	} {
		var want []string
		for _, r := range rows {
			_, err := w.svc.Get(t.Context(), c.p, r.id)
			if c.sees(r) {
				want = append(want, r.id)
			}
			if c.sees(r) != (err == nil) || err != nil && !fault.Is(err, fault.NotFound) {
				t.Errorf("%s: get %+v: %v", name, r, err)
			}
			if c.sees(r) {
				continue
			}
			if _, err := w.svc.Decide(t.Context(), c.p, r.id, Decision{Approve: true}); !fault.Is(err, fault.NotFound) || w.state(r.id) != Pending {
				t.Errorf("%s: decides %+v: %v", name, r, err)
			}
		}
		if got := pages(t, w, c.p); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Errorf("%s: lists %d, want %d", name, len(got), len(want))
		}
	}
}

func limited(p tenant.Principal, space string, users []string, servers ...string) tenant.Principal {
	p.SubjectSpace, p.UserPatterns, p.Servers = space, users, servers
	return p
}

// pages lists in pages of three, each full but the last.
func pages(t *testing.T, w *world, p tenant.Principal) (ids []string) {
	t.Helper()
	f := Filter{Limit: 3}
	for {
		vs, err := w.svc.List(t.Context(), p, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range vs {
			ids = append(ids, v.ID)
			f.After = v.ID
		}
		if len(vs) < f.Limit {
			return ids
		}
	}
}

// FuzzUserPatterns holds the two readings of a pattern, ours and LIKE's, together.
func FuzzUserPatterns(f *testing.F) {
	for _, s := range [][2]string{{"a*e", "alice"}, {"a_*", "a_b"}, {`\*`, `\x`}, {"**", ""}, {"a*b*a", "aba"}, {"a*a", "a"}, {"%", "x"}} {
		f.Add(s[0], s[1])
	}
	w := newWorld(f)
	f.Fuzz(func(t *testing.T, pattern, user string) {
		p := tenant.Principal{UserPatterns: []string{pattern}}
		var like bool
		ctx := t.Context()
		if err := w.pool.QueryRow(ctx, `SELECT $1::text LIKE ANY ($2::text[])`, user, p.UserLikes()).Scan(&like); err != nil {
			t.Skipf("no text of the database: %v", err)
		}
		if ours := p.MayActFor(tenant.Subject{Value: user}); ours != like {
			t.Errorf("%q of %q: %v, LIKE says %v", user, pattern, ours, like)
		}
	})
}
