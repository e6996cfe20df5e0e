package sessions

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// runChild is what the test binary does when a test started it: be a server on
// stdio, or a host with one that waits to be killed.
func runChild(role string) {
	role, args, _ := strings.Cut(role, " ")
	switch role {
	case "server":
		if d, err := time.ParseDuration(os.Getenv("START_DELAY")); err == nil {
			time.Sleep(d)
		}
		if os.Getenv("STUBBORN") != "" {
			signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
			defer func() { select {} }()
		}
		fmt.Fprintln(os.Stderr, "starting")
		serveChild()
	case "cost":
		era, size, _ := strings.Cut(args, " ")
		costServer(era, size)
	case "watch":
		watchServer(args)
	case "host":
		hostChild()
	}
}

type childMessage struct {
	ID     json.RawMessage
	Method string
	Params struct {
		Name          string
		RequestID     json.RawMessage
		Notifications json.RawMessage
		Meta          struct{ ProgressToken json.RawMessage } `json:"_meta"`
	}
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// childListens is the id of the newest request for a stream of changes.
var childListens json.RawMessage

func serveChild() {
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		var m childMessage
		if json.Unmarshal(line, &m) != nil {
			os.Exit(4) // the host wrote something that is no message
		}
		era := os.Getenv("ERA")
		switch m.Method {
		case "server/discover":
			if raw := os.Getenv("DISCOVER"); raw != "" {
				say("%s", strings.ReplaceAll(raw, "$ID", string(m.ID)))
			} else if era == "modern" {
				say(`{"jsonrpc":"2.0","id":%s,"result":{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{"listChanged":true},"resources":{"subscribe":true},"logging":{}}}}`, m.ID)
			} else if era != "silent" {
				say(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32601,"message":"no"}}`, m.ID)
			}
		case "initialize":
			say(`{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2024-11-05","capabilities":{"tools":{"listChanged":true},"resources":{"subscribe":true},"logging":{}},"serverInfo":{"name":"child","version":"1"}}}`, m.ID)
		case "subscriptions/listen":
			say(`{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":%s},"notifications":%s}}`, m.ID, m.Params.Notifications)
			childListens = m.ID
		case "resources/subscribe", "resources/unsubscribe", "logging/setLevel":
			say(`{"jsonrpc":"2.0","id":%s,"result":{}}`, m.ID)
		case "notifications/cancelled":
			say(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`)
		case "tools/list":
			say(`{"jsonrpc":"2.0","id":%s,"result":{"tools":[{"name":"echo"}]}}`, m.ID)
		case "tools/call":
			childCall(m, in)
		}
	}
}

func childCall(m childMessage, in *bufio.Reader) {
	answer := func(text string) {
		b, _ := json.Marshal(text)
		say(`{"jsonrpc":"2.0","id":%s,"result":{"content":[{"type":"text","text":%s}]}}`, m.ID, b)
	}
	switch m.Params.Name {
	case "echo":
		answer("ok")
	case "look":
		answer(childView())
	case "crash":
		os.Exit(3)
	case "answer and crash":
		answer("last words")
		os.Exit(3)
	case "hang":
	case "noise":
		say("Welcome to the server!\n\U0001F600\n[not json\n{\"half\": ")
		for i := range 36 {
			say("log line %d", i)
		}
		say(`{"jsonrpc":"2.0","id":99999,"result":{}}`)
		answer("ok")
		say("bye")
	case "large":
		answer(strings.Repeat("x", 200<<10))
	case "large, id last":
		say(`{"jsonrpc":"2.0","result":{"content":[{"type":"text","text":"%s"}]},"id":%s}`, strings.Repeat("x", 200<<10), m.ID)
	case "empty":
		say(`{"jsonrpc":"2.0","id":%s}`, m.ID)
	case "long line":
		say("%s", strings.Repeat("x", 2<<20))
	case "ask":
		say(`{"jsonrpc":"2.0","id":"a1","method":"roots/list"}`)
		reply, _ := in.ReadString('\n')
		say(`{"jsonrpc":"2.0","id":"a2","method":"ping"}`)
		pong, _ := in.ReadString('\n')
		answer(reply + pong)
	case "ask user":
		say(`{"jsonrpc":"2.0","id":"u1","method":"elicitation/create","params":{"message":"which?"}}`)
		reply, _ := in.ReadString('\n')
		answer(reply)
	case "progress":
		say(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":%s,"progress":0.5,"total":2,"message":"half"}}`, m.Params.Meta.ProgressToken)
		say(`{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"error","logger":"l","data":{"x":1}}}`)
		answer("ok")
	case "update":
		meta := ""
		if childListens != nil {
			meta = `"_meta":{"io.modelcontextprotocol/subscriptionId":` + string(childListens) + `},`
		}
		say(`{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{%s"uri":"file:///a"}}`, meta)
		answer("ok")
	case "null error":
		say(`{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"parse error"}}`)
	case "string id":
		say(`{"jsonrpc":"2.0","id":"%s","result":{"content":[]}}`, m.ID)
	case "stop reading":
		answer("ok")
		select {}
	case "close output":
		os.Stdout.Close()
		select {}
	case "spawn":
		c := exec.Command("sleep", "1000")
		if err := c.Start(); err != nil {
			panic(err)
		}
		answer(fmt.Sprintf("%d %d", os.Getpid(), c.Process.Pid))
	case "change":
		for range 50 {
			say(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`)
		}
		answer("ok")
	}
}

// childView tells what a child can see of its host.
func childView() string {
	view := map[string]any{"env": os.Environ()}
	view["cwd"], _ = os.Getwd()
	view["pgid"], view["pid"] = syscall.Getpgrp(), os.Getpid()
	var fds []string
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		to, _ := os.Readlink("/proc/self/fd/" + e.Name())
		// The Go runtime of the child opens some for itself.
		if to != "" && !strings.HasPrefix(to, "anon_inode") && !strings.HasPrefix(to, "/proc/") && !strings.HasPrefix(to, "/sys/fs/cgroup") {
			fds = append(fds, e.Name()+" "+to)
		}
	}
	view["fds"] = fds
	b, _ := json.Marshal(view)
	return string(b)
}

// hostChild opens a stdio server whose program starts another one, prints their
// numbers, and waits to be killed.
func hostChild() {
	var id tenant.ID
	if err := id.Scan("ten_a"); err != nil {
		panic(err)
	}
	self, err := filepath.Abs(os.Args[0])
	if err != nil {
		panic(err)
	}
	p := NewPool(PoolConfig{Egress: egress.New(egress.Policy{}), Log: quietLog(), TempDir: os.Getenv("TEMP_DIR"), Runtimes: map[string]Runtime{
		"shell": {Command: []string{"sh", "-c", `"$0"; exit 0`, self}, Env: map[string]string{"BULKHEAD_TEST_CHILD": "server", "ERA": "legacy", "STUBBORN": "1"},
			ReadRoots: []string{self}, User: strconv.Itoa(os.Getuid()), Limits: raceLimits},
	}})
	resp, err := p.Do(context.Background(), Key{Tenant: id, Server: "srv_1"}, Target{Transport: TransportStdio, Runtime: "shell"},
		Request{Method: "tools/call", Name: "spawn", Params: json.RawMessage(`{"name":"spawn"}`)})
	if err != nil {
		panic(err)
	}
	fmt.Println(string(resp.Result))
	time.Sleep(time.Hour)
}
