package api

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// errorDomain is ErrorInfo.domain of every error.
const errorDomain = "bulkhead"

// kinds maps each kind of fault to its gRPC code and HTTP status. The statuses
// are those of google.rpc.Code, but for input that is too large.
var kinds = map[fault.Kind]struct {
	code codes.Code
	http int
}{
	fault.Internal:        {codes.Internal, http.StatusInternalServerError},
	fault.Invalid:         {codes.InvalidArgument, http.StatusBadRequest},
	fault.Unauthenticated: {codes.Unauthenticated, http.StatusUnauthorized},
	fault.Denied:          {codes.PermissionDenied, http.StatusForbidden},
	fault.NotFound:        {codes.NotFound, http.StatusNotFound},
	fault.Exists:          {codes.AlreadyExists, http.StatusConflict},
	fault.Precondition:    {codes.FailedPrecondition, http.StatusBadRequest},
	fault.Conflict:        {codes.Aborted, http.StatusConflict},
	fault.TooLarge:        {codes.ResourceExhausted, http.StatusRequestEntityTooLarge},
	fault.Exhausted:       {codes.ResourceExhausted, http.StatusTooManyRequests},
	fault.Unavailable:     {codes.Unavailable, http.StatusServiceUnavailable},
	fault.Deadline:        {codes.DeadlineExceeded, http.StatusGatewayTimeout},
	fault.Canceled:        {codes.Canceled, 499}, // what proxies log for a client that went away
	fault.Unimplemented:   {codes.Unimplemented, http.StatusNotImplemented},
}

// statuses are the HTTP statuses of reasons that HTTP has a word for and gRPC
// has not.
var statuses = map[string]int{
	errMediaType.Reason: http.StatusUnsupportedMediaType,
	errMethod.Reason:    http.StatusMethodNotAllowed,
	errSlowBody.Reason:  http.StatusRequestTimeout,
}

// answer is an error as the caller sees it, the same over REST and gRPC.
type answer struct {
	st     *status.Status
	http   int
	reason string
	retry  time.Duration
}

// Error implements error.
func (a *answer) Error() string { return a.st.Message() }

// GRPCStatus lets gRPC send the status with its details.
func (a *answer) GRPCStatus() *status.Status { return a.st }

// answerFor is the only place where an error becomes what a caller sees. A
// fault keeps its kind, reason and message; the end of a context is told as
// such; anything else is internal and its text is not sent.
func answerFor(err error) *answer {
	var a *answer
	if errors.As(err, &a) {
		return a
	}
	f, ok := fault.As(err)
	switch {
	case ok:
	case errors.Is(err, context.DeadlineExceeded):
		f = fault.New(fault.Deadline, "DEADLINE_EXCEEDED", "the request took longer than its deadline")
	case errors.Is(err, context.Canceled):
		f = fault.New(fault.Canceled, "CANCELED", "the caller went away")
	default:
		f = fault.New(fault.Internal, "INTERNAL", "internal error")
	}
	k, ok := kinds[f.Kind]
	if !ok {
		k = kinds[fault.Internal]
	}
	message := f.Message
	if k.code == codes.Internal {
		message = "internal error"
	}
	metadata := map[string]string{"layer": string(f.Layer)}
	maps.Copy(metadata, f.Metadata)
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: f.Reason, Domain: errorDomain, Metadata: metadata}}
	if len(f.Fields) > 0 {
		bad := &errdetails.BadRequest{}
		for _, field := range f.Fields {
			bad.FieldViolations = append(bad.FieldViolations,
				&errdetails.BadRequest_FieldViolation{Field: field.Path, Description: field.Rule})
		}
		details = append(details, bad)
	}
	if f.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(f.RetryAfter)})
	}
	st, err := status.New(k.code, message).WithDetails(details...)
	if err != nil { // only for messages that cannot be encoded, which these can
		st = status.New(codes.Internal, "internal error")
	}
	a = &answer{st: st, http: k.http, reason: f.Reason, retry: f.RetryAfter}
	if code, ok := statuses[f.Reason]; ok {
		a.http = code
	}
	return a
}

// detail is the text of an error for the log.
func detail(err error) string {
	if f, ok := fault.As(err); ok {
		return f.Detail()
	}
	return err.Error()
}
