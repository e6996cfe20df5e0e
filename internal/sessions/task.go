package sessions

import (
	"fmt"
	"strconv"
	"time"
)

// Bounds of a task.
const (
	// maxTaskID bounds the id of a task.
	maxTaskID = 1024
	// maxTaskMessage bounds what a server says of the state of a task.
	maxTaskMessage = 4096
	// maxTaskTime bounds the times that a server gives for a task; more counts as so
	// much.
	maxTaskTime = 366 * 24 * time.Hour
)

// The states of a task.
const (
	TaskWorking       = "working"
	TaskInputRequired = "input_required"
	TaskCompleted     = "completed"
	TaskFailed        = "failed"
	TaskCancelled     = "cancelled"
)

// readTask reads the members of a task from a result. flaw says why it is none,
// empty if it is one.
func readTask(declared Capabilities, result []byte) (*Task, string) {
	t := &Task{}
	found, twice := lift(result, "taskId", "status", "statusMessage", "ttlMs", "pollIntervalMs", "inputRequests", "result", "error")
	if twice != "" {
		return nil, "has the member " + twice + " twice"
	}
	var ok bool
	if t.ID, ok = text(found["taskId"]); !ok || t.ID == "" || len(t.ID) > maxTaskID || !storable(t.ID) {
		return nil, fmt.Sprintf("has no readable taskId of at most %d bytes", maxTaskID)
	}
	t.Status, _ = text(found["status"])
	t.StatusMessage, _ = text(found["statusMessage"])
	t.StatusMessage = shorten(t.StatusMessage, maxTaskMessage)
	if raw := found["ttlMs"]; raw != nil && string(raw) != "null" {
		d, ok := milliseconds(raw)
		if !ok {
			return nil, "has a ttlMs that is no number of milliseconds"
		}
		t.TTL = &d
	}
	// A pause that cannot be read is one that was not said.
	t.PollInterval, _ = milliseconds(found["pollIntervalMs"])
	switch t.Status {
	case TaskWorking, TaskCancelled:
	case TaskInputRequired:
		if raw := found["inputRequests"]; raw != nil {
			var flaw string
			t.Asks, flaw = readAsks(declared, raw) // those that were answered may be left out
			return t, flaw
		}
	case TaskCompleted:
		raw := found["result"]
		if len(raw) == 0 || raw[0] != '{' {
			return nil, "is a completed task without a result"
		}
		if t.Result = raw; hasState(raw) {
			t.Result = without(raw, requestState)
		}
	case TaskFailed:
		raw := found["error"]
		if raw == nil {
			return nil, "is a failed task without an error"
		}
		e, why, err := parseError(raw)
		if err != nil || why != "" {
			return nil, "is a failed task whose error is none of JSON-RPC"
		}
		t.Error = e
	default:
		return nil, "has a task in a state that the extension does not know"
	}
	return t, ""
}

// hasState reports whether a result has a requestState, in any case.
func hasState(result []byte) bool {
	var m members
	return m.scan(&scanner{data: result}) == nil && m.state
}

// milliseconds reads a time; fractions are dropped.
func milliseconds(raw []byte) (time.Duration, bool) {
	if len(raw) == 0 || raw[0] == '"' {
		return 0, false
	}
	ms, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || !(ms >= 0) {
		return 0, false
	}
	if most := float64(maxTaskTime / time.Millisecond); ms > most {
		ms = most
	}
	return time.Duration(ms) * time.Millisecond, true
}
