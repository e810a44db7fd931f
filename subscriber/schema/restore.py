"""Creates the objects of an archive in a PostgreSQL target.

Two sections
    *pre-data*: what pg_dump has there, and the keys by which changes are applied: without them, each UPDATE would read its whole table.
    *post-data*: all other indexes and constraints, then triggers, rules and policies.
Idempotent
    Each entry is one transaction. An object that exists is left as it is. So a restore that was interrupted continues where it stopped.
Parallel
    An entry starts when those that it needs exist. Indexes of one table are built side by side. Other entries exclude each other if they
    need the same object, because their locks could lead to a deadlock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import MappingProxyType
from typing import Final

from subscriber.errors import TargetError
from subscriber.interfaces.schema import SchemaProgress, SchemaStep, Section, StepState
from subscriber.protocol.quoting import quote_identifier
from subscriber.schema.archive import Entry
from subscriber.sinks.postgres.scripts import ScriptSession

__all__ = ["of_new_tables", "of_tables", "restore", "section", "without_tables"]

_EXISTS: Final = frozenset({"42P07", "42710", "42P06", "42723", "42701"})
_EXISTS_OF: Final = MappingProxyType(
    {
        # a primary key, an identity, a partition
        "CONSTRAINT": frozenset({"42P16"}),
        "SEQUENCE": frozenset({"55000"}),
        "TABLE ATTACH": frozenset({"42809"}),
        # a row of the catalog
        **{f"TEXT SEARCH {kind}": frozenset({"23505"}) for kind in ("PARSER", "TEMPLATE", "DICTIONARY", "CONFIGURATION")},
    }
)
"""SQLSTATEs of an object that exists, where PostgreSQL has no error of its own for it."""
_OF_THEIR_OWN: Final = frozenset({"TABLE", "VIEW", "MATERIALIZED VIEW", "FOREIGN TABLE", "FUNCTION", "PROCEDURE", "AGGREGATE", "TYPE"})
"""Objects that do not belong to a table that they need."""
_TOLD: Final = _OF_THEIR_OWN | {"FK CONSTRAINT"}
_DEADLOCK: Final = "40P01"
_DEADLOCKS: Final = 10
_NO_PRIVILEGE: Final = "42501"
_FIRST: Final = MappingProxyType({"CONSTRAINT": 0, "INDEX": 0, "INDEX ATTACH": 1, "FK CONSTRAINT": 3, "EVENT TRIGGER": 4})
_OTHERS: Final = 2
_HINTS: Final = MappingProxyType(
    {
        "EXTENSION": "install the extension on the target's server, or leave it out with --exclude-extension",
        "POLICY": "create the policy's roles in the target, then repeat the command",
        "FK CONSTRAINT": "wait until all tables are ready (subscriber status), or correct the rows; then repeat the command",
    }
)


def section(entries: Sequence[Entry], which: Section) -> list[Entry]:
    """Return the entries of a section."""
    keys = {entry.number for entry in entries if entry.is_key}
    # a key of a partitioned table is valid when the keys of all partitions are attached
    keys |= {entry.number for entry in entries if entry.type == "INDEX ATTACH" and len(entry.needs & keys) == 2}
    first = {entry.number for entry in entries if entry.before_data} | keys
    return [entry for entry in entries if (entry.number in first) is (which is Section.PRE_DATA)]


def of_new_tables(entries: Sequence[Entry], existing: Collection[tuple[str, str]]) -> list[Entry]:
    """Leave out what belongs to tables that exist in the target: even a statement that only finds this out waits for their locks.

    Args:
        entries: each after those that it needs.
        existing: schema and name of these tables.
    """
    left_out = {entry.number for entry in entries if entry.type == "TABLE" and (entry.schema, entry.name) in existing}
    new, kept = set[int](), list[Entry]()
    for entry in entries:
        if entry.number in left_out:
            continue
        # a partition needs its table, which may exist
        if entry.type != "TABLE" and entry.needs & left_out and not entry.needs & new:
            left_out.add(entry.number)
            continue
        if entry.type == "TABLE" or entry.needs & new:
            new.add(entry.number)
        kept.append(entry)
    return kept


def of_tables(entries: Sequence[Entry], names: Collection[tuple[str, str]]) -> list[Entry]:
    """Leave out all but some tables, what belongs to them, and what both need.

    Foreign keys of other tables that refer to these are left out: the target checks the rows of the other tables at once, against no rows.

    Args:
        entries: each after those that it needs.
        names: schema and name of the tables.
    """
    tables = {entry.number for entry in entries if entry.type == "TABLE" and (entry.schema, entry.name) in names}
    wanted = set(tables)
    for entry in entries:
        others = entry.type == "FK CONSTRAINT" and not any(
            entry.schema == schema and entry.name.startswith(f"{name} ") for schema, name in names
        )
        if entry.type not in _OF_THEIR_OWN and entry.needs & wanted and not others:
            wanted.add(entry.number)
    for entry in reversed(entries):
        if entry.number in wanted:
            wanted |= entry.needs
    return [entry for entry in entries if entry.number in wanted]


def without_tables(entries: Sequence[Entry], excluded: Callable[[tuple[str, str]], bool]) -> tuple[list[Entry], list[str]]:
    """Leave out tables, and what needs them.

    Args:
        entries: each after those that it needs.
        excluded: whether a table is left out, by schema and name.

    Returns:
        The others, and a line for each object that is left out and does not belong to such a table.
    """
    left_out, kept, lines = set[int](), list[Entry](), list[str]()
    for entry in entries:
        # the name of a foreign key begins with that of its table
        table = entry.name.rpartition(" ")[0] if entry.type == "FK CONSTRAINT" else entry.name
        named = entry.type in {"TABLE", "FK CONSTRAINT"} and excluded((entry.schema, table))
        if not named and not entry.needs & left_out:
            kept.append(entry)
            continue
        left_out.add(entry.number)
        if not named and entry.type in _TOLD:
            lines.append(f"{entry} is left out: it needs a table that exclude_table leaves out")
    return kept, lines


async def restore(
    entries: Sequence[Entry],
    sql: Callable[[Entry], str],
    sessions: Sequence[ScriptSession],
    progress: SchemaProgress,
) -> dict[int, StepState]:
    """Create the objects of a section.

    Args:
        entries: each after those that it needs.
        sql: the SQL of an entry. Empty: nothing is done.
        sessions: how many entries are created at the same time.
        progress: told about each entry.

    Returns:
        What happened to each entry.

    Raises:
        TargetError: an object cannot be created. Others that were begun are finished first.
    """
    restoring = _Restoring(entries, sql, sessions, progress)
    return await restoring.run()


class _Restoring:
    def __init__(
        self,
        entries: Sequence[Entry],
        sql: Callable[[Entry], str],
        sessions: Sequence[ScriptSession],
        progress: SchemaProgress,
    ) -> None:
        self._waiting = sorted(entries, key=_rank) if not any(entry.before_data for entry in entries) else list(entries)
        self._numbers = {entry.number for entry in entries}
        self._sql = sql
        self._idle = deque(sessions)
        self._progress = progress
        self._done: dict[int, StepState] = {}
        self._running: dict[asyncio.Task[StepState], tuple[Entry, ScriptSession]] = {}

    async def run(self) -> dict[int, StepState]:
        failed: TargetError | None = None
        try:
            while self._running or (self._waiting and failed is None):
                if failed is None:
                    self._start()
                finished, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    entry, session = self._running.pop(task)
                    self._idle.append(session)
                    try:
                        self._done[entry.number] = task.result()
                    except TargetError as error:
                        failed = _joined(failed, error)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        if failed is not None:
            raise failed
        return self._done

    def _start(self) -> None:
        for entry in list(self._waiting):
            if not self._idle:
                return
            if self._may_start(entry):
                self._waiting.remove(entry)
                session = self._idle.popleft()
                self._running[asyncio.create_task(self._create(entry, session))] = (entry, session)

    def _may_start(self, entry: Entry) -> bool:
        if not (entry.needs & self._numbers) <= self._done.keys():
            return False
        return all(_compatible(entry, other) for other, _ in self._running.values())

    async def _create(self, entry: Entry, session: ScriptSession) -> StepState:
        began = time.monotonic()
        self._tell(entry, StepState.BEGUN, 0.0, len(self._done))
        state = await _created(entry, self._sql(entry), session)
        self._tell(entry, state, time.monotonic() - began, len(self._done) + 1)
        return state

    def _tell(self, entry: Entry, state: StepState, seconds: float, number: int) -> None:
        self._progress(SchemaStep(str(entry), state, seconds, number, len(self._numbers)))


def _rank(entry: Entry) -> int:
    return _FIRST.get(entry.type, _OTHERS)


def _compatible(entry: Entry, other: Entry) -> bool:
    return entry.type == other.type == "INDEX" or not entry.needs & other.needs


async def _created(entry: Entry, sql: str, session: ScriptSession) -> StepState:
    for attempt in range(_DEADLOCKS):
        try:
            if sql:
                await session.run(sql)
        except TargetError as error:
            if not entry.lacking and error.sqlstate in _EXISTS | _EXISTS_OF.get(entry.type, frozenset()):
                return StepState.EXISTS
            if error.sqlstate == _DEADLOCK and attempt < _DEADLOCKS - 1:
                # with a transaction of the running subscription: the server has chosen this one to wait
                continue
            error.add_note(f"while creating {entry} in the target")
            error.hint = _HINTS.get(entry.type) or error.hint
            if error.sqlstate == _NO_PRIVILEGE:
                place = "DATABASE …" if entry.type in {"SCHEMA", "EXTENSION"} else f"SCHEMA {quote_identifier(entry.schema)}"
                error.hint = f"GRANT CREATE ON {place} to the target's role, or connect as the owner of what is altered"
            raise
        return StepState.CREATED
    raise AssertionError


def _joined(first: TargetError | None, error: TargetError) -> TargetError:
    if first is None:
        return error
    first.also.append(error)
    return first
