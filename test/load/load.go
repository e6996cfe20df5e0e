// Package load drives a running Bulkhead as its callers do: it prepares tenants
// whose contract allows the demo calendar's tools, and proposes, decides and
// lists over REST and gRPC. The bench and the soak test share it. It measures
// nothing and knows nothing of the service but its public API.
package load

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// Tenant is a prepared tenant: its servers are registered and reviewed.
type Tenant struct {
	ID string
	// The secrets of its keys.
	AdminKey, ServiceKey, ApproverKey string
}

// Server is a demo calendar as tenants register it.
type Server struct {
	// Name is that of the registration.
	Name string
	// URL is its MCP endpoint.
	URL string
}

// maxAnswer bounds an answer that is read, in bytes.
const maxAnswer = 64 << 20

// REST calls Bulkhead over REST. It is safe for concurrent use.
type REST struct {
	// URL is Bulkhead's address without a slash at the end.
	URL    string
	client *http.Client
}

// NewREST returns a client that keeps at most conns connections.
func NewREST(url string, conns int) *REST {
	return &REST{URL: url, client: &http.Client{Transport: &http.Transport{MaxConnsPerHost: conns, MaxIdleConnsPerHost: conns}}}
}

// Close ends the connections that no request uses.
func (c *REST) Close() { c.client.CloseIdleConnections() }

// As names a caller: a key, and the user it acts for where it is a service's.
type As struct{ Key, User string }

// Do makes one request and decodes the answer into out, unless that is nil. Any
// status but 200 is an error with the answer's text.
func (c *REST) Do(ctx context.Context, who As, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(raw)
	}
	r, err := http.NewRequestWithContext(ctx, method, c.URL+path, body)
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "Bearer "+who.Key)
	if who.User != "" {
		r.Header.Set("Bulkhead-User", who.User)
	}
	if in != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.client.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s: %.500s", method, path, resp.Status, raw)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(raw, out)
}

// Prepare makes a tenant with the operator's key, registers the servers, and has
// an administrator review all they offer: reads need no consent, drafts ask for
// each call. A session may make a million calls.
func (c *REST) Prepare(ctx context.Context, operatorKey, name string, servers ...Server) (*Tenant, error) {
	var t struct{ TenantID, AdminKey string }
	if err := c.Do(ctx, As{Key: operatorKey}, "POST", "/v1/tenants", map[string]any{"displayName": name}, &t); err != nil {
		return nil, err
	}
	out := &Tenant{ID: t.TenantID, AdminKey: t.AdminKey}
	for role, key := range map[string]*string{"SERVICE": &out.ServiceKey, "APPROVER": &out.ApproverKey} {
		var made struct{ Secret string }
		err := c.Do(ctx, As{Key: out.AdminKey}, "POST", "/v1/keys", map[string]any{"displayName": role, "role": role}, &made)
		if err != nil {
			return nil, err
		}
		*key = made.Secret
	}
	for _, s := range servers {
		if err := c.register(ctx, As{Key: out.AdminKey}, s); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (c *REST) register(ctx context.Context, admin As, s Server) error {
	path := "/v1/servers/" + s.Name
	err := c.Do(ctx, admin, "POST", "/v1/servers", map[string]any{"name": s.Name, "http": map[string]any{"url": s.URL},
		"isolation": "PER_USER", "authorization": map[string]any{"mode": "NONE"}}, nil)
	if err != nil {
		return err
	}
	var offered struct {
		Definitions []struct{ Name, DefinitionDigest string }
	}
	if err := c.Do(ctx, admin, "GET", path+"/definitions?refresh=true", nil, &offered); err != nil {
		return err
	}
	tools := make([]map[string]any, 0, len(offered.Definitions))
	for _, d := range offered.Definitions {
		t := map[string]any{"name": d.Name, "definition": d.DefinitionDigest, "effect": "read", "consent": "none"}
		switch d.Name {
		case "create_draft_event":
			t["effect"], t["consent"] = "write", "call"
			t["idempotency"] = map[string]any{"argument": "requestId"}
		case "send_invitations":
			t["effect"], t["consent"] = "destructive", "call"
		}
		tools = append(tools, t)
	}
	var made struct{ Revision int }
	err = c.Do(ctx, admin, "POST", path+"/contracts", map[string]any{"contract": map[string]any{
		"server": s.Name, "transport": "http", "origin": strings.TrimSuffix(s.URL, "/mcp"), "audience": s.URL,
		"protocol": map[string]any{"versions": []string{"2026-07-28", "2025-11-25"}},
		"methods":  []string{"tools/list", "tools/call"},
		"limits":   map[string]any{"calls_per_session": 1_000_000},
		"tools":    tools,
	}}, &made)
	if err != nil {
		return err
	}
	return c.Do(ctx, admin, "POST", path+"/contracts/"+strconv.Itoa(made.Revision)+":activate", struct{}{}, nil)
}

// Open opens a session of a user with these servers and returns its id.
func (c *REST) Open(ctx context.Context, who As, servers ...string) (string, error) {
	var s struct{ SessionID string }
	err := c.Do(ctx, who, "POST", "/v1/sessions", map[string]any{"servers": servers}, &s)
	return s.SessionID, err
}

// CloseSession closes a session.
func (c *REST) CloseSession(ctx context.Context, who As, session string) error {
	return c.Do(ctx, who, "DELETE", "/v1/sessions/"+session, nil, nil)
}

// Tools lists the session's tools and returns how many there are.
func (c *REST) Tools(ctx context.Context, who As, session string) (int, error) {
	var list struct{ Tools []struct{} }
	err := c.Do(ctx, who, "GET", "/v1/sessions/"+session+"/tools", nil, &list)
	return len(list.Tools), err
}

// Call is the part of a call that its caller looks at.
type Call struct {
	CallID   string
	Revision int
	State    string
	Consent  struct{ ConsentID string }
	Error    json.RawMessage
	Decision struct {
		FirstFailed, Reason string
		Checks              []struct {
			Check, Detail string
			Passed        bool
		}
	}
}

// why tells what a call says about its state.
func (c Call) why() string {
	out := fmt.Sprintf("%s %s %s %s", c.State, c.Decision.FirstFailed, c.Decision.Reason, c.Error)
	for _, k := range c.Decision.Checks {
		if !k.Passed {
			out += fmt.Sprintf("; %s: %s", k.Check, k.Detail)
		}
	}
	return out
}

// Read proposes a consent-free read and returns an error unless it succeeded.
func (c *REST) Read(ctx context.Context, who As, session string) error {
	var call Call
	err := c.Do(ctx, who, "POST", "/v1/sessions/"+session+"/calls", json.RawMessage(ReadBody), &call)
	if err == nil && call.State != "SUCCEEDED" {
		err = fmt.Errorf("the read ended as %s", call.why())
	}
	return err
}

// ReadTool and ReadArguments are the read that load consists of.
const (
	ReadTool      = "get_availability"
	ReadArguments = `{"from":"2026-12-01T09:00:00Z","to":"2026-12-01T17:00:00Z"}`
	// ReadServer is the registration that Read uses.
	ReadServer = "calendar"
	// ReadBody is the body of its proposal over REST.
	ReadBody = `{"server":"` + ReadServer + `","tool":"` + ReadTool + `","arguments":` + ReadArguments + `}`
)

// Write proposes a draft, which asks for consent, and lets the approver answer.
// It returns an error unless an approved draft succeeded and a denied one was
// denied. All drafts of a user are one event, so that no calendar is filled.
func (c *REST) Write(ctx context.Context, t *Tenant, who As, session string, approve bool) error {
	var call Call
	err := c.Do(ctx, who, "POST", "/v1/sessions/"+session+"/calls", map[string]any{"server": ReadServer, "tool": "create_draft_event",
		"arguments": map[string]any{"title": "Review", "start": "2027-03-01T09:00:00Z", "end": "2027-03-01T10:00:00Z", "requestId": who.User}}, &call)
	if err != nil {
		return err
	}
	if call.State != "CONSENT_REQUIRED" {
		return fmt.Errorf("the write is %s", call.why())
	}
	decision, want := "APPROVE", "SUCCEEDED"
	if !approve {
		decision, want = "DENY", "DENIED"
	}
	err = c.Do(ctx, As{Key: t.ApproverKey}, "POST", "/v1/consents/"+call.Consent.ConsentID+":decide",
		map[string]any{"decision": decision, "reason": "load"}, nil)
	if err != nil {
		return err
	}
	for call.State == "CONSENT_REQUIRED" || call.State == "DISPATCHING" {
		path := "/v1/calls/" + call.CallID + "?wait=10s&afterRevision=" + strconv.Itoa(call.Revision)
		before := call.Revision
		if err := c.Do(ctx, who, "GET", path, nil, &call); err != nil {
			return err
		}
		if call.Revision == before {
			return fmt.Errorf("the write is still %s", call.State)
		}
	}
	if call.State != want {
		return fmt.Errorf("the write ended not as %s but as %s", want, call.why())
	}
	return nil
}
