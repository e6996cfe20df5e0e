package calls

// State is where a call stands (design 3.1).
type State string

// The states of a call.
const (
	Denied                State = "DENIED"
	ConsentRequired       State = "CONSENT_REQUIRED"
	AuthorizationRequired State = "AUTHORIZATION_REQUIRED"
	Dispatching           State = "DISPATCHING"
	InputRequired         State = "INPUT_REQUIRED"
	Succeeded             State = "SUCCEEDED"
	Failed                State = "FAILED"
	Cancelled             State = "CANCELLED"
	Uncertain             State = "UNCERTAIN"
)

// next is the state table: every transition that exists. Besides it a late answer
// that contradicts a resolution reopens the call as UNCERTAIN (keepEvidence).
var next = map[State][]State{
	ConsentRequired:       {Denied, Cancelled, AuthorizationRequired, Dispatching},
	AuthorizationRequired: {Dispatching, Cancelled, Denied, Failed},
	Dispatching:           {Denied, Succeeded, Failed, Cancelled, Uncertain, InputRequired, AuthorizationRequired, Dispatching},
	InputRequired:         {Dispatching, Cancelled, Uncertain},
	Uncertain:             {Succeeded, Failed},
}

// Final reports whether the state ends a call. An uncertain call has ended for
// its caller, but evidence may still resolve it.
func (s State) Final() bool {
	switch s {
	case Denied, Succeeded, Failed, Cancelled:
		return true
	}
	return false
}

// Settled reports whether a waiter has nothing to wait for: every state but
// DISPATCHING needs somebody else or nothing at all.
func (s State) Settled() bool { return s != Dispatching }

// May reports whether the table has a transition from s to t.
func (s State) May(t State) bool {
	for _, n := range next[s] {
		if n == t {
			return true
		}
	}
	return false
}

// Reason says why a call was denied, beyond its decision.
type Reason string

// The reasons of a denied call.
const (
	NoReason      Reason = ""
	ReasonRefused Reason = "REFUSED"
	ReasonExpired Reason = "EXPIRED"
	ReasonVoid    Reason = "VOID"
)
