# Each target makes what it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
# PYTHON may name another interpreter (3.11 or later).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
TARGET ?=
TEST_ARGS ?= -n 2

.PHONY: help demo test benchmark-parallel lint format clean

help:
	@echo 'make demo [TARGET=URL]  copy and follow an embedded PostgreSQL 18 into a second database, then prove both equal'
	@echo 'make test               all tests, on real servers that it brings itself'
	@echo 'make benchmark-parallel   from COMMIT to durability, streaming=on against streaming=parallel'
	@echo 'make lint               ruff, mypy --strict, import contracts'

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade --constraint constraints.txt pip
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --group test --group lint
	touch $@

demo: $(VENV)/.demo
	$(BIN)/subscriber demo $(if $(TARGET),--target '$(TARGET)')

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(TEST_ARGS)

benchmark-parallel: $(VENV)/.dev
	$(BIN)/python -m tests.benchmark.parallel_apply

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist
