package telemetry

import (
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Metrics are the product's metrics. It is safe for concurrent use.
//
// Labels are tenant, server and words of the program, never a user, session,
// call or address. Tenants, pairs of tenant and server, and words are counted;
// past a bound they become "other", so that no caller decides how many series
// there are. The series of a server end with it (ForgetServer).
type Metrics struct {
	registry *prometheus.Registry
	bounds   *bounds
	// servers is held, shared, from the admission of a server's label to the
	// writing of its series, so that none comes back while it is forgotten.
	servers sync.RWMutex

	requests      *prometheus.CounterVec
	requestTime   *prometheus.HistogramVec
	calls         *prometheus.CounterVec
	callTime      *prometheus.HistogramVec
	refreshes     *prometheus.CounterVec
	connections   *prometheus.GaugeVec
	security      *prometheus.CounterVec
	webhooks      *prometheus.CounterVec
	redisUp       prometheus.Gauge
	limitedByRate *prometheus.CounterVec
}

// callBuckets reach from a local read to the ceiling of a call, in seconds.
var callBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}

// NewMetrics returns metrics in a registry of their own, with those of the Go
// runtime and the process.
func NewMetrics() *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), bounds: newBounds()}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "bulkhead", Name: name, Help: help}, labels)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "bulkhead", Name: name, Help: help}, labels)
	}
	histogram := func(name, help string, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "bulkhead", Name: name, Help: help, Buckets: callBuckets}, labels)
	}
	m.requests = counter("requests_total", "Requests at the edge, by method and code.", "method", "code")
	m.requestTime = histogram("request_duration_seconds", "Time of a request at the edge.", "method")
	m.calls = counter("calls_total", "Calls that reached a state, by tenant, server and state.", "tenant", "server", "state")
	m.callTime = histogram("call_duration_seconds", "Time from proposal to the final state of a call.", "tenant", "server")
	m.refreshes = counter("catalog_refreshes_total", "Listings of a server's definitions, by outcome.", "tenant", "server", "outcome")
	m.connections = gauge("connections", "Open connections to servers.", "tenant", "server")
	m.security = counter("security_events_total", "What a security team wants to see of a server, by event.", "tenant", "server", "event")
	m.limitedByRate = counter("rate_limited_total", "Requests refused by a rate limit.", "tenant")
	m.webhooks = counter("webhook_attempts_total", "Attempts to deliver a webhook, by tenant and outcome.", "tenant", "outcome")
	m.redisUp = prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "bulkhead", Name: "redis_up", Help: "1 while Redis answers."})
	m.registry.MustRegister(
		m.requests, m.requestTime, m.calls, m.callTime, m.refreshes, m.connections, m.security,
		m.limitedByRate, m.webhooks, m.redisUp,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler serves the metrics. A scrape that fails is logged.
func (m *Metrics) Handler(log *slog.Logger) http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: 4,
		Timeout:             10 * time.Second,
		ErrorLog:            slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	})
}

// Request counts a request at the edge: the method is a name of the API, the
// code a name of a gRPC code.
func (m *Metrics) Request(method, code string, took time.Duration) {
	method = m.bounds.method(method)
	m.requests.WithLabelValues(method, m.bounds.word(code)).Inc()
	m.requestTime.WithLabelValues(method).Observe(took.Seconds())
}

// CallState counts a call that reached a state.
func (m *Metrics) CallState(tenant, server, state string) {
	m.servers.RLock()
	defer m.servers.RUnlock()
	tenant, server = m.bounds.pair(tenant, server)
	m.calls.WithLabelValues(tenant, server, m.bounds.word(state)).Inc()
}

// CallTook records the time from proposal to final state.
func (m *Metrics) CallTook(tenant, server string, took time.Duration) {
	m.servers.RLock()
	defer m.servers.RUnlock()
	tenant, server = m.bounds.pair(tenant, server)
	m.callTime.WithLabelValues(tenant, server).Observe(took.Seconds())
}

// ForgetServer ends the series of a server that was deleted. What happens to it
// later, such as the end of a call under way, starts new ones.
func (m *Metrics) ForgetServer(tenant, server string) {
	m.servers.Lock()
	defer m.servers.Unlock()
	p, ok := m.bounds.forget(tenant, server)
	if !ok {
		return
	}
	labels := prometheus.Labels{"tenant": p.tenant, "server": p.server}
	m.calls.DeletePartialMatch(labels)
	m.callTime.DeletePartialMatch(labels)
	m.refreshes.DeletePartialMatch(labels)
	m.connections.DeletePartialMatch(labels)
	m.security.DeletePartialMatch(labels)
}

// CatalogRefresh counts a listing of definitions by its outcome, such as
// "changed", "same" or "failed".
func (m *Metrics) CatalogRefresh(tenant, server, outcome string) {
	m.servers.RLock()
	defer m.servers.RUnlock()
	tenant, server = m.bounds.pair(tenant, server)
	m.refreshes.WithLabelValues(tenant, server, m.bounds.word(outcome)).Inc()
}

// ConnectionOpened adds an open connection; closed, called once, takes it away
// from where it was added, whatever was forgotten since.
func (m *Metrics) ConnectionOpened(tenant, server string) (closed func()) {
	m.servers.RLock()
	defer m.servers.RUnlock()
	tenant, server = m.bounds.pair(tenant, server)
	g := m.connections.WithLabelValues(tenant, server)
	g.Inc()
	return g.Dec
}

// SecurityEvent counts an event about a server, such as "definition_changed" or
// "downgrade_refused".
func (m *Metrics) SecurityEvent(tenant, server, event string) {
	m.servers.RLock()
	defer m.servers.RUnlock()
	tenant, server = m.bounds.pair(tenant, server)
	m.security.WithLabelValues(tenant, server, m.bounds.word(event)).Inc()
}

// RateLimited counts a request refused by a rate limit.
func (m *Metrics) RateLimited(tenant string) {
	m.limitedByRate.WithLabelValues(m.bounds.tenant(tenant)).Inc()
}

// WebhookAttempt counts an attempt to deliver a webhook: "delivered", "failed" when
// it is tried again, or "given_up".
func (m *Metrics) WebhookAttempt(tenant, outcome string) {
	m.webhooks.WithLabelValues(m.bounds.tenant(tenant), m.bounds.word(outcome)).Inc()
}

// RedisUp records whether Redis answers.
func (m *Metrics) RedisUp(up bool) {
	if up {
		m.redisUp.Set(1)
		return
	}
	m.redisUp.Set(0)
}
