package e2e

import (
	"context"
	"fmt"
	"os"
	"testing"
)

// TestMain builds the server once, starts it, and stops it after the tests.
func TestMain(m *testing.M) {
	os.Exit(mainRun(m))
}

func mainRun(m *testing.M) (code int) {
	life := newLifetime()
	defer func() {
		if err := life.end(); err != nil {
			fmt.Fprintf(os.Stderr, "e2e: %v\n", err)
			code = 1
		}
	}()
	if err := life.try(func() { theService = startService(life) }); err != nil {
		fmt.Fprintf(os.Stderr, "e2e: start the service: %v\n", err)
		return 1
	}
	return m.Run()
}

// lifetime is a testing.TB that lasts as long as the test binary, for fixtures
// that all tests share. Only the methods below may be called.
type lifetime struct {
	testing.TB
	ctx      context.Context
	cancel   context.CancelFunc
	cleanups []func()
	failures []string
}

type fatal string

func newLifetime() *lifetime {
	l := &lifetime{}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// try runs fn and returns what it reported by Fatal.
func (l *lifetime) try(fn func()) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case fatal:
			err = fmt.Errorf("%s", string(r))
		default:
			panic(r)
		}
	}()
	fn()
	return nil
}

// end runs the cleanups, the last first, and returns what was reported.
func (l *lifetime) end() error {
	for len(l.cleanups) > 0 {
		last := l.cleanups[len(l.cleanups)-1]
		l.cleanups = l.cleanups[:len(l.cleanups)-1]
		if err := l.try(last); err != nil {
			l.failures = append(l.failures, err.Error())
		}
	}
	l.cancel()
	if len(l.failures) > 0 {
		return fmt.Errorf("%v", l.failures)
	}
	return nil
}

func (l *lifetime) Helper()                  {}
func (l *lifetime) Name() string             { return "e2e" }
func (l *lifetime) Context() context.Context { return l.ctx }
func (l *lifetime) Cleanup(fn func())        { l.cleanups = append(l.cleanups, fn) }
func (l *lifetime) Fatal(args ...any)        { panic(fatal(fmt.Sprint(args...))) }
func (l *lifetime) Fatalf(format string, args ...any) {
	panic(fatal(fmt.Sprintf(format, args...)))
}
func (l *lifetime) Errorf(format string, args ...any) {
	l.failures = append(l.failures, fmt.Sprintf(format, args...))
}
func (l *lifetime) Logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "e2e: "+format+"\n", args...)
}

func (l *lifetime) TempDir() string {
	dir, err := os.MkdirTemp("", "bulkhead-e2e-")
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // another account runs the binary, too
		l.Fatal(err)
	}
	return dir
}
