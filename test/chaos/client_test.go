package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

type obj = map[string]any

// caller is one credential's view of one server.
type caller struct {
	p         *process
	key, user string
}

func (p *process) as(key string) caller { return caller{p: p, key: key} }

func (c caller) on(user string) caller { c.user = user; return c }

// refusal is an answer that is no success.
type refusal struct {
	status int
	body   string
}

func (r *refusal) Error() string { return fmt.Sprintf("status %d: %s", r.status, r.body) }

// status returns the HTTP status of an error, 0 when there was no answer.
func status(err error) int {
	if r, ok := err.(*refusal); ok { //nolint:errorlint // never wrapped
		return r.status
	}
	return 0
}

// client opens connections as it needs and keeps none to a server that died.
var client = &http.Client{Timeout: patience, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

func (c caller) do(method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(context.Background(), method, c.p.url+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+c.key)
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.user != "" {
		req.Header.Set("Bulkhead-User", c.user)
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return &refusal{status: resp.StatusCode, body: string(raw)}
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return fmt.Errorf("answer of %s: %w: %s", path, err, raw)
	}
	return nil
}

func (c caller) post(path string, in, out any) error { return c.do(http.MethodPost, path, in, out) }
func (c caller) get(path string, out any) error      { return c.do(http.MethodGet, path, nil, out) }

// call is what the tests look at of a call.
type call struct {
	CallID, State, Effect, RequestID, Recorded, Receipt, SideEffectID string
	Revision                                                          int
	Consent                                                           *struct{ ConsentID string }
	Error                                                             *struct{ Layer, Code, Message string }
	Attempts                                                          []struct {
		Number                 int
		Phase, Outcome, Detail string
		Evidence               bool
	}
	Result   json.RawMessage
	Reason   string
	Decision struct {
		FirstFailed, Outcome, Reason string
		Checks                       []struct {
			Check, Detail string
			Passed        bool
		}
	}
	Source struct {
		Findings []struct{ Code, Detail string }
	}
}

func (c call) String() string {
	raw, err := json.Marshal(c)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// stale reports whether a proposal was refused because the catalog could not be
// brought up to date for it.
func (c call) stale() bool {
	for _, k := range c.Decision.Checks {
		if !k.Passed && k.Check == "definition" && strings.HasPrefix(k.Detail, "CATALOG_STALE") {
			return c.Revision == 1 && c.Consent == nil
		}
	}
	return false
}

// user is a person's session on one server process.
type user struct {
	caller
	session string
}

// open opens a session of a user with all servers that have a contract.
func (w *world) open(p *process, name string) user {
	w.t.Helper()
	u := user{caller: p.as(w.service).on(name)}
	var s struct{ SessionID string }
	w.must(u.post("/v1/sessions", obj{}, &s))
	u.session = s.SessionID
	return u
}

// at is the same session through another server process.
func (u user) at(p *process) user { u.p = p; return u }

// proposal is a call to make.
type proposal struct {
	server, tool string
	args         obj
	requestID    string
	wait         time.Duration
}

func (u user) propose(p proposal) (c call, err error) {
	in := obj{"server": p.server, "tool": p.tool, "arguments": p.args, "wait": fmt.Sprintf("%gs", p.wait.Seconds())}
	if p.requestID != "" {
		in["requestId"] = p.requestID
	}
	err = u.post("/v1/sessions/"+u.session+"/calls", in, &c)
	return c, err
}

func (u user) call(id string) (c call, err error) {
	err = u.get("/v1/calls/"+id, &c)
	return c, err
}

// next waits on the server for a revision above the given one.
func (u user) next(id string, after int, wait time.Duration) (c call, err error) {
	q := url.Values{"wait": {fmt.Sprintf("%gs", wait.Seconds())}, "afterRevision": {fmt.Sprint(after)}}
	err = u.get("/v1/calls/"+id+"?"+q.Encode(), &c)
	return c, err
}

func (u user) cancel(id string) (c call, err error) {
	err = u.post("/v1/calls/"+id+":cancel", obj{}, &c)
	return c, err
}

// awaitState polls until the call is in one of the states.
func (w *world) awaitState(u user, id string, states ...string) (c call) {
	w.t.Helper()
	eventually(w.t, "call "+id+" to be "+strings.Join(states, " or "), func() bool {
		got, err := u.call(id)
		if err != nil {
			return false
		}
		c = got
		for _, s := range states {
			if c.State == s {
				return true
			}
		}
		return false
	})
	return c
}

// decide answers a consent.
func (w *world) decide(p *process, c call, decision string) error {
	w.t.Helper()
	if c.Consent == nil {
		w.t.Fatalf("the call asks for no consent: %v", c)
	}
	return p.as(w.approver).post("/v1/consents/"+c.Consent.ConsentID+":decide", obj{"decision": decision, "reason": "test"}, nil)
}
