# make demo    adapt a real model's speculative decoding, live            (first time: about 3 minutes more)
# make test    the whole test suite
# make check   linter, formatter, types
#
# Each one makes .venv and installs what it needs, once. PYTHON chooses the interpreter (3.10 to 3.13),
# PIP_ARGS adds options for pip, TEST_ARGS for pytest, DEMO_ARGS for the demo.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
TEST_ARGS ?=
DEMO_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Prints the seconds gone while a command is at work without a word.
define heartbeat
beat() {
	local s=0
	trap 'kill $$! 2>/dev/null; exit 0' TERM
	while true; do sleep 5 & wait $$!; s=$$((s + 5)); echo "   ... $$1, $${s} s"; done
}
beat "$(1)" & BEAT=$$!
trap 'kill $$BEAT 2>/dev/null || true' EXIT
endef

.PHONY: help
help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@echo "== installing into $(VENV) (once; it downloads torch and transformers)"
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else "AutoSpec needs Python 3.10 to 3.13, found %d.%d: name one, as in make PYTHON=python3.12" % v)'
	$(call heartbeat,installing)
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[demo,tune,dev]'
	touch $@

.PHONY: install
install: $(STAMP)

.PHONY: model
model: $(STAMP)
	@$(BIN)/autospec demo-model

.PHONY: demo
demo: $(STAMP)
	@$(BIN)/autospec demo $(DEMO_ARGS)

.PHONY: test
test: $(STAMP) model
	@$(BIN)/python -m pytest -v --durations=10 $(TEST_ARGS)

.PHONY: check
check: $(STAMP)
	@echo "== ruff check"
	$(BIN)/ruff check .
	echo "== ruff format --check"
	$(BIN)/ruff format --check .
	echo "== mypy --strict (the first run reads torch's types)"
	$(call heartbeat,mypy)
	$(BIN)/mypy

.PHONY: clean
clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
