package e2e

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"sync"
	"testing"
)

// wireOfFile and wireOfProxy return what was sent to server-everything.
func wireOfFile(t *testing.T, _ *realWorld) string {
	b, err := os.ReadFile(theService.everythingWire)
	must(t, err)
	return string(b)
}

func wireOfProxy(_ *testing.T, r *realWorld) string { return r.proxy.sent() }

// proxy stands before a server over HTTP and keeps what is sent to it.
type proxy struct {
	url string

	mu     sync.Mutex
	bodies bytes.Buffer
}

func startProxy(t *testing.T, target string) *proxy {
	t.Helper()
	to, err := url.Parse(target)
	must(t, err)
	p := &proxy{}
	forward := &httputil.ReverseProxy{FlushInterval: -1, Transport: &http.Transport{},
		// Callers that go away are the rule here.
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
		Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: to.Scheme, Host: to.Host}) }}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the sender is gone
		}
		p.mu.Lock()
		p.bodies.Write(append(body, '\n'))
		p.mu.Unlock()
		r.Body = io.NopCloser(bytes.NewReader(body))
		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		front.CloseClientConnections() // streams for changes are open until then
		front.Close()
		forward.Transport.(*http.Transport).CloseIdleConnections()
	})
	p.url = front.URL + to.Path
	return p
}

func (p *proxy) sent() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bodies.String()
}
