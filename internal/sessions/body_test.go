package sessions

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestReadAll(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for _, tt := range []struct {
		name        string
		text        io.Reader
		limit, size int64
		want        int
		err         error
	}{
		{"announced", strings.NewReader(strings.Repeat("x", 3000)), 3000, 3000, 3000, nil},
		{"announced as too large", strings.NewReader(""), 10, 11, 0, errTooLarge},
		{"more than announced", strings.NewReader("xxxx"), 10, 1, 4, nil},
		{"not announced", strings.NewReader(strings.Repeat("x", 5000)), 5000, -1, 5000, nil},
		{"byte by byte", iotest.OneByteReader(strings.NewReader("xxxx")), 10, -1, 4, nil},
		{"empty", strings.NewReader(""), 10, -1, 0, nil},
		{"too large", strings.NewReader(strings.Repeat("x", 5001)), 5000, -1, 5001, errTooLarge},
		{"larger than what is kept", strings.NewReader(strings.Repeat("x", 2*maxScratch)), 1 << 20, -1, 2 * maxScratch, nil},
		{"broken", io.MultiReader(strings.NewReader("xx"), iotest.ErrReader(broken)), 10, -1, 2, broken},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := readAll(tt.text, tt.limit, tt.size, nil)
			if !errors.Is(err, tt.err) || err == nil && len(got) != tt.want {
				t.Errorf("%d bytes, %v; want %d bytes, %v", len(got), err, tt.want, tt.err)
			}
		})
	}
}

// TestReadAll_KeepsNothing reads two answers through the same buffer.
func TestReadAll_KeepsNothing(t *testing.T) {
	first, err := readAll(strings.NewReader("first"), 10, -1, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := readAll(strings.NewReader("other"), 10, -1, nil); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(first, []byte("first")) {
		t.Errorf("the first answer became %q", first)
	}
}

// BenchmarkReadAll reads an answer of 64 KiB whose length is not announced.
func BenchmarkReadAll(b *testing.B) {
	text := bytes.Repeat([]byte("x"), 64<<10)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := readAll(bytes.NewReader(text), 1<<20, -1, nil); err != nil {
			b.Fatal(err)
		}
	}
}
