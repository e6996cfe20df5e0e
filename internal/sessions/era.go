package sessions

import (
	"slices"

	"github.com/mark3labs/mcp-go/mcp"
)

// eraNote is what a server proved about itself.
type eraNote struct {
	version string // the newest seen
	legacy  bool   // the last definite answer was legacy
	silent  int    // probes in a row without a sign
	told    string // the era that was told to Learned last
	offer   string // the version to initialize with, where the newest was refused
}

// era returns what is known of a server: what this process saw, else what others
// saw before and the target brings.
func (p *Pool) era(k Key, t Target) eraNote {
	p.mu.Lock()
	defer p.mu.Unlock()
	note, ok := p.eras[registrationOf(k)]
	if !ok {
		note.legacy = t.KnownEra == EraLegacy
	}
	note.version = max(note.version, t.KnownVersion)
	return note
}

// note changes what is remembered of a server. The caller holds p.mu.
func (p *Pool) note(k Key, change func(*eraNote)) eraNote {
	reg := registrationOf(k)
	note, ok := p.eras[reg]
	if !ok && len(p.eras) >= notesKept {
		for old := range p.eras {
			delete(p.eras, old)
			break
		}
	}
	change(&note)
	p.eras[reg] = note
	return note
}

// noteEra remembers what a server proved. The newest version seen stays, so that
// a later downgrade is noticed.
func (p *Pool) noteEra(k Key, version string, legacy bool) {
	era := EraModern
	if legacy {
		era = EraLegacy
	}
	p.mu.Lock()
	news := false
	p.note(k, func(n *eraNote) {
		news = n.told != era || version > n.version
		*n = eraNote{version: max(n.version, version), legacy: legacy, told: era, offer: n.offer}
	})
	p.mu.Unlock()
	if news && p.learned != nil {
		p.learned(k, era, version)
	}
}

// noteOffer remembers the version that a server takes, for it refuses newer ones
// where it should name another.
func (p *Pool) noteOffer(k Key, version string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.note(k, func(n *eraNote) { n.offer = version })
}

// silent counts a probe without a sign and returns how many there were in a row.
func (p *Pool) silent(k Key) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.note(k, func(n *eraNote) { n.silent++ }).silent
}

// forgetEra lets the next connection probe again.
func (p *Pool) forgetEra(k Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// An entry is made even where there was none: it overrules what the target
	// brings.
	p.note(k, func(n *eraNote) { n.legacy = false })
}

// modernCodes are the codes of JSON-RPC errors that a modern server gives a request
// with status 400.
var modernCodes = []int64{mcp.UNSUPPORTED_PROTOCOL_VERSION, mcp.HEADER_MISMATCH, mcp.MISSING_REQUIRED_CLIENT_CAPABILITY, mcp.INVALID_PARAMS}

// doubtful reports whether a refusal speaks against the modern era that was
// negotiated, so that it is to be negotiated anew before anything else is sent:
// the server may have been replaced by one of the other era. A sign-in, a rate
// limit and an outage say nothing of it.
func doubtful(status int, e *RPCError) bool {
	if e != nil {
		return status == 400 && !slices.Contains(modernCodes, e.Code)
	}
	switch status {
	case 400, 404, 405, 406:
		return true
	}
	return false
}
