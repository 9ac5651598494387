# Two commands do everything: `make serve` and `make test`. `make check` is the quick loop.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: serve test check lint types unit format clean
.DEFAULT_GOAL := serve

serve: $(STAMP)
	$(BIN)/kvshare serve $(ARGS)

test: lint types unit

check: lint types
	$(BIN)/python -m pytest -q -m "not slow and not model"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and pinned: an unpinned one brings gigabytes of CUDA that a laptop does not need.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .kvshare .pytest_cache .mypy_cache .ruff_cache .hypothesis
