# The commands of a checkout. Everything is installed into .venv, once, and again when the lock or pyproject.toml change.
#     make demo    serve the embedded model with and without the learned policy, and compare
#     make test    ruff, mypy --strict, pytest
#     make lint    ruff and mypy only
#     make bench   how long a policy takes to decide
#     make clean   remove what the tools left behind, .venv too

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench setup clean

# The first of these that is a version we support; `make PYTHON=...` overrides it.
PYTHON = $(or $(shell for p in python3 python3.11 python3.12; do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done),python3)
SUPPORTED = import sys; v = "%d.%d" % sys.version_info[:2]; \
	sys.exit(None if v in ("3.11", "3.12") else "set-up: " + sys.executable + " is Python " + v + "; 3.11 or 3.12 is needed")
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP := .venv/set-up-$(shell cat requirements.lock pyproject.toml Makefile | sha256sum | cut -c1-12)
BEGUN := .venv/set-up-begun

help:
	@sed -n 's/^#     //p' Makefile

demo: $(STAMP)
	@$(BIN)/python -m faser.bench.demo
	@$(BIN)/python -m faser.bench.panel

test: lint
	@$(BIN)/pytest

lint: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m faser.bench.decide

setup: $(STAMP)

# An interrupted pip can leave a package that it takes for whole, so a set-up that was begun and not ended starts afresh.
# (.venv/bin goes first: while the mark is there, a half-removed .venv is known for what it is.)
$(STAMP):
	@if [ -e $(BEGUN) ]; then \
	    echo "set-up: the last one was interrupted, starting afresh"; rm -rf .venv/bin; rm -rf .venv; fi
	@python=$(BIN)/python; [ -x $$python ] || python=$(PYTHON); \
	    command -v $$python >/dev/null || { echo "set-up: no $$python; Python 3.11 or 3.12 is needed" >&2; exit 1; }; \
	    $$python -c '$(SUPPORTED)'; mkdir -p .venv; touch $(BEGUN); \
	    [ -x $(BIN)/python ] || { echo "set-up: making .venv"; $$python -m venv .venv; }
	@all=$$(grep -c == requirements.lock); n=0; \
	    echo "set-up: installing $$all packages into .venv (4 GB; one to five minutes once they are downloaded)"; \
	    $(PIP) install --no-deps --progress-bar off -r requirements.lock 2> >(grep -v ^WARNING: >&2 || true) | \
	    while read -r word rest; do case $$word in \
	        Collecting|Processing|Requirement) n=$$((n + 1)); [ $$((n % 30)) -ne 0 ] || echo "set-up: found $$n of $$all";; \
	        Installing) echo "set-up: unpacking";; esac; done
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	    echo "set-up: this torch is a CUDA build, installing the libraries that it needs"; \
	    $(PIP) install -q -q $$(grep ^torch== requirements.lock); }
	@echo "set-up: installing faser"
	@$(PIP) install -q -q --no-deps --no-build-isolation --editable .
	@mkdir -p .venv/types/faser
	@for folder in envs policies kernels train checkpoints; do ln -sfn ../../../$$folder .venv/types/faser/$$folder; done
	@rm -f $$(ls -d .venv/set-up-* | grep -v $(BEGUN)); touch $@; rm $(BEGUN)
	@echo "set-up: done"

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
