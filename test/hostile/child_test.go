package hostile_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
)

// child is this test binary as an MCP server on pipes.
type child struct {
	in  *bufio.Reader
	era string
}

// ask is a message of the host.
type ask struct {
	ID     json.RawMessage
	Method string
	n      int // how many messages came, this one too
}

// beChild plays the child of a case.
func beChild(name string) {
	era, name, _ := strings.Cut(name, " ")
	c := &child{in: bufio.NewReaderSize(os.Stdin, 64<<10), era: era}
	act := childActs[name]
	if act == nil && name != "good" {
		panic("no such child: " + name)
	}
	for n := 1; ; n++ {
		line, err := c.in.ReadBytes('\n')
		if err != nil {
			return
		}
		m := ask{n: n}
		if json.Unmarshal(line, &m) != nil {
			os.Exit(4) // the host wrote something that is no message
		}
		if act == nil || !act(c, &m) {
			c.plain(&m)
		}
	}
}

// say writes a text with $ID replaced by the id of the message.
func (m *ask) say(text string) bool {
	_, err := os.Stdout.WriteString(strings.ReplaceAll(text, "$ID", string(m.ID)))
	return err == nil
}

// forever writes a text again and again, for as long as anybody reads.
func forever(to *os.File, text string) {
	chunk := []byte(strings.Repeat(text, 1+(32<<10)/len(text)))
	for {
		if _, err := to.Write(chunk); err != nil {
			os.Exit(0)
		}
	}
}

const goodLine = `{"jsonrpc":"2.0","id":$ID,"result":` + good + "}\n"

// plain answers as a good server of its era.
func (c *child) plain(m *ask) {
	switch {
	case m.Method == "server/discover" && c.era == "modern":
		m.say(`{"jsonrpc":"2.0","id":$ID,"result":{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}}` + "\n")
	case m.Method == "initialize":
		m.say(`{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}}` + "\n")
	case m.Method == "tools/list":
		m.say(`{"jsonrpc":"2.0","id":$ID,"result":{"resultType":"complete","tools":[{"name":"echo","inputSchema":{"type":"object"}}]}}` + "\n")
	case m.Method == "tools/call":
		m.say(goodLine)
	case m.ID != nil && m.Method != "":
		m.say(`{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"method not found"}}` + "\n")
	}
}

// onCalls makes an act of what happens instead of the answer to a call.
func onCalls(f func(m *ask)) func(*child, *ask) bool {
	return on("tools/call", f)
}

func on(method string, f func(m *ask)) func(*child, *ask) bool {
	return func(_ *child, m *ask) bool {
		if m.Method == method {
			f(m)
		}
		return m.Method == method
	}
}

// saying writes lines and then answers the call.
func saying(lines string) func(*child, *ask) bool {
	return onCalls(func(m *ask) { m.say(lines + goodLine) })
}

// asking20k asks 20,000 times without reading anything in between.
func asking20k(method string) func(*child, *ask) bool {
	return onCalls(func(m *ask) {
		out := bufio.NewWriter(os.Stdout)
		for i := range 20_000 {
			fmt.Fprintf(out, `{"jsonrpc":"2.0","id":"q%d","method":"%s","params":{}}`+"\n", i, method) //nolint:errcheck // the host may be gone
		}
		out.Flush() //nolint:errcheck // the host may be gone
		m.say(goodLine)
	})
}

// childActs are what the children of the cases do; an act reports whether it
// handled the message.
var childActs = map[string]func(*child, *ask) bool{
	"a line without end":               onCalls(func(*ask) { forever(os.Stdout, "x") }),
	"an answer without end":            onCalls(func(m *ask) { m.say(`{"jsonrpc":"2.0","id":$ID,"result":{"x":"`); forever(os.Stdout, "x") }),
	"a line without end when starting": func(*child, *ask) bool { forever(os.Stdout, "x"); return true },
	"garbage without end":              onCalls(func(*ask) { forever(os.Stdout, "no message\n") }),
	"blank lines without end":          onCalls(func(*ask) { forever(os.Stdout, "\n") }),
	"notifications without end": onCalls(func(*ask) {
		forever(os.Stdout, `{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}`+"\n")
	}),
	"answers to nobody without end": onCalls(func(*ask) { forever(os.Stdout, `{"jsonrpc":"2.0","id":77777,"result":{}}`+"\n") }),
	"diagnostics without end":       onCalls(func(*ask) { forever(os.Stderr, strings.Repeat("noise ", 100)+"\n") }),
	"many diagnostics": onCalls(func(m *ask) {
		os.Stderr.WriteString(strings.Repeat("noise ", 50_000)) //nolint:errcheck // the host may be gone
		m.say(goodLine)
	}),
	"20,000 lines of garbage":          saying(strings.Repeat("no message\n", 20_000)),
	"20,000 requests ping":             asking20k("ping"),
	"20,000 requests roots/list":       asking20k("roots/list"),
	"20,000 requests sampling":         asking20k("sampling/createMessage"),
	"20,000 requests elicitation":      asking20k("elicitation/create"),
	"requests with ids that are none":  saying(`{"jsonrpc":"2.0","id":[1],"method":"ping"}` + "\n" + `{"jsonrpc":"2.0","id":{"a":1},"method":"ping"}` + "\n" + `{"jsonrpc":"2.0","id":null,"method":"ping"}` + "\n"),
	"a request with an id of 60 KiB":   saying(`{"jsonrpc":"2.0","id":"` + strings.Repeat("x", 60_000) + `","method":"ping"}` + "\n"),
	"requests with one id":             saying(strings.Repeat(`{"jsonrpc":"2.0","id":1,"method":"ping"}`+"\n", 100)),
	"20,000 changes of the list":       saying(strings.Repeat(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`+"\n", 20_000)),
	"20,000 notices of progress":       saying(strings.Repeat(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":1e400}}`+"\n", 20_000)),
	"dies before it reads":             func(*child, *ask) bool { os.Exit(1); return true },
	"dies at the handshake":            on("initialize", func(*ask) { os.Exit(1) }),
	"dies after the handshake":         on("notifications/initialized", func(*ask) { os.Exit(1) }),
	"dies in the call":                 onCalls(func(*ask) { os.Exit(1) }),
	"dies in the middle of the answer": onCalls(func(m *ask) { m.say(goodLine[:40]); os.Exit(1) }),
	"dies after the answer":            onCalls(func(m *ask) { m.say(goodLine); os.Exit(1) }),
	"answers without an end of line":   onCalls(func(m *ask) { m.say(strings.TrimSpace(goodLine)); os.Exit(0) }),
	"is killed by a signal":            onCalls(func(*ask) { syscall.Kill(os.Getpid(), syscall.SIGSEGV) }), //nolint:errcheck // it dies
	"closes its output":                onCalls(func(*ask) { os.Stdout.Close(); select {} }),
	"closes its input":                 onCalls(func(m *ask) { os.Stdin.Close(); m.say(goodLine); select {} }),
	"closes its diagnostics":           onCalls(func(m *ask) { os.Stderr.Close(); m.say(goodLine) }),
	"stops reading":                    onCalls(func(*ask) { select {} }),
	"never reads":                      func(*child, *ask) bool { select {} },
	"answers before it is asked": on("server/discover", func(m *ask) {
		m.say(`{"jsonrpc":"2.0","id":2,"error":{"code":666,"message":"early"}}` + "\n")
		(&child{era: "modern"}).plain(m)
	}),
	"answers twice":                       onCalls(func(m *ask) { m.say(goodLine + `{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":"x"}}` + "\n") }),
	"answers another request":             onCalls(func(m *ask) { m.say(`{"jsonrpc":"2.0","id":4711,"result":{}}` + "\n") }),
	"answers with a null id":              onCalls(func(m *ask) { m.say(`{"jsonrpc":"2.0","id":null,"result":{}}` + "\n") }),
	"answers with neither":                onCalls(func(m *ask) { m.say(`{"jsonrpc":"2.0","id":$ID}` + "\n") }),
	"answers with an id of its own twice": onCalls(func(m *ask) { m.say(`{"jsonrpc":"2.0","id":$ID,"id":5,"result":{}}` + "\n" + goodLine) }),
	"answers what was cancelled":          onCalls(answerWhenCancelled),
	"a result that is too large": onCalls(func(m *ask) {
		m.say(`{"jsonrpc":"2.0","id":$ID,"result":{"x":"` + strings.Repeat("x", 100_000) + `"}}` + "\n")
	}),
	"nested 60,000 deep": onCalls(func(m *ask) {
		m.say(`{"jsonrpc":"2.0","id":$ID,"result":` + strings.Repeat("[", 30_000) + strings.Repeat("]", 30_000) + "}\n" + goodLine)
	}),
	"a batch":                              onCalls(func(m *ask) { m.say(`[{"jsonrpc":"2.0","id":$ID,"error":{"code":1,"message":"x"}}]` + "\n" + goodLine) }),
	"NUL bytes":                            saying("\x00\x00\x00\n"),
	"UTF-16":                               saying("\xff\xfe{\x00}\x00\n"),
	"a byte order mark":                    onCalls(func(m *ask) { m.say("\xef\xbb\xbf" + goodLine + goodLine) }),
	"bytes that are no UTF-8":              onCalls(func(m *ask) { m.say(`{"jsonrpc":"2.0","id":$ID,"result":{"x":"` + "\xff" + `"}}` + "\n" + goodLine) }),
	"lines that end with carriage returns": onCalls(func(m *ask) { m.say(strings.ReplaceAll(goodLine, "\n", "\r\n")) }),
	"one byte at a time":                   onCalls(func(m *ask) { one(strings.ReplaceAll(goodLine, "$ID", string(m.ID))) }),
	"a grandchild that holds its output":   onCalls(func(m *ask) { grandchild(); m.say(goodLine); os.Exit(0) }),
	"a grandchild and no answer":           onCalls(func(*ask) { grandchild(); os.Exit(0) }),
	"ignores every signal":                 stubborn,
	"lists without end": on("tools/list", func(m *ask) {
		m.say(fmt.Sprintf(`{"jsonrpc":"2.0","id":$ID,"result":{"tools":[],"nextCursor":"%d"}}`+"\n", m.n))
	}),
	"answers with a version of the other era": on("initialize", func(m *ask) {
		m.say(`{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":"2026-07-28","capabilities":{}}}` + "\n")
	}),
}

var cancelled json.RawMessage

// answerWhenCancelled answers the first call when the second comes, after the
// host gave it up, and then the second.
func answerWhenCancelled(m *ask) {
	if cancelled == nil {
		cancelled = m.ID
		return
	}
	late := ask{ID: cancelled}
	late.say(`{"jsonrpc":"2.0","id":$ID,"error":{"code":666,"message":"late"}}` + "\n")
	m.say(goodLine)
}

func one(text string) {
	for i := range len(text) {
		os.Stdout.WriteString(text[i : i+1]) //nolint:errcheck // the host may be gone
	}
}

// grandchild starts a process that has the pipes of this one.
func grandchild() {
	c := exec.Command("sleep", "1000")
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := c.Start(); err != nil {
		panic(err)
	}
}

// stubborn answers, and does not leave when it is asked to.
func stubborn(c *child, m *ask) bool {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	if m.Method != "tools/call" {
		return false
	}
	m.say(goodLine)
	select {}
}
