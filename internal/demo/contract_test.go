package demo

import (
	"os"
	"testing"

	"go.yaml.in/yaml/v3"
)

func TestContract(t *testing.T) {
	t.Parallel()
	digests := map[string]string{}
	for _, name := range Tools() {
		digests[name] = "doc-1:sha256:" + name
	}
	const origin, url = "http://127.0.0.1:1234", `http://127.0.0.1:1234/mcp?a="b&c`
	var got struct {
		Server, Transport, Origin, Audience string
		Methods                             []string
		Tools                               []struct{ Name, Definition, Effect, Consent string }
	}
	if err := yaml.Unmarshal(Contract(origin, url, digests), &got); err != nil {
		t.Fatal(err)
	}
	if got.Server != ServerName || got.Origin != origin || got.Audience != url {
		t.Errorf("server %q, origin %q, audience %q", got.Server, got.Origin, got.Audience)
	}
	want := map[string][2]string{
		GetAvailability: {"read", "none"}, CreateDraftEvent: {"write", "call"}, FindDraft: {"read", "none"},
	}
	if len(got.Tools) != len(want) {
		t.Errorf("%d tools allowed, want %d", len(got.Tools), len(want))
	}
	for _, tool := range got.Tools {
		if w, ok := want[tool.Name]; !ok || w != [2]string{tool.Effect, tool.Consent} || tool.Definition != digests[tool.Name] {
			t.Errorf("tool %+v, want effect and consent %v", tool, w)
		}
	}
}

// TestContractMatchesExample keeps the published copy equal.
func TestContractMatchesExample(t *testing.T) {
	t.Parallel()
	example, err := os.ReadFile("../../examples/calendar.contract.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if string(example) != contractTemplate {
		t.Error("examples/calendar.contract.yaml differs from internal/demo/calendar.contract.yaml")
	}
}
