package sessions

import (
	"bytes"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// refused judges an HTTP answer other than 2xx. A JSON-RPC error in its body is
// the server's answer to the request, whatever the status; 401, 403 and 429 are
// reported as faults beside it, and so is the loss of a legacy session.
func (w *httpWire) refused(resp *http.Response, body io.Reader, x *exchange, next **url.URL) (reply, io.Reader, error) {
	rep := reply{status: resp.StatusCode, phase: refusalPhase(resp.StatusCode)}
	if resp.StatusCode >= 300 && resp.StatusCode < 400 {
		return rep, nil, w.redirected(resp, next)
	}
	if data, err := readAll(body, refusalBytes, resp.ContentLength, x.hold); err == nil {
		if w.errorBody(data, x, &rep); rep.msg.err == nil {
			rep.said = shorten(string(data), maxSaid)
		}
	}
	rep.retryAfter = retryAfter(resp.Header.Get("Retry-After"), time.Now())
	return rep, nil, w.refusal(resp, &rep)
}

// errorBody looks for a JSON-RPC error in the body of a refusal.
func (w *httpWire) errorBody(data []byte, x *exchange, rep *reply) {
	data = bytes.TrimSpace(data)
	if len(data) == 0 || data[0] != '{' {
		return
	}
	m, err := parseMessage(data)
	if err != nil || m.err == nil {
		return
	}
	if m.answers(x.id) || m.hasNullID() {
		rep.msg, rep.phase = m, Answered
		return
	}
	w.count.stray.Add(1)
}

func (w *httpWire) refusal(resp *http.Response, rep *reply) error {
	status := strconv.Itoa(resp.StatusCode)
	switch code := resp.StatusCode; {
	case code == http.StatusUnauthorized, code == http.StatusForbidden && rep.msg.err == nil, code == http.StatusForbidden && challenge(resp) != "":
		rep.challenge = challenge(resp)
		reason, text := "AUTHORIZATION_REQUIRED", "the server asks for a sign-in"
		if code == http.StatusForbidden {
			reason, text = "FORBIDDEN_BY_SERVER", "the server refuses this user"
		}
		return failure(fault.Precondition, fault.Server, reason, text).With("status", status)
	case code == http.StatusTooManyRequests:
		return failure(fault.Exhausted, fault.Server, "RATE_LIMITED_BY_SERVER", "the server limits the rate of requests").Retry(rep.retryAfter)
	case code == http.StatusNotFound && w.now().sessionID != "":
		rep.renew = true
		w.lost.Store(true)
		return failure(fault.Unavailable, fault.Protocol, SessionLost, "the server forgot the session; the request was not carried out")
	case rep.msg.err != nil:
		// Servers that lost their sessions often say so with 400 and a code of their
		// own; a new connection costs little and helps.
		rep.renew = code == http.StatusBadRequest && w.now().sessionID != "" && rep.msg.err.Code <= -32000 && rep.msg.err.Code > -32020 ||
			w.now().modern && doubtful(code, rep.msg.err)
		rep.doubt = rep.renew
		return nil
	case code >= 500:
		return failure(fault.Unavailable, fault.Server, "SERVER_ERROR", "the server or a proxy before it answered with status "+status).With("status", status).Retry(rep.retryAfter)
	}
	rep.doubt = w.now().modern && doubtful(resp.StatusCode, nil)
	rep.renew = rep.doubt || resp.StatusCode == http.StatusNotFound
	return failure(fault.Unavailable, fault.Server, "SERVER_REFUSED", "the server refused the request with status "+status).With("status", status)
}

// refusalPhase says what a status proves about the request. Those that are not
// named may come from a proxy that passed the request on.
func refusalPhase(status int) Phase {
	switch status {
	case 307, 308, 400, 401, 403, 404, 405, 406, 411, 413, 414, 415, 422, 426, 429, 431:
		return Answered
	}
	return MaybeSent
}

// redirected sets next to the target of a redirect that keeps method and body and
// stays within the origin.
func (w *httpWire) redirected(resp *http.Response, next **url.URL) error {
	from := resp.Request.URL
	to, err := from.Parse(resp.Header.Get("Location"))
	keeps := resp.StatusCode == http.StatusTemporaryRedirect || resp.StatusCode == http.StatusPermanentRedirect
	sameOrigin := err == nil && to.Scheme == from.Scheme && to.Host == from.Host && to.User == nil
	if keeps && sameOrigin {
		to.Fragment = ""
		*next = to
		return nil
	}
	reason, text := "REDIRECTED_AWAY", "the server redirects to another origin, which is not followed; register the final URL"
	if sameOrigin {
		reason, text = "REDIRECTED", "the server redirects with a status that drops the request; check the trailing slash of the registered URL"
	}
	return failure(fault.Unavailable, fault.Server, reason, text).With("status", strconv.Itoa(resp.StatusCode))
}

// challenge joins the WWW-Authenticate headers of a response.
func challenge(resp *http.Response) string {
	return shorten(strings.Join(resp.Header.Values("Www-Authenticate"), ", "), maxChallenge)
}

// retryAfter reads a Retry-After header: seconds or a date (RFC 9110, 10.2.3).
func retryAfter(v string, now time.Time) time.Duration {
	var d time.Duration
	if s, err := strconv.ParseUint(strings.TrimSpace(v), 10, 31); err == nil {
		d = time.Duration(s) * time.Second
	} else if at, err := http.ParseTime(v); err == nil {
		d = at.Sub(now)
	}
	return max(0, min(d, maxRetryAfter))
}
