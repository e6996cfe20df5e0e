package api

import (
	"fmt"
	"strings"
	"sync"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// shape says how a message looks in JSON.
type shape uint8

const (
	shapeObject shape = iota
	shapeJSON         // bulkhead.v1.Json: the value itself
	shapeTimestamp
	shapeDuration
	shapeFieldMask
	shapeAny // only written, in the details of errors
)

var shapes = map[protoreflect.FullName]shape{
	"bulkhead.v1.Json":          shapeJSON,
	"google.protobuf.Timestamp": shapeTimestamp,
	"google.protobuf.Duration":  shapeDuration,
	"google.protobuf.FieldMask": shapeFieldMask,
	"google.protobuf.Any":       shapeAny,
}

// plan is what the codec knows about one message type, worked out once.
type plan struct {
	shape  shape
	fields []*field
	byName map[string]*field
	// raw is the one field of bulkhead.v1.Json.
	raw protoreflect.FieldDescriptor
	// fromPath names the fields that REST takes from the path, never the body.
	fromPath map[string]bool
}

type field struct {
	fd   protoreflect.FieldDescriptor
	name string
	key  []byte // "name":
	plan *plan  // of the message that the field or its items hold, else nil
}

// plans caches a plan for each message descriptor. Its size is bounded by the
// types that are compiled in.
var plans sync.Map

func planOf(md protoreflect.MessageDescriptor) *plan {
	if p, ok := plans.Load(md.FullName()); ok {
		return p.(*plan)
	}
	building := map[protoreflect.FullName]*plan{}
	build(md, building)
	for name, b := range building {
		plans.LoadOrStore(name, b)
	}
	p, _ := plans.Load(md.FullName()) // perhaps that of another goroutine
	return p.(*plan)
}

func build(md protoreflect.MessageDescriptor, done map[protoreflect.FullName]*plan) *plan {
	if p, ok := done[md.FullName()]; ok {
		return p
	}
	p := &plan{shape: shapes[md.FullName()], byName: map[string]*field{}, fromPath: api().held(md)}
	done[md.FullName()] = p
	if p.shape == shapeJSON {
		p.raw = md.Fields().ByName("raw")
	}
	if p.shape != shapeObject {
		return p
	}
	for i := range md.Fields().Len() {
		fd := md.Fields().Get(i)
		f := &field{fd: fd, name: fd.JSONName(), key: fmt.Appendf(nil, "%q:", fd.JSONName())}
		if fd.Message() != nil && !fd.IsMap() {
			f.plan = build(fd.Message(), done)
		}
		p.fields = append(p.fields, f)
		p.byName[f.name] = f
	}
	return p
}

// unknown explains a member that the message does not have.
func (p *plan) unknown(name string) *pathError {
	for _, f := range p.fields {
		if strings.EqualFold(f.name, name) || string(f.fd.Name()) == name {
			return broken("unknown field; it is written %s", f.name)
		}
	}
	return broken("unknown field")
}
