package sessions

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
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
