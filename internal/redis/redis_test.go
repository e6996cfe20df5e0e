package redis_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/redis/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// eventually waits for a condition that other goroutines bring about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func key(tenant string, parts ...string) redis.Key {
	return redis.Key{Tenant: tenant, Kind: "test", Parts: parts}
}

func TestCache(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, s *redistest.Server) {
		t.Parallel()
		ctx := t.Context()
		cache := redis.NewCache(s.Client(t))
		if _, ok := cache.Get(ctx, key("t1", "a")); ok {
			t.Error("a hit in an empty cache")
		}
		values := map[string][]byte{
			"empty": {}, "bytes": {0, 1, 0xff, '\n'}, "largest": bytes.Repeat([]byte("x"), redis.MaxValue),
		}
		for name, v := range values {
			if !cache.Set(ctx, key("t1", name), v, time.Minute) {
				t.Errorf("%s was not stored", name)
			}
			if got, ok := cache.Get(ctx, key("t1", name)); !ok || !bytes.Equal(got, v) {
				t.Errorf("%s: hit %v, %d bytes; want what was stored", name, ok, len(got))
			}
			if _, ok := cache.Get(ctx, key("t2", name)); ok {
				t.Errorf("%s: another tenant has it", name)
			}
		}
		if cache.Set(ctx, key("t1", "over"), make([]byte, redis.MaxValue+1), time.Minute) {
			t.Error("a value over the bound was stored")
		}
		if cache.Set(ctx, key("t1", "forever"), []byte("x"), 0) {
			t.Error("a value without an end was stored")
		}
		for _, what := range []string{"a value", "what is deleted already"} {
			if !cache.Delete(ctx, key("t1", "bytes")) {
				t.Errorf("deleting %s was not confirmed", what)
			}
		}
		if _, ok := cache.Get(ctx, key("t1", "bytes")); ok {
			t.Error("a deleted value is there")
		}
		if !cache.Set(ctx, key("t1", "short"), []byte("x"), 20*time.Millisecond) {
			t.Error("not stored")
		}
		eventually(t, "the value ends", func() bool {
			_, ok := cache.Get(ctx, key("t1", "short"))
			return !ok
		})
	})
}

// TestOutage stops Redis and starts it again in the middle of use.
func TestOutage(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, s *redistest.Server) {
		t.Parallel()
		ctx := t.Context()
		client := s.Client(t)
		cache, signal := redis.NewCache(client), redis.NewSignal(client)
		sub, err := signal.Subscribe("k")
		if err != nil {
			t.Fatal(err)
		}
		defer sub.Close()
		wantGap(t, sub)
		cache.Set(ctx, key("t", "a"), []byte("before"), time.Minute)

		s.Stop()
		eventually(t, "the loss is noticed", func() bool {
			cache.Get(ctx, key("t", "a"))
			return !client.Up()
		})
		if _, ok := cache.Get(ctx, key("t", "a")); ok {
			t.Error("a hit while Redis is away")
		}
		if cache.Set(ctx, key("t", "a"), []byte("lost"), time.Minute) || cache.Delete(ctx, key("t", "a")) {
			t.Error("a write while Redis is away is confirmed")
		}
		if err := signal.Publish(ctx, "k", "t", "1"); !errors.Is(err, redis.ErrDown) {
			t.Errorf("publish: %v, want ErrDown", err)
		}

		s.Start(t)
		eventually(t, "the client recovers", client.Up)
		wantGap(t, sub)
		if !cache.Set(ctx, key("t", "a"), []byte("after"), time.Minute) {
			t.Error("not stored after the outage")
		}
		if err := signal.Publish(ctx, "k", "t", "2"); err != nil {
			t.Fatal(err)
		}
		if e := next(t, sub); e != (redis.Event{Kind: "k", Tenant: "t", ID: "2"}) {
			t.Errorf("event %+v, want id 2", e)
		}
	})
}

func next(t *testing.T, sub *redis.Subscription) redis.Event {
	t.Helper()
	select {
	case e, ok := <-sub.Events():
		if !ok {
			t.Fatal("the stream is closed")
		}
		return e
	case <-time.After(30 * time.Second):
		t.Fatal("no event")
	}
	return redis.Event{}
}

func wantGap(t *testing.T, sub *redis.Subscription) {
	t.Helper()
	if e := next(t, sub); e != (redis.Event{Gap: true}) {
		t.Errorf("event %+v, want a gap", e)
	}
}

func TestOpen_RedisComesLater(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, s *redistest.Server) {
		t.Parallel()
		s.Stop()
		client := s.Client(t)
		if client.Up() {
			t.Fatal("up without a Redis")
		}
		sub, err := redis.NewSignal(client).Subscribe("k")
		if err != nil {
			t.Fatal(err)
		}
		defer sub.Close()
		s.Start(t)
		eventually(t, "the client finds it", client.Up)
		wantGap(t, sub)
	})
}

// TestDown_NothingIsSent lets Redis accept connections and never answer: after
// the first call has waited out its timeout, no caller waits or connects.
func TestDown_NothingIsSent(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var accepted atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		var conns []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				break
			}
			accepted.Add(1)
			conns = append(conns, c)
		}
		for _, c := range conns {
			c.Close()
		}
	}()
	defer func() { l.Close(); <-done }()

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	client, err := redis.Open(ctx, "redis://"+l.Addr().String(), redis.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if client.Up() {
		t.Fatal("up, though nothing was answered")
	}
	before := accepted.Load()
	cache := redis.NewCache(client)
	for range 10_000 {
		if _, ok := cache.Get(t.Context(), key("t")); ok {
			t.Fatal("a hit")
		}
	}
	// Only the probe and the pool's own two connections may have come meanwhile.
	if n := accepted.Load() - before; n > 100 {
		t.Errorf("%d connections for 10000 calls while Redis is lost", n)
	}
}

// TestCallerGoesAway checks that an impatient caller does not make Redis look lost.
func TestCallerGoesAway(t *testing.T) {
	t.Parallel()
	client := redistest.New(t).Client(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, ok := redis.NewCache(client).Get(ctx, key("t")); ok {
		t.Error("a hit")
	}
	if err := redis.NewSignal(client).Publish(ctx, "k", "t", "1"); !errors.Is(err, context.Canceled) {
		t.Errorf("publish: %v, want Canceled", err)
	}
	if !client.Up() {
		t.Error("the client is lost because a caller went away")
	}
}

func TestOpen_BadAddress(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"", "http://u:hunter2@h", "redis://u:hunter2@h/x"} {
		_, err := redis.Open(t.Context(), url, redis.Options{})
		if !fault.Is(err, fault.Invalid) || strings.Contains(fmt.Sprint(err), "hunter2") {
			t.Errorf("%q: %v, want Invalid without the password", url, err)
		}
	}
}

func TestClose_DuringOutage(t *testing.T) {
	t.Parallel()
	s := redistest.New(t)
	var log strings.Builder
	client, err := redis.Open(t.Context(), s.URL, redis.Options{Timeout: 5 * time.Second, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	s.Stop()
	cache := redis.NewCache(client)
	eventually(t, "the loss is noticed", func() bool {
		cache.Get(t.Context(), key("t"))
		return !client.Up()
	})
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.String(), "redis is lost"); n != 1 {
		t.Errorf("the loss was logged %d times: %s", n, log.String())
	}
	if _, ok := cache.Get(t.Context(), key("t")); ok || client.Up() {
		t.Error("a closed client serves")
	}
}

func TestSignal_Delivery(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, s *redistest.Server) {
		t.Parallel()
		ctx := t.Context()
		a, b := redis.NewSignal(s.Client(t)), redis.NewSignal(s.Client(t))
		sub, err := b.Subscribe("one", "two")
		if err != nil {
			t.Fatal(err)
		}
		wantGap(t, sub)
		sent := []redis.Event{
			{Kind: "one", Tenant: "t1", ID: "x"}, {Kind: "two", Tenant: "t2", ID: ""}, {Kind: "one", Tenant: "3:t", ID: "1:\n\x00é"},
		}
		for _, e := range sent {
			if err := a.Publish(ctx, e.Kind, e.Tenant, e.ID); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.Publish(ctx, "three", "t1", "not heard"); err != nil {
			t.Fatal(err)
		}
		for _, want := range sent {
			if got := next(t, sub); got != want {
				t.Errorf("event %+v, want %+v", got, want)
			}
		}
		sub.Close()
		if _, ok := <-sub.Events(); ok {
			t.Error("an event after Close")
		}
	})
}

func TestSignal_SlowReaderGetsAGap(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, s *redistest.Server) {
		t.Parallel()
		const sent = 2000
		client := s.Client(t)
		signal := redis.NewSignal(client)
		slow, err := signal.Subscribe("k")
		if err != nil {
			t.Fatal(err)
		}
		defer slow.Close()
		fast, err := signal.Subscribe("end")
		if err != nil {
			t.Fatal(err)
		}
		defer fast.Close()
		wantGap(t, fast)
		for len(slow.Events()) == 0 { // in force, and the first gap unread
			time.Sleep(time.Millisecond)
		}
		for i := range sent {
			if err := signal.Publish(t.Context(), "k", "t", fmt.Sprint(i)); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "the queue is full", func() bool { return len(slow.Events()) == cap(slow.Events()) })
		if err := signal.Publish(t.Context(), "end", "t", ""); err != nil {
			t.Fatal(err)
		}
		next(t, fast)
		wantGap(t, slow)
		last, gap := -1, false
		for range cap(slow.Events()) - 1 {
			e := next(t, slow)
			if e.Gap {
				gap = true
				break
			}
			last++
			if e.ID != fmt.Sprint(last) {
				t.Fatalf("event %q, want %d: lost without a gap", e.ID, last)
			}
		}
		if !gap || last >= sent-1 {
			t.Errorf("gap %v after %d of %d events", gap, last+1, sent)
		}
	})
}

func TestSignal_Refusals(t *testing.T) {
	t.Parallel()
	signal := redis.NewSignal(redistest.New(t).Client(t))
	tests := []struct {
		kind       redis.Kind
		tenant, id string
	}{
		{"", "t", "i"}, {"K", "t", "i"}, {"a:b", "t", "i"}, {redis.Kind(strings.Repeat("k", 65)), "t", "i"},
		{"k", "", "i"}, {"k", strings.Repeat("t", 129), "i"}, {"k", "t", strings.Repeat("i", 257)},
	}
	for _, tt := range tests {
		if err := signal.Publish(t.Context(), tt.kind, tt.tenant, tt.id); err == nil {
			t.Errorf("published %+v", tt)
		}
	}
	if _, err := signal.Subscribe(); err == nil {
		t.Error("subscribed to nothing")
	}
	if _, err := signal.Subscribe("k", "*"); err == nil {
		t.Error("subscribed to a malformed kind")
	}
}

func TestNamespace_KeepsInstallationsApart(t *testing.T) {
	t.Parallel()
	s := redistest.New(t)
	open := func(ns string) *redis.Client {
		c, err := redis.Open(t.Context(), s.URL, redis.Options{Timeout: 5 * time.Second, Namespace: ns})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	a, b := open("a"), open("b")
	redis.NewCache(a).Set(t.Context(), key("t"), []byte("x"), time.Minute)
	if _, ok := redis.NewCache(b).Get(t.Context(), key("t")); ok {
		t.Error("another installation's value is a hit")
	}
}
