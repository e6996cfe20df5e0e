package contract

import (
	"fmt"
	"regexp"
	"time"

	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/overloads"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/common/types/traits"
	"cel.dev/cel-go/interpreter"
)

// The weights of the meter. A step is meant to take at most about 100 ns.
const (
	textStep  = 64  // bytes that one step reads or copies
	runeStep  = 32  // bytes whose characters one step counts
	parseStep = 8   // bytes that one step parses, or judges as a path
	entrySize = 32  // bytes of an element of a list that is made
	pairSize  = 128 // bytes of an entry of a map that is made
	mapSteps  = 4   // steps to compare an entry of a map, or to open a value
	loopSteps = 3   // steps of a round of a loop, besides what it does
	nodesStep = 8   // nodes of a loop, which may be constants, for a step more
	parseCost = 8   // steps of a conversion, which may make an error
	zoneCost  = 500 // steps to look up a time zone
	lookEvery = 10_000
)

// meter counts what one evaluation costs, by the size of what is read and made,
// before it is read or made. It is not safe for concurrent use.
type meter struct {
	steps uint64 // of calls and literals; CEL counts the others in its frame
	spent uint64 // of all evaluations before this one on the same meter
	bytes uint64
	look  uint64 // the step at which the clock is looked at next
	end   time.Time
}

// meterName is how a node finds the meter; no expression can name it.
const meterName = "@meter"

// meterOf returns the meter of an evaluation.
func meterOf(frame *interpreter.ExecutionFrame) *meter {
	v, _ := frame.ResolveName(meterName)
	return v.(*meter)
}

// run counts steps and bytes, and ends the evaluation when they are too many.
// It panics with what cel.Program recovers from.
func (m *meter) run(frame *interpreter.ExecutionFrame, steps, bytes uint64) {
	m.steps += steps
	m.bytes += bytes
	total := m.spent + m.steps
	if t := frame.CostTracker(); t != nil {
		total += t.ActualCost()
	}
	if total > maxCost || m.bytes > maxMade {
		panic(interpreter.EvalCancelledError{Cause: interpreter.CostLimitExceeded, Message: "the rule costs too much"})
	}
	if total < m.look {
		return
	}
	m.look = total + lookEvery
	switch now := time.Now(); {
	case m.end.IsZero():
		m.end = now.Add(maxTime)
	case now.After(m.end):
		panic(interpreter.EvalCancelledError{Cause: interpreter.ContextCancelled, Message: "the rule took too long"})
	}
}

// metered is a call whose cost is counted once its operands are known and
// before it is made. It stands for the node that CEL planned, also where CEL
// finds the function only when it runs.
type metered struct {
	interpreter.InterpretableV2
	function, overload string
	args               []interpreter.InterpretableV2
	call               binding
	pattern            *regexp.Regexp // of matches
	program            uint64         // instructions of the pattern
}

// binding is what a call runs.
type binding struct {
	trait int
	do    func(args []ref.Val) ref.Val
}

// Exec implements interpreter.InterpretableV2.
func (c *metered) Exec(frame *interpreter.ExecutionFrame) ref.Val {
	var room [3]ref.Val
	vals := room[:0]
	for _, a := range c.args {
		v := a.Exec(frame)
		if types.IsUnknownOrError(v) {
			return v
		}
		vals = append(vals, v)
	}
	m := meterOf(frame)
	m.count(frame, c, vals)
	switch c.function {
	case operators.Equals:
		return types.Equal(vals[0], vals[1])
	case operators.NotEquals:
		return types.Bool(types.Equal(vals[0], vals[1]) != types.True)
	case operators.Add:
		if list, ok := joined(vals[0], vals[1]); ok {
			return list
		}
	case overloads.Matches:
		text, ok := vals[0].(types.String)
		if !ok {
			return types.MaybeNoSuchOverloadErr(vals[0])
		}
		return types.Bool(c.pattern.MatchString(string(text)))
	}
	return c.invoke(vals)
}

// invoke makes the call as CEL does: by the binding, else by the receiver.
func (c *metered) invoke(vals []ref.Val) ref.Val {
	if c.call.do != nil && (c.call.trait == 0 || len(vals) > 0 && vals[0].Type().HasTrait(c.call.trait)) {
		return c.call.do(vals)
	}
	if len(vals) > 0 {
		if r, ok := vals[0].(traits.Receiver); ok && vals[0].Type().HasTrait(traits.ReceiverType) {
			return r.Receive(c.function, c.overload, vals[1:])
		}
	}
	return types.NewErr("no such overload: %s", c.function)
}

// Eval implements interpreter.Interpretable.
func (c *metered) Eval(vars interpreter.Activation) ref.Val {
	return interpreter.EvalActivation(vars, c.Exec)
}

// made is a list or map literal with parts that are not constant.
type made struct {
	interpreter.InterpretableV2
	steps, bytes uint64
}

// Exec implements interpreter.InterpretableV2.
func (l *made) Exec(frame *interpreter.ExecutionFrame) ref.Val {
	meterOf(frame).run(frame, l.steps, l.bytes)
	return l.InterpretableV2.Exec(frame)
}

// Eval implements interpreter.Interpretable.
func (l *made) Eval(vars interpreter.Activation) ref.Val {
	return interpreter.EvalActivation(vars, l.Exec)
}

// joined adds two lists into one that is flat. CEL's own would be read through
// as many layers as there were additions. A list that a macro is making grows
// in place, by CEL.
func joined(a, b ref.Val) (ref.Val, bool) {
	left, isLeft := a.(traits.Lister)
	right, isRight := b.(traits.Lister)
	if _, growing := a.(traits.MutableLister); !isLeft || !isRight || growing {
		return nil, false
	}
	all := make([]ref.Val, 0, length(a)+length(b))
	for _, list := range [...]traits.Lister{left, right} {
		for it := list.Iterator(); it.HasNext() == types.True; {
			all = append(all, it.Next())
		}
	}
	return types.NewRefValList(types.DefaultTypeAdapter, all), true
}

// length is the number of bytes, elements or entries of a value, 0 for others.
func length(v ref.Val) uint64 {
	switch v := v.(type) {
	case types.String:
		return uint64(len(v))
	case types.Bytes:
		return uint64(len(v))
	case traits.Sizer:
		if n, ok := v.Size().(types.Int); ok && n > 0 {
			return uint64(n)
		}
	}
	return 0
}

// text is length for strings and bytes alone.
func text(v ref.Val) uint64 {
	switch v.(type) {
	case types.String, types.Bytes:
		return length(v)
	}
	return 0
}

// count counts a call before it is made. A test holds that it knows each
// function of the environment.
func (m *meter) count(frame *interpreter.ExecutionFrame, c *metered, vals []ref.Val) {
	first := vals[0]
	switch c.function {
	case operators.Equals, operators.NotEquals:
		m.equal(frame, first, vals[1])
	case operators.In, operators.OldIn, overloads.DeprecatedIn:
		m.contained(frame, first, vals[1])
	case operators.Add:
		m.sum(frame, first, vals[1])
	case operators.Less, operators.LessEquals, operators.Greater, operators.GreaterEquals:
		m.run(frame, 1+min(text(first), text(vals[1]))/textStep, 0)
	case overloads.Contains, overloads.StartsWith, overloads.EndsWith:
		m.run(frame, 1+(text(first)+text(vals[1]))/textStep, 0)
	case overloads.Matches:
		// RE2 looks at each instruction for each byte at worst.
		m.run(frame, 1+text(first)*(1+c.program/parseStep)/2, 0)
	case overloads.Size:
		m.run(frame, 1+text(first)/runeStep, 0)
	case "within":
		m.run(frame, 1+(min(text(first), maxPath)+min(text(vals[1]), maxPath))/parseStep, 0)
	case keyName:
		// Where there is no such key, CEL writes it into an error.
		m.run(frame, 2+text(first)/textStep, 2*text(first))
	case rangeName:
		m.run(frame, 1+uint64(vals[1].(types.Int))*length(first), 0)
	case operators.LogicalNot, operators.Negate, operators.Subtract, operators.Multiply, operators.Divide,
		operators.Modulo, overloads.TypeConvertType, overloads.TypeConvertDyn:
		m.run(frame, 1, 0)
	default: // conversions, and the parts of a time
		steps, size := uint64(parseCost), uint64(64)
		for _, v := range vals {
			steps += text(v) / parseStep
			size += 2 * text(v)
		}
		if len(vals) > 1 {
			steps += zoneCost
		}
		m.run(frame, steps, size)
	}
}

// sum counts an addition: what it makes is as large as both.
func (m *meter) sum(frame *interpreter.ExecutionFrame, a, b ref.Val) {
	left, right := length(a), length(b)
	switch a.(type) {
	case types.String, types.Bytes:
		m.run(frame, 1+(left+right)/textStep, left+right)
	case traits.MutableLister:
		m.run(frame, 1+right, entrySize*right)
	case traits.Lister:
		m.run(frame, 1+left+right, entrySize*(left+right))
	default:
		m.run(frame, 1, 0)
	}
}

// equal counts a comparison. It ends early where kinds or lengths differ.
func (m *meter) equal(frame *interpreter.ExecutionFrame, a, b ref.Val) {
	m.run(frame, 1, 0)
	switch a.(type) {
	case types.String, types.Bytes:
		if n := text(a); n == text(b) {
			m.run(frame, n/textStep, 0)
		}
	case traits.Mapper:
		if _, ok := b.(traits.Mapper); ok && length(a) == length(b) {
			m.deep(frame, a)
		}
	case traits.Lister:
		if _, ok := b.(traits.Lister); ok && length(a) == length(b) {
			m.deep(frame, a)
		}
	}
}

// contained counts a search for a value in a list, or for a key in a map.
func (m *meter) contained(frame *interpreter.ExecutionFrame, v, in ref.Val) {
	if _, ok := in.(traits.Mapper); ok {
		m.run(frame, mapSteps+text(v)/textStep, 0)
		return
	}
	m.run(frame, 1+length(in), 0)
	n, isText := uint64(0), false
	switch v.(type) {
	case types.String, types.Bytes:
		n, isText = text(v)/textStep, true
	case traits.Mapper, traits.Lister:
	default:
		return
	}
	// Texts are compared where they are of one length; short ones cost nothing.
	if isText && n == 0 {
		return
	}
	list, ok := in.(traits.Lister)
	if !ok {
		return
	}
	for it := list.Iterator(); it.HasNext() == types.True; {
		if e := it.Next(); !isText {
			m.equal(frame, v, e)
		} else if text(e) == text(v) {
			m.run(frame, n, 0)
		}
	}
}

// deep counts every value in a list or map, level by level, so that it ends as
// soon as the count does.
func (m *meter) deep(frame *interpreter.ExecutionFrame, v any) {
	switch v := v.(type) {
	case string:
		m.run(frame, uint64(len(v))/textStep, 0)
	case []any:
		m.run(frame, mapSteps+uint64(len(v)), 0)
		for _, e := range v {
			m.deep(frame, e)
		}
	case []string:
		m.run(frame, mapSteps+uint64(len(v)), 0)
		for _, e := range v {
			m.deep(frame, e)
		}
	case map[string]any:
		m.run(frame, mapSteps*(1+uint64(len(v))), 0)
		for name, e := range v {
			m.run(frame, uint64(len(name))/textStep, 0)
			m.deep(frame, e)
		}
	case types.String, types.Bytes:
		m.run(frame, text(v.(ref.Val))/textStep, 0)
	case traits.Mapper:
		m.deepMap(frame, v)
	case traits.Lister:
		m.deepList(frame, v)
	}
}

func (m *meter) deepMap(frame *interpreter.ExecutionFrame, v traits.Mapper) {
	if native, ok := v.Value().(map[string]any); ok {
		m.deep(frame, native)
		return
	}
	m.run(frame, mapSteps*(1+length(v)), 0)
	for it := v.Iterator(); it.HasNext() == types.True; {
		key := it.Next()
		m.deep(frame, key)
		if e, found := v.Find(key); found {
			m.deep(frame, e)
		}
	}
}

func (m *meter) deepList(frame *interpreter.ExecutionFrame, v traits.Lister) {
	if native, ok := v.Value().([]any); ok {
		m.deep(frame, native)
		return
	}
	m.run(frame, mapSteps+length(v), 0)
	for it := v.Iterator(); it.HasNext() == types.True; {
		m.deep(frame, it.Next())
	}
}

// decorate puts the meter in front of every call and literal of a plan.
func decorate(node interpreter.InterpretableV2) (interpreter.InterpretableV2, error) {
	switch n := node.(type) {
	case *metered, *made:
		return node, nil
	case interpreter.InterpretableCall:
		if n.Function() == operators.NotStrictlyFalse {
			return node, nil
		}
		return meterCall(n)
	case interpreter.InterpretableConstructor:
		parts := n.InitVals()
		for _, p := range parts {
			if _, constant := p.(interpreter.InterpretableConst); !constant {
				size := uint64(entrySize)
				if n.Type() == types.MapType {
					size = pairSize
				}
				return &made{InterpretableV2: n, steps: 1 + uint64(len(parts)), bytes: size * (1 + uint64(len(parts)))}, nil
			}
		}
	}
	return node, nil
}

func meterCall(n interpreter.InterpretableCall) (interpreter.InterpretableV2, error) {
	c := &metered{InterpretableV2: n, function: n.Function(), overload: n.OverloadID(), args: n.Args()}
	if len(c.args) == 0 {
		return nil, fmt.Errorf("the function %s takes nothing", c.function)
	}
	if c.function == overloads.Matches {
		pattern, ok := c.args[1].(interpreter.InterpretableConst)
		if !ok {
			return nil, fmt.Errorf("the pattern is no literal")
		}
		source, _ := pattern.Value().(types.String)
		size, err := types.RegexProgramSize(string(source))
		if err != nil || size > maxRegex {
			return nil, fmt.Errorf("the pattern has more than %d instructions", maxRegex)
		}
		c.program = uint64(size)
		if c.pattern, err = regexp.Compile(string(source)); err != nil {
			return nil, err
		}
		return c, nil
	}
	all, err := bindings()
	if err != nil {
		return nil, err
	}
	var found bool
	if c.call, found = all[c.overload]; !found {
		c.call = all[c.function]
	}
	return c, nil
}
