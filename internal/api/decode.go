package api

import (
	"bytes"
	"encoding/base64"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// decodeBody fills an empty m from a JSON object in one pass. Unknown and
// miscased members, duplicate names, null outside of Json, enum numbers and
// unspecified enums are refused, with the path of the member.
func decodeBody(b []byte, m proto.Message) *pathError {
	s := newScanner(b)
	if s.peek() != '{' {
		if s.pos >= len(s.b) {
			return broken("is empty")
		}
		return broken("must be a JSON object")
	}
	r := m.ProtoReflect()
	p := planOf(r.Descriptor())
	err := s.object(0, func(name []byte) *pathError {
		if p.fromPath[string(name)] {
			return broken("is part of the path and not of the body")
		}
		return s.member(r, p, name, 0)
	})
	if err != nil {
		return err
	}
	return s.end()
}

// member reads the value of one named field into m.
func (s *scanner) member(m protoreflect.Message, p *plan, name []byte, depth int) *pathError {
	f := p.byName[string(name)]
	if f == nil {
		return p.unknown(string(name))
	}
	if o := f.fd.ContainingOneof(); o != nil && !o.IsSynthetic() {
		if other := m.WhichOneof(o); other != nil {
			return broken("excludes %s", other.JSONName())
		}
	}
	if !f.fd.IsList() {
		v, err := s.fieldValue(f, func() protoreflect.Value { return m.NewField(f.fd) }, depth)
		if err != nil {
			return err
		}
		m.Set(f.fd, v)
		return nil
	}
	if s.peek() != '[' {
		return broken("must be an array")
	}
	l := m.Mutable(f.fd).List()
	return s.array(depth+1, func(int) *pathError {
		v, err := s.fieldValue(f, l.NewElement, depth+1)
		if err != nil {
			return err
		}
		l.Append(v)
		return nil
	})
}

// fieldValue reads one value of the field's type; empty makes a message to fill.
func (s *scanner) fieldValue(f *field, empty func() protoreflect.Value, depth int) (protoreflect.Value, *pathError) {
	c := s.peek()
	if f.plan != nil && f.plan.shape == shapeJSON {
		raw, err := s.raw()
		if err != nil {
			return protoreflect.Value{}, err
		}
		v := empty()
		// The body's buffer is not reused, so the slice may be kept.
		v.Message().Set(f.plan.raw, protoreflect.ValueOfBytes(raw))
		return v, nil
	}
	if f.plan != nil && f.plan.shape == shapeObject {
		if c != '{' {
			return protoreflect.Value{}, broken("must be an object")
		}
		v := empty()
		return v, s.object(depth+1, func(name []byte) *pathError {
			return s.member(v.Message(), f.plan, name, depth+1)
		})
	}
	switch {
	case c == '"':
		token, err := s.text()
		if err != nil {
			return protoreflect.Value{}, err
		}
		return f.fromText(string(unquote(token)), false)
	case c == '-' || c >= '0' && c <= '9':
		token, err := s.number()
		if err != nil {
			return protoreflect.Value{}, err
		}
		return f.fromNumber(token)
	case c == 't' && f.fd.Kind() == protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true), s.word("true")
	case c == 'f' && f.fd.Kind() == protoreflect.BoolKind:
		return protoreflect.ValueOfBool(false), s.word("false")
	}
	// Broken text is reported as such, good text of another type by its type.
	if err := s.value(depth); err != nil {
		return protoreflect.Value{}, err
	}
	return protoreflect.Value{}, broken("must be %s", f.want())
}

// want names what the field takes, for messages to people.
func (f *field) want() string {
	switch f.fd.Kind() {
	case protoreflect.BoolKind:
		return "true or false"
	case protoreflect.Int32Kind, protoreflect.Int64Kind:
		return "an integer"
	case protoreflect.EnumKind:
		return "one of " + strings.Join(enumNames(f.fd.Enum()), ", ")
	case protoreflect.BytesKind:
		return "a string in base64"
	}
	if f.plan != nil {
		switch f.plan.shape {
		case shapeTimestamp:
			return `a time such as "2026-11-29T12:00:00Z"`
		case shapeDuration:
			return `a duration such as "30s"`
		case shapeFieldMask:
			return `field names such as "displayName,isolation"`
		}
	}
	return "a string"
}

func enumNames(ed protoreflect.EnumDescriptor) (names []string) {
	for i := range ed.Values().Len() {
		if ev := ed.Values().Get(i); ev.Number() != 0 {
			names = append(names, string(ev.Name()))
		}
	}
	return names
}

// fromNumber reads an integer token. Fractions and exponents are refused even
// where their value is whole, because callers and logs would see two spellings.
func (f *field) fromNumber(token []byte) (protoreflect.Value, *pathError) {
	if k := f.fd.Kind(); k != protoreflect.Int32Kind && k != protoreflect.Int64Kind {
		return protoreflect.Value{}, broken("must be %s", f.want())
	}
	if bytes.ContainsAny(token, ".eE") {
		return protoreflect.Value{}, broken("must be an integer")
	}
	return f.fromText(string(token), false)
}

// fromText reads a field from the text of a JSON string or, with loose, of a
// query parameter, where a bool is a text too.
func (f *field) fromText(s string, loose bool) (protoreflect.Value, *pathError) {
	switch f.fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(s), nil
	case protoreflect.BoolKind:
		if loose && (s == "true" || s == "false") {
			return protoreflect.ValueOfBool(s == "true"), nil
		}
	case protoreflect.Int32Kind:
		if n, err := strconv.ParseInt(s, 10, 32); err == nil && strconv.FormatInt(n, 10) == s {
			return protoreflect.ValueOfInt32(int32(n)), nil
		}
	case protoreflect.Int64Kind:
		if n, err := strconv.ParseInt(s, 10, 64); err == nil && strconv.FormatInt(n, 10) == s {
			return protoreflect.ValueOfInt64(n), nil
		}
	case protoreflect.EnumKind:
		if ev := f.fd.Enum().Values().ByName(protoreflect.Name(s)); ev != nil && ev.Number() != 0 {
			return protoreflect.ValueOfEnum(ev.Number()), nil
		}
	case protoreflect.BytesKind:
		if raw, err := base64.StdEncoding.Strict().DecodeString(s); err == nil {
			return protoreflect.ValueOfBytes(raw), nil
		}
	case protoreflect.MessageKind:
		if m := wellKnown(f.plan.shape, s); m != nil {
			return protoreflect.ValueOfMessage(m.ProtoReflect()), nil
		}
	}
	return protoreflect.Value{}, broken("must be %s", f.want())
}

// wellKnown reads a time, a duration or a field mask; nil when s is none.
func wellKnown(k shape, s string) proto.Message {
	switch k {
	case shapeTimestamp:
		t, err := time.Parse(time.RFC3339Nano, s)
		if ts := timestamppb.New(t); err == nil && ts.CheckValid() == nil {
			return ts
		}
	case shapeDuration:
		if d, err := time.ParseDuration(s); err == nil && !strings.HasPrefix(s, "+") {
			return durationpb.New(d)
		}
	case shapeFieldMask:
		var fm fieldmaskpb.FieldMask
		if protojson.Unmarshal(appendText(nil, s), &fm) == nil {
			return &fm
		}
	}
	return nil
}

func appendMask(b []byte, m protoreflect.Message) []byte {
	out, err := protojson.Marshal(m.Interface())
	if err != nil {
		return append(b, `""`...)
	}
	return append(b, out...)
}

// checkText walks a message that did not come through decodeBody and applies
// the same rules to its texts: no U+0000, and Json that is JSON.
func checkText(m protoreflect.Message, p *plan) *pathError {
	if p.shape == shapeJSON {
		return checkJSON(m.Get(p.raw).Bytes())
	}
	for _, f := range p.fields {
		if !m.Has(f.fd) || f.fd.IsMap() {
			continue
		}
		v := m.Get(f.fd)
		if !f.fd.IsList() {
			if err := checkValue(v, f); err != nil {
				return err.within(f.name)
			}
			continue
		}
		for i := range v.List().Len() {
			if err := checkValue(v.List().Get(i), f); err != nil {
				return err.within("[" + strconv.Itoa(i) + "]").within(f.name)
			}
		}
	}
	return nil
}

func checkValue(v protoreflect.Value, f *field) *pathError {
	switch {
	case f.plan != nil:
		return checkText(v.Message(), f.plan)
	case f.fd.Kind() == protoreflect.StringKind && strings.IndexByte(v.String(), 0) >= 0:
		return broken("holds the character U+0000")
	}
	return nil
}
