package webhooks

import (
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

func reason(err error) string {
	if f, ok := fault.As(err); ok {
		return f.Reason
	}
	return ""
}

func field(err error) string {
	if f, ok := fault.As(err); ok && len(f.Fields) > 0 {
		return f.Fields[0].Path
	}
	return ""
}
