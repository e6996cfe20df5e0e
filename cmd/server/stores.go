package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/bulkhead-mcp/bulkhead/internal/config"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres/embedded"
	"github.com/bulkhead-mcp/bulkhead/internal/redis"
	"github.com/bulkhead-mcp/bulkhead/internal/seal"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// stores are what everything else stands on.
type stores struct {
	db *tenant.DB
	// jobs is the job queue's way to the database.
	jobs   *riverpgxv5.Driver
	redis  *redis.Client
	ring   *seal.Ring
	signer *seal.Signer
	// sole says that no other replica can have this database.
	sole bool
	// lost is closed when the embedded database ends by itself; nil otherwise.
	lost <-chan struct{}
}

func openStores(ctx context.Context, cfg *config.Config, log *slog.Logger, stack *closers) (*stores, error) {
	out := &stores{}
	url, keks := string(cfg.DatabaseURL), cfg.KEKs
	redisURL := string(cfg.RedisURL)
	if cfg.Development {
		pg, err := embedded.Start(ctx, embedded.Options{DataDir: cfg.DataDir, BinDir: cfg.PostgresBin, Log: log})
		if err != nil {
			return nil, err
		}
		stack.push(pg.Stop)
		if err := migrate(ctx, pg.URL(), log); err != nil {
			return nil, err
		}
		if err := embedded.PrepareLogin(ctx, pg.URL()); err != nil {
			return nil, err
		}
		if keks, err = config.DevelopmentKEK(cfg.DataDir); err != nil {
			return nil, err
		}
		mini, err := redis.StartEmbedded()
		if err != nil {
			return nil, err
		}
		stack.push(func(context.Context) error { mini.Close(); return nil })
		url, redisURL = pg.URLFor(embedded.LoginRole), mini.URL()
		out.sole, out.lost = true, pg.Exited()
	} else if err := migrate(ctx, string(cfg.MigrationDatabaseURL), log); err != nil {
		return nil, err
	}
	if err := out.openKeys(keks); err != nil {
		return nil, err
	}
	if err := out.openDatabase(ctx, url, stack); err != nil {
		return nil, err
	}
	client, err := redis.Open(ctx, redisURL, redis.Options{Log: log})
	if err != nil {
		return nil, err
	}
	stack.push(func(context.Context) error { return client.Close() })
	out.redis = client
	return out, nil
}

func (s *stores) openDatabase(ctx context.Context, url string, stack *closers) error {
	app, err := postgres.Open(ctx, url, tenant.AppRole, postgres.Options{ApplicationName: "bulkhead"})
	if err != nil {
		return err
	}
	stack.push(func(context.Context) error { app.Close(); return nil })
	system, err := postgres.Open(ctx, url, tenant.SystemRole, postgres.Options{ApplicationName: "bulkhead-system", MaxConns: 4})
	if err != nil {
		return err
	}
	stack.push(func(context.Context) error { system.Close(); return nil })
	if err := errors.Join(postgres.Check(ctx, app), postgres.Check(ctx, system)); err != nil {
		return err
	}
	// The queue keeps a connection for what it is told, and one for leading.
	jobs, err := postgres.Open(ctx, url, tenant.SystemRole, postgres.Options{ApplicationName: "bulkhead-jobs", MaxConns: 6})
	if err != nil {
		return err
	}
	stack.push(func(context.Context) error { jobs.Close(); return nil })
	s.jobs = riverpgxv5.New(jobs)
	s.db, err = tenant.NewDB(app, system)
	return err
}

// openKeys makes the ring of key-encryption keys and the signer of checkpoints,
// whose seed is derived from the primary key: neither is in the database.
func (s *stores) openKeys(keks []config.KEK) error {
	if len(keks) == 0 {
		return errors.New("no key-encryption key")
	}
	ring := make([]seal.KEK, len(keks))
	for i, k := range keks {
		kek, err := seal.NewLocalKEK(k.ID, k.Key)
		if err != nil {
			return err
		}
		ring[i] = kek
	}
	var err error
	if s.ring, err = seal.NewRing(ring[0], ring[1:]...); err != nil {
		return err
	}
	s.signer = seal.NewSigner(seal.DeriveSeed(keks[0].Key, "audit-checkpoint"))
	return nil
}

// olderSigners are the public keys of checkpoints signed before a rotation of
// the key-encryption key.
func olderSigners(keks []config.KEK) (out []*seal.Signer) {
	for i, k := range keks {
		if i > 0 {
			out = append(out, seal.NewSigner(seal.DeriveSeed(k.Key, "audit-checkpoint")))
		}
	}
	return out
}
