package contract

import (
	"context"
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

// The bounds of a rule. Costs are those of CEL: about one for each step.
const (
	maxExpression = 4 << 10 // bytes
	maxNodes      = 2000
	maxNesting    = 50
	maxLoops      = 2    // comprehensions within each other
	maxRegex      = 1000 // instructions of the compiled pattern
	// maxCost ends an evaluation. It is also the most that a rule may be
	// estimated to cost when each list, map and string it reads has sizeHint
	// entries or characters.
	maxCost  = 500_000
	sizeHint = 64
	// maxTime ends a rule with loops on a machine so slow that the cost did not.
	maxTime = 5 * time.Second
	// checkEvery is the number of loop steps between looks at the clock.
	checkEvery = 100
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
	loops  bool
	// names are the members that the expression itself names; only these may
	// appear in the reason of a denial.
	names map[string]bool
}

// environments returns the CEL environment of rules over a proposal, and the
// one that has result too.
var environments = sync.OnceValues(func() ([2]*cel.Env, error) {
	object := cel.MapType(cel.StringType, cel.DynType)
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
	checked, issues := env.Compile(src)
	if issues.Err() != nil {
		for _, e := range issues.Errors()[:1] {
			r.fail(path, "does not compile at %d:%d: %s", e.Location.Line(), e.Location.Column()+1, oneLine(e.Message))
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
	if err != nil || estimate.Max > maxCost {
		r.fail(path, "costs too much: over %d steps for lists and texts of %d", maxCost, sizeHint)
		return nil
	}
	out.program, err = env.Program(checked, cel.EvalOptions(cel.OptOptimize), cel.CostLimit(maxCost),
		cel.CostTracking(lengths{}), cel.InterruptCheckFrequency(checkEvery))
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
		case ast.ComprehensionKind:
			u.loops = true
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
func (sizes) EstimateCallCost(function, _ string, _ *cost.AstNode, _ []cost.AstNode) *cost.CallEstimate {
	if function != "within" {
		return nil
	}
	return cost.NewCallEstimate(cost.RangedCostEstimate(1, 1+sizeHint/10), nil)
}

// lengths counts what within costs when it runs: a tenth of a step for each
// byte, as CEL counts its own functions over strings.
type lengths struct{}

// CallCost implements cost.ActualCostEstimator.
func (lengths) CallCost(function, _ string, args []ref.Val, _ ref.Val) *uint64 {
	if function != "within" {
		return nil
	}
	steps := uint64(1)
	for _, a := range args {
		if s, ok := a.(types.String); ok {
			steps += uint64(min(len(s), maxPath)) / 10
		}
	}
	return &steps
}

// eval evaluates the expression. The reason is empty when there is a value; it
// never holds a value of the call.
func (u *rule) eval(v *Vars) (value ref.Val, reason string) {
	switch {
	case u.args && v.Args.inexact != "":
		return nil, "arguments hold a number that cannot be read exactly, at " + v.Args.inexact
	case u.result && v.Result.inexact != "":
		return nil, "the result holds a number that cannot be read exactly, at " + v.Result.inexact
	}
	ctx := context.Background()
	if u.loops {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, maxTime)
		defer cancel()
	}
	var err error
	if u.loops {
		value, _, err = u.program.ContextEval(ctx, activation{v})
	} else {
		value, _, err = u.program.Eval(activation{v})
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
	value, reason := u.eval(v)
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
		return fmt.Sprintf("the rule took more than %d steps", maxCost)
	case errors.Is(err, interpreter.InterruptError{}):
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
