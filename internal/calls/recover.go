package calls

import "time"

// Phase is how far an attempt came; it is a fact, not a guess.
type Phase string

// The phases of an attempt.
const (
	NotSent   Phase = "NOT_SENT"
	MaybeSent Phase = "MAYBE_SENT"
	Answered  Phase = "ANSWERED"
)

// Effect is what a tool does to the world, as the contract says; what a server
// says of its own tools is not asked.
type Effect string

// The effects of a tool.
const (
	Read        Effect = "READ"
	Write       Effect = "WRITE"
	Destructive Effect = "DESTRUCTIVE"
)

// Failure is what is known after an attempt failed.
type Failure struct {
	Effect Effect
	Phase  Phase
	// Idempotent says that the contract trusts the call's idempotency key.
	Idempotent bool
	// StatusQuery says that the contract has a way to ask what happened.
	StatusQuery bool
	// Temporary says that trying again may help: the server refused for now, or
	// the transport broke. A tool's own error never is.
	Temporary bool
	// Refused says that the server refused the attempt, without carrying it out, over
	// something that is put right since: a lost session, the era, its definition.
	Refused bool
	// Unreadable says that the server answered with what is no answer: whether it
	// carried the attempt out, nobody can tell.
	Unreadable bool
	// Queued says that the attempt gave up its place among the calls that wait for one
	// connection, because its time to be sent was over.
	Queued bool
	// Cancelled says that a person asked to stop.
	Cancelled bool
	// Asked says that the server asked for input before: a part of the work may be
	// done, although this attempt sent nothing.
	Asked bool
	// Attempt counts from 1, and anew when the server was answered; Retries is the
	// contract's budget of further ones.
	Attempt int
	Retries int
	// Left is the time to the call's ceiling, Delay the pause a retry would need.
	Left  time.Duration
	Delay time.Duration
}

// Step is what to do after a failed attempt.
type Step uint8

// The steps after a failure.
const (
	// EndFailed ends the call: it is known that nothing happened, or that nothing
	// of consequence did.
	EndFailed Step = iota
	// EndCancelled ends the call at a person's wish, with the same knowledge.
	EndCancelled
	// Retry sends again after the delay.
	Retry
	// Ask runs the status query; without an answer the call is uncertain.
	Ask
	// EndUncertain says openly that the outcome is not known.
	EndUncertain
)

// After decides what follows a failed attempt. It is pure: the same facts give
// the same step on every replica and after every restart (design 3.2, step 6).
func After(f Failure) Step {
	told := f.Phase == Answered && !f.Unreadable
	harmless := f.Effect == Read || told || f.Phase == NotSent && !f.Asked
	if f.Cancelled {
		switch {
		case harmless && !told, f.Effect == Read:
			return EndCancelled
		case told:
			return EndFailed
		case f.StatusQuery:
			return Ask
		}
		return EndUncertain
	}
	if f.mayRetry() {
		return Retry
	}
	switch {
	case harmless:
		return EndFailed
	case f.StatusQuery:
		return Ask
	}
	return EndUncertain
}

// unsentRetries is the budget of every call for attempts that sent nothing,
// whatever its effect; a contract may give more.
const unsentRetries = 2

// maxQueued is the same for attempts that waited for others of this replica: each
// of them waits for as long as it may be sent.
const maxQueued = 20

func (f Failure) mayRetry() bool {
	if f.Delay >= f.Left || !f.Temporary {
		return false
	}
	switch {
	case f.Phase == NotSent && f.Queued:
		return f.Attempt <= max(f.Retries, maxQueued)
	case f.Phase == NotSent:
		return f.Attempt <= max(f.Retries, unsentRetries)
	case f.Phase == Answered && f.Refused && f.Effect == Read:
		return f.Attempt <= max(f.Retries, 1)
	}
	return f.Attempt <= f.Retries && (f.Effect == Read || f.Idempotent)
}

const (
	firstDelay = 100 * time.Millisecond
	maxDelay   = 5 * time.Second
)

// Delay returns the pause before the next attempt: doubling from 100 ms to 5 s,
// never less than what the server asked for, with jitter in [0, 1) taking away
// up to half of our own part.
func Delay(attempt int, retryAfter time.Duration, jitter float64) time.Duration {
	d := maxDelay
	if attempt < 7 {
		d = min(firstDelay<<(attempt-1), maxDelay)
	}
	d -= time.Duration(jitter * float64(d) / 2)
	return max(d, retryAfter)
}
