package sessions

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// handshakeRefused names what a refused initialize means: err, or the error of
// JSON-RPC in the reply. A server that speaks HTTP+SSE there is told apart and
// never spoken to so, since the tenant did not register it for that.
func (c *conn) handshakeRefused(ctx context.Context, rep *reply, err error) error {
	f, _ := fault.As(err)
	plain := f != nil && f.Reason == "SERVER_REFUSED"
	status := strconv.Itoa(rep.status)
	if w, ok := c.wire.(*httpWire); ok && (plain || err == nil) && mayBeSSE(rep) && w.speaksSSE(ctx) {
		return protocolError("TRANSPORT_UNSUPPORTED", "the URL speaks HTTP+SSE, not Streamable HTTP; register the server as sse").With("status", status)
	}
	switch {
	case plain:
		return protocolError("TRANSPORT_UNSUPPORTED", "the URL does not speak Streamable HTTP").With("status", status).Cause(err)
	case err != nil:
		return err
	}
	e := rep.msg.err
	out := protocolError("INITIALIZE_REFUSED", "the server refused to initialize: "+strconv.Quote(shorten(e.Message, 200))).With("code", strconv.FormatInt(e.Code, 10))
	if offered := supportedVersions(e.Data, "supported"); len(offered) > 0 {
		out = out.With("supported", shorten(strings.Join(offered, " "), 200))
	}
	return out
}

// olderNamed returns the newest version older than the one that was refused, of
// those that the refusal names, and nothing when there is none or one was tried.
func (c *conn) olderNamed(rep *reply, refused string) []string {
	text := rep.said
	var named []string
	if e := rep.msg.err; e != nil {
		text, named = e.Message, supportedVersions(e.Data, "supported")
	}
	if c.steppedDown || rep.msg.err == nil && rep.status != http.StatusBadRequest {
		return nil
	}
	for _, v := range c.target.legacyVersions() { // the newest first
		if v < refused && (slices.Contains(named, v) || strings.Contains(text, v)) {
			return []string{v}
		}
	}
	return nil
}

// mayBeSSE reports whether an answer to initialize leaves open that the URL is that
// of an event stream. Sign-in, rate limits and outages say nothing about it; an
// error that only an endpoint for JSON-RPC gives rules it out.
func mayBeSSE(rep *reply) bool {
	switch rep.status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed:
	default:
		return false
	}
	if rep.msg.err == nil {
		return true
	}
	switch rep.msg.err.Code {
	case mcp.UNSUPPORTED_PROTOCOL_VERSION, mcp.HEADER_MISMATCH, mcp.MISSING_REQUIRED_CLIENT_CAPABILITY, mcp.METHOD_NOT_FOUND:
		return false
	}
	return true
}

// speaksSSE looks whether GET yields an event stream that names an endpoint first.
// Nothing is posted there.
func (w *httpWire) speaksSSE(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, w.limits.Probe)
	defer cancel()
	resp, err := w.openStream(ctx, w.endpoint.Load(), "")
	if err != nil {
		return false
	}
	defer resp.Body.Close() //nolint:errcheck // only its beginning is wanted
	body, err := decoded(resp)
	if err != nil || resp.StatusCode != http.StatusOK || mediaType(resp.Header) != "text/event-stream" {
		return false
	}
	e := newEventReader(body, streamLimits{event: envelopeSlack, lines: w.limits.EventLines, total: envelopeSlack})
	ev, err := e.next()
	return err == nil && ev.name == "endpoint"
}

// leaveSession deletes the session of a handshake that came to nothing, before
// another is tried on the same wire.
func (c *conn) leaveSession(ctx context.Context) {
	if w, ok := c.wire.(*httpWire); ok {
		w.close(ctx)
		w.enter("")
	}
}
