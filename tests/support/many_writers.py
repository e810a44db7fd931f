"""Several writers of the publisher at once, and a reader that knows the order of their commits.

Each transaction writes its writer and number into ``log``, moves an amount between two accounts, and may give a seat to another holder. A
seat is unique in two ways, so that transactions of different writers free a key and take it. The order of commits is read by
``test_decoding``.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
from typing import Any, Final

import psycopg
from psycopg import errors

from tests.support.database import Database
from tests.support.prefixes import Thread

__all__ = ["ManyWriters", "Sums"]

_ACCOUNTS: Final = 40
_SETUP: Final = f"""
    CREATE TABLE log (writer int, n int, PRIMARY KEY (writer, n));
    CREATE TABLE account (id int PRIMARY KEY, amount int NOT NULL);
    CREATE TABLE seat (id int PRIMARY KEY, name text UNIQUE);
    INSERT INTO account SELECT g, 0 FROM generate_series(1, {_ACCOUNTS}) AS g;
    INSERT INTO seat SELECT g, CASE WHEN g % 2 = 0 THEN 'n' || g END FROM generate_series(1, {_ACCOUNTS}) AS g
"""
_ORDER: Final = re.compile(r"table public\.log: INSERT: writer\[integer\]:(\d+) n\[integer\]:(\d+)")


class ManyWriters:
    """The writers.

    Args:
        publisher, target: empty databases.
        writers: how many.

    Attributes:
        order: writer and number of each transaction, in the order of the commits.
    """

    def __init__(self, publisher: Database, target: Database, writers: int) -> None:
        self.publisher = publisher
        self.target = target
        self.order: list[tuple[int, int]] = []
        self._writers = writers
        for database in (publisher, target):
            database.execute(_SETUP)
        publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        self._slot = f"order_{publisher.name}"
        publisher.execute(f"SELECT pg_create_logical_replication_slot('{self._slot}', 'test_decoding')")

    def write(self, seed: int, count: int) -> None:
        """Let each writer write so many transactions, and read their order."""
        threads = [
            threading.Thread(target=self._write, args=(random.Random(seed + number), number, count)) for number in range(self._writers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        slot = f"'{self._slot}', NULL, NULL, 'include-xids', '0'"
        for (data,) in self.publisher.fetch(f"SELECT data FROM pg_logical_slot_get_changes({slot})"):
            if found := _ORDER.fullmatch(data):
                self.order.append((int(found[1]), int(found[2])))
        self.publisher.execute(f"SELECT pg_drop_replication_slot('{self._slot}')")
        assert len(self.order) == count * self._writers

    def _write(self, rng: random.Random, writer: int, count: int) -> None:
        with self.publisher.connect() as session:
            done = 0
            while done < count:
                with contextlib.suppress(errors.DeadlockDetected, errors.UniqueViolation), session.transaction():
                    session.execute("INSERT INTO log VALUES (%s, %s)", (writer, done))
                    self._change(session, rng)
                    done += 1

    def _change(self, session: psycopg.Connection[Any], rng: random.Random) -> None:
        first, second = rng.sample(range(1, _ACCOUNTS + 1), 2)
        amount = rng.randrange(100)
        session.execute("UPDATE account SET amount = amount - %s WHERE id = %s", (amount, first))
        session.execute("UPDATE account SET amount = amount + %s WHERE id = %s", (amount, second))
        if rng.random() < 0.5:
            first, second = rng.sample(range(1, _ACCOUNTS + 1), 2)
            names = session.execute("SELECT name FROM seat WHERE id = %s AND name IS NOT NULL FOR UPDATE", (first,)).fetchall()
            free = session.execute("SELECT FROM seat WHERE id = %s AND name IS NULL FOR UPDATE", (second,)).rowcount
            if names and free:
                session.execute("UPDATE seat SET name = NULL WHERE id = %s", (first,))
                session.execute("UPDATE seat SET name = %s WHERE id = %s", (names[0][0], second))


class Sums(Thread):
    """Reads snapshots of the target: the first transactions in the order of the commits, whole ones.

    Attributes:
        seen: how many transactions were visible.
    """

    def __init__(self, writers: ManyWriters) -> None:
        super().__init__(writers.target)
        self._order = writers.order
        self.seen: set[int] = set()

    def step(self, session: psycopg.Connection[Any]) -> None:
        with session.transaction():
            session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            log = session.execute("SELECT writer, n FROM log").fetchall()
            ((total,),) = session.execute("SELECT sum(amount) FROM account").fetchall()
            ((names,),) = session.execute("SELECT count(name) FROM seat").fetchall()
        self.seen.add(len(log))
        if set(log) != set(self._order[: len(log)]):
            self.problem = f"{len(log)} transactions are visible, and they are not the first ones"
        elif (total, names) != (0, _ACCOUNTS // 2):
            self.problem = f"a part of a transaction is visible: the sum is {total}, the names are {names}"
