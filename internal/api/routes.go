package api

import (
	"slices"
	"strings"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// route is one REST path of a method. Segments that are variables are "".
type route struct {
	method   string
	segments []string
	verb     string
}

type routes []route

// bind notes the REST path of each method of a service: for the Allow header,
// and for the fields that the path holds, which no body or query may.
func (rs routes) bind(sd protoreflect.ServiceDescriptor) routes {
	for i := range sd.Methods().Len() {
		m := sd.Methods().Get(i)
		h, _ := proto.GetExtension(m.Options(), annotations.E_Http).(*annotations.HttpRule)
		method, path := pathOf(h)
		if path == "" {
			continue
		}
		r := route{method: method}
		if i := strings.LastIndexByte(path, ':'); i > strings.LastIndexByte(path, '}') {
			path, r.verb = path[:i], path[i+1:]
		}
		p := planOf(m.Input())
		for s := range strings.SplitSeq(strings.TrimPrefix(path, "/"), "/") {
			if name, ok := strings.CutPrefix(s, "{"); ok {
				if fd := m.Input().Fields().ByName(protoreflect.Name(strings.TrimSuffix(name, "}"))); fd != nil {
					p.fromPath[fd.JSONName()] = true
				}
				s = ""
			}
			r.segments = append(r.segments, s)
		}
		rs = append(rs, r)
	}
	return rs
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
