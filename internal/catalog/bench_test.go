package catalog

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

// largest returns the costliest schema that is still compiled.
func largest() json.RawMessage {
	var b strings.Builder
	b.WriteString(`{"type":"object","properties":{`)
	for i := range maxSubschemas - 3 {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `"p%d":{"type":"string","maxLength":%d}`, i, i)
	}
	b.WriteString(`}}`)
	return json.RawMessage(b.String())
}

func BenchmarkCompileLargestSchema(b *testing.B) {
	raw := largest()
	for b.Loop() {
		c := newChecker(raw)
		if skipped, err := c.check("arguments", map[string]any{"p1": "x"}); skipped != "" || err != nil {
			b.Fatal(skipped, err)
		}
	}
}

func BenchmarkValidateArguments(b *testing.B) {
	c := newChecker([]byte(`{"type":"object","required":["title"],"properties":{"title":{"type":"string","maxLength":200},
		"attendees":{"type":"array","items":{"type":"string"}},"minutes":{"type":"integer","minimum":1}}}`))
	v := map[string]any{"title": "Review", "minutes": int64(30), "attendees": []any{"a", "b"}}
	for b.Loop() {
		if skipped, err := c.check("arguments", v); skipped != "" || err != nil {
			b.Fatal(skipped, err)
		}
	}
}

// BenchmarkReadListing examines a list of 400 tools of 2.5 kB, the size of the
// largest servers in use.
func BenchmarkReadListing(b *testing.B) {
	var items []json.RawMessage
	text := strings.Repeat("Does something useful with care. ", 50)
	for i := range 400 {
		items = append(items, json.RawMessage(fmt.Sprintf(`{"name":"tool_%d","description":%q,"inputSchema":{"type":"object","properties":{
			"a":{"type":"string","description":%q},"b":{"type":"integer"},"c":{"type":"array","items":{"type":"string"}}}}}`, i, text, text[:600])))
	}
	b.SetBytes(int64(len(items) * len(items[0])))
	for b.Loop() {
		if _, err := buildContent(Server{ID: "srv_x", Name: "s"}, Tool, listing(items...)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCurrent(b *testing.B) {
	s := &Service{o: Options{Now: time.Now}, slots: newLRU[slotKey, *slot](10), contents: newLRU[contentKey, *content](1 << 20),
		drops: newLRU[string, uint64](10)}
	id, err := benchTenant()
	if err != nil {
		b.Fatal(err)
	}
	c := Context{Tenant: id, Subject: subject("ann")}
	v := Server{ID: "srv_x", Name: "s", Isolation: PerUser, Registration: 1}
	w, err := s.wish(v, c, Tool)
	if err != nil {
		b.Fatal(err)
	}
	cont, err := buildContent(v, Tool, listing(tool("a", okSchema)))
	if err != nil {
		b.Fatal(err)
	}
	cont.index("s", func(_, _ string, raw []byte) *checker { return newChecker(raw) })
	s.contents.put(contentKey{id, cont.id}, cont, 1)
	for b.Loop() {
		w.slot.view.own = seen{revisionID: cont.id, registration: 1, generation: 1}
		w.slot.at = time.Now()
		if _, err := s.Current(b.Context(), v, c, Tool, time.Minute); err != nil {
			b.Fatal(err)
		}
	}
}
