"""One session of the mixed load: a connection that runs one transaction after the other.

After a lost connection a transaction is not repeated. It is unknown whether it was committed, and later plans do not depend on it. A
prepared one stays on its shelf (see :mod:`subscriber.testing.load.plans`) until it is known to have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import sql

from subscriber.testing.load.plans import SHELVES, WEIGHTS, Ending, Keys, Kind, Plan, Release, RollbackTo, Savepoint, Statement, make_plan

__all__ = ["Connection", "LoadReport", "LoadSession", "LoadSettings", "connect", "end_prepared"]

Connection = psycopg.AsyncConnection[Any]

_RETRIED: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
_ATTEMPTS: Final = 20
_RECONNECT_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.1
_MOST_LATE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """See :class:`subscriber.testing.load.mixed_load.MixedLoad`."""

    dsn: str
    seed: int
    rate: float | None = None
    sessions: int = 4
    schema: str = "load"
    huge_rows: int = 20_000
    weights: Mapping[Kind, float] = field(default_factory=lambda: dict(WEIGHTS))
    reconnect: bool = False
    held: set[Kind] = field(default_factory=set)


@dataclass(slots=True)
class LoadReport:
    """The work of a load so far.

    Attributes:
        committed, rolled_back, prepared: transactions by kind.
        committed_prepared, rolled_back_prepared: how prepared transactions ended.
        rows: changed by committed transactions.
        retried: transactions retried after a deadlock or serialization failure.
        lost: transactions whose outcome is unknown because the connection was lost.
        reconnected: number of reconnections.
    """

    committed: Counter[Kind] = field(default_factory=Counter)
    rolled_back: Counter[Kind] = field(default_factory=Counter)
    prepared: Counter[Kind] = field(default_factory=Counter)
    committed_prepared: int = 0
    rolled_back_prepared: int = 0
    rows: int = 0
    retried: int = 0
    lost: int = 0
    reconnected: int = 0

    @property
    def transactions(self) -> int:
        """Number of transactions that ended in any way."""
        return self.committed.total() + self.rolled_back.total() + self.prepared.total()

    @property
    def kinds(self) -> Counter[Kind]:
        """Number of transactions of each kind."""
        return self.committed + self.rolled_back + self.prepared

    def prepared_ended(self, *, commit: bool, rows: int) -> None:
        """Count COMMIT PREPARED or ROLLBACK PREPARED of a transaction that changed so many rows."""
        if commit:
            self.committed_prepared += 1
            self.rows += rows
        else:
            self.rolled_back_prepared += 1


@dataclass(slots=True)
class Shelved:
    """A prepared transaction on a shelf: how it will end, and after how many other transactions of its session."""

    gid: str
    plan: Plan
    rows: int
    commit: bool
    due: int


async def connect(settings: LoadSettings) -> Connection:
    """Connect. With ``reconnect``, wait up to a minute for the publisher."""
    deadline = time.monotonic() + (_RECONNECT_SECONDS if settings.reconnect else 0)
    while True:
        try:
            connection = await psycopg.AsyncConnection.connect(settings.dsn, autocommit=True)
            await connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(settings.schema)))
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return connection


async def end_prepared(connection: Connection, gid: str, *, commit: bool) -> None:
    verb = sql.SQL("COMMIT PREPARED {}" if commit else "ROLLBACK PREPARED {}")
    await connection.execute(verb.format(gid))


class LoadSession:
    """One connection of the load, one transaction at a time.

    Args:
        settings: of the load.
        report: of the load, to which this session adds.
        keys: of this session.
        gid_prefix: of this session.
        stop: set to end the session.
    """

    def __init__(self, settings: LoadSettings, report: LoadReport, keys: Keys, *, gid_prefix: str, stop: asyncio.Event) -> None:
        self.shelves: dict[int, Shelved] = {}
        self._settings = settings
        self._report = report
        self._keys = keys
        self._gid_prefix = gid_prefix
        self._stop = stop
        self._rng = random.Random(f"{settings.seed}/{keys.session}")
        self._done = 0

    async def work(self, transactions: int | None) -> None:
        """Run so many transactions, or until stopped. Prepared transactions then stay on :attr:`shelves`."""
        settings = self._settings
        opening = [kind for kind in Kind if settings.weights.get(kind)]
        random.Random(settings.seed).shuffle(opening)
        first = opening[self._keys.session :: settings.sessions]
        interval = settings.sessions / settings.rate if settings.rate else 0.0
        due = time.monotonic() + interval * self._keys.session / settings.sessions
        connection = await connect(settings)
        try:
            while self._done != transactions and not self._stop.is_set():
                if interval:
                    due = max(due + interval, time.monotonic() - _MOST_LATE_SECONDS)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), due - time.monotonic())
                        break
                try:
                    await self._resolve(connection)
                    await self._transaction(connection, self._next_kind(first))
                except psycopg.OperationalError:
                    if not settings.reconnect:
                        raise
                    self._report.lost += 1
                    await connection.close()
                    connection = await connect(settings)
                    self._report.reconnected += 1
                self._done += 1
        finally:
            await connection.close()

    def _next_kind(self, first: list[Kind]) -> Kind:
        """Take the last kind of ``first`` that is not held; if there is none, draw one."""
        settings = self._settings
        for kind in reversed(first):
            if kind not in settings.held:
                first.remove(kind)
                return kind
        kinds = {kind: weight for kind, weight in settings.weights.items() if kind not in settings.held}
        return self._rng.choices(list(kinds), list(kinds.values()))[0]

    async def _transaction(self, connection: Connection, kind: Kind) -> None:
        shelf = self._free_shelf()
        if shelf is None and kind in {Kind.PREPARED, Kind.HUGE_PREPARED}:
            await self._resolve(connection, at_least=1)
            shelf = self._free_shelf()
        plan = make_plan(kind, self._rng, self._keys, huge_rows=self._settings.huge_rows, shelf=shelf)
        rows = await self._execute_patiently(connection, plan)
        match plan.ending:
            case Ending.COMMIT:
                self._report.committed[kind] += 1
                self._report.rows += rows
                self._keys.gained(plan)
            case Ending.ROLLBACK:
                self._report.rolled_back[kind] += 1
            case Ending.PREPARE:
                self._report.prepared[kind] += 1

    def _free_shelf(self) -> int | None:
        return next((number for number in range(SHELVES) if number not in self.shelves), None)

    async def _execute_patiently(self, connection: Connection, plan: Plan) -> int:
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._execute(connection, plan)
            except _RETRIED:
                self._report.retried += 1
                await connection.execute("ROLLBACK")
        return await self._execute(connection, plan)

    async def _execute(self, connection: Connection, plan: Plan) -> int:
        """Run it to its end. Return how many rows it changed, without those of rolled back savepoints."""
        cursor = connection.cursor()
        rows = 0
        savepoints: dict[str, int] = {}
        await cursor.execute("BEGIN")
        for step in plan.steps:
            match step:
                case Statement(query, parameters):
                    await cursor.execute(query.encode(), parameters)
                    rows += max(cursor.rowcount, 0)
                case Savepoint(name):
                    await cursor.execute(sql.SQL("SAVEPOINT {}").format(sql.Identifier(name)))
                    savepoints[name] = rows
                case RollbackTo(name):
                    await cursor.execute(sql.SQL("ROLLBACK TO SAVEPOINT {}").format(sql.Identifier(name)))
                    rows = savepoints[name]
                case Release(name):
                    await cursor.execute(sql.SQL("RELEASE SAVEPOINT {}").format(sql.Identifier(name)))
        if plan.ending is Ending.PREPARE:
            assert plan.shelf is not None
            gid = f"{self._gid_prefix}{self._done}"
            # noted before the command: if the connection is lost now, the shelf is not free until the outcome is known
            due = self._done + self._rng.randint(1, 30)
            self.shelves[plan.shelf] = Shelved(gid, plan, rows, commit=self._rng.random() < 0.7, due=due)
            await cursor.execute(sql.SQL("PREPARE TRANSACTION {}").format(gid))
        else:
            await cursor.execute(plan.ending.value)
        return rows

    async def _resolve(self, connection: Connection, *, at_least: int = 0) -> None:
        """End the prepared transactions that are due, and the oldest ones if more are needed."""
        waiting = sorted(self.shelves.items(), key=lambda item: item[1].due)
        for number, (shelf, prepared) in enumerate(waiting):
            if number >= at_least and prepared.due > self._done:
                break
            try:
                await end_prepared(connection, prepared.gid, commit=prepared.commit)
            except psycopg.errors.UndefinedObject:
                if not self._settings.reconnect:
                    raise
                # it was never prepared, or the connection was lost before the answer to this command
            else:
                self._report.prepared_ended(commit=prepared.commit, rows=prepared.rows)
                if prepared.commit:
                    self._keys.gained(prepared.plan)
            del self.shelves[shelf]
