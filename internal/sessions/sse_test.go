package sessions

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

var wide = streamLimits{event: 1 << 20, lines: 1 << 16, total: 1 << 24}

type seenEvent struct{ Name, Data string }

func readEvents(r io.Reader, lim streamLimits) (out []seenEvent, last *eventReader, err error) {
	e := newEventReader(r, lim)
	for {
		ev, err := e.next()
		if err != nil {
			return out, e, err
		}
		out = append(out, seenEvent{ev.name, string(ev.data)})
	}
}

func TestFO072_EventStreamFraming(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, in string
		want     []seenEvent
	}{
		{"plain", "data: {\"a\":1}\n\n", []seenEvent{{"", `{"a":1}`}}},
		{"no space", "data:x\n\n", []seenEvent{{"", "x"}}},
		{"two spaces", "data:  x\n\n", []seenEvent{{"", " x"}}},
		{"two lines", "data: {\"a\":\ndata: 1}\n\n", []seenEvent{{"", "{\"a\":\n1}"}}},
		{"crlf", "event: message\r\ndata: x\r\n\r\ndata: y\r\n\r\n", []seenEvent{{"message", "x"}, {"", "y"}}},
		{"cr", "data: x\r\rdata: y\r\r", []seenEvent{{"", "x"}, {"", "y"}}},
		{"mixed ends", "data: x\r\n\ndata: y\n\r\n", []seenEvent{{"", "x"}, {"", "y"}}},
		{"byte order mark", "\xef\xbb\xbfdata: x\n\n", []seenEvent{{"", "x"}}},
		{"byte order mark later", "data: x\n\n\xef\xbb\xbfdata: y\n\n", []seenEvent{{"", "x"}}},
		{"no empty line at the end", "data: x", []seenEvent{{"", "x"}}},
		{"empty line missing", "data: x\n", []seenEvent{{"", "x"}}},
		{"unknown field", "foo: bar\ndata: x\n\n", []seenEvent{{"", "x"}}},
		{"field without colon", "data\ndata: x\n\n", []seenEvent{{"", "\nx"}}},
		{"nothing", "", nil},
	} {
		for name, r := range map[string]io.Reader{
			"whole": strings.NewReader(c.in), "bytes": iotest.OneByteReader(strings.NewReader(c.in)),
			"halves": iotest.HalfReader(strings.NewReader(c.in)), "err with data": iotest.DataErrReader(strings.NewReader(c.in)),
		} {
			got, _, err := readEvents(r, wide)
			if err != io.EOF || !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s, %s: %q, %v; want %q", c.name, name, got, err, c.want)
			}
		}
	}
}

func TestFO073_CommentsPingsAndEmptyEvents(t *testing.T) {
	t.Parallel()
	in := ": ping\n\ndata:\n\nevent: ping\ndata: {}\n\nid: 42\n\nretry: 1500\n\nretry: -1\nid: a\x00b\n\ndata: x\n\n:\n"
	got, e, err := readEvents(strings.NewReader(in), wide)
	want := []seenEvent{{"ping", "{}"}, {"", "x"}}
	if err != io.EOF || !reflect.DeepEqual(got, want) {
		t.Fatalf("%q %v", got, err)
	}
	if e.lastID != "42" || e.retry != 1500*time.Millisecond {
		t.Fatalf("id %q, retry %v", e.lastID, e.retry)
	}
	lines := 0
	e = newEventReader(strings.NewReader(": a\n: b\n\ndata: x\n\n"), wide)
	e.activity = func() { lines++ }
	if _, err := e.next(); err != nil || lines != 5 {
		t.Fatalf("%d lines counted as activity, %v", lines, err)
	}
}

func TestEventReader_Limits(t *testing.T) {
	t.Parallel()
	lim := streamLimits{event: 100, lines: 10, total: 1000}
	for _, c := range []struct {
		name, in string
		want     error
	}{
		{"line", "data: " + strings.Repeat("x", 200) + "\n\n", errEventTooLarge},
		{"line without end", strings.Repeat("x", 300), errEventTooLarge},
		{"data over lines", strings.Repeat("data: 12345678901234567890\n", 6), errEventTooLarge},
		{"lines", strings.Repeat("data:\n", 11), errEventTooLarge},
		{"comment lines", strings.Repeat(":\n", 11), errEventTooLarge},
		{"total", strings.Repeat("data: x\n\n", 200), errStreamTooLarge},
		{"inside", strings.Repeat("data: x\n\n", 100), io.EOF},
	} {
		if _, _, err := readEvents(strings.NewReader(c.in), lim); err != c.want {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	broken := io.MultiReader(strings.NewReader("data: x\n"), iotest.ErrReader(io.ErrUnexpectedEOF))
	if got, _, err := readEvents(broken, wide); len(got) != 0 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("an event of a broken stream was delivered: %q %v", got, err)
	}
}

// Work must stay linear for the shapes that make naive readers quadratic. The
// counted bytes are compared, not the time.
func TestEventReader_ManyLinesOfOneEvent(t *testing.T) {
	t.Parallel()
	lim := streamLimits{event: 8 << 20, lines: 1 << 20, total: 16 << 20}
	for _, end := range []string{"\n", "\r", "\r\n"} {
		in := strings.Repeat("data:"+end, 200_000) + "data: x" + end + end
		got, _, err := readEvents(strings.NewReader(in), lim)
		if err != io.EOF || len(got) != 1 || len(got[0].Data) != 200_001 {
			t.Errorf("%q: %d events, %v", end, len(got), err)
		}
	}
}

// reference reads a whole stream the simple way.
func reference(in string) (out []seenEvent) {
	in = strings.TrimPrefix(in, "\xef\xbb\xbf")
	in = strings.ReplaceAll(strings.ReplaceAll(in, "\r\n", "\n"), "\r", "\n")
	var data []string
	name := ""
	flush := func() {
		if d := strings.Join(data, "\n"); d != "" {
			out = append(out, seenEvent{name, d})
		}
		data, name = nil, ""
	}
	for _, line := range strings.Split(in, "\n") {
		if line == "" {
			flush()
			continue
		}
		k, v, _ := strings.Cut(line, ":")
		v = strings.TrimPrefix(v, " ")
		switch k {
		case "data":
			data = append(data, v)
		case "event":
			name = shorten(v, 64)
		}
	}
	flush()
	return out
}

func FuzzEventReader(f *testing.F) {
	for _, s := range []string{"data: x\n\n", "data: x\r\n\r\ndata: y\r\r", "\xef\xbb\xbfdata:\ndata\n\n", "event: ping\ndata: {}\n\n:\n", "id: 1\nretry: 5\n"} {
		f.Add(s, uint64(1))
	}
	f.Fuzz(func(t *testing.T, in string, seed uint64) {
		want := reference(in)
		got, _, err := readEvents(newCutter(in, seed), wide)
		if err != io.EOF {
			t.Fatal(err)
		}
		if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
			t.Fatalf("%q: %q, want %q", in, got, want)
		}
	})
}

// cutter returns a string in pieces of random length.
type cutter struct {
	s   string
	rnd *rand.Rand
}

func newCutter(s string, seed uint64) *cutter {
	return &cutter{s: s, rnd: rand.New(rand.NewPCG(seed, 1))}
}

func (c *cutter) Read(p []byte) (int, error) {
	if c.s == "" {
		return 0, io.EOF
	}
	n := min(1+c.rnd.IntN(7), len(p), len(c.s))
	copy(p, c.s[:n])
	c.s = c.s[n:]
	return n, nil
}

// An id counts once its event is whole, so that what broke off is not left out when
// the stream is taken up again.
func TestEventReader_IDsOfWholeEvents(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"id: 1\ndata: x\n\nid: 2\ndata: y\n":     "2", // only its empty line is missing, at a clean end
		"id: 1\ndata: x\n\nid: 2\n":              "1",
		"id: 1\n\ndata: x\n\n":                   "1",
		"id: 1\n\nid:\ndata: x\n\n":              "",
		"id: 1\ndata: x\n\nid: 2\n: comment":     "1",
		"id: 1\nid: 2\ndata: x\n\ndata: y\n\n: ": "2",
	} {
		if _, e, _ := readEvents(strings.NewReader(in), wide); e.lastID != want {
			t.Errorf("%q: %q, want %q", in, e.lastID, want)
		}
	}
	broken := io.MultiReader(strings.NewReader("id: 1\ndata: x\n\nid: 2\ndata: y\n"), iotest.ErrReader(io.ErrUnexpectedEOF))
	if _, e, _ := readEvents(broken, wide); e.lastID != "1" {
		t.Errorf("the id of a broken event: %q", e.lastID)
	}
}

// An event that cannot be held is told by its beginning and skipped to its end,
// whichever way its lines are cut; the events around it come whole.
func TestEventReader_GivesUpWhatCannotBeHeld(t *testing.T) {
	t.Parallel()
	filler := strings.Repeat("x", 300<<10)
	for name, large := range map[string]string{
		"one line":   `data: {"id":7,"x":"` + filler + "\"}\n\n",
		"many lines": `data: {"id":7,"x":["` + strings.Repeat("\"\ndata: ,\"xxxxxxxx", 40_000) + "\"]}\n\n",
		"CRLF":       `data: {"id":7,"x":"` + filler + "\"}\r\n\r\n",
	} {
		for _, step := range []int{1000, 4096, 1 << 20} {
			stream := "data: before\n\n" + large + "data: after\n\n"
			e := newEventReader(&stepReader{data: []byte(stream), step: step}, streamLimits{event: 4 << 20, lines: 1 << 20, total: 8 << 20})
			budget := newBudget(100<<10, 100<<10)
			e.hold = &lease{budget: budget, tenant: tenantID(t, "ten_a")}
			var begins []string
			e.giveUp = func(begin []byte) { begins = append(begins, string(begin[:min(len(begin), 9)])) }
			var got []string
			for {
				ev, err := e.next()
				if err != nil {
					if err != io.EOF {
						t.Fatal(err)
					}
					break
				}
				got = append(got, string(ev.data))
			}
			if !slices.Equal(got, []string{"before", "after"}) || len(begins) != 1 || strings.TrimSpace(begins[0]) == "" || !strings.HasPrefix(strings.TrimSpace(begins[0]), `{"id":7,`) {
				t.Errorf("%s by %d: %.40q, begins %q", name, step, got, begins)
			}
			if e.hold.release(); budget.used != 0 {
				t.Errorf("%s by %d: %d bytes are still counted", name, step, budget.used)
			}
		}
	}
}

// stepReader reads at most step bytes at a time.
type stepReader struct {
	data []byte
	step int
}

func (r *stepReader) Read(p []byte) (int, error) {
	if len(r.data) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.data[:min(len(r.data), r.step)])
	r.data = r.data[n:]
	return n, nil
}
