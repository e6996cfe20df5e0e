package redis

import (
	"fmt"

	"github.com/alicebob/miniredis/v2"
)

// Embedded is a Redis inside this process, for development and tests. It keeps
// nothing beyond the process.
type Embedded struct {
	m   *miniredis.Miniredis
	url string
}

// StartEmbedded starts a Redis on a free loopback port.
func StartEmbedded() (*Embedded, error) {
	m := miniredis.NewMiniRedis()
	// Without it keys never expire.
	m.ClockTTL(true)
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("start the in-process redis: %w", err)
	}
	return &Embedded{m: m, url: "redis://" + m.Addr()}, nil
}

// URL returns its address.
func (e *Embedded) URL() string { return e.url }

// Close stops it and waits for its connections. It may be called twice.
func (e *Embedded) Close() { e.m.Close() }

// Restart starts it again at the same address after Close, empty, as a Redis
// without persistence would. It is for tests of an outage.
func (e *Embedded) Restart() error {
	e.m.FlushAll()
	if err := e.m.Restart(); err != nil {
		return fmt.Errorf("restart the in-process redis: %w", err)
	}
	return nil
}
