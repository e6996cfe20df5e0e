#!/usr/bin/env bash
# Runs every fuzz target for a while, one after the other, in all packages or in
# the given directories: deploy/fuzz.sh [TIME [DIRECTORY...]]
# What it finds lies in the testdata/fuzz of the package and is to be committed
# with the fix.
set -euo pipefail
time=${1:-10s}
shift || true
[ $# -gt 0 ] || set -- .

targets=$(find "$@" -name node_modules -prune -o -name '*_test.go' -print | sort |
	xargs grep -oHE '^func Fuzz[A-Za-z0-9_]*' | sed 's/:func / /')
[ -n "$targets" ] || { echo "no fuzz target found" >&2; exit 1; }

failed=()
while read -r file target; do
	dir=./$(dirname "$file")
	echo "== $target in $dir for $time"
	go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 5s "$dir" </dev/null || failed+=("$target in $dir")
done <<<"$targets"

echo "$(wc -l <<<"$targets") fuzz targets ran, ${#failed[@]} failed"
if [ ${#failed[@]} -gt 0 ]; then
	printf 'failed: %s\n' "${failed[@]}"
	exit 1
fi
