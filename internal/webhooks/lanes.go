package webhooks

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	// slowAnswer is from when on an endpoint counts as slow, and slowWorkers how many
	// deliveries it then has under way.
	slowAnswer  = 2 * time.Second
	slowWorkers = 2
	// leastTurn and mostTurn bound how long a delivery without a place waits until
	// it asks again.
	leastTurn = 50 * time.Millisecond
	mostTurn  = 30 * time.Second
)

// laneKey names a lane: of a tenant, or of one of its endpoints.
type laneKey struct {
	tenant   tenant.ID
	endpoint string
}

// lane is what goes to one endpoint, or of one tenant, in this replica.
type lane struct {
	running int
	// took is how long deliveries take here lately.
	took time.Duration
	// turn is when the next delivery that finds no place should ask again.
	turn time.Time
}

// lanes share out the places for deliveries, so that an endpoint that is slow or
// has much to be told keeps no place from others. There is a lane for each
// endpoint with deliveries under way or waiting.
type lanes struct {
	perTenant, perEndpoint int

	mu   sync.Mutex
	open map[laneKey]*lane // at most maxLanes that are idle
}

// maxLanes is from when on lanes that nothing uses are forgotten.
const maxLanes = 10_000

func newLanes(perTenant, perEndpoint int) *lanes {
	return &lanes{perTenant: perTenant, perEndpoint: perEndpoint, open: map[laneKey]*lane{}}
}

// take takes a place for a delivery, or says how long to wait before asking again:
// those who wait are told times one after the other.
func (l *lanes) take(t tenant.ID, endpoint string, now time.Time) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.open) >= maxLanes {
		for k, v := range l.open {
			if v.running == 0 && v.turn.Before(now) {
				delete(l.open, k)
			}
		}
	}
	all, one := l.lane(laneKey{tenant: t}), l.lane(laneKey{t, endpoint})
	places := l.perEndpoint
	if one.took > slowAnswer {
		places = min(places, slowWorkers)
	}
	switch {
	case one.running >= places:
		return one.wait(now, places), false
	case all.running >= l.perTenant:
		return all.wait(now, l.perTenant), false
	}
	all.running++
	one.running++
	return 0, true
}

func (l *lanes) lane(k laneKey) *lane {
	v := l.open[k]
	if v == nil {
		v = &lane{}
		l.open[k] = v
	}
	return v
}

func (v *lane) wait(now time.Time, places int) time.Duration {
	if v.turn.Before(now) {
		v.turn = now
	}
	v.turn = v.turn.Add(max(v.took, leastTurn/5) / time.Duration(places))
	wait := min(max(v.turn.Sub(now), leastTurn), mostTurn)
	return wait + time.Duration(rand.Int64N(int64(leastTurn)))
}

// give gives a place back after a delivery that took so long.
func (l *lanes) give(t tenant.ID, endpoint string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range []laneKey{{tenant: t}, {t, endpoint}} {
		v := l.lane(k)
		v.running--
		v.took += (took - v.took) / 4
	}
}
