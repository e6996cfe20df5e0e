package elicitation

import (
	"encoding/json"
	"errors"
	"math/big"
	"net/mail"
	"net/url"
	"slices"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// Fill holds an answer against the form and returns it in canonical form, with
// the form's defaults for what it leaves out. What is wrong names each field as
// content.<name> and the rule it breaks.
func (f *Form) Fill(content []byte) (json.RawMessage, error) {
	if len(content) > MaxContent {
		return nil, fault.Field1("content", "must have at most %d bytes", MaxContent)
	}
	canon, err := canonical.Args(content)
	var bad *canonical.Error
	if errors.As(err, &bad) {
		return nil, fault.Field1(canonical.At("content", bad.Path), "%s", bad.Rule)
	}
	given, ok := objectOf(canon)
	if err != nil || !ok {
		return nil, fault.Field1("content", "must be an object")
	}
	var wrong []fault.Field
	for i := range f.fields {
		x := &f.fields[i]
		value := given[x.name]
		rule := ""
		switch {
		case value != nil:
			rule = x.check(value)
		case x.byDefault != nil:
			given[x.name] = x.byDefault
		case x.required:
			rule = "is required"
		}
		if rule != "" {
			wrong = append(wrong, fault.Field{Path: canonical.Member("content", x.name), Rule: rule})
		}
	}
	for name := range given {
		if !slices.ContainsFunc(f.fields, func(x field) bool { return x.name == name }) {
			wrong = append(wrong, fault.Field{Path: canonical.Member("content", name), Rule: "is not asked for"})
		}
	}
	if len(wrong) > 0 {
		slices.SortFunc(wrong, func(a, b fault.Field) int {
			if a.Path < b.Path {
				return -1
			}
			return 1
		})
		return nil, fault.InvalidFields(wrong[:min(len(wrong), maxFields)]...)
	}
	return assemble(given)
}

func assemble(m members) (json.RawMessage, error) {
	out := []byte{'{'}
	for name, value := range m {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(canonical.AppendString(out, name), ':'), value...)
	}
	canon, err := canonical.Args(append(out, '}'))
	return canon, fault.Wrap(err, "canonical content")
}

// check returns the rule that a value breaks, or "".
func (f *field) check(value json.RawMessage) string {
	switch f.kind {
	case typeBoolean:
		if !isBoolean(value) {
			return "must be true or false"
		}
	case typeNumber, typeInteger:
		return f.checkNumber(value)
	case typeString:
		s, ok := textOf(value)
		if !ok {
			return "must be a string"
		}
		return f.checkText(s)
	case typeArray:
		return f.checkSeveral(value)
	}
	return ""
}

func (f *field) checkNumber(value json.RawMessage) string {
	n, ok := numberOf(value)
	switch {
	case !ok:
		return "must be a number"
	case f.kind == typeInteger && !n.IsInt():
		return "must be an integer"
	case f.least != nil && n.Cmp(f.least) < 0:
		return "must be at least " + decimal(f.least)
	case f.most != nil && n.Cmp(f.most) > 0:
		return "must be at most " + decimal(f.most)
	}
	return ""
}

func (f *field) checkText(s string) string {
	n := length(s)
	switch {
	case f.closed && !slices.Contains(f.choices, s):
		return "must be one of the form's choices"
	case f.shortest != nil && n.Cmp(f.shortest) < 0:
		return "must have at least " + decimal(f.shortest) + " characters"
	case f.longest != nil && n.Cmp(f.longest) > 0:
		return "must have at most " + decimal(f.longest) + " characters"
	case f.pattern != nil && !f.pattern.MatchString(s):
		return "must match the form's pattern"
	}
	return f.checkFormat(s)
}

// checkFormat knows the formats of the protocol; others say nothing.
func (f *field) checkFormat(s string) string {
	switch f.format {
	case "email":
		if a, err := mail.ParseAddress(s); err != nil || a.Address != s {
			return "must be an email address"
		}
	case "uri":
		if u, err := url.Parse(s); err != nil || u.Scheme == "" {
			return "must be a URI with its scheme"
		}
	case "date":
		if _, err := time.Parse(time.DateOnly, s); err != nil {
			return "must be a date such as 2026-11-25"
		}
	case "date-time":
		if _, err := time.Parse(time.RFC3339, s); err != nil {
			return "must be a time such as 2026-11-25T08:00:00Z"
		}
	}
	return ""
}

func (f *field) checkSeveral(value json.RawMessage) string {
	chosen, ok := textsOf(value)
	if !ok {
		return "must be a list of strings"
	}
	n := new(big.Rat).SetInt64(int64(len(chosen)))
	switch {
	case f.fewest != nil && n.Cmp(f.fewest) < 0:
		return "must have at least " + decimal(f.fewest) + " choices"
	case f.manyest != nil && n.Cmp(f.manyest) > 0:
		return "must have at most " + decimal(f.manyest) + " choices"
	case len(chosen) > len(f.choices):
		return "must name each choice once"
	}
	seen := map[string]bool{}
	for _, c := range chosen {
		if !slices.Contains(f.choices, c) {
			return "must hold only the form's choices"
		}
		if seen[c] {
			return "must name each choice once"
		}
		seen[c] = true
	}
	return ""
}

// decimal shows a bound; one that is no short decimal is cut.
func decimal(r *big.Rat) string {
	if r.IsInt() {
		if s := r.Num().String(); len(s) <= 40 {
			return s
		}
	}
	f, _ := r.Float64()
	return big.NewFloat(f).Text('g', 15)
}
