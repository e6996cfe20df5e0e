package events_test

import (
	"context"
	"testing"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/events"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/redis/redistest"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// wire carries signals over Redis as the server does.
type wire struct {
	signal *redis.Signal
}

func (w wire) PublishRecorded(t tenant.ID) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = w.signal.Publish(ctx, "events", t.String(), "") // what is lost is found by reading
}

func (w wire) PublishProgress(tenant.ID, string, string) {}

// Redis only makes readers quicker: without it they read every poll interval, and
// when it is back they are told to look.
func TestFollow_RedisAwayAndBack(t *testing.T) {
	redistest.Each(t, func(t *testing.T, r *redistest.Server) {
		w := newWorld(t)
		pl := w.place(w.tenant())
		client := r.Client(t)
		signal := redis.NewSignal(client)
		sub, err := signal.Subscribe("events")
		must(t, err)
		defer sub.Close()
		patient := quick()
		patient.Poll = time.Hour // hears by signals alone
		here := w.service(wire{signal}, quick())
		there, other := w.service(nil, patient), w.service(nil, quick())
		ctx, stop := context.WithCancel(t.Context())
		ran, heard := make(chan error, 1), make(chan struct{})
		go func() { ran <- here.Run(ctx) }()
		gaps := make(chan struct{}, 16)
		go func() {
			defer close(heard)
			for {
				select {
				case e := <-sub.Events():
					if e.Gap {
						there.SignalledAll()
						gaps <- struct{}{}
						continue
					}
					there.Signalled(pl.who.Tenant)
				case <-ctx.Done():
					return
				}
			}
		}()
		defer func() {
			stop()
			must(t, <-ran)
			<-heard
		}()
		<-gaps
		a, b := pl.follow(there, 1), pl.follow(other, 1)
		defer a.Close()
		defer b.Close()
		tell := func(n int64, streams ...*events.Stream) {
			t.Helper()
			change(t, pl)
			here.Recorded(pl.who.Tenant)
			for _, st := range streams {
				if e := next(t, st); e.N != n {
					t.Fatalf("want %d: %+v", n, e)
				}
			}
		}
		tell(2, a, b)
		r.Stop()
		tell(3, b) // a hears nothing, b reads
		r.Start(t)
		<-gaps
		if e := next(t, a); e.N != 3 {
			t.Fatalf("%+v", e)
		}
	})
}
