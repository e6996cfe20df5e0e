#!/usr/bin/env bash
# Regenerates proto/gen from the .proto files. Needs node and go; the compiler comes from the lock file beside this
# script, the plugins from go.mod, so that their versions never differ from the runtime's.
set -euo pipefail
cd "$(dirname "$0")"
if [ ! -x node_modules/.bin/buf ] || [ node_modules -ot package-lock.json ]; then
  npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
  touch node_modules
fi
buf=node_modules/.bin/buf
"$buf" format -w --path bulkhead
"$buf" lint --path bulkhead
"$buf" generate
node openapi.mjs gen/openapiv2/bulkhead.swagger.json
gofmt -l gen
