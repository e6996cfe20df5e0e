// Package telemetry makes the process observable: JSON log lines that carry
// whose work they are about, and Prometheus metrics with a bounded number of
// series. It has no global state but the standard library's own log (TakeStandard);
// loggers and metrics are passed on.
package telemetry

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Scope says what a piece of work belongs to. Empty members are unknown.
type Scope struct {
	Request string
	Tenant  string
	Session string
	Call    string
	// Trace is the id of the caller's distributed trace.
	Trace string
}

type scopeKey struct{}

// With returns a context whose log lines carry s. Members that s leaves empty
// stay what they were.
func With(ctx context.Context, s Scope) context.Context {
	old := From(ctx)
	s.Request = or(s.Request, old.Request)
	s.Tenant = or(s.Tenant, old.Tenant)
	s.Session = or(s.Session, old.Session)
	s.Call = or(s.Call, old.Call)
	s.Trace = or(s.Trace, old.Trace)
	return context.WithValue(ctx, scopeKey{}, s)
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// From returns the scope of ctx.
func From(ctx context.Context) Scope {
	s, _ := ctx.Value(scopeKey{}).(Scope)
	return s
}

// attrs returns the known members in a fixed order.
func (s Scope) attrs() []slog.Attr {
	out := make([]slog.Attr, 0, 5)
	for _, a := range [...]slog.Attr{
		slog.String("request", s.Request), slog.String("tenant", s.Tenant),
		slog.String("session", s.Session), slog.String("call", s.Call), slog.String("trace", s.Trace),
	} {
		if a.Value.String() != "" {
			out = append(out, a)
		}
	}
	return out
}

// NewLogger returns a logger that writes JSON lines to w, one Write each. Every
// line has the scope of its context at the top level. Values under keys that
// name a secret are replaced, texts are cut at 8 KiB, and a fault is written with
// its private cause.
func NewLogger(w io.Writer, level slog.Leveler) *slog.Logger {
	return slog.New(&handler{base: slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: clean})})
}

// handler adds the scope beside whatever groups the logger has opened. Groups
// and the attributes in them are therefore kept apart and put on at the end.
type handler struct {
	base    slog.Handler
	grouped []func(slog.Handler) slog.Handler
}

func (h *handler) Enabled(ctx context.Context, l slog.Level) bool { return h.base.Enabled(ctx, l) }

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	attrs := From(ctx).attrs()
	if len(h.grouped) == 0 {
		r = r.Clone()
		for _, a := range attrs {
			if !has(r, a.Key) {
				r.AddAttrs(a)
			}
		}
		return h.base.Handle(ctx, r)
	}
	full := h.base.WithAttrs(attrs)
	for _, step := range h.grouped {
		full = step(full)
	}
	return full.Handle(ctx, r)
}

// has reports whether the line names the key itself; twice would be invalid to
// many readers of JSON.
func has(r slog.Record, key string) bool {
	found := false
	r.Attrs(func(a slog.Attr) bool {
		found = a.Key == key
		return !found
	})
	return found
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	if len(h.grouped) == 0 {
		return &handler{base: h.base.WithAttrs(attrs)}
	}
	return h.then(func(b slog.Handler) slog.Handler { return b.WithAttrs(attrs) })
}

func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	return h.then(func(b slog.Handler) slog.Handler { return b.WithGroup(name) })
}

func (h *handler) then(step func(slog.Handler) slog.Handler) slog.Handler {
	return &handler{base: h.base, grouped: append(h.grouped[:len(h.grouped):len(h.grouped)], step)}
}

const (
	redacted = "[redacted]"
	maxText  = 8 << 10 // bytes of one text in a line
)

// secretWords name secrets when they occur in a key, whatever its spelling.
var secretWords = []string{
	"password", "passwd", "secret", "token", "authorization", "cookie", "apikey",
	"credential", "privatekey", "operatorkey", "requeststate",
}

// secretStarts begin values that are secrets under any key.
var secretStarts = []string{"bhk_", "Bearer ", "Basic "}

// clean replaces what must not be in a log and bounds the rest.
func clean(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindString:
		a.Value = cleanText(a.Key, a.Value.String())
	case slog.KindAny:
		if err, ok := a.Value.Any().(error); ok {
			a.Value = cleanText("", detail(err))
		} else if namesSecret(a.Key) {
			a.Value = slog.StringValue(redacted)
		}
	}
	return a
}

func cleanText(key, s string) slog.Value {
	if namesSecret(key) {
		return slog.StringValue(redacted)
	}
	for _, start := range secretStarts {
		if strings.HasPrefix(s, start) {
			return slog.StringValue(redacted)
		}
	}
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	return slog.StringValue(s)
}

// namesSecret compares letters only, so that api_key, apiKey and X-Api-Key are
// one. Numbers and booleans are no secrets and never come here: tokenGeneration
// stays readable.
func namesSecret(key string) bool {
	letters := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		}
		return -1
	}, key)
	for _, w := range secretWords {
		if strings.Contains(letters, w) {
			return true
		}
	}
	return false
}

// detail returns an error's text with the private cause of the fault in it,
// which Error leaves out for the caller's sake.
func detail(err error) string {
	f, ok := fault.As(err)
	if !ok {
		return err.Error()
	}
	text := err.Error()
	if cause := errors.Unwrap(f); cause != nil {
		text += ": " + detail(cause)
	}
	return text
}
