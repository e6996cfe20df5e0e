package calls

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

// FO-113: the same key and the same request, in whatever order of members, is the
// same call; another request under the key is refused with what differs.
func TestFO113_SameKeyOtherRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	for _, tool := range []string{"read", "write", "write_call", "write_key", "nothing_such"} {
		propose := func(args string, change ...func(*Proposal)) (*Call, error) {
			r := sc.proposal(tool)
			r.RequestID, r.Arguments = "k-"+tool, []byte(args)
			for _, c := range change {
				c(&r)
			}
			return sc.Propose(t.Context(), sc.alice, r)
		}
		first, err := propose(`{"a":1,"b":{"c":"x","d":2}}`)
		if err != nil {
			t.Fatal(tool, detail(err))
		}
		for _, same := range []string{`{"b":{"d":2,"c":"x"},"a":1}`, ` { "a" : 1, "b":{"c":"\u0078","d":2}}`} {
			again, err := propose(same)
			if err != nil || again.ID != first.ID || again.State != first.State {
				t.Errorf("%s %s: %+v, %v", tool, same, again, err)
			}
		}
		for name, c := range map[string]struct {
			args   string
			change func(*Proposal)
			paths  []string
		}{
			"arguments": {`{"a":2,"b":{"c":"x","d":3}}`, nothing, []string{"arguments.a", "arguments.b.d"}},
			"1 and 1.0": {`{"a":1.0,"b":{"c":"x","d":2}}`, nothing, []string{"arguments.a"}},
			"tool":      {`{"a":1,"b":{"c":"x","d":2}}`, func(r *Proposal) { r.Tool = "find" }, []string{"tool"}},
		} {
			_, err := propose(c.args, c.change)
			f, _ := fault.As(err)
			if f == nil || f.Kind != fault.Exists || f.Metadata["callId"] != first.ID {
				t.Errorf("%s, other %s: %v", tool, name, err)
				continue
			}
			var paths []string
			for _, field := range f.Fields {
				paths = append(paths, field.Path)
			}
			if !slices.Equal(paths, c.paths) {
				t.Errorf("%s, other %s: %v, want %v", tool, name, paths, c.paths)
			}
		}
	}
	if w.sender.count("read") != 1 || w.sender.count("write") != 1 {
		t.Errorf("sends: %v", w.sender.all())
	}
}

func TestRequestID_FiftyAtOnceRunOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, two := w.node(quick()), w.node(quick())
	sc := w.scene(one)
	w.sender.answer(func(ctx context.Context, _ sent, _ int) (sessions.Response, error) {
		time.Sleep(20 * time.Millisecond) // long enough to be joined
		return answered(okResult)
	})
	for _, tool := range []string{"read", "write", "write_call"} {
		var mu sync.Mutex
		ids := map[string]int{}
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				on := sc
				if i%2 == 1 && tool != "read" { // a plain read is joined in its replica only
					on = sc.on(two)
				}
				r := on.proposal(tool)
				r.RequestID = "same-" + tool
				c, err := on.Propose(t.Context(), sc.alice, r)
				if err != nil {
					t.Errorf("%s: %v", tool, detail(err))
					return
				}
				mu.Lock()
				defer mu.Unlock()
				ids[c.ID]++
			})
		}
		wg.Wait()
		want := 1
		if tool == "write_call" {
			want = 0
		}
		if len(ids) != 1 || w.sender.count(tool) != want {
			t.Errorf("%s: %v, %d sends", tool, ids, w.sender.count(tool))
		}
	}
	if n := w.count(`SELECT count(*) FROM calls`); n != 3 {
		t.Errorf("%d calls", n)
	}
	if n := w.count(`SELECT calls FROM session_usage`); n != 3 {
		t.Errorf("%d calls counted", n)
	}
}

// The same read on two replicas at once runs on both, for neither knows of the
// other, and becomes one call: the first to commit. Another request under its id
// is told so.
func TestRequestID_AcrossReplicasTheFirstCommitCounts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, two := w.node(quick()), w.node(quick())
	sc := w.scene(one)
	g := newGate(t)
	w.sender.answer(g.script(okAnswer))
	type got struct {
		c   *Call
		err error
	}
	results := make(chan got, 3)
	for i, n := range []*node{one, two, two} {
		go func() {
			r := sc.proposal("read")
			r.RequestID = "one"
			if i == 2 {
				r.RequestID, r.Tool = "two", "find"
			}
			c, err := n.Propose(t.Context(), sc.alice, r)
			results <- got{c, err}
		}()
	}
	for range 3 {
		<-g.arrived
	}
	// A write takes the id of the third meanwhile.
	w.sender.answer(nil)
	if c := sc.propose("write", func(r *Proposal) { r.RequestID = "two" }); c.State != Succeeded {
		t.Fatal(c.State)
	}
	g.release()
	ids := map[string]int{}
	refused := 0
	for range 3 {
		r := <-results
		switch {
		case fault.Is(r.err, fault.Exists):
			refused++
		case r.err != nil || r.c.State != Succeeded || !r.c.Recorded:
			t.Errorf("%+v %v", r.c, r.err)
		default:
			ids[r.c.ID]++
		}
	}
	if len(ids) != 1 || refused != 1 {
		t.Errorf("%v, %d refused", ids, refused)
	}
	w.verify(sc.alice.Tenant)
}

// The key of an idempotent write is the request's id, is an argument like any
// other, and is what consent was given for.
func TestIdempotencyKey_IsPartOfWhatIsDecidedAndSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	c := sc.propose("write_key", func(r *Proposal) { r.RequestID, r.Arguments = "abc", []byte(`{}`) })
	if c.IdempotencyKey != "abc" || string(c.Arguments) != `{"key":"abc"}` {
		t.Fatalf("%q %s", c.IdempotencyKey, c.Arguments)
	}
	v, err := sc.consents.Get(t.Context(), sc.approver, c.ConsentID)
	if err != nil || string(v.Arguments) != `{"key":"abc"}` || v.ArgumentsDigest != c.ArgumentsDigest {
		t.Fatalf("%+v %v", v, err)
	}
	own := sc.propose("write_key", func(r *Proposal) { r.Arguments = []byte(`{"key":"mine","z":1}`) })
	if own.IdempotencyKey != "mine" || string(own.Arguments) != `{"key":"mine","z":1}` {
		t.Fatalf("%q %s", own.IdempotencyKey, own.Arguments)
	}
	for _, bad := range []string{`{"key":1}`, `{"key":""}`, `{"key":null}`} {
		r := sc.proposal("write_key")
		r.Arguments = []byte(bad)
		if _, err := sc.Propose(t.Context(), sc.alice, r); !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "arguments.key") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	sc.decide(c, true)
	sc.until(c.ID, Succeeded)
	if s := w.sender.all(); len(s) != 1 || s[0].args != `{"key":"abc"}` {
		t.Fatalf("%+v", s)
	}
}
