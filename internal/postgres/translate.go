package postgres

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// retrySoon is what a caller is told to wait after losing against a concurrent
// transaction or finding the database away.
const (
	retrySoon  = 50 * time.Millisecond
	retryLater = time.Second
)

// Translate turns an error of the driver into a fault whose public text holds
// nothing the driver or the database said; that stays the private cause. nil
// stays nil and a fault stays itself. pgx.ErrNoRows becomes NotFound.
func Translate(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := fault.As(err); ok {
		return err
	}
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg):
		return fromState(pg).Cause(err)
	case errors.Is(err, pgx.ErrNoRows):
		return fault.New(fault.NotFound, "NOT_FOUND", "not found").Cause(err)
	case errors.Is(err, context.Canceled):
		return fault.New(fault.Canceled, "CANCELED", "the request was cancelled").Cause(err)
	case errors.Is(err, context.DeadlineExceeded), pgconn.Timeout(err):
		return deadline().Cause(err)
	case isConnection(err):
		return unavailable().Cause(err)
	}
	return internal().Cause(err)
}

func isConnection(err error) bool {
	var connect *pgconn.ConnectError
	var network net.Error
	return errors.As(err, &connect) || errors.As(err, &network) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || pgconn.SafeToRetry(err)
}

// fromState maps a SQLSTATE; see PostgreSQL's appendix A for the codes.
func fromState(pg *pgconn.PgError) *fault.Error {
	switch pg.Code {
	case "23505", "23P01": // unique_violation, exclusion_violation
		return fault.New(fault.Exists, "ALREADY_EXISTS", "a resource with this name or id exists already")
	case "23503": // foreign_key_violation
		return fault.New(fault.Precondition, "REFERENCE_BROKEN", "a resource this one refers to is missing or still in use")
	case "40001", "40P01", "55P03": // serialization_failure, deadlock_detected, lock_not_available
		return fault.New(fault.Conflict, "CONCURRENT_CHANGE", "a concurrent change won; read again").Retry(retrySoon)
	case "57014": // query_canceled, by statement_timeout where the context still lives
		return deadline()
	case "25006", "40003": // read_only_sql_transaction after a failover, statement_completion_unknown
		return unavailable()
	case "57P01", "57P02", "57P03", "57P05", "25P03": // shutdown, crash, starting up, idle time-outs
		return unavailable()
	}
	switch pg.Code[:min(2, len(pg.Code))] {
	case "08", "53": // connection exceptions, insufficient resources
		return unavailable()
	}
	// insufficient_privilege (42501) is among these on purpose: a missing grant,
	// or a row refused by row-level security, is a fault of ours.
	return internal()
}

func internal() *fault.Error {
	return fault.New(fault.Internal, "INTERNAL", "internal error")
}

func unavailable() *fault.Error {
	return fault.New(fault.Unavailable, "DATABASE_UNAVAILABLE", "the database is not reachable for now").Retry(retryLater)
}

func deadline() *fault.Error {
	return fault.New(fault.Deadline, "DATABASE_TIMEOUT", "the database did not answer in time")
}

// Constraint returns the name of the constraint that err broke, or "". It lets
// a store tell which of its unique indexes refused a row.
func Constraint(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.ConstraintName
	}
	return ""
}

// Retryable reports whether the transaction that ended with err lost against a
// concurrent one (serialization failure or deadlock) and may be run again as a
// whole. It wrote nothing.
func Retryable(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "40001" || pg.Code == "40P01")
}
