"""``schema_change = follow``: random DDL and DML on the publisher, in single transactions and in streams, while the subscriber is killed.

A table whose columns cannot be told with certainty is parked and reconciled. Table ``t0`` has only changes that are certain, and is never
reconciled. At the end ``verify`` finds no different row, and ``schema diff`` only columns that the publisher has dropped.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from subscriber.protocol.lsn import Lsn
from tests.crash.process import QUICK, Process, RunProcess
from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase
from tests.support.program import subscriber
from tests.support.sqlalchemy_targets import OtherTarget, sqlite_target

TABLES = ("t0", "t1", "t2")
OPTIONS = ("two_phase=false", "streaming=on", "on_error=park", "park_after=1", "park_retry=1s")
SETTINGS = (*QUICK, "schema_change=follow")
WIDER = {
    "integer": "bigint",
    "bigint": "numeric",
    "numeric": "numeric",
    "character varying(9)": "character varying(20)",
    "character varying(20)": "text",
    "text": "text",
}
SERVERS = [
    pytest.param("publisher18_db", "native", id="18-postgres"),
    pytest.param("publisher18_db", "sqlite", id="18-sqlite"),
    # with more of the same only in make test-all
    pytest.param("publisher16_db", "native", id="16-postgres"),
    pytest.param("publisher18_db", "mariadb", id="18-mariadb"),
]
CERTAIN = ("add", "add default", "add not null", "rename", "swap")
DROPPED = ("keep", "drop")
KINDS = ("add", "add default", "add not null", "drop", "rename", "rename", "swap", "type", "drop and add")
MISTAKEN = """
import sys
from dataclasses import replace
from subscriber.cli.main import main
from subscriber.subscription.run.tables import followed_columns

right = followed_columns.changed_columns

def wrong(*arguments):
    # a renamed column is taken for one that was dropped, and a new one
    changes = right(*arguments)
    renamed = changes.renamed or {}
    numbers = {each.name: each.number for each in changes.known.columns}
    added = tuple((numbers[name], name) for name in renamed.values())
    return replace(changes, dropped=(*changes.dropped, *renamed), renamed=None, added=(*changes.added, *added))

followed_columns.changed_columns = wrong
sys.exit(main(sys.argv[1:]))
"""


def family(name: str) -> str:
    """Names of columns: of integers, or of texts. A resync cannot change a type that does not fit."""
    return "abcdefgh" if name in "abcdefgh" else "pqrstuvw"


class Writer:
    """Writes to the publisher at random, and counts the statements of each kind."""

    def __init__(self, publisher: Database, seed: int, kinds: Sequence[str]) -> None:
        self.kinds = kinds
        self.random = random.Random(seed)
        self.publisher = publisher
        self.counts: Counter[str] = Counter()
        self._columns: dict[str, dict[str, str]] = {table: {"a": "integer", "b": "integer"} for table in TABLES}
        self._last = 1000

    def _name(self, table: str, like: str) -> str:
        """A name that no column has now; it may have been one's, which had a type of the same family."""
        return self.random.choice([name for name in family(like) if name not in self._columns[table]])

    def _ddl(self, table: str) -> tuple[str, str]:
        columns = self._columns[table]
        kind = self.random.choice([each for each in self.kinds if table != "t0" or each in CERTAIN])
        names = list(columns)
        if len(names) < 2 or (kind.startswith("add") and len(names) > 5):
            kind = "add" if len(names) < 2 else "rename" if table == "t0" else "drop"
        name = self.random.choice(names) if names else ""
        if kind.startswith("add"):
            name = self._name(table, self.random.choice("ap"))
            columns[name] = "integer" if name in family("a") else "character varying(9)"
            default = "" if kind == "add" else f" DEFAULT '{self.random.randrange(100)}'" + " NOT NULL" * (kind == "add not null")
            return kind, f"ALTER TABLE {table} ADD {name} {columns[name]}{default}"
        if kind == "drop":
            del columns[name]
            return kind, f"ALTER TABLE {table} DROP {name}"
        if kind == "drop and add":
            del columns[name]
            new = self._name(table, "a")
            columns[new] = "integer"
            return kind, f"ALTER TABLE {table} DROP {name}; ALTER TABLE {table} ADD {new} int DEFAULT {self.random.randrange(100)}"
        if kind == "rename":
            new = self._name(table, name)
            columns[new] = columns.pop(name)
            return kind, f"ALTER TABLE {table} RENAME {name} TO {new}"
        if kind == "swap":
            others = [each for each in names if each != name and each in family(name)]
            if not others:
                return self._ddl(table)
            other = self.random.choice(others)
            columns[name], columns[other] = columns[other], columns[name]
            renames = ((name, "x"), (other, name), ("x", other))
            return kind, "; ".join(f"ALTER TABLE {table} RENAME {old} TO {new}" for old, new in renames)
        columns[name] = WIDER[columns[name]]
        return kind, f"ALTER TABLE {table} ALTER {name} TYPE {columns[name]}"

    def _dml(self, table: str, rows: int = 1) -> tuple[str, str]:
        columns = self._columns[table]
        kind = self.random.choice(["insert", "insert", "update", "delete"])
        if kind == "insert" or not columns:
            names = "".join(f", {name}" for name in columns)
            values = ", i" * len(columns)
            first, self._last = self._last + 1, self._last + rows
            return kind, f"INSERT INTO {table} (id{names}) SELECT i{values} FROM generate_series({first}, {self._last}) AS i"
        chosen = f"id % 37 = {self.random.randrange(37)}"
        if kind == "update":
            return kind, f"UPDATE {table} SET {self.random.choice(list(columns))} = {self.random.randrange(1000)} WHERE {chosen}"
        return kind, f"DELETE FROM {table} WHERE {chosen}"

    def step(self) -> None:
        """One transaction, or some."""
        table = self.random.choice(TABLES)
        shape = self.random.choice(["dml", "dml", "dml", "ddl", "ddl", "together", "rolled back", "large"])
        before = {name: dict(columns) for name, columns in self._columns.items()}
        made: list[tuple[str, str]] = []
        if shape == "dml":
            made = [self._dml(self.random.choice(TABLES)) for _ in range(3)]
        elif shape == "ddl":
            made = [self._ddl(table)]
        else:
            for _ in range(self.random.randrange(1, 4)):
                made += [self._dml(table, 500 if shape == "large" else 1), self._ddl(table)]
            made.append(self._dml(table))
        if shape in ("dml", "ddl"):
            for _, statement in made:
                self.publisher.execute(statement)
        else:
            statements = "; ".join(statement for _, statement in made)
            self.publisher.execute(f"BEGIN; {statements}; {'ROLLBACK' if shape == 'rolled back' else 'COMMIT'}")
        if shape == "rolled back":
            self._columns = before
            made = [("rolled back " + kind, "") for kind, _ in made]
        self.counts.update(kind for kind, _ in made)
        self.counts.update([f"({shape})"])


class MistakenProcess(RunProcess):
    """One with a mistake."""

    def start(self, *more: str) -> Process:
        self.code = MISTAKEN
        return super().start(*more)


class Target:
    """What the test asks a target of any kind."""

    def __init__(self, other: OtherTarget, run: RunProcess) -> None:
        self.other = other
        self.run = run

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for a state."""
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.run.log()}"
            self.run.assert_runs()
            time.sleep(0.05)

    def is_known(self) -> bool:
        """All tables are ready, and their columns are known."""
        rows = self.other.fetch(f"SELECT srsubstate, srcolumns IS NOT NULL FROM {self.other.ours('pg_subscription_rel')}")
        return len(rows) == len(TABLES) and all(state == "r" and known for state, known in rows)

    def has(self, lsn: Lsn) -> bool:
        """Everything up to there is applied."""
        found = self.other.position(self.run.name)
        return found is not None and Lsn.parse(found) >= lsn


def compared(target: Target, publisher: Database, *, dropped: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Tables whose rows differ, and what ``schema diff`` says of each table, except what is not followed."""
    run = target.run
    sides = (run.name, f"--target={run.target_url}", f"--connection={publisher.dsn}", "--json")
    verified = subscriber("verify", *sides)
    rows = [table["table"] for table in json.loads(verified.output)["tables"] if not table["equal"]]
    found = subscriber("schema", "diff", *sides, "--publication=pub")
    differences = json.loads(found.output)["differences"]
    left = [each for each in differences if each["kind"] != "nullability" and (dropped == "drop" or not each["extra"])]
    return rows, [(each["name"], each["message"]) for each in left]


def follow(
    publisher: Database,
    other: OtherTarget,
    directory: Path,
    *,
    steps: int,
    kills: int,
    seed: int,
    kinds: Sequence[str] = KINDS,
    process: type[RunProcess] = RunProcess,
    dropped: str = "keep",
) -> None:
    print(f"seed {seed}, publisher {publisher.version}, target {other.kind}, dropped columns: {dropped}")
    writer = Writer(publisher, seed, kinds)
    for table in TABLES:
        for execute in (publisher.execute, other.execute) if other.kind == "native" else (publisher.execute,):
            execute(f"CREATE TABLE {table} (id int PRIMARY KEY, a int, b int)")
        publisher.execute(f"INSERT INTO {table} SELECT i, i, i FROM generate_series(1, 300) AS i")
    publisher.execute(f"CREATE PUBLICATION pub FOR TABLE {', '.join(TABLES)}")
    settings = (*SETTINGS, f"dropped_columns={dropped}", *(() if other.kind == "native" else ("create_tables=on",)))
    run = process(publisher, other.url, directory, OPTIONS, settings)
    target = Target(other, run)
    try:
        run.catch_up(60)
        run.start()
        for number in range(1, steps + 1):
            # a table that is being synchronized is not followed yet
            target.wait("not all tables are known", target.is_known)
            writer.step()
            if writer.random.random() < 0.7:
                lsn = publisher.current_lsn()
                target.wait(f"{lsn} is not applied", lambda lsn=lsn: target.has(lsn))  # type: ignore[misc]
            if number % (steps // (kills + 1)) == 0:
                run.kill()
                run.start()
        # the last changes need a row
        for table in TABLES:
            publisher.execute(f"INSERT INTO {table} (id) VALUES (0)")
        lsn = publisher.current_lsn()
        target.wait(f"{lsn} is not applied", lambda: target.has(lsn) and target.is_known())
        rows, differences = compared(target, publisher, dropped=dropped)
        log = run.log(10**9)
        run.kill()
    except BaseException:
        print(run.log())
        raise
    finally:
        run.end()
    print(", ".join(f"{count} {kind}" for kind, count in sorted(writer.counts.items())))
    followed = log.count("was altered on the publisher")
    reconciled = set(re.findall(r'table "public\.(\w+)" was reconciled', log))
    print(f"followed: {followed}, not certain: {log.count('it is not certain how')}, reconciled: {', '.join(sorted(reconciled)) or 'none'}")
    assert followed
    assert rows == []
    # MariaDB cannot change columns inside a transaction
    assert "t0" not in reconciled or other.kind == "mariadb"
    # a table that was reconciled has the columns, and perhaps other types
    assert [message for table, message in differences if table not in reconciled] == []


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> OtherTarget:
    kind = request.param
    if kind == "native":
        database: Database = request.getfixturevalue("target_db")
        return OtherTarget("native", database.dsn, database.fetch, database.execute)
    if kind == "sqlite":
        return sqlite_target(tmp_path / "replica.db")
    other: MariaDatabase = request.getfixturevalue("mariadb_db")
    return OtherTarget("mariadb", other.url, other.fetch, other.execute)


@pytest.mark.crash
@pytest.mark.parametrize(("server", "target"), SERVERS[:2], indirect=["target"])
def test_random_ddl(request: pytest.FixtureRequest, target: OtherTarget, tmp_path: Path, server: str) -> None:
    seed = secrets.randbits(32)
    follow(request.getfixturevalue(server), target, tmp_path, steps=40, kills=2, seed=seed, dropped=DROPPED[seed % 2])


@pytest.mark.crash
@pytest.mark.parametrize("target", ["native"], indirect=True)
def test_a_mistake_is_found(publisher18_db: Database, target: OtherTarget, tmp_path: Path) -> None:
    """The kinds are those after which a table is never reconciled."""
    with pytest.raises(AssertionError, match=r"assert \['"):
        follow(publisher18_db, target, tmp_path, steps=6, kills=0, seed=1, kinds=["rename", "add"], process=MistakenProcess)


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("server", "target"), SERVERS, indirect=["target"])
def test_much_random_ddl(request: pytest.FixtureRequest, target: OtherTarget, tmp_path: Path, server: str) -> None:
    seed = secrets.randbits(32)
    follow(request.getfixturevalue(server), target, tmp_path, steps=300, kills=10, seed=seed, dropped=DROPPED[seed % 2])
