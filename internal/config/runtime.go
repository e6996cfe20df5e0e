package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// The bounds of the runtimes file.
const (
	maxRuntimes = 64
	maxArgs     = 64
	maxEnv      = 64
	maxRoots    = 32
	maxText     = 4096 // bytes of one argument, value or path
	// maxBytes, maxCount and maxSeconds bound the limits that a runtime may set.
	maxBytes   = 1 << 50
	maxCount   = 1 << 20
	maxSeconds = 30 * 24 * 3600
)

// Runtime is a declared command that stdio servers run. A tenant gives only its
// name, so that no caller chooses what is executed.
type Runtime struct {
	// Command is the program and its arguments. The program is an absolute path
	// or a bare name that is looked up on the PATH.
	Command []string `json:"command"`
	// Env is the whole environment of the process beside what sessions adds.
	Env map[string]string `json:"env"`
	// ReadRoots and WriteRoots are the absolute paths of files and directories that
	// the process may read and write, beside itself and the system's libraries.
	ReadRoots  []string `json:"readRoots"`
	WriteRoots []string `json:"writeRoots"`
	// Dir is the working directory; empty means one of the host's choice.
	Dir string `json:"dir"`
	// Network allows the network.
	Network bool `json:"network"`
	// User is whom the process runs as: a name, a number, or two numbers with a
	// colon between user and group; empty means one of the host's choice.
	User string `json:"user"`
	// Limits bound what the process uses.
	Limits RuntimeLimits `json:"limits"`
}

// RuntimeLimits are what the kernel bounds of a process; a zero member means the
// default, which sessions knows.
type RuntimeLimits struct {
	// MemoryBytes, AddressSpaceBytes and FileBytes are for each process: what it
	// can write to and shares with nobody, all that it maps, a file it writes.
	MemoryBytes       uint64 `json:"memoryBytes"`
	AddressSpaceBytes uint64 `json:"addressSpaceBytes"`
	FileBytes         uint64 `json:"fileBytes"`
	// OpenFiles bounds the descriptors of each process.
	OpenFiles uint64 `json:"openFiles"`
	// Processes bounds processes and threads together.
	Processes uint64 `json:"processes"`
	// CPUSeconds bounds the processor time of each process in its life.
	CPUSeconds uint64 `json:"cpuSeconds"`
}

// String names the program only: arguments and environment may hold secrets.
func (r Runtime) String() string {
	if len(r.Command) == 0 {
		return "runtime"
	}
	return "runtime " + r.Command[0]
}

// Format prints the same as String under every verb.
func (r Runtime) Format(f fmt.State, _ rune) { io.WriteString(f, r.String()) } //nolint:errcheck // fmt keeps its own error

// LogValue is String.
func (r Runtime) LogValue() slog.Value { return slog.StringValue(r.String()) }

var (
	runtimeName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,62}$`)
	envName     = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	userName    = regexp.MustCompile(`^([a-z_][a-z0-9_-]{0,31}|[0-9]{1,10}(:[0-9]{1,10})?)$`)
)

// parseRuntimes reads a JSON object of runtimes by name. Unknown and repeated
// members are refused.
func parseRuntimes(b []byte) (map[string]Runtime, []fault.Field) {
	if path, err := checkMembers(b); err != nil {
		return nil, []fault.Field{{Path: path, Rule: err.Error()}}
	}
	var rs map[string]Runtime
	if err := json.Unmarshal(b, &rs); err != nil {
		return nil, []fault.Field{{Path: "runtimes", Rule: jsonRule(err)}}
	}
	var bad []fault.Field
	if len(rs) > maxRuntimes {
		bad = append(bad, fault.Field{Path: "runtimes", Rule: fmt.Sprintf("has more than %d members", maxRuntimes)})
	}
	for _, name := range slices.Sorted(maps.Keys(rs)) {
		if !runtimeName.MatchString(name) {
			bad = append(bad, fault.Field{Path: fmt.Sprintf("%q", name), Rule: "a name matches " + runtimeName.String()})
		}
		for _, f := range rs[name].check() {
			bad = append(bad, fault.Field{Path: name + "." + f.Path, Rule: f.Rule})
		}
	}
	return rs, bad
}

// jsonRule says what was wrong without repeating a value.
func jsonRule(err error) string {
	var typ *json.UnmarshalTypeError
	if errors.As(err, &typ) {
		return fmt.Sprintf("%s has the wrong type", typ.Field)
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

func (r Runtime) check() []fault.Field {
	var bad []fault.Field
	refuse := func(path, format string, args ...any) {
		bad = append(bad, fault.Field{Path: path, Rule: fmt.Sprintf(format, args...)})
	}
	if len(r.Command) == 0 || len(r.Command) > maxArgs {
		refuse("command", "has 1 to %d members", maxArgs)
	} else if p := r.Command[0]; p == "" || strings.Contains(p, "/") && !filepath.IsAbs(p) {
		refuse("command[0]", "is an absolute path or a bare name")
	}
	for i, a := range r.Command {
		if rule := textRule(a); rule != "" {
			refuse(fmt.Sprintf("command[%d]", i), "%s", rule)
		}
	}
	if len(r.Env) > maxEnv {
		refuse("env", "has at most %d members", maxEnv)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Env)) {
		if !envName.MatchString(name) {
			refuse("env", "%q is not a name of a variable", name)
		} else if rule := textRule(r.Env[name]); rule != "" {
			refuse("env."+name, "%s", rule)
		}
	}
	for _, roots := range []struct {
		name  string
		paths []string
	}{{"readRoots", r.ReadRoots}, {"writeRoots", r.WriteRoots}} {
		if len(roots.paths) > maxRoots {
			refuse(roots.name, "has at most %d members", maxRoots)
		}
		for i, p := range roots.paths {
			if rule := pathRule(p); rule != "" {
				refuse(fmt.Sprintf("%s[%d]", roots.name, i), "%s", rule)
			}
		}
	}
	if r.Dir != "" {
		if rule := pathRule(r.Dir); rule != "" {
			refuse("dir", "%s", rule)
		}
	}
	if r.User != "" && !userName.MatchString(r.User) {
		refuse("user", "is a name, a number, or two numbers with a colon between")
	}
	return append(bad, r.Limits.check()...)
}

func (l RuntimeLimits) check() (bad []fault.Field) {
	for _, m := range []struct {
		name        string
		value       uint64
		least, most uint64
	}{
		{"memoryBytes", l.MemoryBytes, 1 << 20, maxBytes}, {"addressSpaceBytes", l.AddressSpaceBytes, 1 << 20, maxBytes},
		{"fileBytes", l.FileBytes, 1, maxBytes}, {"openFiles", l.OpenFiles, 8, maxCount}, {"processes", l.Processes, 1, maxCount},
		{"cpuSeconds", l.CPUSeconds, 1, maxSeconds},
	} {
		if m.value != 0 && (m.value < m.least || m.value > m.most) {
			bad = append(bad, fault.Field{Path: "limits." + m.name, Rule: fmt.Sprintf("is a whole number from %d to %d, or 0 for the default", m.least, m.most)})
		}
	}
	return bad
}

func textRule(s string) string {
	switch {
	case len(s) > maxText:
		return fmt.Sprintf("has at most %d bytes", maxText)
	case strings.ContainsRune(s, 0):
		return "holds a zero byte"
	}
	return ""
}

func pathRule(p string) string {
	if !filepath.IsAbs(p) || filepath.Clean(p) != p {
		return "is an absolute path without . and .. and doubled slashes"
	}
	return textRule(p)
}

// runtimeMembers and limitMembers are the members of a Runtime and of its limits.
var (
	runtimeMembers = []string{"command", "env", "readRoots", "writeRoots", "dir", "network", "user", "limits"}
	limitMembers   = []string{"memoryBytes", "addressSpaceBytes", "fileBytes", "openFiles", "processes", "cpuSeconds"}
)

// checkMembers walks the tokens, since encoding/json takes the last of two
// members silently. It refuses what follows the value, too.
func checkMembers(b []byte) (string, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if path, err := walk(d, "runtimes", 0); err != nil {
		return path, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return "runtimes", errors.New("has something after the object")
	}
	return "", nil
}

func walk(d *json.Decoder, path string, depth int) (string, error) {
	const maxDepth = 8
	t, err := d.Token()
	if err != nil {
		return path, errors.New("is not JSON")
	}
	open, nested := t.(json.Delim)
	if depth == 0 && open != '{' {
		return path, errors.New("must be an object")
	}
	if !nested {
		return "", nil
	}
	if depth > maxDepth {
		return path, errors.New("is nested too deeply")
	}
	seen := map[string]bool{}
	for i := 0; d.More(); i++ {
		child := fmt.Sprintf("%s[%d]", path, i)
		if open == '{' {
			k, err := d.Token()
			name, ok := k.(string)
			if err != nil || !ok {
				return path, errors.New("is not JSON")
			}
			child = path + "." + name
			if seen[name] {
				return child, errors.New("occurs twice")
			}
			seen[name] = true
			// encoding/json would take Command for command.
			if depth == 1 && !slices.Contains(runtimeMembers, name) ||
				depth == 2 && strings.HasSuffix(path, ".limits") && !slices.Contains(limitMembers, name) {
				return child, errors.New("is not a known member")
			}
		}
		if at, err := walk(d, child, depth+1); err != nil {
			return at, err
		}
	}
	if _, err := d.Token(); err != nil {
		return path, errors.New("is not JSON")
	}
	return "", nil
}
