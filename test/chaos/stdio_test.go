package chaos

import "os"

// childVariable makes the test binary a server on stdio.
const childVariable = "BULKHEAD_TEST_CHAOS_CHILD"

func serveStdio() { os.Exit(1) }
