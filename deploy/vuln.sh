#!/bin/sh
# Checks the packages given (default ./...) for known vulnerabilities, offline.
#
# The database is built once from the pinned golang.org/x/vulndb module (see
# deploy/tools/vulndb.mod) and kept in the user's cache directory. A finding in
# a package that is built in counts, whether or not the affected symbol is seen
# to be called. It fails on a finding that deploy/vuln-allow.txt does not list,
# or lists with an end date that has passed.
#
#   deploy/vuln.sh [package ...]
#   deploy/vuln.sh -report FILE -allow FILE -today YYYY-MM-DD   judge only, for tests
set -eu

report=
allow=deploy/vuln-allow.txt
today=$(date -u +%F)
while [ $# -gt 0 ]; do
	case $1 in
	-report) report=$2 && shift 2 ;;
	-allow) allow=$2 && shift 2 ;;
	-today) today=$2 && shift 2 ;;
	*) break ;;
	esac
done

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# database prints the directory of the finished database.
database() {
	set -- "$(go list -modfile=deploy/tools/vulndb.mod -m -f '{{.Version}}' golang.org/x/vulndb)"
	db=${XDG_CACHE_HOME:-$HOME/.cache}/bulkhead/vulndb-$1
	if [ ! -d "$db" ]; then
		go mod download -modfile=deploy/tools/vulndb.mod golang.org/x/vulndb
		src=$(go list -modfile=deploy/tools/vulndb.mod -m -f '{{.Dir}}' golang.org/x/vulndb)
		mkdir -p "${db%/*}"
		new=$(mktemp -d "$db.XXXXXX")
		go tool -modfile=deploy/tools/vulndb.mod indexdb -vulns "$src/data/osv" -out "$new" >&2
		mv -T "$new" "$db" 2>/dev/null || rm -rf "$new" # another run was first
	fi
	echo "$db"
}

if [ -z "$report" ]; then
	db=$(database)
	report=$tmp/report.json
	go tool -modfile=deploy/tools/govulncheck.mod govulncheck -db "file://$db" -format json "${@:-./...}" >"$report"
fi

# One line "ID package" for each finding in a package that is built in. The
# report is a stream of indented JSON objects; the first frame of a finding's
# trace is where the vulnerability lies, and has no package when only the
# module is required.
awk '
	/^  "finding": \{/        { finding = 1; id = ""; frame = 0 }
	finding && /^    "osv": "/ { split($0, q, "\""); id = q[4] }
	finding && /^      \{/    { frame++ }
	finding && frame == 1 && /^        "package": "/ { split($0, q, "\""); print id, q[4] }
	/^\}/                     { finding = 0 }
' "$report" | sort -u >"$tmp/found"

# A report that was cut short must not pass for a clean one.
grep -q '"config": {' "$report" || { echo "vuln: no govulncheck report in $report" >&2; exit 1; }

awk -v today="$today" -v list="$allow" '
	FILENAME == list {
		if ($0 ~ /^[ \t]*(#|$)/) next
		if (NF < 3 || $1 !~ /^GO-[0-9]+-[0-9]+$/ || $2 !~ /^[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]$/) {
			print "vuln: " list ": line " FNR " is not: ID END-DATE REASON"; bad = 1; next
		}
		end[$1] = $2
		next
	}
	{ where[$1] = where[$1] " " $2 }
	END {
		for (id in where) {
			n++
			if (!(id in end)) { print "vuln: new: " id " in" where[id]; bad = 1 }
			else if (end[id] < today) { print "vuln: allowed only until " end[id] ": " id " in" where[id]; bad = 1 }
		}
		for (id in end) if (!(id in where)) print "vuln: note: " id " is allowed but no longer found"
		printf "vuln: %d finding(s), all allowed: %s\n", n, bad ? "no" : "yes"
		exit bad
	}
' "$allow" "$tmp/found"
