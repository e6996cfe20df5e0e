package api

import (
	"io"
	"net/http"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// bodyTimeout is how long a request's body may take to arrive. It is not the
// server's ReadTimeout, which would end long waits too: net/http cancels a
// request when its connection's read deadline passes, read or not.
const bodyTimeout = 30 * time.Second

var errSlowBody = fault.New(fault.Deadline, "REQUEST_TIMEOUT", "the request body took too long to arrive")

func tooLarge(limit int) error {
	return fault.New(fault.TooLarge, "REQUEST_TOO_LARGE", "the request body exceeds the limit of %d bytes", limit)
}

// restBody is the body of a REST request. It gives at most limit bytes, and
// keeps the error that ended the reading of the request for the error handler.
type restBody struct {
	r     io.ReadCloser
	limit int
	left  int   // of limit
	size  int64 // as announced; -1 when unknown
	err   error
}

// Read implements io.Reader.
func (b *restBody) Read(p []byte) (int, error) {
	if len(p) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.r.Read(p)
	if n > b.left {
		b.left = 0
		return 0, tooLarge(b.limit)
	}
	b.left -= n
	return n, err
}

// Close implements io.Closer.
func (b *restBody) Close() error { return b.r.Close() }

// timedBody is a body that must arrive within a time, which counts no more once
// all of it was read.
type timedBody struct {
	io.ReadCloser
	rc   *http.ResponseController
	done bool
}

// timed puts the time limit on the body of a request; one without a body stays
// as it is.
func timed(w http.ResponseWriter, r *http.Request, within time.Duration) io.ReadCloser {
	if r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 {
		return r.Body
	}
	rc := http.NewResponseController(w)
	if err := rc.SetReadDeadline(time.Now().Add(within)); err != nil {
		return r.Body // a writer of a test, which has no connection
	}
	return &timedBody{ReadCloser: r.Body, rc: rc}
}

// Read implements io.Reader.
func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	// After any other error the limit stays: net/http reads on, to see whether
	// the connection can be kept.
	if err == io.EOF && !b.done {
		b.done = true
		b.rc.SetReadDeadline(time.Time{}) //nolint:errcheck // setting it worked, so does this
	}
	return n, err
}
