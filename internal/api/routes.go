package api

import (
	"slices"
	"strings"
	"sync"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// route is one REST path of a method. Segments that are variables are "".
type route struct {
	method   string
	segments []string
	verb     string
	// input is the request message, fields those that the path holds.
	input  protoreflect.MessageDescriptor
	fields []protoreflect.Name
}

type routes []route

// api are the REST paths of all methods of bulkhead.v1, read once from the
// descriptors: for the Allow header, and for the fields that a path holds, which
// no body or query may.
var api = sync.OnceValue(func() (rs routes) {
	protoregistry.GlobalFiles.RangeFilesByPackage(pb.File_bulkhead_v1_json_proto.Package(), func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			for j := range f.Services().Get(i).Methods().Len() {
				rs = append(rs, readRoute(f.Services().Get(i).Methods().Get(j)))
			}
		}
		return true
	})
	return rs
})

func readRoute(m protoreflect.MethodDescriptor) route {
	h, _ := proto.GetExtension(m.Options(), annotations.E_Http).(*annotations.HttpRule)
	r := route{input: m.Input()}
	var path string
	r.method, path = pathOf(h)
	if i := strings.LastIndexByte(path, ':'); i > strings.LastIndexByte(path, '}') {
		path, r.verb = path[:i], path[i+1:]
	}
	for s := range strings.SplitSeq(strings.TrimPrefix(path, "/"), "/") {
		if name, ok := strings.CutPrefix(s, "{"); ok {
			r.fields = append(r.fields, protoreflect.Name(strings.TrimSuffix(name, "}")))
			s = ""
		}
		r.segments = append(r.segments, s)
	}
	return r
}

// held returns the JSON names of the fields of a request that its path holds.
func (rs routes) held(md protoreflect.MessageDescriptor) map[string]bool {
	held := map[string]bool{}
	for _, r := range rs {
		if r.input.FullName() != md.FullName() {
			continue
		}
		for _, name := range r.fields {
			held[md.Fields().ByName(name).JSONName()] = true
		}
	}
	return held
}

func pathOf(h *annotations.HttpRule) (method, path string) {
	switch {
	case h.GetGet() != "":
		return "GET", h.GetGet()
	case h.GetPost() != "":
		return "POST", h.GetPost()
	case h.GetPatch() != "":
		return "PATCH", h.GetPatch()
	case h.GetDelete() != "":
		return "DELETE", h.GetDelete()
	}
	return "", ""
}

// methods lists what a path can be asked with, for the Allow header.
func (rs routes) methods(path string) (out []string) {
	for _, r := range rs {
		if r.matches(path) && !slices.Contains(out, r.method) {
			out = append(out, r.method)
		}
	}
	slices.Sort(out)
	return out
}

func (r route) matches(path string) bool {
	if r.verb != "" {
		var ok bool
		if path, ok = strings.CutSuffix(path, ":"+r.verb); !ok {
			return false
		}
	}
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	if len(parts) != len(r.segments) {
		return false
	}
	for i, s := range r.segments {
		if s != "" && s != parts[i] {
			return false
		}
	}
	return true
}
