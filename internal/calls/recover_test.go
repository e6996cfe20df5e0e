package calls

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/sessions"
)

var allStates = []State{Denied, ConsentRequired, AuthorizationRequired, Dispatching, InputRequired, Succeeded, Failed, Cancelled, Uncertain}

// The table of design 3.1, written out once more.
func TestStates_EveryPair(t *testing.T) {
	t.Parallel()
	legal := map[[2]State]bool{
		{ConsentRequired, Denied}: true, {ConsentRequired, Cancelled}: true,
		{ConsentRequired, AuthorizationRequired}: true, {ConsentRequired, Dispatching}: true,
		{AuthorizationRequired, Dispatching}: true, {AuthorizationRequired, Cancelled}: true,
		{AuthorizationRequired, Denied}: true, {AuthorizationRequired, Failed}: true,
		{Dispatching, Denied}: true, {Dispatching, Succeeded}: true, {Dispatching, Failed}: true, {Dispatching, Cancelled}: true,
		{Dispatching, Uncertain}: true, {Dispatching, InputRequired}: true, {Dispatching, AuthorizationRequired}: true,
		{Dispatching, Dispatching}:   true, // another attempt
		{InputRequired, Dispatching}: true, {InputRequired, Cancelled}: true, {InputRequired, Uncertain}: true,
		{Uncertain, Succeeded}: true, {Uncertain, Failed}: true,
	}
	for _, from := range allStates {
		for _, to := range allStates {
			if got := from.May(to); got != legal[[2]State{from, to}] {
				t.Errorf("%s → %s: %v", from, to, got)
			}
		}
		if from.Final() && slices.ContainsFunc(allStates, from.May) {
			t.Errorf("%s is final and goes on", from)
		}
		if from.Settled() == (from == Dispatching) {
			t.Errorf("%s settled: %v", from, from.Settled())
		}
	}
	if State("").Final() || State("").May(Denied) {
		t.Error("no state is a state")
	}
}

// Every combination of the facts; each rule is stated for itself.
func TestAfter_EveryCombination(t *testing.T) {
	t.Parallel()
	bools := []bool{false, true}
	n := 0
	for _, phase := range []Phase{NotSent, MaybeSent, Answered, unreadable} {
		for _, effect := range []Effect{Read, Write, Destructive} {
			for _, idempotent := range bools {
				for _, query := range bools {
					for _, temporary := range bools {
						for _, cancelled := range bools {
							for retries := range 4 {
								for attempt := 1; attempt <= 5; attempt++ {
									for _, left := range []time.Duration{-time.Second, 50 * time.Millisecond, time.Minute} {
										f := Failure{Effect: effect, Phase: phase, Idempotent: idempotent, StatusQuery: query,
											Temporary: temporary, Cancelled: cancelled, Attempt: attempt, Retries: retries,
											Left: left, Delay: 50 * time.Millisecond}
										if phase == unreadable {
											f.Phase, f.Unreadable, f.Temporary = Answered, true, false // nothing of it passes
										}
										n++
										if why := wrongStep(f, After(f)); why != "" {
											t.Fatalf("%+v: step %d: %s", f, After(f), why)
										}
									}
								}
							}
						}
					}
				}
			}
		}
	}
	t.Logf("%d combinations", n)
}

// unreadable stands for an answer that tells nothing.
const unreadable Phase = "UNREADABLE"

// wrongStep says which rule of design 3.2, step 6, a step breaks.
func wrongStep(f Failure, s Step) string {
	unknown := (f.Phase == MaybeSent || f.Unreadable) && f.Effect != Read
	switch {
	case s == Retry && unknown && !f.Idempotent:
		return "a write that may have been sent and is not idempotent is never retried"
	case s == Retry && f.Cancelled:
		return "a cancelled call is not retried"
	case s == Retry && !f.Temporary:
		return "what is not temporary is not retried"
	case s == Retry && f.Delay >= f.Left:
		return "nothing is retried past the ceiling"
	case s == Retry && f.Phase != NotSent && f.Attempt > f.Retries:
		return "what may have been sent is retried within the contract's budget"
	case s == Retry && f.Phase == NotSent && f.Attempt > max(f.Retries, unsentRetries):
		return "what was not sent is retried within its budget"
	case s == Retry && f.Phase == Answered && f.Effect != Read && !f.Idempotent:
		return "a write that was answered is not sent again"
	case (s == EndFailed || s == EndCancelled) && unknown:
		return "a write that may have been sent never ends FAILED or CANCELLED without evidence"
	case (s == Ask || s == EndUncertain) && !unknown:
		return "nothing is uncertain about a read, or about what was not sent or was answered"
	case s == Ask && !f.StatusQuery:
		return "there is nothing to ask"
	case s == EndUncertain && f.StatusQuery:
		return "the status query is asked first"
	case s == EndCancelled && !f.Cancelled:
		return "nobody cancelled it"
	case s == EndFailed && f.Cancelled && (f.Effect == Read || f.Phase == NotSent):
		return "a read, or what was not sent, ends as cancelled at a person's wish"
	case s != Retry && !f.Cancelled && f.Temporary && f.Delay < f.Left && f.Attempt <= f.Retries && (f.Effect == Read || f.Idempotent || f.Phase == NotSent):
		return "the contract's budget is not used"
	}
	return ""
}

func TestDelay(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		attempt int
		after   time.Duration
		jitter  float64
		want    time.Duration
	}{
		{1, 0, 0, 100 * time.Millisecond},
		{2, 0, 0, 200 * time.Millisecond},
		{6, 0, 0, 3200 * time.Millisecond},
		{7, 0, 0, 5 * time.Second},
		{1000, 0, 0, 5 * time.Second},
		{1, 0, 0.5, 75 * time.Millisecond},
		{7, 0, 0.999999, 2500 * time.Millisecond},
		{1, time.Second, 0.9, time.Second},
		{7, time.Second, 0, 5 * time.Second},
	} {
		if got := Delay(c.attempt, c.after, c.jitter).Round(time.Millisecond); got != c.want {
			t.Errorf("Delay(%d, %s, %g) = %s, want %s", c.attempt, c.after, c.jitter, got, c.want)
		}
	}
	for attempt := 1; attempt < 70; attempt++ {
		if d := Delay(attempt, 0, 0.999); d < firstDelay/2 || d > maxDelay {
			t.Errorf("attempt %d: %s", attempt, d)
		}
	}
}

func TestCleanResult(t *testing.T) {
	t.Parallel()
	const rep = "\uFFFD"
	for in, want := range map[string]string{
		`{"a":1}`:                        "",
		`"\ud83d\ude00"`:                 "", // a pair
		`"\uD83D\uDE00"`:                 "",
		`"\ud83d"`:                       `"\ufffd"`,
		`"\ude00\ud83d"`:                 `"\ufffd\ufffd"`,
		`"\ud83d\ud83d\ude00"`:           `"\ufffd\ud83d\ude00"`,
		`"\\ud83d"`:                      "", // an escaped backslash and text
		`"\\\ud83d"`:                     `"\\\ufffd"`,
		`"\ud83d\n"`:                     `"\ufffd\n"`,
		`"\ud83dx"`:                      `"\ufffdx"`,
		`"\ud83d\u0041"`:                 `"\ufffd\u0041"`,
		`"\uDBFF\uDFFF"`:                 "",
		"\"a\xff\"":                      `"a` + rep + `"`,
		"\"\xed\xa0\x80\"":               `"` + rep + `"`,
		"\"\xff\\ud83d\"":                `"` + rep + `\ufffd"`,
		`{"isError":false,"x":"\udc00"}`: `{"isError":false,"x":"\ufffd"}`,
	} {
		got, findings := cleanResult([]byte(in))
		if want == "" {
			if string(got) != in || findings != nil {
				t.Errorf("%q became %q, %v", in, got, findings)
			}
			continue
		}
		if string(got) != want || len(findings) != 1 {
			t.Errorf("%q became %q, %v, want %q", in, got, findings, want)
		}
	}
}

func TestCleanText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in   string
		most int
		want string
	}{
		{"plain", 10, "plain"}, {"a\x00b", 10, "a\uFFFDb"}, {"a\xffb", 10, "a\uFFFDb"},
		{"ééé", 3, "é…"}, {"abc", 3, "abc"}, {"abcd", 3, "abc…"}, {"", 0, ""},
	} {
		if got := cleanText(c.in, c.most); got != c.want {
			t.Errorf("cleanText(%q, %d) = %q", c.in, c.most, got)
		}
	}
}

func TestToolError(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		okResult:                         "",
		`{"isError":false,"content":[]}`: "",
		`{"isError":true,"content":[]}`:  "the tool says that it failed",
		`{"\u0069sError":true,"content":[{"type":"text","text":"no"}]}`:                    "no",
		`{"isError":true,"content":[{"type":"image"},{"type":"text","text":"bad\u0000"}]}`: "bad\uFFFD",
		`{"content":[{"type":"text","text":"\"isError\":true"}]}`:                          "",
		`{"isError":true,"content":"permission denied"}`:                                   "permission denied",
		`{"isError":true,"content":{"x":1}}`:                                               "the tool says that it failed",
		`{"isError":true,"content":null}`:                                                  "the tool says that it failed",
		`{"isError":true}`:                                                                 "the tool says that it failed",
		`{"isError":true,"ISERROR":false,"content":[]}`:                                    "the tool says that it failed",
		`{"isError":true,"content":[5,{"Type":"text","type":"image","text":"no"}]}`:        "the tool says that it failed",
		`{"isError":true,"content":[{"type":"text","text":5}]}`:                            "the tool says that it failed",
		`{"IsError":true,"content":[]}`:                                                    "",
		`{"content":[{"isError":true}],"_meta":{"isError":true}}`:                          "",
	} {
		got := ""
		r, err := sessions.ReadResult([]byte(in))
		if err != nil {
			t.Fatal(err)
		}
		if e := toolError(r.Parts); e != nil {
			got = e.Message
		}
		if got != want {
			t.Errorf("%s: %q, want %q", in, got, want)
		}
	}
}

func TestCallParams(t *testing.T) {
	t.Parallel()
	if got := string(callParams("a\"b\u2028", []byte(`{"x":1.0}`))); got != fmt.Sprintf(`{"name":"a\"b%c","arguments":{"x":1.0}}`, 0x2028) {
		t.Errorf("%s", got)
	}
}
