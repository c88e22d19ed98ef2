# Every target runs in .venv, which is created on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# Most modules are never imported, so pip compiles none. Python compiles a module, once, when it is first imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-slow quick lint types check durations format docs bench clean

demo: $(READY)
	$(BIN)/vitral demo

test: lint  # mypy uses one core: it runs next to the tests
	@$(MAKE) --no-print-directory --jobs 2 types quick

test-all: test test-slow

quick: $(READY)
	$(PYTEST) -m 'not slow'

test-slow: $(READY)
	$(PYTEST) -m slow

durations: $(READY)  # the 100 slowest quick tests, with the time of their fixtures
	$(PYTEST) -m 'not slow' --durations 100 --durations-min 0.5

check: lint types

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/mnist_cpu.py

$(READY): pyproject.toml constraints.txt
	@echo "Installing everything for development into .venv: 3 GB, several minutes"
	$(PYTHON) -m venv .venv
	-grep == constraints.txt | sort -r | xargs -P 2 -n 25 $(PIP) --no-deps  # on two cores; torch is in the first batch
	$(PIP) -c constraints.txt -e '.[dev]'  # vitral, and whatever is missing
	@touch $@

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
