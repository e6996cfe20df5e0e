package sessions

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// serveRole serves HTTP on a port of its own until the parent lets go of its
// standard input. The address is the first line of output.
func serveRole(h http.HandlerFunc) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println("http://" + l.Addr().String())
	srv := &http.Server{Handler: h}
	go func() {
		io.Copy(io.Discard, os.Stdin) //nolint:errcheck // its end is all there is to learn
		srv.Close()                   //nolint:errcheck // the process ends
	}()
	srv.Serve(l) //nolint:errcheck // it ends with the process
}

// costServer is a server in a process of its own that does as little as a server
// can: it answers a call with a text of so many bytes.
func costServer(era, bytes string) {
	size, err := strconv.Atoi(bytes)
	if err != nil {
		panic(err)
	}
	result := `{"content":[{"type":"text","text":"` + strings.Repeat("x", size) + `"}]}`
	legacy := era == EraLegacy
	serveRole(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		m, bad := parseMessage(body)
		if err != nil || bad != nil {
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		out := `"result":` + result
		switch {
		case m.id == nil:
			w.WriteHeader(http.StatusAccepted)
			return
		case m.method == "server/discover" && legacy:
			out = `"error":{"code":-32601,"message":"no such method"}`
		case m.method == "server/discover":
			out = `"result":{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}`
		case m.method == "initialize":
			out = `"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"cost","version":"1"}}`
			w.Header().Set("Mcp-Session-Id", "cost")
		}
		answer := `{"jsonrpc":"2.0","id":` + string(m.id) + `,` + out + `}`
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
		io.WriteString(w, answer) //nolint:errcheck // the client may be gone
	})
}

// startServer starts this test binary as a server in a role, a word and its
// arguments, and returns its address.
func startServer(t testing.TB, role string) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{"BULKHEAD_TEST_CHILD=" + role}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close() //nolint:errcheck // the child ends by it
		cmd.Wait() //nolint:errcheck // how it ended is of no interest
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

func startCostServer(b *testing.B, era string, size int) string {
	b.Helper()
	return startServer(b, fmt.Sprintf("cost %s %d", era, size))
}

// ownCPU is what this process has used of the processors.
func ownCPU(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cpuEach runs fn so often that the clock's grain does not matter, and returns
// what one run cost this process.
func cpuEach(b *testing.B, n int, fn func() error) time.Duration {
	b.Helper()
	began := ownCPU(b)
	for range n {
		if err := fn(); err != nil {
			b.Fatal(err)
		}
	}
	return (ownCPU(b) - began) / time.Duration(n)
}

// BenchmarkClientCost compares the processor time that a call costs this process,
// the server being another one, with that of a plain net/http POST of the same
// bytes. Five rounds in turn; the metrics are medians of the rounds' ratios.
func BenchmarkClientCost(b *testing.B) {
	for _, era := range []string{EraLegacy, EraModern} {
		b.Run(era, func(b *testing.B) {
			address := startCostServer(b, era, 10)
			p := newPool(b, nil)
			k, target, r := keyOf(b, "a"), httpTarget(address), echo()
			call := func() error {
				resp, err := p.Do(context.Background(), k, target, r)
				resp.Release()
				return err
			}
			meta := modernMeta("bulkhead", "test", Capabilities{})
			if era == EraLegacy {
				meta = nil
			}
			body := encodeRequest(7, "tools/call", r.Params, meta, map[string]json.RawMessage{})
			client := &http.Client{Transport: &http.Transport{}}
			defer client.CloseIdleConnections()
			post := func() error {
				resp, err := client.Post(address, "application/json", bytes.NewReader(body))
				if err != nil {
					return err
				}
				defer resp.Body.Close() //nolint:errcheck // read whole
				_, err = io.ReadAll(resp.Body)
				return err
			}
			compare(b, 4000, call, post)
		})
	}
}

// BenchmarkLargeCost does the same for a result of 64 KiB, against a bare reverse
// proxy that passes it on; the proxy's cost includes serving it.
func BenchmarkLargeCost(b *testing.B) {
	address := startCostServer(b, EraModern, 64<<10)
	p := newPool(b, nil)
	k, target, r := keyOf(b, "a"), httpTarget(address), echo()
	call := func() error {
		resp, err := p.Do(context.Background(), k, target, r)
		resp.Release()
		return err
	}
	to, err := url.Parse(address)
	if err != nil {
		b.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }, Transport: &http.Transport{}}
	defer proxy.Transport.(*http.Transport).CloseIdleConnections()
	body := encodeRequest(7, "tools/call", r.Params, modernMeta("bulkhead", "test", Capabilities{}), nil)
	pass := func() error {
		proxy.ServeHTTP(discard{http.Header{}}, must(http.NewRequest(http.MethodPost, "http://proxy/", bytes.NewReader(body))))
		return nil
	}
	compare(b, 1000, call, pass)
}

type discard struct{ h http.Header }

func (d discard) Header() http.Header         { return d.h }
func (d discard) Write(p []byte) (int, error) { return len(p), nil }
func (d discard) WriteHeader(int)             {}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func compare(b *testing.B, n int, ours, theirs func() error) {
	b.Helper()
	cpuEach(b, n/4, ours)
	cpuEach(b, n/4, theirs)
	var ratios, own, other []float64
	for range 5 {
		o, t := cpuEach(b, n, ours), cpuEach(b, n, theirs)
		ratios, own, other = append(ratios, float64(o)/float64(t)), append(own, float64(o.Microseconds())), append(other, float64(t.Microseconds()))
	}
	for b.Loop() {
		if err := ours(); err != nil {
			b.Fatal(err)
		}
	}
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	b.ReportMetric(median(ratios), "ratio")
	b.ReportMetric(median(own), "own-cpu-µs/op")
	b.ReportMetric(median(other), "bare-cpu-µs/op")
}
