// Command testreport reads what `go test -json` writes and shows it for people
// and for CI: the line of each package as go test would print it, everything of
// a test that failed, and every test that was skipped with its reason. It exits
// with 1 when a test failed, when nothing was tested, or when a test was skipped
// that the allow-list does not name.
//
//	go test -json ./... | testreport -allow deploy/skip-allow.txt [-lines FILE]
//
// With -lines the packages' lines go to FILE, to be shown at the end of all.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	allow := flag.String("allow", "deploy/skip-allow.txt", "file of the tests that may be skipped")
	lines := flag.String("lines", "", "file that gets the packages' lines")
	flag.Parse()
	ok, err := run(os.Stdin, os.Stdout, *allow, *lines)
	if err != nil {
		fmt.Fprintf(os.Stderr, "testreport: %v\n", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, allowFile, linesFile string) (ok bool, err error) {
	text, err := os.ReadFile(allowFile)
	if err != nil {
		return false, err
	}
	allowed, err := parseAllowed(string(text))
	if err != nil {
		return false, fmt.Errorf("%s: %w", allowFile, err)
	}
	r := &report{out: out, lines: out, output: map[testName][]string{}, allowed: allowed}
	if linesFile != "" {
		f, err := os.Create(linesFile)
		if err != nil {
			return false, err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		r.lines = f
	}
	if err := r.read(in); err != nil {
		return false, err
	}
	return r.end(), nil
}

// event is one line of go test -json; see `go doc test2json`.
type event struct {
	Action, Package, Test, Output, ImportPath string
}

// testName names a test; Test is empty for what a package says itself.
type testName struct{ Package, Test string }

type report struct {
	out, lines io.Writer
	// output is what a test has said so far; it is dropped when the test passed.
	output   map[testName][]string
	skipped  []skip
	allowed  []allowance
	passed   int
	failed   int
	packages int
	broken   bool
}

// skip is a test that did not run.
type skip struct {
	testName
	reason string
}

func (r *report) read(in io.Reader) error {
	s := bufio.NewScanner(in)
	s.Buffer(nil, 16<<20)
	for s.Scan() {
		var e event
		if err := json.Unmarshal(s.Bytes(), &e); err != nil {
			// Not from a test: what the go command itself says.
			fmt.Fprintln(r.out, s.Text())
			r.broken = true
			continue
		}
		r.take(e)
	}
	return s.Err()
}

func (r *report) take(e event) {
	name := testName{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		fmt.Fprint(r.out, e.Output)
	case "build-fail":
		r.broken = true
	case "output":
		if e.Test == "" && isLine(e.Output) {
			fmt.Fprint(r.lines, e.Output)
			if r.lines != r.out {
				fmt.Fprint(r.out, "  "+e.Output)
			}
			return
		}
		r.output[name] = append(r.output[name], e.Output)
	case "pass":
		delete(r.output, name)
		r.count(e, &r.passed)
	case "skip":
		if e.Test != "" {
			r.skipped = append(r.skipped, skip{name, reason(r.output[name])})
		}
		delete(r.output, name)
	case "fail":
		r.show(e)
		r.count(e, &r.failed)
		r.broken = true
	}
}

func (r *report) count(e event, n *int) {
	if e.Test == "" {
		r.packages++
		return
	}
	*n++
}

// show prints what a failed test said. A failed package shows what is left too:
// tests that never ended.
func (r *report) show(e event) {
	var names []testName
	for name := range r.output {
		if name.Package == e.Package && (e.Test == "" || name.Test == e.Test) {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b testName) int { return strings.Compare(a.Test, b.Test) })
	for _, name := range names {
		fmt.Fprint(r.out, strings.Join(r.output[name], ""))
		delete(r.output, name)
	}
}

// isLine reports whether a package's output is its line of result, and not
// what its tests printed.
func isLine(s string) bool {
	return strings.HasPrefix(s, "ok  \t") || strings.HasPrefix(s, "FAIL\t") || strings.HasPrefix(s, "?   \t")
}

// reason finds what the test gave to Skip: the last line that is not a mark of
// the test's run.
func reason(lines []string) string {
	for _, l := range slices.Backward(lines) {
		l = strings.TrimSpace(l)
		if l != "" && !strings.HasPrefix(l, "--- ") && !strings.HasPrefix(l, "=== ") {
			return l
		}
	}
	return "no reason given"
}

// end prints the sums and reports whether all is well.
func (r *report) end() bool {
	fmt.Fprintf(r.out, "%d tests passed, %d failed, %d skipped in %d packages\n", r.passed, r.failed, len(r.skipped), r.packages)
	slices.SortFunc(r.skipped, func(a, b skip) int {
		return strings.Compare(a.Package+" "+a.Test, b.Package+" "+b.Test)
	})
	for _, s := range r.skipped {
		verdict := "skipped"
		if !slices.ContainsFunc(r.allowed, func(a allowance) bool { return a.covers(s.testName) }) {
			verdict, r.broken = "skipped and not allowed", true
		}
		fmt.Fprintf(r.out, "%s: %s %s: %s\n", verdict, s.Package, s.Test, s.reason)
	}
	if r.packages == 0 {
		fmt.Fprintln(r.out, "nothing was tested")
		return false
	}
	return !r.broken
}

// allowance names a test that may be skipped.
type allowance struct {
	pkg, test string // the end of the package's path; a test's name, in which * stands for anything
}

func (a allowance) covers(n testName) bool {
	if n.Package != a.pkg && !strings.HasSuffix(n.Package, "/"+a.pkg) {
		return false
	}
	head, tail, star := strings.Cut(a.test, "*")
	if !star {
		return n.Test == a.test
	}
	return len(n.Test) >= len(head)+len(tail) && strings.HasPrefix(n.Test, head) && strings.HasSuffix(n.Test, tail)
}

// parseAllowed reads lines of: package test reason. Empty lines and lines that
// begin with # do not count.
func parseAllowed(text string) (list []allowance, err error) {
	n := 0
	for line := range strings.Lines(text) {
		n++
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		if len(f) < 3 || strings.Count(f[1], "*") > 1 {
			return nil, fmt.Errorf("line %d is not: package test reason, with at most one * in test", n)
		}
		list = append(list, allowance{f[0], f[1]})
	}
	return list, nil
}
