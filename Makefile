# Everything a person types in this folder. `make help` lists it.
# Nothing here needs root; everything that is installed goes to .venv.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Extra arguments for the tool that a target runs: make test ARGS="-k wire -x"
ARGS ?=
CPP := $(shell find native benchmarks -name '*.cpp' -o -name '*.h' | sort)
UV_VERSION := 0.13.7
# The whole suite goes to one worker for each core, file by file, since the tests of a file may share a
# cluster. A worker that crashes ends the run: with loadfile, xdist 3.8 can wait forever for its successor.
# Not in pytest's own settings: a part of the suite (ARGS, or plain pytest) stays in one process, where -x
# stops at once and a debugger works.
WORKERS = $(if $(strip $(ARGS)),,-n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 0)

.DEFAULT_GOAL := help
.PHONY: help run test coverage lint format lock bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 18

run: $(VENV)/.native ## start a cluster on this machine, use it from another process, stop it
	@$(BIN)/python examples/tour.py $(ARGS)

test: $(VENV)/.native ## run every test; what is left out is listed at the end
	@$(BIN)/python -m pytest $(WORKERS) $(ARGS)

coverage: $(VENV)/.native ## run the tests and show the lines that none of them reached
	@$(BIN)/python -m pytest --cov --cov-report=term $(WORKERS) $(ARGS)

lint: $(VENV)/.genie ## check style, types and layers
	@status=0; for tool in "ruff check ." "ruff format --check ." mypy "lint-imports --no-logo" \
	  "clang-format --dry-run --Werror $(CPP)"; do \
	  echo "$${tool:0:60}"; $(BIN)/$$tool || status=1; done; exit $$status

format: $(VENV)/.genie ## put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

bench: $(VENV)/.native ## run every benchmark; ARGS=--json for machines
	@status=0; for file in benchmarks/bench_*.py; do \
	  echo "$$file" >&2; $(BIN)/python "$$file" $(ARGS) || status=1; done; exit $$status

# Keeps the versions that are locked already. To move to the newest: make lock ARGS=--upgrade
lock: build/lock/bin/uv ## write requirements/dev.txt anew
	@build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
	  --generate-hashes --no-header --no-emit-index-url --no-emit-find-links $(ARGS) \
	  --extra etcd --extra ray --extra dev pyproject.toml requirements/dev.in -o requirements/dev.txt
	@echo "requirements/dev.txt: $$(grep -c == requirements/dev.txt) packages"

clean: ## remove caches and build results; the environment stays (rm -rf .venv)
	@rm -rf build dist htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache *.egg-info $(VENV)/.native
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# --- the environment, in four steps, each redone only when its own input changes --------------

# 69: there is no C++ compiler. Everything but the torch device works without, so that is said, and tried again.
$(VENV)/.native: $(CPP) genie/runtime/native.py $(VENV)/.genie
	@$(BIN)/python -m genie.runtime.native && touch $@ || { status=$$?; [ $$status -eq 69 ] || exit $$status; }

$(VENV)/.genie: pyproject.toml $(VENV)/.torch
	@echo "installing genie from this folder" >&2
	@$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.torch: requirements/torch.txt $(VENV)/.locked
	@$(call install,--requirement requirements/torch.txt,PyTorch (large),0)
	@touch $@

$(VENV)/.locked: requirements/dev.txt $(BIN)/python
	@$(call install,--require-hashes --requirement requirements/dev.txt,the locked packages,$$(grep -c == requirements/dev.txt))
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Genie needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

build/lock/bin/uv: Makefile
	@echo "making build/lock with uv $(UV_VERSION)"
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip --disable-pip-version-check install --quiet uv==$(UV_VERSION)
	@touch $@

# $(call install,pip arguments,what it is,how many packages): one line of progress instead of pip's
# hundreds; all of them are in .venv/install.log, and its end is shown when pip fails. On standard error:
# standard output is the target's own (make bench ARGS=--json).
define install
set -o pipefail; echo "installing $(2)" >&2; \
$(PIP) install --progress-bar off $(1) 2>&1 | tee $(VENV)/install.log | awk -v total=$(3) ' \
  function say(text) { if (tty) printf "\r\033[K  %s", text; else print "  " text; fflush() } \
  BEGIN { tty = system("test -t 2") == 0 } \
  /^(Collecting|Processing|Requirement already)/ { n++; if (tty || n % 20 == 0) say(n (total ? " of " total : "") " packages") } \
  /^ *Downloading .*(MB|GB)/ { say("downloading " $$2 " " $$3 " " $$4) } \
  /^Installing collected/ { say("unpacking") } \
  END { if (tty) printf "\r\033[K" }' >&2 \
|| { tail -n 15 $(VENV)/install.log >&2; echo "installing $(2) failed; the whole log is $(VENV)/install.log" >&2; exit 1; }
endef
