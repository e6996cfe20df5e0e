package catalog

import (
	"container/list"
	"sync"
)

// lru is a bounded map that forgets what was not used for longest. The bound is
// on the sum of costs. It is safe for concurrent use.
type lru[K comparable, V any] struct {
	limit int64

	mu    sync.Mutex // guards what follows
	items map[K]*list.Element
	order *list.List // front is the last used
	cost  int64
}

type lruItem[K comparable, V any] struct {
	key   K
	value V
	cost  int64
}

func newLRU[K comparable, V any](limit int64) *lru[K, V] {
	return &lru[K, V]{limit: limit, items: map[K]*list.Element{}, order: list.New()}
}

func (c *lru[K, V]) get(k K) (v V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.items[k]
	if !ok {
		return v, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*lruItem[K, V]).value, true
}

// getOrAdd returns the value of k and adds what make returns when there is none.
// make must not use the cache.
func (c *lru[K, V]) getOrAdd(k K, cost int64, make func() V) V {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.items[k]; ok {
		c.order.MoveToFront(e)
		return e.Value.(*lruItem[K, V]).value
	}
	v := make()
	c.add(k, v, cost)
	return v
}

// put sets the value of k. A value that costs more than the limit is not kept.
func (c *lru[K, V]) put(k K, v V, cost int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(k)
	c.add(k, v, cost)
}

func (c *lru[K, V]) delete(k K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(k)
}

func (c *lru[K, V]) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.items)
}

func (c *lru[K, V]) add(k K, v V, cost int64) {
	if cost > c.limit {
		return
	}
	c.items[k] = c.order.PushFront(&lruItem[K, V]{key: k, value: v, cost: cost})
	c.cost += cost
	for c.cost > c.limit {
		c.remove(c.order.Back().Value.(*lruItem[K, V]).key)
	}
}

func (c *lru[K, V]) remove(k K) {
	e, ok := c.items[k]
	if !ok {
		return
	}
	c.cost -= e.Value.(*lruItem[K, V]).cost
	c.order.Remove(e)
	delete(c.items, k)
}
