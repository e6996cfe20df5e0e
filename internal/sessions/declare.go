package sessions

import (
	"slices"
	"strconv"
	"strings"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// extensionTasks is the id of the extension for tasks.
const extensionTasks = "io.modelcontextprotocol/tasks"

// declarations is the number of sets that Capabilities can be.
const declarations = 1 << 5

// index numbers a set, for what is encoded once for each.
func (d Capabilities) index() (n int) {
	for i, on := range [...]bool{d.ElicitationForm, d.ElicitationURL, d.Sampling, d.Roots, d.Tasks} {
		if on {
			n |= 1 << i
		}
	}
	return n
}

func declarationOf(n int) Capabilities {
	return Capabilities{ElicitationForm: n&1 != 0, ElicitationURL: n&2 != 0, Sampling: n&4 != 0, Roots: n&8 != 0, Tasks: n&16 != 0}
}

// modern is the set as clientCapabilities of the modern era.
func (d Capabilities) modern() string {
	members := d.members(d.modes(true))
	if d.Tasks {
		members = append(members, `"extensions":{"`+extensionTasks+`":{}}`)
	}
	return "{" + strings.Join(members, ",") + "}"
}

// legacy is the set as the capabilities of initialize.
func (d Capabilities) legacy(version string) string {
	return "{" + strings.Join(d.members(d.modes(version >= mcp.ProtocolVersion20251125)), ",") + "}"
}

// modes is the value of elicitation, empty for none. Revisions without modes know
// the form only.
func (d Capabilities) modes(named bool) string {
	var modes []string
	if d.ElicitationForm && named {
		modes = append(modes, `"form":{}`)
	}
	if d.ElicitationURL && named {
		modes = append(modes, `"url":{}`)
	}
	if len(modes) == 0 && !d.ElicitationForm {
		return ""
	}
	return "{" + strings.Join(modes, ",") + "}"
}

func (d Capabilities) members(elicitation string) (out []string) {
	if elicitation != "" {
		out = append(out, `"elicitation":`+elicitation)
	}
	if d.Roots {
		out = append(out, `"roots":{}`)
	}
	if d.Sampling {
		out = append(out, `"sampling":{}`)
	}
	return out
}

// inHandshake is what of the set a handshake for this version can declare.
func (d Capabilities) inHandshake(version string) Capabilities {
	d.Tasks = false
	d.ElicitationForm = d.ElicitationForm && version >= mcp.ProtocolVersion20250618
	d.ElicitationURL = d.ElicitationURL && version >= mcp.ProtocolVersion20251125
	return d
}

// asks reports whether a server with this declaration may ask for anything.
func (d Capabilities) asks() bool {
	return d.ElicitationForm || d.ElicitationURL || d.Sampling || d.Roots
}

// agrees reports whether a legacy connection was declared as the target wants it.
func (c *conn) agrees(t *Target) bool {
	if c.era != EraLegacy {
		return true
	}
	was, wants := c.target.Declare, t.Declare
	was.Tasks, wants.Tasks = false, false
	return was == wants && c.target.LogLevel == t.LogLevel && (!wants.Roots || slices.Equal(c.target.Roots, t.Roots))
}

// The capabilities of a server that requests need, as bits.
const (
	offersTools = 1 << iota
	offersResources
	offersSubscribe
	offersPrompts
	offersCompletions
	offersLogging
	offersTasks
)

// offersOf reads which features a server declares. Before revision 2025-03-26
// there was no flag for completions.
func offersOf(caps []byte, version string) (offers uint8) {
	has := func(bit uint8, raw []byte) {
		if len(raw) > 0 && raw[0] == '{' {
			offers |= bit
		}
	}
	has(offersTools, member(caps, "tools"))
	resources := member(caps, "resources")
	has(offersResources, resources)
	if string(member(resources, "subscribe")) == "true" {
		offers |= offersSubscribe
	}
	has(offersPrompts, member(caps, "prompts"))
	has(offersCompletions, member(caps, "completions"))
	if version < mcp.ProtocolVersion20250326 {
		offers |= offersCompletions
	}
	has(offersLogging, member(caps, "logging"))
	has(offersTasks, member(member(caps, "extensions"), extensionTasks))
	return offers
}

// needs maps the methods of requests to what the server must declare for them.
var needs = map[string]struct {
	bit  uint8
	name string
}{
	string(mcp.MethodToolsCall):            {offersTools, "tools"},
	string(mcp.MethodResourcesRead):        {offersResources, "resources"},
	string(mcp.MethodResourcesSubscribe):   {offersSubscribe, "resources.subscribe"},
	string(mcp.MethodResourcesUnsubscribe): {offersSubscribe, "resources.subscribe"},
	string(mcp.MethodPromptsGet):           {offersPrompts, "prompts"},
	string(mcp.MethodCompletionComplete):   {offersCompletions, "completions"},
	string(mcp.MethodSetLogLevel):          {offersLogging, "logging"},
	string(mcp.MethodTasksGet):             {offersTasks, extensionTasks},
	methodTasksUpdate:                      {offersTasks, extensionTasks},
	string(mcp.MethodTasksCancel):          {offersTasks, extensionTasks},
}

// methodTasksUpdate answers the questions of a task.
const methodTasksUpdate = "tasks/update"

func isTask(method string) bool { return strings.HasPrefix(method, "tasks/") }

// gate refuses what the server did not declare, and what its era does not have.
func (c *conn) gate(t *Target, method string) error {
	need, ok := needs[method]
	switch {
	case !ok: // a list, which has rules of its own
		return nil
	case isTask(method) && c.era != EraModern:
		return failure(fault.Precondition, fault.Host, "ERA_UNSUITED", "tasks exist on connections of the modern era only").With("method", method)
	case isTask(method) && !t.Declare.Tasks:
		return failure(fault.Precondition, fault.Host, "CAPABILITY_UNDECLARED", "tasks are not declared to this server").With("method", method)
	case c.offers&need.bit == 0:
		return failure(fault.Precondition, fault.Host, "CAPABILITY_MISSING", "the server does not declare the capability "+need.name+", so this is not asked of it").
			With("capability", need.name).With("method", method)
	}
	return nil
}

// maxRequired bounds the capabilities that a refusal is read for, and a name.
const maxRequired = 16

// capabilityRequired is the fault for the error of a server that refused the
// request because this client does not declare a capability; nil for any other.
func capabilityRequired(e *RPCError) *fault.Error {
	if e == nil || e.Code != mcp.MISSING_REQUIRED_CLIENT_CAPABILITY {
		return nil
	}
	var names []string
	add := func(prefix string, raw []byte, deeper func(name string, raw []byte) bool) {
		s := scanner{data: raw}
		s.object(0, func(name []byte) error { //nolint:errcheck // what can be read is shown
			v, err := s.raw(1)
			if err != nil {
				return err
			}
			if full := prefix + string(name); len(names) < maxRequired && !deeper(full, v) {
				names = append(names, shorten(full, 128))
			}
			return nil
		})
	}
	leaf := func(string, []byte) bool { return false }
	add("", member(e.Data, "requiredCapabilities"), func(name string, raw []byte) bool {
		had := len(names)
		switch name {
		case "extensions":
			add("", raw, leaf)
		case "elicitation", "sampling":
			add(name+".", raw, leaf)
		}
		return len(names) > had
	})
	slices.Sort(names)
	said := "a capability that it does not name"
	if len(names) > 0 {
		said = strconv.Quote(strings.Join(names, ", "))
	}
	return failure(fault.Precondition, fault.Protocol, "CLIENT_CAPABILITY_REQUIRED",
		"the server refuses the request because this client does not declare "+said).With("capabilities", strings.Join(names, ","))
}

func subscribes(method string) bool {
	return method == string(mcp.MethodResourcesSubscribe) || method == string(mcp.MethodResourcesUnsubscribe)
}
