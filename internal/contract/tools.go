package contract

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
)

func (r *reader) tools(c *Contract, top object) {
	c.tools = map[string]*Tool{}
	v, path, ok := top.get("tools")
	if !ok {
		return
	}
	l, ok := r.list(path, v, 0, maxTools)
	if !ok {
		return
	}
	var at []string // the place of each tool in c.Tools
	for i, v := range l {
		t, ok := r.tool(c, element(path, i), v)
		if !ok {
			continue
		}
		if _, twice := c.tools[t.Name]; twice {
			r.fail(element(path, i)+".name", "stands in the list twice")
			continue
		}
		c.tools[t.Name] = t
		c.Tools = append(c.Tools, t)
		at = append(at, element(path, i))
	}
	for i, t := range c.Tools {
		r.queryTool(c, t, at[i])
	}
}

// queryTool checks what a status query asks once all tools are known.
func (r *reader) queryTool(c *Contract, t *Tool, at string) {
	if t.StatusQuery == nil || t.StatusQuery.Tool == "" {
		return
	}
	path := at + ".status_query.tool"
	q, ok := c.tools[t.StatusQuery.Tool]
	switch {
	case !ok:
		r.fail(path, "must be a tool of this contract")
	case q.Effect != EffectRead:
		r.fail(path, "must be a tool whose effect is read")
	}
}

// tool reads one tool. It is false only when there is not even a name, so that
// other tools can refer to one that has other violations.
func (r *reader) tool(c *Contract, path string, v any) (*Tool, bool) {
	o, ok := r.object(path, v, "name", "definition", "effect", "consent", "subjects", "when", "timeout",
		"retry", "idempotency", "status_query")
	if !ok {
		return nil, false
	}
	t := &Tool{Terms: Terms{Timeout: c.Limits.Timeout}}
	named := false
	if v, path, ok := o.need("name"); ok {
		if s, ok := v.(string); ok && strings.ContainsRune(s, ' ') {
			r.fail(path, "must have no space")
		} else {
			t.Name, named = r.printable(path, v, maxToolName)
		}
	}
	if v, path, ok := o.need("definition"); ok {
		t.Definition = r.definition(path, v)
	}
	if v, path, ok := o.need("effect"); ok {
		w, _ := r.word(path, v, "read", "write", "destructive")
		t.Effect = Effect(w)
	}
	r.consent(&t.Terms, o)
	r.subjects(&t.Terms, o)
	o.duration("timeout", &t.Timeout, minDuration, maxTimeout)
	if _, path, given := o.get("timeout"); given && t.Timeout > c.Limits.Ceiling {
		r.fail(path, "must not exceed limits.ceiling (%s)", short(c.Limits.Ceiling))
	}
	if v, path, ok := o.get("idempotency"); ok {
		r.idempotency(t, path, v)
	}
	r.retry(t, o)
	if v, path, ok := o.get("when"); ok {
		if src, ok := r.expression(path, v); ok {
			t.When = src
			t.when = r.compile(path, src, ruleWhen, t)
		}
	}
	if v, path, ok := o.get("status_query"); ok {
		r.statusQuery(c, t, path, v)
	}
	return t, named
}

func (r *reader) definition(path string, v any) string {
	s, _ := v.(string)
	if s != DefinitionAny && !definitionForm.MatchString(s) {
		r.fail(path, "must be %s and 64 lower-case hexadecimal digits, or \"any\" to accept every definition", definitionPrefix)
	}
	return s
}

func (r *reader) consent(t *Terms, o object) {
	t.Consent = ConsentCall
	if t.Effect == EffectRead {
		t.Consent = ConsentNone
	}
	v, path, ok := o.get("consent")
	if !ok {
		return
	}
	w, ok := r.word(path, v, "none", "session", "call")
	if !ok {
		return
	}
	t.Consent = Consent(w)
	if t.Effect == EffectDestructive && t.Consent != ConsentCall {
		r.fail(path, "must be call for a destructive tool")
	}
}

func (r *reader) subjects(t *Terms, top object) {
	v, path, ok := top.get("subjects")
	if !ok {
		return
	}
	o, ok := r.object(path, v, "groups", "users", "projects")
	if !ok {
		return
	}
	if len(o.members) == 0 {
		r.fail(path, "must name groups, users or projects")
	}
	word := func(path string, v any) (string, bool) { return r.printable(path, v, maxWord) }
	if v, path, ok := o.get("groups"); ok {
		t.Subjects.Groups = r.texts(path, v, 1, maxSubjects, word)
	}
	if v, path, ok := o.get("users"); ok {
		t.Subjects.Users = r.texts(path, v, 1, maxSubjects, func(path string, v any) (string, bool) {
			// The same value from two sources is two people.
			s, ok := r.printable(path, v, 2*maxWord)
			source, value, _ := strings.Cut(s, "|")
			if ok && (source == "" || value == "") {
				r.fail(path, "must be a source and a value, joined by |")
				return "", false
			}
			return s, ok
		})
	}
	if v, path, ok := o.get("projects"); ok {
		t.Subjects.Projects = r.texts(path, v, 1, maxSubjects, word)
	}
}

func (r *reader) retry(t *Tool, top object) {
	v, path, ok := top.get("retry")
	if !ok {
		return
	}
	o, ok := r.object(path, v, "max")
	if !ok {
		return
	}
	if v, path, ok := o.need("max"); ok {
		t.Retry.Max, _ = r.integer(path, v, 0, maxRetries)
	}
	if t.Retry.Max > 0 && t.Effect != EffectRead && !t.Idempotency.Offered() {
		r.fail(path, "is only for effect read or a tool with idempotency")
	}
}

func (r *reader) idempotency(t *Tool, path string, v any) {
	o, ok := r.object(path, v, "argument", "meta")
	if !ok {
		return
	}
	argument, at, hasArgument := o.get("argument")
	meta, metaAt, hasMeta := o.get("meta")
	if hasArgument == hasMeta {
		r.fail(path, "must have exactly one of argument and meta")
		return
	}
	if hasArgument {
		t.Idempotency.Argument, _ = r.printable(at, argument, maxWord)
		return
	}
	on, ok := r.boolean(metaAt, meta)
	if ok && !on {
		r.fail(metaAt, "must be true; leave idempotency out when the server honours no key")
	}
	t.Idempotency.Meta = on
}

func (r *reader) statusQuery(c *Contract, t *Tool, path string, v any) {
	o, ok := r.object(path, v, "tool", "arguments", "succeeded", "absent", "settle", "side_effect_id")
	if !ok {
		return
	}
	if t.Effect == EffectRead {
		r.fail(path, "is only for a tool that writes")
	}
	q := &StatusQuery{Absent: AbsentUncertain, Settle: defaultSettle, argumentBytes: c.Limits.RequestBytes}
	t.StatusQuery = q
	if v, path, ok := o.need("tool"); ok {
		q.Tool, _ = r.printable(path, v, maxToolName)
	}
	if v, path, ok := o.get("arguments"); ok {
		r.queryArguments(t, q, path, v)
	}
	if v, path, ok := o.need("succeeded"); ok {
		if src, ok := r.expression(path, v); ok {
			q.succeeded = r.compile(path, src, ruleSucceeded, t)
		}
	}
	if v, path, ok := o.get("absent"); ok {
		w, ok := r.word(path, v, "uncertain", "final")
		if ok {
			q.Absent = Absent(w)
		}
	}
	o.duration("settle", &q.Settle, 0*time.Second, maxSettle)
	if v, path, ok := o.get("side_effect_id"); ok {
		if src, ok := r.expression(path, v); ok {
			q.sideEffectID = r.compile(path, src, ruleSideEffect, t)
		}
	}
}

func (r *reader) queryArguments(t *Tool, q *StatusQuery, path string, v any) {
	m, ok := v.(map[string]any)
	if !ok {
		r.fail(path, "must be an object, not %s", typeName(v))
		return
	}
	if len(m) > maxQueryArgs {
		r.fail(path, "must have at most %d members", maxQueryArgs)
		return
	}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		at := canonical.Member(path, name)
		if src, ok := r.expression(at, m[name]); ok {
			q.arguments = append(q.arguments, queryArgument{name: name, rule: r.compile(at, src, ruleArgument, t)})
		}
	}
}

// expression reads the source of a rule.
func (r *reader) expression(path string, v any) (string, bool) {
	s, ok := v.(string)
	switch {
	case !ok:
		r.fail(path, "must be a CEL expression as a string, not %s", typeName(v))
	case strings.TrimSpace(s) == "":
		r.fail(path, "must not be empty")
	case len(s) > maxExpression:
		r.fail(path, "must have at most %d bytes", maxExpression)
	default:
		return s, true
	}
	return "", false
}
