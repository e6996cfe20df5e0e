package hostile_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// misbehaviour is one thing that a server does wrong, over HTTP.
type misbehaviour struct {
	name    string
	version string // empty plays it in both eras
	scripts map[string]script
	// healed are the scripts of the good server afterwards; nil are none.
	healed map[string]script
	// do is what is asked of the server; nil is one call.
	do func(ctx context.Context, r *rig, s *server) string
	// want is the outcome; legacy is that of the legacy era where it differs.
	want, legacy string
	limits       func(*sessions.Limits)
	target       func(*sessions.Target)
	// request changes the call.
	request func(*sessions.Request)
	// alloc bounds what the whole case allocates, the server's part too.
	alloc int64
	// requests bounds what the server is asked, without the good call at the end.
	requests int
	// sent bounds what can be written to this host. It is what may be read, and what
	// the kernel's buffers take.
	sent int64
	// stays says that the same connection or registration is not usable at once, as
	// after a pause of an hour.
	stays bool
}

const (
	defaultAlloc    = 2 << 20
	defaultRequests = 8
	defaultSent     = 24 << 20 // socket buffers of loopback grow to several MiB
)

// versions are the versions that a case is played with.
func (m *misbehaviour) versions() []string {
	if m.version != "" {
		return []string{m.version}
	}
	return []string{modern, legacy}
}

func (m *misbehaviour) expected(version string) string {
	if version != modern && m.legacy != "" {
		return m.legacy
	}
	return m.want
}

func timeout(d time.Duration) func(*sessions.Request) {
	return func(r *sessions.Request) { r.Timeout = d }
}

// play runs the case once.
func (m *misbehaviour) play(t testing.TB, version string) {
	t.Helper()
	s := newServer(t, listen(t), version, m.scripts)
	limits := small()
	if m.limits != nil {
		m.limits(&limits)
	}
	target := sessions.Target{ServerName: "hostile", Transport: sessions.TransportHTTP, URL: s.url}
	if m.target != nil {
		m.target(&target)
	}
	r, shutdown := newRig(t, target, limits, nil)
	defer shutdown()
	defer s.close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var got string
	if m.do != nil {
		got = m.do(ctx, r, s)
	} else {
		got = r.call(ctx, m.request)
	}
	if ctx.Err() != nil {
		t.Fatalf("%s hangs: %s", m.name, got)
	}
	if want := m.expected(version); got != want {
		t.Errorf("%s: %s, want %s", m.name, got, want)
	}
	if n, most := s.total(), orElse(m.requests, defaultRequests); n > most {
		t.Errorf("%s: the server was asked %d times, more than %d", m.name, n, most)
	}
	if n, most := s.sent.Load(), orElse(m.sent, defaultSent); n > most {
		t.Errorf("%s: %d bytes were taken, more than %d", m.name, n, most)
	}
	s.heal(m.healed)
	if !m.stays {
		// What was known of the server may cost one more failure, but no more.
		for try := 0; ; try++ {
			got := r.call(ctx, nil)
			if got == "ok" {
				break
			}
			if try == 20 {
				t.Fatalf("%s: the same user does not get through any more: %s", m.name, got)
			}
			pause(ctx)
		}
	}
	r.key.Registration++
	if got := r.call(ctx, nil); got != "ok" {
		t.Errorf("%s: a good request on a fresh connection: %s", m.name, got)
	}
}

// pause lets the shortest pause after a failure pass.
func pause(ctx context.Context) {
	select {
	case <-time.After(3 * time.Millisecond):
	case <-ctx.Done():
	}
}

func orElse[T int | int64](v, other T) T {
	if v == 0 {
		return other
	}
	return v
}

// call makes the call of most cases and returns its outcome.
func (r *rig) call(ctx context.Context, change func(*sessions.Request)) string {
	q := call()
	if change != nil {
		change(&q)
	}
	resp, err := r.pool.Do(ctx, r.key, r.target, q)
	defer resp.Release()
	return outcome(resp, err)
}

func (r *rig) list(ctx context.Context) string {
	return listed(r.pool.List(ctx, r.key, r.target, sessions.KindTool))
}

// all are the misbehaviours over HTTP.
func all() []misbehaviour {
	var out []misbehaviour
	for _, group := range [][]misbehaviour{
		bodies(), messages(), streams(), connections(), statuses(), asking(), negotiations(), lists(), changes(), legacyStreams(), wishes(),
	} {
		out = append(out, group...)
	}
	return out
}

// TestMemory plays every case by itself and holds what it allocates to its bound.
// It is not parallel, because memory is counted for the whole process.
func TestMemory(t *testing.T) {
	for _, m := range all() {
		for _, version := range m.versions() {
			n := allocated(func() { m.play(t, version) })
			if most := orElse(m.alloc, defaultAlloc); n > most {
				t.Errorf("%s of %s allocates %d bytes, more than %d", m.name, version, n, most)
			}
		}
	}
}

// TestHTTP plays every case beside all others.
func TestHTTP(t *testing.T) {
	names := map[string]bool{}
	for _, m := range all() {
		if names[m.name] {
			t.Fatalf("two cases are named %s", m.name)
		}
		names[m.name] = true
		for _, version := range m.versions() {
			t.Run(fmt.Sprintf("%s/%s", m.name, version), func(t *testing.T) {
				t.Parallel()
				m.play(t, version)
			})
		}
	}
}
