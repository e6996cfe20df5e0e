package sessions

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
)

// trivial is a modern server that does as little as a server can.
func trivial(b *testing.B, size int) string {
	b.Helper()
	result := `{"content":[{"type":"text","text":"` + strings.Repeat("x", size) + `"}]}`
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		m, err := parseMessage(body)
		if err != nil {
			return
		}
		out := result
		if m.method == "server/discover" {
			out = `{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}}}`
		}
		w.Header().Set("Content-Type", "application/json")
		answer := `{"jsonrpc":"2.0","id":` + string(m.id) + `,"result":` + out + `}`
		w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
		io.WriteString(w, answer) //nolint:errcheck // the client may be gone
	}))
	b.Cleanup(s.Close)
	return s.URL
}

// BenchmarkDo measures one call, the server in the same process included. Compare
// with BenchmarkNetHTTP, which sends the same bytes and reads the answer whole.
func BenchmarkDo(b *testing.B) {
	for name, size := range map[string]int{"small": 10, "64KiB": 64 << 10} {
		b.Run(name, func(b *testing.B) {
			p := newPool(b, nil)
			k, target, r := keyOf(b, "a"), httpTarget(trivial(b, size)), echo()
			if _, err := p.Do(b.Context(), k, target, r); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := p.Do(b.Context(), k, target, r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkNetHTTP(b *testing.B) {
	for name, size := range map[string]int{"small": 10, "64KiB": 64 << 10} {
		b.Run(name, func(b *testing.B) {
			url := trivial(b, size)
			body := encodeRequest(7, "tools/call", echo().Params, modernMeta("bulkhead", "test", Capabilities{}), map[string]json.RawMessage{})
			b.ReportAllocs()
			for b.Loop() {
				resp, err := http.Post(url, "application/json", bytes.NewReader(body))
				if err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadAll(resp.Body); err != nil {
					b.Fatal(err)
				}
				resp.Body.Close()
			}
			http.DefaultClient.CloseIdleConnections()
		})
	}
}
