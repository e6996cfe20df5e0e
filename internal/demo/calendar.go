package demo

import (
	"slices"
	"strconv"
	"sync"
	"time"
)

// Bounds of one get_availability: the span asked for, and the busy entries in
// its answer.
const (
	maxRange = 31 * 24 * time.Hour
	maxBusy  = 500
)

// draft is one draft event, as create_draft_event takes it.
type draft struct {
	Title     string   `json:"title"`
	Start     string   `json:"start"`
	End       string   `json:"end"`
	Notes     string   `json:"notes,omitempty"`
	Attendees []string `json:"attendees,omitempty"`
	RequestID string   `json:"requestId,omitempty"`

	start, end time.Time
}

// parse reads the times. The refusal is a sentence for the caller, empty when
// the draft is good.
func (d *draft) parse() (refusal string) {
	var ok bool
	if d.start, d.end, ok = parseSpan(d.Start, d.End); !ok {
		return "start and end must be RFC 3339 times, start before end"
	}
	return ""
}

// same reports whether two drafts ask for the same event.
func (d draft) same(o draft) bool {
	return d.Title == o.Title && d.start.Equal(o.start) && d.end.Equal(o.end) &&
		d.Notes == o.Notes && slices.Equal(d.Attendees, o.Attendees)
}

// span is a stretch of time; Title is set on busy ones only.
type span struct {
	Start string `json:"start"`
	End   string `json:"end"`
	Title string `json:"title,omitempty"`
}

// availability is the answer of get_availability.
type availability struct {
	Busy []span `json:"busy"`
	Free []span `json:"free"`
}

// calendar holds the draft events, in memory only.
type calendar struct {
	mu        sync.Mutex
	events    []draft // event n has the id "ev_n", counted from 1
	byRequest map[string]int
	invited   map[string][]string
}

func newCalendar() *calendar {
	return &calendar{byRequest: map[string]int{}, invited: map[string][]string{}}
}

func eventID(index int) string { return "ev_" + strconv.Itoa(index+1) }

// create adds a draft, or finds the one that an earlier call with the same
// requestId made. created is false for the latter. The refusal is a sentence
// for the caller and empty on success.
func (c *calendar) create(d draft) (id string, created bool, refusal string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d.RequestID != "" {
		if i, ok := c.byRequest[d.RequestID]; ok {
			if !c.events[i].same(d) {
				return "", false, "requestId was used for another event"
			}
			return eventID(i), false, ""
		}
	}
	if len(c.events) >= maxEvents {
		return "", false, "the calendar is full"
	}
	c.events = append(c.events, d)
	i := len(c.events) - 1
	if d.RequestID != "" {
		c.byRequest[d.RequestID] = i
	}
	return eventID(i), true, ""
}

// find returns the id of the event that a requestId made.
func (c *calendar) find(requestID string) (id string, found bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, ok := c.byRequest[requestID]
	if !ok {
		return "", false
	}
	return eventID(i), true
}

// invite records invitations to an event and returns how many there were. ok is
// false when there is no such event.
func (c *calendar) invite(id string, to []string) (sent int, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, err := strconv.Atoi(trimID(id))
	if err != nil || n < 1 || n > len(c.events) || eventID(n-1) != id {
		return 0, false
	}
	c.invited[id] = slices.Clone(to)
	return len(to), true
}

// trimID returns what follows "ev_", or nothing.
func trimID(id string) string {
	if len(id) > 3 && id[:3] == "ev_" {
		return id[3:]
	}
	return ""
}

// between lists what is busy and what is free from one time to another, in
// order. Free time is what no draft covers. ok is false when more than maxBusy
// drafts fall into the span.
func (c *calendar) between(from, to time.Time) (out availability, ok bool) {
	c.mu.Lock()
	var hits []draft
	for _, e := range c.events {
		if e.start.Before(to) && e.end.After(from) {
			hits = append(hits, e)
		}
	}
	c.mu.Unlock()
	if len(hits) > maxBusy {
		return out, false
	}
	slices.SortStableFunc(hits, func(a, b draft) int { return a.start.Compare(b.start) })
	out = availability{Busy: []span{}, Free: []span{}}
	open := from
	for _, e := range hits {
		out.Busy = append(out.Busy, span{Start: stamp(e.start), End: stamp(e.end), Title: e.Title})
		if e.start.After(open) {
			out.Free = append(out.Free, span{Start: stamp(open), End: stamp(e.start)})
		}
		if e.end.After(open) {
			open = e.end
		}
	}
	if open.Before(to) {
		out.Free = append(out.Free, span{Start: stamp(open), End: stamp(to)})
	}
	return out, true
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// parseSpan reads two RFC 3339 times, the first before the second.
func parseSpan(start, end string) (from, to time.Time, ok bool) {
	from, err := time.Parse(time.RFC3339, start)
	if err != nil {
		return from, to, false
	}
	to, err = time.Parse(time.RFC3339, end)
	return from, to, err == nil && from.Before(to)
}
