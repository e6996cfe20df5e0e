// Command server is Bulkhead: the host of the Model Context Protocol as a
// multi-tenant service. Without arguments it serves; `server demo-calendar` runs
// the demo MCP server of development mode.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/bulkhead-mcp/bulkhead/internal/config"
	"github.com/bulkhead-mcp/bulkhead/internal/telemetry"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bulkhead: "+failure(err))
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == demoCommand {
		return demoCalendar(ctx, args[1:], os.Stdout)
	}
	if len(args) > 0 {
		return fmt.Errorf("unknown argument %q; the settings are environment variables, see README.md", args[0])
	}
	cfg, err := config.Process()
	if err != nil {
		return err
	}
	telemetry.TakeStandard(telemetry.NewLogger(os.Stderr, cfg.LogLevel))
	// A second signal ends the process at once.
	context.AfterFunc(ctx, func() { signal.Reset(os.Interrupt, syscall.SIGTERM) })
	return run(ctx, cfg, os.Stdout, os.Stderr)
}
