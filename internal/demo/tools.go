package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"

	"github.com/mark3labs/mcp-go/mcp"
	"github.com/mark3labs/mcp-go/server"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// The tools that every demo server offers.
const (
	GetAvailability  = "get_availability"
	CreateDraftEvent = "create_draft_event"
	FindDraft        = "find_draft"
	SendInvitations  = "send_invitations"
)

// Tools returns the names of the four tools, in the order of the constants.
func Tools() []string {
	return []string{GetAvailability, CreateDraftEvent, FindDraft, SendInvitations}
}

// The schemas are written out so that the definition's digest depends on this
// file alone. All inputs refuse unknown members.
const (
	availabilityIn = `{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false,
"required":["from","to"],"properties":{
"from":{"type":"string","format":"date-time","maxLength":64,"description":"Start of the span, RFC 3339."},
"to":{"type":"string","format":"date-time","maxLength":64,"description":"End of the span, at most 31 days later."}}}`
	availabilityOut = `{"type":"object","additionalProperties":false,"required":["busy","free"],"properties":{
"busy":{"type":"array","items":{"type":"object","required":["start","end","title"],"properties":{"start":{"type":"string"},"end":{"type":"string"},"title":{"type":"string"}}}},
"free":{"type":"array","items":{"type":"object","required":["start","end"],"properties":{"start":{"type":"string"},"end":{"type":"string"}}}}}}`
	draftIn = `{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false,
"required":["title","start","end"],"properties":{
"title":{"type":"string","minLength":1,"maxLength":500},
"start":{"type":"string","format":"date-time","maxLength":64,"description":"RFC 3339."},
"end":{"type":"string","format":"date-time","maxLength":64,"description":"RFC 3339, after start."},
"notes":{"type":"string","maxLength":4000},
"attendees":{"type":"array","maxItems":100,"items":{"type":"string","maxLength":254},"description":"Kept on the draft; nobody is invited."},
"requestId":{"type":"string","minLength":1,"maxLength":128,"description":"Makes the call idempotent: the same requestId returns the same event."}}}`
	draftOut = `{"type":"object","additionalProperties":false,"required":["id","status"],"properties":{
"id":{"type":"string"},"status":{"const":"draft"}}}`
	findIn = `{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false,
"required":["requestId"],"properties":{"requestId":{"type":"string","minLength":1,"maxLength":128}}}`
	findOut = `{"type":"object","additionalProperties":false,"required":["found"],"properties":{
"found":{"type":"boolean"},"id":{"type":"string"}}}`
	inviteIn = `{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false,
"required":["id","attendees"],"properties":{"id":{"type":"string","maxLength":64},
"attendees":{"type":"array","minItems":1,"maxItems":100,"items":{"type":"string","maxLength":254}}}}`
	inviteOut = `{"type":"object","additionalProperties":false,"required":["sent"],"properties":{"sent":{"type":"integer"}}}`
	noteIn    = `{"type":"object","additionalProperties":false,"properties":{"text":{"type":"string","maxLength":4000}}}`
	noteOut   = `{"type":"object","additionalProperties":false,"required":["count"],"properties":{"count":{"type":"integer"}}}`
)

// toolset is what the server offers now.
type toolset struct {
	mcp    *server.MCPServer
	cal    *calendar
	counts *counts

	mu      sync.Mutex // orders changes; the library guards its own reads
	offered map[string]server.ServerTool
	added   int
}

func newToolset(m *server.MCPServer, cal *calendar, c *counts, generated int) *toolset {
	t := &toolset{mcp: m, cal: cal, counts: c, offered: map[string]server.ServerTool{}}
	first := []server.ServerTool{
		define(GetAvailability, "Lists busy and free time in a span.", availabilityIn, availabilityOut, reads(), t.getAvailability),
		define(CreateDraftEvent, "Creates a draft event. Nobody is invited.", draftIn, draftOut, writes(), t.createDraft),
		define(FindDraft, "Finds the draft event that a requestId created.", findIn, findOut, reads(), t.findDraft),
		define(SendInvitations, "Sends invitations for an event to its attendees.", inviteIn, inviteOut, reachesOut(), t.sendInvitations),
	}
	for i := range generated {
		name := fmt.Sprintf("generated_%04d", i+1)
		first = append(first, define(name, "A generated read-only tool, one of many.", noteIn, noteOut, reads(), t.note(name)))
	}
	for _, d := range first {
		t.offered[d.Tool.Name] = d
	}
	m.AddTools(first...)
	return t
}

// define makes a tool of raw schemas, so that nothing in them is reordered or
// lost on the wire.
func define(name, description, in, out string, a mcp.ToolAnnotation, h server.ToolHandlerFunc) server.ServerTool {
	tool := mcp.NewToolWithRawSchema(name, description, json.RawMessage(in))
	tool.RawOutputSchema = json.RawMessage(out)
	tool.Annotations = a
	return server.ServerTool{Tool: tool, Handler: h}
}

func reads() mcp.ToolAnnotation {
	return mcp.ToolAnnotation{ReadOnlyHint: new(true), OpenWorldHint: new(false)}
}

func writes() mcp.ToolAnnotation {
	return mcp.ToolAnnotation{
		ReadOnlyHint: new(false), DestructiveHint: new(false), IdempotentHint: new(true), OpenWorldHint: new(false),
	}
}

func reachesOut() mcp.ToolAnnotation {
	return mcp.ToolAnnotation{ReadOnlyHint: new(false), DestructiveHint: new(true), OpenWorldHint: new(true)}
}

func (t *toolset) getAvailability(_ context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
	var in struct{ From, To string }
	if err := req.BindArguments(&in); err != nil {
		return mcp.NewToolResultError("arguments do not fit the schema"), nil
	}
	from, to, ok := parseSpan(in.From, in.To)
	if !ok || to.Sub(from) > maxRange {
		return mcp.NewToolResultError("from and to must be RFC 3339 times, from before to, at most 31 days apart"), nil
	}
	out, ok := t.cal.between(from, to)
	if !ok {
		return mcp.NewToolResultError("too many events in this span; ask for a shorter one"), nil
	}
	t.counts.execute(GetAvailability)
	return mcp.NewToolResultStructuredOnly(out), nil
}

func (t *toolset) createDraft(_ context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
	var d draft
	if err := req.BindArguments(&d); err != nil {
		return mcp.NewToolResultError("arguments do not fit the schema"), nil
	}
	if refusal := d.parse(); refusal != "" {
		return mcp.NewToolResultError(refusal), nil
	}
	id, created, refusal := t.cal.create(d)
	if refusal != "" {
		return mcp.NewToolResultError(refusal), nil
	}
	if created {
		t.counts.execute(CreateDraftEvent)
	}
	return mcp.NewToolResultStructuredOnly(struct {
		ID     string `json:"id"`
		Status string `json:"status"`
	}{id, "draft"}), nil
}

func (t *toolset) findDraft(_ context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
	var in struct {
		RequestID string `json:"requestId"`
	}
	if err := req.BindArguments(&in); err != nil {
		return mcp.NewToolResultError("arguments do not fit the schema"), nil
	}
	id, found := t.cal.find(in.RequestID)
	t.counts.execute(FindDraft)
	return mcp.NewToolResultStructuredOnly(struct {
		Found bool   `json:"found"`
		ID    string `json:"id,omitempty"`
	}{found, id}), nil
}

func (t *toolset) sendInvitations(_ context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
	var in struct {
		ID        string   `json:"id"`
		Attendees []string `json:"attendees"`
	}
	if err := req.BindArguments(&in); err != nil {
		return mcp.NewToolResultError("arguments do not fit the schema"), nil
	}
	sent, ok := t.cal.invite(in.ID, in.Attendees)
	if !ok {
		return mcp.NewToolResultError("no such event"), nil
	}
	t.counts.execute(SendInvitations)
	return mcp.NewToolResultStructuredOnly(struct {
		Sent int `json:"sent"`
	}{sent}), nil
}

// note makes the handler of an added or generated tool.
func (t *toolset) note(name string) server.ToolHandlerFunc {
	return func(context.Context, mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		t.counts.execute(name)
		return mcp.NewToolResultStructuredOnly(struct {
			Count int `json:"count"`
		}{t.counts.executed(name)}), nil
	}
}

// add offers a new writing tool.
func (t *toolset) add(name, description string) error {
	if !toolName(name) {
		return fault.Field1("name", "must be 1 to 64 letters, digits, '_' or '-'")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.offered[name]; ok {
		return fault.New(fault.Exists, "TOOL_EXISTS", "the tool is offered already")
	}
	if t.added >= maxAddedTools {
		return fault.New(fault.Exhausted, "TOO_MANY_TOOLS", "no more than %d tools can be added", maxAddedTools)
	}
	t.added++
	t.offer(define(name, description, noteIn, noteOut, writes(), t.note(name)))
	return nil
}

// describe changes an offered tool's description.
func (t *toolset) describe(name, description string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	d, ok := t.offered[name]
	if !ok {
		return fault.New(fault.NotFound, "NO_SUCH_TOOL", "no such tool is offered")
	}
	d.Tool.Description = description
	t.offer(d)
	return nil
}

// remove withdraws an offered tool.
func (t *toolset) remove(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.offered[name]; !ok {
		return fault.New(fault.NotFound, "NO_SUCH_TOOL", "no such tool is offered")
	}
	delete(t.offered, name)
	t.mcp.DeleteTools(name)
	return nil
}

// offer registers a tool; the library announces the change. The caller holds mu.
func (t *toolset) offer(d server.ServerTool) {
	t.offered[d.Tool.Name] = d
	t.mcp.AddTools(d)
}

// names returns what is offered, sorted.
func (t *toolset) names() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	names := make([]string, 0, len(t.offered))
	for n := range t.offered {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

func toolName(s string) bool {
	if len(s) == 0 || len(s) > 64 {
		return false
	}
	for _, r := range s {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
		default:
			return false
		}
	}
	return true
}
