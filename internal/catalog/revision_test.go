package catalog

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func TestRevisionID_CoversContentAndNothingElse(t *testing.T) {
	t.Parallel()
	v := Server{ID: "srv_1", Name: "s"}
	build := func(v Server, l Listing) string {
		c, err := buildContent(v, Tool, l)
		if err != nil {
			t.Fatal(err)
		}
		return c.id
	}
	base := Listing{Items: []json.RawMessage{tool("a", okSchema), tool("b", okSchema)}, ProtocolVersion: "2026-07-28",
		Era: "MODERN", Capabilities: json.RawMessage(`{"a":1,"b":2}`)}
	id := build(v, base)
	same := base
	same.Capabilities = json.RawMessage(`{ "b":2, "a":1 }`)
	same.Items = []json.RawMessage{json.RawMessage(`{"_meta":{"n":1}, "name":"a","inputSchema":{"type":"object"}}`), base.Items[1]}
	if build(v, same) != id {
		t.Error("_meta, white space or the order of members made a new revision")
	}
	for name, change := range map[string]func(*Listing){
		"order":    func(l *Listing) { l.Items = []json.RawMessage{l.Items[1], l.Items[0]} },
		"missing":  func(l *Listing) { l.Items = l.Items[:1] },
		"version":  func(l *Listing) { l.ProtocolVersion = "2025-11-25" },
		"era":      func(l *Listing) { l.Era = "LEGACY" },
		"declared": func(l *Listing) { l.Capabilities = nil },
		"partial":  func(l *Listing) { l.Incomplete = "pagination loop" },
		"schema":   func(l *Listing) { l.Items = []json.RawMessage{tool("a", `{"type":"object","title":"x"}`), l.Items[1]} },
	} {
		l := base
		change(&l)
		if build(v, l) == id {
			t.Errorf("%s: the same revision", name)
		}
	}
	if build(Server{ID: "srv_2", Name: "s"}, base) == id {
		t.Error("two servers share a revision")
	}
}

func TestFO041_ListsAreBounded(t *testing.T) {
	t.Parallel()
	items := make([]json.RawMessage, MaxDefinitions+1)
	for i := range items {
		items[i] = json.RawMessage(`{}`)
	}
	if _, err := buildContent(Server{}, Tool, Listing{Items: items}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("too many: %v", err)
	}
	big := json.RawMessage(strings.Repeat(" ", MaxListing/2+1))
	if _, err := buildContent(Server{}, Tool, Listing{Items: []json.RawMessage{big, big}}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("too large: %v", err)
	}
}

func TestLRU_HoldsItsBound(t *testing.T) {
	t.Parallel()
	c := newLRU[int, int](10)
	for i := range 100 {
		c.put(i, i, 3)
	}
	if n := c.len(); n != 3 {
		t.Errorf("%d items", n)
	}
	c.get(97)
	c.put(100, 100, 3)
	if _, ok := c.get(97); !ok {
		t.Error("the one used last is gone")
	}
	if _, ok := c.get(98); ok {
		t.Error("the one not used for longest is there")
	}
	c.put(5, 5, 11)
	if _, ok := c.get(5); ok {
		t.Error("larger than the whole")
	}
}
