package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

const secretText = "nobody may read this"

// escapes are paths that mean, to somebody, a file outside of root. name is the
// last part of root.
func escapes(root, name string) map[string]string {
	up := strings.Repeat("../", 12)
	return map[string]string{
		"parent":                     root + "/../secret.txt",
		"parent twice":               root + "/../../secret.txt",
		"parent in the middle":       root + "/a/../../secret.txt",
		"parent back into the root":  root + "/../" + name + "/note.txt",
		"many parents":               root + "/" + up + "etc/passwd",
		"ends in parent":             root + "/..",
		"dot segment":                root + "/./note.txt",
		"three dots":                 root + "/.../secret.txt",
		"dots and a space":           root + "/.. /secret.txt",
		"dots and a semicolon":       root + "/..;/secret.txt",
		"absolute elsewhere":         "/etc/passwd",
		"the file system's root":     "/",
		"the parent itself":          filepath.Dir(root),
		"a sibling with the prefix":  root + "-evil/secret.txt",
		"a sibling with more text":   root + "x",
		"relative":                   "note.txt",
		"relative parent":            "../secret.txt",
		"empty":                      "",
		"home":                       "~/secret.txt",
		"file URI":                   "file://" + root + "/note.txt",
		"doubled separator":          root + "//note.txt",
		"doubled in front":           "/" + root + "/note.txt",
		"doubled then parent":        root + "//../secret.txt",
		"encoded dots":               root + "/%2e%2e/secret.txt",
		"encoded capital dots":       root + "/%2E%2E/secret.txt",
		"half encoded dots":          root + "/.%2e/secret.txt",
		"encoded separator":          root + "/..%2fsecret.txt",
		"encoded capital separator":  root + "/..%2Fsecret.txt",
		"encoded backslash":          root + "/..%5csecret.txt",
		"encoded twice":              root + "/%252e%252e/secret.txt",
		"overlong dot":               root + "/%c0%ae%c0%ae/secret.txt",
		"percent u":                  root + "/%u002e%u002e/secret.txt",
		"encoded NUL":                root + "/note.txt%00.png",
		"backslash parent":           root + `/..\secret.txt`,
		"backslash separators":       root + `\..\secret.txt`,
		"a drive":                    `C:\secret.txt`,
		"a share":                    `\\host\share\secret.txt`,
		"line feed":                  root + "/note.txt\n",
		"carriage return":            root + "/..\r/secret.txt",
		"escape":                     root + "/\x1b[2K/secret.txt",
		"fullwidth dots":             root + "/\uff0e\uff0e/secret.txt",
		"fullwidth slash":            root + "/..\uff0fsecret.txt",
		"fullwidth backslash":        root + "/..\uff3csecret.txt",
		"two dot leader":             root + "/\u2025/secret.txt",
		"one dot leaders":            root + "/\u2024\u2024/secret.txt",
		"ellipsis":                   root + "/\u2026/secret.txt",
		"division slash":             root + "/..\u2215secret.txt",
		"fraction slash":             root + "/..\u2044secret.txt",
		"big solidus":                root + "/..\u29f8secret.txt",
		"zero width space in dots":   root + "/.\u200b./secret.txt",
		"zero width joiner in dots":  root + "/.\u200d./secret.txt",
		"byte order mark in dots":    root + "/.\ufeff./secret.txt",
		"grapheme joiner in dots":    root + "/.\u034f./secret.txt",
		"variation selector in dots": root + "/.\ufe00./secret.txt",
		"right to left override":     root + "/\u202e..\u202c/secret.txt",
		"small full stops":           root + "/\ufe52\ufe52/secret.txt",
		"ends in a dot":              root + "/note.txt.",
		"ends in a space":            root + "/note.txt ",
		"too long":                   root + "/" + strings.Repeat("a", 4096),
	}
}

// TestFilesystemRule holds the rule `within` against every lexical way out, with
// the real file server. The server itself serves more than the contract allows:
// only the rule stands between.
func TestFilesystemRule(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		base := ownDir(t)
		root := filepath.Join(base, "data")
		must(t, os.MkdirAll(filepath.Join(root, "a", "b"), 0o755))
		must(t, os.MkdirAll(root+"-evil", 0o755))
		for _, dir := range []string{base, root + "-evil", filepath.Dir(base), theService.outside} {
			write(t, dir, "secret.txt", secretText)
		}
		write(t, root, "note.txt", "kept below the root")
		write(t, filepath.Join(root, "a", "b"), "grüße 1.txt", "deep below the root")

		s := w.stdioServer("files", "filesystem-wire")
		within := `within(args.path, "` + root + `")`
		w.review(s, nil, toolRule{name: "read_text_file", effect: "read", when: within},
			toolRule{name: "list_directory", effect: "read", when: within},
			toolRule{name: "write_file", effect: "write", consent: "none", when: within})
		ses := w.session(w.alice)

		for name, path := range escapes(root, "data") {
			for _, tool := range []string{"read_text_file", "write_file"} {
				args := obj{"path": path}
				if tool == "write_file" {
					args["content"] = "escaped"
				}
				call := w.propose(w.alice, ses, "files", tool, args)
				if call.GetState() != pb.Call_DENIED || call.GetDecision().GetFirstFailed() != "arguments" || detailOf(call) == "" {
					t.Errorf("%s: %s of %q is %s by %q", name, tool, path, call.GetState(), call.GetDecision().GetFirstFailed())
				}
				if call.GetResult() != nil || len(call.GetAttempts()) > 0 {
					t.Errorf("%s: %s has an attempt or a result", name, tool)
				}
			}
		}
		for _, path := range []string{root + "/note.txt\x00.png", root + "/\x00/../secret.txt", "\x00"} {
			// A NUL makes no call at all.
			_, err := w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: ses, Server: "files", Tool: "read_text_file", Arguments: raw(obj{"path": path})})
			wantField(t, err, "arguments.path")
		}
		for name, args := range map[string]any{
			"no path": obj{}, "a number": obj{"path": 1}, "a list": obj{"path": []string{root + "/note.txt"}}, "an object": obj{"path": obj{"": root}},
		} {
			if call := w.propose(w.alice, ses, "files", "read_text_file", args); call.GetState() != pb.Call_DENIED || call.GetDecision().GetFirstFailed() != "arguments" {
				t.Errorf("%s: %s", name, call.GetState())
			}
		}

		for path, has := range map[string]string{
			root + "/note.txt": "kept below the root", root + "/a/b/grüße 1.txt": "deep below the root",
		} {
			wantSucceeded(t, w.propose(w.alice, ses, "files", "read_text_file", obj{"path": path}), has)
		}
		for _, path := range []string{root, root + "/", root + "/a"} {
			wantState(t, w.propose(w.alice, ses, "files", "list_directory", obj{"path": path}), pb.Call_SUCCEEDED)
		}
		wantState(t, w.propose(w.alice, ses, "files", "write_file", obj{"path": root + "/a/new.txt", "content": "x"}), pb.Call_SUCCEEDED)
		wantWire(t, root)
	})
}

// wantWire wants that only paths of legitimate calls arrived at the file server.
func wantWire(t *testing.T, root string) {
	t.Helper()
	b, err := os.ReadFile(theService.wire)
	must(t, err)
	arrived := 0
	for line := range strings.Lines(string(b)) {
		if !strings.Contains(line, root) && !strings.Contains(line, "secret") && !strings.Contains(line, "passwd") {
			continue // of the other transport's test, or no call
		}
		if strings.Contains(line, root+"/note.txt") || strings.Contains(line, root+"/a/") || strings.Contains(line, root+`"`) ||
			strings.Contains(line, root+`/"`) || strings.Contains(line, root+`/a"`) {
			arrived++
		}
		if strings.Contains(line, "..") || strings.Contains(line, "secret") || strings.Contains(line, "passwd") || strings.Contains(line, "escaped") {
			t.Errorf("arrived at the server: %q", line)
		}
	}
	if arrived != 6 {
		t.Errorf("%d legitimate calls arrived, want 6", arrived)
	}
}
