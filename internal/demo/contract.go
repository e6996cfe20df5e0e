package demo

import (
	_ "embed"
	"encoding/json"
	"os"
	"strings"
)

//go:embed calendar.contract.yaml
var contractTemplate string

// Contract renders the reviewed contract of the demo calendar as YAML: reads
// and drafts are allowed, invitations are not. The digests, by tool name, are
// what the tools are pinned to; a missing one leaves an empty pin, which no
// contract parser takes. examples/calendar.contract.yaml is the same text.
func Contract(origin, url string, digests map[string]string) []byte {
	return []byte(os.Expand(contractTemplate, func(name string) string {
		switch name {
		case "ORIGIN":
			return quoted(origin)
		case "URL":
			return quoted(url)
		default:
			return quoted(digests[strings.ToLower(name)])
		}
	}))
}

// quoted returns s as the inside of a double-quoted YAML scalar, of which JSON's
// string syntax is a subset.
func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		return "" // a string always marshals
	}
	return string(b[1 : len(b)-1])
}
