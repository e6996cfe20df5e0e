package api

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

func TestDecode_Refuses(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat("[", 65) + strings.Repeat("]", 65)
	for name, c := range map[string]struct {
		into       proto.Message
		body       string
		path, rule string
	}{
		"empty text":              {&pb.CreateCallRequest{}, " ", "", "is empty"},
		"array":                   {&pb.CreateCallRequest{}, `[]`, "", "must be a JSON object"},
		"null":                    {&pb.CreateCallRequest{}, `null`, "", "must be a JSON object"},
		"data after":              {&pb.CreateCallRequest{}, `{} {}`, "", "data after"},
		"cut off":                 {&pb.CreateCallRequest{}, `{"server":"a`, "server", "cut off"},
		"unknown":                 {&pb.CreateCallRequest{}, `{"nope":1}`, "nope", "unknown field"},
		"miscased (FO-070)":       {&pb.CreateCallRequest{}, `{"tool":"a","Tool":"b"}`, "Tool", "it is written tool"},
		"miscased json (FO-070)":  {&pb.CreateCallRequest{}, `{"Arguments":{}}`, "Arguments", "it is written arguments"},
		"proto name":              {&pb.CreateCallRequest{}, `{"request_id":"a"}`, "request_id", "it is written requestId"},
		"duplicate":               {&pb.CreateCallRequest{}, `{"tool":"a","tool":"a"}`, "tool", "appears twice"},
		"duplicate by escape":     {&pb.CreateCallRequest{}, `{"tool":"a","\u0074ool":"b"}`, "tool", "appears twice"},
		"duplicate in json":       {&pb.CreateCallRequest{}, `{"arguments":{"x":[{"a":1,"b":2,"a":3}]}}`, "arguments.x[0].a", "appears twice"},
		"path in body":            {&pb.CreateCallRequest{}, `{"sessionId":"ses_x"}`, "sessionId", "part of the path"},
		"string for json is fine": {&pb.CreateCallRequest{}, `{"arguments":"x"}`, "", ""},
		"number for string":       {&pb.CreateCallRequest{}, `{"tool":1}`, "tool", "must be a string"},
		"null for string":         {&pb.CreateCallRequest{}, `{"tool":null}`, "tool", "must be a string"},
		"null for message":        {&pb.CreateServerRequest{}, `{"http":null}`, "http", "must be an object"},
		"object for string":       {&pb.CreateCallRequest{}, `{"tool":{"a":1}}`, "tool", "must be a string"},
		"broken object":           {&pb.CreateCallRequest{}, `{"tool":{"a":}}`, "tool.a", "not valid JSON"},
		"string for bool":         {&pb.CreateKeyRequest{}, `{"mayDecide":"true"}`, "mayDecide", "true or false"},
		"number for bool":         {&pb.CreateKeyRequest{}, `{"mayDecide":1}`, "mayDecide", "true or false"},
		"fraction":                {&pb.CheckContractRequest{}, `{"revision":1.0}`, "revision", "an integer"},
		"exponent":                {&pb.CheckContractRequest{}, `{"revision":1e2}`, "revision", "an integer"},
		"too large":               {&pb.CheckContractRequest{}, `{"revision":2147483648}`, "revision", "an integer"},
		"odd integer text":        {&pb.CheckContractRequest{}, `{"revision":"+1"}`, "revision", "an integer"},
		"leading zero":            {&pb.CheckContractRequest{}, `{"revision":01}`, "", "not valid JSON"},
		"enum number":             {&pb.CreateKeyRequest{}, `{"role":2}`, "role", "must be one of OPERATOR, ADMIN"},
		"enum number as text":     {&pb.CreateKeyRequest{}, `{"role":"2"}`, "role", "must be one of"},
		"enum unknown":            {&pb.CreateKeyRequest{}, `{"role":"ROOT"}`, "role", "must be one of"},
		"enum lower case":         {&pb.CreateKeyRequest{}, `{"role":"admin"}`, "role", "must be one of"},
		"enum unspecified":        {&pb.CreateKeyRequest{}, `{"role":"ROLE_UNSPECIFIED"}`, "role", "must be one of"},
		"list":                    {&pb.CreateKeyRequest{}, `{"servers":"a"}`, "servers", "must be an array"},
		"list item":               {&pb.CreateKeyRequest{}, `{"servers":["a",2]}`, "servers[1]", "must be a string"},
		"two of a oneof":          {&pb.CreateServerRequest{}, `{"http":{"url":"x"},"stdio":{"runtime":"y"}}`, "stdio", "excludes http"},
		"nested unknown":          {&pb.CreateServerRequest{}, `{"http":{"URL":"x"}}`, "http.URL", "it is written url"},
		"duration":                {&pb.CreateCallRequest{}, `{"wait":"soon"}`, "wait", "a duration"},
		"duration number":         {&pb.CreateCallRequest{}, `{"wait":10}`, "wait", "a duration"},
		"time":                    {&pb.CreateKeyRequest{}, `{"expireTime":"tomorrow"}`, "expireTime", "a time"},
		"field mask":              {&pb.UpdateServerRequest{}, `{"updateMask":"display_name"}`, "updateMask", "field names"},
		"NUL raw":                 {&pb.CreateCallRequest{}, "{\"tool\":\"a\x00\"}", "tool", "control character"},
		"NUL escaped":             {&pb.CreateCallRequest{}, `{"tool":"a\u0000"}`, "tool", "U+0000"},
		"NUL in json":             {&pb.CreateCallRequest{}, `{"arguments":{"a":["\u0000"]}}`, "arguments.a[0]", "U+0000"},
		"NUL in a name":           {&pb.CreateCallRequest{}, `{"arguments":{"\u0000":1}}`, "arguments", "U+0000"},
		"lone high surrogate":     {&pb.CreateCallRequest{}, `{"tool":"\ud800"}`, "tool", "lone surrogate"},
		"lone low surrogate":      {&pb.CreateCallRequest{}, `{"arguments":{"a":"\udc00x"}}`, "arguments.a", "lone surrogate"},
		"high twice":              {&pb.CreateCallRequest{}, `{"tool":"\ud800\ud800"}`, "tool", "lone surrogate"},
		"bad UTF-8":               {&pb.CreateCallRequest{}, "{\"tool\":\"\xff\"}", "tool", "not valid UTF-8"},
		"bad UTF-8 in json":       {&pb.CreateCallRequest{}, "{\"arguments\":{\"a\":\"\xc0\xaf\"}}", "arguments.a", "not valid UTF-8"},
		"bad escape":              {&pb.CreateCallRequest{}, `{"tool":"\x41"}`, "tool", "not valid JSON"},
		"too deep":                {&pb.CreateCallRequest{}, `{"arguments":` + deep + `}`, "arguments" + strings.Repeat("[0]", 64), "deeper than 64"},
		"trailing comma":          {&pb.CreateCallRequest{}, `{"tool":"a",}`, "", "not valid JSON"},
		"comment":                 {&pb.CreateCallRequest{}, `{/**/"tool":"a"}`, "", "not valid JSON"},
		"bytes":                   {&pb.VerifyAuditEntriesRequest{}, `{"checkpoint":{"signature":"%"}}`, "checkpoint.signature", "base64"},
		"number of no grammar":    {&pb.CreateCallRequest{}, `{"arguments":[1,-]}`, "arguments[1]", "not valid JSON"},
	} {
		err := decodeBody([]byte(c.body), c.into)
		switch {
		case err == nil && c.rule != "":
			t.Errorf("%s: accepted", name)
		case err != nil && c.rule == "":
			t.Errorf("%s: refused: %v", name, err)
		case err != nil && (err.path != c.path || !strings.Contains(err.rule, c.rule)):
			t.Errorf("%s: got %q: %q, want %q: %q", name, err.path, err.rule, c.path, c.rule)
		}
	}
}

func TestDecode_KeepsJSONByteForByte(t *testing.T) {
	t.Parallel()
	args := `{ "n":1.0, "big":12345678901234567890.12e-3,"s":"\u00e4\ud83d\ude00" , "Arguments":[null , true]}`
	var in pb.CreateCallRequest
	body := `{"server":"cal\u0065ndar","arguments":` + args + `,"wait":"1.5s","tool":"名"}`
	if err := decodeBody([]byte(body), &in); err != nil {
		t.Fatal(err)
	}
	want := &pb.CreateCallRequest{Server: "calendar", Tool: "名", Wait: durationpb.New(1500 * time.Millisecond),
		Arguments: &pb.Json{Raw: []byte(args)}}
	if !proto.Equal(&in, want) {
		t.Fatalf("got %v", &in)
	}
	out := string(marshal(&in))
	if !strings.Contains(out, `"arguments":`+args+`,`) {
		t.Fatalf("arguments were changed: %s", out)
	}
}

func TestDecode_Types(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]proto.Message{
		`{"order":"CHAIN","afterSequence":"9007199254740993"}`: &pb.ListAuditEntriesRequest{Order: pb.ListAuditEntriesRequest_CHAIN, AfterSequence: 9007199254740993},
		`{"afterSequence":9007199254740993,"pageSize":"7"}`:    &pb.ListAuditEntriesRequest{AfterSequence: 9007199254740993, PageSize: 7},
	} {
		got := &pb.ListAuditEntriesRequest{}
		if err := decodeBody([]byte(body), got); err != nil || !proto.Equal(got, want) {
			t.Errorf("%s: %v, %v", body, got, err)
		}
	}
	var up pb.UpdateServerRequest
	if err := decodeBody([]byte(`{"displayName":"","sharedStateAcknowledged":false,"updateMask":"displayName,http.url"}`), &up); err != nil {
		t.Fatal(err)
	}
	if up.DisplayName == nil || up.SharedStateAcknowledged == nil || up.Isolation != nil ||
		strings.Join(up.GetUpdateMask().GetPaths(), " ") != "display_name http.url" {
		t.Errorf("presence is lost: %v", &up)
	}
	var s pb.OpenSessionRequest
	if err := decodeBody([]byte(`{"ttl":"8h"}`), &s); err != nil || s.GetTtl().AsDuration() != 8*time.Hour {
		t.Errorf("ttl: %v, %v", s.GetTtl(), err)
	}
}

// FO-114 and FO-115: documented fields are always there, 64-bit integers are
// strings, enums are words.
func TestEncode_EmitsDefaults(t *testing.T) {
	t.Parallel()
	for want, m := range map[string]proto.Message{
		`{"auditEntries":[],"nextPageToken":""}`:                       &pb.ListAuditEntriesResponse{},
		`{"tenantId":"","displayName":"","state":"STATE_UNSPECIFIED"}`: &pb.Tenant{},
		`{"ok":false,"entries":"9007199254740993","unsealed":"0","lost":"0","detailsChecked":false,"problems":[],` +
			`"moreProblems":"0","lastSequence":"-1","lastDigest":"","checkpoint":{"tenantId":"","sequence":"0","digest":"","keyId":"",` +
			`"signature":"AP8=","createTime":"2026-11-29T12:00:00.5Z"}}`: &pb.VerifyAuditEntriesResponse{Entries: 9007199254740993, LastSequence: -1,
			Checkpoint: &pb.AuditCheckpoint{Signature: []byte{0, 255}, CreateTime: timestamppb.New(time.Date(2026, 11, 29, 12, 0, 0, 5e8, time.UTC))}},
		`{"negotiation":"0s","decision":"0.000041s","execution":"-1.500s"}`: &pb.Call_Timings{Negotiation: durationpb.New(0),
			Decision: durationpb.New(41 * time.Microsecond), Execution: durationpb.New(-1500 * time.Millisecond)},
		`{"code":"a\"\\\n\u0001\u2028ä\ufffd","detail":""}`: &pb.Finding{Code: "a\"\\\n\x01\u2028ä\xff"},
	} {
		got := marshal(m)
		var a, b any
		if err := json.Unmarshal(got, &a); err != nil {
			t.Errorf("%s: %v", got, err)
			continue
		}
		if err := json.Unmarshal([]byte(want), &b); err != nil {
			t.Fatal(err)
		}
		x, _ := json.Marshal(a)
		y, _ := json.Marshal(b)
		if !bytes.Equal(x, y) {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// Every field of every message must have a form in JSON, in both directions for
// requests: a kind that the codec does not know would panic in production.
func TestCodec_KnowsEveryField(t *testing.T) {
	t.Parallel()
	n := 0
	protoregistry.GlobalTypes.RangeMessages(func(mt protoreflect.MessageType) bool {
		if mt.Descriptor().ParentFile().Package() != "bulkhead.v1" || mt.Descriptor().FullName() == "bulkhead.v1.Json" {
			return true
		}
		n++
		m := mt.New()
		fill(m, 0)
		out := marshal(m.Interface())
		if err := checkJSON(out); err != nil {
			t.Errorf("%s: %v in %s", mt.Descriptor().FullName(), err, out)
			return true
		}
		back := mt.New()
		p := planOf(mt.Descriptor())
		s := newScanner(out)
		s.peek()
		if err := s.object(0, func(name []byte) *pathError { return s.member(back, p, name, 0) }); err != nil {
			t.Errorf("%s: %v in %s", mt.Descriptor().FullName(), err, out)
		} else if !proto.Equal(m.Interface(), back.Interface()) {
			t.Errorf("%s: %v became %v", mt.Descriptor().FullName(), m, back)
		}
		return true
	})
	if n < 60 {
		t.Fatalf("only %d messages", n)
	}
}

// fill sets every field but the later members of a oneof.
func fill(m protoreflect.Message, depth int) {
	if depth > 4 {
		return
	}
	fds := m.Descriptor().Fields()
	for i := range fds.Len() {
		fd := fds.Get(i)
		if o := fd.ContainingOneof(); o != nil && m.WhichOneof(o) != nil {
			continue
		}
		value := func(empty func() protoreflect.Value) protoreflect.Value {
			switch fd.Kind() {
			case protoreflect.BoolKind:
				return protoreflect.ValueOfBool(true)
			case protoreflect.Int32Kind:
				return protoreflect.ValueOfInt32(-7)
			case protoreflect.Int64Kind:
				return protoreflect.ValueOfInt64(1<<53 + 1)
			case protoreflect.StringKind:
				return protoreflect.ValueOfString("a\"b\\c\u00e4\n")
			case protoreflect.BytesKind:
				return protoreflect.ValueOfBytes([]byte{1, 2, 3, 4})
			case protoreflect.EnumKind:
				return protoreflect.ValueOfEnum(1)
			}
			v := empty()
			switch x := v.Message().Interface().(type) {
			case *pb.Json:
				x.Raw = []byte(`{"a": [1.0]}`)
			case *timestamppb.Timestamp:
				x.Seconds, x.Nanos = 1_790_000_000, 120_000_000
			case *durationpb.Duration:
				x.Seconds, x.Nanos = 90, 1
			default:
				if strings.HasPrefix(string(v.Message().Descriptor().FullName()), "bulkhead.") {
					fill(v.Message(), depth+1)
				}
			}
			return v
		}
		if fd.IsList() {
			l := m.Mutable(fd).List()
			l.Append(value(l.NewElement))
			l.Append(value(l.NewElement))
			continue
		}
		m.Set(fd, value(func() protoreflect.Value { return m.NewField(fd) }))
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		`{"server":"calendar","tool":"t","arguments":{"a":[1,{"b":null}]},"wait":"10s","requestId":"r"}`,
		`{"arguments":"\ud83d\ude00\u00e4"}`, `{"tool":"a\u0000"}`, `{"a":1,"a":2}`, `[[[[`, "{\"tool\":\"\xff\"}", `{"wait":"1h2m"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		valid := checkJSON(b) == nil
		if valid && !json.Valid(b) {
			t.Fatalf("accepted what is no JSON: %q", b)
		}
		in := &pb.CreateCallRequest{}
		if decodeBody(b, in) != nil {
			return
		}
		if !valid {
			t.Fatalf("decoded what is no JSON: %q", b)
		}
		// The session is in the path, so that its field never comes from a body.
		out := bytes.Replace(marshal(in), []byte(`"sessionId":"",`), nil, 1)
		back := &pb.CreateCallRequest{}
		if err := decodeBody(out, back); err != nil || !proto.Equal(in, back) {
			t.Fatalf("%q became %q: %v", b, out, err)
		}
		if in.GetArguments() != nil && !bytes.Contains(b, in.GetArguments().GetRaw()) {
			t.Fatalf("arguments were changed: %q", in.GetArguments().GetRaw())
		}
	})
}

func benchCall(result []byte) *pb.Call {
	return &pb.Call{CallId: "call_01hzzzzzzzzzzzzzzzzzzzzzzz", SessionId: "ses_01hzzzzzzzzzzzzzzzzzzzzzzz", Revision: 3, Server: "calendar",
		Kind: pb.Call_TOOL, Name: "get_availability", Effect: pb.Tool_READ, Arguments: &pb.Json{Raw: []byte(`{"day":"2026-11-29"}`)},
		ArgumentsDigest: "args-1:sha256:00", RequestId: "req_1", State: pb.Call_SUCCEEDED,
		Decision: &pb.Decision{Outcome: pb.Decision_ALLOW, Checks: []*pb.Decision_Check{{Check: "protocol", Passed: true}, {Check: "host", Passed: true},
			{Check: "client", Passed: true}, {Check: "server", Passed: true}, {Check: "origin", Passed: true}, {Check: "transport", Passed: true},
			{Check: "method", Passed: true}, {Check: "capability", Passed: true}, {Check: "subject", Passed: true}, {Check: "definition", Passed: true},
			{Check: "audience", Passed: true}, {Check: "scopes", Passed: true}, {Check: "arguments", Passed: true}, {Check: "payload", Passed: true},
			{Check: "consent", Passed: true}, {Check: "timeout", Passed: true}, {Check: "budget", Passed: true}}},
		Timings: &pb.Call_Timings{Execution: durationpb.New(time.Millisecond)}, Result: &pb.Json{Raw: result},
		Source: &pb.Call_Source{Server: "calendar", Untrusted: true}, Recorded: pb.Call_DURABLE, CreateTime: timestamppb.New(time.Unix(1_790_000_000, 0))}
}
