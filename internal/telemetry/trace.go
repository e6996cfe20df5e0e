package telemetry

import (
	"crypto/rand"
	"encoding/hex"
	"strings"
)

// Trace is a position in a distributed trace, as W3C Trace Context writes it. The
// zero value is none.
type Trace struct {
	parent string // of version 00
	state  string
}

// The bounds of tracestate (W3C Trace Context, section 3.3.1).
const (
	maxTraceState   = 512 // bytes
	maxTraceMembers = 32
)

// ReadTrace reads the headers traceparent and tracestate. What is malformed is as
// good as absent, as the standard demands: without a valid parent there is no
// trace, and an invalid state is left out.
func ReadTrace(parents, states []string) Trace {
	if len(parents) != 1 {
		return Trace{}
	}
	p := parents[0]
	if len(p) < 55 || p[2] != '-' || p[35] != '-' || p[52] != '-' || !isHex(p[:2]) || !isHex(p[3:35]) || !isHex(p[36:52]) || !isHex(p[53:55]) {
		return Trace{}
	}
	later := p[:2] != "00"
	if p[:2] == "ff" || len(p) > 55 && (!later || p[55] != '-') || len(p) > 256 ||
		strings.Trim(p[3:35], "0") == "" || strings.Trim(p[36:52], "0") == "" {
		return Trace{}
	}
	t := Trace{parent: "00-" + p[3:53] + flags(p[53:55])}
	if s := strings.Join(states, ","); validTraceState(s) {
		t.state = s
	}
	return t
}

// TraceOf returns the trace that was stored as its two members.
func TraceOf(parent, state string) Trace {
	if parent == "" {
		return Trace{}
	}
	return ReadTrace([]string{parent}, []string{state})
}

// flags keeps what version 00 knows of two hexadecimal digits: sampled.
func flags(h string) string {
	if strings.IndexByte("13579bdf", h[1]) >= 0 {
		return "01"
	}
	return "00"
}

func isHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// validTraceState checks a list of members; each is a key and a value.
func validTraceState(s string) bool {
	if s == "" || len(s) > maxTraceState {
		return false
	}
	members := strings.Split(s, ",")
	if len(members) > maxTraceMembers {
		return false
	}
	seen := make(map[string]bool, len(members))
	for _, m := range members {
		m = strings.Trim(m, " \t")
		if m == "" {
			continue
		}
		key, value, ok := strings.Cut(m, "=")
		if !ok || seen[key] || !validTraceKey(key) || value == "" || len(value) > 256 {
			return false
		}
		seen[key] = true
		for i := range len(value) {
			if value[i] < 0x20 || value[i] > 0x7e || value[i] == '=' {
				return false
			}
		}
	}
	return len(seen) > 0
}

func validTraceKey(key string) bool {
	if key == "" || len(key) > 256 {
		return false
	}
	for i := range len(key) {
		c := key[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && strings.IndexByte("_-*/@", c) < 0 {
			return false
		}
	}
	return true
}

// ID returns the id of the whole trace, 32 hexadecimal digits, "" for none.
func (t Trace) ID() string {
	if t.parent == "" {
		return ""
	}
	return t.parent[3:35]
}

// Parent and State return the members as they are sent on; empty for none.
func (t Trace) Parent() string { return t.parent }

// State returns the tracestate, which goes on as it came.
func (t Trace) State() string { return t.state }

// Child returns the trace with a new span, the one whose work it goes on with.
func (t Trace) Child() Trace {
	if t.parent == "" {
		return t
	}
	var span [8]byte
	rand.Read(span[:]) //nolint:errcheck // it never fails
	span[0] |= 1       // never all zero
	t.parent = t.parent[:36] + hex.EncodeToString(span[:]) + t.parent[52:]
	return t
}
