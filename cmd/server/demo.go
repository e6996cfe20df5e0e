package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
)

// demoCommand runs the demo calendar, an MCP server of its own process.
const demoCommand = "demo-calendar"

// demoReady is the line that the child prints once it accepts connections.
type demoReady struct {
	URL    string `json:"url"`
	Origin string `json:"origin"`
}

func demoCalendar(ctx context.Context, args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet(demoCommand, flag.ContinueOnError)
	address := flags.String("address", "127.0.0.1:0", "loopback address to listen on")
	legacy := flags.Bool("legacy", false, "speak only the revisions before 2026-07-28")
	control := flags.Bool("control", false, "offer the control endpoints that tests use")
	tools := flags.Int("tools", 0, "how many generated tools to offer besides")
	parent := flags.Bool("with-stdin", false, "end when standard input ends")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if *parent {
		// The parent holds the other end: when it is gone, however it went, so is this.
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			cancel()
		}()
	}
	return demo.Serve(ctx, demo.Options{Address: *address, LegacyOnly: *legacy, Control: *control, GeneratedTools: *tools,
		Logger: slog.New(slog.DiscardHandler),
		Ready: func(s *demo.Server) {
			line, _ := json.Marshal(demoReady{URL: s.URL(), Origin: s.Origin()}) // two strings always encode
			fmt.Fprintf(stdout, "%s\n", line)                                    //nolint:errcheck // the parent times out
		}})
}

// demoChild is the demo server as a child of this process.
type demoChild struct {
	demoReady
	cmd   *exec.Cmd
	stdin io.Closer
	// exited is closed once the child is gone.
	exited chan struct{}
}

// startDemo starts this binary again as the demo server, on the given loopback
// address. Closing ends it; so does this process's end.
func startDemo(ctx context.Context, address string) (*demoChild, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, demoCommand, "--address", address, "--with-stdin")
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &demoChild{cmd: cmd, stdin: stdin, exited: make(chan struct{})}
	line := make(chan string, 1)
	go func() {
		defer close(c.exited)
		s, _ := bufio.NewReaderSize(io.LimitReader(stdout, 4096), 4096).ReadString('\n')
		line <- s
		_ = cmd.Wait() // how the demo ended matters to nobody
	}()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	select {
	case s := <-line:
		if err = json.Unmarshal([]byte(strings.TrimSpace(s)), &c.demoReady); err == nil {
			return c, nil
		}
		err = fmt.Errorf("the demo server did not start on %s", address)
	case <-ctx.Done():
		err = ctx.Err()
	}
	return nil, errors.Join(err, c.close())
}

// close ends the child and waits for it.
func (c *demoChild) close() error {
	err := c.stdin.Close()
	select {
	case <-c.exited:
	case <-time.After(5 * time.Second):
		_ = c.cmd.Process.Kill()
		<-c.exited
	}
	return err
}
