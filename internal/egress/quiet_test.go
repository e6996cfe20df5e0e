package egress

import (
	"io"
	"log"
)

// quiet keeps the handshake errors that tests provoke out of the output.
var quiet = log.New(io.Discard, "", 0)
