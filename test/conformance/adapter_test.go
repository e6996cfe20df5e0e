package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"
)

const (
	// serverName is how each scenario's tenant calls the suite's server.
	serverName = "judge"
	// adapterTime is less than the suite waits, so that we say ourselves what hung.
	adapterTime = 15 * time.Second
	// showcase and profile are tools that are there for their schemas: another tool
	// is called with the one, and the server of the other serves no calls.
	showcase = "json_schema_2020_12_tool"
	profile  = "lookup_user"
)

// obj is a JSON object.
type obj = map[string]any

// adapter is one run: a tenant of its own with one server.
type adapter struct {
	ctx                        context.Context
	operator, admin, alice     caller
	scenario, version, session string
}

// adapt is the program that the suite runs, with the URL of its server as the
// last argument.
func adapt() (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), adapterTime)
	defer cancel()
	a := &adapter{ctx: ctx, scenario: os.Getenv("MCP_CONFORMANCE_SCENARIO"), version: os.Getenv("MCP_CONFORMANCE_PROTOCOL_VERSION"),
		operator: caller{url: os.Getenv(adapterURL), key: os.Getenv(adapterOperator)}}
	if err := a.run(os.Args[len(os.Args)-1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (a *adapter) run(url string) error {
	if err := a.tenant(url); err != nil {
		return err
	}
	seen, err := a.review()
	if err != nil {
		return err
	}
	calls, err := a.calls(seen)
	if err != nil {
		return err
	}
	var failed []error
	for _, c := range calls {
		if err := a.call(c); err != nil {
			failed = append(failed, err)
		}
	}
	// The suite waits until nobody is connected to its server.
	failed = append(failed, a.alice.do(a.ctx, "DELETE", a.session, nil, nil), a.admin.do(a.ctx, "DELETE", "/v1/servers/"+serverName, nil, nil))
	return errors.Join(failed...)
}

// tenant makes a tenant with an admin and a user's service key, and registers the
// suite's server under a contract that only fixes the protocol version.
func (a *adapter) tenant(url string) error {
	var made struct{ AdminKey string }
	if err := a.operator.do(a.ctx, "POST", "/v1/tenants", obj{"displayName": a.scenario}, &made); err != nil {
		return err
	}
	a.admin = caller{url: a.operator.url, key: made.AdminKey}
	var key struct{ Secret string }
	if err := a.admin.do(a.ctx, "POST", "/v1/keys", obj{"displayName": "frontend", "role": "SERVICE"}, &key); err != nil {
		return err
	}
	a.alice = caller{url: a.operator.url, key: key.Secret, user: "alice"}
	return a.admin.do(a.ctx, "POST", "/v1/servers", obj{"name": serverName, "http": obj{"url": url}}, nil)
}

// definition is what the server offers.
type definition struct {
	Kind, Name, DefinitionDigest, Quarantine string
}

// review pins what the server lists, and returns what the user then sees.
func (a *adapter) review() (offers, error) {
	// An admin may look at a server before there is a contract for it, and would do
	// so in whatever version the server prefers. A user's look is bound by the
	// contract, and the admin sees what it found.
	// A kind of which it names nothing is not even listed.
	if err := a.activate(nil, []obj{{"uri": "https://nothing.example/"}}, []obj{{"name": "nothing"}}); err != nil {
		return offers{}, err
	}
	var opened struct{ SessionID string }
	if err := a.alice.do(a.ctx, "POST", "/v1/sessions", obj{"servers": []string{serverName}}, &opened); err != nil {
		return offers{}, err
	}
	a.session = "/v1/sessions/" + opened.SessionID
	if _, err := a.offered(); err != nil {
		return offers{}, err
	}
	var listed struct{ Definitions []definition }
	if err := a.admin.do(a.ctx, "GET", "/v1/servers/"+serverName+"/definitions", nil, &listed); err != nil {
		return offers{}, err
	}
	var tools, resources, prompts []obj
	for _, d := range listed.Definitions {
		switch {
		case d.Quarantine != "":
		case d.Kind == "TOOL":
			tools = append(tools, obj{"name": d.Name, "definition": d.DefinitionDigest, "effect": "write", "consent": "none"})
		case d.Kind == "RESOURCE":
			resources = append(resources, obj{"uri": d.Name})
		case d.Kind == "PROMPT":
			prompts = append(prompts, obj{"name": d.Name, "definition": d.DefinitionDigest})
		}
	}
	if err := a.activate(tools, resources, prompts); err != nil {
		return offers{}, err
	}
	return a.offered()
}

// offer is one thing that the user may call, read or get.
type offer struct {
	Name, URI  string
	Definition json.RawMessage
}

// offers are those that the user sees.
type offers struct {
	Tools, Resources, Prompts []offer
}

// offered lists what the user sees of every kind.
func (a *adapter) offered() (seen offers, err error) {
	for _, kind := range []string{"tools", "resources", "prompts"} {
		if err := a.alice.do(a.ctx, "GET", a.session+"/"+kind, nil, &seen); err != nil {
			return seen, err
		}
	}
	fmt.Printf("the user sees %d tools, %d resources, %d prompts\n", len(seen.Tools), len(seen.Resources), len(seen.Prompts))
	return seen, nil
}

func (a *adapter) activate(tools, resources, prompts []obj) error {
	var server struct{ Origin string }
	if err := a.admin.do(a.ctx, "GET", "/v1/servers/"+serverName, nil, &server); err != nil {
		return err
	}
	c := obj{"server": serverName, "transport": "http", "origin": server.Origin,
		"protocol": obj{"versions": []string{a.version}}, "tools": tools, "resources": resources, "prompts": prompts,
		"methods": []string{"tools/list", "tools/call", "resources/list", "resources/templates/list", "resources/read", "prompts/list", "prompts/get"},
		"reverse": a.reverse()}
	for _, name := range []string{"tools", "resources", "prompts"} {
		if len(c[name].([]obj)) == 0 {
			delete(c, name)
		}
	}
	var draft struct{ Revision int }
	if err := a.admin.do(a.ctx, "POST", "/v1/servers/"+serverName+"/contracts", obj{"contract": c}, &draft); err != nil {
		return err
	}
	return a.admin.do(a.ctx, "POST", fmt.Sprintf("/v1/servers/%s/contracts/%d:activate", serverName, draft.Revision), obj{}, nil)
}

// reverse is what the server may ask for: forms, and everything where the
// scenario looks at what is declared.
func (a *adapter) reverse() obj {
	if a.scenario == "request-metadata" {
		return obj{"elicitation": obj{"form": true, "url": []string{"https://sign-in.example"}}, "sampling": true, "roots": []string{"file:///work"}}
	}
	return obj{"elicitation": obj{"form": true}}
}

// calls are the calls of a scenario: those that it asks for, else everything that
// the user sees, once.
func (a *adapter) calls(seen offers) (calls []obj, err error) {
	var wanted struct {
		ToolCalls []struct {
			Name      string
			Arguments map[string]json.RawMessage
		}
	}
	if text := os.Getenv("MCP_CONFORMANCE_CONTEXT"); text != "" {
		if err := json.Unmarshal([]byte(text), &wanted); err != nil {
			return nil, fmt.Errorf("the suite's context: %w", err)
		}
	}
	for _, c := range wanted.ToolCalls {
		// The protocol says the same of an argument that is null and of one that is
		// absent. Null does not fit the type in the definition, and so is refused.
		maps.DeleteFunc(c.Arguments, func(_ string, v json.RawMessage) bool { return string(v) == "null" })
		calls = append(calls, obj{"tool": c.Name, "arguments": c.Arguments})
	}
	if calls != nil {
		return calls, nil
	}
	for _, tool := range seen.Tools {
		if tool.Name == showcase || tool.Name == profile {
			continue
		}
		args, err := arguments(tool, seen.Tools)
		if err != nil {
			return nil, err
		}
		calls = append(calls, obj{"tool": tool.Name, "arguments": args})
	}
	for _, r := range seen.Resources {
		calls = append(calls, obj{"resource": r.URI})
	}
	for _, p := range seen.Prompts {
		calls = append(calls, obj{"prompt": p.Name})
	}
	return calls, nil
}

// schema is as much of a tool's definition as arguments are made from.
type schema struct {
	InputSchema struct {
		Properties map[string]struct{ Type any }
		Required   []string
	}
}

// arguments makes the least arguments that a tool takes. The tool that wants the
// schema of another gets it as the API showed it.
func arguments(tool offer, all []offer) (obj, error) {
	var s schema
	if err := json.Unmarshal(tool.Definition, &s); err != nil {
		return nil, fmt.Errorf("the definition of %s: %w", tool.Name, err)
	}
	args := obj{}
	for _, name := range s.InputSchema.Required {
		switch s.InputSchema.Properties[name].Type {
		case "number", "integer":
			args[name] = 3
		case "boolean":
			args[name] = true
		case "array":
			args[name] = []any{}
		case "object":
			args[name] = obj{}
		default:
			args[name] = "text"
		}
		if tool.Name == "json_schema_echo" && name == "schema" {
			of := slices.IndexFunc(all, func(o offer) bool { return o.Name == showcase })
			if of < 0 {
				return nil, fmt.Errorf("no tool %s", showcase)
			}
			var other struct{ InputSchema json.RawMessage }
			if err := json.Unmarshal(all[of].Definition, &other); err != nil {
				return nil, err
			}
			args[name] = other.InputSchema
		}
	}
	return args, nil
}

// call proposes a call, answers what the server asks, and waits for the end.
func (a *adapter) call(c obj) error {
	c["server"], c["wait"] = serverName, "20s"
	var got struct {
		CallID, State string
		Revision      int
		Error         json.RawMessage
		Decision      json.RawMessage
	}
	if err := a.alice.do(a.ctx, "POST", a.session+"/calls", c, &got); err != nil {
		return err
	}
	for {
		switch got.State {
		case "SUCCEEDED":
			return nil
		case "DISPATCHING":
		case "INPUT_REQUIRED":
			if err := a.answer(got.CallID); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%v of %v: %s %s", got.State, c, got.Error, got.Decision)
		}
		path := fmt.Sprintf("/v1/calls/%s?wait=20s&afterRevision=%d", got.CallID, got.Revision)
		if err := a.alice.do(a.ctx, "GET", path, nil, &got); err != nil {
			return err
		}
	}
}

// answer accepts every question of the server with an empty form.
func (a *adapter) answer(call string) error {
	var asked struct {
		Interactions []struct{ InteractionID, State string }
	}
	path := "/v1/calls/" + call + "/interactions"
	if err := a.alice.do(a.ctx, "GET", path, nil, &asked); err != nil {
		return err
	}
	for _, i := range asked.Interactions {
		if i.State != "PENDING" {
			continue
		}
		if err := a.alice.do(a.ctx, "POST", path+"/"+i.InteractionID+":respond", obj{"action": "ACCEPT", "content": obj{}}, nil); err != nil {
			return err
		}
	}
	return nil
}
