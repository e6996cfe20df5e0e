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
	var ok bool
	if t.ID, ok = text(member(result, "taskId")); !ok || t.ID == "" || len(t.ID) > maxTaskID {
		return nil, fmt.Sprintf("has no taskId of at most %d bytes", maxTaskID)
	}
	t.Status, _ = text(member(result, "status"))
	t.StatusMessage, _ = text(member(result, "statusMessage"))
	t.StatusMessage = shorten(t.StatusMessage, maxTaskMessage)
	if raw := member(result, "ttlMs"); raw != nil && string(raw) != "null" {
		d, ok := milliseconds(raw)
		if !ok {
			return nil, "has a ttlMs that is no number of milliseconds"
		}
		t.TTL = &d
	}
	// A pause that cannot be read is one that was not said.
	t.PollInterval, _ = milliseconds(member(result, "pollIntervalMs"))
	switch t.Status {
	case TaskWorking, TaskCancelled:
	case TaskInputRequired:
		return t, t.readAsks(declared, result)
	case TaskCompleted:
		if t.Result = member(result, "result"); len(t.Result) == 0 || t.Result[0] != '{' {
			return nil, "is a completed task without a result"
		}
	case TaskFailed:
		raw := member(result, "error")
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

// readAsks reads what a task asks for. That it asks for nothing new is fine, since
// questions that were answered may be left out.
func (t *Task) readAsks(declared Capabilities, result []byte) (flaw string) {
	if raw := member(result, "inputRequests"); raw != nil {
		t.Asks, flaw = readAsks(declared, raw)
	}
	return flaw
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
