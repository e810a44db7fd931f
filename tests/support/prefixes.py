"""A checker of commit order: whatever a reader of the target sees is what the publisher had after one of its transactions.

:class:`History` writes transactions to the publisher, over random tables with unique indexes of every kind. Each one writes its number, and
the state of all tables after it is remembered as a digest. :class:`Reader` takes snapshots of the target all the time, and compares.
:class:`Alterer` alters the tables of the target meanwhile.
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

__all__ = ["Alterer", "History", "Reader", "Thread"]

_ROWS: Final = 30
_SELDOM: Final = 0.02
_COLUMNS: Final = "id int NOT NULL, u int, w int NOT NULL, n numeric NOT NULL, name {text} NOT NULL, v text"
_READ: Final = "id, u, w, n, name, v"
_KEYS: Final = (
    "PRIMARY KEY (id)",
    "PRIMARY KEY (id), UNIQUE (u)",
    "PRIMARY KEY (id), UNIQUE (u, w)",
    "PRIMARY KEY (id), UNIQUE (u) DEFERRABLE INITIALLY DEFERRED",
    "PRIMARY KEY (id), UNIQUE (u) DEFERRABLE",
    "UNIQUE (id), PRIMARY KEY (n)",
    "PRIMARY KEY (name)",
    "PRIMARY KEY (id), EXCLUDE USING btree (u WITH =)",
    "PRIMARY KEY (id, w)",
    "g int GENERATED ALWAYS AS (id * 2) STORED UNIQUE, PRIMARY KEY (id)",
)
_NULLS_EQUAL: Final = ("PRIMARY KEY (id), UNIQUE NULLS NOT DISTINCT (u)", "PRIMARY KEY (id), UNIQUE NULLS NOT DISTINCT (u, w)")
_SINCE: Final = 15
_INDEXES: Final = (
    "CREATE UNIQUE INDEX ON {table} (w) WHERE u > 15",
    "CREATE UNIQUE INDEX ON {table} (lower(name))",
    "CREATE UNIQUE INDEX ON {table} (n) INCLUDE (u)",
    "ALTER TABLE {table} REPLICA IDENTITY FULL",
    "CREATE UNIQUE INDEX {table}_i ON {table} (w); ALTER TABLE {table} REPLICA IDENTITY USING INDEX {table}_i",
    "SELECT",
    "SELECT",
)
_PARTITIONED: Final = """
    CREATE TABLE {table} ({columns}{keys}) PARTITION BY RANGE (w);
    CREATE TABLE {table}_low PARTITION OF {table}{leaf} FOR VALUES FROM (MINVALUE) TO (15);
    CREATE TABLE {table}_high PARTITION OF {table}{leaf} FOR VALUES FROM (15) TO (MAXVALUE)
"""
_NOTED: Final = """
    CREATE TABLE notes (what text, n int); CREATE TABLE noted (id int PRIMARY KEY, v text);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO public.notes VALUES (TG_OP, (SELECT max(n) FROM public.log)); RETURN NULL; END $$;
    CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON noted FOR EACH ROW EXECUTE FUNCTION note();
"""
"""A trigger that sees which transactions are applied: it notes that of each change. Its table is not published."""
_CITEXT: Final = "SELECT count(*) FROM pg_available_extensions WHERE name = 'citext'"
_REJECTED: Final = (errors.UniqueViolation, errors.ExclusionViolation, errors.ForeignKeyViolation)


class History:
    """Random tables, and random transactions of one writer.

    Args:
        publisher, target: empty databases.
        rng: where all choices come from.
        rows: the range of the keys.
        most: the largest number of changes of a transaction.

    Attributes:
        digests: the state after each transaction, by its number.
        schema: SQL of the publisher's tables.
        two_phase: whether some transactions are prepared.
    """

    def __init__(self, publisher: Database, target: Database, rng: random.Random, *, rows: int = _ROWS, most: int = 6) -> None:
        self.publisher = publisher
        self.target = target
        self.rows = rows
        self.two_phase = publisher.version >= _SINCE and rng.random() < 0.5
        self.digests: list[str] = []
        self._rng = rng
        self._most = most
        self.tables = [f"t{number}" for number in range(rng.randint(2, 4))]
        versions = publisher.version, target.version
        keys = _KEYS + (_NULLS_EQUAL if min(versions) >= _SINCE else ())
        citext = all(database.value(_CITEXT) for database in (publisher, target))
        setup = "CREATE EXTENSION citext;" if citext else ""
        setup += f"CREATE TABLE log (n int PRIMARY KEY); CREATE TABLE free (a int, b text); {_NOTED}"
        of_target = f"{setup} ALTER TABLE noted ENABLE ALWAYS TRIGGER note;"
        referenced = False
        for name in self.tables:
            columns = _COLUMNS.format(text=rng.choice(("text", "citext" if citext else "varchar(40)")))
            key, kind = rng.choice(keys), rng.random()
            # a publisher rejects updates if such a column is in the replica identity
            index = "SELECT" if "GENERATED" in key else rng.choice(_INDEXES).format(table=name)
            made = f"CREATE TABLE {name} ({columns}, {key}); {index}"
            there = made
            if kind < 0.1:
                made = there = _PARTITIONED.format(table=name, columns=columns, keys=", PRIMARY KEY (id, w)", leaf="")
            elif kind < 0.2:
                # a key of each partition: it does not find one row for certain
                made = f"CREATE TABLE {name} ({columns}, PRIMARY KEY (id))"
                there = _PARTITIONED.format(table=name, columns=columns, keys="", leaf=" (PRIMARY KEY (id))")
            elif kind < 0.4 and referenced:
                reference = f"ALTER TABLE {name} ADD FOREIGN KEY (w) REFERENCES t0 (id) ON UPDATE CASCADE ON DELETE CASCADE"
                made, there = f"{made}; {reference}", f"{there}; {reference}"
            if name == "t0":
                referenced = "(id)" in key and kind >= 0.2
            setup, of_target = f"{setup} {made};", f"{of_target} {there};"
        self.schema = setup
        publisher.execute(setup)
        target.execute(of_target)
        names = [*self.tables, "free", "noted"]
        root = rng.choice(("", " WITH (publish_via_partition_root)"))
        publisher.execute(f"CREATE PUBLICATION pub FOR TABLE {', '.join(['log', *names])}{root}")
        contents = [_content(name, _READ) for name in self.tables] + [_content(name) for name in ("free", "noted", "notes")]
        self.digest = f"SELECT md5(concat_ws('/', {', '.join(contents)}))"
        publisher.execute(f"ALTER DATABASE {publisher.name} SET logical_decoding_work_mem = '64kB'")
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
            except _REJECTED:
                self._session.execute("ROLLBACK")
                continue
            ((digest,),) = self._session.execute(self.digest.encode()).fetchall()
            if self.two_phase and self._rng.random() < _SELDOM:
                self._session.execute(f"PREPARE TRANSACTION '{self.publisher.name}'".encode())
                self._session.execute(f"COMMIT PREPARED '{self.publisher.name}'".encode())
            else:
                self._session.execute("COMMIT")
            self.digests.append(digest)

    def _change(self) -> None:
        self._session.execute("SAVEPOINT change")
        with contextlib.suppress(*_REJECTED):
            self._session.execute(self._statement().encode())
            self._session.execute("RELEASE change")
            return
        self._session.execute("ROLLBACK TO change")

    def _statement(self) -> str:
        rng, number = self._rng, self._rng.randrange
        table = rng.choice(self.tables)
        one, other, value = number(self.rows), number(self.rows), number(self.rows)
        if rng.random() < _SELDOM / 4:
            # streamed before its end
            return f"INSERT INTO free SELECT g, repeat('{value}', 100) FROM generate_series(1, 500) AS g"
        if rng.random() < _SELDOM:
            noted = (
                f"INSERT INTO noted VALUES ({one})",
                f"UPDATE noted SET v = '{value}' WHERE id < {one}",
                f"DELETE FROM noted WHERE id = {one}",
            )
            return rng.choice(noted)
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


def _content(table: str, columns: str = "*") -> str:
    return f"""(SELECT string_agg(x::text, ',' ORDER BY x::text COLLATE "C") FROM (SELECT {columns} FROM {table}) AS x)"""


class Thread:
    """Something that goes on in a thread of its own while a block lasts.

    Attributes:
        problem: why it has ended before.
    """

    def __init__(self, target: Database) -> None:
        self.problem: str | None = None
        self._target = target
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Do it while the block lasts."""
        thread = threading.Thread(target=self._run, name=type(self).__name__)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set() and self.problem is None:
            # the test may end sessions of the target
            with (
                contextlib.suppress(psycopg.OperationalError),
                self._target.connect(application_name=type(self).__name__) as session,
            ):
                while not self._stopped.is_set() and self.problem is None:
                    self.step(session)

    def step(self, session: psycopg.Connection[Any]) -> None:
        """Do it once."""
        raise NotImplementedError


class Reader(Thread):
    """Reads snapshots of the target.

    Attributes:
        seen: the numbers of the transactions after which it saw the target; -1: before the first.
        problem: the first state that the publisher never had.
    """

    def __init__(self, history: History) -> None:
        super().__init__(history.target)
        self.seen: set[int] = set()
        self._history = history

    def step(self, session: psycopg.Connection[Any]) -> None:
        history = self._history
        with session.transaction():
            session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            ((count, last),) = session.execute("SELECT count(*), coalesce(max(n), -1) FROM log").fetchall()
            ((digest,),) = session.execute(history.digest.encode()).fetchall()
        self.seen.add(last)
        if count != last + 1:
            self.problem = f"transaction {last} is visible, and {last + 1 - count} before it are not"
        elif last >= 0 and digest != history.digests[last]:
            self.problem = f"the rows are not those after transaction {last}"


_ALTERATIONS: Final = (
    "CREATE UNIQUE INDEX {table}_x ON {table} (id, w, n, name)",
    "CREATE UNIQUE INDEX CONCURRENTLY {table}_x ON {table} (id, w, n, name)",
    "CREATE INDEX CONCURRENTLY {table}_x ON {table} (u)",
    "DROP INDEX {table}_x",
    "DROP INDEX CONCURRENTLY {table}_x",
    "REINDEX TABLE CONCURRENTLY {table}",
    "ALTER TABLE {table} ADD COLUMN own int",
    "ALTER TABLE {table} DROP COLUMN own",
    "ALTER TABLE {table} ALTER v SET STORAGE EXTERNAL",
    "ALTER TABLE {table} ALTER v TYPE varchar",
    "ALTER TABLE {table} ALTER v TYPE text",
    "CREATE TRIGGER passing BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION passing();"
    " ALTER TABLE {table} ENABLE ALWAYS TRIGGER passing",
    "DROP TRIGGER passing ON {table}",
    "VACUUM {table}",
)
"""None of them changes which rows are valid, or rewrites the table, which snapshots would see."""


_MOST_ALTERATIONS: Final = 40
_IN_VAIN: Final = (
    # it is there, or it is not
    errors.DuplicateTable,
    errors.DuplicateColumn,
    errors.DuplicateObject,
    errors.UndefinedColumn,
    errors.UndefinedObject,
    # concurrently with a partitioned table
    errors.FeatureNotSupported,
    errors.DeadlockDetected,
)


class Alterer(Thread):
    """Alters the tables of the target: indexes, columns, triggers. The rows stay what they are."""

    def __init__(self, history: History, rng: random.Random) -> None:
        super().__init__(history.target)
        self._tables = history.tables
        self._rng = rng
        self.done = 0
        history.target.execute("CREATE FUNCTION passing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$")

    def step(self, session: psycopg.Connection[Any]) -> None:
        statement = self._rng.choice(_ALTERATIONS).format(table=self._rng.choice(self._tables))
        with contextlib.suppress(*_IN_VAIN):
            session.execute(statement.encode())
            self.done += 1
        # a transaction that met one is applied again: without an end, none would be applied on a slow machine
        self._stopped.wait(self._rng.uniform(0, 0.1) if self.done < _MOST_ALTERATIONS else None)
