"""What every test may use: embedded PostgreSQL servers, one set a worker process, started when first asked for.

``SUBSCRIBER_TEST_DSN`` names a publisher to use instead of the embedded ones (see docker/compose.yaml); the target stays embedded.
"""

from __future__ import annotations

import gc
import logging
import os
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import hypothesis
import pytest

from subscriber.errors import ConfigurationError
from subscriber.testing.mariadb import EmbeddedMariaDB
from subscriber.testing.mariadb_binaries import WITHOUT_VARIABLE, is_done_without
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress, fresh_database, given_publisher_version
from tests.support.hostile import hostile_defaults, other_values
from tests.support.mariadb_database import MariaDatabase, fresh_mariadb_database

pytest_plugins = [
    "tests.support.versions",
    "tests.support.scratch",
    "tests.support.clusters",
    "tests.support.order",
    "tests.support.compared",
    "tests.support.object_store",
]

# the duration of an example depends on the machine: other workers and their servers run at the same time
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


def pytest_configure() -> None:
    # an editable installation keeps the entry points of the day when it was made
    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, points in declared.items():
        if not points.items() <= {(point.name, point.value) for point in entry_points(group=group)}:
            pytest.exit("entry points in pyproject.toml are new here: .venv/bin/pip install --no-deps --editable .", returncode=4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # the bug was that two tests of Spark had no mark: `make test` skipped them without pyspark, and `make test-spark` left them out
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


def pytest_collection_finish() -> None:
    # five thousand tests stay to the end: the garbage collector need not look through them again and again
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def as_quiet_as_before() -> Iterator[None]:
    """The program, where a test runs it in this process, says how much is logged: to no test after it."""
    ours = logging.getLogger("subscriber")
    before = ours.level
    yield
    ours.setLevel(before)


class Servers:
    """The embedded servers of this worker, by role and version."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int], EmbeddedServer] = {}

    def get(self, role: str, version: int) -> EmbeddedServer:
        key = (role, version)
        if key not in self._running:
            self._running[key] = EmbeddedServer.create(version)
        return self._running[key]

    def remove(self) -> None:
        for server in self._running.values():
            server.remove()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    found = Servers()
    yield found
    found.remove()


def _publisher(servers: Servers, version: int) -> ServerAddress:
    if (actual := given_publisher_version()) is not None:
        if actual != version:
            pytest.skip(f"SUBSCRIBER_TEST_DSN names a PostgreSQL {actual}")
        return ServerAddress(os.environ["SUBSCRIBER_TEST_DSN"], actual)
    return ServerAddress(servers.get("publisher", version).dsn(), version)


@pytest.fixture(scope="session")
def publisher18(servers: Servers) -> ServerAddress:
    """A PostgreSQL 18 that publishes."""
    return _publisher(servers, 18)


@pytest.fixture(scope="session")
def publisher16(servers: Servers) -> ServerAddress:
    """A PostgreSQL 16 that publishes."""
    return _publisher(servers, 16)


@pytest.fixture(scope="session")
def publisher(servers: Servers, publisher_version: int) -> ServerAddress:
    """A publisher of the version that the run is for (see tests/support/versions.py)."""
    return _publisher(servers, publisher_version)


@pytest.fixture(scope="session")
def target_server(servers: Servers) -> ServerAddress:
    """The PostgreSQL 18 that holds the targets."""
    return ServerAddress(servers.get("target", 18).dsn(), 18)


@pytest.fixture
def publisher_db(publisher: ServerAddress) -> Iterator[Database]:
    """An empty database on the publisher, dropped afterwards with its slots."""
    with fresh_database(publisher, "pub") as database:
        yield database


@pytest.fixture
def publisher18_db(publisher18: ServerAddress) -> Iterator[Database]:
    """As publisher_db, on PostgreSQL 18 only."""
    with fresh_database(publisher18, "pub") as database:
        yield database


@pytest.fixture
def publisher16_db(publisher16: ServerAddress) -> Iterator[Database]:
    """As publisher_db, on PostgreSQL 16 only."""
    with fresh_database(publisher16, "pub") as database:
        yield database


@pytest.fixture
def target_db(target_server: ServerAddress) -> Iterator[Database]:
    """An empty target database, dropped afterwards."""
    with fresh_database(target_server, "tgt") as database:
        yield database


@pytest.fixture
def hostile_target_db(target_db: Database) -> Iterator[Database]:
    """A target whose every session setting has another default, for all sessions but the test's own. See tests/support/hostile.py."""
    with hostile_defaults(target_db, other_values(target_db)):
        yield target_db


def _mariadb(**settings: str) -> EmbeddedMariaDB:
    """Without its programs the test fails, unless it was said that MariaDB is done without."""
    if is_done_without():
        pytest.skip(f"{WITHOUT_VARIABLE} is set")
    try:
        return EmbeddedMariaDB.create(settings=settings)
    except ConfigurationError as error:
        pytest.fail(error.one_line())


@pytest.fixture(scope="session")
def mariadb() -> Iterator[EmbeddedMariaDB]:
    """A MariaDB server."""
    with _mariadb() as server:
        yield server


@pytest.fixture
def make_mariadb() -> Iterator[Callable[..., EmbeddedMariaDB]]:
    """MariaDB servers of this test alone, with settings of their own or to be killed."""
    made: list[EmbeddedMariaDB] = []

    def create(**settings: str) -> EmbeddedMariaDB:
        made.append(_mariadb(**{name.replace("_", "-"): value for name, value in settings.items()}))
        return made[-1]

    yield create
    for server in made:
        server.remove()


@pytest.fixture
def mariadb_db(mariadb: EmbeddedMariaDB) -> Iterator[MariaDatabase]:
    """An empty database of MariaDB, dropped afterwards."""
    with fresh_mariadb_database(mariadb) as database:
        yield database
