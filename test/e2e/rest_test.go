package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"google.golang.org/genproto/googleapis/api/annotations"
	_ "google.golang.org/genproto/googleapis/rpc/errdetails" // errors carry these
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// grpcConn calls over gRPC with the given metadata.
type grpcConn struct {
	grpc.ClientConnInterface
	header map[string]string
}

func (c grpcConn) Invoke(ctx context.Context, method string, in, out any, opts ...grpc.CallOption) error {
	for k, v := range c.header {
		ctx = metadata.AppendToOutgoingContext(ctx, k, v)
	}
	return c.ClientConnInterface.Invoke(ctx, method, in, out, opts...)
}

// restConn makes REST requests of the same generated clients: path, verb and
// body by the google.api.http option of the method, JSON by protojson. It shares
// no code with the server's gateway, so that it checks that one.
type restConn struct {
	http   *http.Client
	url    string
	header map[string]string
}

func (c restConn) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, fmt.Errorf("no method streams")
}

func (c restConn) Invoke(ctx context.Context, method string, in, out any, _ ...grpc.CallOption) error {
	verb, target, body, err := transcode(method, in.(proto.Message))
	if err != nil {
		return err
	}
	code, _, answer, err := send(ctx, c.http, verb, c.url+target, body, c.header)
	if err != nil {
		return status.FromContextError(err).Err()
	}
	if code != http.StatusOK {
		return restError(code, answer)
	}
	plain, err := inline(out.(proto.Message).ProtoReflect().Descriptor(), answer, wrapJSON)
	if err != nil {
		return fmt.Errorf("%s answers %q: %w", method, answer, err)
	}
	return protojson.Unmarshal(plain, out.(proto.Message)) // strict: no unknown member
}

// send makes one request. A nil body sends none.
func send(ctx context.Context, client *http.Client, verb, target string, body []byte, header map[string]string) (int, http.Header, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, verb, target, bytes.NewReader(body))
	if err != nil {
		return 0, nil, nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	res, err := client.Do(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer func() { _ = res.Body.Close() }()
	answer, err := io.ReadAll(res.Body)
	return res.StatusCode, res.Header, answer, err
}

// restFailure is an error as REST has it: the status and the HTTP code.
type restFailure struct {
	*status.Status
	http int
}

func (e *restFailure) Error() string              { return fmt.Sprintf("HTTP %d: %s", e.http, e.Message()) }
func (e *restFailure) GRPCStatus() *status.Status { return e.Status }

func restError(code int, body []byte) error {
	var st spb.Status
	if err := protojson.Unmarshal(body, &st); err != nil {
		return fmt.Errorf("HTTP %d with %q: %w", code, body, err)
	}
	return &restFailure{status.FromProto(&st), code}
}

// transcode returns the request line and the body of a method.
func transcode(method string, in proto.Message) (verb, target string, body []byte, err error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return "", "", nil, err
	}
	rule := proto.GetExtension(d.Options(), annotations.E_Http).(*annotations.HttpRule)
	raw, err := protojson.Marshal(in)
	if err == nil {
		raw, err = inline(in.ProtoReflect().Descriptor(), raw, unwrapJSON)
	}
	var members map[string]json.RawMessage
	if err == nil {
		err = json.Unmarshal(raw, &members)
	}
	if err != nil {
		return "", "", nil, err
	}
	verb, template := verbOf(rule)
	fields := in.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		hole := "{" + string(f.Name()) + "}"
		if strings.Contains(template, hole) {
			template = strings.Replace(template, hole, url.PathEscape(text(members[f.JSONName()])), 1)
			delete(members, f.JSONName())
		}
	}
	if rule.GetBody() == "*" {
		body, err = encode(members)
		return verb, template, body, err
	}
	query := url.Values{}
	for k, v := range members {
		query.Set(k, text(v))
	}
	if len(query) > 0 {
		template += "?" + query.Encode()
	}
	return verb, template, nil, nil
}

func verbOf(r *annotations.HttpRule) (verb, template string) {
	switch {
	case r.GetGet() != "":
		return http.MethodGet, r.GetGet()
	case r.GetDelete() != "":
		return http.MethodDelete, r.GetDelete()
	case r.GetPatch() != "":
		return http.MethodPatch, r.GetPatch()
	}
	return http.MethodPost, r.GetPost()
}

// text is a JSON scalar as a path or a query has it.
func text(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	return string(raw)
}

// encode marshals without changing what is raw already.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return b.Bytes(), err
}

const jsonMessage = protoreflect.FullName("bulkhead.v1.Json")

// inline walks the JSON of a message and passes each member of the type Json
// through turn.
func inline(d protoreflect.MessageDescriptor, raw []byte, turn func([]byte) ([]byte, error)) ([]byte, error) {
	if d.FullName() == jsonMessage {
		return turn(raw)
	}
	if strings.HasPrefix(string(d.FullName()), "google.protobuf.") {
		return raw, nil
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return nil, err
	}
	for name, value := range members {
		f := d.Fields().ByJSONName(name)
		if f == nil || f.Message() == nil || f.IsMap() {
			continue
		}
		if !f.IsList() {
			out, err := inline(f.Message(), value, turn)
			if err != nil {
				return nil, err
			}
			members[name] = out
			continue
		}
		var items []json.RawMessage
		if err := json.Unmarshal(value, &items); err != nil {
			return nil, err
		}
		for i := range items {
			out, err := inline(f.Message(), items[i], turn)
			if err != nil {
				return nil, err
			}
			items[i] = out
		}
		out, err := encode(items)
		if err != nil {
			return nil, err
		}
		members[name] = out
	}
	return encode(members)
}

// wrapJSON makes the proto form, {"raw":base64}, of plain JSON.
func wrapJSON(plain []byte) ([]byte, error) {
	return []byte(`{"raw":"` + base64.StdEncoding.EncodeToString(plain) + `"}`), nil
}

// unwrapJSON makes plain JSON of the proto form.
func unwrapJSON(wrapped []byte) ([]byte, error) {
	var m struct{ Raw []byte }
	err := json.Unmarshal(wrapped, &m)
	return m.Raw, err
}

// client is every service over one transport as one caller.
type client struct {
	pb.TenantServiceClient
	pb.KeyServiceClient
	pb.ServerServiceClient
	pb.ContractServiceClient
	pb.SessionServiceClient
	pb.CatalogServiceClient
	pb.CallServiceClient
	pb.ConsentServiceClient
	pb.AuditServiceClient
	pb.WebhookServiceClient
	pb.EventServiceClient
}

func newClient(c grpc.ClientConnInterface) *client {
	return &client{pb.NewTenantServiceClient(c), pb.NewKeyServiceClient(c), pb.NewServerServiceClient(c), pb.NewContractServiceClient(c),
		pb.NewSessionServiceClient(c), pb.NewCatalogServiceClient(c), pb.NewCallServiceClient(c), pb.NewConsentServiceClient(c),
		pb.NewAuditServiceClient(c), pb.NewWebhookServiceClient(c), pb.NewEventServiceClient(c)}
}

// codeOf is the gRPC code of an error of either transport.
func codeOf(err error) codes.Code { return status.Code(err) }
