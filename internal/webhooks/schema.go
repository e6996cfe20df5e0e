package webhooks

import (
	"embed"
	"strings"
)

//go:embed schemas/*.json
var schemas embed.FS

// Schema returns the JSON Schema of the payload of a type of event by its file
// name, <type>.json. They are public.
func Schema(file string) ([]byte, bool) {
	if strings.ContainsAny(file, `/\`) {
		return nil, false
	}
	raw, err := schemas.ReadFile("schemas/" + file)
	return raw, err == nil
}
