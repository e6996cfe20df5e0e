# What a developer runs; .ci/run calls `make check`. See README.md.
#
#   build      the server, as bin/server
#   test       all tests, with the race detector; needs no service, starts its own
#   lint       format, vet, staticcheck, protos
#   generate   proto/gen from the protos
#   fuzz       every fuzz target for FUZZTIME (default 10s)
#   fuzz-long  those that read what servers send, for FUZZTIME_LONG each (10m)
#   webhooks   10,000 webhooks to an endpoint that fails, over the kill of a replica
#   soak       64 callers for SOAK (default 1m)
#   bench      measurements as JSON; BENCH takes its flags, as in BENCH='-rounds 1'
#   check      all that CI asks for: lint, generated code fresh, vulnerabilities,
#              tests with the race detector, clean tree

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.NOTPARALLEL:
.PHONY: build test lint generate fuzz fuzz-long webhooks soak bench check format vet staticcheck protos fresh vuln race clean-tree

# Packages to test, and what to add to the report (see deploy/testreport).
PACKAGES ?= ./...
REPORT ?=
TEST_TIMEOUT ?= 15m
FUZZTIME ?= 10s
FUZZTIME_LONG ?= 10m
SOAK ?= 1m
BENCH ?=

# The race detector needs a C compiler. Without one the tests run without it and
# deploy/environment.sh says so; `make check` refuses.
RACE := $(shell command -v "$$(go env CC)" >/dev/null && echo -race)
# No build flag but -race is set anywhere here: each further one would compile
# every dependency once more.

# go-files lists what is written or generated here, tracked or not.
go-files = find . \( -name node_modules -o -name '.?*' -o -name bin \) -prune -o -name '*.go' -print0

build:
	go build -o bin/ ./cmd/server

# Always anew (-count=1): what is on the machine decides what is tested, and Go's
# cache does not see that.
test:
	@deploy/environment.sh
	go test -json -count=1 $(RACE) -timeout $(TEST_TIMEOUT) $(PACKAGES) | go run ./deploy/testreport $(REPORT)

lint: format vet staticcheck protos

format:
	@echo "== gofmt"
	@bad=$$($(go-files) | xargs -0 gofmt -l); [ -z "$$bad" ] || { echo "gofmt these:"; echo "$$bad"; exit 1; }

vet:
	@echo "== go vet"
	@go vet ./...

staticcheck:
	@echo "== staticcheck"
	@go tool -modfile=deploy/tools/staticcheck.mod staticcheck ./...

# proto/generate.sh installs buf from the lock file of proto/.
proto/node_modules/.bin/buf: proto/package-lock.json
	cd proto && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && touch node_modules node_modules/.bin/buf

protos: proto/node_modules/.bin/buf
	@echo "== buf lint and format"
	@cd proto && node_modules/.bin/buf lint --path bulkhead && node_modules/.bin/buf format --diff --exit-code --path bulkhead

generate:
	@echo "== generate"
	@proto/generate.sh

fresh: generate
	@changed=$$(git status --porcelain -- proto); [ -z "$$changed" ] || { \
		echo "generated code is not that of the protos: run make generate and commit"; echo "$$changed"; git --no-pager diff --stat -- proto; exit 1; }
	@echo "generated code: fresh"

vuln:
	@echo "== vulnerabilities"
	@deploy/vuln.sh

fuzz:
	@deploy/fuzz.sh $(FUZZTIME)

fuzz-long:
	@deploy/fuzz.sh $(FUZZTIME_LONG) internal/sessions internal/elicitation

webhooks:
	go test -count=1 -v -timeout 30m -run '^TestFO112_ManyToOneThatFailsOften$$' ./internal/webhooks -deliveries 10000

soak:
	go test -count=1 -v -timeout 30m -run '^TestSoak$$' ./cmd/server -duration $(SOAK)

bench:
	@go run ./test/bench $(BENCH)

race:
	@[ -n "$(RACE)" ] || { echo "the race detector needs a C compiler; run: apt-get install gcc libc6-dev"; exit 1; }

clean-tree:
	@changed=$$(git status --porcelain); [ -z "$$changed" ] || { echo "the tree is not clean:"; echo "$$changed"; exit 1; }
	@echo "tree: clean"

check: race lint fresh vuln test clean-tree
