package embedded

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

// childVariable makes the test binary play the process that runs a server and
// is then killed.
const childVariable = "EMBEDDED_TEST_DATA_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childVariable); dir != "" {
		runChild(dir)
		return
	}
	goleak.VerifyTestMain(m)
}

// runChild starts a server, prints its address and waits to be killed.
func runChild(dir string) {
	s, err := Start(context.Background(), Options{DataDir: dir})
	if err != nil {
		fmt.Println("error:", err)
		return
	}
	fmt.Println(s.child.Pid, s.socketDir, s.URL())
	select {}
}

// dataDir returns a directory that the server's account can reach, as root too.
func dataDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "bulkhead-embedded-test-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func start(t *testing.T, o Options) *Server {
	t.Helper()
	s, err := Start(t.Context(), o)
	if err != nil {
		t.Fatalf("start: %v", err)
	}
	t.Cleanup(func() { s.Stop(context.Background()) })
	return s
}

func exec1(t *testing.T, s *Server, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL())
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func TestStart_KeepsDataAndLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	s := start(t, Options{DataDir: dir})
	exec1(t, s, `CREATE TABLE kept (n int)`)

	if _, err := Start(t.Context(), Options{DataDir: dir}); !errors.Is(err, ErrInUse) {
		t.Errorf("second start on the same directory: %v, want ErrInUse", err)
	}
	pid := s.child.Pid
	if err := s.Stop(t.Context()); err != nil {
		t.Fatalf("stop: %v", err)
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Errorf("second stop: %v", err)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d is still there", pid)
	}
	if _, err := os.Stat(s.socketDir); !os.IsNotExist(err) {
		t.Errorf("socket directory is left behind")
	}

	again := start(t, Options{DataDir: dir})
	exec1(t, again, `INSERT INTO kept VALUES (1)`)
}

func TestStart_NoPort(t *testing.T) {
	t.Parallel()
	s := start(t, Options{DataDir: dataDir(t), Fast: true})
	exec1(t, s, `DO $$ BEGIN
		IF current_setting('listen_addresses') <> '' THEN RAISE EXCEPTION 'listens'; END IF;
	END $$`)
	st, err := os.Stat(s.socketDir)
	if err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("socket directory: %v, %v; want 0700", st.Mode(), err)
	}
}

// child is a process of this test binary that runs a server on dir.
type child struct {
	cmd        *exec.Cmd
	postmaster int
	socketDir  string
}

func startChild(t *testing.T, dir string) child {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("child: %v", err)
	}
	said := strings.Fields(line)
	n, err := strconv.Atoi(said[0])
	if err != nil || len(said) != 3 {
		t.Fatalf("child says %q", line)
	}
	conn, err := pgx.Connect(t.Context(), said[2])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), `CREATE TABLE IF NOT EXISTS kept (n int)`); err != nil {
		t.Fatal(err)
	}
	return child{cmd: cmd, postmaster: n, socketDir: said[1]}
}

func TestStart_AfterParentWasKilled(t *testing.T) {
	t.Parallel()
	for name, alsoPostmaster := range map[string]bool{"parent only": false, "parent and postmaster": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := dataDir(t)
			c := startChild(t, dir)
			c.cmd.Process.Kill()
			if alsoPostmaster {
				syscall.Kill(c.postmaster, syscall.SIGKILL)
			}
			c.cmd.Wait()
			s := start(t, Options{DataDir: dir})
			exec1(t, s, `INSERT INTO kept VALUES (1)`)
			awaitGone(t, c.postmaster)
			if _, err := os.Stat(c.socketDir); !os.IsNotExist(err) {
				t.Errorf("the killed run's socket directory is left behind")
			}
		})
	}
}

// awaitGone waits for a process to have ended; a zombie counts, since only its
// new parent can reap it.
func awaitGone(t *testing.T, pid int) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for (cluster{root: "/nowhere"}).stateOf(pid) >= foreign {
		if time.Now().After(deadline) {
			t.Fatalf("postmaster %d outlived its parent", pid)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestStart_StalePidFile(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		pid  func(t *testing.T) int
	}{
		{"a zombie that nobody reaps", startZombie},
		{"another program has the number", startSleeper},
		{"nobody has the number", func(*testing.T) int { return 4194303 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := dataDir(t)
			s := start(t, Options{DataDir: dir, Fast: true})
			pidFile := filepath.Join(dir, "postgres", "pgdata", "postmaster.pid")
			held, err := os.ReadFile(pidFile)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			_, rest, _ := strings.Cut(string(held), "\n")
			acct, err := serverAccount()
			if err != nil {
				t.Fatal(err)
			}
			stale := fmt.Sprintf("%d\n%s", tt.pid(t), rest)
			if err := os.WriteFile(pidFile, []byte(stale), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := (cluster{account: acct}).own(pidFile); err != nil {
				t.Fatal(err)
			}
			start(t, Options{DataDir: dir, Fast: true})
		})
	}
}

// startSleeper starts a program of the server's account that is not PostgreSQL.
func startSleeper(t *testing.T) int {
	t.Helper()
	cmd := sleeper(t)
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd.Process.Pid
}

// startZombie starts a program, kills it and does not reap it.
func startZombie(t *testing.T) int {
	t.Helper()
	cmd := sleeper(t)
	cmd.Process.Kill()
	t.Cleanup(func() { cmd.Wait() })
	return cmd.Process.Pid
}

func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	acct, err := serverAccount()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "600")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: acct.credential()}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

func TestStart_HalfMadeClusterIsBegunAnew(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	half := filepath.Join(dir, "postgres", "pgdata.new")
	if err := os.MkdirAll(half, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(half, "PG_VERSION"), []byte("15\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, Options{DataDir: dir, Fast: true})
	if _, err := os.Stat(half); !os.IsNotExist(err) {
		t.Error("pgdata.new is left behind")
	}
}

func TestStart_Refusals(t *testing.T) {
	t.Parallel()
	t.Run("relative directory", func(t *testing.T) {
		t.Parallel()
		wantError(t, Options{DataDir: "data"}, "is not an absolute path")
	})
	t.Run("binaries of another version", func(t *testing.T) {
		t.Parallel()
		dir := dataDir(t)
		start(t, Options{DataDir: dir, Fast: true}).Stop(t.Context())
		version := filepath.Join(dir, "postgres", "pgdata", "PG_VERSION")
		if err := os.WriteFile(version, []byte("9\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		wantError(t, Options{DataDir: dir}, "is of PostgreSQL 9, the binaries")
	})
	t.Run("directory out of reach", func(t *testing.T) {
		t.Parallel()
		if os.Geteuid() != 0 {
			t.Skip("only root switches to another account")
		}
		dir := dataDir(t)
		if err := os.Chmod(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		wantError(t, Options{DataDir: filepath.Join(dir, "data")}, "is out of reach for account")
	})
	t.Run("no binaries in the given directory", func(t *testing.T) {
		t.Parallel()
		wantError(t, Options{DataDir: dataDir(t), BinDir: "/usr/share"}, "no initdb and postgres in /usr/share")
	})
}

func wantError(t *testing.T, o Options, want string) {
	t.Helper()
	s, err := Start(t.Context(), o)
	if err == nil {
		s.Stop(context.Background())
		t.Fatalf("started; want an error with %q", want)
	}
	if !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %q, want one line with %q", err, want)
	}
}
