#!/bin/sh
# Prints what the tests will use, one line each, and fails on what they cannot do
# without: node and npm for the MCP servers that others wrote, PostgreSQL's
# binaries for the database. The order of search is that of
# internal/postgres/embedded and internal/redis/redistest.
set -eu

missing=0
lacks() { # what, command to run
	echo "$1: none; run: $2" >&2
	missing=1
}
version() { "$@" 2>/dev/null | head -n 1; }

echo "go: $(go version | cut -d' ' -f3-), $(command -v go)"

if cc=$(command -v "$(go env CC)"); then
	echo "race detector: on, by $cc"
else
	echo "race detector: off, since it needs a C compiler; run: apt-get install gcc libc6-dev"
fi

if [ -n "${BULKHEAD_TEST_DATABASE_URL:-}" ]; then
	echo "postgres: the server that BULKHEAD_TEST_DATABASE_URL names"
else
	bin=
	for dir in $(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -t/ -k5 -rV); do
		[ -x "$dir/initdb" ] && [ -x "$dir/postgres" ] && bin=$dir && break
	done
	if [ -z "$bin" ] && path=$(command -v postgres); then
		dir=$(dirname "$(readlink -f "$path")")
		[ -x "$dir/initdb" ] && bin=$dir
	fi
	if [ -n "$bin" ]; then
		echo "postgres: private servers of $bin, $(version "$bin/postgres" --version)"
	else
		lacks postgres "apt-get install postgresql"
	fi
fi

if redis=$(command -v redis-server); then
	echo "redis: in-process and private servers of $redis, $(version "$redis" --version | cut -d' ' -f3)"
else
	echo "redis: in-process only; to test with a real one, too, run: apt-get install redis-server"
fi

if node=$(command -v node) && command -v npm >/dev/null; then
	echo "node: $node, $(version node --version), npm $(version npm --version)"
else
	lacks "node and npm" "apt-get install nodejs npm"
fi
exit $missing
