package contract

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/cost"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/interpreter"
)

// The bounds of a rule. Costs are steps of about 100 ns at most: those that CEL
// counts, and those of the meter for calls and literals by the size of what they
// read and make.
const (
	maxExpression = 4 << 10 // bytes
	maxNodes      = 2000
	maxNesting    = 50
	maxLoops      = 2    // comprehensions within each other
	maxRegex      = 1000 // instructions of the compiled pattern
	// maxCost ends an evaluation. It is also the most that a rule may be
	// estimated to cost when each list, map and string it reads has sizeHint
	// entries or characters.
	maxCost  = 200_000
	sizeHint = 64
	// maxMade bounds in bytes all that one evaluation makes: texts, lists, maps.
	maxMade = 4 << 20
	// maxTime ends a rule on a machine so slow that the cost did not.
	maxTime = time.Second
)

// ruleKind is where an expression stands; it decides variables and type.
type ruleKind uint8

const (
	ruleWhen       ruleKind = iota // bool over the proposal
	ruleArgument                   // any JSON value over the proposal
	ruleSucceeded                  // bool over proposal and result
	ruleSideEffect                 // string over proposal and result
)

// rule is one compiled expression, safe for concurrent use.
type rule struct {
	program cel.Program
	// args and result say which foreign values the expression reads.
	args   bool
	result bool
	// names are the members that the expression itself names; only these may
	// appear in the reason of a denial.
	names map[string]bool
}

// environments returns the CEL environment of rules over a proposal, and the
// one that has result too.
var environments = sync.OnceValues(func() ([2]*cel.Env, error) {
	object, any := cel.MapType(cel.StringType, cel.DynType), cel.TypeParamType("T")
	proposal, err := cel.NewEnv(
		cel.Variable("args", object),
		cel.Variable("principal.subject", cel.StringType),
		cel.Variable("principal.source", cel.StringType),
		cel.Variable("principal.groups", cel.ListType(cel.StringType)),
		cel.Variable("principal.project", cel.StringType),
		cel.Variable("principal.role", cel.StringType),
		cel.Variable("session.id", cel.StringType),
		cel.Variable("session.servers", cel.ListType(cel.StringType)),
		cel.Variable("call.idempotencyKey", cel.StringType),
		cel.Variable("call.requestId", cel.StringType),
		cel.Variable("call.server", cel.StringType),
		cel.Variable("call.tool", cel.StringType),
		cel.Function("within", cel.Overload("within_dyn_dyn", []*cel.Type{cel.DynType, cel.DynType}, cel.BoolType,
			cel.BinaryBinding(celWithin))),
		// Only guard writes these two; no expression can name them.
		cel.Function(keyName, cel.Overload(keyName+"_any", []*cel.Type{any}, any, cel.UnaryBinding(celKey))),
		cel.Function(rangeName, cel.Overload(rangeName+"_any", []*cel.Type{any, cel.IntType}, any,
			cel.BinaryBinding(func(v, _ ref.Val) ref.Val { return v }))),
		cel.ParserExpressionSizeLimit(maxExpression),
		cel.ParserRecursionLimit(maxNesting),
		cel.ExpressionNodeLimit(maxNodes),
		cel.ASTValidators(
			cel.ValidateComprehensionNestingLimit(maxLoops),
			cel.ValidateRegexLiterals(),
			cel.ValidateDurationLiterals(),
			cel.ValidateTimestampLiterals(),
		),
		cel.RegexProgramSizeLimit(maxRegex),
	)
	if err != nil {
		return [2]*cel.Env{}, err
	}
	query, err := proposal.Extend(cel.Variable("result", object))
	return [2]*cel.Env{proposal, query}, err
})

// keyName is a function that bounds a key which is known only when the rule
// runs, rangeName one that bounds what a loop goes over; its second operand is
// the number of steps of each round, besides what is counted within it.
const (
	keyName   = "@key"
	rangeName = "@range"
)

// bindings returns what each function and overload of the environment runs.
var bindings = sync.OnceValues(func() (map[string]binding, error) {
	envs, err := environments()
	if err != nil {
		return nil, err
	}
	all := map[string]binding{}
	for _, f := range envs[1].Functions() {
		bound, err := f.Bindings()
		if err != nil {
			return nil, err
		}
		for _, o := range bound {
			b := binding{trait: o.OperandTrait}
			if o.Unary != nil || o.Binary != nil || o.Function != nil {
				b.do = func(args []ref.Val) ref.Val {
					switch {
					case len(args) == 1 && o.Unary != nil:
						return o.Unary(args[0])
					case len(args) == 2 && o.Binary != nil:
						return o.Binary(args[0], args[1])
					case o.Function != nil:
						return o.Function(args...)
					}
					return types.NewErr("no such overload")
				}
			}
			all[o.Operator] = b
		}
	}
	return all, nil
})

// celKey lets through what can be a key or an index.
func celKey(v ref.Val) ref.Val {
	switch v.(type) {
	case types.String, types.Int, types.Uint, types.Double, types.Bool:
		return v
	}
	return types.NewErr("no such overload")
}

// guard puts keyName and rangeName into a parsed expression.
func guard(parsed *ast.AST) {
	type site struct {
		e     ast.Expr
		round int64 // steps of a round where e is a range, 0 where it is a key
	}
	var sites []site
	last := int64(0)
	add := func(e ast.Expr, round int64) {
		if e.Kind() != ast.LiteralKind {
			sites = append(sites, site{e, round})
		}
	}
	ast.PreOrderVisit(parsed.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		last = max(last, e.ID())
		switch e.Kind() {
		case ast.ComprehensionKind:
			add(e.AsComprehension().IterRange(), loopSteps+nodes(e)/nodesStep)
		case ast.MapKind:
			for _, entry := range e.AsMap().Entries() {
				last = max(last, entry.ID())
				add(entry.AsMapEntry().Key(), 0)
			}
		case ast.CallKind:
			if c := e.AsCall(); c.FunctionName() == operators.Index && len(c.Args()) == 2 {
				add(c.Args()[1], 0)
			}
		}
	}))
	for id := range parsed.SourceInfo().MacroCalls() {
		last = max(last, id)
	}
	factory, info := ast.NewExprFactory(), parsed.SourceInfo()
	for _, s := range sites {
		last++
		inner := factory.NewUnspecifiedExpr(last)
		inner.SetKindCase(s.e)
		if at, ok := info.GetOffsetRange(s.e.ID()); ok {
			info.SetOffsetRange(last, at)
		}
		if s.round == 0 {
			s.e.SetKindCase(factory.NewCall(s.e.ID(), keyName, inner))
			continue
		}
		last++
		s.e.SetKindCase(factory.NewCall(s.e.ID(), rangeName, inner, factory.NewLiteral(last, types.Int(s.round))))
	}
}

// nodes is the number of nodes of an expression.
func nodes(e ast.Expr) (n int64) {
	ast.PreOrderVisit(e, ast.NewExprVisitor(func(ast.Expr) { n++ }))
	return n
}

// celWithin is within for whatever a rule passes: what is no string is within
// nothing.
func celWithin(path, root ref.Val) ref.Val {
	p, ok := path.(types.String)
	r, isString := root.(types.String)
	return types.Bool(ok && isString && within(string(p), string(r)))
}

// compile compiles an expression, notes what is wrong with it, and returns nil
// then.
func (r *reader) compile(path, src string, kind ruleKind, t *Tool) *rule {
	return r.compileCosting(path, src, kind, t, maxCost)
}

// compileCosting is compile with another bound of the estimate.
func (r *reader) compileCosting(path, src string, kind ruleKind, t *Tool, most uint64) *rule {
	envs, err := environments()
	if err != nil {
		// The environment is made of constants; a test compiles in it.
		r.fail(path, "cannot be compiled: %v", err)
		return nil
	}
	env := envs[0]
	if kind == ruleSucceeded || kind == ruleSideEffect {
		env = envs[1]
	}
	checked, issues := env.Parse(src)
	if issues.Err() == nil {
		guard(checked.NativeRep())
		checked, issues = env.Check(checked)
	}
	if issues.Err() != nil {
		for _, e := range issues.Errors()[:1] {
			at := ""
			if e.Location.Line() > 0 {
				at = fmt.Sprintf(" at %d:%d", e.Location.Line(), e.Location.Column()+1)
			}
			r.fail(path, "does not compile%s: %s", at, oneLine(e.Message))
		}
		return nil
	}
	if !allowedType(checked.OutputType(), kind) {
		want := "bool"
		if kind == ruleSideEffect {
			want = "string"
		}
		r.fail(path, "must be of type %s, not %s", want, cel.FormatCELType(checked.OutputType()))
		return nil
	}
	out := &rule{names: map[string]bool{}}
	if broken := out.inspect(checked.NativeRep(), t); broken != "" {
		r.fail(path, "%s", broken)
		return nil
	}
	estimate, err := env.EstimateCost(checked, sizes{})
	if err != nil || estimate.Max > most {
		r.fail(path, "costs too much: over %d steps for lists and texts of %d", maxCost, sizeHint)
		return nil
	}
	out.program, err = env.Program(checked, cel.CustomDecoratorV2(decorate), cel.EvalOptions(cel.OptOptimize),
		cel.CostLimit(maxCost))
	if err != nil {
		r.fail(path, "does not compile: %s", oneLine(err.Error()))
		return nil
	}
	return out
}

func allowedType(t *cel.Type, kind ruleKind) bool {
	switch {
	case t.Kind() == types.DynKind || kind == ruleArgument:
		return true
	case kind == ruleSideEffect:
		return t.Kind() == types.StringKind
	}
	return t.Kind() == types.BoolKind
}

// oneLine bounds a message of the compiler.
func oneLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	if len(s) > 200 {
		s = strings.ToValidUTF8(s[:200], "") + "…"
	}
	return s
}

// inspect notes what the expression reads, and refuses what could only be
// judged when it is too late. It returns the broken rule, or empty.
func (u *rule) inspect(checked *ast.AST, t *Tool) (broken string) {
	visit := func(e ast.Expr) {
		switch e.Kind() {
		case ast.MapKind:
			for _, entry := range e.AsMap().Entries() {
				if k := entry.AsMapEntry().Key(); k.Kind() == ast.LiteralKind && types.IsError(celKey(k.AsLiteral())) {
					broken = "has a map with a key that is no text, number or bool"
				}
			}
		case ast.StructKind:
			broken = "makes a message; rules have lists and maps only"
		case ast.IdentKind:
			switch e.AsIdent() {
			case "args":
				u.args = true
			case "result":
				u.result = true
			case "call.idempotencyKey":
				if !t.Idempotency.Offered() {
					broken = "reads call.idempotencyKey, but the tool has no idempotency"
				}
			}
		case ast.SelectKind:
			u.names[e.AsSelect().FieldName()] = true
		case ast.CallKind:
			if rule := u.inspectCall(e.AsCall()); rule != "" {
				broken = rule
			}
		}
	}
	ast.PreOrderVisit(checked.Expr(), ast.NewExprVisitor(visit))
	return broken
}

func (u *rule) inspectCall(c ast.CallExpr) string {
	args := c.Args()
	literal := func(e ast.Expr) (string, bool) {
		if e.Kind() != ast.LiteralKind {
			return "", false
		}
		s, ok := e.AsLiteral().Value().(string)
		return s, ok
	}
	switch c.FunctionName() {
	case "within":
		if root, ok := literal(args[1]); ok && !cleanPath(root) {
			return "within needs a clean absolute path as its root, else it is never true"
		}
	case "matches":
		if _, ok := literal(args[len(args)-1]); !ok {
			return "matches needs its pattern as a literal"
		}
	case operators.Index:
		if name, ok := literal(args[1]); ok {
			u.names[name] = true
		}
	}
	return ""
}

// sizes tells the estimate of costs how large foreign values are taken to be.
type sizes struct{}

// EstimateSize implements cost.Estimator.
func (sizes) EstimateSize(cost.AstNode) *cost.SizeEstimate {
	return &cost.SizeEstimate{Min: 0, Max: sizeHint}
}

// EstimateCallCost implements cost.Estimator.
func (sizes) EstimateCallCost(function, _ string, _ *cost.AstNode, args []cost.AstNode) *cost.CallEstimate {
	switch function {
	case "within":
		return cost.NewCallEstimate(cost.RangedCostEstimate(1, 1+2*sizeHint/parseStep), nil)
	case rangeName:
		return cost.NewCallEstimate(cost.FixedCostEstimate(loopSteps*sizeHint), args[0].ComputedSize())
	}
	return nil
}

// eval evaluates the expression on a meter, which may be one of several
// evaluations. The reason is empty when there is a value; it never holds a value
// of the call.
func (u *rule) eval(v *Vars, m *meter) (value ref.Val, reason string) {
	switch {
	case u.args && v.Args.inexact != "":
		return nil, "arguments hold a number that cannot be read exactly, at " + v.Args.inexact
	case u.result && v.Result.inexact != "":
		return nil, "the result holds a number that cannot be read exactly, at " + v.Result.inexact
	}
	value, details, err := u.program.Eval(activation{v, m})
	if details != nil && details.ActualCost() != nil {
		m.spent += *details.ActualCost()
	}
	switch {
	case err != nil:
		return nil, u.reason(err)
	case value == nil || types.IsUnknownOrError(value):
		return nil, "the rule cannot be evaluated"
	}
	return value, ""
}

// evalBool is eval for a rule that must be true or false.
func (u *rule) evalBool(v *Vars) (ok bool, reason string) {
	value, reason := u.eval(v, &meter{})
	if reason != "" {
		return false, reason
	}
	b, isBool := value.(types.Bool)
	if !isBool {
		return false, "the rule gave no true or false"
	}
	return bool(b), ""
}

// reason says why an evaluation failed. CEL's own text may quote a value of the
// call, so only what the rule itself names is let through.
func (u *rule) reason(err error) string {
	var cancelled interpreter.EvalCancelledError
	text := err.Error()
	switch {
	case errors.As(err, &cancelled) && cancelled.Cause == interpreter.CostLimitExceeded:
		return "the rule costs too much"
	case errors.As(err, &cancelled):
		return "the rule took too long"
	case strings.HasPrefix(text, "no such key: "):
		if name := strings.TrimPrefix(text, "no such key: "); u.names[name] {
			return "the rule reads a member that is missing: " + name
		}
		return "the rule reads a member that is missing"
	case strings.HasPrefix(text, "no such overload"):
		return "a value has a type that the rule does not expect"
	}
	return "the rule cannot be evaluated"
}
