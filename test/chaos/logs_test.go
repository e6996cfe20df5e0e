package chaos

import (
	"encoding/json"
	"strings"
	"testing"
)

// checkLog fails for lines that are no JSON object with time, level and msg, and
// for every secret that occurs in them.
func checkLog(t testing.TB, log string, secrets map[string]string) {
	t.Helper()
	bad := 0
	for line := range strings.Lines(log) {
		if strings.TrimSpace(line) == "" {
			continue
		}
		var l struct{ Time, Level, Msg string }
		if err := json.Unmarshal([]byte(line), &l); (err != nil || l.Time == "" || l.Level == "" || l.Msg == "") && bad < 20 {
			bad++
			t.Errorf("a line of the log is no entry: %s", line)
		}
	}
	for what, secret := range secrets {
		if i := strings.Index(log, secret); i >= 0 {
			t.Errorf("the log holds the %s: %q", what, log[max(0, i-200):min(len(log), i+20)])
		}
	}
}
