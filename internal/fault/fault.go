// Package fault is the one error type of Bulkhead. A fault says what kind of
// failure it is, in which layer it happened, and what the caller may be told;
// the cause stays private and goes to the log only. Domain packages return
// faults; package api maps them to gRPC statuses (and so to REST) in one
// function. Anything that is not a fault is internal, and its text is never
// sent to a caller.
package fault

import (
	"errors"
	"fmt"
	"time"
)

// Kind says what a caller can do about a failure. It decides the gRPC code and
// the HTTP status.
type Kind uint8

// The kinds of failure, each with the gRPC code it becomes.
const (
	// Internal is a fault of ours; its text is never shown. INTERNAL.
	Internal Kind = iota
	// Invalid is bad input; Fields name what and why. INVALID_ARGUMENT.
	Invalid
	// Unauthenticated means that no valid credential came. UNAUTHENTICATED.
	Unauthenticated
	// Denied means that the caller may not do this. PERMISSION_DENIED.
	Denied
	// NotFound means that no such resource is visible to the caller. NOT_FOUND.
	NotFound
	// Exists means that another resource has this name or request id. ALREADY_EXISTS.
	Exists
	// Precondition means that the resource's state does not allow it. FAILED_PRECONDITION.
	Precondition
	// Conflict means that a concurrent change won; read again. ABORTED.
	Conflict
	// TooLarge means that input exceeds a limit of bytes. RESOURCE_EXHAUSTED, HTTP 413.
	TooLarge
	// Exhausted means that a rate or a quota is used up. RESOURCE_EXHAUSTED.
	Exhausted
	// Unavailable means that a part is down for now; retry later. UNAVAILABLE.
	Unavailable
	// Deadline means that time ran out. DEADLINE_EXCEEDED.
	Deadline
	// Canceled means that the caller went away. CANCELED.
	Canceled
	// Unimplemented means that this build does not offer it. UNIMPLEMENTED.
	Unimplemented
)

var kindNames = [...]string{
	"internal", "invalid", "unauthenticated", "denied", "not found", "exists", "precondition",
	"conflict", "too large", "exhausted", "unavailable", "deadline", "canceled", "unimplemented",
}

// String returns the kind in lower case, for logs.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Layer places a failure: in the model, the host (Bulkhead itself), the
// transport, the protocol or the server.
type Layer string

// The layers of mission row A12.
const (
	Model     Layer = "MODEL"
	Host      Layer = "HOST"
	Transport Layer = "TRANSPORT"
	Protocol  Layer = "PROTOCOL"
	Server    Layer = "SERVER"
)

// Field names one member of the input and the rule it broke. Path is written
// as the caller wrote it, in lowerCamelCase with dots and [i].
type Field struct {
	Path string
	Rule string
}

// Error is a failure. Reason is a stable UPPER_SNAKE_CASE word for programs,
// Message a sentence for people; neither may hold a secret or a payload.
type Error struct {
	Kind       Kind
	Layer      Layer
	Reason     string
	Message    string
	Fields     []Field
	Metadata   map[string]string
	RetryAfter time.Duration

	cause error
}

// New returns a fault of the host layer.
func New(kind Kind, reason, format string, args ...any) *Error {
	return &Error{Kind: kind, Layer: Host, Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Field1 returns an Invalid fault for one field.
func Field1(path, format string, args ...any) *Error {
	return InvalidFields(Field{Path: path, Rule: fmt.Sprintf(format, args...)})
}

// InvalidFields returns an Invalid fault that names every given field.
func InvalidFields(fields ...Field) *Error {
	msg := "invalid request"
	if len(fields) > 0 {
		msg = fields[0].Path + ": " + fields[0].Rule
		if len(fields) > 1 {
			msg += fmt.Sprintf(" (and %d more)", len(fields)-1)
		}
	}
	return &Error{Kind: Invalid, Layer: Host, Reason: "INVALID_ARGUMENT", Message: msg, Fields: fields}
}

// Wrap returns an Internal fault with a private cause. The operation is for the
// log. A nil cause gives nil.
func Wrap(cause error, operation string) error {
	if cause == nil {
		return nil
	}
	var f *Error
	if errors.As(cause, &f) {
		return cause
	}
	return fmt.Errorf("%s: %w", operation, cause)
}

// Cause returns a copy of e with a private cause.
func (e *Error) Cause(err error) *Error {
	c := *e
	c.cause = err
	return &c
}

// In returns a copy of e placed in another layer.
func (e *Error) In(l Layer) *Error {
	c := *e
	c.Layer = l
	return &c
}

// Retry returns a copy of e that tells the caller when to try again.
func (e *Error) Retry(after time.Duration) *Error {
	c := *e
	c.RetryAfter = after
	return &c
}

// With returns a copy of e with one more metadata entry.
func (e *Error) With(key, value string) *Error {
	c := *e
	c.Metadata = make(map[string]string, len(e.Metadata)+1)
	for k, v := range e.Metadata {
		c.Metadata[k] = v
	}
	c.Metadata[key] = value
	return &c
}

// Error returns the public text; the cause is reached by Unwrap or Detail.
func (e *Error) Error() string { return e.Message }

// Unwrap returns the private cause, or nil.
func (e *Error) Unwrap() error { return e.cause }

// Detail returns the text for the log: the public message and the private cause.
func (e *Error) Detail() string {
	if e.cause == nil {
		return e.Message
	}
	return e.Message + ": " + e.cause.Error()
}

// As returns the fault in err's chain.
func As(err error) (*Error, bool) {
	var f *Error
	ok := errors.As(err, &f)
	return f, ok
}

// KindOf returns the kind of err, Internal for anything that is no fault.
func KindOf(err error) Kind {
	if f, ok := As(err); ok {
		return f.Kind
	}
	return Internal
}

// Is reports whether err is a fault of this kind. It is false for nil.
func Is(err error, kind Kind) bool { return err != nil && KindOf(err) == kind }
