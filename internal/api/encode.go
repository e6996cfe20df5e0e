package api

import (
	"encoding/base64"
	"strconv"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// appendMessage writes m as JSON: lowerCamelCase names, fields without presence
// always, fields with presence when set, Json values byte for byte, 64-bit
// integers as strings, enums by name.
func appendMessage(b []byte, m protoreflect.Message, p *plan) []byte {
	switch p.shape {
	case shapeJSON:
		if raw := m.Get(p.raw).Bytes(); len(raw) > 0 {
			return append(b, raw...)
		}
		return append(b, "null"...)
	case shapeTimestamp:
		b = append(b, '"')
		b = m.Interface().(*timestamppb.Timestamp).AsTime().AppendFormat(b, time.RFC3339Nano)
		return append(b, '"')
	case shapeDuration:
		return appendDuration(b, m.Interface().(*durationpb.Duration))
	case shapeFieldMask:
		return appendMask(b, m)
	case shapeAny:
		return appendAny(b, m.Interface().(*anypb.Any))
	}
	b = append(b, '{')
	return append(appendFields(b, m, p), '}')
}

func appendFields(b []byte, m protoreflect.Message, p *plan) []byte {
	from := len(b)
	for _, f := range p.fields {
		if f.fd.HasPresence() && !m.Has(f.fd) {
			continue
		}
		if len(b) > from {
			b = append(b, ',')
		}
		b = append(b, f.key...)
		b = appendField(b, m.Get(f.fd), f)
	}
	return b
}

func appendField(b []byte, v protoreflect.Value, f *field) []byte {
	switch {
	case f.fd.IsMap():
		return appendTextMap(b, v.Map())
	case f.fd.IsList():
		b = append(b, '[')
		l := v.List()
		for i := range l.Len() {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendValue(b, l.Get(i), f)
		}
		return append(b, ']')
	}
	return appendValue(b, v, f)
}

func appendValue(b []byte, v protoreflect.Value, f *field) []byte {
	switch f.fd.Kind() {
	case protoreflect.MessageKind:
		return appendMessage(b, v.Message(), f.plan)
	case protoreflect.StringKind:
		return appendText(b, v.String())
	case protoreflect.BoolKind:
		return strconv.AppendBool(b, v.Bool())
	case protoreflect.Int32Kind:
		return strconv.AppendInt(b, v.Int(), 10)
	case protoreflect.Int64Kind:
		b = append(b, '"')
		b = strconv.AppendInt(b, v.Int(), 10)
		return append(b, '"')
	case protoreflect.BytesKind:
		b = append(b, '"')
		b = base64.StdEncoding.AppendEncode(b, v.Bytes())
		return append(b, '"')
	case protoreflect.EnumKind:
		if ev := f.fd.Enum().Values().ByNumber(v.Enum()); ev != nil {
			return appendText(b, string(ev.Name()))
		}
		return strconv.AppendInt(b, int64(v.Enum()), 10)
	}
	panic("api: no JSON for fields like " + string(f.fd.FullName()))
}

// appendTextMap writes a map of texts in the order of its keys' iteration; only
// ErrorInfo has one, with a handful of entries.
func appendTextMap(b []byte, m protoreflect.Map) []byte {
	b = append(b, '{')
	from := len(b)
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		if len(b) > from {
			b = append(b, ',')
		}
		b = append(appendText(b, k.String()), ':')
		b = appendText(b, v.String())
		return true
	})
	return append(b, '}')
}

func appendAny(b []byte, a *anypb.Any) []byte {
	m, err := a.UnmarshalNew()
	if err != nil {
		return append(b, "{}"...)
	}
	p := planOf(m.ProtoReflect().Descriptor())
	b = append(b, `{"@type":`...)
	b = appendText(b, a.GetTypeUrl())
	if p.shape != shapeObject {
		b = append(b, `,"value":`...)
		return append(appendMessage(b, m.ProtoReflect(), p), '}')
	}
	if len(p.fields) > 0 {
		b = append(b, ',')
	}
	return append(appendFields(b, m.ProtoReflect(), p), '}')
}

func appendDuration(b []byte, d *durationpb.Duration) []byte {
	s, n := d.GetSeconds(), d.GetNanos()
	b = append(b, '"')
	if s < 0 || n < 0 {
		b, s, n = append(b, '-'), -s, -n
	}
	b = strconv.AppendInt(b, s, 10)
	if n != 0 {
		digits := strconv.AppendInt(nil, int64(n)+1e9, 10)[1:]
		for len(digits) > 3 && string(digits[len(digits)-3:]) == "000" {
			digits = digits[:len(digits)-3]
		}
		b = append(append(b, '.'), digits...)
	}
	return append(b, 's', '"')
}

const hexDigits = "0123456789abcdef"

// appendText writes a JSON string. Invalid UTF-8 becomes U+FFFD: it can only
// come from a fault of ours, and an answer must stay readable.
func appendText(b []byte, s string) []byte {
	b = append(b, '"')
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= 0x20 && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(s[i:])
			if r != utf8.RuneError || n != 1 {
				i += n
				continue
			}
		}
		b = append(b, s[from:i]...)
		switch c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\n':
			b = append(b, '\\', 'n')
		case '\r':
			b = append(b, '\\', 'r')
		case '\t':
			b = append(b, '\\', 't')
		default:
			if c < 0x20 {
				b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
			} else {
				b = append(b, "\uFFFD"...)
			}
		}
		i++
		from = i
	}
	b = append(b, s[from:]...)
	return append(b, '"')
}
