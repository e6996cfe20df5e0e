package sessions

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
)

var (
	errAborted  = errors.New("sessions: request given up before it was sent")
	errEncoding = errors.New("sessions: content encoding was not offered")
	errTooLarge = errors.New("sessions: body exceeds its limit")
	// errQuestions means that a server asked too much on the stream of an answer.
	errQuestions = errors.New("sessions: too many requests of the server")
)

// sendBody is the body of a request. It knows whether a byte of it was ever asked
// for, which is the fact behind NotSent: an HTTP server cannot act on a message
// of which it has the headers only. It has no GetBody, so net/http never sends it
// twice.
type sendBody struct {
	mu      sync.Mutex
	data    []byte
	pos     int
	before  func() error
	started bool
	dead    bool
	refusal error
}

// Read implements io.Reader. The first call runs before.
func (b *sendBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.dead {
		return 0, errAborted
	}
	if !b.started {
		if b.before != nil {
			if err := b.before(); err != nil {
				b.dead, b.refusal = true, err
				return 0, errAborted
			}
		}
		b.started = true
	}
	if b.pos == len(b.data) {
		return 0, io.EOF
	}
	n := copy(p, b.data[b.pos:])
	b.pos += n
	return n, nil
}

// Close implements io.Closer.
func (b *sendBody) Close() error { return nil }

// abort makes sure that nothing is sent from now on, and reports whether nothing
// was sent before. The transport may still hold the body after it returned.
func (b *sendBody) abort() (unsent bool, refusal error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dead = true
	return !b.started, b.refusal
}

// phase is MaybeSent once a byte was asked for.
func (b *sendBody) phase() Phase {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.started {
		return MaybeSent
	}
	return NotSent
}

// mediaType returns the media type of a response in lower case without its
// parameters. A list, as duplicated headers become, counts by its first entry.
func mediaType(h http.Header) string {
	v := h.Get("Content-Type")
	if i := strings.IndexAny(v, ";,"); i >= 0 {
		v = v[:i]
	}
	return strings.ToLower(strings.TrimSpace(v))
}

// decoded returns the body without its content encoding. Gzip is understood even
// though it was not asked for, since intermediaries compress on their own.
func decoded(resp *http.Response) (io.Reader, error) {
	switch strings.ToLower(strings.TrimSpace(resp.Header.Get("Content-Encoding"))) {
	case "", "identity":
		return resp.Body, nil
	case "gzip", "x-gzip":
		return &gunzip{src: resp.Body}, nil
	}
	return nil, errEncoding
}

// gunzip opens the gzip stream at the first read, because its header may come
// late on an event stream.
type gunzip struct {
	src io.Reader
	zr  *gzip.Reader
}

func (g *gunzip) Read(p []byte) (int, error) {
	if g.zr == nil {
		zr, err := gzip.NewReader(g.src)
		if err != nil {
			return 0, err
		}
		g.zr = zr
	}
	return g.zr.Read(p)
}

// scratch holds buffers for answers whose length is not announced. Larger ones
// are not kept.
var scratch = sync.Pool{New: func() any { return new([]byte) }}

const maxScratch = 256 << 10

// readAll reads at most limit bytes; more is errTooLarge. size is the announced
// length, or -1. The buffer is counted on hold, also when it fails.
func readAll(r io.Reader, limit, size int64, hold *lease) ([]byte, error) {
	if size > limit {
		return nil, errTooLarge
	}
	if size >= 0 {
		// One byte more than announced, so that the end is seen without growing. What
		// is announced is not believed beyond 1 MiB.
		start := int(min(size, 1<<20)) + 1
		if err := hold.grow(start); err != nil {
			return nil, err
		}
		return readInto(make([]byte, 0, start), r, limit, int(size)+1, hold)
	}
	p := scratch.Get().(*[]byte)
	buf, err := readInto((*p)[:0], r, limit, int(limit)+1, hold)
	if cap(buf) > maxScratch {
		return buf, err
	}
	*p = buf
	defer scratch.Put(p)
	if err != nil {
		return nil, err
	}
	return bytes.Clone(buf), nil
}

// joined puts blocks of so many bytes and two ends together.
func joined(blocks [][]byte, blocked int, end, last []byte) []byte {
	whole := make([]byte, 0, blocked+len(end)+len(last))
	for _, b := range blocks {
		whole = append(whole, b...)
	}
	return append(append(whole, end...), last...)
}

// readInto appends what it reads to buf, and returns buf beside an error too. The
// buffer doubles up to likely bytes, where the end is expected; a large text is
// read in blocks, which are joined once, so that it costs about twice its size.
func readInto(buf []byte, r io.Reader, limit int64, likely int, hold *lease) ([]byte, error) {
	var blocks [][]byte
	blocked := 0
	for {
		if len(buf) == cap(buf) {
			large := cap(buf) >= blockBytes
			more := max(cap(buf), 2048)
			switch {
			case large:
				more = blockBytes
			case cap(buf) < likely:
				more = min(more, likely-cap(buf))
			}
			if err := hold.grow(blocked + cap(buf) + more); err != nil {
				return buf, err
			}
			if large {
				blocks, blocked = append(blocks, buf), blocked+len(buf)
				buf = make([]byte, 0, blockBytes)
			} else {
				buf = slices.Grow(buf, more)
			}
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		switch {
		case int64(blocked+len(buf)) > limit:
			return buf, errTooLarge
		case err == io.EOF && blocks != nil:
			return joined(blocks, blocked, buf, nil), nil
		case err == io.EOF:
			return buf, nil
		case err != nil:
			return buf, err
		}
	}
}
