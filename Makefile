# Targets for development. `make help` lists them.
# No target requires root; packages are installed into .venv.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Extra arguments for the tool of a target: make test ARGS="-k wire -x"
ARGS ?=
CPP := $(shell find native benchmarks -name '*.cpp' -o -name '*.h' | sort)
UV_VERSION := 0.13.7
# The whole suite uses two workers per core, because tests wait half of the time. Each worker runs whole files,
# because the tests of a file may share a cluster. A crashed worker ends the run: with loadfile, xdist 3.8 can
# wait forever for its replacement.
# Not in the configuration of pytest: a part of the suite (ARGS, or plain pytest) runs in one process, where -x
# stops at once and a debugger works.
WORKERS = $(if $(strip $(ARGS)),,-n $$(($$(nproc) < 4 ? 2 * $$(nproc) : 8)) --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 0)
# Long tests are CPU-bound.
LONG_WORKERS = $(if $(strip $(ARGS)),,-n logical --dist loadfile --no-loadscope-reorder --max-worker-restart 0)

# Many containers set it. Every process of Genie or a test would then compile Genie again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-unit test-long test-all sim faults durations coverage lint format lock bench bench-compare soak clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 24

run: $(VENV)/.native ## run the tour: start a cluster, use it, stop it
	@$(BIN)/python examples/tour.py $(ARGS)

test: $(VENV)/.native $(VENV)/.dev ## run all tests except long ones; list skipped tests
	@$(BIN)/python -m pytest -m "not long" $(WORKERS) $(ARGS)

test-unit: $(VENV)/.native $(VENV)/.dev ## run the tests that start no process (seconds)
	@$(BIN)/python -m pytest --unit $(if $(strip $(ARGS)),,-n logical --dist loadfile) $(ARGS)

test-long: $(VENV)/.native $(VENV)/.dev ## run the long tests: Ray, op databases, seeds
	@$(BIN)/python -m pytest -m long $(LONG_WORKERS) $(ARGS)

test-all: test test-long ## run all tests

# SEEDS=30000 (default: 300), FIRST=1000, KIND=disk; SEED=7 replays one seed and prints its log
sim: $(VENV)/.native $(VENV)/.dev ## simulate faults with many seeds: [SEEDS=N] [FIRST=N] [KIND=KIND], or SEED=N
	@$(BIN)/python -m tests.sim.run $(foreach name,SEEDS SEED FIRST KIND,$(if $(filter-out undefined \
	  environment,$(origin $(name))),--$(shell echo $(name) | tr A-Z a-z) '$($(name))'))

# ROUNDS=10 (default: 1); ARGS="--fault node-isolated --json --results DIR"
faults: $(VENV)/.native $(VENV)/.dev ## inject faults into real processes, with root: [ROUNDS=N]
	@$(BIN)/python -m tests.faults.run $(ROUNDS:%=--rounds %) $(ARGS)

durations: $(VENV)/.native $(VENV)/.dev ## run all tests and record the duration of each file
	@$(BIN)/python -m pytest --record-durations $(LONG_WORKERS) $(ARGS)

coverage: $(VENV)/.native $(VENV)/.dev ## run the tests of make test and list uncovered lines
	@$(BIN)/python -m pytest -m "not long" --cov --cov-report=term $(WORKERS) $(ARGS)

lint: $(VENV)/.dev ## check style, types and import layers
	@status=0; for tool in "ruff check ." "ruff format --check ." mypy "lint-imports --no-logo" \
	  "clang-format --dry-run --Werror $(CPP)"; do \
	  echo "$${tool:0:60}"; $(BIN)/$$tool || status=1; done; exit $$status

format: $(VENV)/.dev ## format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

bench: $(VENV)/.native $(VENV)/.dev ## run all benchmarks; ARGS=--json for JSON output
	@status=0; for file in benchmarks/bench_*.py; do \
	  echo "$$file" >&2; $(BIN)/python "$$file" $(ARGS) || status=1; done; exit $$status

# BENCH=benchmarks/bench_x.py (default: the fast ones), ROUNDS=5, THRESHOLD=1.05, JSON=1; ARGS for the benchmark
bench-compare: $(VENV)/.native $(VENV)/.dev ## compare benchmarks with another revision: BASE=REF [BENCH=FILE]
	@[ -n "$(BASE)" ] || { echo "BASE is not set; usage: make bench-compare BASE=main" >&2; exit 2; }
	@$(BIN)/python benchmarks/compare.py $(BENCH:%=--bench %) $(ROUNDS:%=--rounds %) \
	  $(THRESHOLD:%=--threshold %) $(if $(JSON),--json) -- "$(BASE)" $(ARGS)

# A fraction of an hour is allowed: make soak HOURS=0.05
HOURS ?= 72
soak: $(VENV)/.native $(VENV)/.dev ## look for leaks for hours: HOURS=72
	@$(BIN)/python benchmarks/soak.py --hours "$(HOURS)" $(ARGS)

# Keeps the locked versions. To upgrade: make lock ARGS=--upgrade
# dev.txt contains all of run.txt, in the same versions, so dev.txt is resolved first and constrains run.txt.
lock: build/lock/bin/uv ## write requirements/run.txt and dev.txt
	@$(call compile,dev,--extra dev --extra etcd --extra gossip --extra ray requirements/run.in)
	@$(call compile,run,--constraint requirements/dev.txt)

clean: ## remove caches and build results, but not .venv
	@rm -rf build dist htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache *.egg-info $(VENV)/.native
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# --- the environment, in steps that are repeated only when their input changes ----------------
# `make run` needs .native: the packages of run.txt, PyTorch, this folder, the compiled libraries. Other targets
# also need .dev: the test tools, the linters and Ray.

# 69: no C++ compiler. Only the torch device needs it, so this is a warning, and the next run tries again.
$(VENV)/.native: $(CPP) genie/native/libraries.py genie/native/compiler.py $(VENV)/.genie
	@$(BIN)/python -m genie.native && touch $@ || { status=$$?; [ $$status -eq 69 ] || exit $$status; }

$(VENV)/.genie: pyproject.toml $(VENV)/.torch
	@echo "installing genie from this folder" >&2
	@$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# Compiles the libraries that do not need PyTorch meanwhile. If that fails, .native tries again and reports it.
$(VENV)/.torch: requirements/torch.txt $(VENV)/.run
	@$(BIN)/python -m genie.native genie_scheduler genie_tree >$(VENV)/compile.log 2>&1 & compiling=$$!; \
	  trap "kill $$compiling 2>/dev/null" EXIT; \
	  $(call install,--requirement requirements/torch.txt,PyTorch (large),0); wait $$compiling || true
	@touch $@

# After .genie: under make -j two pip processes would conflict.
$(VENV)/.dev: requirements/dev.txt $(VENV)/.genie
	@$(call install,--require-hashes --requirement requirements/dev.txt,the development tools,$$(grep -c == $<))
	@touch $@

$(VENV)/.run: requirements/run.txt $(BIN)/python
	@$(call install,--require-hashes --requirement requirements/run.txt,the locked packages,$$(grep -c == $<))
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Genie requires Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Select another one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

build/lock/bin/uv: Makefile
	@echo "creating build/lock with uv $(UV_VERSION)"
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip --disable-pip-version-check install --quiet uv==$(UV_VERSION)
	@touch $@

# $(call compile,set,further inputs): locks requirements/<set>.in and the dependencies of pyproject.toml.
define compile
build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
  --generate-hashes --no-strip-extras --no-header --no-emit-index-url --no-emit-find-links $(ARGS) \
  pyproject.toml requirements/$(1).in $(2) -o requirements/$(1).txt && \
echo "requirements/$(1).txt: $$(grep -c == requirements/$(1).txt) packages"
endef

# $(call install,pip arguments,description,number of packages): prints one line of progress; the output of pip is
# in .venv/install.log, and its end is printed if pip fails. Uses standard error, because standard output belongs
# to the target (make bench ARGS=--json).
define install
set -o pipefail; interrupted=; trap 'interrupted=1' INT; echo "installing $(2)" >&2; \
$(PIP) install --progress-bar off $(1) 2>&1 | tee $(VENV)/install.log | awk -v total=$(3) ' \
  function show(text) { if (tty) printf "\r\033[K  %s", text; else print "  " text; fflush() } \
  BEGIN { tty = system("test -t 2") == 0 } \
  /^(Collecting|Processing|Requirement already)/ { n++; if (tty || n % 20 == 0) show(n (total ? " of " total : "") " packages") } \
  /^ *Downloading .*(MB|GB)/ { show("downloading " $$2 " " $$3 " " $$4) } \
  /^Installing collected/ { show("unpacking") } \
  END { if (tty) printf "\r\033[K" }' >&2 \
|| { [ $$interrupted ] && { echo "interrupted; run make again" >&2; exit 130; }; \
  tail -n 15 $(VENV)/install.log >&2; echo "installing $(2) failed; full log: $(VENV)/install.log" >&2; exit 1; }
endef
