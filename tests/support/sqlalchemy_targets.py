"""Targets that SQLAlchemy serves, as a test sees them from outside: through their own drivers, without code of this package."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from subscriber import Lsn
from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import Ended, confirmed, slots, subscriber

ALL = "SELECT id, v FROM t ORDER BY id"
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
IN_BOTH_ALIKE = pytest.mark.parametrize("other_target", ["sqlite", pytest.param("mariadb", marks=pytest.mark.endurance)], indirect=True)
"""For what does not depend on the kind of database: with SQLite on each change."""


@dataclass
class OtherTarget:
    """One empty database.

    Attributes:
        kind: ``sqlite``, ``mariadb`` or ``native`` (PostgreSQL through its own sink).
        url: for ``--target``.
        fetch, execute: SQL in a session of the test's.
        path: of a file.
    """

    kind: str
    url: str
    fetch: Callable[[str], list[tuple[Any, ...]]]
    execute: Callable[[str], None]
    path: Path | None = None

    def ours(self, table: str) -> str:
        """The name of one of our tables there."""
        return f"{'subscriber.' if self.kind == 'native' else 'subscriber_'}{table}"

    def has_catalog(self) -> bool:
        if self.path is not None and not self.path.exists():
            return False
        queries = {
            "sqlite": "SELECT count(*) FROM sqlite_schema WHERE name = 'subscriber_version'",
            "mariadb": "SELECT count(*) FROM information_schema.tables"
            " WHERE table_schema = database() AND table_name = 'subscriber_version'",
            "native": "SELECT count(*) FROM pg_tables WHERE schemaname = 'subscriber' AND tablename = 'version'",
        }
        return bool(self.fetch(queries[self.kind])[0][0])

    def has_table(self, name: str) -> bool:
        queries = {
            "sqlite": "SELECT count(*) FROM sqlite_schema WHERE name = '{}'",
            "mariadb": "SELECT count(*) FROM information_schema.tables WHERE table_schema = database() AND table_name = '{}'",
        }
        return bool(self.fetch(queries[self.kind].format(name))[0][0])

    def position(self, name: str) -> str | None:
        """Up to where the subscription has everything."""
        rows = self.fetch(
            f"SELECT p.remote_lsn FROM {self.ours('position')} p JOIN {self.ours('pg_subscription')} s ON s.oid = p.srsubid"
            f" WHERE p.srrelid = 0 AND s.subname = '{name}'"
        )
        return str(rows[0][0]) if rows else None

    def states(self) -> dict[str, str]:
        """State by table."""
        return dict(self.fetch(f"SELECT srrelname, srsubstate FROM {self.ours('pg_subscription_rel')}"))

    def wait(self, query: str, expected: Any, timeout: float = WAIT_SECONDS) -> None:
        """Until a query gives these rows; one that fails gives none."""
        deadline = time.monotonic() + timeout
        found: Any = None
        while found != expected:
            assert time.monotonic() < deadline, f"{query!r} gives {found!r}, not {expected!r}"
            found = self._tried(query)
            time.sleep(0.03)

    def _tried(self, query: str) -> Any:
        if not self.has_catalog():
            return None
        try:
            return self.fetch(query)
        except Exception as error:  # noqa: BLE001 -- of three drivers: there is no such table yet
            return error

    def follows(self, *tables: str) -> None:
        """Wait until the tables are in the apply worker's hands."""
        name = "srrelid::regclass::text" if self.kind == "native" else "srrelname"
        query = f"SELECT {name}, srsubstate FROM {self.ours('pg_subscription_rel')} ORDER BY 1"
        self.wait(query, [(name, "r") for name in sorted(tables or ("t",))])

    def reaches(self, name: str, lsn: Lsn) -> None:
        """Wait until everything up to there is in it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            found = self.position(name)
            if found is not None and Lsn.parse(found) >= lsn:
                return
            assert time.monotonic() < deadline, f"it stays at {found}, before {lsn}"
            time.sleep(0.03)


def sqlite_target(path: Path) -> OtherTarget:
    """A file, which is not made here."""

    def fetch(query: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(path, timeout=WAIT_SECONDS)) as connection:
            return connection.execute(query).fetchall()

    def execute(query: str) -> None:
        with contextlib.closing(sqlite3.connect(path, timeout=WAIT_SECONDS)) as connection:
            connection.executescript(query)

    return OtherTarget("sqlite", f"sqlite:///{path}", fetch, execute, path)


def native_target(database: Database) -> OtherTarget:
    """A PostgreSQL database for its own sink, with the table."""
    database.execute(TABLE)
    return OtherTarget("native", database.dsn, database.fetch, database.execute)


@dataclass
class Replica:
    """A publisher with table ``t`` of 1000 rows, and another kind of target; the program's arguments to make it a replica."""

    publisher: Database
    target: OtherTarget
    more: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"other_{self.publisher.name}"

    def arguments(self, *more: str, verb: str = "run", target: str | None = None) -> list[str]:
        connection = f"--connection={self.publisher.dsn}"
        return [
            verb,
            connection,
            "--publication=pub",
            f"--target={target or self.target.url}",
            f"--name={self.name}",
            "-c",
            "wal_retrieve_retry_interval=200ms",
            *self.more,
            *more,
        ]

    def catches_up(self, *more: str) -> Ended:
        """Run until both are the same, silently."""
        done = subscriber(*self.arguments("--until-caught-up", *more))
        assert (done.status, done.output, done.errors) == (0, "", "")
        self.same()
        return done

    def behind(self, lsn: Lsn) -> bool:
        """Whether the target's position is still before what was committed up to there."""
        found = self.target.position(self.name)
        return found is not None and Lsn.parse(found) < lsn

    def same(self) -> None:
        assert self.target.fetch(ALL) == self.publisher.fetch(ALL)

    def acknowledged(self) -> None:
        """What is durable in the target was acknowledged to the publisher, and the slot is free."""
        self.publisher.wait(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.name}'", False)
        assert confirmed(self.publisher, self.name) == self.target.position(self.name)
        assert slots(self.publisher) == [self.name]


def replica_of(publisher: Database, target: OtherTarget) -> Replica:
    """Fill the publisher. The tables of a target that is no file are created because the test says so."""
    publisher.execute(TABLE)
    publisher.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 1000) AS i; CREATE PUBLICATION pub FOR TABLE t; ANALYZE t")
    return Replica(publisher, target, [] if target.kind in {"sqlite", "native"} else ["--create-tables"])


@contextlib.contextmanager
def write_locked(path: Path) -> Iterator[None]:
    """Another program keeps the file's write lock while the block lasts."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=WAIT_SECONDS)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")
