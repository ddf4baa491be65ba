# Each target sets up all it needs (a .venv, the install) and is fast when repeated.
.PHONY: demo test test-recipes lint bench docs test-versions
.DEFAULT_GOAL := test

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# torch first and pinned: an unpinned torch would bring a build with gigabytes of CUDA.
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check
# Tests start hundreds of processes, which must not all compile flatmin again.
export PYTHONDONTWRITEBYTECODE :=

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (once, some minutes) ..."
	@$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'development needs Python 3.11 or newer; set PYTHON=...'"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) "pip>=25.1" "$$(grep '^torch==' constraints.txt)"  # dependency groups need that pip
	@$(PIP) --group dev -e ".[lab,ray]"
	@touch $@

demo: $(READY)
	@$(BIN)/flatmin demo

test: $(READY)
	@$(BIN)/python -m pytest

# The recipes in the libraries that the group `dev` does not have, because they are large: 1 GB together.
test-recipes: $(READY)
	@$(PIP) --group recipes
	@$(BIN)/python -m pytest tests/test_recipes_in_libraries.py -rs

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir .venv/site

bench: $(READY)
	@$(BIN)/python -m benchmarks

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

# tests/core and tests/measures on other versions of torch and Python: minutes, and gigabytes where torch has no CPU build.
# `make test-versions` runs the oldest and the newest; `make test-versions TORCH=2.8.0 PYTHON=3.12` one, with that Python.
test-versions:
	@python3 tests/versions.py $(if $(TORCH),--torch $(TORCH) --python $(PYTHON))
