"""``schema_change = follow``: random DDL and DML on the publisher, in single transactions and in streams, while the subscriber is killed.

A table whose columns cannot be told with certainty is parked and reconciled. At the end the rows of all published columns are equal.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.process import QUICK, SubscriberProcess
from tests.support.database import Database

TABLES = ("t0", "t1", "t2")
OPTIONS = ("two_phase=false", "streaming=on", "on_error=park", "park_after=1", "park_retry=1s")
SETTINGS = (*QUICK, "schema_change=follow")
WIDER = {"integer": "bigint", "bigint": "numeric"}
COLUMNS = """
SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute
 WHERE attrelid = '{}'::regclass AND attnum > 0 AND NOT attisdropped AND attname <> 'id' ORDER BY attnum
"""


class Writer:
    """Writes to the publisher at random, and counts the statements of each kind."""

    def __init__(self, publisher: Database, seed: int) -> None:
        self.random = random.Random(seed)
        self.publisher = publisher
        self.counts: Counter[str] = Counter()
        self._columns: dict[str, dict[str, str]] = {table: {"a": "integer", "b": "integer"} for table in TABLES}
        self._last = 1000

    def _name(self, table: str) -> str:
        """A name that no column has now; it may have been one's."""
        return self.random.choice([name for name in "abcdefgh" if name not in self._columns[table]])

    def _ddl(self, table: str) -> tuple[str, str]:
        columns = self._columns[table]
        kind = self.random.choice(["add", "add default", "drop", "rename", "rename", "swap", "type", "drop and add"])
        names = list(columns)
        if len(names) < 2 or (kind in ("add", "add default") and len(names) > 5):
            kind = "add" if len(names) < 2 else "drop"
        name = self.random.choice(names) if names else ""
        if kind.startswith("add"):
            name = self._name(table)
            columns[name] = "integer"
            default = f" DEFAULT {self.random.randrange(100)}" if kind == "add default" else ""
            return kind, f"ALTER TABLE {table} ADD {name} int{default}"
        if kind == "drop":
            del columns[name]
            return kind, f"ALTER TABLE {table} DROP {name}"
        if kind == "drop and add":
            del columns[name]
            new = self._name(table)
            columns[new] = "integer"
            return kind, f"ALTER TABLE {table} DROP {name}; ALTER TABLE {table} ADD {new} int DEFAULT {self.random.randrange(100)}"
        if kind == "rename":
            new = self._name(table)
            columns[new] = columns.pop(name)
            return kind, f"ALTER TABLE {table} RENAME {name} TO {new}"
        if kind == "swap":
            other = self.random.choice([each for each in names if each != name])
            columns[name], columns[other] = columns[other], columns[name]
            renames = ((name, "x"), (other, name), ("x", other))
            return kind, "; ".join(f"ALTER TABLE {table} RENAME {old} TO {new}" for old, new in renames)
        columns[name] = WIDER.get(columns[name], "numeric")
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


def follow(publisher: Database, target: Database, directory: Path, *, steps: int, kills: int, seed: int) -> None:
    print(f"seed {seed}, publisher {publisher.version}")
    writer = Writer(publisher, seed)
    for table in TABLES:
        for database in (publisher, target):
            database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, a int, b int)")
        publisher.execute(f"INSERT INTO {table} SELECT i, i, i FROM generate_series(1, 300) AS i")
    publisher.execute(f"CREATE PUBLICATION pub FOR TABLE {', '.join(TABLES)}")
    run = SubscriberProcess(publisher, target, directory, OPTIONS, SETTINGS)
    position = 'subscriber."position" WHERE srrelid = 0'
    known = "SELECT count(*) = 3 AND bool_and(srsubstate::text = 'r' AND srcolumns IS NOT NULL) FROM subscriber.pg_subscription_rel"
    try:
        run.catch_up(60)
        run.start()
        target.wait(known, True, 60)
        for number in range(1, steps + 1):
            # a table that is being synchronized is not followed yet
            target.wait(known, True, 60)
            writer.step()
            if writer.random.random() < 0.7:
                target.wait(f"SELECT remote_lsn >= '{publisher.current_lsn()}' FROM {position}", True, 60)
            if number % (steps // (kills + 1)) == 0:
                run.kill()
                run.start()
        # the last changes need a row
        for table in TABLES:
            publisher.execute(f"INSERT INTO {table} (id) VALUES (0)")
        target.wait(f"SELECT remote_lsn >= '{publisher.current_lsn()}' FROM {position}", True, 120)
        target.wait(known, True, 120)
        log = run.log(10**9)
        run.kill()
    except BaseException:
        print(run.log())
        raise
    finally:
        run.end()
    print(", ".join(f"{count} {kind}" for kind, count in sorted(writer.counts.items())))
    followed = log.count("was altered on the publisher")
    print(f"followed: {followed}, not certain: {log.count('it is not certain how')}")
    assert followed
    for table in TABLES:
        columns = dict(publisher.fetch(COLUMNS.format(table)))
        here = dict(target.fetch(COLUMNS.format(table)))
        assert columns.keys() <= here.keys(), table
        reconciled = f'table "public.{table}" was reconciled' in log
        assert reconciled or columns.items() <= here.items(), table
        query = f"SELECT {', '.join(['id', *columns])} FROM {table} ORDER BY id"
        assert target.fetch(query) == publisher.fetch(query), table


@pytest.mark.crash
@pytest.mark.parametrize("server", ["publisher16_db", "publisher18_db"])
def test_random_ddl(request: pytest.FixtureRequest, target_db: Database, tmp_path: Path, server: str) -> None:
    follow(request.getfixturevalue(server), target_db, tmp_path, steps=40, kills=2, seed=secrets.randbits(32))


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("server", ["publisher16_db", "publisher18_db"])
def test_much_random_ddl(request: pytest.FixtureRequest, target_db: Database, tmp_path: Path, server: str) -> None:
    follow(request.getfixturevalue(server), target_db, tmp_path, steps=300, kills=10, seed=secrets.randbits(32))
