package sessions

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
)

func TestList_Pages(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Modern)
	s.On("tools/list",
		mcptest.Result(`{"tools":[{"name":"a","x":1.0,"$schema":"y"}],"nextCursor":"","ttlMs":60000,"cacheScope":"public"}`),
		mcptest.Result(`{"tools":[],"nextCursor":"2","ttlMs":30000,"cacheScope":"public"}`),
		mcptest.Result(`{"tools":[{"name":"b"}],"ttlMs":90000,"cacheScope":"public"}`))
	p := newPool(t, nil)
	l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), KindTool)
	if err != nil || len(l.Items) != 2 || string(l.Items[0]) != `{"name":"a","x":1.0,"$schema":"y"}` || l.TTL != 30*time.Second || l.Scope != "public" || l.Era != EraModern || l.ListChanged {
		t.Fatalf("%+v %v", l, err)
	}
	seen := s.Seen("tools/list")
	if !strings.Contains(seen[1].Body, `"cursor":""`) || !strings.Contains(seen[2].Body, `"cursor":"2"`) || strings.Contains(seen[0].Body, "cursor") {
		t.Fatal(seen[1].Body)
	}
	if got := p.Connections(keyOf(t, "a").Tenant, anyKey)[0].State; got != StateCatalogued {
		t.Fatal(got)
	}
}

func TestList_BadAnswersAreNoEmptyList(t *testing.T) {
	t.Parallel()
	n := 0
	endless := func(w http.ResponseWriter, raw *http.Request, r *mcptest.Request) {
		n++
		mcptest.Result(fmt.Sprintf(`{"tools":[],"nextCursor":"c%d"}`, n))(w, raw, r)
	}
	for name, c := range map[string]struct {
		answer mcptest.Answer
		reason string
	}{
		"empty":           {mcptest.Result(`{}`), "LIST_INVALID"},
		"null":            {mcptest.Result(`null`), "RESULT_INVALID"},
		"null array":      {mcptest.Result(`{"tools":null}`), "LIST_INVALID"},
		"miscased":        {mcptest.Result(`{"Tools":[]}`), "LIST_INVALID"},
		"object":          {mcptest.Result(`{"tools":{}}`), "LIST_INVALID"},
		"twice":           {mcptest.Result(`{"tools":[],"tools":[{"name":"x"}]}`), "LIST_INVALID"},
		"endless cursors": {endless, "LIST_TOO_LONG"},
		"numeric cursor":  {mcptest.Result(`{"tools":[],"nextCursor":7}`), "CURSOR_INVALID"},
		"long cursor":     {mcptest.Result(`{"tools":[],"nextCursor":"` + strings.Repeat("x", 10000) + `"}`), "CURSOR_INVALID"},
		"too many items":  {mcptest.Result(`{"tools":[` + strings.Repeat(`{"name":"x"},`, 30) + `{}]}`), "LIST_TOO_LONG"},
		"too many bytes":  {mcptest.Result(`{"tools":[{"name":"` + strings.Repeat("x", 200_000) + `"}]}`), "RESULT_TOO_LARGE"},
		"error":           {mcptest.Error(-32603, "x", ""), "LIST_REFUSED"},
		"not found":       {mcptest.Error(-32601, "x", ""), "LIST_REFUSED"},
		"input required":  {mcptest.Result(`{"resultType":"input_required","tools":[]}`), "RESULT_TYPE_INVALID"},
		"sign-in":         {mcptest.Status(401, "", ""), "AUTHORIZATION_REQUIRED"},
	} {
		s := mcptest.New(t, mcptest.Modern)
		s.On("tools/list", c.answer)
		p := newPool(t, func(c *PoolConfig) { c.Limits.ListItems, c.Limits.ListPages, c.Limits.ListBytes = 20, 10, 100_000 })
		l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), KindTool)
		if f, ok := fault.As(err); !ok || f.Reason != c.reason || l.Items != nil {
			t.Errorf("%s: %+v %v", name, l, err)
		}
	}
}

func TestList_KindsThatAServerDoesNotHave(t *testing.T) {
	t.Parallel()
	s := mcptest.New(t, mcptest.Legacy)
	s.Capabilities(`{"resources":{"listChanged":true}}`)
	s.On("resources/templates/list", mcptest.Error(-32601, "no", ""))
	s.On("tools/list", mcptest.Error(-32601, "no", ""))
	p := newPool(t, nil)
	for _, kind := range []string{KindTool, KindPrompt, KindResourceTemplate} {
		l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), kind)
		if err != nil || l.Items == nil || len(l.Items) != 0 || l.ListChanged != (kind == KindResourceTemplate) || l.Scope != "private" {
			t.Errorf("%s: %+v %v", kind, l, err)
		}
	}
	if s.Count("prompts/list") != 0 {
		t.Error("prompts were asked for")
	}
}

func TestList_ToolsWithBadHeaderMarksAreLeftOut(t *testing.T) {
	t.Parallel()
	schema := func(s string) string { return `{"name":"bad","inputSchema":{"type":"object",` + s + `}}` }
	bad := []string{
		schema(`"properties":{"a":{"type":"string","x-mcp-header":""}}`),
		schema(`"properties":{"a":{"type":"string","x-mcp-header":"X"},"b":{"type":"string","x-mcp-header":"x"}}`),
		schema(`"properties":{"a":{"type":"string","x-mcp-header":"not a token"}}`),
		schema(`"properties":{"a":{"type":"number","x-mcp-header":"A"}}`),
		schema(`"properties":{"a":{"type":"object","x-mcp-header":"A"}}`),
		schema(`"properties":{"a":{"type":"array","items":{"type":"string","x-mcp-header":"A"}}}`),
		schema(`"anyOf":[{"properties":{"a":{"type":"string","x-mcp-header":"A"}}}]`),
		schema(`"$defs":{"d":{"type":"string","x-mcp-header":"A"}},"properties":{"a":{"$ref":"#/$defs/d"}}`),
	}
	good := `{"name":"good","description":"x-mcp-header","inputSchema":{"type":"object","properties":{"a":{"type":"string","x-mcp-header":"A"},"o":{"type":"object","properties":{"b":{"type":"integer","x-mcp-header":"B"}}}}}}`
	body := `{"tools":[` + strings.Join(append(bad, good), ",") + `]}`
	modern, legacy := mcptest.New(t, mcptest.Modern), mcptest.New(t, mcptest.Legacy)
	modern.On("tools/list", mcptest.Result(body))
	legacy.On("tools/list", mcptest.Result(body))
	p := newPool(t, nil)
	l, err := p.List(t.Context(), keyOf(t, "a"), httpTarget(modern.URL), KindTool)
	if err != nil || len(l.Items) != 1 || string(l.Items[0]) != good || len(l.Rejected) != len(bad) || l.Rejected[0].Reason == "" {
		t.Fatalf("%d kept, %d rejected, %v", len(l.Items), len(l.Rejected), err)
	}
	l, err = p.List(t.Context(), keyOf(t, "b"), httpTarget(legacy.URL), KindTool)
	if err != nil || len(l.Items) != len(bad)+1 {
		t.Fatalf("%d kept, %v", len(l.Items), err)
	}
}

// A server that repeats a cursor is read up to there, each definition once, and
// the list says that it may lack some.
func TestList_ARepeatedCursorEndsIt(t *testing.T) {
	t.Parallel()
	page := func(next string, names ...string) mcptest.Answer {
		var items []string
		for _, n := range names {
			items = append(items, `{"name":"`+n+`"}`)
		}
		return mcptest.Result(`{"tools":[` + strings.Join(items, ",") + `],"nextCursor":` + next + `}`)
	}
	for name, c := range map[string]struct {
		pages []mcptest.Answer
		want  int
	}{
		"the same page for ever":  {[]mcptest.Answer{page(`"x"`, "a", "b", "c")}, 3},
		"a last page with itself": {[]mcptest.Answer{page(`"x"`, "a", "b"), page(`"x"`, "c")}, 3},
		"two pages in turn":       {[]mcptest.Answer{page(`"x"`, "a"), page(`"y"`, "b"), page(`"x"`, "a")}, 2},
	} {
		s := mcptest.New(t, mcptest.Modern)
		s.On("tools/list", c.pages...)
		l, err := newPool(t, nil).List(t.Context(), keyOf(t, "a"), httpTarget(s.URL), KindTool)
		if err != nil || len(l.Items) != c.want || !strings.HasPrefix(l.Incomplete, "pagination loop") {
			t.Errorf("%s: %d items, %q, %v", name, len(l.Items), l.Incomplete, err)
		}
		if n := s.Count("tools/list"); n > 3 {
			t.Errorf("%s: %d pages were asked for", name, n)
		}
	}
}
