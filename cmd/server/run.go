package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkhead-mcp/bulkhead/internal/config"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
	"github.com/bulkhead-mcp/bulkhead/migrations"
)

// closers is a stack of what must be closed, newest first.
type closers []func(ctx context.Context) error

func (c *closers) push(fn func(ctx context.Context) error) { *c = append(*c, fn) }

func (c closers) close(ctx context.Context) error {
	var errs []error
	for i := len(c) - 1; i >= 0; i-- {
		errs = append(errs, c[i](ctx))
	}
	return errors.Join(errs...)
}

// run serves until ctx ends, then stops in order: no new work, calls within the
// grace period, connections and processes, audit, stores. stdout is for people,
// stderr for the log.
func run(ctx context.Context, cfg *config.Config, stdout, stderr io.Writer) (err error) {
	log := telemetry.NewLogger(stderr, cfg.LogLevel)
	var stack closers
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		err = errors.Join(err, stack.close(last))
	}()
	// The listeners open first: a port in use is known before anything starts.
	api, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return fmt.Errorf("BULKHEAD_LISTEN: %w", err)
	}
	defer api.Close() //nolint:errcheck // closed by the server in the good case
	metrics, err := net.Listen("tcp", cfg.MetricsListen)
	if err != nil {
		return fmt.Errorf("BULKHEAD_METRICS_LISTEN: %w", err)
	}
	defer metrics.Close() //nolint:errcheck // closed by the server in the good case

	base, err := openStores(ctx, cfg, log, &stack)
	if err != nil {
		return err
	}
	p, err := build(ctx, cfg, base, log, &stack)
	if err != nil {
		return err
	}
	return serve(ctx, cfg, p, api, metrics, log, stdout)
}

// serve runs the listeners and the loops until ctx ends or one of them fails.
func serve(ctx context.Context, cfg *config.Config, p *parts, api, metrics net.Listener, log *slog.Logger, stdout io.Writer) error {
	if err := p.hooks.Start(ctx); err != nil {
		return err
	}
	// Loops outlive the listeners: the calls that drain need heartbeat and sealer.
	loops, stopLoops := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLoops()
	background, loops := errgroup.WithContext(loops)
	background.Go(func() error { return p.calls.Run(loops) })
	background.Go(func() error { return p.audit.Run(loops) })
	background.Go(func() error { return p.signals.run(loops) })
	background.Go(func() error { return p.signals.registered.run(loops) })
	background.Go(func() error { return p.changes.run(loops) })
	background.Go(func() error { return p.events.Run(loops) })
	background.Go(func() error { return p.lessons.run(loops) })

	front, stopFront := context.WithCancel(ctx)
	defer stopFront()
	context.AfterFunc(loops, stopFront)
	g, front := errgroup.WithContext(front)
	// Waiting callers are answered and streams end as soon as the stop begins.
	context.AfterFunc(front, p.calls.Drain)
	context.AfterFunc(front, p.events.Drain)
	g.Go(func() error { return p.api.Serve(front, api, cfg.GracePeriod) })
	g.Go(func() error { return serveMetrics(front, metrics, p.metrics.Handler(log)) })
	if cfg.Development {
		g.Go(func() error { return p.development(front, "http://"+api.Addr().String(), stdout) })
	}
	log.InfoContext(ctx, "serving", "address", api.Addr().String(), "metrics", metrics.Addr().String(), "development", cfg.Development)
	err := g.Wait()
	if err != nil {
		log.ErrorContext(ctx, "a part ended by itself; stopping", "error", err)
	}

	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.GracePeriod)
	defer cancel()
	// Calls that end now are announced; other replicas deliver what this one leaves.
	err = errors.Join(err, p.calls.Stop(grace), p.hooks.Stop(grace))
	stopLoops()
	err = errors.Join(err, background.Wait())
	log.InfoContext(ctx, "stopped")
	return err
}

func serveMetrics(ctx context.Context, l net.Listener, h http.Handler) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", h)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, MaxHeaderBytes: 16 << 10}
	stop := context.AfterFunc(ctx, func() { srv.Close() }) //nolint:errcheck // nothing is owed to a scraper
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// migrate applies migrations where the configuration names the tables' owner.
func migrate(ctx context.Context, url string, log *slog.Logger) error {
	if url == "" {
		return nil
	}
	return postgres.Migrate(ctx, url, migrations.FS, log)
}

// failure is the text for the terminal: a fault's private cause too, for it is
// the operator who reads it. Of several errors each has a line; the first is
// usually the cause of the others.
func failure(err error) string {
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		var lines []string
		for _, e := range all.Unwrap() {
			lines = append(lines, failure(e))
		}
		return strings.Join(lines, "\n")
	}
	f, ok := fault.As(err)
	if !ok {
		return err.Error()
	}
	out := f.Detail()
	for _, x := range f.Fields {
		out += "\n  " + x.Path + " " + x.Rule
	}
	return out
}

func replicaName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}
