package catalog

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"github.com/bulkhead-mcp/bulkhead/internal/canonical"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// The bounds of one check against a schema. Past them the value is left to the
// server.
const (
	// maxCheckProduct bounds parts of the schema × parts of the value.
	maxCheckProduct = 8_000_000
	// maxCheckSteps bounds the work that references and combinators multiply.
	maxCheckSteps = 8_000_000
	// maxCheckTime bounds the time; the clock is read at every subschema.
	maxCheckTime = 100 * time.Millisecond
	// maxCheckFields bounds the broken rules that an answer names.
	maxCheckFields = 10
)

// compiling lets one schema be compiled at a time: a server with costly schemas
// must not take all processors from other tenants.
var compiling = make(chan struct{}, 1)

// checker checks values against one schema. It compiles at the first use, once.
type checker struct {
	raw []byte

	once   sync.Once
	schema *jsonschema.Schema
	nodes  int
	skip   string // why nothing is checked

	// mu lets one value be checked at a time, because run belongs to it. The
	// bounds above keep the wait short; checkers are not shared by tenants.
	mu  sync.Mutex
	run checkRun
}

// newChecker returns a checker for a schema, nil when there is none.
func newChecker(raw []byte) *checker {
	if len(raw) == 0 {
		return nil
	}
	return &checker{raw: raw}
}

// checkRun is what one check has spent.
type checkRun struct {
	steps int
	end   time.Time
}

type overspent struct{}

func (r *checkRun) spend(n int) {
	r.steps += n
	if r.steps > maxCheckSteps || time.Now().After(r.end) {
		panic(overspent{})
	}
}

const schemaURL = "urn:bulkhead:definition"

func (c *checker) compile() {
	shape := readSchema(c.raw)
	if shape.skip != "" {
		c.skip = shape.skip
		return
	}
	compiling <- struct{}{}
	defer func() { <-compiling }()
	c.nodes = weigh(shape.doc)
	k := jsonschema.NewCompiler()
	k.DefaultDraft(jsonschema.Draft2020)
	k.UseLoader(noLoader{})
	k.UseRegexpEngine(c.regexp)
	k.AssertVocabs()
	k.RegisterVocabulary(&jsonschema.Vocabulary{URL: "urn:bulkhead:meter", Compile: c.meter})
	if err := k.AddResource(schemaURL, shape.doc); err != nil {
		c.skip = "the schema cannot be compiled"
		return
	}
	schema, err := k.Compile(schemaURL)
	if err != nil {
		c.skip = "the schema is not valid in its dialect or refers to what is not there"
		return
	}
	c.schema = schema
}

// noLoader refuses to load anything: a schema that could make the host fetch
// would be a request forged by a server.
type noLoader struct{}

var errNoLoad = errors.New("catalog: references are not fetched")

// Load implements jsonschema.URLLoader.
func (noLoader) Load(string) (any, error) { return nil, errNoLoad }

// meteredPattern charges each match to the running check.
type meteredPattern struct {
	*pattern
	c *checker
}

// MatchString implements jsonschema.Regexp.
func (m *meteredPattern) MatchString(s string) bool {
	m.c.run.spend(1 + len(s)*m.states/64)
	return m.pattern.MatchString(s)
}

func (c *checker) regexp(text string) (jsonschema.Regexp, error) {
	p, err := compilePattern(text)
	if err != nil {
		return nil, err
	}
	return &meteredPattern{pattern: p, c: c}, nil
}

// meter counts the work of one subschema. The library calls it after the
// subschema's own keywords; what those can cost is bounded by maxCheckProduct.
type meter struct {
	c      *checker
	weight int
}

func (c *checker) meter(_ *jsonschema.CompilerContext, obj map[string]any) (jsonschema.SchemaExt, error) {
	return &meter{c: c, weight: 1 + len(obj)}, nil
}

// Validate implements jsonschema.SchemaExt.
func (m *meter) Validate(_ *jsonschema.ValidatorContext, v any) {
	n := m.weight
	switch v := v.(type) {
	case map[string]any:
		n += len(v)
	case []any:
		n += len(v)
	}
	m.c.run.spend(n)
}

// weigh counts the parts of a value. Numbers count four times because comparing
// them is exact arithmetic.
func weigh(v any) int {
	n := 1
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			n += weigh(e)
		}
	case map[string]any:
		for _, e := range v {
			n += 1 + weigh(e)
		}
	case json.Number:
		n = 4
	}
	return n
}

// check returns the broken rules as an Invalid fault with paths below root. A
// non-empty skipped says why the value was not checked, or not fully.
func (c *checker) check(root string, v any) (skipped string, err error) {
	c.once.Do(c.compile)
	if c.skip != "" {
		return c.skip, nil
	}
	exact, parts, _ := exactNumbers(v)
	if parts*c.nodes > maxCheckProduct {
		return "schema and value together are too large", nil
	}
	verr, done := c.validate(exact)
	if !done {
		return "the check took too long", nil
	}
	if verr == nil {
		return "", nil
	}
	var fields []fault.Field
	collectFields(root, verr, &fields)
	return "", fault.InvalidFields(fields...)
}

func (c *checker) validate(v any) (verr *jsonschema.ValidationError, done bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.run = checkRun{end: time.Now().Add(maxCheckTime)}
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(overspent); !ok {
				panic(r)
			}
			verr, done = nil, false
		}
	}()
	if err := c.schema.Validate(v); err != nil {
		if !errors.As(err, &verr) {
			return nil, false
		}
	}
	return verr, true
}

// exactNumbers returns v with numbers that no Go number holds as decimal text,
// which the library compares exactly, the number of its parts, and whether it
// is another value than v. It copies only what it changes.
func exactNumbers(v any) (exact any, parts int, changed bool) {
	switch v := v.(type) {
	case canonical.Inexact:
		return json.Number(v), 1, true
	case []any:
		out := v
		for i, e := range v {
			x, n, other := exactNumbers(e)
			parts += n
			if !other {
				continue
			}
			if !changed {
				out, changed = slices.Clone(v), true
			}
			out[i] = x
		}
		return out, parts + 1, changed
	case map[string]any:
		out := v
		for name, e := range v {
			x, n, other := exactNumbers(e)
			parts += 1 + n
			if !other {
				continue
			}
			if !changed {
				out, changed = maps.Clone(v), true
			}
			out[name] = x
		}
		return out, parts + 1, changed
	}
	return v, 1, false
}

// collectFields turns the library's tree into fields. The rules hold words of
// the schema's vocabulary and numbers of the schema, never a value: those may
// be secret.
func collectFields(root string, e *jsonschema.ValidationError, out *[]fault.Field) {
	if len(*out) >= maxCheckFields {
		return
	}
	path := instancePath(root, e.InstanceLocation)
	add := func(path, rule string) {
		if len(*out) < maxCheckFields {
			*out = append(*out, fault.Field{Path: path, Rule: rule})
		}
	}
	switch k := e.ErrorKind.(type) {
	case *kind.Required:
		for _, name := range k.Missing {
			add(memberPath(path, name), "is required")
		}
	case *kind.AdditionalProperties:
		for _, name := range k.Properties {
			add(memberPath(path, name), "is not a known member")
		}
	case *kind.PropertyNames:
		add(memberPath(path, k.Property), "is not an allowed name")
	case *kind.AnyOf, *kind.OneOf, *kind.Not, *kind.Contains, *kind.MinContains:
		add(path, ruleText(k))
	default:
		if len(e.Causes) == 0 {
			add(path, ruleText(k))
		}
		for _, cause := range e.Causes {
			collectFields(root, cause, out)
		}
	}
}

func instancePath(root string, tokens []string) string {
	path := root
	for _, t := range tokens {
		if _, err := strconv.Atoi(t); err == nil && len(t) < 10 {
			path += "[" + t + "]"
			continue
		}
		path = memberPath(path, t)
	}
	return path
}

func ruleText(k jsonschema.ErrorKind) string {
	switch k := k.(type) {
	case *kind.Type:
		return "must be " + strings.Join(k.Want, " or ") + ", not " + k.Got
	case *kind.Enum:
		return "must be one of the listed values"
	case *kind.Const:
		return "must be the one allowed value"
	case *kind.Pattern:
		return "must match the schema's pattern"
	case *kind.MinLength:
		return fmt.Sprintf("must have at least %d characters", k.Want)
	case *kind.MaxLength:
		return fmt.Sprintf("must have at most %d characters", k.Want)
	case *kind.MinItems:
		return fmt.Sprintf("must have at least %d items", k.Want)
	case *kind.MaxItems:
		return fmt.Sprintf("must have at most %d items", k.Want)
	case *kind.MinProperties:
		return fmt.Sprintf("must have at least %d members", k.Want)
	case *kind.MaxProperties:
		return fmt.Sprintf("must have at most %d members", k.Want)
	case *kind.UniqueItems:
		return "must not hold an item twice"
	case *kind.Minimum:
		return "must be at least " + decimal(k.Want)
	case *kind.Maximum:
		return "must be at most " + decimal(k.Want)
	case *kind.ExclusiveMinimum:
		return "must be greater than " + decimal(k.Want)
	case *kind.ExclusiveMaximum:
		return "must be less than " + decimal(k.Want)
	case *kind.MultipleOf:
		return "must be a multiple of " + decimal(k.Want)
	case *kind.AnyOf:
		return "must have one of the allowed forms"
	case *kind.OneOf:
		return "must have exactly one of the allowed forms"
	case *kind.Not:
		return "must not have this form"
	}
	if p := k.KeywordPath(); len(p) > 0 {
		return "breaks the schema's rule " + quoteShort(p[0])
	}
	return "is not allowed by the schema"
}

// decimal writes a bound of the schema, which may have hundreds of digits.
func decimal(r *big.Rat) string {
	s := r.RatString()
	if !r.IsInt() {
		s = strings.TrimRight(r.FloatString(12), "0")
	}
	if len(s) > 40 {
		return "the schema's bound"
	}
	return s
}
