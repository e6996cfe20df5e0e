package api

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"google.golang.org/protobuf/proto"

	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// serveGRPC hands a request to gRPC. A first message over the limit is answered
// here, so that the caller gets our error with its details: gRPC's own is bare.
func (s *Server) serveGRPC(w http.ResponseWriter, r *http.Request, limit int) {
	var prefix [5]byte // one byte of flags and the length (gRPC over HTTP/2, Length-Prefixed-Message)
	n, err := io.ReadFull(r.Body, prefix[:])
	if err == nil && int64(binary.BigEndian.Uint32(prefix[1:])) > int64(limit) {
		rq := &request{transport: "grpc", id: requestID(r.Header.Values(headerRequestID)), remote: parseAddr(r.RemoteAddr)}
		method := r.URL.Path
		if _, ok := rules[method]; !ok {
			method = "" // what a caller makes up is no label of a metric
		}
		a := answerFor(s.edge.finish(r.Context(), rq, method, tenant.Principal{}, nil, nil, tooLarge(limit), 0))
		writeTrailersOnly(w, a, rq.id)
		return
	}
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(prefix[:n]), r.Body), r.Body}
	if streaming[r.URL.Path] {
		w = newPacedWriter(w, streamWriteLimit)
	}
	s.grpc.ServeHTTP(w, r)
}

// writeTrailersOnly ends a gRPC request with a status and no message.
func writeTrailersOnly(w http.ResponseWriter, a *answer, requestID string) {
	h := w.Header()
	h.Set("Content-Type", "application/grpc")
	h.Set(headerRequestID, requestID)
	h.Set("Grpc-Status", strconv.Itoa(int(a.st.Code())))
	h.Set("Grpc-Message", url.PathEscape(a.st.Message()))
	if raw, err := proto.Marshal(a.st.Proto()); err == nil {
		h.Set("Grpc-Status-Details-Bin", base64.RawStdEncoding.EncodeToString(raw))
	}
	w.WriteHeader(http.StatusOK)
}
