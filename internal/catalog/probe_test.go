package catalog

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func TestProbeServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	w.lister.does(func(_ ctx, _ Server, c Context, kind Kind) (Listing, error) {
		if !c.Probe || c.Subject.Source != "bulkhead:admin" {
			return Listing{}, fmt.Errorf("asked as %+v", c)
		}
		l := listing(tool("a", okSchema), tool("", okSchema))
		l.Capabilities = json.RawMessage(`{"tools":{},"prompts":{},"resources":null}`)
		l.ServerInfo = json.RawMessage(`{"name":"demo","version":"1"}`)
		if kind == Prompt {
			return Listing{}, errDown
		}
		return l, nil
	})
	probe, err := w.one.ProbeServer(t.Context(), p, "calendar")
	if err != nil || !probe.Reachable || probe.Failure != nil || probe.Era != "MODERN" || probe.ProtocolVersion != "2026-07-28" {
		t.Fatalf("%v %+v", err, probe)
	}
	if r := probe.Kinds[0].Revision; r == nil || r.Stale {
		t.Errorf("a list that was just made is shown as stale: %+v", r)
	}
	if len(probe.Kinds) != 2 || probe.Kinds[0].Callable != 1 || probe.Kinds[0].Quarantined != 1 ||
		probe.Kinds[1].Kind != Prompt || probe.Kinds[1].Failure == nil {
		t.Errorf("kinds %+v", probe.Kinds)
	}
	if string(probe.ServerInfo) != `{"name":"demo","version":"1"}` || len(probe.Capabilities) == 0 {
		t.Errorf("%s %s", probe.ServerInfo, probe.Capabilities)
	}
	w.later(confirmFor)
	if got, err := w.two.GetServer(t.Context(), p, v.ID); err != nil || got.Era != "MODERN" || got.ProtocolVersion != "2026-07-28" || got.Registration != 1 {
		t.Errorf("%v %+v", err, got)
	}
	before := w.lister.count()
	w.lister.says(Listing{}, errDown)
	probe, err = w.one.ProbeServer(t.Context(), p, "calendar")
	if err != nil || probe.Reachable || probe.Failure == nil || probe.Failure.Layer != fault.Server || w.lister.count() != before+1 {
		t.Errorf("%v %+v", err, probe)
	}
	// A probe is made whatever failed before.
	w.lister.says(listing(tool("back", okSchema)), nil)
	if probe, err = w.two.ProbeServer(t.Context(), p, "calendar"); err != nil || !probe.Reachable {
		t.Errorf("%v %+v", err, probe)
	}
}

func TestDefinitions_ShowsEverythingOffered(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	w.lister.does(func(_ ctx, _ Server, c Context, _ Kind) (Listing, error) {
		return listing(tool("of_"+strings.ReplaceAll(c.Subject.Source, ":", "_"), okSchema), tool("broken", `true`)), nil
	})
	r, err := w.one.Definitions(t.Context(), p, "calendar", Tool, false)
	if err != nil || !slices.Equal(names(r), []string{"of_bulkhead_admin", "broken"}) || r.Definitions[1].Quarantine == "" {
		t.Fatalf("%v %v", err, r)
	}
	w.current(w.one, v, user(p, "ann"), time.Hour)
	before := w.lister.count()
	if r, err = w.two.Definitions(t.Context(), p, v.ID, Tool, false); err != nil || r.Definitions[0].Name != "of_app" || w.lister.count() != before {
		t.Errorf("latest: %v %v", err, names(r))
	}
	if err := w.one.Invalidate(t.Context(), Change{Tenant: p.Tenant, ServerID: v.ID, Reason: "reconnected"}); err != nil {
		t.Fatal(err)
	}
	if r, err = w.two.Definitions(t.Context(), p, v.ID, Tool, false); err != nil || !r.Stale || r.StaleReason != "reconnected" {
		t.Errorf("%v stale %v %q", err, r.Stale, r.StaleReason)
	}
	if r, err = w.two.Definitions(t.Context(), p, v.ID, Tool, true); err != nil || r.Stale || r.Definitions[0].Name != "of_bulkhead_admin" {
		t.Errorf("refresh: %v %v", err, r)
	}
}

func TestEncoded_OneForEachAllowedSet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	r := w.current(w.one, v, user(p, "ann"), time.Hour)
	builds := 0
	get := func(r *Revision, key string) string {
		return string(w.one.Encoded(r, key, func() []byte { builds++; return []byte(fmt.Sprint(key, builds)) }))
	}
	if a, b := get(r, "x"), get(r, "x"); a != b || builds != 1 {
		t.Errorf("%q %q %d", a, b, builds)
	}
	if get(r, "y"); builds != 2 {
		t.Error("two allowed sets share an answer")
	}
	// Another user with the same list shares it; a stale view does not.
	if get(w.current(w.one, v, user(p, "bob"), time.Hour), "x"); builds != 2 {
		t.Error("one list, two answers")
	}
	w.lister.says(Listing{}, errDown)
	w.later(2 * time.Hour)
	if get(w.current(w.one, v, user(p, "ann"), time.Hour), "x"); builds != 3 {
		t.Error("a stale view gets the fresh answer")
	}
}

func TestClose_CancelsListsAndWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.admin("Acme")
	v := w.server(p, "calendar")
	s := w.replica()
	began := make(chan struct{})
	w.lister.does(func(ctx ctx, _ Server, _ Context, _ Kind) (Listing, error) {
		close(began)
		<-ctx.Done()
		return Listing{}, ctx.Err()
	})
	failed := make(chan error, 1)
	go func() { failed <- errorOf(s.Current(context.WithoutCancel(t.Context()), v, user(p, "ann"), Tool, 0)) }()
	<-began
	s.Close()
	if err := <-failed; err == nil {
		t.Error("a list of a closed service")
	}
	if _, err := s.Current(t.Context(), v, user(p, "bob"), Tool, 0); !fault.Is(err, fault.Unavailable) {
		t.Errorf("after Close: %v", err)
	}
}
