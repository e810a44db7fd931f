"""A checker of commit order: whatever a reader of the target sees is what the publisher had after one of its transactions.

:class:`History` writes transactions to the publisher, over random tables with unique indexes of every kind. Each one writes its number, and
the state of all tables after it is remembered as a digest. :class:`Reader` takes snapshots of the target all the time, and compares.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg import errors

from tests.support.database import Database

__all__ = ["History", "Reader"]

_ROWS: Final = 30
_KEYS: Final = (
    "PRIMARY KEY (id)",
    "PRIMARY KEY (id), UNIQUE (u)",
    "PRIMARY KEY (id), UNIQUE (u, w)",
    "PRIMARY KEY (id), UNIQUE (u) DEFERRABLE INITIALLY DEFERRED",
    "PRIMARY KEY (id), UNIQUE (u) DEFERRABLE",
    "PRIMARY KEY (n), UNIQUE (id)",
    "PRIMARY KEY (name)",
    "PRIMARY KEY (id), EXCLUDE USING btree (u WITH =)",
    "PRIMARY KEY (id, w)",
)
_INDEXES: Final = (
    "CREATE UNIQUE INDEX ON {table} (w) WHERE u > 15",
    "CREATE UNIQUE INDEX ON {table} (lower(name))",
    "CREATE UNIQUE INDEX ON {table} (n) INCLUDE (u)",
    "ALTER TABLE {table} REPLICA IDENTITY FULL",
    "CREATE UNIQUE INDEX {table}_i ON {table} (w); ALTER TABLE {table} REPLICA IDENTITY USING INDEX {table}_i",
    "SELECT",
    "SELECT",
)
_COLUMNS: Final = "id int NOT NULL, u int, w int NOT NULL, n numeric NOT NULL, name {text} NOT NULL, v text"
_CITEXT: Final = "SELECT count(*) FROM pg_available_extensions WHERE name = 'citext'"


class History:
    """Random tables, and random transactions of one writer.

    Args:
        publisher, target: empty databases.
        rng: where all choices come from.
        rows: the range of the keys.
        most: the largest number of changes of a transaction.

    Attributes:
        digests: the state after each transaction, by its number.
    """

    def __init__(self, publisher: Database, target: Database, rng: random.Random, *, rows: int = _ROWS, most: int = 6) -> None:
        self.publisher = publisher
        self.target = target
        self.rows = rows
        self.digests: list[str] = []
        self._rng = rng
        self._most = most
        names = [f"t{number}" for number in range(rng.randint(2, 4))]
        citext = all(database.value(_CITEXT) for database in (publisher, target))
        setup = "CREATE EXTENSION citext;" if citext else ""
        setup += "CREATE TABLE log (n int PRIMARY KEY); CREATE TABLE free (a int, b text);"
        for name in names:
            columns = _COLUMNS.format(text=rng.choice(("text", "citext" if citext else "varchar(40)")))
            setup += f"CREATE TABLE {name} ({columns}, {rng.choice(_KEYS)}); {rng.choice(_INDEXES).format(table=name)};"
        self.schema = setup
        for database in (publisher, target):
            database.execute(setup)
        publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        self._tables = names
        self.digest = "SELECT md5(concat_ws('/', " + ", ".join(map(_content, [*names, "free"])) + "))"
        self._session = publisher.connect()

    def close(self) -> None:
        self._session.close()

    def write(self, count: int) -> None:
        """Write so many transactions."""
        for _ in range(count):
            self._session.execute("BEGIN")
            self._session.execute("INSERT INTO log VALUES (%s)", (len(self.digests),))
            for _ in range(self._rng.randint(1, self._most)):
                self._change()
            try:
                self._session.execute("SET CONSTRAINTS ALL IMMEDIATE")
            except errors.UniqueViolation:
                self._session.execute("ROLLBACK")
                continue
            ((digest,),) = self._session.execute(self.digest.encode()).fetchall()
            self._session.execute("COMMIT")
            self.digests.append(digest)

    def _change(self) -> None:
        self._session.execute("SAVEPOINT change")
        with contextlib.suppress(errors.UniqueViolation, errors.ExclusionViolation):
            self._session.execute(self._statement().encode())
            self._session.execute("RELEASE change")
            return
        self._session.execute("ROLLBACK TO change")

    def _statement(self) -> str:
        rng, number = self._rng, self._rng.randrange
        table = rng.choice(self._tables)
        one, other, value = number(self.rows), number(self.rows), number(self.rows)
        name = rng.choice(("a{}", "A{}", "b{}")).format(value)
        number_text = rng.choice((f"{value}.0", f"{value}.00", value))
        row = f"({one}, {rng.choice(('NULL', value))}, {other}, {number_text}, '{name}', '{rng.random()}')"
        moved = f"CASE id WHEN {one} THEN {other} ELSE {one} END"
        return rng.choice(
            (
                f"INSERT INTO {table} VALUES {row}",
                f"INSERT INTO {table} VALUES {row}",
                f"UPDATE {table} SET v = '{rng.random()}' WHERE id = {one}",
                f"UPDATE {table} SET v = repeat('{rng.random()}', 500) WHERE id = {one}",
                f"UPDATE {table} SET u = {value}, w = {other} WHERE id = {one}",
                f"UPDATE {table} SET n = {value}.0, name = '{name}' WHERE id = {one}",
                f"UPDATE {table} SET id = {other} WHERE id = {one}",
                f"UPDATE {table} SET u = {moved}, w = {moved} WHERE id IN ({one}, {other})",
                f"DELETE FROM {table} WHERE id = {one}",
                f"DELETE FROM {table} WHERE id = {one}; INSERT INTO {table} VALUES {row}",
                f"INSERT INTO free VALUES ({number(100)}, '{name}')",
            )
        )


def _content(table: str) -> str:
    return f"""(SELECT string_agg(x::text, ',' ORDER BY x::text COLLATE "C") FROM {table} AS x)"""


class Reader:
    """A thread that reads snapshots of the target.

    Attributes:
        seen: the numbers of the transactions after which it saw the target; -1: before the first.
        problem: the first state that the publisher never had.
    """

    def __init__(self, history: History) -> None:
        self.seen: set[int] = set()
        self.problem: str | None = None
        self._history = history
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader of prefixes")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read while the block lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set() and self.problem is None:
            # the test may end sessions of the target
            with contextlib.suppress(psycopg.OperationalError), self._history.target.connect(application_name="reader") as session:
                while not self._stopped.is_set() and self.problem is None:
                    self._read(session)

    def _read(self, session: psycopg.Connection[Any]) -> None:
        with session.transaction():
            session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            ((count, last),) = session.execute("SELECT count(*), coalesce(max(n), -1) FROM log").fetchall()
            ((digest,),) = session.execute(self._history.digest.encode()).fetchall()
        self.seen.add(last)
        if count != last + 1:
            self.problem = f"transaction {last} is visible, and {last + 1 - count} before it are not"
        elif last >= 0 and digest != self._history.digests[last]:
            self.problem = f"the rows are not those after transaction {last}"
