// Package proto holds the public API's definition: the .proto files, the code
// generated from them below gen, and the OpenAPI document of its REST face.
package proto

import _ "embed"

// OpenAPI is the OpenAPI 2.0 document that is served as /openapi.json.
//
//go:embed gen/openapiv2/bulkhead.swagger.json
var OpenAPI []byte
