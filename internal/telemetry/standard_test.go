package telemetry_test

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
)

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// A server that answers twice makes net/http log what the second answer says. It
// is not parallel: the standard library has one log.
func TestStandard_QuotesNoServer(t *testing.T) {
	var out lockedBuffer
	flags := log.Flags()
	telemetry.TakeStandard(telemetry.NewLogger(&out, slog.LevelDebug))
	defer func() { log.SetOutput(io.Discard); log.SetFlags(flags) }()

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	served := make(chan struct{})
	go func() {
		defer close(served)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		c.Read(make([]byte, 4096)) //nolint:errcheck // whatever it asks
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"+"HTTP/1.1 200 OK\r\n\r\nPLANTED")
		io.Copy(io.Discard, c) //nolint:errcheck // until the client leaves
	}()
	tr := &http.Transport{}
	resp, err := (&http.Client{Transport: tr}).Get("http://" + ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body) //nolint:errcheck // two bytes
	resp.Body.Close()
	for end := time.Now().Add(20 * time.Second); out.String() == "" && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	tr.CloseIdleConnections()
	<-served
	if got := out.String(); !strings.Contains(got, "Unsolicited response") || strings.Contains(got, "PLANTED") || !strings.Contains(got, `"DEBUG"`) {
		t.Errorf("the log says %q", got)
	}
	log.Print("something else")
	if got := out.String(); !strings.Contains(got, "something else") || !strings.Contains(got, `"WARN"`) {
		t.Errorf("the log says %q", got)
	}
}
