package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/bulkhead-mcp/bulkhead/test/load"
)

// Targets and cases by the names that the report uses.
const (
	direct       = "direct"
	reverseProxy = "reverse-proxy"
	overREST     = "rest"
	overGRPC     = "grpc"

	caseRead  = "read"
	caseList  = "list"
	caseLarge = "large"
	caseIdle  = "idle"
)

// user is a caller's identity with its session.
type user struct {
	load.As
	session string
}

// users opens a session for each of n users, dealt out to the tenants.
func (w *world) users(ctx context.Context, kind string, tenants []*load.Tenant, n int, server string) ([]user, error) {
	c := load.NewREST(w.url, 1)
	defer c.Close()
	out := make([]user, n)
	for i := range out {
		who := load.As{Key: tenants[i%len(tenants)].ServiceKey, User: fmt.Sprintf("%s-%d", kind, i)}
		id, err := c.Open(ctx, who, server)
		if err != nil {
			return nil, err
		}
		out[i] = user{who, id}
	}
	return out, nil
}

func bearer(u user) map[string]string {
	return map[string]string{"Authorization": "Bearer " + u.Key, "Bulkhead-User": u.User}
}

// wires opens a connection for each caller.
func wires(n int, dialOne func(i int) (*wire, error)) (cs []caller, done func(), err error) {
	var open []*wire
	done = func() {
		for _, x := range open {
			x.close()
		}
	}
	for i := range n {
		x, err := dialOne(i)
		if err != nil {
			done()
			return nil, nil, err
		}
		open, cs = append(open, x), append(cs, x.do)
	}
	return cs, done, nil
}

// mcpTarget is the MCP server itself, or a proxy before it, called in the modern
// era as a client of its own would.
func mcpTarget(name string, own, upstream *child, base string, method, tool, params, expect string) target {
	return target{name: name, own: own, upstream: upstream, open: func(_ context.Context, n int) ([]caller, func(), error) {
		return wires(n, func(int) (*wire, error) {
			return dial(base, "POST", "/mcp", modern(method, tool), modernBody(method, params), expect)
		})
	}}
}

// restTarget proposes the read over REST in the sessions of these users.
func (w *world) restTarget(users []user, upstream *child, server, expect string) target {
	body := strings.Replace(load.ReadBody, `"`+load.ReadServer+`"`, `"`+server+`"`, 1)
	return target{name: overREST, own: w.server, upstream: upstream, open: func(_ context.Context, n int) ([]caller, func(), error) {
		return wires(n, func(i int) (*wire, error) {
			return dial(w.url, "POST", "/v1/sessions/"+users[i].session+"/calls", bearer(users[i]), body, expect)
		})
	}}
}

// grpcTarget is the same over gRPC: one connection for all callers, as a backend
// has it.
func (w *world) grpcTarget(users []user) target {
	return target{name: overGRPC, own: w.server, upstream: w.upstream, open: func(_ context.Context, n int) ([]caller, func(), error) {
		c, err := load.NewGRPC(w.url)
		if err != nil {
			return nil, nil, err
		}
		cs := make([]caller, n)
		for i := range cs {
			u := users[i]
			cs[i] = func(ctx context.Context) error { return c.Read(ctx, u.As, u.session) }
		}
		return cs, func() { c.Close() }, nil
	}}
}

const (
	readParams    = `"name":"` + load.ReadTool + `","arguments":` + load.ReadArguments
	readExpect    = `"free"`
	readSucceeded = `"SUCCEEDED"`
)

// readCases are a consent-free read at different numbers of callers.
func (w *world) readCases(ctx context.Context, callers []int) ([]bench, error) {
	most := 0
	for _, n := range callers {
		most = max(most, n)
	}
	users, err := w.users(ctx, "reader", w.tenants, most, load.ReadServer)
	if err != nil {
		return nil, err
	}
	var out []bench
	for _, n := range callers {
		out = append(out, bench{name: caseRead, callers: n, targets: []target{
			mcpTarget(direct, nil, w.upstream, strings.TrimSuffix(w.upstreamURL, "/mcp"), "tools/call", load.ReadTool, readParams, readExpect),
			mcpTarget(reverseProxy, w.proxy, w.upstream, w.proxyURL, "tools/call", load.ReadTool, readParams, readExpect),
			w.restTarget(users, w.upstream, load.ReadServer, readSucceeded),
			w.grpcTarget(users),
		}})
	}
	return out, nil
}

// largeCases are the same read with an answer of about 64 KiB, at four callers.
func (w *world) largeCases(ctx context.Context) ([]bench, error) {
	const callers = 4
	users, err := w.users(ctx, "large", w.tenants[:1], callers, largeServer)
	if err != nil {
		return nil, err
	}
	return []bench{{name: caseLarge, callers: callers, targets: []target{
		mcpTarget(direct, nil, w.named(largeServer), strings.TrimSuffix(w.largeURL, "/mcp"), "tools/call", load.ReadTool, readParams, readExpect),
		mcpTarget(reverseProxy, w.named("proxy-large"), w.named(largeServer), w.proxyLargeURL, "tools/call", load.ReadTool, readParams, readExpect),
		w.restTarget(users, w.named(largeServer), largeServer, readSucceeded),
	}}}, nil
}

// named returns the process of this name.
func (w *world) named(name string) *child {
	for _, c := range w.children {
		if c.name == name {
			return c
		}
	}
	return nil
}

// listCases are the whole list of tools at one caller, beside the server's own.
func (w *world) listCases(ctx context.Context) ([]bench, error) {
	var out []bench
	for _, s := range []struct {
		name, url string
		tools     int
	}{{hundredServer, w.hundredURL, 100}, {thousandServer, w.thousandURL, 1000}} {
		users, err := w.users(ctx, s.name, w.tenants, len(w.tenants), s.name)
		if err != nil {
			return nil, err
		}
		for _, u := range users {
			if err := w.countTools(ctx, u, s.tools); err != nil {
				return nil, err
			}
		}
		rest := target{name: overREST, own: w.server, upstream: w.named(s.name), open: func(context.Context, int) ([]caller, func(), error) {
			cs, done, err := wires(len(users), func(i int) (*wire, error) {
				return dial(w.url, "GET", "/v1/sessions/"+users[i].session+"/tools", bearer(users[i]), "", `"modelName"`)
			})
			return []caller{inTurn(cs)}, done, err
		}}
		out = append(out, bench{name: caseList + " " + strconv.Itoa(s.tools), callers: 1, targets: []target{
			mcpTarget(direct, nil, w.named(s.name), strings.TrimSuffix(s.url, "/mcp"), "tools/list", "", "", `"inputSchema"`), rest,
		}})
	}
	return out, nil
}

// inTurn is one caller for a user of each tenant, because it may be faster than
// one tenant is allowed to be.
func inTurn(cs []caller) caller {
	turn := 0
	return func(ctx context.Context) error {
		turn++
		return cs[turn%len(cs)](ctx)
	}
}

// countTools makes sure that the list is whole before its time is taken.
func (w *world) countTools(ctx context.Context, u user, want int) error {
	c := load.NewREST(w.url, 1)
	defer c.Close()
	n, err := c.Tools(ctx, u.As, u.session)
	if err == nil && n != want {
		err = fmt.Errorf("the list has %d tools, not %d", n, want)
	}
	return err
}
