package canonical

import (
	"bytes"
	"strconv"
)

// Inexact is a number token that neither an int64 nor a float64 stands for.
// Whoever would calculate with it must refuse instead.
type Inexact string

// decimal is the parts of a number token, as slices of it.
type decimal struct {
	negative   bool
	whole      []byte
	fraction   []byte
	exponent   int
	isInteger  bool // neither fraction nor exponent was written
	tokenBytes int
}

// readDecimal reads the number at the beginning of b (RFC 8259 section 6). The
// second result is the rule that was broken, or empty; limit tells a broken
// bound from broken grammar.
func readDecimal(b []byte) (d decimal, rule string, limit bool) {
	i := 0
	if i < len(b) && b[i] == '-' {
		d.negative = true
		i++
	}
	d.whole = digits(b[i:])
	i += len(d.whole)
	switch {
	case len(d.whole) == 0:
		return d, "a digit was expected", false
	case len(d.whole) > 1 && d.whole[0] == '0':
		return d, "a number must not begin with 0", false
	}
	d.isInteger = true
	if i < len(b) && b[i] == '.' {
		d.isInteger = false
		d.fraction = digits(b[i+1:])
		i += 1 + len(d.fraction)
		if len(d.fraction) == 0 {
			return d, "a digit was expected after the point", false
		}
	}
	if len(d.whole)+len(d.fraction) > MaxDigits {
		return d, "has a number of more than " + strconv.Itoa(MaxDigits) + " digits", true
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		d.isInteger = false
		i++
		minus := i < len(b) && b[i] == '-'
		if minus || i < len(b) && b[i] == '+' {
			i++
		}
		ds := digits(b[i:])
		i += len(ds)
		if len(ds) == 0 {
			return d, "a digit was expected in the exponent", false
		}
		significant := bytes.TrimLeft(ds, "0")
		if len(ds) > MaxDigits || len(significant) > 3 {
			return d, exponentRule, true
		}
		for _, c := range significant {
			d.exponent = d.exponent*10 + int(c-'0')
		}
		if d.exponent > MaxExponent {
			return d, exponentRule, true
		}
		if minus {
			d.exponent = -d.exponent
		}
	}
	d.tokenBytes = i
	return d, "", false
}

const exponentRule = "has a number whose exponent is beyond ±400"

func digits(b []byte) []byte {
	for i, c := range b {
		if c < '0' || c > '9' {
			return b[:i]
		}
	}
	return b
}

// normal returns the significant digits, appended to buf, and the position of
// the decimal point relative to their beginning: the value is 0.digits × 10^point.
// Zero has no digits.
func (d decimal) normal(buf []byte) (significant []byte, point int) {
	all := append(append(buf, d.whole...), d.fraction...)
	point = len(d.whole) + d.exponent
	significant = bytes.TrimLeft(all, "0")
	point -= len(all) - len(significant)
	significant = bytes.TrimRight(significant, "0")
	if len(significant) == 0 {
		return nil, 0
	}
	return significant, point
}

func (p *parser) number() *Error {
	d, rule, limit := readDecimal(p.in[p.pos:])
	if limit {
		return &Error{Rule: rule}
	}
	if rule != "" {
		return p.syntax(rule)
	}
	token := p.in[p.pos : p.pos+d.tokenBytes]
	p.pos += d.tokenBytes
	if !p.doc {
		p.out = append(p.out, token...)
		return nil
	}
	var buf [MaxDigits]byte
	significant, point := d.normal(buf[:0])
	if point-1 > MaxExponent || point-1 < -MaxExponent {
		return &Error{Rule: exponentRule}
	}
	p.out = appendNormal(p.out, d.negative, significant, point)
	return nil
}

// appendNormal writes the doc-1 text of ±0.ds × 10^point.
func appendNormal(out []byte, negative bool, ds []byte, point int) []byte {
	if len(ds) == 0 {
		return append(out, '0')
	}
	if negative {
		out = append(out, '-')
	}
	switch {
	case len(ds) <= point && point <= 21:
		return appendZeros(append(out, ds...), point-len(ds))
	case 0 < point && point <= 21:
		out = append(out, ds[:point]...)
		return append(append(out, '.'), ds[point:]...)
	case -6 < point && point <= 0:
		return append(appendZeros(append(out, '0', '.'), -point), ds...)
	}
	out = append(out, ds[0])
	if len(ds) > 1 {
		out = append(append(out, '.'), ds[1:]...)
	}
	out = append(out, 'e')
	if point-1 > 0 {
		out = append(out, '+')
	}
	return strconv.AppendInt(out, int64(point-1), 10)
}

func appendZeros(out []byte, n int) []byte {
	for range n {
		out = append(out, '0')
	}
	return out
}

// Number returns the Go value of a number token: an int64 for an integer token
// in its range, else a float64 when the token is the decimal that stands for
// that float, else Inexact.
//
// A decimal stands for a float when the float's shortest text has the same
// decimal value. Then two tokens of different value never become one float, and
// since rounding keeps the order, comparing the floats is comparing the
// decimals. Demanding the binary value to be the decimal itself would refuse
// 0.1, and with it every rule about a price.
func Number(token []byte) (any, bool) {
	d, rule, _ := readDecimal(token)
	if rule != "" || d.tokenBytes != len(token) {
		return nil, false
	}
	if d.isInteger {
		if n, err := strconv.ParseInt(string(token), 10, 64); err == nil {
			return n, true
		}
	}
	f, err := strconv.ParseFloat(string(token), 64)
	if err != nil {
		return Inexact(token), true
	}
	var text [32]byte
	back, _, _ := readDecimal(strconv.AppendFloat(text[:0], f, 'e', -1, 64))
	var a, b [MaxDigits]byte
	as, ap := d.normal(a[:0])
	bs, bp := back.normal(b[:0])
	if ap != bp || !bytes.Equal(as, bs) {
		return Inexact(token), true
	}
	return f, true
}
