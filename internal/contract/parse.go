package contract

import (
	"regexp"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// The bounds of a contract; docs/contract.md lists them with the defaults.
const (
	// MaxBytes is the largest source of a contract.
	MaxBytes = 256 << 10

	maxTools         = 1000
	maxScopes        = 64
	maxPatterns      = 1000
	maxSubjects      = 256
	maxQueryArgs     = 32
	maxOrigins       = 32
	maxRetries       = 5
	maxToolName      = 128
	maxWord          = 256
	maxURI           = 2048
	maxTimeout       = 10 * time.Minute
	maxCeiling       = 24 * time.Hour
	maxAge           = 24 * time.Hour
	maxSettle        = 24 * time.Hour
	minDuration      = time.Millisecond
	minAge           = time.Second
	maxRequestBytes  = 4 << 20
	maxResultBytes   = 16 << 20
	maxCallsASession = 1_000_000
)

// The defaults of what a contract may leave out.
const (
	defaultTimeout     = 30 * time.Second
	defaultCeiling     = 5 * time.Minute
	defaultRequest     = 64 << 10
	defaultResult      = 1 << 20
	defaultCalls       = 1000
	defaultWriteAge    = 60 * time.Second
	defaultReadAge     = 15 * time.Minute
	defaultSettle      = 60 * time.Second
	notOfferedYet      = "is not offered yet"
	runtimePrefix      = "stdio:"
	definitionPrefix   = "doc-1:sha256:"
	modernVersion      = "2026-07-28"
	firstLegacyVersion = "2024-11-05"
)

var (
	versions = []string{modernVersion, "2025-11-25", "2025-06-18", "2025-03-26", firstLegacyVersion}

	methods = []string{
		"tools/list", "tools/call",
		"resources/list", "resources/templates/list", "resources/read", "resources/subscribe", "resources/unsubscribe",
		"prompts/list", "prompts/get", "completion/complete", "logging/setLevel", "subscriptions/listen",
		"tasks/get", "tasks/update", "tasks/result", "tasks/list", "tasks/cancel",
	}

	serverName     = regexp.MustCompile(`^[a-z][a-z0-9-]{0,62}$`)
	definitionForm = regexp.MustCompile(`^doc-1:sha256:[0-9a-f]{64}$`)
)

// Parse reads a contract in YAML or JSON. It refuses what it does not know, and
// names up to 20 violations at once by their paths as written in the contract,
// such as tools[1].when, in an Invalid fault.
func Parse(src []byte) (*Contract, error) {
	canon, err := normalise(src)
	if err != nil {
		return nil, err
	}
	doc, err := canonical.Decode(canon)
	if err != nil {
		return nil, fault.Wrap(err, "decode a canonical contract")
	}
	r := &reader{}
	c := &Contract{ID: canonical.ContractID(canon), Canonical: canon}
	r.contract(c, doc)
	if r.failed() {
		return nil, r.err()
	}
	return c, nil
}

func (r *reader) contract(c *Contract, doc any) {
	o, ok := r.object("", doc, "server", "transport", "protocol", "origin", "audience", "scopes", "methods",
		"limits", "record", "tools", "resources", "prompts", "reverse")
	if !ok {
		return
	}
	if v, path, ok := o.need("server"); ok {
		c.Server = r.match(path, v, serverName, "must match ^[a-z][a-z0-9-]{0,62}$")
	}
	if v, path, ok := o.need("transport"); ok {
		w, _ := r.word(path, v, "http", "sse", "stdio")
		c.Transport = Transport(w)
	}
	r.protocol(c, o)
	r.reach(c, o)
	c.Methods = []string{"tools/list", "tools/call"}
	if v, path, ok := o.get("methods"); ok {
		c.Methods = r.texts(path, v, 1, len(methods), func(path string, v any) (string, bool) {
			return r.choice(path, v, methods)
		})
	}
	r.limits(c, o)
	r.record(c, o)
	r.tools(c, o)
	r.resources(c, o)
	r.prompts(c, o)
	r.reverse(c, o)
}

func (r *reader) match(path string, v any, form *regexp.Regexp, rule string) string {
	s, ok := v.(string)
	switch {
	case !ok:
		r.fail(path, "must be a string, not %s", typeName(v))
	case !form.MatchString(s):
		r.fail(path, "%s", rule)
	}
	return s
}

// choice reads one of known words, as it is written.
func (r *reader) choice(path string, v any, known []string) (string, bool) {
	if _, ok := r.word(path, v, known...); !ok {
		return "", false
	}
	return v.(string), true
}

func (r *reader) protocol(c *Contract, top object) {
	c.DowngradeForbidden = true
	v, path, ok := top.need("protocol")
	if !ok {
		return
	}
	o, ok := r.object(path, v, "versions", "downgrade")
	if !ok {
		return
	}
	if v, path, ok := o.need("versions"); ok {
		c.Versions = r.texts(path, v, 1, len(versions), func(path string, v any) (string, bool) {
			s, ok := r.choice(path, v, versions)
			if ok && s == modernVersion && c.Transport == TransportSSE {
				r.fail(path, "cannot be spoken over transport sse")
			}
			return s, ok
		})
	}
	if v, path, ok := o.get("downgrade"); ok {
		w, _ := r.word(path, v, "forbid", "allow")
		c.DowngradeForbidden = w != "ALLOW"
	}
}

func (r *reader) limits(c *Contract, top object) {
	l := &c.Limits
	*l = Limits{
		Timeout: defaultTimeout, Ceiling: defaultCeiling,
		RequestBytes: defaultRequest, ResultBytes: defaultResult, CallsPerSession: defaultCalls,
		DefinitionAge: DefinitionAge{Write: defaultWriteAge, Read: defaultReadAge},
	}
	v, path, ok := top.get("limits")
	if !ok {
		return
	}
	o, ok := r.object(path, v, "timeout", "ceiling", "request_bytes", "result_bytes", "calls_per_session", "definition_age")
	if !ok {
		return
	}
	o.duration("timeout", &l.Timeout, minDuration, maxTimeout)
	o.duration("ceiling", &l.Ceiling, minDuration, maxCeiling)
	if l.Timeout > l.Ceiling {
		at := "timeout"
		if _, _, given := o.get(at); !given {
			at = "ceiling"
		}
		r.fail(o.at(at), "the timeout (%s) must not exceed the ceiling (%s)", short(l.Timeout), short(l.Ceiling))
	}
	o.integer("request_bytes", &l.RequestBytes, 2, maxRequestBytes)
	o.integer("result_bytes", &l.ResultBytes, 2, maxResultBytes)
	o.integer("calls_per_session", &l.CallsPerSession, 1, maxCallsASession)
	if v, path, ok := o.get("definition_age"); ok {
		if a, ok := r.object(path, v, "write", "read"); ok {
			a.duration("write", &l.DefinitionAge.Write, minAge, maxAge)
			a.duration("read", &l.DefinitionAge.Read, minAge, maxAge)
		}
	}
}

// duration puts an optional member into d.
func (o object) duration(name string, d *time.Duration, low, high time.Duration) {
	if v, path, ok := o.get(name); ok {
		if got, ok := o.r.duration(path, v, low, high); ok {
			*d = got
		}
	}
}

// integer puts an optional member into n.
func (o object) integer(name string, n *int, low, high int) {
	if v, path, ok := o.get(name); ok {
		if got, ok := o.r.integer(path, v, low, high); ok {
			*n = got
		}
	}
}

func (r *reader) record(c *Contract, top object) {
	c.Record = RecordBeforeAnswer
	v, path, ok := top.get("record")
	if !ok {
		return
	}
	o, ok := r.object(path, v, "reads")
	if !ok {
		return
	}
	if v, path, ok := o.need("reads"); ok {
		w, ok := r.word(path, v, "before_send", "before_answer", "after_answer")
		if w == "AFTER_ANSWER" {
			r.fail(path, notOfferedYet)
		} else if ok {
			c.Record = Record(w)
		}
	}
}

func (r *reader) reverse(c *Contract, top object) {
	v, path, ok := top.get("reverse")
	if !ok {
		return
	}
	o, ok := r.object(path, v, "elicitation", "sampling", "roots", "logging")
	if !ok {
		return
	}
	if v, path, ok := o.get("elicitation"); ok {
		r.elicitation(&c.Reverse, path, v)
	}
	if v, path, ok := o.get("sampling"); ok {
		c.Reverse.Sampling, _ = r.boolean(path, v)
	}
	if v, path, ok := o.get("roots"); ok {
		c.Reverse.Roots = r.texts(path, v, 0, maxOrigins, r.root)
	}
	if v, path, ok := o.get("logging"); ok {
		level, _ := r.word(path, v, logLevels...)
		c.Reverse.Logging = strings.ToLower(level) // as the protocol writes it
	}
}

// logLevels are the levels of log messages that the protocol names (RFC 5424
// section 6.2.1), from the least severe.
var logLevels = []string{"debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"}

func (r *reader) elicitation(rev *Reverse, path string, v any) {
	o, ok := r.object(path, v, "form", "url")
	if !ok {
		return
	}
	if v, path, ok := o.get("form"); ok {
		rev.ElicitationForm, _ = r.boolean(path, v)
	}
	if v, path, ok := o.get("url"); ok {
		rev.ElicitationURL = r.texts(path, v, 0, maxOrigins, r.origin)
	}
}
