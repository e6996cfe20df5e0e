package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const nobody = 65534

// walkHeadings are the README's sections that are one walk-through.
var walkHeadings = []string{"A call that needs consent, by curl\n", "A server of your own, by curl\n"}

// shellBlocks returns the blocks of shell in a text.
func shellBlocks(text string) (out []string) {
	for _, m := range regexp.MustCompile("(?s)\n```sh\n(.*?)```\n").FindAllStringSubmatch(text, -1) {
		out = append(out, m[1])
	}
	return out
}

// readme returns the README's lines of shell: those of the two commands and
// those of the walk-through.
func readme(t *testing.T) (commands, walk []string) {
	t.Helper()
	b, err := os.ReadFile("../../README.md")
	must(t, err)
	if n := bytes.Count(b, []byte("\n")); n >= 200 {
		t.Errorf("the README has %d lines", n)
	}
	into := &commands
	for section := range strings.SplitSeq(string(b), "\n## ") {
		into = &commands
		for _, heading := range walkHeadings {
			if strings.HasPrefix(section, heading) {
				into = &walk
			}
		}
		*into = append(*into, shellBlocks(section)...)
	}
	return commands, walk
}

// TestREADME runs the very lines of the walk-through against the server in
// development mode, as this account and, for root, as an ordinary one; stops it
// as Ctrl-C does, and finds everything again.
func TestREADME(t *testing.T) {
	t.Parallel()
	commands, walk := readme(t)
	if len(commands) != 2 || commands[0] != "go run ./cmd/server\n" || commands[1] != "make test\n" {
		t.Errorf("the two commands are %q", commands)
	}
	if len(walk) < 8 {
		t.Fatalf("the walk-through has %d blocks", len(walk))
	}
	script := strings.Join(walk, "")
	t.Run("this account", func(t *testing.T) {
		t.Parallel()
		dir := readableDir(t, os.Geteuid())
		development{t: t, data: filepath.Join(dir, "data"), env: []string{"HOME=" + dir, "BULKHEAD_DATA_DIR=" + filepath.Join(dir, "data")}}.walk(script)
	})
	t.Run("an ordinary account", func(t *testing.T) {
		t.Parallel()
		uid := os.Geteuid()
		if uid == 0 {
			uid = nobody
		}
		home := readableDir(t, uid) // and no setting: the default place is tested
		development{t: t, uid: uid, data: filepath.Join(home, ".cache", "bulkhead"), env: []string{"HOME=" + home}}.walk(script)
	})
}

// readableDir makes a directory that belongs to the account, directly in /tmp:
// a private PostgreSQL must reach it, and a socket's path is short.
func readableDir(t *testing.T, uid int) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "bhreadme-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	if uid != os.Geteuid() {
		must(t, os.Chown(dir, uid, uid))
	}
	return dir
}

// development is the server in development mode with a data directory.
type development struct {
	t    *testing.T
	uid  int // other than this account's; 0 for this one
	data string
	env  []string
}

func (d development) walk(script string) {
	d.t.Helper()
	stop := d.start()
	if d.t.Failed() {
		return
	}
	out := d.shell(script)
	for _, want := range []string{
		`"modelName":"calendar__get_availability"`, `"modelName":"calendar__create_draft_event"`,
		`"name":"get_availability","effect":"READ"`, `"free":[{"start":"2026-12-07T08:00:00Z"`,
		`"state":"CONSENT_REQUIRED"`, `"firstFailed":"consent"`, `"state":"PENDING"`, `"state":"APPROVED"`,
		`"state":"SUCCEEDED"`, `"structuredContent":{"id":"ev_1"`, `"sideEffectId":"ev_1"`, `"untrusted":true`,
		`"kind":"consent.decided"`, `"kind":"call.dispatched"`, `"ok":true`, "event: consent.requested\n", `{"ticket":"bht_`,
		`"name":"office"`, `"reachable":true`, `"state":"ACTIVE"`, `"modelName":"office__get_availability"`,
	} {
		if !strings.Contains(out, want) {
			d.t.Errorf("the walk-through does not show %s", want)
		}
	}
	tools := regexp.MustCompile(`(?m)^\{"revision":"\w+","tools":.*$`).FindAllString(out, -1)
	if len(tools) != 2 || strings.Contains(strings.Join(tools, ""), "send_invitations") ||
		strings.Contains(tools[1], "create_draft_event") {
		d.t.Error("the walk-through shows a tool that the contract leaves out")
	}
	if n := succeeded(out); n != 2 {
		d.t.Errorf("%d calls succeed, want 2", n)
	}
	if d.t.Failed() {
		d.t.Logf("it shows:\n%s", out)
	}
	told := d.follow(regexp.MustCompile(`"sessionId":"(ses_\w+)"`).FindStringSubmatch(out))
	stop()
	if got := told(); !strings.Contains(got, "event: bye\n") || !strings.Contains(got, `"reason":"SHUTTING_DOWN"`) {
		d.t.Errorf("a stream of events ends with the server's stop by:\n%s", got)
	}

	call := regexp.MustCompile(`"callId":"(call_\w+)"[^\n]*"state":"CONSENT_REQUIRED"`).FindStringSubmatch(out)
	stop = d.start()
	if call == nil || d.t.Failed() {
		d.t.Fatal("nothing to find again")
	}
	if got := d.get("service", "/v1/calls/"+call[1]); !strings.Contains(got, `"state":"SUCCEEDED"`) || !strings.Contains(got, `"ev_1"`) {
		d.t.Errorf("the call after the restart: %s", got)
	}
	// It works again, with the server's memory gone and the registration kept.
	if out := d.shell(script); succeeded(out) != 2 || !strings.Contains(out, `"ok":true`) {
		d.t.Errorf("the walk-through after the restart shows:\n%s", out)
	}
	d.keepCheckpoint()
	stop()
}

// follow opens a stream of a session's events; what it returns waits for its end.
func (d development) follow(session []string) (told func() string) {
	d.t.Helper()
	if session == nil {
		d.t.Fatal("no session to follow")
	}
	b, err := os.ReadFile(filepath.Join(d.data, "demo.json"))
	must(d.t, err)
	var file map[string]string
	must(d.t, json.Unmarshal(b, &file))
	req, err := http.NewRequest("GET", file["url"]+"/v1/sessions/"+session[1]+"/events", nil)
	must(d.t, err)
	req.Header.Set("Authorization", "Bearer "+file["serviceKey"])
	req.Header.Set("Bulkhead-User", "alice")
	res, err := http.DefaultClient.Do(req)
	must(d.t, err)
	got := make(chan string, 1)
	go func() {
		defer res.Body.Close()
		all, err := io.ReadAll(res.Body)
		if err != nil {
			all = append(all, err.Error()...)
		}
		got <- string(all)
	}()
	return func() string { return <-got }
}

// keepCheckpoint runs the very lines of docs/audit.md. The stop has signed a
// checkpoint, so that there is one to keep.
func (d development) keepCheckpoint() {
	d.t.Helper()
	page, err := os.ReadFile("../../docs/audit.md")
	must(d.t, err)
	blocks := shellBlocks(string(page))
	named := regexp.MustCompile(`checkpoint-\d{4}-\d\d-\d\d\.json`)
	if len(blocks) != 2 || !named.MatchString(blocks[1]) {
		d.t.Fatalf("docs/audit.md has the blocks %q", blocks)
	}
	b, err := os.ReadFile(filepath.Join(d.data, "demo.json"))
	must(d.t, err)
	var file map[string]string
	must(d.t, json.Unmarshal(b, &file))
	as := func(key string) string {
		return "cd " + readableDir(d.t, max(d.uid, os.Geteuid())) + "\nBULKHEAD_URL=" + file["url"] + " AUDITOR_KEY=" + key + "\n"
	}
	good := as(file["auditorKey"])
	out := d.shell(good + blocks[0] + "cat checkpoint-*.json; mv checkpoint-*.json " + named.FindString(blocks[1]) + "\n" + blocks[1])
	if !regexp.MustCompile(`(?s)^\{"checkpoint":\{[^}]*"signature":"[^"]+"[^}]*\}\}\n.*"ok":true`).MatchString(out) {
		d.t.Errorf("keeping a checkpoint shows:\n%s", out)
	}
	// What cannot be asked fails, and leaves nothing that looks like a checkpoint.
	out = d.shell(as(file["serviceKey"]) + "if " + strings.TrimSpace(blocks[0]) + "; then echo kept; fi; ls | wc -l\n")
	if strings.Contains(out, "kept") || !strings.HasSuffix(strings.TrimSpace(out), "0") {
		d.t.Errorf("with a key that may not verify:\n%s", out)
	}
}

// succeeded counts the calls that are shown with a result.
func succeeded(out string) (n int) {
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, `{"callId":`) && strings.Contains(line, `"state":"SUCCEEDED"`) {
			n++
		}
	}
	return n
}

// start starts the server as a person at a terminal does, in a session of its
// own; stop ends it with Ctrl-C.
func (d development) start() (stop func()) {
	d.t.Helper()
	cmd := exec.Command(theService.Binary)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "BULKHEAD_LISTEN=127.0.0.1:0", "BULKHEAD_METRICS_LISTEN=127.0.0.1:0"}, d.env...)
	cmd.SysProcAttr = d.account()
	cmd.SysProcAttr.Setsid = true
	cmd.Dir = "/"
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	must(d.t, err)
	must(d.t, cmd.Start())
	exited := make(chan error, 1)
	serving := make(chan string, 1)
	go func() {
		r := bufio.NewReader(stdout)
		for {
			line, err := r.ReadString('\n')
			if strings.HasPrefix(line, "Bulkhead is serving at ") {
				serving <- line
			}
			if err != nil {
				break
			}
		}
		_, _ = io.Copy(io.Discard, r)
		exited <- cmd.Wait()
	}()
	ended := false
	end := func() error {
		if ended {
			return nil
		}
		ended = true
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGINT)
		select {
		case err := <-exited:
			return err
		case <-time.After(patience):
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-exited
			return fmt.Errorf("it does not stop")
		}
	}
	d.t.Cleanup(func() { _ = end() }) // for a test that failed
	select {
	case <-serving:
	case err := <-exited:
		ended = true
		d.t.Errorf("the server ended: %v\n%s", err, stderr.String())
	case <-time.After(patience):
		d.t.Errorf("the server does not serve:\n%s", stderr.String())
	}
	return func() {
		d.t.Helper()
		if err := end(); err != nil {
			d.t.Errorf("Ctrl-C: %v\n%s", err, stderr.String())
		}
		if left := processes(cmd.Process.Pid, d.data); len(left) > 0 {
			d.t.Errorf("left running: %q", left)
		}
	}
}

func (d development) account() *syscall.SysProcAttr {
	if d.uid == 0 || d.uid == os.Geteuid() {
		return &syscall.SysProcAttr{}
	}
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(d.uid), Gid: uint32(d.uid)}}
}

// shell runs lines as a person would, and returns what they print.
func (d development) shell(script string) string {
	d.t.Helper()
	cmd := exec.CommandContext(d.t.Context(), "bash", "-eu", "-c", script)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, d.env...)
	cmd.SysProcAttr = d.account()
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	if err != nil {
		d.t.Errorf("the walk-through: %v", err)
	}
	return string(out)
}

func (d development) get(role, path string) string {
	d.t.Helper()
	b, err := os.ReadFile(filepath.Join(d.data, "demo.json"))
	must(d.t, err)
	var file map[string]string
	must(d.t, json.Unmarshal(b, &file))
	rt := &http.Transport{}
	defer rt.CloseIdleConnections()
	_, _, answer, err := send(d.t.Context(), &http.Client{Transport: rt}, "GET", file["url"]+path, nil,
		map[string]string{"Authorization": "Bearer " + file[role+"Key"], "Bulkhead-User": "alice"})
	must(d.t, err)
	return string(answer)
}

// processes are those of a session, and those that work in a directory.
func processes(session int, dir string) (found []string) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, stat := range stats {
		b, err := os.ReadFile(stat)
		if err != nil {
			continue // gone meanwhile
		}
		// pid (comm) state ppid pgrp session
		fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		cwd, _ := os.Readlink(filepath.Join(filepath.Dir(stat), "cwd"))
		line, _ := os.ReadFile(filepath.Join(filepath.Dir(stat), "cmdline"))
		if fields[3] == strconv.Itoa(session) || strings.HasPrefix(cwd, dir) || bytes.Contains(line, []byte(dir)) {
			found = append(found, string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
	return found
}
