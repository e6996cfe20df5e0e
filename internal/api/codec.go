package api

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/protobuf/proto"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// encoded is an answer that a service hands over as finished JSON, such as a
// catalog that is stored encoded. REST writes its bytes as they are.
type encoded []byte

// codec is the gateway's marshaler: strict when it reads, complete when it
// writes, and lossless for Json fields (see decodeBody and appendMessage).
type codec struct{}

var _ runtime.Marshaler = codec{}

// ContentType implements runtime.Marshaler.
func (codec) ContentType(any) string { return "application/json" }

// Marshal implements runtime.Marshaler.
func (codec) Marshal(v any) ([]byte, error) {
	switch v := v.(type) {
	case encoded:
		return v, nil
	case proto.Message:
		return marshal(v), nil
	}
	return nil, fmt.Errorf("api: cannot encode %T", v)
}

func marshal(m proto.Message) []byte {
	r := m.ProtoReflect()
	return appendMessage(make([]byte, 0, 2048+proto.Size(m)*9/8), r, planOf(r.Descriptor()))
}

// Unmarshal implements runtime.Marshaler.
func (codec) Unmarshal(b []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("api: cannot decode into %T", v)
	}
	if err := decodeBody(b, m); err != nil {
		return err.fault()
	}
	return nil
}

// NewDecoder implements runtime.Marshaler. The reader is the request's body; a
// fault is left there too, because the gateway passes on only its text.
func (c codec) NewDecoder(r io.Reader) runtime.Decoder {
	return runtime.DecoderFunc(func(v any) error {
		b, err := readBody(r)
		if err != nil {
			err = bodyFault(err)
		} else if len(b) > 0 {
			err = c.Unmarshal(b, v)
		}
		if err == nil {
			return nil
		}
		if rb, ok := r.(*restBody); ok {
			rb.err = err
		}
		// The gateway takes io.EOF for an empty body.
		return errors.New(err.Error())
	})
}

// readBody reads all of r, into one buffer of the right size where the request
// announced it.
func readBody(r io.Reader) ([]byte, error) {
	rb, ok := r.(*restBody)
	if !ok || rb.size <= 0 || rb.size > int64(rb.limit) {
		return io.ReadAll(r)
	}
	b := make([]byte, rb.size)
	_, err := io.ReadFull(r, b)
	return b, err
}

// bodyFault says why a body could not be read. A body that was cut off is never
// decoded, even if what came is valid.
func bodyFault(err error) error {
	switch {
	case fault.Is(err, fault.TooLarge):
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSlowBody
	}
	return fault.New(fault.Canceled, "REQUEST_CUT_OFF", "the request body did not arrive whole").Cause(err)
}

// NewEncoder implements runtime.Marshaler.
func (c codec) NewEncoder(w io.Writer) runtime.Encoder {
	return runtime.EncoderFunc(func(v any) error {
		b, err := c.Marshal(v)
		if err != nil {
			return err
		}
		_, err = w.Write(b)
		return err
	})
}
