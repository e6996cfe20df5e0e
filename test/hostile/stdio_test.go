package hostile_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/confine"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// misconduct is one thing that a child does wrong.
type misconduct struct {
	// name is that of the act in childActs.
	name string
	// era is what the child speaks, "modern" if empty.
	era string
	// want is the outcome of a call, and also are others that are as true when the
	// child's end meets the request.
	want    string
	also    []string
	do      func(ctx context.Context, r *rig) string
	request func(*sessions.Request)
	limits  func(*sessions.Limits)
	// alloc bounds what this process allocates for it, 3 MiB if 0.
	alloc int64
}

const (
	diedMaybe = "TRANSPORT SERVER_ENDED, maybe sent"
	diedFirst = "TRANSPORT SERVER_ENDED, not sent"
	silent    = "TRANSPORT TIMEOUT, maybe sent"
)

func calls(n int, change func(*sessions.Request)) func(context.Context, *rig) string {
	return func(ctx context.Context, r *rig) (got string) {
		for range n {
			got = r.call(ctx, change)
		}
		return got
	}
}

func misconducts() []misconduct {
	brief := timeout(400 * time.Millisecond)
	narrow := func(l *sessions.Limits) { l.NoiseBytes = 1 << 20 }
	return []misconduct{
		{name: "a line without end", want: diedMaybe},
		{name: "an answer without end", want: diedMaybe},
		{name: "a line without end when starting", want: diedFirst},
		{name: "garbage without end", want: diedMaybe, limits: narrow},
		{name: "blank lines without end", want: diedMaybe, limits: narrow},
		{name: "notifications without end", want: diedMaybe, limits: narrow, alloc: 16 << 20},
		{name: "answers to nobody without end", want: diedMaybe, limits: narrow, alloc: 16 << 20},
		{name: "diagnostics without end", want: diedMaybe, limits: func(l *sessions.Limits) { l.DiagnosticBytes = 1 << 20 }},
		{name: "many diagnostics", want: "ok"},
		{name: "20,000 lines of garbage", limits: noisy, want: "ok", alloc: 8 << 20},
		{name: "20,000 requests ping", era: "legacy", limits: noisy, want: "ok", alloc: 64 << 20},
		{name: "20,000 requests roots/list", era: "legacy", limits: noisy, want: "ok", alloc: 64 << 20},
		{name: "20,000 requests sampling", era: "legacy", limits: noisy, want: "ok", alloc: 64 << 20},
		{name: "20,000 requests elicitation", limits: noisy, want: "ok", alloc: 64 << 20},
		{name: "requests with ids that are none", era: "legacy", want: "ok"},
		{name: "a request with an id of 60 KiB", era: "legacy", limits: noisy, want: "ok"},
		{name: "requests with one id", era: "legacy", want: "ok"},
		{name: "20,000 changes of the list", era: "legacy", limits: noisy, want: "ok", alloc: 32 << 20},
		{name: "20,000 notices of progress", limits: noisy, want: "ok", alloc: 32 << 20},
		{name: "dies before it reads", want: diedFirst},
		{name: "dies at the handshake", era: "legacy", want: diedFirst},
		{name: "dies after the handshake", era: "legacy", want: diedMaybe, also: []string{diedFirst, "TRANSPORT WRITE_FAILED, not sent"}},
		{name: "dies in the call", want: diedMaybe},
		{name: "dies in the middle of the answer", want: diedMaybe},
		{name: "dies after the answer", want: "ok"},
		{name: "answers without an end of line", want: "ok"},
		{name: "is killed by a signal", want: diedMaybe},
		{name: "closes its output", want: diedMaybe},
		{name: "closes its input", want: "ok"},
		{name: "closes its diagnostics", want: "ok"},
		{name: "stops reading", request: brief, want: silent},
		{name: "never reads", want: "TRANSPORT TIMEOUT, not sent", do: func(ctx context.Context, r *rig) string {
			r.target.Timeout = 200 * time.Millisecond
			defer func() { r.target.Timeout = 0 }()
			return r.call(ctx, nil)
		}},
		{name: "answers before it is asked", want: "ok"},
		{name: "answers twice", do: calls(3, nil), want: "ok"},
		{name: "answers another request", request: brief, want: silent},
		{name: "answers with a null id", request: brief, want: silent},
		{name: "answers with neither", want: "PROTOCOL ANSWER_EMPTY, maybe sent"},
		{name: "answers with an id of its own twice", want: "ok"},
		{name: "answers what was cancelled", want: "ok", do: func(ctx context.Context, r *rig) string {
			if got := r.call(ctx, brief); got != silent {
				return got
			}
			return r.call(ctx, nil)
		}},
		{name: "a result that is too large", want: "SERVER RESULT_TOO_LARGE, maybe sent"},
		{name: "nested 60,000 deep", want: "ok"},
		{name: "a batch", want: "ok"},
		{name: "NUL bytes", want: "ok"},
		{name: "UTF-16", want: "ok"},
		{name: "a byte order mark", want: "ok"},
		{name: "bytes that are no UTF-8", want: "ok"},
		{name: "lines that end with carriage returns", want: "ok"},
		{name: "one byte at a time", want: "ok"},
		{name: "a grandchild that holds its output", want: "ok"},
		{name: "a grandchild and no answer", want: diedMaybe},
		{name: "ignores every signal", want: "ok"},
		{name: "lists without end", want: "PROTOCOL LIST_TOO_LONG", do: func(ctx context.Context, r *rig) string { return r.list(ctx) }},
		{name: "answers with a version of the other era", era: "legacy", want: "PROTOCOL VERSION_UNSUPPORTED, not sent"},
	}
}

// play runs the case once.
func (m *misconduct) play(t testing.TB) {
	t.Helper()
	self, err := filepath.Abs(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	runtimes := map[string]sessions.Runtime{}
	for name, act := range map[string]string{"bad": m.name, "good": "good"} {
		runtimes[name] = sessions.Runtime{
			Command: []string{self}, Env: map[string]string{"HOSTILE_CHILD": orModern(m.era) + " " + act}, ReadRoots: []string{self},
			User: strconv.Itoa(os.Getuid()), Limits: confine.Limits{Memory: 1 << 50, AddressSpace: 1 << 50}, // the race detector maps terabytes
		}
	}
	limits := small()
	if m.limits != nil {
		m.limits(&limits)
	}
	r, shutdown := newRig(t, sessions.Target{ServerName: "hostile", Transport: sessions.TransportStdio, Runtime: "bad"}, limits, runtimes)
	defer shutdown()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	got := ""
	if m.do != nil {
		got = m.do(ctx, r)
	} else {
		got = r.call(ctx, m.request)
	}
	if ctx.Err() != nil {
		t.Fatalf("it hangs: %s", got)
	}
	if got != m.want && !slices.Contains(m.also, got) {
		t.Errorf("%s: %s, want %s", m.name, got, m.want)
	}
	r.key.Registration, r.target.Runtime = 2, "good"
	if got := r.call(ctx, nil); got != "ok" {
		t.Errorf("%s: a good request to another child: %s", m.name, got)
	}
}

func orModern(era string) string {
	if era == "" {
		return "modern"
	}
	return era
}

// TestStdio plays every case beside all others.
func TestStdio(t *testing.T) {
	played := map[string]bool{}
	for _, m := range misconducts() {
		played[m.name] = true
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			m.play(t)
		})
	}
	for name := range childActs {
		if !played[name] {
			t.Errorf("no case plays %q", name)
		}
	}
}

// TestStdioMemory plays the cases by themselves that write much, and holds what
// they make this process allocate to its bound.
func TestStdioMemory(t *testing.T) {
	for _, m := range misconducts() {
		if m.alloc == 0 && m.want != diedMaybe {
			continue
		}
		n := allocated(func() { m.play(t) })
		if most := orElse(m.alloc, 3<<20); n > most {
			t.Errorf("%s allocates %d bytes, more than %d", m.name, n, most)
		}
	}
}
